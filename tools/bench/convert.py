"""onnx2zc on a 1.6 GB model in one file, against `cp` of it and against `onnx.load`, which is how others begin."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.bench.harness import OURS, Promise, Row, Settings, collect, require_disk
from tools.measure import MIB
from tools.models.gpt import write_gpt
from tools.worker import call_alone

__all__ = ["copy_seconds", "run", "settle"]

AREA = "convert"
SIZE_MIB = 1536  # 1.6 GB
COPY, COPY_SYNC = "cp", "cp and fsync"
PEER = "onnx.load"
PEAK_LIMIT = 96 * MIB


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of converting a large model."""
    mib = settings.pick(SIZE_MIB, 8)
    require_disk(settings.folder, 4 * mib * MIB)
    source, copy, archive = (settings.folder / name for name in ("gpt.onnx", "copy.onnx", "gpt.zcr"))
    with source.open("wb") as sink:
        write_gpt(sink, mib)
    peaks: dict[str, list[float]] = {OURS: [], PEER: []}

    def alone(name: str, function: str, **arguments: Any) -> float:
        settle(archive)
        told: dict[str, Any] = call_alone(f"tools.serving:{function}", source=str(source), **arguments)
        peaks[name].append(told["peak_rss"])
        return float(told["seconds"])

    repeats = settings.pick(5, 1)
    ways = {
        OURS: lambda: alone(OURS, "convert", dest=str(archive), durable=False),
        COPY: lambda: copy_seconds(source, copy, sync=False),
        PEER: lambda: alone(PEER, "onnx_load"),
    }
    durable_ways = {
        OURS: lambda: alone(OURS, "convert", dest=str(archive)),
        COPY_SYNC: lambda: copy_seconds(source, copy, sync=True),
    }
    collect(1, {OURS: ways[OURS], COPY: ways[COPY]})
    seconds, durable = (
        {name: statistics.median(s) for name, s in collect(repeats, some).items()} for some in (ways, durable_ways)
    )
    for path in (source, copy, archive):
        path.unlink(missing_ok=True)
    work = f"onnx2zc on a model of {mib * MIB / 1e9:.1f} GB"
    memory = {name: statistics.median(p) for name, p in peaks.items()}
    limit, within = Promise("under", PEAK_LIMIT), Promise("within", 1.5, COPY)
    yield Row(AREA, f"{work}: peak memory", "B", memory, limit, note="resident, Python included", samples=repeats)
    yield Row(AREA, f"{work}, no fsync", "s", seconds, within, note="onnx.load writes nothing", samples=repeats)
    yield Row(AREA, f"{work}, fsync", "s", durable, Promise("within", 1.5, COPY_SYNC), samples=repeats)


def settle(dest: Path) -> None:
    """Remove what the last contestant wrote, and wait until nothing is left to be written back."""
    dest.unlink(missing_ok=True)
    if hasattr(os, "sync"):
        os.sync()


def copy_seconds(source: Path, dest: Path, *, sync: bool) -> float:
    """Return how long `cp` takes, with an fsync if asked for."""
    settle(dest)
    command = shutil.which("cp")
    start = time.perf_counter()
    if command:
        subprocess.run([command, source, dest], check=True)
    else:
        shutil.copyfile(source, dest)
    if sync:
        with dest.open("rb+") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start
