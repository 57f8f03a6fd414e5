"""An HTTP server for tests and benchmarks: serves files by ranges, counts what it does, misbehaves when asked to."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


@dataclass
class Request:
    """One request: which bytes were asked for (None: all), how many went out as its body."""

    path: str
    asked: tuple[int, int] | None
    sent: int = 0


@dataclass
class Server:
    """A server's files and its behaviour.

    Attributes:
        folder: whose files are served.
        etag: what is sent as ETag, None for nothing.
        misbehave: called with the handler and the number of the request, from 0; True: it has answered itself.
        ranges: whether ranges are done.
        delay: seconds before each answer.
    """

    folder: Path
    url: str = ""
    etag: str | None = '"1"'
    ranges: bool = True
    delay: float = 0.0
    most_sent: int = 1 << 62
    misbehave: Callable[[Any, int], bool] | None = None
    requests: list[Request] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def sent(self) -> int:
        return sum(request.sent for request in self.requests)

    def replace_after(self, requests: int) -> None:
        """Send another ETag from that request on, as if the file had been replaced."""

        def replaced(_: Any, number: int) -> bool:
            self.etag = f'"{1 + (number >= requests)}"'
            return False

        self.misbehave = replaced

    def forget(self) -> None:
        """Begin to count anew."""
        self.requests.clear()
        self.most_at_once = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for its header to be acknowledged
    server_state: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: what matters is counted."""

    def do_GET(self) -> None:
        state = self.server_state
        with state.lock:
            number = len(state.requests)
            request = Request(self.path, self._asked())
            state.requests.append(request)
            state.at_once += 1
            state.most_at_once = max(state.most_at_once, state.at_once)
        try:
            if state.delay:
                time.sleep(state.delay)
            if state.misbehave is None or not state.misbehave(self, number):
                self.answer(request)
        except (BrokenPipeError, ConnectionResetError):  # the reader gave up
            self.close_connection = True
        finally:
            with state.lock:
                state.at_once -= 1

    def _asked(self) -> tuple[int, int] | None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def answer(self, request: Request, *, cut: int | None = None) -> None:
        """Answer as servers do; with `cut` the connection breaks off after so many bytes."""
        state = self.server_state
        path = state.folder / unquote(self.path.partition("?")[0]).lstrip("/")
        if not path.is_file():
            self.say(404, b"not found")
            return
        size = path.stat().st_size
        start, end = request.asked if request.asked and state.ranges else (0, size)
        end = min(end, size, start + state.most_sent)
        if start >= size:
            self.say(416, Content_Range=f"bytes */{size}")
            return
        self.send_response(206 if request.asked and state.ranges else 200)
        if request.asked and state.ranges:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        if state.etag is not None:
            self.send_header("ETag", state.etag)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        stop = end if cut is None else min(end, start + cut)
        with path.open("rb") as file:
            file.seek(start)
            while start < stop and (data := file.read(min(1 << 20, stop - start))):
                request.sent += len(data)  # before: the reader may look at it as soon as it has them
                self.wfile.write(data)
                start += len(data)
        if cut is not None:
            self.wfile.flush()
            self.hang_up()


class _Server(ThreadingHTTPServer):
    """One that says nothing of connections that either side broke off."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError | ValueError):  # ValueError: the file of a closed connection
            super().handle_error(request, client_address)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a folder's files on this machine while the block runs."""
    state = Server(folder)
    handler = type("Handler", (_Handler,), {"server_state": state})
    server = _Server(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
