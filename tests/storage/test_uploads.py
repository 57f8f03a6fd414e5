"""An upload is published whole or not at all, and leaves nothing behind: in S3, and in what else fsspec writes to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from records import saved

import zcrecord
from zcrecord import (
    DestinationExistsError,
    LazyTensor,
    RecordWriter,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
)
from zcrecord.remote import files
from zcrecord.storage import uploads
from zcrecord.storage.files import check_destination
from zcrecord.storage.urls import connect, file_beside

if TYPE_CHECKING:
    from buckets import S3

PART = 1 << 16
WEIGHTS = {f"w{i}": np.random.default_rng(i).integers(0, 255, 100_000, np.uint8) for i in range(2)}  # four parts
NEWER = {name: value[::-1].copy() for name, value in WEIGHTS.items()}
SMALL = {"w": np.arange(9)}
URL = "s3://bucket/models/m.zcr"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 KiB, which moto is told to take."""
    import moto.s3.models

    monkeypatch.setattr(uploads, "_PART", PART)
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", PART)


class Renamed(LocalFileSystem):  # type: ignore[misc]
    """A local file system under another protocol, which fsspec before 2026 does not remove from paths."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(os.fspath(path).removeprefix(f"{cls.protocol}://"))


class Shelf(Renamed):
    """A file system that renames, as those of SFTP and HDFS do."""

    protocol = "shelf"

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """Rename a file, onto one that is there, too."""
        os.replace(path1, path2)


class Depot(Renamed):
    """A store that renames nothing, and takes whole files."""

    protocol = "depot"
    mv = fsspec.AbstractFileSystem.mv


for kind in (Shelf, Depot):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


@pytest.fixture(params=["s3", "memory", "shelf", "depot", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """A URL of each kind of store, with an old archive at it; options to reach it; its file system.

    At the end the store has nothing else.
    """
    kind = request.param
    folder = {"s3": "bucket/models", "memory": "/uploads"}.get(kind, str(tmp_path))
    options = request.getfixturevalue("s3").options if kind == "s3" else {}
    fs = fsspec.filesystem(kind, **options)
    fs.pipe_file(f"{folder}/m.zcr", saved(WEIGHTS))
    yield f"{kind}://{folder}/m.zcr", options, fs
    fs.invalidate_cache()
    assert [os.path.basename(name) for name in fs.ls(folder, detail=False)] == ["m.zcr"]
    assert kind != "s3" or not request.getfixturevalue("s3").unfinished("bucket")
    fs.rm_file(f"{folder}/m.zcr")


def content(fs: Any, url: str) -> bytes:
    fs.invalidate_cache()
    data: bytes = fs.cat_file(url.partition("://")[2])
    return data


def test_a_record_saved_to_a_url_is_the_one_saved_to_a_file(place: Any) -> None:
    url, options, fs = place
    for record in (NEWER, SMALL):
        zcrecord.save_record(record, url, storage_options=options)
        assert content(fs, url) == saved(record)
    with RecordWriter(url, storage_options=options) as out:
        for name, value in WEIGHTS.items():
            out.add(name, value)
    loaded = zcrecord.load_record(url, storage_options=options, verify="full")
    assert all(map(np.array_equal, loaded.values(), WEIGHTS.values()))


@pytest.mark.exhaustive(keep=5)
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("nbytes", [0, 100, PART, 3 * PART])
def test_an_exception_leaves_what_was_there(place: Any, nbytes: int, error: type[BaseException]) -> None:
    url, options, fs = place

    def pieces() -> Iterator[bytes]:
        yield bytes(nbytes)
        raise error("half-way")

    record = {"w": LazyTensor("uint8", (nbytes + 1,), pieces())}
    with pytest.raises(error):
        zcrecord.save_record(record, url, storage_options=options)
    assert content(fs, url) == saved(WEIGHTS)


def test_only_the_version_that_was_seen_is_replaced(place: Any) -> None:
    url, options, fs = place
    if "file" in fs.protocol:
        return  # a path has no versions
    for record in (SMALL, NEWER):
        version = uploads.version_at(url, options)
        with uploads.upload(url, options, replaces=version) as sink:
            sink.write(saved(record))
        assert content(fs, url) == saved(record)
        for wrong in ("", '"of another"', version):
            stale = pytest.raises(SourceError, match=r"m\.zcr: was written by another in the meantime, and stays; load")
            with stale, uploads.upload(url, options, replaces=wrong) as sink:
                sink.write(saved(WEIGHTS))
            assert content(fs, url) == saved(record)


# S3: the requests of an upload, each of which may fail.


def steps(s3: S3, record: Any) -> list[str]:
    """Return the requests of saving a record, without that which only looks."""
    s3.requests.clear()
    zcrecord.save_record(record, URL, storage_options=s3.options)
    requests = sorted(r for r in s3.requests if r.startswith(("POST", "PUT")))
    s3.requests.clear()
    return requests


def test_an_upload_has_parts_and_a_small_one_is_one_request(s3: S3) -> None:
    whole = URL.removeprefix("s3:/")
    assert steps(s3, SMALL) == [f"PUT {whole}"]
    assert steps(s3, WEIGHTS) == [
        f"POST {whole}",
        f"POST {whole}?uploads",
        *(f"PUT {whole}?partNumber={number}" for number in range(1, 5)),
    ]


@pytest.mark.parametrize("way", ["403 AccessDenied", pytest.param("closed", marks=pytest.mark.exhaustive(keep=0))])
@pytest.mark.parametrize("newer", [NEWER, SMALL], ids=["large", "small"])
def test_an_upload_broken_off_at_every_request_leaves_the_old_object_and_no_parts(
    s3: S3, newer: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    requests = steps(s3, newer)
    zcrecord.save_record(WEIGHTS, URL, storage_options=s3.options)
    for broken in requests:
        s3.answers = lambda request, broken=broken: way if request == broken else None  # type: ignore[misc]
        with pytest.raises(SourceError, match=r"s3://bucket/models/m\.zcr: cannot write"):
            zcrecord.save_record(newer, URL, storage_options=s3.options)
        assert broken in s3.requests
        s3.answers = lambda _: None
        assert content(s3.file_system(), URL) == saved(WEIGHTS)
        assert not s3.unfinished("bucket")


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("way", ["closed", "lost", "503 SlowDown"])
def test_a_request_that_fails_once_is_made_again(s3: S3, way: str) -> None:
    requests = steps(s3, NEWER)
    for record, failing in ((NEWER, requests[0]), (WEIGHTS, requests[1]), (SMALL, "PUT /bucket/models/m.zcr")):
        failed: list[str] = []

        def answer(request: str, failing: str = failing, failed: list[str] = failed) -> str | None:
            if request != failing or failed:
                return None
            failed.append(request)
            return way

        s3.answers = answer
        zcrecord.save_record(record, URL, storage_options=s3.options)
        assert failed
        assert content(s3.file_system(), URL) == saved(record)


@pytest.mark.exhaustive(keep=0)
def test_a_commit_whose_answer_was_lost_has_happened(s3: S3) -> None:
    """Even if every further try, too, is answered by an error."""
    for record in (NEWER, SMALL):
        commit = steps(s3, record)[0]
        zcrecord.save_record(WEIGHTS, URL, storage_options=s3.options)
        first = True

        def answer(request: str, commit: str = commit) -> str | None:
            nonlocal first
            if request != commit:
                return None
            first, now = False, first
            return "lost" if now else "404 NoSuchUpload"

        s3.answers = answer
        zcrecord.save_record(record, URL, storage_options=s3.options)
        assert not first
        s3.answers = lambda _: None
        assert content(s3.file_system(), URL) == saved(record)


def test_parts_that_cannot_be_removed_are_told(s3: S3) -> None:
    s3.answers = lambda request: "403 AccessDenied" if "partNumber=2" in request or "DELETE" in request else None
    with pytest.raises(SourceError, match="cannot write") as caught:
        zcrecord.save_record(WEIGHTS, URL, storage_options=s3.options)
    assert "parts of the upload may be left there, removing them failed" in caught.value.__notes__[0]
    s3.answers = lambda _: None
    assert s3.unfinished("bucket") == ["models/m.zcr"]


def test_parts_suffice_for_five_tebibytes_and_are_no_larger_than_s3_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    most, least = 5 << 30, 5 << 20
    unknown = [uploads.part_size(number, 0) for number in range(1, 10_001)]
    assert sum(unknown) > 5 << 40
    assert least <= min(unknown)
    assert max(unknown) < most
    assert unknown[:100] == [16 << 20] * 100
    for total in (1, 100 << 30, 5 << 40):
        size = uploads.part_size(1, total)
        assert size == uploads.part_size(9000, total)
        assert least <= size < most
        assert size * 10_000 > total
    assert uploads.part_size(1, 0, fixed=True) == uploads.part_size(10_000, 0, fixed=True)


def test_an_upload_of_too_many_parts_is_an_error(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_MOST_PARTS", 3)
    with pytest.raises(SourceError, match=r"m\.zcr: takes more than 3 parts of an upload; write to a file, and upload"):
        zcrecord.save_record(WEIGHTS, URL, storage_options=s3.options)
    assert not s3.unfinished("bucket")


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("s3://nobucket/m.zcr", SourceNotFoundError, r"s3://nobucket/m\.zcr: cannot write: no such bucket or folder"),
        ("s3://bucket", UnsupportedError, "bucket: names a bucket; name an object in it"),
        ("s3://bucket/models/", SourceError, "s3://bucket/models/: names a folder; name a file in it"),
        ("simplecache::s3://bucket/m.zcr", UnsupportedError, "chained URLs are for reading; write to the last one"),
        ("https://host/m.zcr", UnsupportedError, r"https://host/m\.zcr: HTTP servers are for reading; write to the"),
        ("nosuch://host/m.zcr", UnsupportedError, "URLs of the kind nosuch:// are not known to fsspec"),
    ],
)
def test_a_url_that_cannot_be_written_is_told(s3: S3, url: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        zcrecord.save_record(SMALL, url, storage_options=s3.options if "s3" in url else None)


@pytest.mark.parametrize("kind", ["memory", "shelf"])
def test_a_folder_is_refused_before_the_first_byte(kind: str, tmp_path: Path) -> None:
    folder = f"{tmp_path}/models/m.zcr"
    fs = fsspec.filesystem(kind)
    fs.makedirs(folder)
    fs.pipe_file(f"{folder}/old", b"old")
    refused = pytest.raises(SourceError, match=r"m\.zcr: cannot write: is a folder; name a file in it")
    with refused, uploads.upload(f"{kind}://{folder}"):
        pytest.fail("it was opened")
    assert fs.find(str(tmp_path)) == [f"{folder}/old"]
    fs.rm(str(tmp_path), recursive=True)


SIGNS = ["x*.zcr", "x[1].zcr", "[a]*/x.zcr", "x#1.zcr", "x%41.zcr", "x{1,2}.zcr", "~x.zcr", "é ü.zcr"]


@pytest.mark.parametrize("name", SIGNS)
@pytest.mark.parametrize("kind", ["s3", "memory", "shelf", "depot"])
def test_signs_of_patterns_in_a_name_mean_themselves(
    kind: str, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options = request.getfixturevalue("s3").options if kind == "s3" else {}
    folder, fs = "bucket/f" if kind == "s3" else f"{tmp_path}/f", fsspec.filesystem(kind, **options)
    others = {f"{folder}/{other}" for other in ("x1.zcr", "xA.zcr", "a/x.zcr", "x.zcr")}
    for other in others:
        fs.makedirs(os.path.dirname(other), exist_ok=True)
        fs.pipe_file(other, b"another")
    if kind in ("shelf", "depot"):
        fs.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
    url = f"{kind}://{folder}/{name}"
    for record in (SMALL, NEWER):
        zcrecord.save_record(record, url, storage_options=options)
        fs.invalidate_cache()
        assert set(fs.find(folder)) == {*others, f"{folder}/{name}"}
        loaded = zcrecord.load_record(url, storage_options=options)
        assert loaded.path == url
        assert all(np.array_equal(loaded[each], value) for each, value in record.items())
    assert set(files.list_files(f"{kind}://{folder}", options)) == {name, *(o[len(folder) + 1 :] for o in others)}
    files.remove_file(url, options)
    fs.invalidate_cache()
    assert {path: fs.cat_file(path) for path in fs.find(folder)} == dict.fromkeys(others, b"another")
    fs.rm(folder, recursive=True)


def test_a_query_is_refused_where_it_would_be_left_out(s3: S3) -> None:
    message = r"/m: has '\?' in it, where a query begins, which only HTTP servers read, .*; rename the file"
    for url, options in (("memory://f/m?.zcr", {}), ("s3://bucket/m?version=1", s3.options)):
        with pytest.raises(UnsupportedError, match=message):
            zcrecord.save_record(SMALL, url, storage_options=options)
        with pytest.raises(UnsupportedError, match=message):
            zcrecord.load_record(url, storage_options=options)


def test_a_version_of_an_object_is_read_and_never_written(s3: S3) -> None:
    fs = s3.file_system()
    fs.call_s3("create_bucket", Bucket="versions")
    fs.call_s3("put_bucket_versioning", Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    zcrecord.save_record(SMALL, "s3://versions/m", storage_options=s3.options)
    first = fs.call_s3("head_object", Bucket="versions", Key="m")["VersionId"]
    zcrecord.save_record(NEWER, "s3://versions/m", storage_options=s3.options)
    url = f"s3://versions/m?versionId={first}"
    assert np.array_equal(zcrecord.load_record(url, storage_options=s3.options)["w"], SMALL["w"])
    with pytest.raises(UnsupportedError, match="names one version of an object; leave out what follows"):
        zcrecord.save_record(NEWER, url, storage_options=s3.options)


def test_a_catalogue_s_shard_with_a_query_in_its_name_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"memory://f/n: has '\?' in it"):
        connect(file_beside("memory://f/m.zcr", "n?1.zcr"), {})
    assert file_beside("s3://f/m.zcr?versionId=1", "n.zcr") == "s3://f/n.zcr"  # the version is the catalogue's


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("any of theirs")])
@pytest.mark.parametrize(("kind", "method"), [(Shelf, "mv"), (Depot, "put_file")])
def test_a_store_that_fails_to_publish_keeps_what_was_there(
    kind: Any, method: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, path1: str, path2: str, **_: Any) -> None:
        raise error

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "m.zcr").write_bytes(b"old")
    monkeypatch.setattr(kind, method, fail)
    with pytest.raises(SourceError, match=r"m\.zcr: cannot write.*(Input/output error|any of theirs)"):
        zcrecord.save_record(WEIGHTS, f"{kind.protocol}://{tmp_path}/m.zcr")
    assert os.listdir(tmp_path) == ["m.zcr"]
    assert (tmp_path / "m.zcr").read_bytes() == b"old"


def test_a_rename_that_does_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.zcr").write_bytes(b"old")
    monkeypatch.setattr(Shelf, "mv", lambda *_, **__: None)
    with pytest.raises(SourceError, match="did not rename onto the file there; remove that first"):
        zcrecord.save_record(WEIGHTS, f"shelf://{tmp_path}/m.zcr")
    assert os.listdir(tmp_path) == ["m.zcr"]


@pytest.mark.filterwarnings("ignore")  # of forks beside threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="platform: no fork")
@pytest.mark.parametrize("end", ["leaves the block", "fails in it", "fills a part"])
def test_a_forked_child_ends_no_upload_of_its_parent(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, said = os.pipe()
    monkeypatch.setattr(uploads._RenamedUpload, "discard", lambda _: os.write(said, b"discarded "))
    url, parent = "memory://forked/m.bin", os.getpid()
    try:
        with uploads.upload(url) as sink:
            sink.write(b"parent")
            child = os.fork()
            if not child and end == "fails in it":
                raise RuntimeError("in the child")
            if not child and end == "fills a part":
                sink.write(bytes(1 << 25))
            if child:
                os.waitpid(child, 0)
    except Exception as error:
        os.write(said, str(error).encode())
    finally:
        if os.getpid() != parent:
            os._exit(0)
    os.close(said)
    with open(answer, "rb") as file:
        answers = file.read()
    refused = b"memory://forked/m.bin: is being written by the process that forked this one"
    assert answers == b"in the child" if end == "fails in it" else answers.startswith(refused)
    assert content(fsspec.filesystem("memory"), url) == b"parent"


def test_a_source_that_is_the_destination_is_named_without_its_password() -> None:
    url = "memory://user:password@host/m.zcr"
    with pytest.raises(DestinationExistsError, match=r"^memory://host/m\.zcr: source and destination are the same URL"):
        check_destination(url, url, force=True)
