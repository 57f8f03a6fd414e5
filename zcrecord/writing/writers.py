"""Archive writers, and the reports of saves and conversions.

`write_plan` takes payloads in memory and writes straight through, the index in front. A `StreamWriter` takes payloads
as they come, writes the index behind them, and stores equal ones once. Entries are made by `flatten` and `module_tree`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import eq
from typing import Any

import numpy as np

from zcrecord.codec import layout
from zcrecord.codec.blocks import BlockDigest, Checksums, add_blocks
from zcrecord.codec.digests import digest_of, digest_of_pieces
from zcrecord.codec.entries import Entries, PayloadId, digest_kind, encode
from zcrecord.codec.index import PAYLOAD, Array
from zcrecord.errors import IntegrityError, UnsupportedError
from zcrecord.storage.files import Progress
from zcrecord.storage.new_files import PREAD, FileSink
from zcrecord.storage.sink import Sink
from zcrecord.storage.threads import MOST_THREADS, cores, each_piece
from zcrecord.tensors.lazy import LazyTensor
from zcrecord.tensors.strides import address

from .equal import COMPARED, EqualPayloads, equal_sources, key_of
from .sharing import PayloadPlan, SplitSource, chunks

_BATCH = 1 << 20  # bytes of small payloads joined into one write
_ZEROS = bytes(layout.MAX_ALIGNMENT)
MOST_WAITING = 1 << 19  # the largest payload that waits, before a pipe, until it is whole


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of a save. Sizes are in bytes; `deduplicated` counts those that equal others and were stored once."""

    tensors: int
    payloads: int
    payload_bytes: int
    archive_bytes: int
    tied: int
    deduplicated: int


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """Report of a conversion. Sizes are in bytes.

    `source` and `dest` are None for streams. `input_bytes` counts the input, decompressed, with external data;
    `archive_bytes` all that was written, in any format; `payload_bytes` the values; `shared_bytes` those that equal
    earlier ones and were stored once; `repeated_bytes` those stored again: ties in a format without them, strided
    values beside external data. `peak_rss` is of the process so far, None if the system does not tell. `left_out`
    counts tensors that were not chosen. A `dry_run` wrote nothing; its sizes are those of a real run. With
    `session_options` ONNX Runtime makes no copy of weights outside the model.
    """

    source: str | None
    dest: str | None
    tensors: int
    modules: int
    renamed: int
    payload_bytes: int
    archive_bytes: int
    input_bytes: int
    shared_bytes: int
    seconds: float
    peak_rss: int | None
    repeated_bytes: int = 0
    left_out: int = 0
    verified: bool = False
    dry_run: bool = False
    session_options: Mapping[str, str] = field(default_factory=dict)


def conversion_report(started: float, **facts: Any) -> ConvertReport:
    """Return the report of a conversion that began at `started`, by `time.perf_counter`; `facts` are its fields."""
    defaults = {"source": None, "dest": None, "renamed": 0, "shared_bytes": 0}
    return ConvertReport(**{**defaults, "seconds": time.perf_counter() - started, "peak_rss": peak_rss(), **facts})


