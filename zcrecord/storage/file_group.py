"""New files of one folder that appear together, once all of them are whole."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from types import TracebackType

from .files import FileSink, refusals, sync_file, sync_folder
from .scratch import note_of, remove_unnamed, scratch_file

__all__ = ["FileGroup"]

_NEW = 0o666  # mode of a new file, before the mask


class FileGroup:
    """New files beside a path; scratch files until `appear` gives them their names.

    A context manager: leaving it by an exception removes them, even after they appeared, unless the file at the path
    names them by then. Those of a process that was killed are removed by the next save to the path, as every scratch
    file is: a note tells those that have appeared. Their mode is that of the file there.

    Args:
        path: absolute; what will refer to the files, and is written after them.
        durable: fsync them and their folder, so that they survive power loss.
    """

    def __init__(self, path: str, *, durable: bool) -> None:
        self._path, self._durable, self._mode = path, durable, _NEW
        if os.name == "posix":
            with refusals(path), contextlib.suppress(FileNotFoundError):
                self._mode = stat.S_IMODE(os.stat(path).st_mode)
        self._stack = contextlib.ExitStack()
        self._files: list[tuple[int, str, FileSink]] = []
        self._appeared: list[str] = []

    def __enter__(self) -> FileGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):
                remove_unnamed(self._path, self._appeared)
        self._close()
        self._stack.__exit__(kind, error, trace)

    def add(self) -> FileSink:
        """Return a sink into one more file.

        Raises:
            SourceError: the file system reports an error; with very many files, that a process may open no more.
        """
        with refusals(self._path):
            fd, scratch = self._stack.enter_context(scratch_file(self._path, self._mode, clear=not self._files))
            sink = FileSink(fd, self._path, durable=self._durable)
            self._files.append((fd, scratch, sink))
            if self._mode != _NEW:
                os.chmod(scratch, self._mode)  # which the process's mask took from
        return sink

    def claim(self, names: Sequence[str], replaced: Sequence[str]) -> bool:
        """Reserve names for the files, against other saves, too; False if one is taken.

        `replaced` are files that the one at the path names, until it is replaced: the caller removes them then.

        Raises:
            SourceError: the file system reports an error.
        """
        folder = os.path.dirname(self._path)
        first = os.path.join(folder, names[0])
        with refusals(self._path), contextlib.ExitStack() as stack:
            if any(os.path.lexists(os.path.join(folder, name)) for name in names):
                return False
            self._note(stack, [*names, *replaced])
            try:
                fd = os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode)
            except FileExistsError:  # another save was faster
                return False
            self._appeared.append(names[0])
            os.close(fd)
            self._stack.enter_context(stack.pop_all())
        return True

    def appear(self, names: Sequence[str]) -> None:
        """Give the files their names, in the order in which they were added: claimed ones, or that of the path.

        Raises:
            SourceError: the file system reports an error.
        """
        folder = os.path.dirname(self._path)
        with refusals(self._path):
            for fd, _, sink in self._files:
                sink.flush()
                if self._durable:
                    sync_file(fd)
        files = self._files.copy()
        self._close()
        with refusals(self._path):
            for name, (_, scratch, _) in zip(names, files, strict=True):
                self._appeared.append(name)
                os.replace(scratch, os.path.join(folder, name))
        if self._durable and os.name == "posix":
            sync_folder(folder)

    def note(self, replaced: Sequence[str]) -> None:
        """Have the next save remove files that the one at the path names until it is replaced, if this one is killed.

        Raises:
            SourceError: the file system reports an error.
        """
        with refusals(self._path):
            self._note(self._stack, replaced)

    def _note(self, stack: contextlib.ExitStack, names: Sequence[str]) -> None:
        fd, _ = stack.enter_context(scratch_file(self._path, self._mode, clear=False))
        try:
            os.write(fd, note_of(names))
            if self._durable:
                sync_file(fd)
        finally:
            os.close(fd)

    def _close(self) -> None:
        files, self._files = self._files, []
        for fd, _, _ in files:
            with contextlib.suppress(OSError):
                os.close(fd)
