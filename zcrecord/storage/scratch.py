"""Scratch files: new files beside the place that they are to take, and what is left of those whose writer died.

Knows how they are named, and the locks: of a scratch file, which tells the living writers from the dead, and of the
folder, by which savers take turns. A lock is one on an open file (flock): the system takes it off when the process that
has it ends, and no file is left of it. Writing a scratch file, and putting it in its place, is `files`'s. One may be a
note: shards that are there before, or after, the catalogue names them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple, Self

from zcrecord.errors import SourceError

__all__ = [
    "MOST_OF_CATALOGUE",
    "SHARD_END",
    "Descriptor",
    "ListedFile",
    "ScratchFile",
    "folder_lock",
    "folder_locks",
    "note_of",
    "remove_unnamed",
    "scratch_file",
    "shard_pattern",
    "sync_file",
    "sync_folder",
    "unnamed",
]

_SUFFIX = ".zcr-scratch"
_LONGEST = 200  # bytes of a name that its scratch file's begins with
_TRIES = 16  # to make a file that no other process removes before it is locked
_NOTE = b"zcrecord shards\n"  # the start of a note; a line for each file follows
_LINE = re.compile(r"([0-9]{1,20}) ([0-9]{1,20}) (-?[0-9]{1,20}) (.+)")
SHARD_END = r"(~\d+|~[0-9a-f]{16})?-\d{5}-of-\d{5}\.zcr"  # of a shard's name; a number or 16 random digits tell sets
MOST_OF_CATALOGUE = 1 << 22  # bytes that are read of one, whose first payload has the names of its shards; or of a note
_EXACT = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC"))  # bytes as they are, and not for children
_NO_LOCKS = {  # errors that say that locks are not to be had here, or that nothing is there
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOSYS, errno.EBADF, errno.EINVAL),
    *(getattr(errno, "ENOTSUP", None), errno.EOPNOTSUPP, errno.ENOENT, errno.ENOTDIR),
}
_PATIENCE = 300.0  # seconds; no saver needs a folder nearly as long
_PAUSES = 0.001, 0.05  # seconds between two looks at a lock: the first, the longest


# Descriptors and locks.


class Descriptor:
    """A file descriptor, closed at the end of a block, or with the last reference to it.

    The number goes from the system call into `_numbers`, and from there to `os.close`, in one step of the interpreter:
    no signal is handled in between, where the number would be lost and the file stay open.

    Args:
        call: `os.open` or `os.dup`, with its arguments.
    """

    __slots__ = ("__weakref__", "_numbers")

    def __init__(self, call: Callable[..., int], *arguments: Any) -> None:
        self._numbers: list[int] = []
        self._numbers.extend(map(call, *([argument] for argument in arguments)))

    def fileno(self) -> int:
        """Return the number.

        Raises:
            ValueError: it was closed.
        """
        if not self._numbers:
            raise ValueError("the descriptor was closed")
        return self._numbers[0]

    def close(self) -> None:
        """Close the file, unless that was done."""
        if self._numbers:
            next(map(os.close, iter(self._numbers.pop, None)))

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # errors of a file that was written are told by the writer's own `close`
            self.close()

    def __del__(self) -> None:
        self.__exit__(None, None, None)


def _try_lock(file: Descriptor) -> bool | None:
    """Lock a file while it is open; False if another descriptor has the lock, None where there are no locks.

    Raises:
        OSError: the system tells neither.
    """
    _locks.add(file)
    try:
        import fcntl  # not on Windows

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except ImportError:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


_locks: weakref.WeakSet[Descriptor] = weakref.WeakSet()  # descriptors that may have one


def _leave_locks() -> None:
    """Close, in a child that was forked, what its parent has locked: it would stay so when the parent ends."""
    for lock in list(_locks):
        lock.__exit__(None, None, None)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)

_locked: ContextVar[tuple[weakref.ref[Descriptor], ...]] = ContextVar("_locked", default=())  # folders, by this thread


@contextlib.contextmanager
def folder_lock(folder: str) -> Iterator[None]:
    """Run a block while no other saver, of this process or another, does: files are replaced and removed only so.

    The lock is the folder's own. A block inside another one of the same thread and folder goes on at once. Nothing is
    locked on Windows, which opens no folder, on file systems that lock none, and in folders that may not be read.

    Raises:
        SourceError: another program has had the lock for minutes, or the system reports an error.
    """
    try:
        here = Descriptor(os.open, folder or ".", os.O_RDONLY | _EXACT)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise _refused(error, folder) from error
        yield
        return
    with here:
        outer = _locked.get()
        if any((lock := ref()) and os.path.sameopenfile(lock.fileno(), here.fileno()) for ref in outer):
            yield
            return
        _wait(here, folder)
        try:
            _locked.set((*outer, weakref.ref(here)))
            yield
        finally:
            _unlock(here)
            _locked.set(outer)


@contextlib.contextmanager
def folder_locks(folders: Iterable[str]) -> Iterator[None]:
    """Run a block under the locks of several folders, taken in one order: else two savers would wait for one another.

    A block inside that needs one of them goes on at once; it takes no lock of another folder.

    Raises:
        SourceError: as `folder_lock`.
    """
    with contextlib.ExitStack() as stack:
        for folder in sorted(folders, key=_number_of):
            stack.enter_context(folder_lock(folder))
        yield


def _number_of(folder: str) -> tuple[int, ...]:
    """Return device and inode of a folder; nothing if the system does not tell them, as `folder_lock` will say."""
    with contextlib.suppress(OSError):
        status = os.stat(folder or ".")
        return status.st_dev, status.st_ino
    return ()


def _refused(error: OSError, folder: str) -> SourceError:
    what = f"cannot write: the folder cannot be locked: {error.strerror}"
    return SourceError(what, path=folder, errno=error.errno)


def _wait(here: Descriptor, folder: str) -> None:
    """Lock a folder once nobody else has, if it can be.

    Raises:
        SourceError: another program has had the lock for minutes, or the system reports an error.
    """
    pause, end = _PAUSES[0], time.monotonic() + _PATIENCE
    try:
        while _try_lock(here) is False:
            if time.monotonic() > end:
                what = f"another program has kept this folder locked for {_PATIENCE:.0f} seconds (lslocks tells which)"
                raise SourceError(f"cannot write: {what}; end that, and save again", path=folder)
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise _refused(error, folder) from error


def _unlock(here: Descriptor) -> None:
    """Take the lock off, which closing alone does not: a child that was forked meanwhile has the descriptor, too."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # closed, in a child that was forked in the block
        import fcntl

        fcntl.flock(here.fileno(), fcntl.LOCK_UN)


