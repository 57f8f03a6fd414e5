"""Payload verification and content digest. Keeps no payload bytes in memory."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from zcrecord.codec.element_rules import ElementRules
from zcrecord.codec.entries import ModuleKind, ValueForm, ValueType
from zcrecord.codec.index import Index
from zcrecord.codec.layout import DIGEST_ALLOWANCE, NONE
from zcrecord.errors import FormatError, IntegrityError, LimitError, RecordError, SourceError, located, printable
from zcrecord.storage.threads import MOST_THREADS, WORTH_A_THREAD, Going, cores, run_threads

from . import damage
from .archive import Archive, Progress
from .by_file import parts_by_file, sized_openers
from .payload_source import Array

_PIECE = 8 << 20  # bytes hashed at a time
_TAG = b"zcrecord content digest 2\n"
_TOO_MANY_VIEWS = (
    f"different views of the same bytes add up to more than {DIGEST_ALLOWANCE} times index and payloads, up to which "
    "there is a content digest; save copies of them"
)


def check(archive: Archive, progress: Progress | None = None) -> None:
    """Check every payload's digest, that all other bytes outside the index are zero, and elements (R70 to R74).

    Of a part of an archive, and of another format's file, only what the index names is checked; of a zip file also the
    members' CRC-32. Remote payloads are checked as they come, in little memory, all shards of a catalogue even after an
    error. `progress` is called as by `damage.find`. IntegrityError, with all `damage`, if a digest does not match,
    FormatError if another rule is broken, SourceError if a shard is missing.
    """
    archive.ensure_all()
    check_members(archive)
    _check_files(archive, _check_file, progress)
    if archive.source.file_names:
        _check_pieces(archive)
        for part in parts_by_file(archive):
            _check_elements(part)  # by the whole's element types: a shard's own may differ


def check_members(archive: Archive) -> None:
    """Raise IntegrityError unless each member of another format's zip file has the CRC-32 that the file says."""
    for octets, crc, name in archive.source.member_sums():
        if zlib.crc32(octets) != crc:
            fault = f"the CRC-32 of its member '{printable(name)}' does not match; the file is damaged: copy it again"
            raise IntegrityError(fault, path=archive.path)


def check_indexes(archive: Archive) -> None:
    """Check the whole index, and of a catalogue those of its shards; reads no payload. Errors are those of `check`."""
    archive.ensure_all()
    _check_files(archive, lambda file, _: file.ensure_all(), None)
    _check_pieces(archive)


def _check_pieces(archive: Archive) -> None:
    """Raise FormatError unless the pieces of each split tensor tile it, and each has the size of its box."""
    table = archive.source.piece_table()
    split = frozenset() if table is None else table.split()
    rows = archive.index.tensors
    tensors = np.flatnonzero(np.isin(rows["payload"], list(split)))
    # Once for all that are tied, which have one shape: a million pieces may have a million names.
    _, first = np.unique(rows[["payload", "bits"]][tensors], return_index=True)
    for i in tensors[first].tolist():
        archive.boxed_pieces(i)


def _check_files(
    archive: Archive, check_one: Callable[[Archive, Progress | None], None], progress: Progress | None
) -> None:
    """Check each file of an archive by `check_one`, even after an error; raise the first, with the damage of all."""
    if not archive.source.file_names:
        check_one(archive, progress)
        return
    openers = sized_openers(archive)
    nbytes_done, total = 0, sum(size for size, _ in openers)
    first_error: RecordError | None = None
    damaged: list[damage.Damage] = []
    for size, open_file in openers:
        try:
            check_one(open_file(), progress and _shift_progress(progress, nbytes_done, total))
        except (FormatError, SourceError) as error:
            first_error = first_error or error
            whole_file = damage.Damage(error.message, 0, 0)
            damaged += [replace(d, path=error.path) for d in error.damage or (whole_file,)]
        nbytes_done += size
    if first_error is not None:
        first_error.damage = tuple(damaged)
        raise first_error
    if progress:
        progress(total, total)


def _shift_progress(progress: Progress, before: int, total: int) -> Progress:
    """Return a function that reports the bytes done of one file as those of all, of which `before` were done."""
    return lambda done, _: progress(min(before + done, total), total)


def _check_file(archive: Archive, progress: Progress | None) -> None:
    """Check index, payloads and elements of one file; errors are those of `check`."""
    archive.ensure_all()
    with located(path=archive.path):
        if archive.source.remote is not None:
            archive.source.remote.check(archive, progress)
            return
        if damaged := damage.find(archive, progress):
            raise damage.error_of(damaged)
    _check_elements(archive)


def _check_elements(archive: Archive) -> None:
    """Raise FormatError for bad pad bits, bools or ends of strings (R70 to R72); each payload is checked once."""
    rules = ElementRules(archive.index, archive.place)
    payloads = rules.payloads()
    archive.fetch([number for _, number in payloads])
    for i in rules.strings:
        archive.view(i)  # checks the ends, once
    with located(path=archive.path):
        for place, number in payloads:
            for octets in archive.blocks(number):
                rules.check(place, np.frombuffer(octets, np.uint8), last=True)  # no split tensor has pad bits


