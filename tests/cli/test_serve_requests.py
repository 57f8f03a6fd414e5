"""Requests that make no sense: each has an answer, the server goes on, and no traceback of its libraries is told."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import served

import zcrecord
from zcrecord.cli import serve

ARCHIVE, HOST, END = b"GET /archive.zcr HTTP/1.1\r\n", b"Host: localhost\r\n", b"Connection: close\r\n\r\n"
REQUESTS = {
    "no Host": (ARCHIVE + END, 400),
    "no Host, as HTTP/1.0 has it": (b"GET /archive.zcr HTTP/1.0\r\n\r\n", 421),
    "an empty Host": (ARCHIVE + b"Host:\r\n" + END, 421),
    "two Hosts": (ARCHIVE + HOST + HOST + END, 400),
    "two Hosts, one of them elsewhere": (ARCHIVE + HOST + b"Host: example.org\r\n" + END, 400),
    "an overlong Host": (ARCHIVE + b"Host: " + b"a" * 9000 + b"\r\n" + END, 400),
    "an overlong name of this machine": (ARCHIVE + b"Host: " + b"a." * 300 + b"localhost\r\n" + END, 400),
    "a Host with a user": (ARCHIVE + b"Host: x@y.localhost\r\n" + END, 400),
    "a Host with a path": (ARCHIVE + b"Host: a/b.localhost\r\n" + END, 400),
    "a Host that is no text": (ARCHIVE + b"Host: \xff.localhost\r\n" + END, 400),
    "an unclosed bracket": (ARCHIVE + b"Host: [::1\r\n" + END, 421),
    "a header that is no text": (ARCHIVE + HOST + b"If-None-Match: \xff\r\n" + END, 400),
    "a date beyond all": (ARCHIVE + HOST + b"If-Modified-Since: Sun, 01 Jan 99999999999 00:00:00 GMT\r\n" + END, 400),
    "a range beyond all": (ARCHIVE + HOST + b"Range: bytes=" + b"9" * 5000 + b"-\r\n" + END, 416),
    "NUL in a header": (ARCHIVE + HOST + b"X: a\0b\r\n" + END, 400),
    "a long path": (b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n" + HOST + END, 400),
    "many headers": (ARCHIVE + HOST + b"".join(b"X-%d: a\r\n" % i for i in range(5000)) + END, 400),
    "a body that is not what it says": (
        b"POST /about.json HTTP/1.1\r\n" + HOST + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n" + END + b"abc",
        405,
    ),
    "chunks that are none": (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n" + END + b"zz\r\n", 400),
    "a version of HTTP that there is not": (b"GET / HTTP/9.9\r\n" + HOST + END, 400),
    "TLS": (bytes.fromhex("16030100c8010000c40303") + bytes(200), 400),
    "no HTTP": (b"\0\1\2\r\n\r\n", 400),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("requests") / "model.zcr"
    zcrecord.save_record({"w": np.arange(10.0)}, path)
    return path


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
    assert answer(server.port, ARCHIVE + HOST + END).startswith(b"HTTP/1.1 200 OK\r\n")


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
