"""Base class of remote files: size, version tag, retries, and the wording of errors.

Requests are left to the two kinds: `http` for HTTP servers, `fsspec` for everything else that the package fsspec
reaches.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

from zcrecord.codec.layout import MAX_ARCHIVE_SIZE
from zcrecord.errors import SourceError, SourceNotFoundError
from zcrecord.storage.urls import connect, redacted

from .ranges import NEAR

TRIES = 5  # of one request, the first included; the waits between them are 1.5 to 3 seconds in all, 40 at the most
MOST_AT_ONCE = 8  # requests under way at a time; more than browsers make, fewer than servers take for an attack
_FIRST_WAIT = 0.1  # seconds before the second try; doubled before each further one
_LONGEST_WAIT = 10.0  # seconds, even if a server asks for more: an error then serves users better

Request = tuple[int, memoryview]  # an offset in the file, and the memory to fill from there


def retry_delay(tries: int, retry_after: float = 0.0) -> float:
    """Return the random seconds to wait after `tries` tries, at least the server's Retry-After."""
    spread: float = _FIRST_WAIT * 2 ** (tries - 1) * random.uniform(1, 2)  # noqa: S311
    return min(_LONGEST_WAIT, max(retry_after, spread))


class RemoteFile:
    """Base class of remote files. `start` is called first; then several threads may use it, and forked processes."""

    near = NEAR  # ranges with at most so many bytes between them are fetched by one request, faster than by two

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, dict(options)
        self.shown = redacted(url)  # the URL as errors show it, without secrets
        self.size = -1  # in bytes, once `start` was called
        self.tag: str | None = None  # the server's version tag (ETag, or time of change); None if it sends none
        self.strong = True  # equal tags promise equal bytes; those of a weak ETag do not
        self._pid = -1
        self._connection: tuple[Any, str] | None = None

    def connection(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path in it; new ones in a forked process, which has no threads."""
        if self._connection is None or self._pid != os.getpid():
            self._connection, self._pid = connect(self._url, self._options), os.getpid()
        return self._connection

    def start(self, nbytes: int) -> memoryview:
        """Fetch the first bytes, `size` and `tag`; may return fewer bytes, or all of a small file."""
        raise NotImplementedError

    def look(self) -> None:
        """Fetch `size` and `tag`, by as small a request as there is; a SourceError if they have changed."""
        self.start(1)

    def fill(self, requests: list[Request]) -> None:
        """Fetch the bytes of all requests, several at a time; their memory is final when it returns or raises."""
        raise NotImplementedError

    def check_same(self) -> None:
        """Raise SourceError if the file was replaced, where `fill` does not notice that."""

    def check_version(self, size: int, tag: str | None, strong: bool = True) -> None:
        """Store the first size and tag; raise SourceError if later ones differ."""
        if self.size < 0:
            if size > MAX_ARCHIVE_SIZE:
                raise SourceError(f"the server says that it has {size} bytes, which no archive has", path=self.shown)
            self.size, self.tag, self.strong = size, tag, strong
        elif (size, tag) != (self.size, self.tag):
            raise self.replaced_error()

    def replaced_error(self) -> SourceError:
        """Return the error for a file that was replaced."""
        fault = "was replaced or changed since it was opened; load it again, views taken before stay as they are"
        return SourceError(fault, path=self.shown)

    def missing_error(self) -> SourceNotFoundError:
        """Return the error for a file that does not exist."""
        return SourceNotFoundError("no such file on the server", path=self.shown)

    def failed_error(self, fault: str, tries: int = TRIES) -> SourceError:
        """Return the error for a request that failed at every try."""
        times = f", tried {tries} times" if tries > 1 else ""
        return SourceError(f"cannot be read{times}: {fault}", path=self.shown)