def sync_file(fd: int) -> None:
    """Flush a file to the disk, so that it survives power loss."""
    os.fsync(fd)
    if sys.platform == "darwin":  # there fsync leaves it in the drive's cache
        import fcntl

        with contextlib.suppress(OSError):  # not every file system has it
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)


def sync_folder(folder: str) -> None:
    """Flush a folder to the disk, so that renames survive power loss, where the file system can.

    Raises:
        OSError: the disk fails. No error: file systems that cannot, folders that may not be read.
    """
    try:
        with Descriptor(os.open, folder or ".", os.O_RDONLY | _EXACT) as opened:
            sync_file(opened.fileno())
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


# Scratch files.


class ListedFile(NamedTuple):
    """A file in a folder, by what no other file has, and no file from elsewhere can know.

    Attributes:
        inode, nbytes, changed: its number in the file system, its size, and when it was last changed, in ns.
        name: in the folder.
    """

    inode: int
    nbytes: int
    changed: int
    name: str

    @classmethod
    def at(cls, path: str, name: str) -> ListedFile:
        """Return the file at a path, which has this name or is to get it."""
        status = os.stat(path)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, name)


class ScratchFile(Descriptor):
    """A scratch file, open for reading and writing.

    Attributes:
        stays: whether it is left behind at the end, for the next save to find.
    """

    stays = False


