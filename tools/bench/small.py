"""10,000 tensors of 1 KB: opening, looking up, viewing and saving them, against safetensors and npz, all with numpy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

import zcrecord
from tools.bench.harness import BURST, OURS, Promise, Row, Settings, median_seconds

__all__ = ["run"]

AREA = "small"
COUNT = 10_000
ITEMS = 256  # float32: 1 KB
PEER = "safetensors"
NPZ = "npz"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of 10,000 small tensors."""
    from safetensors.numpy import save_file

    count = settings.pick(COUNT, 500)
    tensors = make_tensors(count)
    archive, safetensors_file, npz = (settings.folder / f"small.{s}" for s in ("zcr", "safetensors", "npz"))
    zcrecord.save_record(tensors, archive)
    save_file(tensors, safetensors_file)
    _save_npz(npz, tensors)
    yield from _open_one(settings, archive, safetensors_file, npz, list(tensors))
    yield _all_views(settings, archive, safetensors_file, npz, list(tensors))
    yield _save(settings, tensors)


def make_tensors(count: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return tensors of 1 KB, each in memory of its own and different, named as a deep model would name them."""
    values = np.random.default_rng(0).random((count, ITEMS), np.float32)
    return {
        f"model.layers.{i // 100}.experts.{i // 10 % 10}.part_{i % 10}.weight": values[i].copy() for i in range(count)
    }


def _open_one(settings: Settings, archive: Path, peer: Path, npz: Path, names: list[str]) -> Iterator[Row]:
    from safetensors import safe_open

    wanted = iter(np.random.default_rng(1).integers(0, len(names), 1 << 20).tolist())

    def ours(verify: Literal["index", "touch"]) -> object:
        return zcrecord.load_record(archive, verify=verify)[names[next(wanted)]]

    def theirs() -> object:
        with safe_open(peer, framework="np") as file:
            return file.get_tensor(names[next(wanted)])

    def theirs_npz() -> object:
        with np.load(npz) as file:
            return file[names[next(wanted)]]

    repeats = settings.pick(30, 1)
    ways = {"index": lambda: ours("index"), "touch": lambda: ours("touch"), PEER: theirs, NPZ: theirs_npz}
    seconds = median_seconds(repeats, ways)
    peers = {PEER: seconds[PEER], NPZ: seconds[NPZ]}
    work = f"open and get one tensor of {len(names):,} x 1 KB"
    index = {OURS: seconds["index"], **peers}
    yield Row(AREA, f"{work}, whole index verified", "s", index, Promise("faster", 5, PEER), samples=repeats * BURST)
    touch = {OURS: seconds["touch"], **peers}
    yield Row(AREA, f'{work}, verify="touch"', "s", touch, Promise("faster", 60, PEER), samples=repeats * BURST)


def _all_views(settings: Settings, archive: Path, peer: Path, npz: Path, names: list[str]) -> Row:
    from safetensors import safe_open

    def ours() -> object:
        record = zcrecord.load_record(archive)
        return dict(record.items())

    def theirs() -> object:
        with safe_open(peer, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping

    def theirs_npz() -> object:
        with np.load(npz) as file:
            return dict(file)

    repeats = settings.pick(7, 1)
    seconds = median_seconds(repeats, {OURS: ours, PEER: theirs, NPZ: theirs_npz})
    work = f"open and get all {len(names):,}"
    return Row(AREA, work, "s", seconds, Promise("faster", 4, PEER), samples=repeats * BURST)


def _save(settings: Settings, tensors: dict[str, Any]) -> Row:
    from safetensors.numpy import save_file

    folder = settings.folder
    ways = {
        OURS: lambda: zcrecord.save_record(tensors, folder / "saved.zcr", durable=False),
        PEER: lambda: save_file(tensors, folder / "saved.safetensors"),
        NPZ: lambda: _save_npz(folder / "saved.npz", tensors),
    }
    repeats = settings.pick(7, 1)
    seconds = median_seconds(repeats, ways)
    work = f"save {len(tensors):,} x 1 KB, digests on, no fsync"
    return Row(AREA, work, "s", seconds, Promise("faster", 2.5, PEER), samples=repeats * BURST)


def _save_npz(path: Path, tensors: dict[str, Any]) -> None:
    np.savez(path, **tensors)
