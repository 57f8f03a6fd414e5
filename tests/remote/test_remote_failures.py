"""Faults between a server and a reader are tried again or are one typed error; nothing wrong is ever shown."""

from __future__ import annotations

import asyncio
import importlib
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import DigestAuthMiddleware
from costly_archives import write_twins
from forge import Forge
from records import saved
from remote_archives import WEIGHTS, Misbehave, asked, hung_up, is_right, load, replying, with_zeros

import zcrecord
from tools.measure import begin_peak, peak_rss
from tools.range_server import Server, serving
from zcrecord import (
    DependencyError,
    FormatError,
    IntegrityError,
    LimitError,
    RecordError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
    transport,
)
from zcrecord.remote import http

BUSY = replying(503, b"later", Retry_After="0")


def cut_short(handler: Any, number: int) -> bool:
    handler.answer(handler.server_state.requests[number], cut=30_000)
    return True


@pytest.mark.parametrize("failure", [BUSY, hung_up, cut_short], ids=["busy", "hung up", "cut short"])
def test_what_fails_now_and_then_is_tried_again(server: Server, failure: Misbehave) -> None:
    server.misbehave = lambda handler, number: number % 2 == 0 and failure(handler, number)
    assert is_right(load(server))
    assert len(server.requests) >= 4


def test_what_broke_off_goes_on_where_it_broke_off(server: Server) -> None:
    rec = load(server)
    server.forget()
    server.misbehave = lambda handler, number: number == 0 and cut_short(handler, number)
    assert np.array_equal(rec["w5"], WEIGHTS["w5"])
    first, second = server.requests
    assert first.asked is not None
    assert second.asked == (first.asked[0] + 30_000, first.asked[1])


@pytest.mark.parametrize(
    "failure, message", [(BUSY, "HTTP 503"), (hung_up, "[Dd]isconnected|reset|closed")], ids=["busy", "hung up"]
)
def test_what_fails_always_is_told_after_five_tries(server: Server, failure: Misbehave, message: str) -> None:
    rec = load(server)
    server.forget()
    server.misbehave = failure
    with pytest.raises(SourceError, match=rf"/m\.zcr: cannot be read, tried 5 times: .*({message})"):
        rec["w3"]
    assert len(server.requests) in (5, 10), "aiohttp itself asks once more where a kept connection was closed"
    server.misbehave = None
    assert is_right(rec), "a record is as good as before"


def test_frames_that_cannot_be_had_are_not_asked_for_all_over(server: Server) -> None:
    transport.pack(server.folder / "m.zcr", server.folder / "p.zcr.zst")
    rec = load(server, name="p.zcr.zst")
    server.forget()
    server.misbehave = BUSY
    with pytest.raises(SourceError, match="tried 5 times"):
        assert rec["w3"].any()
    assert len(server.requests) == 5


def test_a_server_that_sends_less_at_a_time_is_asked_for_the_rest(server: Server) -> None:
    server.most_sent = 70_000
    assert is_right(load(server))


def test_nobody_listening_is_told(server: Server, tmp_path: Path) -> None:
    with serving(tmp_path) as gone:
        pass
    with pytest.raises(SourceError, match=r"m\.zcr: cannot be read, tried 5 times: Cannot connect to host"):
        load(gone)


@pytest.mark.parametrize(
    "status, kind, message",
    [
        (404, SourceNotFoundError, "no such file on the server"),
        (401, SourceError, r"refused it \(HTTP 401\); give credentials in storage_options="),
        (418, SourceError, "answered HTTP 418 and not 206"),
    ],
)
def test_a_refusal_is_told_at_once(server: Server, status: int, kind: type[RecordError], message: str) -> None:
    server.misbehave = replying(status, b"<html>")
    with pytest.raises(kind, match=message):
        load(server)
    assert len(server.requests) == 1


