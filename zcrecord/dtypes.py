"""THE dtype table: every element type the format knows, with its name in each neighbouring world.

Source: codes are those of `schema/zcrecord.fbs`; ONNX codes those of `onnx.TensorProto.DataType`; safetensors names
those of its `Dtype` enum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zcrecord.errors import UnsupportedError

__all__ = ["DTYPES", "DType", "as_dtype", "by_code", "by_name", "by_onnx", "by_safetensors", "from_numpy", "nbytes"]

Array = np.ndarray[Any, np.dtype[Any]]
Octets = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type. `bits` is its natural width; types below a byte may also be stored one to a byte (8)."""

    code: int
    name: str
    bits: int
    onnx: int | None
    safetensors: str | None
    torch: str | None
    c: str | None
    rust: str | None

    @property
    def numpy(self) -> np.dtype[Any] | None:
        """The dtype of that name in numpy, little-endian, or in ml_dtypes; None for strings, and if neither has it."""
        dtype = _numpy.get(self.name)
        if dtype is None and self.name in by_name and self.bits:
            import ml_dtypes  # here, because it takes a tenth of numpy's time to import, and few records need it

            if hasattr(ml_dtypes, self.name):
                dtype = _numpy[self.name] = np.dtype(getattr(ml_dtypes, self.name))
        return dtype

    @property
    def packed(self) -> bool:
        """True if elements are narrower than a byte, and so lie packed unless stored one to a byte."""
        return 0 < self.bits < 8

    def __repr__(self) -> str:
        return f"DType({self.name})"


# All other tables are made of this one: `python -m tools.generate`. A name tells more than it seems to: "int" has a
# sign, and "float8_e4m3fnuz" says how its bits are read.
# fmt: off
DTYPES: tuple[DType, ...] = (
    #     code  name              bits  onnx  safetensors   torch             C              Rust
    DType(1,  "bool",             8,   9,    "BOOL",       "bool",           "uint8_t",     "u8"),
    DType(2,  "uint8",            8,   2,    "U8",         "uint8",          "uint8_t",     "u8"),
    DType(3,  "int8",             8,   3,    "I8",         "int8",           "int8_t",      "i8"),
    DType(4,  "uint16",           16,  4,    "U16",        "uint16",         "uint16_t",    "u16"),
    DType(5,  "int16",            16,  5,    "I16",        "int16",          "int16_t",     "i16"),
    DType(6,  "uint32",           32,  12,   "U32",        "uint32",         "uint32_t",    "u32"),
    DType(7,  "int32",            32,  6,    "I32",        "int32",          "int32_t",     "i32"),
    DType(8,  "uint64",           64,  13,   "U64",        "uint64",         "uint64_t",    "u64"),
    DType(9,  "int64",            64,  7,    "I64",        "int64",          "int64_t",     "i64"),
    DType(16, "float16",          16,  10,   "F16",        "float16",        "uint16_t",    "u16"),
    DType(17, "bfloat16",         16,  16,   "BF16",       "bfloat16",       "uint16_t",    "u16"),
    DType(18, "float32",          32,  1,    "F32",        "float32",        "float",       "f32"),
    DType(19, "float64",          64,  11,   "F64",        "float64",        "double",      "f64"),
    DType(20, "complex64",        64,  14,   "C64",        "complex64",      "float",       "[f32; 2]"),
    DType(21, "complex128",       128, 15,   None,         "complex128",     "double",      "[f64; 2]"),
    DType(32, "float8_e4m3fn",    8,   17,   "F8_E4M3",    "float8_e4m3fn",  "uint8_t",     "u8"),
    DType(33, "float8_e4m3fnuz",  8,   18,   "F8_E4M3FNUZ", "float8_e4m3fnuz", "uint8_t",   "u8"),
    DType(34, "float8_e5m2",      8,   19,   "F8_E5M2",    "float8_e5m2",    "uint8_t",     "u8"),
    DType(35, "float8_e5m2fnuz",  8,   20,   "F8_E5M2FNUZ", "float8_e5m2fnuz", "uint8_t",   "u8"),
    DType(36, "float8_e8m0fnu",   8,   24,   "F8_E8M0",    "float8_e8m0fnu", "uint8_t",     "u8"),
    DType(48, "float6_e2m3fn",    6,   27,   "F6_E2M3",    None,             "uint8_t",     "u8"),
    DType(49, "float6_e3m2fn",    6,   28,   "F6_E3M2",    None,             "uint8_t",     "u8"),
    DType(50, "float4_e2m1fn",    4,   23,   "F4",         None,             "uint8_t",     "u8"),
    DType(51, "uint4",            4,   21,   None,         None,             "uint8_t",     "u8"),
    DType(52, "int4",             4,   22,   None,         None,             "uint8_t",     "u8"),
    DType(53, "uint2",            2,   25,   None,         None,             "uint8_t",     "u8"),
    DType(54, "int2",             2,   26,   None,         None,             "uint8_t",     "u8"),
    DType(64, "string",           0,   8,    None,         None,             None,          None),
)
# fmt: on

