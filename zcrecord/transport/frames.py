"""zstd frames with a seek table after them: the table read, written and checked, frames decompressed in parallel.

Knows zstd's "seekable format" and the faults of files that claim to have it; nothing of archives.

Source: https://github.com/facebook/zstd/blob/dev/contrib/seekable_format/zstd_seekable_compression_format.md
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import xxhash

from zcrecord.errors import FormatError, IntegrityError, LimitError, RecordError
from zcrecord.storage.compressed import import_zstandard, is_one_frame
from zcrecord.storage.threads import map_ordered

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_SKIPPABLE = (0x184D2A5E).to_bytes(4, "little")
_SEEKABLE = (0x8F92EAB1).to_bytes(4, "little")
_SKIPPABLE_HEADER = 8  # bytes: magic and size
_FOOTER = struct.Struct("<IB4s")  # number of frames, descriptor, magic
_CHECKSUMS, _RESERVED = 0x80, 0x7C  # of the descriptor
_PADDING = 1 << 16  # bytes that a frame may have beyond twice its content: no zstd makes such frames
_BATCH = 1 << 20  # decompressed bytes of one unit of work, where frames are smaller
_WIDE = 8 << 20  # bytes of a window that every thread may allocate; zstd's own advice to decoders
_WIDE_LOCK = threading.Lock()  # held while a wider window is allocated
EXPANDED, EXPANDED_FREE = 64, 64 << 20  # packed bytes may take 64 times their number in memory, and 64 MiB


def check_expansion(nbytes: int, packed: int, advice: str = "") -> None:
    """Raise LimitError, with advice, if `nbytes` is more than EXPANDED times `packed` bytes, plus EXPANDED_FREE."""
    if nbytes > EXPANDED * packed + EXPANDED_FREE:
        fault = f"{packed} packed bytes would take {nbytes} bytes of memory"
        raise LimitError(f"{fault}; {advice}unpack it into a file (zcrecord unpack), and load that")


class SeekEntry(NamedTuple):
    """A frame's entry in the seek table: its size packed and unpacked, and the low half of its content's XXH64."""

    packed: int
    nbytes: int
    checksum: int


class SeekTable(NamedTuple):
    """Seek table: frame i is the file's bytes [starts[i], starts[i + 1]), its content is [bounds[i], bounds[i + 1])."""

    starts: Numbers
    bounds: Numbers
    checksums: Numbers | None

    @property
    def nbytes(self) -> int:
        """Total size of all content."""
        return int(self.bounds[-1])

    @property
    def sizes(self) -> Numbers:
        """Content size of each frame."""
        return np.diff(self.bounds)

    def packed_range(self, i: int) -> tuple[int, int]:
        """Return the range of a frame in the file."""
        return int(self.starts[i]), int(self.starts[i + 1])

    def range(self, i: int) -> tuple[int, int]:
        """Return the range of a frame's content."""
        return int(self.bounds[i]), int(self.bounds[i + 1])

    def covering(self, ranges: Iterable[tuple[int, int]]) -> Numbers:
        """Return the frames, ascending, that hold any byte of these ranges; empty frames next to them are included."""
        edges = np.array([(start, end) for start, end in ranges if start < end], np.int64).reshape(-1, 2)
        left, right = np.searchsorted(self.bounds, edges, "left"), np.searchsorted(self.bounds, edges, "right") - 1
        first, last = np.minimum(left, right)[:, 0], np.maximum(left, right)[:, 1]  # range i lies in [first, last)
        changes = np.zeros(len(self.bounds), np.int64)  # from frame to frame, in the number of ranges over it
        np.add.at(changes, first, 1)
        np.add.at(changes, last, -1)
        return np.flatnonzero(np.cumsum(changes)[:-1] > 0)


def encode_table(entries: Iterable[SeekEntry]) -> bytes:
    """Return the seek table as the skippable frame that stands after all others (R83)."""
    rows = np.array(list(entries), "<u4").reshape(-1, 3)
    body = rows.tobytes() + _FOOTER.pack(len(rows), _CHECKSUMS, _SEEKABLE)
    return _SKIPPABLE + len(body).to_bytes(4, "little") + body


def read_table(size: int, read: Callable[[int, int], Any]) -> SeekTable | None:
    """Return the seek table at a file's end, by `read(offset, nbytes)`; None if it has none, FormatError if damaged."""
    if size <= _FOOTER.size + _SKIPPABLE_HEADER:
        return None
    count, descriptor, magic = _FOOTER.unpack(read(size - _FOOTER.size, _FOOTER.size))
    if magic != _SEEKABLE:
        return None
    if descriptor & _RESERVED:
        raise _table_error(f"descriptor {descriptor:#04x} has reserved bits that are not zero", size - 5)
    columns = 3 if descriptor & _CHECKSUMS else 2
    body = 4 * columns * count + _FOOTER.size
    start = size - body - _SKIPPABLE_HEADER
    if start < 0 or body >> 32:
        fault = f"{count} frames would take a table of {body + _SKIPPABLE_HEADER} bytes, and the file has {size}"
        raise _table_error(fault, size - _FOOTER.size)
    if bytes(read(start, _SKIPPABLE_HEADER)) != _SKIPPABLE + body.to_bytes(4, "little"):
        raise _table_error(f"of {count} frames it would start at {start:#x}, where there is none", start)
    rows = np.frombuffer(read(start + _SKIPPABLE_HEADER, 4 * columns * count), "<u4").reshape(-1, columns)
    return _table_of(rows, start)


