"""Zip files that can be read in two ways: what is done to a sound one, and what is then said of it."""

from __future__ import annotations

import struct
from collections.abc import Callable

END, END64, LOCATOR, ENTRY, LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"


def directory(data: bytes) -> tuple[int, int, int]:
    """Return start and end of the directory of a sound zip file, and the offset of its end record."""
    end = data.rindex(END)
    nbytes, start = struct.unpack_from("<2I", data, end + 12)
    return start, start + nbytes, end


def put(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def entries(data: bytes) -> list[int]:
    at, stop, _ = directory(data)
    found = []
    while at < stop:
        found.append(at)
        at += 46 + sum(struct.unpack_from("<3H", data, at + 28))
    return found


def two_directories(data: bytes) -> bytes:
    """Add a directory in front of the end records, whose members are all stored; the end states the old one."""
    start, stop, _ = directory(data)
    second = data
    for at in entries(data):
        second = put(second, at + 10, bytes(2))
    return data[:stop] + second[start:stop] + data[stop:]


def in_front(data: bytes) -> bytes:
    return b"junk" + bytes(60) + data


def moved(data: bytes) -> bytes:
    """Put bytes in front, and say so in every offset."""
    for at in entries(data):
        data = put(data, at + 42, struct.pack("<I", struct.unpack_from("<I", data, at + 42)[0] + 64))
    start, _, end = directory(data)
    data = put(data, end + 16, struct.pack("<I", start + 64))
    if (wide := data.find(END64, start)) >= 0:
        data = put(data, wide + 48, struct.pack("<Q", start + 64))
        data = put(data, data.index(LOCATOR, wide) + 8, struct.pack("<Q", wide + 64))
    return bytes(64) + data


def with_comment(data: bytes) -> bytes:
    return put(data, len(data) - 2, b"\4\0") + b"note"


def with_end_in_comment(data: bytes) -> bytes:
    """A comment that is an end record of its own: no members, for who looks for the last one."""
    return put(data, len(data) - 2, b"\x16\0") + END + bytes(18)


def with_hole(data: bytes) -> bytes:
    """Leave room between the directory and the end records."""
    _, stop, _ = directory(data)
    data = data[:stop] + bytes(8) + data[stop:]
    if (wide := data.find(END64, stop)) >= 0:
        data = put(data, data.index(LOCATOR, wide) + 8, struct.pack("<Q", wide))
    return data


def with_locator(data: bytes) -> bytes:
    """Have a ZIP64 locator lead to an end record of its own, in front of the directory."""
    start, stop, end = directory(data)
    count, nbytes = len(entries(data)), stop - start
    other = END64 + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, count, count, nbytes, start + 56)
    made = data[:start] + other + data[start:stop] + other + LOCATOR + struct.pack("<IQI", 0, start, 1) + data[end:]
    return put(made, len(made) - 6, struct.pack("<I", start + 56))


def with_wide_end(data: bytes) -> bytes:
    """A ZIP64 end record in its place that has another directory than the end record says: an empty one."""
    _, stop, end = directory(data)
    wide = END64 + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, 0, 0, 0, stop)
    return data[:stop] + wide + LOCATOR + struct.pack("<IQI", 0, stop, 1) + data[end:]


def with_extra(data: bytes, extra: bytes) -> bytes:
    """Add an extra field to the last entry of the directory."""
    at = entries(data)[-1]
    start, stop, end = directory(data)
    sizes = struct.unpack_from("<2H", data, at + 28)
    data = put(data, at + 30, struct.pack("<H", sizes[1] + len(extra)))
    put_in = at + 46 + sum(sizes)
    data = put(data, end + 12, struct.pack("<I", stop - start + len(extra)))
    if (wide := data.find(END64, stop)) >= 0:
        data = put(data, wide + 40, struct.pack("<Q", stop - start + len(extra)))
        data = put(data, data.index(LOCATOR, wide) + 8, struct.pack("<Q", wide + len(extra)))
    return data[:put_in] + extra + data[put_in:]


def with_count(data: bytes) -> bytes:
    _, _, end = directory(data)
    count = struct.pack("<H", len(entries(data)) - 1)
    data = put(data, end + 8, count * 2)
    if (wide := data.find(END64)) >= 0:
        data = put(data, wide + 24, (count + bytes(6)) * 2)
    return data


def member(data: bytes) -> int:
    return int(struct.unpack_from("<I", data, entries(data)[0] + 42)[0])


# What is done, and what a reader has to say.
TRICKS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "two directories": (two_directories, r"its directory is at .* should end at|in front of its locator"),
    "bytes in front": (in_front, r"its directory is at .* should end at|in front of its locator|no torch checkpoint"),
    "bytes in front, in every offset": (moved, "something stands in front of its first member|no torch checkpoint"),
    "bytes behind": (lambda data: data + b"\0", "a comment or other bytes behind its end record|damaged, or"),
    "a comment": (with_comment, "a comment or other bytes behind its end record"),
    "an end record in a comment": (with_end_in_comment, "a comment or other bytes|its directory has|should end at"),
    "a hole behind the directory": (with_hole, "should end at|damaged, or"),
    "a ZIP64 end record elsewhere": (with_locator, "its ZIP64 end record is not in front of its locator|damaged, or"),
    "another directory in ZIP64's end record": (with_wide_end, "its two end records contradict each other|damaged, or"),
    "fewer members than there are": (with_count, "members, its end record says"),
    "a member with another name": (
        lambda data: put(data, member(data) + 30, b"#"), "the directory and the member's own header contradict",
    ),
    "a member that its own header has compressed otherwise": (
        lambda data: put(data, member(data) + 8, bytes([data[member(data) + 8] ^ 8])),
        "the directory and the member's own header contradict",
    ),
    "a stored member of another size": (
        lambda data: put(data, entries(data)[-1] + 24, b"\xff\xff\0\0"),
        "bytes, of which 65535 should come|takes .* bytes",
    ),
    "a folder with bytes in it": (
        lambda data: put(data, entries(data)[0] + 38, b"\x10"), r"a folder, and \d+ bytes in it",
    ),
    "two sizes of 64 bits": (
        lambda data: with_extra(data, struct.pack("<2HQ2HQ", 1, 8, 2, 1, 8, 2)), "two sizes or two names",
    ),
    "another name beside": (
        lambda data: with_extra(data, struct.pack("<2HBI", 0x7075, 9, 1, 0) + b"evil"), "two sizes or two names",
    ),
    "a name that NUL ends before its length": (
        lambda data: put(put(data, member(data) + 32, b"\0"), entries(data)[0] + 48, b"\0"), "two sizes or two names",
    ),
}  # fmt: skip
