"""Loader that reads the file by position, in parallel, straight into memory: the caller's, or memory of its own.

For cold disks, where each page fault of a mapping waits for the disk: neighbouring payloads are read together, several
reads run at a time, and only small neighbours are copied after they were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from zcrecord.dtypes import Octets
from zcrecord.errors import SourceError, UnsupportedError
from zcrecord.storage.memory import READ_PIECE, READERS, new_memory, read_on_demand
from zcrecord.storage.threads import each_piece

from .boxes import BoxSource, File
from .host import HostLoader, as_tensor, dst_bytes
from .protocol import LoadPlan, PayloadRef, RangeSource

_REMOTE_READ = 8 << 20  # bytes of one read from a remote archive
_GAP = 1 << 16  # bytes between two payloads that are read with them, which is faster than a second read

_Request = tuple[PayloadRef, Octets]  # a ref, and the memory for its bytes


class ReadingLoader(HostLoader):
    """Tensors in memory of their own, or the caller's (`dst=`), read from the file; tied tensors share one.

    `load` notes the memory of each tensor, or copies bytes in memory; `finish` reads all others. A file that was
    replaced, changed or became shorter since it was opened is a SourceError. Cancelling, by `cancel` or Ctrl-C, waits
    for the reads under way, since they fill memory that may be the caller's: four of 2 MiB each, or one remote batch.
    """

    device = "read"

    def __init__(self) -> None:
        super().__init__()
        self._wanted: list[_Request] = []

    def begin(self, plan: LoadPlan) -> None:
        """Keep the plan; nothing is opened yet."""
        self._plan, self._wanted = plan, []
        plan.advance(0)  # bytes arrive in `finish`

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the tensor; `finish` reads its bytes, unless they are in memory."""
        if ref.path is None and ref.source is None:
            return super().load(ref, dst)
        to_boundary = 0 if ref.check is None else -ref.inside % READ_PIECE  # bytes of the first read
        out = new_memory(ref.nbytes, to_boundary) if dst is None else dst_bytes(dst, ref)
        self._wanted.append((ref, out))
        return as_tensor(out, ref)

    def finish(self) -> None:
        """Read everything, in the order of the file; an error of reading, or of a checksum, is raised here."""
        plan, requests = self._plan, self._wanted
        if plan is None:
            raise UnsupportedError("begin(plan) comes first")
        self.abort()
        remaining = plan.nbytes

        def advance(nbytes: int) -> None:
            nonlocal remaining
            nbytes = min(nbytes, remaining)  # the bytes of gaps, which are read too, are left out at the end
            remaining -= nbytes
            plan.advance(nbytes)

        files: list[Any] = []
        with ExitStack() as stack:

            @cache  # each file once
            def open_file(file: File) -> Any:
                memory: Any = read_on_demand(file[0], least=0)
                if memory.identity != file[1]:  # first: an empty file has nothing to close
                    raise SourceError("was replaced or changed since it was opened; load it again", path=file[0])
                stack.callback(memory.octets.close)
                files.append(memory.octets)
                return memory.octets

            each_piece(_Read.run, _planned_reads(plan, requests, open_file), advance=advance, threads=READERS)
            for octets in files:
                octets.fill([])  # looks at the file once more
        for ref, out in requests:
            _check_blocks(ref, 0, out.data)  # those that no read had whole

    def abort(self) -> None:
        """Drop the buffers. Nothing else is kept between two calls."""
        self._plan, self._wanted = None, []


class _Read(NamedTuple):
    """One read: a source's bytes from an offset on, into buffers one after the other."""

    source: RangeSource
    offset: int
    buffers: list[memoryview]
    check: Callable[[memoryview], None] = lambda _: None  # called with the bytes; raises if they are damaged

    def run(self) -> int:
        """Read by one call of the source, of several buffers through a copy; return the number of bytes."""
        nbytes = sum(map(len, self.buffers))
        octets = self.buffers[0] if len(self.buffers) == 1 else np.empty(nbytes, np.uint8).data
        self.source.readinto_at(self.offset, octets)
        self.check(octets)  # while they are in a cache
        if len(self.buffers) > 1:
            for buffer in self.buffers:
                buffer[:] = octets[: len(buffer)]
                octets = octets[len(buffer) :]
        return nbytes


def _check_blocks(ref: PayloadRef, start: int, octets: memoryview) -> None:
    """Compare bytes of a ref that were read, from `start` on, with the checksums of their blocks."""
    if ref.check is not None:
        ref.check(ref.inside + start, ref.inside + start + len(octets), octets)


def _planned_reads(plan: LoadPlan, requests: Iterable[_Request], open_file: Callable[[File], Any]) -> list[_Read]:
    """Return the reads for all refs, source by source; `open_file` opens the plan's file, and those of boxes."""
    by_source: dict[int, list[_Request]] = {}  # 0 for the plan's file
    for ref, out in requests:
        by_source.setdefault(0 if ref.path is not None else id(ref.source), []).append((ref, out))
    reads: list[_Read] = []
    for source_requests in by_source.values():
        ref, _ = source_requests[0]
        if ref.path is not None:
            assert plan.path is not None and plan.identity is not None
            file = open_file((plan.path, plan.identity))
            reads += _source_reads(file, source_requests, min(READ_PIECE, plan.max_in_flight), _GAP)
            continue
        assert ref.source is not None
        # All refs of a remote archive have the same source, which merges near ones; a box has one of its own.
        source = ref.source.reading_files(open_file) if isinstance(ref.source, BoxSource) else ref.source
        max_nbytes = max(1, min(_REMOTE_READ, plan.max_in_flight // READERS))  # each may take as much again
        reads += _source_reads(source, source_requests, max_nbytes, 0)
    return reads


def _source_reads(source: RangeSource, requests: Sequence[_Request], max_nbytes: int, max_gap: int) -> list[_Read]:
    """Return the reads of one source, of up to `max_nbytes` each.

    One read takes refs at most `max_gap` apart. Large refs take several, cut between blocks to be checked. An unchecked
    ref may join a checked read: a read is one range of the file, and the check ends with its payload.
    """
    reads: list[_Read] = []
    unused = np.empty(min(max_gap, max_nbytes), np.uint8).data  # receives the bytes of gaps
    read_end = read_nbytes = -1  # of the last read; the first is the end in the file
    for ref, out in sorted(requests, key=lambda request: request[0].offset):
        gap, start = ref.offset - read_end, 0
        block = 0 if ref.check is None else ref.check.blocks.size
        can_join = reads and not block and ref.nbytes < 2 * max_nbytes  # larger ones need several anyway
        if can_join and 0 <= gap <= len(unused) and read_nbytes + gap < max_nbytes:
            start = min(ref.nbytes, max_nbytes - read_nbytes - gap)
            reads[-1].buffers.extend([unused[:gap], out[:start].data])
            read_end, read_nbytes = ref.offset + start, read_nbytes + gap + start
        while start < ref.nbytes:
            past_boundary = (ref.inside + start) % max_nbytes if block else 0
            stop = min(start + max_nbytes - past_boundary, ref.nbytes)
            read = _Read(source, ref.offset + start, [out[start:stop].data])
            reads.append(read._replace(check=partial(_check_blocks, ref, start)) if 0 < block <= max_nbytes else read)
            read_end, read_nbytes, start = ref.offset + stop, stop - start, stop
    return reads
