"""New metadata for a catalogue: the catalogue is written anew, its shards stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.errors import SourceError
from zcrecord.storage.files import identity_of
from zcrecord.writing.catalogue import BLOBS, outline_of, write_catalogue

from .record import Record
from .save import metadata_entries, stored_entries

__all__ = ["add_to_catalogue"]


def add_to_catalogue(record: Record, metadata: Mapping[str, Any], *, durable: bool) -> None:
    """Replace the catalogue of a record by one with more metadata, plain values but bytes; its shards stay as they are.

    Raises:
        SourceError: the file was replaced since it was opened, or the file system reports an error.
    """
    archive: Any = record.archive
    catalogue: Archive = archive.shards.catalogue
    entries = stored_entries(archive)
    entries.metadata = [a for a in entries.metadata if a.key not in metadata] + metadata_entries(metadata)
    entries.payload_rows, kind = archive.index.payloads, archive.index.digest_kind
    entries.digest_kind, h = kind, archive.header
    outline, _ = outline_of(entries, h.alignment, h.base_alignment, h.payload_room)
    tree = Record(catalogue).tree()
    tree["outline"] = np.frombuffer(outline, np.uint8)
    if BLOBS in tree:
        tree[BLOBS] = [bytes(blob) for blob in tree[BLOBS]]
    if catalogue.file is None or identity_of(catalogue.file[0]) != catalogue.file[1]:
        raise SourceError("was replaced since it was opened; load it again", path=archive.path)
    write_catalogue(tree, catalogue.file[0], kind=kind, durable=durable)
