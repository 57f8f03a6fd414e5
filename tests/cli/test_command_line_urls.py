"""Commands read from URLs, and write to them, as from and to paths; errors name the URL without its secrets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import command_line as c
import numpy as np
import pytest
import torch

import zcrecord
from zcrecord import transport

if TYPE_CHECKING:
    from buckets import S3

pytestmark = pytest.mark.usefixtures("model_folder", "memory")


def put(memory: Any, *names: str) -> None:
    for name in names:
        memory.pipe_file(f"/b/{name}", Path(name).read_bytes())


@pytest.mark.exhaustive(keep=("npz]", "safetensors"))
@pytest.mark.parametrize("name", ["m.zcr", "m.zcr.zst", "m.safetensors", "m.pt", "m.npz"])
def test_convert_reads_every_kind_of_file_behind_a_url(name: str, memory: Any, run: c.Commands) -> None:
    weights: dict[str, Any] = {"w": np.arange(6, dtype=np.float32), "b": np.ones(2)}
    zcrecord.save_record(weights, "m.zcr")
    transport.pack("m.zcr", "m.zcr.zst")
    torch.save({key: torch.from_numpy(array) for key, array in weights.items()}, "m.pt")
    for other in ("m.safetensors", "m.npz"):
        run.quietly(f"convert m.zcr {other}")
    memory.pipe_file(f"/b/{name}", Path(name.partition("?")[0]).read_bytes())
    for source, dest in ((f"memory://b/{name}", "out.zcr"), (f"memory://b/{name}", "out.npz"), ("out.npz", "back.zcr")):
        run.quietly(f"convert {source} {dest}")
    for made in ("out.zcr", "back.zcr"):
        found = zcrecord.load_record(made)
        assert {key: found[key].tolist() for key in weights} == {key: a.tolist() for key, a in weights.items()}


@pytest.mark.slow
def test_pack_unpack_and_onnx2zc_read_urls(memory: Any, run: c.Commands) -> None:
    c.make_archive()
    put(memory, "model.zcr", "model.onnx")
    run("pack memory://b/model.zcr packed.zst")
    put(memory, "packed.zst")
    run("unpack memory://b/packed.zst again.zcr")
    assert Path("again.zcr").read_bytes() == Path("model.zcr").read_bytes()
    run.quietly("pack memory://b/model.zcr memory://b/other.zst")
    assert memory.cat_file("/b/other.zst") == Path("packed.zst").read_bytes()
    run.quietly("onnx2zc memory://b/model.onnx digits.zcr")
    put(memory, "digits.zcr")
    run.quietly("to-onnx memory://b/digits.zcr again.onnx")
    assert Path("again.onnx").read_bytes() == Path("model.onnx").read_bytes()


@pytest.mark.parametrize("command", ["convert", "pack", "consolidate"])
def test_a_url_without_a_file_is_told_without_its_secrets(command: str, run: c.Commands) -> None:
    told = r"memory://b/none\.zcr: (no such file|.*FileNotFound|does not exist)"
    run.fails(f"{command} memory://user:secret@b/none.zcr out.zcr", told)


def test_what_reads_files_alone_says_that_it_was_given_a_url(run: c.Commands) -> None:
    run.fails("embed https://user:secret@h/m.zcr --lang c", r"error: https://h/m\.zcr: is a URL, and this reads files")


# Written to buckets.


@pytest.fixture(scope="module")
def environment(s3_server: S3) -> Iterator[None]:
    """Have the environment name the S3 server."""
    import s3fs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3_server.options["endpoint_url"])
        patch.setenv("AWS_ACCESS_KEY_ID", s3_server.options["key"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.options["secret"])
        yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(s3: S3, environment: None) -> S3:
    """The S3 server, with an empty bucket."""
    return s3


def fetched(bucket: S3, name: str) -> bytes:
    data: bytes = bucket.file_system().cat_file(f"bucket/{name}")
    return data


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize(
    "command",
    [
        "convert model.zcr s3://bucket/x.zcr",
        "pack model.zcr s3://bucket/x.zcr.zst",
        "tune model.zcr s3://bucket/tuned.zcr",
        "onnx2zc model.onnx s3://bucket/tuned.zcr --tune",
        "to-onnx model.zcr s3://bucket/again.onnx",
        "report model.zcr -o s3://bucket/x.html",
    ],
)
def test_a_command_replaces_an_object_only_with_force(bucket: S3, command: str, run: c.Commands) -> None:
    run.quietly("onnx2zc model.onnx")
    name = command.partition("s3://bucket/")[2].split()[0]
    run.quietly(command)
    first = fetched(bucket, name)
    run.fails(f"{command} -q", f"s3://bucket/{name}: exists already; --force replaces it\n$")
    bucket.file_system().pipe_file(f"bucket/{name}", b"old")
    run.quietly(f"{command} --force")
    assert fetched(bucket, name) == first
