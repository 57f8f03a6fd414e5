"""Zip files of npz and torch: their members, and a member's bytes piece by piece.

Two readers of one zip file may find different members: zipfile uses the directory in front of the end record, miniz in
torch the one at the offset in that record. So a file is refused unless every reader finds the same members, each with
the same bytes. `npz` and `torch` read the content of members.

Source: APPNOTE.TXT 6.3.10 (PKWARE), sections 4.3 and 4.5, for the records; CPython's zipfile and miniz 3.0 for what
each of them looks at.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zcrecord.errors import FormatError, UnsupportedError, printable
from zcrecord.storage.stream_reader import PIECE

_END, _END_MAGIC = struct.Struct("<4s4H2IH"), b"PK\5\6"  # without its comment
_END64, _END64_MAGIC = struct.Struct("<4sQ2H2I4Q"), b"PK\6\6"
_LOCATOR, _LOCATOR_MAGIC = struct.Struct("<4sIQI"), b"PK\6\7"  # of the ZIP64 end record
_ENTRY, _ENTRY_MAGIC = struct.Struct("<4s24x3H12x"), b"PK\1\2"  # of the directory; bytes of name, extra and comment
_FIELDS = np.dtype({  # of an entry, by their offsets in it
    "names": ["flags", "method", "crc", "packed", "size", "attributes", "offset"],
    "formats": ["<u2", "<u2", "<u4", "<u4", "<u4", "<u4", "<u4"],
    "offsets": [8, 10, 16, 20, 24, 38, 42], "itemsize": _ENTRY.size,
})  # fmt: skip
_LOCAL, _LOCAL_MAGIC = struct.Struct("<4s4xH16x2H"), b"PK\3\4"  # a member's own header; method, bytes of name and extra
_ZIP64, _OTHER_NAME = 0x0001, 0x7075  # extra fields: sizes of 64 bits, another name for the member
_FOLDER = 0x10  # of a member's external attributes: miniz extracts no bytes of a folder, and reports success
_ALIKE = "readers of zip files would differ about what is in it; save it anew"
_TAIL = _END.size + 0xFFFF  # bytes at the end in which an end record can begin: it and its comment
_WIDE = 0xFFFFFFFF  # a size or offset that stands in the ZIP64 field
_MOST = 1 << 62  # larger offsets and sizes count as this, which is behind the end of any file


class ZipDirectory(NamedTuple):
    """The directory of a zip file, by columns: where it starts, and what it has of each member."""

    start: int
    names: list[bytes]
    extras: dict[int, bytes]  # extra fields of those members that have some, by number
    columns: dict[str, Any]  # of _FIELDS


class ZipMember(NamedTuple):
    """A member of a zip file: where its bytes lie, how many it has there and unpacked, and their CRC."""

    name: str
    offset: int
    packed: int
    size: int
    crc: int
    method: int  # 0 for stored, 8 for deflated


class MemberReader:
    """Reads a member from its first byte on, unpacked, and compares its CRC when the last byte is read."""

    def __init__(self, file: Any, member: ZipMember) -> None:
        """Read from a file reader, or from the file's bytes in memory, which threads may share."""
        self._file, self._member = file, member
        self._packed = self._done = self._crc = 0  # bytes passed in the file, and unpacked; the CRC of these
        self._inflater = zlib.decompressobj(-15) if member.method else None

    def read(self, nbytes: int) -> bytes:
        """Return exactly so many next bytes.

        Raises:
            FormatError: the member ends before, or is damaged.
        """
        parts: list[bytes] = []
        missing = nbytes
        while missing and (part := self._some(min(missing, self._member.size - self._done))):
            parts.append(part)
            missing -= len(part)
            self._done += len(part)
            self._crc = zlib.crc32(part, self._crc)
        if missing:
            raise FormatError(f"ends {missing} bytes early; the file is truncated or damaged")
        if self._done == self._member.size and self._crc != self._member.crc:
            raise _damaged(f"Bad CRC-32 for file '{printable(self._member.name)}'")
        return b"".join(parts)

    def _some(self, most: int) -> bytes:
        """Return some of the next bytes; none at the end."""
        if self._inflater is None or not most:
            return self._from_file(most)
        part = b""
        while not part and not self._inflater.eof:
            packed = self._inflater.unconsumed_tail or self._from_file(PIECE)
            try:
                part = self._inflater.decompress(packed, most)
            except zlib.error as error:
                raise _damaged(str(error)) from error
            if not packed:
                break
        return part

    def _from_file(self, most: int) -> bytes:
        """Return the next bytes of the member as they lie in the file."""
        nbytes = min(most, PIECE, self._member.packed - self._packed)
        data = read_range(self._file, self._member.offset + self._packed, nbytes)
        self._packed += nbytes
        return data


