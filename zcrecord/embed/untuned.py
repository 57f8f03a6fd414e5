"""Archives without their tuned part, for the forms that take all of an archive's bytes: flash is not to carry it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from zcrecord.archive.archive import Archive
from zcrecord.onnx import tuned
from zcrecord.record.record import Record

from .write_files import write

__all__ = ["without_tuned_part"]


@contextlib.contextmanager
def without_tuned_part(record: Record, folder: str, stem: str, *, kept: bool, force: bool) -> Iterator[str | None]:
    """Yield the path of a file with the archive's bytes from before it was tuned, None if it is not tuned.

    The file is STEM_untuned.zcr in the folder if it is `kept`, since compilers read it; it is removed if the block
    fails. Otherwise it is gone after the block.
    """
    archive = record.archive.root
    part = tuned.read_tuned(archive)
    if part is None:
        yield None
    elif kept:
        (path,) = write({f"{stem}_untuned.zcr": _pieces(archive, part)}, folder, force=force)
        try:
            yield path
        except BaseException:
            os.unlink(path)
            raise
    else:
        with tempfile.TemporaryDirectory(prefix="zcrecord-") as scratch:
            (path,) = write({os.path.basename(str(archive.path)): _pieces(archive, part)}, scratch)
            yield path


def _pieces(archive: Archive, part: tuned.TunedPart) -> Iterator[Any]:
    position = 0
    for offset, data in tuned.bytes_before(archive, part):
        yield bytes(offset - position)
        yield data
        position = offset + len(data)
