"""Reads npz, numpy's zip files of arrays; nothing is ever unpickled.

Names are split at their dots; Fortran order becomes strides; arrays of strings become StringTensors. The rest of an
archive's content (see `structure`) is in the member 'zcrecord.json'. `npy` reads the headers of arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.entries import Order, encodable
from zcrecord.codec.file_types import HEAD, wrong_type
from zcrecord.errors import FormatError, LimitError, RecordError, UnsupportedError
from zcrecord.storage.stream_reader import PIECE

from .npy import NpyHeader, read_npy_header, string_tensor
from .readers import MemoryReader, Reader
from .receiver import Receiver
from .structure import MAX_TEXT, Structure, decode_structure
from .zip_files import DEFLATED, STORED, Member, MemberReader, zip_members

STRUCTURE = "zcrecord.json"
BYTES = "npz.bytes"  # metadata: names of StringTensors that were arrays of bytes, not of text
NPY = ".npy"
MEMORY = 64 << 20  # bytes of strings in memory that are allowed for a file of any size ...
TIMES = 16  # ... plus so many times the size of the file


def read(reader: Reader, out: Receiver) -> int:
    """Give the arrays of a .npz file to `out`; returns the bytes of input.

    Stored members lie in the file as they are; deflated and big-endian ones are decoded piece by piece. An array of
    strings is decoded at once, into memory.

    Raises:
        FormatError: the zip file or an array in it is damaged, or it has a name twice. UnsupportedError: arrays of
        objects or structures, other types, other compression. LimitError: compressed strings that claim too much
        memory. SourceError: the file cannot be read.
    """
    if reader.nbytes is None:
        raise UnsupportedError("a .npz file is read from its end; write it to a file first")
    head = bytes(reader.read_at(0, HEAD))
    if not head.startswith(b"PK") and (fault := wrong_type(head, "a .npz file")):
        raise FormatError(fault, offset=0)
    all_members, directory = zip_members(reader, "not a .npz file")
    reader.described = directory, reader.nbytes
    members, structure = _arrays_in(all_members, reader)
    if isinstance(reader, MemoryReader):
        octets = reader.memory.octets
        # The checksums of other members are compared when they are decoded.
        stored = [member for member in members.values() if member.method == STORED]
        reader.sums = lambda: (member.checksum(octets) for member in stored)
    _Arrays(members, structure, reader, out).give()
    return reader.nbytes


def _arrays_in(members: list[Member], reader: Reader) -> tuple[dict[str, Member], Structure]:
    """Return the members that are arrays, by name, and the structure; raises what `read` does."""
    arrays: dict[str, Member] = {}
    structure: Structure | None = None
    for member in members:
        name = member.text.removesuffix(NPY)
        if member.encrypted:
            raise UnsupportedError("this member is encrypted; save it without", tensor=name)
        if member.method not in (STORED, DEFLATED):
            raise UnsupportedError(f"compression {member.method}; numpy stores or deflates", tensor=name)
        if not name or not encodable(name):
            raise FormatError("a member without a name that text can hold")
        if member.text == STRUCTURE and structure is None:
            structure = decode_structure(_structure_text(member, reader))
        elif name in arrays:
            raise FormatError("this name is there twice", tensor=name)
        else:
            arrays[name] = member
    return arrays, structure or Structure()


def _structure_text(member: Member, reader: Reader) -> str:
    """Return the text in the member for the structure; FormatError if that is not as zcrecord writes it."""
    if member.nbytes > MAX_TEXT:
        fault = f"{STRUCTURE} has {member.nbytes} bytes, at most {MAX_TEXT} are legal"
        raise FormatError(f"{fault}; it is not zcrecord's")
    if member.method != STORED:
        raise FormatError(f"{STRUCTURE} is compressed; it is not zcrecord's")
    try:
        return bytes(MemberReader(reader, member).read(member.nbytes)).decode()
    except UnicodeDecodeError:
        raise FormatError(f"{STRUCTURE} is not UTF-8; it is not zcrecord's") from None


class _Arrays:
    """Gives the arrays of one file to a receiver."""

    def __init__(self, members: dict[str, Member], structure: Structure, reader: Reader, out: Receiver) -> None:
        self._members, self._structure = members, structure
        self._reader, self._out = reader, out
        self._byte_arrays: list[str] = []  # names of arrays of bytes
        self._memory_left = MEMORY + TIMES * (reader.nbytes or 0)  # for the strings of all arrays, which stay in memory

    def give(self) -> None:
        """Give all arrays in the order of the file, with modules and attributes between them, and the metadata."""
        for number, (name, member) in enumerate(self._members.items()):
            self._structure.write_items(self._out, number)
            try:
                self._array(name, member)
            except RecordError as error:
                raise error.located(tensor=name) from error.__cause__
        self._structure.write_items(self._out)
        self._out.metadata.update(self._structure.metadata)
        if self._byte_arrays:
            self._out.metadata[BYTES] = self._byte_arrays

    def _array(self, name: str, member: Member) -> None:
        """Give one array; tie it to an earlier one if the structure says so and their bytes are the same."""
        header = read_npy_header(MemberReader(self._reader, member).read)
        if header.nbytes + header.data_nbytes != member.nbytes:
            fault = f"shape {header.shape} of {header.dtype} takes {header.data_nbytes} bytes"
            raise FormatError(f"{fault}, the file has {member.nbytes - header.nbytes}")
        path = self._structure.path(name, self._members)
        twin = self._structure.twin(name)
        if header.dtype.kind == "S":
            self._byte_arrays.append(name)
        if twin in self._members and self._out.reads and self._have_same_bytes(member, self._members[twin]):
            self._out.tie(path, self._structure.path(twin, self._members))
            return
        if header.dtype.kind in "SU":
            self._out.add(path, self._strings(header, member))
            return
        kind = dtypes.from_numpy(header.dtype)
        order: Order = "F" if header.fortran else "C"
        is_swapped = kind.numpy != header.dtype
        if member.method == STORED and not (is_swapped or self._out.reads):
            offset = member.start + header.nbytes
            self._out.put_range(path, kind, header.shape, self._reader, offset, header.data_nbytes, order)
            return
        reason = "big-endian" if is_swapped else "deflated"
        self._out.put_decoded(path, kind, header.shape, lambda: self._elements(member, header), reason, order)

    def _elements(self, member: Member, header: NpyHeader) -> Iterator[Any]:
        """Yield the elements of an array as archives have them."""
        kind = dtypes.from_numpy(header.dtype)
        for piece in self._pieces(member, header.nbytes):
            yield np.frombuffer(piece, header.dtype).astype(kind.numpy) if kind.numpy != header.dtype else piece

    def _pieces(self, member: Member, start: int = 0) -> Iterator[Any]:
        """Yield the bytes of a member from `start` on."""
        reader = MemberReader(self._reader, member)
        reader.read(start)
        for position in range(start, member.nbytes, PIECE):
            yield reader.read(min(PIECE, member.nbytes - position))

    def _have_same_bytes(self, member: Member, twin: Member) -> bool:
        """Return True if two members of the file have the same bytes, headers included."""
        if (member.nbytes, member.crc) != (twin.nbytes, twin.crc):
            return False
        return all(map(operator.eq, self._pieces(member), self._pieces(twin)))

    def _strings(self, header: NpyHeader, member: Member) -> Any:
        """Return an array of strings as a StringTensor; LimitError if all arrays of them take too much memory."""
        inflated = header.data_nbytes if member.method != STORED else 0
        self._memory_left -= inflated + 8 * prod(header.shape)
        if self._memory_left < 0:
            fault = f"its {prod(header.shape)} strings take much more memory than the file"
            raise LimitError(f"{fault}; save it uncompressed")
        data = MemberReader(self._reader, member).read(member.nbytes)[header.nbytes :]
        if not header.dtype.itemsize:
            return string_tensor(np.full(header.shape, "", "U1" if header.dtype.kind == "U" else "S1"))
        array = np.frombuffer(data, header.dtype).reshape(header.shape, order="F" if header.fortran else "C")
        return string_tensor(array)
