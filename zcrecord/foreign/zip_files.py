"""Zip files of npz and torch: one typed error for any damage, members read piece by piece.

Two readers of one zip file may find different members: zipfile uses the directory in front of the end record, miniz in
torch the one at the offset in that record. `check_alike` refuses a file that can be read in two ways. `npz` and `torch`
read the content of members.

Source: APPNOTE.TXT 6.3.10 (PKWARE), sections 4.3 and 4.5, for the records; CPython's zipfile and miniz 3.0 for what
each of them looks at.
"""

from __future__ import annotations

import collections
import contextlib
import struct
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

from zcrecord.codec.entries import encodable
from zcrecord.errors import FormatError, RecordError, SourceError, UnsupportedError, printable

_END, _END_MAGIC = struct.Struct("<4s4H2IH"), b"PK\5\6"  # without its comment
_END64, _END64_MAGIC = struct.Struct("<4sQ2H2I4Q"), b"PK\6\6"
_LOCATOR, _LOCATOR_MAGIC = struct.Struct("<4sIQI"), b"PK\6\7"  # of the ZIP64 end record
_ENTRY, _ENTRY_MAGIC = struct.Struct("<4s6H3I5H2I"), b"PK\1\2"  # of the directory, without name, extra and comment
_LOCAL, _LOCAL_MAGIC = struct.Struct("<4s5H3I2H"), b"PK\3\4"  # a member's own header, without name and extra
_ZIP64, _OTHER_NAME = 0x0001, 0x7075  # extra fields: sizes of 64 bits, another name for the member
_FOLDER = 0x10  # of a member's external attributes: miniz extracts no bytes of a folder, and reports success
_NPZ = "not a .npz file"
_ALIKE = "readers of zip files would differ about what is in it; save it anew"
_TAIL = _END.size + 0xFFFF  # bytes at the end in which an end record can begin: it and its comment
_WIDE = 0xFFFFFFFF  # a size or offset that stands in the ZIP64 field

_Entry = collections.namedtuple(  # a member as the directory has it, by zipfile's names; `name` is bytes
    "_Entry", "name orig_filename flag_bits compress_type CRC compress_size file_size external_attr header_offset extra"
)


def open_zip(file: Any, wrong: str = _NPZ) -> zipfile.ZipFile:
    """Open a seekable file as a zip file; `wrong` names the expected format in the error for another file.

    Raises:
        FormatError: the file is not a zip file, or is damaged.
    """
    with zip_faults(wrong):
        return zipfile.ZipFile(file)


@contextlib.contextmanager
def zip_faults(wrong: str = _NPZ) -> Iterator[None]:
    """Turn the exceptions of zipfile and zlib for a damaged file into one typed error."""
    try:
        yield
    except (RecordError, MemoryError, GeneratorExit):
        raise
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror or error}", errno=error.errno) from error
    except Exception as error:  # BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError: not documented
        what = printable(str(error) or type(error).__name__)
        raise FormatError(f"damaged, or {wrong} ({what}); copy it again") from error


def check_alike(opened: zipfile.ZipFile, file: Any, total: int) -> None:
    """Refuse a zip file of `total` bytes unless every reader finds the same members, each with the same bytes.

    The file must begin with the first member, and end with one directory and the end records right behind it. Members
    must not overlap, and each member's own header must agree with the directory.

    Raises:
        FormatError: the file can be read in two ways, or is damaged.
    """
    start, end, count = _directory(file, total)
    names = [entry.name for entry in _entries(_read(file, start, end - start), start)]
    _check_members(opened.infolist(), names, start, count, file)


def stored_members(octets: memoryview, wrong: str) -> tuple[dict[bytes, tuple[int, int, int]], int]:
    """Return offset, size and CRC of each member of a zip file in memory, and the offset of its directory.

    Names are in lower case, as torch compares them. `wrong` names the expected format in the error for another file.

    Raises:
        FormatError: as `check_alike`; or two members have one name. UnsupportedError: a member is compressed, or
        encrypted.
    """
    tail = bytes(octets[-_TAIL:])
    if not 0 <= tail.rfind(_END_MAGIC) <= len(tail) - _END.size:
        raise FormatError(f"damaged, or {wrong} (it does not end as a zip file); copy it again")
    start, end, count = _directory(octets, len(octets))
    entries = _entries(_read(octets, start, end - start), start)
    packed = next((entry for entry in entries if entry.compress_type or entry.flag_bits & 1), None)
    if packed is not None:
        done = "compressed" if packed.compress_type else "encrypted"
        what = f"{wrong}, or one that was packed again: '{printable(packed.orig_filename)}' is {done}"
        raise UnsupportedError(f"{what}; unpack it and pack it without compression, or save it anew")
    ends = _check_members(entries, [entry.name for entry in entries], start, count, octets)
    out = {e.name.lower(): (end - e.file_size, e.file_size, e.CRC) for e, end in ends}
    if len(out) < len(entries):
        raise FormatError(f"two of its members have one name, or differ by case alone; {_ALIKE}")
    return out, start


