"""THE dtype table: every element type the format knows, with its name in each neighbouring world.

Each reverse map is derived from the one table; the number of bytes a tensor takes is computed in one place,
:func:`nbytes`. Where things lie in a file is left to `layout`.

Source: codes are those of `schema/zcrecord.fbs`; ONNX codes those of `onnx.TensorProto.DataType`; safetensors names
those of its `Dtype` enum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .errors import UnsupportedError

__all__ = ["DTYPES", "DType", "by_code", "by_name", "by_numpy", "by_onnx", "from_numpy", "nbytes"]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type. `bits` is its natural width; types below a byte may also be stored one to a byte (8)."""

    code: int
    name: str
    bits: int
    numpy: np.dtype[Any] | None  # None: no fixed-size element (string)
    onnx: int | None
    safetensors: str | None
    torch: str | None
    c: str | None
    rust: str | None

    @property
    def packed(self) -> bool:
        """Whether elements are narrower than a byte, and so lie packed unless stored one to a byte."""
        return 0 < self.bits < 8

    def __repr__(self) -> str:
        return f"DType({self.name})"


def _d(np_type: npt.DTypeLike) -> np.dtype[Any]:
    return np.dtype(np_type).newbyteorder("<") if np.dtype(np_type).isbuiltin == 1 else np.dtype(np_type)


_ML = ml_dtypes
# fmt: off
DTYPES: tuple[DType, ...] = (
    #     code  name              bits  numpy                        onnx  safetensors   torch             C              Rust
    DType(1,  "bool",             8,   _d(np.bool_),                 9,    "BOOL",       "bool",           "uint8_t",     "u8"),
    DType(2,  "uint8",            8,   _d(np.uint8),                 2,    "U8",         "uint8",          "uint8_t",     "u8"),
    DType(3,  "int8",             8,   _d(np.int8),                  3,    "I8",         "int8",           "int8_t",      "i8"),
    DType(4,  "uint16",           16,  _d(np.uint16),                4,    "U16",        "uint16",         "uint16_t",    "u16"),
    DType(5,  "int16",            16,  _d(np.int16),                 5,    "I16",        "int16",          "int16_t",     "i16"),
    DType(6,  "uint32",           32,  _d(np.uint32),                12,   "U32",        "uint32",         "uint32_t",    "u32"),
    DType(7,  "int32",            32,  _d(np.int32),                 6,    "I32",        "int32",          "int32_t",     "i32"),
    DType(8,  "uint64",           64,  _d(np.uint64),                13,   "U64",        "uint64",         "uint64_t",    "u64"),
    DType(9,  "int64",            64,  _d(np.int64),                 7,    "I64",        "int64",          "int64_t",     "i64"),
    DType(16, "float16",          16,  _d(np.float16),               10,   "F16",        "float16",        "uint16_t",    "u16"),
    DType(17, "bfloat16",         16,  _d(_ML.bfloat16),             16,   "BF16",       "bfloat16",       "uint16_t",    "u16"),
    DType(18, "float32",          32,  _d(np.float32),               1,    "F32",        "float32",        "float",       "f32"),
    DType(19, "float64",          64,  _d(np.float64),               11,   "F64",        "float64",        "double",      "f64"),
    DType(20, "complex64",        64,  _d(np.complex64),             14,   "C64",        "complex64",      "float",       "[f32; 2]"),
    DType(21, "complex128",       128, _d(np.complex128),            15,   None,         "complex128",     "double",      "[f64; 2]"),
    DType(32, "float8_e4m3fn",    8,   _d(_ML.float8_e4m3fn),        17,   "F8_E4M3",    "float8_e4m3fn",  "uint8_t",     "u8"),
    DType(33, "float8_e4m3fnuz",  8,   _d(_ML.float8_e4m3fnuz),      18,   "F8_E4M3FNUZ", "float8_e4m3fnuz", "uint8_t",   "u8"),
    DType(34, "float8_e5m2",      8,   _d(_ML.float8_e5m2),          19,   "F8_E5M2",    "float8_e5m2",    "uint8_t",     "u8"),
    DType(35, "float8_e5m2fnuz",  8,   _d(_ML.float8_e5m2fnuz),      20,   "F8_E5M2FNUZ", "float8_e5m2fnuz", "uint8_t",   "u8"),
    DType(36, "float8_e8m0fnu",   8,   _d(_ML.float8_e8m0fnu),       24,   "F8_E8M0",    "float8_e8m0fnu", "uint8_t",     "u8"),
    DType(48, "float6_e2m3fn",    6,   _d(_ML.float6_e2m3fn),        27,   "F6_E2M3",    None,             "uint8_t",     "u8"),
    DType(49, "float6_e3m2fn",    6,   _d(_ML.float6_e3m2fn),        28,   "F6_E3M2",    None,             "uint8_t",     "u8"),
    DType(50, "float4_e2m1fn",    4,   _d(_ML.float4_e2m1fn),        23,   "F4",         None,             "uint8_t",     "u8"),
    DType(51, "uint4",            4,   _d(_ML.uint4),                21,   None,         None,             "uint8_t",     "u8"),
    DType(52, "int4",             4,   _d(_ML.int4),                 22,   None,         None,             "uint8_t",     "u8"),
    DType(53, "uint2",            2,   _d(_ML.uint2),                25,   None,         None,             "uint8_t",     "u8"),
    DType(54, "int2",             2,   _d(_ML.int2),                 26,   None,         None,             "uint8_t",     "u8"),
    DType(64, "string",           0,   None,                         8,    None,         None,             None,          None),
)
# fmt: on

by_code: dict[int, DType] = {d.code: d for d in DTYPES}
by_name: dict[str, DType] = {d.name: d for d in DTYPES}
by_onnx: dict[int, DType] = {d.onnx: d for d in DTYPES if d.onnx is not None}
by_numpy: dict[np.dtype[Any], DType] = {d.numpy: d for d in DTYPES if d.numpy is not None}
STRING = by_name["string"]


def from_numpy(dtype: np.dtype[Any]) -> DType:
    """Return the table's entry for a numpy dtype of either byte order.

    Raises:
        UnsupportedError: the format has no such element type (object, structured, datetime, long double, ...).
    """
    found = by_numpy.get(dtype)
    if found is None and dtype.isbuiltin == 0 and dtype.kind in "biufc":
        found = by_numpy.get(dtype.newbyteorder("<"))
    if found is None:
        raise UnsupportedError(f"dtype {dtype} has no place in an archive; convert the array with .astype(...) first")
    return found


def nbytes(count: int, bits: int) -> int:
    """Return how many bytes `count` elements of `bits` bits take, packed: ceil(count * bits / 8)."""
    return (count * bits + 7) >> 3
