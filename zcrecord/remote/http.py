"""Files on HTTP servers: requests for ranges, over the session of fsspec's HTTP file system.

fsspec's own `cat_file` takes whatever comes for the range that was asked for, be it the whole file, another range or
another version of it. Here every answer says what it is before a byte of it is taken, and is written straight to where
it belongs: bytes are counted as they come and nothing is decompressed, so a server decides over no memory here. Where
a server sends a request on to another, what was meant for the first alone does not go along.
"""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from zcrecord.errors import SourceError

from .file import MOST_AT_ONCE, TRIES, Piece, Place, wait
from .ranges import NEAR

__all__ = ["Web"]

T = TypeVar("T")

SMALL = 8 << 20  # bytes that are taken whole from a server that does not do ranges
_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # what servers say that are busy or about to restart
_MOVED = (301, 302, 303, 307, 308)
_MOST_MOVES = 10  # as browsers and aiohttp have it, some of them more
_SECRET = ("headers", "auth", "cookies", "cookie_jar", "base_url")  # options that are for one server, and no other's
_CONNECT, _SILENCE = 20.0, 60.0  # seconds to wait for a connection, and for the next byte
_PATIENCE = TRIES * _SILENCE  # seconds for one request with all its tries, whatever a server does to be waited for
_SLOWEST = 16 << 10  # bytes a second: what a long request has besides that
_MOST_COOKIES = 300  # of all servers of one session, which keeps them; older releases of aiohttp set no limit
_LEAVE = 5.0  # seconds that requests are given to end when the caller is interrupted
_DOWNLOAD = "download the file and load that"
_LENGTH = re.compile("[0-9]{1,19}")
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,19})-([0-9]{1,19})|\*)/([0-9]{1,19}|\*)")


class _AgainError(Exception):
    """A request is worth another try, after as many seconds as the server asked for."""

    def __init__(self, what: str, seconds: float = 0.0) -> None:
        super().__init__(what)
        self.seconds = seconds


class _Hop:
    """Where one request goes, over which session, and what goes along."""

    def __init__(self, at: Any, session: Any, headers: Mapping[str, str], options: dict[str, Any]) -> None:
        self.at, self.session, self.headers, self.options = at, session, headers, options


class _Part:
    """What one request is for, and how much of it has come; a further try goes on from there."""

    def __init__(self, offset: int, target: memoryview) -> None:
        self.target, self.done, self._offset = target, 0, offset
        self.grant: Callable[[], None] | None = None  # more time, as soon as an answer is there

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


