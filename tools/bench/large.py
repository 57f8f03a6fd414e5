"""1.6 GB in 24 tensors: saving it against plain writes of the same buffers, and what loading it takes of memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness import BURST, OURS, Promise, Row, Settings, collect, require_disk
from tools.bench.peers import GGUF, NPZ, PEERS, SAFETENSORS, SAFETENSORS_TORCH, TORCH
from tools.measure import MIB, memory
from tools.worker import Worker, call_alone

AREA = "large"
COUNT = 24
MIB_EACH = 64
PLAIN = "os.write"
STATE_DICT = "state dict"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of 24 large tensors."""
    mib_each = settings.pick(MIB_EACH, 1)
    total = COUNT * mib_each * MIB
    require_disk(settings.folder, 8 * total)
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
        seconds = {name: statistics.median(s) for name, s in samples.items()}
        seconds |= {name: save(name) for name in PEERS}  # none of them waits for the disk
    promise = Promise("within", 1.1, PLAIN)
    note = "peers do not fsync"
    yield Row(AREA, f"save {work}, digests, fsync and rename", "s", seconds, promise, note=note, samples=repeats)
    yield from _load(settings, work)
    yield _ready(settings, work)
    for name in ("zcr", "raw", *(peer.suffix for peer in PEERS.values())):
        (settings.folder / f"large.{name}").unlink(missing_ok=True)


def _load(settings: Settings, work: str) -> Iterator[Row]:
    files = _files(settings)
    target = "tools.bench.large:load_growth"
    told = {way: call_alone(target, way=way, path=str(path)) for way, path in files.items()}
    inside, tensors = told[OURS]["inside"], told[OURS]["tensors"]
    touched = told[OURS]["file_backed"] // 1024
    note = f"{inside} of {tensors} views lie inside the mapping; {touched} KiB of the file touched"
    growth = {way: float(t["private"]) for way, t in told.items()}
    yield Row(AREA, f"load {work}: private memory", "B", growth, Promise("under", 4 * MIB), note=note)
    ready = {OURS: call_alone(target, way=STATE_DICT, path=str(files[OURS]))}
    ready |= {way: told[way] for way in (SAFETENSORS_TORCH, TORCH)}
    growth = {way: float(t["private"]) for way, t in ready.items()}
    what = f"torch state dict of {work}, writable: private memory before the first write"
    yield Row(AREA, what, "B", growth, Promise("under", 8 * MIB))


def _ready(settings: Settings, work: str) -> Row:
    files = _files(settings)
    repeats = settings.pick(9, 2)
    with Worker() as worker:

        def seconds(way: str, path: Path) -> float:
            return float(worker.call("tools.bench.large:load_seconds", way=way, path=str(path)))

        ways = {OURS: (STATE_DICT, files[OURS])} | {n: (n, files[n]) for n in (SAFETENSORS_TORCH, TORCH)}
        for way in ways.values():
            seconds(*way)
        samples = collect(repeats, {name: lambda way=way: seconds(*way) for name, way in ways.items()})  # type: ignore[misc]
    medians = {name: statistics.median(s) for name, s in samples.items()}
    promise = Promise("faster", 1, SAFETENSORS_TORCH)
    return Row(AREA, f"torch state dict of {work}: ready", "s", medians, promise, samples=repeats * BURST)


def _files(settings: Settings) -> dict[str, Path]:
    suffixes = {OURS: "zcr"} | {name: peer.suffix for name, peer in PEERS.items()}
    return {name: settings.folder / f"large.{suffix}" for name, suffix in suffixes.items()}


# -- in the worker ---------------------------------------------------------------------------------------------------

_buffers: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}


def make_buffers(mib: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the tensors, of `mib` MiB each."""
    values = np.random.default_rng(0)
    return {f"blocks.{i}.weight": values.random((mib, MIB // 4), np.float32) for i in range(COUNT)}


def save_seconds(way: str, folder: str, mib: int) -> float:
    """Save the buffers one way, replacing what is there; return the seconds."""
    import zcrecord

    if not _buffers:
        _buffers.update(make_buffers(mib))
    start = time.perf_counter()
    if way == OURS:
        zcrecord.save_record(_buffers, Path(folder, "large.zcr"))
    elif way == PLAIN:
        _plain_save(Path(folder, "large.raw"))
    else:
        PEERS[way].save(Path(folder, f"large.{PEERS[way].suffix}"), _buffers)
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


def load_seconds(way: str, path: str) -> float:
    """Load every tensor one way, several times in a row; return the median seconds until they can be used."""
    samples = []
    for _ in range(BURST):  # as `median_seconds` has them
        start = time.perf_counter()
        kept = WAYS_TO_LOAD[way](Path(path))
        samples.append(time.perf_counter() - start)
        assert len(kept) == COUNT
        del kept
    return statistics.median(samples)


def load_growth(way: str, path: str) -> dict[str, Any]:
    """Load every tensor one way; return the growth of private and file-backed memory, in bytes, and where views lie.

    The way "copy" is ours with each view copied: what the measurement has to notice.
    """
    load = WAYS_TO_LOAD[way]
    _warm_up(Path(path), way)
    before = memory()
    tensors = load(Path(path))
    after = memory()
    if before is None or after is None or before.private is None or after.private is None:
        raise OSError("private memory cannot be learnt here; /proc/PID/smaps_rollup is Linux's")
    assert after.file_backed is not None
    assert before.file_backed is not None
    mappings = _mappings(path)
    places = [(_address(t), t.nbytes) for t in tensors]
    return {
        "private": after.private - before.private,
        "file_backed": after.file_backed - before.file_backed,
        "tensors": len(tensors),
        "inside": sum(any(lo <= at and at + nbytes <= hi for lo, hi in mappings) for at, nbytes in places),
    }


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data)


def _load_ours(path: Path) -> list[Any]:
    import zcrecord

    return list(zcrecord.load_record(path).values())


def _load_copies(path: Path) -> list[Any]:
    return [view.copy() for view in _load_ours(path)]


def _state_dict(path: Path) -> list[Any]:
    import zcrecord

    return list(zcrecord.load_record(path).torch().values())


def _by_peer(name: str) -> Any:
    return lambda path: list(PEERS[name].all(path).values())


WAYS_TO_LOAD = {
    OURS: _load_ours,
    "copy": _load_copies,
    STATE_DICT: _state_dict,
    **{name: _by_peer(name) for name in (SAFETENSORS, SAFETENSORS_TORCH, NPZ, TORCH, GGUF)},
}


def _warm_up(path: Path, way: str) -> None:
    """Save and load something small the same way, so that imports and first calls are in no figure."""
    import tempfile

    import zcrecord

    small = {"a": np.zeros(16, np.float32)}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder, f"small.{PEERS[way].suffix if way in PEERS else 'zcr'}")
        if way in PEERS:
            PEERS[way].save(file, small)
        else:
            zcrecord.save_record(small, file, durable=False)
        WAYS_TO_LOAD[way](file)


def _mappings(path: str) -> list[tuple[int, int]]:
    """Return the address ranges at which the file is mapped into this process."""
    wanted = str(Path(path).resolve())
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5] == wanted:
            lo, hi = (int(word, 16) for word in words[0].split("-"))
            found.append((lo, hi))
    return found
