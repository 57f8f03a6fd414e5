"""Npz in and out: numpy's zip files of arrays, streamed, one piece in memory; nothing is ever unpickled.

Names are split at their dots; Fortran order becomes strides; arrays of strings become StringTensors. The rest of an
archive's content (see `structure`) is in the member 'zcrecord.json', which is written only if needed. `npy` reads and
writes the headers of arrays.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.archive.info import TensorInfo
from zcrecord.archive.payloads import Payloads
from zcrecord.codec.file_types import HEAD, wrong_type
from zcrecord.errors import FormatError, LimitError, RecordError, UnsupportedError
from zcrecord.formats.structure import MAX_TEXT, Structure, decode_structure, structure_of
from zcrecord.formats.zip_files import ZipSink, members, open_zip, read_end, read_exactly, zip_entry, zip_faults
from zcrecord.record.record import Record
from zcrecord.record.record_writer import RecordWriter
from zcrecord.storage.files import Progress, open_sink, open_source
from zcrecord.storage.stream_reader import PIECE

from .npy import NpyHeader, encode_npy_header, read_npy_header, string_rows, string_tensor

STRUCTURE = "zcrecord.json"
BYTES = "npz.bytes"  # metadata: names of StringTensors that were arrays of bytes, not of text
_NPY = ".npy"
_MEMORY = 64 << 20  # bytes of strings in memory that are allowed for a file of any size ...
_TIMES = 16  # ... plus so many times the size of the file
_LONGEST = 65535  # bytes of a member's name


def read(path: str, out: RecordWriter, progress: Progress) -> int:
    """Write the arrays of a .npz file to `out`; returns the bytes of input.

    Stored and deflated members are read piece by piece, to the end given by their arrays' shapes. An array of strings
    is in memory while it is converted. Big-endian arrays are converted to little-endian.

    Example:
        >>> np.savez("arrays.npz", weight=np.ones((2, 3)), names=np.array(["a", "bc"]))
        >>> with RecordWriter("arrays.zcr") as out:
        ...     size = read("arrays.npz", out, lambda done, total: None)
        >>> out.report.tensors
        2

    Raises:
        FormatError: the zip file or an array in it is damaged, or it has a name twice. UnsupportedError: arrays of
        objects or structures, other types, other compression. LimitError: compressed strings that claim too much
        memory. SourceError: the file cannot be read.
    """
    file, total = open_source(path)
    with file:
        if total is None:
            raise UnsupportedError("a .npz file is read from its end; write it to a file first")
        with zip_faults():
            what = wrong_type(file.read(HEAD), "a .npz file")
            if what is not None and not zipfile.is_zipfile(file):
                raise FormatError(what, offset=0)
            reader = io.BufferedReader(file)
        with reader as buffered:
            opened = open_zip(buffered)
            arrays, text = members(opened, buffered, total, _NPY, STRUCTURE, MAX_TEXT)
            _Arrays(opened, arrays, decode_structure(text), out, total, progress).write()
    return total


class _Arrays:
    """Writes the members of one file to an archive."""

    def __init__(
        self,
        opened: zipfile.ZipFile,
        members: dict[str, zipfile.ZipInfo],
        structure: Structure,
        out: RecordWriter,
        total: int,
        progress: Progress,
    ) -> None:
        self._opened, self._members, self._structure, self._out = opened, members, structure, out
        self._total, self._progress = total, progress
        self._done = 0
        self._octets: list[str] = []  # names of arrays of bytes

    def write(self) -> None:
        """Write all members, modules, attributes and metadata."""
        for number, (name, info) in enumerate(self._members.items()):
            self._structure.write_items(self._out, number)
            try:
                with zip_faults():
                    member = self._opened.open(info)
                with member:
                    self._array(name, info, member)
            except RecordError as error:
                raise error.located(tensor=name) from error.__cause__
            self._done += info.compress_size
        self._structure.write_items(self._out)
        self._out.metadata.update(self._structure.metadata)
        if self._octets:
            self._out.metadata[BYTES] = self._octets
        self._progress(self._total, self._total)

    def _array(self, name: str, info: zipfile.ZipInfo, member: Any) -> None:
        """Write one array; tie it to an earlier one if the structure says so and their bytes are the same."""
        header = read_npy_header(lambda size: read_exactly(member, size))
        due = header.nbytes + header.data_nbytes
        if due != info.file_size:
            what = f"shape {header.shape} of {header.dtype} takes {header.data_nbytes} bytes"
            raise FormatError(f"{what}, the file has {info.file_size - header.nbytes}")
        path = self._structure.path(name, self._members)
        twin = self._structure.twin(name)
        if header.dtype.kind == "S":
            self._octets.append(name)
        if twin in self._members and self._same(info, self._members[twin]):
            self._out.tie(path, self._structure.path(twin, self._members))
            return
        if header.dtype.kind in "SU":
            self._out.add(path, self._strings(header, member, info))
            return
        kind = dtypes.from_numpy(header.dtype)
        swapped = kind.numpy != header.dtype
        with self._out.tensor(path, kind, header.shape, order="F" if header.fortran else "C") as tensor:
            left = header.data_nbytes
            while left:
                piece: Any = read_exactly(member, min(PIECE, left))
                left -= len(piece)
                tensor.write(np.frombuffer(piece, header.dtype).astype(kind.numpy) if swapped else piece)
                self._progress(self._done + info.compress_size * (due - left) // due, self._total)
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

    def _strings(self, header: NpyHeader, member: Any, info: zipfile.ZipInfo) -> Any:
        inflated = header.data_nbytes if info.compress_type != zipfile.ZIP_STORED else 0
        if inflated + 8 * prod(header.shape) > _MEMORY + _TIMES * self._total:
            raise LimitError(
                f"its {prod(header.shape)} strings take much more memory than the file; save it uncompressed"
            )
        data = read_exactly(member, header.data_nbytes)
        read_end(member)
        if not header.dtype.itemsize:
            return string_tensor(np.full(header.shape, "", "U1" if header.dtype.kind == "U" else "S1"))
        array = np.frombuffer(data, header.dtype).reshape(header.shape, order="F" if header.fortran else "C")
        return string_tensor(array)


def write(
    record: Record,
    dest: Any,
    *,
    durable: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Write a record as .npz, uncompressed, whole or not at all; returns the bytes written.

    `numpy.load` gives the arrays under their full names; tensors in Fortran order stay in that order. Strings become
    arrays of text, or of bytes if they are not UTF-8 or were bytes in a .npz file. Attributes, metadata, modules and
    ties are in the member 'zcrecord.json', from which `read` restores them.

    Example:
        >>> import zcrecord
        >>> _ = zcrecord.save_record({"layer": {"weight": np.ones((2, 3))}}, "model.zcr")
        >>> size = write(zcrecord.load_record("model.zcr"), "model.npz")
        >>> np.load("model.npz")["layer.weight"].shape
        (2, 3)

    Raises:
        UnsupportedError: a type that numpy's files do not have (bfloat16, float8, narrower ones).
        LimitError: a name of more than 65535 bytes, or attributes and metadata of more than 100 MB. IntegrityError: a
        payload is damaged. SourceError: the file system refused.
    """
    payloads = Payloads(record.archive)
    for info in payloads.infos:
        try:
            _check(info)
        except RecordError as error:
            raise error.located(path=record.archive.path, tensor=info.name) from None
    structure = structure_of(record, payloads.infos, texts=False)
    octets = structure.metadata.pop(BYTES, ())
    octets = set(octets) if isinstance(octets, list | tuple) else set()
    data = (structure.encode() or "").encode()
    if len(data) > MAX_TEXT:
        what = f"attributes and metadata take {len(data)} bytes as JSON, {STRUCTURE} has at most {MAX_TEXT}"
        raise LimitError(what, path=record.archive.path)
    done = 0
    with open_sink(dest, durable=durable, options=storage_options) as sink:
        file: Any = ZipSink(sink)
        opened = zipfile.ZipFile(file, "w")
        try:
            for info in payloads.infos:
                member, header, pieces = _member(record, payloads, info, info.name in octets)
                with opened.open(member, "w") as entry:
                    entry.write(header)
                    for piece in pieces:
                        entry.write(piece)
                        done += memoryview(piece).nbytes
                        if progress is not None:
                            progress(done, max(done, payloads.nbytes))
            if data:
                opened.writestr(zip_entry(STRUCTURE, len(data)), data)
            opened.close()
        finally:
            opened.fp = None  # closed; or given up, where `close` would refuse a member that Ctrl-C left open
        payloads.let_go()
        return sink.position


