"""Tensors, storages and values of torch in a checkpoint's pickle, without torch: what each function there gives.

A tensor becomes a description: its storage, and where its elements lie there. `pickled` runs the pickle.

Source: torch/_utils.py and torch/serialization.py of torch 2.13; torch.Tensor.set_ for the sizes that are legal.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from math import prod
from operator import mul
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK
from zcrecord.dtypes import DType
from zcrecord.errors import FormatError, LimitError, UnsupportedError, printable
from zcrecord.tensors.interop import FLOAT4_PAIRS
from zcrecord.tensors.packed import PackedTensor
from zcrecord.tensors.strides import c_strides, is_c_order

from . import numpy_types
from .pickled import Function

_BOOL, _FLOAT4 = dtypes.by_name["bool"], dtypes.by_name["float4_e2m1fn"]
_KINDS: dict[str, DType] = {d.torch: d for d in dtypes.DTYPES if d.torch} | {FLOAT4_PAIRS: _FLOAT4}
_WITHOUT = {  # dtypes of torch that archives do not have
    "complex32", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "qint8", "qint32", "quint8", "quint4x2",
    "quint2x4", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
}  # fmt: skip
_STORAGES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128", "Untyped": "uint8", "QInt8": "qint8", "QInt32": "qint32", "QUInt8": "quint8",
    "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4",
}  # fmt: skip
_DTYPE, _DEVICE = "zcr:torch_dtype", "zcr:torch_device"
_DEVICES = re.compile(r"[a-z]{1,16}(:[0-9]{1,3})?")
_SCHEMES = re.compile(r"per_(tensor|channel)_(affine|symmetric|affine_float_qparams)")
_PLAIN_VALUE = "a {} is neither a tensor nor a plain value; take it out of the checkpoint"
_QUANTIZED = "a quantized tensor; save its .int_repr() with scale and zero point, or .dequantize() it"
_UNREADABLE = {
    "_rebuild_qtensor": _QUANTIZED,
    "_rebuild_sparse_tensor": "a sparse tensor; .coalesce() it, save its .indices() and .values(), or .to_dense() it",
    "_rebuild_nested_tensor": "a nested tensor; save the tensors of .unbind()",
    "_rebuild_meta_tensor_no_storage": "a meta tensor has no values; load or initialise it before it is saved",
    "_rebuild_wrapper_subclass": "a tensor that computes its values from others; save those",
}
_ASKED, TIMES = 64 << 20, 4  # limit of the bytes that a pickle's calls make: so many, plus so many times the file


class Unreadable:
    """A value that no archive holds; an error says why if it is in the checkpoint."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why


class TorchValue:
    """A dtype or device: the class name of the module that stands for it in an archive, and its text."""

    __slots__ = ("text", "type_name")

    def __init__(self, type_name: str, text: str) -> None:
        self.type_name, self.text = type_name, text

    def __repr__(self) -> str:
        return self.text


class TorchStorage:
    """Bytes of one or more tensors, from the byte `start` of `octets` on, which are set before a tensor is viewed."""

    __slots__ = ("dtype", "in_file", "nbytes", "octets", "parent", "start")

    def __init__(self, dtype: str, nbytes: int, parent: TorchStorage | None = None, start: int = 0) -> None:
        """Describe `nbytes` bytes; if there is a parent, its own from the byte `start` on."""
        self.dtype, self.nbytes, self.parent, self.start = dtype, nbytes, parent, start
        self.octets: Any = None
        self.in_file = parent is None  # and not a copy

    def memory(self) -> tuple[Any, int]:
        """Return memory with these bytes, and their offset there."""
        octets, start = self.parent.memory() if self.parent else (self.octets, 0)
        if octets is None:
            raise ValueError("a storage without bytes")
        return octets, start + self.start

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _itemsize(self.dtype)

    def swapped(self) -> memoryview:
        """Return a copy of its bytes in which each number is in the other byte order."""
        item = self.itemsize >> self.dtype.startswith("complex")
        count = self.nbytes // item
        return np.ndarray(count, f"u{item}", self.octets, self.start).byteswap().view(np.uint8).data


