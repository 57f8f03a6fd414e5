"""onnx2zc beside `cp`, `cat`, and what people do today: one large model, pipes, very many small tensors.

Every contestant works in a process of its own that has imported everything beforehand; the pipes are the exception:
there whole commands are timed, the start of Python included.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from tools.bench.harness import OURS, Promise, Row, Settings, medians, require_disk, seconds_of
from tools.measure import MIB
from tools.models.gpt import write_gpt
from tools.models.small import write_small
from tools.worker import ROOT, call_alone

AREA = "convert"
SIZE_MIB = 1536  # 1.6 GB
COPY, COPY_SYNC, CAT = "cp", "cp and fsync", "cat | cat"
LOAD, IR, SAFE, ARRAYS = "onnx.load", "onnx-ir", "onnx.load, safetensors", "onnx.load, to_array"
LITTLE = Promise("under", 40 * MIB)


def run(settings: Settings) -> Iterator[Row]:
    yield from _large(settings)
    yield from _small(settings)


class _Alone:
    """Contestants in processes of their own on one model, and the peaks of their memory above what they imported."""

    def __init__(self, settings: Settings, name: str, write: Callable[[IO[bytes]], object]) -> None:
        self.source, self.dest = settings.folder / f"{name}.onnx", settings.folder / f"{name}.zcr"
        with self.source.open("wb") as sink:
            write(sink)
        self.peaks: dict[str, list[float]] = {}

    def __call__(self, name: str, function: str, **arguments: Any) -> float:
        settle(self.dest)
        cost: dict[str, Any] = call_alone(f"tools.serving:{function}", source=str(self.source), **arguments)
        self.peaks.setdefault(name, []).append(cost["peak_rss"] - cost["imported_rss"])
        return float(cost["seconds"])

    def convert(self, **options: Any) -> float:
        return self(OURS, "convert", dest=str(self.dest), **options)

    def beside_arrays(self, repeats: int) -> dict[str, float]:
        """Return the seconds of a conversion, and those of making an array of each initializer."""
        ways = {OURS: partial(self.convert, durable=False), ARRAYS: partial(self, ARRAYS, "onnx_to_arrays")}
        return medians(repeats, ways)

    def memory(self) -> dict[str, float]:
        return {name: statistics.median(peaks) for name, peaks in self.peaks.items()}

    def remove(self) -> None:
        """Remove the files, for which there may be no room beside the next ones."""
        for path in (self.source, self.dest):
            path.unlink(missing_ok=True)


def _large(settings: Settings) -> Iterator[Row]:
    mib, repeats = settings.pick(SIZE_MIB, 8), settings.pick(5, 1)
    require_disk(settings.folder, 4 * mib * MIB)
    alone = _Alone(settings, "gpt", lambda sink: write_gpt(sink, mib))
    copy = settings.folder / "copy"
    ways = {
        OURS: partial(alone.convert, durable=False),
        COPY: partial(copy_seconds, alone.source, copy, sync=False),
    }
    synced: dict[str, Callable[[], float]] = {
        OURS: alone.convert,
        COPY_SYNC: partial(copy_seconds, alone.source, copy, sync=True),
    }
    others = {
        LOAD: partial(alone, LOAD, "onnx_load"),
        IR: partial(alone, IR, "onnx_ir_load"),
        SAFE: partial(alone, SAFE, "onnx_to_safetensors", dest=str(copy)),
    }
    seconds = medians(repeats, ways, uncounted=1) | medians(settings.pick(3, 1), others)
    durable = medians(repeats, synced)
    piped, peak = _piped(alone.source, repeats)
    alone.remove()
    copy.unlink()
    work = f"onnx2zc on a model of {mib * MIB / 1e9:.1f} GB"
    within = Promise("within", 1.15, COPY)
    yield Row(AREA, f"{work}: peak memory above the import", "B", alone.memory(), LITTLE, samples=repeats)
    note = "onnx.load and onnx-ir write nothing"
    yield Row(AREA, f"{work}, no fsync", "s", seconds, within, note=note, samples=repeats)
    yield Row(AREA, f"{work}, fsync", "s", durable, Promise("within", 1.15, COPY_SYNC), samples=repeats)
    yield Row(AREA, f"{work}, from a pipe to a pipe", "s", piped, Promise("within", 1.3, CAT), samples=repeats)
    yield Row(AREA, f"{work}, from a pipe to a pipe: peak memory above the import", "B", {OURS: peak}, LITTLE)


def _piped(source: Path, repeats: int) -> tuple[dict[str, float], float]:
    """Return the seconds of a command between two others, and the peak of ours above its import."""
    code = "import sys; from zcrecord.cli.dispatch import onnx2zc_main; sys.exit(onnx2zc_main())"
    peaks: list[float] = []

    def timed(command: str) -> float:
        shell = ["sh", "-c", f"cat {source} | {command} | cat > /dev/null"]
        done: list[subprocess.CompletedProcess[bytes]] = []
        seconds = seconds_of(lambda: done.append(subprocess.run(shell, cwd=ROOT, stderr=subprocess.PIPE, check=True)))
        if report := done[0].stderr:
            peaks.append(json.loads(report)["peak_rss"])
        return seconds

    imported = call_alone("tools.serving:imported_rss")
    ways = {OURS: partial(timed, f"'{sys.executable}' -c '{code}' - - --json"), CAT: partial(timed, "cat")}
    return medians(repeats, ways, uncounted=1), statistics.median(peaks) - imported


def _small(settings: Settings) -> Iterator[Row]:
    as_fast = Promise("within", 1.5, ARRAYS)
    for full, nested, promise in (
        (1_000, False, None),
        (10_000, False, as_fast),
        (100_000, False, None),
        (10_000, True, as_fast),
    ):
        count, repeats = settings.pick(full, full // 100), settings.pick(9 if full < 100_000 else 3, 1)
        alone = _Alone(settings, "small", partial(write_small, initializers=count, nested=nested))
        named = ", each in a module of its own," if nested else ""
        work = f"onnx2zc on {count:,} small initializers{named} and {2 * count:,} nodes, no fsync"
        yield Row(AREA, work, "s", alone.beside_arrays(repeats), promise, samples=repeats)


def settle(dest: Path) -> None:
    """Remove what the last contestant wrote, and wait until nothing is left to be written back."""
    dest.unlink(missing_ok=True)
    os.sync()


def copy_seconds(source: Path, dest: Path, *, sync: bool) -> float:
    """Return how long `cp` takes, with an fsync if asked for."""

    def copy() -> None:
        subprocess.run(["cp", source, dest], check=True)
        if sync:
            with dest.open("rb+") as file:
                os.fsync(file.fileno())

    settle(dest)
    return seconds_of(copy)
