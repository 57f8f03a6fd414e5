"""`zcrecord serve`: a web server for one archive, until Ctrl-C: its bytes by ranges, and the page that shows it.

Serves only the archive, the samples, the page's files, and onnxruntime-web from a folder; sets the headers, and refuses
requests from other hosts. aiohttp does HTTP; the page is `web/page`. Each response is from the file as it is at that
time; a replaced file has another ETag. Malformed requests get an error status, and are not reported.
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
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from zcrecord.archive.archive import require_one_file
from zcrecord.codec.layout import MAGIC
from zcrecord.errors import SourceError, UnsupportedError, missing_package
from zcrecord.record.load import load_record
from zcrecord.storage.files import is_url, read_start

from .endings import print_message
from .parsers import Arguments, Parser, natural
from .render import Printer
from .stdio import check_file
from .web_runtime import WebRuntime, web_runtime

_PORT = 8000  # the default, if it is free
_WEB = Path(__file__).parents[1] / "web"
_PAGE_FOLDERS = "reader", "view", "page"  # of the folder `web`: all that the page loads
_TYPES = {".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css"}
# onnxruntime-web comes as bytes that the page has checked (blob:), and compiles WebAssembly.
_POLICY = (
    "default-src 'none'; script-src 'self' blob: 'wasm-unsafe-eval'; style-src 'self'; connect-src 'self'{connect}; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",  # cached, but validated at each use: the archive may be replaced
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_HOST = re.compile(r"[A-Za-z0-9._:\[\]%-]{0,261}")  # a name of at most 253 characters, and a port
_LEAVE = 1.0  # seconds for responses to finish when the server stops


def serve_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord serve`."""
    parser.add_argument("file", metavar="FILE", help="an archive; not an archive attached to a program")
    about = "port to listen on; 0 for any free port (default: 8000, or any free port if 8000 is taken)"
    parser.add_argument("--port", type=natural, metavar="N", help=about)
    about = "address to listen on (default: 127.0.0.1); other machines may then read all of FILE"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=about)
    about = "an archive with the tensors images (or inputs) and labels; the page runs the model on them, if it can"
    parser.add_argument("--samples", metavar="ARCHIVE", help=about)
    about = """a folder of the npm package onnxruntime-web, which runs the model; without it the browser fetches that
        from cdn.jsdelivr.net when the model is run"""
    parser.add_argument("--onnxruntime-web", metavar="FOLDER", help=about)
    parser.flag("--open", help="open the page in a browser")


def serve(args: Arguments) -> int:
    """Serve an archive, and a page that shows it in a browser, until Ctrl-C. Only programs on this machine can connect,
    unless --host names another address."""
    if args.file == "-" or is_url(args.file):
        args.refuse("serve needs a file, not standard input or a URL")
    files = {"archive": Path(args.file)}
    if args.samples is not None:
        files["samples"] = Path(args.samples)
    for path in files.values():
        check_file(os.fspath(path))

    try:
        from aiohttp import web  # here, because it is an extra
    except ImportError as error:
        raise missing_package("aiohttp", extra="serve") from error
    for name, path in files.items():
        _check_archive(path, is_samples=name == "samples")
    runtime = web_runtime(args.onnxruntime_web)
    with _listen(args.host, args.port) as listening:
        app = _application(web, files, runtime, is_local=is_loopback(args.host))
        url = _url(args.host, listening.getsockname()[1])
        fault = "error: a fault of serve itself, {}; please report it"
        with _reporting_faults(lambda reason: print_message("zcrecord", fault.format(reason))):
            signal_number = asyncio.run(_run(web, app, listening, lambda: _announce(args, url)))
    if signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _announce(args: Arguments, url: str) -> None:
    """Print the URL at which the server answers, and open it in a browser if that was asked for."""
    if not is_loopback(args.host):
        print_message("zcrecord", f"every machine that can connect to {args.host} can read all of {args.file}")
    Printer(sys.stdout).line(url)
    if sys.stdout is not None:  # None: standard output is closed
        sys.stdout.flush()  # a program at the other end of a pipe may wait for the URL
        if sys.stdout.isatty():
            print_message("zcrecord", "Ctrl-C ends the server")
    if args.open:
        import webbrowser  # here, because few use --open

        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # it may block until they end


