"""Zip files of npz and torch: one typed error for any damage, members read piece by piece.

Two readers of one zip file may find different members: zipfile uses the directory in front of the end record, miniz in
torch the one at the offset in that record. `check_alike` refuses a file that can be read in two ways. `npz` and `torch`
read the content of members.

Source: APPNOTE.TXT 6.3.10 (PKWARE), sections 4.3 and 4.5, for the records; CPython's zipfile and miniz 3.0 for what
each of them looks at.
"""

from __future__ import annotations

import contextlib
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

from zcrecord.codec.entries import encodable
from zcrecord.errors import FormatError, RecordError, SourceError, UnsupportedError, printable

_END, _END_MAGIC = struct.Struct("<4s4H2IH"), b"PK\5\6"  # without its comment
_END64, _END64_MAGIC = struct.Struct("<4sQ2H2I4Q"), b"PK\6\6"
_LOCATOR, _LOCATOR_MAGIC = struct.Struct("<4sIQI"), b"PK\6\7"  # of the ZIP64 end record
_ENTRY, _ENTRY_MAGIC = struct.Struct("<4s4x2H4x3I3H4x2I"), b"PK\1\2"  # of the directory; then name, extra and comment
_LOCAL, _LOCAL_MAGIC = struct.Struct("<4s4xH16x2H"), b"PK\3\4"  # a member's own header; method, bytes of name and extra
_ZIP64, _OTHER_NAME = 0x0001, 0x7075  # extra fields: sizes of 64 bits, another name for the member
_FOLDER = 0x10  # of a member's external attributes: miniz extracts no bytes of a folder, and reports success
_ALIKE = "readers of zip files would differ about what is in it; save it anew"
_TAIL = _END.size + 0xFFFF  # bytes at the end in which an end record can begin: it and its comment
_WIDE = 0xFFFFFFFF  # a size or offset that stands in the ZIP64 field


@contextlib.contextmanager
def zip_faults() -> Iterator[None]:
    """Turn the exceptions of zipfile and zlib for a damaged .npz file into one typed error."""
    try:
        yield
    except (RecordError, MemoryError, GeneratorExit):
        raise
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror or error}", errno=error.errno) from error
    except Exception as error:  # BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError: not documented
        what = printable(str(error) or type(error).__name__)
        raise FormatError(f"damaged, or not a .npz file ({what}); copy it again") from error


def check_alike(opened: zipfile.ZipFile, file: Any, total: int) -> None:
    """Refuse a zip file of `total` bytes unless every reader finds the same members, each with the same bytes.

    The file must begin with the first member, and end with one directory and the end records right behind it. Members
    must not overlap, and each member's own header must agree with the directory. Else it is a FormatError.
    """
    start, end, count = _directory(file, total)
    names, extras, _ = _entries(_read(file, start, end - start), start)
    rows: list[tuple[int, ...]] = [
        (i.flag_bits, i.compress_type, i.CRC, i.compress_size, i.file_size, i.external_attr, i.header_offset)
        for i in opened.infolist()
    ]
    _check_members(names, extras, rows, start, count, file)


def stored_members(octets: memoryview, wrong: str) -> tuple[dict[bytes, tuple[int, int, int]], int]:
    """Return offset, size and CRC of each member of a zip file in memory, and the offset of its directory.

    Names are in lower case, as torch compares them. `wrong` names the expected format in the error for another file.

    Raises:
        FormatError: as `check_alike`; or two members have one name. UnsupportedError: one is compressed or encrypted.
    """
    tail = bytes(octets[-_TAIL:])
    if not 0 <= tail.rfind(_END_MAGIC) <= len(tail) - _END.size:
        raise FormatError(f"damaged, or {wrong} (it does not end as a zip file); copy it again")
    start, end, count = _directory(octets, len(octets))
    names, extras, rows = _entries(_read(octets, start, end - start), start)
    for name, (flags, method, *_) in zip(names, rows, strict=True):
        if method or flags & 1:
            done = "compressed" if method else "encrypted"
            what = f"{wrong}, or one that was packed again: '{printable(name.decode(errors='replace'))}' is {done}"
            raise UnsupportedError(f"{what}; unpack it and pack it without compression, or save it anew")
    ends = _check_members(names, extras, rows, start, count, octets)
    out = {name.lower(): (end - row[4], row[4], row[2]) for name, row, end in zip(names, rows, ends, strict=True)}
    if len(out) < count:
        raise FormatError(f"two of its members have one name, or differ by case alone; {_ALIKE}")
    return out, start


