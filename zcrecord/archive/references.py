"""An archive of references: its payloads are ranges of other files; CONVENTIONS.md has the tables.

The files are archives, or of other formats. Each is identified by its size and the SHA-256 of the range from which its
own index is made. `sharded.ShardedSource` is the payload source; a file counts as a shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from zcrecord.codec.blocks import BlockTable
from zcrecord.codec.entries import Entries, ModuleEntry, ModuleKind, index_in_memory
from zcrecord.codec.index import PAYLOAD, Index, numpy_type
from zcrecord.codec.layout import NONE, Header
from zcrecord.errors import FormatError, IntegrityError, printable
from zcrecord.storage.memory import Memory

from .archive import Archive
from .memory_source import source_in as default_source_in
from .payload_source import Array, PayloadTable
from .piece_table import PieceTable
from .shards import Shards, file_names, table_of

__all__ = ["MOST_DESCRIBED", "OpenFile", "ReferencedFiles"]

MOST_DESCRIBED = 1 << 28  # bytes of a file that are hashed when it is opened; a GGUF file's header may have as many

# Opens a file by name for a function, and returns the function's result; its arguments are the file's memory, a
# function that fetches a range of it, and one that makes a payload source.
OpenFile = Callable[[str, Callable[..., Archive]], Archive]


class ReferencedFiles(Shards):
    """The files that an archive of references names, each opened when something in it is first needed."""

    from_tables = True

    def __init__(self, archive: Archive, open_file: OpenFile, index: Index) -> None:
        """Read and check the tables; `index` is that of the outline. FormatError for a bad table, name or range.

        Names must be plain; ranges must not overlap or leave their file, and be aligned for their tensors' elements.
        """
        self.set_files(archive, file_names(archive, "", "a file, which lies beside the archive that names it"))
        count = len(self.names)
        self._sizes = table_of(archive, "files.nbytes", np.uint64, (count,))
        self._described = table_of(archive, "files.described", np.uint64, (count, 2))
        self._digests = table_of(archive, "files.described_sha256", np.uint8, (count, 32))
        self._open_file = open_file
        self._described_by_file: dict[Any, tuple[int, int, bytes]] = {}  # by identity: the range, and its SHA-256
        file = table_of(archive, "file", np.uint32, (len(index.payloads),))
        offset = table_of(archive, "offset", np.uint64, file.shape)
        if np.count_nonzero(bad := (file >= count) & (file != NONE)):
            raise FormatError(f"payload {int(bad.argmax())} is in file {file[bad.argmax()]}, of {count}", tensor="file")
        for start, end, nbytes in zip(*self._described.T.tolist(), self._sizes.tolist(), strict=True):
            if not start <= end <= min(nbytes, start + MOST_DESCRIBED):
                fault = f"[{start}, {end}) is no range of a file of {nbytes} bytes, or has over {MOST_DESCRIBED} bytes"
                raise FormatError(fault, tensor="files.described")
        _check_aligned(file, offset, index)
        numbers = self._numbers(file, offset, index)
        self._payloads, self._offset, self._hashed = index.payloads, offset, index.digest_kind
        self._blocks = cache(partial(BlockTable, index))
        self.table = PieceTable(file, numbers, None, None, None)

    def _numbers(self, file: Array, offset: Array, index: Index) -> Array:
        """Return each payload's number among its file's, by offset; FormatError if ranges overlap or leave the file."""
        files, starts, stops = file, offset, offset + index.payloads["nbytes"]
        self._order: Array | None = None  # None if payloads are ordered already, as in an index of another format
        same_file = files[1:] == files[:-1]
        if (files[1:] < files[:-1]).any() or ((starts[1:] < starts[:-1]) & same_file).any():
            self._order = np.lexsort((stops, starts, files))
            files, starts, stops = (column[self._order] for column in (files, starts, stops))
            same_file = files[1:] == files[:-1]
        self._ends = np.searchsorted(files, np.arange(len(self.names) + 1, dtype=np.uint32))
        last, numbers = int(self._ends[-1]), np.arange(len(files), dtype=np.uint32)
        for start, end in pairwise(self._ends.tolist()):
            numbers[start:end] -= start
        used = np.flatnonzero(np.diff(self._ends))
        furthest = np.maximum.reduceat(stops[:last], self._ends[used])
        wrapped = files[:last][stops[:last] < starts[:last]]
        if len(past := np.append(wrapped, used[furthest > self._sizes[used]])):
            raise FormatError(f"a payload ends past the end of {printable(self.names[past[0]])}", tensor="offset")
        overlapping = (starts[1:] < stops[:-1]) & same_file
        overlapping[last:] = False  # those in the archive itself
        overlapping &= (starts[1:] != starts[:-1]) | (stops[1:] != stops[:-1])  # equal ranges are shared bytes
        if overlapping.any():
            name = printable(self.names[files[1:][overlapping.argmax()]])
            raise FormatError(f"payloads in {name} overlap", tensor="offset")
        # For payloads in the archive itself the offset is the number of a blob; there are never as many as NONE.
        numbers[last:] = np.minimum(starts[last:], np.uint64(NONE))
        if self._order is None:
            return numbers
        out = np.empty_like(numbers)
        out[self._order] = numbers
        return out

    def _rows(self, file: int) -> Array:
        """Return the payloads of a file as entries, ordered by their offset in it."""
        chosen: Any = slice(self._ends[file], self._ends[file + 1])
        chosen = chosen if self._order is None else self._order[chosen]
        rows: Array = self._payloads[chosen].copy()
        rows["offset"] = self._offset[chosen]
        return rows

    def size(self, file: int) -> int:
        """Return the size of a file in bytes, by the table; does not open it."""
        return int(self._sizes[file])

    def _context(self, file: int) -> str:
        return f"{self.catalogue.path} refers to {printable(self.names[file])}; put the very file beside it"

    def _open_checked(self, file: int) -> Archive:
        """Open a file, and check that it is the one that was indexed; errors are those of `_payloads_in`."""
        shard = self.open_named(file, lambda name: self._open_file(name, partial(self._payloads_in, file)))
        shard.source.pin(self.pins.get(self.names[file], {}))
        return shard

    def _payloads_in(
        self, file: int, memory: Memory, fetch: Callable[[int, int], None] = lambda *_: None,
        source_in: Any = default_source_in,
    ) -> Archive:  # fmt: skip
        """Return the bytes of a file as an archive of payloads alone; `fetch` has a range of a remote one in memory.

        IntegrityError if the file is not the one that was indexed, FormatError if it is this archive.
        """
        start, end = self._described[file].tolist()
        if memory.identity is not None and self.catalogue.source.file == (memory.absolute, memory.identity):
            raise FormatError("refers to itself", path=self.catalogue.path)
        if len(memory.octets) != self._sizes[file]:
            fault = f"has {len(memory.octets)} bytes, {self._sizes[file]} when it was indexed"
            raise IntegrityError(f"{fault}: {self._context(file)}", path=memory.path)
        fetch(start, end)
        described = self._described_by_file.get(memory.identity)  # links may give one file thousands of names
        if described is None:
            described = start, end, hashlib.sha256(memory.octets[start:end]).digest()
            if memory.identity is not None:
                self._described_by_file[memory.identity] = described
        *described_range, digest = described
        if described_range != [start, end]:
            raise FormatError("refers to one file by two names, and by two headers", path=self.catalogue.path)
        if digest != self._digests[file].tobytes():
            fault = "is another file than the one that was indexed, or was changed"
            raise IntegrityError(f"{fault}: {self._context(file)}", path=memory.path)
        index = _empty_index()._replace(payloads=self._rows(file), digest_kind=self._hashed)
        octets = memory.octets.toreadonly()
        header = Header.of_payloads(len(octets), start, end)
        table = PayloadTable(index.payloads, bool(self._hashed), header.payload_offset, self._blocks)
        return Archive(header, index, source_in(memory, octets, table, 0))  # bytes that were read stay writable there


@cache
def _empty_index() -> Index:
    """Return an index of one module, the record itself, and nothing else."""
    root = ModuleEntry("", 0, NONE, 0, int(ModuleKind.MAPPING), "")
    return index_in_memory(Entries(modules=[root], payload_rows=np.zeros(0, PAYLOAD)))


def _check_aligned(file: Array, offset: Array, index: Index) -> None:
    """Raise FormatError if a payload starts at an offset of its file where views of a tensor would be misaligned."""
    unaligned = (offset.astype(np.uint8) & 7 != 0) & (file != NONE)  # no element needs more than 8 bytes
    if not np.count_nonzero(unaligned):
        return
    # At level "touch" any number may be there.
    rows = index.tensors[np.append(unaligned, False)[np.minimum(index.tensors["payload"], len(file))]]
    for code in np.unique(rows["dtype"]).tolist():
        if (dtype := numpy_type(code)) is None:
            continue
        numbers = rows["payload"][rows["dtype"] == code]
        if np.count_nonzero(bad := offset[numbers] % np.uint64(dtype.alignment) != 0):
            number = int(numbers[bad.argmax()])
            fault = f"payload {number} starts at {offset[number]} of its file, which is not aligned for {dtype}"
            raise FormatError(fault, tensor="offset")
