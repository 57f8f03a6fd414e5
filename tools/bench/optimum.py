"""A folder as Optimum exports it, an encoder and two decoders of nearly the same weights, served by one process.

One process has all three models open and writes text, from the archive, tuned and not, and from the .onnx files. Sizes
of memory are above what the process has after its imports; resident memory is its proportional set size, in which a
page counts once, however often it is mapped. All have to write the same tokens.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.bench.harness import OURS, Promise, Row, Settings, require_disk
from tools.bench.session import AS_FAST, PEER, UNTUNED
from tools.measure import MIB, memory
from tools.models import optimum
from tools.worker import Worker, call_alone

AREA = "optimum"
QUESTION = [30, 41, 52, 16, 1]
STEPS, REPEATS = 24, 9  # tokens of a text, texts that are timed
ROUNDS = 3  # processes of each way, of which the median counts
_models: dict[str, Any] = {}


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of one folder."""
    require_disk(settings.folder, settings.pick(4096, 16) * MIB)
    folder, plain, tuned = (settings.folder / name for name in ("t5", "served", "tuned"))
    size = "small" if settings.quick else "real"
    call_alone("tools.models.optimum:write_folder", task="seq2seq", size=size, folder=str(folder))
    call_alone("tools.bench.optimum:convert_and_tune", source=str(folder), dest=str(plain), tuned=str(tuned))
    ways = {OURS: tuned, UNTUNED: plain, PEER: folder}
    samples: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(settings.pick(ROUNDS, 1)):
        for way, path in ways.items():
            samples[way].append(_served(path))
    texts = {tuple(one["tokens"]) for told in samples.values() for one in told}
    assert len(texts) == 1, f"not all write the same tokens: {texts}"

    def medians(figure: str) -> dict[str, float]:
        return {way: float(statistics.median(one[figure] for one in told)) for way, told in samples.items()}

    what = f"Optimum's folder of T5, {_stored(folder) / 1e6:.0f} MB, encoder and both decoders"
    stored = {way: float(_stored(path)) for way, path in ways.items()}
    several = len(samples[OURS])
    yield Row(AREA, f"{what}: bytes stored", "B", stored, Promise("within", 1.3, PEER))
    yield Row(AREA, f"{what}: private memory", "B", medians("private"), Promise("within", 0.1, PEER), samples=several)
    resident = Promise("within", 0.6, PEER)
    yield Row(AREA, f"{what}: resident memory", "B", medians("resident"), resident, samples=several)
    yield Row(AREA, f"{what}: seconds for each token", "s", medians("seconds"), AS_FAST, samples=several)


def _stored(folder: Path) -> int:
    """Return the bytes of a folder's models or archive."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".onnx", optimum.DATA, ".zcr"))


def _served(folder: Path) -> dict[str, Any]:
    """Return the figures of one process, and its text."""
    with Worker() as worker:
        worker.call("tools.serving:prepare")
        before = memory(worker.pid)
        worker.call("tools.bench.optimum:open_models", folder=str(folder))
        tokens, seconds = worker.call("tools.bench.optimum:write_text")
        after = memory(worker.pid)
        if before is None or after is None or None in (before.pss, after.pss, before.private, after.private):
            raise OSError("proportional set sizes cannot be learnt here; /proc/PID/smaps_rollup is Linux's")
        gained = {"private": after.private - before.private, "resident": after.pss - before.pss}  # type: ignore[operator]
        return {"tokens": tokens, "seconds": seconds, **gained}


# -- in processes of their own ---------------------------------------------------------------------------------------


def convert_and_tune(source: str, dest: str, tuned: str) -> None:
    """Convert a folder, and tune a copy."""
    from zcrecord import onnx

    for path in (dest, tuned):
        onnx.convert(source, path, durable=False)
    onnx.tune(tuned, durable=False)


def open_models(folder: str) -> None:
    """Keep sessions of a folder's models for `write_text`: off its archive, or else of its .onnx files."""
    import onnxruntime

    from zcrecord import load_record
    from zcrecord.onnx import session

    logging.getLogger("zcrecord").setLevel(logging.ERROR)  # it warns of an archive that is not tuned: so on purpose
    archive = Path(folder, "model.zcr")
    record = load_record(archive) if archive.exists() else None
    for name in optimum.SEQ2SEQ:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if record is not None:
            _models[name] = session(record, module=name, sess_options=options)
        else:
            path = Path(folder, f"{name}.onnx")
            _models[name] = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def write_text() -> tuple[list[int], float]:
    """Return the tokens of a text, and the median seconds of each."""
    seconds: list[float] = []
    tokens: list[int] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        tokens, _ = optimum.generate(_models.__getitem__, QUESTION, STEPS)
        seconds.append((time.perf_counter() - start) / STEPS)
    return tokens, statistics.median(seconds)
