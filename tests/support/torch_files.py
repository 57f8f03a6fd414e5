"""Files of torch, saved and converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import zcrecord
from zcrecord import RecordWriter
from zcrecord.formats import torch as reading


def nothing(done: int, total: int | None) -> None:
    """Progress that nobody looks at."""


def converted(path: Path, progress: Any = nothing) -> zcrecord.Record:
    """Return the archive of a checkpoint, every digest checked."""
    with RecordWriter(path.with_suffix(".zcr")) as out:
        assert reading.read(str(path), out, progress) == path.stat().st_size
    return zcrecord.load_record(path.with_suffix(".zcr"), verify="full")


def saved(value: Any, folder: Path, **options: Any) -> zcrecord.Record:
    """Return the archive of what torch saved."""
    torch.save(value, folder / "m.pt", **options)
    return converted(folder / "m.pt")
