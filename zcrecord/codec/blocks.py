"""Checksums of payloads' blocks: made, encoded as metadata and decoded, as CONVENTIONS.md has them. No I/O."""

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

Checksums = dict[tuple[int, int], bytes]  # by digest and size of a payload those of its blocks, u64s


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
        """Add any contiguous bytes-like."""
        view = memoryview(data)
        if not self._sums and self._filled + view.nbytes < BLOCK:  # nearly always
            self._whole.update(data)
            self._filled += view.nbytes
            return
        octets, at = view.cast("B"), 0
        while at < len(octets):
            piece = octets[at : at + BLOCK - self._filled]
            self._whole.update(piece)
            if self._sums:
                self._block.update(piece)
            at, self._filled = at + len(piece), self._filled + len(piece)
            if self._filled == BLOCK:
                self._end_block()

    def _end_block(self) -> None:
        self._sums.append((self._block if self._sums else self._whole).intdigest())  # the first is the whole so far
        self._block.reset()
        self._filled = 0

    def note(self, nbytes: int, known: Checksums) -> int:
        """Return the digest of a payload of `nbytes`, and keep the checksums of a large one; no byte may follow."""
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

    def range(self, number: int, nbytes: int) -> tuple[int, int]:
        """Return start and end of a block in a payload of `nbytes`."""
        return number * self.size, min((number + 1) * self.size, nbytes)

    def around(self, lo: int, hi: int, nbytes: int) -> tuple[int, int]:
        """Return the range that the blocks of bytes [lo, hi) fill, in a payload of `nbytes`."""
        return lo // self.size * self.size, min(-(-hi // self.size) * self.size, nbytes)


class BlockTable:
    """The checksums that an archive has; `block` is 0 if it has none that are as CONVENTIONS.md says.

    Reads the index as it lies, checked or not, and bounds all that it finds there.
    """

    def __init__(self, index: Index) -> None:
        self.block = 0
        words = _words_of(index) if index.digest_kind else index.words[:0]
        if len(words) < 2:
            return
        block, count = int(words[0]), int(words[1])
        if block & block - 1 or not 1 << 12 <= block <= 1 << 30 or 2 + 2 * count > len(words):
            return
        digests, sizes, sums = words[2 : 2 + count], words[2 + count : 2 + 2 * count], words[2 + 2 * count :]
        each = sizes // np.uint64(block) + (sizes % np.uint64(block) > 0)
        if (digests[1:] <= digests[:-1]).any() or (sizes == 0).any() or (each > len(sums)).any():
            return
        ends = np.cumsum(each, dtype=np.uint64)  # no sum wraps: there are fewer than 2^28 words
        if (int(ends[-1]) if count else 0) == len(sums):
            self.block, self._digests, self._sizes, self._ends, self._sums = block, digests, sizes, ends, sums

    def find(self, digest: int, nbytes: int) -> Blocks | None:
        """Return the checksums of a payload. One of less than 8 MiB that is not described is one block."""
        if not self.block:
            return None
        at = int(np.searchsorted(self._digests, np.uint64(digest)))
        if at < len(self._digests) and (int(self._digests[at]), int(self._sizes[at])) == (digest, nbytes):
            end = int(self._ends[at])
            return Blocks(self.block, self._sums[end - -(-nbytes // self.block) : end])
        return Blocks(nbytes, np.array([digest], np.uint64)) if 0 < nbytes < LEAST else None

    def of(self, rows: Array) -> Checksums:
        """Return the checksums of those payloads that are described, if the blocks have the size that writers give."""
        if self.block != BLOCK:
            return {}
        rows = rows[np.isin(rows["digest"], self._digests)]
        keys = zip(rows["digest"].tolist(), rows["nbytes"].tolist(), strict=True)
        return {key: found.sums.tobytes() for key in keys if (found := self.find(*key)) and found.size == BLOCK}


def is_blocks(index: Index, rows: Array) -> Array:
    """Return True for the row of metadata with this convention's name."""
    here: Array = (rows["name_size"] == len(NAME)) & (rows["name"] < len(index.text))
    for i in np.flatnonzero(here).tolist():
        start = int(rows["name"][i])
        here[i] = index.text[start : start + len(NAME)] == NAME.encode()
    return here


def _words_of(index: Index) -> Any:
    rows = index.metadata[is_blocks(index, index.metadata)]
    if len(rows) != 1 or rows["form"][0] != ValueForm.LIST or rows["type"][0] not in (ValueType.INT, ValueType.UINT):
        return index.words[:0]
    start, count = int(rows["value"][0]) & NONE, int(rows["value"][0]) >> 32
    words = index.words[start : start + count]
    return words if len(words) == count else words[:0]


def add_blocks(entries: Entries, known: Checksums) -> None:
    """Put the checksums of an archive's payloads, whose rows are complete, among its metadata."""
    rows = entries.payload_rows
    if not entries.digest_kind or not len(rows) or int((rows["offset"] + rows["nbytes"]).max()) < LEAST:
        return
    rows = rows[rows["nbytes"] >= LEAST]
    keys = set(zip(rows["digest"].tolist(), rows["nbytes"].tolist(), strict=True)) & known.keys()
    sizes = dict(sorted(keys))  # of two payloads with one digest, which no chance makes, one is described
    head = np.array([BLOCK, len(sizes), *sizes, *sizes.values()], np.uint64)
    words = np.concatenate([head, *(np.frombuffer(known[key], np.uint64) for key in sizes.items())])
    kind = ValueType.UINT if int(words.max()) >> 63 else ValueType.INT  # as of every list of integers (R69)
    others = [a for a in entries.metadata if a.key != NAME]
    entries.metadata = [*others, AttributeEntry(NAME, NONE, 0, WordList(kind, words))]
