"""ONNX Runtime computes off the archive: the same outputs, no copy of a weight, whatever the archive comes from."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphs
import onnx_models as m
import onnxruntime as ort
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import TensorProto, helper, numpy_helper
from onnx_exports import stub
from onnx_graphs import PACKS, archive_of, assert_same, converted_in, feeds, floats, graph_model, mlp, plain, value
from other_processors import COUNTS_MEMORY
from records import saved

import zcrecord
from tools.measure import most_allocated
from tools.models.architectures import ARCHITECTURES, EXPORTERS, write_architecture
from tools.serving import request_for
from zcrecord import integrity
from zcrecord.errors import DependencyError, IntegrityError, LimitError, OnnxError, SourceError, UnsupportedError
from zcrecord.onnx import convert, fill_session, graph, runtime, session, to_onnx, tune, tuning


@pytest.fixture(params=["direct", "earlier"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which weights reach ONNX Runtime: in place, and as before 1.31."""
    if request.param == "earlier":
        monkeypatch.setattr(runtime, "_DIRECT_SINCE", (99, 0))
    return str(request.param)


# The same outputs.


@pytest.mark.parametrize("memory", ["shared", "speed"])
@pytest.mark.parametrize("number", range(3), ids=["mlp", "if", "conv"])
def test_outputs_are_bit_equal_under_the_same_options(number: int, memory: Any, version: str, tmp_path: Path) -> None:
    model, inputs = feeds()[number]
    path = converted_in(tmp_path, model)
    record = zcrecord.load_record(path)
    reference = plain(model, memory == "shared")
    for source in (path, str(path), record, path.read_bytes(), bytearray(path.read_bytes())):
        made = session(source, memory=memory)
        assert type(made) is ort.InferenceSession
        for feed in inputs:
            assert_same(made.run(None, feed), reference.run(None, feed))


def test_strings_and_complex_tensors_and_empty_ones_stay_in_the_model() -> None:
    model = mlp()
    model.graph.initializer.append(helper.make_tensor("names", TensorProto.STRING, [40], [b"a long string"] * 40))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((0, 64), "f4"), "none"))
    model.graph.node.append(helper.make_node("Identity", ["names"], ["z"]))
    model.graph.node.append(helper.make_node("Concat", ["y", "none"], ["cat"], axis=0))
    model.graph.output.extend([value("z", 40, kind=TensorProto.STRING), value("cat", "n", 64)])
    x = floats(2, 64)
    got = session(archive_of(model)).run(None, {"x": x})
    assert got[1].tolist() == ["a long string"] * 40
    assert_same([got[0], got[2]], [plain(model, True).run(["y"], {"x": x})[0], got[0]])


def test_a_type_narrower_than_a_byte_is_handed_over(version: str, tmp_path: Path) -> None:
    weights = onnx_graphs.RNG.integers(-8, 8, (64, 64)).astype("i1")
    t = helper.make_tensor("w", TensorProto.INT4, [64, 64], weights.reshape(-1).tolist())
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0)
    model = graph_model([node, helper.make_node("MatMul", ["x", "d"], ["y"])], [value("x", 1, 64)], [value("y")],
                        {"s": np.abs(floats(64))})  # fmt: skip
    model.opset_import[0].version = 21
    model.ir_version = 10
    model.graph.initializer.append(t)
    x = {"x": floats(1, 64)}
    assert_same(session(converted_in(tmp_path, model)).run(None, x), plain(model, True).run(None, x))


def test_very_many_weights_are_mapped_only_from_a_larger_size_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runtime, "_DIRECT_SINCE", (99, 0))
    monkeypatch.setattr(graph, "MOST_MAPPED", 2)
    model, inputs = mlp(), {"x": floats(1, 64)}
    path = converted_in(tmp_path, model)
    assert runtime._least_mapped(zcrecord.load_record(path)) == 64 * 4 + 1
    assert_same(session(path).run(None, inputs), plain(model, True).run(None, inputs))


# Where the archive is.


def test_an_archive_that_is_renamed_or_replaced_after_it_was_opened_answers_as_before(
    version: str, tmp_path: Path
) -> None:
    model, inputs = mlp(), {"x": floats(1, 64)}
    path, expected = converted_in(tmp_path, model), plain(model, True).run(None, inputs)
    record = zcrecord.load_record(path)
    path.rename(tmp_path / "renamed.zcr")
    assert_same(session(record).run(None, inputs), expected)
    path.write_bytes(archive_of(mlp()))  # as large, other weights
    assert_same(session(record).run(None, inputs), expected)


