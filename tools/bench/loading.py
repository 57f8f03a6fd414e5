"""1.6 GB brought to a device: the host device against memcpy of the same mapping.

Where new memory is filled its page faults count for all alike; the record is opened anew for every repetition, so that
nobody finds the mapping's pages mapped already. The device is this machine's memory; for torch's see `gpu`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, Settings, collect, require_disk
from tools.bench.large import make_buffers
from tools.measure import MIB, peak_rss
from tools.worker import Worker, call_alone
from zcrecord.loaders import load_into
from zcrecord.loaders.plan import MAX_IN_FLIGHT

AREA = "loading"
COPY = "memcpy"
READ, BY_POSITION = "zcrecord, mmap=False", "zcrecord, reads by position"
MATRICES = 16


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of 24 large tensors, warm and cold."""
    mib_each = settings.pick(64, 4)
    require_disk(settings.folder, 30 * mib_each * MIB)
    path = settings.folder / "loading.zcr"
    buffers = make_buffers(mib_each)
    total = sum(b.nbytes for b in buffers.values())
    zcrecord.save_record(buffers, path)
    del buffers
    os.sync()
    work, repeats = f"{total / 1e9:.1f} GB", settings.pick(9, 2)
    within = Promise("within", 1.111, COPY)  # nine tenths of its speed
    with Worker() as worker:
        measure = partial(_medians, worker, path)
        for where, warm in (("new memory", False), ("memory that is there", True)):
            seconds = measure(repeats, {OURS: ("host", warm), COPY: ("copy", warm)})
            yield Row(AREA, f"host device, {work} to {where}", "s", seconds, within, samples=repeats)
        yield _extra(path, work, total)
    path.unlink()


def make_matrices(side: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return square matrices: 16 of 4096 x 4096 are 1.1 GB."""
    values = np.random.default_rng(0)
    return {f"blocks.{i}.weight": values.random((side, side), np.float32) for i in range(MATRICES)}


def _medians(worker: Worker, path: Path, repeats: int, ways: dict[str, tuple[str, bool]]) -> dict[str, float]:
    """Return the median seconds of each way, after one call each that is not counted."""

    def seconds(way: str, warm: bool) -> float:
        target = "tools.bench.loading:load_seconds"
        return float(worker.call(target, way=way, path=str(path), warm=warm))

    calls: dict[str, Callable[[], float]] = {name: partial(seconds, *way) for name, way in ways.items()}
    collect(1, calls)
    return {name: statistics.median(s) for name, s in collect(repeats, calls).items()}


def _extra(path: Path, work: str, total: int) -> Row:
    """Return the row of what is resident besides the tensors at the most, mapped pages of the file included."""
    ways = {OURS: "host", COPY: "copy", BY_POSITION: "read", READ: "load"}
    values = {
        name: float(max(0, call_alone("tools.bench.loading:peak_growth", way=way, path=str(path)) - total))
        for name, way in ways.items()
    }
    promise = Promise("under", MAX_IN_FLIGHT + 8 * MIB)
    note = f"max_in_flight is {MAX_IN_FLIGHT // MIB} MiB"
    return Row(AREA, f"host device, {work}: the most that is resident besides the tensors", "B", values, promise, note)


# -- in the worker ---------------------------------------------------------------------------------------------------

_rooms: dict[str, np.ndarray[Any, Any]] = {}


def load_seconds(way: str, path: str, warm: bool) -> float:
    """Bring all tensors to memory of this process one way; return the seconds.

    `warm`: to memory that is there and was touched.
    """
    record = zcrecord.load_record(path)
    rooms: dict[str, Any] | None = None
    if warm and not _rooms:
        _rooms.update({name: np.ones_like(view) for name, view in record.items()})
    if warm:
        rooms = _rooms
        record = zcrecord.load_record(path)
    start = time.perf_counter()
    kept = _load(way, path, record, rooms)  # freed after the clock is read
    seconds = time.perf_counter() - start
    del kept
    return seconds


def _load(way: str, path: str, record: zcrecord.Record, rooms: dict[str, Any] | None) -> Any:
    if way == "copy":
        return {name: _copy(view, None if rooms is None else rooms[name]) for name, view in record.items()}
    if way == "load":
        return zcrecord.load_record(path, mmap=False)
    return load_into(record, way, dst=rooms)


def _copy(view: np.ndarray[Any, Any], room: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    out = np.empty_like(view) if room is None else room
    np.copyto(out, view)
    return out


def peak_growth(way: str, path: str) -> int:
    """Return by how much the most that this process had resident grows while everything is loaded one way."""
    before = peak_rss() or 0
    kept = _load(way, path, zcrecord.load_record(path), None)
    after = peak_rss() or 0
    del kept
    return after - before
