"""The payload source of a part: some payloads of another source, under numbers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from .payload_source import Array, PayloadSource
from .piece_table import PieceTable


def _of_whole(name: str) -> Any:
    """Return a property that is the attribute or method of this name of the whole source."""
    return property(attrgetter(f"whole.{name}"))


def _by_number(name: str) -> Any:
    """Return a method that calls the whole source's of this name, with the payload's number there."""

    def method(part: PartSource, number: int, *arguments: Any) -> Any:
        return getattr(part.whole, name)(int(part.numbers[number]), *arguments)

    return method


class PartSource(PayloadSource):
    """Payloads of another source: payload i is payload `numbers[i]` of `whole`, which is no part itself."""

    # Files are those of the whole.
    opened_nbytes: Any = _of_whole("opened_nbytes")
    file: Any = _of_whole("file")
    mapping: Any = _of_whole("mapping")
    gone: Any = _of_whole("gone")
    file_names: Any = _of_whole("file_names")
    file_size: Any = _of_whole("file_size")
    file_archive: Any = _of_whole("file_archive")
    numbers_in_file: Any = _of_whole("numbers_in_file")
    open_files: Any = _of_whole("open_files")
    is_mapped: Any = _of_whole("is_mapped")
    is_remote: Any = _of_whole("is_remote")
    remote: Any = _of_whole("remote")
    seal: Any = _of_whole("seal")
    pins: Any = _of_whole("pins")
    pin: Any = _of_whole("pin")
    mappings: Any = _of_whole("mappings")

    nbytes: Any = _by_number("nbytes")
    locate: Any = _by_number("locate")
    payload: Any = _by_number("payload")
    blocks: Any = _by_number("blocks")
    decoding: Any = _by_number("decoding")
    read_by: Any = _by_number("read_by")
    place: Any = _by_number("place")
    pieces: Any = _by_number("pieces")
    boxes: Any = _by_number("boxes")
    expected: Any = _by_number("expected")

    def __init__(self, source: PayloadSource, numbers: Sequence[int] | Array) -> None:
        """Take payloads of a source by number; a part of a part is a part of the whole."""
        self.whole: PayloadSource = source
        self.numbers: Array = np.array(numbers, np.int64)
        if isinstance(source, PartSource):
            self.whole, self.numbers = source.whole, source.numbers[self.numbers]
        self._table: PieceTable | None = None
        self.path, self.absolute, self.mode = source.path, source.absolute, source.mode
        self.buffer, self.offset, self.on_demand = source.buffer, source.offset, source.on_demand

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        if (neighbours := self.whole.neighbours(int(self.numbers[number]))) is None:
            return None
        octets, offsets = neighbours
        return octets, offsets[self.numbers]

    def fetch(self, numbers: Sequence[int] | None = None) -> None:
        self.whole.fetch((self.numbers if numbers is None else self.numbers[list(numbers)]).tolist())

    def stored_nbytes(self, numbers: Array | None = None) -> int:
        return self.whole.stored_nbytes(self.numbers if numbers is None else self.numbers[numbers])

    def piece_table(self) -> PieceTable | None:
        table = self.whole.piece_table()
        if self._table is None and table is not None:
            self._table = table.chosen(self.numbers)
        return self._table

    def private(self, numbers: Array | None = None) -> PayloadSource:
        used = self.numbers if numbers is None else self.numbers[numbers]
        return PartSource(self.whole.private(used), self.numbers)

    @property
    def original(self) -> PayloadSource | None:
        original = self.whole.original
        return None if original is None else PartSource(original, self.numbers)
