"""`save_record`, by way of `writing`: flatten a nested record, plan the payloads, write them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import starmap
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.archive.damage import check_digest
from zcrecord.archive.payloads import check_blobs
from zcrecord.archive.private_copy import check_apart
from zcrecord.codec.entries import Entries, ModuleEntry, PayloadId, TensorLayout, digest_kind
from zcrecord.codec.layout import ALIGNMENT, NONE, check_alignment
from zcrecord.errors import ProducerError, UnsupportedError
from zcrecord.storage.files import Progress, open_sink, path_or_none
from zcrecord.tensors.lazy import LazyTensor
from zcrecord.writing import flatten
from zcrecord.writing.flatten import metadata_entries as metadata_entries  # re-exported
from zcrecord.writing.sharing import PayloadPlan, plan_sharing
from zcrecord.writing.writers import SaveReport, StreamWriter, write_plan

from .own_shards import check_no_own_shard
from .record import Record

if TYPE_CHECKING:
    from .references import ReferencingWriter
    from .sharded_writer import ShardedWriter

PayloadWriter: TypeAlias = "StreamWriter | ShardedWriter | ReferencingWriter"
Metadata = Mapping[str, Any] | Callable[[], Mapping[str, Any]]  # of an archive; or a function that returns it later


def save_record(
    record: Any,
    dest: Any,
    *,
    alignment: int = ALIGNMENT,
    digest: str | None = "xxh3",
    durable: bool = True,
    metadata: Mapping[str, Any] | None = None,
    max_shard_size: int | None = None,
    base: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Write a record as one archive, whole or not at all; tensors in C order are written from their own memory.

    Args:
        record: nested dicts, lists, tuples and dataclasses of arrays and plain values; a flat `{name: array}`; an
            object with `state_dict()`; or a Record. None, bool, int, float, str, bytes, and lists of one of these,
            become attributes; a numpy scalar is a tensor of rank 0. Keys are texts or integers, and stay so. Tied
            arrays are stored once and stay tied; a view stores only its own rows. Payloads of a Record are not copied;
            tensors split over shards are assembled a few MiB at a time. With such a tensor, or a LazyTensor, the
            archive is written forward, one piece at a time, with the index last.
        dest: a path; a URL that fsspec writes to, such as `s3://bucket/model.zcr`; or a binary file object, also a
            pipe. A file opened by fsspec is published when it is closed, even by an error: give the URL instead.
        alignment: of every payload in bytes, a power of two from 16 to 65536; of those of 1 MiB and more, 16384.
        digest: 'xxh3' for a checksum of each payload, and equal payloads stored once; 'none' for neither.
        durable: fsync file and folder, so that the archive survives power loss. If the system reports an error of the
            folder's fsync, the archive is in its place and the save returns; the logger "zcrecord" warns that power
            loss may bring the old file back.
        metadata: of the file: names to None, bool, int, float, str, bytes, or lists of one of these. None keeps the
            metadata of a Record.
        max_shard_size: write shards beside `dest`, `model-00001-of-00002.zcr`, and a catalogue at `dest`, which opens
            as one record. A shard has at most so many bytes of payloads, but at least one payload. What fits into one
            shard is one archive at `dest`. Tied tensors stay in one shard; equal payloads are stored once.
        base: the path of an archive in `dest`'s folder, or of an index of other formats' files (`zcrecord.index`):
            payloads that it has are not written, but referred to. The new archive opens only beside these files, and
            refuses changed ones. Nothing ever removes a base. The report's `archive_bytes` counts the new file alone.
        progress: called with the bytes of tensors written, and all bytes, between large tensors and at the end.
        storage_options: for fsspec, if `dest` is a URL: credentials, the endpoint of an S3 server.

    Raises:
        UnsupportedError: a value or key the format cannot hold. DestinationExistsError: `dest` is a shard of the
        catalogue that the record was loaded from. NameCollisionError: two tensors would share a name.
        LimitError: alignment, depth, rank or size out of bounds; or, without digests, payloads of a Record that share
        their bytes would take far more than its file. ProducerError: a LazyTensor gave other bytes than it declared.
        IntegrityError: a payload of a Record is damaged. SourceError: the file system or the file object reports an
        error (PipeClosedError: the reader closed the pipe); a buffered file object may repeat it when it is closed.

    Example:
        >>> import numpy as np
        >>> report = save_record({"w": np.ones((2, 3), np.float32), "steps": 5}, "model.zcr")
        >>> report.tensors, report.payload_bytes
        (1, 24)
    """
    kind, notify = digest_kind(digest), progress or (lambda *_: None)
    check_alignment(alignment)
    if isinstance(record, Record):
        check_no_own_shard(record, path_or_none(dest))
        flat, plan = _plan_archive(record.archive)
        if not kind:  # else equal payloads are found by their digests, and stored once
            nbytes = int(record.archive.index.payloads["nbytes"].sum(dtype=np.float64))
            check_apart(nbytes, record.archive.stored_nbytes(), record.path)
        metadata = record.metadata if metadata is None else metadata
    else:
        flat = flatten.flatten(record)
        plan = plan_sharing(flat.values)
    flat.metadata = metadata_entries({} if metadata is None else metadata)
    if max_shard_size is None and base is None and not any(isinstance(s, LazyTensor) for s in plan.sources):
        with open_sink(dest, durable=durable, options=storage_options) as sink:
            return write_plan(sink, flat, plan, alignment=alignment, kind=kind, progress=notify)
    options: dict[str, Any] = {"alignment": alignment, "digest": digest, "durable": durable}
    with open_writer(dest, max_shard_size, base, storage_options, **options) as out:
        return _write_forward(flat, plan, out, notify)


