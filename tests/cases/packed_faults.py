"""Packed archives that hold two archives, or whose seek table is wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import records as r
import zstandard
from collisions import colliding
from packed_archives import frames_of, streamed, xxh64

from zcrecord import FormatError, IntegrityError, LimitError, RecordError

SIZE = 4096
HONEST = r.saved({"a": np.zeros(128, np.uint8), "w": np.arange(SIZE // 4, dtype=np.uint32)})
AT = HONEST.index(np.arange(SIZE // 4, dtype=np.uint32).tobytes())
OTHER = HONEST[:AT] + colliding(HONEST[AT : AT + SIZE], bytes(SIZE)) + HONEST[AT + SIZE :]  # no 64 bits tell them apart
WEIGHTS = HONEST[AT : AT + SIZE]
Entry = tuple[int, int, int]  # of a seek table: packed and unpacked size, checksum
Piece = tuple[bytes, list[Entry]]  # bytes of a file, and their entries


def frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def skipped(content: bytes) -> bytes:
    return struct.pack("<II", 0x184D2A50, len(content)) + content


def entry(packed: bytes | int, content: bytes) -> Entry:
    return packed if isinstance(packed, int) else len(packed), len(content), xxh64(content)


def honest(content: bytes, **options: bool) -> Piece:
    made = frame(content, **options)
    return made, [entry(made, content)]


def file_of(*pieces: Piece, behind: bytes = b"", checksums: bool = True) -> bytes:
    """Return a file of these pieces, and the seek table of their entries."""
    rows = [row if checksums else row[:2] for _, rows in pieces for row in rows]
    body = b"".join(struct.pack(f"<{len(row)}I", *row) for row in rows)
    body += struct.pack("<IBI", len(rows), 0x80 * checksums, 0x8F92EAB1)
    return b"".join(data for data, _ in pieces) + struct.pack("<II", 0x184D2A5E, len(body)) + body + behind


def behind_an_empty_entry(told: bytes, found: bytes) -> Piece:
    hidden, shown = frame(found), frame(told)
    return hidden + skipped(shown), [entry(len(hidden) + 8, b""), entry(shown, told)]


def behind_an_entry_of_nothing_before(told: bytes, found: bytes) -> Piece:
    hidden, shown = frame(found), frame(told)
    return skipped(shown) + hidden, [entry(8, b""), entry(shown, told), entry(hidden, b"")]


def in_a_skippable_frame(told: bytes, found: bytes) -> Piece:
    hidden, shown = frame(found), frame(told)
    return skipped(shown) + hidden, [entry(8 + len(shown) + len(hidden), told)]


def of_two_frames(told: bytes, found: bytes) -> Piece:
    if not found.startswith(told[:1]):
        found = told[:1] + found[1:]
    parts = [frame(told), frame(found)]
    return b"".join(parts), [entry(b"".join(parts), told)]


def through_a_skippable_frame_of_two(told: bytes, found: bytes) -> Piece:
    """The header of a skippable frame is the end of one entry."""
    first, shown, last = frame(b""), frame(told), frame(found)
    return first + skipped(shown) + last, [entry(len(first) + 8, b""), entry(shown, told), entry(last, b"")]


def under_a_wrong_size(told: bytes, found: bytes) -> Piece:
    made = frame(found, write_content_size=False)
    return made, [entry(made, told[: len(found) // 2]), entry(0, told[len(found) // 2 :])]


def in_a_last_block_that_is_cut(told: bytes, found: bytes) -> Piece:
    """A raw block holds a frame; the entry ends inside the block, where the frame does."""
    shown = frame(told)
    head = b"\x28\xb5\x2f\xfd\x00\x58" + (len(shown) << 3 | 1).to_bytes(3, "little")
    return head + shown + frame(found), [entry(len(head), b""), entry(shown, told), entry(frame(found), b"")]


WAYS: list[Callable[[bytes, bytes], Piece]] = [
    behind_an_empty_entry,
    behind_an_entry_of_nothing_before,
    in_a_skippable_frame,
    of_two_frames,
    through_a_skippable_frame_of_two,
    under_a_wrong_size,
    in_a_last_block_that_is_cut,
]


def forged(way: Callable[[bytes, bytes], Piece], checksums: bool = True) -> bytes:
    """Return a file whose table leads to the honest archive, and whose frames make another."""
    ends = honest(HONEST[:AT]), honest(HONEST[AT + SIZE :])
    middle = way(WEIGHTS, OTHER[AT : AT + SIZE])
    return file_of(ends[0], middle, ends[1], checksums=checksums)


TREE = {"w": np.arange(60, dtype=np.float32).reshape(3, 20), "deep": [{"v": np.ones(3), "n": 5, "b": b"blob" * 20}]}
SMALL = r.saved(TREE)
TABLED = streamed(SMALL)
FOUND = frames_of(TABLED)
END = FOUND[-1].offset + FOUND[-1].nbytes  # where the table starts


def resealed(rows: list[tuple[int, int, int]], descriptor: int = 0x80, count: int | None = None) -> bytes:
    body = b"".join(struct.pack("<III", *row) for row in rows)
    body += struct.pack("<IBI", len(rows) if count is None else count, descriptor, 0x8F92EAB1)
    return TABLED[:END] + struct.pack("<II", 0x184D2A5E, len(body)) + body


def padded() -> bytes:
    """A frame of blocks that hold nothing before the others."""
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + bytes(69_999) + b"\1\0\0"
    return frame + resealed([(len(frame), 0, 0), *ROWS])


ROWS = [(f.nbytes, f.size, f.checksum) for f in FOUND]
BIG = 0xFFFFFFFF
WRONG: dict[str, tuple[bytes, type[RecordError], str]] = {
    "reserved bits": (resealed(ROWS, 0x84), FormatError, "descriptor 0x84 has reserved bits that are not zero"),
    "too many frames": (resealed(ROWS, count=BIG), FormatError, r"4294967295 frames would take a table of \d+ bytes"),
    "a frame more": (resealed(ROWS, count=len(ROWS) + 1), FormatError, "frames it would start at"),
    "a frame less": (resealed(ROWS, count=len(ROWS) - 1), FormatError, "frames it would start at"),
    "no checksums": (resealed(ROWS, 0), FormatError, "frames it would start at"),
    "a line more": (resealed([*ROWS, (1, 1, 1)]), FormatError, r"its frames take \d+ bytes, expected the \d+ before"),
    "no lines": (resealed([]), FormatError, r"its frames take 0 bytes, expected the \d+ before it"),
    "a frame past the end": (resealed([*ROWS[:-1], (BIG, 64, 0)]), FormatError, "its frames take"),
    "a frame shorter": (resealed([(ROWS[0][0] - 1, *ROWS[0][1:]), (ROWS[1][0] + 1, *ROWS[1][1:]), *ROWS[2:]]),
                        FormatError, "frame .0x0, "),
    "more out of a frame": (resealed([(ROWS[0][0], ROWS[0][1] + 1, 0), *ROWS[1:]]), FormatError,
                            r"holds \d+ bytes, the seek table says|trailer"),
    "less out of a frame": (resealed([(ROWS[0][0], ROWS[0][1] - 1, 0), *ROWS[1:]]), FormatError,
                            r"holds \d+ bytes, the seek table says|trailer"),
    "a frame of padding": (padded(), FormatError,
                           r"frame 0 takes 70008 bytes for 0 of content, expected at most twice as many"),
    "another checksum": (resealed([(*ROWS[0][:2], ROWS[0][2] ^ 1), *ROWS[1:]]), IntegrityError,
                         r"frame \[0x0, 0x[0-9a-f]+\): its checksum is not that of the seek table"),
    "terabytes": (resealed([(ROWS[0][0], BIG, 0), *[(0, BIG, 0)] * 5000, *ROWS[1:]]), LimitError,
                  "packed bytes would take .* bytes of memory; unpack it into a file|holds"),
}  # fmt: skip
