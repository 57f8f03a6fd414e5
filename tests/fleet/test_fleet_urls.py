"""Models behind URLs: streamed where one pass over one file will do, else copied; no version is mixed with another."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import onnx_models as m
import pytest
from onnx import TensorProto, numpy_helper

import zcrecord
from tools.bench.fleet import write_models
from tools.range_server import serving
from zcrecord import NameCollisionError, SourceError, SourceNotFoundError, UnsupportedError, formats
from zcrecord.fleet import Job, convert_one, plan, sources
from zcrecord.remote import files

if TYPE_CHECKING:
    from buckets import S3

ALL = "memory://models"


pytestmark = pytest.mark.usefixtures("memory")


def put(fs: Any, path: str, data: bytes) -> str:
    fs.pipe_file(f"/models/{path}", data)
    return f"{ALL}/{path}"


def external(*locations: str) -> bytes:
    tensors = []
    for location in locations or ["sub/w.bin"]:
        t = TensorProto(name=location, data_type=TensorProto.FLOAT, dims=[6], data_location=TensorProto.EXTERNAL)
        t.external_data.add(key="location", value=location)
        tensors.append(t)
    if not locations:
        tensors[0].name = "w"
    data: bytes = m.model_of(*tensors).SerializeToString()
    return data


def run(tmp_path: Path, **options: Any) -> list[str]:
    return [convert_one(job).state for job in plan(ALL, tmp_path / "out", durable=False, **options)]


@pytest.mark.parametrize("name", ["a//b.onnx", "a\0b.onnx"])
def test_a_key_that_no_folder_has_a_name_for_is_refused(
    name: str, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceError, match="memory://models: has no model below it"):
        plan(ALL, tmp_path)
    # As S3 lists it; not all of fsspec's releases list it in memory.
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: {f"/models/{name}": {"size": 1}})
    with pytest.raises(NameCollisionError, match=r"the name 'a(//|\\x00)b\.onnx' has an empty part, or NUL; rename it"):
        plan(ALL, tmp_path / "out")


@pytest.mark.parametrize("name", ["prod.zcr::x.onnx", "prod.onnx?x.onnx"])
def test_a_name_that_means_another_file_in_a_url_is_refused(memory: Any, tmp_path: Path, name: str) -> None:
    put(memory, name, external())
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / name).write_bytes(external())
    for source, dest in ((ALL, tmp_path / "out"), (tmp_path / "models", "memory://out")):
        with pytest.raises(
            NameCollisionError, match=r"'(::|\?)' in it, which means something else in a URL; rename it"
        ):
            plan(source, dest)
    assert [job.nbytes for job in plan(tmp_path / "models", tmp_path / "out")] == [len(external())]


@pytest.mark.parametrize("suffix", ["onnx", "onnx.zst", "safetensors"])
def test_one_file_that_is_read_forward_is_streamed_in_pieces(
    suffix: str, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).integers(0, 255, 100_000, np.uint8)
    if suffix == "safetensors":
        zcrecord.save_record({"w": values}, tmp_path / "m.zcr")
        formats.convert(tmp_path / "m.zcr", tmp_path / "m.safetensors")
        data = (tmp_path / "m.safetensors").read_bytes()
    else:
        data = m.model_of(numpy_helper.from_array(values, "w")).SerializeToString()
    if suffix == "onnx.zst":
        import zstandard

        data = zstandard.compress(data)
    put(memory, f"m.{suffix}", data)
    monkeypatch.setattr(files, "_PIECE", 7000)
    monkeypatch.setattr(sources.Model, "on_disk", lambda *_: pytest.fail("it was copied"))
    assert run(tmp_path) == ["converted"]
    assert np.array_equal(zcrecord.load_record(tmp_path / "out" / "m.zcr", verify="full")["w"], values)


def test_catalogue_is_copied_with_its_shards_and_is_one_model(memory: Any, tmp_path: Path) -> None:
    tensors = {"a": np.arange(9), "b": np.ones(9)}
    (tmp_path / "m").mkdir()
    zcrecord.save_record(tensors, tmp_path / "m" / "m.zcr", max_shard_size=72)
    for path in (tmp_path / "m").iterdir():
        put(memory, path.name, path.read_bytes())
    assert run(tmp_path, source_format="zcr") == ["converted"]
    assert run(tmp_path, source_format="zcr") == ["kept"]
    found = zcrecord.load_record(tmp_path / "out" / "m.zcr")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in tensors.items()}


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder on a disk, or in memory behind a URL."""
    return f"{ALL}/net" if request.param == "memory" else str(tmp_path / "net")