def content_digest(
    archive: Archive, sha256: Callable[[int], bytes] | None = None, *, known: dict[Any, bytes] | None = None,
    progress: Progress | None = None,
) -> str:  # fmt: skip
    """Return 'sha256:...' over the archive's content, the same for every layout; FORMAT.md has the exact bytes (R76).

    `sha256` returns the SHA-256 of tensor i's logical bytes; without it several threads hash, and `progress` gets the
    bytes done and the bytes in all. `known` has digests by the keys of `_distinct`, and gets all that are computed.
    LimitError if different views of the same bytes add up to more than 64 times what is stored.
    """
    ix, sha256 = archive.index, sha256 or _streaming_digests(archive, progress)
    keys, distinct = _distinct(archive)
    known = {} if known is None else known
    distinct = {key: i for key, i in distinct.items() if key not in known}
    if sha256 is None:
        known |= _sha256_by_key(archive, distinct, progress)
    else:
        known |= {key: sha256(i) for key, i in distinct.items()}
    names = _texts(ix, ix.modules, "name")
    ranks = np.empty(len(names), np.int64)  # of modules among all, in the order of their full names
    ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    digest = hashlib.sha256(_TAG + _u64(len(ix.modules)))
    module_heads = _entry_heads(ix, ix.modules, _keys(ix, ix.modules), ranks)
    kinds, type_names = ix.modules["kind"].tolist(), _texts(ix, ix.modules, "type_name")
    for m in np.argsort(ranks).tolist():
        digest.update(module_heads[m] + _u64(kinds[m]) + _text(type_names[m]))
    digest.update(_u64(len(ix.tensors)))
    tensor_heads = _entry_heads(ix, ix.tensors, _keys(ix, ix.tensors), ranks)
    for i, key in zip(ix.by_name.tolist(), keys, strict=True):
        row = archive.row(i)
        digest.update(tensor_heads[i] + _u64(row.dtype, row.bits, row.rank, *archive.shape(row)) + known[key])
    _hash_attributes(archive, ranks, digest.update, known)
    return "sha256:" + digest.hexdigest()


def _entry_heads(ix: Index, rows: Array, keys: list[bytes], ranks: Array) -> list[bytes]:
    """Return the bytes hashed first for each module, tensor or attribute: its module's rank, its place and its key."""
    parents = np.where(rows["parent"] == NONE, 0, rows["parent"])  # module 0 is hashed as a child of itself
    # A place is content only in a list or tuple.
    kinds = ix.modules["kind"][parents]
    places = np.where((kinds == ModuleKind.LIST) | (kinds == ModuleKind.TUPLE), rows["place"], 0)
    heads = zip(ranks[parents].tolist(), places.tolist(), keys, strict=True)
    return [_u64(rank, place) + _text(key) for rank, place, key in heads]


def _keys(ix: Index, rows: Array) -> list[bytes]:
    """Return the keys of modules or tensors, the ends of their names, as UTF-8."""
    names = _texts(ix, rows, "name")
    return [name[len(name) - size :] for name, size in zip(names, rows["key_size"].tolist(), strict=True)]


def _texts(ix: Index, rows: Array, field: str) -> list[bytes]:
    """Return one field of entries, a span in the text pool, as UTF-8."""
    spans = zip(rows[field].tolist(), rows[field + "_size"].tolist(), strict=True)
    return [bytes(ix.text[start : start + size]) for start, size in spans]


def _u64(*numbers: int) -> bytes:
    return b"".join([number.to_bytes(8, "little") for number in numbers])


def _text(octets: bytes) -> bytes:
    return _u64(len(octets)) + octets


def _streaming_digests(archive: Archive, progress: Progress | None) -> Callable[[int], bytes] | None:
    """Return a function of tensor i for its SHA-256, computed as bytes of a remote archive come in; None for others."""
    _pin_split_pieces(archive)
    parts = parts_by_file(archive)
    if all(part.source.remote is None for part in parts):
        return None
    by_name: dict[str, Callable[[], bytes]] = {}
    done, total = 0, sum(part.header.archive_size for part in parts)
    for part in parts:
        remote, shifted = part.source.remote, progress and _shift_progress(progress, done, total)
        sha256 = partial(logical_sha256, part) if remote is None else remote.sha256_of(part, shifted)
        done += part.header.archive_size
        by_name |= {name: partial(sha256, i) for i, name in enumerate(part.names())}
    if progress:
        progress(total, total)
    return lambda i: by_name[archive.index.name(i)]()


