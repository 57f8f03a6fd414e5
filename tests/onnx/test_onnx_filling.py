"""ONNX Runtime is given its weights as OrtValues where a loader put them: in place, and never with wrong results."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_models as m
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import archive_of, branches, graph_model, value
from processes import growth

import zcrecord
from zcrecord.dtypes import DType
from zcrecord.errors import MismatchError, TensorNotFoundError, UnsupportedError
from zcrecord.hollow import hollow_of
from zcrecord.loaders import LoadPlan, PayloadRef
from zcrecord.onnx import fill_session, session

RNG = np.random.default_rng(0)
Inputs = dict[str, Any]


def floats(*shape: int) -> Any:
    """Return small whole numbers: in any order, and fused in any way, sums of their products are exact."""
    return RNG.integers(-4, 5, shape).astype("f4")


def node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attributes)


def model_of(nodes: list[Any], weights: Inputs, *shape: int) -> onnx.ModelProto:
    """A model from x of that shape to y."""
    return graph_model(nodes, [value("x", *shape)], [value("y")], weights)


TO_CHANNELS, TO_LAST = {"perm": [0, 3, 1, 2]}, {"perm": [0, 2, 3, 1]}
# What optimizers do with constants: fold, transpose and reshape them under their names, fuse them into others.
MODELS = {
    "matmul": model_of([node("MatMul", "x w", "y")], {"w": floats(64, 64)}, 1, 64),
    "transposed, square": model_of(
        [node("Transpose", "w", "t", perm=[1, 0]), node("MatMul", "x t", "y")], {"w": floats(64, 64)}, 1, 64
    ),
    "pushed through": model_of(
        [node("Transpose", "x", "t", **TO_CHANNELS), node("Add", "t w", "u"), node("Relu", "u", "v"),
         node("Transpose", "v", "y", **TO_LAST)], {"w": floats(1, 8, 8, 8)}, 1, 8, 8, 8,
    ),
    "folded": model_of(
        [node("Add", "w v", "t"), node("MatMul", "x t", "y")], {"w": floats(64, 64), "v": floats(64, 64)}, 1, 64
    ),
    "fused": model_of(
        [node("Conv", "x w", "c", pads=[1, 1, 1, 1]), node("BatchNormalization", "c s b m v", "n", epsilon=0.0),
         node("Relu", "n", "y")],
        {"w": floats(64, 8, 3, 3), **{name: floats(64) for name in "sbm"}, "v": np.tile([1, 4], 32).astype("f4")},
        1, 8, 9, 9,
    ),
    "gemm": model_of([node("Gemm", "x w b", "y", transB=1)], {"w": floats(64, 64), "b": floats(64)}, 1, 64),
}  # fmt: skip


def inputs_of(model: onnx.ModelProto) -> Inputs:
    kind = model.graph.input[0].type.tensor_type
    shape = [d.dim_value for d in kind.shape.dim]
    return {"x": floats(*shape)}


def unoptimized(model: onnx.ModelProto, inputs: Inputs) -> Any:
    """Run a model with every optimizer off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, inputs)[0]


# The same results.


@pytest.mark.exhaustive(keep=12)
@pytest.mark.parametrize("loader", [None, "host", "torch"])
@pytest.mark.parametrize("kind", MODELS)
def test_no_optimizer_makes_a_result_wrong(kind: str, loader: str | None, tmp_path: Path) -> None:
    model = MODELS[kind]
    inputs = inputs_of(model)
    (tmp_path / "m.zcr").write_bytes(archive_of(model))
    chosen: Any = TorchLoader() if loader == "torch" else loader
    got = fill_session(tmp_path / "m.zcr", loader=chosen).run(None, inputs)[0]
    np.testing.assert_array_equal(got, unoptimized(model, inputs))


