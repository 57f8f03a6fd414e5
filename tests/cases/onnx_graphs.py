"""Models of a few nodes that ONNX Runtime runs, with inputs for them; archives and sessions of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models as m
import onnxruntime as ort
from guides import ROOT
from onnx import TensorProto, helper, numpy_helper
from processes import growth

from zcrecord.onnx import convert, runtime, tune

RNG = np.random.default_rng(0)
SHARED = {"ConstantFolding", "NchwcTransformer"}
DIGITS = ROOT / "tests" / "data" / "digits.onnx"
PIXELS = {"pixels": np.ones((2, 64), np.float32)}
PACKS = runtime.compares_packed(ort)  # ONNX Runtime before 1.32 gets no packed weights
READS_INNER = runtime._version(ort) >= runtime._READS_INNER_SINCE  # weights of subgraphs that it wrote


def archive_of(model: Any, **options: Any) -> bytes:
    """The archive of a ModelProto, or of a model that `convert` takes."""
    out = io.BytesIO()
    convert(io.BytesIO(model.SerializeToString()) if isinstance(model, onnx.ModelProto) else model, out, **options)
    return out.getvalue()


def converted_in(folder: Path, model: onnx.ModelProto | bytes, *, tuned: bool = False) -> Path:
    """A folder's model.zcr, of a model that is written beside it; tuned if asked for."""
    (folder / "model.onnx").write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    convert(folder / "model.onnx", folder / "model.zcr", durable=False)
    if tuned:
        tune(folder / "model.zcr", durable=False)
    return folder / "model.zcr"


def digits_in(folder: Path, *, tuned: bool = False) -> Path:
    """A folder's model.zcr, of the digits classifier."""
    return converted_in(folder, DIGITS.read_bytes(), tuned=tuned)


