"""Archives and safetensors files, distinguished by content: `safe_open`, and helpers of the other modules.

`record` opens the files; `frameworks` makes tensors of torch and jax over their memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from zcrecord.archive import subset
from zcrecord.dtypes import STRING, from_numpy
from zcrecord.errors import DependencyError, RecordError, UnsupportedError
from zcrecord.frameworks.torch import import_torch, torch_device
from zcrecord.loaders.boxes import is_box
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.record.save import save_record
from zcrecord.tensors.lazy import LazyTensor
from zcrecord.tensors.packed import PackedTensor, StringTensor

SafetensorError = RecordError

_FRAMEWORKS = {"pt": "torch", "torch": "torch", "pytorch": "torch", "np": "numpy", "numpy": "numpy",
               "jax": "jax", "flax": "jax"}  # fmt: skip
_TENSORS = (np.ndarray, np.generic, PackedTensor, StringTensor, LazyTensor)
_SINGLES = 16  # tensors converted one by one, before all are converted together at a tenth of the cost of each


class IndexingError(RecordError, IndexError):
    """An index that a tensor does not have: out of bounds, of too many dimensions, or of a wrong type."""


class SavingError(UnsupportedError, ValueError):
    """A value cannot be saved. The error is a TypeError as in zcrecord, and a ValueError as in safetensors."""


class safe_open:  # noqa: N801  # the name people import
    """An opened archive or safetensors file: a context manager and a mapping. Opening reads no payload byte.

    Args:
        filename: a path; the content decides which of the two the file is, not its suffix.
        framework: "pt" (torch, pytorch), "np" (numpy) or "jax" (flax).
        device: the device for torch's tensors; "cpu", or None, for the others.
        backend: "mmap", or "pread" to read each tensor, or part of one, by position when it is asked for, into new
            memory: other formats than the two are read as a whole.

    Tensors of torch and numpy may be written: they lie on a private mapping, whose pages are copied at the first write,
    or in memory of their own.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.arange(6).reshape(2, 3)}, "model.safetensors")
        >>> with safe_open("model.safetensors", framework="np") as f:
        ...     f.keys(), f.get_tensor("w").shape, f.get_slice("w")[:, -1:].tolist(), "b" in f
        (['w'], (2, 3), [[2], [5]], False)

    Raises:
        SourceNotFoundError (a FileNotFoundError), SourceError: the file is missing or cannot be read. FormatError: it
        is neither an archive nor a safetensors file, or is damaged. UnsupportedError: an unknown framework, device or
        backend. Each is a SafetensorError.
    """

    def __init__(
        self, filename: str | os.PathLike[str], framework: str, device: Any = "cpu", *, backend: str = "mmap"
    ) -> None:
        if not isinstance(framework, str) or framework not in _FRAMEWORKS:
            raise UnsupportedError(f"framework {framework!r} is not known; {', '.join(_FRAMEWORKS)} are")
        self._framework = _FRAMEWORKS[framework]
        if self._framework != "torch" and not on_cpu(device):
            raise UnsupportedError(f"device {device!r}: {self._framework} takes its tensors from the CPU")
        self._on_cpu = on_cpu(device)
        self._device = device if self._on_cpu else torch_device(import_torch(), device)
        self._reads = backend == "pread"
        writable = self._framework != "jax" and self._on_cpu and not self._reads
        self._record = open_record(filename, backend=backend, writable=writable)
        self._tensors: dict[str, Any] | None = None  # all of them, once several were asked for
        self._singles_left = sys.maxsize if self._reads else _SINGLES

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._tensors = None
        self._record.__exit__(kind, error, trace)

    def keys(self) -> list[str]:
        """Return the names of all tensors, in saved order."""
        return list(self._record)

    def offset_keys(self) -> list[str]:
        """Return the names of all tensors, in the order of their offsets in the file."""
        return [info.name for info in sorted(self._record.infos(), key=lambda info: info.offset)]

    def metadata(self) -> dict[str, str] | None:
        """Return the file's metadata, None if it has none; values other than text become JSON, bytes are left out."""
        texts = {key: _text(value) for key, value in self._record.metadata.items()}
        return {key: text for key, text in texts.items() if text is not None} or None

    def get_tensor(self, name: str) -> Any:
        """Return one tensor; TensorNotFoundError lists similar names. Two calls return the same memory, if mapped."""
        if self._framework == "numpy" and not self._reads:
            return self._record[name]
        if self._tensors is None and self._singles_left > 0:
            self._singles_left -= 1
            tensor = self._convert_one(name)
        else:
            if name not in self._record:
                self._record.info(name)  # raises, with similar names
            try:
                tensor = self._all_tensors()[name]
            except UnsupportedError:  # maybe about another tensor
                self._singles_left = sys.maxsize
                tensor = self._convert_one(name)
        return tensor.to(self._device) if hasattr(tensor, "to") and not self._on_cpu else tensor

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, in saved order; those tied in the file share memory."""
        if self._framework == "torch" and not self._on_cpu:
            return self._record.torch(device=self._device)
        return self._convert(self._record) if self._reads else dict(self._all_tensors())

    def get_slice(self, name: str) -> Slice:
        """Return an object that slices one tensor: `f.get_slice("w")[:, 2:-1]`; TensorNotFoundError lists names."""
        return Slice(self, name)

    def read_box(self, name: str, box: Any) -> Any:
        """Return a box of a tensor, read by itself with backend "pread"; UnsupportedError if that cannot be done."""
        if not self._reads or self._framework == "jax" or not is_box(box):
            raise UnsupportedError("it is a part of the whole tensor")
        loader: Any = "read"
        if self._framework == "torch":
            from zcrecord.loaders.torch import TorchLoader  # here, because torch may not be installed

            loader = TorchLoader(self._device or "cpu")
        return self._record.load_into(loader, name, slices={name: box})[name]

    def _convert_one(self, name: str) -> Any:
        """Return one tensor as the framework's, over the archive's memory; TensorNotFoundError lists similar names."""
        archive = self._record.archive
        number = archive.find(name)
        if number < 0:
            self._record.info(name)  # raises, with similar names
        (tensor,) = self._convert(Record(subset.single_tensor(archive, number))).values()
        return tensor

    def _all_tensors(self) -> dict[str, Any]:
        if self._tensors is None:
            self._tensors = self._convert(self._record)
        return self._tensors

    def _convert(self, record: Record) -> dict[str, Any]:
        """Return a record's tensors as the framework's, over the archive's memory; devices come later."""
        if self._framework == "numpy":
            return dict(Record(record.archive.private()) if self._reads else record)
        return record.jax() if self._framework == "jax" else record.torch(writable=self._on_cpu)

    def __getitem__(self, name: str) -> Any:
        """Return one tensor, as `get_tensor` does."""
        return self.get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._record

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)

    def __repr__(self) -> str:
        return f"<safe_open {self._record!r}>"


