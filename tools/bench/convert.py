"""onnx2zc beside `cp`, `cat`, and what people do today: one large model, pipes, typed values, very many small tensors.

Every contestant works in a process of its own that has imported everything beforehand; the pipes are the exception:
there whole commands are timed, the start of Python included.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from tools.bench.harness import OURS, Promise, Row, Settings, collect, require_disk
from tools.measure import MIB
from tools.models.gpt import write_gpt
from tools.models.small import write_small
from tools.models.typed import write_typed
from tools.models.wire import Nodes, Weight, write_model
from tools.worker import ROOT, call_alone

AREA = "convert"
SIZE_MIB = 1536  # 1.6 GB
LARGEST_MIB = 1880  # 1.97 GB: protobuf ends a model at 2 GiB
TYPED = 500_000_000
RATE = 300e6  # bytes of typed values a second
COPY, COPY_SYNC, CAT = "cp", "cp and fsync", "cat | cat"
LOAD, IR, SAFE, ARRAYS = "onnx.load", "onnx-ir", "onnx.load, safetensors", "onnx.load, to_array"
LITTLE = Promise("under", 40 * MIB)
Told = dict[str, Any]


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of converting models of every kind."""
    yield from _large(settings)
    yield from _largest(settings)
    yield from _typed(settings)
    yield from _small(settings)


def _written(settings: Settings, name: str, write: Callable[[IO[bytes]], object]) -> Path:
    path = settings.folder / name
    with path.open("wb") as sink:
        write(sink)
    return path


class _Alone:
    """Contestants in processes of their own, and the peaks of their memory above what they had imported."""

    def __init__(self, source: Path, dest: Path) -> None:
        self.peaks: dict[str, list[float]] = {}
        self._source, self._dest = source, dest

    def __call__(self, name: str, function: str, **arguments: Any) -> float:
        settle(self._dest)
        told: Told = call_alone(f"tools.serving:{function}", source=str(self._source), **arguments)
        self.peaks.setdefault(name, []).append(told["peak_rss"] - told["imported_rss"])
        return float(told["seconds"])

    def convert(self, **options: Any) -> float:
        """Convert the model."""
        return self(OURS, "convert", dest=str(self._dest), **options)

    def memory(self) -> dict[str, float]:
        """Return the median peaks."""
        return {name: statistics.median(peaks) for name, peaks in self.peaks.items()}


def _medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def _large(settings: Settings) -> Iterator[Row]:
    mib, repeats = settings.pick(SIZE_MIB, 8), settings.pick(5, 1)
    require_disk(settings.folder, 4 * mib * MIB)
    source = _written(settings, "gpt.onnx", lambda sink: write_gpt(sink, mib))
    copy, archive = settings.folder / "copy", settings.folder / "gpt.zcr"
    alone = _Alone(source, archive)
    ways = {
        OURS: partial(alone.convert, durable=False),
        COPY: partial(copy_seconds, source, copy, sync=False),
    }
    synced: dict[str, Callable[[], float]] = {
        OURS: alone.convert,
        COPY_SYNC: partial(copy_seconds, source, copy, sync=True),
    }
    others = {
        LOAD: partial(alone, LOAD, "onnx_load"),
        IR: partial(alone, IR, "onnx_ir_load"),
        SAFE: partial(alone, SAFE, "onnx_to_safetensors", dest=str(copy)),
    }
    collect(1, ways)
    seconds = _medians(collect(repeats, ways)) | _medians(collect(settings.pick(3, 1), others))
    durable = _medians(collect(repeats, synced))
    piped, peak = _piped(source, repeats)
    for path in (source, copy, archive):
        path.unlink(missing_ok=True)
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
    ours = f"'{sys.executable}' -c '{code}' - -"
    peaks: list[float] = []

    def timed(command: str) -> float:
        start = time.perf_counter()
        done = subprocess.run(
            ["sh", "-c", f"cat {source} | {command} | cat > /dev/null"], cwd=ROOT, stderr=subprocess.PIPE, check=True
        )
        seconds = time.perf_counter() - start
        if done.stderr:
            peaks.append(json.loads(done.stderr)["peak_rss"])
        return seconds

    imported = call_alone("tools.serving:imported_rss")
    ways = {OURS: partial(timed, f"{ours} --json"), CAT: partial(timed, "cat")}
    collect(1, ways)
    return _medians(collect(repeats, ways)), statistics.median(peaks) - imported


