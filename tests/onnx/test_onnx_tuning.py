"""A tuned archive answers as the .onnx does, bit for bit, from one shared copy; nothing else of it changes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from guides import ROOT
from onnx import helper
from onnx_graphs import branches, graph_model, value

import zcrecord
from tools.models import convolutions, gpt, quantized
from zcrecord.embed.attachment import attach
from zcrecord.errors import DestinationExistsError, IntegrityError, RecordError, SourceError, UnsupportedError
from zcrecord.integrity.signing import check_signature, sign
from zcrecord.onnx import convert, runtime, session, to_onnx, tune, tuning, untune
from zcrecord.onnx.tuned import read_tuned
from zcrecord.transport.packer import pack

DIGITS = ROOT / "tests" / "data" / "digits.onnx"
VERSION = tuple(map(int, ort.__version__.split(".")[:2]))
PACKS = VERSION >= (1, 32)  # earlier versions get no packed weights
WRITES_INNER = VERSION >= (1, 31)  # 1.21 cannot read the optimised graph with weights in subgraphs that it wrote
WRITERS = {"gpt": gpt.write_gpt, "convolutions": convolutions.write_convolutions, "int8": quantized.write_quantized}


@pytest.fixture(scope="module", params=["gpt", "convolutions", "int8", *(["if"] if WRITES_INNER else [])])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "model.onnx"
    if request.param == "if":
        path.write_bytes(branches().SerializeToString())
    else:
        with path.open("wb") as file:
            WRITERS[request.param](file, 2)
    return path


def inputs(made: Any, batch: int) -> dict[str, Any]:
    """Inputs of any model: names to arrays."""
    rng = np.random.default_rng(batch)
    out = {}
    for each in made.get_inputs():
        shape = [n if isinstance(n, int) else (batch if i == 0 else 8) for i, n in enumerate(each.shape)]
        if "bool" in each.type:
            out[each.name] = np.ones(shape, bool)
        elif "int64" in each.type:
            out[each.name] = rng.integers(0, 2, shape)
        else:
            out[each.name] = rng.standard_normal(shape, dtype=np.float32)
    return out


def plain(path: Path) -> Any:
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    convert(DIGITS, tmp_path / "model.zcr")
    tune(tmp_path / "model.zcr")
    return tmp_path / "model.zcr"


@pytest.mark.exhaustive(keep=2)
@pytest.mark.skipif(not PACKS, reason="without packed weights the last bits differ")
@pytest.mark.parametrize("batch", [1, 16])
def test_a_tuned_session_answers_as_the_onnx_bit_for_bit(model: Path, batch: int, tmp_path: Path) -> None:
    convert(model, tmp_path / "model.zcr")
    report = tune(tmp_path / "model.zcr")
    made, original = session(tmp_path / "model.zcr"), plain(model)
    assert tuning(made) == tuning(tmp_path / "model.zcr") == zcrecord.onnx.Tuning(True, None, report.targets)
    expected = original.run(None, inputs(original, batch))
    for ours, theirs in zip(made.run(None, inputs(original, batch)), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


if not WRITES_INNER:  # no skip, which --all takes for a failure

    def test_a_graph_that_onnx_runtime_cannot_read_again_is_refused(tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(branches().SerializeToString())
        convert(tmp_path / "model.onnx", tmp_path / "model.zcr")
        before = (tmp_path / "model.zcr").read_bytes()
        with pytest.raises(
            UnsupportedError, match="does not read the graph that it optimised; tune with a later one: "
        ):
            tune(tmp_path / "model.zcr")
        assert (tmp_path / "model.zcr").read_bytes() == before


def test_what_onnx_runtime_says_of_a_graph_that_it_does_not_read_again_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is without /proc, which 1.32 needs to map a file."""
    convert(DIGITS, tmp_path / "model.zcr")
    before, made = (tmp_path / "model.zcr").read_bytes(), ort.InferenceSession

    def refusing(model: Any, *args: Any, **more: Any) -> Any:
        if isinstance(model, str):
            raise RuntimeError("Secure opened-file canonicalization requires procfs at /proc/self/fd/6.")
        return made(model, *args, **more)

    monkeypatch.setattr(ort, "InferenceSession", refusing)
    later = "" if WRITES_INNER else "; tune with a later one"
    what = (
        rf"model\.zcr: onnxruntime \S+ does not read the graph that it optimised{later}: .* requires procfs at /proc/"
    )
    with pytest.raises(UnsupportedError, match=what):
        tune(tmp_path / "model.zcr")
    assert (tmp_path / "model.zcr").read_bytes() == before


