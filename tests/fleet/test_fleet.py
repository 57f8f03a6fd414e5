"""A job is done once: current archives are kept, models at fault refused and not tried again, the rest converted."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
import pytest
from guides import ROOT
from onnx import TensorProto, numpy_helper
from records import saved

import zcrecord
from tools.bench.fleet import FLAG, convert_or_die, write_models
from tools.worker import call_alone
from zcrecord import LimitError, SourceError, SourceNotFoundError, UnsupportedError, formats
from zcrecord.errors import FormatError, NameCollisionError, OnnxError
from zcrecord.fleet import Job, Outcome, convert_one, plan, sources
from zcrecord.formats import FORMATS
from zcrecord.storage.urls import file_beside, leads_inside

KEY = "zcrecord.source"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with two models in `models`."""
    monkeypatch.chdir(tmp_path)
    write_models(tmp_path / "models", 2, 1)
    return tmp_path


def converted(**options: Any) -> list[str]:
    """Run a fleet from `models` to `out`; return its states."""
    return [outcome.state for outcome in fleet(**options)]


def fleet(**options: Any) -> list[Outcome]:
    return [convert_one(job) for job in plan("models", "out", durable=False, **options)]


def job_of(source: Path, kind: str = "onnx") -> Job:
    return Job(str(source), str(source.parent / "out" / "m.zcr"), kind, durable=False)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing was to be converted")


def renew(path: Path, data: bytes) -> None:
    """Replace a file, whose time of change differs even where clocks are coarse."""
    old = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(old + 10**9, old + 10**9))


def external(folder: Path, location: str = "sub/w.bin") -> Path:
    """Write a model whose only tensor lies in a file that is not there."""
    t = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[6], data_location=TensorProto.EXTERNAL)
    t.external_data.add(key="location", value=location)
    (folder / "model.onnx").write_bytes(m.model_of(t).SerializeToString())
    (folder / "sub").mkdir()
    return folder / "model.onnx"


# Kept.


def test_archive_is_known_to_be_current_by_its_index_alone(folder: Path) -> None:
    [outcome, _] = fleet()
    with zcrecord.load_record(outcome.job.dest) as record:
        [info] = record.infos()
    with open(outcome.job.dest, "r+b") as file:
        file.seek(info.offset)
        file.write(bytes(info.nbytes))
    assert convert_one(outcome.job).state == "kept"


@pytest.mark.parametrize("options", [{"alignment": 4096}, {"force": True}])
def test_other_options_convert_again(options: dict[str, Any], folder: Path) -> None:
    assert converted() == ["converted"] * 2
    assert converted(**options) == ["converted"] * 2


def test_new_model_in_the_place_of_the_old_is_converted(folder: Path) -> None:
    [path, _] = sorted(Path("models").rglob("*.onnx"))
    [first, _] = fleet()
    before = zcrecord.load_record(first.job.dest).content_digest()
    renew(path, m.model_of(numpy_helper.from_array(np.ones(3), "w")).SerializeToString())
    assert converted() == ["converted", "kept"]
    assert zcrecord.load_record(first.job.dest).content_digest() != before


def test_archive_is_the_one_that_convert_writes_but_for_one_name_of_metadata(folder: Path) -> None:
    [outcome, _] = fleet()
    formats.convert(outcome.job.source, "plain.zcr")
    record, plain = zcrecord.load_record(outcome.job.dest, verify="full"), zcrecord.load_record("plain.zcr")
    assert record.content_digest() == plain.content_digest()
    assert set(record.metadata) == {KEY}
    told = json.loads(record.metadata[KEY])
    assert set(told) == {"archive", "files", "options"}
    assert set(told["files"]) == {os.path.basename(outcome.job.source)}


def test_workers_that_convert_one_model_at_once_leave_one_whole_archive(folder: Path) -> None:
    [job, _] = plan("models", "out", durable=False)
    with ThreadPoolExecutor(8) as pool:
        states = {outcome.state for outcome in pool.map(convert_one, [job] * 16)}
    assert "converted" in states <= {"converted", "kept"}
    assert os.listdir("out/0") == ["00000.zcr"]
    zcrecord.load_record(job.dest, verify="full")


