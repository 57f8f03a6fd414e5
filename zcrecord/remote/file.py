"""Base class of remote files: size, version tag, retries, and the wording of errors. And URLs, as fsspec takes them.

Which requests are made is left to the two kinds: `http` for HTTP servers, `fsspec` for everything else that the package
fsspec reaches.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from zcrecord.codec.layout import MAX_ARCHIVE_SIZE
from zcrecord.errors import DependencyError, SourceError, SourceNotFoundError, UnsupportedError, missing_package

__all__ = ["MOST_AT_ONCE", "TRIES", "RemoteFile", "Request", "connect", "redacted", "retry_delay", "split_url"]

TRIES = 5  # of one request, the first included; the waits between them are 1.5 to 3 seconds in all, 40 at the most
MOST_AT_ONCE = 8  # requests under way at a time; more than browsers make, fewer than servers take for an attack
_FIRST_WAIT = 0.1  # seconds before the second try; doubled before each further one
_LONGEST_WAIT = 10.0  # seconds, even if a server asks for more: an error then serves users better

_CHAINED = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")  # not the :: of an IPv6 address
_PACKAGES = {  # the package that fsspec needs for a kind of URL, and the extra that installs it
    **dict.fromkeys(("http", "https"), ("aiohttp", "remote")),
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
}

Request = tuple[int, memoryview]  # an offset in the file, and the memory to fill from there


def retry_delay(tried: int, asked: float = 0.0) -> float:
    """Return the seconds to wait after `tried` tries, at least `asked`, as the server's Retry-After says.

    Random within bounds, so that many readers do not come back at the same time.
    """
    spread: float = _FIRST_WAIT * 2 ** (tried - 1) * random.uniform(1, 2)  # noqa: S311
    return min(_LONGEST_WAIT, max(asked, spread))


def redacted(url: str) -> str:
    """Return a URL without user, password and query, which may be secret; a signature, for one."""
    *heads, last = _CHAINED.split(url)  # the last has the address
    parts = split_url(last)
    host = parts.netloc.rpartition("@")[2]
    return "::".join([*heads, f"{parts.scheme}://{host}{parts.path}"])


def split_url(url: str) -> SplitResult:
    """Return the parts of a URL; of chained URLs those of the last, which has the file's address."""
    return urlsplit(_CHAINED.split(url)[-1])


def connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the file's path in it.

    Raises:
        DependencyError: fsspec, or the package it needs for this kind of URL, is not installed. UnsupportedError: it
        knows no such kind, or no such options.
    """
    try:
        import fsspec.core
    except ImportError as error:
        raise missing_package("fsspec", "aiohttp", extra="remote") from error
    _check_url(url)
    scheme = url.partition("://")[0].rpartition("::")[2].lower()
    try:
        fs, path = fsspec.core.url_to_fs(url, **_undecoded(url, options))
    except ImportError as error:
        what = f"URLs of the kind {scheme}:// need another package ({error})"
        if scheme not in _PACKAGES:
            raise DependencyError(f"{what}; install that with pip") from error
        package, extra = _PACKAGES[scheme]
        raise missing_package(package, extra=extra, why=what) from error
    except ValueError as error:
        if "not known" in str(error):
            what = f"URLs of the kind {scheme}:// are not known to fsspec; a local file's path has no '://' in it"
            raise UnsupportedError(what) from None
        raise UnsupportedError(f"this is no URL: {error}") from error
    except TypeError as error:
        raise UnsupportedError(f"storage_options= does not fit URLs of the kind {scheme}://: {error}") from error
    return fs, path


def _undecoded(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that keep fsspec from decompressing what an HTTP server sends, in chained URLs.

    Such as `simplecache::https://`; plain `https://` is left to `HttpFile`.
    """
    out = dict(options)
    for scheme in {part.partition("://")[0] for part in _CHAINED.split(url)[1:]} & {"http", "https"}:
        own = dict(out.get(scheme) or {})
        out[scheme] = {**own, "client_kwargs": {**(own.get("client_kwargs") or {}), "auto_decompress": False}}
    return out


def _check_url(url: str) -> None:
    """Raise UnsupportedError for a URL without a valid host and port; the message quotes nothing of it.

    A password with '/' or ':' in it, for one, makes the rest of the password a port.
    """
    try:
        parts = split_url(url)
        if parts.scheme in ("http", "https") and (parts.hostname is None or parts.port == 0):
            raise ValueError
    except ValueError:
        what = "this URL has no host and port that are valid"
        raise UnsupportedError(f"{what}; write special characters of user and password as %XX") from None


class RemoteFile:
    """Base class of remote files. `start` is called first; then several threads may use it, and forked processes.

    Attributes:
        shown: the URL as errors show it, without secrets.
        size: in bytes, once `start` was called.
        tag: the server's version tag (ETag, or time of change); None if it sends none.
        strong: True if equal tags promise equal bytes; a weak ETag does not.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, dict(options)
        self.shown = redacted(url)
        self.size = -1
        self.tag: str | None = None
        self.strong = True
        self._pid = -1
        self._connection: tuple[Any, str] | None = None

    def connection(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path in it; new ones in a forked process, which has no threads."""
        if self._connection is None or self._pid != os.getpid():
            self._connection, self._pid = connect(self._url, self._options), os.getpid()
        return self._connection

    def start(self, nbytes: int) -> memoryview:
        """Fetch the first bytes, and learn `size` and `tag`; may return fewer bytes, or all of a small file."""
        raise NotImplementedError

    def look(self) -> None:
        """Learn `size` and `tag`, by as small a request as there is; later, compare them with those seen first.

        Raises:
            SourceError: it is missing (SourceNotFoundError), cannot be read, or was replaced.
        """
        self.start(1)

    def fill(self, requests: list[Request]) -> None:
        """Fetch the bytes of all requests, several at a time; their memory is final when it returns or raises.

        Raises:
            SourceError: they cannot be fetched, after all tries; or the file was replaced.
        """
        raise NotImplementedError

    def check_same(self) -> None:
        """Raise SourceError if the file was replaced, where `fill` does not notice that."""

    def check_version(self, size: int, tag: str | None, strong: bool = True) -> None:
        """Compare size and tag with those seen first, which are kept.

        Raises:
            SourceError: they differ.
        """
        if self.size < 0:
            if size > MAX_ARCHIVE_SIZE:
                raise SourceError(f"the server says that it has {size} bytes, which no archive has", path=self.shown)
            self.size, self.tag, self.strong = size, tag, strong
        elif (size, tag) != (self.size, self.tag):
            raise self.replaced()

    def replaced(self) -> SourceError:
        """Return the error for a file that was replaced."""
        what = "was replaced or changed since it was opened; load it again, views taken before stay as they are"
        return SourceError(what, path=self.shown)

    def missing(self) -> SourceNotFoundError:
        """Return the error for a file that does not exist."""
        return SourceNotFoundError("no such file on the server", path=self.shown)

    def failed(self, what: str) -> SourceError:
        """Return the error for a request that failed at every try."""
        return SourceError(f"cannot be read, tried {TRIES} times: {what}", path=self.shown)
