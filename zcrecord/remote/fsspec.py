"""Files that fsspec reaches other than by HTTP, such as those in object stores: `info` and `cat_file`, in parallel.

Few of these file systems return the version with the bytes, so it is asked for separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from zcrecord.errors import RecordError, SourceError
from zcrecord.storage.threads import map_ordered
from zcrecord.storage.urls import error_text, first_answer, version_tag

from .file import MOST_AT_ONCE, TRIES, RemoteFile, Request, retry_delay

T = TypeVar("T")

_CODINGS = ("contentEncoding", "ContentEncoding", "content_encoding")  # of Google, S3, Azure


class FsspecFile(RemoteFile):
    """A file that fsspec reaches other than by HTTP."""

    def look(self) -> None:
        self.check_same()

    def start(self, nbytes: int) -> memoryview:
        """Ask for size and version tag at the first call, then fetch the first bytes."""
        if self.size < 0:
            self.check_same()
        first = bytearray(min(nbytes, self.size))
        if first:
            self._fetch((0, memoryview(first)))
        return memoryview(first)

    def check_same(self) -> None:
        """Ask for size and version again, past the file system's cache; of a new S3 server once, for a limited time."""
        fs, _ = self.connection()
        time_limit = first_answer(fs) if self.size < 0 else {}
        self._check(self._retry(lambda: self._info(**time_limit), 1 if time_limit else TRIES))

    def _info(self, **time_limit: float) -> Mapping[str, Any]:
        fs, path = self.connection()
        fs.invalidate_cache(path)
        return dict(fs.info(path, **time_limit))

    def _check(self, info: Mapping[str, Any]) -> None:
        """Store or compare size and version tag; SourceError for a folder, and for a file that is stored encoded."""
        if info.get("type") == "directory" or info.get("size") is None:
            raise SourceError("is not a file, or hides its size; name a file, or download it", path=self.shown)
        if (coding := _coding(info)) not in ("", "identity"):
            text = f"the server keeps it encoded ({coding}), and may send it decompressed, without a limit"
            raise SourceError(f"{text}; download the file, or have it stored without Content-Encoding", path=self.shown)
        self.check_version(int(info["size"]), version_tag(info))

    def fill(self, requests: list[Request]) -> None:
        """Fetch the bytes of all requests, several at a time."""
        if len(requests) == 1:  # one request needs no thread
            self._fetch(requests[0])
            return
        for _ in map_ordered(lambda: self._fetch, requests, MOST_AT_ONCE):
            pass

    def _fetch(self, request: Request) -> None:
        """Fill the memory of one request with all its bytes, or raise SourceError; tries again after lost answers."""
        offset, target = request
        fs, path = self.connection()

        def read_range() -> bytes:
            data: bytes = fs.cat_file(path, start=offset, end=offset + len(target))
            if len(data) > len(target):
                fault = f"the server sent {len(data)} bytes where {len(target)} were asked for"
                raise SourceError(f"{fault}; download the file and load that", path=self.shown)
            if len(data) != len(target):
                self.check_same()
                raise EOFError(f"{len(data)} of {len(target)} bytes came")
            return data

        target[:] = self._retry(read_range)

    def _retry(self, ask: Callable[[], T], max_tries: int = TRIES) -> T:
        """Return the result of `ask`, called again after errors that may pass: exceptions of any class but a few."""
        tries = 0
        while True:
            try:
                return ask()
            except RecordError:
                raise
            except FileNotFoundError as error:  # fsspec's error for any failure in a chained https://
                if isinstance(error.__cause__, RecordError):
                    raise error.__cause__ from None
                raise self.missing_error() from error
            except (PermissionError, NotImplementedError, TypeError, ValueError) as error:
                fault = f"the server or fsspec refused it ({error_text(error)}); do its storage options fit?"
                raise SourceError(fault, path=self.shown) from error
            except Exception as error:
                tries += 1
                if tries == max_tries:
                    self._check_replaced(error)
                    raise self.failed_error(error_text(error), max_tries) from error
                time.sleep(retry_delay(tries))

    def _check_replaced(self, error: Exception) -> None:
        """Raise SourceError if the file was replaced, which may be why a range cannot be read; asks the server once."""
        if self.size < 0:
            return
        try:
            info = self._info()
        except FileNotFoundError:
            raise self.missing_error() from error
        except Exception:
            return
        self._check(info)


def _coding(info: Mapping[str, Any]) -> str:
    """Return the Content-Encoding that a file is stored with, such as gzip; "" if the server does not tell one."""
    settings = info.get("content_settings")
    sources = [info, settings] if isinstance(settings, Mapping) else [info]
    return next((str(s[name]).strip().lower() for s in sources for name in _CODINGS if s.get(name)), "")
