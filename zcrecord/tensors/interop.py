"""Tensors of other libraries as numpy arrays: views of the host's memory, copies of a device's.

Imports neither torch nor jax. A tensor on a device is only described, so that it can be fetched when its turn comes.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.dtypes import Array, DType
from zcrecord.errors import UnsupportedError

from .packed import PackedTensor
from .strides import reach

# torch's name for float4_e2m1fn, two elements to a byte, the first in the low bits as here, its last axis half as long.
# Source: torch/headeronly/util/Float4_e2m1fn_x2.h
FLOAT4_PAIRS = "float4_e2m1fn_x2"

_HOST = {1, 3, 11, 13}  # kDLCPU, kDLCUDAHost, kDLROCMHost, kDLCUDAManaged: numpy reads these in place
_FAILURES = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)
_torch_kinds: dict[Any, DType] = {}


class DeviceTensor(NamedTuple):
    """A tensor that `fetch` copies to the host's memory; those with equal `key` are the same memory, seen alike."""

    kind: DType
    shape: tuple[int, ...]
    key: Hashable
    fetch: Callable[[], Array | PackedTensor]


def as_array(value: Any) -> Array | PackedTensor:
    """Return any library's tensor as an ndarray, or as a PackedTensor if its elements are narrower than a byte.

    Copied once are tensors of a device, jax arrays in several pieces or of elements narrower than a byte, torch tensors
    that are conjugate or negated views, and all that `__array__` copies; nothing else is.
    """
    view = as_view(value)
    return view.fetch() if isinstance(view, DeviceTensor) else view


def as_view(value: Any) -> Array | PackedTensor | DeviceTensor:
    """Return the same as `as_array`, but describe tensors of a device; UnsupportedError if numpy has no view."""
    try:
        if isinstance(value, np.ndarray | np.generic):
            return np.asarray(value)
        if (torch := _library_of(value, "torch", "Tensor")) is not None:
            return _view_torch(value, torch)
        if (jax := _library_of(value, "jax", "Array")) is not None:
            return _view_jax(value, jax)
        return _view_other(value)
    except UnsupportedError:
        raise
    except _FAILURES as error:
        raise UnsupportedError(f"numpy cannot view this {type(value).__name__}: {error}") from error


def is_foreign(value: Any) -> bool:
    """Return True if a value is an array of torch or jax."""
    return any(_library_of(value, *names) is not None for names in (("torch", "Tensor"), ("jax", "Array")))


def _library_of(value: Any, module: str, class_name: str) -> Any:
    """Return an imported module if a value is an instance of that class of it, else None; imports nothing."""
    library = sys.modules.get(module)
    return library if library is not None and isinstance(value, getattr(library, class_name, ())) else None


def _view_other(value: Any) -> Array | DeviceTensor:
    """View a value by DLPack, `__array__` or the buffer protocol, tried in that order."""
    if hasattr(value, "__dlpack__"):
        if _is_on_device(value):
            return _describe_dlpack(value)
        try:
            return np.from_dlpack(value)
        except _FAILURES:
            if not hasattr(value, "__array__"):
                raise
    if hasattr(value, "__array__"):
        return np.asarray(value)
    try:
        octets = memoryview(value)
    except TypeError:
        fault = f"a {type(value).__name__} is neither a tensor, an attribute nor a module; {_saving_advice(value)}"
        raise UnsupportedError(fault) from None
    return np.asarray(octets)


def _saving_advice(value: Any) -> str:
    """Return advice what to save instead of a value that cannot be saved."""
    if callable(value) or isinstance(value, np.dtype):
        return "leave it out, or save its name"
    if isinstance(value, io.IOBase):
        return "save the file's path"
    if isinstance(value, Iterator):
        return "save a list of its items"
    if hasattr(value, "bit_generator"):
        return "save its .bit_generator.state"
    for name in ("get_state", "getstate"):  # of other random generators
        if hasattr(value, name):
            return f"save its .{name}()"
    return "save a dict of what it holds"


def _is_on_device(value: Any) -> bool:
    """Return True if a value with DLPack says that it lies in memory that numpy cannot read."""
    try:
        return int(value.__dlpack_device__()[0]) not in _HOST
    except _FAILURES:
        return False


