"""Zip files of npz and torch: their members found and checked, and read piece by piece; typed errors for any damage.

Two readers of one zip file may find different members: zipfile uses the directory in front of the end record, miniz in
torch the one at the offset in that record. A file that can be read in two ways is refused. `npz` and `torch` know what
members hold.

Source: APPNOTE.TXT 6.3.10 (PKWARE), sections 4.3 and 4.5, for the records; CPython's zipfile and miniz 3.0 for what
each of them looks at.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zcrecord.archive.payload_source import MemberSum
from zcrecord.errors import FormatError

from .readers import Reader

STORED, DEFLATED = 0, 8  # of Member.method
_END, _END_MAGIC = struct.Struct("<4s4H2IH"), b"PK\5\6"  # without its comment
_END64, _END64_MAGIC = struct.Struct("<4sQ2H2I4Q"), b"PK\6\6"
_LOCATOR, _LOCATOR_MAGIC = struct.Struct("<4sIQI"), b"PK\6\7"  # of the ZIP64 end record
_ENTRY, _ENTRY_MAGIC = struct.Struct("<4s4x2H4x3I3H4x2I"), b"PK\1\2"  # of the directory; then name, extra and comment
_LOCAL, _LOCAL_MAGIC = struct.Struct("<4s4xH16x2H"), b"PK\3\4"  # a member's own header; method, bytes of name and extra
_ZIP64, _OTHER_NAME = 0x0001, 0x7075  # extra fields: sizes of 64 bits, another name for the member
_ENCRYPTED, _UTF8 = 0x0061, 0x0800  # flags: encrypted in some way, or a patch for another file; the name is UTF-8
_FOLDER = 0x10  # of a member's external attributes: miniz extracts no bytes of a folder, and reports success
_ALIKE = "readers of zip files would differ about what is in it; save it anew"
_TAIL = _END.size + 0xFFFF  # bytes at the end in which an end record can begin: it and its comment
_WIDE = 0xFFFFFFFF  # a size or offset that stands in the ZIP64 field
_PACKED = 1 << 16  # bytes inflated at a time


@dataclass(slots=True, eq=False)
class Member:
    """A member as the directory has it; its bytes, `packed` of them, lie in the file from `start` on."""

    name: bytes
    extra: bytes
    flags: int
    method: int
    crc: int
    packed: int
    nbytes: int
    attributes: int
    offset: int  # of its own header
    start: int = 0

    @property
    def text(self) -> str:
        """The name as text, with surrogates for what is not UTF-8."""
        return self.name.decode("utf-8" if self.flags & _UTF8 else "cp437", "surrogateescape")

    @property
    def encrypted(self) -> bool:
        """True if its bytes are encrypted, or a patch of another file."""
        return bool(self.flags & _ENCRYPTED)

    def checksum(self, octets: memoryview) -> MemberSum:
        """Return the checksum of a stored member in a file that is in memory."""
        return MemberSum(octets[self.start : self.start + self.packed], self.crc, self.text)


class MemberReader:
    """Reads a member forward, and compares its checksum at its end."""

    def __init__(self, reader: Reader, member: Member) -> None:
        self._reader, self._position, self._end = reader, member.start, member.start + member.packed
        self._unread, self._crc, self._expected = member.nbytes, 0, member.crc
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS) if member.method == DEFLATED else None

    def read(self, nbytes: int) -> Any:
        """Return exactly the next `nbytes` bytes; of a stored member in memory a view, else a copy.

        Raises:
            FormatError: the member ends before, or is damaged; its checksum is compared at the last read alone.
        """
        if nbytes > self._unread:
            raise FormatError(f"ends {nbytes - self._unread} bytes early; the file is truncated or damaged")
        data = self._packed(nbytes) if self._inflater is None else self._inflated(nbytes, self._inflater)
        self._crc = zlib.crc32(data, self._crc)
        self._unread -= nbytes
        if not self._unread and self._crc != self._expected:
            raise FormatError(f"damaged (Bad CRC-32 {self._crc:#x}, expected {self._expected:#x}); copy it again")
        return data

    def _packed(self, limit: int) -> Any:
        """Return the next bytes of the member as it is stored, at most `limit`; none at its end."""
        start, self._position = self._position, min(self._position + limit, self._end)
        return _read_exactly(self._reader, start, self._position - start)

    def _inflated(self, nbytes: int, inflater: Any) -> bytes:
        """Return exactly so many next bytes of a deflated member; FormatError if it is damaged."""
        parts = []
        while nbytes:
            packed = inflater.unconsumed_tail or self._packed(_PACKED)
            try:
                parts.append(inflater.decompress(packed, nbytes))
            except zlib.error as error:
                raise FormatError(f"damaged ({error}); copy it again") from error
            nbytes -= len(parts[-1])
            if not parts[-1] and (inflater.eof or not len(packed)):
                raise FormatError(f"ends {nbytes} bytes early; the file is truncated or damaged")
        return b"".join(parts)


def zip_members(reader: Reader, wrong: str) -> tuple[list[Member], int]:
    """Return the members of a zip file, and the offset of its directory; `wrong` tells what it is if it is no zip file.

    The file must begin with the first member, and end with one directory and the end records right behind it. Members
    must not overlap, and each member's own header must agree with the directory. So every reader finds the same
    members, each with the same bytes.

    Raises:
        FormatError: it breaks one of these rules, or is no zip file.
    """
    total = reader.nbytes or 0
    tail = bytes(reader.read_at(max(total - _TAIL, 0), _TAIL))
    if not 0 <= tail.rfind(_END_MAGIC) <= len(tail) - _END.size:
        raise FormatError(f"damaged, or {wrong} (it does not end as a zip file); copy it again")
    start, end, count = _find_directory(reader, total)
    members = list(_directory_members(bytes(_read_exactly(reader, start, end - start)), start))
    if len(members) != count:
        raise FormatError(f"its directory has {len(members)} members, its end record says {count}; {_ALIKE}")
    if min((member.offset for member in members), default=start):
        raise FormatError(f"something stands in front of its first member; {_ALIKE}", offset=0)
    last_end = 0
    for member in sorted(members, key=lambda member: member.offset):
        fault = _set_start(member, reader)
        if member.offset < last_end:
            fault = "this member overlaps another"
        if fault:
            name = member.name.decode(errors="replace").removesuffix(".npy")
            raise FormatError(f"{fault}; {_ALIKE}", tensor=name, offset=member.offset)
        last_end = member.start + member.packed
    if last_end > start:
        raise FormatError(f"its last member ends at byte {last_end}, the directory starts at {start}; it is truncated")
    return members, start


def _set_start(member: Member, reader: Reader) -> str:
    """Set the start of a member's bytes from its own header; return why readers would differ about it, or ""."""
    header = bytes(_read_exactly(reader, member.offset, _LOCAL.size + len(member.name)))
    magic, method, name_size, extra_size = _LOCAL.unpack_from(header)
    member.start = member.offset + _LOCAL.size + name_size + extra_size
    kinds = [kind for kind, _ in _extra_fields(member.extra)]
    agrees = (magic, method, name_size) == (_LOCAL_MAGIC, member.method, len(member.name))
    if not agrees or not header.endswith(member.name):
        return "the directory and the member's own header contradict each other"
    if method == STORED and member.packed != member.nbytes:
        return f"stored in {member.packed} bytes, of which {member.nbytes} should come"
    if member.nbytes and (member.attributes & _FOLDER or member.name.endswith(b"/")):
        return f"a folder, and {member.nbytes} bytes in it"
    # Of a name with NUL zipfile and miniz take what comes before, this reader all.
    is_ambiguous = kinds.count(_ZIP64) > 1 or _OTHER_NAME in kinds or b"\0" in member.name
    return "two sizes or two names for this member" if is_ambiguous else ""


