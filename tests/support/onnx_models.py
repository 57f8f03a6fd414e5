"""Shared by the ONNX tests: models to convert, their tensors by onnx itself, and protobuf by hand."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from processes import growth

import zcrecord
from zcrecord import dtypes
from zcrecord.onnx import ConvertReport, convert, graph
from zcrecord.tensors.packed import PackedTensor, StringTensor


def packaged_models() -> list[Path]:
    """The models that the onnx wheel carries."""
    return sorted((Path(onnx.__file__).parent / "backend/test/data").rglob("*.onnx"))


def every_tensor(message: Any) -> Iterator[TensorProto]:
    """Every TensorProto of a model, wherever it sits, in the order in which it is serialized."""
    if isinstance(message, TensorProto):
        yield message
        return
    for field, value in sorted(message.ListFields(), key=lambda pair: pair[0].number):
        if field.message_type is not None:
            for item in value if field.is_repeated else [value]:
                yield from every_tensor(item)


def expected(t: TensorProto, base_dir: str = "") -> np.ndarray:
    """Return a tensor's values by onnx; strings as bytes."""
    if t.data_type == TensorProto.STRING:
        out = np.empty(len(t.string_data), object)
        out[:] = list(t.string_data)
        return out.reshape(tuple(t.dims))
    array: np.ndarray = numpy_helper.to_array(t, base_dir)
    return array


def stored(value: Any) -> np.ndarray:
    if isinstance(value, PackedTensor):
        return value.unpack()
    return value.unpack(encoding=None) if isinstance(value, StringTensor) else value


SIGNED = {d.name for d in dtypes.DTYPES if d.packed and d.name.startswith("int")}


def bits(array: np.ndarray) -> Any:
    """Something that is equal for arrays with the same bits; onnx does not extend the sign of narrow integers."""
    if array.dtype == object:
        return array.tolist()
    return (array.astype(np.int8) if array.dtype.name in SIGNED else array).tobytes()


def assert_equal(value: Any, t: TensorProto, base_dir: str = "") -> None:
    """Compare a record's tensor with onnx's, bit by bit."""
    ours, theirs = stored(value), expected(t, base_dir)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert bits(ours) == bits(theirs)


def converted(model: Any, **options: Any) -> zcrecord.Record:
    """A record of a model, given as a ModelProto or as bytes, with everything in it verified."""
    data = model if isinstance(model, bytes) else model.SerializeToString()
    out = io.BytesIO()
    convert(io.BytesIO(data), out, **options)
    record = zcrecord.load_record(out.getvalue())
    record.verify()
    return record


class Forward(io.RawIOBase):
    """A pipe: it cannot seek, and returns at most so many bytes at a time; `asked` is the largest request."""

    def __init__(self, data: bytes, most: int | None = None) -> None:
        self._data, self._most, self.asked = io.BytesIO(data), most, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.asked = max(self.asked, len(buffer))
        return self._data.readinto(memoryview(buffer)[: self._most])

    def seek(self, *_: Any) -> int:
        raise AssertionError("a seek")


def through_pipes(data: bytes, **options: Any) -> tuple[bytes, ConvertReport]:
    """The archive of a model, written into one pipe and read from another, and the report."""
    source_end, feed = os.pipe()
    drain, dest_end = os.pipe()
    got: list[bytes] = []

    def write() -> None:
        with open(feed, "wb") as file:
            file.write(data)

    def read() -> None:
        with open(drain, "rb") as file:
            got.append(file.read())

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    with open(source_end, "rb", buffering=0) as source, open(dest_end, "wb", buffering=0) as dest:
        report = convert(source, dest, **options)
    for thread in threads:
        thread.join()
    return got[0], report


def restored(record: zcrecord.Record) -> onnx.ModelProto:
    """The model that an archive gives back."""
    return onnx.ModelProto.FromString(b"".join(graph.restore(record).parts))


