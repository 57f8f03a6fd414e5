"""Writes npz, numpy's zip files of arrays, one piece in memory.

The rest of an archive's content (see `structure_of`) is in the member 'zcrecord.json', which is written only if needed.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.archive.info import TensorInfo
from zcrecord.archive.payloads import Payloads
from zcrecord.errors import LimitError, UnsupportedError, located
from zcrecord.foreign.npy import encode_npy_header, string_rows
from zcrecord.foreign.npz import BYTES, MEMORY, NPY, STRUCTURE, TIMES
from zcrecord.foreign.structure import MAX_TEXT
from zcrecord.record.record import Record
from zcrecord.storage.files import Progress, open_sink
from zcrecord.storage.sink import Sink

from .structure_of import structure_of

_LONGEST = 65535  # bytes of a member's name


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
        with located(path=record.archive.path, tensor=info.name):
            _check(info)
    structure = structure_of(record, payloads.infos, texts=False)
    names = structure.metadata.pop(BYTES, ())
    byte_arrays = set(names) if isinstance(names, list | tuple) else set()
    data = (structure.encode() or "").encode()
    if len(data) > MAX_TEXT:
        fault = f"attributes and metadata take {len(data)} bytes as JSON, {STRUCTURE} has at most {MAX_TEXT}"
        raise LimitError(fault, path=record.archive.path)
    written = 0
    with open_sink(dest, durable=durable, options=storage_options) as sink:
        with _open_zip(sink) as zip_file:
            for info in payloads.infos:
                member, header, pieces = _member(record, payloads, info, octets=info.name in byte_arrays)
                with zip_file.open(member, "w") as entry:
                    entry.write(header)
                    for piece in pieces:
                        entry.write(piece)
                        written += memoryview(piece).nbytes
                        if progress is not None:
                            progress(written, max(written, payloads.nbytes))
            if data:
                zip_file.writestr(_zip_entry(STRUCTURE, len(data)), data)
        payloads.release()
        return sink.position


@contextlib.contextmanager
def _open_zip(sink: Sink) -> Iterator[zipfile.ZipFile]:
    """Yield a zip file that is written to a sink; after an error nothing more is."""
    file: Any = _ZipSink(sink)
    zip_file = zipfile.ZipFile(file, "w")
    try:
        yield zip_file
        zip_file.close()
    except BaseException:
        # Given up: a member that Ctrl-C left open, and the file, close into nothing when they are collected.
        zip_file.fp, zip_file._writing, zip_file._didModify = io.BytesIO(), False, False  # type: ignore[attr-defined]
        raise


def _check(info: TensorInfo) -> None:
    """Raise LimitError or UnsupportedError if numpy's files cannot represent a tensor."""
    kind = info.dtype
    if len(info.name.encode()) + len(NPY) > _LONGEST:
        raise LimitError(f"its name is longer than the {_LONGEST} bytes that a zip file takes; rename it")
    if kind.code not in dtypes.by_code:
        raise UnsupportedError(f"its element type ({kind.name}) is not known here; upgrade zcrecord")
    if kind is not dtypes.STRING and (kind.packed or kind.numpy is None or kind.numpy.type.__module__ != "numpy"):
        advice = "save it as float32, or viewed as uint8 or uint16"
        raise UnsupportedError(f"numpy's files cannot name {kind.name}; {advice}")


def _member(
    record: Record, payloads: Payloads, info: TensorInfo, *, octets: bool
) -> tuple[zipfile.ZipInfo, bytes, Iterator[Any]]:
    """Return a tensor's zip entry, its .npy header, and the bytes that follow it; `octets`: strings are no text."""
    pieces: Iterator[Any]
    if info.dtype is dtypes.STRING:
        with located(path=record.archive.path, tensor=info.name):
            descr, pieces = string_rows(record[info.name], octets=octets, max_nbytes=MEMORY + TIMES * info.nbytes)
        header, nbytes = encode_npy_header(descr, info.shape), np.dtype(descr).itemsize * prod(info.shape)
    else:
        assert info.dtype.numpy is not None
        fortran = _is_fortran(record, info)
        header, nbytes = encode_npy_header(info.dtype.numpy.str, info.shape, fortran=fortran), info.nbytes
        pieces = payloads.stored(info) if fortran else payloads.pieces(info)
    return _zip_entry(info.name + NPY, len(header) + nbytes), header, pieces


def _is_fortran(record: Record, info: TensorInfo) -> bool:
    """Return True if a tensor is its whole payload, its first axis fastest."""
    if info.strides is None or info.nbytes != len(record.raw(info.name)):
        return False
    flags = record.array(info.name).flags
    return flags.f_contiguous and not flags.c_contiguous


def _zip_entry(name: str, nbytes: int) -> zipfile.ZipInfo:
    """Return a member's entry, the same at any time and on any system."""
    info = zipfile.ZipInfo(name)  # its date is that of 1980
    info.filename = name  # which zipfile may have changed for the system
    info.create_system, info.external_attr, info.file_size = 3, 0o600 << 16, nbytes
    return info


class _ZipSink:
    """A sink with the methods of a file for zipfile, which goes back to complete a member's header if it can."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._position = sink.position

    def write(self, data: Any) -> int:
        """Write bytes at the position: behind the others, or over bytes of a header; return how many."""
        size = memoryview(data).nbytes
        if self._position == self._sink.position:
            self._sink.write(data)
        else:
            self._sink.patch(self._position, bytes(data))
        self._position += size
        return size

    def tell(self) -> int:
        """Return the position; raises OSError if the sink cannot go back."""
        if not self._sink.can_rewind:
            raise OSError("a stream")
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset, or, with any other `whence`, to the end; return the position."""
        self._position = offset if whence == io.SEEK_SET else self._sink.position
        return self._position

    def flush(self) -> None:
        """Do nothing: bytes are not buffered."""
