"""Input of commands: standard streams as bytes, files that have to be regular, archives from either."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

from zcrecord.errors import RecordError, SourceError
from zcrecord.record.load import load_record
from zcrecord.record.record import Record

from .endings import located

__all__ = ["binary", "check_file", "name_of", "opened_archive", "read_stdin", "size_ahead"]

_PIPE = 1 << 20  # bytes of a pipe, where the system grants them; a sixteenth is usual, and as many more switches


def binary(stream: Any, what: str) -> Any:
    """Return the binary buffer of a standard stream; a pipe is made larger first.

    Raises:
        SourceError: the process was started without it.
    """
    if stream is None:
        raise SourceError("is closed", path=f"standard {what}")
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):  # not Linux, no pipe, over a quota
        import fcntl

        fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)
    return stream.buffer


def read_stdin() -> Any:
    """Return all of standard input.

    Raises:
        SourceError: it is closed, or cannot be read.
    """
    try:
        return binary(sys.stdin, "input").read()
    except OSError as error:
        if isinstance(error, RecordError):
            raise
        raise SourceError(f"cannot be read: {error.strerror or error}", errno=error.errno) from error


def name_of(given: str) -> str:
    """Return the name of an input for messages: "-" is standard input."""
    return "standard input" if given == "-" else given


@contextlib.contextmanager
def opened_archive(given: str) -> Iterator[Record]:
    """Open an archive, or standard input if `given` is "-"; errors inside the block name it."""
    with (
        located(name_of(given)),
        load_record(read_stdin() if given == "-" else given) as record,
    ):
        yield record


def check_file(path: str) -> None:
    """Refuse a pipe or a device, for a command that needs a file.

    Raises:
        SourceError: the path is one.
    """
    mode = stat.S_IFREG
    with contextlib.suppress(OSError, ValueError):  # what is wrong otherwise is told when it is opened
        mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise SourceError("not a regular file; copy it to one, and give that", path=path)


def size_ahead(stream: BinaryIO) -> int | None:
    """Return the bytes that are left to read of a regular file; None for a pipe."""
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(stream.fileno())
        if stat.S_ISREG(status.st_mode):
            return max(status.st_size - stream.tell(), 0)
    return None