def test_a_file_that_begins_and_ends_as_the_archive_is_not_mapped_for_it(tmp_path: Path) -> None:
    path = converted_in(tmp_path, onnx_graphs.branches())
    data = path.read_bytes()
    record = zcrecord.load_record(path)
    start = record.archive.header.payload_offset  # of a branch's own weight, which is mapped from a file
    (tmp_path / "other").write_bytes(data[:start] + bytes(16000) + data[start + 16000 :])
    os.replace(tmp_path / "other", path)
    for condition in (True, False):
        feed = {"x": np.ones((1, 64), "f4"), "i": np.array([3]), "c": np.array([condition])}
        ours, theirs = (session(given).run(None, feed)[0] for given in (record, data))
        np.testing.assert_array_equal(ours, theirs)


def test_an_archive_replaced_while_the_session_is_made_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_DIRECT_SINCE", (99, 0))
    path, create = converted_in(tmp_path, mlp()), runtime._create

    def late(*args: Any) -> Any:
        os.utime(path, ns=(1, 1))
        return create(*args)

    monkeypatch.setattr(runtime, "_create", late)
    with pytest.raises(SourceError, match=r"model\.zcr: replaced while the session was made; make it again"):
        session(path)


def test_a_session_is_made_of_what_a_trusted_key_signed_alone(tmp_path: Path) -> None:
    model, inputs = feeds()[0]
    path, key, other = converted_in(tmp_path, model), Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    for signer, fault in ((None, "is not signed$"), (other, "is not signed by this key"), (key, "")):
        if signer is not None:
            integrity.sign(path, signer)
        for source in (path, zcrecord.load_record(path), path.read_bytes()):
            if fault:
                with pytest.raises(IntegrityError, match=fault):
                    session(source, trusted_keys=[key.public_key()])
            else:
                made = session(source, trusted_keys=[key.public_key()])
                assert_same(made.run(None, inputs[0]), plain(model, True).run(None, inputs[0]))
    signature = zcrecord.load_record(path).metadata
    tune(path)
    zcrecord.save_record(zcrecord.load_record(path), path, metadata=signature)
    with pytest.raises(IntegrityError, match="is not what was signed by the key"):
        session(path, trusted_keys=[key.public_key()])


def test_options_of_ones_own_serve_several_sessions(version: str, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    inputs = {"x": floats(1, 64)}
    for i in range(2):
        model = mlp()
        (tmp_path / str(i)).mkdir()
        for source in (archive_of(model), converted_in(tmp_path / str(i), model)):
            made = session(source, sess_options=options, providers=["CPUExecutionProvider"])
            assert_same(made.run(None, inputs), plain(model, True).run(None, inputs))
            assert made.get_session_options().intra_op_num_threads == 1
    assert made.get_providers() == ["CPUExecutionProvider"]


# What it says when it cannot.


def test_an_archive_without_a_model_and_an_unknown_kind_of_memory_are_refused(tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.ones(3)}, tmp_path / "w.zcr")
    with pytest.raises(UnsupportedError, match=r"w\.zcr: no attribute 'onnx\.graph': the archive holds tensors"):
        session(tmp_path / "w.zcr")
    with pytest.raises(UnsupportedError, match="memory='fast' is not known; 'shared' or 'speed'"):
        session(b"", memory="fast")  # type: ignore[arg-type]


def test_a_missing_onnxruntime_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    what = r"onnxruntime is not installed; pip install onnxruntime, or in a checkout .*'\.\[ort\]'"
    with pytest.raises(DependencyError, match=what):
        session(archive_of(mlp()))


@pytest.mark.parametrize("inner", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["strided", "of a subgraph"])
def test_tensors_that_share_their_bytes_are_not_copied_each(inner: bool) -> None:
    """1,100 views of a MiB that are not in C order, or that ONNX Runtime takes from files alone: 1.15 GB in all."""
    w = np.zeros((512, 512), np.float32)
    weights = [m.field(5, stub(i, b"w%d" % i, (512, 512))) for i in range(1100)]
    views = {f"w{i}": w if inner else w.T for i in range(1100)}
    graph = m.field(7, m.field(1, m.field(5, m.field(1, b"g") + m.field(6, weights))) if inner else weights)
    data = saved({**({"_": {"g": views}} if inner else views), "w": w, "onnx.graph": graph})

    def refused() -> None:
        with pytest.raises(LimitError, match=r"tensors that share their bytes would take 1\.15e\+09 bytes"):
            session(data)

    assert most_allocated(refused) < 1 << 24


def test_a_model_too_large_for_protobuf_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_LENGTH", 100)
    with pytest.raises(LimitError, match=r"\d+ bytes in one model, and protobuf holds at most 100; save the"):
        session(archive_of(mlp()))


# Nothing is copied.


