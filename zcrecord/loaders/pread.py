"""Loader that reads the file by position, in parallel, straight into memory: the caller's, or memory of its own.

For network file systems and cold disks, where each page fault of the mapping costs a round trip: neighbouring payloads
are read together, several reads run at a time, and no byte is copied after it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from zcrecord.errors import SourceError, UnsupportedError
from zcrecord.storage.files import identity_of, open_source
from zcrecord.storage.memory import Piece, aligned, aligned_empty, read_at, read_pieces
from zcrecord.storage.threads import each_piece

from .boxes import BoxSource, File
from .host import HostLoader, Octets, as_tensor, dst_bytes
from .protocol import LoadPlan, PayloadRef, RangeSource

_READ = 1 << 20  # bytes of one read; takes many times as long as a network's round trip
_FETCH, _FETCHERS = 8 << 20, 4  # bytes of one request to a remote archive, and requests at a time
_GAP = 1 << 16  # bytes between two payloads that are read, too, which is faster than a second read
_HUGE = 4 << 20  # bytes from which numpy asks for huge pages
_BUFFERS = 1000  # of one read; systems allow 1024

_Wanted = tuple[PayloadRef, Octets]  # a ref, and the memory for its bytes


class ReadingLoader(HostLoader):
    """Tensors in memory of their own, or the caller's (`dst=`), read from the file; tied tensors share one.

    `load` notes the memory of each tensor, `finish` reads all bytes, those of remote archives, too. Bytes in memory are
    copied in `load`. A file that was replaced, changed or became shorter since it was opened is a SourceError.

    Cancelling, by `cancel` or Ctrl-C, waits for the reads under way, since they fill memory that may be the caller's:
    four of 1 MiB each of a file; of a remote archive the requests of one batch. No further read is begun.
    """

    device = "read"

    def __init__(self) -> None:
        super().__init__()
        self._wanted: list[_Wanted] = []

    def begin(self, plan: LoadPlan) -> None:
        """Keep the plan; nothing is opened yet."""
        self._plan, self._wanted = plan, []
        plan.advance(0)  # bytes arrive in `finish`

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the tensor; `finish` reads its bytes, unless they are in memory."""
        if ref.path is None and ref.source is None:
            return super().load(ref, dst)
        out = _empty(ref.nbytes) if dst is None else dst_bytes(dst, ref)
        self._wanted.append((ref, out))
        return as_tensor(out, ref)

    def finish(self) -> None:
        """Read everything, in the order of the file."""
        plan, wanted = self._plan, self._wanted
        if plan is None:
            raise UnsupportedError("begin(plan) comes first")
        self.abort()
        due = plan.nbytes

        def done(nbytes: int) -> None:
            nonlocal due
            nbytes = min(nbytes, due)  # the bytes of gaps, which are read too, are left out at the end
            due -= nbytes
            plan.advance(nbytes)

        in_file = [item for item in wanted if item[0].path is not None]
        if in_file:
            assert plan.path is not None and plan.identity is not None
            pieces = _pieces(in_file, min(_READ, plan.max_in_flight))
            read_pieces(plan.path, pieces, identity=plan.identity, done=done)
        if len(in_file) < len(wanted):
            with ExitStack() as stack:
                files = _Files(stack)
                most = max(1, min(_FETCH, plan.max_in_flight // _FETCHERS))  # each may take as much again
                # All refs of a remote archive have the same source, which merges near ones; a box has one of its own.
                fetches = _source_reads([item for item in wanted if item[0].path is None], most, files)
                each_piece(_fetch, fetches, done=done, threads=_FETCHERS)
                for file in files.values():
                    file.check("was changed while it was read")

    def abort(self) -> None:
        """Drop the buffers. Nothing else is kept between two calls."""
        self._plan, self._wanted = None, []


def _empty(nbytes: int) -> Octets:
    """Return new memory without huge pages, which numpy would use: several threads that clear one page are slow."""
    return aligned_empty(nbytes) if nbytes < _HUGE else np.frombuffer(aligned(nbytes)[1], np.uint8)


class _Files(dict[File, "_PositionedFile"]):
    """Files that are read by position, opened at their first use; the stack closes them."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, file: File) -> _PositionedFile:
        self[file] = opened = _PositionedFile(file, self._stack)
        return opened


class _PositionedFile:
    """A file that must be as its record was opened from it."""

    def __init__(self, file: File, stack: ExitStack) -> None:
        self._path, self._identity = file
        self._fd = stack.enter_context(open_source(self._path)[0]).fileno()
        self.check("was replaced or changed since it was opened")

    def check(self, fault: str) -> None:
        """Raise SourceError unless the file is the one that the record was opened from, unchanged."""
        if identity_of(self._fd) != self._identity:
            raise SourceError(f"{fault}; load it again", path=self._path)

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `offset` on."""
        read_at(self._fd, target, offset)


def _source_reads(wanted: Sequence[_Wanted], most: int, files: _Files) -> list[tuple[RangeSource, Piece]]:
    """Split what is to be read from each source into pieces of at most `most` bytes; return pairs of reader and piece.

    Every ref has a source. Boxes of a local file are read through `files`, which opens each file once.
    """
    grouped: dict[int, tuple[RangeSource, list[_Wanted]]] = {}
    for ref, out in wanted:
        assert ref.source is not None
        grouped.setdefault(id(ref.source), (ref.source, []))[1].append((ref, out))
    fetches: list[tuple[RangeSource, Piece]] = []
    for source, items in grouped.values():
        reader = source.read_by(files.__getitem__) if isinstance(source, BoxSource) else source
        fetches += [(reader, piece) for piece in _pieces(items, most, gap=0)]
    return fetches


def _fetch(read: tuple[RangeSource, Piece]) -> int:
    """Read a piece by one call of its source, even if it fills several buffers; returns its size."""
    source, piece = read
    size = sum(map(len, piece.buffers))
    octets = piece.buffers[0] if len(piece.buffers) == 1 else np.empty(size, np.uint8).data
    source.readinto_at(piece.offset, octets)
    for buffer in piece.buffers if len(piece.buffers) > 1 else ():
        buffer[:] = octets[: len(buffer)]
        octets = octets[len(buffer) :]
    return size


def _pieces(wanted: list[_Wanted], most: int, gap: int = _GAP) -> list[Piece]:
    """Return the reads for all refs, each of up to `most` bytes: neighbours in one read, large ones in several."""
    pieces: list[Piece] = []
    unused = np.empty(min(gap, most), np.uint8).data  # receives the bytes of gaps
    end = size = -1  # of the last piece: its end in the file, its number of bytes
    for ref, out in sorted(wanted, key=lambda item: item[0].offset):
        distance = ref.offset - end
        start = 0
        if pieces and 0 <= distance <= len(unused) and size + distance < most and len(pieces[-1].buffers) < _BUFFERS:
            start = min(ref.nbytes, most - size - distance)
            pieces[-1].buffers.extend([unused[:distance], out[:start].data])
            end, size = ref.offset + start, size + distance + start
        while start < ref.nbytes:
            stop = min(start + most, ref.nbytes)
            pieces.append(Piece(ref.offset + start, [out[start:stop].data]))
            end, size, start = ref.offset + stop, stop - start, stop
    return pieces
