"""The payload source of a part: some payloads of another source, under numbers of their own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .payload_source import Array, PayloadSource, Piece, Place
from .piece_table import PieceTable


class PartSource(PayloadSource):
    """Some payloads of another source. Everything is asked of that one, which stays open as long as this is used.

    Attributes:
        whole: the other source, which is not a part.
        numbers: the number there of each payload.
    """

    def __init__(self, source: PayloadSource, numbers: Sequence[int] | Array) -> None:
        self.whole: PayloadSource = source
        self.numbers: Array = np.array(numbers, np.int64)
        if isinstance(source, PartSource):
            self.whole, self.numbers = source.whole, source.numbers[self.numbers]
        self._table: PieceTable | None = None
        self.path, self.absolute, self.mode = source.path, source.absolute, source.mode
        self.buffer, self.offset = source.buffer, source.offset

    def nbytes(self, number: int) -> int:
        """Return the size of a payload."""
        return self.whole.nbytes(int(self.numbers[number]))

    def locate(self, number: int) -> tuple[memoryview, int]:
        """Return memory in which a payload lies, and its offset there."""
        return self.whole.locate(int(self.numbers[number]))

    def payload(self, number: int) -> memoryview:
        """Return the bytes of a payload, read-only."""
        return self.whole.payload(int(self.numbers[number]))

    def blocks(self, number: int) -> Iterator[memoryview]:
        """Yield the bytes of a payload in order."""
        return self.whole.blocks(int(self.numbers[number]))

    def decoding(self, number: int) -> str | None:
        """Return why a payload is decoded when it is used; None if it is used as it lies."""
        return self.whole.decoding(int(self.numbers[number]))

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        """Return memory in which a payload lies, and the offset there of each payload of the part."""
        near = self.whole.neighbours(int(self.numbers[number]))
        return None if near is None else (near[0], near[1][self.numbers])

    def fetch(self, numbers: Sequence[int] | None = None) -> None:
        """Have payloads in memory, all of the part by default."""
        self.whole.fetch((self.numbers if numbers is None else self.numbers[list(numbers)]).tolist())

    def place(self, number: int) -> Place:
        """Return the identity of a payload, which is that in the other source."""
        return self.whole.place(int(self.numbers[number]))

    def pieces(self, number: int, chosen: Sequence[int] | None = None) -> list[Piece]:
        """Return the payloads of single files that a payload is stored as, or some of them."""
        return self.whole.pieces(int(self.numbers[number]), chosen)

    def boxes(self, number: int, shape: tuple[int, ...], bits: int) -> tuple[Array, Array]:
        """Return first index and size of each piece, of a payload's tensor of this shape."""
        return self.whole.boxes(int(self.numbers[number]), shape, bits)

    def stored_nbytes(self, numbers: Array | None = None) -> int:
        """Return the bytes that the payloads take, each range once."""
        return self.whole.stored_nbytes(self.numbers if numbers is None else self.numbers[numbers])

    def opened_nbytes(self) -> int:
        """Return the bytes of the files that are open."""
        return self.whole.opened_nbytes()

    @property
    def file(self) -> tuple[str, tuple[int, ...]] | None:
        """Absolute path and identity of the one mapped file that the payloads lie in."""
        return self.whole.file

    @property
    def mapping(self) -> Any:
        """The mapping of that file."""
        return self.whole.mapping

    @property
    def gone(self) -> bool:
        """True if an opened file was replaced or removed at its path."""
        return self.whole.gone

    @property
    def file_names(self) -> list[str]:
        """Names of the further files that payloads lie in."""
        return self.whole.file_names

    def piece_table(self) -> PieceTable | None:
        """Return the pieces of the part's payloads, by further file."""
        table = self.whole.piece_table()
        if self._table is None and table is not None:
            self._table = table.chosen(self.numbers)
        return self._table

    def file_size(self, file: int) -> int:
        """Return the size of a further file."""
        return self.whole.file_size(file)

    def file_archive(self, file: int) -> Any:
        """Return the archive of a further file."""
        return self.whole.file_archive(file)

    def numbers_in_file(self, file: int, numbers: Array) -> Array:
        """Return numbers of the table of pieces as those of payloads in the archive of their file."""
        return self.whole.numbers_in_file(file, numbers)

    def open_files(self, files: Iterable[int]) -> None:
        """Open further files, by their numbers."""
        self.whole.open_files(files)

    @property
    def is_mapped(self) -> bool:
        """True if the bytes are those of mapped files."""
        return self.whole.is_mapped

    @property
    def is_remote(self) -> bool:
        """True if payloads are fetched when they are needed."""
        return self.whole.is_remote

    @property
    def remote(self) -> Any:
        """Fetches ranges of the one file by position."""
        return self.whole.remote

    def seal(self) -> bytes | None:
        """Return bytes that tell the other source from others."""
        return self.whole.seal()

    def pins(self) -> dict[Any, Any]:
        """Return the SHA-256 digests that remote payloads had."""
        return self.whole.pins()

    def pin(self, pins: Mapping[Any, Any]) -> None:
        """Compare remote payloads with the SHA-256 digests that they had."""
        self.whole.pin(pins)

    def expected(self, number: int) -> list[bytes | None]:
        """Return the SHA-256 that each piece of a payload is compared with."""
        return self.whole.expected(int(self.numbers[number]))

    def private(self, numbers: Array | None = None) -> PayloadSource:
        """Return a part of a private copy of the other source."""
        used = self.numbers if numbers is None else self.numbers[numbers]
        return PartSource(self.whole.private(used), self.numbers)

    @property
    def original(self) -> PayloadSource | None:
        """The part of the read-only source that the other is a private copy of."""
        original = self.whole.original
        return None if original is None else PartSource(original, self.numbers)

    def mappings(self) -> list[weakref.ref[Any]]:
        """Return the mappings that are open."""
        return self.whole.mappings()
