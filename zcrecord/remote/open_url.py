"""Open a remote archive: header, index and trailer are fetched in two or three requests, payloads on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zcrecord.archive.archive import Archive, Verify, check_crc, open_archive
from zcrecord.codec.layout import HEADER_SIZE, MAGIC, Header, decode_header, too_short
from zcrecord.codec.verify import PayloadColumns, check_payload
from zcrecord.errors import FormatError, IntegrityError, RecordError, UnsupportedError, located
from zcrecord.storage.memory import Memory, is_packed
from zcrecord.storage.urls import connect, protocols_of, redacted
from zcrecord.transport.open_packed import open_packed, sparse_memory

from .cache import VersionCache, cache_at, has_entries
from .file import RemoteFile, Request
from .fsspec import FsspecFile
from .http import HttpFile
from .packed import UnpackedFile, read_table
from .ranges import Range, RangeSet, cut
from .read_ahead import RemoteMemory
from .source import RemoteSource

# Opens a file in sparse memory: the second argument fetches a range of it, the third makes the payload source of it.
# Returns None if the file's format is not known.
OpenOther = Callable[[Memory, Callable[[int, int], None], Any], Archive | None]

_FIRST = 64 << 10  # bytes of the first request, of either end: on most lines they take no longer than the request


def open_url(
    url: str,
    *,
    verify: Verify = "index",
    cache: Any = None,
    options: Mapping[str, Any] | None = None,
    open_other: OpenOther | None = None,
) -> Archive | str:
    """Return a remote archive with header, index and trailer in memory; for a `file://` URL the path.

    A payload is fetched, and its digest checked, before the first view of it is made; of a packed archive its frames,
    or without a seek table all of it. The archive is pickled by URL, cache and options, which may contain credentials.

    Args:
        cache: a folder; None for the environment variable ZCRECORD_CACHE, False for no cache.
        options: for fsspec's file system: headers, credentials, an S3 endpoint.
        open_other: opens a file that is no archive; None refuses it.

    Raises:
        SourceError: it cannot be read. FormatError: it is not a valid archive. And the errors of `connect`.
    """
    file = remote_file(url, options)
    if isinstance(file, str):
        return file
    options = dict(options or {})
    with located(path=file.shown):
        archive = _open(file, verify, _cache_folder(file, url, cache, options), open_other)

    def recipe(archive: Archive) -> tuple[Any, ...]:
        return _reopen, (url, verify, cache, options, _sha256(archive), archive.source.pins())

    archive.source.recipe = recipe if archive.whole else None
    return archive


def remote_file(url: str, options: Mapping[str, Any] | None) -> RemoteFile | str:
    """Return the file behind a URL, without a request yet; for a `file://` URL the path. Raises as `connect`."""
    fs, path = connect(url, options)
    protocols = protocols_of(fs)
    if "file" in protocols:
        return path
    return (HttpFile if "http" in protocols or "https" in protocols else FsspecFile)(url, options or {})


def _reopen(
    url: str, verify: Verify, cache: Any, options: dict[str, Any], seal: bytes, pins: dict[int, bytes]
) -> Archive:
    """Open a pickled archive again; an IntegrityError if the URL has another one now.

    `seal` is the SHA-256 of header, index and trailer, since their CRCs could be forged; of the whole archive, if that
    was in memory. `pins` are SHA-256 digests of payloads, known after `expect=` or `content_digest()`.
    """
    archive = open_url(url, verify=verify, cache=cache, options=options)
    if isinstance(archive, str) or _sha256(archive) != seal:
        raise IntegrityError("is not the archive that was pickled; it was replaced since", path=redacted(url))
    archive.source.pin(pins)
    return archive


def _sha256(archive: Archive) -> bytes:
    """Return the SHA-256 of header, index and trailer; of the whole archive, if that is in memory."""
    octets = archive.buffer
    ranges = [(0, len(octets))] if not archive.source.is_remote else _index_ranges(archive.header, len(octets))
    running = hashlib.sha256()
    for start, end in ranges:
        running.update(octets[start:end])
    return running.digest()


def _open(file: RemoteFile, verify: Verify, cache_folder: Path | None, open_other: OpenOther | None) -> Archive:
    """Return the archive in a remote file, packed or not, or what `open_other` makes of another format's."""
    is_cached = cache_folder is not None and has_entries(cache_folder)  # index and trailer, too, if they are the same
    first = file.start(HEADER_SIZE if is_cached else _FIRST)
    if is_packed(first):
        table, fetched = read_table(file, first)
        if table is None:
            return _open_packed(file, fetched, verify)
        file = UnpackedFile(file, table, fetched)
        first = file.start(HEADER_SIZE)
    if file.size < 2 * HEADER_SIZE or len(first) < HEADER_SIZE:
        raise too_short(file.size, bytes(first[:HEADER_SIZE]))
    memory, present = _memory_of(file, first)
    remote = RemoteMemory(file, memory.octets, present, _version_cache(file, cache_folder))
    if open_other is not None and first[:8] != MAGIC:
        other = open_other(memory, remote.fetch_range, partial(RemoteSource, remote))
        if other is not None:
            return other
    return _open_indexed(remote, memory, present, verify)