@COUNTS_MEMORY
@pytest.mark.measured
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="platform: needs Linux's smaps_rollup")
def test_no_weight_is_copied_and_the_measurement_would_notice(tmp_path: Path) -> None:
    plain_path, path = onnx_graphs.large_branches(tmp_path)
    assert onnx_graphs.private_growth("ort.InferenceSession(path)", plain_path) > 48 << 20
    assert onnx_graphs.private_growth("session(path)", path) < 8 << 20
    assert onnx_graphs.private_growth("session(path, sess_options=ort.SessionOptions())", path) < 8 << 20
    assert onnx_graphs.private_growth("session(mapped(path))", path) < 8 << 20
    plain_path.unlink()
    path.unlink()


@pytest.mark.parametrize("mode", ["r", "c"])
def test_other_providers_than_the_cpu_read_weights_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    record = zcrecord.load_record(converted_in(tmp_path, mlp()), mode=mode)
    given: list[bytes] = []
    create = runtime._create

    def noting(ort: Any, model: bytes, *more: Any) -> Any:
        given.append(model)
        return create(ort, model, *more)

    monkeypatch.setattr(runtime, "_create", noting)
    feed = {"x": floats(2, 64)}
    (expected,) = session(record).run(None, feed)
    found = session(record, providers=["AzureExecutionProvider", "CPUExecutionProvider"])
    np.testing.assert_array_equal(found.run(None, feed)[0], expected)
    in_file = [b"model.zcr" in model for model in given]
    by_file = runtime._version(ort) < runtime._DIRECT_SINCE
    assert in_file == [by_file and mode == "r", mode == "r"], "memory that may be edited is no file's"


@pytest.mark.parametrize("nodes", [[], [helper.make_node("Nothing", [], [])]], ids=["no node", "no such operator"])
@pytest.mark.parametrize("call", [session, fill_session, tune])
def test_a_model_that_onnx_runtime_refuses_is_one_typed_error(call: Any, nodes: list[Any], tmp_path: Path) -> None:
    path = converted_in(tmp_path, graph_model(nodes, [], [], {}))
    before = path.read_bytes()
    what = r"model\.zcr: ONNX Runtime \S+ makes no session of the model: .*; the \.onnx itself has to run there: mend"
    with pytest.raises(OnnxError, match=what):
        call(path)
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.zcr"]
    assert path.read_bytes() == before


def test_an_onnx_runtime_that_is_too_old_is_named_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = converted_in(tmp_path, graph_model([helper.make_node("Nothing", [], [])], [], [], {}))
    monkeypatch.setattr(ort, "__version__", "1.20.1")
    with pytest.raises(OnnxError, match=r"Runtime 1\.20\.1 makes no .*; zcrecord needs onnxruntime 1\.24 or later"):
        session(path)


# Architectures of torch and others.


two_of_them = pytest.mark.exhaustive(keep=("gru-torchscript", "vit-torchscript"))

BATCHES = (1, 16)
# Without prepacking ONNX Runtime takes other kernels, whose sums have another order. That of 4-bit matrices then
# multiplies by floats rather than by activations rounded to 8 bits.
CLOSE = dict.fromkeys(ARCHITECTURES, 1e-5) | {"llama-4bit": 2e-2}


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


@two_of_them
@pytest.mark.slow
def test_a_session_for_speed_answers_bit_for_bit_as_the_onnx(served: Served) -> None:
    assert_same(answers(session(served.archive, memory="speed")), served.answers)


@two_of_them
@pytest.mark.measured
def test_a_session_over_the_one_copy_answers_close_to_the_onnx(served: Served) -> None:
    assert_close(answers(session(served.archive)), served)


@two_of_them
def test_answers_mean_something(served: Served) -> None:
    for batch, answer in zip(BATCHES, served.answers, strict=True):
        assert np.isfinite(answer).all() and answer.std() > 0.01
        assert len({row.tobytes() for row in answer}) == batch


# Tuned for this machine.


@pytest.fixture(scope="module")
def tuned(served: Served) -> Path:
    """The archive, tuned."""
    tune(served.archive, path := served.archive.with_name("tuned.zcr"))
    return path


@two_of_them
@pytest.mark.measured
def test_a_tuned_archive_answers_bit_for_bit_as_the_onnx(served: Served, tuned: Path) -> None:
    made = session(tuned)
    assert tuning(made).used, tuning(made).reason
    if PACKS:
        assert_same(answers(made), served.answers)
    else:
        assert_close(answers(made), served)


@two_of_them
def test_the_model_comes_back_byte_for_byte(served: Served, tuned: Path, tmp_path: Path) -> None:
    for archive in (served.archive, tuned):
        to_onnx(archive, tmp_path / "again.onnx", durable=False, force=True)
        assert (tmp_path / "again.onnx").read_bytes() == served.model.read_bytes()
