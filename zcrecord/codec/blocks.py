"""Checksums of payloads' blocks: computed, encoded as metadata and decoded, as CONVENTIONS.md has them. No I/O."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from .digests import RunningDigest
from .entries import AttributeEntry, Entries, ValueForm, ValueType, WordList
from .index import Array, Index
from .layout import NONE

NAME = "zcrecord.blocks"
BLOCK = 1 << 20
LEAST = 8 << 20  # bytes of a payload, and of all payloads, from which on writers make checksums
_MIN_BLOCK, _MAX_BLOCK = 1 << 12, 1 << 30  # sizes that readers take, powers of two

Checksums = dict[tuple[int, int], bytes]  # by digest and size of a payload, its blocks' checksums as u64s


class BlockDigest:
    """Running digest of a payload and, in the same pass, of its blocks: each piece is hashed while it is in a cache."""

    def __init__(self) -> None:
        self._whole, self._block = RunningDigest(), RunningDigest()
        self.reset()

    def reset(self) -> None:
        """Begin with another payload."""
        self._whole.reset()
        self._block.reset()
        self._filled, self._sums = 0, array("Q")

    def update(self, data: Any) -> None:
        """Hash the next bytes of the payload, any contiguous bytes-like."""
        view = memoryview(data)
        if not self._sums and self._filled + view.nbytes < BLOCK:  # fast path for small payloads, nearly all
            self._whole.update(data)
            self._filled += view.nbytes
            return
        octets, start = view.cast("B"), 0
        while start < len(octets):
            piece = octets[start : start + BLOCK - self._filled]
            self._whole.update(piece)
            if self._sums:
                self._block.update(piece)
            start, self._filled = start + len(piece), self._filled + len(piece)
            if self._filled == BLOCK:
                self._end_block()

    def _end_block(self) -> None:
        """Keep the checksum of the block that was hashed, and begin with the next."""
        self._sums.append((self._block if self._sums else self._whole).intdigest())  # the first is the whole so far
        self._block.reset()
        self._filled = 0

    def finish(self, nbytes: int, known: Checksums) -> int:
        """Return the digest of the payload, of `nbytes`, and add the checksums of a large one to `known`."""
        digest = self._whole.intdigest()
        if nbytes >= LEAST:
            if self._filled:
                self._end_block()
            known[digest, nbytes] = self._sums.tobytes()
        return digest


class Blocks(NamedTuple):
    """The size of a payload's blocks, and their checksums."""

    size: int
    sums: Array

    def bounds(self, number: int, nbytes: int) -> tuple[int, int]:
        """Return start and end of a block, by its number, in a payload of `nbytes`."""
        return number * self.size, min((number + 1) * self.size, nbytes)

    def around(self, start: int, end: int, nbytes: int) -> tuple[int, int]:
        """Return the range that the blocks of bytes [start, end) fill, in a payload of `nbytes`."""
        return start // self.size * self.size, min(-(-end // self.size) * self.size, nbytes)


class BlockTable:
    """The checksums of blocks in an archive's metadata; `block`, their size, is 0 if there are none of a valid form.

    The index need not be verified: bad numbers in it count as no checksums.
    """

    def __init__(self, index: Index) -> None:
        """Decode: block size, count, the payloads' digests, their sizes, then the checksums of each one's blocks."""
        self.block = 0
        words = _words_of(index) if index.digest_kind else index.words[:0]
        if len(words) < 2:
            return
        block, count = int(words[0]), int(words[1])
        if block & block - 1 or not _MIN_BLOCK <= block <= _MAX_BLOCK or 2 + 2 * count > len(words):
            return
        digests, sizes, sums = words[2 : 2 + count], words[2 + count : 2 + 2 * count], words[2 + 2 * count :]
        counts = sizes // np.uint64(block) + (sizes % np.uint64(block) > 0)
        if (digests[1:] <= digests[:-1]).any() or (sizes == 0).any() or (counts > len(sums)).any():
            return
        ends = np.cumsum(counts, dtype=np.uint64)  # no sum wraps: there are fewer than 2^28 words
        if (int(ends[-1]) if count else 0) == len(sums):
            self.block, self._digests, self._sizes, self._ends, self._sums = block, digests, sizes, ends, sums

    def find(self, digest: int, nbytes: int) -> Blocks | None:
        """Return a payload's block checksums, None if unknown; below 8 MiB its digest may stand for one block."""
        if not self.block:
            return None
        i = int(np.searchsorted(self._digests, np.uint64(digest)))
        if i < len(self._digests) and (int(self._digests[i]), int(self._sizes[i])) == (digest, nbytes):
            end = int(self._ends[i])
            return Blocks(self.block, self._sums[end - -(-nbytes // self.block) : end])
        return Blocks(nbytes, np.array([digest], np.uint64)) if 0 < nbytes < LEAST else None

    def checksums_of(self, rows: Array) -> Checksums:
        """Return the checksums of those payloads in `rows` that have some, if blocks have the size that writers use."""
        if self.block != BLOCK:
            return {}
        rows = rows[np.isin(rows["digest"], self._digests)]
        keys = zip(rows["digest"].tolist(), rows["nbytes"].tolist(), strict=True)
        return {key: blocks.sums.tobytes() for key in keys if (blocks := self.find(*key)) and blocks.size == BLOCK}


def is_blocks(index: Index, rows: Array) -> Array:
    """Return for each row of metadata True if it has this convention's name; rows need not be verified."""
    matches: Array = (rows["name_size"] == len(NAME)) & (rows["name"] < len(index.text))
    for i in np.flatnonzero(matches).tolist():
        start = int(rows["name"][i])
        matches[i] = index.text[start : start + len(NAME)] == NAME.encode()
    return matches


def _words_of(index: Index) -> Any:
    """Return the words of the list in this convention's metadata; none if it is missing or of another form."""
    rows = index.metadata[is_blocks(index, index.metadata)]
    if len(rows) != 1 or rows["form"][0] != ValueForm.LIST or rows["type"][0] not in (ValueType.INT, ValueType.UINT):
        return index.words[:0]
    start, count = int(rows["value"][0]) & NONE, int(rows["value"][0]) >> 32
    words = index.words[start : start + count]
    return words if len(words) == count else words[:0]


def add_blocks(entries: Entries, known: Checksums) -> None:
    """Replace the block checksums in an archive's metadata by those of its payloads, whose rows must be complete."""
    rows = entries.payload_rows
    if not entries.digest_kind or not len(rows) or int((rows["offset"] + rows["nbytes"]).max()) < LEAST:
        return
    rows = rows[rows["nbytes"] >= LEAST]
    keys = set(zip(rows["digest"].tolist(), rows["nbytes"].tolist(), strict=True)) & known.keys()
    sizes = dict(sorted(keys))  # by digest; of two payloads with one digest, which chance does not make, one is listed
    head = np.array([BLOCK, len(sizes), *sizes, *sizes.values()], np.uint64)  # the form that BlockTable reads
    words = np.concatenate([head, *(np.frombuffer(known[key], np.uint64) for key in sizes.items())])
    kind = ValueType.UINT if int(words.max()) >> 63 else ValueType.INT  # as of every list of integers (R69)
    others = [entry for entry in entries.metadata if entry.key != NAME]
    entries.metadata = [*others, AttributeEntry(NAME, NONE, 0, WordList(kind, words))]
