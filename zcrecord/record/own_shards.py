"""The shards of a catalogue that is to be replaced: known by their bytes, so that no other file is removed for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zcrecord.archive.archive import Archive
from zcrecord.codec.conventions import CATALOGUE_TYPE
from zcrecord.codec.layout import MAGIC
from zcrecord.errors import RecordError
from zcrecord.storage.files import read_start
from zcrecord.storage.scratch import MOST_OF_CATALOGUE, ListedFile

from .load import load_record

__all__ = ["own_shards", "proved_shards"]


def own_shards(path: str) -> list[ListedFile]:
    """Return the files that a catalogue at a path names, and that are its shards; none if it is no catalogue.

    To be called under the folder's lock. A file is opened only if its first bytes have a catalogue's type name.
    """
    out = []
    with contextlib.suppress(RecordError):  # it may be replaced and not read
        start = read_start(path, MOST_OF_CATALOGUE) if os.path.isfile(path) else b""
        if start.startswith(MAGIC) and CATALOGUE_TYPE.encode() in start:  # and not packed, which would be unpacked
            for name, shard in proved_shards(path):
                if shard.file is not None:
                    _, inode, nbytes, changed = shard.file[1]
                    out.append(ListedFile(inode, nbytes, changed, name))
    return out


def proved_shards(path: str, options: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Archive]]:
    """Yield the shards beside a catalogue at a path or URL, by name: their trailer and index are those that it knows.

    What cannot be read is left out.
    """
    from zcrecord.archive.catalogue import ShardedArchive  # here, because few records have shards

    with contextlib.suppress(RecordError), contextlib.ExitStack() as stack:
        record = load_record(path, verify="touch", cache=False, storage_options=options)
        archive = stack.enter_context(record).archive
        if isinstance(archive, ShardedArchive):
            yield from archive.shards.proved()
