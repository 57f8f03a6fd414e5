"""What only the payloads' bytes can tell: their digests, the zeros between them, and the archive's content digest.

Reads every byte it is asked about; holds none. What the index says is taken as verified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from . import dtypes
from .entries import ValueForm, ValueType
from .errors import FormatError, IntegrityError
from .index import Index
from .layout import HEADER_SIZE, NONE

if TYPE_CHECKING:
    from .reader import Archive

__all__ = ["check", "content_digest"]

_PIECE = 8 << 20  # bytes hashed at a time
_TAG = b"zcrecord content digest 1\n"


def check(archive: Archive, progress: Callable[[int, int], None] | None = None) -> None:
    """Check every payload's digest, and that all other bytes of the archive outside the index are zero (R73, R74).

    Of a part of an archive, and of another format's bytes, only what its index names.

    `progress` is called with the bytes done and the bytes there are, after every 8 MiB at the latest.

    Raises:
        IntegrityError: a digest does not match; names a tensor that uses the payload. FormatError: the rest.
    """
    ix, h = archive.index, archive.header
    start = HEADER_SIZE + h.index_size if h.front else HEADER_SIZE
    done = start
    last = (-1, -1)
    end = h.archive_size - HEADER_SIZE if h.front else h.index_offset
    for number, (offset, nbytes, digest) in enumerate(ix.payloads.tolist()):
        at = h.payload_offset + offset
        if (offset, nbytes) == last:
            continue
        last = (offset, nbytes)
        if archive.whole:
            _check_zero(archive.buffer, done, at)
        done = at + nbytes
        if ix.digest_kind and _xxh3(archive.buffer, at, done, start, end, progress) != digest:
            user = np.flatnonzero(ix.tensors["payload"] == number)
            name = ix.name(int(user[0])) if len(user) else None
            what = f"payload [{at:#x}, {done:#x}): its digest does not match; the file is damaged, copy it again"
            raise IntegrityError(what, tensor=name, offset=at)
    if archive.whole:
        _check_zero(archive.buffer, done, end)
    _check_elements(archive)
    if progress:
        progress(end - start, end - start)


def _xxh3(
    buffer: memoryview, lo: int, hi: int, start: int, end: int, progress: Callable[[int, int], None] | None
) -> int:
    """Return the digest of [lo, hi), in pieces, so that Ctrl-C and a progress bar need not wait for a large payload."""
    if hi - lo <= _PIECE:
        value = xxhash.xxh3_64_intdigest(buffer[lo:hi])
        if progress:
            progress(hi - start, end - start)
        return value
    running = xxhash.xxh3_64()
    for at in range(lo, hi, _PIECE):
        running.update(buffer[at : min(at + _PIECE, hi)])
        if progress:
            progress(min(at + _PIECE, hi) - start, end - start)
    return running.intdigest()


def _check_zero(buffer: memoryview, lo: int, hi: int) -> None:
    if lo < hi and np.frombuffer(buffer[lo:hi], np.uint8).any():
        raise FormatError(f"the gap [{lo:#x}, {hi:#x}) holds bytes that are not zero", offset=lo)


def _check_elements(archive: Archive) -> None:
    """Pad bits are zero, bools 0 or 1, string ends right (R70 to R72); each payload once, however many use it."""
    rows = archive.index.tensors
    bools, strings = (rows["dtype"] == dtypes.by_name[name].code for name in ("bool", "string"))
    packed = (rows["bits"] < 8) & ~strings & np.isin(rows["dtype"], list(dtypes.by_code))
    for i in np.flatnonzero(strings & (rows["payload"] != NONE)).tolist():
        archive.view(i)  # it checks itself, and the archive remembers
    seen: set[tuple[int, int]] = set()
    for i in np.flatnonzero(packed & (rows["payload"] != NONE)).tolist():
        row = archive.row(i)
        used = prod(archive.shape(row)) * row.bits % 8
        if (row.payload, used) not in seen and used and archive.payload(row.payload)[-1] >> used:
            raise FormatError("the pad bits after its last element are not zero", tensor=archive.index.name(i))
        seen.add((row.payload, used))
    fine: dict[int, bool] = {}
    viewed: set[Any] = set()
    for i in np.flatnonzero(bools & (rows["payload"] != NONE)).tolist():
        number = int(rows["payload"][i])
        if number not in fine:
            fine[number] = int(np.frombuffer(archive.payload(number), np.uint8).max()) <= 1
        if fine[number]:
            continue
        row = archive.row(i)  # a view may leave out what is wrong
        key = (number, row.byte_offset, archive.shape(row), archive.strides(row))
        if key not in viewed and int(archive.view(i).view(np.uint8).max()) > 1:
            raise FormatError("a bool is neither 0 nor 1", tensor=archive.index.name(i))
        viewed.add(key)


def content_digest(archive: Archive, sha256: Callable[[int], bytes] | None = None) -> str:
    """Return 'sha256:...' over what the archive holds, however it is laid out; FORMAT.md has the exact bytes (R76).

    `sha256` may give the SHA-256 of tensor i's logical bytes: for who lets go of what was read, or checks it, too.

    Metadata, order, ties, strides, alignment, the index's place and deduplication do not enter. Every payload is read
    once, and so is every distinct strided view: the one cost here that the size of an archive does not bound.
    """
    if sha256 is None:
        archive.bring()
    ix = archive.index
    digest = hashlib.sha256(_TAG)

    def put(*items: bytes | int) -> None:
        for item in items:
            if isinstance(item, int):
                digest.update(item.to_bytes(8, "little"))
            else:
                digest.update(len(item).to_bytes(8, "little") + item)

    known: dict[Any, bytes] = {}
    put(len(ix.tensors))
    for i in ix.by_name.tolist():
        row = archive.row(i)
        shape, strides = archive.shape(row), archive.strides(row)
        key = row.payload if strides is None else (row.payload, row.byte_offset, row.bits, shape, strides)
        if key not in known:
            known[key] = _sha256(archive, i) if sha256 is None else sha256(i)
        put(ix.name(i).encode(), row.dtype, row.bits, len(shape), *shape)
        digest.update(known[key])
    put(len(ix.modules))
    for m in sorted(range(len(ix.modules)), key=lambda m: _span(ix, ix.modules[m], "name")):
        row = ix.modules[m]
        put(_span(ix, row, "name"), int(row["kind"]), _span(ix, row, "type_name"))
    _put_attributes(archive, put)
    return "sha256:" + digest.hexdigest()


def _span(ix: Index, row: Any, field: str) -> bytes:
    start, size = int(row[field]), int(row[field + "_size"])
    return bytes(ix.text[start : start + size])


def _sha256(archive: Archive, i: int) -> bytes:
    """Return the SHA-256 of a tensor's logical bytes: C order, whatever its strides; packed elements as they lie."""
    row = archive.row(i)
    if archive.strides(row) is None:
        return _sha256_of(archive.payload(row.payload))
    return _sha256_of(np.ascontiguousarray(archive.elements(i)).data.cast("B"))


def _sha256_of(data: memoryview) -> bytes:
    """Return the SHA-256 of bytes, in pieces, so that Ctrl-C need not wait for a large payload."""
    digest = hashlib.sha256()
    for at in range(0, len(data), _PIECE):
        digest.update(data[at : at + _PIECE])
    return digest.digest()


def _put_attributes(archive: Archive, put: Any) -> None:
    ix = archive.index
    put(len(ix.attributes))
    found = [(_span(ix, ix.modules[int(row["parent"])], "name"), _span(ix, row, "name"), row) for row in ix.attributes]
    for module, key, row in sorted(found, key=lambda f: f[:2]):
        form, kind, word = int(row["form"]), int(row["type"]), int(row["value"])
        words = [word]
        if form != ValueForm.SCALAR:
            words = ix.words[word & NONE : (word & NONE) + (word >> 32)].tolist()
        put(module, key, kind, form, len(words))
        for w in words:
            if kind == ValueType.TEXT:
                put(bytes(ix.text[w & NONE : (w & NONE) + (w >> 32)]))
            elif kind == ValueType.PAYLOAD:
                put(hashlib.sha256(archive.payload(w)).digest())
            else:
                put(w)
