"""Reads TINY: eight bytes of magic, a count, then name, type, shape and offset of each tensor, and the payloads."""

from __future__ import annotations

import struct
from math import prod

from zcrecord.codec.file_types import HEAD, wrong_type
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK, align_up
from zcrecord.dtypes import DType, by_name, nbytes
from zcrecord.errors import FormatError, RecordError, printable
from zcrecord.writing.module_tree import state_path

from .readers import Reader
from .receiver import Receiver

MAGIC = b"TINYWTS\0"
ALIGNMENT = 32
_LEAST = 2 + 1 + 1 + 1 + 1 + 8  # bytes of the shortest description


def read(reader: Reader, out: Receiver) -> int:
    """Give a TINY file's tensors to `out`; returns the bytes of input. Read once, forward.

    Raises:
        FormatError: a rule is broken. SourceError: the file cannot be read.
    """
    header = _Header(reader)
    end = header.end
    for name, (kind, shape, offset) in header.tensors.items():
        size = nbytes(prod(shape), kind.bits)
        if size:
            if offset != align_up(end, ALIGNMENT):
                raise FormatError(f"its offset is {offset:#x}, {align_up(end, ALIGNMENT):#x} is due", tensor=name)
            end = offset + size
            if reader.nbytes is not None and end > reader.nbytes:
                what = f"its bytes [{offset:#x}, {end:#x}) end past the end of the file ({reader.nbytes:#x})"
                raise FormatError(f"{what}; the file is truncated, copy it again", tensor=name, offset=offset)
    reader.described = 0, header.end
    for name, (kind, shape, offset) in header.tensors.items():
        size = nbytes(prod(shape), kind.bits)
        try:
            if size and not reader.seekable:
                for _ in reader.pieces(offset - reader.position):
                    pass
            out.put_range(state_path(name, header.tensors), kind, shape, reader, offset if size else header.end, size)
        except RecordError as error:
            raise error.located(tensor=name) from error.__cause__
    if (reader.nbytes is not None and reader.nbytes > end) or (not reader.seekable and reader.read(1)):
        raise FormatError("bytes behind the last tensor belong to none", offset=end)
    return end


class _Header:
    """The header of a TINY file."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        head = reader.read(len(MAGIC))
        if head != MAGIC:
            what = wrong_type(head + reader.read(HEAD - len(head)), "a TINY file")
            raise FormatError(what or "it does not start with the magic of a TINY file", offset=0)
        (count,) = self._unpack("I", "the count")
        if reader.nbytes is not None and count * _LEAST > reader.nbytes:
            raise FormatError(f"{count} tensors are claimed, the file has {reader.nbytes} bytes", offset=len(MAGIC))
        self.tensors: dict[str, tuple[DType, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self._text("H", "a name")
            if name in self.tensors:
                raise FormatError("this name is there twice", tensor=name)
            try:
                self.tensors[name] = self._form()
            except RecordError as error:
                raise error.located(tensor=name) from None
        self.end = reader.position

    def _form(self) -> tuple[DType, tuple[int, ...], int]:
        dtype = self._text("B", "the dtype")
        kind = by_name.get(dtype)
        if kind is None or kind.name == "string":
            raise FormatError(f"its dtype '{printable(dtype)}' is not known", offset=self._reader.position)
        (rank,) = self._unpack("B", "the rank")
        if rank > MAX_RANK:
            raise FormatError(f"rank {rank}; at most {MAX_RANK} is legal", offset=self._reader.position)
        shape = self._unpack(f"{rank}Q", "the shape")
        if prod(d or 1 for d in shape) * kind.bits > 8 * MAX_ARCHIVE_SIZE:
            raise FormatError(f"its shape {shape} claims more than 2^56 bytes", offset=self._reader.position)
        return kind, shape, self._unpack("Q", "the offset")[0]

    def _text(self, size: str, what: str) -> str:
        raw = self._take(self._unpack(size, what)[0], what)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = ""
        if not text or "\0" in text:
            raise FormatError(f"{what} is empty or not UTF-8 without NUL: {raw[:40]!r}", offset=self._reader.position)
        return text

    def _unpack(self, form: str, what: str) -> tuple[int, ...]:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}"), what))

    def _take(self, size: int, what: str) -> bytes:
        raw = self._reader.read(size)
        if len(raw) < size:
            raise FormatError(f"ends inside {what}; it is truncated", offset=self._reader.position)
        return raw
