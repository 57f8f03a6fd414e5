"""Cost of checks: digests beside reading the same bytes once with numpy.

The bytes are those of a mapped file in the page cache. Each call opens the file anew, so that all find the mapping's
pages unmapped, and all pay for mapping them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, Settings, medians, require_disk, seconds_of
from tools.bench.large import make_buffers
from tools.bench.small import make_tensors
from tools.measure import MIB
from zcrecord.archive import damage
from zcrecord.storage.threads import cores

AREA = "integrity"
SUM = "numpy sum"
EQUAL = Promise("within", 1.25, SUM)  # four fifths of its speed


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of digests of few large tensors, then of many small ones."""
    mib_each = settings.pick(64, 2)
    require_disk(settings.folder, 30 * mib_each * MIB)
    large, small = settings.folder / "large.zcr", settings.folder / "many.zcr"
    buffers = make_buffers(mib_each)
    total = sum(b.nbytes for b in buffers.values())
    zcrecord.save_record(buffers, large, durable=False)
    del buffers
    count = settings.pick(10_000, 500)
    zcrecord.save_record(make_tensors(count), small, durable=False)
    repeats = settings.pick(7, 1)

    def row(work: str, path: Path, threads: int) -> Row:
        # Single calls, which are too long for bursts.
        ways = {OURS: partial(_check, path, threads), SUM: partial(_sum, path, threads)}
        seconds = medians(repeats, {name: partial(seconds_of, way) for name, way in ways.items()}, uncounted=1)
        return Row(AREA, f"every digest of {work}", "s", seconds, EQUAL, samples=repeats)

    for threads in sorted({1, cores()}):
        used = "one thread" if threads == 1 else f"{threads} threads"
        yield row(f"{total / 1e9:.1f} GB, mapped, {used}", large, threads)
    yield row(f"{count:,} x 1 KB, one thread", small, 1)


def _check(path: Path, threads: int) -> None:
    with zcrecord.load_record(path) as record:
        assert not damage.find(record.archive, threads=threads)


def _sum(path: Path, threads: int) -> None:
    with zcrecord.load_record(path) as record:
        arrays = [array.reshape(-1).view(np.uint64) for array in record.values()]
        if threads == 1:
            for array in arrays:
                array.sum()
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(np.sum, arrays))
        del arrays
