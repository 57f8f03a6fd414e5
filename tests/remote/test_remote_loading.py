"""Loaders of remote archives: few requests, every whole payload checked, from the cache and into it, little memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import saved
from remote_archives import cached_files, with_zeros

import zcrecord
from tools.measure import most_allocated
from tools.range_server import Server, serving
from zcrecord import IntegrityError, SourceError
from zcrecord.loaders import load_into
from zcrecord.loaders.torch import TorchLoader
from zcrecord.remote.file import RemoteFile, Request
from zcrecord.remote.on_demand import OnDemandMemory
from zcrecord.remote.ranges import PayloadRange, RangeSet
from zcrecord.remote.read_ahead import ReadAhead

MIB = 1 << 20
LOADERS = ["host", "read", "torch"]


def weights() -> dict[str, Any]:
    """Some small ones, a large one amid them, two that share bytes, one that is strided."""
    rng = np.random.default_rng(5)
    out: dict[str, Any] = {f"a{i}": rng.integers(0, 255, 40_000, np.uint8) for i in range(12)}
    out["large"] = rng.integers(0, 255, (3 * MIB, 2), np.uint8)
    out["turned"] = out["large"].T
    out["tied"] = out["a3"]
    return out | {f"b{i}": rng.integers(0, 255, 300_000, np.uint8) for i in range(5)}


WEIGHTS = weights()
ARCHIVE = saved(WEIGHTS)
STORED = sum(value.nbytes for name, value in WEIGHTS.items() if name not in ("turned", "tied"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of a folder that holds `m.zcr`, the archive of WEIGHTS."""
    monkeypatch.setattr("zcrecord.remote.file._FIRST_WAIT", 0.001)
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "m.zcr").write_bytes(ARCHIVE)
    with serving(tmp_path / "served") as state:
        yield state


def opened(server: Server, cache: Any = False) -> Any:
    record = zcrecord.load_record(f"{server.url}/m.zcr", cache=cache)
    server.forget()
    return record


def load(record: Any, way: Any, **options: Any) -> dict[str, Any]:
    loaded = load_into(record, TorchLoader("cpu", readers=3) if way == "torch" else way, **options)
    return {name: np.asarray(value) for name, value in loaded.items()}


def is_right(loaded: dict[str, Any]) -> bool:
    return all(np.array_equal(value, WEIGHTS[name]) for name, value in loaded.items())