by_code: dict[int, DType] = {d.code: d for d in DTYPES}
by_name: dict[str, DType] = {d.name: d for d in DTYPES}
by_onnx: dict[int, DType] = {d.onnx: d for d in DTYPES if d.onnx is not None}
by_safetensors: dict[str, DType] = {d.safetensors: d for d in DTYPES if d.safetensors is not None}
STRING = by_name["string"]

_numpy: dict[str, np.dtype[Any]] = {d: np.dtype(d).newbyteorder("<") for d in by_name if hasattr(np, d)}
_by_numpy: dict[np.dtype[Any], DType] = {dtype: by_name[name] for name, dtype in _numpy.items()}


def as_dtype(value: Any) -> DType:
    """Return the element type that a name, a numpy dtype or a torch dtype stands for; UnsupportedError for others."""
    if isinstance(value, DType):
        return value
    name = str(value).removeprefix("torch.")
    if name in by_name:
        return by_name[name]
    try:
        dtype = None if value is None else np.dtype(value)  # numpy would take None for float64
    except TypeError:
        dtype = None
    if dtype is None:
        raise UnsupportedError(f"{name!r} is no element type of the format; it knows {', '.join(by_name)}")
    return from_numpy(dtype)


def from_numpy(dtype: np.dtype[Any]) -> DType:
    """Return the table's entry for a numpy dtype of either byte order; UnsupportedError if it has none."""
    kind = _by_numpy.get(dtype)
    if kind is None and dtype.kind in "biufc":
        kind = _by_numpy.get(dtype.newbyteorder("<"))
    if kind is None and dtype.type.__module__ == "ml_dtypes" and (kind := by_name.get(dtype.name)) is not None:
        _by_numpy[dtype] = kind
    if kind is None:
        raise UnsupportedError(f"dtype {dtype} has no place in an archive; {_saving_advice(dtype)}")
    return kind


def _saving_advice(dtype: np.dtype[Any]) -> str:
    """Return advice how to save an array of a dtype that the format does not have."""
    if dtype.names is not None:
        return "save its fields one by one, as array[field]"
    if dtype.kind in "mM":
        return f"save .view('int64'), and load that with .view('{dtype.str[1:]}')"
    advice = {
        "V": "save its bytes, viewed as uint8",
        **dict.fromkeys("SU", "save StringTensor.from_strings(...) of it"),
        "O": "convert it with .astype(...) to numbers, or save StringTensor.from_strings(...) of texts",
    }  # by numpy's letter for the kind
    return advice.get(dtype.kind, "convert the array with .astype(...) first")


def stored_name(code: int, bits: int) -> str:
    """Return an element type's name, with the bits of a stored element if they differ: "int4", "int4 in 8 bits"."""
    kind = by_code.get(code)
    name = f"unknown {code}" if kind is None else kind.name
    return name if kind is None or kind.bits == bits else f"{name} in {bits} bits"


def nbytes(count: int, bits: int) -> int:
    """Return how many bytes `count` elements of `bits` bits take, packed: ceil(count * bits / 8)."""
    return (count * bits + 7) >> 3
