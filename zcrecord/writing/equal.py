"""Payloads with equal bytes, stored once: found by size and digest, then compared byte by byte.

Tensors that share memory are one payload, not two equal ones; see `sharing`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from zcrecord.codec.blocks import LEAST, BlockDigest, Checksums
from zcrecord.codec.digests import digest_of, digest_of_pieces
from zcrecord.tensors.lazy import LazyTensor

from .sharing import chunks

COMPARED = 1 << 20  # bytes compared at a time
Number = TypeVar("Number")  # distinct for each payload


class EqualPayloads(Generic[Number]):
    """Finds the first payload of equal bytes: has numbers of payloads by a key of their bytes, as size and digest."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, Number] = {}

    def first(self, key: Hashable, number: Number, is_equal: Callable[[Number], bool]) -> Number:
        """Return the number of the first payload with this key, if `is_equal` finds its bytes equal; else `number`."""
        earlier = self._numbers.setdefault(key, number)
        return earlier if earlier != number and is_equal(earlier) else number

    def forget(self, number: Number) -> None:
        """Forget the payload of this number, if it was added last."""
        if self._numbers and next(reversed(self._numbers.values())) == number:
            self._numbers.popitem()


def key_of(nbytes: int, digest: int) -> int:
    """Return size and digest as one number, which takes less memory than a tuple: there may be millions."""
    return nbytes << 64 | digest


def equal_sources(
    sources: Sequence[Any],
    checksums: Checksums,
    stored: Sequence[tuple[int, int]] = (),
    stored_bytes: Callable[[int], Any] = lambda _: None,
) -> tuple[list[int], list[int]]:
    """Return two lists by source: the number of the first payload that equals it, or its own, and its digest.

    Stored payloads are numbered first, then sources. A LazyTensor equals no other source, and has the digest 0.

    Args:
        sources: arrays, `SplitSource`s, `LazyTensor`s.
        checksums: gets those of the blocks of large sources, hashed in the same pass.
        stored: size and digest of payloads that are stored already; `stored_bytes` returns their bytes by number.
    """
    stored_count, digests = len(stored), _digests(sources, checksums)
    numbers = list(range(stored_count, stored_count + len(sources)))
    if not stored and len(set(digests)) == len(digests):
        return numbers, digests
    payloads = EqualPayloads[int]()
    for number, (nbytes, digest) in enumerate(stored):
        payloads.first(key_of(nbytes, digest), number, lambda _: False)  # adds it; what is stored stays as it is

    for i, (source, digest) in enumerate(zip(sources, digests, strict=True)):

        def is_equal(other: int, source: Any = source) -> bool:
            is_stored = other < stored_count
            return same_bytes(stored_bytes(other) if is_stored else sources[other - stored_count], source)

        if not isinstance(source, LazyTensor):
            numbers[i] = payloads.first(key_of(source.nbytes, digest), numbers[i], is_equal)
    return numbers, digests


def _digests(sources: Sequence[Any], checksums: Checksums) -> list[int]:
    """Return the digest of each source, 0 of a LazyTensor; `checksums` gets those of the blocks of large ones."""
    if set(map(type, sources)) == {np.ndarray} and max(source.nbytes for source in sources) < LEAST:
        return list(map(digest_of, sources))  # they have the buffer protocol
    return [0 if isinstance(source, LazyTensor) else digest_of_source(source, checksums) for source in sources]


def digest_of_source(source: Any, checksums: Checksums) -> int:
    """Return the digest of an array or SplitSource; `checksums` gets those of its blocks, if it is large."""
    if source.nbytes < LEAST:
        return digest_of_pieces(chunks(source))
    digest = BlockDigest()
    for chunk in chunks(source):
        digest.update(chunk)
    return digest.finish(source.nbytes, checksums)


def same_bytes(a: Any, b: Any) -> bool:
    """Return True if two sources of one size are equal; copies only those in pieces or with gaps."""
    x, y = _joined(a), _joined(b)
    starts = range(0, len(x), COMPARED)  # the comparison makes an array, of one piece at a time
    return all(np.array_equal(x[start : start + COMPARED], y[start : start + COMPARED]) for start in starts)


def _joined(source: Any) -> Any:
    parts = list(chunks(source))
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
