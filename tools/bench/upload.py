"""Saves to a bucket: an archive to its URL, beside a file of safetensors that is written to the disk and uploaded.

The server is moto's, on this machine, and takes most of the time: seconds say little, memory and disk do. Each way runs
in a process of its own, whose memory is the peak above what it held before.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness import OURS, Promise, Row, Settings, collect
from tools.measure import MIB, begin_peak, peak_rss
from tools.moto_server import serving_moto
from tools.worker import call_alone

AREA = "upload"
PEER = "safetensors, then fs.put"
EACH = 8 * MIB  # bytes of a tensor


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of one record."""
    count = settings.pick(32, 6)
    with serving_moto("bench") as options:
        ways = {
            name: partial(call_alone, f"tools.bench.upload:{way}", options=options, count=count)
            for name, way in ((OURS, "save_archive"), (PEER, "save_then_put"))
        }
        found: Any = collect(settings.pick(3, 1), ways)
    work = f"{count * EACH // MIB} MiB to S3 (moto)"
    for what, unit, promise in (
        ("seconds", "s", Promise("within", 1.1, PEER)),
        ("memory", "B", Promise("under", 192 * MIB)),
        ("disk", "B", Promise("under", 1)),
    ):
        values = {name: statistics.median(one[what] for one in told) for name, told in found.items()}
        yield Row(AREA, f"{work}: {what}", unit, values, promise, samples=len(found[OURS]))


def _record(count: int) -> dict[str, Any]:
    return {f"w{i}": np.random.default_rng(i).integers(0, 255, EACH, np.uint8) for i in range(count)}


def save_archive(options: dict[str, Any], count: int) -> dict[str, float]:
    """Save a record to a URL, twice; the second time counts."""
    import zcrecord

    record = _record(count)
    zcrecord.save_record({"w": record["w0"]}, "s3://bench/m.zcr", storage_options=options)  # imports and connects
    before, start = begin_peak(), time.perf_counter()
    zcrecord.save_record(record, "s3://bench/m.zcr", storage_options=options)
    return {"seconds": time.perf_counter() - start, "memory": (peak_rss() or 0) - before, "disk": 0}


def save_then_put(options: dict[str, Any], count: int) -> dict[str, float]:
    """Save a record as safetensors on the disk, and upload the file."""
    import fsspec
    from safetensors.numpy import save_file

    record = _record(count)
    fs = fsspec.filesystem("s3", **options)
    fs.pipe_file("bench/m", record["w0"].tobytes())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        before, start = begin_peak(), time.perf_counter()
        save_file(record, path)
        fs.put_file(str(path), "bench/m.safetensors")
        seconds, disk = time.perf_counter() - start, os.path.getsize(path)
    return {"seconds": seconds, "memory": (peak_rss() or 0) - before, "disk": disk}
