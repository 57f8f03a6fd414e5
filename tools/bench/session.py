"""An ONNX Runtime session from the archive and from the .onnx: start, answers, private memory, for models of each kind.

Each session is made in a process of its own that has imported everything beforehand. `memory="speed"` has ONNX Runtime
repack weights for its kernels, as it does by itself for an .onnx: it buys latency with a copy.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tools.bench.harness import OURS, Promise, Row, Settings, require_disk
from tools.measure import MIB
from tools.models import branches, convolutions, gpt, quantized
from tools.serving import SEQUENCE
from tools.worker import Worker, call_alone

__all__ = ["run"]

AREA = "session"
PEER = ".onnx"
SPEED = 'zcrecord, memory="speed"'
PREFETCH = "zcrecord, prefetch()"  # beforehand: the disk is read from end to end and not as weights are touched
BATCHES = {1: 15, 16: 5}  # to how many requests make a median
TOKENS = f"each of {SEQUENCE} tokens"
LITTLE = Promise("under", 16 * MIB)
Samples = dict[str, list[dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Subject:
    """One model to serve: what rows call it, its size, what it must reach.

    Attributes:
        each: what one of a batch is; empty: latency is not measured.
        conditions: what its input of truth values is in the first requests, after which memory is measured.
    """

    name: str
    write: Callable[[IO[bytes], int], object]
    mib: int
    each: str = ""
    conditions: tuple[bool, ...] = (True,)
    creation: Promise | None = None
    private: Promise = LITTLE


SUBJECTS = (
    Subject("GPT", gpt.write_gpt, 1536, TOKENS, creation=Promise("faster", 50, PEER)),
    Subject(
        "convolutions", convolutions.write_convolutions, 54, f"each {convolutions.IMAGE} by {convolutions.IMAGE} pixels"
    ),
    Subject("int8 QDQ", quantized.write_quantized, 256, TOKENS),
    Subject(
        "one weight in two branches",
        branches.write_branches,
        512,
        conditions=(False, True),  # the product first: it takes the whole weight
        private=Promise("under", 40 * MIB),
    ),
)


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of serving each model."""
    for subject in SUBJECTS:
        mib = settings.pick(subject.mib, 1)
        require_disk(settings.folder, 3 * mib * MIB)
        source, archive = settings.folder / "model.onnx", settings.folder / "model.zcr"
        with source.open("wb") as sink:
            subject.write(sink, mib)
            sink.flush()
            os.fsync(sink.fileno())  # what is not written back stays in the page cache
        call_alone("tools.serving:convert", source=str(source), dest=str(archive))
        repeats = settings.pick(5, 1)
        samples = _samples(settings, subject, source, archive, repeats)
        for path in (source, archive):
            path.unlink()
        yield from _rows(f"ONNX Runtime, {subject.name}, {_size(mib)}", subject, samples, repeats)


def _samples(settings: Settings, subject: Subject, source: Path, archive: Path, repeats: int) -> Samples:
    ways: dict[str, dict[str, Any]] = {
        OURS: {"path": str(archive)},
        SPEED: {"path": str(archive), "memory": "speed"},
        PEER: {"path": str(source)},
    }
    samples: Samples = {name: [] for name in (*ways, PREFETCH)}
    for _ in range(repeats):
        for name, arguments in ways.items():
            samples[name].append({"cold": _cold(subject, arguments), **_warm(settings, subject, arguments)})
        samples[PREFETCH].append({"cold": _cold(subject, {**ways[OURS], "prefetch": True})})
    return samples


def _cold(subject: Subject, arguments: dict[str, Any]) -> float:
    """Return the seconds from the creation to the first answer, of a file that has to come from the disk."""
    with Worker() as worker:
        worker.call("tools.serving:prepare")
        worker.call("tools.bench.cold:drop_cached", path=arguments["path"])
        created = worker.call("tools.serving:open_session", **arguments)
        first, _ = worker.call("tools.serving:first_answer", condition=subject.conditions[0])
    return float(created + first)


def _warm(settings: Settings, subject: Subject, arguments: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one session in a process of its own."""
    with Worker() as worker:
        worker.call("tools.serving:prepare")
        before = worker.call("tools.serving:private_bytes")
        created = worker.call("tools.serving:open_session", **arguments)
        first, *_ = (worker.call("tools.serving:first_answer", condition=c)[0] for c in subject.conditions)
        after = worker.call("tools.serving:private_bytes")
        figures = {
            "created": created,
            "first": created + first,
            "private": float("nan") if before is None else after - before,
        }
        for batch, repeats in BATCHES.items() if subject.each else ():
            asked = {"batch": batch, "repeats": settings.pick(repeats, 2)}
            figures[f"batch {batch}"] = worker.call("tools.serving:latency", **asked)
    return figures


def _rows(work: str, subject: Subject, samples: Samples, repeats: int) -> Iterator[Row]:
    def row(what: str, key: str, unit: str = "s", promise: Promise | None = None, note: str = "") -> Row:
        medians = {name: statistics.median(s[key] for s in some) for name, some in samples.items() if key in some[0]}
        return Row(AREA, f"{work}: {what}", unit, medians, promise, note, repeats)

    yield row("create the session", "created", promise=subject.creation)
    answers = "the first answer" if len(subject.conditions) == 1 else "an answer of each"
    yield row(f"private memory after {answers}", "private", "B", subject.private)
    yield row("creation to first answer", "first")
    yield row("creation to first answer, not in the page cache", "cold")
    for batch in BATCHES if subject.each else ():
        yield row(f"steady latency, batch {batch}", f"batch {batch}", note=subject.each)


def _size(mib: int) -> str:
    nbytes = mib * MIB
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