def write(fs: Any, path: str, data: bytes) -> None:
    """Write a file, whose version differs from the one before even where clocks are coarse."""
    if "://" in path:
        fs.pipe_file(path.removeprefix("memory:/"), data)
        return
    old = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(data)
    os.utime(path, ns=(old + 10**9, old + 10**9))


def test_external_data_come_along_and_are_watched(place: str, memory: Any, tmp_path: Path) -> None:
    write(memory, f"{place}/model.onnx", external())
    [job] = plan(place, tmp_path / "out", durable=False)
    refused = convert_one(job)
    assert refused.state == convert_one(job).state == "refused"
    assert refused.error.startswith(f"{place}/model.onnx: tensor 'w': external data 'sub/w.bin'")
    for values in (np.arange(6, dtype="<f4"), np.ones(6, "<f4")):
        write(memory, f"{place}/sub/w.bin", values.tobytes())
        assert [convert_one(job).state for _ in range(2)] == ["converted", "kept"]
        assert zcrecord.load_record(job.dest)["w"].tolist() == values.tolist()
    assert os.listdir(tmp_path / "out") == ["model.zcr"]


def test_shards_come_along_and_are_watched(place: str, memory: Any, tmp_path: Path) -> None:
    zcrecord.save_record({"a": np.arange(4), "b": np.arange(4)}, tmp_path / "m.zcr")
    (tmp_path / "hub").mkdir()
    formats.convert(tmp_path / "m.zcr", tmp_path / "hub" / "model.safetensors", max_shard_size=40)
    for path in (tmp_path / "hub").iterdir():
        write(memory, f"{place}/{path.name}", path.read_bytes())
    [job] = plan(place, tmp_path / "out", durable=False)
    assert [convert_one(job).state for _ in range(2)] == ["converted", "kept"]
    shard = "model-00002-of-00002.safetensors"
    write(memory, f"{place}/{shard}", (tmp_path / "hub" / shard).read_bytes()[:-8] + bytes(8))
    assert convert_one(job).state == "converted"
    assert zcrecord.load_record(job.dest)["b"].tolist() == [0, 1, 2, 0]
    if place.startswith(ALL):
        memory.rm_file(f"/models/net/{shard}")
        with pytest.raises(SourceNotFoundError, match=rf"^{place}/{shard}: "):
            convert_one(job)


