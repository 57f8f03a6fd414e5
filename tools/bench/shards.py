"""A model in 30 files: one tensor of 30,000, and all of them, beside sharded safetensors and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

import zcrecord
from tools.bench.harness import BURST, OURS, Promise, Row, Settings, median_seconds
from tools.bench.peers import PEERS, SAFETENSORS, SAFETENSORS_TORCH

AREA = "shards"
FILES, EACH = 30, 1000  # files, and tensors in a file
ITEMS = 256  # float32: 1 KB
THEIRS, THEIRS_TORCH = "safetensors and index.json", "safetensors torch and index.json"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of a sharded model."""
    each = settings.pick(EACH, 50)
    values = np.random.default_rng(0).random((FILES * each, ITEMS), np.float32)
    tensors = {f"model.layers.{i // 100}.experts.{i // 10 % 10}.w{i % 10}.weight": v for i, v in enumerate(values)}
    names = list(tensors)
    ours, index = settings.folder / "model.zcr", settings.folder / "model.safetensors.index.json"

    def save_ours() -> object:
        return zcrecord.save_record(tensors, ours, max_shard_size=each * ITEMS * 4, durable=False)

    def save_theirs() -> None:
        weight_map: dict[str, str] = {}
        for i in range(FILES):
            file, part = f"model-{1 + i:05}-of-{FILES:05}.safetensors", names[i * each : (i + 1) * each]
            PEERS[SAFETENSORS].save(settings.folder / file, {name: tensors[name] for name in part})
            weight_map |= dict.fromkeys(part, file)
        told = {"metadata": {"total_size": values.nbytes}, "weight_map": weight_map}
        index.write_text(json.dumps(told), encoding="utf-8")

    save_ours()
    save_theirs()
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

    def each_by_name() -> object:
        record = zcrecord.load_record(ours)
        return {name: record[name] for name in record}

    few = settings.pick(7, 1)
    numpy, torch = (partial(all_of_theirs, peer) for peer in (SAFETENSORS, SAFETENSORS_TORCH))
    whole: list[tuple[str, dict[str, Callable[[], object]], str]] = [
        ("dict(record)", {OURS: lambda: dict(zcrecord.load_record(ours)), THEIRS: numpy, THEIRS_TORCH: torch}, THEIRS),
        ("a comprehension over the record", {OURS: each_by_name, THEIRS: numpy, THEIRS_TORCH: torch}, THEIRS),
        ("record.torch()", {OURS: lambda: zcrecord.load_record(ours).torch(), THEIRS_TORCH: torch}, THEIRS_TORCH),
    ]
    for what, all_ways, peer in whole:
        work = f"open {FILES} files of {each:,} tensors and get all: {what}"
        yield Row(AREA, work, "s", median_seconds(few, all_ways), Promise("faster", 1, peer), samples=few * BURST)
    work = f"save {FILES} files of {each:,} tensors of 1 KB, digests on, no fsync"
    yield Row(AREA, work, "s", median_seconds(few, {OURS: save_ours, THEIRS: save_theirs}), samples=few * BURST)