def test_without_ranges_a_small_file_is_taken_whole(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rec = load(server)
    server.forget()
    server.ranges = False
    assert is_right(load(server))
    assert len(server.requests) == 1
    with pytest.raises(SourceError, match="does not do ranges"):
        rec["w2"]  # which was opened by ranges
    monkeypatch.setattr(http, "SMALL", 100_000)
    with pytest.raises(SourceError, match=r"does not do ranges \(HTTP 200 .* all 8\d+ bytes; download the file"):
        load(server)


@pytest.mark.parametrize("etags", [('"1"', '"2"'), ('W/"1"', 'W/"2"'), (None, None)], ids=["etag", "weak", "size"])
def test_a_file_with_another_etag_or_size_was_replaced(server: Server, etags: tuple[str | None, str | None]) -> None:
    server.etag = etags[0]
    rec = load(server)
    stored = rec["w2"]
    server.etag = etags[1]
    if etags == (None, None):
        (server.folder / "m.zcr").write_bytes(saved({**WEIGHTS, "more": WEIGHTS["w1"]}))
    with pytest.raises(SourceError, match=r"m\.zcr: was replaced or changed since it was opened; load it again"):
        rec["w3"]
    assert np.array_equal(stored, WEIGHTS["w2"])


def test_bytes_damaged_on_their_way_are_fetched_again(server: Server) -> None:
    rec = load(server)
    server.forget()
    server.misbehave = with_zeros((server.folder / "m.zcr").stat().st_size)
    assert np.array_equal(rec["w4"], WEIGHTS["w4"])
    assert len(server.requests) == 2


def test_a_payload_that_is_damaged_where_it_lies_is_never_shown(server: Server) -> None:
    path = server.folder / "m.zcr"
    data = bytearray(path.read_bytes())
    info = zcrecord.load_record(path).info("w6")
    data[info.offset + 77] ^= 1
    path.write_bytes(data)
    rec = load(server)
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"m\.zcr: tensor 'w6': payload .* its digest does not match"):
            rec["w6"]
    with pytest.raises(IntegrityError, match="tensor 'w6'"):
        rec.torch()
    assert np.array_equal(rec["w5"], WEIGHTS["w5"])


def test_payloads_that_overlap_are_refused_at_touch_too(server: Server) -> None:
    """Payloads are known by their offsets: another of the same offset would be shown unfetched."""
    path = server.folder / "m.zcr"
    f = Forge(path.read_bytes())
    f.set("payloads", 1, offset=int(f.columns["payloads"]["offset"][0]))  # that of the first, and not its size
    path.write_bytes(f.seal())
    assert len(zcrecord.load_record(path, verify="touch")) == len(WEIGHTS)
    with pytest.raises(FormatError, match=r"m\.zcr: payload .*"):
        load(server, verify="touch")


@pytest.mark.parametrize(
    "data, kind, message",
    [
        (b"", FormatError, "the file is empty"),
        (b"<html>" + b" page" * 50, FormatError, "this is a web page, not a zcrecord archive"),
        (saved(WEIGHTS)[:300_000], FormatError, r"the archive has 8\d+ bytes, the source 300000; it is truncated"),
        (saved(WEIGHTS)[:-1] + b"x", IntegrityError, "trailer: its CRC does not match"),
        (saved(WEIGHTS)[:120] + b"\xff" + saved(WEIGHTS)[121:], IntegrityError, "index: its CRC does not match"),
    ],
)
def test_what_is_no_archive_is_refused(server: Server, data: bytes, kind: type[RecordError], message: str) -> None:
    (server.folder / "m.zcr").write_bytes(data)
    with pytest.raises(kind, match=message) as result:
        load(server)
    assert result.value.path == f"{server.url}/m.zcr"
    with pytest.raises(kind, match=message):
        zcrecord.load_record(server.folder / "m.zcr")