@pytest.mark.parametrize("way", ["streamed", "copied"])
def test_object_that_is_replaced_while_it_is_read_is_not_converted(
    way: str, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = m.model_of(numpy_helper.from_array(np.arange(9), "w")).SerializeToString()
    if way == "copied":
        zcrecord.save_record({"w": np.arange(9)}, tmp_path / "m.zcr")
        formats.convert(tmp_path / "m.zcr", tmp_path / "m.npz")
        data = (tmp_path / "m.npz").read_bytes()
    url = put(memory, f"m.{'onnx' if way == 'streamed' else 'npz'}", data)
    real = files.ForwardReader._fetch

    def fetch(self: Any) -> None:
        real(self)
        memory.pipe_file(url, data)

    monkeypatch.setattr(files.ForwardReader, "_fetch", fetch)
    with pytest.raises(SourceError, match=r"memory://models/m.* was replaced or changed"):
        run(tmp_path)
    assert os.listdir(tmp_path / "out") == []
    monkeypatch.setattr(files.ForwardReader, "_fetch", real)
    assert run(tmp_path) == ["converted"]


NAMES = ["%2e%2e/secret.safetensors", "%2e%2e%2fsecret.safetensors", "%252e%252e%252fsecret.safetensors",
         "a?/../../secret.safetensors", "a#.safetensors"]  # fmt: skip


@pytest.mark.parametrize("kind", ["onnx", "json"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_model_leads_to_no_other_folder_of_the_server(name: str, kind: str, tmp_path: Path) -> None:
    """A server takes a name apart as it likes."""
    folder = tmp_path / "web" / "public"
    folder.mkdir(parents=True)
    secret = folder.parent / "secret.safetensors"
    zcrecord.save_record({"w": np.arange(6, dtype="<f4")}, tmp_path / "s.zcr")
    formats.convert(tmp_path / "s.zcr", secret)
    (folder / "m.onnx").write_bytes(external(name))
    (folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}), encoding="utf-8")
    with serving(folder.parent) as server:
        url = f"{server.url}/public/m.onnx" if kind == "onnx" else f"{server.url}/public/m.safetensors.index.json"
        job = Job(url, str(tmp_path / "m.zcr"), "onnx" if kind == "onnx" else "safetensors", durable=False)
        with contextlib.suppress(SourceNotFoundError):
            assert convert_one(job).state == "refused"
        asked = [unquote(request.path) for request in server.requests]
    assert all(path.startswith("/public/") and "/.." not in path for path in asked), asked
    assert not os.path.exists(job.dest)


@pytest.mark.parametrize("locations", [("d", "d/e/x", "d.e"), ("m.onnx/w",), ("d", "e", "e/x")])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_file_that_is_the_folder_of_another_is_refused_once(
    locations: tuple[str, ...], place: str, memory: Any, tmp_path: Path
) -> None:
    source = put(memory, "m.onnx", external(*locations))
    for location in {*locations} - {"m.onnx/w"}:
        memory.store[f"/models/{location}"] = memory.store["/models/m.onnx"]  # object stores have both
    if place == "disk":
        source = str(tmp_path / "m.onnx")
        Path(source).write_bytes(external(*locations))
        (tmp_path / "d").write_bytes(bytes(24))
    refused = convert_one(Job(source, str(tmp_path / "m.zcr"), "onnx", durable=False))
    assert (refused.state, refused.error.startswith(f"{source}: ")) == ("refused", True)
    assert "a file by one location, and a folder by another" in refused.error
    put(memory, "own.onnx", external("own.onnx"))
    assert convert_one(Job(f"{ALL}/own.onnx", str(tmp_path / "own.zcr"), "onnx", durable=False)).state == "converted"


def test_http_servers_are_not_listed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for url in (server.url, f"simplecache::{server.url}/models", f"zip://::{server.url}/m.zip"):
            with pytest.raises(UnsupportedError, match=r"HTTP servers list no files; name the bucket behind it"):
                plan(url, tmp_path / "out", storage_options={"headers": {"X-Api-Key": "hush"}})
        assert not server.requests


@pytest.mark.parametrize(("etag", "again"), [('"1"', "kept"), ('W/"1"', "converted"), (None, "converted")])
def test_file_of_a_server_that_tells_no_version_is_never_taken_for_current(
    etag: str | None, again: str, tmp_path: Path
) -> None:
    write_models(tmp_path / "models", 1, 1)
    with serving(tmp_path / "models") as server:
        server.etag = etag
        job = Job(f"{server.url}/0/00000.onnx?token=hush", str(tmp_path / "out" / "m.zcr"), "onnx", durable=False)
        assert [convert_one(job).state for _ in range(2)] == ["converted", again]
    assert b"hush" not in Path(job.dest).read_bytes()


# -- from a bucket to a bucket ---------------------------------------------------------------------------------------

BUCKET = ("s3://bucket/models", "s3://bucket/archives")


def fill(s3: S3, tmp_path: Path, count: int = 20) -> list[str]:
    whole = write_models(tmp_path / "models", count, 1)
    s3.file_system().put(f"{tmp_path}/models/", "bucket/models/", recursive=True)
    return whole


@pytest.mark.slow
def test_options_of_both_buckets_may_differ_and_archives_of_others_stay(s3: S3, tmp_path: Path) -> None:
    fill(s3, tmp_path, 1)
    [job] = plan(tmp_path / "models", BUCKET[1], dest_storage_options=s3.options)
    assert job.storage_options == {}
    zcrecord.save_record({"w": np.ones(2)}, job.dest, storage_options=s3.options)
    refused = convert_one(job)
    assert (refused.state, refused.error.partition(",")[0]) == ("refused", f"{job.dest}: exists already")
    [job] = plan(BUCKET[0], tmp_path / "out", storage_options=s3.options, dest_storage_options={}, durable=False)
    assert [convert_one(job).state for _ in range(2)] == ["converted", "kept"]


@pytest.mark.slow
def test_fault_of_the_store_is_raised_and_the_old_archive_stays(s3: S3, tmp_path: Path) -> None:
    fill(s3, tmp_path, 1)
    [job] = plan(*BUCKET, storage_options=s3.options)
    assert convert_one(job).state == "converted"
    fs = s3.file_system()
    before = fs.cat_file(job.dest)
    [other] = plan(*BUCKET, storage_options=s3.options, alignment=128)
    s3.answers = lambda request: "500 InternalError" if request.startswith("PUT /bucket/archives") else None
    with pytest.raises(SourceError, match=r"s3://bucket/archives/0/00000\.zcr: cannot write"):
        convert_one(other)
    s3.answers = lambda _: None
    assert fs.cat_file(job.dest) == before
    assert [convert_one(other).state for _ in range(2)] == ["converted", "kept"]
