"""A web server for one archive: its bytes by ranges, and the page that looks into it.

Knows which files there are to be had (none but the archive, the samples, and those of the page), under which headers,
and who may ask. HTTP is aiohttp's. What the page does is left to the page, `web/page/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from zcrecord.codec.layout import MAGIC
from zcrecord.errors import SourceError, UnsupportedError, missing_package
from zcrecord.record.load import load_record

__all__ = ["PORT", "is_loopback", "serve"]

PORT = 8000  # where nobody asks for another, and it is free
_WEB = Path(__file__).parents[1] / "web"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked about each time: the archive may be replaced
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_HOST = re.compile(r"[A-Za-z0-9._:\[\]%-]{0,261}")  # a name of at most 253 characters, and a port
_LEAVE = 1.0  # seconds that answers have to end when the server does


def serve(
    source: str | os.PathLike[str],
    *,
    samples: str | os.PathLike[str] | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    started: Callable[[str], object] | None = None,
    failed: Callable[[str], object] | None = None,
) -> None:
    """Serve an archive and its page until SIGTERM, or Ctrl-C, which raises; reads nothing that nobody asks for.

    What is answered is the file as it is then: one that was replaced has another ETag, by which a reader notices.

    Args:
        source: an archive that is a file of its own.
        samples: an archive with inputs (`images` or `inputs`) and `labels`, for a model that the page can run.
        host: where to listen. On a loopback address, requests that name another host are refused: a page from
            elsewhere whose name was made to point here (DNS rebinding) gets nothing.
        port: 0 for any that is free; None for 8000, or any if that is taken.
        started: called with the URL as soon as there is something to be had of it.
        failed: called, in a line, with what the server did wrong itself. A request that makes no sense is not told:
            it is answered with its status.

    Raises:
        SourceError: a file cannot be read; the address is not to be had. FormatError: it is no valid archive.
        UnsupportedError: it is packed, or attached to a program; the samples have other tensors. DependencyError:
            aiohttp is absent. KeyboardInterrupt: after SIGINT, when all answers have ended or were cut off.
    """
    web = _aiohttp()
    files = {"archive": Path(source), **({"samples": Path(samples)} if samples is not None else {})}
    for name, path in files.items():
        _check(path, samples=name == "samples")
    listening = _listen(host, port)
    with listening:
        app = _application(web, files, local=is_loopback(host))

        async def begin(_: Any) -> None:
            if started is not None:
                started(_url(host, listening.getsockname()[1]))

        app.on_startup.append(begin)
        with _ended_by_signals(web, app), _in_lines(web, failed or (lambda _: None)):
            web.run_app(app, sock=listening, print=None, access_log=None, shutdown_timeout=_LEAVE, handle_signals=False)


@contextlib.contextmanager
def _in_lines(web: Any, tell: Callable[[str], object]) -> Iterator[None]:
    """Have aiohttp, which logs a traceback for each request that it cannot read, tell only faults, in a line each."""
    from aiohttp.http import HttpProcessingError  # here, as `web`

    theirs = (HttpProcessingError, web.RequestPayloadError, ConnectionError, TimeoutError)

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            if not isinstance(error, theirs):
                tell(record.getMessage() if error is None else f"{type(error).__name__}: {error}")

    logger, lines = logging.getLogger("aiohttp.server"), Lines(logging.WARNING)
    logger.addHandler(lines)
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(lines)


@contextlib.contextmanager
def _ended_by_signals(web: Any, app: Any) -> Iterator[None]:
    """Have SIGTERM end an application, and SIGINT, which raises a KeyboardInterrupt when it has ended.

    aiohttp tells nobody which it was, and one that comes while the event loop is made would leave half of it.
    """
    seen: list[int] = []
    loops: list[asyncio.AbstractEventLoop] = []

    def stop() -> None:
        raise web.GracefulExit

    def end(number: int, _: Any) -> None:
        seen.append(number)
        for loop in loops if len(seen) == 1 else ():
            loop.call_soon_threadsafe(stop)

    async def begin(_: Any) -> None:
        loops.append(asyncio.get_running_loop())
        if seen:
            loops[0].call_soon(stop)

    app.on_startup.append(begin)
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]  # as of nohup
        before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if seen and seen[0] == signal.SIGINT:
        raise KeyboardInterrupt


def _aiohttp() -> Any:
    try:
        from aiohttp import web  # here, because it is an extra
    except ImportError as error:
        raise missing_package("aiohttp", extra="serve") from error
    return web


def _check(path: Path, *, samples: bool) -> None:
    """Check an archive before its page is served."""
    with load_record(path) as record:
        fits = not samples or ("labels" in record and ("images" in record or "inputs" in record))
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            what = "is packed or attached to a program, and browsers read plain archives: unpack or detach it first"
            raise UnsupportedError(what, path=os.fspath(path))
    if not fits:
        what = "samples are tensors `images` (or `inputs`) and `labels`, this has not both"
        raise UnsupportedError(what, path=os.fspath(path))


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _listen(host: str, port: int | None) -> socket.socket:
    asked = PORT if port is None else port
    where = f"{host} port {asked}: cannot listen there"
    if asked > 0xFFFF:
        raise SourceError(f"{where}: ports end at 65535")  # the resolver would take the low 16 bits
    try:
        family, _, _, _, address = socket.getaddrinfo(host, asked, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise
            return socket.create_server((address[0], 0), family=family)
    except (OSError, UnicodeError) as error:
        number = None if isinstance(error, UnicodeError | socket.gaierror) else error.errno
        why = str(getattr(error, "strerror", error)) if number is None else os.strerror(number)
        hint = "; --port 0 takes a free one" if asked and number in (errno.EADDRINUSE, errno.EACCES) else ""
        raise SourceError(f"{where}: {why}{hint}", errno=number) from error


def _url(host: str, port: int) -> str:
    bare = host.strip("[]")
    if bare in ("0.0.0.0", "::", ""):  # noqa: S104  # what is told, not where it listens
        bare = socket.gethostname()
    return f"http://[{bare}]:{port}/" if ":" in bare else f"http://{bare}:{port}/"


def _application(web: Any, files: dict[str, Path], *, local: bool) -> Any:
    """Return the HTTP application: each file has a route of its own, and nothing else is served."""

    @web.middleware  # type: ignore[untyped-decorator]
    async def guard(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        if not _makes_sense(request):
            raise web.HTTPBadRequest(text="This request has headers that make no sense.")
        if local and not _names_this_machine(request.headers.get("Host", "")):
            raise web.HTTPMisdirectedRequest(text="This server is for programs on its own machine: ask for localhost.")
        return await handler(request)

    async def prepare(_: Any, response: Any) -> None:
        response.headers.update(_HEADERS)

    async def about(_: Any) -> Any:
        name = os.fsencode(files["archive"].name).decode("utf-8", "replace")
        return web.json_response({"name": name, "samples": "samples" in files})

    app = web.Application(middlewares=[guard])
    app.on_response_prepare.append(prepare)
    app.router.add_get("/about.json", about)
    for name, path in files.items():
        app.router.add_get(f"/{name}.zcr", _answering(web, path, "application/octet-stream"))
    for path in sorted(p for p in (*_WEB.iterdir(), *(_WEB / "page").iterdir()) if p.suffix in _TYPES):
        place = "" if path.name == "index.html" else path.relative_to(_WEB).as_posix()
        app.router.add_get(f"/{place}", _answering(web, path, f"{_TYPES[path.suffix]}; charset=utf-8"))
    return app


def _makes_sense(request: Any) -> bool:
    """Return True if headers are text and those that are used can be parsed; otherwise aiohttp fails later."""
    hosts = request.headers.getall("Host", [])
    if len(hosts) > 1 or any(not _HOST.fullmatch(host) for host in hosts):
        return False
    try:
        for value in request.headers.values():
            value.encode()  # not text: as lone surrogates
        _ = request.if_modified_since, request.if_unmodified_since, request.if_range
    except (ValueError, OverflowError):  # a year beyond all
        return False
    return True


def _names_this_machine(host: str) -> bool:
    """Return True if a Host header names a loopback address; its port may be that of a tunnel."""
    name, _, port = host.rpartition(":")
    return is_loopback(name if name and port.isdecimal() else host)


def _answering(web: Any, path: Path, kind: str) -> Callable[[Any], Awaitable[Any]]:
    class Answer(web.FileResponse):  # type: ignore[misc]
        """The file itself: no compressed sibling of it, and no range of another version of it."""

        async def prepare(self, request: Any) -> Any:
            headers = request.headers.copy()
            headers.popall("Accept-Encoding", None)  # aiohttp would send what is in PATH.gz
            wanted = headers.get("If-Range", "").strip()
            if wanted.startswith(('"', "W/")) and wanted != _tag(path):  # aiohttp knows dates alone
                headers.popall("Range", None)
            return await super().prepare(request.clone(headers=headers))

    async def answer(_: Any) -> Any:
        return Answer(path, headers={"Content-Type": kind})

    return answer


def _tag(path: Path) -> str:
    """Return a file's ETag as aiohttp makes it; nothing without a file."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
