"""10,000 tensors of 1 KB: opening, looking up, viewing and saving them, beside the neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

import zcrecord
from tools.bench.harness import BURST, OURS, Promise, Row, Settings, median_seconds
from tools.bench.peers import PEERS, SAFETENSORS

__all__ = ["run"]

AREA = "small"
COUNT = 10_000
ITEMS = 256  # float32: 1 KB


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of 10,000 small tensors."""
    count = settings.pick(COUNT, 500)
    tensors = make_tensors(count)
    archive = settings.folder / "small.zcr"
    zcrecord.save_record(tensors, archive)
    files = {name: settings.folder / f"small.{peer.suffix}" for name, peer in PEERS.items()}
    for name, path in files.items():
        PEERS[name].save(path, tensors)
    yield from _open_one(settings, archive, files, list(tensors))
    yield _all_views(settings, archive, files, count)
    yield _save(settings, tensors)


def make_tensors(count: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return tensors of 1 KB, each in memory of its own and different, named as a deep model would name them."""
    values = np.random.default_rng(0).random((count, ITEMS), np.float32)
    return {
        f"model.layers.{i // 100}.experts.{i // 10 % 10}.part_{i % 10}.weight": values[i].copy() for i in range(count)
    }


def _seconds(settings: Settings, repeats: int, ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return medians; who takes many times the others' is asked less often, apart, so as not to hold them up."""
    quick = [name for name in ways if name not in PEERS or name == SAFETENSORS]
    seconds = median_seconds(settings.pick(repeats, 1), {name: ways[name] for name in quick})
    return seconds | median_seconds(1, {name: way for name, way in ways.items() if name not in quick})


def _open_one(settings: Settings, archive: Path, files: dict[str, Path], names: list[str]) -> Iterator[Row]:
    wanted = iter(np.random.default_rng(1).integers(0, len(names), 1 << 20).tolist())

    def ours(verify: Literal["index", "touch"]) -> object:
        return zcrecord.load_record(archive, verify=verify)[names[next(wanted)]]

    def theirs(name: str) -> object:
        return PEERS[name].one(files[name], names[next(wanted)])

    ways = {"index": lambda: ours("index"), "touch": lambda: ours("touch")}
    seconds = _seconds(settings, 30, {**ways, **{name: partial(theirs, name) for name in PEERS}})
    peers = {name: seconds[name] for name in PEERS}
    samples = settings.pick(30, 1) * BURST
    work = f"open and get one tensor of {len(names):,} x 1 KB"
    index = {OURS: seconds["index"], **peers}
    yield Row(AREA, f"{work}, whole index verified", "s", index, Promise("faster", 5, SAFETENSORS), samples=samples)
    touch = {OURS: seconds["touch"], **peers}
    yield Row(AREA, f'{work}, verify="touch"', "s", touch, Promise("faster", 60, SAFETENSORS), samples=samples)


def _all_views(settings: Settings, archive: Path, files: dict[str, Path], count: int) -> Row:
    ways: dict[str, Callable[[], object]] = {OURS: lambda: dict(zcrecord.load_record(archive).items())}
    ways |= {name: partial(PEERS[name].all, files[name]) for name in PEERS}
    seconds = _seconds(settings, 7, ways)
    promise = Promise("faster", 4, SAFETENSORS)
    return Row(AREA, f"open and get all {count:,}", "s", seconds, promise, samples=settings.pick(7, 1) * BURST)


def _save(settings: Settings, tensors: dict[str, Any]) -> Row:
    folder = settings.folder
    ways: dict[str, Callable[[], object]] = {
        OURS: lambda: zcrecord.save_record(tensors, folder / "saved.zcr", durable=False)
    }
    ways |= {name: partial(peer.save, folder / f"saved.{peer.suffix}", tensors) for name, peer in PEERS.items()}
    seconds = _seconds(settings, 7, ways)
    work = f"save {len(tensors):,} x 1 KB, digests on, no fsync"
    promise = Promise("faster", 2.5, SAFETENSORS)
    return Row(AREA, work, "s", seconds, promise, samples=settings.pick(7, 1) * BURST)
