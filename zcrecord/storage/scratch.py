"""Scratch files: new files beside the place that they are to take, and removal of those whose writer died.

Knows their names, and locks on open files (flock), which the system removes with their process. The lock of a scratch
file shows that its writer lives; by the lock of a folder savers take turns. `new_files` writes scratch files and puts
them in their places. A note is one, too: it lists shards that exist before, or after, the catalogue names them.
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
from typing import Any, NamedTuple, Self

from zcrecord.codec.conventions import CATALOGUE_TYPE
from zcrecord.codec.layout import HEADER_SIZE, decode_header
from zcrecord.errors import RecordError, SourceError

_SUFFIX = ".zcr-scratch"
_LONGEST = 200  # bytes of the longest name with which a scratch file's name begins
_TRIES = 16  # attempts to create a file that no other process removes before it is locked
_NOTE = b"zcrecord shards\n"  # the start of a note; a line for each file follows
_LINE = re.compile(r"([0-9]{1,20}) ([0-9]{1,20}) (-?[0-9]{1,20}) (.+)")
SHARD_END = r"(~\d+|~[0-9a-f]{16})?-\d{5}-of-\d{5}\.zcr"  # of a shard's name; a number or 16 random digits tell sets
MOST_OF_CATALOGUE = 1 << 22  # bytes read of a catalogue, whose first payload names its shards; or of a note
PACKED = (b"\xb5\x2f\xfd", b"\x2a\x4d\x18")  # zstd's magic from the second byte on: a frame, one to be skipped
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for its writer
_EXACT = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC"))  # bytes as they are, and not for children
_NO_LOCKS = {  # errors of file systems without locks, or of a missing file
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOSYS, errno.EBADF, errno.EINVAL),
    *(getattr(errno, "ENOTSUP", None), errno.EOPNOTSUPP, errno.ENOENT, errno.ENOTDIR),
}
_PATIENCE = 300.0  # seconds to wait for a folder's lock, which no saver keeps nearly as long
_PAUSES = 0.001, 0.05  # seconds between two attempts to lock: the first pause, and the longest


class Descriptor:
    """A file descriptor from `call(*arguments)`, closed at the end of a block, or with the last reference to it.

    The number goes from the system call into `_numbers`, and from there to `os.close`, in one step of the interpreter.
    A signal handled in between could lose the number, and the file would stay open.
    """

    __slots__ = ("__weakref__", "_numbers")

    def __init__(self, call: Callable[..., int], *arguments: Any) -> None:
        self._numbers: list[int] = []
        self._numbers.extend(map(call, *([argument] for argument in arguments)))

    def fileno(self) -> int:
        """Return the number; a ValueError if it was closed."""
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

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # errors of a file that was written are reported by the writer's own `close`
            self.close()

    def __del__(self) -> None:
        self.__exit__()


def _try_lock(file: Descriptor) -> bool | None:
    """Lock a file until it is closed; return False if another descriptor has the lock, None if locks do not work."""
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


def _close_locks() -> None:
    """Close, in a child that was forked, the files that its parent has locked: the locks would outlive the parent."""
    for file in list(_locks):
        file.__exit__()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)

_held: ContextVar[tuple[weakref.ref[Descriptor], ...]] = ContextVar("_held", default=())  # folders this thread locked


@contextlib.contextmanager
def folder_lock(folder: str) -> Iterator[None]:
    """Run a block that no other saver, of this process or another, runs meanwhile: files are replaced only in one.

    A block inside another one of the same thread and folder starts at once. Nothing is locked on Windows, on file
    systems without locks, and in folders that may not be read.

    Raises:
        SourceError: another program has had the lock for minutes, or the system reports an error.
    """
    try:
        opened = Descriptor(os.open, folder or ".", os.O_RDONLY | _EXACT)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise _cannot_lock(error, folder) from error
        yield
        return
    with opened:
        outer = _held.get()
        if any((lock := ref()) and os.path.sameopenfile(lock.fileno(), opened.fileno()) for ref in outer):
            yield
            return
        _wait_for_lock(opened, folder)
        try:
            _held.set((*outer, weakref.ref(opened)))
            yield
        finally:
            _unlock(opened)
            _held.set(outer)


@contextlib.contextmanager
def folder_locks(folders: Iterable[str]) -> Iterator[None]:
    """Run a block under the locks of several folders, taken in one order, so that no two savers block each other."""
    with contextlib.ExitStack() as stack:
        for folder in sorted(folders, key=_device_and_inode):
            stack.enter_context(folder_lock(folder))
        yield


def _device_and_inode(folder: str) -> tuple[int, ...]:
    with contextlib.suppress(OSError):  # `folder_lock` will raise it
        status = os.stat(folder or ".")
        return status.st_dev, status.st_ino
    return ()


def _cannot_lock(error: OSError, folder: str) -> SourceError:
    return SourceError(f"cannot write: the folder cannot be locked: {error.strerror}", path=folder, errno=error.errno)


def _wait_for_lock(opened: Descriptor, folder: str) -> None:
    """Wait until no other saver has the lock of a folder, and lock it; SourceError after _PATIENCE seconds."""
    pause, deadline = _PAUSES[0], time.monotonic() + _PATIENCE
    try:
        while _try_lock(opened) is False:
            if time.monotonic() > deadline:
                fault = f"another program has kept this folder locked for {_PATIENCE:.0f} seconds (lslocks names it)"
                raise SourceError(f"cannot write: {fault}; end it, and save again", path=folder)
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise _cannot_lock(error, folder) from error


def _unlock(opened: Descriptor) -> None:
    """Remove the lock, which closing alone does not: a child that was forked meanwhile has the descriptor, too."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # closed, in a child that was forked in the block
        import fcntl

        fcntl.flock(opened.fileno(), fcntl.LOCK_UN)


