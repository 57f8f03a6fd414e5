"""A model in 30 files: one tensor of 30,000, all of them, and saving, beside sharded safetensors and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import BURST, OURS, Promise, Row, Settings, median_seconds
from tools.bench.peers import PEERS, SAFETENSORS, SAFETENSORS_TORCH

AREA = "shards"
FILES, EACH = 30, 1000  # files, and tensors in a file
ITEMS = 256  # float32: 1 KB
THEIRS, THEIRS_TORCH = "safetensors and index.json", "safetensors torch and index.json"
Array = np.ndarray[Any, np.dtype[np.float32]]


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of a sharded model."""
    each = settings.pick(EACH, 50)
    values = np.random.default_rng(0).random((FILES * each, ITEMS), np.float32)
    tensors = {f"model.layers.{i // 100}.experts.{i // 10 % 10}.w{i % 10}.weight": v for i, v in enumerate(values)}
    ours, index = settings.folder / "model.zcr", settings.folder / "model.safetensors.index.json"
    most = each * ITEMS * 4

    def save_theirs() -> None:
        shards = [dict(part) for part in _batched(tensors, each)]
        names = [f"model-{i:05}-of-{FILES:05}.safetensors" for i in range(1, FILES + 1)]
        for name, part in zip(names, shards, strict=True):
            PEERS[SAFETENSORS].save(settings.folder / name, part)
        weight_map = {key: name for name, part in zip(names, shards, strict=True) for key in part}
        index.write_text(
            json.dumps({"metadata": {"total_size": values.nbytes}, "weight_map": weight_map}), encoding="utf-8"
        )

    def save_ours() -> object:
        return zcrecord.save_record(tensors, ours, max_shard_size=most, durable=False)

    save_ours()
    save_theirs()
    names = list(tensors)
    wanted = iter(np.random.default_rng(1).integers(0, len(names), 1 << 20).tolist())

    def one_of_theirs() -> object:
        name = names[next(wanted)]
        file = json.loads(index.read_text(encoding="utf-8"))["weight_map"][name]
        return PEERS[SAFETENSORS].one(settings.folder / file, name)

    few = settings.pick(30, 1)
    ways: dict[str, Callable[[], object]] = {
        OURS: lambda: zcrecord.load_record(ours)[names[next(wanted)]],
        THEIRS: one_of_theirs,
    }
    work = f"open {FILES} files of {each:,} tensors of 1 KB and get one"
    yield Row(AREA, work, "s", median_seconds(few, ways), Promise("under", 0.003), samples=few * BURST)

    def all_of_theirs(peer: str) -> object:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return {name: tensor for file in files for name, tensor in PEERS[peer].all(settings.folder / file).items()}

    few = settings.pick(7, 1)
    for what, way in (
        ("dict(record)", lambda: dict(zcrecord.load_record(ours))),
        ("a comprehension over the record", lambda: _each(zcrecord.load_record(ours))),
        ("record.torch()", lambda: zcrecord.load_record(ours).torch()),
    ):
        ways = {
            OURS: way,
            THEIRS: lambda: all_of_theirs(SAFETENSORS),
            THEIRS_TORCH: lambda: all_of_theirs(SAFETENSORS_TORCH),
        }
        peer = THEIRS_TORCH if "torch" in what else THEIRS
        seconds = median_seconds(few, ways if peer == THEIRS else {OURS: way, peer: ways[peer]})
        work = f"open {FILES} files of {each:,} tensors and get all: {what}"
        yield Row(AREA, work, "s", seconds, Promise("faster", 1, peer), samples=few * BURST)
    seconds = median_seconds(few, {OURS: save_ours, THEIRS: save_theirs})
    work = f"save {FILES} files of {each:,} tensors of 1 KB, digests on, no fsync"
    yield Row(AREA, work, "s", seconds, samples=few * BURST)


def _each(record: zcrecord.Record) -> dict[str, Any]:
    return {name: record[name] for name in record}


def _batched(tensors: dict[str, Array], count: int) -> Iterator[Any]:
    items = list(tensors.items())
    return (items[start : start + count] for start in range(0, len(items), count))
