"""Files of other formats, read to make an index of them: as streams for a conversion, or in memory to be opened."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

from zcrecord.archive.payload_source import MemberSum
from zcrecord.errors import FormatError, SourceError, printable
from zcrecord.storage.files import Binary, Identity, identity_of, real_path
from zcrecord.storage.folders import in_hub_cache
from zcrecord.storage.memory import Memory, map_file
from zcrecord.storage.stream_reader import StreamReader

__all__ = ["FileReader", "MemoryReader", "Reader", "open_beside", "path_beside"]


def path_beside(path: str, name: str) -> str:
    """Return the path of a file beside another; SourceError for a link, unless within a Hugging Face repository."""
    return _beside(path, name)[0]


def open_beside(path: str, name: str, open_file: Callable[[str], Any]) -> Any:
    """Open the file at `path_beside` by `open_file`, whose result has `inode`, and check that no other took its place.

    Raises:
        SourceError: as `path_beside`; or the file appeared or was replaced meanwhile, as by a link to elsewhere.
    """
    path_there, target = _beside(path, name)
    status = None
    with contextlib.suppress(OSError):  # opening it says why
        status = os.lstat(target)
    opened = open_file(path_there)
    if status is None or (status.st_dev, status.st_ino) != opened.inode:
        if hasattr(opened, "__exit__"):  # a mapping ends with its last reference
            opened.__exit__()
        event = "appeared" if status is None else "was replaced by another file"
        raise SourceError(f"{event} while it was opened; open it again", path=path_there)
    return opened


def _beside(path: str, name: str) -> tuple[str, str]:
    """Return the path of a file beside another, and its target if it is a link; SourceError as `path_beside`."""
    folder = os.path.dirname(path)
    place = os.path.join(folder, name)
    if not os.path.islink(place):
        return place, place
    root, real = real_path(folder), real_path(place)
    if os.path.dirname(real) != root and not in_hub_cache(root, real):
        fault = f"is a link to {printable(real)}, out of its folder; a stranger's index could read any file by it"
        raise SourceError(f"{fault}; put the file itself there", path=place)
    return place, real


class FileReader(StreamReader):
    """A file or a stream, read in pieces; files beside it that it opens are closed with it. See MemoryReader."""

    described = (0, 0)

    def __init__(self, source: str | Binary, *, regular: bool = False) -> None:
        super().__init__(source, regular=regular)
        self._stack = contextlib.ExitStack()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stack.close()

    def beside(self, name: str) -> FileReader:
        """Return a reader of a file in the same folder, closed with this one; SourceError as `open_beside`."""
        assert self.path is not None, "an index of shards is a file"

        reader: FileReader = open_beside(self.path, name, functools.partial(FileReader, regular=True))
        return self._stack.enter_context(reader)


class MemoryReader:
    """A file in memory, with a position. `bring` fetches a range of remote memory before it is read.

    Attributes:
        described: the range from which the format's reader made the index.
        sums: returns the checksums of those members of the file that are stored as they are.
    """

    seekable = True
    described = (0, 0)

    def __init__(
        self,
        memory: Memory,
        *,
        read: Callable[..., Memory] = map_file,
        bring: Callable[[int, int], None] = lambda _start, _end: None,
    ) -> None:
        self.memory, self.path, self.nbytes = memory, memory.path, len(memory.octets)
        self.position = 0
        self.sums: Callable[[], Iterable[MemberSum]] = tuple
        self._read, self._bring = read, bring

    def beside(self, name: str) -> MemoryReader:
        """Return a reader of a file in the same folder, mapped as this one is; SourceError as `open_beside`."""
        read = functools.partial(self._read, least=0)
        return MemoryReader(open_beside(self._index_path, name, read), read=self._read)

    def identity_beside(self, name: str) -> Identity:
        """Return the identity of the file that `beside` opens; raises what that does."""
        real = _beside(self._index_path, name)[1]
        with contextlib.suppress(SourceError):
            return identity_of(real)
        return self.beside(name).memory.identity or ()  # which says why it cannot be read

    @property
    def _index_path(self) -> str:
        if self.memory.absolute is None:
            raise FormatError("an index of shards, which lie beside it in files; load it by its path")
        return self.memory.absolute

    def seek(self, offset: int) -> None:
        """Go to an offset."""
        self.position = offset

    def read(self, limit: int) -> bytes:
        """Return a copy of the next `limit` bytes, fewer only at the end; raises what `bring` does."""
        start, end = self.position, min(self.position + limit, self.nbytes)
        if start < end:
            self._bring(start, end)
        self.position = max(start, end)
        return bytes(self.memory.octets[start:end])

    def read_at(self, offset: int, nbytes: int) -> memoryview:
        """Return a view of a range of a file that is not remote, shorter at its end; threads may call it at once."""
        return self.memory.octets[offset : offset + nbytes]


Reader = FileReader | MemoryReader