def damage(server: Server, name: str) -> None:
    path = server.folder / "m.zcr"
    data = bytearray(path.read_bytes())
    info = zcrecord.load_record(path).info(name)
    data[info.offset + info.nbytes - 7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("most", [100_000, 1 * MIB, 64 * MIB])
@pytest.mark.parametrize("way", LOADERS)
def test_neighbours_are_one_request_whatever_the_loader(server: Server, way: str, most: int) -> None:
    loaded = load(opened(server), way, max_in_flight=most)
    assert list(loaded) == list(WEIGHTS)
    assert is_right(loaded)
    assert server.sent < STORED + 64 * 1024, "nothing came twice"
    assert len(server.requests) <= {100_000: 400, MIB: 60, 64 * MIB: 8}[most]


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("most", [1 * MIB, 64 * MIB])
@pytest.mark.parametrize("way", LOADERS)
def test_a_loader_is_served_from_the_cache_and_fills_it(server: Server, cache: Path, way: str, most: int) -> None:
    assert is_right(load(opened(server, cache), way, max_in_flight=most))
    assert len(cached_files(cache)) == 18
    record = opened(server, cache)
    assert is_right(load(record, way, max_in_flight=most))
    assert not server.requests
    assert all(np.array_equal(value, WEIGHTS[name]) for name, value in record.items()), "views use the same entries"
    assert not server.requests


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("most", [1 * MIB, 64 * MIB])
@pytest.mark.parametrize("name", ["large", "b2"])
@pytest.mark.parametrize("way", LOADERS)
def test_a_payload_that_is_damaged_where_it_lies_is_refused(
    server: Server, cache: Path, way: str, name: str, most: int
) -> None:
    damage(server, name)
    with pytest.raises(IntegrityError, match=rf"/m\.zcr: tensor '{name}': payload \[.*: its digest does not match"):
        load(opened(server, cache), way, max_in_flight=most)
    assert is_right(load(opened(server, cache), way, names=["a*", "b4"]))
    wrong = f"-{WEIGHTS[name].nbytes}"
    assert name == "b2" or not any(path.name.endswith(wrong) for path in cached_files(cache))
    assert not [path for path in cached_files(cache) if path.name.startswith(".new-")], "nothing half written is left"


def test_small_payloads_that_were_damaged_on_their_way_are_fetched_again(server: Server) -> None:
    record = opened(server)
    server.misbehave = with_zeros((server.folder / "m.zcr").stat().st_size)
    assert is_right(load(record, "host", names="a*"))
    assert len(server.requests) > 1


@pytest.mark.slow
def test_loading_takes_little_memory_whatever_the_payloads_size(server: Server) -> None:
    nbytes = 24 * MIB
    (server.folder / "m.zcr").write_bytes(saved({"w": np.arange(nbytes, dtype=np.uint8)}))
    record, room = opened(server), np.empty(nbytes, np.uint8)
    assert most_allocated(lambda: bytes(8 * MIB)) > 7 * MIB, "it would be noticed"
    peak = most_allocated(lambda: load_into(record, "host", dst={"w": room}, max_in_flight=4 * MIB))
    assert np.array_equal(room[-300:], np.arange(nbytes - 300, nbytes).astype(np.uint8))
    assert peak < 7 * MIB, "two batches of 1 MiB each, and what aiohttp reads ahead"


@pytest.mark.slow
def test_loading_many_small_ones_takes_as_little_memory(server: Server) -> None:
    wanted = {f"w{i}": np.frombuffer(np.random.default_rng(i).bytes(1 << 16), np.uint8) for i in range(384)}
    (server.folder / "m.zcr").write_bytes(saved(wanted))
    record = opened(server)
    rooms = {name: np.empty(1 << 16, np.uint8) for name in wanted}
    peak = most_allocated(lambda: load_into(record, "host", dst=rooms, max_in_flight=4 * MIB))
    assert all(np.array_equal(rooms[name], wanted[name]) for name in wanted)
    assert 2 * MIB < peak < 7 * MIB, "as above"


class Zeros(RemoteFile):
    """A file of zeros that is nowhere."""

    def fill(self, pieces: list[Request]) -> None:
        for _, target in pieces:
            target[:] = bytes(len(target))


def ahead_of(file: RemoteFile) -> ReadAhead:
    return ReadAhead(OnDemandMemory(file, memoryview(b""), RangeSet(), None))


def test_batches_together_take_no_more_than_read_ahead_may_hold() -> None:
    room = memoryview(bytearray(2 * MIB))

    def read() -> None:
        ahead = ahead_of(Zeros("memory://m.zcr", {}))
        ahead.expect([PayloadRange(0, 60 * MIB, None, "w")], 12 * MIB)
        for at in range(0, 60 * MIB, 2 * MIB):
            ahead.readinto_at(at, room)

    assert 8 * MIB < most_allocated(read) < 14 * MIB, "three batches of 4 MiB, and what the zeros take"


def test_a_server_that_fails_is_given_up_once_by_all_who_wait_for_it() -> None:
    class Failing(Zeros):
        calls = 0

        def fill(self, pieces: list[Request]) -> None:
            self.calls += 1
            waiting.wait(60)
            raise SourceError("no answer in time", path=self.shown)

    place, waiting = Failing("memory://m.zcr", {}), threading.Event()
    ahead = ahead_of(place)
    ahead.expect([PayloadRange(0, 8 * MIB, None, "w")], 3 * MIB)
    reports: list[BaseException] = []

    def read(at: int) -> None:
        try:
            ahead.readinto_at(at, memoryview(bytearray(10)))
        except SourceError as error:
            reports.append(error)

    readers = [threading.Thread(target=read, args=(at * MIB,)) for at in range(4)]
    readers[0].start()
    while not place.calls:
        time.sleep(0.001)
    for reader in readers[1:]:
        reader.start()
    while len(ahead._awaited) < 3 and readers[0].is_alive():  # until all others wait for the first
        time.sleep(0.001)
    waiting.set()
    for reader in readers:
        reader.join()
    assert (len(reports), place.calls) == (4, 1)
    read(0)
    assert (len(reports), place.calls) == (5, 2), "who comes later tries anew"


@pytest.mark.parametrize("damaged", [False, True])
def test_payloads_that_are_read_backwards_are_checked_in_the_end(server: Server, damaged: bool) -> None:
    if damaged:
        damage(server, "large")
    record = opened(server)
    info = record.info("large")
    ahead = ReadAhead(record.archive.source.remote)
    ahead.expect([PayloadRange(info.offset, info.nbytes, info.digest, "large")], 2 * MIB)
    room = bytearray(info.nbytes)
    for start in reversed(range(0, info.nbytes, 100_000)):
        ahead.readinto_at(info.offset + start, memoryview(room)[start : start + 100_000])
    told = r"tensor 'large': payload .* its digest does not match"
    with pytest.raises(IntegrityError, match=told) if damaged else contextlib.nullcontext():
        ahead.check_same()
    assert (bytes(room) == WEIGHTS["large"].tobytes()) != damaged


@pytest.mark.parametrize("way", LOADERS)
def test_a_file_that_is_replaced_while_it_is_loaded_is_an_error(server: Server, way: str) -> None:
    record = opened(server)
    server.replace_after(4)
    with pytest.raises(SourceError, match=r"m\.zcr: (tensor '.*': )?was replaced or changed since it was opened"):
        load(record, way, max_in_flight=MIB)
