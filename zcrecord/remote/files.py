"""Files of any kind behind URLs: listed below a URL, read forward in pieces, removed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from zcrecord.errors import SourceNotFoundError
from zcrecord.storage.files import refusals
from zcrecord.storage.uploads import store_refusals
from zcrecord.storage.urls import connect, redacted

from .file import RemoteFile
from .open_url import remote_file

_PIECE = 4 << 20  # bytes of a request; of so many together
_AT_ONCE = 4


def list_files(url: str, options: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the files below a URL, in any depth, by relative path, sorted; none if there is no folder."""
    fs, root = connect(url, options)
    infos: Mapping[str, Any] = {}
    with contextlib.suppress(SourceNotFoundError), store_refusals(redacted(url), "its files cannot be listed"):
        fs.invalidate_cache(root)
        infos = fs.find(root, detail=True)
    start = root.rstrip("/") + "/"
    sizes = {path[len(start) :]: int(info.get("size") or 0) for path, info in infos.items() if path.startswith(start)}
    return dict(sorted(sizes.items()))


def remove_file(url: str, options: Mapping[str, Any]) -> None:
    """Remove the file at a URL, if it exists."""
    fs, path = connect(url, options)
    with contextlib.suppress(SourceNotFoundError), store_refusals(redacted(url), "cannot be removed"):
        fs.rm_file(path)


class ForwardReader(io.RawIOBase):
    """A remote file as a binary file object, read forward; at the end the server is asked if it was replaced."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self._file = file
        self._ahead = memoryview(b"")
        self._next = 0  # offset in the file behind `_ahead`

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, or less of it; return the number of bytes, 0 at the end."""
        if not self._ahead:
            self._fetch()
        target = memoryview(buffer).cast("B")
        nbytes = min(len(target), len(self._ahead))
        target[:nbytes] = self._ahead[:nbytes]
        self._ahead = self._ahead[nbytes:]
        return nbytes

    def _fetch(self) -> None:
        """Fetch the next bytes into `_ahead`; at the end of the file ask once more for its version."""
        self._ahead = memoryview(b"")  # which frees the bytes that were passed
        if not self._next:
            self._ahead = self._file.start(_PIECE)  # or more, from a server without range requests
        elif nbytes := min(_PIECE * _AT_ONCE, self._file.size - self._next):
            octets = memoryview(bytearray(nbytes))
            self._file.fill([(self._next + lo, octets[lo : lo + _PIECE]) for lo in range(0, nbytes, _PIECE)])
            self._ahead = octets
        else:
            self._file.look()
        self._next += len(self._ahead)


def open_forward(url: str) -> ForwardReader | str:
    """Return the file behind a URL, to be read forward; for a `file://` URL the path."""
    file = remote_file(url, None)
    return file if isinstance(file, str) else ForwardReader(file)


def copy_to(file: RemoteFile, path: str) -> None:
    """Copy a remote file to a new local one."""
    with ForwardReader(file) as source, refusals(path), open(path, "xb") as dest:
        while piece := source.read(_PIECE):
            dest.write(piece)
