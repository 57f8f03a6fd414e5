"""Files of other formats as they are, by an index of them, and saves of what changed, beside the formats' readers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import BURST, OURS, Promise, Row, Settings, median_seconds
from tools.bench.peers import GGUF, PEERS, SAFETENSORS, TORCH, save_gguf

AREA = "foreign"
FILES, EACH, ITEMS = 30, 1000, 256
WORDS = 128_000  # of the vocabulary of a GGUF file
THEIRS = "safetensors and index.json"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of files that nobody converted."""
    yield from _shards(settings)
    yield from _one_file(settings)
    yield from _index(settings)
    yield from _base(settings)


def _names(count: int) -> list[str]:
    return [f"model.layers.{i // 100}.experts.{i // 10 % 10}.w{i % 10}.weight" for i in range(count)]


def _shards(settings: Settings) -> Iterator[Row]:
    each, folder = settings.pick(EACH, 50), settings.folder / "hub"
    folder.mkdir()
    names = _names(FILES * each)
    files = {name: f"model-{1 + i // each:05}-of-{FILES:05}.safetensors" for i, name in enumerate(names)}
    for start in range(0, len(names), each):
        part = {name: np.ones(ITEMS, np.float32) for name in names[start : start + each]}
        PEERS[SAFETENSORS].save(folder / files[names[start]], part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
    ours = settings.folder / "hub" / "index.zcr"
    zcrecord.index(index, ours, durable=False)
    wanted = iter(np.random.default_rng(1).integers(0, len(names), 1 << 20).tolist())

    def theirs() -> object:
        name = names[next(wanted)]
        there = json.loads(index.read_text(encoding="utf-8"))["weight_map"][name]
        return PEERS[SAFETENSORS].one(folder / there, name)

    few = settings.pick(9, 1)
    for what, path, limit in (("as they are", index, None), ("by an index", ours, 0.0015)):
        ways: dict[str, Callable[[], object]] = {
            OURS: lambda path=path: zcrecord.load_record(path)[names[next(wanted)]],  # type: ignore[misc]
            THEIRS: theirs,
        }
        promise = Promise("faster", 1, THEIRS) if limit is None else Promise("under", limit)
        work = f"open {FILES} files of {each:,} safetensors {what}, and get one"
        yield Row(AREA, work, "s", median_seconds(few, ways), promise, samples=few * BURST)


def _one_file(settings: Settings) -> Iterator[Row]:
    count = settings.pick(10_000, 100)
    tensors = {name: np.ones(ITEMS, np.float32) for name in _names(count)}
    wanted = iter(np.random.default_rng(2).integers(0, count, 1 << 20).tolist())
    names, few = list(tensors), settings.pick(7, 1)
    for peer, limit, note in ((GGUF, 0.05, f" and {WORDS:,} words"), (TORCH, 0.2, "")):
        path = settings.folder / f"model{PEERS[peer].suffix}"
        if peer == GGUF:
            save_gguf(path, tensors, settings.pick(WORDS, 100))
        else:
            PEERS[peer].save(path, tensors)
        ways: dict[str, Callable[[], Any]] = {
            OURS: lambda path=path: zcrecord.load_record(path)[names[next(wanted)]],  # type: ignore[misc]
            peer: lambda path=path, peer=peer: PEERS[peer].one(path, names[next(wanted)]),  # type: ignore[misc]
        }
        work = f"open a file of {peer} with {count:,} tensors{note}, and get one"
        yield Row(AREA, work, "s", median_seconds(few, ways), Promise("under", limit), samples=few * BURST)


def _index(settings: Settings) -> Iterator[Row]:
    path, dest = settings.folder / "large.safetensors", settings.folder / "large.zcr"
    PEERS[SAFETENSORS].save(path, {f"w{i}": np.ones(settings.pick(1 << 24, 1 << 12), np.float32) for i in range(24)})
    few, nbytes = settings.pick(5, 1), f"{os.path.getsize(path) / 1e9:.1f} GB"

    def sha256() -> object:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256")

    def index(digest: str) -> object:
        return zcrecord.index(path, dest, digest=digest, force=True, durable=False)

    ways: dict[str, Callable[[], object]] = {OURS: lambda: index("xxh3"), "SHA-256": sha256}
    work = f"index {nbytes} of safetensors, with digests"
    yield Row(AREA, work, "s", median_seconds(few, ways), Promise("within", 0.35, "SHA-256"), samples=few * BURST)
    ways = {OURS: lambda: index("none")}
    work = f"index {nbytes} of safetensors, without digests"
    yield Row(AREA, work, "s", median_seconds(few, ways), Promise("under", 0.02), samples=few * BURST)


def _base(settings: Settings) -> Iterator[Row]:
    size = settings.pick(1 << 20, 1 << 12)
    base = {f"layer{i}": np.random.default_rng(i).random(size, np.float32) for i in range(16)}
    tuned = {name: values + 1 if i % 2 else values for i, (name, values) in enumerate(base.items())}
    paths = [settings.folder / name for name in ("base.zcr", "tuned.zcr", "whole.zcr")]
    zcrecord.save_record(base, paths[0], durable=False)
    report = zcrecord.save_record(tuned, paths[1], base=paths[0], durable=False)
    whole = zcrecord.save_record(tuned, paths[2], durable=False)
    values = {OURS: float(report.archive_bytes), "a file of its own": float(whole.archive_bytes)}
    promise = Promise("faster", 1.99, "a file of its own")
    yield Row(AREA, "save a fine-tune, half of its layers frozen, with base=: bytes written", "B", values, promise)
