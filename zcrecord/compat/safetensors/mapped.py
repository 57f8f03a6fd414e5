"""A safetensors file as a Record, without converting it: views of the mapped file, under an index made for it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.codec.entries import ModuleKind, TensorLayout, in_memory
from zcrecord.codec.index import PAYLOAD
from zcrecord.codec.layout import NONE
from zcrecord.errors import located
from zcrecord.foreign.safetensors_header import check_length, decode_header
from zcrecord.record.record import Record
from zcrecord.record.save import metadata_entries
from zcrecord.storage.files import path_of
from zcrecord.storage.memory import Memory, buffer_of, map_file, read_file
from zcrecord.writing.flatten import FlatRecord


def open_record(source: Any, *, mmap: bool = True) -> Record:
    """Return a safetensors file as a record: its tensors as views, under their exact names, its metadata; no payload
    byte is read.

    The record is what `load_record` gives, but that it has no digests, cannot be pickled, and may have views that are
    not aligned, where the file has them so.

    Args:
        source: a path, or bytes.
        mmap: False reads the file into memory.

    Raises:
        FormatError: a rule of the format is broken; the file is checked as for a conversion. SourceError: it cannot be
        read.

    Example:
        >>> import numpy as np, zcrecord, zcrecord.formats
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> _ = zcrecord.formats.convert("model.zcr", "model.safetensors")
        >>> open_record("model.safetensors")["w"].shape
        (2, 3)
    """
    if not isinstance(source, str | os.PathLike):
        memory = Memory(buffer_of(source))
    else:
        memory = (map_file if mmap else read_file)(path_of(source), least=0)
    with located(path=memory.path):
        return Record(_archive(memory))


def _archive(memory: Memory) -> Archive:
    octets = memory.octets.toreadonly()
    length = check_length(bytes(octets[:64]), len(octets))
    start = 8 + length
    decoded = decode_header(bytes(octets[8:start]), len(octets) - start)
    names, count = decoded.names, len(decoded.names)
    entries = FlatRecord(ModuleKind.MAPPING, "")  # every name whole, so that they come back as they are
    entries.names = names
    entries.key_sizes = list(map(len, names if "".join(names).isascii() else map(str.encode, names)))
    entries.parents, entries.places = [0] * count, list(range(count))
    entries.layout_ids = decoded.form_ids
    entries.layouts = [TensorLayout(kind.code, kind.bits, shape) for kind, shape in decoded.forms]
    bounds = np.array(decoded.bounds, np.uint64)
    sizes = np.diff(bounds)
    some = sizes > 0
    entries.payload_rows = np.zeros(np.count_nonzero(some), PAYLOAD)
    entries.payload_rows["offset"], entries.payload_rows["nbytes"] = bounds[:-1][some] + np.uint64(start), sizes[some]
    entries.payloads = np.where(some, np.cumsum(some) - 1, NONE)
    entries.metadata = metadata_entries(decoded.metadata)
    return Archive.foreign(memory._replace(octets=octets), in_memory(entries))