def _pin_split_pieces(archive: Archive) -> None:
    """Pin the SHA-256 of remote pieces of split tensors: shards that have nothing else are not streamed."""
    table = archive.source.piece_table()
    for number in table.split() if table is not None else ():
        for piece in archive.source.pieces(number):
            if piece.source.remote is not None and piece.start not in piece.source.pins():
                piece.source.pin({piece.start: hashlib.sha256(piece.source.payload(piece.number)).digest()})


def logical_sha256(archive: Archive, i: int, keep_going: Callable[[int], bool] = lambda _: True) -> bytes:
    """Return the SHA-256 of tensor i's elements in C order; a wrong one if `keep_going`, given bytes done, is False."""
    row = archive.row(i)
    if row.strides == NONE:
        return _sha256_of(archive.blocks(row.payload), keep_going)
    return _sha256_of([np.ascontiguousarray(archive.elements(i)).data.cast("B")], keep_going)


def _distinct(archive: Archive) -> tuple[list[Any], dict[Any, int]]:
    """Return a key for each tensor by name, equal for the same logical bytes, and by key the first tensor.

    A key is the payload's place, or of a strided view a tuple that begins with it. LimitError as above.
    """
    keys: list[Any] = []
    first: dict[Any, int] = {}
    limit = DIGEST_ALLOWANCE * archive.stored_nbytes()
    strided_nbytes = whole_nbytes = 0  # to be hashed; payloads may also be more than is stored, if pieces repeat
    for i in archive.index.by_name.tolist():
        row = archive.row(i)
        place, strides = archive.place(row.payload), archive.strides(row)
        key: Any = place if strides is None else (place, row.byte_offset, row.bits, archive.shape(row), strides)
        keys.append(key)
        if key in first:
            continue
        first[key] = i
        if strides is None:
            whole_nbytes += place[2]
        else:
            strided_nbytes += prod(archive.shape(row)) * row.bits // 8
        if max(strided_nbytes, whole_nbytes) > limit:
            raise LimitError(_TOO_MANY_VIEWS, tensor=archive.index.name(i))
    return keys, first


def _sha256_by_key(archive: Archive, distinct: dict[Any, int], progress: Progress | None) -> dict[Any, bytes]:
    """Return the SHA-256 of tensors' logical bytes, by key; several threads hash, the largest first."""
    sizes = {key: archive.nbytes(archive.row(i)) for key, i in distinct.items()}
    total = sum(sizes.values())
    count, copy_lock = damage.ByteCount(progress, total), threading.Lock()
    digests: dict[Any, bytes] = {}

    def hash_one(key: Any, going: Going) -> None:
        def keep_going(nbytes: int) -> bool:
            count.add(nbytes)
            return going()

        is_strided = archive.row(distinct[key]).strides != NONE
        with copy_lock if is_strided else contextlib.nullcontext():  # one copy is in memory at a time
            digests[key] = logical_sha256(archive, distinct[key], keep_going)

    threads = min(cores(), MOST_THREADS, max(len(sizes), 1), total // WORTH_A_THREAD + 1)
    run_threads(hash_one, sorted(sizes, key=lambda key: -sizes[key]), threads, count.add)
    count.add()  # reports the bytes of a thread that ended last
    return digests


def _sha256_of(parts: Iterable[memoryview], keep_going: Callable[[int], bool] = lambda _: True) -> bytes:
    """Return the SHA-256 of bytes, hashed in pieces, after each of which `keep_going`, or Ctrl-C, may end it."""
    digest = hashlib.sha256()
    for piece in (data[start : start + _PIECE] for data in parts for start in range(0, len(data), _PIECE)):
        digest.update(piece)
        if not keep_going(len(piece)):
            break
    return digest.digest()


def _hash_attributes(archive: Archive, ranks: Array, put: Callable[[bytes], None], known: dict[Any, bytes]) -> None:
    """Give `put` the bytes to hash for all attributes, by module and key; payloads as SHA-256, kept in `known`."""
    ix = archive.index
    parents = ranks[ix.attributes["parent"]].tolist()
    keys = _texts(ix, ix.attributes, "name")
    heads = _entry_heads(ix, ix.attributes, keys, ranks)
    types, forms, values = (ix.attributes[field].tolist() for field in ("type", "form", "value"))
    for i in sorted(range(len(keys)), key=lambda i: (parents[i], keys[i])):
        words = [values[i]]
        if forms[i] != ValueForm.SCALAR:
            start, count = values[i] & NONE, values[i] >> 32
            words = ix.words[start : start + count].tolist()
        put(heads[i] + _u64(types[i], forms[i], len(words)))
        for word in words:
            if types[i] == ValueType.TEXT:
                start, size = word & NONE, word >> 32
                put(_text(bytes(ix.text[start : start + size])))
            elif types[i] == ValueType.PAYLOAD:
                if (place := archive.place(word)) not in known:
                    known[place] = _sha256_of([archive.payload(word)])
                put(known[place])
            else:
                put(_u64(word))
