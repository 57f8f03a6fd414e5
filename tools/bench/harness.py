"""Interleaved repetitions, medians, rows with their promises, and the description of the machine, which runs Linux."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tools.measure import MIB, free_bytes

OURS = "zcrecord"
BURST = 5
Result = TypeVar("Result")
PACKAGES = (
    *("numpy", "flatbuffers", "ml_dtypes", "xxhash", "safetensors", "torch", "gguf", "onnx", "onnx-ir", "onnxruntime"),
    *("onnxscript", "transformers"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run: a folder to write to, and whether speed goes before precision."""

    folder: Path
    quick: bool = False

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full


def on_path(*tools: str) -> bool:
    return all(map(shutil.which, tools))


@dataclass(frozen=True, slots=True)
class Promise:
    """A row's promise: `faster` than a peer by a factor, `within` a factor of a peer, or `under` a limit."""

    kind: str
    limit: float
    peer: str | None = None

    def reached(self, values: Mapping[str, float]) -> bool:
        ours = values[OURS]
        if self.peer is None:
            return ours < self.limit
        peer = values[self.peer]
        return peer >= self.limit * ours if self.kind == "faster" else ours <= self.limit * peer


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: medians by contestant, ours under OURS, all in `unit`: "s", "B", or "" for a count."""

    area: str
    work: str
    unit: str
    values: dict[str, float]
    promise: Promise | None = None
    note: str = ""
    samples: int = 1
    extra: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the row for the results file, with what follows from it: whether the promise was kept."""
        kept = None if self.promise is None else self.promise.reached(self.values)
        return {**asdict(self), "reached": kept}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Row:
        given = {k: v for k, v in data.items() if k != "reached"}
        promise = given.pop("promise")
        return Row(**given, promise=None if promise is None else Promise(**promise))


def collect(repeats: int, ways: Mapping[str, Callable[[], Result]]) -> dict[str, list[Result]]:
    """Return each way's results of each repetition; A B A B, so that a slow minute hits all alike."""
    samples: dict[str, list[Result]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            samples[name].append(way())
    return samples


def medians(repeats: int, ways: Mapping[str, Callable[[], float]], *, uncounted: int = 0) -> dict[str, float]:
    """Return the median of each way's figures, the first few of which do not count."""
    collect(uncounted, ways)
    return {name: statistics.median(figures) for name, figures in collect(repeats, ways).items()}


def figures_of(samples: Sequence[Mapping[str, float]], figure: str) -> float:
    """Return the median of one of several figures."""
    return float(statistics.median(sample[figure] for sample in samples))


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a function takes; what it returns is freed after the clock is read."""
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def median_seconds(repeats: int, ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each way over interleaved bursts of calls, after one call that is not counted.

    A burst is a few calls in a row, each timed by itself: a call of less than a millisecond straight after another
    contestant's (or the garbage collector's) finds the processor's caches full of what was theirs.
    """
    for way in ways.values():
        way()
    return medians(repeats, {name: partial(_burst, way) for name, way in ways.items()})


def _burst(way: Callable[[], object]) -> float:
    gc.collect()  # what the last contestant left is not this one's to sweep up
    return statistics.median(seconds_of(way) for _ in range(BURST))


def require_disk(folder: Path, nbytes: int) -> None:
    """Raise OSError, saying what to do, unless `folder` has room for `nbytes`."""
    if (free := free_bytes(folder)) < nbytes:
        needs, has = nbytes // MIB, free // MIB
        raise OSError(f"{folder} has {has:,} MiB free, this needs {needs:,} MiB; set TMPDIR to a roomier folder")


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    import zcrecord

    found = {"zcrecord": zcrecord.__version__, "python": platform.python_version()}
    return found | {name: version_of(name) for name in PACKAGES}


def machine(folder: Path) -> dict[str, Any]:
    """Describe the machine, on which the figures depend, and today's date (UTC)."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu[1].strip() if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "file_system": max((len(at), kind) for at, kind in mounts if folder.resolve().is_relative_to(at))[1],
    }
