"""External data: values in a file beside the model, read only if the rules let a model refer to that file.

The rules are those of onnx's docs/ExternalDataSecurity.md and of the advisories behind it: CVE-2024-27318 and
CVE-2025-51480 (traversal), CVE-2026-27489 (symbolic links), CVE-2026-34446 (hard links), CVE-2026-34445 (lengths).
Each has a message of its own.

`checksum` is not checked: it is the SHA-1 of a whole file of which a model may use a part. `basepath` is ignored, as by
`onnx.load`, and `prepacked_N`, which names weights that ONNX Runtime packed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zcrecord.errors import Advice, ExternalDataError, OnnxError, RecordError, SourceError, printable
from zcrecord.onnx.protobuf.tensors import RAW_DATA, STRING, TensorMessage
from zcrecord.storage.files import real_path
from zcrecord.storage.memory import aligned_empty, read_some

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

NO_PREPACKING = "session.disable_prepacking"
COPYING = ("ConstantFolding", "NchwcTransformer")  # optimizers that make private copies of weights
# Session configuration with which ONNX Runtime, from 1.18 on and in every language, copies no weights in an archive.
# Source: onnxruntime_session_options_config_keys.h, whose comment has a comma between optimizers;
# `graph_transformer_utils.cc` splits at semicolons, and ignores unknown names.
ONE_COPY = {NO_PREPACKING: "1", "optimization.disable_specified_optimizers": ";".join(COPYING)}

_KEYS = ("location", "offset", "length", "checksum", "basepath")
_PACKED = re.compile(r"prepacked_[0-9]{1,9}")
_OPEN = 16  # files; each takes a descriptor, and another one while it is mapped
_CHUNK = 1 << 19
_NUMBER = re.compile(r"[0-9]{1,19}")
_DRIVE = re.compile(r"[A-Za-z]:")
# O_NONBLOCK: a named pipe in the file's place must not hang the open; it is refused after.
_FLAGS = os.O_RDONLY | sum(getattr(os, f, 0) for f in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_WALKS = os.open in os.supports_dir_fd  # not so on Windows
_FOLDER = sum(getattr(os, f, 0) for f in ("O_PATH", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"))


class ExternalReference(NamedTuple):
    """The place of values: a path relative to the model's folder, its parts joined by "/"; offset and length."""

    location: str
    offset: int
    length: int


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
        """Return the file as a read-only array over a mapping, which lives as long as its last view.

        A new mapping is added to `mappings`.
        """
        octets = self._octets
        if octets is None:
            try:
                mapping = mmap.mmap(self._fd, self.nbytes, access=mmap.ACCESS_READ)
            except ValueError:
                raise self._shrunk() from None
            except OSError as error:
                fault = f"cannot be mapped: {error.strerror or error}; copy it to another disk"
                advice = Advice("{} reads it where it is", "mmap", False)
                raise SourceError(fault, path=self.path, errno=error.errno, advice=advice) from error
            mappings.add(mapping)
            self._octets = octets = np.frombuffer(mapping, np.uint8)
        return octets

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Read from an offset; return the number of bytes read, 0 at the end."""
        try:
            return read_some(self._fd, buffer, offset)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror or error}", path=self.path, errno=error.errno) from error

    def read_more(self, buffer: memoryview, offset: int) -> int:
        """Read from an offset before the end; return the number of bytes read, SourceError if there is none left."""
        count = self.read_at(buffer, offset)
        if not count:
            raise self._shrunk()
        return count

    def read(self, offset: int, nbytes: int) -> Bytes:
        """Return a copy of a range in memory of its own, aligned as payloads are."""
        copy = aligned_empty(nbytes)
        done = 0
        while done < nbytes:
            done += self.read_more(copy.data[done:], offset + done)
        return copy

    def check_current(self) -> None:
        """Raise SourceError unless the file's path still leads to it, and its size is the same."""
        with contextlib.suppress(OSError):
            current = os.stat(self.path)
            if os.path.samestat(current, os.fstat(self._fd)) and current.st_size == self.nbytes:
                return
        raise SourceError("was changed or replaced since it was scanned; scan it again", path=self.path)

    def _shrunk(self) -> SourceError:
        fault = f"became shorter than the {self.nbytes} bytes it had; is it still being written?"
        return SourceError(fault, path=self.path)

    def forget(self) -> None:
        """Release the mapping: views alone keep it."""
        self._octets = None


def _broken(location: str, fault: str, advice: Advice | None = None) -> ExternalDataError:
    return ExternalDataError(f"external data '{printable(location)}': {fault}", advice=advice)


