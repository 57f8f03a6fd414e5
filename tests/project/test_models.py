"""The models the tools make: valid, of the size asked for, the same bytes each time, written in bounded memory."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from exhaustive import some
from onnx import numpy_helper

from tools.measure import MIB
from tools.models import branches, convolutions, gpt, quantized, small, typed
from tools.worker import ROOT, Worker, call_alone

DATA = ROOT / "tests" / "data"

linux = pytest.mark.skipif(sys.platform != "linux", reason="platform: /proc/PID/smaps_rollup is Linux's")


class Model(NamedTuple):
    """One of the tools' models.

    `sha256` is that of every weight of the 1 MiB model, in order. Another value means that the same size no longer
    gives the same bytes.
    """

    write: Callable[[IO[bytes], int], object]
    main: Callable[[list[str]], int]
    sha256: str


MODELS = {
    "gpt": Model(gpt.write_gpt, gpt.main, "38ca47b5b76bf5a992f4629917d0df280807ae6769cc03b10981f62cfa7541ae"),
    "branches": Model(
        branches.write_branches, branches.main, "3448f1db3822c25f6de8c65d1a16780edd9bd82c5a78199fc5d9a90037f21495"
    ),
    "convolutions": Model(
        convolutions.write_convolutions,
        convolutions.main,
        "cb265fcdcb9c9c2ef7bd2baca1858f204a43435d3d44373617d2124d7b12aeae",
    ),
    "quantized": Model(
        quantized.write_quantized, quantized.main, "f33ce2ad7a9e1566a8f02308dab67e4ed0dcc4fd5053dd9912c9983d68aa30b1"
    ),
}

each_model = pytest.mark.parametrize("name", MODELS)


class Pipe(io.BytesIO):
    """A sink that cannot seek, and remembers the largest single write."""

    largest = 0

    def seekable(self) -> bool:
        return False

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("seek")

    def write(self, data: Any) -> int:
        self.largest = max(self.largest, memoryview(data).nbytes)
        return super().write(data)


def written(name: str, mib: int) -> bytes:
    pipe = Pipe()
    MODELS[name].write(pipe, mib)
    return pipe.getvalue()


def weights(model: bytes) -> list[bytes]:
    """The initializers that are not small constants."""
    return [t.raw_data for t in onnx.load_from_string(model).graph.initializer if t.raw_data]


def answers(model: bytes, **inputs: Any) -> Any:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


@each_model
def test_model_passes_the_checker(name: str) -> None:
    onnx.checker.check_model(onnx.load_from_string(written(name, 1)), full_check=True)


@each_model
def test_model_of_one_size_has_the_same_bytes_every_time(name: str) -> None:
    model = written(name, 1)
    assert written(name, 1) == model
    assert hashlib.sha256(b"".join(weights(model))).hexdigest() == MODELS[name].sha256


@each_model
@pytest.mark.parametrize("mib", [1, 2, 8])
def test_model_has_no_two_equal_weights_and_the_size_asked_for(name: str, mib: int) -> None:
    found = weights(written(name, mib))
    assert len(set(found)) == len(found) >= (1 if name == "branches" else 15)
    least = 0.9 if name == "branches" else 0.99  # its one matrix is square
    assert least * mib * MIB < sum(map(len, found)) <= mib * MIB


@each_model
def test_model_is_written_in_chunks_to_what_cannot_seek(name: str) -> None:
    pipe = Pipe()
    MODELS[name].write(pipe, 32)
    assert MIB < pipe.largest <= 4 * MIB


@each_model
@pytest.mark.parametrize("mib", [0, 1901])
def test_model_of_a_size_that_protobuf_cannot_hold_is_refused(name: str, mib: int, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        MODELS[name].main(["--mib", str(mib), "-"])
    told = capsys.readouterr().err
    assert f"size {mib} MiB is not from 1 to 1900" in told
    assert f"tools.models.{name}" in told


@each_model
def test_command_writes_the_model_and_says_what_it_is(name: str, tmp_path: Path, capsys: Any) -> None:
    assert MODELS[name].main(["--mib", "1", str(tmp_path / "model.onnx")]) == 0
    assert (tmp_path / "model.onnx").read_bytes() == written(name, 1)
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'model.onnx'}: ")


# -- what each computes ----------------------------------------------------------------------------------------------


@pytest.mark.measured
def test_gpt_model_answers_with_finite_logits_that_depend_on_earlier_tokens_only() -> None:
    model = written("gpt", 1)
    vocabulary = gpt.plan(1).vocabulary
    tokens = np.random.default_rng(0).integers(0, vocabulary, (3, 9))
    logits = answers(model, input_ids=tokens)
    shorter = answers(model, input_ids=tokens[:, :5])
    assert logits.shape == (3, 9, vocabulary)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1
    np.testing.assert_allclose(logits[:, :5], shorter, atol=1e-4)


@pytest.mark.measured
def test_branches_model_looks_rows_up_or_multiplies_by_the_same_matrix() -> None:
    model = written("branches", 1)
    side = branches.plan(1).side
    (stored,) = onnx.load_from_string(model).graph.initializer
    matrix = onnx.numpy_helper.to_array(stored)
    assert matrix.shape == (side, side)
    rows, x = np.array([5, side - 1]), np.random.default_rng(0).standard_normal((2, side), np.float32)
    looked_up = answers(model, gather=np.array(True), rows=rows, x=x)
    multiplied = answers(model, gather=np.array(False), rows=rows, x=x)
    assert looked_up.tobytes() == matrix[rows].tobytes()
    np.testing.assert_allclose(multiplied, x @ matrix.T, atol=1e-4)


def test_branches_model_has_its_matrix_once_and_names_it_in_both_branches() -> None:
    (node,) = onnx.load_from_string(written("branches", 1)).graph.node
    used = [[name for inner in a.g.node for name in inner.input if "weight" in name] for a in node.attribute]
    assert used == [["shared.weight"], ["shared.weight"]]
    assert not any(a.g.initializer for a in node.attribute)


@pytest.mark.measured
def test_convolutions_model_answers_with_finite_logits_that_tell_images_apart() -> None:
    model = written("convolutions", 2)
    images = np.random.default_rng(0).standard_normal((3, 3, convolutions.IMAGE, convolutions.IMAGE), np.float32)
    logits = answers(model, image=images)
    assert logits.shape == (3, convolutions.plan(2).classes)
    assert np.isfinite(logits).all()
    assert (logits - logits[0])[1:].std() > 0.01
    np.testing.assert_allclose(logits[:1], answers(model, image=images[:1]), rtol=1e-3, atol=1e-3)


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


# -- served without a copy -------------------------------------------------------------------------------------------


def private_growth(path: Path) -> int:
    """The private memory of a process that serves a model, both branches of an If included."""
    with Worker() as worker:
        worker.call("tools.serving:prepare")
        before = int(worker.call("tools.serving:private_bytes"))
        worker.call("tools.serving:open_session", path=str(path))
        for condition in (False, True):
            worker.call("tools.serving:first_answer", condition=condition)
        return int(worker.call("tools.serving:private_bytes")) - before


@pytest.mark.measured
@pytest.mark.exhaustive(keep=1)
@linux
@each_model
def test_serving_from_the_archive_copies_no_weight_and_the_measurement_would_notice(name: str, tmp_path: Path) -> None:
    source, archive = tmp_path / "model.onnx", tmp_path / "model.zcr"
    with source.open("wb") as sink:
        MODELS[name].write(sink, 32)
    call_alone("tools.serving:convert", source=str(source), dest=str(archive))
    assert private_growth(source) > 32 * MIB
    untuned = private_growth(archive)
    assert untuned < 12 * MIB
    call_alone("tools.serving:tune", source=str(archive), dest=str(tmp_path / "tuned.zcr"))
    assert private_growth(tmp_path / "tuned.zcr") < untuned + 4 * MIB
    for path in (source, archive, tmp_path / "tuned.zcr"):
        path.unlink()  # pytest keeps the folders of three runs


@pytest.mark.measured
def test_both_forms_answer_alike(tmp_path: Path) -> None:
    for name, model in some([*MODELS.items()], 1):
        source, archive = tmp_path / f"{name}.onnx", tmp_path / f"{name}.zcr"
        with source.open("wb") as sink:
            model.write(sink, 1)
        call_alone("tools.serving:convert", source=str(source), dest=str(archive))
        for condition in (False, True):
            told = []
            for path in (source, archive):
                with Worker() as worker:
                    worker.call("tools.serving:open_session", path=str(path))
                    told.append(worker.call("tools.serving:first_answer", batch=2, condition=condition)[1])
            np.testing.assert_allclose(told[0], told[1], rtol=1e-3, atol=1e-3)
            assert len(set(told[0])) == 16


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


def test_digits_model_names_its_weights_as_an_exporter_would() -> None:
    names = {t.name for t in onnx.load(DATA / "digits.onnx").graph.initializer}
    assert {"features.0.weight", "features.0.bias", "features.2.weight", "classifier.weight"} <= names


@pytest.mark.parametrize("field, kind", [("float_data", np.float32), ("int64_data", np.int64)])
def test_typed_models_hold_their_values_in_that_field(field: Any, kind: Any) -> None:
    sink = io.BytesIO()
    count = typed.write_typed(sink, field, 2_000_000)
    model = onnx.ModelProto.FromString(sink.getvalue())
    onnx.checker.check_model(model)
    (tensor,) = model.graph.initializer
    values = numpy_helper.to_array(tensor)
    assert len(getattr(tensor, field)) == len(values) == count
    assert values.dtype == kind
    assert len(sink.getvalue()) >= 2_000_000
    if kind is np.int64:
        sizes = [(int(v) & (1 << 64) - 1).bit_length() for v in values[:5000]]
        assert set(range(1, 11)) == {max(1, -(-n // 7)) for n in sizes}


@pytest.mark.parametrize(("nested", "last"), [(False, "blocks.19.bias.9"), (True, "model.layers.1.mlp.99.weight")])
def test_small_models_have_very_many_initializers_and_two_nodes_for_each(nested: bool, last: str) -> None:
    sink = io.BytesIO()
    nbytes = small.write_small(sink, 200, nested=nested)
    model = onnx.ModelProto.FromString(sink.getvalue())
    onnx.checker.check_model(model, full_check=True)
    arrays = [numpy_helper.to_array(t) for t in model.graph.initializer]
    assert (len(arrays), len(model.graph.node)) == (200, 400)
    assert model.graph.initializer[-1].name == last
    assert nbytes == sum(a.nbytes for a in arrays)
    assert len({a.tobytes() for a in arrays}) == 200
