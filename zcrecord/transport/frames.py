"""zstd frames with a seek table after them: which holds what, and what comes out of them, several at a time.

Knows zstd's "seekable format" and what can be wrong with a file that claims to be of it; nothing of archives.

Source: https://github.com/facebook/zstd/blob/dev/contrib/seekable_format/zstd_seekable_compression_format.md
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import xxhash

from zcrecord.errors import FormatError, IntegrityError, LimitError, RecordError
from zcrecord.storage.compressed import import_zstandard
from zcrecord.storage.threads import map_ordered

__all__ = ["EXPANDED", "Row", "Table", "check_proportion", "encode_table", "expanded", "fill", "read_table", "refused"]

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_SKIPPABLE = (0x184D2A5E).to_bytes(4, "little")
_SEEKABLE = (0x8F92EAB1).to_bytes(4, "little")
_FOOTER = 9  # number of frames, descriptor, magic
_CHECKSUMS, _RESERVED = 0x80, 0x7C  # of the descriptor
_TOGETHER = 1 << 20  # bytes out of frames that are one piece of work, where frames are smaller
_WIDE = 8 << 20  # bytes of a window of which every thread may have one; zstd's own advice to decoders
_LONE = threading.Lock()  # held for a wider one
EXPANDED, EXPANDED_FREE = 64, 64 << 20  # times what is packed, and bytes, that may come out of it into memory


def check_proportion(nbytes: int, packed: int, do: str = "") -> None:
    """Raise LimitError if packed bytes would take memory out of all proportion to them; `do` is what to do first."""
    if nbytes > EXPANDED * packed + EXPANDED_FREE:
        what = f"{packed} packed bytes would take {nbytes} bytes of memory"
        raise LimitError(f"{what}; {do}unpack it into a file (zcrecord unpack), and load that")


class Row(NamedTuple):
    """One frame: its bytes in the file, those that come out of it, and the low half of their XXH64."""

    packed: int
    nbytes: int
    checksum: int


class Table(NamedTuple):
    """All frames of a file: frame i is its bytes [starts[i], starts[i + 1]), and holds [bounds[i], bounds[i + 1])."""

    starts: Numbers
    bounds: Numbers
    checksums: Numbers | None

    @property
    def nbytes(self) -> int:
        """How many bytes come out of all of them."""
        return int(self.bounds[-1])

    def covering(self, ranges: Iterable[tuple[int, int]]) -> Numbers:
        """Return the frames, ascending, that hold any byte of these ranges."""
        marks = np.zeros(len(self.bounds), np.int64)
        lows, highs = np.array([r for r in ranges if r[0] < r[1]], np.int64).reshape(-1, 2).T
        np.add.at(marks, np.searchsorted(self.bounds, lows, "right") - 1, 1)
        np.add.at(marks, np.searchsorted(self.bounds, highs, "left"), -1)
        return np.flatnonzero((np.cumsum(marks)[:-1] > 0) & (np.diff(self.bounds) > 0))


def encode_table(rows: Iterable[Row]) -> bytes:
    """Return the skippable frame that stands after frames and says where each begins (R83)."""
    entries = np.array(list(rows), "<u4").reshape(-1, 3)
    body = entries.tobytes() + len(entries).to_bytes(4, "little") + bytes([_CHECKSUMS]) + _SEEKABLE
    return _SKIPPABLE + len(body).to_bytes(4, "little") + body


def read_table(size: int, read: Callable[[int, int], Any]) -> Table | None:
    """Return the seek table of a file of `size` bytes, of which `read(offset, nbytes)` gives some; None if it has none.

    Raises:
        FormatError: there is one, and it is not that of this file (R83).
    """
    footer = bytes(read(size - _FOOTER, _FOOTER)) if size > _FOOTER + 8 else b""
    if footer[5:] != _SEEKABLE:
        return None
    count, descriptor = int.from_bytes(footer[:4], "little"), footer[4]
    if descriptor & _RESERVED:
        raise _damaged(f"descriptor {descriptor:#04x} has reserved bits that are not zero", size - 5)
    width = 3 if descriptor & _CHECKSUMS else 2
    body = 4 * width * count + _FOOTER
    start = size - body - 8
    if start < 0 or body >> 32:
        raise _damaged(
            f"{count} frames would take a table of {body + 8} bytes, and the file has {size}", size - _FOOTER
        )
    if bytes(read(start, 8)) != _SKIPPABLE + body.to_bytes(4, "little"):
        raise _damaged(f"of {count} frames it would start at {start:#x}, and there it does not", start)
    entries = np.frombuffer(read(start + 8, 4 * width * count), "<u4").reshape(-1, width)
    starts, bounds = (np.concatenate(([0], np.cumsum(entries[:, i], dtype=np.int64))) for i in (0, 1))
    if starts[-1] != start:
        raise _damaged(f"its frames take {int(starts[-1])} bytes, {start} stand before it", start)
    return Table(starts, bounds, entries[:, 2].astype(np.int64) if width == 3 else None)


def _damaged(what: str, offset: int) -> FormatError:
    return FormatError(f"seek table: {what}; the file is damaged, copy it again", offset=offset)


def fill(data: memoryview, table: Table, target: memoryview, chosen: Numbers, threads: int) -> None:
    """Decompress chosen frames of a file each to its place in memory that has room for all.

    Raises:
        FormatError: a frame is none, or has another size than the table says (R84). IntegrityError: what comes out of
        it was not what went in. LimitError: it needs a window of more than 128 MiB.
    """
    sums = np.cumsum(np.diff(table.bounds)[chosen]) // _TOGETHER
    parts = np.split(chosen, np.flatnonzero(np.diff(sums)) + 1) if len(chosen) else []

    def start() -> Callable[[Numbers], None]:
        expand = expanded()

        def work(part: Numbers) -> None:
            for i in part.tolist():
                lo, hi = table.starts[i : i + 2].tolist()
                out = target[int(table.bounds[i]) : int(table.bounds[i + 1])]
                expand(data[lo:hi], out, lo, None if table.checksums is None else int(table.checksums[i]))

        return work

    results = map_ordered(start, parts, min(threads, max(len(parts), 1)))
    try:
        for _ in results:
            pass
    finally:
        results.close()  # an error's traceback would keep it, and its threads


def expanded() -> Callable[[Any, memoryview, int, int | None], None]:
    """Return what decompresses one frame into memory of the right size, for one thread's use.

    It takes the frame, the memory, the frame's offset in its file, and the checksum that the table gives.
    """
    package = import_zstandard()
    own = package.ZstdDecompressor()

    def expand(frame: Any, out: memoryview, offset: int, checksum: int | None) -> None:
        try:
            told = package.get_frame_parameters(frame)
            if told.content_size not in (len(out), package.CONTENTSIZE_UNKNOWN):
                raise _frame(f"holds {told.content_size} bytes, the seek table says {len(out)}", offset, frame)
            if told.content_size != len(out) and told.window_size > _WIDE:
                with _LONE:  # its window is memory beside the frame's own bytes: one at a time
                    _expand(package.ZstdDecompressor(), frame, out, offset)
            else:
                _expand(own, frame, out, offset)
        except package.ZstdError as error:
            raise refused(error, f"frame {_range(offset, frame)}", offset) from None
        # zstd has compared the frame's own checksum, which is of the same kind, with what came out.
        found = frame[-4:] if told.has_checksum else (xxhash.xxh64_intdigest(out) & 0xFFFFFFFF).to_bytes(4, "little")
        if checksum is not None and bytes(found) != checksum.to_bytes(4, "little"):
            what = f"frame {_range(offset, frame)}: its checksum is not that of the seek table"
            raise IntegrityError(f"{what}; the file is damaged, copy it again", offset=offset)

    return expand


def _expand(decompressor: Any, frame: Any, out: memoryview, offset: int) -> None:
    reader = decompressor.stream_reader(frame)
    done = 0
    while done < len(out) and (got := reader.readinto(out[done:])):
        done += got
    if done < len(out):
        raise _frame(f"ends after {done} of {len(out)} bytes", offset, frame)
    if reader.read(1):
        raise _frame(f"holds more than the {len(out)} bytes that the seek table says", offset, frame)


def _range(offset: int, frame: Any) -> str:
    return f"[{offset:#x}, {offset + len(frame):#x})"


def _frame(what: str, offset: int, frame: Any) -> FormatError:
    return FormatError(f"frame {_range(offset, frame)}: {what}; the file is damaged, copy it again", offset=offset)


def refused(error: Exception, where: str, offset: int | None = None) -> RecordError:
    """Return what zstd says about its input, as the typed error it is."""
    said = str(error).removeprefix("zstd decompress error: ")
    if "checksum" in said:
        return IntegrityError(f"{where}: {said}; the file is damaged, copy it again", offset=offset)
    if "too much memory" in said:
        return LimitError(f"{where}: its window is larger than 128 MiB; decompress it with zstd --long", offset=offset)
    return FormatError(f"{where}: {said}; the file is damaged, copy it again", offset=offset)
