"""An ONNX Runtime session on a 1.6 GB model, from the archive and from the .onnx: start, answers, private memory.

Each session is made in a process of its own that has imported everything beforehand. `memory="speed"` has ONNX Runtime
repack weights for its kernels, as it does by itself for an .onnx: it buys latency at larger batches with a copy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from tools.bench.harness import OURS, Promise, Row, Settings, require_disk
from tools.measure import MIB
from tools.models.gpt import write_gpt
from tools.serving import SEQUENCE
from tools.worker import Worker, call_alone

__all__ = ["run"]

AREA = "session"
SIZE_MIB = 1536  # 1.6 GB
PEER = ".onnx"
SPEED = 'zcrecord, memory="speed"'
LARGE_BATCH = 16


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of serving a large model."""
    mib = settings.pick(SIZE_MIB, 8)
    require_disk(settings.folder, 3 * mib * MIB)
    source, archive = settings.folder / "gpt.onnx", settings.folder / "gpt.zcr"
    with source.open("wb") as sink:
        write_gpt(sink, mib)
    call_alone("tools.serving:convert", source=str(source), dest=str(archive))
    ways: dict[str, dict[str, Any]] = {
        OURS: {"path": str(archive)},
        SPEED: {"path": str(archive), "memory": "speed"},
        PEER: {"path": str(source)},
    }
    repeats = settings.pick(5, 2)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, arguments in ways.items():
            samples[name].append(_one(settings, arguments))
    for path in (source, archive):
        path.unlink()
    work = f"ONNX Runtime on a model of {mib * MIB / 1e9:.1f} GB"
    yield from _rows(work, samples, repeats)


def _one(settings: Settings, arguments: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one session in a process of its own."""
    with Worker() as worker:
        worker.call("tools.serving:prepare")
        before = worker.call("tools.serving:private_bytes")
        created = worker.call("tools.serving:open_session", **arguments)
        first, _ = worker.call("tools.serving:first_answer")
        after = worker.call("tools.serving:private_bytes")
        repeats = {1: settings.pick(15, 2), LARGE_BATCH: settings.pick(5, 2)}
        latencies = [worker.call("tools.serving:latency", batch=b, repeats=n) for b, n in repeats.items()]
    return {
        "created": created,
        "first": created + first,
        "private": float("nan") if before is None else after - before,
        "batch 1": latencies[0],
        "batch 16": latencies[1],
    }


def _rows(work: str, samples: dict[str, list[dict[str, float]]], repeats: int) -> Iterator[Row]:
    def medians(key: str, *names: str) -> dict[str, float]:
        return {name: statistics.median(s[key] for s in samples[name]) for name in names or samples}

    promise = Promise("faster", 50, PEER)
    yield Row(AREA, f"{work}: create the session", "s", medians("created"), promise, samples=repeats)
    private = medians("private")
    limit = Promise("under", 16 * MIB)
    yield Row(AREA, f"{work}: private memory after the first answer", "B", private, limit, samples=repeats)
    yield Row(AREA, f"{work}: creation to first answer", "s", medians("first"), samples=repeats)
    for batch in ("batch 1", "batch 16"):
        yield Row(AREA, f"{work}: steady latency, {batch} of {SEQUENCE} tokens", "s", medians(batch), samples=repeats)
