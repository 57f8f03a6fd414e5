"""Loader that reads the file by position, in parallel, straight into memory: the caller's, or memory of its own.

For network file systems and cold disks, where each page fault of the mapping costs a round trip: neighbouring payloads
are read together, several reads run at a time, and no byte is copied after it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zcrecord.dtypes import DType
from zcrecord.errors import SourceError, UnsupportedError
from zcrecord.storage.files import identity_of, open_source
from zcrecord.storage.memory import Piece, aligned, aligned_empty, read_at, read_pieces
from zcrecord.storage.threads import each_piece

from .boxes import BoxSource, File
from .host import Octets, as_tensor, dst_bytes
from .protocol import LoadPlan, PayloadRef, RangeSource

__all__ = ["PlannedFiles", "ReadingLoader"]

_READ = 1 << 20  # bytes of one read; takes many times as long as a network's round trip
_FETCH, _FETCHERS = 8 << 20, 4  # bytes of one request to a remote archive, and requests at a time
_GAP = 1 << 16  # bytes between two payloads that are read, too, which is faster than a second read
_HUGE = 4 << 20  # bytes from which numpy asks for huge pages
_BUFFERS = 1000  # of one read; systems allow 1024


class ReadingLoader:
    """Tensors in memory of their own, or the caller's (`dst=`), read from the file; tied tensors share one.

    `load` notes the memory of each tensor, `finish` reads all bytes, those of remote archives, too. Bytes that are in
    memory are copied in `load`. A file that was replaced, changed or became shorter since it was opened is a
    SourceError.

    Cancelling, by `cancel` or Ctrl-C, waits for the reads under way, since they fill memory that may be the caller's:
    four of 1 MiB each of a file; of a remote archive the requests of one batch, each with its tries, until its time
    limit. No further read is begun.
    """

    device = "read"

    def __init__(self) -> None:
        self._plan: LoadPlan | None = None
        self._wanted: list[tuple[PayloadRef, Octets]] = []

    def can_load(self, device: str, dtype: DType) -> bool:
        """Return True for this machine's memory and element types of a fixed size."""
        return device == self.device and dtype.bits > 0

    def begin(self, plan: LoadPlan) -> None:
        """Keep the plan; nothing is opened yet."""
        self._plan, self._wanted = plan, []
        plan.advance(0)  # bytes arrive in `finish`

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the tensor; `finish` reads its bytes."""
        out = _empty(ref.nbytes) if dst is None else dst_bytes(dst, ref)
        if ref.path is not None or ref.source is not None:
            self._wanted.append((ref, out))
        else:
            for start in range(0, ref.nbytes, _FETCH):
                target = out[start : start + _FETCH]
                ref.read_into(target.data, start)
                self._running_plan().advance(len(target))
        return as_tensor(out, ref)

    def _running_plan(self) -> LoadPlan:
        if self._plan is None:
            raise UnsupportedError("begin(plan) comes first")
        return self._plan

    def view(self, loaded: Octets, ref: PayloadRef) -> Any:
        """Return one of several tensors of a payload."""
        return as_tensor(loaded, ref)

    def finish(self) -> None:
        """Read everything, in the order of the file.

        Raises:
            SourceError: the file cannot be read, or is not as it was when the record was opened.
        """
        plan, wanted = self._running_plan(), self._wanted
        self._plan, self._wanted = None, []
        if not wanted:
            return
        done = _Arrived(plan).add
        in_file = [item for item in wanted if item[0].path is not None]
        if in_file:
            assert plan.path is not None and plan.identity is not None
            pieces = _pieces(in_file, min(_READ, plan.max_in_flight))
            read_pieces(plan.path, pieces, identity=plan.identity, done=done)
        if len(in_file) < len(wanted):
            with PlannedFiles() as files:
                most = max(1, min(_FETCH, plan.max_in_flight // _FETCHERS))  # each may hold as much again
                # All refs of a remote archive have the same source, which merges near ones; a box has one of its own.
                fetches = _fetches([item for item in wanted if item[0].path is None], most, files)
                each_piece(_fetch, fetches, done=done, threads=_FETCHERS)

    def abort(self) -> None:
        """Drop the buffers. Nothing else is held between two calls."""
        self._plan, self._wanted = None, []


def _empty(nbytes: int) -> Octets:
    """Return new memory without huge pages, which numpy would use: several threads that clear one page are slow."""
    return aligned_empty(nbytes) if nbytes < _HUGE else np.frombuffer(aligned(nbytes)[1], np.uint8)


class _Arrived:
    """Reports arrived bytes to the plan; the bytes of gaps, which are read too, are left out at the end."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan, self._due = plan, plan.nbytes

    def add(self, nbytes: int) -> None:
        """Report that `nbytes` more bytes were read."""
        nbytes = min(nbytes, self._due)
        self._due -= nbytes
        self._plan.advance(nbytes)