def _largest(settings: Settings) -> Iterator[Row]:
    mib = settings.pick(LARGEST_MIB, 8)
    require_disk(settings.folder, 3 * mib * MIB)
    weight = Weight("w", (mib << 10, 256), 1.0)
    write = partial(write_model, name="largest", graph=Nodes(), weights=[weight], inputs=(), outputs=())
    source, archive = _written(settings, "largest.onnx", write), settings.folder / "largest.zcr"
    alone = _Alone(source, archive)
    alone.convert(durable=False)
    for path in (source, archive):
        path.unlink(missing_ok=True)
    work = f"onnx2zc on one tensor of {mib * MIB / 1e9:.1f} GB: peak memory above the import"
    yield Row(AREA, work, "B", alone.memory(), LITTLE)


def _typed(settings: Settings) -> Iterator[Row]:
    nbytes, repeats = settings.pick(TYPED, 1_000_000), settings.pick(3, 1)
    require_disk(settings.folder, 4 * nbytes)
    fields: tuple[Literal["float_data", "int64_data"], ...] = ("float_data", "int64_data")
    for field in fields:
        source, archive = settings.folder / f"{field}.onnx", settings.folder / f"{field}.zcr"
        with source.open("wb") as sink:
            write_typed(sink, field, nbytes)
        alone = _Alone(source, archive)
        ways = {OURS: partial(alone.convert, durable=False), ARRAYS: partial(alone, ARRAYS, "onnx_to_arrays")}
        seconds = _medians(collect(repeats, ways))
        for path in (source, archive):
            path.unlink(missing_ok=True)
        work = f"onnx2zc on {nbytes / 1e6:.0f} MB of {field}, no fsync"
        yield Row(AREA, work, "s", seconds, Promise("under", nbytes / RATE), note="300 MB/s", samples=repeats)
        yield Row(AREA, f"{work}: peak memory above the import", "B", alone.memory(), LITTLE, samples=repeats)


def _small(settings: Settings) -> Iterator[Row]:
    memory: dict[int, float] = {}
    counts = [settings.pick(n, n // 100) for n in (1_000, 10_000, 100_000)]
    for count in counts:
        row, memory[count] = _many(settings, count, Promise("within", 1.5, ARRAYS) if count == counts[1] else None)
        yield row
    each = (memory[counts[-1]] - memory[counts[0]]) / (counts[-1] - counts[0])
    yield Row(AREA, "onnx2zc: memory for each further small initializer with two nodes", "B", {OURS: each})
    yield _many(settings, counts[1], Promise("within", 1.5, ARRAYS), nested=True)[0]


def _many(settings: Settings, count: int, promise: Promise | None, *, nested: bool = False) -> tuple[Row, float]:
    """Return the row of a model with so many initializers, and the memory that ours took."""
    repeats = settings.pick(9 if count < 100_000 else 3, 1)
    source = _written(settings, "small.onnx", partial(write_small, initializers=count, nested=nested))
    archive = settings.folder / "small.zcr"
    alone = _Alone(source, archive)
    ways = {OURS: partial(alone.convert, durable=False), ARRAYS: partial(alone, ARRAYS, "onnx_to_arrays")}
    seconds = _medians(collect(repeats, ways))
    for path in (source, archive):
        path.unlink(missing_ok=True)
    named = ", each in a module of its own," if nested else ""
    work = f"onnx2zc on {count:,} small initializers{named} and {2 * count:,} nodes, no fsync"
    return Row(AREA, work, "s", seconds, promise, samples=repeats), alone.memory()[OURS]


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