def packed_claim(case: str, claimed: int) -> tuple[int, dict[int, bytes]]:
    """Return size and ends of a packed file whose first frame, or whose seek table, claims many bytes."""
    rows = struct.pack("<II", claimed, claimed) if case == "frame" else bytes(claimed // 8 * 8)
    count, start = len(rows) // 8, claimed if case == "frame" else 100
    footer = struct.pack("<IB", count, 0) + (0x8F92EAB1).to_bytes(4, "little")
    head = (0x184D2A5E).to_bytes(4, "little") + struct.pack("<I", len(rows) + 9)
    end = start + 8 + len(rows)
    return end + 9, {0: bytes.fromhex("28b52ffd"), start: head + rows[:8], end: footer}


@pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells the peak from now on")
@pytest.mark.parametrize("case", ["frame", "table"])
def test_memory_for_packed_bytes_is_taken_as_they_come(server: Server, case: str) -> None:
    claimed = 192 << 20
    size, ends = packed_claim(case, claimed)

    def claims(handler: Any, number: int) -> bool:
        lo, hi = asked(handler, number)
        hi = min(hi, size)
        if hi - lo > 1 << 17:
            handler.say(403)
            return True
        body = bytearray(hi - lo)
        for at, octets in ends.items():
            start, stop = max(lo, at), min(hi, at + len(octets))
            if start < stop:
                body[start - lo : stop - lo] = octets[start - at : stop - at]
        handler.say(206, bytes(body), Content_Range=f"bytes {lo}-{hi - 1}/{size}", ETag='"1"')
        return True

    server.misbehave = claims
    before = begin_peak()
    with pytest.raises(SourceError, match="the server refused it"):
        load(server, cache=False)
    assert (peak_rss() or 0) - before < claimed // 3
    assert bytearray(claimed) and (peak_rss() or 0) - before > claimed // 2, "the measurement notices"


def test_payloads_that_are_not_loaded_make_no_room_for_others_that_share_their_bytes(server: Server) -> None:
    write_twins(server.folder / "m.zcr", 1200, 1 << 20, filler=32 << 20)
    with pytest.raises(LimitError, match=r"tensors that share their bytes would take 1\.26e\+09 bytes"):
        load(server, names="w*", mode="c", cache=False)
    assert server.sent < 2 << 20
    assert len(load(server, names="w1??", mode="c", cache=False)) == 100


def test_a_failure_in_one_thread_leaves_no_other_waiting(server: Server) -> None:
    rec = load(server)
    server.misbehave = replying(403)
    for _ in range(3):
        with pytest.raises(SourceError, match="HTTP 403"):
            rec.prefetch()
    server.misbehave = None
    assert is_right(rec)


def test_options_for_local_files_are_refused(server: Server) -> None:
    with pytest.raises(UnsupportedError, match="embedded='suffix' is for local files"):
        load(server, embedded="suffix")
    assert not server.sent


@pytest.mark.parametrize(
    "missing, reports",
    [("fsspec.core", r"pip install fsspec aiohttp, .*'\.\[remote\]'"), ("s3fs", r"pip install s3fs, .*'\.\[s3\]'")],
)
def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch, missing: str, reports: str) -> None:
    importlib.import_module("fsspec.core")
    known = sys.modules["fsspec.registry"].__dict__["_registry"]  # what was asked for before
    monkeypatch.delitem(known, "s3", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(DependencyError, match=reports):
        zcrecord.load_record("s3://bucket/m.zcr")


def test_view_stays_what_it_is_while_others_fetch_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes between two payloads come along with them, and must not replace one that was checked meanwhile."""
    import fsspec

    fs, names = fsspec.filesystem("memory"), ["pad", "A", "Y", "C"]

    def put(value: float) -> None:
        fs.pipe("/y.zcr", saved({n: np.full(10_000, value + i, np.float32) for i, n in enumerate(names)}))

    put(1.0)
    record = zcrecord.load_record("memory://y.zcr", cache=False)
    fetch, arrived, go_on = type(fs).cat_file, threading.Event(), threading.Event()

    def slow(self: Any, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        if end - start > 60_000:  # A, C and what lies between; Y alone is answered at once
            arrived.set()
            go_on.wait(60)
        result: bytes = fetch(self, path, start=start, end=end, **options)
        return result

    monkeypatch.setattr(type(fs), "cat_file", slow)
    seen: list[Any] = []

    def look(name: str) -> None:
        try:
            if name == "A":
                record.prefetch(["A", "C"])
            seen.append(float(record[name][0]))
        except RecordError as error:
            seen.append(type(error).__name__)

    first, second = (threading.Thread(target=look, args=(name,)) for name in ("A", "Y"))
    first.start()
    assert arrived.wait(60)
    second.start()
    second.join(0.2)
    put(50.0)  # replaced while the first request is under way
    go_on.set()
    first.join(60)
    second.join(60)
    assert len(seen) == 2
    assert {*seen} <= {"SourceError", "IntegrityError"}  # never 3.0, and 52.0 in the same view later
    fs.rm("/y.zcr")


SECRET = {"Authorization": "Bearer SECRET", "X-Api-Key": "SECRET"}
HEARD = list[dict[str, str]]


@pytest.mark.parametrize("target", ["http://{own}/m.zcr?X-Signature=SECRET", "ftp://x/y?sig=SECRET"])
def test_errors_name_no_query_of_a_url_that_leads_astray(server: Server, target: str) -> None:
    server.misbehave = replying(302, Location=target.replace("{own}", server.url.removeprefix("http://")))
    with pytest.raises(SourceError) as caught:
        load(server)
    chain = f"{caught.value} {caught.value.__cause__}"
    assert "SECRET" not in chain
    assert "redirects" in chain or "no http URL" in chain


@pytest.fixture
def elsewhere(server: Server) -> Iterator[Server]:
    """Another server, of another origin, of the same files."""
    with serving(server.folder) as state:
        yield state


def redirecting(where: str, heard: HEARD, status: int = 302) -> Misbehave:
    """Return a server's behaviour: requests that are not signed are sent on, and the headers of all are noted."""

    def moved(handler: Any, _: int) -> bool:
        heard.append(dict(handler.headers))
        signed = "signed" in handler.path
        if not signed:
            handler.say(status, b"", Location=where.replace("{path}", handler.path))
        return not signed

    return moved


def listening(heard: HEARD) -> Misbehave:
    def listen(handler: Any, _: int) -> bool:
        heard.append(dict(handler.headers))
        return False

    return listen


def ways(more: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return storage options that have a secret."""
    secret = {**SECRET, **more}
    return {
        "headers": {"headers": secret},
        "session": {"client_kwargs": {"headers": secret}},
        "cookies": {"client_kwargs": {"cookies": {"session": "SECRET"}}},
    }


@pytest.mark.parametrize(
    "way, status", [*[("headers", s) for s in (301, 302, 303, 307, 308)], ("session", 302), ("cookies", 302)]
)
def test_secrets_stay_with_their_server(server: Server, elsewhere: Server, way: str, status: int) -> None:
    reports: HEARD = []
    heard: HEARD = []
    server.misbehave = redirecting(f"{elsewhere.url}{{path}}", reports, status)
    elsewhere.misbehave = listening(heard)
    assert is_right(load(server, storage_options=ways({"range": "bytes=0-1"})[way]))
    assert all("SECRET" in str(headers) for headers in reports), "the first server is told"
    assert len(heard) == len(reports) > 0
    assert "SECRET" not in str(heard)


@pytest.mark.parametrize("way", ["headers", "session"])
def test_secrets_of_a_chained_url_stay_with_their_server(server: Server, elsewhere: Server, way: str) -> None:
    reports: HEARD = []
    heard: HEARD = []
    server.misbehave, elsewhere.misbehave = redirecting(f"{elsewhere.url}{{path}}", reports), listening(heard)
    url = f"simplecache::{server.url}/m.zcr"
    assert is_right(zcrecord.load_record(url, cache=False, storage_options={"http": ways({})[way]}))
    assert all("SECRET" in str(headers) for headers in reports), "the first server is told"
    assert len(heard) == len(reports) > 0
    assert "SECRET" not in str(heard)
    for given in ({"cookies": {"session": "SECRET"}}, {"middlewares": (DigestAuthMiddleware("u", "SECRET"),)}):
        with pytest.raises(SourceError, match=r"m\.zcr: cannot be read: the server redirects to another, .* would go"):
            zcrecord.load_record(url, cache=False, storage_options={"http": {"client_kwargs": given}})
    assert len(heard) == len(reports) - 2


def test_headers_and_a_user_of_the_url_stay_where_a_server_sends_on_to_itself(server: Server) -> None:
    heard: HEARD = []
    server.misbehave = redirecting("/m.zcr?signed=1", heard, 307)
    assert is_right(load(server, storage_options={"headers": {"Authorization": "Bearer token"}}))
    assert {headers["Authorization"] for headers in heard} == {"Bearer token"}
    heard.clear()
    server.misbehave = redirecting(f"{server.url}/m.zcr?signed=1", heard)
    assert is_right(zcrecord.load_record(f"{server.url.replace('://', '://me:p%2Fw@')}/m.zcr", cache=False))
    assert {headers["Authorization"] for headers in heard} == {"Basic bWU6cC93"}


def test_what_params_add_to_a_query_is_for_the_first_server_alone(server: Server, elsewhere: Server) -> None:
    server.misbehave = replying(302, Location=f"{elsewhere.url}/m.zcr?signed=1")
    assert is_right(load(server, storage_options={"params": {"token": "SECRET"}}))
    assert {request.path for request in server.requests} == {"/m.zcr?token=SECRET"}
    assert {request.path for request in elsewhere.requests} == {"/m.zcr?signed=1"}


def test_a_path_that_fsspec_would_cut_is_refused(tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.zeros(3)}, tmp_path / "model")
    message = r": has '::' in it, where fsspec would cut it and take another file; write %3A%3A"
    acts: list[Callable[[], object]] = [
        lambda: zcrecord.load_record(f"file://{tmp_path}/model::v2.zcr"),
        lambda: zcrecord.save_record({"w": np.ones(3)}, f"file://{tmp_path}/model::v2.zcr"),
        lambda: zcrecord.load_record("http://[::1]:80/model.zcr"),
    ]
    for act in acts:
        with pytest.raises(UnsupportedError, match=message):
            act()


def test_a_file_that_is_no_file_system_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "zip.bad").write_bytes(b"neither")
    with pytest.raises(SourceError, match=r"bad: cannot be opened: "):
        zcrecord.load_record(f"zip://m.zcr::file://{tmp_path}/zip.bad")


@pytest.mark.parametrize(
    "url, options, message",
    [
        ("http://me:pass/word@host/m.zcr", None, "no valid host and port; write special characters"),
        ("http:///m.zcr", None, "no valid host and port"),
        ("http://[::1/m.zcr", None, "no valid host and port"),
        ("https://host/m.zcr", [1], "storage_options= takes a mapping, not a list"),
        ("https://host/m.zcr", {1: 2}, "the storage options do not fit"),
    ],
)
def test_what_cannot_be_asked_for_is_one_typed_error(url: str, options: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as result:
        zcrecord.load_record(url, storage_options=options)
    assert "pass/" not in str(result.value)


@pytest.mark.parametrize("headers", [{"X-Key": "a\nb SECRET"}, {"X-Key": 3}, "SECRET", {3: "SECRET"}])
def test_headers_that_are_none_are_told_without_what_is_in_them(server: Server, headers: Any) -> None:
    with pytest.raises(SourceError, match="storage options fit, headers as text") as result:
        load(server, storage_options={"headers": headers})
    assert "SECRET" not in f"{result.value}{result.value.__cause__}"
    assert not server.requests


@pytest.mark.parametrize("number", [0, 1])
def test_a_server_that_knows_no_such_range_is_told(server: Server, number: int) -> None:
    size = (server.folder / "m.zcr").stat().st_size
    refuse = replying(416, Content_Range=f"bytes */{size}", ETag='"1"')
    server.misbehave = lambda handler, now: now == number and refuse(handler, now)
    message = rf"no bytes \[0x\w+, 0x\w+\) of it \(HTTP 416\), it says 'bytes \*/{size}'; try again, or download"
    with pytest.raises(SourceError, match=message):
        load(server)
    server.misbehave = replying(416)
    with pytest.raises(SourceError, match="it does not say how many bytes it has; try again"):
        load(server)


def test_a_server_that_never_answers_is_given_up_soon(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has answered once may take longer."""
    stopped = threading.Event()
    server.misbehave = lambda *_: stopped.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(http, "_FIRST", 0.3)
        with pytest.raises(SourceError, match=r"m\.zcr: cannot be read: only 0 of 65536 bytes came in \d+ seconds"):
            load(server)
    stopped.set()
    server.misbehave = None
    record = load(server)
    monkeypatch.setattr(http, "_FIRST", 0.0)
    assert is_right(record)


def test_a_trickle_of_bytes_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rec = load(server)
    stopped = threading.Event()

    def trickle(handler: Any, number: int) -> bool:
        start, end = asked(handler, number)
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{rec.archive_nbytes}")
        handler.send_header("ETag", '"1"')
        handler.send_header("Content-Length", str(end - start))
        handler.end_headers()
        while not stopped.wait(0.01):
            handler.wfile.write(b"x")
            handler.wfile.flush()
        return True

    server.misbehave = trickle
    message = r"only \d+ of 100000 bytes came in \d+ seconds; the server or the line is"
    with monkeypatch.context() as patch, pytest.raises(SourceError, match=message):
        patch.setattr(http, "_PATIENCE", 0.3)
        patch.setattr(http, "_SLOWEST", 1 << 40)
        rec["w3"]
    stopped.set()
    server.misbehave = None
    assert is_right(rec), "an honest server may be slow"


def test_bytes_that_come_slowly_have_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rec = load(server)
    server.forget()
    monkeypatch.setattr(http, "_PATIENCE", 100_000)
    monkeypatch.setattr(http, "_SLOWEST", 0.01)
    ends, reschedule = [], asyncio.Timeout.reschedule

    def noted(limit: asyncio.Timeout, when: float | None) -> None:
        ends.append((when or 0) - asyncio.get_running_loop().time())
        reschedule(limit, when)

    monkeypatch.setattr(asyncio.Timeout, "reschedule", noted)
    assert np.array_equal(rec["w3"], WEIGHTS["w3"])
    assert len(server.requests) == 1
    assert [round(end, -5) for end in ends if end > 50_000] == [100_000, 100_000 + 100_000 / 0.01]
