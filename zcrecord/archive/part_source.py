"""The payload source of a part: some payloads of another source, under numbers of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from .payload_source import Array, PayloadSource, Piece, Place
from .piece_table import PieceTable


def _of_whole(name: str) -> Any:
    return property(attrgetter(f"whole.{name}"))


class PartSource(PayloadSource):
    """Some payloads of another source. Everything is asked of that one, which stays open as long as this is used.

    Attributes:
        whole: the other source, which is not a part.
        numbers: the number there of each payload.
    """

    # The same for a part: they concern files, or files by their numbers.
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

    def __init__(self, source: PayloadSource, numbers: Sequence[int] | Array) -> None:
        self.whole: PayloadSource = source
        self.numbers: Array = np.array(numbers, np.int64)
        if isinstance(source, PartSource):
            self.whole, self.numbers = source.whole, source.numbers[self.numbers]
        self._table: PieceTable | None = None
        self.path, self.absolute, self.mode = source.path, source.absolute, source.mode
        self.buffer, self.offset = source.buffer, source.offset

    def nbytes(self, number: int) -> int:
        return self.whole.nbytes(int(self.numbers[number]))

    def locate(self, number: int) -> tuple[memoryview, int]:
        return self.whole.locate(int(self.numbers[number]))

    def payload(self, number: int) -> memoryview:
        return self.whole.payload(int(self.numbers[number]))

    def blocks(self, number: int) -> Iterator[memoryview]:
        return self.whole.blocks(int(self.numbers[number]))

    def decoding(self, number: int) -> str | None:
        return self.whole.decoding(int(self.numbers[number]))

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        near = self.whole.neighbours(int(self.numbers[number]))
        return None if near is None else (near[0], near[1][self.numbers])

    def fetch(self, numbers: Sequence[int] | None = None) -> None:
        self.whole.fetch((self.numbers if numbers is None else self.numbers[list(numbers)]).tolist())

    def place(self, number: int) -> Place:
        return self.whole.place(int(self.numbers[number]))

    def pieces(self, number: int, chosen: Sequence[int] | None = None) -> list[Piece]:
        return self.whole.pieces(int(self.numbers[number]), chosen)

    def boxes(self, number: int, shape: tuple[int, ...], bits: int) -> tuple[Array, Array]:
        return self.whole.boxes(int(self.numbers[number]), shape, bits)

    def stored_nbytes(self, numbers: Array | None = None) -> int:
        return self.whole.stored_nbytes(self.numbers if numbers is None else self.numbers[numbers])

    def piece_table(self) -> PieceTable | None:
        table = self.whole.piece_table()
        if self._table is None and table is not None:
            self._table = table.chosen(self.numbers)
        return self._table

    def expected(self, number: int) -> list[bytes | None]:
        return self.whole.expected(int(self.numbers[number]))

    def private(self, numbers: Array | None = None) -> PayloadSource:
        used = self.numbers if numbers is None else self.numbers[numbers]
        return PartSource(self.whole.private(used), self.numbers)

    @property
    def original(self) -> PayloadSource | None:
        original = self.whole.original
        return None if original is None else PartSource(original, self.numbers)