class TorchTensor:
    """A tensor: elements of `dtype` in a storage, by offset and strides in elements; of float4 in pairs."""

    __slots__ = ("conj", "dtype", "itemsize", "kind", "nbytes", "neg", "offset", "shape", "storage", "strides")

    def __init__(
        self, storage: TorchStorage, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...],
        conj: bool, neg: bool,
    ) -> None:  # fmt: skip
        """Describe a tensor; raises ValueError unless its elements lie in the storage."""
        self.storage, self.dtype, self.offset, self.shape, self.strides = storage, dtype, offset, shape, strides
        self.conj, self.neg, self.kind = conj, neg, _KINDS[dtype]
        numbers = (offset, *shape, *strides)
        if not {int}.issuperset(map(type, numbers)) or min(numbers) < 0 or len(shape) != len(strides):
            raise ValueError("a tensor's offset, sizes or strides are not numbers, or below 0")
        item = self.itemsize = _itemsize(dtype)
        self.nbytes = prod(shape) * item
        if not self.nbytes:
            if prod(n or 1 for n in shape) > MAX_ARCHIVE_SIZE >> 5:
                raise ValueError("a tensor without elements has sizes that no tensor has")
        elif item * (offset + 1 + sum(map(mul, shape, strides)) - sum(strides)) > storage.nbytes:
            raise ValueError("a tensor ends behind its storage")

    @property
    def is_plain(self) -> bool:
        """True if an archive has its bytes just as they lie in the storage, in C order."""
        plain = self.kind.bits >= 8 and self.kind is not _BOOL and not self.conj and not self.neg
        return plain and self.nbytes > 0 and self.storage.in_file and is_c_order(self.shape, self.strides)

    def array(self) -> Any:
        """Return the tensor as an array or PackedTensor, a view unless it has conjugate or negative elements.

        Raises:
            UnsupportedError: a single pair. ValueError: the storage has no bytes.
        """
        if not self.shape and self.dtype == FLOAT4_PAIRS:
            what = f"a {FLOAT4_PAIRS} tensor of rank 0 is two elements without an axis; .reshape(1) it"
            raise UnsupportedError(what)
        native: Any = np.dtype(np.uint8) if self.kind.packed else self.kind.numpy
        if 0 in self.shape:
            view: Any = np.ndarray(self.shape, native)
        else:
            octets, start = self.storage.memory()
            steps = self.strides
            if 1 in self.shape:  # where a stride may be any number
                plain = c_strides(self.shape)
                steps = tuple(c if n == 1 else s for n, s, c in zip(self.shape, steps, plain, strict=True))
            item = self.itemsize
            view = np.ndarray(self.shape, native, octets, start + self.offset * item, tuple(item * s for s in steps))
        if self.conj or self.neg:
            view = np.conjugate(view) if self.conj else view
            view = np.negative(view) if self.neg else view
        if self.kind.packed:
            shape = (*self.shape[:-1], 2 * self.shape[-1])
            return PackedTensor(np.ascontiguousarray(view).reshape(-1), self.kind, shape)
        return view