def sync_file(fd: int) -> None:
    """Flush a file to the disk, so that it survives power loss."""
    os.fsync(fd)
    if sys.platform == "darwin":  # there fsync leaves it in the drive's cache
        import fcntl

        with contextlib.suppress(OSError):  # not every file system has it
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)


def sync_folder(folder: str) -> None:
    """Flush a folder, where the system can, so that renames survive power loss; OSError if the disk fails."""
    try:
        with Descriptor(os.open, folder or ".", os.O_RDONLY | _EXACT) as opened:
            sync_file(opened.fileno())
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


class ListedFile(NamedTuple):
    """A file in a folder, told from others by its inode, its size, and the time of its last change in ns."""

    inode: int
    nbytes: int
    changed: int
    name: str

    @classmethod
    def from_path(cls, path: str, name: str) -> ListedFile:
        """Return the file at a path, which has this name or is to get it."""
        status = os.stat(path)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, name)


class ScratchFile(Descriptor):
    """A scratch file, open for reading and writing; if it `stays`, it is left for the next save."""

    stays = False


@contextlib.contextmanager
def scratch_file(path: str, mode: int = 0o666, *, clear: bool = True) -> Iterator[tuple[ScratchFile, str]]:
    """Yield a new file beside `path`, which the writer closes, and its path; at the end it is removed if it is there.

    Unless `clear` is False, this path's scratch files of killed processes are removed first, but none of a living one,
    be it in another container or, if the file system carries locks, on another machine.
    """
    folder, name = os.path.split(path)
    stem = f".{_shorten(name)}."
    if clear:
        _remove_leftovers(folder, stem, path)
    process = os.getpid()
    for turn in range(_TRIES + 1):
        file, scratch = None, f"{os.path.join(folder, stem)}{os.urandom(6).hex()}{_SUFFIX}"
        try:  # begins before the file exists: Ctrl-C may come right after it was created
            with (
                # With the final file's mode from the start: nobody can open it before it is restricted.
                ScratchFile(os.open, scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | _EXACT, mode) as file,
                _lock_new(file, scratch) if turn < _TRIES else contextlib.nullcontext(True) as is_ours,
            ):
                if is_ours:
                    yield file, scratch
                    return
        finally:
            if (file is None or not file.stays) and os.getpid() == process:  # a child that ends leaves it alone
                with contextlib.suppress(OSError):
                    os.unlink(scratch)


def _shorten(name: str) -> str:
    """Return a name of at most _LONGEST bytes: of a longer one the start, and a hash of the whole."""
    octets = os.fsencode(name)
    if len(octets) <= _LONGEST:
        return name
    from hashlib import sha256  # here, because few names are long

    end = f"~{sha256(octets).hexdigest()[:16]}"
    # File systems count bytes, and some accept no part of a character.
    while len(os.fsencode(name)) > _LONGEST - len(end):
        name = name[:-1]
    return name + end


