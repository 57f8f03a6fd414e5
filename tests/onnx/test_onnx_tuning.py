"""A tuned archive answers as the .onnx does, bit for bit, from one shared copy; nothing else of it changes."""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphs
import onnx_models as m
import onnxruntime as ort
import pytest
import records as r
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx_graphs import DIGITS, PACKS, PIXELS, READS_INNER, branches, converted_in, digits_in, plain

import zcrecord
from tools.models import convolutions, gpt, quantized
from zcrecord.cli.dispatch import main
from zcrecord.errors import DestinationExistsError, IntegrityError, RecordError, SourceError, UnsupportedError
from zcrecord.integrity import check_signature, sign
from zcrecord.onnx import convert, linked_models, runtime, session, to_onnx, tune, tuning, untune, verify_external
from zcrecord.onnx.protobuf.rewriting import read_properties
from zcrecord.onnx.tuned import read_tuned
from zcrecord.transport.packer import pack

WRITERS = {"gpt": gpt.write_gpt, "convolutions": convolutions.write_convolutions, "int8": quantized.write_quantized}


@pytest.fixture(params=[*WRITERS, *(["if"] if READS_INNER else [])])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The archive of a model that lies beside it as model.onnx."""
    model = io.BytesIO()
    if request.param == "if":
        return converted_in(tmp_path, branches())
    WRITERS[request.param](model, 2)
    return converted_in(tmp_path, model.getvalue())


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    return digits_in(tmp_path, tuned=True)


@pytest.mark.exhaustive(keep=2)
@pytest.mark.skipif(not PACKS, reason="without packed weights the last bits differ")
def test_a_tuned_session_answers_as_the_onnx_bit_for_bit(archive: Path) -> None:
    report = tune(archive)
    made, original = session(archive), plain(archive.with_suffix(".onnx"))
    assert tuning(made) == tuning(archive) == zcrecord.onnx.Tuning(True, None, report.targets)
    for batch in (1, 16):
        given = onnx_graphs.request(original, batch)
        onnx_graphs.assert_same(made.run(None, given), original.run(None, given))


if not READS_INNER:  # no skip, which --all takes for a failure

    def test_a_graph_that_onnx_runtime_cannot_read_again_is_refused(tmp_path: Path) -> None:
        path = converted_in(tmp_path, branches())
        before, what = path.read_bytes(), "does not read the graph that it optimised; tune with a later one: "
        with pytest.raises(UnsupportedError, match=what):
            tune(path)
        assert path.read_bytes() == before


def test_what_onnx_runtime_says_of_a_graph_that_it_does_not_read_again_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without /proc, which 1.32 needs to map a file."""
    path, made = digits_in(tmp_path), ort.InferenceSession
    before = path.read_bytes()

    def refusing(model: Any, *args: Any, **more: Any) -> Any:
        if isinstance(model, str):
            raise RuntimeError("Secure opened-file canonicalization requires procfs at /proc/self/fd/6.")
        return made(model, *args, **more)

    monkeypatch.setattr(ort, "InferenceSession", refusing)
    later = "" if READS_INNER else "; tune with a later one"
    what = rf"model\.zcr: onnxruntime \S+ does not read the graph that it optimised{later}: .* requires procfs at /pr"
    with pytest.raises(UnsupportedError, match=what):
        tune(path)
    assert path.read_bytes() == before


def test_tuning_changes_no_tensor_and_removing_gives_back_the_very_bytes(archive: Path, tmp_path: Path) -> None:
    report = tune(archive, tmp_path / "tuned.zcr")
    before, after = zcrecord.load_record(archive), zcrecord.load_record(tmp_path / "tuned.zcr")
    assert before.names == after.names and before.nbytes < after.nbytes
    for name, tensor in before.items():
        np.testing.assert_array_equal(np.asarray(tensor), np.asarray(after[name]))
    for name, record in (("before.onnx", before), ("after.onnx", after)):
        to_onnx(record, tmp_path / name)
    assert (tmp_path / "after.onnx").read_bytes() == (tmp_path / "before.onnx").read_bytes()
    assert report.content_digest != report.content_digest_before
    done = untune(tmp_path / "tuned.zcr", tmp_path / "again.zcr")
    assert (tmp_path / "again.zcr").read_bytes() == archive.read_bytes()
    assert done.targets == () and done.content_digest == report.content_digest_before


@pytest.mark.parametrize("layout", ["front", "pipe"])
def test_removing_gives_back_any_layout(tmp_path: Path, layout: str) -> None:
    path = digits_in(tmp_path)
    if layout == "pipe":
        path.write_bytes(m.through_pipes(DIGITS.read_bytes())[0])
    else:
        zcrecord.save_record(zcrecord.load_record(path), path, metadata={"by": "hand"})
    before = path.read_bytes()
    tune(path)
    assert tuning(session(path)).used
    assert zcrecord.load_record(path).metadata == ({"by": "hand"} if layout == "front" else {})
    untune(path)
    assert path.read_bytes() == before


