"""A plan has one job for each model below a prefix, in one order, and is refused before anything is converted."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from zcrecord import LimitError, SourceError, SourceNotFoundError, UnsupportedError
from zcrecord.errors import NameCollisionError
from zcrecord.fleet import Job, plan
from zcrecord.formats import FORMATS


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * len(name))


def planned(folder: Path, **options: Any) -> dict[str, str]:
    """Return the archives of a plan by their models, both from the prefixes on."""
    jobs = plan(folder, folder.parent / "out", **options)
    return {os.path.relpath(job.source, folder): os.path.relpath(job.dest, folder.parent / "out") for job in jobs}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def test_every_format_that_is_read_is_found_by_its_suffixes(models: Path) -> None:
    suffixes = [suffix for row in FORMATS.values() if row.reads and row.name != "zcr" for suffix in row.suffixes]
    make(models, *(f"{number}/m{suffix}" for number, suffix in enumerate(suffixes)), "notes.txt", "config.json")
    assert planned(models) == {f"{number}/m{suffix}": f"{number}/m.zcr" for number, suffix in enumerate(suffixes)}


def test_models_keep_their_paths_and_come_in_the_order_of_these(models: Path) -> None:
    make(models, "z.onnx", "a/b/c.v2.ONNX", "a/z.safetensors.zst", "a.gguf")
    paths = {"a.gguf": "a.zcr", "a/b/c.v2.ONNX": "a/b/c.v2.zcr", "a/z.safetensors.zst": "a/z.zcr", "z.onnx": "z.zcr"}
    assert list(planned(models).items()) == list(paths.items())
    assert [job.nbytes for job in plan(models, "out")] == [6, 13, 19, 6]


def test_files_that_belong_to_another_are_no_models(models: Path) -> None:
    make(models, "hub/model.safetensors.index.json", *(f"hub/model-0000{i}-of-00002.safetensors" for i in (1, 2)))
    make(models, "net/model.onnx", "net/weights.bin", "net/model.onnx.data", "net/other.pt")
    make(models, "old/pytorch_model.bin", "lone/model-00001-of-00002.safetensors")
    assert planned(models) == {
        "hub/model.safetensors.index.json": "hub/model.zcr",
        "lone/model-00001-of-00002.safetensors": "lone/model-00001-of-00002.zcr",
        "net/model.onnx": "net/model.zcr",
        "net/other.pt": "net/other.zcr",
        "old/pytorch_model.bin": "old/pytorch_model.zcr",
    }


def test_hidden_files_and_folders_are_left_out(models: Path) -> None:
    make(models, ".cache/a.onnx", "b/.git/c.onnx", ".d.onnx", "e.onnx")
    assert planned(models) == {"e.onnx": "e.zcr"}


def test_archives_are_models_only_on_request(models: Path) -> None:
    make(models, "a.zcr", "b.onnx")
    assert planned(models) == {"b.onnx": "b.zcr"}
    assert planned(models, source_format="zcr") == {"a.zcr": "a.zcr"}
    with pytest.raises(UnsupportedError, match="archives are converted to another folder, not over themselves"):
        plan(models, models, source_format="zcr")


def test_of_a_catalogue_and_its_shards_the_catalogue_is_the_model(models: Path) -> None:
    make(models, "a/m.zcr", "a/m-00001-of-00002.zcr", "a/m~7-00002-of-00002.zcr", "b/m-00001-of-00002.zcr")
    alone = "b/m-00001-of-00002.zcr"
    assert planned(models, source_format="zcr") == {"a/m.zcr": "a/m.zcr", alone: alone}


def test_two_models_that_would_become_one_archive_are_named(models: Path) -> None:
    make(models, "m/model.onnx", "m/model.safetensors")
    told = r"models: m/model.onnx and m/model.safetensors would both become m/model.zcr; rename one, or choose"
    with pytest.raises(NameCollisionError, match=told):
        plan(models, "out")
    assert planned(models, source_format="safetensors") == {"m/model.safetensors": "m/model.zcr"}


def test_an_archive_that_would_be_a_folder_of_others_is_named(models: Path) -> None:
    make(models, "a.onnx", "a.zcr/b/c.onnx", "a.zcr.d/e.onnx")
    told = r"models: a\.onnx would become a\.zcr, a folder of models, too; rename one"
    with pytest.raises(NameCollisionError, match=told):
        plan(models, "out")


@pytest.mark.parametrize(("options", "error", "told"), [
    ({"alignment": 17}, LimitError, "alignment"),
    ({"source_format": "onxn"}, UnsupportedError, "format onxn is not known; zcr, safetensors"),
    ({"max_shard_size": 0}, UnsupportedError, "a shard size is in bytes, from 1 on"),
    ({"max_shard_size": 100}, UnsupportedError, "a shard size is not for ONNX; convert the archives that are made"),
    ({"max_shard_size": 9, "dest_prefix": "memory://out"}, UnsupportedError, "memory://out: a shard size is for paths"),
    ({"dest_prefix": "https://host/out"}, UnsupportedError, "https://host/out: HTTP servers are for reading"),
])  # fmt: skip
def test_wrong_options_are_refused_at_once(options: Any, error: type[Exception], told: str, models: Path) -> None:
    make(models, "a.onnx")
    with pytest.raises(error, match=told):
        plan(models, **{"dest_prefix": "out", **options})


def test_prefix_without_models_is_an_error(models: Path) -> None:
    make(models, "notes.txt")
    with pytest.raises(SourceError, match="models: has no model below it; models are recognised by their suffixes"):
        plan(models, "out")
    with pytest.raises(SourceError, match="models: has no model of gguf below it"):
        plan(models, "out", source_format="gguf")
    with pytest.raises(SourceNotFoundError, match="elsewhere: cannot be listed: No such file or directory"):
        plan(models / "elsewhere", "out")


def test_jobs_mean_the_same_in_every_process(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(models, "a.onnx")
    monkeypatch.chdir(models.parent)
    [job] = plan("models", "out", alignment=128, durable=False)
    assert (job.source, job.dest) == (str(models / "a.onnx"), str(models.parent / "out" / "a.zcr"))
    assert pickle.loads(pickle.dumps(job, 5)) == job
    assert (job.alignment, job.durable, job.source_format) == (128, False, "onnx")


def test_a_job_shows_no_credentials() -> None:
    job = Job("s3://b/m.onnx", "s3://b/m.zcr", "onnx", storage_options={"secret": "hush"})
    assert "hush" not in repr(job)