def test_tuning_adds_no_tensor_and_changes_none(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "before.zcr")
    tune(tmp_path / "before.zcr", tmp_path / "tuned.zcr")
    before, after = zcrecord.load_record(tmp_path / "before.zcr"), zcrecord.load_record(tmp_path / "tuned.zcr")
    assert before.names == after.names and before.nbytes < after.nbytes
    for name, tensor in before.items():
        np.testing.assert_array_equal(np.asarray(tensor), np.asarray(after[name]))
    to_onnx(before, tmp_path / "before.onnx")
    to_onnx(after, tmp_path / "after.onnx")
    assert (tmp_path / "after.onnx").read_bytes() == (tmp_path / "before.onnx").read_bytes()


def test_removing_gives_back_the_very_bytes(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.zcr"
    convert(model, path)
    before = path.read_bytes()
    report = tune(path)
    assert path.read_bytes() != before and report.content_digest != report.content_digest_before
    done = untune(path)
    assert path.read_bytes() == before
    assert done.targets == () and done.content_digest == report.content_digest_before


@pytest.mark.parametrize("layout", ["front", "pipe"])
def test_removing_gives_back_any_layout(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "model.zcr"
    if layout == "pipe":
        read, write = os.pipe()
        with os.fdopen(write, "wb") as sink:
            convert(DIGITS, sink)
        with os.fdopen(read, "rb") as source:
            path.write_bytes(source.read())
    else:
        convert(DIGITS, tmp_path / "made.zcr")
        zcrecord.save_record(zcrecord.load_record(tmp_path / "made.zcr"), path, metadata={"by": "hand"})
    before = path.read_bytes()
    assert tuning_is_used(path)
    assert zcrecord.load_record(path).metadata == ({"by": "hand"} if layout == "front" else {})
    untune(path)
    assert path.read_bytes() == before


def tuning_is_used(path: Path) -> bool:
    tune(path)
    return tuning(session(path)).used


def test_tuning_again_gives_the_same_bytes(tuned: Path) -> None:
    once = tuned.read_bytes()
    report = tune(tuned)
    assert tuned.read_bytes() == once and len(report.targets) == 1


def test_packed_weights_lie_on_pages_or_where_equal_ones_lie(tuned: Path) -> None:
    record = zcrecord.load_record(tuned)
    part = read_tuned(record.archive)
    assert part is not None
    packed = part.targets[0].model(record.archive, "x", 0, packed=True).packed
    offsets = [record.archive.header.payload_offset + record.archive.index.payloads["offset"][n] for n in packed]
    assert len(offsets) == (3 if PACKS else 0) and all(offset % 4096 == 0 for offset in offsets)


def test_a_tuned_record_saved_again_is_still_tuned_and_no_larger(tuned: Path, tmp_path: Path) -> None:
    zcrecord.save_record(zcrecord.load_record(tuned), tmp_path / "again.zcr")
    assert tuning(session(tmp_path / "again.zcr")).used
    before, after = zcrecord.load_record(tuned), zcrecord.load_record(tmp_path / "again.zcr")
    assert after.layout.deduplicated == before.layout.deduplicated == 0


@pytest.mark.measured
def test_a_graph_tuned_for_other_weights_is_not_used(tuned: Path, tmp_path: Path) -> None:
    tree = zcrecord.load_record(tuned).tree()
    tree["features"]["0"]["weight"] = tree["features"]["0"]["weight"] * np.float32(2)
    zcrecord.save_record(tree, tmp_path / "other.zcr")
    made = session(tmp_path / "other.zcr")
    assert not tuning(made).used
    to_onnx(tmp_path / "other.zcr", tmp_path / "other.onnx")
    feed = {"pixels": np.ones((1, 64), np.float32)}
    np.testing.assert_allclose(made.run(None, feed)[0], plain(tmp_path / "other.onnx").run(None, feed)[0], rtol=1e-5)


@pytest.mark.measured
@pytest.mark.parametrize("change", ["bytes", "edited", "unmapped", "options", "level", "provider"])
def test_the_original_graph_answers_where_tuning_cannot_be_used(tuned: Path, change: str) -> None:
    options, reason = ort.SessionOptions(), "only the unedited archive in a local file, mapped"
    source: Any = tuned
    more: dict[str, Any] = {}
    if change == "bytes":
        source = zcrecord.load_record(tuned.read_bytes())
    elif change == "edited":
        source = zcrecord.load_record(tuned, mode="c")
    elif change == "unmapped":
        source = zcrecord.load_record(tuned, mmap=False)
    elif change == "level":
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        reason = "sess_options ask for another level of graph optimization"
    elif change == "provider":
        more, reason = {"providers": ["AzureExecutionProvider", "CPUExecutionProvider"]}, "CPUExecutionProvider alone"
    else:
        level = options.graph_optimization_level
        made = session(tuned, sess_options=options)
        assert tuning(made).used and options.graph_optimization_level == level
        return
    made = session(source, sess_options=options, **more)
    found = tuning(made)
    assert not found.used and reason in str(found.reason)
    feed = {"pixels": np.ones((1, 64), np.float32)}
    np.testing.assert_allclose(made.run(None, feed)[0], plain(DIGITS).run(None, feed)[0], rtol=1e-4)


def test_the_first_untuned_session_of_a_process_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(DIGITS, tmp_path / "model.zcr")
    monkeypatch.setattr(runtime, "_warned", False)
    with caplog.at_level(logging.INFO, "zcrecord"):
        for _ in range(2):
            assert tuning(session(tmp_path / "model.zcr")).reason == "it is not tuned"
        session(tmp_path / "model.zcr", memory="speed")
    (told,) = caplog.records
    assert "model.zcr: not tuned for this machine (it is not tuned)" in told.message
    assert "`zcrecord tune`" in told.message


def test_an_archive_attached_to_a_program_uses_its_tuned_part(tuned: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"a program\n" * 9)
    attach(program, tuned, tmp_path / "out", force=True)
    assert tuning(session(tmp_path / "out")).used
    with pytest.raises(UnsupportedError, match="attached to a program; detach it, tune it, and attach it again"):
        tune(tmp_path / "out")


def test_a_file_replaced_meanwhile_is_not_mixed_with_the_old_one(tuned: Path) -> None:
    record = zcrecord.load_record(tuned)
    other = tuned.with_name("other.zcr")
    convert(DIGITS, other)
    os.replace(other, tuned)
    made = session(record)
    assert tuning(made).reason == "its file was replaced or removed since it was opened"


@pytest.mark.parametrize("what", ["no model", "no digests", "packed", "damaged", "there"])
def test_what_cannot_be_tuned_is_refused_and_stays(tmp_path: Path, what: str) -> None:
    path, dest = tmp_path / "model.zcr", None
    kind: type[RecordError] = UnsupportedError
    convert(DIGITS, path)
    if what == "no model":
        zcrecord.save_record({"w": np.ones(3)}, path)
        message = "no attribute 'onnx.graph'"
    elif what == "no digests":
        zcrecord.save_record(zcrecord.load_record(path), tmp_path / "bare.zcr", digest="none")
        path, message = tmp_path / "bare.zcr", "has no digests"
    elif what == "damaged":
        data = bytearray(path.read_bytes())
        data[20000] ^= 1
        path.write_bytes(data)
        kind, message = IntegrityError, "its digest does not match"
    elif what == "there":
        dest, kind, message = tmp_path / "there", DestinationExistsError, "exists"
        dest.write_bytes(b"here")
    else:
        pack(path, tmp_path / "model.zcr.zst")
        path, message = tmp_path / "model.zcr.zst", "is packed"
    before = path.read_bytes()
    with pytest.raises(kind, match=message):
        tune(path, dest)
    assert path.read_bytes() == before
    assert dest is None or dest.read_bytes() == b"here"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_removing_from_an_archive_that_is_not_tuned_is_refused(tmp_path: Path) -> None:
    convert(DIGITS, tmp_path / "model.zcr")
    with pytest.raises(UnsupportedError, match="is not tuned; there is nothing to remove"):
        untune(tmp_path / "model.zcr")


def test_signatures_lapse_and_come_back(tmp_path: Path) -> None:
    path, key = tmp_path / "model.zcr", Ed25519PrivateKey.generate()
    convert(DIGITS, path)
    signed = sign(path, key)
    report = tune(path)
    assert report.lapsed == (signed.key,)
    assert report.content_digest_before == signed.content_digest
    with pytest.raises(RecordError, match="not signed"):
        check_signature(zcrecord.load_record(path), key.public_key())
    sign(path, key)
    assert tuning(session(path)).used
    untune(path)
    assert check_signature(zcrecord.load_record(path), key.public_key()) == signed.key


def test_a_session_of_a_file_that_is_replaced_while_it_is_made_fails(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ort.InferenceSession

    def replacing(*args: Any, **more: Any) -> Any:
        copy = tuned.with_name("copy")
        copy.write_bytes(tuned.read_bytes())
        os.replace(copy, tuned)
        return made(*args, **more)

    monkeypatch.setattr(ort, "InferenceSession", replacing)
    with pytest.raises(SourceError, match="replaced while the session was made; make it again"):
        session(tuned)


def test_small_models_without_external_weights_are_tuned(tmp_path: Path) -> None:
    weight = {"w": np.arange(16, dtype=np.float32).reshape(4, 4)}
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    made = graph_model([node], [value("x", 1, 4)], [value("y", 1, 4)], weight)
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    convert(tmp_path / "model.onnx", tmp_path / "model.zcr")
    assert tuning_is_used(tmp_path / "model.zcr")