def _check_members(
    infos: Sequence[Any], names: list[bytes], start: int, count: int, file: Any
) -> list[tuple[Any, int]]:
    """Return each member and its end, after checking them against one another and the directory at `start`."""
    if not len(names) == len(infos) == count:
        raise FormatError(f"its directory has {len(names)} members, {count} is what its end says; {_ALIKE}")
    if min((info.header_offset for info in infos), default=start):
        raise FormatError(f"something stands in front of its first member; {_ALIKE}", offset=0)
    passed, out = 0, []
    for info, name in sorted(zip(infos, names, strict=True), key=lambda pair: pair[0].header_offset):
        if info.header_offset < passed:
            raise FormatError(f"this member overlaps another; {_ALIKE}", tensor=info.orig_filename.removesuffix(".npy"))
        passed = _check_member(info, name, file)
        out.append((info, passed))
    if passed > start:
        raise FormatError(f"its last member ends at byte {passed}, the directory starts at {start}; it is truncated")
    return out


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
    """Return start and end of the directory and its number of members, from the end records.

    Raises:
        FormatError: the records are not the last bytes, or contradict each other or the directory's end.
    """
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


def _entries(directory: bytes, start: int) -> list[_Entry]:
    """Return the members as they stand in a directory that lies at `start`."""
    out: list[_Entry] = []
    position = 0
    while position < len(directory):
        if position + _ENTRY.size > len(directory) or not directory.startswith(_ENTRY_MAGIC, position):
            raise FormatError(f"its directory is damaged; {_ALIKE}", offset=start + position)
        entry = _ENTRY.unpack_from(directory, position)
        name_end = position + _ENTRY.size + entry[10]
        extra = directory[name_end : name_end + entry[11]]
        sizes = entry[8], entry[9], entry[16]
        if _WIDE in sizes:
            sizes = _wide_sizes(*sizes, extra)
        name = directory[position + _ENTRY.size : name_end]
        text = name.decode(errors="replace")
        flags, method, crc, attributes = entry[3], entry[4], entry[7], entry[15]
        out.append(_Entry(name, text, flags, method, crc, sizes[0], sizes[1], attributes, sizes[2], extra))
        position += _ENTRY.size + sum(entry[10:13])
    if position > len(directory):
        raise FormatError(f"its directory is damaged; {_ALIKE}", offset=start + position)
    return out


def _wide_sizes(packed: int, unpacked: int, offset: int, extra: bytes) -> tuple[int, int, int]:
    """Return sizes and offset of a member, those that are 0xFFFFFFFF from its ZIP64 field if it has one."""
    field = next((data for kind, data in _fields(extra) if kind == _ZIP64), b"")
    wide = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) & -8]))
    unpacked, packed, offset = (next(wide, n) if n == _WIDE else n for n in (unpacked, packed, offset))
    return packed, unpacked, offset


def _fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the kinds and the bytes of a member's extra fields."""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        yield kind, extra[4 : 4 + size]
        extra = extra[4 + size :]


def _check_member(info: Any, name: bytes, file: Any) -> int:
    """Return the end of a member, after checking that its header agrees with the directory."""
    offset, fault = info.header_offset, ""
    header = _read(file, offset, _LOCAL.size + len(name))
    local = _LOCAL.unpack_from(header)
    kinds = [kind for kind, _ in _fields(info.extra)] if info.extra else ()
    own_name = header[_LOCAL.size :] if local[9] == len(name) else None
    if local[0] != _LOCAL_MAGIC or local[3] != info.compress_type or own_name != name:
        fault = "the directory and the member's own header contradict each other"
    elif info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
        fault = f"stored in {info.compress_size} bytes, of which {info.file_size} should come"
    elif info.file_size and (info.external_attr & _FOLDER or name.endswith(b"/")):
        fault = f"a folder, and {info.file_size} bytes in it"
    elif kinds.count(_ZIP64) > 1 or _OTHER_NAME in kinds:
        fault = "two sizes or two names for this member"
    if fault:
        raise FormatError(f"{fault}; {_ALIKE}", tensor=info.orig_filename.removesuffix(".npy"), offset=offset)
    return int(offset + _LOCAL.size + local[9] + local[10] + info.compress_size)


def members(
    opened: zipfile.ZipFile, file: Any, total: int, suffix: str, besides: str, most: int
) -> tuple[dict[str, zipfile.ZipInfo], str | None]:
    """Return members by their names without `suffix`, in their order, and the text of the one named `besides`.

    Args:
        most: the largest legal size of that text, in bytes.

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
    """Return exactly `size` next bytes of a member.

    Raises:
        FormatError: the member ends before, or is damaged.
    """
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
    local = _LOCAL.unpack(_read(file, info.header_offset, _LOCAL.size))
    return int(info.header_offset + _LOCAL.size + local[9] + local[10])
