"""A file elsewhere, as what fetches from it sees it: how big it is, whether it is still the same, what goes wrong.

Which requests are made is for the two kinds of place: `web` has HTTP servers, `stores` everything else that fsspec
reaches. Here is what both share: how often a request is tried, and how errors are worded.
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

__all__ = ["MOST_AT_ONCE", "TRIES", "Piece", "Place", "address_of", "connected", "redacted", "wait"]

TRIES = 5  # of one request, the first included; between them are 1.5 to 3 seconds in all, or 40 if the server asks so
MOST_AT_ONCE = 8  # requests under way at a time; more than browsers make, fewer than servers take for an attack
_FIRST_WAIT = 0.1  # seconds before the second try; doubled before each further one
_LONGEST_WAIT = 10.0  # seconds, whatever a server asks for: who waits longer wants to be told

_CHAINED = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")  # and not an IPv6 address's
_PACKAGES = {  # what fsspec needs for a kind of URL, and the extra that has it
    **dict.fromkeys(("http", "https"), ("aiohttp", "remote")),
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
}

Piece = tuple[int, memoryview]  # from where on, and what is to be filled


def wait(tried: int, asked: float = 0.0) -> float:
    """Return how many seconds to wait after so many tries, or what the server asked for if that is more.

    Spread at random, so that many readers do not come back all at once.
    """
    spread: float = _FIRST_WAIT * 2 ** (tried - 1) * random.uniform(1, 2)  # noqa: S311
    return min(_LONGEST_WAIT, max(asked, spread))


def redacted(url: str) -> str:
    """Return a URL without what may be secret: user, password and query, such as a signature."""
    *heads, last = _CHAINED.split(url)  # the last has the address
    parts = address_of(last)
    host = parts.netloc.rpartition("@")[2]
    return "::".join([*heads, f"{parts.scheme}://{host}{parts.path}"])


def address_of(url: str) -> SplitResult:
    """Return the parts of a URL, of chained ones of the last, which says where the file is."""
    return urlsplit(_CHAINED.split(url)[-1])


def connected(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the file's path in it.

    Raises:
        DependencyError: fsspec, or what it needs for this kind of URL, is not installed. UnsupportedError: it knows no
        such kind, or no such options.
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
    """Return options by which fsspec decompresses nothing of an HTTP server that it reaches through another scheme.

    Such as `simplecache::https://`; what is asked for by `https://` itself is asked for by `web`.
    """
    out = dict(options)
    for scheme in {part.partition("://")[0] for part in _CHAINED.split(url)[1:]} & {"http", "https"}:
        own = dict(out.get(scheme) or {})
        out[scheme] = {**own, "client_kwargs": {**(own.get("client_kwargs") or {}), "auto_decompress": False}}
    return out


def _check_url(url: str) -> None:
    """Raise UnsupportedError for an address in which no server can be found; its text, maybe a password, is not told.

    A password with '/' or ':' in it, for one, makes the rest of it a port.
    """
    try:
        parts = address_of(url)
        if parts.scheme in ("http", "https") and (parts.hostname is None or parts.port == 0):
            raise ValueError
    except ValueError:
        what = "this URL has no host and port that can be understood"
        raise UnsupportedError(f"{what}; write what is special in user and password as %XX") from None


class Place:
    """A file elsewhere. `start` comes first; several threads may use it then, and processes that were forked.

    Attributes:
        shown: its URL as errors name it.
        size: how many bytes it has.
        tag: what tells one version of it from another, as its server has it (ETag, time of change); None for nothing.
        firm: whether an equal tag promises equal bytes; a weak ETag does not.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, dict(options)
        self.shown = redacted(url)
        self.size = -1
        self.tag: str | None = None
        self.firm = True
        self._pid = -1
        self._connection: tuple[Any, str] | None = None

    def connection(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path in it; new ones in a forked process, which has no threads."""
        if self._connection is None or self._pid != os.getpid():
            self._connection, self._pid = connected(self._url, self._options), os.getpid()
        return self._connection

    def start(self, nbytes: int) -> memoryview:
        """Return the first bytes, more or less than were asked for if the file or the server is like that.

        `size` and `tag` are known then.
        """
        raise NotImplementedError

    def fill(self, pieces: list[Piece]) -> None:
        """Fill every piece, several at a time; nothing writes to them any more when it returns or raises.

        Raises:
            SourceError: they cannot be had, however often it was tried; or the file is another one by now.
        """
        raise NotImplementedError

    def check_same(self) -> None:
        """Raise SourceError if the file is another one by now, where `fill` does not see that."""

    def known(self, size: int, tag: str | None, firm: bool = True) -> None:
        """Note what a server says of the file, which has to be what it said before.

        Raises:
            SourceError: it is not.
        """
        if self.size < 0:
            if size > MAX_ARCHIVE_SIZE:
                raise SourceError(f"the server says that it has {size} bytes, which no archive has", path=self.shown)
            self.size, self.tag, self.firm = size, tag, firm
        elif (size, tag) != (self.size, self.tag):
            raise self.replaced()

    def replaced(self) -> SourceError:
        """Return what is raised for a file that is another one by now."""
        what = "was replaced or changed since it was opened; load it again, views taken before stay as they are"
        return SourceError(what, path=self.shown)

    def missing(self) -> SourceNotFoundError:
        """Return what is raised for a file that is not there."""
        return SourceNotFoundError("no such file on the server", path=self.shown)

    def failed(self, what: str) -> SourceError:
        """Return what is raised for a request that was tried often enough."""
        return SourceError(f"cannot be read, tried {TRIES} times: {what}", path=self.shown)
