"""New metadata for a catalogue: the catalogue is written anew, its shards stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zcrecord.archive.archive import has_type_name
from zcrecord.codec.conventions import CATALOGUE_TYPE, REFERENCES_TYPE
from zcrecord.codec.entries import PayloadId
from zcrecord.codec.layout import NONE
from zcrecord.errors import UnsupportedError
from zcrecord.storage.files import open_sink
from zcrecord.writing.catalogue import BLOBS, outline_of, write_catalogue

from .record import Record
from .save import metadata_entries, stored_entries

__all__ = ["add_to_catalogue"]


def add_to_catalogue(record: Record, metadata: Mapping[str, Any], *, durable: bool) -> None:
    """Replace the catalogue of a record by one with more metadata, plain values but bytes; its shards stay as they are.

    Raises:
        FormatError: its list of blobs is not one. UnsupportedError: the metadata have bytes under such a name.
        SourceError: the file was replaced since it was opened, or the file system reports an error.
    """
    archive = record.archive
    catalogue = archive.source.file_archive(NONE)
    entries = stored_entries(archive)
    if any(a.key in metadata and isinstance(a.value, PayloadId) for a in entries.metadata):
        what = "has bytes in its metadata under a name that is to be written; zcrecord convert makes one archive of it"
        raise UnsupportedError(what, path=archive.path)
    entries.metadata = [a for a in entries.metadata if a.key not in metadata] + metadata_entries(metadata)
    entries.payload_rows, kind = archive.index.payloads, archive.index.digest_kind
    entries.digest_kind, h = kind, archive.header
    outline, _ = outline_of(entries, h.alignment, h.base_alignment, h.payload_room)
    tree = Record(catalogue).tree()
    tree["outline"] = np.frombuffer(outline, np.uint8)
    if BLOBS in tree:
        count = len(tree[BLOBS]) if isinstance(tree[BLOBS], list | tuple) else 1  # else `blob` refuses it
        blobs = archive.source.numbers_in_file(NONE, np.arange(count))
        tree[BLOBS] = [catalogue.payload(number) for number in blobs.tolist()]
    assert catalogue.source.file is not None, "it is mapped"
    path, identity = catalogue.source.file
    with open_sink(path, durable=durable, replaces=identity) as sink:
        kind_name = REFERENCES_TYPE if has_type_name(catalogue, REFERENCES_TYPE) else CATALOGUE_TYPE
        write_catalogue(tree, sink, kind=kind, type_name=kind_name)
