"""Archives packed for transport, and unpacked: `.zcr.zst`, zstd frames that begin where payloads do, and a seek table.

Source and destination may be paths or binary file objects, pipes included; `load_record` takes a packed archive as any
other, and needs nothing of this module. How an archive becomes frames is `packing`'s, their table `frames`'s. Held at a
time are, for each thread, two or three frames of up to 6 MiB, packed or not, and what zstd needs (1 MiB at the default
level, 50 MiB at 19); the index; some 200 bytes for each frame.

Weights hold little that repeats: what zstd gains is in how often each byte occurs, and that level 1 finds, too. Of
normally distributed float32 8 % are gained at every level up to 12, of bfloat16 28 % (29 % from level 9 on, at a
thirteenth of the speed).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcrecord.codec.file_types import wrong_type
from zcrecord.errors import FormatError, RecordError
from zcrecord.storage.compressed import PeekableStream, decompressed, import_zstandard
from zcrecord.storage.files import Progress, check_destination, open_sink, open_source, path_of
from zcrecord.storage.memory import is_packed, read_at
from zcrecord.storage.stream_reader import StreamReader
from zcrecord.storage.threads import cores, map_ordered
from zcrecord.writing.writers import peak_rss

from . import frames
from .frames import Row, Table
from .packing import PREADV, Watch, compressors_of, of_file, of_stream

__all__ = ["PackReport", "pack", "unpack"]

_PIECE = 1 << 20  # bytes decompressed at a time where frames are not known beforehand
_PARALLEL = 16 << 20  # bytes of a frame, made elsewhere, up to which several are held at a time


@dataclass(frozen=True, slots=True)
class PackReport:
    """What packing or unpacking did. Bytes throughout.

    `source` and `dest` are None for streams, `frames` where what was unpacked has no seek table that could be read
    beforehand, `peak_rss`, of the process so far, where the system does not tell.
    """

    source: str | None
    dest: str | None
    archive_bytes: int
    packed_bytes: int
    frames: int | None
    seconds: float
    peak_rss: int | None

    @property
    def ratio(self) -> float:
        """How many bytes of archive there are to a packed one."""
        return self.archive_bytes / self.packed_bytes


def pack(
    source: Any,
    dest: Any,
    *,
    level: int = 1,
    threads: int | None = None,
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> PackReport:
    """Write an archive's packed form, from which `unpack`, or any zstd, gives back the very same bytes.

    The same archive, level and zstd library give the same bytes, however many threads there are. From a path, or a
    stream whose index comes first, frames begin where payloads do; a stream whose index comes last is cut every 4 MiB,
    and its index is checked only if the header says where it is.

    Args:
        source: a path or a binary file object, read forward once.
        dest: a path, which appears whole or not at all, or a binary file object.
        level: zstd's, from 1 to 22; more than 1 takes longer and gains little on weights.
        threads: how many compress at a time; None is one for each core.
        force: whether a file that is there may be replaced.
        durable: whether to wait until the file would survive power loss.
        progress: called with the archive's bytes done, and with all there are, where that is known.

    Raises:
        FormatError: the source is no archive. DestinationExistsError: `dest` exists and `force` was not given, or is
        the source. SourceError: the file system refused. DependencyError: zstandard is not installed.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones(1000), "v": np.zeros(9)}, "model.zcr")
        >>> pack("model.zcr", "model.zcr.zst").frames
        3
        >>> zcrecord.load_record("model.zcr.zst", names="v")["v"].sum().item()
        0.0
    """
    started = time.perf_counter()
    source_path, dest_path = _checked(source, dest, force)
    compressors, threads = compressors_of(level), cores(threads)
    watch = Watch(progress)
    rows: list[Row] = []
    try:
        with StreamReader(source_path or source) as reader:
            if source_path is not None and reader.seekable and PREADV:
                packed = of_file(source_path, watch, compressors, threads)
            else:
                packed = of_stream(reader, watch, compressors, threads)
            with open_sink(dest, durable=durable) as sink, closing(packed):
                for row, frame in packed:
                    sink.write(frame)
                    rows.append(row)
                    watch.advance(row.nbytes)
                sink.write(frames.encode_table(rows))
                packed_bytes = sink.position
    except RecordError as error:
        raise error.located(path=source_path) from error.__cause__
    return PackReport(
        source_path, dest_path, watch.done, packed_bytes, len(rows), time.perf_counter() - started, peak_rss()
    )


def unpack(
    source: Any,
    dest: Any,
    *,
    force: bool = False,
    durable: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Write the archive that a packed one is of, the same bytes; every checksum on the way is checked, and the index.

    What the `zstd` tool made of an archive is unpacked, too. A path with a seek table is decompressed by several
    threads, anything else by one. Into a stream whose archive has its index last, unless the header says where it is,
    the index goes unchecked.

    Args:
        source: a path or a binary file object, read forward once.
        dest: a path, which appears whole or not at all, or a binary file object.
        force: whether a file that is there may be replaced.
        durable: whether to wait until the file would survive power loss.
        threads: how many decompress at a time; None is one for each core.
        progress: called with the archive's bytes done, and with all there are, where that is known.

    Raises:
        FormatError: it is no packed archive, or a damaged or truncated one. IntegrityError: a checksum does not match.
        DestinationExistsError: `dest` exists and `force` was not given, or is the source. SourceError: the file system
        refused. DependencyError: zstandard is not installed.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones(1000)}, "model.zcr")
        >>> report = pack("model.zcr", "model.zcr.zst")
        >>> unpack("model.zcr.zst", "again.zcr").archive_bytes == report.archive_bytes
        True
    """
    started = time.perf_counter()
    source_path, dest_path = _checked(source, dest, force)
    import_zstandard()  # before anything is opened
    threads = cores(threads)
    try:
        with StreamReader(source_path or source) as reader:
            table = _table_of(reader)
            watch = Watch(progress, lambda: reader.position if reader.nbytes is None else reader.nbytes)
            watch.expected = None if table is None else table.nbytes
            pieces = _expanded(reader, table, threads)
            with open_sink(dest, durable=durable) as sink, closing(pieces):
                for piece in pieces:
                    watch.see(piece)
                    sink.write(piece)
                    watch.advance(len(piece))
                watch.check(sink)
            packed_bytes = reader.position if reader.nbytes is None else reader.nbytes
    except RecordError as error:
        raise error.located(path=source_path) from error.__cause__
    count = None if table is None else int(np.count_nonzero(np.diff(table.bounds)))
    return PackReport(
        source_path, dest_path, watch.done, packed_bytes, count, time.perf_counter() - started, peak_rss()
    )


