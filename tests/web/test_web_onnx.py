"""The ONNX model that zcrecord.js makes of an archive: it is Python's, and onnxruntime-web runs it from the archive."""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from browser_heap import heap_growth
from onnx import TensorProto, helper, numpy_helper
from onnx_models import every_tensor, field, model_of, packaged_models, rich_model
from web_archives import SUITE, Misbehaving

import zcrecord
from tools.range_server import Server, serving
from zcrecord import onnx as zonnx
from zcrecord.onnx import convert, to_onnx

if TYPE_CHECKING:
    from browsers import Pages

pytestmark = pytest.mark.needs("node")
LOCATIONS = ("small", "large")


def made(paths: list[Path], **options: Any) -> list[dict[str, Any]]:
    """Make the model of each archive in one Node; return what it tells of each, the files lie beside the archives."""
    lines = "".join(json.dumps([str(path), options]) + "\n" for path in paths)
    done = subprocess.run(["node", SUITE / "modelling.mjs"], input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def outside(model: onnx.ModelProto) -> list[TensorProto]:
    """Return the tensors whose values are in other files."""
    return [t for t in every_tensor(model) if t.data_location == TensorProto.EXTERNAL]


def with_values(path: Path, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with the values that its references lead to."""
    files = {name: Path(f"{path}.{name}") for name in LOCATIONS}
    for t in outside(model):
        place = {entry.key: entry.value for entry in t.external_data}
        start = int(place["offset"])
        t.raw_data = files[place["location"]].read_bytes()[start : start + int(place["length"])]
        t.ClearField("external_data")
        t.ClearField("data_location")
    return model


def typed_model() -> onnx.ModelProto:
    """Return a model with values of many types, some of which must be in it, and of all sizes that matter."""
    arrays = {
        "complex": np.full(40, 3 - 4j, np.complex64), "halves": np.ones(300, np.float16),
        "none": np.zeros((0, 5), np.float32), "scalar": np.array(5, np.int64), "inside": np.ones(127, np.uint8),
        "outside": np.ones(128, np.uint8), "few": np.ones(1 << 14, np.uint8), "many": np.ones((1 << 14) + 1, np.int8),
        "again": np.ones((1 << 14) + 1, np.int8), "a.weight": np.ones((3, 7)), "a": np.ones((3, 8)),
    }  # fmt: skip
    return model_of(
        TensorProto(name="packed", data_type=TensorProto.INT4, dims=[301], raw_data=bytes(150) + b"\x03"),
        helper.make_tensor("words", TensorProto.STRING, [2, 100], [b"a", b"\xff"] * 100),
        *(numpy_helper.from_array(array, name) for name, array in arrays.items()),
    )


def archives(folder: Path) -> list[Path]:
    """Write archives of models with tensors in every place, as converted, and as saved again in another order."""
    models = {f"packaged{i}": onnx.load(path) for i, path in enumerate(packaged_models()[::9])}
    models |= {"rich": rich_model(), "typed": typed_model()}
    for name, model in models.items():
        convert(io.BytesIO(model.SerializeToString()), folder / f"{name}.zcr", durable=False)
        record = zcrecord.load_record(folder / f"{name}.zcr")
        turned = {k: np.array(v, order="F") if isinstance(v, np.ndarray) else v for k, v in record.items()}
        tree = {**dict(reversed(turned.items())), "onnx.graph": record.attributes["onnx.graph"]}
        zcrecord.save_record(tree, folder / f"{name}_again.zcr", durable=False)
    square = np.arange(36, dtype=np.float32).reshape(6, 6)
    tied = [numpy_helper.from_array(array.copy(), name) for name, array in {"w": square, "turned": square.T}.items()]
    tree = {"w": square, "turned": square.T, "onnx.graph": graph_of(model_of(*tied))[1]}
    zcrecord.save_record(tree, folder / "tied.zcr", durable=False)
    return sorted(folder.glob("*.zcr"))


def test_a_model_of_several_is_named_by_its_module(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    models = {"first": rich_model(), "second": typed_model()}
    for name, model in models.items():
        onnx.save(model, tmp_path / "folder" / f"{name}.onnx")
    convert(tmp_path / "folder", path := tmp_path / "both.zcr", durable=False)
    for name in models:
        assert "files" in made([path], module=name)[0]
        to_onnx(path, tmp_path / "whole.onnx", module=name, force=True)
        assert with_values(path, onnx.load(f"{path}.onnx", load_external_data=False)) == onnx.load(
            tmp_path / "whole.onnx"
        )
    (none,), (other,) = made([path]), made([path], module="third")
    assert none["name"] == other["name"] == "UnsupportedError"
    assert none["message"].endswith("its models are in modules: first, second; name one, as the option module")


def test_the_model_is_the_one_that_python_makes(tmp_path: Path) -> None:
    paths = archives(tmp_path)
    for verify in (False, True):
        assert [one for one in made(paths, verify=verify) if "files" not in one] == []
    for path in paths:
        model = onnx.load(f"{path}.onnx", load_external_data=False)
        to_onnx(path, tmp_path / "whole.onnx", force=True)
        to_onnx(path, tmp_path / "external.onnx", external=True, force=True)
        external = onnx.load(tmp_path / "external.onnx", load_external_data=False)
        assert [t.name for t in outside(model)] == [t.name for t in outside(external)], path.name
        whole = onnx.load(tmp_path / "whole.onnx")
        assert with_values(path, model) == whole, path.name
    typed = onnx.load(tmp_path / "typed.zcr.onnx", load_external_data=False)
    files = [{entry.key: entry.value for entry in t.external_data}["location"] for t in outside(typed)]
    assert files == ["small", "small", "small", "small", "large", "large", "small", "small"]
    assert Path(f"{tmp_path}/typed.zcr.large").stat().st_size == (1 << 14) + 1  # what is equal once


def graph_of(model: onnx.ModelProto) -> tuple[dict[str, Any], bytes]:
    """Return the tensors and the skeleton that `convert` makes of a model."""
    out = io.BytesIO()
    convert(io.BytesIO(model.SerializeToString()), out)
    record = zcrecord.load_record(out.getvalue())
    return dict(record), bytes(record.attributes["onnx.graph"])


def test_a_skeleton_that_does_not_fit_its_archive_is_a_typed_error(tmp_path: Path) -> None:
    model = model_of(numpy_helper.from_array(np.ones((2, 100), np.float32), "w"))
    tensors, skeleton = graph_of(model)
    w = tensors["w"]
    deep = functools.reduce(lambda inner, number: field(number, inner), [6, 5, 1] * 60, b"")  # graph, attribute, node
    wrong = {
        "the archive does not; save the record with all it had": ({"v": w}, skeleton),
        r"the skeleton has data_type 1 and shape \[2,100\], the archive float64": ({"w": w.astype("f8")}, skeleton),
        r"shape \[2,100\], the archive float32 of 32 bits and \[100,2\]": ({"w": w.T.copy()}, skeleton),
        "'w' has values of its own; convert the model again": (tensors, model.SerializeToString()),
        "it has no graph": (tensors, b""),
        "a field ends past its message": (tensors, skeleton[:-1]),
        "a varint ends past its message": (tensors, skeleton + b"\x80"),
        "wire type 7 is not known": (tensors, skeleton + b"\x0f"),
        "wire type 3 is not known": (tensors, skeleton + b"\x0b\x0c"),
        "a varint has more than 10 bytes": (tensors, skeleton + b"\x08" + b"\xff" * 11),
        "ModelProto has its field 7 twice; export the model again": (tensors, skeleton * 2),
        "messages are nested more than 100 deep": (tensors, field(7, deep)),
    }
    paths = [tmp_path / f"{i}.zcr" for i in range(len(wrong))]
    for path, (tree, graph) in zip(paths, wrong.values(), strict=True):
        zcrecord.save_record({**tree, "onnx.graph": graph}, path, durable=False)
    for path, told, words in zip(paths, made(paths), wrong, strict=True):
        assert told.get("name") == "FormatError", (words, told)
        assert told["message"].startswith(f"{path}: ") and "attribute 'onnx.graph': " in told["message"]
        assert re.search(words, told["message"]), told


def test_names_of_nested_tensors_have_a_limit(tmp_path: Path) -> None:
    tensor = field(5, field(2, 1))  # of an attribute, with a data_type
    node = field(1, field(5, [field(1, b"n" * 60_000), tensor]))
    tree = {**{f"t{i}": np.ones(1) for i in range(40)}, "onnx.graph": field(7, node * 40)}
    zcrecord.save_record(tree, tmp_path / "n.zcr", durable=False)
    (told,) = made([tmp_path / "n.zcr"])
    assert told["name"] == "LimitError"
    assert "the names of nested tensors take more than 8 times the record's" in told["message"]


def test_tensors_that_share_their_bytes_take_no_memory_out_of_proportion(tmp_path: Path) -> None:
    """2,000 names of a MiB that must be in the model, or that a runtime reads one by one, are 2 GiB."""
    for kind, code in ((np.complex64, TensorProto.COMPLEX64), (np.uint8, TensorProto.UINT8)):
        w = np.zeros((1 << 20) // np.dtype(kind).itemsize, kind)
        names = [f"w{i}" for i in range(2000)]
        tensors = [field(5, [field(8, name.encode()), field(2, code), field(1, w.size)]) for name in names]
        tree = {**dict.fromkeys(names, w), "onnx.graph": field(7, tensors)}
        zcrecord.save_record(tree, tmp_path / "m.zcr", durable=False)
        (told,) = made([tmp_path / "m.zcr"])
        assert told["name"] == "LimitError"
        assert "tensors that share their bytes would take 2097152000 bytes, each by itself" in told["message"]


MIB = 1 << 20
LARGEST = 16 * MIB
CREATE = """async ({ url, whole, build }) => {
  const { open } = await import("/zcrecord/web/reader/zcrecord.js");
  const ort = await import(`/onnxruntime-web/dist/ort.${build}.min.mjs`);
  ort.env.wasm.numThreads = 1;
  let { model, externalData } = await (await open(url)).toOnnx();
  if (whole) externalData = await Promise.all(externalData.map(async ({ path, data }) =>
    ({ path, data: data instanceof Blob ? await data.bytes() : data })));
  const session = await ort.InferenceSession.create(model, { externalData, executionProviders: ["wasm"] });
  const x = new ort.Tensor("float32", Float32Array.from({ length: 2048 }, (_, i) => Math.sin(i)), [1, 2048]);
  const { y } = await session.run({ x });
  await session.release();
  return Array.from(y.data);
}"""
FAIL = """async ({ url }) => {
  const { open } = await import("/zcrecord/web/reader/zcrecord.js");
  const ort = await import("/onnxruntime-web/dist/ort.jspi.bundle.min.mjs");
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "fatal";
  let gone = false;
  const vanishing = (place, options) => fetch(gone ? `${place}?do=missing` : place, options);
  const onnx = await (await open(url, { fetch: vanishing })).toOnnx();
  gone = true;
  const told = await ort.InferenceSession.create(onnx.model, { externalData: onnx.externalData }).catch(String);
  return [told, onnx.failure.name, onnx.failure.message];
}"""


def chain(layers: int) -> onnx.ModelProto:
    """Return a model of matrices of 16 MiB, one after the other."""
    rng = np.random.default_rng(1)
    matrices = [(rng.standard_normal((2048, 2048), np.float32) / 45) for _ in range(layers)]
    names = ["x", *(f"h{i}" for i in range(layers - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2048]) for name in "xy"]
    weights = [numpy_helper.from_array(matrix, f"w{i}") for i, matrix in enumerate(matrices)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of zcrecord.js, onnxruntime-web and a model of 160 MiB."""
    folder = tmp_path_factory.mktemp("onnx")
    convert(io.BytesIO(chain(10).SerializeToString()), folder / "chain.zcr", durable=False)
    with serving(folder) as server:
        server.misbehave = Misbehaving()
        yield server


@pytest.fixture(scope="module")
def wanted(served: Server) -> Any:
    """The answer of ONNX Runtime in Python."""
    x = np.sin(np.arange(2048, dtype=np.float64)).astype(np.float32)
    return zonnx.session(served.folder / "chain.zcr").run(None, {"x": x[None]})[0][0]


@pytest.fixture
def page(pages: Pages, served: Server) -> Any:
    page = pages()
    page.goto(f"{served.url}/blank")
    return page


@pytest.mark.needs("chromium", "npm")
def test_onnxruntime_web_runs_a_model_without_its_weights_in_the_heap(page: Any, served: Server, wanted: Any) -> None:
    served.forget()
    answer, grown = heap_growth(page, CREATE, {"url": "/chain.zcr", "build": "jspi.bundle"})
    # onnxruntime-web itself holds a tensor at a time, and so may we.
    assert grown < 2 * LARGEST + 32 * MIB, f"{grown / MIB:.1f} MiB"
    asked = [request for request in served.requests if request.path == "/chain.zcr"]
    assert len(asked) <= 10 + 6 and sum(request.sent for request in asked) < 10 * LARGEST + MIB
    np.testing.assert_allclose(answer, wanted, rtol=1e-3, atol=1e-4)
    again, grown = heap_growth(page, CREATE, {"url": "/chain.zcr", "build": "jspi.bundle", "whole": True})
    assert grown > 10 * LARGEST and again == answer  # it would be noticed


@pytest.mark.needs("chromium", "npm")
@pytest.mark.parametrize("build", ["bundle", "wasm.bundle", "webgpu.bundle", "jspi"])
def test_other_builds_of_onnxruntime_web_run_it_too(page: Any, wanted: Any, build: str) -> None:
    answer = page.evaluate(CREATE, {"url": "/chain.zcr", "build": build})
    np.testing.assert_allclose(answer, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.needs("chromium", "npm")
def test_a_session_that_cannot_be_created_for_want_of_weights_has_the_reason(page: Any, pages: Pages) -> None:
    told, name, message = page.evaluate(FAIL, {"url": "/chain.zcr"})
    assert "Failed to load external data file" in told and name == "SourceNotFoundError"
    assert "chain.zcr: " in message and "404" in message
    pages.expect_complaints("Failed to load resource", "Failed to load external data")  # onnxruntime's own log
