"""The cache gives an archive its own bytes alone: never another publisher's, version's or user's."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collisions import BLOCK, JUNK, colliding
from exhaustive import rounds
from records import saved
from remote_archives import cached_files

import zcrecord
from tools.range_server import Server, serving
from zcrecord import SourceError
from zcrecord.remote import trim_cache
from zcrecord.remote.cache_keys import identity

GENUINE = np.random.default_rng(1).integers(0, 255, 100_000, np.uint8)
EVIL = np.full_like(GENUINE, 66)
WEIGHTS = {"w": GENUINE, "b": np.arange(50_000)}
posix = pytest.mark.skipif(os.name != "posix", reason="platform: has owners and permissions")


def poisoned(archive: bytes) -> bytes:
    """Return an archive with other weights and the very same index: their XXH3 is that of the genuine ones."""
    at = zcrecord.load_record(archive).info("w").offset
    forged = colliding(GENUINE.tobytes(), EVIL.tobytes())
    return archive[:at] + forged + archive[at + len(forged) :]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A hub: Alice's archive, and Mallory's that was made to fit its digests, each in a folder and by a query."""
    folder = tmp_path / "served"
    for who, data in (("alice", saved(WEIGHTS)), ("mallory", poisoned(saved(WEIGHTS)))):
        (folder / "datasets" / who).mkdir(parents=True)
        (folder / "datasets" / who / "m.zcr").write_bytes(data)

    def by_query(handler: Any, _: int) -> bool:
        if "f=" in handler.path:
            handler.path = f"/datasets/{handler.path.partition('f=')[2].partition('&')[0]}/m.zcr"
        elif "/get" in handler.path:
            who = handler.headers.get("X-User") or handler.headers["Authorization"]
            handler.path = f"/datasets/{'mallory' if who in ('mallory', MALLORY) else 'alice'}/m.zcr"
        return False

    with serving(folder) as state:
        state.misbehave = by_query
        yield state


MALLORY = "Basic bWFsbG9yeTpwdw=="  # mallory:pw


def load(server: Server, cache: Any, path: str = "/datasets/alice/m.zcr", **options: Any) -> Any:
    return zcrecord.load_record(f"{server.url}{path}", cache=cache, storage_options=options)


files = partial(cached_files, index=True)


def test_other_weights_of_the_same_digest_take_no_time_to_make() -> None:
    """Else no test here could fail: the archive is full of what was chosen, and passes for sound."""
    data = poisoned(saved(WEIGHTS))
    record = zcrecord.load_record(data, verify="full")
    assert np.count_nonzero(record["w"] == 66) > len(GENUINE) * (BLOCK - JUNK) / BLOCK - 2 * BLOCK
    assert data[:64] == saved(WEIGHTS)[:64]
    assert record.info("w").digest == zcrecord.load_record(saved(WEIGHTS)).info("w").digest


@pytest.mark.parametrize("take", [lambda r: r["w"], lambda r: r.load_into("host")["w"]], ids=["view", "loader"])
@pytest.mark.parametrize(
    ("mallory", "alice"),
    [
        ("/datasets/mallory/m.zcr", "/datasets/alice/m.zcr"),
        ("/datasets/alice/../mallory/m.zcr", "/datasets/alice/m.zcr"),
        ("/records?token=mallory&f=mallory", "/records?token=alice&f=alice"),
    ],
)
def test_weights_of_one_publisher_are_never_replaced_by_those_of_another(
    server: Server, cache: Path, mallory: str, alice: str, take: Callable[[Any], Any]
) -> None:
    stolen = load(server, cache, mallory)
    assert not np.array_equal(take(stolen), GENUINE)
    record = load(server, cache, alice)
    assert np.array_equal(take(record), GENUINE)
    record.verify()
    server.forget()
    assert np.array_equal(take(load(server, cache, alice)), GENUINE), "and is found again"
    assert server.sent == 64


def test_who_is_named_by_a_header_or_a_user_of_the_url_is_another_publisher(server: Server, cache: Path) -> None:
    assert not np.array_equal(load(server, cache, "/get", headers={"X-User": "mallory"})["w"], GENUINE)
    assert np.array_equal(load(server, cache, "/get", headers={"X-User": "alice"})["w"], GENUINE)
    url = server.url.replace("//", "//mallory:pw@") + "/get"
    assert not np.array_equal(zcrecord.load_record(url, cache=cache)["w"], GENUINE)
    assert np.array_equal(zcrecord.load_record(url.replace("mallory", "alice"), cache=cache)["w"], GENUINE)