@pytest.mark.parametrize("kind", ["safetensors", "npz", "zcr"])
def test_every_format_keeps_its_own_metadata_beside_the_stamp(kind: str, tmp_path: Path) -> None:
    record = {"w": np.arange(3, dtype=np.float32)}
    zcrecord.save_record(record, tmp_path / "m.zcr", metadata={"author": "me"})
    if kind != "zcr":
        formats.convert(tmp_path / "m.zcr", tmp_path / f"m.{kind}")
    job = job_of(tmp_path / f"m.{kind}", kind)
    assert [convert_one(job).state for _ in range(2)] == ["converted", "kept"]
    metadata = zcrecord.load_record(job.dest).metadata
    assert metadata.pop(KEY)
    assert metadata["author"] == "me"


def test_archives_in_shards_are_kept_too(tmp_path: Path) -> None:
    zcrecord.save_record({"a": np.arange(100), "b": np.arange(50)}, tmp_path / "m.zcr")
    formats.convert(tmp_path / "m.zcr", tmp_path / "m.safetensors")
    job = Job(str(tmp_path / "m.safetensors"), str(tmp_path / "out" / "m.zcr"), "safetensors", max_shard_size=800)
    assert [convert_one(job).state for _ in range(2)] == ["converted", "kept"]
    assert sorted(os.listdir(tmp_path / "out")) == ["m-00001-of-00002.zcr", "m-00002-of-00002.zcr", "m.zcr"]
    os.unlink(tmp_path / "out" / "m-00002-of-00002.zcr")
    assert [convert_one(job).state for _ in range(2)] == ["converted", "kept"]
    assert len(zcrecord.load_record(job.dest, verify="full")) == 2


# -- refused ---------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    renew(path, path.read_bytes()[:-100])


def test_truncated_model_is_refused_and_not_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truncate(Path("models/0/00000.onnx"))
    [refused, other] = fleet()
    assert (refused.state, other.state) == ("refused", "converted")
    assert "models/0/00000.onnx: " in refused.error
    assert "bytes early; the model is truncated or damaged, copy or export it again" in refused.error
    assert not os.path.exists(refused.job.dest)
    monkeypatch.setattr(formats, "convert", never)
    again = fleet()[0]
    assert (again.state, again.error) == ("refused", refused.error)


@pytest.mark.parametrize(("text", "state"), [('{"reason": "ours"}', "converted"), ("ours", "refused")])
def test_file_of_somebody_else_under_the_name_of_a_refusal_stays(text: str, state: str, folder: Path) -> None:
    if state == "refused":
        truncate(Path("models/0/00000.onnx"))
    Path("out/0").mkdir(parents=True)
    note = Path("out/0/00000.zcr.refused")
    note.write_text(text, encoding="utf-8")
    assert converted() == [state, "converted"]
    assert note.read_text(encoding="utf-8") == text


def upgraded() -> None:
    note = Path("out/0/00000.zcr.refused")
    note.write_text(note.read_text(encoding="utf-8").replace(zcrecord.__version__, "0.0.1"), encoding="utf-8")


