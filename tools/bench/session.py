"""An ONNX Runtime session from the archive and from the .onnx: start, answers, private memory, for models of each kind.

zcrecord's figures are those of a tuned archive. Beside them stand those of the archive before it was tuned, of which
nothing is packed; of the same with `memory="speed"`, which has ONNX Runtime pack weights into a private copy; and of
the .onnx, for which it does so by itself. Each session is made in a process of its own that has imported everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tools.bench.harness import OURS, Promise, Row, Settings, figures_of, require_disk
from tools.measure import MIB, memory, private_peak
from tools.models import branches, convolutions, gpt, quantized
from tools.serving import SEQUENCE
from tools.worker import Worker, call_alone

AREA = "session"
PEER = ".onnx"
UNTUNED = "zcrecord, not tuned"
SPEED = 'zcrecord, memory="speed"'
PREFETCH = f"{UNTUNED}, prefetch()"  # beforehand: the disk is read from end to end and not as weights are touched
LITTLE_MORE = f"{UNTUNED}, and 4 MiB"
BATCHES = {1: 15, 16: 5}  # to how many requests make a median
TOKENS = f"each of {SEQUENCE} tokens"
LITTLE = Promise("under", 16 * MIB)
AS_FAST = Promise("within", 1.05, PEER)
ROOM = 7  # times a model's size: the .onnx, the archive, the tuned one, and what tuning writes meanwhile
Figures = dict[str, float]
Samples = dict[str, list[Figures]]


@dataclass(frozen=True, slots=True)
class Subject:
    """One model to serve: what rows call it, its size, what it must reach.

    Attributes:
        each: what one of a batch is; empty: latency is not measured.
        conditions: what its input of truth values is in the first requests, after which memory is measured.
        creation: the promise of the tuned archive, and `untuned` that of the archive before.
    """

    name: str
    write: Callable[[IO[bytes], int], object]
    mib: int
    each: str = ""
    conditions: tuple[bool, ...] = (True,)
    creation: Promise | None = None
    untuned: Promise | None = None
    private: Promise = LITTLE


PIXELS = f"each {convolutions.IMAGE} by {convolutions.IMAGE} pixels"
SUBJECTS = (
    Subject(
        "GPT", gpt.write_gpt, 1536, TOKENS, creation=Promise("faster", 2.5, PEER), untuned=Promise("faster", 50, PEER)
    ),
    Subject("convolutions", convolutions.write_convolutions, 54, PIXELS, creation=Promise("faster", 8, PEER)),
    Subject("int8 QDQ", quantized.write_quantized, 256, TOKENS, creation=Promise("faster", 2.5, PEER)),
    Subject(
        "one weight in two branches",
        branches.write_branches,
        512,
        conditions=(False, True),  # the product first: it takes the whole weight
        private=Promise("under", 40 * MIB),
    ),
)


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of serving each model; a quick run does with the first and the last."""
    for subject in SUBJECTS[:: settings.pick(1, 3)]:
        mib = settings.pick(subject.mib, 1)
        require_disk(settings.folder, ROOM * mib * MIB)
        source, archive, tuned = (settings.folder / name for name in ("model.onnx", "model.zcr", "tuned.zcr"))
        with source.open("wb") as sink:
            subject.write(sink, mib)
            sink.flush()
            os.fsync(sink.fileno())  # what is not written back stays in the page cache
        call_alone("tools.serving:convert", source=str(source), dest=str(archive))
        tunings = [_tune(archive, tuned) for _ in range(settings.pick(3, 1))]
        repeats = settings.pick(5, 1)
        ways: dict[str, dict[str, Any]] = {
            OURS: {"path": str(tuned)},
            UNTUNED: {"path": str(archive)},
            SPEED: {"path": str(archive), "memory": "speed"},
            PEER: {"path": str(source)},
        }
        work = f"ONNX Runtime, {subject.name}, {size_text(mib)}"
        samples, differing = _samples(settings, subject, ways, repeats)
        yield from _rows(work, subject, samples, repeats)
        seconds = {OURS: figures_of(tunings, "seconds"), PEER: figures_of(samples[PEER], "created")}
        yield Row(AREA, f"{work}: tune, beside the session's creation", "s", seconds, Promise("within", 2, PEER))
        limit = Promise("under", max(512 * MIB, 2 * tunings[0]["largest"] + 256 * MIB))
        private = {OURS: max(figures["private"] for figures in tunings)}
        yield Row(AREA, f"{work}: private memory of tuning", "B", private, limit)
        if subject.each:
            what = f"{work}: answers that are not the .onnx's, bit for bit"
            yield Row(AREA, what, "", differing, Promise("under", 1))
            sizes = {name: float(os.path.getsize(ways[name]["path"])) for name in (OURS, UNTUNED, PEER)}
            yield Row(AREA, f"{work}: size of the file", "B", sizes, Promise("within", 2.1, PEER))
        for path in (source, archive, tuned):
            path.unlink()