def _cache_folder(file: RemoteFile, url: str, cache: Any, options: Mapping[str, Any] | None) -> Path | None:
    """Return the folder of a file in the cache, None without a cache; fsspec's own configuration is part of its key."""
    fs, _ = file.connection()
    return cache_at(cache, url, {**fs.storage_options, **(options or {})})


def _version_cache(file: RemoteFile, folder: Path | None) -> VersionCache | None:
    """Return the entries of the version that was opened; None without a cache, or if versions cannot be told apart."""
    return VersionCache(folder, file.size, file.tag) if folder and file.tag is not None and file.strong else None


def _open_indexed(remote: RemoteMemory, memory: Memory, present: RangeSet, verify: Verify) -> Archive:
    """Read index and trailer from the cache or the server, and return the archive once they are checked."""
    octets, cache = memory.octets, remote.cache
    header = decode_header(bytes(octets[:HEADER_SIZE]))
    was_cached = cache is not None and _read_cached_index(cache, octets, present)
    if not was_cached:
        _fetch_index(remote, octets, header, max(HEADER_SIZE, remote.near))
    try:
        archive = open_archive(memory, verify=verify, source_in=partial(RemoteSource, remote))
        check_crc(archive.buffer, archive.header)  # at level "touch", too: unlike a local file, it came a long way
        check_payload(PayloadColumns(archive.index, archive.header))  # all: payloads are known by their offsets here
    except FormatError:
        remote.check_same()  # if it was replaced meanwhile, it is not damaged
        raise
    if cache is not None and not was_cached:
        cache.put_index([(start, octets[start:end]) for start, end in _index_ranges(archive.header, len(octets))])
    return archive


def _memory_of(file: RemoteFile, first: memoryview) -> tuple[Memory, RangeSet]:
    """Return memory as large as a file, with its first bytes, and the set of its present ranges."""
    present = RangeSet()
    present.add(0, len(first))
    return sparse_memory(file.size, [(0, first)])._replace(path=file.shown, filled=present.ranges), present


def open_ranges(url: str, open_memory: OpenOther, cache: Any, options: Mapping[str, Any] | None) -> Archive:
    """Open a file of any type behind a URL by a function, its first bytes in memory; caches payloads with digests."""
    file = remote_file(url, options)
    if isinstance(file, str):
        raise UnsupportedError("is a local file, which an archive behind a URL cannot name", path=file)
    with located(path=file.shown):
        memory, present = _memory_of(file, file.start(_FIRST))
        folder = _cache_folder(file, url, cache, options)
        remote = RemoteMemory(file, memory.octets, present, _version_cache(file, folder))
        archive = open_memory(memory, remote.fetch_range, partial(RemoteSource, remote))
    assert archive is not None, "it takes any file"
    return archive


def _index_ranges(header: Header, size: int) -> list[Range]:
    """Return the ranges of header, index and trailer."""
    start = header.index_offset
    return [(0, HEADER_SIZE), (start, start + header.index_size), (size - HEADER_SIZE, size)]


def _fetch_index(remote: RemoteMemory, octets: memoryview, header: Header | None, tail_nbytes: int) -> None:
    """Fetch index and trailer; without a sealed header first the last `tail_nbytes`, which hold the trailer."""
    size = len(octets)
    if header is None:
        remote.fetch([(max(0, size - tail_nbytes), size)])
        header = decode_header(bytes(octets[-HEADER_SIZE:]), "trailer")
    if header is not None and header.archive_size == size:
        remote.fetch(_index_ranges(header, size))


def _read_cached_index(cache: VersionCache, octets: memoryview, present: RangeSet) -> bool:
    """Read index and trailer from the cache; False if they are missing, or do not fit the header that was fetched."""
    pieces = cache.read_index()
    if not pieces or len(pieces[-1][1]) != HEADER_SIZE or pieces[0][1] != octets[:HEADER_SIZE]:
        return False
    try:
        trailer = decode_header(pieces[-1][1], "trailer")
    except RecordError:
        return False
    ranges = [(offset, offset + len(piece)) for offset, piece in pieces]
    size = len(octets)
    if trailer is None or ranges != _index_ranges(trailer, size) or max(end for _, end in ranges) > size:
        return False
    for (start, end), (_, piece) in zip(ranges, pieces, strict=True):
        octets[start:end] = piece
        present.add(start, end)
    return True


def _open_packed(file: RemoteFile, fetched: list[Request], verify: Verify) -> Archive:
    """Fetch a packed archive without a seek table whole, and decompress it; the packed bytes are not kept."""
    packed = sparse_memory(file.size, fetched)
    octets = packed.octets
    present = RangeSet()
    for offset, piece in fetched:
        present.add(offset, offset + len(piece))
    file.fill([(start, octets[start:end]) for start, end in cut(present.missing(0, file.size))])
    file.check_same()
    return open_packed(Memory(octets, file.shown, packed.mapping), verify=verify, mode="r")