def _table_of(rows: np.ndarray[Any, Any], start: int) -> SeekTable:
    """Return the seek table of these rows that begins at `start`; FormatError if its frames do not end there."""
    starts, bounds = (np.concatenate(([0], np.cumsum(rows[:, i], dtype=np.int64))) for i in (0, 1))
    if starts[-1] != start:
        raise _table_error(f"its frames take {int(starts[-1])} bytes, expected the {start} before it", start)
    for i in np.flatnonzero(np.diff(starts) > 2 * np.diff(bounds) + _PADDING)[:1].tolist():
        fault = f"frame {i} takes {int(rows[i, 0])} bytes for {int(rows[i, 1])} of content"
        raise _table_error(f"{fault}, expected at most twice as many and {_PADDING} more", int(starts[i]))
    return SeekTable(starts, bounds, rows[:, 2].astype(np.int64) if rows.shape[1] == 3 else None)


def _table_error(fault: str, offset: int) -> FormatError:
    return FormatError(f"seek table: {fault}; the file is damaged, copy it again", offset=offset)


def decompress_frames(data: memoryview, table: SeekTable, target: memoryview, chosen: Numbers, threads: int) -> None:
    """Decompress chosen frames of a file, each to its place in `target`, which has room for the whole archive.

    FormatError if an entry of the table is not one valid frame of that size (R84), IntegrityError if its checksum is
    not that of the table, LimitError if it needs a window of more than 128 MiB.
    """
    batch = np.cumsum(table.sizes[chosen]) // _BATCH
    batches = np.split(chosen, np.flatnonzero(np.diff(batch)) + 1) if len(chosen) else []

    def start() -> Callable[[Numbers], None]:
        decompress = frame_decompressor(table)

        def work(frames: Numbers) -> None:
            for i in frames.tolist():
                decompress(i, data[slice(*table.packed_range(i))], target[slice(*table.range(i))])

        return work

    with closing(map_ordered(start, batches, min(threads, max(len(batches), 1)))) as results:
        for _ in results:  # closed, because an error's traceback would keep the generator and its threads
            pass


def frame_decompressor(table: SeekTable) -> Callable[[int, Any, memoryview], None]:
    """Return `decompress(i, frame, target)` for one thread, where `target` has the content's size.

    It raises as `decompress_frames` does.
    """
    package = import_zstandard()
    decompressor = package.ZstdDecompressor()

    def decompress(i: int, frame: Any, target: memoryview) -> None:
        """Decompress frame `i` into `target`, and compare its checksum with the table's."""
        offset = int(table.starts[i])
        try:
            header = _frame_header(package, frame, len(target), offset)
            is_narrow = header.window_size < len(target)
            step = len(target) - is_narrow  # less than all at once, or zstd would ignore the window's size (R84)
            if (is_narrow or header.content_size != len(target)) and header.window_size > _WIDE:
                with _WIDE_LOCK:  # its window is memory beside the frame's own bytes: one at a time
                    _decompress(package.ZstdDecompressor(), frame, target, offset, step)
            else:
                _decompress(decompressor, frame, target, offset, step)
        except package.ZstdError as error:
            raise zstd_error(error, _frame_name(offset, frame), offset) from None
        if table.checksums is None:
            return
        # zstd has compared a frame's own checksum, which is of the same kind, with its content.
        checksum = int.from_bytes(frame[-4:], "little") if header.has_checksum else xxhash.xxh64_intdigest(target)
        if checksum & 0xFFFFFFFF != int(table.checksums[i]):
            fault = f"{_frame_name(offset, frame)}: its checksum is not that of the seek table"
            raise IntegrityError(f"{fault}; the file is damaged, copy it again", offset=offset)

    return decompress


def _frame_header(package: Any, frame: Any, nbytes: int, offset: int) -> Any:
    """Return zstd's parameters of a frame; FormatError unless it is one frame, and may have `nbytes` of content."""
    if not is_one_frame(frame):
        raise _frame_error("is not one zstd frame that ends there, as the seek table says", offset, frame)
    header = package.get_frame_parameters(frame)
    if header.content_size not in (nbytes, package.CONTENTSIZE_UNKNOWN):
        raise _frame_error(f"holds {header.content_size} bytes, the seek table says {nbytes}", offset, frame)
    return header


def _decompress(decompressor: Any, frame: Any, target: memoryview, offset: int, step: int) -> None:
    """Decompress a frame, at most `step` bytes at a time; FormatError unless its content has the size of `target`."""
    reader = decompressor.stream_reader(frame)
    done = 0
    while done < len(target) and (nbytes := reader.readinto(target[done : done + step])):
        done += nbytes
    if done < len(target):
        raise _frame_error(f"ends after {done} of {len(target)} bytes", offset, frame)
    if reader.read(1):
        raise _frame_error(f"holds more than the {len(target)} bytes that the seek table says", offset, frame)


def _frame_name(offset: int, frame: Any) -> str:
    return f"frame [{offset:#x}, {offset + len(frame):#x})"


def _frame_error(fault: str, offset: int, frame: Any) -> FormatError:
    return FormatError(f"{_frame_name(offset, frame)}: {fault}; the file is damaged, copy it again", offset=offset)


def zstd_error(error: Exception, name: str, offset: int | None = None) -> RecordError:
    """Return the zcrecord error for one of zstd; `name` is the part of the file that it is about."""
    text = str(error).removeprefix("zstd decompress error: ")
    if "too much memory" in text:
        return LimitError(f"{name}: its window is larger than 128 MiB; decompress it with zstd --long", offset=offset)
    kind = IntegrityError if "checksum" in text else FormatError
    return kind(f"{name}: {text}; the file is damaged, copy it again", offset=offset)
