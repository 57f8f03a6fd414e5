"""Reads npz, numpy's zip files of arrays; nothing is ever unpickled.

Names are split at their dots; Fortran order becomes strides; arrays of strings become StringTensors. The rest of an
archive's content (see `structure`) is in the member 'zcrecord.json'. `npy` reads the headers of arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.archive.payload_source import MemberSum
from zcrecord.codec.entries import Order, encodable
from zcrecord.codec.file_types import HEAD, wrong_type
from zcrecord.errors import FormatError, LimitError, RecordError, UnsupportedError
from zcrecord.storage.stream_reader import PIECE

from .npy import NpyHeader, read_npy_header, string_tensor
from .readers import MemoryReader, Reader
from .receiver import Receiver
from .structure import MAX_TEXT, Structure, decode_structure
from .zip_files import MemberReader, ZipDirectory, ZipMember, check_members, read_directory, read_range

STRUCTURE = "zcrecord.json"
BYTES = "npz.bytes"  # metadata: names of StringTensors that were arrays of bytes, not of text
NPY = ".npy"
MEMORY = 64 << 20  # bytes of strings in memory that are allowed for a file of any size ...
TIMES = 16  # ... plus so many times the size of the file
_STORED, _DEFLATED = 0, 8  # methods of compression
_ENCRYPTED, _UTF8 = 1, 0x800  # flags of a member: its name is UTF-8


def read(reader: Reader, out: Receiver) -> int:
    """Give the arrays of a .npz file to `out`; returns the bytes of input.

    Stored members lie in the file as they are; deflated and big-endian ones are decoded piece by piece. An array of
    strings is decoded at once, into memory.

    Raises:
        FormatError: the zip file or an array in it is damaged, or it has a name twice. UnsupportedError: arrays of
        objects or structures, other types, other compression. LimitError: compressed strings that claim too much
        memory. SourceError: the file cannot be read.
    """
    total = reader.nbytes
    if total is None:
        raise UnsupportedError("a .npz file is read from its end; write it to a file first")
    file = reader.memory.octets if isinstance(reader, MemoryReader) else reader
    wrong = wrong_type(read_range(file, 0, min(HEAD, total)), "a .npz file")
    no_zip = wrong or "damaged, or not a .npz file (File is not a zip file); copy it again"
    directory = read_directory(file, total, no_zip)
    arrays, structure = _members(file, directory)
    reader.described = directory.start, total
    if isinstance(reader, MemoryReader):
        reader.sums = functools.partial(_sums, arrays.values(), reader.memory.octets)
    _Arrays(arrays, structure, reader, file, out).give()
    return total


def _members(file: Any, directory: ZipDirectory) -> tuple[dict[str, ZipMember], Structure]:
    """Return the arrays by name, in the order of the directory, and the structure."""
    columns = {name: column.tolist() for name, column in directory.columns.items()}
    names = [
        raw.decode("utf-8" if flags & _UTF8 else "cp437", "surrogateescape")
        for raw, flags in zip(directory.names, columns["flags"], strict=True)
    ]
    for name, flags, method in zip(names, columns["flags"], columns["method"], strict=True):
        if flags & _ENCRYPTED:
            raise UnsupportedError("this member is encrypted", tensor=name.removesuffix(NPY))
        if method not in (_STORED, _DEFLATED):
            what = f"compression {method}; numpy stores or deflates"
            raise UnsupportedError(what, tensor=name.removesuffix(NPY))
    places = check_members(directory, file).tolist()
    members = map(ZipMember, names, places, *(columns[name] for name in ("packed", "size", "crc", "method")))
    arrays: dict[str, ZipMember] = {}
    structure: Structure | None = None
    for member in members:
        name = member.name.removesuffix(NPY)
        if not name or not encodable(name):
            raise FormatError("a member without a name that text can hold")
        if name in arrays:
            raise FormatError("this name is there twice", tensor=name)
        if member.name == STRUCTURE and structure is None:
            structure = _structure(file, member)
        else:
            arrays[name] = member
    return arrays, structure or Structure()


def _structure(file: Any, member: ZipMember) -> Structure:
    if member.size > MAX_TEXT:
        what = f"{member.name} has {member.size} bytes, at most {MAX_TEXT} are legal"
        raise FormatError(f"{what}; it is not zcrecord's")
    if member.method != _STORED:
        raise FormatError(f"{member.name} is compressed; it is not zcrecord's")
    try:
        return decode_structure(MemberReader(file, member).read(member.size).decode())
    except UnicodeDecodeError:
        raise FormatError(f"{member.name} is not UTF-8; it is not zcrecord's") from None


def _sums(members: Iterable[ZipMember], octets: memoryview) -> Iterator[MemberSum]:
    """Yield the checksums of stored members; those of others are compared when they are decoded."""
    for member in members:
        if member.method == _STORED:
            yield MemberSum(octets[member.offset : member.offset + member.size], member.crc, member.name)


class _Arrays:
    """Gives the arrays of one file to a receiver."""

    def __init__(
        self, members: dict[str, ZipMember], structure: Structure, reader: Reader, file: Any, out: Receiver
    ) -> None:
        self._members, self._structure, self._reader, self._file, self._out = members, structure, reader, file, out
        self._octets: list[str] = []  # names of arrays of bytes
        self._room = MEMORY + TIMES * (reader.nbytes or 0)  # for the strings of all arrays, which stay in memory

    def give(self) -> None:
        """Give all members, modules, attributes and metadata."""
        for number, (name, member) in enumerate(self._members.items()):
            self._structure.write_items(self._out, number)
            try:
                self._array(name, member)
            except RecordError as error:
                raise error.located(tensor=name) from error.__cause__
        self._structure.write_items(self._out)
        self._out.metadata.update(self._structure.metadata)
        if self._octets:
            self._out.metadata[BYTES] = self._octets

    def _array(self, name: str, member: ZipMember) -> None:
        """Give one array; tie it to an earlier one if the structure says so and their bytes are the same."""
        header = read_npy_header(MemberReader(self._file, member).read)
        if header.nbytes + header.data_nbytes != member.size:
            what = f"shape {header.shape} of {header.dtype} takes {header.data_nbytes} bytes"
            raise FormatError(f"{what}, the file has {member.size - header.nbytes}")
        path = self._structure.path(name, self._members)
        twin = self._structure.twin(name)
        if header.dtype.kind == "S":
            self._octets.append(name)
        if twin in self._members and self._out.reads and self._same(member, self._members[twin]):
            self._out.tie(path, self._structure.path(twin, self._members))
            return
        if header.dtype.kind in "SU":
            self._out.add(path, self._strings(header, member))
            return
        kind = dtypes.from_numpy(header.dtype)
        order: Order = "F" if header.fortran else "C"
        swapped = kind.numpy != header.dtype
        if not (member.method or swapped or self._out.reads):
            offset = member.offset + header.nbytes
            self._out.put_range(path, kind, header.shape, self._reader, offset, header.data_nbytes, order)
            return
        reason = "big-endian" if swapped else "deflated"
        self._out.put_decoded(path, kind, header.shape, lambda: self._pieces(member, header), reason, order)

    def _pieces(self, member: ZipMember, header: NpyHeader) -> Iterator[Any]:
        """Yield the elements of an array as archives have them."""
        kind = dtypes.from_numpy(header.dtype)
        opened = MemberReader(self._file, member)
        opened.read(header.nbytes)
        for done in range(0, header.data_nbytes, PIECE):
            piece: Any = opened.read(min(PIECE, header.data_nbytes - done))
            yield np.frombuffer(piece, header.dtype).astype(kind.numpy) if kind.numpy != header.dtype else piece

    def _same(self, a: ZipMember, b: ZipMember) -> bool:
        """Return True if two members of the file have the same bytes, headers included."""
        if (a.size, a.crc) != (b.size, b.crc):
            return False
        one, other = MemberReader(self._file, a), MemberReader(self._file, b)
        sizes = (min(PIECE, a.size - done) for done in range(0, a.size, PIECE))
        return all(one.read(size) == other.read(size) for size in sizes)

    def _strings(self, header: NpyHeader, member: ZipMember) -> Any:
        inflated = header.data_nbytes if member.method else 0
        self._room -= inflated + 8 * prod(header.shape)
        if self._room < 0:
            what = f"its {prod(header.shape)} strings take much more memory than the file"
            raise LimitError(f"{what}; save it uncompressed")
        data = MemberReader(self._file, member).read(member.size)[header.nbytes :]
        if not header.dtype.itemsize:
            return string_tensor(np.full(header.shape, "", "U1" if header.dtype.kind == "U" else "S1"))
        array = np.frombuffer(data, header.dtype).reshape(header.shape, order="F" if header.fortran else "C")
        return string_tensor(array)
