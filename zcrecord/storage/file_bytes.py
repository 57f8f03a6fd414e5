"""The bytes of a file that is not mapped: slices are read by position, so that the system's errors are exceptions.

For network file systems, where a page fault is a round trip, and ends the process if the file fails or shrinks.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from zcrecord.dtypes import Octets
from zcrecord.errors import SourceError, located

from .files import Identity, identity_of
from .memory import Memory, aligned, aligned_empty, c_function, map_file, read_at

_PIECE, _READERS = 1 << 20, 4  # bytes of one read, which takes many round trips of a network, and reads at a time
_HUGE = 4 << 20  # bytes from which numpy asks for huge pages

# Source: statfs(2), and linux/magic.h.
_NETWORK = {0x6969: "NFS", 0x0BD00BD0: "Lustre", 0x65735546: "FUSE", 0x01021997: "9p", 0x517B: "SMB", 0xFE534D42: "SMB",
            0xFF534D42: "SMB"}  # fmt: skip


def _network_of(fd: int) -> str | None:
    """Return the name of an open file's file system, if its files are to be read and not mapped."""
    call = c_function("fstatfs", "c_int", "c_int", "c_void_p") if sys.platform == "linux" else None
    status = np.zeros(64, np.uint64)  # struct statfs takes less than half of it
    if call is not None and call(fd, status.ctypes.data):  # as some of FUSE do
        return "an unknown file system"
    return _NETWORK.get(int(status.view(np.uint32)[0]))  # a long, on little-endian machines


def new_memory(nbytes: int) -> Octets:
    """Return new memory without huge pages, which numpy would use: several threads that clear one page are slow."""
    return aligned_empty(nbytes) if nbytes < _HUGE else np.frombuffer(aligned(nbytes)[1], np.uint8)


def read_on_demand(path: str, *, unless_local: bool = False, **options: Any) -> Memory:
    """Open a file by `map_file`, its bytes as `FileBytes`; with `unless_local` map it, if no network is between."""

    def bytes_of(fd: int, identity: Identity) -> FileBytes | None:
        network = _network_of(fd) if unless_local else ""
        return None if network is None else FileBytes(fd, path, identity, network)

    return map_file(path, instead=bytes_of, **options)


def read_file(path: str, **options: Any) -> Memory:
    """Read a whole file, opened by `map_file`, into memory at an address that is a multiple of 65536."""
    memory = read_on_demand(path, **options)
    file: Any = memory.octets
    block, octets = aligned(len(file))
    if octets:
        with contextlib.closing(file):
            file.fill([(0, octets)])
    return memory._replace(octets=octets, mapping=block)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # of a file that was only read: it means nothing
        os.close(fd)


class FileBytes:
    """Stands for a memoryview of an open file: a slice with an end is read, one without is `FileBytes`, too."""

    readonly = True

    def __init__(self, fd: int, path: str, identity: Identity, network: str) -> None:
        """Keep the file of a descriptor open until the last slice goes, or `close` is called."""
        self._fd, self._path, self._identity, self.network, self._start = os.dup(fd), path, identity, network, 0
        self.close = weakref.finalize(self, _close, self._fd)

    def __len__(self) -> int:
        return self._identity[2] - self._start

    def __getitem__(self, at: slice) -> Any:
        start, stop, _ = at.indices(len(self))
        if at.stop is None:
            rest: Any = copy.copy(self)
            rest._start, rest.whole = self._start + start, self
            return rest
        out = new_memory(max(0, stop - start)).data
        self.fill([(start, out)])
        return out.toreadonly()

    def __bytes__(self) -> bytes:
        return bytes(self[: len(self)])

    def toreadonly(self) -> FileBytes:
        """Return the same."""
        return self

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill memory with the bytes from an offset on."""
        self.fill([(offset, target)])

    def fill(self, requests: Sequence[tuple[int, memoryview]]) -> None:
        """Fill memory with the bytes from offsets on, by several reads at a time.

        Raises:
            SourceError: the system failed to read, or the file became shorter, or was changed.
        """
        pieces = [
            (self._start + start + at, target[at : at + _PIECE])
            for start, target in requests
            for at in range(0, len(target), _PIECE)
        ]
        with located(path=self._path):
            if len(pieces) == 1:
                read_at(self._fd, pieces[0][1], pieces[0][0])
            elif pieces:
                from .threads import each_piece  # here, because threading takes a millisecond to import

                each_piece(lambda piece: read_at(self._fd, piece[1], piece[0]), pieces, threads=_READERS)
            if identity_of(self._fd) != self._identity:
                raise SourceError("was changed while it was read; load it again")