def _describe_dlpack(value: Any) -> DeviceTensor:
    def fetch() -> Array:
        try:
            return np.from_dlpack(value, device="cpu", copy=True)
        except _FAILURES as error:  # numpy before 2.1, or an exporter of an older DLPack
            if hasattr(value, "__array__"):
                with contextlib.suppress(*_FAILURES):
                    return np.asarray(value)
            fault = f"numpy cannot copy this {type(value).__name__} from its device: {error}"
            raise UnsupportedError(f"{fault}; hand over a copy in the host's memory") from error

    return DeviceTensor(dtypes.as_dtype(value.dtype), tuple(value.shape), ("dlpack", id(value)), fetch)


def _plain(tensor: Any, torch: Any) -> Any:
    """Return a tensor of torch's own class over the same memory, detached; UnsupportedError without dense memory."""
    kind = type(tensor)
    if kind is torch.Tensor:
        plain = tensor.detach()
    elif kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedError(_why_not_wrapped(tensor))
    elif torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedError("an uninitialized parameter has no values; run the module once, or load its weights")
    else:
        from torch._C import DisableTorchFunctionSubclass  # a subclass may have its own idea of what detach() does

        with DisableTorchFunctionSubclass():
            plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_quantized or plain.is_nested or plain.is_meta:
        raise UnsupportedError(_why_not_dense(plain, torch))
    return plain


def _why_not_wrapped(tensor: Any) -> str:
    """Return the fault of a tensor whose class computes its values, with advice."""
    name = type(tensor).__name__
    if hasattr(tensor, "fake_mode"):
        return f"a {name} has no values; save the real tensor"
    if hasattr(tensor, "full_tensor"):
        return f"a {name} is spread over processes; save its .full_tensor(), or the .to_local() of each"
    if hasattr(tensor, "get_mask"):
        return f"a {name}; save its .get_data() and .get_mask() as two tensors"
    if tensor.is_nested:
        return "a nested tensor; save its .values() and .offsets(), or the tensors of .unbind()"
    return f"a {name} computes its values from other tensors; save those, or what its class offers as a plain tensor"


def _why_not_dense(tensor: Any, torch: Any) -> str:
    """Return the fault of a tensor without strided memory of plain elements, with advice."""
    if tensor.is_meta:
        return "a meta tensor has no values; load or initialise it before it is saved"
    if tensor.is_nested:
        return "a nested tensor; save the tensors of .unbind()"
    if tensor.is_quantized:
        return "a quantized tensor; save its .int_repr() with scale and zero point, or .dequantize() it"
    indices = ""
    if tensor.layout is torch.sparse_coo:
        indices = ".coalesce() it, save its .indices() and .values(), or "
    elif str(tensor.layout).startswith("torch.sparse"):
        indices = "save its .values() and both kinds of indices, or "
    return f"a tensor of layout {tensor.layout}; {indices}.to_dense() it"


def _torch_kind(tensor: Any, torch: Any) -> DType:
    """Return the element type of a torch tensor; UnsupportedError if the format has none."""
    if not _torch_kinds:
        known = {d.torch: d for d in dtypes.DTYPES if d.torch} | {FLOAT4_PAIRS: dtypes.by_name["float4_e2m1fn"]}
        _torch_kinds.update({getattr(torch, name): d for name, d in known.items() if hasattr(torch, name)})
    kind = _torch_kinds.get(tensor.dtype)
    if kind is None:
        fault = f"dtype {tensor.dtype} has no place in an archive; convert the tensor with .to(...) first"
        raise UnsupportedError(fault)
    return kind


def _torch_shape(tensor: Any, kind: DType) -> tuple[int, ...]:
    """Return the shape in elements; torch counts pairs of float4 ones."""
    shape = tuple(tensor.shape)
    if not kind.packed:
        return shape
    if not shape:
        raise UnsupportedError(f"a {FLOAT4_PAIRS} tensor of rank 0 is two elements without an axis; .reshape(1) it")
    return (*shape[:-1], 2 * shape[-1])