@pytest.mark.parametrize("form, options, message", [
    (hollow_of, {}, r"a hollow record has no weights; fill it, and pass the record that seal\(\) returns"),
    (bytes, {"sess_options": "x"}, r"sess_options= takes an onnxruntime\.SessionOptions, not a str"),
    (bytes, {"sess_options": ort.SessionOptions}, r"sess_options= takes an onnxruntime\.SessionOptions, not"),
    (lambda _: 3, {}, "a int is neither a path nor contiguous bytes"),
])  # fmt: skip
def test_misuse_is_one_typed_error(form: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        fill_session(form(archive_of(MODELS["matmul"])), **options)


class Plain:
    """A loader that copies what a ref has in memory, and does nothing else."""

    device = "plain"

    def can_load(self, device: str, dtype: DType) -> bool:
        return dtype.bits >= 8

    def begin(self, plan: LoadPlan) -> None: ...

    def load(self, ref: PayloadRef, dst: Any = None) -> Any:
        assert ref.buffer is not None
        return np.frombuffer(bytearray(ref.buffer), ref.dtype.numpy).reshape(ref.shape)

    def view(self, loaded: Any, ref: PayloadRef) -> Any:
        return np.ndarray(ref.shape, ref.dtype.numpy, loaded, ref.byte_offset)

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class TorchLoader(Plain):
    def load(self, ref: PayloadRef, dst: Any = None) -> Any:
        return torch.from_numpy(super().load(ref, dst))


@pytest.mark.parametrize("loader", [None, "host"])
def test_a_matrix_that_branches_share_is_filled_and_their_own_ones_are_not_mixed_up(loader: Any) -> None:
    model = branches()
    for t in m.every_tensor(model):
        t.CopyFrom(numpy_helper.from_array(floats(64, 64), t.name))
    made = fill_session(archive_of(model), loader=loader)
    assert [w.name for w in made.get_overridable_initializers()] == ["shared"]
    for choice in (True, False):
        inputs = {"x": floats(1, 64), "i": np.array([3]), "c": np.array([choice])}
        np.testing.assert_array_equal(made.run(None, inputs)[0], unoptimized(model, inputs))


def test_a_model_of_an_early_version_whose_weights_are_inputs_already_is_filled() -> None:
    model = onnx.ModelProto()
    model.CopyFrom(MODELS["pushed through"])
    model.ir_version = 3
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [1, 8, 8, 8]))
    inputs = inputs_of(model)
    made = fill_session(archive_of(model))
    assert [i.name for i in made.get_inputs()] == ["x"]
    np.testing.assert_array_equal(made.run(None, inputs)[0], unoptimized(model, inputs))


def test_element_types_that_numpy_lacks_are_handed_over() -> None:
    cast = node("Cast", "w", "t", to=TensorProto.FLOAT)
    weights = floats(64, 64).astype(ml_dtypes.bfloat16)
    model = model_of([cast, node("MatMul", "x t", "y")], {}, 1, 64)
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.BFLOAT16, [64, 64], weights.tobytes(), raw=True))
    inputs = inputs_of(model)
    made = fill_session(archive_of(model), loader="host")
    assert [w.type for w in made.get_overridable_initializers()] == ["tensor(bfloat16)"]
    np.testing.assert_array_equal(made.run(None, inputs)[0], inputs["x"] @ weights.astype("f4"))


def test_a_sealed_hollow_record_fills_a_session() -> None:
    model = MODELS["folded"]
    data = archive_of(model)
    hollow = hollow_of(data)
    hollow.stream((t.name, numpy_helper.to_array(t)) for t in model.graph.initializer)
    inputs = inputs_of(model)
    sealed = hollow.seal()
    for made in (fill_session(sealed), session(sealed)):
        np.testing.assert_array_equal(made.run(None, inputs)[0], unoptimized(model, inputs))


# Where the weights are.


def test_weights_are_used_where_the_loader_put_them() -> None:
    kept: dict[str, Any] = {}

    class Keeps(Plain):
        def load(self, ref: PayloadRef, dst: Any = None) -> Any:
            kept[ref.name] = super().load(ref, dst)
            return kept[ref.name]

    inputs = inputs_of(MODELS["matmul"])
    made = fill_session(archive_of(MODELS["matmul"]), loader=Keeps())
    before = made.run(None, inputs)[0]
    kept["w"] *= 2
    np.testing.assert_array_equal(made.run(None, inputs)[0], before * 2)


def test_the_session_keeps_its_weights_alive() -> None:
    model = MODELS["gemm"]
    inputs = inputs_of(model)
    for loader in (None, "host", TorchLoader()):
        made = fill_session(archive_of(model), loader=loader)
        junk = [bytes(16_384) for _ in range(500)]  # what freed memory would be filled with
        np.testing.assert_array_equal(made.run(None, inputs)[0], unoptimized(model, inputs))
        assert len(junk) == 500


def test_sessions_share_what_was_loaded_once_or_went_through_a_sink() -> None:
    model = MODELS["gemm"]
    data, inputs = archive_of(model), inputs_of(model)

    def sink(_: str, info: zcrecord.TensorInfo) -> Any:
        return np.empty(info.shape, info.dtype.numpy)

    hollow = hollow_of(data, sink=sink)
    hollow.stream(io.BytesIO(data))
    weights = hollow.seal()
    first, second = fill_session(data, loader=weights), fill_session(data, loader=weights)
    for made in (first, second):
        np.testing.assert_array_equal(made.run(None, inputs)[0], unoptimized(model, inputs))
    weights["b"] += 1
    np.testing.assert_array_equal(first.run(None, inputs)[0], second.run(None, inputs)[0])
    assert (first.run(None, inputs)[0] > unoptimized(model, inputs)).all()
    with pytest.raises(TensorNotFoundError, match="tensor 'w': is a weight of the model, and not among the"):
        fill_session(data, loader={"b": weights["b"]})
    with pytest.raises(TensorNotFoundError, match=r"not among the 2 tensors .*; close names there: 'ww'$"):
        fill_session(data, loader={"ww": weights["w"], "b": weights["b"]})


