"""Sources of a fleet: files below a folder or a URL, their versions, and a model with the files that belong to it.

A version is a text that changes when a file does: size and time of change of a local file, size and ETag of a remote
one. It contains no host, folder or user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from zcrecord.errors import ExternalDataError, RecordError, SourceError, SourceNotFoundError, printable
from zcrecord.foreign.safetensors_header import MAX_HEADER
from zcrecord.foreign.safetensors_index import decode_index
from zcrecord.record.load import load_record
from zcrecord.storage.compressed import SUFFIXES
from zcrecord.storage.files import is_url, open_source, refusals, scratch_folder
from zcrecord.storage.urls import file_beside, redacted

GONE = "missing"  # the version of a file that does not exist
_NO_FILE = errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP  # the last two: no file can have the name


def file_behind(url: str, options: Mapping[str, Any]) -> Any:
    """Return the remote file behind a URL, or the path of a `file://` URL."""
    from zcrecord.remote.open_url import remote_file  # here, because many fleets stay on disks

    return remote_file(url, options)


def label(place: str) -> str:
    """Return a place for messages: a URL without user, password and query."""
    return redacted(place) if is_url(place) else place


def list_files(prefix: str, options: Mapping[str, Any]) -> dict[str, int]:
    """Return the size of each regular file below a folder or a URL, in any depth, by relative path with "/", sorted."""
    if is_url(prefix):
        from zcrecord.remote.files import list_files  # here, as above

        return list_files(prefix, options)

    def fail(error: OSError) -> None:
        kind = SourceNotFoundError if isinstance(error, FileNotFoundError) else SourceError
        raise kind(f"cannot be listed: {error.strerror}", path=error.filename, errno=error.errno) from error

    sizes = {}
    for folder, _, names in os.walk(prefix, onerror=fail):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # removed since, or a link to nothing
                status = os.stat(path)
                if stat.S_ISREG(status.st_mode):  # a pipe would wait for its writer
                    sizes[os.path.relpath(path, prefix).replace(os.sep, "/")] = status.st_size
    return dict(sorted(sizes.items()))


def folder_among(names: Iterable[str]) -> str | None:
    """Return the first path, with parts joined by "/", that another one lies below; None if there is none."""
    paths = sorted(name.split("/") for name in set(names))  # so that a path is followed by those below it
    return next(("/".join(path) for path, following in pairwise(paths) if path == following[: len(path)]), None)


class Model:
    """A model and the files that belong to it, by their paths relative to its folder; local or remote.

    Attributes:
        name: the name of the model's own file.
        versions: the first known version of each file that was looked at; None if a server gives no version.
    """

    def __init__(self, source: str, source_format: str, options: Mapping[str, Any]) -> None:
        self._source, self._format, self._options = source, source_format, options
        self.name = source.partition("?")[0].rpartition("/")[2] if is_url(source) else os.path.basename(source)
        self.versions: dict[str, str | None] = {}
        self._remote_files: dict[str, Any] = {}  # whose size is known

    def version(self, name: str) -> str | None:
        """Return a file's version as it is now, GONE if it does not exist, None if the server gives no version."""
        if not is_url(self._source):
            path = self._place_of(name)
            try:
                status = os.stat(path)
            except OSError as error:
                if error.errno in _NO_FILE:
                    return GONE
                raise SourceError(f"cannot be read: {error.strerror}", path=path, errno=error.errno) from error
            if name == self.name and not stat.S_ISREG(status.st_mode):
                raise SourceError("not a regular file; put a copy of the model in its place", path=path)
            return f"{status.st_size}-{status.st_mtime_ns:x}"
        file = file_behind(self._place_of(name), self._options)
        try:
            file.look()
        except SourceNotFoundError:
            return GONE
        self._remote_files[name] = file
        return f"{file.size}-{file.tag}" if file.tag is not None and file.strong else None

    def note(self, names: Iterable[str]) -> None:
        """Add the versions of files to `versions`, unless it has them."""
        for name in names:
            if name not in self.versions:
                self.versions[name] = self.version(name)

    def check_same(self) -> None:
        """Raise SourceError if a file has changed since its version was noted; one without versions has not."""
        for name, version in self.versions.items():
            if self.version(name) != version:
                fault = "was replaced or changed while it was converted; convert it again"
                raise SourceError(fault, path=label(self._place_of(name)))

    def stream(self) -> Any:
        """Return the model's own file, remote and noted, as a binary file object that the caller closes."""
        from zcrecord.remote.files import ForwardReader  # here, as above

        return ForwardReader(self._remote_files[self.name])

    @contextlib.contextmanager
    def on_disk(self) -> Iterator[str]:
        """Yield the path of the model on a disk, with all its files; a remote model is copied, and the copy removed.

        The versions of all files are noted before they are read.
        """
        if not is_url(self._source):
            self.note(self._referred_files(self._source))
            yield self._source
            return
        with scratch_folder(os.path.join(tempfile.gettempdir(), "fleet")) as scratch:
            path = os.path.join(scratch, self.name)
            try:
                self._copy([self.name], scratch)
                self._copy(self._referred_files(path), scratch)
                yield path
            except RecordError as error:
                if error.path is not None and error.path.startswith(scratch):
                    error.path = label(self._place_of(os.path.relpath(error.path, scratch).replace(os.sep, "/")))
                raise

    def _copy(self, names: Iterable[str], folder: str) -> None:
        """Copy remote files into a folder, their versions noted before; files that do not exist are left out."""
        from zcrecord.remote.files import copy_to  # here, as above

        for name in names:
            self.note([name])
            if self.versions[name] != GONE:  # the reader of the model has a better error
                path = os.path.join(folder, *name.split("/"))
                with refusals(path):
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                copy_to(self._remote_files[name], path)

    def _referred_files(self, path: str) -> list[str]:
        """Return the other files of the model whose own file is at `path`, relative to its folder, with "/"."""
        if path.endswith(".json"):
            with open_source(path)[0] as file:
                return list(decode_index(file.read(MAX_HEADER)).files)
        if path.lower().endswith(SUFFIXES):  # compressed models are single files
            return []
        if self._format == "zcr":
            with load_record(path, verify="touch") as record:
                return record.archive.source.file_names
        if self._format != "onnx":
            return []
        from zcrecord.onnx.lazy.locate import find_tensors, open_model  # here, because other models refer to none

        tensors = find_tensors(open_model(path))[1]
        locations = {tensor.reference.location for tensor in tensors if tensor.reference is not None}
        if folder := folder_among([*locations, self.name]):
            fault = f"external data '{printable(folder)}': a file by one location, and a folder by another"
            raise ExternalDataError(fault)
        return sorted(locations - {self.name})

    def _place_of(self, name: str) -> str:
        """Return the path or URL of a file of the model."""
        if name == self.name:
            return self._source
        if is_url(self._source):
            return file_beside(self._source, name)
        return os.path.join(os.path.dirname(self._source), *name.split("/"))