@contextlib.contextmanager
def scratch_file(path: str, mode: int = 0o666, *, clear: bool = True) -> Iterator[tuple[ScratchFile, str]]:
    """Yield a new file beside `path`, and its name; at the end it is gone, or renamed.

    The writer closes it. Unless `clear` is False, scratch files for this path of processes that were killed are removed
    first; that of a living process, in another container or, if the file system carries locks, on another machine,
    never is.

    Raises:
        OSError: the file system reports an error.
    """
    folder, name = os.path.split(path)
    stem = f".{_shortened(name)}."
    if clear:
        _clear(folder, stem, path)
    process = os.getpid()
    for turn in range(_TRIES + 1):
        file, scratch = None, f"{os.path.join(folder, stem)}{os.urandom(6).hex()}{_SUFFIX}"
        try:  # before it is made: Ctrl-C may come right after
            with (
                # Its mode is that of the file to come from the start: it is never open to more people.
                ScratchFile(os.open, scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | _EXACT, mode) as file,
                _kept(file, scratch) if turn < _TRIES else contextlib.nullcontext(True) as ours,
            ):
                if ours:
                    yield file, scratch
                    return
        finally:
            if (file is None or not file.stays) and os.getpid() == process:  # a child that ends leaves it alone
                with contextlib.suppress(OSError):
                    os.unlink(scratch)


def _shortened(name: str) -> str:
    """Return a name of at most _LONGEST bytes: a longer one's start, and a hash of the whole in place of the rest."""
    octets = os.fsencode(name)
    if len(octets) <= _LONGEST:
        return name
    from hashlib import sha256  # here, because few names are long

    end = f"~{sha256(octets).hexdigest()[:16]}"
    while len(os.fsencode(name)) > _LONGEST - len(
        end
    ):  # file systems count bytes, and some take no part of a character
        name = name[:-1]
    return name + end


@contextlib.contextmanager
def _kept(file: Descriptor, scratch: str) -> Iterator[bool]:
    """Lock a new file, so that no other process removes it, until the block ends; yields False if one has done so.

    By another descriptor, since the writer closes its own before the file takes its place. Read-only, since no program
    can be started that is open for writing; but on file systems that lock only files open for writing.
    """
    for reading in (True, False) if os.name == "posix" else ():
        try:
            way: tuple[Any, ...] = (os.open, scratch, os.O_RDONLY | _EXACT) if reading else (os.dup, file.fileno())
            held = Descriptor(*way)
        except OSError:
            if not reading:
                raise
            continue
        with held:
            locked = _try_lock(held)
            if locked is not None:
                yield locked and os.path.lexists(scratch)
                return
    yield True


def note_of(new: Iterable[ListedFile], last: ListedFile | None = None, replaced: Iterable[ListedFile] = ()) -> bytes:
    """Return a note: the content of a scratch file during a commit.

    Args:
        new: files that are to appear before the one that refers to them.
        last: that one; `replaced` are not needed any more once it is in its place.
    """
    blocks = (new, () if last is None else (last, *replaced))
    text = "\n\n".join("\n".join(" ".join(map(str, file)) for file in block) for block in blocks)
    return _NOTE + text.encode(errors="surrogateescape")


def _noted(start: bytes, folder: str) -> list[ListedFile]:
    """Return the files that a note lists: new ones, and those replaced if the last file has left its scratch name."""
    blocks = start[len(_NOTE) :].decode(errors="surrogateescape").partition("\n\n")
    lines = ([match.groups() for line in block.split("\n") if (match := _LINE.fullmatch(line))] for block in blocks)
    new, _, last = [[ListedFile(int(a), int(b), int(c), name) for a, b, c, name in block] for block in lines]
    return new + (last[1:] if last and _is_in_place(folder, last[0]) else [])


def _is_in_place(folder: str, file: ListedFile) -> bool:
    """Return True if a file is in a folder under any name but a scratch file's.

    Raises:
        OSError: the folder cannot be listed.
    """
    with os.scandir(folder or ".") as entries:
        names = [entry.name for entry in entries if not entry.name.endswith(_SUFFIX)]
    return any(_is_there(folder, file._replace(name=name)) for name in names)


def remove_unnamed(path: str, files: Sequence[ListedFile]) -> bool:
    """Remove shards beside a path: those that are still the files listed, and that no catalogue in the folder names.

    Catalogues are known by `.zcr`, and read as far as MOST_OF_CATALOGUE; their names come first. Returns False if a
    file could not be removed, the folder not be locked, or a catalogue not be read, which may name any: then nothing
    is removed.
    """
    if not files:
        return True
    folder, name = os.path.split(path)
    ours, done = re.compile(shard_pattern(name)), True
    with contextlib.suppress(OSError, UnicodeError), folder_lock(folder):
        names = [file.name for file in files if ours.fullmatch(file.name) and _is_there(folder, file)]
        for shard in _unnamed_by_any(folder, name, names, ours) if names else ():
            try:
                os.unlink(os.path.join(folder, shard))
            except OSError:
                done = False
        return done
    return False