def test_an_ort_value_that_owns_its_memory_is_used_in_place() -> None:
    values = []

    class Own(Plain):
        def load(self, ref: PayloadRef, dst: Any = None) -> Any:
            made = ort.OrtValue.ortvalue_from_shape_and_type(ref.shape, ref.dtype.numpy)
            made.update_inplace(super().load(ref, dst))
            values.append(made)
            return made

    inputs = inputs_of(MODELS["matmul"])
    made = fill_session(archive_of(MODELS["matmul"]), loader=Own())
    before = made.run(None, inputs)[0]
    values[0].update_inplace(np.zeros((64, 64), np.float32))
    assert before.any()
    assert not made.run(None, inputs)[0].any()


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")
def test_no_weight_is_copied_but_by_the_loader_and_the_measurement_would_notice(tmp_path: Path) -> None:
    large = [node("MatMul", "x w", "t"), node("Transpose", "v", "u", perm=[1, 0]), node("MatMul", "t u", "y")]
    model = model_of(large, {"w": floats(2048, 2048), "v": floats(2048, 2048)}, 1, 2048)
    (tmp_path / "large.zcr").write_bytes(archive_of(model))
    (tmp_path / "small.zcr").write_bytes(archive_of(MODELS["matmul"]))
    (tmp_path / "large.onnx").write_bytes(model.SerializeToString())
    setup = """
import os
import numpy as np, onnxruntime as ort
from zcrecord.onnx import fill_session, session
os.chdir(sys.argv[1])
session("small.zcr").run(None, {"x": np.ones((1, 64), np.float32)})  # what is needed once
"""

    def grown(make: str) -> int:
        return growth(setup, f"(made := {make}).run(None, {{'x': np.ones((1, 2048), 'f4')}})", tmp_path)[0]

    weights, little = 32 << 20, 4 << 20
    assert grown("ort.InferenceSession('large.onnx')") > weights
    assert grown("fill_session('large.zcr')") < little
    assert weights - little < grown("fill_session('large.zcr', loader='host')") < weights + little


# What it says when it cannot.


@pytest.mark.parametrize("change, message", [
    (lambda a: a.T[:32], r"tensor 'w': the loader gave tensor\(float\) of shape \(32, 64\), the model has float32 of"),
    (lambda a: a.view("f2"), r"the loader gave tensor\(float16\) of shape \(64, 128\), the model has float32 of shape"),
])  # fmt: skip
def test_what_a_loader_gives_must_be_what_the_model_declares(change: Any, message: str) -> None:
    class Wrong(Plain):
        def load(self, ref: PayloadRef, dst: Any = None) -> Any:
            return change(super().load(ref, dst))

    with pytest.raises(MismatchError, match=message):
        fill_session(archive_of(MODELS["matmul"]), loader=Wrong())


def test_options_of_ones_own_are_used_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    fill_session(archive_of(MODELS["gemm"]), loader="host").run(None, inputs_of(MODELS["gemm"]))
    assert capfd.readouterr() == ("", "")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    made = fill_session(archive_of(MODELS["matmul"]), sess_options=options, providers=["CPUExecutionProvider"])
    assert made.get_session_options().intra_op_num_threads == 1
    assert made.get_providers() == ["CPUExecutionProvider"]


def test_options_of_one_session_are_refused_for_another_and_keep_its_weights() -> None:
    """ONNX Runtime has the weights' addresses in the options, and uses them in every session made with these."""
    data = archive_of(MODELS["transposed, square"])
    options = ort.SessionOptions()
    with pytest.raises(Exception, match="NoSuchProvider"):
        fill_session(data, loader="host", sess_options=options, providers=["NoSuchProvider"])
    with pytest.raises(UnsupportedError, match="have weights of another session; make new ones"):
        fill_session(data, loader="host", sess_options=options)
    x = {"x": floats(1, 64)}
    ours, theirs = session(data, sess_options=options), session(data)
    assert np.array_equal(ours.run(None, x)[0], theirs.run(None, x)[0])  # from freed memory before


def test_weights_of_another_byte_order_have_the_same_values() -> None:
    data, x = archive_of(MODELS["matmul"]), {"x": floats(1, 64)}
    swapped = {name: value.astype(">f4") for name, value in zcrecord.load_record(data).items()}
    assert np.array_equal(fill_session(data, loader=swapped).run(None, x)[0], session(data).run(None, x)[0])