def _read_exactly(reader: Reader, offset: int, nbytes: int) -> Any:
    """Return exactly this range of a file; FormatError if it ends before."""
    data = reader.read_at(offset, nbytes) if offset < (reader.nbytes or 0) else b""
    if len(data) < nbytes:
        raise FormatError(f"ends {nbytes - len(data)} bytes early; the file is truncated or damaged", offset=offset)
    return data


def _find_directory(reader: Reader, total: int) -> tuple[int, int, int]:
    """Return start and end of the directory and its number of members, by the end records; FormatError for damage."""
    end = total - _END.size
    magic, disk, first_disk, entries, count, nbytes, start, comment = _END.unpack(_read_exactly(reader, end, _END.size))
    if magic != _END_MAGIC or comment:
        raise FormatError(f"a comment or other bytes behind its end record; {_ALIKE}", offset=end)
    narrow: tuple[int, ...] = (disk, first_disk, entries, count, nbytes, start)
    locator_start = end - _LOCATOR.size
    locator = _read_exactly(reader, locator_start, _LOCATOR.size) if locator_start >= 0 else b""
    if bytes(locator[:4]) == _LOCATOR_MAGIC:
        end = locator_start - _END64.size
        if end < 0 or locator != _LOCATOR.pack(_LOCATOR_MAGIC, 0, end, 1):  # disk, offset, and number of disks
            raise FormatError(f"its ZIP64 end record is not in front of its locator; {_ALIKE}", offset=locator_start)
        magic, size, _, _, *wide = _END64.unpack(_read_exactly(reader, end, _END64.size))
        if magic != _END64_MAGIC or size != _END64.size - 12:
            raise FormatError(f"its ZIP64 end record is damaged; {_ALIKE}", offset=end)
        overflows = (0xFFFF,) * 4 + (_WIDE,) * 2
        if any(small not in (large, mark) for small, large, mark in zip(narrow, wide, overflows, strict=True)):
            raise FormatError(f"its two end records contradict each other; {_ALIKE}", offset=end)
        narrow = tuple(wide)
    disk, first_disk, entries, count, nbytes, start = narrow
    if disk or first_disk or entries != count:
        raise FormatError("one part of a zip file that was split; join the parts", offset=end)
    if start + nbytes != end:
        fault = f"its directory is at [{start}, {start + nbytes}) as its end says, and should end at {end}"
        raise FormatError(f"{fault}; {_ALIKE}", offset=end)
    return start, end, count


