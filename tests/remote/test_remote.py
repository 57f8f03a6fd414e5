"""Archives behind a URL: what is fetched, when, in how many requests, and that it is the same as of a local file."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_archives import OneWay
from records import saved
from remote_archives import is_right, write_sparse

import zcrecord
from tools.range_server import Server, serving
from zcrecord import TensorNotFoundError, UnsupportedError, transport
from zcrecord.remote.ranges import RangeSet
from zcrecord.storage.files import is_url
from zcrecord.storage.urls import redacted

KIB = 1 << 10
COUNT = 20


def weights(count: int = COUNT, nbytes: int = 40 * KIB) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {f"layers.{i}.w": rng.integers(0, 255, (nbytes // 16, 16), np.uint8) for i in range(count)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of a folder that holds `m.zcr`, the archive of `weights()`."""
    (tmp_path / "m.zcr").write_bytes(saved(weights()))
    with serving(tmp_path) as state:
        yield state


@pytest.fixture
def url(server: Server) -> str:
    return f"{server.url}/m.zcr"


def back_indexed(record: Any, *, sealed: bool) -> bytes:
    lazy = {k: zcrecord.LazyTensor("uint8", v.shape, partial(iter, [v])) for k, v in record.items()}
    if sealed:
        return saved(lazy)

    pipe = OneWay()
    zcrecord.save_record(lazy, pipe)
    return bytes(pipe.written)


def test_one_small_tensor_of_a_gibibyte_takes_three_requests_and_less_than_256_kib(tmp_path: Path) -> None:
    wanted = write_sparse(tmp_path / "m.zcr", 1 << 30)
    assert (tmp_path / "m.zcr").stat().st_size > 1 << 30
    with serving(tmp_path) as server:
        rec = zcrecord.load_record(f"{server.url}/m.zcr")
        assert len(rec) == 10
        assert rec["small"].nbytes == 16 * KIB
        assert np.array_equal(rec["small"], wanted)
    assert len(server.requests) <= 3
    assert server.sent < 256 * KIB


def test_opening_fetches_ends_and_index_and_no_more_than_asked_for_is_fetched_then(server: Server, url: str) -> None:
    rec = zcrecord.load_record(url)
    assert rec.names == tuple(weights())
    assert rec.info("layers.3.w").shape == (2560, 16)
    assert len(server.requests) == 2
    assert server.sent < 66 * KIB
    server.forget()
    assert np.array_equal(rec["layers.9.w"], weights()["layers.9.w"])
    assert [request.sent for request in server.requests] == [40 * KIB]
    for _ in range(50):
        assert np.array_equal(rec["layers.9.w"], weights()["layers.9.w"])
    assert len(server.requests) == 1, "what is there is not fetched again"
    assert np.array_equal(rec["layers.3.w"], weights()["layers.3.w"])
    assert len(server.requests) == 2, "however many were asked for before"


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("count", [20, 2000])
def test_an_index_at_the_back_is_found_whatever_the_header_says(tmp_path: Path, sealed: bool, count: int) -> None:
    record = weights(count, 64)
    record |= weights(20)
    data = back_indexed(record, sealed=sealed)
    assert any(data[10:60]) == sealed
    (tmp_path / "m.zcr").write_bytes(data)
    with serving(tmp_path) as server:
        rec = zcrecord.load_record(f"{server.url}/m.zcr")
        assert len(server.requests) <= (2 if sealed or count == 20 else 3)
        assert is_right(rec, record)


def test_a_small_archive_is_there_after_one_request(server: Server, url: str) -> None:
    (server.folder / "m.zcr").write_bytes(saved({"w": np.arange(9)}))
    assert zcrecord.load_record(url)["w"].tolist() == list(range(9))
    assert len(server.requests) == 1


def test_names_bring_what_is_chosen_and_nothing_else(server: Server, url: str) -> None:
    part = zcrecord.load_record(url, names=["layers.7.w", "layers.8.w"])
    server.forget()
    assert is_right(part, {name: weights()[name] for name in ("layers.7.w", "layers.8.w")})
    assert not server.requests


