"""1.6 GB brought to a device: the host device against memcpy of the same mapping.

Where new memory is filled its page faults count for all alike; the record is opened anew for every repetition, so that
nobody finds the mapping's pages mapped already. The device is this machine's memory; for torch's see `gpu`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, Settings, medians, require_disk, seconds_of
from tools.bench.large import make_buffers
from tools.measure import MIB, peak_rss
from tools.worker import Worker, call_alone
from zcrecord.loaders import load_into
from zcrecord.loaders.plan import MAX_IN_FLIGHT

AREA = "loading"
COPY = "memcpy"
READ, BY_POSITION = "zcrecord, mmap=False", "zcrecord, reads by position"


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
        load = partial(worker.call, "tools.bench.loading:load_seconds", path=str(path))
        for where, warm in (("new memory", False), ("memory that is there", True)):
            ways = {OURS: partial(load, way="host", warm=warm), COPY: partial(load, way="copy", warm=warm)}
            seconds = medians(repeats, ways, uncounted=1)
            yield Row(AREA, f"host device, {work} to {where}", "s", seconds, within, samples=repeats)
    grown = partial(call_alone, "tools.bench.loading:peak_growth", path=str(path))
    ways_alone = {OURS: "host", COPY: "copy", BY_POSITION: "read", READ: "load"}
    values = {name: float(max(0, grown(way=way) - total)) for name, way in ways_alone.items()}
    promise = Promise("under", MAX_IN_FLIGHT + 8 * MIB)
    note = f"max_in_flight is {MAX_IN_FLIGHT // MIB} MiB"
    yield Row(AREA, f"host device, {work}: the most that is resident besides the tensors", "B", values, promise, note)


# -- in the worker ---------------------------------------------------------------------------------------------------

_rooms: dict[str, np.ndarray[Any, Any]] = {}


def load_seconds(way: str, path: str, warm: bool) -> float:
    """Bring all tensors to memory of this process one way, `warm` to memory that was touched; return the seconds."""
    if warm and not _rooms:
        _rooms.update({name: np.ones_like(view) for name, view in zcrecord.load_record(path).items()})
    record = zcrecord.load_record(path)
    return seconds_of(lambda: _load(way, path, record, _rooms if warm else None))


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
    before = peak_rss()
    kept = _load(way, path, zcrecord.load_record(path), None)
    after = peak_rss()
    del kept
    return after - before
