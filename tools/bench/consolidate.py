"""One file of a checkpoint that two ranks saved, beside HuggingFace's consolidation of what they saved for it.

Neither waits for the disk. Memory is the peak of private memory above what the process has before, in a run that is not
timed: pages of the files read do not count, as the system may take them back at any time.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.harness import OURS, Promise, Row, Settings, collect, require_disk
from tools.measure import MIB, private_peak
from tools.ranks import HUGGING_FACE, Ranks, Sharded
from tools.worker import Worker

AREA = "consolidate"
MODEL = {"layers": 32, "width": 384, "vocabulary": 32000}
SMALL = {"layers": 2, "width": 64, "vocabulary": 500}
SHARDED: tuple[Sharded, ...] = ("rows", "columns")
DEST = "consolidated"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of a model that is split by rows, then by columns."""
    require_disk(settings.folder, settings.pick(6000, 100) * MIB)
    with Ranks() as ranks:
        ranks.join(2)
        checkpoints = {sharded: _saved(settings, ranks, sharded) for sharded in SHARDED}
    for sharded, folders in checkpoints.items():
        nbytes = sum(path.stat().st_size for path in folders[OURS].iterdir())
        work = f"a checkpoint by 2 ranks, {nbytes / 1e9:.1f} GB, split by {sharded}: one file of it"
        yield from _rows(settings, folders, work)
        for folder in folders.values():
            shutil.rmtree(folder)
    shutil.rmtree(settings.folder / DEST)


def _saved(settings: Settings, ranks: Ranks, sharded: Sharded) -> dict[str, Path]:
    """Have the ranks save a model in each way; return the folders."""
    ranks.call("build", sharded=sharded, filled=True, **(SMALL if settings.quick else MODEL))
    folders = {way: settings.folder / f"{way} {sharded}" for way in (OURS, HUGGING_FACE)}
    for way, folder in folders.items():
        ranks.call("save", way=way, folder=str(folder), durable=False)
    return folders


def _rows(settings: Settings, folders: dict[str, Path], work: str) -> Iterator[Row]:
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    dest = str(settings.folder / DEST)
    repeats = settings.pick(5, 1)
    with Worker() as ours, Worker() as theirs:
        calls = {}
        for way, worker in ((OURS, ours), (HUGGING_FACE, theirs)):
            given = {"way": way, "folder": str(folders[way]), "dest": dest}
            calls[way] = partial(worker.call, "tools.bench.consolidate:consolidate", **given)
            worker.call("tools.bench.consolidate:prepare", way=way)
            with private_peak(worker.pid) as peak:
                calls[way]()
            peaks[way] = float(peak())
        seconds = collect(repeats, calls)
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    yield Row(AREA, f"{work}, no fsync", "s", medians, Promise("within", 1, HUGGING_FACE), samples=repeats)
    yield Row(AREA, f"{work}, private memory", "B", peaks, Promise("under", 32 * MIB))


def prepare(way: str) -> None:
    """Import what a consolidation needs."""
    if way == OURS:
        import zcrecord.distributed
        import zcrecord.formats  # noqa: F401
    else:
        import torch.distributed.checkpoint._consolidate_hf_safetensors  # noqa: F401


def consolidate(way: str, folder: str, dest: str) -> float:
    """Make one file of a checkpoint in a new folder; return the seconds."""
    shutil.rmtree(dest, ignore_errors=True)
    os.mkdir(dest)
    os.sync()
    if way == OURS:
        from zcrecord.distributed import consolidate as ours

        start = time.perf_counter()
        ours(folder, os.path.join(dest, "model.zcr"), durable=False)
        return time.perf_counter() - start
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    into_one = dict.fromkeys(_names(Path(folder)), 1)
    start = time.perf_counter()
    consolidate_safetensors_files(folder, dest, into_one)
    return time.perf_counter() - start


def _names(folder: Path) -> list[str]:
    """Return the names of the tensors in the headers of safetensors files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [name for name in found if name != "__metadata__"]