def parse(entries: dict[str, str], nbytes: int) -> ExternalReference:
    """Return the place in external_data of a tensor of `nbytes`; checks all rules that need no look at the file."""
    location = entries.get("location", "")
    if "location" not in entries:
        raise ExternalDataError("external data: no location; every tensor kept outside the model needs one")
    for key in entries:
        if key not in _KEYS and not _PACKED.fullmatch(key):
            raise _broken(location, f"unknown key '{printable(key)}', known are {', '.join(_KEYS)}")
    location = _checked_location(location)
    offset = _number(entries, "offset", location) or 0
    length = _number(entries, "length", location)
    if length is not None and length != nbytes:
        raise _broken(location, f"length {length}, but the tensor's shape and type take {nbytes} bytes")
    return ExternalReference(location, offset, nbytes)


def reference_of(t: TensorMessage) -> ExternalReference | None:
    """Return the place of values with data_location EXTERNAL; None if the tensor is empty or has no legal shape."""
    if t.values.field and (t.values.field != RAW_DATA or t.values.nbytes):
        raise OnnxError("has external data and values of its own; it may have one of them")
    if t.data_type == STRING:
        raise ExternalDataError("strings cannot be external data")
    nbytes = t.expected()
    if t.dtype is None or nbytes < 0:
        return None  # `TensorReader.finish` names the fault
    reference = parse(t.entries or {}, nbytes)
    return reference if nbytes else None


def location_from(model: str, path: str) -> str:
    """Return the location by which a model at a path refers to a file: the file's path relative to the model's folder.

    Links are followed in both paths: `onnx` refuses links and hard links, ONNX Runtime paths that leave the folder.

    Source: onnx 1.23, ONNX Runtime 1.31.
    """
    real, folder = os.path.realpath(path), os.path.dirname(os.path.realpath(model))
    if not Path(real).is_relative_to(folder):
        by_link = f", by a link in '{printable(path)}'," if os.path.islink(path) else ""
        rule = f"external data must lie in the model's folder ('{printable(folder)}') or below it"
        fault = f"{rule}; this file lies{by_link} in '{printable(os.path.dirname(real))}'"
        raise ExternalDataError(f"{fault}: write the model there, or copy the file", path=path)
    links = os.stat(real).st_nlink
    if links != 1:
        fault = f"the file has {links} names (hard links), and onnx takes no external data from such a file; copy it"
        raise ExternalDataError(fault, path=path)
    location = Path(real).relative_to(folder).as_posix()
    try:
        location.encode()
        parse({"location": location}, 0)
    except UnicodeEncodeError:
        raise ExternalDataError("its path is not UTF-8, as a location must be; rename it", path=path) from None
    except ExternalDataError as error:
        raise error.located(path=path) from None
    return location


def check_inside(reference: ExternalReference, nbytes: int) -> None:
    """Raise ExternalDataError unless a reference lies inside its file of so many bytes."""
    end = reference.offset + reference.length
    if end > nbytes:
        fault = f"bytes {reference.offset} to {end} are past its end ({nbytes})"
        raise _broken(reference.location, f"{fault}; the file is truncated or belongs to another model")


def _checked_location(location: str) -> str:
    """Return a location as a path in the model's folder; ExternalDataError if it could lead out of it."""
    if not location:
        raise _broken(location, "the location is empty")
    if "\0" in location:
        raise _broken(location, "the location contains NUL")
    if "\\" in location or _DRIVE.match(location):
        raise _broken(location, "a location has no backslash and no drive; folders are separated by '/'")
    if location.startswith("/"):
        raise _broken(location, "the location is absolute; it must be relative to the model's folder")
    parts: list[str] = []
    for part in location.split("/"):
        if part == ".." and not parts:
            raise _broken(location, "the location leaves the model's folder through '..'")
        if part == "..":
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    if not parts:
        raise _broken(location, "the location is the model's folder itself, not a file in it")
    return "/".join(parts)


def _number(entries: dict[str, str], key: str, location: str) -> int | None:
    """Return the number in an entry; None without the entry, ExternalDataError for any other text."""
    text = entries.get(key)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise _broken(location, f"{key} '{printable(text)}' is not a non-negative decimal integer")
    return int(text)


