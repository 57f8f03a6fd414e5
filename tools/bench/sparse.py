"""Opening an archive of 64 GiB against one of 1 MiB with the same 100 tensors: the payload's size must not matter."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import BURST, OURS, Promise, Row, Settings, median_seconds

AREA = "sparse"
COUNT = 100
GIB = 1 << 30
SMALL = "an archive of 1 MiB"


class Holes:
    """A file object that skips each write of one size: payloads, here all zeros, become holes."""

    def __init__(self, file: Any, piece: int) -> None:
        self._file, self._piece = file, piece

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        if nbytes != self._piece:
            return int(self._file.write(data))
        self._file.seek(nbytes, 1)
        return nbytes


def write_holes(path: Path, nbytes: int) -> None:
    """Write an archive of 100 tensors whose payloads, of `nbytes` together, take no space on disk.

    Its bytes are those that `save_record` writes for zeros, digests left out; no page of zeros is ever read.
    """
    each = nbytes // COUNT // 8 * 8 + 4  # no multiple of 8, as index and padding are
    # Address space without memory behind it; 64 GiB of numpy zeros could be refused.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    with mmap.mmap(-1, each * COUNT, flags=flags, prot=mmap.PROT_READ) as space, path.open("wb") as file:
        values = np.frombuffer(space, np.float32).reshape(COUNT, -1)
        record = {f"blocks.{i // 10}.part_{i % 10}.weight": values[i] for i in range(COUNT)}
        zcrecord.save_record(record, Holes(file, each), digest="none")
        del values, record


def run(settings: Settings) -> Iterator[Row]:
    size = settings.pick(64, 1) * GIB
    paths = {OURS: settings.folder / "huge.zcr", SMALL: settings.folder / "tiny.zcr"}
    write_holes(paths[OURS], size)
    write_holes(paths[SMALL], 1 << 20)
    repeats = settings.pick(50, 1)
    seconds = median_seconds(repeats, {name: partial(zcrecord.load_record, path) for name, path in paths.items()})
    work = f"open an archive of {size // GIB} GiB (holes), {COUNT} tensors"
    yield Row(AREA, work, "s", seconds, Promise("within", 1.2, SMALL), samples=repeats * BURST)
