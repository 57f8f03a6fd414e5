"""`zcrecord serve`: ranges and caching as RFC 9110 has them, only what it serves is there, only this machine asks."""

from __future__ import annotations

import gzip
import http.client
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import command_line as c
import numpy as np
import pytest
import served

import zcrecord
from zcrecord import transport
from zcrecord.cli import serve
from zcrecord.cli.web_runtime import BUILDS, VERSION

ARCHIVE = "/archive.zcr"
WEIGHT = np.arange(3000, dtype=np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "model é.zcr"
    zcrecord.save_record({"w": WEIGHT}, path)
    path.with_suffix(".zcr.gz").write_bytes(gzip.compress(b"another file"))
    (path.parent / "secret.txt").write_text("secret", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    with served.served(path) as url:
        yield url


def ask(
    url: str, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers in lower case, and body."""
    connection = http.client.HTTPConnection("127.0.0.1", int(url.rstrip("/").rpartition(":")[2]), timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


# Bytes.


def test_whole_archive_is_sent_with_what_caches_and_readers_need(url: str, path: Path) -> None:
    status, headers, body = ask(url, ARCHIVE)
    assert (status, body) == (200, path.read_bytes())
    assert headers["content-type"] == "application/vnd.zcrecord"
    assert headers["accept-ranges"] == "bytes"
    assert headers["etag"].startswith('"')
    assert "last-modified" in headers
    assert headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(("asked", "start", "end"), [("0-63", 0, 64), ("64-64", 64, 65), ("-64", -64, None)])
def test_range_is_sent_as_it_was_asked_for(url: str, path: Path, asked: str, start: int, end: int | None) -> None:
    whole = path.read_bytes()
    status, headers, body = ask(url, ARCHIVE, headers={"Range": f"bytes={asked}"})
    assert (status, body) == (206, whole[start:end])
    first = start % len(whole)
    assert headers["content-range"] == f"bytes {first}-{first + len(body) - 1}/{len(whole)}"


def test_head_and_a_range_past_the_end_tell_the_size(url: str, path: Path) -> None:
    size = path.stat().st_size
    status, headers, _ = ask(url, ARCHIVE, headers={"Range": f"bytes={size}-"})
    assert (status, headers["content-range"]) == (416, f"bytes */{size}")
    status, headers, body = ask(url, ARCHIVE, "HEAD")
    assert (status, headers["content-length"], body) == (200, str(size), b"")


def test_condition_is_minded(url: str, path: Path) -> None:
    tag = ask(url, ARCHIVE, "HEAD")[1]["etag"]
    part = {"Range": "bytes=0-7"}
    assert ask(url, ARCHIVE, headers={**part, "If-Range": tag})[0] == 206
    status, _, body = ask(url, ARCHIVE, headers={**part, "If-Range": '"another"'})
    assert (status, len(body)) == (200, path.stat().st_size)
    assert ask(url, ARCHIVE, headers={**part, "If-Range": f"W/{tag}"})[0] == 200  # a weak one never matches
    assert ask(url, ARCHIVE, headers={"If-None-Match": tag})[0] == 304
    assert ask(url, ARCHIVE, headers={**part, "If-Match": '"another"'})[0] == 412


def test_compressed_sibling_is_no_version_of_it(url: str, path: Path) -> None:
    status, headers, body = ask(url, ARCHIVE, headers={"Accept-Encoding": "gzip"})
    assert (status, headers.get("content-encoding"), body) == (200, None, path.read_bytes())


@pytest.mark.slow
def test_who_goes_away_in_the_middle_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"w": np.zeros(64 << 20, np.uint8)}, path, durable=False)
    with served.served(path) as url:
        with socket.create_connection(("127.0.0.1", int(url.rstrip("/").rpartition(":")[2])), timeout=30) as sock:
            sock.sendall(b"GET /archive.zcr HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(1 << 16)
        assert ask(url, ARCHIVE, headers={"Range": "bytes=0-7"})[0] == 206


# What there is.


def test_page_comes_with_all_it_is_made_of(url: str) -> None:
    status, headers, body = ask(url, "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<title>" in body
    web = Path(zcrecord.__file__).parent / "web"
    files = [file for room in ("reader", "view", "page") for file in (web / room).iterdir()]
    files = [file for file in files if file.suffix in (".js", ".css")]
    assert len(files) > 30
    for file in files:
        status, headers, body = ask(url, f"/{file.relative_to(web).as_posix()}")
        assert (status, body) == (200, file.read_bytes()), file
        assert headers["content-type"].startswith(("text/javascript", "text/css"))


@pytest.mark.parametrize("place", [
    "/secret.txt", "/../secret.txt", "/%2e%2e/secret.txt", "/page/../../errors.py", "/page", "/page/", "/samples.zcr",
    "/model%20%C3%A9.zcr", "//etc/passwd", "/archive.zcr/", "/archive.zcr.gz", "/page/page.js/..",
    "/reader/zcrecord.d.ts", "/reader/package.json", "/view/",
])  # fmt: skip
def test_nothing_else_is_there(url: str, place: str) -> None:
    assert ask(url, place)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(url: str, method: str) -> None:
    assert ask(url, ARCHIVE, method)[0] == 405


def test_every_answer_says_what_a_page_may_do(url: str) -> None:
    for place in ("/", "/page/page.js", ARCHIVE, "/about.json", "/absent"):
        headers = ask(url, place, headers={"Origin": "https://evil.example"})[1]
        assert not [name for name in headers if name.startswith("access-control")]
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self' blob: 'wasm-unsafe-eval'; style-src 'self'; ")
        assert f"; connect-src 'self' https://cdn.jsdelivr.net/npm/onnxruntime-web@{VERSION}/dist/; " in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == "no-cache"


@pytest.mark.slow
def test_name_of_the_file_is_told_as_json(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"<script>\xff\xe2\x80\xae'\".zcr")
    zcrecord.save_record({"w": WEIGHT}, path)
    samples = tmp_path / "samples.zcr"
    zcrecord.save_record({"inputs": np.zeros((2, 64), np.float32), "labels": np.zeros(2, np.int64)}, samples)
    with served.served(path, "--samples", samples) as url:
        _, headers, body = ask(url, "/about.json")
        assert headers["content-type"].startswith("application/json")
        assert body.startswith(b'{"name": "<script>\\ufffd\\u202e\'\\".zcr", "samples": true, "runtime": {')
        assert ask(url, "/samples.zcr")[2] == samples.read_bytes()


@pytest.mark.slow
def test_onnxruntime_web_in_a_folder_is_served_and_its_server_is_not_named(path: Path, tmp_path: Path) -> None:
    names = [file.name for build in BUILDS.values() for file in build]
    for place in (tmp_path / "flat", tmp_path / "package" / "dist"):
        place.mkdir(parents=True)
        for name in [*names, "ort.all.min.mjs"]:
            (place / name).write_bytes(name.encode())
    for folder in (tmp_path / "flat", tmp_path / "package"):
        with served.served(path, "--onnxruntime-web", folder) as url:
            for name in names:
                _, headers, body = ask(url, f"/onnxruntime-web/{name}")
                kind = "application/wasm" if name.endswith(".wasm") else "text/javascript"
                assert (headers["content-type"], body) == (kind, name.encode())
                assert "; connect-src 'self'; " in headers["content-security-policy"]
            assert ask(url, "/onnxruntime-web/ort.all.min.mjs")[0] == 404
            assert b"https" not in ask(url, "/about.json")[2]


def test_folder_without_onnxruntime_web_is_told_at_once(path: Path, tmp_path: Path, run: c.Commands) -> None:
    words = rf": is no folder of onnxruntime-web: it has no %s; npm install onnxruntime-web@{VERSION} makes one"
    jspi, asyncify = BUILDS["jspi"], BUILDS["asyncify"]
    command = ["serve", str(path), "--onnxruntime-web", str(tmp_path)]
    run.fails(command, words % jspi[0].name)
    for file in (*jspi, asyncify[0]):
        (tmp_path / file.name).write_bytes(b"")
    run.fails(command, words % asyncify[1].name)


# Who may ask.


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1:80", "[::1]:8000", "[::1]", "a.localhost:1"])
def test_request_that_names_this_machine_is_answered(url: str, host: str) -> None:
    assert ask(url, ARCHIVE, headers={"Host": host})[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.168.0.1", ""])
def test_request_that_names_another_host_is_refused(url: str, host: str) -> None:
    status, _, body = ask(url, ARCHIVE, headers={"Host": host})
    assert (status, body[:11]) == (421, b"This server")


@pytest.mark.slow
def test_listening_for_everybody_is_warned_of(path: Path) -> None:
    server = served.start(path, "--host", "0.0.0.0")
    assert ask(server.url, ARCHIVE, headers={"Host": "model.example"})[0] == 200
    status, errors = server.end()
    assert status == 0
    assert errors == f"zcrecord: every machine that can connect to 0.0.0.0 can read all of {path}\n"


# Beginning and end.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "status", "told"), [(signal.SIGINT, 130, "zcrecord: interrupted\n"), (signal.SIGTERM, 0, "")]
)
def test_ends_as_every_command_does(path: Path, by: signal.Signals, status: int, told: str) -> None:
    server = served.start(path)
    ask(server.url, "/")
    assert server.end(by) == (status, told)


def test_taken_port_is_told_if_it_was_asked_for(path: Path, run: c.Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = f"127.0.0.1 port {port}: cannot listen there: Address already in use; --port 0"
        run.fails(["serve", str(path), "--port", str(port)], told)
    run.fails(["serve", str(path), "--port", "65536"], "port 65536: cannot listen there: the largest port is 65535")


@pytest.mark.slow
def test_browser_is_opened_if_asked_for(path: Path, tmp_path: Path) -> None:
    browser, told = tmp_path / "browser", tmp_path / "told"
    browser.write_text(f'#!/bin/sh\necho "$1" > {told}.new\nmv {told}.new {told}\n', encoding="utf-8")
    browser.chmod(browser.stat().st_mode | stat.S_IXUSR)
    server = served.start(path, "--open", environment={"BROWSER": f"{browser} %s"})
    wait = subprocess.run(["/bin/sh", "-c", f"until [ -e {told} ]; do sleep 0.05; done"], timeout=30)
    assert wait.returncode == 0
    assert told.read_text(encoding="utf-8") == f"{server.url}\n"
    assert server.end() == (0, "")


def test_what_cannot_be_served_is_told_at_once(path: Path, tmp_path: Path, run: c.Commands) -> None:
    shutil.copy(c.DIGITS, tmp_path / "m.onnx")
    run.fails(["serve", str(tmp_path / "m.onnx")], "m.onnx: is an ONNX model; ")
    transport.pack(path, tmp_path / "m.zst")
    run.fails(
        ["serve", str(tmp_path / "m.zst")], "is packed or attached to a program, and browsers read plain archives"
    )
    told = "samples need the tensors `images` .or `inputs`. and `labels`; one of the two is missing"
    run.fails(["serve", str(path), "--samples", str(path)], told)


# Requests that make no sense: each has an answer, the server goes on, and no traceback of its libraries is told.

GET, HOST, END = b"GET /archive.zcr HTTP/1.1\r\n", b"Host: localhost\r\n", b"Connection: close\r\n\r\n"
REQUESTS = {
    "no Host, as HTTP/1.0 has it": (b"GET /archive.zcr HTTP/1.0\r\n\r\n", 421),
    "an empty Host": (GET + b"Host:\r\n" + END, 421),
    "two Hosts": (GET + HOST + HOST + END, 400),
    "an overlong name of this machine": (GET + b"Host: " + b"a." * 300 + b"localhost\r\n" + END, 400),
    "a Host with a user": (GET + b"Host: x@y.localhost\r\n" + END, 400),
    "a Host that is no text": (GET + b"Host: \xff.localhost\r\n" + END, 400),
    "a header that is no text": (GET + HOST + b"If-None-Match: \xff\r\n" + END, 400),
    "a date beyond all": (GET + HOST + b"If-Modified-Since: Sun, 01 Jan 99999999999 00:00:00 GMT\r\n" + END, 400),
    "a range beyond all": (GET + HOST + b"Range: bytes=" + b"9" * 5000 + b"-\r\n" + END, 416),
    "many headers": (GET + HOST + b"".join(b"X-%d: a\r\n" % i for i in range(5000)) + END, 400),
    "a body that is not what it says": (
        b"POST /about.json HTTP/1.1\r\n" + HOST + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n" + END + b"abc",
        405,
    ),
    "TLS": (bytes.fromhex("16030100c8010000c40303") + bytes(200), 400),
}


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[served.Server]:
    server = served.start(path)
    yield server
    assert server.end() == (0, "")  # of all requests nothing was told


def answer(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        told = b""
        while part := connection.recv(65536):
            told += part
    return told


@pytest.mark.parametrize("request_", REQUESTS)
def test_request_that_makes_no_sense_is_answered_and_nothing_is_told(request_: str, server: served.Server) -> None:
    sent, status = REQUESTS[request_]
    first, _, rest = answer(server.port, sent).partition(b"\r\n")
    assert int(first.split()[1]) == status
    assert b"Traceback" not in rest
    assert answer(server.port, GET + HOST + END).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.slow
def test_fault_of_the_server_itself_is_told_in_a_line() -> None:
    logger = logging.getLogger("aiohttp.server")
    told: list[str] = []
    with serve._reporting_faults(told.append):
        try:
            raise KeyError("ours")
        except KeyError:
            logger.exception("Error handling request")
        try:
            raise ConnectionResetError
        except ConnectionResetError:
            logger.exception("Error handling request")
    assert told == ["KeyError: 'ours'"]
    assert logger.propagate
