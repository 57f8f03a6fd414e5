"""The models the tools make: valid, of the size asked for, the same bytes each time."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import onnx
import onnxruntime
import pytest

from tools.bench.resident import move_to_constants, private_growth
from tools.measure import MIB
from tools.models import branches, convolutions, gpt, quantized, tied
from tools.worker import ROOT, call_alone

DATA = ROOT / "tests" / "data"

linux = pytest.mark.skipif(sys.platform != "linux", reason="platform: /proc/PID/smaps_rollup is Linux's")


MODELS: dict[str, Callable[[IO[bytes], int], object]] = {
    "gpt": gpt.write_gpt,
    "branches": branches.write_branches,
    "convolutions": convolutions.write_convolutions,
    "quantized": quantized.write_quantized,
    "tied": tied.write_tied,
    "dequantized": tied.write_dequantized,
}
ONE_MATRIX = ("branches", "tied", "dequantized")
each_model = pytest.mark.parametrize("name", MODELS)


def written(name: str, mib: int) -> bytes:
    sink = io.BytesIO()
    MODELS[name](sink, mib)
    return sink.getvalue()


@each_model
@pytest.mark.parametrize("mib", [1, 8])
def test_model_is_valid_of_the_size_asked_for_the_same_every_time_and_no_two_weights_are(name: str, mib: int) -> None:
    model = written(name, mib)
    assert written(name, mib) == model
    onnx.checker.check_model(made := onnx.load_from_string(model), full_check=True)
    found = [t.raw_data for t in made.graph.initializer if t.raw_data]  # not small constants
    assert len(set(found)) == len(found) >= (1 if name in ONE_MATRIX else 15)
    least = 0.9 if name == "branches" else 0.99  # its one matrix is square
    assert least * mib * MIB < sum(map(len, found)) <= mib * MIB


def test_quantized_model_is_one_that_onnxruntime_computes_in_integers(tmp_path: Path) -> None:
    model = written("quantized", 2)
    x = np.random.default_rng(0).standard_normal((2, 5, quantized.plan(2).width), np.float32)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # it warns that such a file is for this machine alone
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearMatMul") == 2 * quantized.BLOCKS
    assert "MatMul" not in kinds
    assert all(np.isfinite(out).all() for out in session.run(None, {"x": x}))
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (floats,) = onnxruntime.InferenceSession(model, plain, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    assert floats.shape == (2, 5, quantized.plan(2).classes)
    assert 0.5 < floats.std() < 2  # integers depend on the processor: without VNNI sums of two products are cut off


@pytest.mark.measured
@pytest.mark.exhaustive(keep=1)
@linux
@pytest.mark.parametrize("name", [*MODELS, "constants"])
def test_serving_from_the_archive_copies_no_weight_and_the_measurement_would_notice(name: str, tmp_path: Path) -> None:
    source, archive = tmp_path / "model.onnx", tmp_path / "model.zcr"
    source.write_bytes(written("gpt" if name == "constants" else name, 32))
    if name == "constants":
        move_to_constants(source)
    call_alone("tools.serving:convert", source=str(source), dest=str(archive))
    assert private_growth(source) > 32 * MIB
    untuned = private_growth(archive)
    if name == "dequantized":  # a branch of the untuned one makes floats of the matrix, and turns it
        assert private_growth(archive, ()) < 4 * MIB < 100 * MIB < untuned
        untuned = 8 * MIB
    assert untuned < 12 * MIB
    call_alone("tools.serving:tune", source=str(archive), dest=str(tmp_path / "tuned.zcr"))
    assert private_growth(tmp_path / "tuned.zcr") < untuned + 4 * MIB
    for path in (source, archive, tmp_path / "tuned.zcr"):
        path.unlink()  # pytest keeps the folders of three runs


@pytest.mark.measured
def test_digits_model_is_small_and_classifies_the_held_out_images() -> None:
    assert (DATA / "digits.onnx").stat().st_size <= MIB
    with np.load(DATA / "digits_heldout.npz") as held_out:
        images, labels = held_out["images"], held_out["labels"]
    assert images.shape == (360, 8, 8)
    assert images.dtype == labels.dtype == np.uint8
    session = onnxruntime.InferenceSession(DATA / "digits.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"pixels": images.reshape(-1, 64).astype(np.float32)})
    assert (logits.argmax(axis=1) == labels).mean() >= 0.95
