"""Well-known architectures, as torch's two exporters write them, answer off the archive as off the .onnx."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto
from onnx_graphs import PACKS, assert_same

from tools.models.architectures import ARCHITECTURES, EXPORTERS, write_architecture
from tools.serving import request_for
from zcrecord.onnx import convert, session, to_onnx, tune, tuning

pytestmark = pytest.mark.exhaustive(keep=("gru-torchscript", "vit-torchscript"))

BATCHES = (1, 16)
# Without prepacking ONNX Runtime takes other kernels, whose sums have another order. That of 4-bit matrices then
# multiplies by floats rather than by activations rounded to 8 bits.
CLOSE = dict.fromkeys(ARCHITECTURES, 1e-5) | {"llama-4bit": 2e-2}
OPERATORS = dict.fromkeys(("resnet", "vit"), "Conv") | dict.fromkeys(("bert", "llama-f16"), "MatMul")
OPERATORS |= {"gru": "GRU", "llama-4bit": "MatMulNBits"}


@dataclass(frozen=True)
class Served:
    """One export: the model's file, its archive, and ONNX Runtime's answers to a request of each batch size."""

    name: str
    model: Path
    archive: Path
    answers: list[np.ndarray]


def answers(made: Any) -> list[np.ndarray]:
    return [made.run(None, request_for(made, batch))[0] for batch in BATCHES]


@pytest.fixture(scope="module", params=[f"{name}-{exporter}" for name in ARCHITECTURES for exporter in EXPORTERS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    name, _, exporter = request.param.rpartition("-")
    folder = tmp_path_factory.mktemp(request.param)
    model, archive = folder / "model.onnx", folder / "model.zcr"
    write_architecture(name, exporter, model)
    convert(model, archive, durable=False)
    return Served(name, model, archive, answers(ort.InferenceSession(model)))


def assert_close(got: list[np.ndarray], served: Served) -> None:
    for a, b in zip(got, served.answers, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=CLOSE[served.name] * float(np.abs(b).max()))


@pytest.mark.slow
def test_a_session_for_speed_answers_bit_for_bit_as_the_onnx(served: Served) -> None:
    assert_same(answers(session(served.archive, memory="speed")), served.answers)


@pytest.mark.measured
def test_a_session_over_the_one_copy_answers_close_to_the_onnx(served: Served) -> None:
    assert_close(answers(session(served.archive)), served)


def test_answers_mean_something(served: Served) -> None:
    for batch, answer in zip(BATCHES, served.answers, strict=True):
        assert np.isfinite(answer).all() and answer.std() > 0.01
        assert len({row.tobytes() for row in answer}) == batch


def test_an_export_has_what_its_architecture_is_chosen_for(served: Served) -> None:
    model = onnx.load(served.model)
    assert OPERATORS[served.name] in {node.op_type for node in model.graph.node}
    nbytes: Counter[int] = Counter()
    for t in model.graph.initializer:
        nbytes[t.data_type] += len(t.raw_data)
    most = {"llama-f16": TensorProto.FLOAT16}.get(served.name, TensorProto.FLOAT)
    assert max(nbytes, key=nbytes.__getitem__) == most
    (batch, *_) = model.graph.input[0].type.tensor_type.shape.dim
    assert batch.dim_param == "batch"


# Tuned for this machine.


@pytest.fixture(scope="module")
def tuned(served: Served) -> Path:
    """The archive, tuned."""
    tune(served.archive, path := served.archive.with_name("tuned.zcr"))
    return path


@pytest.mark.measured
def test_a_tuned_archive_answers_bit_for_bit_as_the_onnx(served: Served, tuned: Path) -> None:
    made = session(tuned)
    assert tuning(made).used, tuning(made).reason
    if PACKS:
        assert_same(answers(made), served.answers)
    else:
        assert_close(answers(made), served)


def test_the_model_comes_back_byte_for_byte(served: Served, tuned: Path, tmp_path: Path) -> None:
    for archive in (served.archive, tuned):
        to_onnx(archive, tmp_path / "again.onnx", durable=False, force=True)
        assert (tmp_path / "again.onnx").read_bytes() == served.model.read_bytes()
