"""1,000,000 tensors: what opening costs for each, index verified, and whether touch stays flat."""

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
    """Yield the rows of a small and a large archive."""
    count = settings.pick(1_000_000, 10_000)
    few, many = "1,000 tensors", f"{count:,} tensors"
    paths = {few: settings.folder / "few.zcr", OURS: settings.folder / "many.zcr"}
    for path, n in ((paths[few], 1000), (paths[OURS], count)):
        values = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
        layers = {f"block_{i // 100}.part_{i % 100}": values[i].copy() for i in range(n)}
        zcrecord.save_record({"layers": layers}, path, alignment=16, durable=False)
    repeats = settings.pick(5, 1)
    opened = median_seconds(repeats, {OURS: partial(zcrecord.load_record, paths[OURS])})
    work, each = f"open, index verified, for each of {many}", {OURS: opened[OURS] / count}
    yield Row(AREA, work, "s", each, Promise("under", EACH), samples=repeats * BURST)
    touch = {name: partial(zcrecord.load_record, paths[name], verify="touch") for name in (OURS, few)}
    seconds = median_seconds(6 * repeats, touch)
    yield Row(
        AREA, f'open {many}, verify="touch"', "s", seconds, Promise("within", FLAT, few), samples=6 * repeats * BURST
    )
