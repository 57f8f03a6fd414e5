"""Commands write to URLs as they write to paths: whole, not over what is there, and with errors that help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import command_line as c
import pytest

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
