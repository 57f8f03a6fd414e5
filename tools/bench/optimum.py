"""A folder as Optimum exports it, an encoder and two decoders of nearly the same weights, served by one process.

One process has all three models open and writes text, from the archive, tuned and not, and from the .onnx files. Sizes
of memory are above what the process has after its imports; resident memory is its proportional set size, in which a
page counts once, however often it is mapped. All have to write the same tokens.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.harness import OURS, Promise, Row, Settings, collect, figures_of, require_disk, seconds_of
from tools.bench.session import AS_FAST, PEER, UNTUNED
from tools.measure import MIB, memory
from tools.models import optimum
from tools.worker import Worker, call_alone

AREA = "optimum"
QUESTION = [30, 41, 52, 16, 1]
STEPS, REPEATS = 24, 9  # tokens of a text, texts that are timed
_models: dict[str, Any] = {}


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of one folder."""
    require_disk(settings.folder, settings.pick(4096, 16) * MIB)
    folder, plain, tuned = (settings.folder / name for name in ("t5", "served", "tuned"))
    size = "small" if settings.quick else "real"
    call_alone("tools.models.optimum:write_folder", task="seq2seq", size=size, folder=str(folder))
    call_alone("tools.bench.optimum:convert_and_tune", source=str(folder), dest=str(plain), tuned=str(tuned))
    ways = {OURS: tuned, UNTUNED: plain, PEER: folder}
    several = settings.pick(3, 1)  # processes of each way
    samples = collect(several, {way: partial(_served, path) for way, path in ways.items()})
    texts = {tuple(one["tokens"]) for found in samples.values() for one in found}
    assert len(texts) == 1, f"not all write the same tokens: {texts}"
    what = f"Optimum's folder of T5, {_stored(folder) / 1e6:.0f} MB, encoder and both decoders"
    stored = {way: float(_stored(path)) for way, path in ways.items()}
    yield Row(AREA, f"{what}: bytes stored", "B", stored, Promise("within", 1.3, PEER))
    for name, figure, unit, promise in (
        ("private memory", "private", "B", Promise("within", 0.1, PEER)),
        ("resident memory", "resident", "B", Promise("within", 0.6, PEER)),
        ("seconds for each token", "seconds", "s", AS_FAST),
    ):
        values = {way: figures_of(found, figure) for way, found in samples.items()}
        yield Row(AREA, f"{what}: {name}", unit, values, promise, samples=several)


def _stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".onnx", optimum.DATA, ".zcr"))


def _served(folder: Path) -> dict[str, Any]:
    """Return the figures of one process, and its text."""
    with Worker() as worker:
        worker.call("tools.serving:prepare")
        before = memory(worker.pid)
        worker.call("tools.bench.optimum:open_models", folder=str(folder))
        tokens, seconds = worker.call("tools.bench.optimum:write_text")
        after = memory(worker.pid)
    grown = {"private": after.private - before.private, "resident": after.pss - before.pss}
    return {"tokens": tokens, "seconds": seconds, **grown}


# -- in processes of their own ---------------------------------------------------------------------------------------


def convert_and_tune(source: str, dest: str, tuned: str) -> None:
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
    texts: list[list[int]] = []

    def write() -> None:
        texts.append(optimum.generate(_models.__getitem__, QUESTION, STEPS)[0])

    seconds = [seconds_of(write) / STEPS for _ in range(REPEATS)]
    return texts[-1], statistics.median(seconds)
