"""From 1,000 to 1,000,000 tensors: what opening costs for each, index verified, and whether touch stays flat."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

import zcrecord
from tools.bench.harness import BURST, OURS, Promise, Row, Settings, median_seconds

AREA = "growth"
EACH = 0.2e-6  # seconds for a tensor
FLAT = 1.5  # touch maps the file and reads the header, whatever there is in it


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of growing archives."""
    most = settings.pick(1_000_000, 10_000)
    counts = [n for n in (1_000, 10_000, 100_000, 1_000_000) if n <= most]
    paths = {n: settings.folder / f"{n}.zcr" for n in counts}
    for n, path in paths.items():
        values = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
        layers = {f"block_{i // 100}.part_{i % 100}": values[i].copy() for i in range(n)}
        zcrecord.save_record({"layers": layers}, path, alignment=16, durable=False)
    repeats = settings.pick(5, 1)
    for n in counts:
        ways = {OURS: partial(zcrecord.load_record, paths[n])}
        seconds = {OURS: median_seconds(repeats, ways)[OURS] / n}
        promise = Promise("under", EACH) if n == most else None
        yield Row(
            AREA, f"open, index verified, for each of {n:,} tensors", "s", seconds, promise, samples=repeats * BURST
        )
    few, many = (f"{n:,} tensors" for n in (counts[0], counts[-1]))
    touch = {
        OURS: partial(zcrecord.load_record, paths[counts[-1]], verify="touch"),
        few: partial(zcrecord.load_record, paths[counts[0]], verify="touch"),
    }
    seconds = median_seconds(6 * repeats, touch)
    work = f'open {many}, verify="touch"'
    yield Row(AREA, work, "s", seconds, Promise("within", FLAT, few), samples=6 * repeats * BURST)
    for path in paths.values():
        path.unlink()
