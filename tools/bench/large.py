"""1.6 GB in 24 tensors: saving it against plain writes of the same buffers, and what loading it takes of memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness import OURS, Promise, Row, Settings, collect, require_disk
from tools.measure import MIB, memory
from tools.worker import Worker, call_alone

__all__ = ["WAYS_TO_LOAD", "load_growth", "run", "save_seconds"]

AREA = "large"
COUNT = 24
MIB_EACH = 64
PLAIN = "os.write"
PEER = "safetensors"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of 24 large tensors."""
    mib_each = settings.pick(MIB_EACH, 1)
    total = COUNT * mib_each * MIB
    require_disk(settings.folder, 4 * total)
    work = f"{total / 1e9:.1f} GB in {COUNT} tensors"
    repeats = settings.pick(5, 2)
    with Worker() as worker:  # the buffers are its memory, and go with it

        def save(way: str) -> float:
            return float(
                worker.call("tools.bench.large:save_seconds", way=way, folder=str(settings.folder), mib=mib_each)
            )

        for way in (OURS, PLAIN):
            save(way)  # both then replace a file of that size
        samples = collect(repeats, {OURS: lambda: save(OURS), PLAIN: lambda: save(PLAIN)})
        save(PEER)
    seconds = {name: statistics.median(s) for name, s in samples.items()}
    promise = Promise("within", 1.1, PLAIN)
    yield Row(AREA, f"save {work}, digests, fsync and rename", "s", seconds, promise, samples=repeats)
    yield _load(settings, f"load {work}")
    for name in ("large.zcr", "large.raw", "large.safetensors"):
        (settings.folder / name).unlink(missing_ok=True)


def _load(settings: Settings, work: str) -> Row:
    names = {OURS: "large.zcr", PEER: "large.safetensors"}
    target = "tools.bench.large:load_growth"
    told = {way: call_alone(target, way=way, path=str(settings.folder / name)) for way, name in names.items()}
    inside, tensors = told[OURS]["inside"], told[OURS]["tensors"]
    touched = told[OURS]["file_backed"] // 1024
    note = f"{inside} of {tensors} views lie inside the mapping; {touched} KiB of the file touched"
    growth = {way: float(t["private"]) for way, t in told.items()}
    return Row(AREA, f"{work}: private memory", "B", growth, Promise("under", 4 * MIB), note=note)


# -- in the worker ---------------------------------------------------------------------------------------------------

_buffers: dict[str, np.ndarray[Any, Any]] = {}


def save_seconds(way: str, folder: str, mib: int) -> float:
    """Save the buffers one way, replacing what is there; return the seconds."""
    import zcrecord

    if not _buffers:
        values = np.random.default_rng(0)
        shape = (mib, MIB // 4)
        _buffers.update({f"blocks.{i}.weight": values.random(shape, np.float32) for i in range(COUNT)})
    start = time.perf_counter()
    if way == OURS:
        zcrecord.save_record(_buffers, Path(folder, "large.zcr"))
    elif way == PLAIN:
        _plain_save(Path(folder, "large.raw"))
    else:
        from safetensors.numpy import save_file

        save_file(_buffers, Path(folder, "large.safetensors"))
    return time.perf_counter() - start


def _plain_save(path: Path) -> None:
    """Write the buffers with nothing but the kernel below; scratch file, fsyncs and rename as in `save_record`."""
    scratch = path.with_suffix(".scratch")
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for array in _buffers.values():
            view = array.data.cast("B")
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(scratch, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_growth(way: str, path: str) -> dict[str, Any]:
    """Load every tensor one way; return the growth of private and file-backed memory, in bytes, and where views lie.

    The way "copy" is ours with each view copied: what the measurement has to notice.
    """
    load = WAYS_TO_LOAD[way]
    _warm_up(Path(path))
    before = memory()
    tensors = load(Path(path))
    after = memory()
    if before is None or after is None or before.private is None or after.private is None:
        raise OSError("private memory cannot be learnt here; /proc/PID/smaps_rollup is Linux's")
    assert after.file_backed is not None
    assert before.file_backed is not None
    mappings = _mappings(path)
    return {
        "private": after.private - before.private,
        "file_backed": after.file_backed - before.file_backed,
        "tensors": len(tensors),
        "inside": sum(
            any(lo <= t.ctypes.data and t.ctypes.data + t.nbytes <= hi for lo, hi in mappings) for t in tensors
        ),
    }


def _load_ours(path: Path) -> list[Any]:
    import zcrecord

    return list(zcrecord.load_record(path).values())


def _load_copies(path: Path) -> list[Any]:
    return [view.copy() for view in _load_ours(path)]


def _load_safetensors(path: Path) -> list[Any]:
    from safetensors.numpy import load_file

    return list(load_file(path).values())


WAYS_TO_LOAD = {OURS: _load_ours, "copy": _load_copies, PEER: _load_safetensors}


def _warm_up(path: Path) -> None:
    """Save and load something small by all ways, so that imports and first calls are in no figure."""
    import tempfile

    from safetensors.numpy import save_file

    import zcrecord

    small = {"a": np.zeros(16, np.float32)}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        archive, peer = Path(folder, "small.zcr"), Path(folder, "small.safetensors")
        zcrecord.save_record(small, archive, durable=False)
        save_file(small, peer)
        _load_copies(archive)
        _load_safetensors(peer)


def _mappings(path: str) -> list[tuple[int, int]]:
    """Return the address ranges at which the file is mapped into this process."""
    wanted = str(Path(path).resolve())
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5] == wanted:
            lo, hi = (int(word, 16) for word in words[0].split("-"))
            found.append((lo, hi))
    return found
