"""Files on HTTP servers: range requests over the session of fsspec's HTTP file system.

fsspec's own `cat_file` accepts any answer for a range: the whole file, another range, another version. Here headers are
checked first, and bytes, never decompressed, are counted as they are written to their place: a server cannot make this
process use more memory. Another server, after a redirect, gets no headers, cookies or passwords of the user.
"""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

from zcrecord.errors import Advice, SourceError

from .file import MOST_AT_ONCE, TRIES, RemoteFile, Request, retry_delay
from .ranges import NEAR

T = TypeVar("T")

SMALL = 8 << 20  # bytes of a file that is fetched whole from a server without range requests
_RETRIED_STATUSES = (408, 425, 429, 500, 502, 503, 504)  # statuses of servers that are busy or about to restart
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 10  # redirects that are followed; aiohttp has the same limit, browsers 20
_SHARED = frozenset(  # options of aiohttp that hold for a server that a redirect leads to; others may have secrets
    ("timeout", "ssl", "proxy", "proxy_auth", "proxy_headers", "trust_env", "auto_decompress", "read_bufsize")
)
_CONNECT, _SILENCE = 5.0, 60.0  # seconds to wait for a connection, and for the next byte
_PATIENCE = TRIES * _SILENCE  # seconds for one request with all its tries, however a server delays
_FIRST = 60.0  # seconds for a server's very first answer: there may be no server
_SLOWEST = 16 << 10  # bytes a second, by which a long request gets more time
_MOST_COOKIES = 300  # kept by one session; older releases of aiohttp set no limit
_GRACE = 5.0  # seconds for requests to end when the caller is interrupted
_DOWNLOAD = "download the file and load that"
_LENGTH = re.compile("[0-9]{1,19}")
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,19})-([0-9]{1,19})|\*)/([0-9]{1,19}|\*)")


class _RetryError(Exception):
    """The request should be tried again, after as many seconds as the server asked for."""

    def __init__(self, fault: str, seconds: float = 0.0) -> None:
        super().__init__(fault)
        self.seconds = seconds


class _Hop(NamedTuple):
    """One step of a request, the first or after a redirect."""

    url: Any
    session: Any
    headers: Mapping[str, str]
    options: dict[str, Any]  # of aiohttp


class _Transfer:
    """One range on its way: the memory to fill, and the bytes received so far; a further try goes on from there."""

    def __init__(self, offset: int, target: memoryview) -> None:
        self.target, self.received, self._offset = target, 0, offset
        self.extend: Callable[[], None] | None = None  # extends the time limit, once an answer has begun

    @property
    def offset(self) -> int:
        return self._offset + self.received

    @property
    def missing(self) -> int:
        return len(self.target) - self.received

    def write(self, chunk: bytes) -> None:
        end = self.received + len(chunk)
        self.target[self.received : end] = chunk
        self.received = end


