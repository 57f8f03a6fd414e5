"""New metadata for a catalogue, which is written again; its shards stay as they are."""

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


def add_to_catalogue(record: Record, metadata: Mapping[str, Any], *, durable: bool) -> None:
    """Replace the catalogue of a record by one with more metadata: any plain values except bytes."""
    archive = record.archive
    catalogue = archive.source.file_archive(NONE)
    entries = stored_entries(archive)
    if any(a.key in metadata and isinstance(a.value, PayloadId) for a in entries.metadata):
        fault = "has bytes in its metadata under a name that is to be written; zcrecord convert makes one archive of it"
        raise UnsupportedError(fault, path=archive.path)
    entries.metadata = [a for a in entries.metadata if a.key not in metadata] + metadata_entries(metadata)
    entries.payload_rows, entries.digest_kind = archive.index.payloads, archive.index.digest_kind
    header = archive.header
    outline, _ = outline_of(entries, header.alignment, header.base_alignment, header.payload_room)
    tree = Record(catalogue).tree()
    tree["outline"] = np.frombuffer(outline, np.uint8)
    if BLOBS in tree:
        count = len(tree[BLOBS]) if isinstance(tree[BLOBS], list | tuple) else 1  # the source refuses any other value
        blobs = archive.source.numbers_in_file(NONE, np.arange(count))
        tree[BLOBS] = [catalogue.payload(number) for number in blobs.tolist()]
    assert catalogue.source.file is not None, "it is mapped"
    path, identity = catalogue.source.file
    with open_sink(path, durable=durable, replaces=identity) as sink:
        type_name = REFERENCES_TYPE if has_type_name(catalogue, REFERENCES_TYPE) else CATALOGUE_TYPE
        write_catalogue(tree, sink, kind=entries.digest_kind, type_name=type_name)