def _view_torch(value: Any, torch: Any) -> Array | PackedTensor | DeviceTensor:
    """View a torch tensor in the host's memory, or describe one on a device."""
    tensor = _plain(value, torch)
    kind = _torch_kind(tensor, torch)
    if tensor.is_cpu:
        return _torch_array(tensor, kind, torch)

    def fetch() -> Array | PackedTensor:
        return _torch_array(_plain(tensor.cpu(), torch), kind, torch)

    where = tensor.data_ptr() or ("object", id(value))  # a device without addresses: the same object is the same tensor
    form = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return DeviceTensor(kind, _torch_shape(tensor, kind), ("torch", str(tensor.device), where, form), fetch)


def _torch_array(tensor: Any, kind: DType, torch: Any) -> Array | PackedTensor:
    """Return a plain torch tensor of the CPU as an array over its memory, which the array keeps."""
    dtype = kind.numpy
    assert dtype is not None
    _check_storage(tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if dtype.isbuiltin != 2:  # 2: a dtype of ml_dtypes, which torch does not know
        return np.asarray(tensor.numpy())
    raw: Array = tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).numpy()
    if kind.packed:
        return PackedTensor(np.ascontiguousarray(raw).reshape(-1), kind, _torch_shape(tensor, kind))
    return raw.view(dtype)


def _check_storage(tensor: Any) -> None:
    """Raise UnsupportedError if a tensor's storage was made smaller than the tensor: reading it would crash."""
    if not tensor.numel():
        return
    last = tensor.storage_offset() + reach(tensor.shape, tensor.stride())[1]
    needed, stored = (last + 1) * tensor.itemsize, tensor.untyped_storage().nbytes()
    if stored < needed:
        fault = f"its storage holds {stored} of the {needed} bytes it reaches; it was freed or resized"
        raise UnsupportedError(f"{fault}, load or gather it before it is saved")


def _view_jax(value: Any, jax: Any) -> Array | DeviceTensor:
    """View a jax array on one CPU device, or describe any other."""
    _check_jax(value, jax)
    devices = value.devices()
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        return np.asarray(value)
    kind = dtypes.from_numpy(np.dtype(value.dtype))
    return DeviceTensor(kind, tuple(value.shape), ("jax", id(value)), lambda: _gather_shards(value, jax))


def _check_jax(value: Any, jax: Any) -> None:
    """Raise UnsupportedError for an array that is traced, deleted or spread over processes."""
    if isinstance(value, jax.core.Tracer):
        raise UnsupportedError("a traced array has no values; save outside of jit, grad and vmap")
    if value.is_deleted():
        raise UnsupportedError("an array that was deleted or donated has no values; save it before that")
    if not value.is_fully_addressable and not value.is_fully_replicated:
        fault = "an array that is spread over processes"
        raise UnsupportedError(f"{fault}; gather it with jax.experimental.multihost_utils.process_allgather(...)")


def _gather_shards(value: Any, jax: Any) -> Array:
    """Return an array in one piece of the host's memory; jax keeps no copy, as it would after np.asarray(value)."""
    shards = value.addressable_shards
    if value.is_fully_replicated:
        return _to_host(shards[0].data, jax)
    out = np.empty(value.shape, value.dtype)
    for shard in shards:
        if shard.replica_id == 0:
            out[shard.index] = _to_host(shard.data, jax)
    return out


def _to_host(value: Any, jax: Any) -> Array:
    """Return a jax array of one device as an array in the host's memory."""
    try:
        host = jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return np.asarray(value)
    return np.asarray(jax.device_put(value, host))


def pytree_children(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return (key, child) pairs of an instance of a class registered with jax as a pytree; None for all others."""
    tree_util = getattr(sys.modules.get("jax"), "tree_util", None)
    if tree_util is None or value is None or tree_util.default_registry.flatten_one_level(value) is None:
        return None
    leaves, _ = tree_util.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    children = [(path_key(path[0]), child) for path, child in leaves]
    key, count = Counter(key for key, _ in children).most_common(1)[0] if children else (None, 0)
    if count > 1:
        raise UnsupportedError(f"the pytree {type(value).__name__} has two children with the key {key!r}; rename one")
    return children


def path_key(entry: Any) -> Any:
    """Return one step of a path in a pytree as a key: numbers as text, other objects as they are."""
    for attribute in ("name", "idx", "key"):
        if hasattr(entry, attribute):
            key = getattr(entry, attribute)
            return str(key) if isinstance(key, int) else key
    return str(entry)
