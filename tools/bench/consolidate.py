"""One file of a checkpoint that two ranks saved, beside HuggingFace's consolidation of what they saved for it.

Neither waits for the disk. Memory is the peak of private memory above what the process has before, in a run that is not
timed: pages of the files read do not count, as the system may take them back at any time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.distributed import model_size
from tools.bench.harness import OURS, Promise, Row, Settings, medians, require_disk, seconds_of
from tools.measure import MIB, private_peak
from tools.ranks import HUGGING_FACE, Ranks
from tools.worker import Worker

AREA = "consolidate"


def run(settings: Settings) -> Iterator[Row]:
    require_disk(settings.folder, settings.pick(6000, 100) * MIB)
    checkpoints = {}
    with Ranks() as ranks:
        ranks.join(2)
        for sharded in ("rows", "columns"):
            ranks.call("build", sharded=sharded, filled=True, **model_size(settings))
            folders = {way: settings.folder / f"{way} {sharded}" for way in (OURS, HUGGING_FACE)}
            for way, folder in folders.items():
                ranks.call("save", way=way, folder=str(folder), durable=False)
            checkpoints[sharded] = folders
    for sharded, folders in checkpoints.items():
        nbytes = sum(path.stat().st_size for path in folders[OURS].iterdir())
        work = f"a checkpoint by 2 ranks, {nbytes / 1e9:.1f} GB, split by {sharded}: one file of it"
        yield from _rows(settings, folders, work)


def _rows(settings: Settings, folders: dict[str, Path], work: str) -> Iterator[Row]:
    peaks: dict[str, float] = {}
    repeats = settings.pick(5, 1)
    with Worker() as ours, Worker() as theirs:
        calls = {}
        for way, worker in ((OURS, ours), (HUGGING_FACE, theirs)):
            given = {"way": way, "folder": str(folders[way]), "dest": str(settings.folder / "consolidated")}
            calls[way] = partial(worker.call, "tools.bench.consolidate:consolidate", **given)
            worker.call("tools.bench.consolidate:prepare", way=way)
            with private_peak(worker.pid) as peak:
                calls[way]()
            peaks[way] = float(peak())
        seconds = medians(repeats, calls)
    yield Row(AREA, f"{work}, no fsync", "s", seconds, Promise("within", 1, HUGGING_FACE), samples=repeats)
    yield Row(AREA, f"{work}, private memory", "B", peaks, Promise("under", 32 * MIB))


def prepare(way: str) -> None:
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

        return seconds_of(lambda: ours(folder, os.path.join(dest, "model.zcr"), durable=False))
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    into_one = dict.fromkeys(_names(Path(folder)), 1)
    return seconds_of(lambda: consolidate_safetensors_files(folder, dest, into_one))


def _names(folder: Path) -> list[str]:
    """Return the names of the tensors in the headers of safetensors files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [name for name in found if name != "__metadata__"]
