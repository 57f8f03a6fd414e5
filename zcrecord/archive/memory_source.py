"""Payload sources in memory: bytes that were given, read or decompressed, and a mapped file."""

from __future__ import annotations

from typing import Any

import numpy as np

from zcrecord.errors import SourceError
from zcrecord.storage.memory import Memory, map_file

from .payload_source import Array, FileSource, PayloadSource, PayloadTable
from .private_copy import PrivateSource


def source_in(memory: Memory, octets: memoryview, table: PayloadTable, offset: int = 0) -> FileSource:
    """Return the source of a local archive or file: read on demand, mapped read-only, or in writable memory."""
    if memory.on_demand and not isinstance(octets, memoryview):  # unless an embedded archive was read whole
        from .foreign_source import ForeignSource  # here, because few files are read on demand

        return ForeignSource(memory, [memory], np.zeros(1, np.uint64), table)
    is_mapped = memory.mapping is not None and memory.identity is not None and memory.octets.readonly
    source = MappedSource if is_mapped else MemorySource
    return source(memory, octets, table, offset)


class MemorySource(FileSource):
    """The payloads of one archive in memory that was given, read or decompressed."""

    def private(self, numbers: Array | None = None) -> PayloadSource:
        return PrivateSource.copy_of(self, numbers)


class FetchedSource(MemorySource):
    """Base class of sources in memory that `fetch` fills with payloads before they are used."""

    def locate(self, number: int) -> tuple[memoryview, int]:
        self.fetch([number])
        return super().locate(number)

    def payload(self, number: int) -> memoryview:
        self.fetch([number])
        return super().payload(number)


class MappedSource(MemorySource):
    """Payloads of one archive in a mapped file, which nobody can have written to."""

    @property
    def file(self) -> tuple[str, tuple[int, ...]] | None:
        assert self.absolute is not None and self.memory.identity is not None, "it is mapped by its path"
        return self.absolute, self.memory.identity

    @property
    def mapping(self) -> Any:
        return self.memory.mapping

    def private_memory(self) -> Memory:
        """Return a private mapping, whose pages are copied when they are written; SourceError for a replaced file."""
        path, identity = self.file or ("", ())
        copy = map_file(path, private=True, least=0)
        if copy.identity != identity:
            raise SourceError("was replaced or changed since it was opened; load it again", path=path)
        octets = copy.octets[self.offset : self.offset + len(self.buffer)]
        return copy._replace(octets=octets, path=self.path, absolute=path)
