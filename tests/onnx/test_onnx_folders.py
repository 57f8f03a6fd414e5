"""Folders of several models, as Optimum exports them, become one archive, are served from it, and come back."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_graphs import assert_same, plain
from optimum_folders import copy_folder, generate

import zcrecord
from zcrecord import errors, formats
from zcrecord.cli.dispatch import main, onnx2zc_main
from zcrecord.onnx import convert, fill_session, session, to_onnx, tune, tuned, tuning, untune, verify_external
from zcrecord.storage import folders

MODELS = ["decoder_model", "decoder_with_past_model", "encoder_model"]
BESIDE = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_folder("seq2seq", tmp_path_factory.mktemp("optimum") / "t5")


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(exported, tmp_path / "t5"))


@pytest.fixture(scope="module")
def served(exported: Path) -> Path:
    """The folder that the export becomes; not to be changed."""
    convert(exported, exported.parent / "served")
    return exported.parent / "served"


@pytest.fixture(scope="module")
def tuned_folder(served: Path) -> Path:
    found = Path(shutil.copytree(served, served.parent / "tuned"))
    tune(found)
    return found


def original(folder: Path, name: str) -> Any:
    return plain(folder / f"{name}.onnx")


def ranges(record: zcrecord.Record, module: str) -> set[tuple[int, int]]:
    """The offsets and sizes of a module's weights of more than a KiB."""
    return {(info.offset, info.nbytes) for info in record.module(module).infos() if info.nbytes > 1024}


# Conversion.


@pytest.mark.slow
def test_each_model_becomes_a_module_with_its_graph_beside_copies_of_the_small_files(
    exported: Path, served: Path
) -> None:
    assert sorted(os.listdir(served)) == sorted([*BESIDE, "model.zcr"])
    for name in BESIDE:
        assert (served / name).read_bytes() == (exported / name).read_bytes()
    record = zcrecord.load_record(served / "model.zcr")
    assert [name for name in record.modules if name and "." not in name] == MODELS
    assert list(record.attributes) == [f"{name}.onnx.graph" for name in MODELS]
    record.verify()


@pytest.mark.slow
def test_weights_of_both_decoders_are_stored_once(exported: Path, served: Path) -> None:
    sizes = {name: (exported / f"{name}.onnx_data").stat().st_size for name in MODELS}
    record = zcrecord.load_record(served / "model.zcr")
    first, later = (ranges(record, name) for name in MODELS[:2])
    assert later <= first  # the later one lacks the keys and values of the cross attention
    assert sum(nbytes for _, nbytes in later) > 0.9 * sizes["decoder_with_past_model"]
    assert record.nbytes < 1.1 * (sizes["decoder_model"] + sizes["encoder_model"]) + 300_000  # their graphs


def test_a_dry_run_writes_nothing_and_progress_counts_the_bytes_of_all_models(folder: Path, tmp_path: Path) -> None:
    dry = convert(folder, tmp_path / "served", dry_run=True)
    assert os.listdir(tmp_path) == ["t5"]
    calls: list[tuple[int, int | None]] = []
    report = convert(folder, tmp_path / "served", progress=lambda *pair: calls.append(pair))
    assert dry.archive_bytes == report.archive_bytes and dry.shared_bytes > 0
    done, totals = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] <= report.input_bytes == sum(path.stat().st_size for path in folder.glob("*.onnx*"))
    assert set(totals) == {sum(path.stat().st_size for path in folder.glob("*.onnx"))}


@pytest.mark.slow
def test_a_folder_of_one_model_has_it_as_the_record_itself(tmp_path: Path) -> None:
    folder = copy_folder("text-generation", tmp_path / "llama")
    assert convert(folder, tmp_path / "served").left_out == 0
    given = {"input_ids": np.array([[3, 4]]), "attention_mask": np.ones((1, 2), np.int64)}
    given |= {"position_ids": np.array([[0, 1]])}
    for name in (f"past_key_values.{i}.{kind}" for i in (0, 1) for kind in ("key", "value")):
        given[name] = np.zeros((1, 2, 0, 32), np.float32)
    tune(tmp_path / "served")
    ours, theirs = session(tmp_path / "served"), original(folder, "model")
    assert tuning(ours).used
    assert [output.name for output in ours.get_outputs()] == [output.name for output in theirs.get_outputs()]
    assert_same(ours.run(None, given), theirs.run(None, given))