def _checked(source: Any, dest: Any, force: bool) -> tuple[str | None, str | None]:
    """Return both paths, None for a file object, unless the destination may not be written."""
    source_path = None if hasattr(source, "read") else path_of(source)
    dest_path = None if hasattr(dest, "write") else path_of(dest)
    check_destination(source_path, dest_path, force)
    return source_path, dest_path


def _table_of(reader: StreamReader) -> Table | None:
    """Return the seek table of a file; None for a stream, or if there is none."""
    size = reader.nbytes
    if size is None:
        return None

    def read(offset: int, nbytes: int) -> bytes:
        reader.seek(offset)
        return reader.read(nbytes)

    _check_magic(read(0, 4))
    table = frames.read_table(size, read)
    reader.seek(0)
    return table


def _check_magic(head: bytes) -> None:
    if not is_packed(head):
        what = wrong_type(head, "a packed archive") or "not a packed archive: no zstd frame starts so"
        raise FormatError(what if head else "the file is empty")


def _expanded(reader: StreamReader, table: Table | None, threads: int) -> Generator[Any, None, None]:
    """Return what yields the archive's bytes in order: frame by frame, or as they come."""
    if reader.path is not None and table is not None and PREADV:
        largest = max(int(np.diff(column).max(initial=0)) for column in (table.starts, table.bounds))
        if largest <= _PARALLEL:
            return _frame_by_frame(reader.path, table, threads)
    return _stream(reader)


def _frame_by_frame(path: str, table: Table, threads: int) -> Generator[Any, None, None]:
    """Yield what comes out of each frame of a file; each thread reads its own."""
    file, _ = open_source(path)

    def start() -> Callable[[int], memoryview]:
        expand = frames.expanded()

        def work(i: int) -> memoryview:
            lo, hi = table.starts[i : i + 2].tolist()
            frame, out = (np.empty(n, np.uint8).data for n in (hi - lo, int(np.diff(table.bounds[i : i + 2])[0])))
            read_at(file.fileno(), frame, lo)
            expand(frame, out, lo, None if table.checksums is None else int(table.checksums[i]))
            return out

        return work

    with file:
        yield from map_ordered(start, np.flatnonzero(np.diff(table.bounds)).tolist(), threads)


def _stream(reader: StreamReader) -> Generator[bytes, None, None]:
    """Yield what comes out of zstd frames, one after the other, as far as they go."""
    peeked = PeekableStream(reader)
    _check_magic(peeked.head)
    stream = decompressed(peeked)
    while piece := stream.read(_PIECE):
        yield piece
