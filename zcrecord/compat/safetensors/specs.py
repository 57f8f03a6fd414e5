"""`safetensors.serialize` and `deserialize`, over archives: tensors by their addresses, and as bytes.

The caller must give valid addresses, as with safetensors: they cannot be checked.
"""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from zcrecord.archive.payloads import check_copies
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK
from zcrecord.compat.safetensors.opening import dtype_name, open_record, write, write_bytes
from zcrecord.dtypes import STRING, DType, by_name, by_safetensors, nbytes
from zcrecord.errors import UnsupportedError
from zcrecord.tensors.interop import FLOAT4_PAIRS
from zcrecord.tensors.packed import PackedTensor
from zcrecord.tensors.strides import as_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor in C order in memory, which must stay valid until the tensor is written.

    Attributes:
        dtype: the element type: given as "float32" or as safetensors' "F32", stored as the latter.
        shape: the dimensions; for `float4_e2m1fn_x2` the last one is given in pairs, and stored in elements.
        data_ptr: the address.
        data_len: the number of bytes.

    Example:
        >>> array = np.ones((2, 3), np.float32)
        >>> TensorSpec(dtype="float32", shape=array.shape, data_ptr=0, data_len=array.nbytes)
        TensorSpec(dtype='F32', shape=[2, 3], data_ptr=0, data_len=24)

    Raises:
        UnsupportedError: an unknown element type, or numbers that no tensor can have.
    """

    dtype: str
    shape: Sequence[int] = field(hash=False)  # a list, as programs expect it
    data_ptr: int
    data_len: int

    def __post_init__(self) -> None:
        """Check all fields, and convert dtype and shape to safetensors' form."""
        kind = _kind_of(self.dtype)
        try:
            shape = list(map(operator.index, self.shape))
            address, length = operator.index(self.data_ptr), operator.index(self.data_len)
        except TypeError:
            values = self.shape, self.data_ptr, self.data_len
            raise UnsupportedError(f"shape, data_ptr and data_len are integers, not {values!r}") from None
        is_possible = max(*shape, length, 0) <= MAX_ARCHIVE_SIZE and address < 1 << 64 and len(shape) <= MAX_RANK
        if min(*shape, address, length) < 0 or not is_possible:
            raise UnsupportedError(f"no tensor has shape {shape}, data_ptr {address} and data_len {length}")
        if self.dtype == FLOAT4_PAIRS and not shape:
            raise UnsupportedError(f"{FLOAT4_PAIRS} of rank 0 is two elements without an axis; its shape is (1,)")
        if self.dtype == FLOAT4_PAIRS:
            shape[-1] *= 2
        object.__setattr__(self, "dtype", kind.safetensors or kind.name)
        object.__setattr__(self, "shape", shape)


def _kind_of(dtype: Any) -> DType:
    """Return the element type of a name: one of this package's or of safetensors', or torch's for pairs of float4."""
    name = "float4_e2m1fn" if dtype == FLOAT4_PAIRS else str(dtype)
    kind = by_name.get(name) or by_safetensors.get(name)
    if kind is None or kind is STRING:
        known = ", ".join(name for name in by_name if name != STRING.name)
        raise UnsupportedError(f"element type {dtype!r} is not known; the known ones are {known}, {FLOAT4_PAIRS}")
    return kind


def serialize(tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return tensors, given by their addresses, as the bytes of an archive.

    Example:
        >>> a = np.ones((2, 3), np.float32)
        >>> spec = TensorSpec(dtype="float32", shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
        >>> [(name, fields["dtype"], fields["shape"]) for name, fields in deserialize(serialize({"a": spec}))]
        [('a', 'F32', [2, 3])]

    Raises:
        UnsupportedError: a value is not a TensorSpec, or its length does not fit its shape.
    """
    return write_bytes(_arrays(tensor_dict), metadata)


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors, given by their addresses, as an archive, whole or not at all.

    Example:
        >>> a = np.ones((2, 3), np.float32)
        >>> spec = TensorSpec(dtype="float32", shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
        >>> serialize_file({"a": spec}, "model.safetensors", metadata={"format": "np"})

    Raises:
        UnsupportedError: as `serialize` does. SourceError: the file system reports an error.
    """
    write(_arrays(tensor_dict), filename, metadata)


def deserialize(bytes: Any) -> list[tuple[str, dict[str, Any]]]:  # the name people pass it by
    """Return (name, {"dtype", "shape", "data"}) of every tensor of an archive or a safetensors file in memory.

    `data` is a new bytearray in C order. The source is any bytes-like object.

    Example:
        >>> a = np.arange(3, dtype=np.uint8)
        >>> spec = TensorSpec(dtype="uint8", shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
        >>> deserialize(serialize({"a": spec}))
        [('a', {'dtype': 'U8', 'shape': [3], 'data': bytearray(b'\\x00\\x01\\x02')})]

    Raises:
        FormatError: the source is neither. UnsupportedError: a tensor of strings, or a source that is not bytes-like.
        LimitError: copies of tensors that share bytes would take far more memory than the source.
    """
    try:
        source = memoryview(bytes)
    except TypeError:
        raise UnsupportedError(f"a {type(bytes).__name__} is not bytes-like; load_file() takes a path") from None
    tensors = []
    with open_record(source, writable=False) as record:
        if texts := [info.name for info in record.infos() if info.dtype is STRING]:
            fault = "strings have no bytes of elements; load it with zcrecord.load_record"
            raise UnsupportedError(fault, tensor=texts[0])
        check_copies(record.archive, record.infos())
        for name, view in record.items():
            data = bytearray(view.packed if isinstance(view, PackedTensor) else as_bytes(view))
            tensors.append((name, {"dtype": dtype_name(view), "shape": list(view.shape), "data": data}))
    return tensors


def _arrays(specs: Any) -> dict[str, Any]:
    """Return tensors over the memory that TensorSpecs name, by name; UnsupportedError for other values."""
    if not isinstance(specs, Mapping):
        raise UnsupportedError(f"a mapping from names to TensorSpec is expected, not a {type(specs).__name__}")
    return {name: _array(name, spec) for name, spec in specs.items()}


def _array(name: Any, spec: Any) -> Any:
    """Return the memory at a TensorSpec's address as a tensor, uncopied, which does not keep it alive."""
    if not isinstance(spec, TensorSpec):
        raise UnsupportedError(f"a TensorSpec is expected, not a {type(spec).__name__}", tensor=str(name))
    kind = _kind_of(spec.dtype)
    size = nbytes(prod(spec.shape), kind.bits)
    if spec.data_len != size:
        fault = f"shape {spec.shape} of {spec.dtype} takes {size} bytes, data_len says {spec.data_len}"
        raise UnsupportedError(fault, tensor=str(name))
    if size and not spec.data_ptr:
        raise UnsupportedError(f"{size} bytes at address 0; is it on another device?", tensor=str(name))
    memory: Any = (ctypes.c_ubyte * size).from_address(spec.data_ptr) if size else b""
    octets = np.frombuffer(memory, np.uint8)
    if kind.packed:
        return PackedTensor(octets, kind, tuple(spec.shape))
    assert kind.numpy is not None  # a TensorSpec never has strings
    return octets.view(kind.numpy).reshape(spec.shape)
