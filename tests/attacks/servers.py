"""Servers that answer what no server should: to fill memory, to be waited for, or to be read in two ways.

An attack's file is what such a server sends to every request, byte for byte; what lies beside it as `more` it sends
after that, again and again, and if that is nothing it is silent. `@RANGE@`, `@LENGTH@` and `@N@` are replaced by what
was asked for, and by the request's number. An empty file is an honest server's; one called `late` is asked with less
patience, so that giving up takes no minutes.
"""

from __future__ import annotations

import io
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from attacks import catalogue
from attacks.catalogue import Attack, Door, Maker
from attacks.doors import command
from zcrecord import SourceError
from zcrecord.cli.dispatch import main
from zcrecord.remote import file, http

LATE, PATIENCE = 0.3, 90.0  # seconds in place of five minutes: where that is what ends it, and where it must not be
LONGEST = 120.0
NAME = "m.zcr"
ENDLESS = 1 << 40


@cache
def archive() -> bytes:
    """Return the honest server's archive: two tensors, larger than the first request."""
    file = io.BytesIO()
    weights = np.arange(300_000, dtype=np.uint8)
    zcrecord.save_record({"w": weights, "b": weights[::-1].copy()}, file, durable=False)
    return file.getvalue()


class Server:
    """A server of one reply, while `hostile`; before, of the archive."""

    def __init__(self, path: Path, *, hostile: bool = True) -> None:
        self.head, more = path.read_bytes(), path.with_name("more")
        self.more = more.read_bytes() if more.exists() else None
        self.patience = LATE if path.name == "late" else PATIENCE
        self.hostile, self.number = hostile, 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://localhost:{self.listening.getsockname()[1]}/{NAME}"
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while True:
            connection, _ = self.listening.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                heard = b""
                while b"\r\n\r\n" not in heard:
                    if not (some := connection.recv(1 << 16)):
                        return
                    heard += some
                    if heard.endswith(b"\r\n\r\n"):
                        self.answer(connection, heard)
                        heard = b""
        except OSError:  # the reader gave up
            pass

    def answer(self, connection: socket.socket, heard: bytes) -> None:
        self.number += 1
        found, data = re.search(rb"Range: bytes=(\d+)-(\d+)", heard), archive()
        start, end = (int(found[1]), min(int(found[2]) + 1, len(data))) if found else (0, len(data))
        told = b"bytes %d-%d/%d" % (start, end - 1, len(data))
        if not self.head or not self.hostile:
            head = b'HTTP/1.1 206 Partial\r\nETag: "1"\r\nContent-Range: %s\r\nContent-Length: %d\r\n\r\n'
            connection.sendall(head % (told, end - start) + data[start:end])
            return
        known = {b"@RANGE@": told, b"@LENGTH@": b"%d" % (end - start), b"@N@": b"%d" % self.number}
        head = self.head
        for name, value in known.items():
            head = head.replace(name, value)
        connection.sendall(head)
        if self.more is None:
            connection.close()
            return
        while True:
            connection.sendall(self.more)
            time.sleep(0 if self.more else 0.1)


def hurried(server: Server, ask: Callable[[str], object]) -> Callable[[], object]:
    def act() -> None:
        http._PATIENCE, http._SLOWEST, file._FIRST_WAIT = server.patience, ENDLESS, 0.001
        server.hostile = True
        ask(server.url)

    return act


def opening(**options: Any) -> Door:
    """Open an archive, and read all of it."""

    def door(path: Path) -> Callable[[], object]:
        kept = path.with_name("kept") if options.pop("cached", False) else False
        return hurried(Server(path), lambda url: dict(zcrecord.load_record(url, cache=kept, **options)))

    return door


def opened(take: Callable[[Any], object]) -> Door:
    """Open an archive of a server that turns hostile then, and take some of it."""

    def door(path: Path) -> Callable[[], object]:
        server = Server(path, hostile=False)
        record = zcrecord.load_record(server.url, cache=False)
        return hurried(server, lambda _: take(record))

    return door


def listed(path: Path) -> Callable[[], object]:
    return hurried(Server(path), lambda url: command(main, "ls")(url)())  # type: ignore[arg-type]


DOORS: dict[str, Door] = {
    "load_record": opening(),
    "load_record cache": opening(cached=True),
    "load_record full": opening(verify="full"),
    "zcrecord ls": listed,
    "view": opened(lambda record: record["w"]),
    "prefetch": opened(lambda record: record.prefetch()),
    "loader": opened(lambda record: record.load_into("host")),
}