def test_what_was_kept_of_a_bad_version_is_gone_with_it(server: Server, cache: Path) -> None:
    """An account is taken over for an hour, and the file as it was put back."""
    path = server.folder / "datasets" / "alice" / "m.zcr"
    good = path.read_bytes()
    server.etag = '"1"'
    path.write_bytes(poisoned(good))
    assert not np.array_equal(load(server, cache)["w"], GENUINE)
    server.etag = '"2"'
    path.write_bytes(good)
    assert np.array_equal(load(server, cache)["w"], GENUINE)


@pytest.mark.parametrize("etag", [None, 'W/"1"'])
def test_nothing_is_kept_without_versions(server: Server, cache: Path, etag: str | None) -> None:
    server.etag = etag
    assert np.array_equal(load(server, cache)["w"], GENUINE)
    assert np.array_equal(load(server, cache).load_into("host")["w"], GENUINE)
    assert files(cache) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("X-Amz-Date=1&X-Amz-Signature=2&v=1", "X-Amz-Date=3&X-Amz-Signature=4&v=1"),
        ("v=1&X-Goog-Expires=1&X-Goog-Signature=2", "v=1&X-Goog-Expires=3&X-Goog-Signature=4"),
        ("AWSAccessKeyId=a&Signature=b&Expires=1", "AWSAccessKeyId=a&Signature=c&Expires=2"),
        ("Policy=a&Signature=b&Key-Pair-Id=c", "Policy=d&Signature=e&Key-Pair-Id=c"),
        ("sv=1&sr=b&sp=r&se=2&sig=3", "sv=1&sr=b&sp=r&se=4&sig=5"),
    ],
)
def test_a_url_that_is_signed_anew_names_the_same_archive(one: str, other: str) -> None:
    assert identity(f"https://host/m?{one}", {}) == identity(f"https://host/m?{other}", {})
    assert identity(f"https://host/m?{one}", {}) != identity(f"https://host/n?{other}", {})
    assert identity(f"https://host/m?{one}&v=2", {}) != identity(f"https://host/m?{other}", {})


@pytest.mark.parametrize("name", ["token", "sp", "sig", "signature", "expires", "policy", "X-Amz-Date"])
def test_one_name_of_a_signature_alone_may_be_how_a_server_tells_its_files_apart(name: str) -> None:
    assert identity(f"https://host/m?{name}=alice", {}) != identity(f"https://host/m?{name}=mallory", {})


def test_archives_are_told_apart_by_all_that_a_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "s3://bucket/models/m.zcr"
    here = {"client_kwargs": {"endpoint_url": "http://here:1"}}
    known = [
        identity(url, {}),
        identity(url, here),
        identity(url, {"client_kwargs": {"endpoint_url": "http://there:1"}}),
        identity(url, {"endpoint_url": "http://here:1"}),
        identity(url, {"key": "alice"}),
        identity(url, {"headers": {"X-User": b"alice"}}),
        identity(url, {"headers": {"X-User": b"mallory"}}),
        identity(url + "#a", {}),
        identity(url + "#b", {}),
        identity("simplecache::" + url, {"s3": here}),
    ]
    assert len(set(known)) == len(known)
    proofs = {"secret": "b", "token": "c", "headers": {"Authorization": "Bearer d", "Cookie": "e"}}
    assert identity(url, {**here, **proofs}) == known[1]
    assert identity(url, {"session": object()}) == identity(url, {"session": object()})
    for name in ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.setenv(name, "http://elsewhere:1")
        assert identity(url, {}) not in known
        monkeypatch.delenv(name)


def folders(cache: Path) -> dict[str, Path]:
    """Return the folders of a cache that one archive was loaded with, by what they are."""
    root = cache / "zcrecord-1"
    (archive,) = root.iterdir()
    (version,) = archive.iterdir()
    return {"named": cache, "root": root, "archive": archive, "version": version}


@posix
@pytest.mark.parametrize("which", ["named", "root", "archive", "version"])
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (0o770, r"its group may write to the cache's folder, and could change what is loaded; .* \(chmod go-w\)"),
        (0o707, r"everybody may write to the cache's folder, .* \(chmod go-w\), or name another in cache="),
    ],
)
def test_a_folder_that_others_may_write_to_is_refused(
    server: Server, cache: Path, which: str, mode: int, message: str
) -> None:
    assert load(server, cache)["w"].any()
    folder = folders(cache)[which]
    folder.chmod(mode)
    with pytest.raises(SourceError, match=message) as result:
        load(server, cache)
    assert str(folder) in str(result.value)
    assert load(server, False)["w"].any()
    folder.chmod(0o700)
    assert load(server, cache)["w"].any()


