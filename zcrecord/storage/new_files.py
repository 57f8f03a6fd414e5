"""New files: sinks into scratch files beside their places, and the commit, which renames them to these places.

Every saver ends here. A commit holds the folder's lock from the check of the old files to the last rename. A note,
itself a scratch file, lists what the next save removes if the commit is killed. Knows system calls, and how to undo;
nothing of archives.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

from zcrecord.errors import DestinationExistsError, SourceError

from .scratch import (
    Descriptor,
    ListedFile,
    ScratchFile,
    folder_locks,
    note_of,
    remove_orphans,
    scratch_file,
    sync_file,
    sync_folder,
)
from .sink import Sink

Identity = tuple[int, ...]  # of a file, to tell whether it was replaced: device, inode, size, time of change
identity_from: Callable[[os.stat_result], Identity] = attrgetter("st_dev", "st_ino", "st_size", "st_mtime_ns")
ShardsOf = Callable[[str], Sequence[ListedFile]]  # lists the proved shards of the catalogue at a path

_RESERVED = 64 << 20  # bytes of a file that is allocated before it is written; larger ones gain little
_SMALL, _BUFFER = 1 << 15, 1 << 18  # bytes of the largest write that is buffered, and of the buffer
_AHEAD = 16 << 20  # bytes of one write, at most; if they are to be durable, the disk begins with them before the next
_NEVER = 1 << 62  # a position that no file reaches
_MAPPED = (5, 32, 1224)  # Windows' codes for replacing an open file: denied, shared, a user-mapped section
_REPLACED = "was replaced meanwhile, and that stays; start again with the file that is there now"
_NEW, _NO_SETUID = 0o666, 0o777  # mode of a new file, before the process's mask; bits of a mode without setuid
_OF_CONTENT = ("security.ima", "security.evm")  # extended attributes that sign a file's bytes

PREAD = hasattr(os, "pread")  # threads can read one file back by position
BLOCK = 4096  # bytes of a file system's block, nearly everywhere: a clone starts and ends on one
_COPIED = 64 << 20  # bytes copied at a time: signals are handled in between
_FICLONERANGE = 0x4020940D  # as x86, Arm, RISC-V and LoongArch number it; others refuse it, and copy
# Errors after which the bytes are read and written instead; after any other error this would fail, too.
_CANNOT_COPY = {
    errno.EBADF, errno.EINTR, errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY,
    errno.EXDEV,
}  # fmt: skip


def version_of(path: str) -> Identity:
    """Return the identity of the file at a path, which a saver may be given to replace; empty if there is none."""
    try:
        return identity_from(os.stat(path))
    except FileNotFoundError:
        return ()


def check_writer(process: int, path: str | None) -> None:
    """Raise SourceError unless this is the process that began to write."""
    if os.getpid() != process:
        fault = "is being written by the process that forked this one, and only that may finish it"
        raise SourceError(f"{fault}; leave the block there, and end this process by os._exit", path=path)


class FileSink(Sink):
    """A sink over a regular file of our own, by its descriptor. Small writes are buffered; `flush` writes them."""

    can_rewind = keeps = True

    def __init__(self, fd: int, path: str, *, durable: bool) -> None:
        self._fd, self._path, self._process = fd, path, os.getpid()
        self._writeback_end = 0 if durable and sys.platform == "linux" else _NEVER  # end of bytes that are written back
        self._buffer = bytearray()  # the last bytes, not written yet

    def identity(self) -> Identity:
        """Return the file's identity, after all bytes so far were written."""
        self.flush()
        with refusals(self._path):
            return identity_from(os.fstat(self._fd))

    def reserve(self, nbytes: int) -> None:
        """Allocate small files now: ext4 flushes bytes that are not yet allocated when a rename replaces a file."""
        if nbytes <= _RESERVED and hasattr(os, "posix_fallocate"):
            with contextlib.suppress(OSError):  # a full disk is reported by the write
                os.posix_fallocate(self._fd, 0, nbytes)

    def write(self, data: Any) -> None:
        view = memoryview(data)
        nbytes = view.nbytes
        if nbytes <= _SMALL and self.position:  # the first is written at once: a disk may be full from the start
            self._buffer += view
            self.position += nbytes
            if len(self._buffer) > _BUFFER:
                self.flush()
            return
        self.flush()
        octets = view.cast("B") if nbytes else view
        for start in range(0, nbytes, _AHEAD):
            self._write(octets[start : start + _AHEAD])
            self.position += min(_AHEAD, nbytes - start)
            self._start_writeback()

    def _start_writeback(self) -> None:
        """Have the system write the bytes so far to the disk meanwhile: then the fsync at the end takes little time."""
        start = self._writeback_end
        if self.position - start >= _AHEAD:
            self._writeback_end = self.position
            with contextlib.suppress(OSError):  # Linux starts to write these pages, and drops the few that are written
                os.posix_fadvise(self._fd, start, self.position - start, os.POSIX_FADV_DONTNEED)

    def _write(self, view: memoryview) -> None:
        """Write all of a view at the file's position, unbuffered; `position` stays."""
        try:
            while len(view):
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            refuse(error, self._path)

    def flush(self) -> None:
        check_writer(self._process, self._path)  # a child shares the file's position with its parent
        if self._buffer:
            buffer, self._buffer = self._buffer, bytearray()
            self._write(memoryview(buffer))

    def read_back(self, offset: int, size: int) -> bytes:
        written = self.position - len(self._buffer)
        if offset >= written:
            return bytes(self._buffer[offset - written : offset - written + size])
        self.flush()
        parts = []
        with refusals(self._path) if PREAD else self._at_position(offset):
            while size and (part := os.pread(self._fd, size, offset) if PREAD else os.read(self._fd, size)):
                parts.append(part)
                size, offset = size - len(part), offset + len(part)
        return b"".join(parts)

    def rewind(self, offset: int) -> None:
        check_writer(self._process, self._path)
        written = self.position - len(self._buffer)
        del self._buffer[max(offset - written, 0) :]
        self.position = offset
        if self._writeback_end != _NEVER:
            self._writeback_end = min(self._writeback_end, offset)
        if offset < written:
            with refusals(self._path):
                os.ftruncate(self._fd, offset)
                os.lseek(self._fd, offset, os.SEEK_SET)

    def patch(self, offset: int, data: bytes) -> None:
        self.flush()
        with self._at_position(offset):
            self._write(memoryview(data))

    @contextlib.contextmanager
    def _at_position(self, offset: int) -> Iterator[None]:
        """Move the file's position to an offset for a block, and back after it."""
        with refusals(self._path):
            before = os.lseek(self._fd, 0, os.SEEK_CUR)
            os.lseek(self._fd, offset, os.SEEK_SET)
            yield
            os.lseek(self._fd, before, os.SEEK_SET)

    def copy_from(self, file: int, offset: int, nbytes: int) -> tuple[int, bool]:
        """Append bytes of an open file, at most `nbytes`; return how many, and True if they were cloned."""
        self.flush()
        with refusals(self._path):
            copied, cloned = copy_range(file, offset, self._fd, self.position, nbytes)
            os.lseek(self._fd, self.position + copied, os.SEEK_SET)
        self.position += copied
        if not cloned:
            self._start_writeback()
        return copied, cloned


