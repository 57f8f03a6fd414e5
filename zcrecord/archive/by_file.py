"""An archive by its files: parts that lie in one file each, read-ahead, and the archives that verification opens."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial

import numpy as np

from zcrecord.codec.index import Index
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, NONE

from .archive import Archive
from .payload_source import Array
from .piece_table import PieceTable

_NEAR = 1 << 16  # bytes between payloads up to which both get one piece of advice


def parts_by_file(archive: Archive) -> list[Archive]:
    """Return parts that lie in one file each: the archive itself, or a part for each shard of a catalogue.

    Parts of shards have no attributes. The last part has the tensors that are split, empty, or in the catalogue.
    """
    table = archive.source.piece_table()
    if table is None:
        return [archive]
    archive.ensure_all()
    of_tensors = _files_of_tensors(archive.index, table)
    parts = [_part_in(archive, table, f, of_tensors == f) for f in np.unique(of_tensors).tolist() if f != NONE]
    if np.count_nonzero(in_no_shard := of_tensors == NONE):
        parts.append(archive.part(_index_of(archive.index, in_no_shard), range(len(archive.index.payloads))))
    return parts


def sized_openers(archive: Archive) -> list[tuple[int, Callable[[], Archive]]]:
    """Return size and opener of each archive to verify, one for each file; of a part of a catalogue parts of shards."""
    source, table = archive.source, archive.source.piece_table()
    if table is None:
        return [(archive.header.archive_size, lambda: archive)]
    archive.ensure_all()
    of_tensors = _files_of_tensors(archive.index, table)
    if archive.part_of is None:

        def open_file(file: int) -> Archive:
            shard: Archive = source.file_archive(file)
            return shard if shard.whole else _part_in(archive, table, file, of_tensors == file)  # for names in errors

        return [(source.file_size(file), partial(open_file, file)) for file in (NONE, *range(len(source.file_names)))]
    masks = ((file, (of_tensors == file) & (of_tensors != NONE)) for file in table.files())
    return [(source.file_size(file), partial(_part_in, archive, table, file, chosen)) for file, chosen in masks]


def _files_of_tensors(index: Index, table: PieceTable) -> Array:
    """Return by tensor the number of the shard that it lies in, whole; NONE for others."""
    numbers = np.minimum(index.tensors["payload"], len(index.payloads))
    return np.asarray(np.append(table.whole(), np.uint32(NONE))[numbers])


def _part_in(archive: Archive, table: PieceTable, file: int, chosen: Array) -> Archive:
    """Return the part of a catalogue in one shard: the tensors where `chosen` is True, and every payload there."""
    source = archive.source
    shard: Archive = source.file_archive(file)
    numbers = np.unique(source.numbers_in_file(file, np.unique(table.payload[table.in_file(file)])))
    index = _index_of(archive.index, chosen)
    index.tensors["payload"] = np.searchsorted(numbers, table.numbers()[index.tensors["payload"]])
    rows = shard.index.payloads[numbers]
    return shard.part(index._replace(payloads=rows, digest_kind=shard.index.digest_kind), numbers.tolist())


def _index_of(index: Index, chosen: Array) -> Index:
    """Return an index of the tensors where `chosen` is True, with all modules and no attributes."""
    by_name = (np.cumsum(chosen) - 1)[index.by_name[chosen[index.by_name]]].astype(np.uint32)
    empty = index.attributes[:0]
    return index._replace(tensors=index.tensors[chosen], by_name=by_name, attributes=empty, metadata=empty)


def prefetch(archive: Archive) -> None:
    """Advise the system to read all mapped payloads ahead; fetch those of a remote archive."""
    for part in parts_by_file(archive):
        part.fetch()
        if hasattr(mapping := part.source.mapping, "madvise"):
            _read_ahead(part, mapping)


def _read_ahead(archive: Archive, mapping: mmap.mmap) -> None:
    """Advise the system to read the pages of an archive's payloads; near ones are one range."""
    base = archive.offset + archive.header.payload_offset
    start = end = 0  # of the range so far, which the last item ends
    for offset, nbytes, _ in [*archive.index.payloads.tolist(), (MAX_ARCHIVE_SIZE, 0, 0)]:
        if offset > end + _NEAR:
            page = (base + start) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                mapping.madvise(mmap.MADV_WILLNEED, page, base + end - page)
            start = end = offset
        end = max(end, offset + nbytes)
