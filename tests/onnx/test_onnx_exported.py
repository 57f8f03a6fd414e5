"""Models of torch's exporters convert whole, from any source, and ONNX Runtime answers the same off the archive."""

from __future__ import annotations

import collections
from pathlib import Path

import onnx
import onnx_models as m
import pytest
from exported_models import EXPORTERS, EXPORTS, Exported, exported

import zcrecord
from zcrecord.onnx import convert

pytestmark = pytest.mark.exhaustive(keep=("lstm-torchscript", "[twins]"))


@pytest.fixture(params=[f"{name}-{exporter}" for name in EXPORTS for exporter in EXPORTERS])
def export(request: pytest.FixtureRequest) -> Exported:
    name, _, exporter = request.param.partition("-")
    return exported(name, exporter)


@pytest.fixture(params=EXPORTS)
def external(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of the dynamo exporter with external data."""
    export = exported(request.param, "dynamo")
    assert set(export.files) == {"model.onnx", "model.onnx.data"}
    for name, data in export.files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path / "model.onnx"


def assert_whole(record: zcrecord.Record, model: onnx.ModelProto, base_dir: str = "") -> None:
    """Compare every tensor with what onnx says is in the model, and check all digests."""
    record.verify()
    tensors = list(m.every_tensor(model))
    for value, t in zip(record.values(), tensors, strict=True):
        m.assert_equal(value, t, base_dir)


def users(model: onnx.ModelProto) -> collections.Counter[str]:
    """How many nodes of the main graph take each value."""
    return collections.Counter(name for node in model.graph.node for name in node.input)


# Everything is there.


@pytest.mark.slow
def test_a_model_with_external_data_converts_and_comes_back(external: Path) -> None:
    convert(external, external.with_suffix(".zcr"))
    record = zcrecord.load_record(external.with_suffix(".zcr"))
    assert_whole(record, onnx.load(external, load_external_data=False), str(external.parent))
    loaded = onnx.load(external)
    for t in m.every_tensor(loaded):
        t.ClearField("data_location")  # `onnx.load` sets it
    assert m.restored(record) == m.normal(loaded)


def test_a_model_in_one_file_comes_back_and_has_torchs_own_weights_under_torchs_names(export: Exported) -> None:
    """A weight that an exporter does not lay out anew has its name and bits of `state_dict`.

    Convolutions are left out: the dynamo exporter folds normalisation into them, and their names stay.
    """
    record = m.converted(export.data)
    assert_whole(record, export.model)
    assert m.restored(record) == m.normal(export.model)
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


# In their places.
