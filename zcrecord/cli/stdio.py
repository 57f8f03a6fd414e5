"""Standard input and output, as the bytes that the command line takes from them and gives to them.

Knows that they may be closed, and how much there is to read; what is done with it is left to `cli`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from typing import Any, BinaryIO

from zcrecord.errors import RecordError, SourceError

__all__ = ["binary", "check_file", "read_stdin", "size_ahead"]

_PIPE = 1 << 20  # bytes of a pipe, where the system grants them; a sixteenth is usual, and as many more switches


def binary(stream: Any, what: str) -> Any:
    """Return the bytes under a standard stream; of a pipe, after it was told to hold more.

    Raises:
        SourceError: the process was started without it.
    """
    if stream is None:
        raise SourceError("it is closed", path=f"standard {what}")
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


def check_file(path: str) -> None:
    """Raise for a pipe or a device, where a command needs a file and takes no standard input either.

    Raises:
        SourceError: the path is one.
    """
    mode = stat.S_IFREG
    with contextlib.suppress(OSError, ValueError):  # what is wrong otherwise is told when it is opened
        mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise SourceError("not a regular file; write it to one, and name that", path=path)


def size_ahead(stream: BinaryIO) -> int | None:
    """Return how many bytes there are to read from where a regular file is; None for a pipe."""
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(stream.fileno())
        if stat.S_ISREG(status.st_mode):
            return max(status.st_size - stream.tell(), 0)
    return None
