"""Files on HTTP servers: requests for ranges, over the session of fsspec's HTTP file system.

fsspec's own `cat_file` takes whatever comes for the range that was asked for, be it the whole file, another range or
another version of it. Here every answer says what it is before a byte of it is taken, and is written straight to where
it belongs.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from zcrecord.errors import SourceError

from .place import MOST_AT_ONCE, TRIES, Piece, Place, wait
from .ranges import NEAR

__all__ = ["Web"]

T = TypeVar("T")

SMALL = 8 << 20  # bytes that are taken whole from a server that does not do ranges
_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # what servers say that are busy or about to restart
_CONNECT, _SILENCE = 20.0, 60.0  # seconds to wait for a connection, and for the next byte
_LEAVE = 5.0  # seconds that requests are given to end when the caller is interrupted
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)")


class _AgainError(Exception):
    """A request is worth another try, after as many seconds as the server asked for."""

    def __init__(self, what: str, seconds: float = 0.0) -> None:
        super().__init__(what)
        self.seconds = seconds


class _Part:
    """What one request is for, and how much of it has come; a further try goes on from there."""

    def __init__(self, offset: int, target: memoryview) -> None:
        self.target, self.done, self._offset = target, 0, offset

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

    def start(self, nbytes: int) -> memoryview:
        """Return the first bytes; all of a small file's from a server that does not do ranges."""
        first = bytearray(nbytes)
        part = _Part(0, memoryview(first))
        whole: bytes | None = self._run(self._try(part, first=True))
        return memoryview(first)[: part.done] if whole is None else memoryview(whole)

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

    async def _try(self, part: _Part, *, first: bool = False) -> bytes | None:
        """Make a request until it is answered in full; returns the whole file if that is what came first."""
        import aiohttp

        tried = 0
        while True:
            before = part.done
            try:
                whole = await self._ask(part, first=first)
                if whole is not None or not part.left:
                    return whole
                raise _AgainError(f"only {part.done} of {len(part.target)} bytes came")
            except (aiohttp.ClientSSLError, aiohttp.InvalidURL, aiohttp.TooManyRedirects) as error:
                raise SourceError(f"cannot be read: {_said(error)}", path=self.shown) from None  # it may name the query
            except (_AgainError, aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                tried = 1 if part.done - before >= NEAR else tried + 1  # a server may send less at a time
                if tried == TRIES:
                    raise self.failed(_said(error)) from None
                await asyncio.sleep(wait(tried, getattr(error, "seconds", 0.0)))

    async def _ask(self, part: _Part, *, first: bool) -> bytes | None:
        """Make one request, and write what comes to where it belongs."""
        import aiohttp

        fs, url = self.connection()
        session = await fs.set_session()
        options = dict(fs.kwargs)
        end = part.at + part.left - 1
        wanted = {"Range": f"bytes={part.at}-{end}", "Accept-Encoding": "identity"}
        options["headers"] = {**options.get("headers", {}), **wanted}
        if "timeout" not in fs.client_kwargs:
            options.setdefault("timeout", aiohttp.ClientTimeout(sock_connect=_CONNECT, sock_read=_SILENCE))
        async with session.get(fs.encode_url(url), **options) as answer:
            self._check_status(answer.status, answer.headers)
            if answer.status == 200:
                return await self._whole(answer, first)
            if answer.status == 416:
                self.known(_empty(answer.headers), _tag(answer.headers))
                if first and not self.size:
                    return b""
                raise SourceError(f"the server has no bytes from {part.at} on (HTTP 416)", path=self.shown)
            await self._take(answer, part)
        return None

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

    async def _whole(self, answer: Any, first: bool) -> bytes:
        """Return a small file whose server sends all of it, whatever is asked for."""
        nbytes = answer.content_length
        if self.size >= 0:
            self.known(self.size if nbytes is None else nbytes, _tag(answer.headers))
        if not first or nbytes is None or nbytes > SMALL or "Content-Encoding" in answer.headers:
            size = "an unknown number of" if nbytes is None else f"all {nbytes}"
            what = f"the server does not do ranges (HTTP 200 in place of 206) and would send {size} bytes"
            raise SourceError(f"{what}; download the file and load that", path=self.shown)
        data: bytes = await answer.read()
        self.known(nbytes, _tag(answer.headers))
        return data

    async def _take(self, answer: Any, part: _Part) -> None:
        """Write a range to where it belongs, after checking that it is of the same file and the one asked for."""
        said = answer.headers.get("Content-Range", "")
        found = _CONTENT_RANGE.fullmatch(said.strip())
        if found is None or found[1] is None or found[3] == "*" or int(found[1]) != part.at:
            what = f"the server answered the range '{said}' where bytes from {part.at} on were asked for"
            raise SourceError(f"{what}; download the file and load that", path=self.shown)
        if "Content-Encoding" in answer.headers:
            what = f"the server sends it encoded ({answer.headers['Content-Encoding']})"
            raise SourceError(f"{what}; download the file and load that", path=self.shown)
        self.known(int(found[3]), _tag(answer.headers))
        if part.at + part.left > self.size:  # the first request, of a file that is shorter
            part.shorten(self.size)
        async for chunk in answer.content.iter_any():
            if len(chunk) > part.left:
                what = f"the server sent more than the {len(part.target)} bytes that were asked for"
                raise SourceError(f"{what}; download the file and load that", path=self.shown)
            part.put(chunk)


def _tag(headers: Mapping[str, str]) -> str | None:
    return headers.get("ETag") or headers.get("Last-Modified")


def _empty(headers: Mapping[str, str]) -> int:
    """Return the size that goes with "no such range"."""
    found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    return int(found[3]) if found is not None and found[3] != "*" else 0


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    kind = type(error).__name__
    if kind == "TooManyRedirects":
        return "too many redirects"
    if isinstance(error, ValueError) or "Redirect" in kind or "Url" in kind:  # their texts have the URL, query and all
        return "it leads to what is no http URL"
    if getattr(error, "status", 0):
        return f"HTTP status {getattr(error, 'status', 0)}"
    return str(error) or kind