def peak_rss() -> int | None:
    """Return the most memory this process has held, in bytes; None if the system does not tell."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/self/status", "rb") as status:  # a codec is imported when it is first used
            line = next(line for line in status if line.startswith(b"VmHWM:"))
        return int(line.split()[1]) << 10
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux this may be the parent's peak
    return peak if sys.platform == "darwin" else peak << 10


def report_of(entries: Entries, size: int) -> SaveReport:
    """Return the report of an archive of `size` bytes; its payload rows are in order of offset, equal ones together."""
    rows = entries.payload_rows
    is_stored = np.ones(len(rows), bool)  # False for the range of the payload before
    is_stored[1:] = rows["offset"][1:] != rows["offset"][:-1]
    payload_bytes = int(rows["nbytes"][is_stored].sum())
    payloads = np.asarray(entries.payloads, np.int64)
    payloads = payloads[payloads != layout.NONE]
    return SaveReport(
        tensors=len(entries.names),
        payloads=int(is_stored.sum()),
        payload_bytes=payload_bytes,
        archive_bytes=size,
        tied=len(payloads) - int(np.count_nonzero(np.bincount(payloads, minlength=1))),
        deduplicated=int(rows["nbytes"].sum()) - payload_bytes,
    )


def write_plan(
    sink: Sink, flat: Entries, plan: PayloadPlan, *, alignment: int, kind: int, progress: Progress | None = None
) -> SaveReport:
    """Write a record with all values in memory, index first; equal payloads once, if `kind`, of digests, is not 0."""
    flat.layout_ids, flat.layouts = plan.layout_ids, plan.layouts
    blobs = _Blobs(plan.sources)
    flat.change_values(blobs.number)
    sources = [*plan.sources, *blobs.sources]
    source_ids = np.array(plan.source_ids, np.int64)
    flat.payloads = np.where(source_ids < 0, layout.NONE, source_ids)
    checksums: Checksums = {}
    unequal = list(range(len(sources))), [0] * len(sources)
    equal_to, digests = equal_sources(sources, checksums) if kind else unequal
    stored_ids = np.flatnonzero(np.array(equal_to, np.intp) == np.arange(len(sources)))
    stored = [sources[i] for i in stored_ids.tolist()]
    sizes = np.array([source.nbytes for source in stored], np.uint64)
    offsets, end, base = layout.plan_payloads(sizes, alignment)
    rows = np.zeros(len(sources), PAYLOAD)
    slots = np.searchsorted(stored_ids, equal_to)
    rows["offset"], rows["nbytes"], rows["digest"] = offsets[slots], sizes[slots], np.array(digests, np.uint64)
    renumber_payloads(flat, rows)
    flat.digest_kind = kind
    add_blocks(flat, checksums)
    index = encode(flat)
    header = layout.front_header(index, alignment, base, end)
    sink.reserve(header.archive_size)
    sink.write(header.encode() + index)
    offsets += np.uint64(header.payload_offset)  # in the archive now
    _write_sources(sink, stored, offsets, sizes, progress or (lambda *_: None))
    sink.write(bytes(header.archive_size - layout.HEADER_SIZE - sink.position) + header.encode())
    return report_of(flat, header.archive_size)


class _Blobs:
    """Bytes among attributes, as further sources; equal ones, and those of a tensor's payload, are one source."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors
        self._by_value: dict[bytes, PayloadId] = {}
        self._by_place: dict[tuple[int, int], tuple[PayloadId, Any]] = {}  # keeps the values, so no address is reused
        self.sources: list[Any] = []

    def number(self, value: Any) -> Any:
        """Return the number of the source of bytes, NONE for empty ones; any other value as it is."""
        if not isinstance(value, bytes | memoryview):
            return value
        if isinstance(value, bytes) or value.format != "B" or value.ndim != 1 or not len(value):
            octets = bytes(value)
            if octets and octets not in self._by_value:
                self._by_value[octets] = self._add(octets)
            return self._by_value.get(octets, PayloadId(layout.NONE))
        if not self._by_place:
            arrays = ((n, source) for n, source in enumerate(self._tensors) if isinstance(source, np.ndarray))
            self._by_place = {(address(a), a.nbytes): (PayloadId(n), a) for n, a in arrays}
        place = address(value), value.nbytes
        if place not in self._by_place:  # lists may name one payload a million times
            self._by_place[place] = self._add(value), value
        return self._by_place[place][0]

    def _add(self, octets: bytes | memoryview) -> PayloadId:
        self.sources.append(np.frombuffer(octets, np.uint8))
        return PayloadId(len(self._tensors) + len(self.sources) - 1)


def renumber_payloads(entries: Entries, rows: Array) -> Array:
    """Set the payload rows of entries, ordered by offset, and renumber all payloads so; return the old numbers."""
    order = np.argsort(rows["offset"], kind="stable")
    entries.payload_rows = rows[order]
    count = len(order)
    new_numbers = np.full(count + 1, layout.NONE)  # NONE, greater than any number, stays
    new_numbers[order] = np.arange(count)

    def renumbered(value: Any) -> Any:
        return PayloadId(new_numbers[min(value, count)]) if isinstance(value, PayloadId) else value

    entries.payloads = new_numbers[np.minimum(np.asarray(entries.payloads, np.int64), count)]
    entries.change_values(renumbered)
    return order