def test_packed_weights_lie_on_pages_or_where_equal_ones_lie(tuned: Path) -> None:
    record = zcrecord.load_record(tuned)
    part = read_tuned(record.archive)
    assert part is not None
    packed = part.targets[0].model(record.archive, "x", 0, packed=True).packed
    offsets = [record.archive.header.payload_offset + record.archive.index.payloads["offset"][n] for n in packed]
    assert len(offsets) == (3 if PACKS else 0) and all(offset % 4096 == 0 for offset in offsets)


@pytest.mark.measured
def test_a_graph_tuned_for_other_weights_is_not_used(tuned: Path, tmp_path: Path) -> None:
    tree = zcrecord.load_record(tuned).tree()
    tree["features"]["0"]["weight"] = tree["features"]["0"]["weight"] * np.float32(2)
    zcrecord.save_record(tree, tmp_path / "other.zcr")
    made = session(tmp_path / "other.zcr")
    assert not tuning(made).used
    to_onnx(tmp_path / "other.zcr", tmp_path / "other.onnx")
    expected = plain(tmp_path / "other.onnx").run(None, PIXELS)[0]
    np.testing.assert_allclose(made.run(None, PIXELS)[0], expected, rtol=1e-5)


UNMAPPED = "only the unedited archive in a local file, mapped"
BASIC = ort.SessionOptions()
BASIC.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC


@pytest.mark.measured
@pytest.mark.parametrize("load, options, reason", [
    (lambda path: zcrecord.load_record(path.read_bytes()), {}, UNMAPPED),
    (lambda path: zcrecord.load_record(path, mode="c"), {}, UNMAPPED),
    (lambda path: zcrecord.load_record(path, mmap=False), {}, UNMAPPED),
    (str, {"sess_options": BASIC}, "sess_options ask for another level of graph optimization"),
    (str, {"providers": ["AzureExecutionProvider", "CPUExecutionProvider"]}, "CPUExecutionProvider alone"),
])  # fmt: skip
def test_the_original_graph_answers_where_tuning_cannot_be_used(
    load: Any, options: dict[str, Any], reason: str, tuned: Path
) -> None:
    made = session(load(tuned), **options)
    found = tuning(made)
    assert not found.used and reason in str(found.reason)
    np.testing.assert_allclose(made.run(None, PIXELS)[0], plain(DIGITS).run(None, PIXELS)[0], rtol=1e-4)


def test_options_of_ones_own_are_used_and_stay_as_they_were(tuned: Path) -> None:
    options = ort.SessionOptions()
    level = options.graph_optimization_level
    assert tuning(session(tuned, sess_options=options)).used and options.graph_optimization_level == level


def test_the_first_untuned_session_of_a_process_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = digits_in(tmp_path)
    monkeypatch.setattr(runtime, "_warned", False)
    with caplog.at_level(logging.INFO, "zcrecord"):
        for _ in range(2):
            assert tuning(session(path)).reason == "it is not tuned"
        session(path, memory="speed")
    (record,) = caplog.records
    assert re.search(r"model\.zcr: the original graph answers \(it is not tuned\).*`zcrecord tune`", record.message)
    with pytest.raises(UnsupportedError, match="is not tuned; there is nothing to remove"):
        untune(path)


def test_a_file_replaced_meanwhile_is_not_mixed_with_the_old_one(tuned: Path) -> None:
    record = zcrecord.load_record(tuned)
    tuned.unlink()
    convert(DIGITS, tuned)
    made = session(record)
    assert tuning(made).reason == "its file was replaced or removed since it was opened"


