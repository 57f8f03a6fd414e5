"""`index`: an archive that names the payloads in files of another format."""

from __future__ import annotations

import os
import time
from bisect import bisect
from collections.abc import Mapping

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.archive.digest import check_members
from zcrecord.codec.entries import PayloadId, digest_kind
from zcrecord.codec.layout import ALIGNMENT, NONE, locate
from zcrecord.errors import UnsupportedError, located
from zcrecord.foreign import foreign_format, outline_of
from zcrecord.foreign.folders import model_in
from zcrecord.foreign.readers import MemoryReader
from zcrecord.foreign.receiver import Outline
from zcrecord.storage.files import Progress, check_destination, open_sink, path_of, place_for
from zcrecord.storage.memory import map_file
from zcrecord.writing.equal import digest_of_source
from zcrecord.writing.writers import ConvertReport, conversion_report

from .references import Files, Range, ReferencingWriter
from .save import stored_entries


def index(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    digest: str | None = "xxh3",
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write an archive of a few KB that names the payloads of other formats' files, which stay as they are.

    The archive opens as a record: names as a tree, checksums, signatures, `verify`, `expect=`. Files are named by their
    plain names, so the archive lies beside them. Each is known by its size and the SHA-256 of its header: a file
    of another size or header is refused. Other changes are found by the checksums. `convert` makes an archive of it
    with its own payloads.

    Args:
        source: a file of safetensors, GGUF, torch or npz, an index of shards, or a folder with one of these.
        dest: a path in the folder of these files.
        digest: 'xxh3' for a checksum of each payload, which reads all of them; 'none' for none.
        force, durable: as of `formats.convert`.
        progress: called with the bytes of payloads hashed, and those to be.

    Raises:
        UnsupportedError: a tensor does not lie in a file as it is used (deflated, big-endian, not aligned, an array of
        numpy in a checkpoint); `dest` lies in another folder, or the source is an archive. DestinationExistsError:
        `dest` exists and `force` was not given, or it is one of the files. FormatError, LimitError, SourceError: those
        of `load_record`.

    Example:
        >>> import numpy as np, zcrecord, zcrecord.formats
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> _ = zcrecord.formats.convert("model.zcr", "model.safetensors")
        >>> index("model.safetensors", "index.zcr").tensors
        1
        >>> zcrecord.load_record("index.zcr")["w"].shape
        (2, 3)
    """
    started, kind, path, out = time.perf_counter(), digest_kind(digest), path_of(source), path_of(dest)
    if os.path.isdir(path):
        path = model_in(path)
    version = check_destination(path, out, force)
    memory = map_file(path, least=0)
    format_name = foreign_format(memory)
    if format_name is None:
        with located(path=path):
            locate(memory.octets, None)  # raises for a file that is no archive either
        raise UnsupportedError("is no file of another format; archives and catalogues need no index", path=path)
    with located(path=path):
        outline = outline_of(format_name, MemoryReader(memory))
        archive = outline.archive(memory)
        for reader in outline.readers.values():
            check_destination(reader.path, out, force=True)  # raises if it is the file read
        if kind:
            check_members(archive)
    files = Files(out)
    with open_sink(place_for(out, version), durable=durable, check=files.check_unreplaced) as sink:
        writer = ReferencingWriter(sink, files, None, alignment=ALIGNMENT, digest=digest)
        with located(path=path):
            ids = _refer_to_payloads(archive, outline, files, writer, kind, progress or (lambda *_: None))
        entries = stored_entries(archive)
        entries.payloads = [NONE if p == NONE else ids[p] for p in entries.payloads]
        entries.change_values(lambda v: PayloadId(ids[v]) if isinstance(v, PayloadId) and v != NONE else v)
        saved = writer.finish(entries)
    return conversion_report(
        started,
        source=path,
        dest=out,
        tensors=saved.tensors,
        modules=len(entries.modules),
        payload_bytes=saved.payload_bytes,
        archive_bytes=saved.archive_bytes,
        input_bytes=sum(file.nbytes for file in files.files),
        shared_bytes=saved.deduplicated,
    )


def _refer_to_payloads(
    archive: Archive, outline: Outline, files: Files, writer: ReferencingWriter, kind: int, progress: Progress
) -> list[int]:
    """Refer to each payload, or store an attribute's that lies in no file; return the ids, by payload number."""
    source, rows, ids, done = archive.source, archive.index.payloads, list[int](), 0
    total = int(rows["nbytes"].sum())
    bases = sorted(outline.readers)
    users = dict(zip(archive.index.tensors["payload"].tolist()[::-1], archive.names()[::-1], strict=True))  # the first
    for number, (offset, nbytes, _) in enumerate(rows.tolist()):
        base, reader = _reader_at(outline.readers, bases, offset)
        decoding = source.decoding(number)
        if number in users and (reader is None or decoding is not None):
            fault = f"is {decoding or 'no range of the file'}, and an index names ranges of files; convert the file"
            raise UnsupportedError(fault, tensor=users[number])
        octets = np.frombuffer(source.payload(number), np.uint8)
        if reader is None or reader.memory.path is None:
            ids.append(writer.store(octets))
            continue
        digest = digest_of_source(octets, writer.checksums) if kind else 0
        file = files.number(reader.memory, reader.described)
        ids.append(writer.refer(Range(file, offset - base, nbytes, digest)))
        done += nbytes
        progress(done, total)
    return ids


def _reader_at(readers: Mapping[int, MemoryReader], bases: list[int], offset: int) -> tuple[int, MemoryReader | None]:
    """Return the base and the reader of the file that has an outline's offset; the reader is None if no file has it."""
    position = bisect(bases, offset) - 1
    base = bases[position] if position >= 0 else 0
    reader = readers.get(base)
    return base, reader if reader is not None and base <= offset < base + reader.nbytes else None
