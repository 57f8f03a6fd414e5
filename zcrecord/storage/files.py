"""Local files: paths, opening to read, and destinations that appear whole or not at all.

A file is written beside its place, as a scratch file (`scratch`), and takes it at the end. Knows system calls, and how
to undo; nothing of archives.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NoReturn, TypeGuard

from zcrecord.errors import DestinationExistsError, SourceError, SourceNotFoundError, UnsupportedError

from .copying import copy_range
from .scratch import Descriptor, folder_lock, scratch_file
from .sink import ObjectSink, Sink

__all__ = [
    "Binary",
    "FileSink",
    "Identity",
    "Progress",
    "absolute_path",
    "check_destination",
    "identity_of",
    "is_url",
    "open_regular",
    "open_sink",
    "open_source",
    "path_of",
    "path_of_open",
    "path_or_none",
    "put_in_place",
    "read_start",
    "refusals",
    "scratch_file",
    "scratch_folder",
    "sync_file",
    "sync_folder",
    "version_of",
]

Binary = IO[bytes] | io.RawIOBase | io.BufferedIOBase
Identity = tuple[int, ...]  # of a file, to know it again: device, inode, size, time of change
Progress = Callable[[int, int | None], None]  # bytes done, bytes in all where that is known

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z][A-Za-z0-9+.-]+)*://")
_REGULAR = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"))  # a pipe would wait otherwise

_RESERVED = 64 << 20  # bytes of a file that is allocated before it is written
_SMALL, _GATHERED = 1 << 15, 1 << 18  # bytes of a write that is gathered, and of all that are
_AHEAD = 16 << 20  # bytes of a file that is to be durable, at a time, that the disk is set to work on
_OF_CONTENT = ("security.ima", "security.evm")  # extended attributes that sign a file's bytes
_MOST = 1 << 30  # bytes of one write; Linux takes no more than 2 GiB - 4 KiB

_MAPPED = (5, 32, 1224)  # Windows' codes for replacing an open file: denied, shared, a user-mapped section


# Paths.


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


def path_or_none(file: Any) -> str | None:
    """Return a path as text, None for a file object."""
    if hasattr(file, "read") or hasattr(file, "write"):
        return None
    return os.fsdecode(os.fspath(file))


def path_of_open(file: Any) -> str | None:
    """Return the path of a file opened by `open`, if it is at its first byte and that path still leads to it."""
    raw = getattr(file, "raw", file)
    if not isinstance(raw, io.FileIO) or not isinstance(raw.name, str):  # a gzip file has name and descriptor, too
        return None
    with contextlib.suppress(OSError, ValueError):
        if file.readable() and file.tell() == 0 and os.path.samestat(os.stat(raw.name), os.fstat(raw.fileno())):
            return raw.name
    return None


def is_url(source: Any) -> TypeGuard[str]:
    """Return True for a URL such as `https://...`, several chained ones included; a Windows path is none.

    Only text is: a file in a folder named `https:` is reached by a `pathlib.Path`, or with `./` before its path.
    """
    return isinstance(source, str) and "://" in source and _URL.match(source) is not None


def absolute_path(path: str) -> str:
    """Return a path that stays right when the working folder changes; `..` is left to the system, for links' sake."""
    if os.name == "nt":
        return os.path.abspath(path)
    if path.startswith("/"):
        return path
    with contextlib.suppress(FileNotFoundError):  # the working folder was removed
        return os.path.join(os.getcwd(), path)
    return path


# Opening to read.


def _check_no_url(path: str) -> None:
    if is_url(path):
        from .urls import redacted  # here, because few paths are

        what = "is a URL, and this reads files; download it, and name the file"
        raise UnsupportedError(what, path=redacted(path))