def _damaged(what: str) -> FormatError:
    return FormatError(f"damaged, or not a .npz file ({what}); copy it again")


def read_directory(file: Any, total: int, no_zip: str) -> ZipDirectory:
    """Return the directory of a zip file of `total` bytes; `file` is a reader, or its bytes in memory.

    Raises:
        FormatError: it is damaged, or not at the file's end; or, with the text `no_zip`, this is no zip file.
    """
    tail = read_range(file, max(total - _TAIL, 0), min(total, _TAIL))
    if not 0 <= tail.rfind(_END_MAGIC) <= len(tail) - _END.size:
        raise FormatError(no_zip)
    start, end, count = _directory(file, total)
    directory = _entries(read_range(file, start, end - start), start)
    if len(directory.names) != count:
        raise FormatError(f"its directory has {len(directory.names)} members, {count} is what its end says; {_ALIKE}")
    return directory


def stored_members(octets: memoryview, wrong: str) -> tuple[dict[bytes, tuple[int, int, int]], int]:
    """Return offset, size and CRC of each member of a zip file in memory, and the offset of its directory.

    Names are in lower case, as torch compares them. `wrong` names the expected format in the error for another file.

    Raises:
        FormatError: as `check_members`; or two members have one name. UnsupportedError: a member is compressed, or
        encrypted.
    """
    no_zip = f"damaged, or {wrong} (it does not end as a zip file); copy it again"
    directory = read_directory(octets, len(octets), no_zip)
    _, names, _, columns = directory
    for done, packed in (("compressed", columns["method"] > 0), ("encrypted", columns["flags"] & 1)):
        if packed.any():
            name = printable(names[packed.argmax()].decode(errors="replace"))
            what = f"{wrong}, or one that was packed again: '{name}' is {done}"
            raise UnsupportedError(f"{what}; unpack it and pack it without compression, or save it anew")
    starts = check_members(directory, octets)
    places = zip(starts.tolist(), columns["size"].tolist(), columns["crc"].tolist(), strict=True)
    out = dict(zip(map(bytes.lower, names), places, strict=True))
    if len(out) < len(names):
        raise FormatError(f"two of its members have one name, or differ by case alone; {_ALIKE}")
    return out, directory.start


def check_members(directory: ZipDirectory, file: Any) -> Any:
    """Return the offset of each member's bytes, after a check of members against one another and the directory.

    The first member must stand at the file's start, and the last one must end where the directory starts. Members must
    not overlap, and each member's own header must agree with the directory.

    Raises:
        FormatError: the file can be read in two ways, or is damaged.
    """
    start, names, _, columns = directory
    offset = columns["offset"]
    if min(offset.tolist(), default=start):
        raise FormatError(f"something stands in front of its first member; {_ALIKE}", offset=0)
    ends, faults = _compare_headers(directory, file)
    order = np.argsort(offset, kind="stable")
    overlaps = np.zeros(len(names), bool)
    overlaps[order[1:]] = offset[order[1:]] < ends[order[:-1]]
    faults = {"this member overlaps another": overlaps, **faults}
    faulty = np.any(list(faults.values()), axis=0)[order]
    if faulty.any():
        i = int(order[faulty.argmax()])
        fault = next(text for text, mask in faults.items() if mask[i])
        fault = fault.format(columns["packed"][i], columns["size"][i])
        name = names[i].decode(errors="replace").removesuffix(".npy")
        raise FormatError(f"{fault}; {_ALIKE}", tensor=name, offset=int(offset[i]))
    if (end := ends.max(initial=0)) > start:
        raise FormatError(f"its last member ends at byte {end}, the directory starts at {start}; it is truncated")
    return ends - columns["packed"]


def _compare_headers(directory: ZipDirectory, file: Any) -> tuple[Any, dict[str, Any]]:
    """Return the end of each member by its own header, and which members have which fault."""
    _, names, extras, columns = directory
    headers = [
        read_range(file, at, _LOCAL.size + len(n)) for at, n in zip(columns["offset"].tolist(), names, strict=True)
    ]
    own = [_LOCAL.unpack_from(header) for header in headers]
    alike = [
        row[:3] == (_LOCAL_MAGIC, method, len(name)) and header.endswith(name)
        for row, header, method, name in zip(own, headers, columns["method"].tolist(), names, strict=True)
    ]
    folder = (columns["attributes"] & _FOLDER > 0) | np.array([name.endswith(b"/") for name in names], bool)
    fields = {i: [kind for kind, _ in _fields(extra)] for i, extra in extras.items()}
    twice = [i for i, kinds in fields.items() if kinds.count(_ZIP64) > 1 or _OTHER_NAME in kinds]
    stored, packed, size = columns["method"] == 0, columns["packed"], columns["size"]
    ends = columns["offset"] + packed + np.array([_LOCAL.size + row[2] + row[3] for row in own], np.int64)
    return ends, {
        "the directory and the member's own header contradict each other": ~np.array(alike, bool),
        "stored in {} bytes, of which {} should come": stored & (packed != size),
        "a folder, and {1} bytes in it": folder & (size > 0),
        "two sizes or two names for this member": np.isin(np.arange(len(names)), twice),
    }