def _is_there(folder: str, file: ListedFile) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        return ListedFile.at(os.path.join(folder, file.name), file.name) == file
    return False


def _unnamed_by_any(folder: str, name: str, names: list[str], ours: re.Pattern[str]) -> list[str]:
    """Return the shards that no catalogue in a folder names.

    Files that have names as shards of `name` may be catalogues, too, but for these shards and those that one names.

    Raises:
        OSError: the folder, or a file in it that may be a catalogue, cannot be read.
    """
    catalogues = _catalogues(folder, name)
    shards = [other for other in catalogues if ours.fullmatch(other) and other not in names]
    for catalogue in catalogues:
        if not ours.fullmatch(catalogue):
            start = _start(folder, catalogue, name)
            names, shards = unnamed(names, start), [shard for shard in shards if os.fsencode(shard) not in start]
    for shard in shards:
        names = unnamed(names, _start(folder, shard, name)) if names else names
    return names


def _catalogues(folder: str, name: str) -> list[str]:
    """Return the names of files that may be catalogues: this one, and all in the folder; links that lead nowhere, too.

    Raises:
        OSError: the folder cannot be listed, or the system does not tell what a name in it is of.
    """
    out = [name]
    with os.scandir(folder or ".") as entries:
        for entry in entries:
            if entry.name.endswith(".zcr") and entry.name != name:
                lost = entry.is_symlink() and not os.path.exists(entry.path)
                out += [entry.name] * (lost or entry.is_file())
    return out


def _start(folder: str, catalogue: str, name: str) -> bytes:
    """Return the first bytes of a catalogue; none if `name` is not there.

    Shards of `big-model.zcr` are left out: their names would be taken for those of `model.zcr`.

    Raises:
        OSError: it cannot be read.
    """
    path = os.path.join(folder, catalogue)
    try:
        with open(path, "rb") as file:
            start = file.read(MOST_OF_CATALOGUE)
    except FileNotFoundError:
        if catalogue != name and os.path.islink(path):
            raise
        return b""
    if catalogue != name and catalogue.endswith(name):
        # Names follow one another: of `rmodel.zcr` the end of one and the next would be taken for a name of its own.
        before = catalogue.removesuffix(name)
        if not ".zcr".endswith(before) and not before.endswith(".zcr"):
            return re.sub(os.fsencode(shard_pattern(catalogue)), b"", start)
    return start


def unnamed(names: Iterable[str], start: bytes) -> list[str]:
    """Return the shards that a catalogue does not name, by its first MOST_OF_CATALOGUE bytes; none if that cannot tell.

    Its names come first, but may be more than these bytes have.
    """
    names = list(names)
    if sum(map(len, names)) > MOST_OF_CATALOGUE // 4:
        return []
    return [name for name in names if os.fsencode(name) not in start]


def shard_pattern(name: str) -> str:
    """Return a regular expression of the names of shards beside a catalogue."""
    return re.escape(name.removesuffix(".zcr")) + SHARD_END


def _clear(folder: str, stem: str, path: str) -> None:
    """Remove the scratch files of this stem that dead writers left, and shards that their notes list."""
    ours = re.compile(f"{re.escape(stem)}[0-9a-f]{{12}}{re.escape(_SUFFIX)}")
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
    extra = os.O_NONBLOCK | os.O_NOFOLLOW | _EXACT  # it may be anything
    try:
        file = Descriptor(os.open, scratch, os.O_RDWR | extra)  # NFS locks only files open for writing
    except PermissionError:
        file = Descriptor(os.open, scratch, os.O_RDONLY | extra)
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or not _try_lock(file):
            return
        most = MOST_OF_CATALOGUE if status.st_size <= MOST_OF_CATALOGUE else len(_NOTE)
        start = os.read(file.fileno(), most)
        if start.startswith(_NOTE):
            folder = os.path.dirname(path)
            if status.st_uid != os.geteuid():
                return  # that user's next save needs it, and nothing is removed on its word
            sync_folder(folder)  # first, or power loss could bring back what refers to the files
            if not remove_unnamed(path, _noted(start, folder)):
                return  # for the next save
        os.unlink(scratch)
