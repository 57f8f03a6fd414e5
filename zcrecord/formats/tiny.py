"""Writes TINY files, one piece in memory."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from zcrecord.archive.payloads import Payloads
from zcrecord.codec.layout import align_up
from zcrecord.dtypes import STRING, by_code
from zcrecord.errors import UnsupportedError, located
from zcrecord.foreign.tiny import ALIGNMENT, MAGIC
from zcrecord.record.record import Record
from zcrecord.storage.files import Progress, open_sink


def write(
    record: Record,
    dest: Any,
    *,
    durable: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Write a record's tensors as TINY, whole or not at all; returns the bytes written.

    Example:
        >>> import numpy as np, os, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> write(zcrecord.load_record("model.zcr"), "m.weights.bin") == os.path.getsize("m.weights.bin")
        True

    Raises:
        UnsupportedError: a tensor of strings. SourceError: the file system refused.
    """
    payloads = Payloads(record.archive)
    heads = []
    for info in payloads.infos:
        with located(path=record.archive.path, tensor=info.name):
            if info.dtype is STRING or info.dtype.code not in by_code:
                raise UnsupportedError(f"TINY has no {info.dtype.name}")
        name, kind = info.name.encode(), info.dtype.name.encode()
        shape = struct.pack(f"<B{len(info.shape)}Q", len(info.shape), *info.shape)
        heads.append(struct.pack("<H", len(name)) + name + struct.pack("<B", len(kind)) + kind + shape)
    header = len(MAGIC) + 4 + sum(len(head) + 8 for head in heads)
    end, done = header, 0
    with open_sink(dest, durable=durable, options=storage_options) as sink:
        sink.write(MAGIC + struct.pack("<I", len(heads)))
        for head, info in zip(heads, payloads.infos, strict=True):
            start = align_up(end, ALIGNMENT)
            sink.write(head + struct.pack("<Q", start))
            end = start + info.nbytes if info.nbytes else end
        for info in payloads.infos:
            if info.nbytes:
                sink.write(bytes(align_up(sink.position, ALIGNMENT) - sink.position))
            for piece in payloads.pieces(info):
                sink.write(piece)
                done += memoryview(piece).nbytes
                if progress is not None:
                    progress(done, payloads.nbytes)
        payloads.release()
        return sink.position