@pytest.mark.parametrize("what", ["no model", "no digests", "packed", "damaged", "there", "old"])
def test_what_cannot_be_tuned_is_refused_and_stays(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, dest = digits_in(tmp_path), None
    kind: type[RecordError] = UnsupportedError
    if what == "no model":
        zcrecord.save_record({"w": np.ones(3)}, path)
        message = "no attribute 'onnx.graph'"
    elif what == "old":
        monkeypatch.setattr(ort, "__version__", "1.23.2")
        message = "onnxruntime 1.23.2 cannot tune a model; 1.24 and later can"
    elif what == "no digests":
        zcrecord.save_record(zcrecord.load_record(path), tmp_path / "bare.zcr", digest="none")
        path, message = tmp_path / "bare.zcr", "has no digests"
    elif what == "damaged":
        r.damage(path, 20000)
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


def test_signatures_lapse_and_come_back(tmp_path: Path) -> None:
    path, key = digits_in(tmp_path), Ed25519PrivateKey.generate()
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


# Small models whose weights lie in an archive are valid after it is tuned or untuned in its place.


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return digits_in(tmp_path)


@pytest.fixture
def small(digits: Path) -> Path:
    to_onnx(digits, digits.with_name("small.onnx"), external=True)
    return digits.with_name("small.onnx")


def properties(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        return read_properties(file)


@pytest.mark.measured
def test_tuning_and_untuning_in_place_write_models_beside_the_archive_again(digits: Path, small: Path) -> None:
    before = small.read_bytes()
    assert tune(digits).models == (str(small),)
    assert small.read_bytes() != before
    assert verify_external(small, full=True).content_digest == zcrecord.load_record(digits).content_digest()
    ours, theirs = (plain(path).run(None, PIXELS)[0] for path in (small, DIGITS))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert tune(digits).models == (str(small),)
    assert untune(digits).models == (str(small),)
    assert small.read_bytes() == before
    verify_external(small, full=True)


def test_an_archive_tuned_to_another_path_leaves_models_as_they_are_until_it_comes_here(
    digits: Path, small: Path
) -> None:
    before = small.read_bytes()
    assert tune(digits, digits.with_name("tuned.zcr")).models == ()
    assert small.read_bytes() == before
    verify_external(small)
    os.replace(digits.with_name("tuned.zcr"), digits)
    with pytest.raises(IntegrityError, match="content digest sha256:"):
        verify_external(small)
    assert tune(digits).models == (str(small),)
    verify_external(small)


def test_models_of_other_archives_and_other_files_are_left_alone(digits: Path, small: Path, tmp_path: Path) -> None:
    convert(DIGITS, tmp_path / "other.zcr", alignment=128)
    to_onnx(tmp_path / "other.zcr", tmp_path / "other.onnx", external=True)
    shutil.copy(DIGITS, tmp_path / "whole.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"zcrecord.archive")
    (tmp_path / "folder.onnx").mkdir()
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "gone.onnx").symlink_to("nowhere.onnx")
    kept = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file() and p not in (small, digits)}
    assert tune(digits).models == (str(small),)
    assert {p: p.read_bytes() for p in kept} == kept


def test_a_model_of_an_earlier_state_of_the_archive_is_left_alone(digits: Path, small: Path) -> None:
    tree = zcrecord.load_record(digits).tree()
    tree["scale"] = tree["scale"] * np.float32(2)
    zcrecord.save_record(tree, digits)
    before = small.read_bytes()
    assert tune(digits).models == ()
    assert small.read_bytes() == before


@pytest.mark.parametrize("remove", [False, True])
def test_where_weights_would_move_the_archive_stays_and_the_message_names_the_model(
    digits: Path, remove: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    zcrecord.save_record(zcrecord.load_record(digits), digits)  # its index comes first, that of a tuned one last
    if remove:
        tune(digits)
    small = digits.with_name("small.onnx")
    to_onnx(digits, small, external=True)
    before, model = digits.read_bytes(), small.read_bytes()
    what = r"model\.zcr: '.*small\.onnx' takes weights from this archive, at places that would change; write the result"
    with pytest.raises(UnsupportedError, match=what):
        (untune if remove else tune)(digits)
    assert main(["tune", str(digits), *(["--remove"] if remove else [])]) == 1
    assert "export it again with" in capsys.readouterr().err
    assert (digits.read_bytes(), small.read_bytes()) == (before, model)
    verify_external(small)
    small.unlink()
    assert (untune if remove else tune)(digits).models == ()


@pytest.mark.slow
def test_a_tuned_model_for_this_cpu_alone_stays_one(tmp_path: Path) -> None:
    with (tmp_path / "model.onnx").open("wb") as file:
        convolutions.write_convolutions(file, 2)
    convert(tmp_path / "model.onnx", digits := tmp_path / "model.zcr")
    report = tune(digits)
    for name, tuned in (("forced", True), ("plain", None)):
        to_onnx(digits, tmp_path / f"{name}.onnx", external=True, tuned=tuned)
    before = {name: properties(tmp_path / f"{name}.onnx").get("zcrecord.tuned_for") for name in ("forced", "plain")}
    assert before["forced"] == report.targets[0]
    assert len(tune(digits).models) == 2
    for name, target in before.items():
        assert properties(tmp_path / f"{name}.onnx").get("zcrecord.tuned_for") == target
        verify_external(tmp_path / f"{name}.onnx")
    untune(digits)
    assert "zcrecord.tuned_for" not in properties(tmp_path / "forced.onnx")
    onnx.load(tmp_path / "forced.onnx")


def test_only_the_end_of_a_large_model_is_read_and_a_failure_names_the_model(
    digits: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked_models, "_TAIL", 1000)
    assert tune(digits).models == (str(small),)

    def full(*_: object, **__: object) -> None:
        raise SourceError("cannot write: No space left on device", path=str(small))

    monkeypatch.setattr(linked_models, "to_onnx", full)
    message = (
        r"small\.onnx: .*No space left on device; the archive is replaced; export this model again with external=True"
    )
    with pytest.raises(SourceError, match=message):
        tune(digits)
