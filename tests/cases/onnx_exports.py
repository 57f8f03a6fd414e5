"""Exported models: how they are made, run and compared."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphs
import onnx_models as m
from onnx import TensorProto, helper, numpy_helper

import zcrecord
from zcrecord.onnx import convert, to_onnx

OURS = ("zcrecord.archive", "zcrecord.content_digest", "zcrecord.payload_offset", "zcrecord.index_crc")
LINK = dict(zip(OURS, ("m.zcr", "sha256:" + "0" * 64, "128", "0123abcd"), strict=True))


def archive(model: onnx.ModelProto, path: Path, **options: Any) -> Path:
    convert(io.BytesIO(model.SerializeToString()), path, force=True, durable=False, **options)
    return path


def whole(source: Any, **options: Any) -> onnx.ModelProto:
    out = io.BytesIO()
    to_onnx(source, out, **options)
    return onnx.ModelProto.FromString(out.getvalue())


def pointing(source: Any, dest: Path, **options: Any) -> onnx.ModelProto:
    """The small model written beside an archive, as `onnx.load` reads it, without what is said of the archive."""
    to_onnx(source, dest, external=True, durable=False, **options)
    return plain(onnx.load(dest))


def plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model without what `to_onnx` adds, values in the form in which they come back."""
    kept = [p for p in model.metadata_props if p.key not in (*OURS, "zcrecord.embedded")]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for t in m.every_tensor(model):
        t.ClearField("data_location")
    return model


def outside(path: Path) -> dict[str, dict[str, str]]:
    """The external_data of every tensor of a model that has some, by the tensor's name."""
    model = onnx.load(path, load_external_data=False)
    return {t.name: {e.key: e.value for e in t.external_data} for t in m.every_tensor(model) if t.external_data}


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


mlp = functools.partial(onnx_graphs.mlp, seed=0)


def tensors_of_every_kind() -> list[TensorProto]:
    """Tensors that a small model has inside, and four that it refers to: least, packed, floats, bools."""
    return [
        numpy_helper.from_array(np.zeros(127, np.uint8), "most"),
        numpy_helper.from_array(np.ones(128, np.uint8), "least"),
        numpy_helper.from_array(np.zeros((0, 3), "f4"), "empty"),
        numpy_helper.from_array(np.ones(40, np.complex64), "complex"),
        helper.make_tensor("strings", TensorProto.STRING, [9000], [b"\xff" * (i % 300) for i in range(9000)]),
        helper.make_tensor("packed", TensorProto.INT4, [301], bytes(i % 100 for i in range(150)) + b"\1", raw=True),
        helper.make_tensor("floats", TensorProto.FLOAT, [50], [0.5] * 50),
        numpy_helper.from_array(np.arange(300) % 2 == 1, "bools"),
    ]


def outputs(model: Any, feeds: dict[str, Any]) -> list[Any]:
    return list(onnx_graphs.plain(model).run(None, feeds))


X = {"x": floats(3, 64, seed=9)}


def named(notes: int) -> onnx.ModelProto:
    """A small model with pairs of its own in its metadata_props, the second of so many bytes."""
    model = m.model_of(numpy_helper.from_array(floats(64), "w"))
    model.metadata_props.add(key="author", value="me")
    model.metadata_props.add(key="notes", value="x" * notes)
    return model


def stub(number: Any, name: bytes = b"w", dims: tuple[int, ...] = (64,), more: bytes = b"") -> bytes:
    """A tensor of a skeleton, whose values are those of the archive's tensor of this number."""
    entry = m.field(1, b"zcrecord") + m.field(2, str(number).encode())
    head = b"".join(m.field(1, dim) for dim in dims) + m.field(2, TensorProto.FLOAT) + m.field(8, name)
    return head + m.field(14, 1) + m.field(13, entry) + more


def damaged(path: Path, name: str) -> None:
    offset = zcrecord.load_record(path).info(name).offset
    with path.open("r+b") as file:
        file.seek(offset + 9)
        byte = file.read(1)[0]
        file.seek(offset + 9)
        file.write(bytes([byte ^ 4]))