def copy_range(source: int, offset: int, dest: int, dest_offset: int, nbytes: int) -> tuple[int, bool]:
    """Copy bytes between open files without reading them; return how many, and True if they were cloned.

    Copies fewer than asked for, or none, where the system cannot (only Linux can); file positions stay. A clone (XFS,
    Btrfs, bcachefs, ZFS, some network file systems) shares blocks on the disk, and takes neither space nor time.
    """
    if not sys.platform.startswith("linux"):
        return 0, False
    if nbytes and not (offset | dest_offset | nbytes) % BLOCK:
        import array
        import fcntl

        try:
            fcntl.ioctl(dest, _FICLONERANGE, array.array("Q", [source, offset, nbytes, dest_offset]))
        except OSError as error:
            if error.errno not in _CANNOT_COPY:
                raise
        else:
            return nbytes, True
    try:
        return os.copy_file_range(source, dest, min(nbytes, _COPIED), offset, dest_offset), False
    except OSError as error:
        if error.errno not in _CANNOT_COPY:
            raise
        return 0, False


@contextlib.contextmanager
def refusals(path: str) -> Iterator[None]:
    """Raise an OSError of the block as SourceError "cannot write", which names this path; see `refuse`."""
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
    untouched = "; the file there before is untouched" if os.path.isfile(path) else ""
    raise SourceError(f"cannot write: {reason}{untouched}", path=path, errno=error.errno) from error