class _StorageClass(Unreadable):
    """A class of storages: the dtype of the elements."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        super().__init__(_PLAIN_VALUE.format("StorageType"))
        self.dtype = dtype


class TorchNames:
    """What the names and persistent identifiers in one checkpoint's pickle stand for.

    Attributes:
        storages: by their keys.
    """

    def __init__(self, size: int, place: Callable[[str, TorchStorage], None]) -> None:
        """Serve a file of `size` bytes; `place` is called with each new storage and its key."""
        self.storages: dict[str, TorchStorage] = {}
        self._place, self._asked, self._size = place, 0, size
        rebuild: dict[str, Callable[..., Any]] = {
            "_rebuild_tensor": self._tensor, "_rebuild_tensor_v2": self._tensor, "_rebuild_tensor_v3": self._tensor_v3,
            "_rebuild_parameter": _same, "_rebuild_parameter_with_state": _same,
            "_rebuild_device_tensor_from_cpu_tensor": _on_device,
            **{name: lambda *_, why=why: Unreadable(why) for name, why in _UNREADABLE.items()},
        }  # fmt: skip
        self._rebuild = {("torch._utils", name): Function(call) for name, call in rebuild.items()}
        calls: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._tensor", "_rebuild_from_type_v2"): self._from_type,
            ("torch", "Size"): _size,
            ("torch", "device"): _device,
            ("torch.serialization", "_get_layout"): lambda _: Unreadable(_PLAIN_VALUE.format("layout")),
            ("collections", "OrderedDict"): self._ordered,
            ("collections", "Counter"): _counter,
            ("builtins", "complex"): _complex,
            ("builtins", "set"): lambda *_: Unreadable(_PLAIN_VALUE.format("set")),
            ("builtins", "bytes"): self._octets,
            ("builtins", "bytearray"): self._octets,
            ("_codecs", "encode"): self._octets,
        }
        self._names = numpy_types.NAMES | self._rebuild | {key: Function(call) for key, call in calls.items()}

    def named(self, module: str, name: str) -> Any:
        """Return what a name stands for; FormatError for any that torch would not load from untrusted files."""
        module = "builtins" if module == "__builtin__" else module  # as Python 2 had it
        found = self._names.get((module, name))
        if found is not None:
            return found
        if module in ("torch", "torch.cuda", "torch.storage") and name.removesuffix("Storage") in _STORAGES:
            return _StorageClass(_STORAGES[name.removesuffix("Storage")])
        if module == "torch" and (name in _KINDS or name in _WITHOUT):
            return TorchValue(_DTYPE, name)
        if (module == "torch" and _SCHEMES.fullmatch(name)) or (module, name) in _CLASSES:
            return Unreadable(_PLAIN_VALUE.format(f"torch.{name}"))
        label = printable(f"{module}.{name}".removeprefix("builtins."))
        what = f"holds an object of {label}, and loading that may run code; have whoever made the file save plain"
        raise FormatError(f"{what} tensors, as torch.save(model.state_dict(), ...) does")

    def persistent(self, identifier: Any) -> TorchStorage:
        """Return the storage of ("storage", class, key, device, elements); a sixth item describes a view of it."""
        if type(identifier) is not tuple or len(identifier) not in (5, 6) or identifier[0] != "storage":
            raise ValueError("a persistent identifier that is no storage")
        _, kind, key, _, count, *view = identifier
        if type(kind) is not _StorageClass or type(key) is not str:
            raise ValueError("a storage without class or key")
        storage = self.storages.get(key)
        if storage is None or not storage.nbytes:
            storage = TorchStorage(kind.dtype, _number(count) * _itemsize(kind.dtype))
            self.storages[key] = storage
            self._place(key, storage)
        if not view or view[0] is None:
            return storage
        key, start, count = view[0]
        item = _itemsize(storage.dtype)
        if type(key) is not str or storage.parent or item * (_number(start) + _number(count)) > storage.nbytes:
            raise ValueError("a view that ends behind its storage")
        return self.storages.setdefault(key, TorchStorage(storage.dtype, count * item, storage, start * item))

    def _tensor(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any = False, _hooks: Any = None,
        metadata: Any = None, dtype: str | None = None,
    ) -> TorchTensor | Unreadable:  # fmt: skip
        if type(storage) is not TorchStorage or type(size) is not tuple or type(stride) is not tuple:
            raise ValueError("a tensor without storage, sizes or strides")
        dtype = dtype or storage.dtype
        if dtype in _WITHOUT:
            return Unreadable(f"dtype torch.{dtype} has no place in an archive; convert the tensor with .to(...) first")
        if len(size) > MAX_RANK:
            return Unreadable(f"a tensor of {len(size)} dimensions, at most {MAX_RANK} are legal; .reshape() it")
        bits = metadata if type(metadata) is dict else {}
        return TorchTensor(storage, dtype, offset, size, stride, bits.get("conj") is True, bits.get("neg") is True)

    def _tensor_v3(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any,
        metadata: Any = None,
    ) -> TorchTensor | Unreadable:  # fmt: skip
        return self._tensor(storage, offset, size, stride, metadata=metadata, dtype=_dtype(dtype))

    def _from_type(self, function: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
        if function not in self._rebuild.values() or type(arguments) is not tuple:
            raise ValueError("a tensor that no function of torch makes")
        return function.call(*arguments)

    def _ask(self, nbytes: int) -> None:
        """Raise LimitError before the calls in a pickle have made far more bytes than the file has."""
        self._asked += nbytes
        if self._asked > TIMES * self._size + _ASKED:
            what = f"its pickle asks for {self._asked} bytes, the file has {self._size}; the file is malicious"
            raise LimitError(what)

    def _octets(self, value: Any = b"", encoding: Any = "latin1") -> bytes:
        """Return the bytes of a text, as pickles of protocol 2 have them; of a number so many zeros."""
        if encoding not in ("latin1", "latin-1") or not isinstance(value, str | bytes | int):
            raise ValueError("bytes that are made of no text")
        self._ask(_number(value) if isinstance(value, int) else len(value))
        return value.encode("latin1") if isinstance(value, str) else bytes(value)

    def _ordered(self, items: Any = ()) -> dict[str, Any]:
        """Return a dict; Python 2 had its items as an argument."""
        self._ask(64 * len(items))
        if items and not all(type(pair) in (list, tuple) and len(pair) == 2 and type(pair[0]) is str for pair in items):
            raise ValueError("an OrderedDict that is made of no items")
        return dict(items)


_CLASSES = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a number of bytes or elements that is none")
    return value


@functools.cache
def _itemsize(dtype: str) -> int:
    return max(_KINDS[dtype].bits // 8, 1) if dtype in _KINDS else 1


def _dtype(value: Any) -> str:
    if type(value) is not TorchValue or value.type_name != _DTYPE:
        raise ValueError("a tensor of no dtype")
    return value.text


def _same(tensor: Any, *_: Any) -> Any:
    """Return the tensor of a parameter."""
    if not isinstance(tensor, TorchTensor | Unreadable):
        raise ValueError("a parameter that is no tensor")
    return tensor


def _on_device(tensor: Any, dtype: Any, *_: Any) -> Any:
    if isinstance(tensor, TorchTensor) and tensor.dtype != _dtype(dtype):
        return Unreadable(f"a tensor of torch.{tensor.dtype} that becomes one of torch.{dtype.text}; convert it")
    return _same(tensor)


def _size(sizes: Any = ()) -> tuple[Any, ...]:
    if type(sizes) is not tuple:
        raise ValueError("a torch.Size that is no tuple")
    return sizes


def _device(kind: Any, index: Any = None) -> TorchValue:
    text = f"{kind}:{_number(index)}" if index is not None else kind
    if type(kind) is not str or not _DEVICES.fullmatch(text):
        raise ValueError("a device that torch does not have")
    return TorchValue(_DEVICE, text)


def _counter(counts: Any) -> dict[Any, Any]:
    if type(counts) is not dict:
        raise ValueError("a Counter that is made of no dict")
    return counts


def _complex(real: Any, imag: Any) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise ValueError("a complex number of no floats")
    return complex(real, imag)
