"""An archive whose payloads are all in memory, written straight through: index in front, nothing to go back for.

What comes one by one is `streaming`'s. Which tensors share bytes on purpose is decided by `sharing`, what the entries
say by `tree`, where the bytes go by `sink`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import xxhash

from zcrecord.codec.entries import Entries
from zcrecord.codec.index import PAYLOAD, Array, encode
from zcrecord.codec.layout import HEADER_SIZE, NONE, Header, align_up, check_alignment, plan_payloads
from zcrecord.errors import LimitError
from zcrecord.storage.sink import Sink

from .sharing import SplitSource, chunks

__all__ = ["SaveReport", "digest_kind", "report_of", "write_front"]

_BATCH = 1 << 20  # bytes of small payloads joined into one write
_COMPARE = 1 << 20  # bytes compared at a time


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save wrote. Bytes throughout; `deduplicated` counts bytes that equal others and were stored once."""

    tensors: int
    payloads: int
    payload_bytes: int
    archive_bytes: int
    tied: int
    deduplicated: int


def digest_kind(digest: str | None) -> int:
    """Return the schema's code for a digest name, 'xxh3' or 'none'.

    Raises:
        LimitError: another name.
    """
    if digest in (None, "none"):
        return 0
    if digest == "xxh3":
        return 1
    raise LimitError(f"digest {digest!r} is not known; 'xxh3' or 'none'")


def _hash(source: SplitSource | Array) -> int:
    if not isinstance(source, SplitSource):
        return xxhash.xxh3_64_intdigest(source.data)
    running = xxhash.xxh3_64()
    for chunk in chunks(source):
        running.update(chunk.data)
    return running.intdigest()


def _same_bytes(a: SplitSource | Array, b: SplitSource | Array) -> bool:
    """Return whether two sources of one size hold the same bytes; copies only what lies in pieces or has gaps."""
    x, y = (np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in (list(chunks(s)) for s in (a, b)))
    return all(np.array_equal(x[i : i + _COMPARE], y[i : i + _COMPARE]) for i in range(0, len(x), _COMPARE))


def _homes(sources: Sequence[SplitSource | Array], kind: int) -> tuple[list[int], list[int]]:
    """Return which source each one's bytes are stored with (itself, or an equal earlier one), and the digests."""
    homes = list(range(len(sources)))
    if not kind:
        return homes, [0] * len(sources)
    if set(map(type, sources)) == {np.ndarray}:
        digests = list(map(xxhash.xxh3_64_intdigest, cast(list[Any], sources)))  # they have the buffer protocol
    else:
        digests = [_hash(s) for s in sources]
    if len(set(digests)) < len(digests):
        seen: dict[int, int] = {}
        for i, digest in enumerate(digests):
            home = seen.setdefault(digest, i)
            if home != i and sources[i].nbytes == sources[home].nbytes and _same_bytes(sources[i], sources[home]):
                homes[i] = home
    return homes, digests


def write_front(
    sink: Sink, number: Any, sources: Sequence[SplitSource | Array], *, alignment: int, kind: int
) -> SaveReport:
    """Write a front-indexed archive, straight through; every size is known from one plan before the first byte.

    `number(payloads)` gives the entries, told which payload holds each source.
    """
    check_alignment(alignment)
    homes, digests = _homes(sources, kind)
    home = np.array(homes, np.int64)
    order = np.argsort(home, kind="stable")  # equal ranges side by side
    kept = np.flatnonzero(home == np.arange(len(home)))
    sizes = np.array([sources[i].nbytes for i in kept.tolist()], np.uint64)
    offsets, end, base = plan_payloads(sizes, alignment)
    rows = np.zeros(len(homes), PAYLOAD)
    slot = np.searchsorted(kept, home[order])
    rows["offset"], rows["nbytes"] = offsets[slot], sizes[slot]
    rows["digest"] = np.array(digests, np.uint64)[order]
    payloads = np.empty(len(homes), np.int64)
    payloads[order] = np.arange(len(homes))
    entries: Entries = number(np.append(payloads, NONE))
    entries.payload_rows, entries.digest_kind = rows, kind
    index = encode(entries)
    payload_offset = align_up(HEADER_SIZE + len(index), base)
    size = payload_offset + end + HEADER_SIZE
    header = Header(alignment, base, HEADER_SIZE, len(index), payload_offset, size, zlib.crc32(index)).encode()
    sink.reserve(size)
    sink.write(header + index)
    stored = sources if len(kept) == len(sources) else [sources[i] for i in kept.tolist()]
    _write_sources(sink, stored, offsets + np.uint64(payload_offset), sizes)
    sink.write(bytes(size - HEADER_SIZE - sink.position) + header)
    return report_of(entries, size)


def _write_sources(sink: Sink, sources: Sequence[SplitSource | Array], offsets: Array, sizes: Array) -> None:
    """Write payloads at their offsets with zeros between; small ones joined, large ones straight from their arrays."""
    ends = offsets + sizes
    gaps = offsets - np.concatenate((np.array([sink.position], np.uint64), ends[:-1]))
    single = sizes >= np.uint64(_BATCH)
    if SplitSource in set(map(type, sources)):
        single |= np.array([isinstance(s, SplitSource) for s in sources], bool)
    cut = single | (gaps > 0)
    cut[1:] |= single[:-1] | ((ends // np.uint64(_BATCH))[1:] != (ends // np.uint64(_BATCH))[:-1])
    cuts = [*np.flatnonzero(cut).tolist(), len(sources)]
    parts: list[Any] = [] if cut[:1].all() else list(sources[: cuts[0]])  # from cut to cut nothing but bytes to join
    held = 0
    for lo, hi in itertools.pairwise(cuts):
        if gaps[lo]:
            parts.append(bytes(int(gaps[lo])))
        if single[lo] or held >= _BATCH:
            sink.write(b"".join(parts))
            parts, held = [], 0
        if single[lo]:
            for chunk in chunks(sources[lo]):
                sink.write(chunk)
        else:
            parts += sources[lo:hi]
            held += int(ends[hi - 1] - offsets[lo])
    sink.write(b"".join(parts))


def report_of(entries: Entries, size: int) -> SaveReport:
    """Return what an archive of so many bytes holds."""
    rows = entries.payload_rows
    new = np.ones(len(rows), bool)
    new[1:] = rows["offset"][1:] != rows["offset"][:-1]
    stored = int(rows["nbytes"][new].sum())
    users = np.asarray(entries.payloads, np.int64)
    users = users[users != NONE]
    different = np.count_nonzero(np.bincount(users, minlength=1))
    return SaveReport(
        tensors=len(entries.names),
        payloads=int(new.sum()),
        payload_bytes=stored,
        archive_bytes=size,
        tied=len(users) - int(different),
        deduplicated=int(rows["nbytes"].sum()) - stored,
    )
