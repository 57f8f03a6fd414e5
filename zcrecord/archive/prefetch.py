"""Payloads read ahead: of a mapped file into the system's page cache, of a remote archive into memory."""

from __future__ import annotations

import mmap

from zcrecord.codec.layout import MAX_ARCHIVE_SIZE

from .archive import Archive
from .by_file import parts_by_file

_NEAR = 1 << 16  # bytes between payloads for which one piece of advice does


def prefetch(archive: Archive) -> None:
    """Advise the system that all payloads will be read soon; those of a remote archive are fetched."""
    for part in parts_by_file(archive):
        _prefetch(part)


def _prefetch(archive: Archive) -> None:
    archive.fetch()
    mapping = archive.source.mapping
    if not hasattr(mapping, "madvise"):
        return
    page, base = mmap.PAGESIZE, archive.offset + archive.header.payload_offset
    start = end = 0
    for offset, nbytes, _ in [*archive.index.payloads.tolist(), (MAX_ARCHIVE_SIZE, 0, 0)]:
        if offset > end + _NEAR:
            lo = (base + start) // page * page
            if end > start:
                mapping.madvise(mmap.MADV_WILLNEED, lo, base + end - lo)
            start = end = offset
        end = max(end, offset + nbytes)
