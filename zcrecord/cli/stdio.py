"""Input of commands: standard streams as bytes, files that have to be regular, archives from either."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from zcrecord.archive.archive import Embedded, Verify
from zcrecord.errors import SourceError
from zcrecord.foreign.folders import model_in
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.storage.files import is_url

from .endings import located

_PIPE_NBYTES = 1 << 20  # of a pipe's buffer, if the system allows it; a sixteenth is usual, with 16 times the switches


def binary_stream(stream: Any, name: str) -> Any:
    """Return the binary buffer of standard input or output (`name`), a pipe made larger; SourceError if closed."""
    if stream is None:
        raise SourceError("is closed", path=f"standard {name}")
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):  # not Linux, no pipe, over a quota
        import fcntl

        fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
    return stream.buffer


def name_of(argument: str) -> str:
    """Return the name of an input for messages: "-" is standard input; a URL is without its secrets."""
    if is_url(argument):
        from zcrecord.storage.urls import redacted  # here, because few inputs are URLs

        return redacted(argument)
    return "standard input" if argument == "-" else argument


def source_of(argument: str) -> Any:
    """Return the source of a record: all bytes of standard input for "-", the one model of a folder, or `argument`."""
    if argument == "-":
        stream = binary_stream(sys.stdin, "input")
        try:
            return stream.read()
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror or error}", errno=error.errno) from error
    check_file(argument, "pipe it in, and give - in its place")
    return model_in(argument, archive_first=True) if os.path.isdir(argument) else argument


@contextlib.contextmanager
def open_archive(
    argument: str, embedded: Embedded | None = None, keys: Sequence[str] | None = None, verify: Verify = "index"
) -> Iterator[Record]:
    """Open the archive of an argument, which the owner of one of the `keys` has signed; errors in the block name it."""
    options: dict[str, Any] = {"embedded": embedded, "trusted_keys": keys, "verify": verify}
    with located(name_of(argument)), load_record(source_of(argument), **options) as record:
        yield record


def check_file(path: str, advice: str = "copy it to one, and give that") -> None:
    """Raise SourceError if a path is a pipe or a device, for a command that needs a file."""
    mode = stat.S_IFREG
    with contextlib.suppress(OSError, ValueError):  # other faults are reported when the file is opened
        mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise SourceError(f"not a regular file; {advice}", path=path)
