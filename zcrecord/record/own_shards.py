"""The shards of a catalogue that is to be replaced: known by their bytes, so that no other file is removed for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zcrecord.archive.archive import Archive
from zcrecord.codec.layout import MAGIC
from zcrecord.errors import RecordError
from zcrecord.storage.file_group import removing
from zcrecord.storage.files import is_url, path_of, read_start
from zcrecord.storage.scratch import ListedFile

from .load import load_record

__all__ = ["own_shards", "proved_shards", "replacing"]


@contextlib.contextmanager
def replacing(dest: Any, durable: bool) -> Iterator[None]:
    """Remove the shards of a catalogue at a path once the block has replaced it; of anything else there are none."""
    path = None if dest is None or hasattr(dest, "write") or is_url(dest) else os.path.realpath(path_of(dest))
    with removing(path or "", own_shards(path) if path else (), durable=durable):
        yield


def own_shards(path: str) -> list[ListedFile]:
    """Return the files that a catalogue at a path names, and that are its shards; none if it is no catalogue."""
    out = []
    with contextlib.suppress(RecordError):
        if os.path.isfile(path) and read_start(path, len(MAGIC)) == MAGIC:  # and not packed, which would be unpacked
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