class FileGroup:
    """New scratch files beside `path`, an absolute one, with the mode of the file there; `durable` ones are synced.

    At the end of the block, or by the next save, files that were not renamed to a place are removed. Unless `clear` is
    False, leftovers of killed savers are removed before the first is made.
    """

    def __init__(self, path: str, *, durable: bool, clear: bool = True) -> None:
        self._path, self._durable, self._clear = path, durable, clear
        self._mode: int | None = None  # of the file there
        if os.name == "posix":  # Windows has no more than read-only, and replaces no such file
            with refusals(path), contextlib.suppress(FileNotFoundError):
                self._mode = stat.S_IMODE(os.stat(path).st_mode) & _NO_SETUID  # which would be that of this user
        self._stack = contextlib.ExitStack()
        self._files: list[tuple[ScratchFile, str, FileSink]] = []  # each file, its path, and the sink into it

    def __enter__(self) -> FileGroup:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def add(self) -> FileSink:
        """Return a sink into one more file."""
        clear = self._clear and not self._files
        with refusals(self._path):
            mode = _NEW if self._mode is None else self._mode
            file, scratch = self._stack.enter_context(scratch_file(self._path, mode, clear=clear))
            sink = FileSink(file.fileno(), self._path, durable=self._durable)
            self._files.append((file, scratch, sink))
            if self._mode is not None:
                os.fchmod(file.fileno(), self._mode)  # again: the process's mask removed a part
        return sink

    def drop_last(self) -> None:
        """Leave out the file that was added last; it is removed at the end of the block."""
        self._files.pop()

    def finish(self, like: tuple[str, Identity] | None = None) -> list[str]:
        """Close the files, with the attributes of the file `like` if it has the same identity; return their paths."""
        for _, _, sink in self._files:
            sink.flush()
        with refusals(self._path):
            for file, scratch, _ in self._files:
                if like is not None:  # last: writing takes setuid and capabilities away
                    _copy_attributes(file.fileno() if os.chmod in os.supports_fd else scratch, *like)
                if self._durable:
                    sync_file(file.fileno())
                file.close()
        return [scratch for _, scratch, _ in self._files]


def _copy_attributes(file: int | str, like: str, identity: Identity) -> None:
    """Give a file the mode of the file `like`, and owner and extended attributes as far as permissions allow.

    Both by descriptors: who may write to a folder could put a link to any file at a path.
    """
    with Descriptor(os.open, like, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)) as opened:
        status = os.fstat(opened.fileno())
        if identity_from(status) != identity:
            raise SourceError(_REPLACED, path=like)
        mode = stat.S_IMODE(status.st_mode)
        if hasattr(os, "chown"):
            try:
                os.chown(file, status.st_uid, status.st_gid)
            except OSError:
                mode &= _NO_SETUID  # which would make it run as another user than before
        if hasattr(os, "listxattr"):
            with contextlib.suppress(OSError):  # not every file system has any
                for name in os.listxattr(opened.fileno()):
                    if name not in _OF_CONTENT:
                        with contextlib.suppress(OSError):
                            os.setxattr(file, name, os.getxattr(opened.fileno(), name))
    os.chmod(file, mode)


class Placement(NamedTuple):
    """A finished scratch file and its place, absolute paths; `replaces` is the one version to replace, or None."""

    scratch: str
    path: str
    replaces: Identity | str | None = None


