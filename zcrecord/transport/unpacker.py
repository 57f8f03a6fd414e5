"""Unpack archives that were packed for transport: frames decompressed in parallel or as a stream, all checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from zcrecord.codec.file_types import wrong_type
from zcrecord.errors import FormatError, located
from zcrecord.storage.compressed import PeekableStream, decompressed, import_zstandard
from zcrecord.storage.files import Progress, open_sink
from zcrecord.storage.memory import is_packed, read_at
from zcrecord.storage.stream_reader import StreamReader
from zcrecord.storage.threads import cores, map_ordered
from zcrecord.writing.writers import peak_rss

from .frames import SeekTable, frame_decompressor, read_table
from .packer import PREADV, ArchiveCheck, PackReport, resolve_paths

_PIECE = 1 << 20  # bytes decompressed at a time, of a stream
_PARALLEL = 16 << 20  # bytes of the largest frame for which several frames are held at a time


def unpack(
    source: Any,
    dest: Any,
    *,
    force: bool = False,
    durable: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> PackReport:
    """Write the archive that was packed, the same bytes; every checksum on the way is checked, and the index.

    Archives that the `zstd` tool compressed are unpacked, too. A path with a seek table is decompressed by several
    threads, anything else by one. Written to a stream, an archive whose index comes last has its index checked only if
    the header says where it is.

    Args:
        source: a path or a binary file object, read forward once.
        dest, force, durable, progress, storage_options: as in `pack`.
        threads: number of decompressing threads; None is one for each core.

    Raises:
        FormatError: it is no packed archive, or a damaged or truncated one. IntegrityError: a checksum does not match.
        DestinationExistsError: `dest` exists and `force` was not given, or is the source. SourceError: the file system
        refused. DependencyError: zstandard is not installed.

    Example:
        >>> import numpy as np, zcrecord
        >>> from zcrecord.transport import pack
        >>> _ = zcrecord.save_record({"w": np.ones(1000)}, "model.zcr")
        >>> report = pack("model.zcr", "model.zcr.zst")
        >>> unpack("model.zcr.zst", "again.zcr").archive_bytes == report.archive_bytes
        True
    """
    started = time.perf_counter()
    source_path, dest_path, sink_place = resolve_paths(source, dest, force=force, options=storage_options)
    import_zstandard()  # before anything is opened
    threads = cores(threads)
    with located(path=source_path), StreamReader(source_path or source) as reader:

        def packed_nbytes() -> int:  # of a stream, as far as it was read
            return reader.position if reader.nbytes is None else reader.nbytes

        table = _table_of(reader)
        check = ArchiveCheck(progress, packed_nbytes)
        check.expected = None if table is None else table.nbytes
        pieces = _decompress(reader, table, threads)
        with open_sink(sink_place, durable=durable, options=storage_options) as sink, closing(pieces):
            for piece in pieces:
                check.update(piece)
                sink.write(piece)
                check.advance(len(piece))
            check.finish(sink)
    frames, seconds = None if table is None else len(table.sizes), time.perf_counter() - started
    return PackReport(source_path, dest_path, check.done, packed_nbytes(), frames, seconds, peak_rss())


def _table_of(reader: StreamReader) -> SeekTable | None:
    """Return the seek table of a file; None for a stream, or if there is none."""
    if reader.nbytes is None:
        return None
    _check_magic(reader.read_at(0, 4))
    table = read_table(reader.nbytes, reader.read_at)
    reader.seek(0)
    return table


def _check_magic(head: bytes) -> None:
    """Raise FormatError unless a file's first bytes are those of a zstd frame."""
    if not is_packed(head):
        fault = wrong_type(head, "a packed archive") or "not a packed archive: it does not begin with a zstd frame"
        raise FormatError(fault if head else "the file is empty")


def _decompress(reader: StreamReader, table: SeekTable | None, threads: int) -> Generator[Any, None, None]:
    """Return a generator of the archive's bytes in order: frame by frame, or as a stream."""
    if reader.path is None or table is None or not PREADV:
        return _decompress_stream(reader)
    largest = max(np.diff(table.starts).max(initial=0), table.sizes.max(initial=0))
    return _decompress_file(reader.fileno(), table, threads) if largest <= _PARALLEL else _decompress_stream(reader)


def _decompress_file(fd: int, table: SeekTable, threads: int) -> Generator[Any, None, None]:
    """Yield the content of each frame of the file whose table it is; each thread reads its own frames."""
    sizes = table.sizes

    def start_thread() -> Callable[[int], memoryview]:
        decompress = frame_decompressor(table)

        def decompressed_frame(i: int) -> memoryview:
            start, end = table.packed_range(i)
            packed, content = np.empty(end - start, np.uint8).data, np.empty(sizes[i], np.uint8).data
            read_at(fd, packed, start)
            decompress(i, packed, content)
            return content

        return decompressed_frame

    yield from map_ordered(start_thread, range(len(sizes)), threads)


def _decompress_stream(reader: StreamReader) -> Generator[bytes, None, None]:
    """Yield the content of zstd frames one after the other, with or without a seek table."""
    peeked = PeekableStream(reader)
    _check_magic(peeked.head)
    stream = decompressed(peeked)
    while piece := stream.read(_PIECE):
        yield piece
