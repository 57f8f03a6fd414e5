"""Copies a file of another format to a `RecordWriter`, a piece at a time, and files behind URLs to local ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from zcrecord.codec.entries import Order
from zcrecord.codec.file_types import Format
from zcrecord.dtypes import DType
from zcrecord.errors import RecordError, located
from zcrecord.foreign import format_reader
from zcrecord.foreign.readers import FileReader
from zcrecord.foreign.receiver import Path, Pieces, Shape
from zcrecord.record.load import load_record
from zcrecord.record.record_writer import RecordWriter
from zcrecord.remote.file import RemoteFile
from zcrecord.storage.files import Binary, Progress, scratch_folder

__all__ = ["Copying", "copy_file", "open_fetched"]


def copy_file(kind: str, source: str | Binary, out: RecordWriter, progress: Progress) -> int:
    """Copy a file of another format to an archive that is being written; return the bytes of input."""
    with FileReader(source) as reader, located(path=reader.path):
        nbytes = format_reader(kind)(reader, Copying(out, reader.nbytes, progress))
    progress(nbytes, nbytes)
    return nbytes


@contextlib.contextmanager
def open_fetched(file: RemoteFile, url: str, options: Mapping[str, Any] | None, kind: Format) -> Iterator[Any]:
    """Yield the record of a remote archive, or the path of a copy of any other file; errors name the URL."""
    if kind.name == "zcr":
        with load_record(url, storage_options=options) as record:
            yield record
        return
    from zcrecord.remote.files import copy_to  # here, because few sources are remote

    with scratch_folder(file.shown) as scratch:
        copy = os.path.join(scratch, f"model{''.join(kind.suffixes[:1])}")
        try:
            copy_to(file, copy)
            yield copy
        except RecordError as error:
            error.path = file.shown if error.path == copy else error.path
            raise


class Copying:
    """A `Receiver` that copies; `progress` is called with the bytes of tensors copied and the size of the input."""

    reads = True

    def __init__(self, out: RecordWriter, nbytes: int | None, progress: Progress) -> None:
        self.metadata, self.module, self.attribute, self.tie = out.metadata, out.module, out.attribute, out.tie
        self._out, self._progress = out, progress
        self._done, self._total = 0, nbytes

    def put_range(
        self, path: Path, kind: DType, shape: Shape, reader: Any, offset: int, nbytes: int, order: Order = "C"
    ) -> None:
        """Copy a tensor whose bytes lie in the file of a reader."""
        with self._out.tensor(path, kind, shape, order=order) as tensor:
            if nbytes:
                reader.seek(offset)
            self._copy(tensor, reader.pieces(nbytes))

    def put_decoded(
        self, path: Path, kind: DType, shape: Shape, pieces: Pieces, _reason: str, order: Order = "C"
    ) -> None:
        """Copy a tensor whose bytes `pieces` yields."""
        with self._out.tensor(path, kind, shape, order=order) as tensor:
            self._copy(tensor, pieces())

    def parts(self, values: Iterable[Any], _reader: Any = None) -> list[Any]:
        """Return tensors in memory, ties between them found, to be added one by one."""
        return self._out.parts(values)

    def add(self, path: Any, value: Any) -> None:
        """Copy a tensor in memory."""
        self._out.add(path, value)
        self._report(0)

    def _copy(self, tensor: Any, pieces: Iterable[Any]) -> None:
        """Write pieces to a tensor of the archive, and report each."""
        for piece in pieces:
            tensor.write(piece)
            self._report(memoryview(piece).nbytes)

    def _report(self, nbytes: int) -> None:
        """Call `progress` after so many more bytes, at most the size of the input: tied tensors have more."""
        self._done += nbytes
        self._progress(self._done if self._total is None else min(self._done, self._total), self._total)