def _check(info: TensorInfo) -> None:
    """Raise LimitError or UnsupportedError if numpy's files cannot represent a tensor."""
    kind = info.dtype
    if len(info.name.encode()) + len(_NPY) > _LONGEST:
        raise LimitError(f"its name is longer than the {_LONGEST} bytes that a zip file takes")
    if kind.code not in dtypes.by_code:
        raise UnsupportedError(f"its element type ({kind.name}) is not known here; upgrade zcrecord")
    if kind is not dtypes.STRING and (kind.packed or kind.numpy is None or kind.numpy.type.__module__ != "numpy"):
        raise UnsupportedError(
            f"numpy's files cannot name {kind.name}; save it as float32, or viewed as uint8 or uint16"
        )


def _member(
    record: Record, payloads: Payloads, info: TensorInfo, octets: bool
) -> tuple[zipfile.ZipInfo, bytes, Iterator[Any]]:
    """Return a member's zip entry, the array's header, and the bytes that follow it."""
    pieces: Iterator[Any]
    if info.dtype is dtypes.STRING:
        try:
            descr, pieces = string_rows(record[info.name], octets=octets, most=_MEMORY + _TIMES * info.nbytes)
        except RecordError as error:
            raise error.located(path=record.archive.path, tensor=info.name) from None
        header, nbytes = encode_npy_header(descr, info.shape), np.dtype(descr).itemsize * prod(info.shape)
    else:
        assert info.dtype.numpy is not None
        fortran = _is_fortran(record, info)
        header, nbytes = encode_npy_header(info.dtype.numpy.str, info.shape, fortran=fortran), info.nbytes
        pieces = payloads.stored(info) if fortran else payloads.pieces(info)
    return zip_entry(info.name + _NPY, len(header) + nbytes), header, pieces


def _is_fortran(record: Record, info: TensorInfo) -> bool:
    """Return True if a tensor is its whole payload, its first axis fastest."""
    if info.strides is None or info.nbytes != len(record.raw(info.name)):
        return False
    flags = record.array(info.name).flags
    return flags.f_contiguous and not flags.c_contiguous
