"""Files in object stores and whatever else fsspec reaches: its `info` and its `cat_file`, several at a time.

Few of these file systems say with the bytes which version they are of, so that is asked for separately.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from zcrecord.errors import RecordError, SourceError
from zcrecord.storage.threads import map_ordered

from .file import MOST_AT_ONCE, TRIES, Piece, Place, wait

__all__ = ["Store"]

T = TypeVar("T")

# What file systems call that which changes with the content, the surest first.
_CODINGS = ("contentEncoding", "ContentEncoding", "content_encoding")  # Google's, S3's, Azure's
_TAGS = ("ETag", "etag", "content_hash", "content_md5", "md5Hash", "md5", "generation", "LastModified",
         "last_modified", "updated", "mtime", "modified", "created")  # fmt: skip


class Store(Place):
    """A file that fsspec reaches other than by HTTP."""

    def start(self, nbytes: int) -> memoryview:
        """Return the first bytes."""
        self.check_same()
        first = bytearray(min(nbytes, self.size))
        if first:
            self._one((0, memoryview(first)))
        return memoryview(first)

    def check_same(self) -> None:
        """Ask how big the file is and which version it is, past what the file system remembers."""
        fs, path = self.connection()

        def ask() -> Mapping[str, Any]:
            fs.invalidate_cache(path)
            found: Mapping[str, Any] = fs.info(path)
            return found

        self._note(self._tried(ask))

    def _note(self, found: Mapping[str, Any]) -> None:
        if found.get("type") == "directory" or found.get("size") is None:
            raise SourceError("is no file, or the server does not tell its size", path=self.shown)
        if (coding := _coding(found)) not in ("", "identity"):
            what = (
                f"the server keeps it encoded ({coding}); what it sends may be decompressed on the way, without a limit"
            )
            raise SourceError(f"{what}; download the file, or have it stored without Content-Encoding", path=self.shown)
        self.known(int(found["size"]), next((f"{found[t]}" for t in _TAGS if found.get(t)), None))

    def fill(self, pieces: list[Piece]) -> None:
        """Fill every piece, several at a time."""
        if len(pieces) == 1:  # a thread costs more than it brings
            self._one(pieces[0])
            return
        for _ in map_ordered(lambda: self._one, pieces, MOST_AT_ONCE):
            pass

    def _one(self, piece: Piece) -> None:
        offset, target = piece
        fs, path = self.connection()

        def ask() -> bytes:
            data: bytes = fs.cat_file(path, start=offset, end=offset + len(target))
            if len(data) > len(target):
                what = f"the server sent {len(data)} bytes where {len(target)} were asked for"
                raise SourceError(f"{what}; download the file and load that", path=self.shown)
            if len(data) != len(target):
                self.check_same()
                raise EOFError(f"{len(data)} of {len(target)} bytes came")
            return data

        target[:] = self._tried(ask)

    def _tried(self, ask: Callable[[], T]) -> T:
        """Return what is asked for, after several tries where that may help.

        Each file system has errors of its own, of any class; but what they have in common with `OSError` is told apart.
        """
        tried = 0
        while True:
            try:
                return ask()
            except RecordError:
                raise
            except FileNotFoundError as error:
                raise self.missing() from error
            except (PermissionError, NotImplementedError, TypeError, ValueError) as error:
                what = f"the server or fsspec refused it ({_said(error)}); does storage_options= fit?"
                raise SourceError(what, path=self.shown) from error
            except Exception as error:
                tried += 1
                if tried == TRIES:
                    self._look(error)
                    raise self.failed(_said(error)) from error
                time.sleep(wait(tried))

    def _look(self, error: Exception) -> None:
        """Raise if the file is another one by now, which may be why a range cannot be had; ask once, and no more."""
        if self.size < 0:
            return
        fs, path = self.connection()
        try:
            fs.invalidate_cache(path)
            found = fs.info(path)
        except FileNotFoundError:
            raise self.missing() from error
        except Exception:
            return
        self._note(found)


def _coding(found: Mapping[str, Any]) -> str:
    """Return how a file is encoded where it lies, as far as its file system says so: any publisher may say gzip."""
    settings = found.get("content_settings")
    told = [found, settings] if isinstance(settings, Mapping) else [found]
    return next((str(t[name]).strip().lower() for t in told for name in _CODINGS if t.get(name)), "")


def _said(error: Exception) -> str:
    said = str(error) or type(error).__name__
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno and not error.args[1:] else said
