"""The files that hold a model's values, mapped or read by position."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import weakref

from zcrecord.errors import SourceError
from zcrecord.onnx.external_data import Bytes, ExternalReference, ModelFolder, OpenFile, check_inside
from zcrecord.storage.files import open_source, read_error

_MAPPED = 256  # files of external data that views may keep mapped: in Python each takes a descriptor


def open_model(path: str) -> OpenFile:
    """Return a model's file; SourceError if it is missing, not a regular file, or unreadable."""
    what = "not a regular file, and only values in one can be read on demand; convert it instead"
    kind = stat.S_IFREG
    with contextlib.suppress(OSError):  # opening it tells the reason
        kind = os.stat(path).st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # before it is opened: a pipe would wait for its writer
        raise SourceError(what, path=path)
    stream, nbytes = open_source(path)
    with stream:
        if nbytes is None:
            raise SourceError(what, path=path)
        try:
            file = OpenFile(os.dup(stream.fileno()), os.path.realpath(path))
        except OSError as error:
            raise read_error(error, path) from error
        if hasattr(os, "posix_fadvise"):  # not to be read from end to end
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_NORMAL)
    return file


class ModelFiles:
    """A model's own file and those of its external data, opened and checked when they are first needed.

    A reference of None stands for the model's own file. Threads share it without a lock.

    Attributes:
        mappings: those that are alive.
    """

    def __init__(self, model: OpenFile, folder: ModelFolder) -> None:
        self._model = model
        self._folder = folder
        self._located: dict[str, str] = {}
        self.mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._mapped: weakref.WeakValueDictionary[str, Bytes] = weakref.WeakValueDictionary()

    def locate(self, reference: ExternalReference | None) -> str:
        """Return the path of a reference's file, links followed; does not open it."""
        if reference is None:
            return self._model.path
        path = self._located.get(reference.location)
        if path is None:
            path = self._located[reference.location] = self._folder.locate(reference.location)
        return path

    def mapped(self, reference: ExternalReference | None, offset: int, nbytes: int) -> Bytes | None:
        """Return a read-only view of some bytes; None if views keep too many files mapped already."""
        if reference is None:
            return self._model.octets(self.mappings)[offset : offset + nbytes]
        octets = self._mapped.get(reference.location)
        if octets is None:
            if len(self.mappings) >= _MAPPED:
                return None
            octets = self._folder.file_of(reference).octets(self.mappings)
            self._mapped[reference.location] = octets
        check_inside(reference, len(octets))
        return octets[offset : offset + nbytes]

    def file_of(self, reference: ExternalReference | None) -> OpenFile:
        """Return the open file of a reference."""
        return self._model if reference is None else self._folder.file_of(reference)

    def forget(self) -> None:
        """Release all mappings: views alone keep them."""
        self._model.forget()
        self._folder.forget()


def release(mappings: weakref.WeakSet[mmap.mmap]) -> bool:
    """Unmap each mapping that no view uses; return True if no mapping is left."""
    gone = True
    for mapping in list(mappings):
        try:
            mapping.close()
        except BufferError:  # a view lives
            gone = False
    return gone