def _write_sources(
    sink: Sink, sources: Sequence[SplitSource | Array], offsets: Array, sizes: Array, progress: Progress
) -> None:
    """Write payloads at their offsets, zeros between: large ones from their arrays, runs of small ones joined."""
    ends = offsets + sizes
    gaps = offsets - np.concatenate((np.array([sink.position], np.uint64), ends[:-1]))
    is_alone = sizes >= np.uint64(_BATCH)  # written by itself, and a run of its own
    if SplitSource in set(map(type, sources)):
        is_alone |= np.array([isinstance(source, SplitSource) for source in sources], bool)
    batches = ends // np.uint64(_BATCH)
    starts_run = is_alone | (gaps > 0)
    starts_run[1:] |= is_alone[:-1] | (batches[1:] != batches[:-1])
    starts = [*np.flatnonzero(starts_run).tolist(), len(sources)]
    pending: list[Any] = [] if starts_run[:1].all() else list(sources[: starts[0]])
    pending_bytes, done, total = 0, 0, int(sizes.sum())
    for start, stop in itertools.pairwise(starts):
        if gaps[start]:
            pending.append(bytes(int(gaps[start])))
        if is_alone[start] or pending_bytes >= _BATCH:
            sink.write(b"".join(pending))
            pending, pending_bytes = [], 0
        if is_alone[start]:
            progress(done, total)
            for chunk in chunks(sources[start]):
                sink.write(chunk)
        else:
            pending += sources[start:stop]
            pending_bytes += int(ends[stop - 1] - offsets[start])
        done += int(sizes[start:stop].sum())
    sink.write(b"".join(pending))
    progress(total, total)