def _check_members(
    names: list[bytes], extras: list[bytes], rows: list[tuple[int, ...]], start: int, count: int, file: Any
) -> list[int]:
    """Return the end of each member, after checking them against one another and the directory at `start`."""
    if not len(names) == len(rows) == count:
        raise FormatError(f"its directory has {len(names)} members, {count} is what its end says; {_ALIKE}")
    if min((row[6] for row in rows), default=start):
        raise FormatError(f"something stands in front of its first member; {_ALIKE}", offset=0)
    passed, ends = 0, [0] * count
    for i in sorted(range(count), key=lambda i: rows[i][6]):
        overlaps = rows[i][6] < passed
        fault, passed = _check_member(names[i], extras[i], rows[i], file)
        if overlaps or fault:
            fault, name = "this member overlaps another" if overlaps else fault, names[i].decode(errors="replace")
            raise FormatError(f"{fault}; {_ALIKE}", tensor=name.removesuffix(".npy"), offset=rows[i][6])
        ends[i] = passed
    if passed > start:
        raise FormatError(f"its last member ends at byte {passed}, the directory starts at {start}; it is truncated")
    return ends


def _check_member(name: bytes, extra: bytes, row: tuple[int, ...], file: Any) -> tuple[str, int]:
    """Return in what a member's own header contradicts the directory, "" for nothing; and the member's end."""
    _, method, _, packed, size, attributes, offset = row
    header, fault = _read(file, offset, _LOCAL.size + len(name)), ""
    magic, own_method, name_size, extra_size = _LOCAL.unpack_from(header)
    kinds = [kind for kind, _ in _fields(extra)] if extra else ()
    if magic != _LOCAL_MAGIC or own_method != method or name_size != len(name) or not header.endswith(name):
        fault = "the directory and the member's own header contradict each other"
    elif method == zipfile.ZIP_STORED and packed != size:
        fault = f"stored in {packed} bytes, of which {size} should come"
    elif size and (attributes & _FOLDER or name.endswith(b"/")):
        fault = f"a folder, and {size} bytes in it"
    elif kinds.count(_ZIP64) > 1 or _OTHER_NAME in kinds:
        fault = "two sizes or two names for this member"
    return fault, offset + _LOCAL.size + name_size + extra_size + packed


def _read(file: Any, offset: int, nbytes: int) -> bytes:
    if isinstance(file, memoryview):
        data = bytes(file[offset : offset + nbytes])
    else:
        with zip_faults():
            file.seek(offset)
            data = bytes(file.read(nbytes))
    if len(data) < nbytes:
        raise FormatError(f"ends {nbytes - len(data)} bytes early; the file is truncated or damaged", offset=offset)
    return data


def _directory(file: Any, total: int) -> tuple[int, int, int]:
    """Return start and end of the directory and its number of members, from the end records."""
    end = total - _END.size
    magic, disk, first_disk, entries, count, nbytes, start, comment = _END.unpack(_read(file, end, _END.size))
    if magic != _END_MAGIC or comment:
        raise FormatError(f"a comment or other bytes behind its end record; {_ALIKE}", offset=end)
    narrow: tuple[int, ...] = (disk, first_disk, entries, count, nbytes, start)
    before = end - _LOCATOR.size
    if before >= 0 and (locator := _LOCATOR.unpack(_read(file, before, _LOCATOR.size)))[0] == _LOCATOR_MAGIC:
        end = before - _END64.size
        if end < 0 or locator[1:] != (0, end, 1):
            raise FormatError(f"its ZIP64 end record is not in front of its locator; {_ALIKE}", offset=before)
        magic, size, _, _, *wide = _END64.unpack(_read(file, end, _END64.size))
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