class Web(Place):
    """A file on an HTTP server."""

    _bare: tuple[Any, Any] | None = None  # fsspec's file system, and a session for other servers than its own

    def start(self, nbytes: int) -> memoryview:
        """Return the first bytes; all of a small file's from a server that does not do ranges."""
        first = bytearray(nbytes)
        part = _Part(0, memoryview(first))
        whole: memoryview | None = self._run(self._try(part, first=True))
        return memoryview(first)[: part.done] if whole is None else whole

    def fill(self, pieces: list[Piece]) -> None:
        """Fill every piece, several at a time."""
        self._run(self._all([_Part(offset, target) for offset, target in pieces]))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in fsspec's own thread; who is interrupted meanwhile waits until nothing is written any more."""
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

    async def _all(self, parts: list[_Part]) -> None:
        gate = asyncio.Semaphore(MOST_AT_ONCE)

        async def one(part: _Part) -> None:
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

    async def _try(self, part: _Part, *, first: bool = False) -> memoryview | None:
        """Make a request until it is answered in full; returns the whole file if that is what came first."""
        nbytes, clock = part.left, asyncio.get_running_loop().time
        start = clock()
        try:
            async with asyncio.timeout(_PATIENCE) as limit:
                part.grant = lambda: limit.reschedule(start + _PATIENCE + nbytes / _SLOWEST)
                return await self._repeat(part, first=first)
        except TimeoutError:
            what = f"cannot be read: only {part.done} of {nbytes} bytes came in {clock() - start:.0f} seconds"
            raise SourceError(f"{what}; the server or the line is too slow", path=self.shown) from None

    async def _repeat(self, part: _Part, *, first: bool) -> memoryview | None:
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
                raise SourceError(f"cannot be read: {_said(error)}", path=self.shown) from None  # it may name the query
            except (_AgainError, aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                tried = 1 if part.done - before >= NEAR else tried + 1  # a server may send less at a time
                if tried == TRIES:
                    raise self.failed(_said(error)) from None
                await asyncio.sleep(wait(tried, getattr(error, "seconds", 0.0)))
            except (TypeError, ValueError):  # whose text may have what is secret
                what = "no request can be made of it; do the URL and storage_options= fit, headers as text?"
                raise SourceError(what, path=self.shown) from None

    async def _ask(self, part: _Part, *, first: bool) -> memoryview | None:
        """Make one request, wherever it is sent on to, and write what comes to where it belongs."""
        hop = await self._first_hop(f"bytes={part.at}-{part.at + part.left - 1}")
        follow = hop.options.pop("allow_redirects", True)
        for _ in range(hop.options.pop("max_redirects", _MOST_MOVES) + 1):
            ours: dict[str, Any] = {"allow_redirects": False, "auto_decompress": False}
            async with hop.session.get(hop.at, headers=hop.headers, **{**hop.options, **ours}) as answer:
                if len(hop.session.cookie_jar) > _MOST_COOKIES:
                    hop.session.cookie_jar.clear()  # it is other servers', too
                    raise SourceError(f"the server sets more than {_MOST_COOKIES} cookies", path=self.shown)
                if answer.status not in _MOVED or not follow:
                    return await self._answered(answer, part, first=first)
                where = self._only(answer.headers, "Location")
            hop = await self._sent_on(hop, where)
        raise SourceError("cannot be read: too many redirects", path=self.shown)

    async def _first_hop(self, wanted: str) -> _Hop:
        """Return where a range is asked for first: encoded it would be other bytes than those of the file."""
        import aiohttp

        fs, url = self.connection()
        options = dict(fs.kwargs)
        ours = {"Range": wanted, "Accept-Encoding": "identity"}
        theirs = {k: v for k, v in dict(options.pop("headers", {})).items() if str(k).title() not in ours}
        if "timeout" not in fs.client_kwargs:
            options.setdefault("timeout", aiohttp.ClientTimeout(sock_connect=_CONNECT, sock_read=_SILENCE))
        return _Hop(fs.encode_url(url), await fs.set_session(), {**theirs, **ours}, options)

    async def _sent_on(self, hop: _Hop, where: str) -> _Hop:
        """Return where a redirect leads. To another server go no headers, cookies or passwords of the user's.

        What `params` add to a query is for the first request alone, as aiohttp has it: the server's answer is to that.
        """
        try:
            at = hop.at.join(type(hop.at)(where, encoded=True))
            if at.scheme not in ("http", "https") or not where:
                raise ValueError
            same = at.origin() == hop.at.origin()
        except (TypeError, ValueError):
            raise SourceError("cannot be read: it leads to what is no http URL", path=self.shown) from None
        options = {name: value for name, value in hop.options.items() if name != "params"}
        if same:
            if at.user is None and hop.at.user is not None:  # a whole URL does not repeat them
                at = at.with_user(hop.at.user).with_password(hop.at.password)
            return _Hop(at, hop.session, hop.headers, options)
        ours = {name: hop.headers[name] for name in ("Range", "Accept-Encoding")}
        options = {name: value for name, value in options.items() if name not in _SECRET}
        return _Hop(at, await self._bare_session(hop.session), ours, options)

    async def _bare_session(self, session: Any) -> Any:
        """Return a session that has nothing of the user's to say to a server: fsspec's own, or one made for this."""
        fs, _ = self.connection()
        if not any(name in fs.client_kwargs for name in _SECRET):
            return session
        if self._bare is None or self._bare[0] is not fs:
            shared = (*_SECRET, "connector")  # which is closed with the session that it was given to
            kept = {name: value for name, value in fs.client_kwargs.items() if name not in shared}
            self._bare = fs, await fs.get_client(loop=fs.loop, **kept)
            weakref.finalize(self, fs.close_session, fs.loop, self._bare[1])
        return self._bare[1]

    async def _answered(self, answer: Any, part: _Part, *, first: bool) -> memoryview | None:
        self._check_status(answer.status, answer.headers)
        codings = [c.strip() for c in ",".join(answer.headers.getall("Content-Encoding", ())).split(",")]
        if not {c.lower() for c in codings} <= {"", "identity"} and answer.status != 416:
            encoded = f"the server sends it encoded ({', '.join(filter(None, codings))}), though that was ruled out"
            raise SourceError(f"{encoded}; other bytes than the file's; {_DOWNLOAD}", path=self.shown)
        if answer.status == 200:
            return await self._whole(answer, first)
        if answer.status == 416:
            return self._no_such_range(answer.headers, part, first=first)
        await self._take(answer, part)
        return None

    def _no_such_range(self, headers: Any, part: _Part, *, first: bool) -> memoryview:
        """Return no bytes, all that an empty file has; any other has those that were asked for, or was replaced."""
        said = self._only(headers, "Content-Range")
        found = _CONTENT_RANGE.fullmatch(said)
        if found is not None and found[3] != "*":
            self.known(int(found[3]), *self._tag(headers))
            if first and not self.size:
                return memoryview(b"")
        told = f"it says '{said}'" if said else "it does not say how many bytes it has"
        asked = f"[{part.at:#x}, {part.at + part.left:#x})"
        what = f"the server has no bytes {asked} of it (HTTP 416), {told}"
        raise SourceError(f"{what}; try again, or {_DOWNLOAD}", path=self.shown)

    def _check_status(self, status: int, headers: Mapping[str, str]) -> None:
        if status in (404, 410):
            raise self.missing()
        if status in (401, 403, 407):
            what = f"the server refused it (HTTP {status}); give credentials in storage_options="
            raise SourceError(what, path=self.shown)
        if status in _AGAIN:
            seconds = headers.get("Retry-After", "")
            raise _AgainError(f"HTTP {status}", float(seconds) if seconds.isdecimal() else 0.0)
        if status not in (200, 206, 416):
            raise SourceError(f"the server answered HTTP {status} and not 206", path=self.shown)

    async def _whole(self, answer: Any, first: bool) -> memoryview:
        """Return a small file whose server sends all of it, whatever is asked for."""
        length = self._only(answer.headers, "Content-Length")
        nbytes = int(length) if _LENGTH.fullmatch(length) else None
        if self.size >= 0:
            self.known(self.size if nbytes is None else nbytes, *self._tag(answer.headers))
        if not first or nbytes is None or nbytes > SMALL:
            size = "an unknown number of" if nbytes is None else f"all {nbytes}"
            what = f"the server does not do ranges (HTTP 200 in place of 206) and would send {size} bytes"
            raise SourceError(f"{what}; {_DOWNLOAD}", path=self.shown)
        whole = _Part(0, memoryview(bytearray(nbytes)))
        await self._pour(answer, whole)
        if whole.left:
            raise _AgainError(f"only {whole.done} of {nbytes} bytes came")
        self.known(nbytes, *self._tag(answer.headers))
        return whole.target

    async def _take(self, answer: Any, part: _Part) -> None:
        """Write a range to where it belongs, after checking that it is of the same file and the one asked for."""
        said = self._only(answer.headers, "Content-Range")
        found = _CONTENT_RANGE.fullmatch(said)
        if found is None or found[1] is None or found[3] == "*" or int(found[1]) != part.at:
            what = f"the server answered the range '{said}' where bytes from {part.at} on were asked for"
            raise SourceError(f"{what}; {_DOWNLOAD}", path=self.shown)
        self.known(int(found[3]), *self._tag(answer.headers))
        if part.at + part.left > self.size:  # the first request, of a file that is shorter
            part.shorten(self.size)
        if part.grant is not None:
            part.grant()
        await self._pour(answer, part)

    async def _pour(self, answer: Any, part: _Part) -> None:
        """Write a body to where it belongs, as it comes: what is read of one that is too long is one chunk.

        How long an answer says that it is decides nothing here: with Transfer-Encoding it may go on for ever.
        """
        async for chunk in answer.content.iter_any():
            if len(chunk) > part.left:
                what = f"the server sent more than the {len(part.target)} bytes that were asked for"
                raise SourceError(f"{what}; {_DOWNLOAD}", path=self.shown)
            part.put(chunk)

    def _tag(self, headers: Any) -> tuple[str | None, bool]:
        """Return what changes with the content, and whether the same one is a promise that every byte is the same.

        A weak ETag promises only that the bytes mean the same. Of two times within a second a date tells nothing,
        either, but whoever has replaced a file twice in that time has not shown the first one to anybody.
        """
        etag = self._only(headers, "ETag")
        return (etag, not etag.startswith("W/")) if etag else (self._only(headers, "Last-Modified") or None, True)

    def _only(self, headers: Any, name: str) -> str:
        """Return the value of a header, "" if it is not there.

        Raises:
            SourceError: it is there twice with two values, of which this reader would take one and a proxy the other.
        """
        values = {value.strip() for value in headers.getall(name, ())}
        if len(values) > 1:
            what = f"the server's answer has {len(values)} headers {name} that say different things"
            raise SourceError(f"{what}; {_DOWNLOAD}", path=self.shown)
        return values.pop() if values else ""


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    kind = type(error).__name__
    if kind == "ServerDisconnectedError":  # whose text is what came before, as an object of aiohttp's
        return "Server disconnected"
    if isinstance(error, ValueError) or "Redirect" in kind or "Url" in kind:  # their texts have the URL, query and all
        return "it leads to what is no http URL"
    if getattr(error, "status", 0):
        return f"HTTP status {getattr(error, 'status', 0)}"
    return str(error) or kind