@posix
def test_a_folder_of_another_user_is_refused(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(server, cache)["w"].any()
    theirs, look = folders(cache)["archive"], Path.lstat

    def lstat(path: Path) -> os.stat_result:
        result = list(look(path))
        result[4] = 4242 if path == theirs else result[4]
        return os.stat_result(result)

    monkeypatch.setattr(Path, "lstat", lstat)
    message = rf"{theirs.name}: the cache's folder is another user's \(number 4242\), who could change what is loaded"
    with pytest.raises(SourceError, match=message):
        load(server, cache)


@posix
def test_a_link_in_place_of_a_folder_is_refused_but_for_the_one_that_was_named(server: Server, cache: Path) -> None:
    assert load(server, cache)["w"].any()
    cache.rename(cache.with_name("elsewhere"))
    cache.symlink_to(cache.with_name("elsewhere"))
    assert load(server, cache)["w"].any()
    root = cache / "zcrecord-1"
    root.rename(cache / "aside")
    root.symlink_to(cache / "aside")
    with pytest.raises(SourceError, match="zcrecord-1: the cache's folder is a link or a file; name another"):
        load(server, cache)


def test_a_file_in_place_of_a_folder_is_told(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match=r"file: the cache's folder is a file; name another"):
        load(server, tmp_path / "file")
    with pytest.raises(SourceError, match=r"inner: the cache's folder cannot be made: Not a directory"):
        load(server, tmp_path / "file" / "inner")


@posix
def test_a_folder_in_which_nobody_can_rename_what_is_anothers_may_be_named(server: Server, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o1777)
    assert load(server, cache)["w"].any()
    (cache / "zcrecord-1").chmod(0o1777)
    with pytest.raises(SourceError, match="zcrecord-1: everybody may write"):
        load(server, cache)


@posix
def test_nobody_else_may_read_or_write_what_is_made_whatever_the_umask(server: Server, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert load(server, tmp_path / "new" / "cache")["w"].any()
        assert load(server, tmp_path / "new" / "cache").load_into("host", max_in_flight=1 << 16)["b"].any()
    finally:
        os.umask(before)
    paths = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(paths) == 8
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}


@posix
def test_a_file_that_others_may_have_written_counts_as_none(server: Server, cache: Path) -> None:
    """A folder that was open to a group is no more, as the error advises; what they left in it is still there."""
    assert load(server, cache)["w"].any()
    (stored,) = [path for path in files(cache) if path.stat().st_size == len(GENUINE)]
    stored.write_bytes(colliding(GENUINE.tobytes(), EVIL.tobytes()))
    stored.chmod(0o660)
    assert np.array_equal(load(server, cache)["w"], GENUINE)
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    if os.geteuid() == 0:
        stored.write_bytes(colliding(GENUINE.tobytes(), EVIL.tobytes()))
        os.chown(stored, 4242, -1)
        assert np.array_equal(load(server, cache)["w"], GENUINE)


@posix
def test_a_folder_that_others_may_write_to_is_not_trimmed(server: Server, cache: Path) -> None:
    assert load(server, cache)["w"].any()
    before = files(cache)
    (cache / "zcrecord-1").chmod(0o770)
    with pytest.raises(SourceError, match="zcrecord-1: its group may write to the cache's folder"):
        trim_cache(cache)
    assert files(cache) == before


def test_trimming_leaves_no_empty_folders_and_a_record_that_is_open_goes_on(server: Server, cache: Path) -> None:
    record = load(server, cache)
    assert record["b"].any()
    assert trim_cache(cache) == 0
    assert list((cache / "zcrecord-1").iterdir()) == []
    assert np.array_equal(record["w"], GENUINE)
    assert len(files(cache)) == 1


@pytest.mark.slow
def test_trimming_while_others_open_and_load_harms_nobody(server: Server, cache: Path) -> None:
    ended = threading.Event()

    def trim() -> None:
        while not ended.is_set():
            trim_cache(cache)

    thread = threading.Thread(target=trim)
    thread.start()
    try:
        for _ in range(rounds(30)):
            assert np.array_equal(load(server, cache)["w"], GENUINE)
            assert np.array_equal(load(server, cache).load_into("host", max_in_flight=1 << 16)["w"], GENUINE)
    finally:
        ended.set()
        thread.join()
