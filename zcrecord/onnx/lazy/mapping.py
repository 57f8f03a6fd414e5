"""`scan`: every tensor of a model by name, type, shape and place; values are read on demand.

Tensors have the names and, bit by bit, the values of a conversion. Finding them, and the decision between view and
copy, are left to `locate`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from zcrecord.archive.payload_source import Closed
from zcrecord.dtypes import STRING, DType
from zcrecord.errors import RecordError, TensorNotFoundError, UnsupportedError, located
from zcrecord.onnx.external_data import ModelFolder
from zcrecord.onnx.names import full_names
from zcrecord.storage.files import absolute_path, path_of
from zcrecord.tensors.packed import PackedTensor, StringTensor
from zcrecord.writing.writers import ConvertReport

from .locate import LocatedTensor, ModelFiles, find_tensors, is_aligned, open_model, read, release


def scan(path: str | os.PathLike[str], *, allow_links: bool = False, mmap: bool = True) -> OnnxTensors:
    """List every tensor of an ONNX model without reading a payload; each lookup gives a view of the file if possible,
    otherwise a copy of that tensor alone.

    The model must be a regular file that is not compressed; `convert` makes an archive of others, and of pipes. The
    graph is read once and not kept. Faults of values (too many or too few varints, one out of range), and external data
    that are missing or forbidden, are found when a tensor is looked up.

    Args:
        path: the model; its external data lie beside it.
        allow_links: as in `convert`.
        mmap: False copies each tensor into memory when it is looked up: for network file systems, and for files that
            may become shorter in place, which kills a process that has them mapped (SIGBUS).

    Raises:
        OnnxError: not a valid model, or one with unsupported features; with the offset. ExternalDataError: a tensor's
            external_data breaks a rule. SourceError: the file cannot be read, or is no file.

    Example:
        >>> tensors = scan("model.onnx")
        >>> tensors.info("features.2.bias").shape, tensors.info("features.2.bias").field
        ((32,), 'raw_data')
        >>> tensors["features.2.bias"].dtype.name
        'float32'
    """
    if hasattr(path, "read"):
        raise UnsupportedError("a stream cannot be read in any order; name a file to scan, or convert the stream")
    source = path_of(path)
    file = open_model(source)
    with located(path=source):
        tensors, entries = find_tensors(file)
        names = full_names(tensors, file.nbytes)
    folder = ModelFolder(os.path.dirname(absolute_path(source)), allow_links=allow_links)
    return OnnxTensors(source, ModelFiles(file, folder), names, entries, mmap=mmap)


@dataclass(frozen=True, slots=True)
class OnnxTensorInfo:
    """One tensor's name, type, shape and place, known without reading its values.

    Attributes:
        name: its name, the same as in a converted archive.
        dtype: element type.
        shape: its dimensions.
        file: path of the file with its values, links followed. The file was not opened, so it may not exist.
        offset: start of the values in that file; None if they have to be decoded, or if there are none.
        nbytes: size of the values in an archive; for strings with the table of their ends.
        field: the field of TensorProto that has the values, "external_data" for another file, "" for none.
        copied: True if a lookup copies the values. If False, a lookup copies them only if they are not canonical (a
            bool of 2, a bit set after the last packed element), or if views keep 256 files mapped already.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: str
    offset: int | None
    nbytes: int
    field: str
    copied: bool


