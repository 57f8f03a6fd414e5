"""Checkpoints in a bucket, or behind any URL that fsspec writes to: the catalogue commits them there, too."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import zcrecord
from zcrecord.distributed import ZcrStorageReader, ZcrStorageWriter, folder
from zcrecord.distributed.folder import CheckpointPrefix
from zcrecord.errors import SourceError

if TYPE_CHECKING:
    from buckets import S3

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

FOLDER = "s3://bucket/run/7"
CATALOGUE = f"{FOLDER}/checkpoint.zcr"


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3, 4), value), "b": torch.full((5,), value, dtype=torch.bfloat16), "step": int(value)}


def save(s3: S3, value: float, folder: str = FOLDER) -> None:
    dcp.save(state(value), storage_writer=ZcrStorageWriter(folder, storage_options=s3.options), no_dist=True)


def loaded(options: Any, folder: str = FOLDER) -> float:
    """Return the value of the checkpoint that is there, whole."""
    found = state(-1)
    dcp.load(found, storage_reader=ZcrStorageReader(folder, storage_options=options), no_dist=True)
    [value] = {*found["w"].flatten().tolist(), *found["b"].tolist(), found["step"]}
    return float(value)


def names(s3: S3) -> list[str]:
    """Return the objects of the checkpoint, without random tags."""
    found = s3.file_system().find("bucket/run/7")
    return sorted(re.sub("~[0-9a-f]{16}", "~", os.path.basename(name)) for name in found)


WHOLE = ["checkpoint.zcr", "checkpoint~-00001-of-00001.zcr"]


@pytest.mark.slow
def test_a_checkpoint_is_saved_to_a_bucket_and_replaced_the_catalogue_last(s3: S3) -> None:
    save(s3, 1)
    assert (loaded(s3.options), names(s3)) == (1, WHOLE)
    s3.requests.clear()
    save(s3, 2)
    sent = [re.sub("~[0-9a-f]{16}", "~", r) for r in s3.requests if not r.startswith(("GET", "HEAD"))]
    assert list(dict.fromkeys(sent)) == [  # where conditions are refused the catalogue is sent twice
        "PUT /bucket/run/7/checkpoint~-00001-of-00001.zcr",
        "PUT /bucket/run/7/checkpoint.zcr",
        "DELETE /bucket/run/7/checkpoint~-00001-of-00001.zcr",
    ]
    assert (loaded(s3.options, CATALOGUE), names(s3)) == (2, WHOLE)
    assert zcrecord.load_record(CATALOGUE, storage_options=s3.options, verify="full")["w"].sum() == 24


@pytest.mark.slow
def test_a_load_fetches_payloads_that_lie_together_at_once(s3: S3) -> None:
    many = {f"w{i}": torch.full((5000,), float(i)) for i in range(40)}
    dcp.save(many, storage_writer=ZcrStorageWriter(FOLDER, storage_options=s3.options), no_dist=True)
    found = {name: torch.zeros(5000) for name in many}
    s3.requests.clear()
    dcp.load(found, storage_reader=ZcrStorageReader(FOLDER, storage_options=s3.options), no_dist=True)
    assert all(map(torch.equal, found.values(), many.values()))
    assert len([request for request in s3.requests if request.startswith("GET")]) < 8


@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("broken", ["PUT .*~", "PUT .*/checkpoint.zcr", "HEAD .*/checkpoint.zcr"])
def test_a_save_that_fails_leaves_the_old_checkpoint_and_none_of_its_own_files(s3: S3, broken: str) -> None:
    save(s3, 1)
    s3.answers = lambda request: "403 AccessDenied" if re.search(broken, request) else None
    with pytest.raises(CheckpointException, match=r"run/7.*cannot (write|read)"):
        save(s3, 2)
    s3.answers = lambda _: None
    assert (loaded(s3.options), names(s3)) == (1, WHOLE)


@pytest.mark.exhaustive(keep=0)
def test_old_files_that_cannot_be_removed_stay_and_no_later_save_takes_them_for_its_own(s3: S3) -> None:
    save(s3, 1)
    s3.answers = lambda request: "403 AccessDenied" if request.startswith("DELETE") else None
    save(s3, 2)
    s3.answers = lambda _: None
    assert (loaded(s3.options), len(names(s3))) == (2, 3)
    save(s3, 3)
    assert (loaded(s3.options), len(names(s3))) == (3, 3)


@pytest.mark.exhaustive(keep=0)
def test_files_that_another_catalogue_there_names_stay(s3: S3) -> None:
    save(s3, 1)
    s3.file_system().copy("bucket/run/7/checkpoint.zcr", "bucket/run/7/best.zcr")
    save(s3, 2)
    found = zcrecord.load_record(f"{FOLDER}/best.zcr", storage_options=s3.options, verify="full")
    assert (found["w"].sum(), loaded(s3.options), len(names(s3))) == (12, 2, 4)


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("begun", [0, 1], ids=["the first checkpoint", "the next one"])
def test_of_two_saves_at_a_time_the_second_is_refused(s3: S3, begun: int) -> None:
    """The other save is a whole one, made when the catalogue of the first is about to be sent."""
    for value in range(begun):
        save(s3, value)
    interfered: list[str] = []

    def interfere(request: str) -> str | None:
        if not interfered and re.match(r"PUT .*~", request):
            interfered.append(request)
            save(s3, 8)
        return None

    s3.answers = interfere
    with pytest.raises(CheckpointException, match=r"checkpoint\.zcr: was written by another in the meantime, and stay"):
        save(s3, 9)
    s3.answers = lambda _: None
    assert (loaded(s3.options), names(s3)) == (8, WHOLE)


@pytest.mark.exhaustive(keep=0)
def test_a_folder_without_a_checkpoint_is_told(s3: S3) -> None:
    with pytest.raises(CheckpointException, match=r"s3://bucket/none/checkpoint\.zcr: no such file on the server"):
        loaded(s3.options, "s3://bucket/none")
    with pytest.raises(CheckpointException, match="s3://nobucket/run"):
        save(s3, 1, "s3://nobucket/run")


@pytest.mark.exhaustive(keep=0)
def test_two_ranks_save_to_a_bucket_and_load_in_other_layouts(s3: S3, tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text(json.dumps(s3.options | {"config_kwargs": {}}), encoding="utf-8")
    script, scenario = Path(__file__).with_name("ranks_scenarios.py"), "saved_and_loaded_in_a_bucket"
    for facts in ranks.run_ranks(script, 2, tmp_path, scenario)[scenario]:
        assert "RANK 1" in facts["told"]
        assert facts["loaded"] == [facts["saved"]] * 4
        assert facts["after"] == facts["last"] != facts["saved"]
    assert names(s3) == ["checkpoint.zcr", "checkpoint~-00001-of-00002.zcr", "checkpoint~-00002-of-00002.zcr"]
    record = zcrecord.load_record(CATALOGUE, storage_options=s3.options, verify="full")
    assert record["model.w"].shape == (8, 6)


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder in memory, which is empty afterwards, too."""
    import fsspec

    yield "memory://runs/7"
    fsspec.filesystem("memory").rm("/runs", recursive=True)


def test_a_checkpoint_is_saved_by_its_id_to_any_url(memory: str) -> None:
    for value in (1, 2):
        dcp.save(state(value), checkpoint_id=memory, storage_writer=ZcrStorageWriter(), no_dist=True)
        assert loaded(None, memory) == value
    with pytest.raises(SourceError, match="was written by another"):
        CheckpointPrefix(memory, None).commit({}, 1, {}, '"of another"')
    assert loaded(None, memory) == 2


def test_archives_of_ranks_that_a_catalogue_may_name_behind_a_long_index_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    fs, shard = fsspec.filesystem("memory"), "checkpoint~0123456789abcdef-00001-of-00001.zcr"
    fs.pipe({f"/run/{shard}": b"", "/run/checkpoint.zcr": bytes(999) + shard.encode()})
    prefix = CheckpointPrefix("memory://run", None)
    monkeypatch.setattr(folder, "MOST_OF_CATALOGUE", 500)
    prefix.take_back({shard: shard})
    assert fs.exists(f"/run/{shard}")
    fs.pipe("/run/checkpoint.zcr", b"another.zcr")
    prefix.take_back({shard: shard})
    assert not fs.exists(f"/run/{shard}")
