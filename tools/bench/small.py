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

AREA = "small"
COUNT = 10_000
ITEMS = 256  # float32: 1 KB
# How people ask for all tensors, and how many times as fast as safetensors that is to be.
IDIOMS = {
    "dict(record.items())": 4.0,
    "dict(record)": 3.5,
    "a comprehension over the record": 3.5,
    "a list by names that are known": 3.5,
}


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of 10,000 small tensors."""
    count = settings.pick(COUNT, 500)
    tensors = make_tensors(count)
    archive = settings.folder / "small.zcr"
    zcrecord.save_record(tensors, archive)
    files = {name: settings.folder / f"small.{peer.suffix}" for name, peer in PEERS.items()}
    works = (
        partial(_open_one, settings, archive, files, list(tensors)),
        partial(_all_views, settings, archive, files, list(tensors)),
        partial(_save, settings, tensors),
    )
    PEERS[SAFETENSORS].save(files[SAFETENSORS], tensors)
    quick = [work([OURS, SAFETENSORS]) for work in works]
    # Those who take many times the others' time are asked less often and last: they bring torch into the process.
    slow = [name for name in PEERS if name != SAFETENSORS]
    for name in slow:
        PEERS[name].save(files[name], tensors)
    (one, one_slow), (views, views_slow), (save, save_slow) = zip(quick, [work(slow) for work in works], strict=True)
    work = f"open and get one tensor of {count:,} x 1 KB"
    peers = {SAFETENSORS: one[SAFETENSORS], **one_slow}
    for level, what, factor in (("index", "whole index verified", 5), ("touch", 'verify="touch"', 60)):
        seconds = {OURS: one[level], **peers}
        promise = Promise("faster", factor, SAFETENSORS)
        yield Row(AREA, f"{work}, {what}", "s", seconds, promise, samples=settings.pick(30, 1) * BURST)
    few = settings.pick(7, 1) * BURST
    for idiom, faster in IDIOMS.items():
        seconds = {OURS: views[idiom], SAFETENSORS: views[SAFETENSORS], **views_slow}
        promise = Promise("faster", faster, SAFETENSORS)
        yield Row(AREA, f"open and get all {count:,}: {idiom}", "s", seconds, promise, samples=few)
    work, promise = f"save {count:,} x 1 KB, digests on, no fsync", Promise("faster", 2.5, SAFETENSORS)
    yield Row(AREA, work, "s", {**save, **save_slow}, promise, samples=few)


def make_tensors(count: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return tensors of 1 KB, each in memory of its own and different, named as a deep model would name them."""
    values = np.random.default_rng(0).random((count, ITEMS), np.float32)
    return {
        f"model.layers.{i // 100}.experts.{i // 10 % 10}.part_{i % 10}.weight": values[i].copy() for i in range(count)
    }


def _open_one(
    settings: Settings, archive: Path, files: dict[str, Path], names: list[str], whom: list[str]
) -> dict[str, float]:
    wanted = iter(np.random.default_rng(1).integers(0, len(names), 1 << 20).tolist())

    def ours(verify: Literal["index", "touch"]) -> object:
        return zcrecord.load_record(archive, verify=verify)[names[next(wanted)]]

    def theirs(name: str) -> object:
        return PEERS[name].one(files[name], names[next(wanted)])

    ways: dict[str, Callable[[], object]] = {name: partial(theirs, name) for name in whom if name in PEERS}
    if OURS in whom:
        ways = {"index": lambda: ours("index"), "touch": lambda: ours("touch"), **ways}
    return median_seconds(settings.pick(30 if OURS in whom else 1, 1), ways)


def _all_views(
    settings: Settings, archive: Path, files: dict[str, Path], names: list[str], whom: list[str]
) -> dict[str, float]:
    def each_by_name() -> object:
        record = zcrecord.load_record(archive)
        return {name: record[name] for name in record}

    def names_known() -> object:
        record = zcrecord.load_record(archive)
        return [record[name] for name in names]

    idioms = lambda: dict(zcrecord.load_record(archive).items()), lambda: dict(zcrecord.load_record(archive))
    ways: dict[str, Callable[[], object]] = {}
    if OURS in whom:
        ways = dict(zip(IDIOMS, (*idioms, each_by_name, names_known), strict=True))
    ways |= {name: partial(PEERS[name].all, files[name]) for name in whom if name in PEERS}
    return median_seconds(settings.pick(7 if OURS in whom else 1, 1), ways)


def _save(settings: Settings, tensors: dict[str, Any], whom: list[str]) -> dict[str, float]:
    folder = settings.folder
    ways: dict[str, Callable[[], object]] = {
        OURS: lambda: zcrecord.save_record(tensors, folder / "saved.zcr", durable=False)
    }
    ways |= {name: partial(peer.save, folder / f"saved.{peer.suffix}", tensors) for name, peer in PEERS.items()}
    return median_seconds(settings.pick(7 if OURS in whom else 1, 1), {name: ways[name] for name in whom})