class StreamWriter:
    """Writer of an archive with the index last; takes payloads as they come, and holds only their offsets.

    In a sink that can be read back, a payload whose digest and bytes equal an earlier one's is removed again; the
    header is sealed at the end. Before a pipe, payloads up to MOST_WAITING bytes wait until they are whole, and are not
    written if their SHA-256 equals an earlier one's; larger payloads are not deduplicated. The header stays unsealed,
    which readers of whole files accept.
    """

    def __init__(self, sink: Sink, *, alignment: int = 64, digest: str | None = "xxh3") -> None:
        self._sink = sink
        self._alignment = layout.check_alignment(alignment)
        self._kind = digest_kind(digest)
        self._base = alignment
        self._payload_offset = layout.align_up(layout.HEADER_SIZE, alignment)
        self._rows = array("Q")  # offset, nbytes, digest of each payload; numbers, not objects: there may be millions
        self._equal_payloads = EqualPayloads[int]()  # absolute offsets by size and digest, or by SHA-256
        self._before_last = 0, 0  # `_end` and `_base` without the last payload
        self._start = -1  # of the payload in progress; -1 if there is none
        self._start_alignment = 1  # of the payload in progress
        self._end = self._payload_offset  # of all payloads
        self._hash = BlockDigest()
        self.checksums: Checksums = {}  # of large payloads, also of forgotten ones
        self._incomplete: bytearray | None = None  # the payload in progress, while it may equal an earlier one
        self._waiting: tuple[int, bytearray] | None = None  # offset and bytes of a whole payload, not written yet
        self.index: bytes | bytearray = b""
        self.trailer = b""
        sink.write(layout.encode_unsealed(alignment) + bytes(self._payload_offset - layout.HEADER_SIZE))

    def places(self) -> Any:
        """Return the offset in the archive of each payload, as an array."""
        return np.frombuffer(self._rows, np.uint64)[::3] + np.uint64(self._payload_offset)

    def store(self, source: Any, *, alignment: int = 0) -> int:
        """Write one payload, of a LazyTensor, array or SplitSource; return its id, NONE for no bytes."""
        self.begin(source.nbytes, alignment=alignment)
        for piece in source.pieces() if isinstance(source, LazyTensor) else chunks(source):
            self.write(piece)
        return self.end()

    def add_all(self, payloads: Sequence[Any]) -> None:
        """Write non-empty bytes as payloads, small ones together; their ids follow the last id."""
        sink = self._sink
        if not self._kind or not sink.can_rewind or max(map(len, payloads), default=0) >= layout.LARGE_PAYLOAD:
            for data in payloads:
                self.begin(len(data))
                self.write(data)
                self.end()
            return
        assert self._start < 0, "end() the payload in progress first"
        pending: list[Any] = []  # written together, each payload after zeros up to its alignment

        def is_equal(earlier: int, data: Any) -> bool:
            sink.write(b"".join(pending))  # the earlier payload may be among them
            pending.clear()
            return not sink.keeps or sink.read_back(earlier, len(data)) == data

        position = sink.position
        for data, digest in zip(payloads, map(digest_of, payloads), strict=True):
            self._before_last = self._end, self._base
            gap = -position & self._alignment - 1
            key = key_of(len(data), digest)
            start = self._equal_payloads.first(key, position + gap, partial(is_equal, data=data))
            if start == position + gap:
                pending += _ZEROS[:gap], data
                position = self._end = start + len(data)
            self._rows.extend((start - self._payload_offset, len(data), digest))
        sink.write(b"".join(pending))

    @property
    def payloads(self) -> int:
        """The number of payloads, which is the next id."""
        return len(self._rows) // 3

    def begin(self, nbytes: int, *, alignment: int = 0) -> None:
        """Start a payload of about `nbytes` bytes, at a multiple of `alignment` unless it equals an earlier payload."""
        assert self._start < 0, "end() the payload in progress first"
        self._write_waiting()
        self._start_alignment = max(layout.payload_alignment(nbytes, self._alignment), alignment)
        self._start = layout.align_up(self._sink.position, self._start_alignment)
        self._hash.reset()
        if self._kind and not self._sink.can_rewind and nbytes <= MOST_WAITING:
            self._incomplete = bytearray()

    def write(self, data: Any) -> None:
        """Append any bytes-like to the payload in progress."""
        if self._incomplete is not None:
            self._incomplete.extend(data)  # not +=, which an ndarray takes for arithmetic
            if len(self._incomplete) <= MOST_WAITING:
                return
            data, self._incomplete = self._incomplete, None
        self._hash.update(data)
        if memoryview(data).nbytes:  # only then: where no byte follows there must be no zeros either (R13)
            self._write_at(self._start, data)

    def _write_at(self, start: int, data: Any) -> None:
        """Append data at an absolute offset, after zeros up to it; right here if earlier data went beyond it."""
        gap = start - self._sink.position
        if gap > 0:
            self._sink.write(bytes(gap))
        self._sink.write(data)

    def end(self) -> int:
        """Finish the payload in progress and return its id, NONE if no byte was written."""
        assert self._start >= 0, "begin() a payload first"
        start, self._start = self._start, -1
        if self._incomplete is not None:
            data, self._incomplete = self._incomplete, None
            return self._end_waiting(start, data) if data else layout.NONE
        nbytes = self._sink.position - start
        if nbytes <= 0:
            return layout.NONE
        digest = self._hash.finish(nbytes, self.checksums) if self._kind else 0
        if self._kind and self._sink.can_rewind:
            is_equal = partial(self._ranges_equal, start, nbytes)
            first = self._equal_payloads.first(key_of(nbytes, digest), start, is_equal)
            if first != start:
                self._sink.rewind(self._end)
                start = first
        return self._append_row(start, nbytes, digest)

    def _end_waiting(self, start: int, data: bytearray) -> int:
        """Finish a payload of which no byte is written yet, and return its id."""
        import hashlib  # here, because few write into pipes

        first = self._equal_payloads.first(hashlib.sha256(data).digest(), start, lambda _: True)
        if first == start:
            self._waiting = start, data
        return self._append_row(first, len(data), digest_of(data))

    def _append_row(self, start: int, nbytes: int, digest: int) -> int:
        """Note a payload at an absolute offset, and return its id."""
        self._before_last = self._end, self._base
        if start >= self._end:  # else it shares the place of an earlier one
            self._end, self._base = start + nbytes, max(self._base, self._start_alignment)
        self._rows.extend((start - self._payload_offset, nbytes, digest))
        return self.payloads - 1

    def _write_waiting(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._write_at(*waiting)

    def key_of(self, number: int) -> tuple[int, int] | None:
        """Return size and digest of a payload, the key among equal ones; None without digests."""
        _, nbytes, digest = self.row(number)
        return (nbytes, digest) if self._kind else None

    def row(self, number: int) -> tuple[int, int, int]:
        """Return offset, size and digest of a payload, as the index has them."""
        offset, nbytes, digest = self._rows[3 * number : 3 * number + 3]
        return offset, nbytes, digest

    def pieces_of(self, number: int) -> Iterator[bytes]:
        """Return an iterator that reads a payload back in pieces of up to 1 MiB."""
        offset, nbytes, _ = self.row(number)
        return self._read_back(self._payload_offset + offset, nbytes)

    def repeat(self, number: int) -> int:
        """Add a payload with the bytes of an earlier one, and return its id; writes nothing."""
        self._rows.extend(self.row(number))
        self._before_last = self._end, self._base
        return self.payloads - 1

    def forget(self, number: int) -> None:
        """Remove the last payload; UnsupportedError if another was written since, or it went into a pipe."""
        if number != self.payloads - 1:
            raise UnsupportedError("only the last payload can be taken back")
        start = self._rows[-3] + self._payload_offset
        del self._rows[-3:]
        end, base = self._before_last
        if start < end:
            return  # it equals an earlier one: nothing was added
        if self._waiting is None and not self._sink.can_rewind:
            raise UnsupportedError("bytes in a pipe cannot be taken back; write to a file")
        self._waiting = None
        self._equal_payloads.forget(start)
        if self._sink.can_rewind:
            self._sink.rewind(end)
        self._end, self._base = end, base

    def _ranges_equal(self, start: int, nbytes: int, other: int) -> bool:
        """Return True if the bytes at two offsets are equal; their digests decide if the sink cannot be read back."""
        return not self._sink.keeps or all(map(eq, self._read_back(start, nbytes), self._read_back(other, nbytes)))

    def _read_back(self, start: int, nbytes: int) -> Iterator[bytes]:
        """Yield bytes at an absolute offset that were written, a piece at a time."""
        for done in range(0, nbytes, COMPARED):
            yield self._sink.read_back(start + done, min(COMPARED, nbytes - done))

    def finish(self, entries: Entries) -> SaveReport:
        """Write index and trailer, and seal the header if the sink can seek; renumbers the payloads of `entries`."""
        assert self._start < 0, "end() the payload in progress first"
        entries.change_values(self._store_bytes)
        self._write_waiting()
        renumber_payloads(entries, np.array(self._rows, np.uint64).view(PAYLOAD))
        entries.digest_kind = self._kind
        add_blocks(entries, self.checksums)
        self.index = index = encode(entries)
        header = layout.back_header(index, self._alignment, self._base, self._payload_offset, self._sink.position)
        self.trailer = header.encode()
        self._sink.write(bytes(header.index_offset - self._sink.position) + index)
        self._sink.write(self.trailer)
        if self._sink.can_rewind:
            self._sink.patch(0, self.trailer)
        return report_of(entries, header.archive_size)

    def verify_written(self, progress: Progress = lambda *_: None) -> None:
        """Read the archive back and compare its digests; IntegrityError if they differ, UnsupportedError for a pipe."""
        if not self._sink.can_rewind:
            raise UnsupportedError("bytes in a pipe cannot be read back; write to a file")
        done = 0

        def check(row: tuple[int, int, int]) -> int:
            offset, nbytes, digest = row
            start = self._payload_offset + offset
            if self._kind and digest_of_pieces(self._read_back(start, nbytes)) != digest:
                fault = f"bytes [{start:#x}, {start + nbytes:#x}) are not what was written"
                raise IntegrityError(f"{fault}; the disk or the memory is failing", offset=start)
            return nbytes

        def advance(nbytes: int) -> None:
            nonlocal done
            progress(done, self._sink.position)
            done += nbytes

        rows = sorted(set(map(self.row, range(self.payloads))))
        threads = min(cores(), MOST_THREADS) if PREAD and isinstance(self._sink, FileSink) else 1
        each_piece(check, rows, threads=threads, advance=advance)
        offset = self._sink.position - layout.HEADER_SIZE - len(self.index)
        if self._sink.read_back(offset, len(self.index)) != self.index:
            raise IntegrityError("its index is not what was written; the disk or the memory is failing", offset=offset)

    def _store_bytes(self, value: Any) -> Any:
        """Write an attribute's value if it is bytes, and return their id; return any other value as it is."""
        return PayloadId(self.store(np.frombuffer(value, np.uint8))) if isinstance(value, bytes | memoryview) else value
