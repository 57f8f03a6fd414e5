"""The shards of catalogues that savers replace, identified by their bytes; and shards that they may not replace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zcrecord.archive.archive import Archive, is_catalogue
from zcrecord.codec.conventions import CATALOGUE_TYPE
from zcrecord.codec.layout import MAGIC, NONE
from zcrecord.errors import RecordError, UnsupportedError
from zcrecord.storage.files import check_destination, open_source, real_path
from zcrecord.storage.folders import catalogue_of_shard
from zcrecord.storage.scratch import MOST_OF_CATALOGUE, ListedFile

from .load import load_record
from .record import Record

_PIECE = 1 << 16  # bytes read at a time of a file that is to be replaced


def own_shards(path: str) -> list[ListedFile]:
    """Return the files that a catalogue at a path names and that are its shards; none if it is not a catalogue.

    The caller holds the folder's lock. A file is opened only if its first bytes have a catalogue's type name.
    """
    shards = []
    with contextlib.suppress(RecordError, OSError):  # a file that cannot be read is replaced, too
        if os.path.isfile(path) and _may_be_catalogue(path):
            for name, shard in proved_shards(path):
                if shard.source.file is not None:
                    _, inode, nbytes, changed = shard.source.file[1]
                    shards.append(ListedFile(inode, nbytes, changed, name))
    return shards


def _may_be_catalogue(path: str) -> bool:
    """Return True for an archive, not a packed one, that has a catalogue's type name in its first bytes."""
    type_name, last_piece_end = CATALOGUE_TYPE.encode(), b""
    with open_source(path, regular=True)[0] as file:
        for start in range(0, MOST_OF_CATALOGUE, _PIECE):
            piece = file.read(_PIECE)
            if not (start or piece.startswith(MAGIC)) or not piece:
                break
            if type_name in last_piece_end + piece:
                return True
            last_piece_end = piece[-len(type_name) :]
    return False


def proved_shards(path: str, options: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Archive]]:
    """Yield names and archives of a catalogue's shards whose trailer and index digest are those in the catalogue."""
    with contextlib.suppress(RecordError), contextlib.ExitStack() as stack:
        record = load_record(path, verify="touch", cache=False, storage_options=options)
        source = stack.enter_context(record).archive.source
        # An archive of references names files, too, but does not own them.
        has_shards = bool(source.file_names) and is_catalogue(source.file_archive(NONE))
        for file, name in enumerate(source.file_names if has_shards else ()):
            with contextlib.suppress(RecordError):
                yield name, source.file_archive(file)


def check_no_shard(path: str) -> None:
    """Raise UnsupportedError if the file at a path is a shard of a catalogue beside it, which refuses other ones."""
    folder, name = os.path.split(real_path(path))
    catalogue = catalogue_of_shard(name)
    if catalogue is not None and os.path.isfile(beside := os.path.join(folder, catalogue)):
        with load_record(beside) as record:
            is_shard = name in record.archive.source.file_names
        if is_shard:
            fault = f"is a shard of {catalogue}, which has the digest of its index"
            raise UnsupportedError(f"{fault}; name another file for the new one", path=path)


def check_no_own_shard(record: Record, dest: str | None) -> None:
    """Raise DestinationExistsError if a destination is a shard of the catalogue that a record was loaded from."""
    folders = {os.path.dirname(record.path or ""), os.path.dirname(real_path(record.path or ""))}
    for name in record.archive.source.file_names if dest is not None else ():
        for folder in folders:  # of the path, and of the file that a link leads to
            check_destination(os.path.join(folder, name), dest, force=True)
