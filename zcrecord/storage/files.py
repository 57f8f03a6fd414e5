"""Parts that all conversions share: the check of destinations, the opening of sources.

Knows files and processes; nothing of any format's inside, which is left to `onnx` and `formats`.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from zcrecord.errors import DestinationExistsError, SourceError, SourceNotFoundError

from .scratch import refusals

__all__ = [
    "Binary",
    "Progress",
    "check_destination",
    "open_source",
    "path_or_none",
]

Binary = IO[bytes] | io.RawIOBase | io.BufferedIOBase
Progress = Callable[[int, int | None], None]  # bytes done, bytes in all where that is known


def path_or_none(file: Any) -> str | None:
    """Return a path as text, None for a file object."""
    if hasattr(file, "read") or hasattr(file, "write"):
        return None
    return os.fsdecode(os.fspath(file))


def check_destination(source: str | None, dest: str | None, force: bool) -> None:
    """Raise unless `dest` may be written: it is not there, or is to be replaced, and is never the source.

    Raises:
        DestinationExistsError: it is there and `force` is not given, or it is the source. SourceError: nobody can tell.
    """
    if dest is None:
        return
    with refusals(dest):
        if not Path(dest).exists():
            return
        if source is not None and Path(source).exists() and Path(dest).samefile(source):
            raise DestinationExistsError("source and destination are the same file; name another", path=dest)
        if not force and Path(dest).is_file():
            raise DestinationExistsError("exists already; force=True replaces it", path=dest)


class _Source(io.FileIO):
    """A file that is only read: closing it has nothing to tell."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def open_source(path: str) -> tuple[io.FileIO, int | None]:
    """Return a file to read forward, and its length if it is a regular one.

    Raises:
        SourceError: it is missing (SourceNotFoundError), a directory, or cannot be read.
    """
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(_Source(path))
            status = os.fstat(file.fileno())
            stack.pop_all()
    except OSError as error:
        kind = SourceNotFoundError if isinstance(error, FileNotFoundError) else SourceError
        raise kind(f"cannot read: {error.strerror or error}", path=path, errno=error.errno) from error
    if not stat.S_ISREG(status.st_mode):
        return file, None
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file, status.st_size
