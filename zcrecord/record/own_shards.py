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
from zcrecord.storage.files import open_source
from zcrecord.storage.scratch import MOST_OF_CATALOGUE, ListedFile

from .load import load_record

__all__ = ["own_shards", "proved_shards"]


_PIECE = 1 << 16  # bytes read at a time of a file that is to be replaced


def own_shards(path: str) -> list[ListedFile]:
    """Return the files that a catalogue at a path names, and that are its shards; none if it is no catalogue.

    To be called under the folder's lock. A file is opened only if its first bytes have a catalogue's type name.
    """
    out = []
    with contextlib.suppress(RecordError, OSError):  # it may be replaced and not read
        if os.path.isfile(path) and _may_be_catalogue(path):
            for name, shard in proved_shards(path):
                if shard.source.file is not None:
                    _, inode, nbytes, changed = shard.source.file[1]
                    out.append(ListedFile(inode, nbytes, changed, name))
    return out


def _may_be_catalogue(path: str) -> bool:
    """Return True for an archive, not a packed one, that has a catalogue's type name in its first bytes."""
    kind, seen = CATALOGUE_TYPE.encode(), b""
    with open_source(path)[0] as file:
        for at in range(0, MOST_OF_CATALOGUE, _PIECE):
            piece = file.read(_PIECE)
            if not (at or piece.startswith(MAGIC)) or not piece:
                break
            if kind in seen + piece:
                return True
            seen = piece[-len(kind) :]
    return False


def proved_shards(path: str, options: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Archive]]:
    """Yield the shards beside a catalogue at a path or URL, by name: their trailer and index are those that it knows.

    What cannot be read is left out.
    """
    with contextlib.suppress(RecordError), contextlib.ExitStack() as stack:
        record = load_record(path, verify="touch", cache=False, storage_options=options)
        source = stack.enter_context(record).archive.source
        for file, name in enumerate(source.file_names):
            with contextlib.suppress(RecordError):
                yield name, source.file_archive(file)
