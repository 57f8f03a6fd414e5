"""Reads npz, numpy's zip files of arrays; nothing is ever unpickled.

Names are split at their dots; Fortran order becomes strides; arrays of strings become StringTensors. The rest of an
archive's content (see `structure`) is in the member 'zcrecord.json'. `npy` reads the headers of arrays.
"""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.archive.payload_source import MemberSum
from zcrecord.codec.entries import Order
from zcrecord.codec.file_types import HEAD, wrong_type
from zcrecord.errors import FormatError, LimitError, RecordError, UnsupportedError
from zcrecord.storage.stream_reader import PIECE

from .npy import NpyHeader, read_npy_header, string_tensor
from .readers import MemoryReader, Reader, as_file
from .receiver import Receiver
from .structure import MAX_TEXT, Structure, decode_structure
from .zip_files import data_offset, members, read_end, read_exactly, zip_faults

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
    total = reader.nbytes
    if total is None:
        raise UnsupportedError("a .npz file is read from its end; write it to a file first")
    file = as_file(reader)
    with zip_faults():
        what = wrong_type(file.read(HEAD), "a .npz file")
        if what is not None and not zipfile.is_zipfile(file):
            raise FormatError(what, offset=0)
        opened = zipfile.ZipFile(file)
    arrays, text = members(opened, file, total, NPY, STRUCTURE, MAX_TEXT)
    reader.described = opened.start_dir, total
    if isinstance(reader, MemoryReader):
        reader.sums = functools.partial(_sums, opened, arrays.values(), reader.memory.octets)
    _Arrays(opened, arrays, decode_structure(text), reader, out).give()
    return total


def _sums(opened: zipfile.ZipFile, stored: Iterable[zipfile.ZipInfo], octets: memoryview) -> Iterator[MemberSum]:
    """Yield the checksums of stored members; those of others are compared when they are decoded."""
    for info in stored:
        if info.compress_type == zipfile.ZIP_STORED:
            start = data_offset(opened.fp, info)
            yield MemberSum(octets[start : start + info.file_size], info.CRC, info.filename)


class _Arrays:
    """Gives the arrays of one file to a receiver."""

    def __init__(
        self,
        opened: zipfile.ZipFile,
        members: dict[str, zipfile.ZipInfo],
        structure: Structure,
        reader: Reader,
        out: Receiver,
    ) -> None:
        self._opened, self._members, self._structure = opened, members, structure
        self._reader, self._out = reader, out
        self._octets: list[str] = []  # names of arrays of bytes
        self._room = MEMORY + TIMES * (reader.nbytes or 0)  # for the strings of all arrays, which stay in memory

    def give(self) -> None:
        """Give all members, modules, attributes and metadata."""
        for number, (name, info) in enumerate(self._members.items()):
            self._structure.write_items(self._out, number)
            try:
                self._array(name, info)
            except RecordError as error:
                raise error.located(tensor=name) from error.__cause__
        self._structure.write_items(self._out)
        self._out.metadata.update(self._structure.metadata)
        if self._octets:
            self._out.metadata[BYTES] = self._octets

    def _member(self, info: zipfile.ZipInfo) -> Any:
        with zip_faults():
            return self._opened.open(info)

    def _array(self, name: str, info: zipfile.ZipInfo) -> None:
        """Give one array; tie it to an earlier one if the structure says so and their bytes are the same."""
        with self._member(info) as member:
            header = read_npy_header(lambda size: read_exactly(member, size))
        if header.nbytes + header.data_nbytes != info.file_size:
            what = f"shape {header.shape} of {header.dtype} takes {header.data_nbytes} bytes"
            raise FormatError(f"{what}, the file has {info.file_size - header.nbytes}")
        path = self._structure.path(name, self._members)
        twin = self._structure.twin(name)
        if header.dtype.kind == "S":
            self._octets.append(name)
        if twin in self._members and self._out.reads and self._same(info, self._members[twin]):
            self._out.tie(path, self._structure.path(twin, self._members))
            return
        if header.dtype.kind in "SU":
            self._out.add(path, self._strings(header, info))
            return
        kind = dtypes.from_numpy(header.dtype)
        order: Order = "F" if header.fortran else "C"
        swapped = kind.numpy != header.dtype
        if info.compress_type == zipfile.ZIP_STORED and not (swapped or self._out.reads):
            offset = data_offset(self._opened.fp, info) + header.nbytes
            self._out.put_range(path, kind, header.shape, self._reader, offset, header.data_nbytes, order)
            return
        reason = "big-endian" if swapped else "deflated"
        self._out.put_decoded(path, kind, header.shape, lambda: self._pieces(info, header), reason, order)

    def _pieces(self, info: zipfile.ZipInfo, header: NpyHeader) -> Iterator[Any]:
        """Yield the elements of an array as archives have them."""
        kind = dtypes.from_numpy(header.dtype)
        with self._member(info) as member:
            read_exactly(member, header.nbytes)
            left = header.data_nbytes
            while left:
                piece: Any = read_exactly(member, min(PIECE, left))
                left -= len(piece)
                yield np.frombuffer(piece, header.dtype).astype(kind.numpy) if kind.numpy != header.dtype else piece
            read_end(member)

    def _same(self, a: zipfile.ZipInfo, b: zipfile.ZipInfo) -> bool:
        """Return True if two members of the file have the same bytes, headers included."""
        if (a.file_size, a.CRC) != (b.file_size, b.CRC):
            return False
        with zip_faults(), self._opened.open(a) as one, self._opened.open(b) as other:
            while piece := one.read(PIECE):
                if piece != other.read(PIECE):
                    return False
        return True

    def _strings(self, header: NpyHeader, info: zipfile.ZipInfo) -> Any:
        inflated = header.data_nbytes if info.compress_type != zipfile.ZIP_STORED else 0
        self._room -= inflated + 8 * prod(header.shape)
        if self._room < 0:
            what = f"its {prod(header.shape)} strings take much more memory than the file"
            raise LimitError(f"{what}; save it uncompressed")
        with self._member(info) as member:
            data = read_exactly(member, header.nbytes + header.data_nbytes)[header.nbytes :]
            read_end(member)
        if not header.dtype.itemsize:
            return string_tensor(np.full(header.shape, "", "U1" if header.dtype.kind == "U" else "S1"))
        array = np.frombuffer(data, header.dtype).reshape(header.shape, order="F" if header.fortran else "C")
        return string_tensor(array)