# What was there before.


@pytest.mark.parametrize("name", ["model.zcr", "config.json"])
def test_another_file_of_a_name_is_replaced_on_request_alone(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine", encoding="utf-8")
    with pytest.raises(errors.DestinationExistsError, match=f"{name}: exists already; force=True replaces it"):
        convert(folder, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == [name]
    assert (tmp_path / "out" / name).read_text(encoding="utf-8") == "mine"
    convert(folder, tmp_path / "out", force=True)
    assert (tmp_path / "out" / name).read_bytes() != b"mine"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_that_takes_a_file_s_place_meanwhile_is_not_followed(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.json").write_text("secret", encoding="utf-8")
    found = folders.companions

    def late(source: str) -> dict[str, str]:
        names = found(source)
        (folder / "config.json").unlink()
        if kind == "link":
            (folder / "config.json").symlink_to(tmp_path / "secret.json")
        else:
            os.mkfifo(folder / "config.json")
        return names

    monkeypatch.setattr(folders, "companions", late)
    with pytest.raises(errors.SourceError, match=r"config\.json: (cannot write: Too many levels|not a regular file)"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["encoder_model.onnx", "m.onnx", "m.safetensors", "m.zcr", "step/_METADATA"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_no_model_of_a_folder_is_a_pipe_or_a_link_out_of_it(kind: str, name: str, folder: Path, tmp_path: Path) -> None:
    path = folder / name
    if name.startswith("encoder"):
        path.rename(tmp_path / "other")
    else:
        folder = tmp_path / "m"
        folder.mkdir()
        path = folder / name
        (tmp_path / "other").write_bytes(b"{}")
    if kind == "pipe":
        path.parent.mkdir(exist_ok=True)
        os.mkfifo(path)
    elif "/" in name:  # orbax's tree is a folder
        (tmp_path / "other").unlink()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "_METADATA").write_text("{}", encoding="utf-8")
        path.parent.symlink_to(tmp_path / "other")
    else:
        path.symlink_to(tmp_path / "other")
    message = "out of its folder|not a regular file|without a model"
    for convert_folder in (formats.convert, convert):
        with pytest.raises(errors.SourceError, match=message):
            convert_folder(folder, tmp_path / "new.zcr")
    assert not (tmp_path / "new.zcr").exists()


# Bad folders.


def without_data(folder: Path) -> None:
    (folder / "decoder_with_past_model.onnx_data").unlink()


def with_a_name_twice(folder: Path) -> None:
    shutil.copy(folder / "decoder_model.onnx", folder / "decoder_model.ONNX")


def with_names_that_run_into_one_another(folder: Path) -> None:
    for name in ("decoder_model.onnx", "encoder_model.onnx"):
        (folder / name).unlink()
    os.rename(folder / "decoder_with_past_model.onnx", folder / "m.onnx")
    shutil.copy(folder / "m.onnx", folder / "m.inner.onnx")  # m has a module of that name


def with_a_name_that_is_not_utf_8(folder: Path) -> None:
    os.rename(folder / "decoder_model.onnx", os.fsencode(folder) + b"/decoder\xff.onnx")


def without_a_model(folder: Path) -> None:
    for path in folder.glob("*.onnx"):
        path.unlink()


@pytest.mark.parametrize("change, error, message", [
    (without_data, errors.ExternalDataError, r"past_model\.onnx: .*external data 'decoder_with_past_model\.onnx_data"),
    (with_a_name_twice, errors.NameCollisionError, r"decoder_model\.ONNX and decoder_model\.onnx would both be module"),
    pytest.param(with_names_that_run_into_one_another, errors.NameCollisionError, r"m\.inner", marks=pytest.mark.slow),
    (with_a_name_that_is_not_utf_8, errors.UnsupportedError, "its name has lone surrogates, which are not UTF-8"),
    (without_a_model, errors.SourceError, "t5: is a folder without a model"),
])  # fmt: skip
def test_a_bad_folder_is_one_error_and_leaves_nothing(
    change: Callable[[Path], None], error: type[Exception], message: str, folder: Path
) -> None:
    change(folder)
    before = sorted(os.listdir(folder.parent))
    for dest in ("out", "out.zcr"):
        for act in (convert, formats.convert):
            with pytest.raises(error, match=message):
                act(folder, folder.parent / dest)
    assert sorted(os.listdir(folder.parent)) == before


def test_patterns_are_for_one_model(folder: Path) -> None:
    with pytest.raises(errors.UnsupportedError, match="select and exclude are for one model, and the folder has 3"):
        convert(folder, folder.parent / "out", select="*.weight")


# Sessions.


@pytest.mark.slow
def test_sessions_of_one_record_or_of_its_module_share_its_memory(exported: Path, served: Path) -> None:
    record = zcrecord.load_record(served / "model.zcr")
    expected = generate(lambda name: original(exported, name))[0]
    assert generate(lambda name: session(record, module=name))[0] == expected
    parts = {name: session(record.module(name)) for name in MODELS}
    assert generate(parts.__getitem__)[0] == expected
    reason = "a part of an archive is not: give the archive, and module="
    assert {tuning(found).reason for found in parts.values()} == {reason}
    assert generate(lambda name: fill_session(record, module=name))[0] == expected
    in_memory = zcrecord.load_record((served / "model.zcr").read_bytes())
    assert generate(lambda name: session(in_memory, module=name))[0] == expected


def test_a_model_is_named_among_several(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = "its models are in modules: decoder_model, decoder_with_past_model, encoder_model; name one by module="
    for act in (session, tuning, fill_session, lambda source: to_onnx(source, io.BytesIO())):
        with pytest.raises(errors.UnsupportedError, match=what):
            act(served)
    with pytest.raises(errors.TensorNotFoundError, match="decoder"):
        session(served, module="decoder")
    with pytest.raises(errors.UnsupportedError, match=r"no attribute 'onnx\.graph'"):
        session(served, module="decoder_model.inner")
    assert main(["to-onnx", str(served), "-", "--quiet"]) == 1
    assert "name one by --module" in capsys.readouterr().err


# Tuning.


@pytest.mark.slow
def test_tuning_tunes_every_model_and_stores_equal_packed_weights_once(served: Path, tuned_folder: Path) -> None:
    record = zcrecord.load_record(tuned_folder / "model.zcr")
    part = tuned.read_tuned(record.archive)
    assert part is not None
    assert [found.module for found in part.targets] == MODELS
    first, later = (set(found.payloads) for found in part.targets[:2])
    sizes = record.archive.index.payloads["nbytes"]
    assert sizes[list(first & later)].sum() > 0.9 * sizes[list(later)].sum()


@pytest.mark.slow
def test_tuning_a_folder_again_gives_the_same_bytes_and_untuning_those_from_before(
    served: Path, tuned_folder: Path, tmp_path: Path
) -> None:
    work = Path(shutil.copytree(tuned_folder, tmp_path / "work"))
    report = tune(work)
    assert report.modules == tuple(MODELS)
    assert len(report.targets) == 1
    assert (work / "model.zcr").read_bytes() == (tuned_folder / "model.zcr").read_bytes()
    assert untune(work).modules == ()
    assert (work / "model.zcr").read_bytes() == (served / "model.zcr").read_bytes()


@pytest.mark.slow
def test_the_command_line_converts_tunes_and_tells_of_each_model(
    folder: Path, tuned_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert onnx2zc_main([str(folder), str(tmp_path / "out"), "--tune"]) == 0
    assert "models: decoder_model, decoder_with_past_model, encoder_model" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*BESIDE, "model.zcr"])
    expected = (tuned_folder / "model.zcr").read_bytes()
    assert (tmp_path / "out" / "model.zcr").read_bytes() == expected
    assert main(["info", str(tmp_path / "out" / "model.zcr")]) == 0
    told = capsys.readouterr().out
    assert all(f"tuned for: {name}: onnxruntime" in told for name in MODELS)
    assert main(["tune", str(tmp_path / "out"), "--remove", "--quiet"]) == 0
    assert main(["tune", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modules"] == MODELS
    assert (tmp_path / "out" / "model.zcr").read_bytes() == expected
    with pytest.raises(SystemExit):
        onnx2zc_main([str(folder), str(tmp_path / "out"), "--tune", "--dry-run"])


def test_a_failed_tuning_of_a_folder_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "encoder_model.onnx_data").unlink()
    assert onnx2zc_main([str(folder), str(folder.parent / "out"), "--tune"]) == 1
    assert "encoder_model.onnx_data" in capsys.readouterr().err
    assert os.listdir(folder.parent) == ["t5"]


@pytest.mark.slow
def test_targets_that_swap_their_models_are_not_used(tuned_folder: Path) -> None:
    archive = zcrecord.load_record(tuned_folder / "model.zcr").archive
    part = tuned.read_tuned(archive)
    assert part is not None
    for found in part.targets:
        found.check(archive)
        for name in {*MODELS, ""} - {found.module}:
            with pytest.raises(zcrecord.IntegrityError, match="its tuned part is for other weights or another graph"):
                found._replace(module=name).check(archive)


# Back to ONNX.


@pytest.mark.slow
def test_each_model_comes_back_with_its_weights_inside(exported: Path, tuned_folder: Path, tmp_path: Path) -> None:
    for name in MODELS:
        arguments = [str(tuned_folder), str(tmp_path / f"{name}.onnx"), "--module", name, "--quiet"]
        assert main(["to-onnx", *arguments]) == 0
        again = onnx.load(tmp_path / f"{name}.onnx")
        expected = onnx.load(exported / f"{name}.onnx")
        for tensor in expected.graph.initializer:
            tensor.ClearField("data_location")
        assert again == expected


@pytest.mark.slow
def test_small_models_refer_to_one_archive_and_are_written_again_when_it_is_tuned(
    exported: Path, served: Path, tmp_path: Path
) -> None:
    work = Path(shutil.copytree(served, tmp_path / "work"))
    for name in MODELS:
        to_onnx(work, work / f"{name}.onnx", module=name, external=True)
        assert verify_external(work / f"{name}.onnx", full=True).tensors > 10
    expected = generate(lambda name: original(exported, name))[0]
    assert generate(lambda name: original(work, name))[0] == expected
    before = {name: (work / f"{name}.onnx").read_bytes() for name in MODELS}
    assert tune(work).models == tuple(str(work / f"{name}.onnx") for name in MODELS)
    for name in MODELS:
        assert (work / f"{name}.onnx").read_bytes() != before[name]
        verify_external(work / f"{name}.onnx", full=True)
    assert generate(lambda name: original(work, name))[0] == expected
    untune(work)
    assert {name: (work / f"{name}.onnx").read_bytes() for name in MODELS} == before


def test_a_small_model_of_another_module_is_refused(served: Path, tmp_path: Path) -> None:
    work = Path(shutil.copytree(served, tmp_path / "work"))
    to_onnx(work, work / "encoder.onnx", module="encoder_model", external=True)
    data = (work / "encoder.onnx").read_bytes()
    assert data.count(b"encoder_model") == 1
    (work / "encoder.onnx").write_bytes(data.replace(b"encoder_model", b"decoder_model"))
    with pytest.raises(zcrecord.IntegrityError, match="the archive has no tensor of this name"):
        verify_external(work / "encoder.onnx")