def fetched(path: Path) -> Callable[[], object]:
    import fsspec

    url, fs = Server(path).url, fsspec.filesystem("http", skip_instance_cache=True)
    return lambda: fs.cat_file(url, start=0, end=1 << 16)


PEERS: dict[str, dict[str, Door]] = {"fsspec": {"cat_file": fetched}}
LATER = frozenset({"view", "prefetch", "loader"})
FIRST = frozenset(DOORS) - LATER
EVERY = frozenset(DOORS)


def sent(head: bytes, more: bytes | None = None, name: str = "reply") -> Maker:
    def make(folder: Path) -> Path:
        if more is not None:
            (folder / "more").write_bytes(more)
        return catalogue.file(lambda: head, name)(folder)

    return make


HARMLESS = sent(b"")


def inflating(window: int) -> bytes:
    """Return 0.5 MB that inflate to 512 MiB: zlib's with that `wbits`; its checksum at the end is wrong."""
    packer = zlib.compressobj(9, zlib.DEFLATED, window)
    piece = bytes(1 << 20)
    first, again = (packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + again * 511 + packer.flush()


def reply(status: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


PART = ("206 Partial Content", "Content-Range: @RANGE@", 'ETag: "1"')
ZEROS = bytes(1 << 16)


def encoded(what: str, *codings: str, status: tuple[str, ...] = PART, window: int = 31) -> Attack:
    headers = [f"Content-Encoding: {coding}" for coding in codings]

    def make(folder: Path) -> Path:
        body = inflating(window)
        return sent(reply(*status, *headers, f"Content-Length: {len(body)}", body=body))(folder)

    return attack(f"512 MiB in 0.5 MB, {what}", "W1", make, "sends it encoded .*, which the request", peer=True)


def attack(
    name: str, rule: str, make: Maker | bytes, message: str, doors: frozenset[str] = EVERY,
    *, more: bytes | None = None, peer: bool = False,  # one that ends by itself: a peer's patience is what it is
) -> Attack:  # fmt: skip
    made = sent(make, more, "late" if rule == "W8" else "reply") if isinstance(make, bytes) else make
    return catalogue.attack(name, rule, made, SourceError, message, doors, PEERS if peer else ())


WHOLE = ("200 OK", 'ETag: "1"')
CHUNKS = (*PART, "Transfer-Encoding: chunked")
IN_CHUNKS = r"sends it in chunks \(Transfer-Encoding\)"
CHUNKED = (*WHOLE, "Transfer-Encoding: chunked")
UNREADABLE = "tried 5 times: HTTP status 400"
TWICE = "headers {} that say different things; download|HTTP status 400"  # as releases of aiohttp have it themselves
TOO_LATE = "only 0 of [0-9]+ bytes came in [0-9]+ seconds; the server or the line is too slow"
NO_RANGES = "does not do ranges|was replaced or changed"
MORE = "sent more than the [0-9]+ bytes that were asked for"
COOKIES = [f"Set-Cookie: n@N@_{i}={'v' * 4000}" for i in range(120)]

ATTACKS: tuple[Attack, ...] = (
    encoded("gzip", "gzip"),
    encoded("gzip behind identity", "identity", "gzip"),
    encoded("gzip behind nothing", "", "gzip"),
    encoded("gzip before identity", "gzip", "identity"),
    encoded("identity and gzip in one header", "identity, gzip"),
    encoded("deflate behind identity", "identity", "deflate", window=15),
    encoded("of a whole file", "identity", "gzip", status=WHOLE),
    attack("two lengths", "W2", reply(*WHOLE, "Content-Length: 9", "Content-Length: 70000"),
           TWICE.format("Content-Length"),
           more=ZEROS),
    attack("two ranges", "W2", reply(*PART, "Content-Range: bytes 0-1/2"), TWICE.format("Content-Range"), more=ZEROS),
    attack("two ETags", "W2", reply(*PART, 'ETag: "2"'), TWICE.format("ETag"), more=ZEROS),
    attack("two places to go on to", "W2", reply("302 Found", "Location: /a", "Location: /b"), TWICE.format("Location"),
           more=ZEROS),
    attack("no ranges, and no end", "W3", reply(*WHOLE), NO_RANGES, more=ZEROS),
    attack("no ranges, in chunks without an end", "W3", reply(*CHUNKED), NO_RANGES,
           more=b"1000\r\n" + bytes(4096) + b"\r\n"),
    attack("no ranges, and 9 GB", "W3", reply(*WHOLE, "Content-Length: 9000000000"), NO_RANGES, more=ZEROS),
    attack("no ranges, and more than its length", "W5", reply(*WHOLE, "Content-Length: 600"),
           f"not its magic|{UNREADABLE}", frozenset(), more=ZEROS),  # which of them depends on what comes together
    attack("an error without an end", "W3", reply("418 No"), "answered HTTP 418 and not 206", more=ZEROS),
    attack("busy without an end", "W3", reply("503 Busy"), "tried 5 times: HTTP 503", more=ZEROS),
    attack("another range", "W4", reply("206 Part", "Content-Range: bytes 7-9/100"),
           "answered the range 'bytes 7-9/100'",
           peer=True),
    attack("a range in other digits", "W4", reply("206 Part", "Content-Range: bytes \u0660-\u0669/\u0661\u0660\u0660"),
           "answered the range '|HTTP status 400"),
    attack("a range of a file that has no size", "W4", reply("206 Part", "Content-Range: bytes 0-9/*"),
           "answered the range"),
    attack("a range without an end", "W5", reply(*PART), MORE, more=ZEROS),
    attack("a range in chunks without an end", "W13", reply(*CHUNKS), IN_CHUNKS,
           more=b"1000\r\n" + bytes(4096) + b"\r\n"),
    attack("a chunk's extension without an end", "W13", reply(*CHUNKS, body=b"5;"), IN_CHUNKS, more=b"a" * (1 << 16)),
    attack("a chunk's length without an end", "W13", reply(*CHUNKS), IN_CHUNKS, more=b"0" * (1 << 16)),
    attack("empty lines for ever", "W8", b"\r\n", TOO_LATE, more=b"\r\n" * 1000),
    attack("a range cut short", "W6", reply(*PART, "Content-Length: @LENGTH@", body=b"x"), "tried 5 times", peer=True),
    attack("another version", "W7", reply("206 Part", "Content-Range: @RANGE@", 'ETag: "2"'),
           f"was replaced or changed|{MORE}",
           LATER, more=ZEROS),
    attack("nothing but the first byte", "W6", b"H", "tried 5 times: Server disconnected"),
    attack("nothing, for ever", "W8", b"H", TOO_LATE, more=b""),
    attack("100 Continue for ever", "W8", b"H", TOO_LATE, more=b"TTP/1.1 100 Continue\r\n\r\nH" * 2000),
    attack("103 Early Hints for ever", "W8", b"H", TOO_LATE, more=reply("103 Hints", "Link: " + "x" * 4000)[1:] + b"H"),
    attack("lengths of chunks for ever", "W3", reply(*CHUNKED, body=b"1;"), NO_RANGES, more=b"x" * 1000),
    attack("redirects in a circle", "W9", reply("302 Found", f"Location: /{NAME}", "Content-Length: 0"),
           "too many redirects"),
    attack("a redirect to a file", "W9", reply("302 Found", "Location: file:///etc/passwd"), "is no http URL",
           more=ZEROS),
    attack("a redirect without an end", "W9", reply("302 Found", f"Location: /{NAME}"), "too many redirects",
           more=ZEROS),
    attack("headers without an end", "W10", b"HTTP/1.1 206 Partial\r\n", UNREADABLE,
           more=b"X: yyyyyyyyyyyy\r\n" * 1000),
    attack("a header without an end", "W10", b"HTTP/1.1 206 Partial\r\nX: ", UNREADABLE, more=b"y" * 10_000),
    attack("a length with a sign", "W10", reply(*WHOLE, "Content-Length: +600"), UNREADABLE, more=ZEROS),
    attack("a length and a coding for the way", "W10", reply(*CHUNKED, "Content-Length: 600"), UNREADABLE, more=ZEROS),
    attack("a coding for the way that is unknown", "W10", reply(*WHOLE, "Transfer-Encoding: x", "Content-Length: 600"),
           UNREADABLE, more=ZEROS),
    attack("cookies without an end", "W11", reply("302 Found", f"Location: /{NAME}", *COOKIES, "Content-Length: 0"),
           "more than 300 cookies|too many redirects"),  # newer releases of aiohttp keep fewer
    attack("an exabyte", "W12", reply("206 Part", f"Content-Range: bytes 0-63/{1 << 60}"), "which no archive has",
           FIRST,
           more=ZEROS),
)  # fmt: skip
