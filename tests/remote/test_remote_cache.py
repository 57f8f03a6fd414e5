"""A cache saves requests and never changes what is loaded: what is damaged, forged or in use by others does no harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash
from records import ROOT, saved
from remote_archives import WEIGHTS, cached_files, is_right, load

from tools.range_server import Server
from zcrecord import SourceError, UnsupportedError
from zcrecord.remote import trim_cache


def test_a_second_load_asks_for_64_bytes(server: Server, cache: Path) -> None:
    assert is_right(load(server, cache))
    server.forget()
    assert is_right(load(server, cache))
    assert [request.sent for request in server.requests] == [64]
    assert len(cached_files(cache)) == 8


def test_only_what_was_fetched_is_kept_and_only_the_rest_is_fetched(server: Server, cache: Path) -> None:
    assert load(server, cache)["w3"].any()
    assert len(cached_files(cache)) == 1
    rec = load(server, cache)
    server.forget()
    assert is_right(rec)
    assert sum(request.sent for request in server.requests) < 710_000


@pytest.mark.parametrize("way", ["flipped", "shorter", "longer", "folder", "pipe", "link"])
def test_a_damaged_entry_is_fetched_again_and_mended(server: Server, cache: Path, way: str, tmp_path: Path) -> None:
    assert is_right(load(server, cache))
    for path in cached_files(cache, index=True):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.unlink()
        if way == "folder":
            path.mkdir()
        elif way == "pipe":
            os.mkfifo(path)
        elif way == "link":
            (tmp_path / path.name).write_bytes(data)
            path.symlink_to(tmp_path / path.name)
        else:
            path.write_bytes({"flipped": data, "shorter": data[:-3], "longer": data + b"more"}[way])
    server.forget()
    assert is_right(load(server, cache))
    assert server.sent > 800_000
    if way != "folder":
        server.forget()
        assert is_right(load(server, cache))
        assert server.sent == 64


def test_without_digests_payloads_are_not_kept(server: Server, cache: Path) -> None:
    (server.folder / "m.zcr").write_bytes(saved(WEIGHTS, digest="none"))
    assert is_right(load(server, cache))
    assert not cached_files(cache)


def test_the_environment_names_a_cache(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_right(load(server, None))
    monkeypatch.setenv("ZCRECORD_CACHE", str(cache))
    assert is_right(load(server, False))
    assert not cache.exists()
    assert is_right(load(server, None))
    assert len(cached_files(cache)) == 8
    assert trim_cache(limit=250_000) <= 250_000
    assert trim_cache() == 0


def test_trimming_takes_what_was_not_used_for_longest_and_nothing_of_others(server: Server, cache: Path) -> None:
    assert is_right(load(server, cache))
    for number, path in enumerate(cached_files(cache)):
        os.utime(path, (number, number))
    oldest = cached_files(cache)[0]
    stored = cached_files(cache)[-2:]
    other = cache / "mine.txt"
    other.write_text("mine", encoding="utf-8")
    left = trim_cache(cache, limit=210_000)
    assert 200_000 <= left <= 210_000
    assert not oldest.exists()
    assert {*stored, other} <= set(cached_files(cache))
    assert trim_cache(cache) == 0
    assert cached_files(cache, index=True) == [other]
    assert is_right(load(server, cache))


def test_trimming_follows_no_link_to_elsewhere(tmp_path: Path, cache: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.txt").write_text("mine", encoding="utf-8")
    cache.mkdir()
    (cache / "zcrecord-1").symlink_to(elsewhere)
    assert trim_cache(cache) == 0
    assert (elsewhere / "mine.txt").read_text(encoding="utf-8") == "mine"


def test_using_an_entry_counts_for_trimming(server: Server, cache: Path) -> None:
    assert is_right(load(server, cache))
    for path in cached_files(cache, index=True):
        os.utime(path, (1, 1))
    assert load(server, cache)["w4"].any()
    trim_cache(cache, limit=150_000)
    server.forget()
    rec = load(server, cache)
    assert rec["w4"].any()
    assert all(request.sent != 100_000 for request in server.requests)


def test_loading_goes_on_without_a_cache(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert is_right(load(server, cache))
    assert not cached_files(cache, index=True), "nothing half written is left"


@pytest.mark.parametrize("folder", [True, b"cache", "a\0b"])
def test_what_is_no_folder_is_one_typed_error(server: Server, folder: Any) -> None:
    with pytest.raises((UnsupportedError, SourceError), match=r"cache= takes a folder's path|cannot be made"):
        load(server, folder)


def test_trimming_refuses_what_is_no_folder_or_limit_and_no_cache_is_empty() -> None:
    with pytest.raises(UnsupportedError, match="cache= takes a folder's path, False for none"):
        trim_cache(True)
    with pytest.raises(UnsupportedError, match="limit='1 GB' is not a number of bytes"):
        trim_cache("cache", limit="1 GB")  # type: ignore[arg-type]
    assert trim_cache(False) == 0


def index_file(cache: Path) -> Path:
    (path,) = cache.rglob("index")
    return path


def test_an_index_is_written_once_and_used_from_then_on(server: Server, cache: Path) -> None:
    load(server, cache)
    first = index_file(cache).stat().st_ino
    os.utime(index_file(cache), (1, 1))
    load(server, cache)
    assert index_file(cache).stat().st_ino == first
    assert index_file(cache).stat().st_mtime > 1, "but it was used"


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"[" * 100_000,
        b'{"digest": DIGEST, "pieces": []}',
        b'{"digest": DIGEST, "pieces": [[0, 64]]}',
        b'{"digest": DIGEST, "pieces": [[0, 64], [64, 0], [0, 0]]}',
        b'{"digest": DIGEST, "pieces": [[0, -5], [0, 1e400]]}',
        b'{"digest": DIGEST, "pieces": [[true, 64], "ab", 3]}',
        b'{"digest": DIGEST}',
    ],
)
def test_a_malformed_index_in_the_cache_is_fetched_again_and_mended(server: Server, cache: Path, line: bytes) -> None:
    load(server, cache)
    right = index_file(cache).read_bytes()
    rest = right.partition(b"\n")[2]
    line = line.replace(b"DIGEST", json.dumps(xxhash.xxh3_64_hexdigest(rest)).encode())
    index_file(cache).write_bytes(line + b"\n" + rest)
    assert is_right(load(server, cache))
    assert index_file(cache).read_bytes() == right


@pytest.mark.slow
def test_several_processes_may_fill_one_cache_at_once(server: Server, cache: Path) -> None:
    code = (
        "import sys, zcrecord; "
        "rec = zcrecord.load_record(sys.argv[1], cache=sys.argv[2]); "
        "print(sum(int(value.sum()) for value in rec.values()))"
    )
    command = [sys.executable, "-c", code, f"{server.url}/m.zcr", str(cache)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    expected = sum(int(value.sum()) for value in WEIGHTS.values())
    assert [int(process.communicate()[0]) for process in running] == [expected] * 3
    assert len(cached_files(cache, index=True)) == 9
    server.forget()
    assert is_right(load(server, cache))
    assert server.sent == 64
