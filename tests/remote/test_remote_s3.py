"""Archives in an S3 bucket, of a server that runs here; and any file system of fsspec that fails now and then."""

from __future__ import annotations

import gzip
import pickle
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from records import saved
from remote_archives import WEIGHTS, is_right

import zcrecord
from tools.range_server import serving
from zcrecord import FormatError, SourceError, SourceNotFoundError
from zcrecord.remote.ranges import cut
from zcrecord.storage import uploads

if TYPE_CHECKING:
    from buckets import S3

NEWER = {name: value[::-1].copy() for name, value in WEIGHTS.items()}
URL = "s3://bucket/models/m.zcr"


@pytest.fixture
def options(s3: S3) -> Iterator[dict[str, Any]]:
    """Options to reach a server with an empty bucket; file systems are made anew, since tests change their methods."""
    import s3fs

    yield s3.options
    s3fs.S3FileSystem.clear_instance_cache()


def put(options: dict[str, Any], record: Any, **way: Any) -> None:
    import s3fs

    s3fs.S3FileSystem(**options).pipe("bucket/models/m.zcr", saved(record, **way))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    import s3fs

    asked: list[tuple[int, int]] = []
    before = s3fs.S3FileSystem._cat_file

    async def cat_file(self: Any, path: str, start: int, end: int) -> Any:
        asked.append((start, end))
        return await before(self, path, start=start, end=end)

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", cat_file)
    s3fs.S3FileSystem.clear_instance_cache()  # each takes hold of its methods when it is made
    return asked


