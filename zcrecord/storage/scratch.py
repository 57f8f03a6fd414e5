"""Scratch files: new files beside the place that they are to take, and what is left of those whose writer died.

Knows how they are named, and that a lock tells the living writers from the dead. Writing one, and putting it in its
place, is `files`'s. One may be a note: the names of shards that are there before, or after, the catalogue names them.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator

__all__ = [
    "MOST_OF_CATALOGUE",
    "note_of",
    "one_at_a_time",
    "remove_unnamed",
    "scratch_file",
    "shard_pattern",
    "unnamed",
]

_SUFFIX = ".zcr-scratch"
_LONGEST = 200  # bytes of a name that its scratch file's begins with
_TRIES = 16  # to make a file that no other process removes before it is locked
_NOTE = b"zcrecord shards\n"  # the start of a note; names follow, a line each
MOST_OF_CATALOGUE = 1 << 22  # bytes that are read of one, whose first payload has the names of its shards; or of a note
_MORE = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC"))


@contextlib.contextmanager
def scratch_file(path: str, mode: int = 0o666, *, clear: bool = True) -> Iterator[tuple[int, str]]:
    """Yield a new file beside `path`, open for reading and writing, and its name; at the end it is gone, or renamed.

    The writer closes it. Unless `clear` is False, scratch files for this path of processes that were killed are removed
    first; that of a living process, in another container or, if the file system carries locks, on another machine,
    never is.

    Raises:
        OSError: the file system reports an error.
    """
    folder, name = os.path.split(path)
    while len(os.fsencode(name)) > _LONGEST:  # file systems count bytes, and some take no part of a character
        name = name[:-1]
    stem = f".{name}."
    if clear:
        _clear(folder, stem, path)
    fd, held, scratch = _make(os.path.join(folder, stem), mode)
    try:
        yield fd, scratch
    finally:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        _close(held)


def _make(start: str, mode: int) -> tuple[int, int, str]:
    """Return a new file, a descriptor that locks it, so that no other process removes it, and its name."""
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
    """Return another descriptor, which locks a file until it is closed; -1 without locks, None if another has it.

    It is closed after the file took its place. Read-only, since no program can be started that is open for writing;
    but on file systems that lock only files open for writing.
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
    """Close those that are descriptors; errors of the file are told when the writer closes its own."""
    for fd in descriptors:
        if fd is not None and fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _lock(fd: int) -> bool | None:
    """Lock a file for as long as it is open; False if another process has the lock, None without locks."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


@contextlib.contextmanager
def one_at_a_time(folder: str) -> Iterator[None]:
    """Wait until no other such block, of this process or another, is run for a folder, where the system has locks."""
    fd = -1
    try:
        with contextlib.suppress(ImportError, OSError):  # Windows opens no folder, some file systems lock none
            import fcntl

            fd = os.open(folder or ".", os.O_RDONLY | _MORE)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        _close(fd)


def note_of(names: Iterable[str]) -> bytes:
    """Return a note: the content of a scratch file while shards of these names may be there that nothing names."""
    return _NOTE + "\n".join(names).encode()


def remove_unnamed(path: str, names: Iterable[str]) -> None:
    """Remove shards beside a path, but for those that the catalogue there names; others' files are left alone.

    Raises:
        OSError: the catalogue cannot be read; nothing was removed.
    """
    folder, name = os.path.split(path)
    ours = re.compile(shard_pattern(name))
    start = b""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        start = file.read(MOST_OF_CATALOGUE)
    for shard in unnamed(names, start):
        if ours.fullmatch(shard):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, shard))


def unnamed(names: Iterable[str], start: bytes) -> list[str]:
    """Return the shards that a catalogue does not name, by its first MOST_OF_CATALOGUE bytes; none if that cannot tell.

    Its names come first, but may be more than these bytes have.
    """
    names = list(names)
    if sum(map(len, names)) > MOST_OF_CATALOGUE // 4:
        return []
    return [name for name in names if name.encode() not in start]


def shard_pattern(name: str) -> str:
    """Return a regular expression of the names of shards beside a catalogue; a number or 16 random digits tell sets."""
    return rf"{re.escape(name.removesuffix('.zcr'))}(~\d+|~[0-9a-f]{{16}})?-\d{{5}}-of-\d{{5}}\.zcr"


def _clear(folder: str, stem: str, path: str) -> None:
    """Remove the scratch files of this stem, and of shards, that dead writers left, and shards that their notes name.

    Ranks of a distributed save write shards each by itself, without a note.
    """
    shard = rf"\.{shard_pattern(os.path.basename(path))}\."
    ours = re.compile(f"({re.escape(stem)}|{shard})[0-9a-f]{{12}}{re.escape(_SUFFIX)}")
    with contextlib.suppress(OSError):  # a folder may be written to and not listed
        with os.scandir(folder or ".") as entries:
            found = [entry.path for entry in entries if ours.fullmatch(entry.name)]
        for scratch in found:
            with contextlib.suppress(OSError):  # of another process, or removed by it meanwhile
                _remove_dead(scratch, path)


def _remove_dead(scratch: str, path: str) -> None:
    if os.name != "posix":  # Windows removes no file that is open
        os.unlink(scratch)
        return
    extra = os.O_NONBLOCK | os.O_NOFOLLOW | _MORE  # it may be anything
    try:
        fd = os.open(scratch, os.O_RDWR | extra)  # NFS locks only files open for writing
    except PermissionError:
        fd = os.open(scratch, os.O_RDONLY | extra)
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and _lock(fd):
            start = os.read(fd, MOST_OF_CATALOGUE if status.st_size <= MOST_OF_CATALOGUE else len(_NOTE))
            if start.startswith(_NOTE) and status.st_uid == os.geteuid():
                remove_unnamed(path, start[len(_NOTE) :].decode(errors="replace").split("\n"))
            os.unlink(scratch)
    finally:
        os.close(fd)
