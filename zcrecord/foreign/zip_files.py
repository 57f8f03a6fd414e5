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
_ENTRY, _ENTRY_MAGIC = struct.Struct("<4s6H3I5H2I"), b"PK\1\2"  # of the directory, without name, extra and comment
_LOCAL, _LOCAL_MAGIC = struct.Struct("<4s5H3I2H"), b"PK\3\4"  # a member's own header, without name and extra
_ZIP64, _OTHER_NAME = 0x0001, 0x7075  # extra fields: sizes of 64 bits, another name for the member
_FOLDER = 0x10  # of a member's external attributes: miniz extracts no bytes of a folder, and reports success
_NPZ = "not a .npz file"
_ALIKE = "readers of zip files would differ about what is in it; save it anew"


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
    names = _names(_read(file, start, end - start), start)
    infos = opened.infolist()
    if not len(names) == len(infos) == count:
        raise FormatError(f"its directory has {len(names)} members, {count} is what its end says; {_ALIKE}")
    if min((info.header_offset for info in infos), default=start):
        raise FormatError(f"something stands in front of its first member; {_ALIKE}", offset=0)
    passed = 0
    for info, name in sorted(zip(infos, names, strict=True), key=lambda pair: pair[0].header_offset):
        label = info.orig_filename.removesuffix(".npy")
        if info.header_offset < passed:
            raise FormatError(f"this member overlaps another; {_ALIKE}", tensor=label)
        passed = _check_member(info, name, file)
    if passed > start:
        raise FormatError(f"its last member ends at byte {passed}, the directory starts at {start}; it is truncated")


def _read(file: Any, offset: int, nbytes: int) -> bytes:
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


def _names(directory: bytes, start: int) -> list[bytes]:
    """Return the members' names as they stand in a directory that lies at `start`."""
    names: list[bytes] = []
    position = 0
    while position < len(directory):
        if position + _ENTRY.size > len(directory) or not directory.startswith(_ENTRY_MAGIC, position):
            raise FormatError(f"its directory is damaged; {_ALIKE}", offset=start + position)
        sizes = _ENTRY.unpack_from(directory, position)[10:13]
        names.append(directory[position + _ENTRY.size : position + _ENTRY.size + sizes[0]])
        position += _ENTRY.size + sum(sizes)
    if position > len(directory):
        raise FormatError(f"its directory is damaged; {_ALIKE}", offset=start + position)
    return names


def _check_member(info: zipfile.ZipInfo, name: bytes, file: Any) -> int:
    """Return the end of a member, after checking that its header agrees with the directory."""
    label, offset = info.orig_filename.removesuffix(".npy"), info.header_offset
    local = _LOCAL.unpack(_read(file, offset, _LOCAL.size))
    own_name = _read(file, offset + _LOCAL.size, local[9])
    if local[0] != _LOCAL_MAGIC or local[3] != info.compress_type or own_name != name:
        what = "the directory and the member's own header contradict each other"
        raise FormatError(f"{what}; {_ALIKE}", tensor=label, offset=offset)
    if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
        what = f"stored in {info.compress_size} bytes, of which {info.file_size} should come"
        raise FormatError(f"{what}; {_ALIKE}", tensor=label, offset=offset)
    if info.file_size and (info.external_attr & _FOLDER or name.endswith(b"/")):
        raise FormatError(f"a folder, and {info.file_size} bytes in it; {_ALIKE}", tensor=label, offset=offset)
    extra, kinds = info.extra, []
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        kinds.append(kind)
        extra = extra[4 + size :]
    if kinds.count(_ZIP64) > 1 or _OTHER_NAME in kinds:
        raise FormatError(f"two sizes or two names for this member; {_ALIKE}", tensor=label, offset=offset)
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