def put_in_place(files: Sequence[Placement], *, durable: bool, shards_of: ShardsOf | None = None) -> None:
    """Move finished files to their places, replacing the files there: every saver's last step.

    The last one may refer to the others, and appears after them. If a move fails, those at free places are moved back.
    If `durable`, the moves survive power loss. `shards_of` lists the shards of the file that the last one replaces, all
    in one folder; they are removed after that, now or by the next save, unless a catalogue there names them.

    Raises:
        SourceError: the place has another version (DestinationExistsError: a file), which stays; or the system refuses.
    """
    last = files[-1]
    folders = sorted({os.path.dirname(file.path) for file in files})
    with contextlib.ExitStack() as stack:
        stack.enter_context(refusals(last.path))
        stack.enter_context(folder_locks(folders))
        for file in files:
            _check_replaced(file)
        replaced = shards_of(last.path) if shards_of is not None and version_of(last.path) else ()
        listed = shards_of is not None and bool(replaced or files[1:])
        with _commit_note(files, replaced, durable=durable) if listed else contextlib.nullcontext() as note:
            _move_all(files, note, durable=durable)
            if note is not None:
                synced = _sync_folders(folders if durable else (), last.path)
                note.stays = not (synced and remove_orphans(last.path, replaced))
    _sync_folders(folders if durable and not listed else (), last.path)


def _sync_folders(folders: Iterable[str], path: str) -> bool:
    """Flush folders to the disk; return False if that fails, after a warning that power loss may undo a save."""
    try:
        for folder in folders:
            sync_folder(folder)
    except OSError as error:
        import logging  # here, because few disks fail

        fault = f"is written, but the system refused to flush its folder to the disk ({error.strerror or error})"
        advice = "power loss may undo the save: check the disk, save again"
        logging.getLogger("zcrecord").warning(f"{path}: {fault}; {advice}")
        return False
    return True


def _check_replaced(file: Placement) -> None:
    """Raise unless a file's place has the version that it may replace, and is not a directory."""
    if os.path.isdir(file.path) and not os.path.islink(file.path):  # before the first is moved: none is put back
        raise SourceError("is a directory; name a file in it", path=file.path, errno=errno.EISDIR)
    if file.replaces is None or version_of(file.path) == file.replaces:
        return
    if not file.replaces:
        fault = "was made by another saver meanwhile, and stays; look at it, and start again"
        raise DestinationExistsError(fault, path=file.path, errno=errno.EEXIST)
    raise SourceError(_REPLACED, path=file.path)


@contextlib.contextmanager
def _commit_note(files: Sequence[Placement], replaced: Sequence[ListedFile], *, durable: bool) -> Iterator[ScratchFile]:
    """Yield the written note of a commit; it is removed at the end only if the caller sets `stays` to False."""
    *before, last = (ListedFile.from_path(file.scratch, os.path.basename(file.path)) for file in files)
    with scratch_file(files[-1].path, clear=False) as (note, _):
        out = FileSink(note.fileno(), files[-1].path, durable=durable)
        out.write(note_of(before, last, replaced))
        out.flush()
        if durable:
            sync_file(note.fileno())
        note.stays = True
        yield note


def _move_all(files: Sequence[Placement], note: ScratchFile | None, *, durable: bool) -> None:
    """Move finished files to their places; if one fails, move those at free places back, and give up the note."""
    *before, last = files
    at_free_places = [file for file in before if not os.path.lexists(file.path)]
    new = os.lstat(last.scratch)
    try:
        for file in before:
            os.replace(file.scratch, file.path)
        for folder in {os.path.dirname(file.path) for file in before} if durable else ():
            sync_folder(folder)  # first, or power loss could leave a file that refers to missing ones
        os.replace(last.scratch, last.path)
    except BaseException as error:
        if os.path.lexists(last.scratch):  # else it is in its place, or its folder was moved
            with contextlib.suppress(OSError):
                for file in at_free_places:
                    if not os.path.lexists(file.scratch):
                        os.replace(file.path, file.scratch)
                if note is not None:
                    note.stays = False
        elif isinstance(error, OSError) and os.path.lexists(last.path) and os.path.samestat(new, os.lstat(last.path)):
            fault = f"is written, but the system reported an error ({error.strerror or error})"
            raise SourceError(f"{fault}; verify it, or save again", path=last.path, errno=error.errno) from error
        raise
