"""Files on HTTP servers: range requests over the session of fsspec's HTTP file system.

fsspec's own `cat_file` accepts whatever the server sends for a range: the whole file, another range, another version.
Here every answer's headers are checked before a byte of it is taken, and its bytes are written straight to their place.
They are counted as they come and never decompressed, so that a server cannot make this process use more memory. If a
server redirects to another server, the user's headers, cookies and passwords are not sent there.
"""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from zcrecord.errors import Advice, SourceError

from .file import MOST_AT_ONCE, TRIES, RemoteFile, Request, retry_delay
from .ranges import NEAR

__all__ = ["HttpFile"]

T = TypeVar("T")

SMALL = 8 << 20  # bytes of a file that is fetched whole from a server without range requests
_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses of servers that are busy or about to restart
_MOVED = (301, 302, 303, 307, 308)
_MOST_MOVES = 10  # redirects that are followed; aiohttp has the same limit, browsers 20
_SHARED = frozenset(  # options of aiohttp that hold for a server that a redirect leads to; others may have secrets
    ("timeout", "ssl", "proxy", "proxy_auth", "proxy_headers", "trust_env", "auto_decompress", "read_bufsize")
)
_CONNECT, _SILENCE = 5.0, 60.0  # seconds to wait for a connection, and for the next byte
_PATIENCE = TRIES * _SILENCE  # seconds for one request with all its tries, however a server delays
_FIRST = 60.0  # of them, for a server's first answer of all: it may be none
_SLOWEST = 16 << 10  # bytes a second, by which a long request gets more time
_MOST_COOKIES = 300  # kept by one session; older releases of aiohttp set no limit
_LEAVE = 5.0  # seconds for requests to end when the caller is interrupted
_DOWNLOAD = "download the file and load that"
_LENGTH = re.compile("[0-9]{1,19}")
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,19})-([0-9]{1,19})|\*)/([0-9]{1,19}|\*)")


class _AgainError(Exception):
    """The request should be tried again, after as many seconds as the server asked for."""

    def __init__(self, what: str, seconds: float = 0.0) -> None:
        super().__init__(what)
        self.seconds = seconds


class _Hop:
    """One step of a request, the first or after a redirect: URL, session, headers, options of aiohttp."""

    def __init__(self, at: Any, session: Any, headers: Mapping[str, str], options: dict[str, Any]) -> None:
        self.at, self.session, self.headers, self.options = at, session, headers, options


class _Transfer:
    """One range on its way: the memory to fill, and the bytes received so far; a further try goes on from there."""

    def __init__(self, offset: int, target: memoryview) -> None:
        self.target, self.done, self._offset = target, 0, offset
        self.grant: Callable[[], None] | None = None  # extends the time limit, once an answer has begun

    @property
    def at(self) -> int:
        return self._offset + self.done

    @property
    def left(self) -> int:
        return len(self.target) - self.done

    def shorten(self, size: int) -> None:
        self.target = self.target[: size - self._offset]

    def put(self, chunk: bytes) -> None:
        end = self.done + len(chunk)
        self.target[self.done : end] = chunk
        self.done = end


