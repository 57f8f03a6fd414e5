"""Archives over HTTP: one small tensor of a large archive, and all tensors at once against one by one.

The server runs on this machine and waits before each answer, as a distant one would have it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, Settings, median_seconds
from tools.bench.sparse import Holes
from tools.range_server import Server, serving

AREA = "remote"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LARGE = 9  # tensors beside the small one
ROUND_TRIP = 0.02  # seconds that the server waits before it answers: another continent's are 0.1 and more
ONE_BY_ONE = "one by one"


def write_sparse(path: Path, nbytes: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Write an archive of 10 tensors: `small`, of 16 KiB, which is returned, amid 9 of zeros that take no disk.

    All of them are a little more than `nbytes` together.
    """
    each = nbytes // LARGE // MIB * MIB + MIB
    small = np.random.default_rng(0).standard_normal(4 * KIB).astype(np.float32)
    with mmap.mmap(-1, each) as space, path.open("wb") as file:
        # Lazy ones are written as they come, the index last: the hardest for a reader.
        record: dict[str, Any] = {
            f"large.{i}": zcrecord.LazyTensor("float32", (each // 4,), lambda: [space]) for i in range(LARGE)
        }
        last = record.pop(f"large.{LARGE - 1}")
        record |= {"small": small, "last": last}  # between others, where no other request brings it along
        zcrecord.save_record(record, Holes(file, each))
    return small


def run(settings: Settings) -> Iterator[Row]:
    with serving(settings.folder) as server:
        yield from _one_tensor(settings, server)
        yield _all_tensors(settings, server)


def _one_tensor(settings: Settings, server: Server) -> Iterator[Row]:
    size = settings.pick(GIB, 16 * MIB)
    write_sparse(settings.folder / "sparse.zcr", size)
    zcrecord.load_record(f"{server.url}/sparse.zcr")["small"].sum()
    work = f"one 16 KiB tensor of an archive of {size // MIB} MiB over HTTP (10 tensors)"
    yield Row(AREA, f"{work}: requests", "", {OURS: len(server.requests)}, Promise("under", 4))
    yield Row(AREA, f"{work}: bytes fetched", "B", {OURS: server.sent}, Promise("under", 256 * KIB))


def _all_tensors(settings: Settings, server: Server) -> Row:
    count = settings.pick(100, 25)
    values = np.random.default_rng(0).standard_normal((count, 256, 64)).astype(np.float32)
    zcrecord.save_record({f"layers.{i}.weight": values[i] for i in range(count)}, settings.folder / "many.zcr")
    server.delay = ROUND_TRIP
    url = f"{server.url}/many.zcr"

    def one_by_one() -> None:
        record = zcrecord.load_record(url)
        for name in record:
            record[name]

    repeats = settings.pick(3, 1)
    ways = {OURS: lambda: list(zcrecord.load_record(url).values()), ONE_BY_ONE: one_by_one}
    seconds = median_seconds(repeats, ways)
    work = f"all {count} tensors of 64 KiB over HTTP, {ROUND_TRIP * 1000:.0f} ms a round trip"
    return Row(AREA, work, "s", seconds, Promise("faster", 5, ONE_BY_ONE), samples=repeats)