@contextlib.contextmanager
def open_writer(
    dest: Any, shard_size: int | None, base: Any, storage: Mapping[str, Any] | None, *, durable: bool, **options: Any
) -> Iterator[PayloadWriter]:
    """Yield a writer of payloads one by one: to one archive, to shards, or to an archive that refers to `base`."""
    if base is not None:
        if shard_size is not None:
            raise UnsupportedError("base= and max_shard_size= do not go together; give one of them")
        from .references import referencing  # here, as below, because few records refer to another

        with referencing(dest, base, durable=durable, **options) as writer:
            yield writer
    elif shard_size is not None:
        from .sharded_writer import ShardedWriter

        out = ShardedWriter(dest, shard_size, durable=durable, **options)
        with out.files:
            yield out
    else:
        with open_sink(dest, durable=durable, options=storage) as sink:
            yield StreamWriter(sink, **options)


def _write_forward(flat: flatten.FlatRecord, plan: PayloadPlan, out: PayloadWriter, progress: Progress) -> SaveReport:
    """Write a record forward, payloads in the order of first use, the index last."""
    flat.layout_ids, flat.layouts = plan.layout_ids, plan.layouts
    users = dict(zip(reversed(plan.source_ids), reversed(flat.names), strict=True))  # of each source the first tensor
    payloads: list[int] = []
    done, total = 0, sum(source.nbytes for source in plan.sources)
    store_next = getattr(out, "store_next", lambda sources, start: [out.store(sources[start])])  # of shards several
    while (start := len(payloads)) < len(plan.sources):
        progress(done, total)
        try:
            payloads += store_next(plan.sources, start)
        except ProducerError as error:
            raise error.located(tensor=users[start]) from error.__cause__
        done += sum(source.nbytes for source in plan.sources[start : len(payloads)])
    progress(total, total)
    flat.payloads = [payloads[source] if source >= 0 else NONE for source in plan.source_ids]
    return out.finish(flat)


def _plan_archive(archive: Archive) -> tuple[flatten.FlatRecord, PayloadPlan]:
    """Return a loaded record's entries and payloads, to be saved again; exactly the tied tensors stay tied."""
    archive.ensure_all()
    check_blobs(archive)
    archive.fetch()
    ix, source, plan = archive.index, archive.source, _layouts_of(archive)
    users = dict(zip(ix.tensors["payload"].tolist(), archive.names(), strict=True))
    for number in range(len(ix.payloads)):
        pieces = source.pieces(number)
        if archive.mode == "r":  # a private copy may have been edited
            check_digest(pieces, users.get(number))
        if len(pieces) < 2:
            plan.sources.append(np.frombuffer(archive.payload(number), np.uint8))
        else:  # put together while it is written
            plan.sources.append(LazyTensor("uint8", (source.nbytes(number),), source.blocks(number)))
    plan.source_ids = [-1 if p == NONE else p for p in ix.tensors["payload"].tolist()]
    plan.renumber()
    return _flat_record(archive, archive.payload), plan


def stored_entries(archive: Archive) -> Entries:
    """Return a loaded archive's entries, to be written again; payloads, also of bytes, by their numbers in it."""
    archive.ensure_all()
    ix = archive.index
    entries, plan = _flat_record(archive, PayloadId), _layouts_of(archive)
    plan.renumber()
    entries.layout_ids, entries.layouts = plan.layout_ids, plan.layouts
    entries.payloads = ix.tensors["payload"].tolist()
    entries.metadata = unflatten.metadata_entries(ix, PayloadId)
    return entries


def _flat_record(archive: Archive, payload: Any) -> flatten.FlatRecord:
    """Return a loaded record without layouts; `payload(number)` makes the value of an attribute that is a payload."""
    ix = archive.index
    names = starmap(ix.string, _columns(ix.modules, "name", "name_size"))
    type_names = starmap(ix.string, _columns(ix.modules, "type_name", "type_name_size"))
    rows = zip(names, _columns(ix.modules, "key_size", "parent", "place", "kind"), type_names, strict=True)
    modules = [ModuleEntry._make((name, *numbers, type_name)) for name, numbers, type_name in rows]
    flat = flatten.FlatRecord(modules[0].kind, modules[0].type_name)
    flat.modules, flat.names = modules, archive.names()
    flat.key_sizes, flat.parents, flat.places = (ix.tensors[c].tolist() for c in ("key_size", "parent", "place"))
    flat.attributes = list(unflatten.attribute_entries(ix, ix.attributes, payload))
    return flat


def _columns(rows: Any, *names: str) -> Iterator[tuple[int, ...]]:
    """Yield the values of some columns of a table, row by row; five times faster than by the rows themselves."""
    return zip(*(rows[name].tolist() for name in names), strict=True)


def _layouts_of(archive: Archive) -> PayloadPlan:
    """Return a plan with the layouts of a loaded archive's tensors, each distinct one once, and no payload."""
    ix = archive.index
    plan = PayloadPlan(len(ix.tensors))
    numbers: dict[tuple[int, ...], int] = {}
    for i, key in enumerate(_columns(ix.tensors, "dims", "rank", "strides", "dtype", "bits", "byte_offset")):
        if (number := numbers.get(key)) is None:
            dims, rank, strides, dtype, bits, byte_offset = key
            shape = tuple(ix.dims[dims : dims + rank].tolist())
            steps = None if strides == NONE else tuple(ix.strides[strides : strides + rank].tolist())
            number = numbers[key] = plan.layout_id(TensorLayout(dtype, bits, shape, steps, byte_offset))
        plan.layout_ids[i] = number
    return plan


def metadata_now(metadata: Metadata | None) -> Mapping[str, Any]:
    """Return metadata; a function is called for them."""
    return metadata() if callable(metadata) else metadata or {}