@pytest.mark.parametrize(("change", "options", "tried", "state"), [
    (lambda: write_models(Path("models"), 1, 1), {}, True, "converted"),
    (upgraded, {}, True, "refused"),
    (None, {}, False, "refused"),
    (None, {"alignment": 128}, True, "refused"),
    (None, {"force": True}, True, "refused"),
])  # fmt: skip
def test_refusal_holds_until_something_changes(
    change: Any, options: dict[str, Any], tried: bool, state: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate(Path("models/0/00000.onnx"))
    fleet()
    sources: list[str] = []
    real = formats.convert

    def convert(source: str, *arguments: Any, **options: Any) -> Any:
        sources.append(source)
        return real(source, *arguments, **options)

    monkeypatch.setattr(formats, "convert", convert)
    monkeypatch.setattr("zcrecord.fleet.sources.Model._referred_files", lambda *_: [])  # which finds the fault first
    if change is not None:
        change()
    [job, _] = plan("models", "out", durable=False, **options)
    assert convert_one(job).state == state
    assert sources == ([job.source] if tried else [])
    assert Path("out/0/00000.zcr.refused").exists() == (state != "converted")


@pytest.mark.parametrize("location", ["sub/w.bin", "sub/" + "w" * 300])
def test_a_name_that_no_file_can_have_is_the_models_fault_and_not_tried_again(tmp_path: Path, location: str) -> None:
    job = job_of(external(tmp_path, location))
    (tmp_path / "sub" / "w.bin").symlink_to("w.bin")  # a loop
    assert convert_one(job).state == "refused"


def test_refused_model_leaves_the_archive_of_the_one_before(folder: Path) -> None:
    [first, _] = fleet()
    before = Path(first.job.dest).read_bytes()
    truncate(Path("models/0/00000.onnx"))
    assert converted() == ["refused", "kept"]
    assert Path(first.job.dest).read_bytes() == before


def test_archive_that_no_fleet_wrote_is_refused_by_name(folder: Path) -> None:
    [job, _] = plan("models", "out", durable=False)
    os.makedirs(os.path.dirname(job.dest))
    told = f"{job.dest}: exists already, and no fleet wrote it; remove it, or force its replacement"
    for before in (saved({"w": np.ones(2)}), b"x"):
        Path(job.dest).write_bytes(before)
        outcome = convert_one(job)
        assert (outcome.state, outcome.error, Path(job.dest).read_bytes()) == ("refused", told, before)
    assert converted(force=True) == ["converted"] * 2
    assert converted() == ["kept"] * 2


@pytest.mark.parametrize("there", [False, True])
def test_archive_that_somebody_else_makes_meanwhile_stays(
    there: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [job, _] = plan("models", "out", durable=False, alignment=128)
    if there:
        fleet()
    real = formats.convert

    def late(*arguments: Any, **options: Any) -> Any:
        Path(job.dest).write_bytes(b"somebody's")
        return real(*arguments, **options)

    monkeypatch.setattr(formats, "convert", late)
    with pytest.raises(SourceError, match="meanwhile, and"):
        convert_one(job)
    assert Path(job.dest).read_bytes() == b"somebody's"
    assert convert_one(job).state == "refused"


# -- raised ----------------------------------------------------------------------------------------------------------


def test_model_that_changes_while_it_is_converted_is_for_the_engine_to_try_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [first, _] = fleet()
    before = Path(first.job.dest).read_bytes()
    path, real = Path("models/0/00000.onnx"), formats.convert
    renew(path, path.read_bytes())

    def convert(*arguments: Any, **options: Any) -> Any:
        renew(path, path.read_bytes())
        return real(*arguments, **options)

    def torn(*_: Any, **__: Any) -> Any:
        renew(path, path.read_bytes())
        raise OnnxError("half of the old model and half of the new")

    for changing in (convert, torn):
        with monkeypatch.context() as patch:
            patch.setattr(formats, "convert", changing)
            with pytest.raises(SourceError, match=r"00000\.onnx: was replaced or changed while it was"):
                fleet()
        assert Path(first.job.dest).read_bytes() == before
    assert os.listdir("out/0") == ["00000.zcr"]
    assert converted() == ["converted", "kept"]


def test_faults_of_the_system_are_raised(folder: Path) -> None:
    [job, _] = plan("models", "out", durable=False)
    Path("out").write_text("a file in the place of the folder", encoding="utf-8")
    with pytest.raises(SourceError, match=r"Not a directory|File exists"):
        convert_one(job)
    os.unlink(job.source)
    with pytest.raises(SourceNotFoundError, match=r"00000\.onnx: no such file"):
        convert_one(job)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="platform: named pipes")
def test_a_pipe_among_the_models_is_none_and_one_in_the_place_of_a_model_is_an_error_at_once(folder: Path) -> None:
    [first, second] = plan("models", "out", durable=False)
    os.mkfifo(folder / "models" / "m.safetensors")
    (folder / "models" / "m.pt").symlink_to("m.safetensors")
    assert plan("models", "out", durable=False) == [first, second]
    pipe = Job(str(folder / "models" / "m.safetensors"), str(folder / "out" / "m.zcr"), "safetensors")
    with pytest.raises(SourceError, match=r"m\.safetensors: not a regular file"):
        convert_one(pipe)


# -- archives of strangers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["[", "7", '{"files":[]}', '{"files":{"00000.onnx":7}}', "[" * 100_000, '{"files":{"../x":"1"}}'],
)
def test_stamp_of_a_stranger_is_no_stamp(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [job, _] = plan("models", "out", durable=False)
    os.makedirs(os.path.dirname(job.dest))
    zcrecord.save_record({"w": np.ones(2)}, job.dest, metadata={KEY: text})
    asked: list[str] = []
    real = sources.Model.version

    def version(self: sources.Model, name: str) -> str | None:
        asked.append(name)
        return real(self, name)

    monkeypatch.setattr(sources.Model, "version", version)
    state = convert_one(job).state
    assert state in ("refused", "converted")
    assert set(asked) == {"00000.onnx"}


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a\\b", "", "a//b", "a\0"])
def test_stamp_has_no_file_outside_of_the_model_s_folder_looked_at(name: str, folder: Path) -> None:
    assert not leads_inside(name)
    assert leads_inside("sub/w.bin")
    with pytest.raises(FormatError, match=r"https://host/a/m\.onnx: the file name .* leads to another folder"):
        file_beside("https://host/a/m.onnx?t=1", name)


@pytest.mark.parametrize(("url", "name", "beside"), [
    ("https://host/a/m.onnx?t=1", "%2e%2e%2fw?#", "https://host/a/%252e%252e%252fw%3F%23?t=1"),
    ("https://host?t=1", "w.bin", "https://host/w.bin?t=1"),
    ("simplecache::https://host/m.onnx", "a::b %", "simplecache::https://host/a%3A%3Ab%20%25"),
    ("zip://a/m.onnx::https://host/b/m.zip", "%2e w", "zip://a/%2e w::https://host/b/m.zip"),
])  # fmt: skip
def test_file_beside_another_is_named_as_its_server_takes_names(url: str, name: str, beside: str) -> None:
    assert file_beside(url, name) == beside


# A plan has one job for each model below a prefix, in one order, and is refused before anything is converted.


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


# Engines.


GUIDE = ROOT / "zcrecord" / "fleet" / "README.md"
COUNT = 20  # of which one is truncated


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every archive below a folder, by its path from there."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.zcr")}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(found.items())}


