"""The payload source of an archive behind a URL: payloads are fetched, and checked, before they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zcrecord.archive.memory_source import FetchedSource
from zcrecord.archive.payload_source import Array, PayloadTable
from zcrecord.errors import located
from zcrecord.storage.memory import Memory

from .ranges import PayloadRange
from .read_ahead import RemoteMemory


class RemoteSource(FetchedSource):
    """Payloads of one remote archive, in memory that has addresses for all of it."""

    def __init__(
        self, remote: RemoteMemory, memory: Memory, octets: memoryview, table: PayloadTable, offset: int = 0
    ) -> None:
        super().__init__(memory, octets, table, offset)
        self._remote, self._complete = remote, False

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        return super().neighbours(number) if self._complete else None  # some were not fetched yet

    def fetch(self, numbers: Sequence[int] | None = None) -> None:
        """Have payloads in memory, each checked, by their numbers; all for None."""
        rows = (self.table.rows if numbers is None else self.table.rows[list(numbers)]).tolist()
        base, hashed = self.table.base, self.table.hashed
        payloads = [PayloadRange(base + offset, nbytes, digest if hashed else None) for offset, nbytes, digest in rows]
        with located(path=self.path):
            self._remote.fetch_payloads(payloads)
        self._complete |= numbers is None

    @property
    def remote(self) -> RemoteMemory:
        """Fetches ranges of the file by position."""
        return self._remote

    def pins(self) -> dict[Any, Any]:
        """Return the SHA-256 digests of payloads by their offsets."""
        return self._remote.pins

    def pin(self, pins: Mapping[Any, Any]) -> None:
        super().pin(pins)
        self._remote.pin(dict(pins))