class HttpFile(RemoteFile):
    """A file on an HTTP server."""

    _bare: tuple[Any, Any] | None = None  # fsspec's file system, and a session without secrets for other servers

    def start(self, nbytes: int) -> memoryview:
        """Fetch the first bytes; all of a small file from a server without range requests."""
        first = bytearray(nbytes)
        part = _Transfer(0, memoryview(first))
        whole: memoryview | None = self._run(self._fetch_in_time(part, first=True))
        return memoryview(first)[: part.received] if whole is None else whole

    def fill(self, requests: list[Request]) -> None:
        self._run(self._fetch_all([_Transfer(offset, target) for offset, target in requests]))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in fsspec's own thread; after an interrupt, wait until it writes no more bytes."""
        ended = threading.Event()

        async def work_and_report() -> T:
            try:
                return await work
            finally:
                ended.set()

        fs, _ = self.connection()
        future = asyncio.run_coroutine_threadsafe(work_and_report(), fs.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            ended.wait(_GRACE)
            raise

    async def _fetch_all(self, parts: list[_Transfer]) -> None:
        """Fetch several ranges, some at a time; an error of one ends all, before it is raised."""
        limit = asyncio.Semaphore(MOST_AT_ONCE)

        async def fetch(part: _Transfer) -> None:
            async with limit:
                await self._fetch_in_time(part)

        tasks = [asyncio.ensure_future(fetch(part)) for part in parts]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _fetch_in_time(self, part: _Transfer, *, first: bool = False) -> memoryview | None:
        """Fetch a range, in a limited time; return the whole file instead if the `first` request was answered so."""
        nbytes, clock = part.missing, asyncio.get_running_loop().time
        start = clock()
        try:
            async with asyncio.timeout(_PATIENCE if self.size >= 0 else min(_PATIENCE, _FIRST)) as limit:
                part.extend = lambda: limit.reschedule(start + _PATIENCE + nbytes / _SLOWEST)
                return await self._fetch_with_retries(part, first=first)
        except TimeoutError:
            fault = f"cannot be read: only {part.received} of {nbytes} bytes came in {clock() - start:.0f} seconds"
            raise SourceError(f"{fault}; the server or the line is too slow", path=self.shown) from None

    async def _fetch_with_retries(self, part: _Transfer, *, first: bool) -> memoryview | None:
        """Fetch a range; ask again after errors that may pass, at most TRIES times without progress."""
        import aiohttp

        tries = 0
        while True:
            received_before = part.received
            try:
                whole = await self._request(part, first=first)
                if whole is not None or not part.missing:
                    return whole
                raise _RetryError(f"only {part.received} of {len(part.target)} bytes came")
            except (aiohttp.ClientSSLError, aiohttp.InvalidURL) as error:
                # Not from the error: its text may have the query.
                raise SourceError(f"cannot be read: {_reason(error)}", path=self.shown) from None
            except (_RetryError, aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                has_progressed = part.received - received_before >= NEAR  # a server may send less at a time
                tries = 1 if has_progressed else tries + 1
                if tries == TRIES:
                    raise self.failed_error(_reason(error)) from None
                await asyncio.sleep(retry_delay(tries, getattr(error, "seconds", 0.0)))
            except (TypeError, ValueError):  # their texts may have secrets
                fault = "the request is invalid; do the URL and its storage options fit, headers as text?"
                raise SourceError(fault, path=self.shown) from None

    async def _request(self, part: _Transfer, *, first: bool) -> memoryview | None:
        """Make one request, following redirects, and write its bytes to their place; return a file that came whole."""
        hop = await self._first_hop(f"bytes={part.offset}-{part.offset + part.missing - 1}")
        follow = hop.options.pop("allow_redirects", True)
        for _ in range(hop.options.pop("max_redirects", _MAX_REDIRECTS) + 1):
            required: dict[str, Any] = {"allow_redirects": False, "auto_decompress": False}
            async with hop.session.get(hop.url, headers=hop.headers, **{**hop.options, **required}) as answer:
                if len(hop.session.cookie_jar) > _MOST_COOKIES:
                    hop.session.cookie_jar.clear()  # those of the session's other servers, too
                    raise SourceError(f"it sent more than {_MOST_COOKIES} cookies; {_DOWNLOAD}", path=self.shown)
                if answer.status not in _REDIRECT_STATUSES or not follow:
                    return await self._receive(answer, part, first=first)
                location = self._header(answer.headers, "Location")
            hop = await self._next_hop(hop, location)
        raise SourceError(f"cannot be read: too many redirects; {_DOWNLOAD}", path=self.shown)

    async def _first_hop(self, byte_range: str) -> _Hop:
        """Return the first step of a range request; it forbids encodings, whose bytes are not those of the file."""
        import aiohttp

        fs, url = self.connection()
        options = dict(fs.kwargs)
        required = {"Range": byte_range, "Accept-Encoding": "identity"}
        given = dict(options.pop("headers", {})).items()
        headers = {name: value for name, value in given if str(name).title() not in required} | required
        if "timeout" not in fs.client_kwargs:
            options.setdefault("timeout", aiohttp.ClientTimeout(sock_connect=_CONNECT, sock_read=_SILENCE))
        return _Hop(fs.encode_url(url), await fs.set_session(), headers, options)

    async def _next_hop(self, hop: _Hop, location: str) -> _Hop:
        """Return the next step of a request; to another server without the user's headers, cookies and passwords."""
        try:
            url = hop.url.join(type(hop.url)(location, encoded=True))
            if url.scheme not in ("http", "https") or not location:
                raise ValueError
            same_origin = url.origin() == hop.url.origin()
        except (TypeError, ValueError):
            raise SourceError(f"cannot be read: the redirect is no http URL; {_DOWNLOAD}", path=self.shown) from None
        options = {name: value for name, value in hop.options.items() if name != "params"}
        if same_origin:
            if url.user is None and hop.url.user is not None:  # an absolute URL does not repeat them
                url = url.with_user(hop.url.user).with_password(hop.url.password)
            return _Hop(url, hop.session, hop.headers, options)
        required = {name: hop.headers[name] for name in ("Range", "Accept-Encoding")}
        options = {name: value for name, value in options.items() if name in _SHARED}
        return _Hop(url, await self._bare_session(hop.session), required, options)

    async def _bare_session(self, session: Any) -> Any:
        """Return a session without the user's headers, cookies and passwords: fsspec's own, or a new one."""
        fs, _ = self.connection()
        if _SHARED.issuperset(fs.client_kwargs):
            return session
        if self._bare is None or self._bare[0] is not fs:
            shared = {name: value for name, value in fs.client_kwargs.items() if name in _SHARED}
            self._bare = fs, await fs.get_client(loop=fs.loop, **shared)
            weakref.finalize(self, fs.close_session, fs.loop, self._bare[1])
        return self._bare[1]

    async def _receive(self, answer: Any, part: _Transfer, *, first: bool) -> memoryview | None:
        """Write an answer's bytes to their place once its headers are checked; return a file that came whole."""
        self._check_status(answer.status, answer.headers)
        codings = [coding.strip() for coding in ",".join(answer.headers.getall("Content-Encoding", ())).split(",")]
        if not {coding.lower() for coding in codings} <= {"", "identity"} and answer.status != 416:
            encoded = f"the server sends it encoded ({', '.join(filter(None, codings))}), which the request ruled out"
            raise SourceError(f"{encoded}; {_DOWNLOAD}", path=self.shown)
        if answer.status == 200:
            return await self._receive_file(answer, first)
        if answer.status == 416:
            return self._no_such_range(answer.headers, part, first=first)
        await self._receive_range(answer, part)
        return None

    def _no_such_range(self, headers: Any, part: _Transfer, *, first: bool) -> memoryview:
        """Return the empty content of an empty file; for any other file HTTP 416 is an error."""
        content_range = self._header(headers, "Content-Range")
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is not None and match[3] != "*":
            self.check_version(int(match[3]), *self._tag(headers))
            if first and not self.size:
                return memoryview(b"")
        reason = f"it says '{content_range}'" if content_range else "it does not say how many bytes it has"
        end = part.offset + part.missing
        fault = f"the server has no bytes [{part.offset:#x}, {end:#x}) of it (HTTP 416), {reason}"
        raise SourceError(f"{fault}; try again, or {_DOWNLOAD}", path=self.shown)

    def _check_status(self, status: int, headers: Mapping[str, str]) -> None:
        """Raise for a status other than 200, 206 and 416: SourceError, or _RetryError from a busy server."""
        if status in (404, 410):
            raise self.missing_error()
        if status in (401, 403, 407):
            advice = Advice("give credentials in {}", "storage_options")
            raise SourceError(f"the server refused it (HTTP {status})", path=self.shown, advice=advice)
        if status in _RETRIED_STATUSES:
            seconds = headers.get("Retry-After", "")
            raise _RetryError(f"HTTP {status}", float(seconds) if seconds.isdecimal() else 0.0)
        if status not in (200, 206, 416):
            raise SourceError(f"the server answered HTTP {status} and not 206; {_DOWNLOAD}", path=self.shown)

    async def _receive_file(self, answer: Any, first: bool) -> memoryview:
        """Return a small file that was sent whole instead of a range."""
        length = self._header(answer.headers, "Content-Length")
        nbytes = int(length) if _LENGTH.fullmatch(length) else None
        if self.size >= 0:
            self.check_version(self.size if nbytes is None else nbytes, *self._tag(answer.headers))
        if not first or nbytes is None or nbytes > SMALL:
            size = "an unknown number of" if nbytes is None else f"all {nbytes}"
            fault = f"the server does not do ranges (HTTP 200 in place of 206) and would send {size} bytes"
            raise SourceError(f"{fault}; {_DOWNLOAD}", path=self.shown)
        whole = _Transfer(0, memoryview(bytearray(nbytes)))
        await self._receive_body(answer, whole)
        if whole.missing:
            raise _RetryError(f"only {whole.received} of {nbytes} bytes came")
        self.check_version(nbytes, *self._tag(answer.headers))
        return whole.target

    async def _receive_range(self, answer: Any, part: _Transfer) -> None:
        """Write a range to its place, after checking that it is the range asked for, of the same file."""
        content_range = self._header(answer.headers, "Content-Range")
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is None or match[1] is None or match[3] == "*" or int(match[1]) != part.offset:
            fault = f"the server answered the range '{content_range}' where bytes from {part.offset} on were asked for"
            raise SourceError(f"{fault}; {_DOWNLOAD}", path=self.shown)
        self.check_version(int(match[3]), *self._tag(answer.headers))
        if part.offset + part.missing > self.size:  # the first request, of a file that is shorter
            part.target = part.target[: self.size - part.offset + part.received]
        if part.extend is not None:
            part.extend()
        await self._receive_body(answer, part)

    async def _receive_body(self, answer: Any, part: _Transfer) -> None:
        """Write a body to its place as it comes; refuse one that is too long, or in chunks of unlimited headers."""
        if "Transfer-Encoding" in answer.headers:
            fault = "the server sends it in chunks (Transfer-Encoding), and a range's length is known"
            raise SourceError(f"{fault}; {_DOWNLOAD}", path=self.shown)
        async for chunk in answer.content.iter_any():
            if len(chunk) > part.missing:
                fault = f"the server sent more than the {len(part.target)} bytes that were asked for"
                raise SourceError(f"{fault}; {_DOWNLOAD}", path=self.shown)
            part.write(chunk)

    def _tag(self, headers: Any) -> tuple[str | None, bool]:
        """Return the version tag, and True if an equal one promises equal bytes: no weak ETag, but a date does."""
        etag = self._header(headers, "ETag")
        return (etag, not etag.startswith("W/")) if etag else (self._header(headers, "Last-Modified") or None, True)

    def _header(self, headers: Any, name: str) -> str:
        """Return the value of a header, "" without it; two values are an error, since a proxy may take the other."""
        values = {value.strip() for value in headers.getall(name, ())}
        if len(values) > 1:
            fault = f"the server's answer has {len(values)} headers {name} that say different things"
            raise SourceError(f"{fault}; {_DOWNLOAD}", path=self.shown)
        return values.pop() if values else ""


def _reason(error: BaseException) -> str:
    """Return an error's reason without secrets, such as a URL's query."""
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