def plain(model: Any, shared: bool = False) -> ort.InferenceSession:
    """ONNX Runtime's session of a model or its path; `shared` sets the options of `zcrecord.onnx.session`."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if shared:
        options.add_session_config_entry("session.disable_prepacking", "1")
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    disabled = SHARED if shared else None
    return ort.InferenceSession(
        source, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled, enable_fallback=0
    )


def request(session: Any, batch: int = 2) -> dict[str, Any]:
    """Inputs of any session: booleans are true, integers 0 or 1."""
    rng, out = np.random.default_rng(batch), {}
    for each in session.get_inputs():
        shape = [n if isinstance(n, int) else (batch if i == 0 else 8) for i, n in enumerate(each.shape)]
        if "bool" in each.type:
            out[each.name] = np.ones(shape, bool)
        elif "int" in each.type:
            out[each.name] = rng.integers(0, 2, shape)
        else:
            out[each.name] = rng.standard_normal(shape, dtype=np.float32)
    return out


def assert_same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def floats(*shape: int, seed: int | None = None) -> np.ndarray:
    """Random floats, always others unless a seed is given."""
    rng = RNG if seed is None else np.random.default_rng(seed)
    return rng.standard_normal(shape).astype("f4")


def value(name: str, *shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape or None)


def graph_model(
    nodes: list[Any], inputs: list[Any], outputs: list[Any], inits: dict[str, np.ndarray]
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(a, n) for n, a in inits.items()]
    made = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def mlp(seed: int | None = None, **more: Any) -> onnx.ModelProto:
    """Two matrices of one shape, a bias, a scalar and a Constant, random or of a seed; and more initializers."""
    seeds = [None if seed is None else seed + i for i in range(5)]
    nodes = [
        helper.make_node("MatMul", ["x", "a.w"], ["h"]),
        helper.make_node("Add", ["h", "a.b"], ["i"]),
        helper.make_node("MatMul", ["i", "b.w"], ["k"]),
        helper.make_node("Constant", [], ["c"], name="const", value=numpy_helper.from_array(floats(64, seed=seeds[4]))),
        helper.make_node("Mul", ["k", "c"], ["l"]),
        helper.make_node("Mul", ["l", "scale"], ["y"]),
    ]
    inits = {
        "a.w": floats(64, 64, seed=seeds[1]), "b.w": floats(64, 64, seed=seeds[2]), "a.b": floats(64, seed=seeds[3]),
        "scale": np.array(0.5, "f4"), **more,
    }  # fmt: skip
    return graph_model(nodes, [value("x", "n", 64)], [value("y", "n", 64)], inits)


def branches() -> onnx.ModelProto:
    """An If whose branches use one matrix of the graph around them, and each a matrix of its own, of one name."""
    own = {b: numpy_helper.from_array(floats(64, 64), "own") for b in ("then", "else")}
    then = helper.make_graph(
        [helper.make_node("Gather", ["shared", "i"], ["g"]), helper.make_node("MatMul", ["g", "own"], ["t"])],
        "then", [], [value("t")], [own["then"]],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Transpose", ["shared"], ["s"], perm=[1, 0]), helper.make_node("MatMul", ["x", "s"], ["m"]),
         helper.make_node("MatMul", ["m", "own"], ["e"])],
        "else", [], [value("e")], [own["else"]],
    )  # fmt: skip
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    inputs = [value("x", 1, 64), value("i", 1, kind=TensorProto.INT64), value("c", 1, kind=TensorProto.BOOL)]
    return graph_model([node], inputs, [value("y")], {"shared": floats(64, 64)})


def conv() -> onnx.ModelProto:
    """Convolution, batch normalisation, and transposes that an optimizer pushes through a weight."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "mean", "var"], ["n"]),
        helper.make_node("Transpose", ["n"], ["t"], perm=[0, 2, 3, 1]),
        helper.make_node("Add", ["t", "nhwc"], ["u"]),
        helper.make_node("Transpose", ["u"], ["y"], perm=[0, 3, 1, 2]),
    ]
    inits = {"w": floats(48, 3, 3, 3), "s": floats(48), "b": floats(48), "mean": floats(48), "var": floats(48) ** 2,
             "nhwc": floats(1, 8, 8, 48)}  # fmt: skip
    return graph_model(nodes, [value("x", 1, 3, 8, 8)], [value("y")], inits)


def feeds() -> list[tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]]:
    x, i = floats(1, 64), np.array([3])
    return [
        (mlp(), [{"x": floats(5, 64)}]),
        (branches(), [{"x": x, "i": i, "c": np.array([c])} for c in (True, False)]),
        (conv(), [{"x": floats(1, 3, 8, 8)}]),
    ]


def large_branches(tmp_path: Path) -> tuple[Path, Path]:
    """An If whose branches share a matrix of 16 MiB and have one of 16 MiB each, as .onnx and .zcr."""
    model = branches()
    size = {"shared": floats(2048, 2048), "own": floats(2048, 2048)}
    for t in m.every_tensor(model):
        t.CopyFrom(numpy_helper.from_array(size[t.name] * np.float32(len(t.raw_data) and RNG.random()), t.name))
    del model.graph.input[0]
    model.graph.input.insert(0, value("x", 1, 2048))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    convert(tmp_path / "m.onnx", tmp_path / "m.zcr", durable=True)
    return tmp_path / "m.onnx", tmp_path / "m.zcr"


SETUP = """
import mmap
import numpy as np, onnxruntime as ort
from zcrecord.onnx import session
def mapped(path):
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
path = sys.argv[1]
feeds = [{"x": np.ones((1, 2048), "f4"), "i": np.array([3]), "c": np.array([c])} for c in (True, False)]
"""


def private_growth(make: str, path: Path) -> int:
    """Return the private memory that a session over `path`, both of whose branches ran, takes in a fresh process."""
    return growth(SETUP, f"made = {make}\nfor feed in feeds: made.run(None, feed)", path)[0]
