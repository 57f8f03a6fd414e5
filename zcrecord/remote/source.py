"""The payload source of an archive behind a URL: payloads are fetched, and checked, before they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zcrecord.archive.memory_source import FetchedSource
from zcrecord.archive.payload_source import Array, PayloadTable
from zcrecord.errors import RecordError
from zcrecord.storage.memory import Memory

from .whole import RemoteMemory


class RemoteSource(FetchedSource):
    """Payloads of one remote archive, in memory that has addresses for all of it."""

    def __init__(
        self, remote: RemoteMemory, memory: Memory, octets: memoryview, table: PayloadTable, offset: int = 0
    ) -> None:
        super().__init__(memory, octets, table, offset)
        self._remote, self._complete = remote, False

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        """Return the memory, and the offset of each payload there; None until all have been fetched."""
        return super().neighbours(number) if self._complete else None

    def fetch(self, numbers: Sequence[int] | None = None) -> None:
        """Have payloads in memory, all by default, each compared with its digest."""
        rows = (self.table.rows if numbers is None else self.table.rows[list(numbers)]).tolist()
        base, hashed = self.table.base, self.table.hashed
        payloads = [(base + offset, nbytes, digest if hashed else None) for offset, nbytes, digest in rows]
        try:
            self._remote.fetch_payloads(payloads)
        except RecordError as error:
            raise error.located(path=self.path) from error.__cause__
        self._complete |= numbers is None

    @property
    def remote(self) -> RemoteMemory:
        """Fetches ranges of the file by position."""
        return self._remote

    def pins(self) -> dict[Any, Any]:
        """Return the SHA-256 digests that payloads had when all of the archive was hashed, by their offsets."""
        return self._remote.pins

    def pin(self, pins: Mapping[Any, Any]) -> None:
        """Compare payloads, whenever they are fetched, with the SHA-256 digests that they had."""
        super().pin(pins)
        self._remote.pin(dict(pins))
