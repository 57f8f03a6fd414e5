"""Values of every ONNX type, in a model or beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
from onnx import TensorProto, helper

import zcrecord

CODES = sorted(set(zcrecord.dtypes.by_onnx) & set(TensorProto.DataType.values()))  # 6 bits: from onnx 1.23 on
NUMBERS = sorted(set(CODES) - {TensorProto.STRING})


def sample(code: int, shape: tuple[int, ...]) -> np.ndarray:
    """An array of this type with many different bits in it."""
    count = int(np.prod(shape))
    if code == TensorProto.STRING:
        return np.array([b"x" * (i % 5) + b"\xc3\xa9" for i in range(count)], object).reshape(shape)
    kind: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(code)
    rng = np.random.default_rng(code)
    width = zcrecord.dtypes.by_onnx[code].bits
    if width < 8 or code == TensorProto.BOOL:
        raw = rng.integers(0, 2 if code == TensorProto.BOOL else 1 << width, count).astype(np.uint8)
        if kind.name.startswith("int"):
            return raw.astype(np.int8).reshape(shape).astype(kind)  # numpy's form, the sign extended
        return raw.view(kind).reshape(shape)
    return np.frombuffer(rng.bytes(count * kind.itemsize), kind).reshape(shape)


DATA = np.arange(6, dtype="<f4")


def reference(location: str | None = "w.bin", name: str = "w", **entries: str) -> TensorProto:
    """A tensor of six floats that lies in a file."""
    t = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[6], data_location=TensorProto.EXTERNAL)
    if location is not None:
        t.external_data.add(key="location", value=location)
    for key, value in entries.items():
        t.external_data.add(key=key, value=value)
    return t


def write(folder: Path, *tensors: TensorProto, data: bytes = DATA.tobytes()) -> Path:
    """A folder with a model and w.bin; returns the model's path."""
    folder.mkdir(exist_ok=True)
    (folder / "w.bin").write_bytes(data)
    (folder / "model.onnx").write_bytes(m.model_of(*tensors).SerializeToString())
    return folder / "model.onnx"