@contextlib.contextmanager
def _lock_new(file: Descriptor, scratch: str) -> Iterator[bool]:
    """Lock a new file, so that no other process removes it, until the block ends; yields False if one has done so.

    By another descriptor, since the writer closes its own before the file takes its place. Read-only, since no program
    can be started that is open for writing; but on file systems that lock only files open for writing.
    """
    for read_only in (True, False) if os.name == "posix" else ():  # Windows removes no file that is open
        try:
            call: tuple[Any, ...] = (os.open, scratch, os.O_RDONLY | _EXACT) if read_only else (os.dup, file.fileno())
            second = Descriptor(*call)
        except OSError:
            if not read_only:
                raise
            continue
        with second:
            locked = _try_lock(second)
            if locked is not None:
                yield locked and os.path.lexists(scratch)
                return
    yield True


def note_of(new: Iterable[ListedFile], last: ListedFile | None = None, replaced: Iterable[ListedFile] = ()) -> bytes:
    """Return a note's bytes: `new` files appear before the `last` one, after which the `replaced` may be removed."""
    blocks = (new, () if last is None else (last, *replaced))
    text = "\n\n".join("\n".join(" ".join(map(str, file)) for file in block) for block in blocks)
    return _NOTE + text.encode(errors="surrogateescape")


def _removable_by_note(note: bytes, folder: str) -> list[ListedFile]:
    """Return the new files that a note lists, and, once the last new file is in its place, the replaced ones."""
    new, _, others = note[len(_NOTE) :].decode(errors="surrogateescape").partition("\n\n")
    last_and_replaced = _parse_lines(others)
    is_finished = bool(last_and_replaced) and _is_in_place(folder, last_and_replaced[0])
    return _parse_lines(new) + (last_and_replaced[1:] if is_finished else [])


def _parse_lines(text: str) -> list[ListedFile]:
    """Return the files of a note's lines; a malformed line, as of a note that was cut off, is left out."""
    rows = [match.groups() for line in text.split("\n") if (match := _LINE.fullmatch(line))]
    return [ListedFile(int(inode), int(nbytes), int(changed), name) for inode, nbytes, changed, name in rows]


def _is_in_place(folder: str, file: ListedFile) -> bool:
    """Return True if a file is in a folder under any name but a scratch file's."""
    with os.scandir(folder or ".") as entries:
        names = [entry.name for entry in entries if not entry.name.endswith(_SUFFIX)]
    return any(_is_unchanged(folder, file._replace(name=name)) for name in names)


def remove_orphans(path: str, files: Sequence[ListedFile]) -> bool:
    """Remove those of some files that are shards of the catalogue at a path, unchanged, and named by no catalogue.

    Returns False if one could not be removed. None is removed if the folder cannot be locked, or a catalogue not read.
    """
    if not files:
        return True
    folder, name = os.path.split(path)
    pattern, all_removed = re.compile(shard_pattern(name)), True
    with contextlib.suppress(OSError, UnicodeError), folder_lock(folder):
        names = [file.name for file in files if pattern.fullmatch(file.name) and _is_unchanged(folder, file)]
        for shard in _orphans_in(folder, name, names, pattern) if names else ():
            try:
                os.unlink(os.path.join(folder, shard))
            except OSError:
                all_removed = False
        return all_removed
    return False


def _is_unchanged(folder: str, file: ListedFile) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        return ListedFile.from_path(os.path.join(folder, file.name), file.name) == file
    return False


def _orphans_in(folder: str, name: str, names: list[str], pattern: re.Pattern[str]) -> list[str]:
    """Return the shards in `names` that no catalogue in a folder names; OSError if a possible one cannot be read.

    Other files that match `pattern`, of shards of `name`, may be catalogues, too, unless a catalogue names them.
    """
    catalogues = _possible_catalogues(folder, name)
    doubtful = [other for other in catalogues if pattern.fullmatch(other) and other not in names]
    for catalogue in catalogues:
        if not pattern.fullmatch(catalogue):
            octets = _searched_bytes(folder, catalogue, name)
            names, doubtful = orphans(names, octets), [other for other in doubtful if os.fsencode(other) not in octets]
    for other in doubtful:
        names = orphans(names, _searched_bytes(folder, other, name)) if names else names
    return names


