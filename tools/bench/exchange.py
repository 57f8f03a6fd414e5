"""1.6 GB from safetensors and back, against `cp`; and a record of 8 GiB that is made while it is written."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.convert import copy_seconds, settle
from tools.bench.harness import OURS, Promise, Row, Settings, collect, require_disk
from tools.bench.large import make_buffers
from tools.bench.peers import PEERS, SAFETENSORS
from tools.measure import MIB, peak_rss
from tools.worker import call_alone

AREA = "exchange"
COPY = "cp"
PEAK = 40 * MIB
PIECE = MIB  # bytes of a generated chunk


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of conversions, and of a record larger than what may be held."""
    mib_each, gib = settings.pick(64, 1), settings.pick(8, 1)
    require_disk(settings.folder, 80 * mib_each * MIB)
    require_disk(settings.folder, gib * 1100 * MIB)
    theirs, ours, copy = (settings.folder / f"exchange.{s}" for s in ("safetensors", "zcr", "copy"))
    buffers = make_buffers(mib_each)
    total = sum(b.nbytes for b in buffers.values())
    PEERS[SAFETENSORS].save(theirs, buffers)
    del buffers
    for source, dest, what in ((theirs, ours, "from safetensors"), (ours, theirs, "to safetensors")):
        yield from _convert(settings, source, dest, copy, f"convert {total / 1e9:.1f} GB {what}")
    for path in (theirs, ours, copy):
        path.unlink(missing_ok=True)
    yield _produce(settings, gib)


def _convert(settings: Settings, source: Path, dest: Path, copy: Path, work: str) -> Iterator[Row]:
    peaks: list[float] = []

    def ours() -> float:
        settle(dest)
        told = call_alone("tools.bench.exchange:convert", source=str(source), dest=str(dest))
        peaks.append(told["growth"])
        return float(told["seconds"])

    ways: dict[str, Callable[[], float]] = {OURS: ours, COPY: lambda: copy_seconds(source, copy, sync=False)}
    collect(1, ways)
    repeats = settings.pick(5, 1)
    seconds = {name: statistics.median(s) for name, s in collect(repeats, ways).items()}
    yield Row(AREA, f"{work}, no fsync", "s", seconds, Promise("within", 1.25, COPY), samples=repeats)
    growth = {OURS: statistics.median(peaks)}
    yield Row(AREA, f"{work}: peak memory above the import", "B", growth, Promise("under", PEAK), samples=repeats)


def _produce(settings: Settings, gib: int) -> Row:
    path = settings.folder / "produced.zcr"
    told: dict[str, Any] = call_alone("tools.bench.exchange:produce", path=str(path), mib=gib << 10)
    path.unlink()
    os.sync()
    work = f"save a record of {gib} GiB made of generated chunks of 1 MiB: peak memory above the import"
    note = f"{told['seconds']:.1f} s"
    return Row(AREA, work, "B", {OURS: told["growth"]}, Promise("under", PEAK), note=note)


# -- in a process of its own -----------------------------------------------------------------------------------------


def convert(source: str, dest: str) -> dict[str, float]:
    """Convert a file; return the seconds, and by how much the peak of resident memory rose above the import."""
    import zcrecord.formats
    import zcrecord.formats.safetensors

    before = peak_rss() or 0
    start = time.perf_counter()
    zcrecord.formats.convert(source, dest, durable=False, force=True)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "growth": float((peak_rss() or 0) - before)}


def produce(path: str, mib: int, *, keep: bool = False) -> dict[str, float]:
    """Save 16 tensors that are made chunk by chunk; `keep` holds on to all chunks, which has to be noticed."""
    import zcrecord

    kept = []
    values = np.random.default_rng(0)

    def chunks(nbytes: int) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
        for _ in range(nbytes // PIECE):
            piece = values.random(PIECE // 4, np.float32)
            if keep:
                kept.append(piece)
            yield piece

    each = mib * MIB // 16
    record = {f"w{i}": zcrecord.LazyTensor("float32", (each // 4,), lambda: chunks(each)) for i in range(16)}
    before = peak_rss() or 0
    start = time.perf_counter()
    zcrecord.save_record(record, path, durable=False)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "growth": float((peak_rss() or 0) - before)}