def recipe(engine: str) -> str:
    """Return the program that the guide has for an engine."""
    found = re.search(
        rf"^\*\*{engine}\.\*\*.*?^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return found[1]


@pytest.mark.skipif(os.name != "posix", reason="platform: SIGKILL")
@pytest.mark.exhaustive(keep=0)
def test_engines_lose_nothing_and_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sorted(write_models(tmp_path / "models", COUNT, 1))
    jobs = plan(tmp_path / "models", tmp_path / "pool", durable=False)
    monkeypatch.setenv(FLAG, str(tmp_path / "killed"))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(convert_or_die, job) for job in jobs]
        assert any(isinstance(future.exception(), BrokenProcessPool) for future in futures)
    done = [job.dest for job in jobs if os.path.exists(job.dest)]
    assert 0 < len(done) < len(whole)
    assert [path for path in (tmp_path / "pool").rglob(".*") if path.name.endswith(".zcr-scratch")]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(convert_one, jobs))
    assert {o.job.dest for o in outcomes if o.state == "kept"} == set(done)
    assert [o.state for o in outcomes].count("refused") == 1
    assert list(digests(tmp_path / "pool")) == whole
    assert not list((tmp_path / "pool").rglob(".*"))

    arguments = {"source": str(tmp_path / "models"), "options": {}, "flag": str(tmp_path / "killed-by-dask")}
    told = call_alone("tools.bench.fleet:with_dask", dest=str(tmp_path / "dask"), **arguments)
    assert (tmp_path / "killed-by-dask").exists()
    kept = ["kept"] * told["states"].count("kept")  # converted, and run again: the outcome died with the worker
    assert sorted(told["states"]) == ["converted"] * (len(whole) - len(kept)) + kept + ["refused"]
    assert digests(tmp_path / "dask") == digests(tmp_path / "pool")

    program = recipe("Dask").replace("s3://bucket/models", f"{tmp_path}/models")
    program = program.replace("s3://bucket/archives", f"{tmp_path}/dask") + "    print(*[o.state for o in outcomes])\n"
    (tmp_path / "recipe.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, tmp_path / "recipe.py"], capture_output=True, text=True, env=environment)
    assert sorted(ran.stdout.split()) == ["kept"] * len(whole) + ["refused"], ran.stderr