class _ReadOnlyFile(io.FileIO):
    """A file that is only read: closing it has nothing to tell."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def open_regular(path: str, opened: int | None = None) -> tuple[io.FileIO, Identity]:
    """Return a regular file, to be read by position, and its identity; with `opened`, that of another descriptor.

    Raises:
        SourceError: it is a directory, a pipe or a device. OSError: the system refuses. UnsupportedError: it is a URL.
    """
    _check_no_url(path)
    # Before it is opened: a file object refuses a directory's descriptor, and leaves it open.
    if opened is None and os.path.isdir(path):
        raise SourceError("is a directory; name an archive in it", path=path, errno=errno.EISDIR)
    call = map(os.open, [path], [os.O_RDONLY | _REGULAR]) if opened is None else map(os.dup, [opened])
    with contextlib.ExitStack() as stack:
        # In one step of the interpreter: Ctrl-C cannot come between the descriptor and the object that closes it.
        file = stack.enter_context(next(map(_ReadOnlyFile, call)))
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("not a regular file; read it and pass the bytes", path=path)
        stack.pop_all()
    return file, _identity(status)


def open_source(path: str) -> tuple[io.FileIO, int | None]:
    """Return a file to read forward, and its length if it is a regular one.

    Raises:
        SourceError: it is missing (SourceNotFoundError), a directory, or cannot be read. UnsupportedError: it is a URL.
    """
    _check_no_url(path)
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(_ReadOnlyFile(path))
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


def read_start(path: str, most: int) -> bytes:
    """Return the first bytes of a file, at most so many.

    Raises:
        SourceError: it is missing (SourceNotFoundError), a directory, or cannot be read.
    """
    with open_source(path)[0] as file:
        try:
            return file.read(most)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror or error}", path=path, errno=error.errno) from error


def identity_of(file: int | str) -> Identity:
    """Return the identity of an open file, by its descriptor, or of the file at a path.

    Raises:
        SourceError: the system does not tell.
    """
    try:
        return _identity(os.stat(file))
    except OSError as error:
        path = file if isinstance(file, str) else None
        raise SourceError(f"cannot be read: {error.strerror}", path=path, errno=error.errno) from error


def version_of(path: str) -> Identity:
    """Return the identity of the file at a path, which a saver may be given to replace; empty if none is there.

    Raises:
        OSError: the system does not tell.
    """
    try:
        return _identity(os.stat(path))
    except FileNotFoundError:
        return ()


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


# Destinations.


def check_destination(
    source: str | None, dest: str | None, force: bool, options: Mapping[str, Any] | None = None
) -> Identity | None:
    """Raise unless `dest` may be written: it is not there, or is to be replaced, and is never the source.

    Both may be URLs; `options` are those for fsspec to reach `dest`. Returns what `open_sink` may replace: of a path
    where nothing is, nothing unless `force` is given, since another saver may come first.

    Raises:
        DestinationExistsError: it is there and `force` is not given, or it is the source.
        SourceError: the system, or the store, does not tell.
    """
    if dest is None:
        return None
    if is_url(dest):
        from . import uploads  # here, because few destinations are URLs

        if (local := uploads.local_path(dest, options)) is None:
            if source == dest:
                raise DestinationExistsError("source and destination are the same URL; name another", path=dest)
            uploads.check_new(dest, options, force)
            return None
        dest = local
    from pathlib import Path  # here, because a program that only loads is spared 3 ms

    with refusals(dest):
        if not Path(dest).exists():
            return None if force else ()
        if source is not None and Path(source).exists() and Path(dest).samefile(source):
            raise DestinationExistsError("source and destination are the same file; name another", path=dest)
        if not force and Path(dest).is_file():
            raise DestinationExistsError("exists already; force=True replaces it", path=dest)
    return None


@contextlib.contextmanager
def open_sink(
    dest: Any,
    *,
    durable: bool = True,
    like: str | None = None,
    options: Mapping[str, Any] | None = None,
    replaces: Identity | str | None = None,
) -> Iterator[Sink]:
    """Yield a sink for a path, a URL or a binary file object.

    A path gets a scratch file beside it, which replaces the file there only when the block ends without an exception,
    and is removed otherwise: the path holds the old file or the new one, whole. `durable` adds an fsync of the file
    and of its folder. A symbolic link keeps pointing where it did; a device or a pipe is written to directly.
    `uploads` does the same for a URL, with `options` for fsspec; its sink cannot be read back.

    `replaces` is the only version that may be replaced, as `version_of` tells it of a path, `uploads.version_at` of a
    URL; None for any.

    Raises:
        SourceError: the file system, or the store, reports an error, and `errno` says how; or another version is there.
    """
    if hasattr(dest, "write"):
        sink = ObjectSink(dest)
        yield sink
        sink.flush()
        return
    if is_url(dest):
        from . import uploads  # here, because few destinations are URLs

        if (local := uploads.local_path(dest, options)) is None:
            with uploads.upload(dest, options, replaces=replaces if isinstance(replaces, str) else None) as uploaded:
                yield uploaded
            return
        dest = local
    given = path_of(dest)
    path = os.path.realpath(given)
    with refusals(path):
        mode = _mode_of(given)  # and not of `path`: that of /dev/fd/3 may be no path at all
    if not os.path.basename(given) or (mode is not None and stat.S_ISDIR(mode)):
        raise SourceError("is a directory; name a file in it", path=path, errno=errno.EISDIR)
    if mode is not None and not stat.S_ISREG(mode):
        with refusals(given):
            file = open(given, "wb", buffering=0)  # noqa: SIM115  # an exception of the block is no refusal
        with file:
            yield ObjectSink(file)
        return
    yield from _replacing(path, mode, durable, like, replaces)


def _mode_of(path: str) -> int | None:
    """Return a file's type and mode, None if it is not there; any other failure is an error."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _replacing(
    path: str, old_mode: int | None, durable: bool, like: str | None, replaces: Identity | str | None
) -> Iterator[Sink]:
    """Yield a sink over a scratch file that takes the place of `path` at the end.

    Refusals of the system are one typed error; an exception of the block goes through as it is.
    """
    replaced = os.name == "posix" and old_mode is not None  # Windows has no more than read-only, and replaces no such
    mode = stat.S_IMODE(old_mode) if replaced and old_mode is not None else 0o666
    with contextlib.ExitStack() as stack:
        with refusals(path):
            file, scratch = stack.enter_context(scratch_file(path, mode))
            if replaced:
                os.chmod(scratch, mode)
        sink = FileSink(file.fileno(), path, durable=durable)
        yield sink
        sink.flush()
        with refusals(path):
            if like is not None:  # last: writing takes setuid and capabilities away
                _make_like(scratch, like)
            if durable:
                sync_file(file.fileno())
            file.close()
        put_in_place(scratch, path, durable=durable, replaces=replaces)