def _tune(archive: Path, tuned: Path) -> Figures:
    """Return seconds and private memory of tuning in a process of its own, and the bytes of the largest weight."""
    tuned.unlink(missing_ok=True)
    with Worker() as worker:
        worker.call("tools.serving:prepare")
        with private_peak(worker.pid) as peak:
            figures: Figures = worker.call("tools.serving:tune", source=str(archive), dest=str(tuned))
    return {**figures, "private": float(peak())}


def _samples(
    settings: Settings, subject: Subject, ways: dict[str, dict[str, Any]], repeats: int
) -> tuple[Samples, Figures]:
    """Return the figures of each way and repetition, and how many of its answers were not the .onnx's, bit for bit."""
    samples: Samples = {name: [] for name in (*ways, PREFETCH)}
    answers: dict[str, list[str]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, arguments in ways.items():
            figures, digests = _warm(settings, subject, arguments)
            samples[name].append({"cold": _cold(subject, arguments), **figures})
            answers[name] += digests
        samples[PREFETCH].append({"cold": _cold(subject, {**ways[UNTUNED], "prefetch": True})})
    stock = answers.pop(PEER)
    return samples, {name: float(sum(map(str.__ne__, own, stock))) for name, own in answers.items()}


def _cold(subject: Subject, arguments: dict[str, Any]) -> float:
    """Return the seconds from the creation to the first answer, of a file that has to come from the disk."""
    with Worker() as worker:
        worker.call("tools.serving:prepare")
        worker.call("tools.bench.cold:drop_cached", path=arguments["path"])
        created = worker.call("tools.serving:open_session", **arguments)
        first, _ = worker.call("tools.serving:first_answer", condition=subject.conditions[0])
    return float(created + first)


def _warm(settings: Settings, subject: Subject, arguments: dict[str, Any]) -> tuple[Figures, list[str]]:
    """Return the figures of one session in a process of its own, and the digests of its answers."""
    with Worker() as worker:
        worker.call("tools.serving:prepare")
        before = memory(worker.pid).private
        created = worker.call("tools.serving:open_session", **arguments)
        first, *_ = (worker.call("tools.serving:first_answer", condition=c)[0] for c in subject.conditions)
        figures = {"created": created, "first": created + first, "private": memory(worker.pid).private - before}
        for batch, repeats in BATCHES.items() if subject.each else ():
            asked = {"batch": batch, "repeats": settings.pick(repeats, 2)}
            figures[f"batch {batch}"] = worker.call("tools.serving:latency", **asked)
        figures["private, both"] = memory(worker.pid).private - before
        digests = [worker.call("tools.serving:answer_digest", batch=batch) for batch in BATCHES if subject.each]
    return figures, digests


def _rows(work: str, subject: Subject, samples: Samples, repeats: int) -> Iterator[Row]:
    def row(what: str, key: str, unit: str = "s", promise: Promise | None = None, note: str = "") -> Row:
        values = {name: figures_of(some, key) for name, some in samples.items() if key in some[0]}
        return Row(AREA, f"{work}: {what}", unit, values, promise, note, repeats)

    created = row("create the session", "created", promise=subject.creation)
    yield created
    if subject.untuned:
        values = {OURS: created.values[UNTUNED], PEER: created.values[PEER]}
        yield Row(AREA, f"{work}, not tuned: create the session", "s", values, subject.untuned, samples=repeats)
    answers = "the first answer" if len(subject.conditions) == 1 else "an answer of each"
    yield row(f"private memory after {answers}", "private", "B", subject.private)
    if subject.each:
        both = row(
            "private memory after answers at both batch sizes", "private, both", "B", Promise("within", 1, LITTLE_MORE)
        )
        both.values[LITTLE_MORE] = both.values[UNTUNED] + 4 * MIB
        yield both
    yield row("creation to first answer", "first")
    yield row("creation to first answer, not in the page cache", "cold")
    for batch in BATCHES if subject.each else ():
        yield row(f"steady latency, batch {batch}", f"batch {batch}", promise=AS_FAST, note=subject.each)


def size_text(mib: int) -> str:
    """Return a size as the names of rows have it."""
    nbytes = mib * MIB
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