@pytest.mark.slow
def test_an_archive_in_a_bucket_is_read_by_ranges(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    put(options, WEIGHTS)
    asked = counted(monkeypatch)
    rec = zcrecord.load_record(URL, storage_options=options)
    assert len(asked) == 2
    assert np.array_equal(rec["w5"], WEIGHTS["w5"])
    assert [end - start for start, end in asked[2:]] == [100_000]
    assert is_right(rec)
    assert is_right(pickle.loads(pickle.dumps(rec)))


@pytest.mark.slow
def test_kept_bytes_are_found_again(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(options, WEIGHTS)
    assert is_right(zcrecord.load_record(URL, storage_options=options, cache=tmp_path))
    asked = counted(monkeypatch)
    assert is_right(zcrecord.load_record(URL, storage_options=options, cache=tmp_path))
    assert asked == [(0, 64)]


@pytest.mark.slow
def test_an_object_that_is_replaced_is_never_mixed(options: dict[str, Any]) -> None:
    put(options, WEIGHTS, digest="none")
    rec = zcrecord.load_record(URL, storage_options=options)
    put(options, NEWER, digest="none")
    with pytest.raises(SourceError, match="was replaced or changed since it was opened"):
        rec["w3"]
    assert is_right(zcrecord.load_record(URL, storage_options=options), NEWER)


@pytest.mark.slow
def test_a_missing_object_or_bucket_is_told(options: dict[str, Any]) -> None:
    with pytest.raises(SourceNotFoundError, match=r"s3://bucket/none\.zcr: no such file on the server"):
        zcrecord.load_record("s3://bucket/none.zcr", storage_options=options)
    with pytest.raises(SourceNotFoundError):
        zcrecord.load_record("s3://nobucket/m.zcr", storage_options=options)


def test_options_that_do_not_fit_are_told() -> None:
    with pytest.raises(SourceError, match=r"m\.zcr: .* refused it .*nosuch_option.*; do its storage options fit"):
        zcrecord.load_record(URL, storage_options={"nosuch_option": 1, "skip_instance_cache": True})


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class of fsspec's own file system in memory, with an archive at memory://m.zcr."""
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr("zcrecord.remote.file._FIRST_WAIT", 0.001)
    MemoryFileSystem().pipe("/m.zcr", saved(WEIGHTS))
    yield MemoryFileSystem
    MemoryFileSystem().rm("/m.zcr")


def failing(monkeypatch: pytest.MonkeyPatch, kind: Any, errors: list[Exception | int]) -> None:
    """Have `cat_file` raise these errors first, or answer with so many bytes."""
    before = kind.cat_file

    def cat_file(self: Any, path: str, start: int, end: int) -> Any:
        if errors:
            error = errors.pop(0)
            if isinstance(error, Exception):
                raise error
            return before(self, path, start=start, end=end)[:error]
        return before(self, path, start=start, end=end)

    monkeypatch.setattr(kind, "cat_file", cat_file)


@pytest.mark.slow
def test_errors_of_any_kind_and_short_answers_are_tried_again(monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    failing(monkeypatch, memory, [ConnectionResetError(), Exception("busy"), TimeoutError(), 17])
    assert is_right(zcrecord.load_record("memory://m.zcr"))


def test_errors_that_stay_are_told(monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    failing(monkeypatch, memory, [Exception("busy")] * 99)
    with pytest.raises(SourceError, match=r"memory://m\.zcr: cannot be read, tried 5 times: busy"):
        zcrecord.load_record("memory://m.zcr")


def test_a_refusal_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    errors: list[Exception | int] = [PermissionError("no"), PermissionError("no")]
    failing(monkeypatch, memory, errors)
    with pytest.raises(SourceError, match="refused it"):
        zcrecord.load_record("memory://m.zcr")
    assert len(errors) == 1


def test_a_folder_is_no_archive(memory: Any) -> None:
    memory().mkdir("/folder")
    with pytest.raises(SourceError, match="is not a file"):
        zcrecord.load_record("memory://folder")
    memory().rmdir("/folder")


def test_a_file_that_became_shorter_was_replaced(memory: Any) -> None:
    rec = zcrecord.load_record("memory://m.zcr")
    memory().pipe("/m.zcr", b"short")
    with pytest.raises(SourceError, match="was replaced"):
        rec["w7"]


@pytest.mark.parametrize("verify", ["touch", "full"])
def test_a_file_replaced_between_two_fetches_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch, memory: Any, verify: Any
) -> None:
    monkeypatch.setattr("zcrecord.remote.read_ahead._MOST", 600_000)  # so that batches hold w7 whole
    place, fetches, before = zcrecord.load_record("memory://m.zcr").info("w7").offset, [0], memory.cat_file

    def cat_file(self: Any, path: str, start: int, end: int) -> Any:
        if not start <= place < end:
            return before(self, path, start=start, end=end)
        fetches[0] += 1
        if fetches[0] == 1:
            return bytes(end - start)  # a fault of a proxy
        self.pipe("/m.zcr", saved(NEWER))
        return before(self, path, start=start, end=end)

    monkeypatch.setattr(memory, "cat_file", cat_file)
    with pytest.raises(SourceError, match="was replaced or changed since it was opened"):
        zcrecord.load_record("memory://m.zcr", verify=verify)["w7"]
    assert fetches == [2]


def test_pieces_land_where_they_belong(monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    monkeypatch.setattr("zcrecord.remote.on_demand.cut", partial(cut, piece=9_999))
    assert is_right(zcrecord.load_record("memory://m.zcr"))


@pytest.mark.slow
def test_an_object_is_read_as_it_lies_whatever_it_is_said_to_be_encoded_by(options: dict[str, Any]) -> None:
    """Any publisher may say gzip of an object: what decompresses that on the way has no limit."""
    import s3fs

    fs = s3fs.S3FileSystem(**options)
    fs.pipe("bucket/models/m.zcr", saved(WEIGHTS), ContentEncoding="gzip")
    assert fs.call_s3("head_object", Bucket="bucket", Key="models/m.zcr")["ContentEncoding"] == "gzip"
    assert is_right(zcrecord.load_record(URL, storage_options=options))
    fs.pipe("bucket/models/m.zcr", gzip.compress(saved(WEIGHTS)), ContentEncoding="gzip")
    with pytest.raises(FormatError, match=r"this is a gzip stream|not its magic"):
        zcrecord.load_record(URL, storage_options=options)


@pytest.mark.parametrize("reports", [{"contentEncoding": "gzip"}, {"content_settings": {"content_encoding": "GZIP"}}])
def test_encoded_objects_are_refused(monkeypatch: pytest.MonkeyPatch, memory: Any, reports: dict[str, Any]) -> None:
    before = memory.info
    monkeypatch.setattr(memory, "info", lambda self, path: {**before(self, path), **reports})
    monkeypatch.setattr(memory, "cat_file", None)
    with pytest.raises(SourceError, match=r"keeps it encoded \(gzip\).* stored without Content-Encoding"):
        zcrecord.load_record("memory://m.zcr", cache=False)


def test_more_than_was_asked_for_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    asked: list[int] = []

    def cat_file(self: Any, path: str, start: int, end: int) -> bytes:
        asked.append(end)
        return bytes(end - start + 1)

    monkeypatch.setattr(memory, "cat_file", cat_file)
    with pytest.raises(SourceError, match="the server sent 65537 bytes where 65536 were asked for; download the file"):
        zcrecord.load_record("memory://m.zcr", cache=False)
    assert len(asked) == 1


@pytest.mark.parametrize("codings", [("gzip",), ("identity", "gzip")])
def test_chained_http_is_not_decompressed(
    tmp_path: Path, codings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zcrecord.remote.file._FIRST_WAIT", 0.001)
    body = gzip.compress(saved(WEIGHTS))

    def encoded(handler: Any, _: int) -> bool:
        handler.send_response(200)
        for coding in codings:
            handler.send_header("Content-Encoding", coding)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True

    with serving(tmp_path) as server:
        server.misbehave = encoded
        url = f"simplecache::{server.url}/m.zcr"
        for own in ({}, {"http": {"client_kwargs": {"headers": {"X-Key": "1"}}}}):
            with pytest.raises((FormatError, SourceError), match=r"gzip|magic|hides its size|is invalid"):
                zcrecord.load_record(url, storage_options=own, cache=False)
        server.misbehave = None
        (tmp_path / "n.zcr").write_bytes(saved(WEIGHTS))
        assert is_right(zcrecord.load_record(url.replace("m.zcr", "n.zcr"), cache=False))


@pytest.fixture
def mute() -> Iterator[dict[str, Any]]:
    """Options of an S3 server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        yield {"key": "a", "secret": "b", "client_kwargs": {"endpoint_url": endpoint}, "skip_instance_cache": True}


@pytest.mark.parametrize("way", ["load", "save", "cached"])
def test_a_mute_endpoint_is_one_error(way: str, mute: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcrecord.storage.urls._ANSWER", 0.3)
    with pytest.raises(SourceError, match=r"s3://bucket/m\.zcr: cannot (be )?read: no answer in 0\.3 seconds; is the"):
        if way == "save":
            uploads.version_at("s3://bucket/m.zcr", mute)
        elif way == "cached":
            zcrecord.load_record("simplecache::s3://bucket/m.zcr", storage_options={"s3": mute}, cache=False)
        else:
            zcrecord.load_record("s3://bucket/m.zcr", storage_options=mute, cache=False)


@pytest.mark.slow
def test_a_server_never_heard_of_is_asked_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client tries again by itself."""
    import s3fs

    asked: list[str] = []

    async def info(_: Any, path: str, **__: Any) -> Any:
        asked.append(path)
        raise ConnectionError("no connection")

    monkeypatch.setattr(s3fs.S3FileSystem, "_info", info)
    s3fs.S3FileSystem.clear_instance_cache()  # each takes hold of its methods when it is made
    with pytest.raises(SourceError, match=r"m\.zcr: cannot be read: no connection"):
        zcrecord.load_record(URL, storage_options=options, cache=False)
    assert len(asked) == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["s3", "memory"])
def test_a_save_to_a_file_object_of_fsspec_is_that_to_a_file(where: str, options: dict[str, Any]) -> None:
    import fsspec

    fs = fsspec.filesystem(where, **(options if where == "s3" else {}))
    for record in (WEIGHTS, NEWER):
        with fs.transaction, fs.open("bucket/saved/m.zcr", "wb") as file:
            zcrecord.save_record(record, file)
        assert fs.cat("bucket/saved/m.zcr") == saved(record)