def put_in_place(scratch: str, path: str, *, durable: bool, replaces: Identity | str | None = None) -> None:
    """Move a finished file to a path, where it replaces what is there: every saver's last step.

    The folder is locked from the look at what is there to the move, so that no other saver comes in between. `durable`
    adds an fsync of the folder; the file had its own.

    Args:
        replaces: the version, as `version_of` tells it, that alone may be replaced; None for any.

    Raises:
        SourceError: another version is there (DestinationExistsError: something is), and stays; or the file system
        reports an error.
    """
    folder = os.path.dirname(path)
    with refusals(path), folder_lock(folder):
        if replaces is not None and version_of(path) != replaces:
            if not replaces:
                what = "was made by another saver meanwhile, and stays; look at it, and start again"
                raise DestinationExistsError(what, path=path, errno=errno.EEXIST)
            what = "was replaced meanwhile, and that stays; start again with the file that is there now"
            raise SourceError(what, path=path)
        os.replace(scratch, path)
    if durable and os.name == "posix":
        sync_folder(folder)


def _make_like(path: str, like: str) -> None:
    """Give a file another's mode, and its owner and extended attributes as far as one may."""
    status = os.stat(like)
    mode = stat.S_IMODE(status.st_mode)
    if hasattr(os, "chown"):
        try:
            os.chown(path, status.st_uid, status.st_gid)
        except OSError:
            mode &= 0o777  # setuid would make it run as another user than before
    if hasattr(os, "listxattr"):
        with contextlib.suppress(OSError):  # not every file system has any
            for name in os.listxattr(like):
                if name not in _OF_CONTENT:
                    with contextlib.suppress(OSError):
                        os.setxattr(path, name, os.getxattr(like, name))
    os.chmod(path, mode)


def sync_file(fd: int) -> None:
    """Flush a file to the disk, so that it survives power loss."""
    os.fsync(fd)
    if sys.platform == "darwin":  # there fsync leaves it in the drive's cache
        import fcntl

        with contextlib.suppress(OSError):  # not every file system has it
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)


def sync_folder(folder: str) -> None:
    """Flush a folder to the disk, so that a rename survives power loss; failures are ignored, since it is done."""
    # Some network file systems cannot; some folders may be written but not read.
    with contextlib.suppress(OSError), Descriptor(os.open, folder or ".", os.O_RDONLY) as opened:
        sync_file(opened.fileno())


