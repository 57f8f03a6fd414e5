"""The files that hold a model's values, open while they are used: mapped, or read by position.

The rules for files that a model may use are left to `external_data`, the meaning of the bytes to `locate`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from zcrecord.errors import Advice, SourceError
from zcrecord.onnx.external_data import ExternalReference, ModelFolder, check_inside
from zcrecord.storage.files import open_source
from zcrecord.storage.memory import aligned_empty, read_some

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_OPEN = 32  # files of external data; each takes two descriptors
_MAPPED = 256  # of them that views may keep mapped: in Python each takes a descriptor


class OpenFile:
    """A regular file, closed with its last reference: another thread may be reading it."""

    __slots__ = ("_fd", "_octets", "nbytes", "path")

    def __init__(self, fd: int, path: str) -> None:
        """Take over a descriptor."""
        self._fd = fd
        self._octets: Bytes | None = None
        self.path = path
        self.nbytes = os.fstat(fd).st_size

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._fd)

    def octets(self, mappings: weakref.WeakSet[mmap.mmap]) -> Bytes:
        """Return the file's bytes as a read-only array over a mapping, which lives as long as its last view.

        A new mapping is added to `mappings`.
        """
        octets = self._octets
        if octets is None:
            try:
                mapping = mmap.mmap(self._fd, self.nbytes, access=mmap.ACCESS_READ)
            except ValueError:
                raise self._shrunk() from None
            except OSError as error:
                what = f"cannot be mapped: {error.strerror or error}; copy it to another disk"
                advice = Advice("{} reads it where it is", "mmap", False)
                raise SourceError(what, path=self.path, errno=error.errno, advice=advice) from error
            mappings.add(mapping)
            self._octets = octets = np.frombuffer(mapping, np.uint8)
        return octets

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Read from an offset, as many bytes as fit or come at once; return their number, 0 at the end."""
        try:
            return read_some(self._fd, buffer, offset)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror or error}", path=self.path, errno=error.errno) from error

    def read(self, offset: int, nbytes: int) -> Bytes:
        """Return a copy of some bytes in memory of its own, aligned as payloads are."""
        room = aligned_empty(nbytes)
        done = 0
        while done < nbytes:
            got = self.read_at(room.data[done:], offset + done)
            if not got:
                raise self._shrunk()
            done += got
        return room

    def check_current(self) -> None:
        """Raise SourceError unless the file's path still leads to it, and it is as large as it was."""
        with contextlib.suppress(OSError):
            there = os.stat(self.path)
            if os.path.samestat(there, os.fstat(self._fd)) and there.st_size == self.nbytes:
                return
        raise SourceError("was changed or replaced since it was scanned; scan it again", path=self.path)

    def _shrunk(self) -> SourceError:
        what = f"became shorter than the {self.nbytes} bytes it had; is it still being written?"
        return SourceError(what, path=self.path)

    def forget(self) -> None:
        """Let go of the mapping: views alone keep it."""
        self._octets = None


def open_model(path: str) -> OpenFile:
    """Return a model's file.

    Raises:
        SourceError: it is missing (SourceNotFoundError), not a regular file, or cannot be read.
    """
    special = SourceError(
        "not a regular file, and only values in one can be read on demand; convert it instead", path=path
    )
    try:
        kind = Path(path).stat().st_mode
    except OSError:
        kind = stat.S_IFREG  # opening it tells the reason
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # before it is opened: a pipe would wait for its writer
        raise special
    stream, nbytes = open_source(path)
    with stream:
        if nbytes is None:
            raise special
        try:
            file = OpenFile(os.dup(stream.fileno()), os.path.realpath(path))
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror or error}", path=path, errno=error.errno) from error
        if hasattr(os, "posix_fadvise"):  # not to be read from end to end
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_NORMAL)
    return file


class ModelFiles:
    """A model's own file and those of its external data, opened and checked when they are first needed.

    Threads share it without a lock: at worst two open the same file, and the one forgotten is closed with its views.

    Attributes:
        mappings: those that are alive.
    """

    def __init__(self, model: OpenFile, folder: ModelFolder) -> None:
        self._model = model
        self._folder = folder
        self._files: dict[str, OpenFile] = {}
        self._located: dict[str, str] = {}
        self.mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._mapped: weakref.WeakValueDictionary[str, Bytes] = weakref.WeakValueDictionary()

    @property
    def path(self) -> str:
        """The model's own file, links followed."""
        return self._model.path

    def locate(self, reference: ExternalReference | None) -> str:
        """Return the path of the file referred to, the model's own for None; links followed, nothing opened."""
        if reference is None:
            return self._model.path
        path = self._located.get(reference.location)
        if path is None:
            path = self._located[reference.location] = self._folder.locate(reference.location)
        return path

    def read_model(self, buffer: memoryview, offset: int) -> int:
        """Read the model's own file, as `OpenFile.read_at` does."""
        return self._model.read_at(buffer, offset)

    def mapped(self, reference: ExternalReference | None, offset: int, nbytes: int) -> Bytes | None:
        """Return a read-only view of some bytes; None if views keep too many files mapped already.

        Raises:
            ExternalDataError: the file may not be used, is not there, or is too short. SourceError: it cannot be
                mapped.
        """
        if reference is None:
            octets = self._model.octets(self.mappings)
        else:
            known = self._mapped.get(reference.location)
            if known is None:
                if len(self.mappings) >= _MAPPED:
                    return None
                known = self._open(reference).octets(self.mappings)
                self._mapped[reference.location] = known
            check_inside(reference, len(known))
            octets = known
        return octets[offset : offset + nbytes]

    def read(self, reference: ExternalReference | None, offset: int, nbytes: int) -> Bytes:
        """Return a copy of some bytes; raises the errors of `mapped`."""
        return self.file_of(reference).read(offset, nbytes)

    def file_of(self, reference: ExternalReference | None) -> OpenFile:
        """Return the open file that has the bytes referred to, the model's own for None.

        Raises:
            ExternalDataError: it may not be used, is not there, or is too short.
        """
        return self._model if reference is None else self._open(reference)

    def _open(self, reference: ExternalReference) -> OpenFile:
        location = reference.location
        file = self._files.get(location)
        if file is None:
            file = OpenFile(self._folder.open(location), self.locate(reference))
            if len(self._files) >= _OPEN:
                self._files.pop(list(self._files)[0], None)  # noqa: RUF015  # no other thread can add to a list
            self._files[location] = file
        check_inside(reference, file.nbytes)
        return file

    def forget(self) -> None:
        """Let go of all mappings: views alone keep them."""
        for file in (self._model, *list(self._files.values())):
            file.forget()


def release(mappings: weakref.WeakSet[mmap.mmap]) -> bool:
    """Unmap each mapping that no view uses; return True if those are all."""
    gone = True
    for mapping in list(mappings):
        try:
            mapping.close()
        except BufferError:  # a view lives
            gone = False
    return gone