def normal(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every tensor's values in raw_data, the form in which they come back from an archive."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for t in every_tensor(model):
        if t.data_type == TensorProto.STRING:
            continue
        array = expected(t)
        raw = PackedTensor.pack(array).packed if _is_packed(t) else array
        for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
            t.ClearField(field)
        t.ClearField("data_location")
        t.raw_data = raw.tobytes()
    return model


def _is_packed(t: TensorProto) -> bool:
    return dtypes.by_onnx[t.data_type].packed


def model_of(*initializers: TensorProto, nodes: Any = (), **fields: Any) -> onnx.ModelProto:
    made = helper.make_graph(list(nodes), "g", [], [], list(initializers))
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9, **fields)


def constant(name: str, value: int = 0, count: int = 1) -> onnx.NodeProto:
    """A Constant node."""
    return helper.make_node("Constant", [], ["c"], name=name, value=numpy_helper.from_array(np.full(count, value)))


def rich_model() -> onnx.ModelProto:
    """A model with a tensor in every place that onnx has for one."""

    def arr(value: float) -> TensorProto:
        return numpy_helper.from_array(np.full(3, value, np.float32))

    def sparse(name: str, value: float) -> onnx.SparseTensorProto:
        values = numpy_helper.from_array(np.array([value], np.float32), name)
        return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([2])), [5])

    def branch(value: float) -> onnx.GraphProto:
        inner = helper.make_graph([], "inner", [], [], [numpy_helper.from_array(np.full(2, value + 0.5, "f4"), "w")])
        nodes = [helper.make_node("Loop", [], ["l"], name="loop", body=inner)]
        return helper.make_graph(nodes, "b", [], [], [numpy_helper.from_array(np.full(2, value, "f4"), "w")])

    several = helper.make_node("Custom", [], ["several"])
    for name, kind, fields in [
        ("ts", AttributeProto.TENSORS, {"tensors": [arr(1), arr(2)]}),
        ("gs", AttributeProto.GRAPHS, {"graphs": [branch(10), branch(20)]}),
        ("sp", AttributeProto.SPARSE_TENSOR, {"sparse_tensor": sparse("", 3)}),
        ("sps", AttributeProto.SPARSE_TENSORS, {"sparse_tensors": [sparse("", 4), sparse("", 5)]}),
    ]:
        several.attribute.append(AttributeProto(name=name, type=kind, **fields))
    nodes = [
        several,
        helper.make_node("If", ["c"], ["y"], name="branches", then_branch=branch(30), else_branch=branch(40)),
        helper.make_node("Constant", [], ["const"], value=arr(6)),
    ]
    model = model_of(numpy_helper.from_array(np.arange(4.0), "layer.0.weight"), nodes=nodes)
    model.graph.sparse_initializer.append(sparse("sparse.w", 7))
    function = helper.make_function(
        "my.domain", "Fun", ["x"], ["y"], [helper.make_node("Constant", [], ["k"], value=arr(8))], [], ["a"]
    )
    function.attribute_proto.append(helper.make_attribute("default", arr(9)))
    model.functions.append(function)
    training = model.training_info.add()
    training.initialization.CopyFrom(helper.make_graph([], "i", [], [], [numpy_helper.from_array(np.arange(2), "m")]))
    training.algorithm.CopyFrom(branch(50))
    return model


def peak_growth(setup: str, work: str) -> int:
    """Return the bytes by which the peak memory of a fresh process grows while it does this work."""
    return growth(setup, work)[1]


# Protobuf by hand, for what no exporter writes.


def varint(value: int, nbytes: int = 0) -> bytes:
    value = int(value) & (1 << 64) - 1
    out = bytearray()
    while value > 127 or len(out) + 1 < nbytes:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: int | bytes | list[bytes]) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = b"".join(value) if isinstance(value, list) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def wire_model(*initializers: bytes, graph: bytes = b"") -> bytes:
    """A ModelProto whose graph has these TensorProtos as initializers, and whatever else is given."""
    body = b"".join(field(5, t) for t in initializers)
    return field(1, 9) + field(7, body + graph) + field(8, field(2, 17))