class ModelFolder:
    """The folder of a model, and the files in it that were opened last.

    Threads share it without a lock: at worst two open the same file, and one of the two is closed with its views.
    `allow_links` accepts symbolic links to any place, and files with several names. Without it, a link is
    accepted only inside one repository of a Hugging Face cache, where `snapshots/<revision>/` links into `blobs/`.
    """

    def __init__(self, path: str | os.PathLike[str], *, allow_links: bool = False) -> None:
        self.path = real_path(os.fspath(path))
        self.nbytes = 0  # read so far
        self._allow_links = allow_links
        self._files: dict[str, OpenFile] = {}
        self._buffer = memoryview(b"")

    def read(self, reference: ExternalReference) -> Iterator[memoryview]:
        """Yield the bytes of a reference in pieces, each valid until the next."""
        file, done = self.file_of(reference), 0
        self._buffer = self._buffer or memoryview(bytearray(_CHUNK))  # most models need none
        while done < reference.length:
            count = file.read_more(self._buffer[: reference.length - done], reference.offset + done)
            self.nbytes += count
            done += count
            yield self._buffer[:count]

    def file_of(self, reference: ExternalReference) -> OpenFile:
        """Return the open file of a reference that lies inside it.

        Raises:
            ExternalDataError: the model may not use the file, or it is missing or too short.
        """
        location = reference.location
        file = self._files.get(location)
        if file is None:
            file = OpenFile(self.open(location), str(Path(self.path, *location.split("/"))))
            if len(self._files) >= _OPEN:
                oldest, *_ = list(self._files)  # a copy: another thread may add meanwhile
                self._files.pop(oldest, None)
            self._files[location] = file
        check_inside(reference, file.nbytes)
        return file

    def forget(self) -> None:
        """Release the mappings of its files."""
        for file in list(self._files.values()):
            file.forget()

    def path_of(self, location: str) -> str:
        """Return the path of a file in the folder, links followed; does not open it."""
        return os.path.realpath(Path(self.path, *location.split("/")))

    def open(self, location: str) -> int:
        """Return a descriptor of a file in the folder that the model may use; the caller closes it."""
        try:
            return self._open_checked(location)
        except OSError as error:
            if isinstance(error, RecordError):
                raise
            fault = f"cannot be opened: {error.strerror or error}; it belongs beside the model"
            raise _broken(location, fault) from error

    def _open_checked(self, location: str) -> int:
        """Return a descriptor of a file; it is checked before and after, so that a swap in between is noticed."""
        path = Path(self.path, *location.split("/"))
        real = os.path.realpath(path)
        if real != str(path) and not self._allow_links:
            from zcrecord.storage.folders import in_hub_cache  # here, because few models lie behind links

            if not in_hub_cache(self.path, real):
                if not Path(real).is_relative_to(self.path):
                    raise _broken(location, "a symbolic link leads out of the model's folder", _LINKS)
                if path.is_symlink():
                    raise _broken(location, "it is a symbolic link", _LINKS)
        before = Path(real).lstat()
        if not stat.S_ISREG(before.st_mode):
            raise _broken(location, "it is not a regular file; copy its bytes to one")
        if before.st_nlink != 1 and not self._allow_links:
            raise _broken(location, f"the file has {before.st_nlink} names (hard links)", _LINKS)
        root = self.path if Path(real).is_relative_to(self.path) else os.path.dirname(real)
        fd = _open_below(root, os.path.relpath(real, root).split(os.sep))
        try:
            opened = os.fstat(fd)
            if (opened.st_dev, opened.st_ino) != (before.st_dev, before.st_ino) or os.path.realpath(path) != real:
                raise _broken(location, "it was replaced by another file while it was opened; try again")
            if not stat.S_ISREG(opened.st_mode) or (opened.st_nlink != 1 and not self._allow_links):
                raise _broken(location, "it changed while it was opened; try again")
        except BaseException:
            os.close(fd)
            raise
        return fd


def _open_below(root: str, parts: list[str]) -> int:
    """Return a descriptor of a file below a folder; a link on the way is an OSError, whenever it was put there.

    To resolve the path before and after is not enough: a folder can be swapped for a link and back meanwhile.
    """
    if not _WALKS:
        return os.open(os.path.join(root, *parts), _FLAGS)
    folder = os.open(root, _FOLDER & ~getattr(os, "O_NOFOLLOW", 0))
    try:
        for part in parts[:-1]:
            parent, folder = folder, os.open(part, _FOLDER, dir_fd=folder)
            os.close(parent)
        return os.open(parts[-1], _FLAGS, dir_fd=folder)
    finally:
        os.close(folder)


_LINKS = Advice("{} allows that", "allow_links", True)
