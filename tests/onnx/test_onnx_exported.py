"""Models of torch's exporters convert whole, from any source, and ONNX Runtime answers the same off the archive."""

from __future__ import annotations

import collections
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_models as m
import pytest
from exported_models import EXPORTERS, EXPORTS, Exported, exported

import zcrecord
from zcrecord.onnx import convert, graph

pytestmark = pytest.mark.exhaustive(keep=("lstm-torchscript", "[twins]"))


@pytest.fixture(params=[f"{name}-{exporter}" for name in EXPORTS for exporter in EXPORTERS])
def export(request: pytest.FixtureRequest) -> Exported:
    name, _, exporter = request.param.partition("-")
    return exported(name, exporter)


@pytest.fixture(params=EXPORTS)
def external(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Exported, Path]:
    """A model of the dynamo exporter with external data, and its folder."""
    export = exported(request.param, "dynamo")
    assert set(export.files) == {"model.onnx", "model.onnx.data"}
    for name, data in export.files.items():
        (tmp_path / name).write_bytes(data)
    return export, tmp_path / "model.onnx"


def assert_whole(record: zcrecord.Record, model: onnx.ModelProto, base_dir: str = "") -> None:
    """Compare every tensor with what onnx says is in the model, and check all digests."""
    record.verify()
    tensors = list(m.every_tensor(model))
    for value, t in zip(record.values(), tensors, strict=True):
        m.assert_equal(value, t, base_dir)
    restored = onnx.ModelProto.FromString(b"".join(graph.model_parts(record)))
    assert [t.name for t in restored.graph.initializer] == [t.name for t in model.graph.initializer]


def users(model: onnx.ModelProto) -> collections.Counter[str]:
    """How many nodes of the main graph take each value."""
    return collections.Counter(name for node in model.graph.node for name in node.input)


# Everything is there.


def test_a_model_in_one_file_converts_and_comes_back(export: Exported, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(export.data)
    convert(tmp_path / "model.onnx", tmp_path / "model.zcr")
    record = zcrecord.load_record(tmp_path / "model.zcr")
    assert_whole(record, export.model)
    assert onnx.ModelProto.FromString(b"".join(graph.model_parts(record))) == m.normal(export.model)


@pytest.mark.slow
def test_a_model_with_external_data_converts_and_comes_back(external: tuple[Exported, Path]) -> None:
    _, path = external
    convert(path, path.with_suffix(".zcr"))
    record = zcrecord.load_record(path.with_suffix(".zcr"))
    loaded = onnx.load(path)
    assert_whole(record, onnx.load(path, load_external_data=False), str(path.parent))
    restored = onnx.ModelProto.FromString(b"".join(graph.model_parts(record)))
    for t in m.every_tensor(loaded):
        t.ClearField("data_location")  # `onnx.load` sets it
    assert restored == m.normal(loaded)


def test_weights_are_torchs_own_under_torchs_names(export: Exported) -> None:
    """A weight that an exporter did not lay out anew has its name and bits of `state_dict`.

    Convolutions are left out: the dynamo exporter folds normalisation into them and leaves them their names.
    """
    record = m.converted(export.data)
    kept = [name for name, weight in export.weights.items() if name in record and weight.ndim < 4]
    assert kept
    for name in kept:
        assert record[name].dtype == export.weights[name].dtype
        assert record[name].tobytes() == export.weights[name].tobytes()


# Stored once.


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_tied_embedding_is_one_entry(exporter: str) -> None:
    export = exported("gpt2", exporter)
    (name,) = [t.name for t in export.model.graph.initializer if list(t.dims) == [100, 32]]
    assert users(export.model)[name] == 2
    record = m.converted(export.data)
    assert [n for n in record if {100, 32} == set(record[n].shape)] == [name]
    assert record[name].tobytes() == export.weights["model.lm_head.weight"].tobytes()
    assert record[name].tobytes() == export.weights["model.transformer.wte.weight"].tobytes()


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("through", ["file", "pipe"])
def test_equal_weights_that_are_not_tied_are_stored_once_and_stay_distinct(
    exporter: str, through: str, tmp_path: Path
) -> None:
    export = exported("twins", exporter)
    first, second = "first.weight", "second.weight"
    path = tmp_path / "model.zcr"
    if through == "pipe":
        path.write_bytes(m.through_pipes(export.data)[0])
    else:
        report = convert(io.BytesIO(export.data), path)
        assert report.shared_bytes >= export.weights[first].nbytes
    record = zcrecord.load_record(path)
    assert record.info(first).offset == record.info(second).offset
    assert record.info(first).tied == record.info(second).tied == ()
    own = zcrecord.load_record(path, mode="c")
    own[first][:] = 0
    assert own[second].tobytes() == export.weights[second].tobytes() != own[first].tobytes()


# In their places.


def subgraphs(nodes: Any, above: str = "") -> Iterator[tuple[str, str, onnx.GraphProto]]:
    """Every graph inside a node, with the node's operator and the module that is to hold its tensors."""
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                place = f"{above}{node.name or node.output[0]}.{attribute.name}"
                yield node.op_type, place, attribute.g
                yield from subgraphs(attribute.g.node, f"{place}.")


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_tensors_of_subgraphs_lie_in_the_module_of_their_node(exporter: str) -> None:
    export = exported("steps", exporter)
    record = m.converted(export.data)
    found: set[str] = set()
    for kind, place, inner in subgraphs(export.model.graph.node):
        for node in inner.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    name = f"{place}.{node.name}.{attribute.name}"
                    m.assert_equal(record[name], attribute.t)
                    assert record.info(name).module == f"{place}.{node.name}"
                    assert place in record.modules
                    found.add(kind)
        assert not inner.initializer  # both exporters have them all in the main graph
    assert found == {"If", "Loop"}
