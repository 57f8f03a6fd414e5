"""Small models whose weights lie in an archive are valid after it is tuned or untuned in its place."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_graphs import DIGITS, PIXELS, digits_in, plain

import zcrecord
from tools.models import convolutions
from zcrecord.cli.dispatch import main
from zcrecord.errors import IntegrityError, SourceError, UnsupportedError
from zcrecord.onnx import convert, linked_models, to_onnx, tune, untune, verify_external
from zcrecord.onnx.protobuf.rewriting import read_properties


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return digits_in(tmp_path)


@pytest.fixture
def small(archive: Path) -> Path:
    to_onnx(archive, archive.with_name("small.onnx"), external=True)
    return archive.with_name("small.onnx")


def properties(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        return read_properties(file)


@pytest.mark.measured
def test_tuning_and_untuning_in_place_write_models_beside_the_archive_again(archive: Path, small: Path) -> None:
    before = small.read_bytes()
    assert tune(archive).models == (str(small),)
    assert small.read_bytes() != before
    assert verify_external(small, full=True).content_digest == zcrecord.load_record(archive).content_digest()
    ours, theirs = (plain(path).run(None, PIXELS)[0] for path in (small, DIGITS))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert tune(archive).models == (str(small),)
    assert untune(archive).models == (str(small),)
    assert small.read_bytes() == before
    verify_external(small, full=True)


def test_an_archive_tuned_to_another_path_leaves_models_as_they_are_until_it_comes_here(
    archive: Path, small: Path
) -> None:
    before = small.read_bytes()
    assert tune(archive, archive.with_name("tuned.zcr")).models == ()
    assert small.read_bytes() == before
    verify_external(small)
    os.replace(archive.with_name("tuned.zcr"), archive)
    with pytest.raises(IntegrityError, match="content digest sha256:"):
        verify_external(small)
    assert tune(archive).models == (str(small),)
    verify_external(small)


def test_models_of_other_archives_and_other_files_are_left_alone(archive: Path, small: Path, tmp_path: Path) -> None:
    convert(DIGITS, tmp_path / "other.zcr", alignment=128)
    to_onnx(tmp_path / "other.zcr", tmp_path / "other.onnx", external=True)
    shutil.copy(DIGITS, tmp_path / "whole.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"zcrecord.archive")
    (tmp_path / "folder.onnx").mkdir()
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "gone.onnx").symlink_to("nowhere.onnx")
    kept = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file() and p not in (small, archive)}
    assert tune(archive).models == (str(small),)
    assert {p: p.read_bytes() for p in kept} == kept


def test_a_model_of_an_earlier_state_of_the_archive_is_left_alone(archive: Path, small: Path) -> None:
    tree = zcrecord.load_record(archive).tree()
    tree["scale"] = tree["scale"] * np.float32(2)
    zcrecord.save_record(tree, archive)
    before = small.read_bytes()
    assert tune(archive).models == ()
    assert small.read_bytes() == before


@pytest.mark.parametrize("remove", [False, True])
def test_where_weights_would_move_the_archive_stays_and_the_message_names_the_model(
    archive: Path, remove: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    zcrecord.save_record(zcrecord.load_record(archive), archive)  # its index comes first, that of a tuned one last
    if remove:
        tune(archive)
    small = archive.with_name("small.onnx")
    to_onnx(archive, small, external=True)
    before, model = archive.read_bytes(), small.read_bytes()
    what = r"model\.zcr: '.*small\.onnx' takes weights from this archive, at places that would change; write the result"
    with pytest.raises(UnsupportedError, match=what):
        (untune if remove else tune)(archive)
    assert main(["tune", str(archive), *(["--remove"] if remove else [])]) == 1
    assert "export it again with" in capsys.readouterr().err
    assert (archive.read_bytes(), small.read_bytes()) == (before, model)
    verify_external(small)
    small.unlink()
    assert (untune if remove else tune)(archive).models == ()


@pytest.mark.slow
def test_a_tuned_model_for_this_cpu_alone_stays_one(tmp_path: Path) -> None:
    with (tmp_path / "model.onnx").open("wb") as file:
        convolutions.write_convolutions(file, 2)
    convert(tmp_path / "model.onnx", archive := tmp_path / "model.zcr")
    report = tune(archive)
    for name, tuned in (("forced", True), ("plain", None)):
        to_onnx(archive, tmp_path / f"{name}.onnx", external=True, tuned=tuned)
    before = {name: properties(tmp_path / f"{name}.onnx").get("zcrecord.tuned_for") for name in ("forced", "plain")}
    assert before["forced"] == report.targets[0]
    assert len(tune(archive).models) == 2
    for name, target in before.items():
        assert properties(tmp_path / f"{name}.onnx").get("zcrecord.tuned_for") == target
        verify_external(tmp_path / f"{name}.onnx")
    untune(archive)
    assert "zcrecord.tuned_for" not in properties(tmp_path / "forced.onnx")
    onnx.load(tmp_path / "forced.onnx")


def test_the_command_says_which_models_it_wrote_again(
    archive: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(archive)]) == 0
    assert f"\nwritten again: {small}, whose weights lie in the archive\n" in capsys.readouterr().out
    assert main(["tune", str(archive), "--remove", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == [str(small)]


def test_only_the_end_of_a_large_model_is_read_and_a_failure_names_the_model(
    archive: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked_models, "_TAIL", 1000)
    assert tune(archive).models == (str(small),)

    def full(*_: object, **__: object) -> None:
        raise SourceError("cannot write: No space left on device", path=str(small))

    monkeypatch.setattr(linked_models, "to_onnx", full)
    message = (
        r"small\.onnx: .*No space left on device; the archive is replaced; export this model again with external=True"
    )
    with pytest.raises(SourceError, match=message):
        tune(archive)