class Slice:
    """One tensor to be indexed: `[...]` returns a view, or a copy if numpy or torch copies for that index.

    Raises:
        IndexingError (an IndexError): the index is invalid, even if the framework accepts it.
    """

    __slots__ = ("_file", "_info")

    def __init__(self, file: safe_open, name: str) -> None:
        self._file, self._info = file, file._record.info(name)

    def get_shape(self) -> list[int]:
        """Return the dimensions."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of the element type ("F32"); numpy's if safetensors has none."""
        return self._info.dtype.safetensors or self._info.dtype.name

    def __getitem__(self, index: Any) -> Any:
        name, shape = self._info.name, self._info.shape
        with contextlib.suppress(UnsupportedError):  # of what is no box, or not by itself in the file
            return self._file.read_box(name, index)
        tensor = self._file.get_tensor(name)
        try:
            if not isinstance(tensor, np.ndarray) and hasattr(tensor, "at"):  # of jax, which accepts any number
                _ = np.broadcast_to(np.False_, shape)[index]  # numpy raises IndexError if it is out of bounds
            part = tensor[index]
        except (IndexError, TypeError, ValueError) as error:
            if isinstance(error, RecordError):
                raise
            fault = f"cannot be indexed with {index!r}, its shape is {list(shape)}: {error}"
            raise IndexingError(fault, tensor=name) from error
        return np.asarray(part) if isinstance(part, np.generic) else part