async def _run(web: Any, app: Any, listening: socket.socket, announce: Callable[[], object]) -> int:
    """Run an application until SIGTERM or SIGINT; return the signal's number. Calls `announce` once it answers."""
    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    numbers: list[int] = []

    def end(number: int, _: Any) -> None:
        numbers.append(number)
        loop.call_soon_threadsafe(signalled.set)

    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_LEAVE)
    await runner.setup()
    handlers: dict[int, Any] = {}
    try:
        await web.SockSite(runner, listening).start()
        if threading.current_thread() is threading.main_thread():
            for signal_number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signal_number) != signal.SIG_IGN:  # as nohup has it
                    handlers[signal_number] = signal.signal(signal_number, end)
        announce()
        await signalled.wait()
    finally:
        await runner.cleanup()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return numbers[0]


@contextlib.contextmanager
def _reporting_faults(report: Callable[[str], object]) -> Iterator[None]:
    """Report a fault in one line, instead of aiohttp's traceback; leave out those of clients, as malformed requests."""
    from aiohttp.http import HttpProcessingError  # here, as below
    from aiohttp.web import RequestPayloadError

    client_faults = (HttpProcessingError, RequestPayloadError, ConnectionError, TimeoutError)

    def report_instead(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno >= logging.WARNING and not isinstance(error, client_faults):
            report(record.getMessage() if error is None else f"{type(error).__name__}: {error}")
        return False  # so no handler prints it

    logger = logging.getLogger("aiohttp.server")
    logger.addFilter(report_instead)
    try:
        yield
    finally:
        logger.removeFilter(report_instead)


def _check_archive(path: Path, *, is_samples: bool) -> None:
    """Raise RecordError unless a file is an archive that the page can read; samples need inputs and labels."""
    with load_record(path) as record:
        require_one_file(record.archive, "serve")
        has_samples = "labels" in record and ("images" in record or "inputs" in record)
    if read_start(os.fspath(path), len(MAGIC)) != MAGIC:
        fault = "is packed or attached to a program, and browsers read plain archives: unpack or detach it first"
        raise UnsupportedError(fault, path=os.fspath(path))
    if is_samples and not has_samples:
        fault = "samples need the tensors `images` (or `inputs`) and `labels`; one of the two is missing"
        raise UnsupportedError(fault, path=os.fspath(path))


def is_loopback(host: str) -> bool:
    """Return True if an address, or a name such as localhost, is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens; with `port` None at port 8000 or, if that is in use, at any free one."""
    tried_port = _PORT if port is None else port
    where = f"{host} port {tried_port}: cannot listen there"
    if tried_port > 0xFFFF:
        raise SourceError(f"{where}: the largest port is 65535")  # the resolver would take the low 16 bits
    try:
        family, _, _, _, address = socket.getaddrinfo(host, tried_port, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise
            return socket.create_server((address[0], 0), family=family)
    except (OSError, UnicodeError) as error:
        number = None if isinstance(error, UnicodeError | socket.gaierror) else error.errno
        reason = str(getattr(error, "strerror", error)) if number is None else os.strerror(number)
        hint = "; --port 0 takes a free port" if tried_port and number in (errno.EADDRINUSE, errno.EACCES) else ""
        raise SourceError(f"{where}: {reason}{hint}", errno=number) from error


def _url(host: str, port: int) -> str:
    """Return the page's URL; of an address that stands for all of this machine's, the URL has the machine's name."""
    bare = host.strip("[]")
    if bare in ("0.0.0.0", "::", ""):  # noqa: S104  # for the URL, not to listen on
        bare = socket.gethostname()
    return f"http://[{bare}]:{port}/" if ":" in bare else f"http://{bare}:{port}/"


def _application(web: Any, files: dict[str, Path], runtime: WebRuntime, *, is_local: bool) -> Any:
    """Return the web application, with a route for each file, and no others; if local, for this machine's names."""

    @web.middleware  # type: ignore[untyped-decorator]
    async def guard(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        if not _has_valid_headers(request):
            raise web.HTTPBadRequest(text="This request has invalid headers.")
        if is_local and not _names_this_machine(request.headers.get("Host", "")):
            raise web.HTTPMisdirectedRequest(text="This server is for programs on its own machine: ask for localhost.")
        return await handler(request)

    connect = f" {runtime.connect}" if runtime.connect else ""
    headers = {**_HEADERS, "Content-Security-Policy": _POLICY.format(connect=connect)}

    async def prepare(_: Any, response: Any) -> None:
        response.headers.update(headers)

    async def about(_: Any) -> Any:
        name = os.fsencode(files["archive"].name).decode("utf-8", "replace")
        return web.json_response({"name": name, "samples": "samples" in files, "runtime": runtime.about})

    app = web.Application(middlewares=[guard])
    app.on_response_prepare.append(prepare)
    app.router.add_get("/about.json", about)
    for route, (path, content_type) in _served_files(files, runtime).items():
        app.router.add_get(f"/{route}", _file_handler(web, path, content_type))
    return app


def _served_files(files: dict[str, Path], runtime: WebRuntime) -> dict[str, tuple[Path, str]]:
    """Return the path and content type of each file that is served, by its route: archives, page, onnxruntime-web."""
    served = {f"{name}.zcr": (path, "application/vnd.zcrecord") for name, path in files.items()}
    for path in (path for folder in _PAGE_FOLDERS for path in (_WEB / folder).iterdir() if path.suffix in _TYPES):
        route = "" if path.name == "index.html" else path.relative_to(_WEB).as_posix()
        served[route] = path, f"{_TYPES[path.suffix]}; charset=utf-8"
    runtime_files = runtime.files.items()
    return served | {route: (path, _TYPES.get(path.suffix, "application/wasm")) for route, path in runtime_files}


def _has_valid_headers(request: Any) -> bool:
    """Return True if a request's headers are text, and aiohttp can parse those it uses."""
    hosts = request.headers.getall("Host", [])
    if len(hosts) > 1 or any(not _HOST.fullmatch(host) for host in hosts):
        return False
    try:
        for value in request.headers.values():
            value.encode()  # not text: as lone surrogates
        _ = request.if_modified_since, request.if_unmodified_since, request.if_range
    except (ValueError, OverflowError):  # such as a year that no date has
        return False
    return True


def _names_this_machine(host: str) -> bool:
    """Return True if a Host header names a loopback address; the port may be a tunnel's."""
    name, _, port = host.rpartition(":")
    return is_loopback(name if name and port.isdecimal() else host)


def _file_handler(web: Any, path: Path, content_type: str) -> Callable[[Any], Awaitable[Any]]:
    """Return a handler that responds with a file as it is at that time."""

    class Response(web.FileResponse):  # type: ignore[misc]
        """Response with the file itself, not a compressed sibling; a range only of the version in If-Range."""

        async def prepare(self, request: Any) -> Any:
            headers = request.headers.copy()
            headers.popall("Accept-Encoding", None)  # aiohttp would send the bytes of PATH.gz
            version = headers.get("If-Range", "").strip()
            if version.startswith(('"', "W/")) and version != _etag(path):  # aiohttp compares dates only
                headers.popall("Range", None)
            return await super().prepare(request.clone(headers=headers))

    async def respond(_: Any) -> Any:
        return Response(path, headers={"Content-Type": content_type})

    return respond


def _etag(path: Path) -> str:
    """Return a file's ETag as aiohttp makes it; empty if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
