"""New files of one folder that appear together, once all of them are whole, before the file that refers to them.

Two steps: they are written as scratch files, by one process or several, and then get their names under the folder's
lock, one of several savers at a time. A note, itself a scratch file, tells the next save what one that was killed left.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from .files import FileSink, put_in_place, refusals, sync_file, sync_folder
from .scratch import ListedFile, ScratchFile, note_of, remove_unnamed, scratch_file

__all__ = ["FileGroup", "appearing", "removing"]

_NEW = 0o666  # mode of a new file, before the mask


class FileGroup:
    """New files beside a path; scratch files, which are gone at the end unless they have got their names by then.

    A context manager. Those of a process that was killed are removed by the next save to the path. Their mode is that
    of the file there.

    Args:
        path: absolute; what will refer to the files, and is written after them.
        durable: fsync them, so that they survive power loss.
    """

    def __init__(self, path: str, *, durable: bool) -> None:
        self._path, self._durable, self._mode = path, durable, _NEW
        if os.name == "posix":
            with refusals(path), contextlib.suppress(FileNotFoundError):
                self._mode = stat.S_IMODE(os.stat(path).st_mode)
        self._stack = contextlib.ExitStack()
        self._files: list[tuple[ScratchFile, str, FileSink]] = []

    def __enter__(self) -> FileGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add(self) -> FileSink:
        """Return a sink into one more file.

        Raises:
            SourceError: the file system reports an error; with very many files, that a process may open no more.
        """
        with refusals(self._path):
            file, scratch = self._stack.enter_context(scratch_file(self._path, self._mode, clear=not self._files))
            sink = FileSink(file.fileno(), self._path, durable=self._durable)
            self._files.append((file, scratch, sink))
            if self._mode != _NEW:
                os.chmod(scratch, self._mode)  # which the process's mask took from
        return sink

    def finish(self) -> list[str]:
        """Finish the files; return their paths, in the order in which they were added.

        Raises:
            SourceError: the file system reports an error.
        """
        with refusals(self._path):
            for file, _, sink in self._files:
                sink.flush()
                if self._durable:
                    sync_file(file.fileno())
                file.close()
        return [scratch for _, scratch, _ in self._files]


@contextlib.contextmanager
def appearing(path: str, files: Mapping[str, str], replaced: Sequence[ListedFile], *, durable: bool) -> Iterator[None]:
    """Give scratch files their names beside a path, for a block that puts a file there which refers to them.

    At the end, whatever way it ends, that file tells which are removed: those of the new files, and of the `replaced`
    ones, that it does not name. To be run under the folder's lock.

    Args:
        path: absolute.
        files: scratch files to new names.
        replaced: what the file at the path refers to until the block replaces it, and is known to be its own.

    Raises:
        SourceError: the file system reports an error; or a name is taken.
    """
    folder = os.path.dirname(path)
    with refusals(path):
        new = [ListedFile.at(scratch, name) for scratch, name in files.items()]
    with removing(path, [*new, *replaced], durable=durable):
        for scratch, name in files.items():
            put_in_place(scratch, os.path.join(folder, name), durable=False, replaces=())
        if durable and os.name == "posix":
            sync_folder(folder)  # first, or power loss could leave a file that refers to none
        yield


@contextlib.contextmanager
def removing(path: str, files: Sequence[ListedFile], *, durable: bool) -> Iterator[None]:
    """Remove files beside a path at the end of a block, but for those that a catalogue in the folder names then.

    If that is not done, since this process is killed or the system refuses, the next save to the path does it.

    Raises:
        SourceError: the file system reports an error before the block.
    """
    if not files:
        yield
        return
    with contextlib.ExitStack() as stack:
        with refusals(path):
            note, _ = stack.enter_context(scratch_file(path, clear=False))
            out = FileSink(note.fileno(), path, durable=durable)
            out.write(note_of(files))
            out.flush()
            if durable:
                sync_file(note.fileno())
        note.stays = True
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if durable and os.name == "posix":
                    sync_folder(os.path.dirname(path))  # first, or power loss could bring back what refers to them
                note.stays = not remove_unnamed(path, files)
