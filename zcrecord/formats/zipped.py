"""Zip files in and out, as npz needs them: every damage one typed error, members read no further than asked for.

Knows members and their bytes; what is in them is left to `npz`.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator
from typing import Any

from zcrecord.errors import FormatError, RecordError, SourceError, UnsupportedError, printable
from zcrecord.sink import Sink
from zcrecord.tree import encodable

__all__ = ["ZipSink", "members", "open_zip", "read_end", "read_exactly", "zip_entry", "zip_faults"]

_LOCAL = 30  # bytes of a member's own header, without its name
_END = 22  # bytes of what ends a zip file, without its comment


def open_zip(file: Any, total: int) -> zipfile.ZipFile:
    """Return a seekable file of so many bytes, opened as a zip file.

    Raises:
        FormatError: it is none, or is damaged.
    """
    with zip_faults():
        opened = zipfile.ZipFile(file)
    _check_count(opened, file, total)
    return opened


@contextlib.contextmanager
def zip_faults() -> Iterator[None]:
    """Have whatever zipfile and zlib raise for a damaged file be one typed error."""
    try:
        yield
    except (RecordError, MemoryError, GeneratorExit):
        raise
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror or error}", errno=error.errno) from error
    except Exception as error:  # BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError: it promises none
        what = printable(str(error) or type(error).__name__)
        raise FormatError(f"damaged, or not a .npz file ({what}); copy it again") from error


def _check_count(opened: zipfile.ZipFile, file: Any, total: int) -> None:
    """Raise FormatError unless the directory has as many members as the file's end says; zipfile does not compare."""
    with zip_faults():
        file.seek(total - _END - len(opened.comment))
        end = file.read(_END)
    count = int.from_bytes(end[10:12], "little")
    if count not in (len(opened.infolist()), 0xFFFF):  # 0xFFFF: the number is elsewhere, or too large
        raise FormatError(f"its directory has {len(opened.infolist())} members, {count} is what its end says")


def members(
    opened: zipfile.ZipFile, total: int, suffix: str, besides: str
) -> tuple[dict[str, zipfile.ZipInfo], str | None]:
    """Return members by their names without `suffix`, in their order, and the text of the one named `besides`.

    Raises:
        FormatError: a name is empty or there twice, members overlap, or end past the file. UnsupportedError: one is
        encrypted, or neither stored nor deflated.
    """
    out: dict[str, zipfile.ZipInfo] = {}
    text: str | None = None
    for info in opened.infolist():
        name = info.orig_filename.removesuffix(suffix)  # the other may have been changed for the system
        if info.flag_bits & 1:
            raise UnsupportedError("this member is encrypted", tensor=name)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UnsupportedError(f"compression {info.compress_type}; numpy stores or deflates", tensor=name)
        if not name or not encodable(name):
            raise FormatError("a member without a name that text can hold")
        if info.orig_filename == besides and text is None:
            text = _text(opened, info)
        elif name in out:
            raise FormatError("this name is there twice", tensor=name)
        else:
            out[name] = info
    end = 0
    for info in sorted(opened.infolist(), key=lambda i: i.header_offset):
        if info.header_offset < end:
            raise FormatError("this member overlaps another", tensor=info.orig_filename.removesuffix(suffix))
        end = info.header_offset + _LOCAL + info.compress_size
    if end > total:
        raise FormatError(f"its last member ends at byte {end}, the file has {total}; it is truncated")
    return out, text


def _text(opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    if info.compress_type != zipfile.ZIP_STORED:
        raise FormatError(f"{info.filename} is compressed; it is not zcrecord's")
    with zip_faults():
        return opened.read(info).decode()


def read_exactly(member: Any, size: int) -> bytes:
    """Return the next bytes of a member, exactly so many.

    Raises:
        FormatError: it ends before, or is damaged.
    """
    with zip_faults():
        data = member.read(size)
    if len(data) < size:
        raise FormatError(f"ends {size - len(data)} bytes early; the file is truncated or damaged")
    return bytes(data)


def read_end(member: Any) -> None:
    """Read the end of a member, where zipfile compares its checksum."""
    with zip_faults():
        member.read(1)


def zip_entry(name: str, nbytes: int) -> zipfile.ZipInfo:
    """Return a member's entry, the same at any time and on any system."""
    info = zipfile.ZipInfo(name)  # its date is that of 1980
    info.filename = name  # which may have been changed for the system
    info.create_system, info.external_attr, info.file_size = 3, 0o600 << 16, nbytes
    return info


class ZipSink:
    """A sink as zipfile wants a file: it goes back to complete a member's header, where the sink lets it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._at = sink.position

    def write(self, data: Any) -> int:
        """Append, or overwrite what was written before."""
        size = memoryview(data).nbytes
        if self._at == self._sink.position:
            self._sink.write(data)
        else:
            self._sink.patch(self._at, bytes(data))
        self._at += size
        return size

    def tell(self) -> int:
        """Return the position; an OSError where there is no way back."""
        if not self._sink.can_rewind:
            raise OSError("a stream")
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position from the start, or to the end."""
        self._at = offset if whence == io.SEEK_SET else self._sink.position
        return self._at

    def flush(self) -> None:
        """Nothing is held back."""
