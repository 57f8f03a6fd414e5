"""Saves to a bucket: an archive to its URL, beside a file of safetensors that is written to the disk and uploaded.

The server is moto's, on this machine, and takes most of the time: seconds say little, memory and disk do. Each way runs
in a process of its own, whose memory is the peak above what it held before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness import OURS, Promise, Row, Settings, collect, figures_of
from tools.measure import MIB, timed
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
        samples = collect(settings.pick(3, 1), ways)
    work = f"{count * EACH // MIB} MiB to S3 (moto)"
    for what, figure, unit, promise in (
        ("seconds", "seconds", "s", Promise("within", 1.1, PEER)),
        ("memory", "peak", "B", Promise("under", 192 * MIB)),
        ("disk", "disk", "B", Promise("under", 1)),
    ):
        values = {name: figures_of(found, figure) for name, found in samples.items()}
        yield Row(AREA, f"{work}: {what}", unit, values, promise, samples=len(samples[OURS]))


def _record(count: int) -> dict[str, Any]:
    return {f"w{i}": np.random.default_rng(i).integers(0, 255, EACH, np.uint8) for i in range(count)}


def save_archive(options: dict[str, Any], count: int) -> dict[str, float]:
    """Save a record to a URL, twice; the second time counts."""
    import zcrecord

    record = _record(count)
    zcrecord.save_record({"w": record["w0"]}, "s3://bench/m.zcr", storage_options=options)  # imports and connects
    return timed(lambda: zcrecord.save_record(record, "s3://bench/m.zcr", storage_options=options)) | {"disk": 0}


def save_then_put(options: dict[str, Any], count: int) -> dict[str, float]:
    import fsspec
    from safetensors.numpy import save_file

    record = _record(count)
    fs = fsspec.filesystem("s3", **options)
    fs.pipe_file("bench/m", record["w0"].tobytes())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"

        def save_and_put() -> None:
            save_file(record, path)
            fs.put_file(str(path), "bench/m.safetensors")

        return timed(save_and_put) | {"disk": os.path.getsize(path)}