class PlannedFiles:
    """Files that are read by position, each opened at its first use, and known to be those that records were opened of.

    Use it in a `with` block: its end closes them, and checks that none was changed meanwhile.
    """

    def __init__(self) -> None:
        self._files: dict[File, PlannedFile] = {}

    def __enter__(self) -> PlannedFiles:
        return self

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()

    def __call__(self, file: File) -> PlannedFile:
        """Return a file; SourceError if it was replaced or changed since its record was opened."""
        if file not in self._files:
            self._files[file] = PlannedFile(file)
        return self._files[file]

    def check(self) -> None:
        """Raise SourceError if a file was changed while it was read."""
        for file in self._files.values():
            file.check("was changed while it was read")

    def close(self) -> None:
        """Close all."""
        for file in self._files.values():
            file.close()


class PlannedFile:
    """A file that is read by position; see `PlannedFiles`."""

    def __init__(self, file: File) -> None:
        self._path, self._identity = file
        self._file, _ = open_source(self._path)
        try:
            self.check("was replaced or changed since it was opened")
        except BaseException:
            self.close()
            raise

    def check(self, what: str) -> None:
        """Raise SourceError unless the file is the one that the record was opened from, unchanged."""
        if identity_of(self._file.fileno()) != self._identity:
            raise SourceError(f"{what}; load it again", path=self._path)

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `offset` on."""
        read_at(self._file.fileno(), target, offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _fetches(
    wanted: Sequence[tuple[PayloadRef, Octets]], most: int, files: PlannedFiles
) -> list[tuple[RangeSource, Piece]]:
    """Return the reads of refs that have a source, each of up to `most` bytes; boxes of files are read by position."""
    grouped: dict[int, tuple[RangeSource, list[tuple[PayloadRef, Octets]]]] = {}
    for ref, out in wanted:
        assert ref.source is not None
        grouped.setdefault(id(ref.source), (ref.source, []))[1].append((ref, out))
    found: list[tuple[RangeSource, Piece]] = []
    for source, items in grouped.values():
        reader = source.read_by(files) if isinstance(source, BoxSource) else source
        found += [(reader, piece) for piece in _pieces(items, most, gap=0)]
    return found


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


def _pieces(wanted: list[tuple[PayloadRef, Octets]], most: int, gap: int = _GAP) -> list[Piece]:
    """Return the reads for all refs, each of up to `most` bytes: neighbours in one read, large ones in several."""
    pieces: list[Piece] = []
    unused = np.empty(min(gap, most), np.uint8).data  # receives the bytes of gaps
    end = size = -1  # of the last piece: its end in the file, its number of bytes
    for ref, out in sorted(wanted, key=lambda item: item[0].offset):
        apart = ref.offset - end
        start = 0
        if pieces and 0 <= apart <= len(unused) and size + apart < most and len(pieces[-1].buffers) < _BUFFERS:
            start = min(ref.nbytes, most - size - apart)
            pieces[-1].buffers.extend([unused[:apart], out[:start].data])
            end, size = ref.offset + start, size + apart + start
        while start < ref.nbytes:
            stop = min(start + most, ref.nbytes)
            pieces.append(Piece(ref.offset + start, [out[start:stop].data]))
            end, size, start = ref.offset + stop, stop - start, stop
    return pieces