def dtype_name(view: Any) -> str:
    """Return safetensors' name of a view's element type; numpy's if safetensors has none."""
    kind = STRING if isinstance(view, StringTensor) else getattr(view, "kind", None) or from_numpy(view.dtype)
    return kind.safetensors or kind.name


def on_cpu(device: Any) -> bool:
    """Return True if a device is the CPU, which None is, too."""
    return device is None or str(device).partition(":")[0] == "cpu"


def open_record(source: Any, *, backend: str = "mmap", writable: bool = True) -> Record:
    """Return the record of a file or of bytes; if `writable`, its views may be written, and the file stays as it is.

    Raises:
        FormatError: the source is neither. UnsupportedError: an unknown backend. SourceError: it cannot be read.
    """
    if backend not in ("mmap", "pread"):
        raise UnsupportedError(f"backend {backend!r} is not known; 'mmap' or 'pread'")
    return load_record(source, mode="c" if writable else "r", mmap=True if backend == "mmap" else None)


def write(tensors: Any, dest: Any, metadata: Any) -> None:
    """Write a flat mapping of tensors as an archive; names with dots stay as they are.

    Raises:
        SavingError: `tensors` is not a mapping of names to tensors, or `metadata` not a mapping of names to texts.
    """
    try:
        _check_tensors(tensors, metadata)
        save_record(dict(tensors), dest, metadata=metadata or {})
    except UnsupportedError as error:
        raise SavingError(error.message, path=error.path, tensor=error.tensor) from error.__cause__


def _check_tensors(tensors: Any, metadata: Any) -> None:
    """Raise UnsupportedError unless names are texts, values tensors, and metadata texts by texts."""
    if not isinstance(tensors, Mapping):
        raise UnsupportedError(f"a mapping from names to tensors is expected, not a {type(tensors).__name__}")
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise UnsupportedError(f"key {name!r} is a {type(name).__name__}; tensors have texts for names")
        if not name:
            raise UnsupportedError("an empty key; tensors have texts for names")
        if not (isinstance(value, _TENSORS) or hasattr(value, "__dlpack__") or hasattr(value, "__array__")):
            raise UnsupportedError(f"a {type(value).__name__} is no tensor; metadata= takes texts", tensor=name)
    if not isinstance(metadata, Mapping | None):
        raise UnsupportedError(f"metadata is a mapping from names to texts, not a {type(metadata).__name__}")
    for key, text in (metadata or {}).items():
        if not isinstance(text, str):
            fault = f"metadata {key!r} is a {type(text).__name__}; save str(value), or zcrecord.save_record keeps types"
            raise UnsupportedError(fault)


def write_bytes(tensors: Any, metadata: Any) -> bytes:
    """Return the bytes that `write` writes."""
    file = io.BytesIO()
    write(tensors, file, metadata)
    return file.getvalue()


def _text(value: Any) -> str | None:
    """Return a metadata value as text or JSON; None if it is, or holds, bytes."""
    items = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, memoryview) for item in items):
        return None
    return value if isinstance(value, str) else json.dumps(value)


def no_stand_in(module: str, instead: str) -> Callable[[str], Any]:
    """Return a `__getattr__` that raises an ImportError with advice, for a module without a replacement."""

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        fault = f"safetensors.{module}.{name} has no stand-in here; load with zcrecord.compat.safetensors.numpy, and"
        raise DependencyError(f"{fault} {instead}, or pip install safetensors and import it")

    return missing
