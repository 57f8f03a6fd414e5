"""Open archives that were packed for transport: decompressed once into memory, or only the frames that are needed.

Frames and their table are left to `frames`, packing to `packer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from zcrecord.archive import subset
from zcrecord.archive.archive import Archive, Verify, open_archive
from zcrecord.archive.subset import Names, Rename
from zcrecord.codec.layout import HEADER_SIZE, Header, decode_header
from zcrecord.errors import FormatError, IntegrityError, LimitError, RecordError
from zcrecord.storage.compressed import ZstdFrames, import_zstandard
from zcrecord.storage.memory import Memory, Mode, aligned, buffer_of, map_file
from zcrecord.storage.threads import cores

from . import frames

__all__ = ["open_packed", "select_packed", "sparse_memory"]

_PIECE = 1 << 20  # bytes decompressed at a time to count them


def open_packed(memory: Memory, *, verify: Verify, mode: Mode) -> Archive:
    """Return the archive whose packed form is in `memory`, decompressed once; in mode "c" it is writable as it is.

    With a seek table, frames are decompressed in parallel; without one (`zstd` writes none) one after the other.

    Raises:
        DependencyError: zstandard is not installed. FormatError: it is no packed archive, or a damaged one.
        IntegrityError: a checksum does not match. LimitError: it would take out of all proportion to the packed form.
    """
    try:
        table = _table(memory)
        if table is None:
            block, octets = _decompress_stream(memory)
        else:
            block, octets = _room(memory, table.nbytes)
            frames.decompress_frames(memory.octets, table, octets, np.arange(len(table.sizes)), cores())
    except RecordError as error:
        raise error.located(path=memory.path) from error.__cause__
    return open_archive(memory._replace(octets=octets, mapping=block, identity=None), verify=verify, mode=mode)


def select_packed(memory: Memory, names: Names | None, rename: Rename | None, *, verify: Verify) -> Archive:
    """Return chosen tensors of a packed archive; only frames that hold any of them or the index are decompressed.

    Without a seek table all frames are. The part is pickled by the path, or by the packed bytes, which it then keeps.

    Raises:
        As `open_packed` does. TensorNotFoundError: a name without wildcards is not there.
    """
    names = subset.repeatable(names)
    table = _table(memory)
    if table is None:
        whole = open_packed(memory, verify=verify, mode="r")
        part = subset.select(whole, names, rename)
    else:
        part = _part(memory, table, names, rename)
    source = memory.octets if memory.absolute is None else memory.absolute

    def recipe(part: Archive) -> tuple[Any, ...]:
        pickled = source if isinstance(source, str) else bytes(source)
        return _reopen, (pickled, part.root.header.encode(), names, rename)

    part.recipe = recipe
    return part


def _reopen(source: str | bytes, seal: bytes, names: Names | None, rename: Rename | None) -> Archive:
    """Open a pickled part of a packed archive again; `seal` is the archive's header.

    Raises:
        IntegrityError: it is another archive now.
    """
    memory = map_file(source, least=0) if isinstance(source, str) else Memory(buffer_of(source))
    part = select_packed(memory, names, rename, verify="index")
    if part.root.header.encode() != seal:
        raise IntegrityError("is not the archive that was pickled; it was replaced since", path=memory.path)
    return part


def sparse_memory(size: int, pieces: Iterable[tuple[int, Any]]) -> Memory:
    """Return memory of `size` bytes with these pieces at their offsets, and zeros elsewhere, which take no memory.

    With header, index and trailer an archive can be opened and checked as if all of it were there.

    Raises:
        LimitError: there is no room for the addresses.
    """
    block, octets = _mapped(size, sparse=True)
    for offset, piece in pieces:
        octets[offset : offset + len(piece)] = piece
    return Memory(octets, None, block)


def _table(memory: Memory) -> frames.SeekTable | None:
    octets = memory.octets
    try:
        return frames.read_table(len(octets), lambda offset, nbytes: octets[offset : offset + nbytes])
    except RecordError as error:
        raise error.located(path=memory.path) from None


def _part(memory: Memory, table: frames.SeekTable, names: Names | None, rename: Rename | None) -> Archive:
    """Return chosen tensors of an archive in sparse memory, into which their frames are decompressed."""
    try:
        content = _FrameMemory(memory, table)
        h = content.trailer()
        content.bring([(0, HEADER_SIZE), (h.index_offset, h.index_offset + h.index_size)])
        whole = open_archive(content.memory, verify="index")
        part = subset.select(whole, names, rename)
        chosen = part.index.payloads
        starts = (chosen["offset"] + np.uint64(h.payload_offset)).tolist()
        content.bring([(start, start + n) for start, n in zip(starts, chosen["nbytes"].tolist(), strict=True)])
    except RecordError as error:
        raise error.located(path=memory.path) from error.__cause__
    return part


class _FrameMemory:
    """Sparse memory for all of an archive, into which frames are decompressed when they are needed."""

    def __init__(self, memory: Memory, table: frames.SeekTable) -> None:
        self._data, self._table = memory.octets, table
        self._done = np.zeros(len(table.sizes), bool)
        self._filled: list[tuple[int, int]] = []
        if table.nbytes < 2 * HEADER_SIZE:
            raise _too_few(table.nbytes)
        block, self._octets = _mapped(table.nbytes, sparse=True)
        self.memory = Memory(self._octets, memory.path, block, filled=self._filled, absolute=memory.absolute)

    def trailer(self) -> Header:
        """Return the decoded trailer, checked against the table's size."""
        size = self._table.nbytes
        self.bring([(size - HEADER_SIZE, size)])
        h = decode_header(bytes(self._octets[-HEADER_SIZE:]), "trailer")
        if h is None or h.archive_size != size:
            what = f"trailer: it is not that of an archive of {size} bytes"
            raise FormatError(f"{what}; the file is damaged, copy it again")
        return h

    def bring(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Decompress the frames that hold any byte of these ranges, unless they are there."""
        chosen = self._table.covering(ranges)
        chosen = chosen[~self._done[chosen]]
        self._done[chosen] = True
        frames.check_expansion(int(self._table.sizes[self._done].sum()), len(self._data))
        self._filled += map(self._table.range, chosen.tolist())
        frames.decompress_frames(self._data, self._table, self._octets, chosen, cores())


def _decompress_stream(memory: Memory) -> tuple[Any, memoryview]:
    """Decompress frames one after the other, without a seek table."""
    package = import_zstandard()
    try:
        found, reader = _reader(package, memory)
        with reader:
            first = reader.read(HEADER_SIZE)
            size, done = _size(package, memory, first), len(first)
            block, octets = _room(memory, size)
            octets[:done] = first
            while done < size and (got := reader.readinto(octets[done:])):
                done += got
            more = reader.read(1)
    except package.ZstdError as error:
        raise frames.zstd_error(error, "zstd") from None
    if done < size:
        raise FormatError(f"zstd: ends after {done} of {size} bytes; the file is truncated, copy it again")
    if more:
        raise FormatError(f"zstd: holds more than the archive's {size} bytes; is it several, one after the other?")
    if not found.whole:
        raise FormatError("zstd: it ends inside a frame; the file is truncated, copy it again")
    return block, octets


def _reader(package: Any, memory: Memory) -> tuple[ZstdFrames, Any]:
    """Return the frames in memory, and what decompresses them as in a stream."""
    at = 0

    def read(nbytes: int) -> bytes:
        nonlocal at
        at += nbytes
        return bytes(memory.octets[at - nbytes : at])

    found = ZstdFrames(read)
    return found, package.ZstdDecompressor().stream_reader(found, read_across_frames=True)


def _size(package: Any, memory: Memory, first: bytes) -> int:
    """Return the size of a packed archive: from its header, or by decompressing it once to count."""
    if len(first) < HEADER_SIZE:
        raise _too_few(len(first))
    header = decode_header(first)
    if header is not None:
        return header.archive_size
    size = 0
    with _reader(package, memory)[1] as reader:
        while piece := reader.read(_PIECE):
            size += len(piece)
            frames.check_expansion(size, len(memory.octets))
    return size


def _too_few(size: int) -> FormatError:
    what = f"{size} bytes come out of this zstd file, too few for an archive"
    return FormatError(f"{what}; it is truncated, copy it again")


def _room(memory: Memory, size: int) -> tuple[Any, memoryview]:
    frames.check_expansion(size, len(memory.octets))
    return _mapped(size)


def _mapped(size: int, *, sparse: bool = False) -> tuple[Any, memoryview]:
    try:
        return aligned(size, sparse=sparse)
    except (OSError, OverflowError, ValueError) as error:
        raise LimitError(f"no room in memory for {size} bytes: {error}") from error
