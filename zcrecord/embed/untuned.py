"""Archives without their tuned part, for constants that contain a whole archive: a program does not need that part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from zcrecord.archive.archive import Archive
from zcrecord.onnx import tuned
from zcrecord.record.record import Record
from zcrecord.storage.files import scratch_folder

from .write_files import make_folder, write


@contextlib.contextmanager
def without_tuned_part(record: Record, folder: str) -> Iterator[str | None]:
    """Yield the path of a scratch file with the archive's bytes from before it was tuned; None if it is not tuned."""
    archive = record.archive.root
    part = tuned.read_tuned(archive)
    if part is None:
        yield None
        return
    make_folder(folder)
    with scratch_folder(os.path.join(folder, "untuned")) as scratch:
        (path,) = write({os.path.basename(str(archive.path)): _pieces(archive, part)}, scratch)
        yield path


def _pieces(archive: Archive, part: tuned.TunedPart) -> Iterator[Any]:
    position = 0
    for offset, data in tuned.bytes_before(archive, part):
        yield bytes(offset - position)
        yield data
        position = offset + len(data)