def _directory_members(directory: bytes, start: int) -> Iterator[Member]:
    """Yield the members in a directory that lies at `start`; FormatError if it is damaged."""
    position = 0
    while position < len(directory):
        if position + _ENTRY.size > len(directory) or not directory.startswith(_ENTRY_MAGIC, position):
            raise FormatError(f"its directory is damaged; {_ALIKE}", offset=start + position)
        entry = _ENTRY.unpack_from(directory, position)
        _, flags, method, crc, packed, nbytes, name_size, extra_size, comment_size, attributes, offset = entry
        extra_start = position + _ENTRY.size + name_size
        following = extra_start + extra_size + comment_size
        name = directory[extra_start - name_size : extra_start]
        extra = directory[extra_start : extra_start + extra_size]
        sizes: tuple[int, ...] = nbytes, packed, offset
        field = next((data for kind, data in _extra_fields(extra) if kind == _ZIP64), None) if _WIDE in sizes else None
        if field is not None:
            wide = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
            sizes = tuple(next(wide, -1) if n == _WIDE else n for n in sizes)
        if following > len(directory) or min(sizes) < 0:
            raise FormatError(f"its directory is damaged; {_ALIKE}", offset=start + position)
        nbytes, packed, offset = sizes
        position = following
        yield Member(name, extra, flags, method, crc, packed, nbytes, attributes, offset)


def _extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the kinds and the bytes of a member's extra fields."""
    end = 0
    while (start := end + 4) <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, end)
        end = start + size
        yield kind, extra[start:end]
