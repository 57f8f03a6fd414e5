"""Where bytes go: a file that appears whole or not at all, or any binary file object, a pipe included.

Knows system calls and how to undo; nothing of archives. What is left of those who could not is `scratch`'s, what file
objects say `fileobject`'s.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from zcrecord.errors import SourceError, UnsupportedError

from .file_objects import ObjectSink, flat
from .scratch import refusals, refuse, scratch_file

__all__ = ["NullSink", "Sink", "open_sink", "path_of"]

_RESERVED = 64 << 20  # bytes of a file that is allocated before it is written
_SMALL, _GATHERED = 1 << 15, 1 << 18  # bytes of a write that is gathered, and of all that are
_AHEAD = 16 << 20  # bytes of a file that is to be durable, at a time, that the disk is set to work on
_OF_CONTENT = ("security.ima", "security.evm")  # extended attributes that sign a file's bytes
_MOST = 1 << 30  # bytes of one write; Linux takes no more than 2 GiB - 4 KiB


class Sink(Protocol):
    """Something to write forward into.

    Attributes:
        position: bytes written so far.
        can_rewind: `rewind` and `patch` work, and `read_back` if it `keeps` what was written.
        keeps: what was written can be read back, where it can rewind.
    """

    position: int
    can_rewind: bool
    keeps: bool

    def write(self, data: Any) -> None:
        """Append all of a bytes-like."""

    def flush(self) -> None:
        """Hand on what `write` gathered, so that its failing is told now."""

    def reserve(self, nbytes: int) -> None:
        """Say how many bytes will be written in all."""

    def read_back(self, offset: int, size: int) -> bytes:
        """Return bytes written earlier."""

    def rewind(self, offset: int) -> None:
        """Forget everything from `offset` on."""

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes written earlier; the position stays."""


class _FileSink:
    """A regular file of our own, by its descriptor. Small writes are gathered; `flush` writes what is left of them."""

    can_rewind = keeps = True

    def __init__(self, fd: int, path: str, *, durable: bool) -> None:
        self._fd, self._path = fd, path
        self.position = 0
        self._begun = 0 if durable and sys.platform == "linux" else 1 << 62  # up to where the disk was set to work
        self._gathered = bytearray()  # the last bytes, not written yet

    def reserve(self, nbytes: int) -> None:
        """Allocate now what small files need: ext4 flushes what is not yet allocated when a rename replaces a file.

        Larger files gain little, and where the file system knows no fallocate the C library writes to every block.
        """
        if nbytes <= _RESERVED and hasattr(os, "posix_fallocate"):
            with contextlib.suppress(OSError):  # a full disk is reported by the write
                os.posix_fallocate(self._fd, 0, nbytes)

    def write(self, data: Any) -> None:
        view = data if type(data) is bytes else flat(data)
        nbytes = len(view)
        if nbytes <= _SMALL and self.position:  # the first goes straight: a disk may be full from the start
            self._gathered += view
            self.position += nbytes
            if len(self._gathered) > _GATHERED:
                self.flush()
            return
        self.flush()
        self._write(flat(view))
        self.position += nbytes
        if self.position - self._begun >= _AHEAD:
            self._begin()

    def _begin(self) -> None:
        """Have the disk begin with what was written, so that little is left to wait for at the end."""
        begun, self._begun = self._begun, self.position
        with contextlib.suppress(OSError):  # Linux starts to write these pages out, and lets go of the few that are
            os.posix_fadvise(self._fd, begun, self.position - begun, os.POSIX_FADV_DONTNEED)

    def _write(self, view: memoryview) -> None:
        try:
            while len(view):
                view = view[os.write(self._fd, view[:_MOST]) :]
        except OSError as error:
            refuse(error, self._path)

    def flush(self) -> None:
        """Write what was gathered."""
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._write(memoryview(gathered))

    def read_back(self, offset: int, size: int) -> bytes:
        written = self.position - len(self._gathered)
        if offset >= written:
            return bytes(self._gathered[offset - written : offset - written + size])
        self.flush()
        with refusals(self._path):
            here = os.lseek(self._fd, 0, os.SEEK_CUR)
            os.lseek(self._fd, offset, os.SEEK_SET)
            parts = []
            while size and (part := os.read(self._fd, size)):
                parts.append(part)
                size -= len(part)
            os.lseek(self._fd, here, os.SEEK_SET)
            return b"".join(parts)

    def rewind(self, offset: int) -> None:
        written = self.position - len(self._gathered)
        del self._gathered[max(offset - written, 0) :]
        self.position = offset
        self._begun = min(self._begun, offset) if self._begun < 1 << 62 else self._begun
        if offset < written:
            with refusals(self._path):
                os.ftruncate(self._fd, offset)
                os.lseek(self._fd, offset, os.SEEK_SET)

    def patch(self, offset: int, data: bytes) -> None:
        self.flush()
        with refusals(self._path):
            here = os.lseek(self._fd, 0, os.SEEK_CUR)
            os.lseek(self._fd, offset, os.SEEK_SET)
            self._write(memoryview(data))
            os.lseek(self._fd, here, os.SEEK_SET)


