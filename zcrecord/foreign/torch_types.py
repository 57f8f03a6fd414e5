"""Tensors, storages and values of torch in a checkpoint's pickle, without torch: what each name there stands for.

A tensor becomes a description: its storage, and where its elements lie there. `pickled` runs the pickle.

Source: torch/_utils.py and torch/serialization.py of torch 2.13; torch.Tensor.set_ for the sizes that are legal.
"""

from __future__ import annotations

import datetime
import functools
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from operator import mul
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.conventions import FACTORIES
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK
from zcrecord.errors import FormatError, LimitError, UnsupportedError, printable
from zcrecord.tensors.interop import FLOAT4_PAIRS
from zcrecord.tensors.packed import PackedTensor
from zcrecord.tensors.strides import c_strides, is_c_order

from .numpy_types import NAMES
from .pickled import Function, Stateful, check_keys, expect_type

_BOOL = dtypes.by_name["bool"]
_KINDS = {d.torch: d for d in dtypes.DTYPES if d.torch} | {FLOAT4_PAIRS: dtypes.by_name["float4_e2m1fn"]}
_OTHERS = re.compile(r"complex32|bits(8|16|1x8|2x4|4x2)|qint(8|32)|quint(8|4x2|2x4)|u?int[1-7]")
_STORAGES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128", "Untyped": "uint8", "QInt8": "qint8", "QInt32": "qint32", "QUInt8": "quint8",
    "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4",
}  # fmt: skip
_SIGNED = "complex64", "complex128", "float32", "float64"  # a conjugate tensor's imaginary part is stored negated
_DEVICES = re.compile(r"[a-z]{1,16}(:[0-9]{1,3})?")
_OBJECTS = re.compile(r"torch\.(per_\w+|Tensor|nn\.parameter\.(Parameter|Buffer))|torch\.serialization\._get_layout")
_PLAIN_VALUE = "a {} is neither a tensor nor a plain value; take it out of the checkpoint"
_UNREADABLE = {
    "_rebuild_qtensor": "a quantized tensor; save its .int_repr() with scale and zero point, or .dequantize() it",
    "_rebuild_sparse_tensor": "a sparse tensor; .coalesce() it, save its .indices() and .values(), or .to_dense() it",
    "_rebuild_nested_tensor": "a nested tensor; save the tensors of .unbind()",
    "_rebuild_meta_tensor_no_storage": "a meta tensor has no values; load or initialise it before it is saved",
    "_rebuild_wrapper_subclass": "a tensor that computes its values from others; save those",
}
_PATHLIB = "pathlib", "pathlib._local"  # Python 3.13 has the second name
_PATHS = [
    (prefix + name, kind)
    for prefix in ("", "Pure")
    for name, kind in (("PosixPath", PurePosixPath), ("WindowsPath", PureWindowsPath))
]
_ODD_NUMBERS = "a tensor's offset, sizes or strides are not numbers, or below 0"
_CONTAINER, _CHARACTER = 640, 64  # bytes that are reckoned for an empty container, and for a character of a path
_SAME = "_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_device_tensor_from_cpu_tensor"
_CALL_BYTES, _TIMES = 64 << 20, 4  # limit of the bytes that a pickle's calls make: so many, plus so many times the file


@dataclass(slots=True, eq=False)
class TorchValue:
    """A value of torch that is no tensor: the type name of its module and its text.

    One that no archive holds has the reason as its text; its kind is a dtype if it is a storage's class, or "".
    """

    kind: str
    text: str