def _entries(directory: bytes, start: int) -> tuple[list[bytes], list[bytes], list[tuple[int, ...]]]:
    """Return names, extra fields and rows of the members in a directory that lies at `start`."""
    names, extras, rows, position = list[bytes](), list[bytes](), list[tuple[int, ...]](), 0
    while position < len(directory):
        if position + _ENTRY.size > len(directory) or not directory.startswith(_ENTRY_MAGIC, position):
            raise FormatError(f"its directory is damaged; {_ALIKE}", offset=start + position)
        entry = _ENTRY.unpack_from(directory, position)
        _, flags, method, crc, packed, size, name, extra, comment, attributes, offset = entry
        name_end = position + _ENTRY.size + name
        names.append(directory[name_end - name : name_end])
        extras.append(directory[name_end : name_end + extra])
        if _WIDE in (packed, size, offset):
            packed, size, offset = _wide_sizes(packed, size, offset, extras[-1])
        rows.append((flags, method, crc, packed, size, attributes, offset))
        position = name_end + extra + comment
    if position > len(directory):
        raise FormatError(f"its directory is damaged; {_ALIKE}", offset=start + position)
    return names, extras, rows


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


def members(
    opened: zipfile.ZipFile, file: Any, total: int, suffix: str, besides: str, most: int
) -> tuple[dict[str, zipfile.ZipInfo], str | None]:
    """Return members by name without `suffix`, in order, and the text of that named `besides`, of at most `most` bytes.

    Raises:
        FormatError: a name is empty, two members have one name, or `check_alike` refuses the file. UnsupportedError: a
        member is encrypted, or neither stored nor deflated.
    """
    out: dict[str, zipfile.ZipInfo] = {}
    apart: zipfile.ZipInfo | None = None
    for info in opened.infolist():
        name = info.orig_filename.removesuffix(suffix)  # zipfile may change `filename` for the system
        if info.flag_bits & 1:
            raise UnsupportedError("this member is encrypted", tensor=name)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UnsupportedError(f"compression {info.compress_type}; numpy stores or deflates", tensor=name)
        if not name or not encodable(name):
            raise FormatError("a member without a name that text can hold")
        if info.orig_filename == besides and apart is None:
            apart = info
        elif name in out:
            raise FormatError("this name is there twice", tensor=name)
        else:
            out[name] = info
    check_alike(opened, file, total)
    return out, None if apart is None else _text(opened, apart, most)


def _text(opened: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> str:
    if info.file_size > most:
        raise FormatError(f"{info.filename} has {info.file_size} bytes, at most {most} are legal; it is not zcrecord's")
    if info.compress_type != zipfile.ZIP_STORED:
        raise FormatError(f"{info.filename} is compressed; it is not zcrecord's")
    with zip_faults():
        return opened.read(info).decode()


def read_exactly(member: Any, size: int) -> bytes:
    """Return exactly `size` next bytes of a member; a FormatError if it ends before, or is damaged."""
    with zip_faults():
        data = member.read(size)
    if len(data) < size:
        raise FormatError(f"ends {size - len(data)} bytes early; the file is truncated or damaged")
    return bytes(data)


def read_end(member: Any) -> None:
    """Read the end of a member, so that zipfile reads its checksum."""
    with zip_faults():
        member.read(1)


def data_offset(file: Any, info: zipfile.ZipInfo) -> int:
    """Return the offset in the file of a member's bytes, by its own header, which `check_alike` has checked."""
    _, _, name, extra = _LOCAL.unpack(_read(file, info.header_offset, _LOCAL.size))
    return int(info.header_offset + _LOCAL.size + name + extra)