def test_prefetch_merges_neighbours_into_one_request(server: Server, url: str) -> None:
    rec = zcrecord.load_record(url)
    server.forget()
    rec.prefetch(["layers.4.w", "layers.5.w", "layers.6.w", "layers.15.w"])
    assert sorted(request.sent // KIB for request in server.requests) == [40, 120]
    with pytest.raises(TensorNotFoundError, match=r"close names: 'layers\.1\.w'"):
        rec.prefetch("layers.1.ww")
    server.forget()
    assert rec["layers.5.w"].any()
    assert not server.requests


@pytest.mark.parametrize("way", ["values", "tree", "torch", "save", "digest", "raw mode c"])
def test_who_asks_for_everything_gets_it_in_few_requests(server: Server, url: str, tmp_path: Path, way: str) -> None:
    rec = zcrecord.load_record(url)
    expected = weights()
    server.forget()
    if way == "values":
        assert is_right(rec, expected)
    elif way == "tree":
        assert np.array_equal(rec.tree()["layers.2.w"], expected["layers.2.w"])
    elif way == "torch":
        result = rec.torch()
        result["layers.2.w"].zero_()
        assert np.array_equal(result["layers.1.w"].numpy(), expected["layers.1.w"])
        assert is_right(rec, expected), "what torch writes to is its own"
    elif way == "save":
        zcrecord.save_record(rec, tmp_path / "again.zcr")
        assert (tmp_path / "again.zcr").read_bytes() == (tmp_path / "m.zcr").read_bytes()
    elif way == "digest":
        assert rec.content_digest() == zcrecord.load_record(tmp_path / "m.zcr").content_digest()
    else:
        mine = zcrecord.load_record(url, mode="c")
        mine["layers.2.w"][:] = 7
        assert mine["layers.2.w"].all()
        rec.prefetch()
        assert is_right(rec, expected)
    assert len(server.requests) <= (4 if way == "raw mode c" else 1)


@pytest.mark.slow
def test_long_payloads_are_fetched_in_pieces_several_at_a_time(server: Server, url: str) -> None:
    record = {"w": np.arange(5 << 20, dtype=np.uint64)}
    (server.folder / "m.zcr").write_bytes(saved(record))
    rec = zcrecord.load_record(url)
    server.forget()
    another, met = threading.Event(), []

    def meet(_: Any, number: int) -> bool:  # the first request is answered once there is a second
        if number:
            another.set()
        met.append(another.wait(60))
        return False

    server.misbehave = meet
    assert np.array_equal(rec["w"], record["w"])
    assert met == [True] * 5


def test_tied_and_strided_tensors_are_views_of_one_payload_fetched_once(server: Server, url: str) -> None:
    base = np.arange(120 * KIB, dtype=np.float32).reshape(-1, 4)
    (server.folder / "m.zcr").write_bytes(saved({"a": base, "b": base, "t": base.T, "pad": np.ones(1 << 20)}))
    rec = zcrecord.load_record(url)
    assert np.array_equal(rec["t"], base.T)
    count = len(server.requests)
    assert np.shares_memory(rec["a"], rec["t"])
    assert np.array_equal(rec["b"], base)
    assert len(server.requests) == count


def test_attributes_of_bytes_are_fetched_when_they_are_asked_for(server: Server, url: str) -> None:
    blob = os.urandom(300 * KIB)
    (server.folder / "m.zcr").write_bytes(saved({"w": np.ones(100 * KIB), "graph": blob}))
    rec = zcrecord.load_record(url)
    assert server.sent < 70 * KIB
    assert bytes(rec.attributes["graph"]) == blob


def test_threads_that_want_the_same_payload_fetch_it_once(server: Server, url: str) -> None:
    rec, expected = zcrecord.load_record(url), weights()["layers.12.w"]
    server.forget()
    server.delay = 0.1
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: np.array_equal(rec["layers.12.w"], expected), range(8)))
    assert len(server.requests) == 1


def test_threads_that_want_different_payloads_do_not_wait_for_each_other(server: Server, url: str) -> None:
    rec = zcrecord.load_record(url)
    meeting = threading.Barrier(3)  # broken, and the test failed, unless there are three requests at a time
    server.misbehave = lambda *_: meeting.wait(60) < 0
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(rec.get, (f"layers.{i}.w" for i in (3, 9, 15))))
    assert not meeting.broken


def test_close_releases_the_memory_once_views_are_gone(url: str) -> None:
    rec = zcrecord.load_record(url)
    view = rec["layers.3.w"]
    assert not rec.close()
    assert np.array_equal(view, weights()["layers.3.w"])
    with zcrecord.load_record(url) as other:
        assert other["layers.3.w"].any()
    assert other.close()
    with pytest.raises(UnsupportedError, match="the record is closed"):
        other["layers.3.w"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="platform: has fork")
@pytest.mark.filterwarnings("ignore")  # jax, where other tests have imported it, warns of every fork
def test_a_forked_process_fetches_by_itself(url: str) -> None:
    rec = zcrecord.load_record(url)
    assert rec["layers.3.w"].any()
    pid = os.fork()
    if not pid:
        right = np.array_equal(rec["layers.14.w"], weights()["layers.14.w"])
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert np.array_equal(rec["layers.13.w"], weights()["layers.13.w"])


