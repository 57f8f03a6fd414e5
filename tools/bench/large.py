"""1.6 GB in 24 tensors: saving it against plain writes of the same buffers, and what loading it takes of memory."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness import BURST, OURS, Promise, Row, Settings, medians, require_disk, seconds_of
from tools.bench.peers import PEERS, SAFETENSORS_TORCH, TORCH
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
        save = partial(worker.call, "tools.bench.large:save_seconds", folder=str(settings.folder), mib=mib_each)
        # Both replace a file of that size each time.
        seconds = medians(repeats, {way: partial(save, way=way) for way in (OURS, PLAIN)}, uncounted=1)
        seconds |= {name: save(way=name) for name in PEERS}  # none of them waits for the disk
    promise = Promise("within", 1.1, PLAIN)
    note = "peers do not fsync"
    yield Row(AREA, f"save {work}, digests, fsync and rename", "s", seconds, promise, note=note, samples=repeats)
    suffixes = {OURS: "zcr"} | {name: peer.suffix for name, peer in PEERS.items()}
    files = {name: str(settings.folder / f"large.{suffix}") for name, suffix in suffixes.items()}
    yield from _load(files, work)
    yield _ready(settings, files, work)


def _load(files: dict[str, str], work: str) -> Iterator[Row]:
    grown = partial(call_alone, "tools.bench.large:load_growth")
    growth = {way: grown(way=way, path=path) for way, path in files.items()}
    inside, tensors = growth[OURS]["inside"], growth[OURS]["tensors"]
    touched = growth[OURS]["file_backed"] // 1024
    note = f"{inside} of {tensors} views lie inside the mapping; {touched} KiB of the file touched"
    private = {way: float(g["private"]) for way, g in growth.items()}
    yield Row(AREA, f"load {work}: private memory", "B", private, Promise("under", 4 * MIB), note=note)
    ours = float(grown(way=STATE_DICT, path=files[OURS])["private"])
    private = {OURS: ours} | {way: private[way] for way in (SAFETENSORS_TORCH, TORCH)}
    what = f"torch state dict of {work}, writable: private memory before the first write"
    yield Row(AREA, what, "B", private, Promise("under", 8 * MIB))


def _ready(settings: Settings, files: dict[str, str], work: str) -> Row:
    repeats = settings.pick(9, 2)
    with Worker() as worker:
        load = partial(worker.call, "tools.bench.large:load_seconds")
        ways = {OURS: partial(load, way=STATE_DICT, path=files[OURS])}
        ways |= {name: partial(load, way=name, path=files[name]) for name in (SAFETENSORS_TORCH, TORCH)}
        seconds = medians(repeats, ways, uncounted=1)
    promise = Promise("faster", 1, SAFETENSORS_TORCH)
    return Row(AREA, f"torch state dict of {work}: ready", "s", seconds, promise, samples=repeats * BURST)


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
    if way == OURS:
        return seconds_of(lambda: zcrecord.save_record(_buffers, Path(folder, "large.zcr")))
    if way == PLAIN:
        return seconds_of(lambda: _plain_save(Path(folder, "large.raw")))
    return seconds_of(lambda: PEERS[way].save(Path(folder, f"large.{PEERS[way].suffix}"), _buffers))


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
    return statistics.median(seconds_of(lambda: _load_by(way, Path(path))) for _ in range(BURST))


def load_growth(way: str, path: str) -> dict[str, Any]:
    """Load every tensor one way; return the growth of private and file-backed memory, in bytes, and where views lie.

    The way "copy" is ours with each view copied: what the measurement has to notice.
    """
    _warm_up(Path(path), way)
    before = memory()
    tensors = _load_by(way, Path(path))
    after = memory()
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


def _load_by(way: str, path: Path) -> list[Any]:
    import zcrecord

    if way in PEERS:
        return list(PEERS[way].all(path).values())
    if way == STATE_DICT:
        return list(zcrecord.load_record(path).torch().values())
    views = list(zcrecord.load_record(path).values())
    return [view.copy() for view in views] if way == "copy" else views


def _warm_up(path: Path, way: str) -> None:
    """Save and load something small the same way, so that imports and first calls are in no figure."""
    import zcrecord

    small, file = {"a": np.zeros(16, np.float32)}, path.with_name(f"small{path.suffix}")
    if way in PEERS:
        PEERS[way].save(file, small)
    else:
        zcrecord.save_record(small, file, durable=False)
    _load_by(way, file)
    file.unlink()


def _mappings(path: str) -> list[tuple[int, int]]:
    """Return the address ranges at which the file is mapped into this process."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    ranges = [words[0].split("-") for words in lines if words[5:] == [str(Path(path).resolve())]]
    return [(int(lo, 16), int(hi, 16)) for lo, hi in ranges]