def read_range(file: Any, offset: int, nbytes: int) -> bytes:
    if isinstance(file, memoryview):
        data = bytes(file[offset : offset + nbytes])
    else:
        file.seek(offset)
        data = file.read(nbytes)
    if len(data) < nbytes:
        raise FormatError(f"ends {nbytes - len(data)} bytes early; the file is truncated or damaged", offset=offset)
    return data


def _directory(file: Any, total: int) -> tuple[int, int, int]:
    """Return start and end of the directory and its number of members, from the end records.

    Raises:
        FormatError: the records are not the last bytes, or contradict each other or the directory's end.
    """
    end = total - _END.size
    magic, disk, first_disk, entries, count, nbytes, start, comment = _END.unpack(read_range(file, end, _END.size))
    if magic != _END_MAGIC or comment:
        raise FormatError(f"a comment or other bytes behind its end record; {_ALIKE}", offset=end)
    narrow: tuple[int, ...] = (disk, first_disk, entries, count, nbytes, start)
    before = end - _LOCATOR.size
    if before >= 0 and (locator := _LOCATOR.unpack(read_range(file, before, _LOCATOR.size)))[0] == _LOCATOR_MAGIC:
        end = before - _END64.size
        if end < 0 or locator[1:] != (0, end, 1):
            raise FormatError(f"its ZIP64 end record is not in front of its locator; {_ALIKE}", offset=before)
        magic, size, _, _, *wide = _END64.unpack(read_range(file, end, _END64.size))
        if magic != _END64_MAGIC or size != _END64.size - 12:
            raise FormatError(f"its ZIP64 end record is damaged; {_ALIKE}", offset=end)
        full = (0xFFFF,) * 4 + (0xFFFFFFFF,) * 2
        if any(small not in (large, most) for small, large, most in zip(narrow, wide, full, strict=True)):
            raise FormatError(f"its two end records contradict each other; {_ALIKE}", offset=end)
        narrow = tuple(wide)
    disk, first_disk, entries, count, nbytes, start = narrow
    if disk or first_disk or entries != count:
        raise FormatError("one part of a zip file that was split; join the parts", offset=end)
    if start + nbytes != end:
        what = f"its directory is at [{start}, {start + nbytes}) as its end says, and should end at {end}"
        raise FormatError(f"{what}; {_ALIKE}", offset=end)
    return start, end, count


def _entries(directory: bytes, start: int) -> ZipDirectory:
    """Decode a directory that lies at `start`."""
    places, position, names, extras = list[int](), 0, list[bytes](), dict[int, bytes]()
    while position < len(directory):
        if position + _ENTRY.size > len(directory) or not directory.startswith(_ENTRY_MAGIC, position):
            raise FormatError(f"its directory is damaged; {_ALIKE}", offset=start + position)
        places.append(position)
        _, name, extra, comment = _ENTRY.unpack_from(directory, position)
        end = position + _ENTRY.size + name
        names.append(directory[end - name : end])
        if extra:
            extras[len(names) - 1] = directory[end : end + extra]
        position = end + extra + comment
    if position > len(directory):
        raise FormatError(f"its directory is damaged; {_ALIKE}", offset=start + position)
    octets = b"".join([directory[at : at + _ENTRY.size] for at in places])
    columns = {name: np.frombuffer(octets, _FIELDS)[name].astype(np.int64) for name in _FIELDS.names or ()}
    sizes = [columns[name] for name in ("packed", "size", "offset")]
    for i in np.flatnonzero(np.any([column == _WIDE for column in sizes], axis=0)).tolist():
        packed, size, offset = (int(column[i]) for column in sizes)
        for column, n in zip(sizes, _wide_sizes(packed, size, offset, extras.get(i, b"")), strict=True):
            column[i] = min(n, _MOST)
    return ZipDirectory(start, names, extras, columns)


def _wide_sizes(packed: int, unpacked: int, offset: int, extra: bytes) -> tuple[int, int, int]:
    """Return sizes and offset of a member, those that are 0xFFFFFFFF from its ZIP64 field if it has one."""
    field = next((data for kind, data in _fields(extra) if kind == _ZIP64), b"")
    wide = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) & -8]))
    unpacked, packed, offset = (next(wide, n) if n == _WIDE else n for n in (unpacked, packed, offset))
    return packed, unpacked, offset


def _fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the kinds and the bytes of a member's extra fields."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        yield kind, extra[at + 4 : at + 4 + size]
        at += 4 + size