class NullSink:
    """A sink that counts what is written and keeps nothing."""

    can_rewind, keeps = True, False

    def __init__(self) -> None:
        self.position = 0

    def reserve(self, nbytes: int) -> None:
        """Nothing to prepare."""

    def write(self, data: Any) -> None:
        """Count it."""
        self.position += memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing was gathered."""

    def read_back(self, offset: int, size: int) -> bytes:
        """Refuse: nothing was kept."""
        raise UnsupportedError(f"bytes [{offset}, {offset + size}) were counted and not kept")

    def rewind(self, offset: int) -> None:
        """Forget everything from `offset` on."""
        self.position = offset

    def patch(self, offset: int, data: bytes) -> None:
        """Nothing to overwrite."""


def path_of(value: Any) -> str:
    """Return a path as text.

    Raises:
        UnsupportedError: it is no path. SourceError: no file can have that name.
    """
    if isinstance(value, bytes):
        what = "a path as bytes, which load_record would take for an archive's own; pass it as text, by os.fsdecode"
        raise UnsupportedError(what)
    try:
        path = os.fsdecode(value)
        os.fsencode(path)
    except TypeError:
        raise UnsupportedError(f"a {type(value).__name__} is neither a path nor a binary file object") from None
    except UnicodeError:
        raise SourceError("no file can have this name, it has lone surrogates", path=repr(value)) from None
    if "\0" in path:
        raise SourceError("no file can have this name, it contains NUL", path=path)
    return path


@contextlib.contextmanager
def open_sink(dest: Any, *, durable: bool = True, like: str | None = None) -> Iterator[Sink]:
    """Yield a sink for a path or a binary file object.

    A path gets a scratch file beside it, which replaces what is there only when the block ends without an exception,
    and is removed otherwise: the path holds the old file or the new one, whole. `durable` adds an fsync of the file
    and of its folder. A symbolic link keeps pointing where it did; a device or a pipe is written to directly.

    Raises:
        SourceError: the file system refused; `errno` says how.
    """
    if hasattr(dest, "write"):
        sink = ObjectSink(dest)
        yield sink
        sink.flush()
        return
    given = path_of(dest)
    path = os.path.realpath(given)
    with refusals(path):
        mode = _mode_of(given)  # and not of `path`: that of /dev/fd/3 may be no path at all
    if not os.path.basename(given) or (mode is not None and stat.S_ISDIR(mode)):
        raise SourceError("is a directory; name a file in it", path=path, errno=errno.EISDIR)
    if mode is not None and not stat.S_ISREG(mode):
        with refusals(given):
            file = open(given, "wb", buffering=0)  # noqa: SIM115  # what the block raises is no refusal
        with file:
            yield ObjectSink(file)
        return
    yield from _replacing(path, mode, durable, like)


def _mode_of(path: str) -> int | None:
    """Return a file's type and mode, None if it is not there; whatever else keeps that unknown is an error."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _replacing(path: str, old_mode: int | None, durable: bool, like: str | None) -> Iterator[Sink]:
    """What the system refuses here is one typed error; what is thrown in by who writes goes through as it is."""
    replaced = os.name == "posix" and old_mode is not None  # Windows has no more than read-only, and replaces no such
    mode = stat.S_IMODE(old_mode) if replaced and old_mode is not None else 0o666
    with contextlib.ExitStack() as stack:
        with refusals(path):
            fd, scratch = stack.enter_context(scratch_file(path, mode))
        try:
            if replaced:
                with refusals(path):
                    os.chmod(scratch, mode)
            sink = _FileSink(fd, path, durable=durable)
            yield sink
            sink.flush()
            with refusals(path):
                if like is not None:  # last: whoever writes takes setuid and capabilities away
                    _make_like(scratch, like)
                if durable:
                    _sync(fd)
        finally:
            with refusals(path):
                os.close(fd)
        with refusals(path):
            os.replace(scratch, path)
    if durable and os.name == "posix":
        _sync_folder(os.path.dirname(path))


def _make_like(path: str, like: str) -> None:
    """Give a file another's mode, and its owner and extended attributes as far as one may."""
    status = os.stat(like)
    mode = stat.S_IMODE(status.st_mode)
    if hasattr(os, "chown"):
        try:
            os.chown(path, status.st_uid, status.st_gid)
        except OSError:
            mode &= 0o777  # setuid would make it run as another than the one it did
    if hasattr(os, "listxattr"):
        with contextlib.suppress(OSError):  # not every file system has any
            for name in os.listxattr(like):
                if name not in _OF_CONTENT:
                    with contextlib.suppress(OSError):
                        os.setxattr(path, name, os.getxattr(like, name))
    os.chmod(path, mode)


def _sync(fd: int) -> None:
    """Have what was written survive power loss."""
    os.fsync(fd)
    if sys.platform == "darwin":  # there fsync leaves it in the drive's cache
        import fcntl

        with contextlib.suppress(OSError):  # not every file system has it
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)


def _sync_folder(folder: str) -> None:
    """Have a rename survive power loss, where that can be asked for; it is done, and no failure here undoes it."""
    with contextlib.suppress(OSError):  # some network file systems cannot; some folders may be written but not read
        fd = os.open(folder, os.O_RDONLY)
        try:
            _sync(fd)
        finally:
            os.close(fd)
