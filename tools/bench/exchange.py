"""1.6 GB from safetensors and back, against `cp`; and a record of 8 GiB that is made while it is written."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.convert import copy_seconds, settle
from tools.bench.harness import OURS, Promise, Row, Settings, medians, require_disk
from tools.bench.large import make_buffers
from tools.bench.peers import PEERS, SAFETENSORS
from tools.measure import MIB, timed
from tools.worker import call_alone

AREA = "exchange"
COPY = "cp"
LITTLE = Promise("under", 40 * MIB)
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
        path.unlink()
    cost = call_alone("tools.bench.exchange:produce", path=str(settings.folder / "produced.zcr"), mib=gib << 10)
    work = f"save a record of {gib} GiB made of generated chunks of 1 MiB: peak memory above the import"
    yield Row(AREA, work, "B", {OURS: cost["peak"]}, LITTLE, note=f"{cost['seconds']:.1f} s")


def _convert(settings: Settings, source: Path, dest: Path, copy: Path, work: str) -> Iterator[Row]:
    peaks: list[float] = []

    def ours() -> float:
        settle(dest)
        cost = call_alone("tools.bench.exchange:convert", source=str(source), dest=str(dest))
        peaks.append(cost["peak"])
        return float(cost["seconds"])

    ways: dict[str, Callable[[], float]] = {OURS: ours, COPY: lambda: copy_seconds(source, copy, sync=False)}
    repeats = settings.pick(5, 1)
    seconds = medians(repeats, ways, uncounted=1)
    yield Row(AREA, f"{work}, no fsync", "s", seconds, Promise("within", 1.25, COPY), samples=repeats)
    growth = {OURS: statistics.median(peaks)}
    yield Row(AREA, f"{work}: peak memory above the import", "B", growth, LITTLE, samples=repeats)


# -- in a process of its own -----------------------------------------------------------------------------------------


def convert(source: str, dest: str) -> dict[str, float]:
    """Convert a file; return the seconds, and by how much the peak of resident memory rose."""
    import zcrecord.formats
    import zcrecord.formats.safetensors

    return timed(lambda: zcrecord.formats.convert(source, dest, durable=False, force=True))


def produce(path: str, mib: int) -> dict[str, float]:
    """Save 16 tensors that are made chunk by chunk; return likewise."""
    import zcrecord

    values = np.random.default_rng(0)
    each = mib * MIB // 16

    def chunks() -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
        for _ in range(each // PIECE):
            yield values.random(PIECE // 4, np.float32)

    record = {f"w{i}": zcrecord.LazyTensor("float32", (each // 4,), chunks) for i in range(16)}
    return timed(lambda: zcrecord.save_record(record, path, durable=False))
