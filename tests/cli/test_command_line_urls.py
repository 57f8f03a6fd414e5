"""Commands write to URLs as they write to paths: whole, not over what is there, and with errors that help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import command_line as c
import numpy as np
import pytest

import zcrecord
from zcrecord.cli.dispatch import main, onnx2zc_main

if TYPE_CHECKING:
    from buckets import S3

pytestmark = pytest.mark.usefixtures("model_folder")


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


@pytest.fixture(autouse=True)
def bucket(s3: S3, environment: None) -> S3:
    """The S3 server, with an empty bucket."""
    return s3


def fetched(bucket: S3, name: str) -> bytes:
    data: bytes = bucket.file_system().cat_file(f"bucket/{name}")
    return data


@pytest.mark.exhaustive(keep=0)
def test_onnx2zc_writes_a_model_to_a_bucket(bucket: S3, capsys: pytest.CaptureFixture[str]) -> None:
    assert onnx2zc_main(["model.onnx", "s3://bucket/model.zcr", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dest"] == "s3://bucket/model.zcr"
    assert report["archive_bytes"] == len(fetched(bucket, "model.zcr"))
    Path("back.zcr").write_bytes(fetched(bucket, "model.zcr"))
    assert main(["to-onnx", "back.zcr", "s3://bucket/again.onnx", "--quiet"]) == 0
    assert fetched(bucket, "again.onnx") == Path("model.onnx").read_bytes()


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("convert model.zcr s3://bucket/x.zcr", "x.zcr"),
        ("convert model.zcr s3://bucket/x.safetensors", "x.safetensors"),
        ("convert model.zcr s3://bucket/x.npz", "x.npz"),
        ("pack model.zcr s3://bucket/x.zcr.zst", "x.zcr.zst"),
        ("tune model.zcr s3://bucket/tuned.zcr", "tuned.zcr"),
        ("onnx2zc model.onnx s3://bucket/tuned.zcr --tune", "tuned.zcr"),
        ("report model.zcr -o s3://bucket/x.html", "x.html"),
    ],
)
def test_a_command_replaces_an_object_only_with_force(
    bucket: S3, command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert onnx2zc_main(["model.onnx", "--quiet"]) == 0
    run, arguments = main, [*command.split(), "--quiet"]
    if arguments[0] == "onnx2zc":
        run, arguments = onnx2zc_main, arguments[1:]
    assert run(arguments) == 0
    first = fetched(bucket, name)
    capsys.readouterr()
    assert run(arguments) == 1
    assert capsys.readouterr().err.endswith(f"s3://bucket/{name}: exists already; --force replaces it\n")
    bucket.file_system().pipe_file(f"bucket/{name}", b"old")
    assert run([*arguments, "--force"]) == 0
    assert fetched(bucket, name) == first


@pytest.mark.exhaustive(keep=0)
def test_a_folder_becomes_one_object_by_name(bucket: S3) -> None:
    Path("folder").mkdir()
    Path("model.onnx").rename("folder/model.onnx")
    assert main(["convert", "folder", "s3://bucket/m.zcr", "--quiet"]) == 0
    assert onnx2zc_main(["folder", "s3://bucket/n.zcr", "--quiet"]) == 0
    assert fetched(bucket, "m.zcr") == fetched(bucket, "n.zcr")


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("onnx2zc model.onnx s3://nobucket/m.zcr", "s3://nobucket/m.zcr: cannot write: no such bucket or folder "),
        ("onnx2zc model.onnx s3://bucket/models/", "s3://bucket/models/: names a folder; name a file in it"),
        ("onnx2zc model.onnx https://host/m.zcr", "https://host/m.zcr: HTTP servers are for reading; write to the "),
        ("onnx2zc model.onnx s3://bucket/m.zcr --verify", "--verify reads the source again and the archive back: "),
    ],
)
def test_what_cannot_be_written_is_told(
    command: str, message: str, bucket: S3, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *arguments = command.split()
    if program == "onnx2zc":
        assert onnx2zc_main(arguments) == 1
        assert message in capsys.readouterr().err
    assert not bucket.file_system().find("bucket")


@pytest.mark.slow
def test_a_failure_of_the_store_leaves_the_object(bucket: S3, capsys: pytest.CaptureFixture[str]) -> None:
    zcrecord.save_record({"w": np.arange(3)}, "m.zcr")
    assert main(["convert", "m.zcr", "s3://bucket/m.zcr", "--quiet"]) == 0
    old = fetched(bucket, "m.zcr")
    bucket.answers = lambda request: "403 AccessDenied" if request.startswith("PUT") else None
    c.make_archive()
    assert main(["convert", "model.zcr", "s3://bucket/m.zcr", "--force"]) == 1
    told = capsys.readouterr().err
    assert "s3://bucket/m.zcr: cannot write, the store or fsspec refused it: " in told
    assert "do the URL and its credentials fit?" in told
    bucket.answers = lambda _: None
    assert fetched(bucket, "m.zcr") == old
