"""The payload source of a private copy, which may be written, and the limit of payloads that share their bytes.

Equal payloads that are not tied are stored once. In a private copy the first of them is edited in place; the others,
its twins, get memory of their own when they are first asked for.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import numpy as np

from zcrecord.errors import LimitError, SourceError
from zcrecord.storage.memory import Memory, Mode, aligned_empty, private_copy

from .payload_source import Array, FileSource, PayloadSource, PayloadTable, Place, is_twin

_APART, _APART_FREE = 64, 1 << 30  # bytes that copies may take: times those stored, and besides
_MAPPED = 1 << 20  # bytes from which a private mapping is cheaper than a copy
_MAPPINGS = 32  # of one file at the most: each takes addresses for all of it, and on some systems a descriptor


def twins_nbytes(payloads: Array, stored: int) -> int:
    """Return the bytes that copies of twins take; unverified sizes count as the archive's, `stored`, at most."""
    return int(np.minimum(payloads["nbytes"][is_twin(payloads)], np.uint64(stored)).sum(dtype=np.float64))


def check_apart(nbytes: int, stored: int, path: str | None) -> None:
    """Raise LimitError if payloads that share bytes would take more than 64 times the bytes stored, and 1 GiB."""
    if nbytes > _APART * stored + _APART_FREE:
        fault = f"tensors that share their bytes would take {nbytes:.3g} bytes, each by itself"
        raise LimitError(f"{fault}; load those that you need, or save what you need as a record of its own", path=path)


class PrivateSource(FileSource):
    """Payloads of one archive in writable memory; twins are copied from `original` on use, without it at once."""

    mode: Mode = "c"

    def __init__(
        self, memory: Memory, octets: memoryview, table: PayloadTable, offset: int = 0,
        original: FileSource | None = None,
    ) -> None:  # fmt: skip
        """Take over writable memory; without an original, LimitError if twins would take far more bytes than it."""
        super().__init__(memory, octets, table, offset)
        self._original = original
        self._is_twin = is_twin(self.table.rows)
        self._twins: dict[int, memoryview] = {}
        self._copies: dict[int, Memory] = {}  # further mappings of the file, by the twins' number among their equals
        if original is None:
            self.check_twins(self, None)
            for number in np.flatnonzero(self._is_twin).tolist():
                self.locate(number)

    @classmethod
    def copy_of(cls, original: FileSource, numbers: Array | None) -> PrivateSource:
        """Return a private copy of a source; `numbers` are the payloads that will be used, None for all."""
        cls.check_twins(original, numbers)
        original.fetch(None if numbers is None else numbers.tolist())
        memory = original.private_memory()
        return cls(memory, memory.octets, original.table, original.offset, original)

    @staticmethod
    def check_twins(source: FileSource, numbers: Array | None) -> None:
        """Raise LimitError if copies of twins would take far more bytes than the payloads of these numbers."""
        used = source.table.rows if numbers is None else source.table.rows[numbers]
        stored = source.stored_nbytes(numbers) + source.table.rows.nbytes
        check_apart(twins_nbytes(used, len(source.buffer)), min(stored, len(source.buffer)), source.path)

    def locate(self, number: int) -> tuple[memoryview, int]:
        """Return memory in which a payload lies, and its offset there; a twin's is made on first use."""
        offset, nbytes, _ = self.table.rows[number].item()
        if not self._is_twin[number]:
            return self.octets, offset
        twin = self._twins.get(number)
        if twin is None:
            twin = self._twins.setdefault(number, self._copy_twin(number, offset, nbytes))
        return twin, 0

    def payload(self, number: int) -> memoryview:
        return PayloadSource.payload(self, number)

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        if self._is_twin[number]:
            return None
        return self.octets, np.where(self._is_twin, -1, self.table.rows["offset"].astype(np.int64))

    def place(self, number: int) -> Place:
        """Return a place for each payload that no other has: each is memory of its own."""
        return number, 0, 0

    def private(self, numbers: Array | None = None) -> PayloadSource:
        return PrivateSource.copy_of(self, numbers)

    @property
    def mapping(self) -> Any:
        return None if self._original is None or self._original.mapping is None else self.memory.mapping

    @property
    def original(self) -> PayloadSource | None:
        return self._original

    def mappings(self) -> list[weakref.ref[Any]]:
        further = [weakref.ref(copy.mapping) for copy in self._copies.values() if copy.mapping is not None]
        return [*super().mappings(), *further, *(self._original.mappings() if self._original is not None else ())]

    def _copy_twin(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return writable memory of a twin's own, with its bytes: of a large one a private mapping, if possible."""
        start = self.table.base + offset
        octets = (self._original or self).buffer[start : start + nbytes]
        if nbytes < _MAPPED:
            copy = aligned_empty(nbytes)
            copy[:] = octets
            return copy.data
        rank = number - int(np.searchsorted(self.table.rows["offset"], np.uint64(offset)))
        mapped = self._mapping_of_rank(rank)
        if mapped is None:
            return private_copy(octets).octets
        return np.frombuffer(mapped.octets[self.table.base :], np.uint8).data[offset : offset + nbytes]

    def _mapping_of_rank(self, rank: int) -> Memory | None:
        """Return a private mapping for all n-th twins; None if the file was replaced, or rank is over 32."""
        if rank not in self._copies and self._original is not None and self._original.mapping and rank <= _MAPPINGS:
            with contextlib.suppress(SourceError):
                self._copies[rank] = self._original.private_memory()
        return self._copies.get(rank)