def packed(server: Server, record: Any, name: str = "p.zcr.zst") -> str:
    (server.folder / "p.zcr").write_bytes(saved(record))
    transport.pack(server.folder / "p.zcr", server.folder / name, force=True)
    return f"{server.url}/{name}"


@pytest.mark.slow
def test_of_an_archive_packed_for_transport_only_frames_that_are_needed_are_fetched(server: Server) -> None:
    rng = np.random.default_rng(4)
    record = {f"w{i}": rng.integers(0, 255, 3 << 20, np.uint8) for i in range(6)} | weights()
    url = packed(server, record)
    rec = zcrecord.load_record(url)
    assert rec.archive_nbytes == (server.folder / "p.zcr").stat().st_size
    assert len(server.requests) <= 3
    assert server.sent < 200 * KIB
    server.forget()
    assert np.array_equal(rec["w4"], record["w4"])
    assert len(server.requests) == 2
    assert server.sent < 4 << 20
    server.forget()
    assert all(np.array_equal(rec[f"layers.{i}.w"], record[f"layers.{i}.w"]) for i in range(COUNT))
    assert len(server.requests) <= 4, "small ones share frames, which are kept for a while"
    assert is_right(rec, record)
    assert is_right(pickle.loads(pickle.dumps(rec)), record)
    loaded = rec.load_into("host", max_in_flight=4 << 20)
    assert all(np.array_equal(loaded[name], value) for name, value in record.items())
    assert is_right(zcrecord.load_record(url, names="layers.*"), weights())


@pytest.mark.slow
def test_a_packed_archive_of_any_size_index_and_cutting_is_opened(server: Server, tmp_path: Path) -> None:
    many = {f"t{i}": np.full(3, i) for i in range(5000)}
    for record in (many, {"w": np.arange(5)}, {}):
        assert is_right(zcrecord.load_record(packed(server, record)), record)
    many = {f"t{i}": np.full(3, i % 256, np.uint8) for i in range(5000)}
    (server.folder / "back.zcr").write_bytes(back_indexed(many, sealed=False))
    with (server.folder / "back.zcr").open("rb") as source:
        transport.pack(source, server.folder / "back.zcr.zst")
    assert is_right(zcrecord.load_record(f"{server.url}/back.zcr.zst", cache=tmp_path / "cache"), many)
    again = zcrecord.load_record(f"{server.url}/back.zcr.zst", cache=tmp_path / "cache")
    server.forget()
    assert is_right(again, many)
    assert not server.requests, "payloads are found in the cache, whatever they came out of"


def test_secrets_in_a_url_are_not_told(server: Server) -> None:
    assert redacted("https://me:pw@host:8/a/m.zcr?sig=1") == "https://host:8/a/m.zcr"
    assert redacted("simplecache::s3://key@bucket/m") == "simplecache::s3://bucket/m"
    assert redacted("http://me:pw@[::1]:8/m.zcr?sig=1") == "http://[::1]:8/m.zcr"
    url = f"{server.url}/m.zcr?signature=secret"
    rec = zcrecord.load_record(url)
    assert "secret" not in repr(rec)
    assert rec["layers.1.w"].any()
    assert server.requests[-1].path.endswith("?signature=secret")


def test_only_text_with_a_scheme_is_a_url() -> None:
    url = "https://host/m.zcr"
    assert all(map(is_url, [url, "simplecache::s3://bucket/m.zcr"]))
    assert not any(map(is_url, [r"C:\m.zcr", "C://m.zcr", "models/m.zcr", f"./{url}", Path(url), url.encode()]))


def test_a_file_url_is_the_local_file_mapped(tmp_path: Path) -> None:
    (tmp_path / "m.zcr").write_bytes(saved({"w": np.ones(3)}))
    rec = zcrecord.load_record((tmp_path / "m.zcr").as_uri())
    assert rec["w"].all()
    assert rec.archive.source.is_mapped


def test_what_is_held_and_what_is_missing_agree_with_a_set_of_bytes() -> None:
    rng = np.random.default_rng(1)
    held, there = RangeSet(), np.zeros(60, bool)
    for _ in range(300):
        start, end = sorted(rng.integers(0, 61, 2).tolist())
        gaps = held.missing(start, end)
        assert [i for a, b in gaps for i in range(a, b)] == [i for i in range(start, end) if not there[i]]
        if rng.random() < 0.2:
            held.add(start, end)
            there[start:end] = True
        if there.all():
            held, there = RangeSet(), np.zeros(60, bool)
    assert all(a[1] < b[0] for a, b in zip(held.ranges, held.ranges[1:], strict=False))
