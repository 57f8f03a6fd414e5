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

_AHEAD = 8 << 20  # bytes read at a time in a loop over payloads


class Decoded(NamedTuple):
    """Bytes of a payload that do not lie in a file as they are used.

    Attributes:
        nbytes: of all pieces.
        pieces: yields them in order, each time it is called.
        reason: why, in words: "deflated", "not aligned".
    """

    nbytes: int
    pieces: Callable[[], Iterable[Any]]
    reason: str


class ForeignSource(FileSource):
    """Payloads in files of another format, by offsets in one row of all of them; or in one archive, read on demand.

    A payload that is decoded, or read on demand, is in memory while a view of it is used, and is decoded or read again
    when it is used again. In a loop over payloads those that follow are read, too, 8 MiB at a time.

    Attributes:
        files: mapped files, bytes in memory, and decoded payloads, each as if it were a file.
        bases: the first offset of each.
    """

    def __init__(
        self,
        first: Memory,
        files: Sequence[Memory | Decoded],
        bases: Array,
        table: PayloadTable,
        original: ForeignSource | None = None,
        fetched: FileSource | None = None,
        nbytes: int = 0,
    ) -> None:
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
        """Return the file of a payload, and its offset there."""
        k = int(self._file_of[number])
        return self.files[k], int(self.table.rows["offset"][number]) + self.table.base - int(self.bases[k])

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
        if self.mode == "r":
            self._decoded_nbytes += 0 if number in self._decoded else self.nbytes(number)
            self._decoded.add(number)
            check_apart(self._decoded_nbytes, self.opened_nbytes(), self.path)
        file, _ = self._file(number)
        if isinstance(file, Memory) and file.on_demand and number not in (self._original or self)._kept:
            return self._read(number, file.octets)
        out, done = np.empty(self.nbytes(number), np.uint8), 0  # the owner of the memory, as which it is looked up
        for piece in (self._original or self).blocks(number):
            octets = memoryview(piece).cast("B")
            out[done : done + len(octets)] = octets
            done += len(octets)
        return out

    def _read(self, number: int, octets: Any) -> Array:
        """Return a payload of a file that is read on demand; in a loop read those that follow, too."""
        numbers, budget, offsets = [number], _AHEAD - self.nbytes(number), self.table.rows["offset"]
        while self._last + 1 == number and (n := numbers[-1] + 1) < len(offsets) and offsets[n] != offsets[n - 1]:
            budget -= self.nbytes(n)
            if budget < 0 or self._file_of[n] != self._file_of[number]:
                break
            numbers.append(n)
        read = {n: new_memory(self.nbytes(n)) for n in numbers}
        octets.fill([(self._file(n)[1], out.data) for n, out in read.items()])
        self._last, self._ahead = numbers[-1], [self._copies.setdefault(n, out) for n, out in read.items()][1:]
        return read[number]

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
        """Yield the bytes of a payload in order; one that has to be decoded is not kept."""
        file, _ = self._file(number)
        if isinstance(file, Memory) or number in self._copies:
            yield self.payload(number)
            return
        done = 0
        for piece in file.pieces():
            octets = memoryview(piece).cast("B")
            done += len(octets)
            if done > file.nbytes:
                break
            yield octets
        if done != file.nbytes:
            raise FormatError(f"decodes to other than its {file.nbytes} bytes; it is damaged", path=self.path)

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        file, _ = self._file(number)
        if isinstance(file, Decoded) or self.mode == "c" or self._fetched is not None or file.on_demand:
            return None
        k = self._file_of[number]
        offsets = self.table.rows["offset"].astype(np.int64) - int(self.bases[k])
        return file.octets, np.where(self._file_of == k, offsets, -1)

    def place(self, number: int) -> Place:
        """Return the identity of a payload; in mode "c" each is memory of its own."""
        return super().place(number) if self.mode == "r" else (number, 0, 0)

    def stored_nbytes(self, numbers: Array | None = None) -> int:
        """Return the bytes that payloads take in the files, all by default; of decoded ones their files' size."""
        chosen = np.arange(len(self.table.rows)) if numbers is None else np.asarray(numbers, np.int64)
        return min(distinct_nbytes(self.table.rows[chosen]), self.opened_nbytes())

    def opened_nbytes(self) -> int:
        return self._opened_nbytes

    @property
    def is_mapped(self) -> bool:
        files = [f for f in self.files if isinstance(f, Memory)]
        mapped = all(f.on_demand or (f.mapping is not None and f.octets.readonly) for f in files)
        return self.mode == "r" and self._fetched is None and mapped

    @property
    def file(self) -> tuple[str, tuple[int, ...]] | None:
        one = self.mode == "r" and self.on_demand and not self._kept and [*self.files] == [self.memory]
        return (self.memory.absolute or "", self.memory.identity or ()) if one else None

    @property
    def gone(self) -> bool:
        return any(was_replaced(file) for file in self.files if isinstance(file, Memory))

    def mappings(self) -> list[weakref.ref[Any]]:
        maps = [f.mapping for f in self.files if isinstance(f, Memory) and f.mapping is not None]
        return [weakref.ref(mapping) for mapping in maps]

    def private(self, numbers: Array | None = None) -> PayloadSource:
        """Return a source that copies each payload into memory of its own when it is first used."""
        chosen = np.arange(len(self.table.rows)) if numbers is None else numbers
        nbytes = int(self.table.rows["nbytes"][chosen].sum(dtype=np.float64))
        check_apart(nbytes, self.opened_nbytes(), self.path)
        return ForeignSource(self.memory, self.files, self.bases, self.table, self, nbytes=self.opened_nbytes())

    @property
    def original(self) -> PayloadSource | None:
        return self if self.mode == "r" else self._original