class OnnxTensors(Mapping[str, Any]):
    """A model's tensors as a mapping from full names to values, in the model's order. Immutable; threads may share it.

    Values are read-only numpy arrays, :class:`PackedTensor` or :class:`StringTensor`, as a Record's are. One whose
    `info` says `copied` is read anew by each lookup: keep it if you need it again. The others are views, which keep
    the file mapped. As a context manager it ends lookups on leaving.
    """

    __slots__ = ("__weakref__", "_entries", "_files", "_mappings", "_mmap", "_numbers", "_path")

    def __init__(
        self, path: str, files: ModelFiles, names: list[str], entries: list[LocatedTensor], *, mmap: bool
    ) -> None:
        self._path = path
        self._files: ModelFiles | None = files
        self._mappings = files.mappings
        self._entries = entries
        self._numbers = {name: i for i, name in enumerate(names)}
        self._mmap = mmap

    @property
    def path(self) -> str:
        """The model's path, as it was given."""
        return self._path

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's full name, in the model's order."""
        return tuple(self._open_numbers())

    @property
    def nbytes(self) -> int:
        """Bytes of all values, in the form in which they are given out."""
        self._open_files()
        return sum(entry.nbytes for entry in self._entries)

    def _open_files(self) -> ModelFiles:
        files = self._files  # once: another thread may close it
        if files is None:
            raise Closed.error(self._path)
        return files

    def _open_numbers(self) -> dict[str, int]:
        self._open_files()
        return self._numbers

    def _number(self, name: object) -> int:
        i = self._open_numbers().get(name, -1) if isinstance(name, str) else -1
        if i < 0:
            raise TensorNotFoundError(str(name), self._open_numbers, path=self._path)
        return i

    def __getitem__(self, name: str) -> Any:
        """Return the tensor; TensorNotFoundError (a KeyError) lists close names when it is printed.

        Raises:
            OnnxError: its values do not fit its shape and type. ExternalDataError: their file may not be used, is
                missing, or is too short. SourceError: they cannot be read.
        """
        return self._value(name, self._entries[self._number(name)])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._open_numbers()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the tensor, or `default`; never searches for close names."""
        i = self._open_numbers().get(name, -1)
        return default if i < 0 else self._value(name, self._entries[i])

    def __iter__(self) -> Iterator[str]:
        return iter(self._open_numbers())

    def __len__(self) -> int:
        return len(self._open_numbers())

    def array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a tensor that is an ndarray; UnsupportedError for packed and string ones, TensorNotFoundError."""
        value = self[name]
        if not isinstance(value, np.ndarray):
            raise UnsupportedError(f"a {type(value).__name__} is no ndarray; use tensors[name].unpack()", tensor=name)
        return value

    def info(self, name: str) -> OnnxTensorInfo:
        """Return dtype, shape and place of one tensor; reads nothing."""
        return self._info(name, self._entries[self._number(name)])

    def infos(self) -> Iterator[OnnxTensorInfo]:
        """Yield the OnnxTensorInfo of every tensor in the model's order."""
        return (self._info(name, self._entries[i]) for name, i in self._open_numbers().items())

    def load_all(self) -> dict[str, Any]:
        """Return every tensor by name: views stay views, every other tensor is read or decoded now.

        That takes the memory of all tensors that `info` calls `copied`, and the time to read them; the views' bytes are
        read when they are touched. With `scan(..., mmap=False)` everything is read, into `nbytes` of memory, and
        nothing depends on the files afterwards.

        Example:
            >>> eager = scan("model.onnx").load_all()
            >>> sorted(eager)[:2]
            ['classifier.bias', 'classifier.weight']
        """
        return {name: self._value(name, self._entries[i]) for name, i in self._open_numbers().items()}

    def to_onnx(
        self, dest: str | os.PathLike[str], *, alignment: int = 1, force: bool = False, durable: bool = True
    ) -> ConvertReport:
        """Write a small model over the scanned one: the same graph, and references to the values in the original files.

        `onnx.load` and ONNX Runtime then read the values there, as external data. The original, and its own external
        data, must be files in the folder of `dest` or below it, and stay there as they are: nothing in the small model
        tells that an original has changed, so write it again when it has. `dest` holds the old file or the whole new
        one at any time.

        Values that readers expect in the model are copied into it: tensors of up to 127 bytes, strings, complex
        numbers, tensors in attributes, functions and training_info, sparse ones. So are values that an archive would
        have in another form: integers as varints, floats in several pieces, bools other than 0 and 1, packed elements
        with bits set after the last one.

        Args:
            dest: a path.
            alignment: copy values into the model, too, if their offset is no multiple of this power of two, up to
                65536. With 1 none are, which is right for ONNX Runtime on x86-64: it reads values at any offset, with
                the same results, bit by bit. Only of sums over a constant may the last bit differ, unless the offset
                is a multiple of 16. A processor that cannot read unaligned numbers needs the largest element size, 8.
            force, durable: replace what is at `dest`; that of `save_record`.

        Returns:
            `payload_bytes` are the values in the small model.

        Example:
            >>> report = scan("model.onnx").to_onnx("small.onnx")
            >>> report.archive_bytes < 2000 < report.input_bytes
            True

        Source: tried with 2,500 models of one operator, constants at 9 offsets; ONNX Runtime 1.21, 1.31 and 1.32.

        Raises:
            ExternalDataError: no model at `dest` may refer to a file, or its own external data may not be used, are
                missing, or too short. UnsupportedError: `dest` is no regular file, or a stream. LimitError: more than
                the 2 GiB that one model may have; `alignment` is no power of two up to 65536. OnnxError: values do not
                fit their shape and type. DestinationExistsError: `dest` exists already, or is an original file.
                SourceError: a file was changed or replaced since the scan, or the file system reports an error.
        """
        from .small_model import write_small_model  # here, because few write one

        files, names = self._open_files(), self.names
        options: dict[str, Any] = {"alignment": alignment, "force": force, "durable": durable}
        with located(path=self._path):
            return write_small_model(self._path, names, files, self._entries, dest, **options)

    def _info(self, name: str, tensor: LocatedTensor) -> OnnxTensorInfo:
        file = self._open_files().path_of(tensor.reference)
        offset = tensor.offset if tensor.offset >= 0 else None
        copied = tensor.nbytes > 0 and (not self._mmap or not is_aligned(tensor))
        return OnnxTensorInfo(name, tensor.dtype, tensor.shape, file, offset, tensor.nbytes, tensor.field, copied)

    def _value(self, name: str, tensor: LocatedTensor) -> Any:
        files = self._open_files()
        try:
            data = read(files, tensor, mmap=self._mmap)
            data.setflags(write=False)
            if tensor.dtype is STRING:
                return StringTensor(data, tensor.shape)
            if tensor.dtype.packed:
                return PackedTensor(data, tensor.dtype, tensor.shape)
            return np.ndarray(tensor.shape, tensor.dtype.numpy, data)
        except RecordError as error:
            raise error.located(path=self._path, tensor=name) from error.__cause__

    def close(self) -> bool:
        """End lookups; return True if all mappings are released. Earlier views keep theirs, and stay valid."""
        files, self._files = self._files, None
        if files is not None:
            files.forget()
        return release(self._mappings)

    def __enter__(self) -> OnnxTensors:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, TensorNotFoundError):
            str(error)  # looks up close names now: afterwards it is closed
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._files is None else f"{len(self._entries)} tensors"
        return f"<OnnxTensors {self._path}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError("open files cannot be pickled; scan the path again instead", path=self._path)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other
