"""10,000 tensors of 1 KB: opening, looking up, viewing and saving them, beside the neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
Ways = dict[str, Callable[[], object]]


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of 10,000 small tensors."""
    count = settings.pick(COUNT, 500)
    tensors: dict[str, Any] = make_tensors(count)
    names = list(tensors)
    folder, archive = settings.folder, settings.folder / "small.zcr"
    zcrecord.save_record(tensors, archive)
    files = {name: folder / f"small.{peer.suffix}" for name, peer in PEERS.items()}
    wanted = iter(np.random.default_rng(1).integers(0, count, 1 << 20).tolist())

    def one(level: Literal["index", "touch"]) -> object:
        return zcrecord.load_record(archive, verify=level)[names[next(wanted)]]

    def each_by_name() -> object:
        record = zcrecord.load_record(archive)
        return {name: record[name] for name in record}

    def names_known() -> object:
        record = zcrecord.load_record(archive)
        return [record[name] for name in names]

    idioms = lambda: dict(zcrecord.load_record(archive).items()), lambda: dict(zcrecord.load_record(archive))
    ours: tuple[Ways, ...] = (
        {"index": partial(one, "index"), "touch": partial(one, "touch")},
        dict(zip(IDIOMS, (*idioms, each_by_name, names_known), strict=True)),
        {OURS: lambda: zcrecord.save_record(tensors, folder / "saved.zcr", durable=False)},
    )

    def theirs(peers: list[str]) -> tuple[Ways, ...]:
        for name in peers:
            PEERS[name].save(files[name], tensors)
        return (
            {name: lambda name=name: PEERS[name].one(files[name], names[next(wanted)]) for name in peers},  # type: ignore[misc]
            {name: partial(PEERS[name].all, files[name]) for name in peers},
            {name: partial(PEERS[name].save, folder / f"saved.{PEERS[name].suffix}", tensors) for name in peers},
        )

    repeats = [settings.pick(n, 1) for n in (30, 7, 7)]
    quick = theirs([SAFETENSORS])
    one_each, all_each, saved = (median_seconds(n, a | b) for n, a, b in zip(repeats, ours, quick, strict=True))
    # Those who take many times the others' time are asked once and last: they bring torch into the process.
    slow = [median_seconds(1, ways) for ways in theirs([name for name in PEERS if name != SAFETENSORS])]
    for level, what, factor in (("index", "whole index verified", 5), ("touch", 'verify="touch"', 60)):
        seconds = {OURS: one_each[level], SAFETENSORS: one_each[SAFETENSORS], **slow[0]}
        work, promise = f"open and get one tensor of {count:,} x 1 KB, {what}", Promise("faster", factor, SAFETENSORS)
        yield Row(AREA, work, "s", seconds, promise, samples=repeats[0] * BURST)
    for idiom, faster in IDIOMS.items():
        seconds = {OURS: all_each[idiom], SAFETENSORS: all_each[SAFETENSORS], **slow[1]}
        work, promise = f"open and get all {count:,}: {idiom}", Promise("faster", faster, SAFETENSORS)
        yield Row(AREA, work, "s", seconds, promise, samples=repeats[1] * BURST)
    work, promise = f"save {count:,} x 1 KB, digests on, no fsync", Promise("faster", 2.5, SAFETENSORS)
    yield Row(AREA, work, "s", {**saved, **slow[2]}, promise, samples=repeats[2] * BURST)


def make_tensors(count: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return tensors of 1 KB, each in memory of its own and different, named as a deep model would name them."""
    values = np.random.default_rng(0).random((count, ITEMS), np.float32)
    return {
        f"model.layers.{i // 100}.experts.{i // 10 % 10}.part_{i % 10}.weight": values[i].copy() for i in range(count)
    }
