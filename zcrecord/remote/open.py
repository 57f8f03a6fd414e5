"""Remote archives, opened: header, index and trailer in two or three requests, payloads when they are asked for.

The first request asks for more than the header: a small index in front comes along. What the bytes mean, and whether
they are right, is the archive's own business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from zcrecord.archive.archive import Archive, Verify, check_crc, open_archive
from zcrecord.codec.layout import HEADER_SIZE, Header, decode_header, too_short
from zcrecord.errors import FormatError, IntegrityError, RecordError, UnsupportedError
from zcrecord.storage.memory import Memory, is_packed
from zcrecord.transport.open import open_packed, outline

from .cache import ArchiveCache, VersionCache, cache_at
from .file import RemoteFile, Request, connect, redacted
from .fsspec import FsspecFile
from .http import HttpFile
from .packed import UnpackedFile, read_table
from .ranges import RangeSet, cut
from .whole import RemoteMemory

__all__ = ["open_url"]

FIRST = 64 << 10  # bytes asked for at once, of either end: as long as a request takes anyway, on most lines


def open_url(
    url: str, *, verify: Verify = "index", cache: Any = None, options: Mapping[str, Any] | None = None
) -> Archive | str:
    """Return a remote archive, of which header, index and trailer are there; or the path of a local file.

    A payload is fetched, and its digest checked, before the first view of it is made. Of one packed for transport the
    frames that are needed are fetched, or without a seek table all of it. The archive is pickled by URL, cache and
    options, which may hold credentials.

    Args:
        url: that fsspec knows: `https://`, `s3://`, ...; for a `file://` URL its path is returned.
        verify: "index" or "touch".
        cache: a folder, None for the one that ZCRECORD_CACHE names, False for none; see `zcrecord.remote.cache`.
        options: for fsspec's file system: headers, credentials, an S3 endpoint.

    Raises:
        SourceError: it cannot be read; SourceNotFoundError: it is not there. FormatError: it is no valid archive.
        DependencyError: fsspec, or what it needs, is not installed. UnsupportedError: fsspec knows no such URL.
    """
    if options is not None and not isinstance(options, Mapping):
        raise UnsupportedError(f"storage_options= takes a mapping, not a {type(options).__name__}")
    options = dict(options or {})
    fs, path = connect(url, options)
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    if "file" in protocols:
        return path
    place: RemoteFile = (HttpFile if "http" in protocols or "https" in protocols else FsspecFile)(url, options)
    try:
        archive = _open(place, verify, cache_at(cache, url, {**fs.storage_options, **options}))
    except RecordError as error:
        raise error.located(path=place.shown) from error.__cause__

    def recipe(archive: Archive) -> tuple[Any, ...]:
        pins = {} if archive.remote is None else archive.remote.pins
        return _reopen, (url, verify, cache, options, _sha256(archive), pins)

    archive.recipe = recipe
    return archive


def _reopen(
    url: str, verify: Verify, cache: Any, options: dict[str, Any], seal: bytes, pins: dict[int, bytes]
) -> Archive:
    """Return the remote archive that was pickled: its URL, how it was opened, and which archive it must be.

    That is told by the SHA-256 of its index, of which CRCs could be matched; after `expect=` or `content_digest()` by
    that of each payload, too, as in the process before. Where all of it is in memory it is told by all of it.

    Raises:
        IntegrityError: it is another archive by now.
    """
    archive = open_url(url, verify=verify, cache=cache, options=options)
    if isinstance(archive, str) or _sha256(archive) != seal:
        raise IntegrityError("is not the archive that was pickled; it was replaced since", path=redacted(url))
    if archive.remote is not None:
        archive.remote.pin(pins)
    return archive


def _sha256(archive: Archive) -> bytes:
    """Return the SHA-256 of both ends and the index; of an archive that is in memory, of all of it."""
    running = hashlib.sha256()
    if archive.remote is None:
        running.update(archive.buffer)
    else:
        for _, piece in _ends(archive.header, archive.buffer):
            running.update(piece)
    return running.digest()


def _open(place: RemoteFile, verify: Verify, shelf: ArchiveCache | None) -> Archive:
    few = shelf is not None and shelf.holds_any()
    first = place.start(HEADER_SIZE if few else FIRST)
    if is_packed(first):
        table, have = read_table(place, first)
        if table is None:
            return _open_packed(place, have, verify)
        place = UnpackedFile(place, table, have)
        first = place.start(HEADER_SIZE)
    if place.size < 2 * HEADER_SIZE or len(first) < HEADER_SIZE:
        raise too_short(place.size, bytes(first[:HEADER_SIZE]))
    header = decode_header(bytes(first[:HEADER_SIZE]))
    held = RangeSet()
    held.add(0, len(first))
    memory = outline(place.size, [(0, first)])._replace(path=place.shown, filled=held.ranges)
    cache = None
    if shelf is not None and place.tag is not None and place.strong:  # else nothing tells one version from another
        cache = shelf.version(place.size, place.tag)
    window = RemoteMemory(place, memory.octets, held, cache)
    known = _from_cache(cache, memory.octets, held)
    if not known:
        _fetch_ends(window, memory.octets, header)
    try:
        archive = open_archive(memory._replace(remote=window), verify=verify)
        check_crc(archive.buffer, archive.header)  # at level "touch", too: unlike a local file, it came a long way
    except FormatError:
        place.check_same()  # one that was replaced meanwhile is not damaged
        raise
    if cache is not None and not known:
        cache.put_index(_ends(archive.header, memory.octets))
    return archive


def _fetch_ends(window: RemoteMemory, octets: memoryview, header: Header | None) -> None:
    """Have index and trailer there. What does not fit is left to the archive, which says so."""
    size = len(octets)
    if header is None:
        window.fetch([(max(0, size - FIRST), size)])
        header = decode_header(bytes(octets[-HEADER_SIZE:]), "trailer")
    if header is not None and header.archive_size == size:
        index = header.index_offset, header.index_offset + header.index_size
        window.fetch([index, (size - HEADER_SIZE, size)])


def _ends(header: Header, octets: memoryview) -> list[tuple[int, memoryview]]:
    at = header.index_offset
    return [
        (0, octets[:HEADER_SIZE]),
        (at, octets[at : at + header.index_size]),
        (len(octets) - HEADER_SIZE, octets[-HEADER_SIZE:]),
    ]


def _from_cache(cache: VersionCache | None, octets: memoryview, held: RangeSet) -> bool:
    """Take index and trailer from the cache, if they are there and fit the header that came."""
    pieces = None if cache is None else cache.index()
    if pieces is None or any(offset < 0 or offset + len(piece) > len(octets) for offset, piece in pieces):
        return False
    if not _are_ends(pieces, len(octets)) or pieces[0][1] != octets[:HEADER_SIZE]:
        return False
    for offset, piece in pieces:
        octets[offset : offset + len(piece)] = piece
        held.add(offset, offset + len(piece))
    return True


def _are_ends(pieces: list[tuple[int, bytes]], size: int) -> bool:
    """Return whether pieces are those that `_ends` gives, whoever wrote them."""
    try:
        trailer = decode_header(pieces[-1][1], "trailer") if pieces and len(pieces[-1][1]) == HEADER_SIZE else None
    except RecordError:
        return False
    if trailer is None:
        return False
    told = [(0, HEADER_SIZE), (trailer.index_offset, trailer.index_size), (size - HEADER_SIZE, HEADER_SIZE)]
    return told == [(offset, len(piece)) for offset, piece in pieces]


def _open_packed(place: RemoteFile, have: list[Request], verify: Verify) -> Archive:
    """Return an archive of which the packed form, without a seek table, is fetched whole, and let go of again."""
    packed = outline(place.size, have)
    octets = packed.octets
    held = RangeSet()
    for offset, piece in have:
        held.add(offset, offset + len(piece))
    place.fill([(start, octets[start:end]) for start, end in cut(held.missing(0, place.size))])
    place.check_same()
    return open_packed(Memory(octets, place.shown, packed.mapping), verify=verify, mode="r")