def _possible_catalogues(folder: str, name: str) -> list[str]:
    """Return the names of files that may be catalogues: `name`, and each .zcr in the folder, also a dangling link."""
    names = [name]
    with os.scandir(folder or ".") as entries:
        for entry in entries:
            is_dangling = entry.is_symlink() and not os.path.exists(entry.path)
            if entry.name.endswith(".zcr") and entry.name != name and (is_dangling or entry.is_file()):
                names.append(entry.name)
    return names


def _searched_bytes(folder: str, catalogue: str, name: str) -> bytes:
    """Return the bytes in which a file may name shards of `name`; b"" if there is no file, OSError if it is packed."""
    path = os.path.join(folder, catalogue)
    try:
        octets = _bytes_with_names(path)
    except FileNotFoundError:
        if catalogue != name and os.path.islink(path):
            raise
        return b""
    if octets[1:4] in PACKED and catalogue != name:  # no saver packs one
        raise OSError("it may be a packed catalogue")
    if catalogue != name and catalogue.endswith(name):
        # Names follow one another: of `rmodel.zcr` the end of one and the next would be taken for a name of its own.
        before = catalogue.removesuffix(name)
        if not ".zcr".endswith(before) and not before.endswith(".zcr"):
            return re.sub(os.fsencode(shard_pattern(catalogue)), b"", octets)
    return octets


def _bytes_with_names(path: str) -> bytes:
    """Return a file's first bytes and, of a catalogue with a long index, of its payloads, which name its shards."""
    descriptor = Descriptor(os.open, path, os.O_RDONLY | _AT_ONCE | _EXACT)
    with descriptor, open(descriptor.fileno(), "rb", closefd=False) as file:
        octets = file.read(MOST_OF_CATALOGUE)
        if len(octets) == MOST_OF_CATALOGUE and CATALOGUE_TYPE.encode() in octets:
            with contextlib.suppress(RecordError):  # of a header that is not valid
                header = decode_header(octets[:HEADER_SIZE])
                file.seek(0 if header is None else header.payload_offset)
                octets += file.read(MOST_OF_CATALOGUE)
            if b".zcr" not in octets:
                raise OSError("the names of its shards lie elsewhere")
    return octets


def orphans(names: Iterable[str], octets: bytes) -> list[str]:
    """Return the shards that a catalogue's bytes do not name; [] if these may not hold all names, which are many."""
    names = list(names)
    if sum(map(len, names)) > MOST_OF_CATALOGUE // 4:
        return []
    return [name for name in names if os.fsencode(name) not in octets]


def shard_pattern(name: str) -> str:
    """Return a regular expression of the names of shards beside a catalogue."""
    return re.escape(name.removesuffix(".zcr")) + SHARD_END


def _remove_leftovers(folder: str, stem: str, path: str) -> None:
    """Remove the scratch files of this stem that dead writers left, and shards that their notes list."""
    pattern = f"{re.escape(stem)}[0-9a-f]{{12}}{re.escape(_SUFFIX)}"  # compiled only if a name has the stem: it is slow
    with contextlib.suppress(OSError):  # a folder may be writable and not listable
        with os.scandir(folder or ".") as entries:
            leftovers = [e.path for e in entries if e.name.startswith(stem) and re.fullmatch(pattern, e.name)]
        for scratch in leftovers:
            with contextlib.suppress(OSError):  # of another process, or removed by it meanwhile
                _remove_unless_locked(scratch, path)


def _remove_unless_locked(scratch: str, path: str) -> None:
    """Remove a scratch file beside `path`, and the shards that it lists if it is a note, unless its writer lives."""
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
        limit = MOST_OF_CATALOGUE if status.st_size <= MOST_OF_CATALOGUE else len(_NOTE)
        note = os.read(file.fileno(), limit)
        if note.startswith(_NOTE):
            folder = os.path.dirname(path)
            if status.st_uid != os.geteuid():
                return  # that user's next save needs it; another user's note is not trusted
            sync_folder(folder)  # first, or power loss could bring back a catalogue that refers to the files
            if not remove_orphans(path, _removable_by_note(note, folder)):
                return  # for the next save
        os.unlink(scratch)