class HttpFile(RemoteFile):
    """A file on an HTTP server."""

    _bare: tuple[Any, Any] | None = None  # fsspec's file system, and a session for other servers than its own

    def start(self, nbytes: int) -> memoryview:
        """Fetch the first bytes; all of a small file from a server without range requests."""
        first = bytearray(nbytes)
        part = _Transfer(0, memoryview(first))
        whole: memoryview | None = self._run(self._try(part, first=True))
        return memoryview(first)[: part.done] if whole is None else whole

    def fill(self, requests: list[Request]) -> None:
        """Fetch the bytes of all requests, several at a time."""
        self._run(self._all([_Transfer(offset, target) for offset, target in requests]))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in fsspec's own thread; after an interrupt, wait until nothing is written any more."""
        ended = threading.Event()

        async def to_its_end() -> T:
            try:
                return await work
            finally:
                ended.set()

        fs, _ = self.connection()
        future = asyncio.run_coroutine_threadsafe(to_its_end(), fs.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            ended.wait(_LEAVE)
            raise

    async def _all(self, parts: list[_Transfer]) -> None:
        gate = asyncio.Semaphore(MOST_AT_ONCE)

        async def one(part: _Transfer) -> None:
            async with gate:
                await self._try(part)

        tasks = [asyncio.ensure_future(one(part)) for part in parts]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _try(self, part: _Transfer, *, first: bool = False) -> memoryview | None:
        """Repeat a request until all bytes have come; returns the whole file if the first answer had that."""
        nbytes, clock = part.left, asyncio.get_running_loop().time
        start = clock()
        try:
            async with asyncio.timeout(_PATIENCE if self.size >= 0 else min(_PATIENCE, _FIRST)) as limit:
                part.grant = lambda: limit.reschedule(start + _PATIENCE + nbytes / _SLOWEST)
                return await self._repeat(part, first=first)
        except TimeoutError:
            what = f"cannot be read: only {part.done} of {nbytes} bytes came in {clock() - start:.0f} seconds"
            raise SourceError(f"{what}; the server or the line is too slow", path=self.shown) from None

    async def _repeat(self, part: _Transfer, *, first: bool) -> memoryview | None:
        import aiohttp

        tried = 0
        while True:
            before = part.done
            try:
                whole = await self._ask(part, first=first)
                if whole is not None or not part.left:
                    return whole
                raise _AgainError(f"only {part.done} of {len(part.target)} bytes came")
            except (aiohttp.ClientSSLError, aiohttp.InvalidURL) as error:
                raise SourceError(
                    f"cannot be read: {_said(error)}", path=self.shown
                ) from None  # its text may have the query
            except (_AgainError, aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                tried = 1 if part.done - before >= NEAR else tried + 1  # a server may send less at a time
                if tried == TRIES:
                    raise self.failed(_said(error)) from None
                await asyncio.sleep(retry_delay(tried, getattr(error, "seconds", 0.0)))
            except (TypeError, ValueError):  # their texts may have secrets
                what = "no request can be made of it; do the URL and its storage options fit, headers as text?"
                raise SourceError(what, path=self.shown) from None

    async def _ask(self, part: _Transfer, *, first: bool) -> memoryview | None:
        """Make one request, following redirects, and write its bytes to their place."""
        hop = await self._first_hop(f"bytes={part.at}-{part.at + part.left - 1}")
        follow = hop.options.pop("allow_redirects", True)
        for _ in range(hop.options.pop("max_redirects", _MOST_MOVES) + 1):
            ours: dict[str, Any] = {"allow_redirects": False, "auto_decompress": False}
            async with hop.session.get(hop.at, headers=hop.headers, **{**hop.options, **ours}) as answer:
                if len(hop.session.cookie_jar) > _MOST_COOKIES:
                    hop.session.cookie_jar.clear()  # the session's cookies of other servers go, too
                    raise SourceError(f"the server sets more than {_MOST_COOKIES} cookies", path=self.shown)
                if answer.status not in _MOVED or not follow:
                    return await self._answered(answer, part, first=first)
                location = self._header(answer.headers, "Location")
            hop = await self._redirected(hop, location)
        raise SourceError("cannot be read: too many redirects", path=self.shown)

    async def _first_hop(self, byte_range: str) -> _Hop:
        """Return the first step of a range request; it forbids encodings, whose bytes are not the file's."""
        import aiohttp

        fs, url = self.connection()
        options = dict(fs.kwargs)
        ours = {"Range": byte_range, "Accept-Encoding": "identity"}
        theirs = {k: v for k, v in dict(options.pop("headers", {})).items() if str(k).title() not in ours}
        if "timeout" not in fs.client_kwargs:
            options.setdefault("timeout", aiohttp.ClientTimeout(sock_connect=_CONNECT, sock_read=_SILENCE))
        return _Hop(fs.encode_url(url), await fs.set_session(), {**theirs, **ours}, options)

    async def _redirected(self, hop: _Hop, location: str) -> _Hop:
        """Return the next step of a request; to another server no headers, cookies or passwords of the user's are sent.

        `params` are added to the query of the first request alone, as aiohttp does: the redirect is the answer to them.
        """
        try:
            at = hop.at.join(type(hop.at)(location, encoded=True))
            if at.scheme not in ("http", "https") or not location:
                raise ValueError
            same = at.origin() == hop.at.origin()
        except (TypeError, ValueError):
            raise SourceError("cannot be read: the redirect is no http URL", path=self.shown) from None
        options = {name: value for name, value in hop.options.items() if name != "params"}
        if same:
            if at.user is None and hop.at.user is not None:  # an absolute URL does not repeat them
                at = at.with_user(hop.at.user).with_password(hop.at.password)
            return _Hop(at, hop.session, hop.headers, options)
        ours = {name: hop.headers[name] for name in ("Range", "Accept-Encoding")}
        options = {name: value for name, value in options.items() if name in _SHARED}
        return _Hop(at, await self._bare_session(hop.session), ours, options)

    async def _bare_session(self, session: Any) -> Any:
        """Return a session without the user's headers, cookies and passwords: fsspec's own, or a new one."""
        fs, _ = self.connection()
        if _SHARED.issuperset(fs.client_kwargs):
            return session
        if self._bare is None or self._bare[0] is not fs:
            kept = {name: value for name, value in fs.client_kwargs.items() if name in _SHARED}
            self._bare = fs, await fs.get_client(loop=fs.loop, **kept)
            weakref.finalize(self, fs.close_session, fs.loop, self._bare[1])
        return self._bare[1]

    async def _answered(self, answer: Any, part: _Transfer, *, first: bool) -> memoryview | None:
        self._check_status(answer.status, answer.headers)
        codings = [c.strip() for c in ",".join(answer.headers.getall("Content-Encoding", ())).split(",")]
        if not {c.lower() for c in codings} <= {"", "identity"} and answer.status != 416:
            encoded = f"the server sends it encoded ({', '.join(filter(None, codings))}), which the request ruled out"
            raise SourceError(f"{encoded}; {_DOWNLOAD}", path=self.shown)
        if answer.status == 200:
            return await self._whole(answer, first)
        if answer.status == 416:
            return self._no_such_range(answer.headers, part, first=first)
        await self._take(answer, part)
        return None

    def _no_such_range(self, headers: Any, part: _Transfer, *, first: bool) -> memoryview:
        """Return the no bytes of an empty file; of any other file HTTP 416 is an error."""
        said = self._header(headers, "Content-Range")
        found = _CONTENT_RANGE.fullmatch(said)
        if found is not None and found[3] != "*":
            self.check_version(int(found[3]), *self._tag(headers))
            if first and not self.size:
                return memoryview(b"")
        reason = f"it says '{said}'" if said else "it does not say how many bytes it has"
        what = f"the server has no bytes [{part.at:#x}, {part.at + part.left:#x}) of it (HTTP 416), {reason}"
        raise SourceError(f"{what}; try again, or {_DOWNLOAD}", path=self.shown)

    def _check_status(self, status: int, headers: Mapping[str, str]) -> None:
        if status in (404, 410):
            raise self.missing()
        if status in (401, 403, 407):
            advice = Advice("give credentials in {}", "storage_options")
            raise SourceError(f"the server refused it (HTTP {status})", path=self.shown, advice=advice)
        if status in _AGAIN:
            seconds = headers.get("Retry-After", "")
            raise _AgainError(f"HTTP {status}", float(seconds) if seconds.isdecimal() else 0.0)
        if status not in (200, 206, 416):
            raise SourceError(f"the server answered HTTP {status} and not 206", path=self.shown)

    async def _whole(self, answer: Any, first: bool) -> memoryview:
        """Return a small file, all of which came in the place of a range."""
        length = self._header(answer.headers, "Content-Length")
        nbytes = int(length) if _LENGTH.fullmatch(length) else None
        if self.size >= 0:
            self.check_version(self.size if nbytes is None else nbytes, *self._tag(answer.headers))
        if not first or nbytes is None or nbytes > SMALL:
            size = "an unknown number of" if nbytes is None else f"all {nbytes}"
            what = f"the server does not do ranges (HTTP 200 in place of 206) and would send {size} bytes"
            raise SourceError(f"{what}; {_DOWNLOAD}", path=self.shown)
        whole = _Transfer(0, memoryview(bytearray(nbytes)))
        await self._pour(answer, whole)
        if whole.left:
            raise _AgainError(f"only {whole.done} of {nbytes} bytes came")
        self.check_version(nbytes, *self._tag(answer.headers))
        return whole.target

    async def _take(self, answer: Any, part: _Transfer) -> None:
        """Write a range to its place, after checking that it is the range asked for, of the same file."""
        said = self._header(answer.headers, "Content-Range")
        found = _CONTENT_RANGE.fullmatch(said)
        if found is None or found[1] is None or found[3] == "*" or int(found[1]) != part.at:
            what = f"the server answered the range '{said}' where bytes from {part.at} on were asked for"
            raise SourceError(f"{what}; {_DOWNLOAD}", path=self.shown)
        self.check_version(int(found[3]), *self._tag(answer.headers))
        if part.at + part.left > self.size:  # the first request, of a file that is shorter
            part.shorten(self.size)
        if part.grant is not None:
            part.grant()
        await self._pour(answer, part)

    async def _pour(self, answer: Any, part: _Transfer) -> None:
        """Write a body to its place as it comes; of one that is too long, one piece is read and refused.

        In chunks it is not read: their lengths and extensions go on for as long as the server likes, and count as none
        of its bytes.
        """
        if "Transfer-Encoding" in answer.headers:
            what = "the server sends it in chunks (Transfer-Encoding), and a range's length is known"
            raise SourceError(f"{what}; {_DOWNLOAD}", path=self.shown)
        async for chunk in answer.content.iter_any():
            if len(chunk) > part.left:
                what = f"the server sent more than the {len(part.target)} bytes that were asked for"
                raise SourceError(f"{what}; {_DOWNLOAD}", path=self.shown)
            part.put(chunk)

    def _tag(self, headers: Any) -> tuple[str | None, bool]:
        """Return the version tag, and True if an equal tag promises equal bytes.

        A weak ETag promises only equivalent content. A date has a resolution of one second; but a file that is replaced
        within a second was hardly read by anybody.
        """
        etag = self._header(headers, "ETag")
        return (etag, not etag.startswith("W/")) if etag else (self._header(headers, "Last-Modified") or None, True)

    def _header(self, headers: Any, name: str) -> str:
        """Return the value of a header, "" if it is not there.

        Raises:
            SourceError: it is there with two values, of which this reader could take one and a proxy the other.
        """
        values = {value.strip() for value in headers.getall(name, ())}
        if len(values) > 1:
            what = f"the server's answer has {len(values)} headers {name} that say different things"
            raise SourceError(f"{what}; {_DOWNLOAD}", path=self.shown)
        return values.pop() if values else ""


def _said(error: BaseException) -> str:
    """Return an error's reason, without secrets."""
    kind = type(error).__name__
    if isinstance(error, TimeoutError):
        return "no connection in time" if kind == "ConnectionTimeoutError" else "no answer in time"
    if kind == "ServerDisconnectedError":  # its text is a dump of an object of aiohttp's
        return "Server disconnected"
    if isinstance(error, ValueError) or "Redirect" in kind or "Url" in kind:  # their texts have the URL with its query
        return "the redirect is no http URL"
    if getattr(error, "status", 0):
        return f"HTTP status {getattr(error, 'status', 0)}"
    return str(error) or kind
