"""Scratch files: where a file is written before it takes another's place, and what is left of those whose writer died.

Knows how they are named, that a lock tells the living from the dead, and how to say what the system refuses; nothing of
what is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from typing import NoReturn

from zcrecord.errors import SourceError

__all__ = ["refusals", "refuse", "scratch_file"]

_MAPPED = (5, 32, 1224)  # what Windows says to who replaces an open file: denied, shared, a user-mapped section
_SUFFIX = ".zcr-scratch"
_LONGEST = 200  # bytes of a name that its scratch file's begins with
_TRIES = 16  # to make a file that nobody removes before it is locked
_MORE = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC"))


@contextlib.contextmanager
def scratch_file(path: str, mode: int = 0o666) -> Iterator[tuple[int, str]]:
    """Yield a new file beside `path`, open for reading and writing, and its name; at the end it is gone, or renamed.

    Who writes closes it. Those that processes left which were killed while they wrote for this path are removed first;
    the one of a process that lives, in another container or, where the file system carries locks, on another machine,
    never is.

    Raises:
        OSError: the file system refused.
    """
    folder, name = os.path.split(path)
    while len(os.fsencode(name)) > _LONGEST:  # file systems count bytes, and some take no part of a character
        name = name[:-1]
    stem = f".{name}."
    _clear(folder, stem)
    fd, held, scratch = _make(os.path.join(folder, stem), mode)
    try:
        yield fd, scratch
    finally:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        _close(held)


def _make(start: str, mode: int) -> tuple[int, int, str]:
    """Return a new file, a descriptor that locks it, so that nobody takes it for a dead one's, and its name."""
    for _ in range(_TRIES):
        fd, scratch = _new(start, mode)
        held = None
        try:
            held = _hold(fd, scratch)
            if held is not None and os.path.lexists(scratch):
                return fd, held, scratch
        except OSError:
            _give_up(scratch, fd)
            raise
        _give_up(scratch, fd, held)  # it was removed between its making and its locking
    fd, scratch = _new(start, mode)
    return fd, -1, scratch


def _new(start: str, mode: int) -> tuple[int, str]:
    scratch = f"{start}{os.urandom(6).hex()}{_SUFFIX}"
    return os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | _MORE, mode), scratch  # never open to more people


def _hold(fd: int, scratch: str) -> int | None:
    """Return another descriptor, by which a file is locked until it is closed; -1 without locks, None: another has it.

    It is closed after the file took its place. Read-only, since no program can be started that is open for writing;
    but on file systems that lock only what may be written.
    """
    if os.name != "posix":
        return -1
    for reading in (True, False):
        try:
            held = os.open(scratch, os.O_RDONLY | _MORE) if reading else os.dup(fd)
        except OSError:
            if not reading:
                raise
            continue
        locked = _lock(held)
        if locked:
            return held
        _close(held)
        if locked is False:
            return None
    return -1


def _give_up(scratch: str, *descriptors: int | None) -> None:
    _close(*descriptors)
    with contextlib.suppress(OSError):
        os.unlink(scratch)


def _close(*descriptors: int | None) -> None:
    """Close what is one; what there is to tell of the file is told to who closes it after writing."""
    for fd in descriptors:
        if fd is not None and fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _lock(fd: int) -> bool | None:
    """Lock a file for as long as it is open; False if another has it, None where there are no locks."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _clear(folder: str, stem: str) -> None:
    """Remove the scratch files of this stem whose writers are dead."""
    ours = re.compile(f"{re.escape(stem)}[0-9a-f]{{12}}{re.escape(_SUFFIX)}")
    with contextlib.suppress(OSError):  # a folder may be written to and not listed
        with os.scandir(folder or ".") as entries:
            found = [entry.path for entry in entries if ours.fullmatch(entry.name)]
        for scratch in found:
            with contextlib.suppress(OSError):  # another's, or somebody else was faster
                _remove_dead(scratch)


def _remove_dead(scratch: str) -> None:
    if os.name != "posix":  # Windows removes no file that is open
        os.unlink(scratch)
        return
    extra = os.O_NONBLOCK | os.O_NOFOLLOW | _MORE  # it may be anything that somebody has put there
    try:
        fd = os.open(scratch, os.O_RDWR | extra)  # NFS locks only what may be written
    except PermissionError:
        fd = os.open(scratch, os.O_RDONLY | extra)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode) and _lock(fd):
            os.unlink(scratch)
    finally:
        os.close(fd)


@contextlib.contextmanager
def refusals(path: str) -> Iterator[None]:
    """Turn what the operating system says about this path into one typed error."""
    try:
        yield
    except OSError as error:
        refuse(error, path)


def refuse(error: OSError, path: str) -> NoReturn:
    """Raise what the operating system said about this path, as a SourceError that says what became of the old file."""
    if isinstance(error, SourceError) or error.errno is None:
        raise error
    reason = os.strerror(error.errno)
    if getattr(error, "winerror", None) in _MAPPED:
        reason = "it is mapped, by a record loaded from it here or in another program; close() that, drop its views"
    kept = "; the file there before is untouched" if os.path.isfile(path) else ""
    raise SourceError(f"cannot write: {reason}{kept}", path=path, errno=error.errno) from error
