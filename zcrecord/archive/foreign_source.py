"""The payload source of other formats' files, ranges of several and bytes that are decoded, and of files on demand."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.errors import FormatError
from zcrecord.storage.memory import Memory, Mode, new_memory

from .payload_source import Array, FileSource, PayloadSource, PayloadTable, Place, distinct_nbytes, was_replaced
from .private_copy import check_apart

__all__ = ["Decoded", "ForeignSource"]

_READ_AHEAD = 8 << 20  # bytes read at a time in a loop over payloads


class Decoded(NamedTuple):
    """Bytes of a payload that do not lie in a file as they are used."""

    nbytes: int  # of all pieces
    pieces: Callable[[], Iterable[Any]]  # yields them in order, each time it is called
    reason: str  # why they are decoded, in words: "deflated", "not aligned"


class ForeignSource(FileSource):
    """Payloads in files of another format, by offsets in one row of all of them; or in one archive, read on demand.

    A payload that is decoded, or read on demand, is in memory while a view of it is used, and is decoded or read again
    when it is used again. In a loop over payloads those that follow are read, too, 8 MiB at a time. `files` are mapped
    files, bytes in memory, and decoded payloads, each as if it were a file; `bases` are their first offsets.
    """

    def __init__(
        self, first: Memory, files: Sequence[Memory | Decoded], bases: Array, table: PayloadTable,
        original: ForeignSource | None = None, fetched: FileSource | None = None, nbytes: int = 0,
    ) -> None:  # fmt: skip
        """Take over files, of which `first` is named in errors; each payload of the table lies in one of them.

        With an original this is a private copy of that, in mode "c". `fetched` fetches the payloads in the first of
        the files, which is remote. `nbytes` is the size of all files, those that are decoded included.
        """
        self.mode: Mode = "r" if original is None else "c"
        super().__init__(first, first.octets, table)
        self.files, self.bases = files, bases
        self._file_of = np.searchsorted(bases, table.rows["offset"], "right") - 1
        self._original = original
        self._copies: Any = weakref.WeakValueDictionary() if original is None else {}  # edits stay
        self._decoded, self._decoded_nbytes = set[int](), 0  # payloads that were decoded, and their bytes
        own = sum(len(file.octets) for file in files if isinstance(file, Memory))
        self._opened_nbytes = max(len(self.buffer), own, nbytes)  # of the first, too, if all in it are decoded
        self._fetched, self._used = fetched, set[int]()  # numbers of payloads that were fetched
        self._kept = dict[int, memoryview]()  # payloads in memory for good, of files that are read on demand
        self._last, self._ahead = -2, list[Array]()  # the last payload that was read, and those read with another

    def _file(self, number: int) -> tuple[Memory | Decoded, int]:
        """Return the file that a payload lies in, and its offset there."""
        file = int(self._file_of[number])
        return self.files[file], int(self.table.rows["offset"][number]) + self.table.base - int(self.bases[file])

    def decoding(self, number: int) -> str | None:
        file, _ = self._file(number)
        return file.reason if isinstance(file, Decoded) else None

    def locate(self, number: int) -> tuple[memoryview, int]:
        """Return memory in which a payload lies, and its offset there; decoded first, in mode "c" copied."""
        file, offset = self._file(number)
        if isinstance(file, Memory) and self.mode == "r" and not file.on_demand:
            self.fetch([number])
            return file.octets, offset
        copy: Array | None = self._copies.get(number)
        if copy is None:
            copy = self._copies.setdefault(number, self._copy(number))
        return (copy.data.toreadonly() if self.mode == "r" else copy.data), 0

    def _copy(self, number: int) -> Array:
        """Return a payload in memory of its own; LimitError if all that were decoded take far more than the files."""
        if self.mode == "r":
            self._decoded_nbytes += 0 if number in self._decoded else self.nbytes(number)
            self._decoded.add(number)
            check_apart(self._decoded_nbytes, self.opened_nbytes(), self.path)
        file, _ = self._file(number)
        if isinstance(file, Memory) and file.on_demand and number not in (self._original or self)._kept:
            return self._read(number, file.octets)
        out, filled = np.empty(self.nbytes(number), np.uint8), 0  # the owner of the memory: views keep it alive
        for piece in (self._original or self).blocks(number):
            octets = memoryview(piece).cast("B")
            out[filled : filled + len(octets)] = octets
            filled += len(octets)
        return out

    def _read(self, number: int, octets: Any) -> Array:
        """Return a payload read from its file, `octets`; in a loop over payloads read those that follow, too."""
        numbers, budget, offsets = [number], _READ_AHEAD - self.nbytes(number), self.table.rows["offset"]
        while self._last + 1 == number and (n := numbers[-1] + 1) < len(offsets) and offsets[n] != offsets[n - 1]:
            budget -= self.nbytes(n)
            if budget < 0 or self._file_of[n] != self._file_of[number]:
                break
            numbers.append(n)
        memories = {n: new_memory(self.nbytes(n)) for n in numbers}
        octets.fill([(self._file(n)[1], memory.data) for n, memory in memories.items()])
        copies = [self._copies.setdefault(n, memory) for n, memory in memories.items()]
        self._last, self._ahead = numbers[-1], copies[1:]
        return memories[number]

    def read_by(self, number: int) -> tuple[Any, int] | None:
        file, offset = self._file(number)
        if self.mode == "c" or number in self._kept or not isinstance(file, Memory) or not file.on_demand:
            return None
        return file.octets, offset

    def keep(self, number: int) -> None:
        file, _ = self._file(number)
        if isinstance(file, Memory) and file.on_demand:
            self._kept[number] = self.locate(number)[0]

    def payload(self, number: int) -> memoryview:
        return PayloadSource.payload(self, number)

    def fetch(self, numbers: Sequence[int] | None = None) -> None:
        """Fetch those of the payloads, all by default, that lie in a remote file: the first."""
        if self._fetched is None:
            return
        numbers = range(len(self.table.rows)) if numbers is None else numbers
        remote = [number for number in numbers if not self._file_of[number]]  # in the first file
        self._fetched.fetch(remote)
        self._used.update(remote)

    def pins(self) -> dict[Any, Any]:
        return {self.start(n): hashlib.sha256(self.payload(n)).digest() for n in sorted(self._used)}

    def pin(self, pins: Mapping[Any, Any]) -> None:
        super().pin(pins)
        if self._fetched is not None:
            self._fetched.pin(pins)

    def blocks(self, number: int) -> Iterator[memoryview]:
        """Yield the bytes of a payload in order; decoded ones are not kept. FormatError if they are too few or many."""
        file, _ = self._file(number)
        if isinstance(file, Memory) or number in self._copies:
            yield self.payload(number)
            return
        nbytes = 0
        for piece in file.pieces():
            octets = memoryview(piece).cast("B")
            nbytes += len(octets)
            if nbytes > file.nbytes:
                break
            yield octets
        if nbytes != file.nbytes:
            raise FormatError(f"decodes to other than its {file.nbytes} bytes; it is damaged", path=self.path)

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        """Return the file of a payload, and by payload its offset there, or -1; None if payloads are made on use."""
        file, _ = self._file(number)
        if isinstance(file, Decoded) or self.mode == "c" or self._fetched is not None or file.on_demand:
            return None
        file_number = self._file_of[number]
        offsets = self.table.rows["offset"].astype(np.int64) - int(self.bases[file_number])
        return file.octets, np.where(self._file_of == file_number, offsets, -1)

    def place(self, number: int) -> Place:
        """Return file 0 and a payload's range in the row of all files; in mode "c" a place that no other has."""
        return super().place(number) if self.mode == "r" else (number, 0, 0)

    def stored_nbytes(self, numbers: Array | None = None) -> int:
        """Return the bytes that payloads take, all by default, at most the files' size: decoded ones may be larger."""
        rows = self.table.rows if numbers is None else self.table.rows[np.asarray(numbers, np.int64)]
        return min(distinct_nbytes(rows), self.opened_nbytes())

    def opened_nbytes(self) -> int:
        return self._opened_nbytes

    @property
    def is_mapped(self) -> bool:
        memories = [file for file in self.files if isinstance(file, Memory)]
        all_mapped = all(m.on_demand or (m.mapping is not None and m.octets.readonly) for m in memories)
        return self.mode == "r" and self._fetched is None and all_mapped

    @property
    def file(self) -> tuple[str, tuple[int, ...]] | None:
        if self.mode == "c" or not self.on_demand or self._kept or [*self.files] != [self.memory]:
            return None
        return self.memory.absolute or "", self.memory.identity or ()

    @property
    def gone(self) -> bool:
        return any(was_replaced(file) for file in self.files if isinstance(file, Memory))

    def mappings(self) -> list[weakref.ref[Any]]:
        memories = [file for file in self.files if isinstance(file, Memory)]
        return [weakref.ref(memory.mapping) for memory in memories if memory.mapping is not None]

    def private(self, numbers: Array | None = None) -> PayloadSource:
        """Return a source that copies each payload into memory of its own when it is first used."""
        rows = self.table.rows if numbers is None else self.table.rows[numbers]
        nbytes = int(rows["nbytes"].sum(dtype=np.float64))
        check_apart(nbytes, self.opened_nbytes(), self.path)
        return ForeignSource(self.memory, self.files, self.bases, self.table, self, nbytes=self.opened_nbytes())

    @property
    def original(self) -> PayloadSource | None:
        return self if self.mode == "r" else self._original