class FileSink:
    """A sink over a regular file of our own, by its descriptor. Small writes are gathered; `flush` writes them."""

    can_rewind = keeps = True

    def __init__(self, fd: int, path: str, *, durable: bool) -> None:
        self._fd, self._path = fd, path
        self.position = 0
        self._begun = 0 if durable and sys.platform == "linux" else 1 << 62  # up to where the disk was set to work
        self._gathered = bytearray()  # the last bytes, not written yet

    def reserve(self, nbytes: int) -> None:
        """Allocate small files now: ext4 flushes bytes that are not yet allocated when a rename replaces a file.

        Larger files gain little, and where the file system knows no fallocate the C library writes to every block.
        """
        if nbytes <= _RESERVED and hasattr(os, "posix_fallocate"):
            with contextlib.suppress(OSError):  # a full disk is reported by the write
                os.posix_fallocate(self._fd, 0, nbytes)

    def write(self, data: Any) -> None:
        """Append all of a bytes-like."""
        view = memoryview(data)
        nbytes = view.nbytes
        if nbytes <= _SMALL and self.position:  # the first goes straight: a disk may be full from the start
            self._gathered += view
            self.position += nbytes
            if len(self._gathered) > _GATHERED:
                self.flush()
            return
        self.flush()
        if nbytes:
            self._write(view.cast("B"))
        self.position += nbytes
        if self.position - self._begun >= _AHEAD:
            self._begin()

    def _begin(self) -> None:
        """Have the disk begin with the bytes written so far, so that little is left to wait for at the end."""
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
        """Write the bytes that were gathered."""
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._write(memoryview(gathered))

    def read_back(self, offset: int, size: int) -> bytes:
        """Return bytes written earlier."""
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
        """Forget everything from `offset` on."""
        written = self.position - len(self._gathered)
        del self._gathered[max(offset - written, 0) :]
        self.position = offset
        self._begun = min(self._begun, offset) if self._begun < 1 << 62 else self._begun
        if offset < written:
            with refusals(self._path):
                os.ftruncate(self._fd, offset)
                os.lseek(self._fd, offset, os.SEEK_SET)

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes written earlier; the position stays."""
        self.flush()
        with refusals(self._path):
            here = os.lseek(self._fd, 0, os.SEEK_CUR)
            os.lseek(self._fd, offset, os.SEEK_SET)
            self._write(memoryview(data))
            os.lseek(self._fd, here, os.SEEK_SET)

    def copy_from(self, file: int, offset: int, nbytes: int) -> tuple[int, bool]:
        """Append bytes of an open file; returns how many, and whether the file system cloned them."""
        self.flush()
        with refusals(self._path):
            done, cloned = copy_range(file, offset, self._fd, self.position, nbytes)
            os.lseek(self._fd, self.position + done, os.SEEK_SET)
        self.position += done
        if self.position - self._begun >= _AHEAD and not cloned:
            self._begin()
        return done, cloned


@contextlib.contextmanager
def scratch_folder(beside: str) -> Iterator[str]:
    """Yield a new folder beside a path, or for a URL among temporary files; it is removed at the end, with its files.

    Raises:
        SourceError: it cannot be made.
    """
    import tempfile  # here, because few files are written twice

    with contextlib.ExitStack() as stack:
        with refusals(beside):
            where = None if is_url(beside) else os.path.dirname(os.path.realpath(beside))
            found = tempfile.TemporaryDirectory(dir=where, prefix=".zcrecord-")
            folder = stack.enter_context(found)
        yield folder


@contextlib.contextmanager
def refusals(path: str) -> Iterator[None]:
    """Raise refusals of the system about this path as one typed error."""
    try:
        yield
    except OSError as error:
        refuse(error, path)


def refuse(error: OSError, path: str) -> NoReturn:
    """Raise an error of the system as a SourceError that tells if the old file is untouched."""
    if isinstance(error, SourceError) or error.errno is None:
        raise error
    reason = os.strerror(error.errno)
    if getattr(error, "winerror", None) in _MAPPED:
        reason = "it is mapped, by a record loaded from it here or in another program; close() that, drop its views"
    kept = "; the file there before is untouched" if os.path.isfile(path) else ""
    raise SourceError(f"cannot write: {reason}{kept}", path=path, errno=error.errno) from error