@dataclass(slots=True, eq=False)
class TorchStorage:
    """The bytes of tensors, from the byte `start` of `octets` on, which are the file's or a copy."""

    dtype: str
    nbytes: int
    octets: Any = None
    start: int = 0
    in_file: bool = False

    def swap(self) -> None:
        """Replace its bytes by a copy in which each number is in the other byte order."""
        item = itemsize(self.dtype) // (2 if self.dtype.startswith("complex") else 1)  # a complex number is two
        numbers = np.ndarray(self.nbytes // item, f"u{item}", self.octets, self.start)
        self.octets, self.start, self.in_file = numbers.byteswap().view(np.uint8).data, 0, False


class TorchTensor:
    """A tensor: elements of `dtype` in a storage, by offset and strides in elements; of float4 in pairs."""

    __slots__ = ("dtype", "in_order", "itemsize", "kind", "metadata", "nbytes", "offset", "shape", "storage", "strides")

    def __init__(self, storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any, metadata: Any) -> None:
        """Describe a tensor; raises ValueError unless its elements lie in the storage."""
        self.storage, self.dtype, self.offset, self.shape, self.strides = storage, dtype, offset, shape, strides
        self.kind, self.metadata = _KINDS[dtype], metadata
        if not {int}.issuperset(map(type, (offset, *shape, *strides))) or offset < 0:
            raise ValueError(_ODD_NUMBERS)
        count, last, self.in_order = _extent(shape, strides)
        item = self.itemsize = itemsize(dtype)
        self.nbytes = count * item
        if count and item * (offset + last) > storage.nbytes:
            raise ValueError("a tensor ends behind its storage")
        if metadata and dtype not in _SIGNED:
            raise ValueError(f"a tensor of {dtype} is conjugate or negated")

    @property
    def start(self) -> int:
        """Offset in bytes of the first element in `storage.octets`."""
        return int(self.storage.start + self.itemsize * self.offset)

    @property
    def is_plain(self) -> bool:
        """True if an archive has its bytes just as they lie in the file, in C order; False without bytes."""
        is_unconverted = self.kind.bits >= 8 and self.kind is not _BOOL and not self.metadata
        return self.nbytes > 0 and is_unconverted and self.in_order and bool(self.storage.in_file)

    def array(self) -> Any:
        """Return an array or PackedTensor, a view unless conjugate or negated; UnsupportedError if numpy has none."""
        dtype: Any = np.dtype(np.uint8) if self.kind.packed else self.kind.numpy
        if dtype is None or (self.kind.packed and not self.shape):
            raise UnsupportedError(f"a tensor of torch.{self.dtype} and shape {self.shape}, which numpy cannot have")
        if self.nbytes and self.storage.octets is None:
            raise FormatError("no torch checkpoint, or a damaged one: a storage is missing; copy it again")
        octets, start, strides = None, 0, c_strides(self.shape)
        if self.nbytes:  # the stride of an axis of length 1 may be any number
            octets, start = self.storage.octets, self.start
            strides = tuple(s if n > 1 else c for n, s, c in zip(self.shape, self.strides, strides, strict=True))
        view: Any = np.ndarray(self.shape, dtype, octets, start, tuple(self.itemsize * s for s in strides))
        view = np.conjugate(view) if self.metadata.get("conj") else view
        view = np.negative(view) if self.metadata.get("neg") else view
        if not self.kind.packed:
            return view
        return PackedTensor(np.ascontiguousarray(view).reshape(-1), self.kind, (*self.shape[:-1], 2 * self.shape[-1]))


class Namespace(Stateful):
    """An object with fields: the type name of its module in archives; `state` has the fields by name."""

    __slots__ = ("type_name",)

    def __init__(self, type_name: str) -> None:
        self.type_name, self.state = type_name, {}


class TorchNames:
    """Finds what names and persistent identifiers in a checkpoint's pickle stand for; `storages` has those by key."""

    def __init__(self, size: int, place: Callable[[str, TorchStorage], None], whole: TorchNames | None = None) -> None:
        """Serve a file of `size` bytes; `place` is called with each new storage and its key, and sets its bytes.

        `whole` has the names of a folder if the file is a part of one: its limit of memory is that of all parts.
        """
        self.storages: dict[str, TorchStorage] = {}
        self._place, self._call_nbytes, self._size, self._whole = place, 0, size, whole or self
        if whole is not None:
            whole._size += size
        self._hashes: Counter[int] = Counter()
        tensors: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"), self._tensor),
            **dict.fromkeys(_SAME, lambda t, *_: t if type(t) is TorchValue else expect_type(TorchTensor, t)),
            **{name: functools.partial(_unreadable, reason) for name, reason in _UNREADABLE.items()},
        }  # fmt: skip
        calls: dict[str, Callable[..., Any]] = {
            "torch._tensor._rebuild_from_type_v2": self._from_type,
            "torch.Size": lambda sizes=(): expect_type(tuple, sizes),
            "torch.device": _device,
            "collections.OrderedDict": self._ordered_dict,
            "collections.defaultdict": lambda factory=None: defaultdict(self._factories.get(factory)),
            "collections.deque": self._deque,
            "builtins.set": lambda items: set(self._check_set_items(items)),
            "builtins.frozenset": lambda items: frozenset(self._check_set_items(items)),
            "types.SimpleNamespace": lambda: Namespace("zcr:namespace"),
            "argparse.Namespace": lambda: Namespace("zcr:argparse_namespace"),
            "datetime.datetime": _datetime,
            "datetime.date": lambda data: _datetime(expect_type(bytes, data) + bytes(6)).date(),
            "datetime.time": lambda data, zone=None: _datetime(b"\0\1\1\1" + expect_type(bytes, data), zone).timetz(),
            "datetime.timedelta": datetime.timedelta,
            "datetime.timezone": datetime.timezone,
            **{f"{module}.{name}": functools.partial(self._path, kind) for module in _PATHLIB for name, kind in _PATHS},
            "collections.Counter": lambda counts: expect_type(dict, counts),
            "builtins.complex": lambda real, imag: complex(expect_type(float, real), expect_type(float, imag)),
            "torch.serialization._get_layout": functools.partial(_unreadable, _PLAIN_VALUE.format("layout")),
            **dict.fromkeys(("builtins.bytes", "builtins.bytearray", "_codecs.encode"), self._octets),
        }
        self._tensors = {f"torch._utils.{name}": Function(call) for name, call in tensors.items()}
        self._names = NAMES | self._tensors | {name: Function(call) for name, call in calls.items()}
        self._factories = {}
        for name, kind in (FACTORIES | {"long": int, "unicode": str}).items():  # two of Python 2, which torch writes
            value = self._names.setdefault(f"builtins.{name}", TorchValue("", _PLAIN_VALUE.format(f"class {name}")))
            self._factories[value] = kind

    def find_class(self, module: str, name: str) -> Any:
        """Return the value of a name; FormatError for any that torch would not load from untrusted files."""
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")  # as Python 2 had it
        if (value := self._names.get(full)) is not None:
            return value
        storage = _STORAGES.get(name.removesuffix("Storage")) if name.endswith("Storage") else None
        if storage and module in ("torch", "torch.cuda", "torch.storage"):
            return TorchValue(storage, _PLAIN_VALUE.format("StorageType"))
        if module == "torch" and (name in _KINDS or _OTHERS.fullmatch(name)):
            return TorchValue("zcr:torch_dtype", name)
        if _OBJECTS.fullmatch(full):
            return TorchValue("", _PLAIN_VALUE.format(full))
        fault = f"holds an object of {printable(full.removeprefix('builtins.'))}, and loading that may run code; have"
        fault += " whoever made the file save plain tensors, as torch.save(model.state_dict(), ...) does"
        raise FormatError(fault)

    def persistent_load(self, identifier: Any) -> TorchStorage:
        """Return the storage of ("storage", class, key, device, elements), behind which None may stand."""
        name, kind, key, _, count = identifier if identifier[5:] != (None,) else identifier[:5]
        if (name, type(kind), type(key), type(count)) != ("storage", TorchValue, str, int) or count < 0:
            raise ValueError("a persistent identifier that is no storage")
        storage = self.storages.get(key)
        if storage is None:
            storage = self.storages[key] = TorchStorage(kind.kind, count * itemsize(kind.kind))
            self._place(key, storage)
        # Tensors without elements may share a storage, each of its own dtype.
        return storage if storage.nbytes else TorchStorage(kind.kind, 0)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> TorchTensor | TorchValue:
        """Return a tensor, or why archives have none; `more`: requires_grad, hooks, perhaps dtype and metadata."""
        if type(storage) is not TorchStorage or type(size) is not tuple or type(stride) is not tuple:
            raise ValueError("a tensor without storage, sizes or strides")
        dtype, metadata = storage.dtype, more[2] if len(more) > 2 else None
        if type(metadata) is TorchValue:  # _rebuild_tensor_v3
            dtype, metadata = metadata.text, more[3] if len(more) > 3 else None
        if dtype not in _KINDS:
            advice = "convert the tensor with .to(...) first"
            return TorchValue("", f"dtype torch.{dtype} has no place in an archive; {advice}")
        if len(size) > MAX_RANK:
            return TorchValue("", f"a tensor of {len(size)} dimensions, at most {MAX_RANK} are legal; .reshape() it")
        return TorchTensor(storage, dtype, offset, size, stride, expect_type(dict, metadata) if metadata else {})

    def _from_type(self, function: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
        """Return the tensor of a subclass of torch.Tensor, which `function` makes; its class and state are left out."""
        if function not in self._tensors.values():
            raise ValueError("a tensor that no function of torch makes")
        return function.call(*expect_type(tuple, arguments))

    def _path(self, kind: Any, *parts: Any) -> Path:
        """Return a path of any system, as one of this system; `kind` is its class, `parts` its components."""
        self._reserve(sum(_CHARACTER * len(expect_type(str, part)) for part in parts))
        return Path(kind(*parts).as_posix())

    def _deque(self, _items: Any = (), maxlen: Any = None) -> deque[Any]:
        """Return an empty deque: its items follow."""
        self._reserve(_CONTAINER)
        return deque(maxlen=maxlen)

    def _check_set_items(self, items: Any) -> list[Any]:
        """Return the items of a set; raises what `check_keys` does, and LimitError for too many."""
        checked: list[Any] = expect_type(list, items)
        self._reserve(_CONTAINER + 128 * len(checked))
        check_keys(checked, None, self._hashes)
        return checked

    def _reserve(self, nbytes: int) -> None:
        """Count bytes that a call is about to make; LimitError once they are far more than the file has."""
        whole = self._whole
        whole._call_nbytes += nbytes
        if whole._call_nbytes > _TIMES * whole._size + _CALL_BYTES:
            fault = f"its pickle asks for {whole._call_nbytes} bytes, the file has {whole._size}; the file is malicious"
            raise LimitError(fault)

    def _octets(self, value: Any = b"", encoding: Any = "latin1") -> bytes:
        """Return the bytes of a latin-1 text, as protocol 2 pickles them; for a number n, n zero bytes."""
        if encoding not in ("latin1", "latin-1") or type(value) not in (str, bytes, int):
            raise ValueError("bytes of what is neither a text nor a number")
        self._reserve(abs(value) if isinstance(value, int) else len(value))
        return value.encode("latin1") if isinstance(value, str) else bytes(value)

    def _ordered_dict(self, items: Any = ()) -> dict[str, Any]:
        """Return an OrderedDict; `items` are a list of pairs, as Python 2 pickled it, or nothing."""
        self._reserve(_CONTAINER + 64 * len(items))
        if items and not all(len(pair) == 2 and type(pair[0]) is str for pair in expect_type(list, items)):
            raise ValueError("an OrderedDict of what is no list of pairs")
        return OrderedDict(items)


@functools.lru_cache(1024)
def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, bool]:
    """Return a tensor's element count, the extent in elements, and if it is in C order; ValueError for no tensor."""
    if len(shape) != len(strides) or min(*shape, *strides, 0, 0) < 0:
        raise ValueError(_ODD_NUMBERS)
    count = prod(shape)
    if not count and prod(n or 1 for n in shape) > MAX_ARCHIVE_SIZE >> 5:
        raise ValueError("a tensor without elements has sizes that no tensor has")
    return count, 1 + sum(map(mul, shape, strides)) - sum(strides), is_c_order(shape, strides)


@functools.cache
def itemsize(dtype: str) -> int:
    """Return the bytes of an element, of float4 of a pair; 1 for types that archives do not have."""
    return max(_KINDS[dtype].bits // 8, 1) if dtype in _KINDS else 1


def _unreadable(reason: str, *_: Any) -> TorchValue:
    return TorchValue("", reason)


def _datetime(data: Any, zone: Any = None) -> datetime.datetime:
    """Return the time in the ten bytes of a pickled datetime, where the month's high bit is `fold`; or ValueError."""
    year, fold_month, day, hour, minute, second, high, low = struct.unpack(">H5BBH", expect_type(bytes, data))
    fold, month = divmod(fold_month, 128)
    return datetime.datetime(year, month, day, hour, minute, second, high << 16 | low, zone, fold=fold)


def _device(kind: Any, index: Any = None) -> TorchValue:
    """Return a device, such as cuda:0, as the object that archives have for it; ValueError if torch has none such."""
    text = expect_type(str, kind) if index is None else f"{expect_type(str, kind)[:16]}:{expect_type(int, index)}"
    if not _DEVICES.fullmatch(text):
        raise ValueError("a device that torch does not have")
    return TorchValue("zcr:torch_device", text)
