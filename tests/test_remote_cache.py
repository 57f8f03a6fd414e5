"""A cache saves requests and never changes what is loaded: what is damaged, forged or in use by others does no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import ROOT, saved

import zcrecord
from tools.range_server import Server, serving
from zcrecord import SourceError
from zcrecord.remote import trim_cache

WEIGHTS = {f"w{i}": np.random.default_rng(i).integers(0, 255, 100_000, np.uint8) for i in range(8)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of a folder that holds `m.zcr`, the archive of WEIGHTS."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "m.zcr").write_bytes(saved(WEIGHTS))
    with serving(folder) as state:
        yield state


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(server: Server, cache: Any, name: str = "m.zcr", **options: Any) -> Any:
    return zcrecord.load_record(f"{server.url}/{name}", cache=cache, **options)


def is_right(record: Any) -> bool:
    return all(map(np.array_equal, record.values(), WEIGHTS.values()))


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def payload_files(cache: Path) -> list[Path]:
    return [path for path in files(cache) if not path.name.startswith("index-")]


def test_a_second_load_asks_for_64_bytes(server: Server, cache: Path) -> None:
    assert is_right(load(server, cache))
    server.forget()
    assert is_right(load(server, cache))
    assert [request.sent for request in server.requests] == [64]
    assert len(payload_files(cache)) == 8


def test_only_what_was_fetched_is_kept_and_only_the_rest_is_fetched(server: Server, cache: Path) -> None:
    assert load(server, cache)["w3"].any()
    assert len(payload_files(cache)) == 1
    rec = load(server, cache)
    server.forget()
    assert is_right(rec)
    assert sum(request.sent for request in server.requests) < 710_000


def test_another_version_of_a_model_shares_what_did_not_change(server: Server, cache: Path) -> None:
    assert is_right(load(server, cache))
    (server.folder / "m.zcr").write_bytes(saved({**WEIGHTS, "new": WEIGHTS["w1"][::-1].copy()}))
    server.etag = '"2"'
    rec = load(server, cache)
    server.forget()
    assert rec["w5"].any()
    assert not server.requests
    assert np.array_equal(rec["new"], WEIGHTS["w1"][::-1])
    assert len(server.requests) == 1


def test_an_index_is_not_kept_where_nothing_tells_versions_apart(server: Server, cache: Path) -> None:
    server.etag = None
    assert is_right(load(server, cache))
    server.forget()
    assert is_right(load(server, cache))
    assert len(server.requests) == 2
    assert server.sent < 70_000


@pytest.mark.parametrize("how", ["flipped", "shorter", "longer", "empty", "unreadable"])
def test_a_damaged_entry_is_fetched_again_and_mended(server: Server, cache: Path, how: str) -> None:
    assert is_right(load(server, cache))
    for path in files(cache):
        data = bytearray(path.read_bytes())
        if how == "unreadable":
            path.unlink()
            path.mkdir()
            continue
        data[len(data) // 2] ^= 1
        changed = {"flipped": bytes(data), "shorter": bytes(data[:-3]), "longer": bytes(data) + b"more", "empty": b""}[
            how
        ]
        path.write_bytes(changed)
    server.forget()
    assert is_right(load(server, cache))
    assert server.sent > 800_000
    if how != "unreadable":
        server.forget()
        assert is_right(load(server, cache))
        assert server.sent == 64


def test_an_entry_of_one_publisher_is_not_used_for_another(server: Server, cache: Path) -> None:
    for publisher in ("good", "bad"):
        (server.folder / publisher / "models").mkdir(parents=True)
        (server.folder / publisher / "models" / "m.zcr").write_bytes(saved(WEIGHTS))
    assert is_right(load(server, cache, "bad/models/m.zcr"))
    for path in payload_files(cache):
        path.write_bytes(path.read_bytes())
    server.forget()
    assert is_right(load(server, cache, "good/models/m.zcr"))
    assert server.sent > 800_000
    (server.folder / "good" / "newer").mkdir()
    (server.folder / "good" / "newer" / "m.zcr").write_bytes(saved(WEIGHTS))
    server.forget()
    assert is_right(load(server, cache, "good/newer/m.zcr"))
    assert server.sent < 70_000


def test_without_digests_payloads_are_not_kept(server: Server, cache: Path) -> None:
    (server.folder / "m.zcr").write_bytes(saved(WEIGHTS, digest="none"))
    assert is_right(load(server, cache))
    assert not payload_files(cache)


def test_the_environment_names_a_cache_and_false_does_without(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_right(load(server, None))
    monkeypatch.setenv("ZCRECORD_CACHE", str(cache))
    assert is_right(load(server, False))
    assert not cache.exists()
    assert is_right(load(server, None))
    assert len(payload_files(cache)) == 8
    assert trim_cache(limit=250_000) <= 250_000
    assert trim_cache() == 0


def test_trimming_takes_what_was_not_used_for_longest_and_nothing_of_others(server: Server, cache: Path) -> None:
    assert is_right(load(server, cache))
    for number, path in enumerate(payload_files(cache)):
        os.utime(path, (number, number))
    oldest = payload_files(cache)[0]
    kept = payload_files(cache)[-2:]
    other = cache / "mine.txt"
    other.write_text("mine")
    left = trim_cache(cache, limit=210_000)
    assert 200_000 <= left <= 210_000
    assert not oldest.exists()
    assert set(kept) <= set(files(cache))
    assert other.exists()
    assert trim_cache(cache) == 0
    assert files(cache) == [other]
    assert is_right(load(server, cache))


def test_using_an_entry_counts_for_trimming(server: Server, cache: Path) -> None:
    assert is_right(load(server, cache))
    for path in files(cache):
        os.utime(path, (1, 1))
    assert load(server, cache)["w4"].any()
    trim_cache(cache, limit=150_000)
    server.forget()
    rec = load(server, cache)
    assert rec["w4"].any()
    assert all(request.sent != 100_000 for request in server.requests)


def test_a_cache_that_cannot_be_written_does_not_stop_loading(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert is_right(load(server, cache))
    assert not files(cache), "nothing half written is left"


def test_a_folder_that_cannot_be_made_is_told(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match=r"file: the cache's folder cannot be made"):
        load(server, tmp_path / "file")


@pytest.mark.skipif(os.name != "posix", reason="platform: has permissions")
def test_nobody_else_may_read_what_is_kept(server: Server, cache: Path) -> None:
    assert is_right(load(server, cache))
    assert all(path.stat().st_mode & 0o077 == 0 for path in (cache / "zcrecord-0").iterdir())


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
    assert len(files(cache)) == 9
    server.forget()
    assert is_right(load(server, cache))
    assert server.sent == 64
