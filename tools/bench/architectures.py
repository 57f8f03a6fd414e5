"""Well-known architectures, exported by torch and served by ONNX Runtime: tuned, not tuned, and from the .onnx.

Each is served with the ONNX Runtime that is installed, and with the oldest that pyproject.toml allows, which pip puts
into the scratch folder (not with --quick). With the installed one, answers of the tuned archive have to equal those of
the .onnx bit for bit. Private memory is what a process has gained since its imports, after answers of both sizes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.bench.harness import OURS, Promise, Row, Settings, collect, require_disk
from tools.bench.session import AS_FAST, LITTLE_MORE, PEER, UNTUNED
from tools.bench.sharing import ONE_COPY, PROCESSES, total_pss
from tools.lower_bounds import PROJECT, lower_bounds
from tools.measure import MIB
from tools.models.architectures import ARCHITECTURES
from tools.worker import Worker, call_alone

__all__ = ["run"]

AREA = "architectures"
EXPORTER = "dynamo"
BATCHES = {1: 5, 16: 1}  # to how many requests in a row
ROUNDS = 3  # of which the median counts
THREADS = (1, 2)
ROOM = 6 << 30  # the models, and the archives of one of them
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Served:
    """Figures of one model by way, whether tuned answers equal those of the .onnx, and the tuned archive's size."""

    figures: dict[str, Figures]
    equal: bool
    tuned_bytes: int


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of serving each architecture, and of all of them with the oldest ONNX Runtime."""
    require_disk(settings.folder, settings.pick(ROOM, 64 * MIB))
    names = list(ARCHITECTURES)[: settings.pick(len(ARCHITECTURES), 2)]
    oldest = None if settings.quick else _oldest_runtime(settings.folder)
    version = call_alone("tools.serving:runtime_version")
    on_oldest = []
    for name, model in _exported(settings, names).items():
        served = _serve(settings, model, None)
        title = ARCHITECTURES[name].title
        assert served.equal, f"{title}: the tuned archive does not answer as the .onnx"
        yield from _rows(f"ONNX Runtime {version}, {title}, {model.stat().st_size / 1e6:.0f} MB", served)
        if oldest is not None:
            on_oldest.append(_serve(settings, model, oldest))
        model.unlink()
    if oldest is not None:
        version = call_alone("tools.serving:runtime_version", oldest)
        yield from _sums(f"ONNX Runtime {version}, all {len(names)} architectures", on_oldest)


def _exported(settings: Settings, names: list[str]) -> dict[str, Path]:
    """Export models in one process, since its imports take longer than most exports."""
    models = {name: settings.folder / f"{name}.onnx" for name in names}
    size = "small" if settings.quick else "real"
    with Worker() as worker:
        for name, path in models.items():
            arguments = {"name": name, "exporter": EXPORTER, "size": size, "path": str(path)}
            worker.call("tools.models.architectures:write_architecture", **arguments)
    return models


def _oldest_runtime(folder: Path) -> Path:
    """Install the oldest ONNX Runtime that pyproject.toml allows into a folder of its own."""
    bounds = lower_bounds(PROJECT.read_text(encoding="utf-8"))
    [wanted] = [bound for bound in bounds if bound.startswith("onnxruntime==")]
    packages = folder / "oldest"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), wanted]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return packages


def _serve(settings: Settings, model: Path, packages: Path | None) -> Served:
    archive, tuned = settings.folder / "model.zcr", settings.folder / "tuned.zcr"
    call_alone("tools.serving:convert", source=str(model), dest=str(archive), durable=False)
    call_alone("tools.serving:tune", packages, source=str(archive), dest=str(tuned))
    paths = {OURS: tuned, UNTUNED: archive, PEER: model}
    figures, digests = _in_turns(settings, paths, packages)
    if packages is None:
        for way, path in paths.items():
            figures[way] |= _together(path)
    served = Served(figures, digests[OURS] == digests[PEER], tuned.stat().st_size)
    for path in (archive, tuned):
        path.unlink()
    return served


def _in_turns(
    settings: Settings, paths: dict[str, Path], packages: Path | None
) -> tuple[dict[str, Figures], dict[str, list[str]]]:
    """Return figures and digests of answers by way, each of a process; the oldest ONNX Runtime has all threads alone.

    The processes answer in turns, so that a slow minute hits all alike.
    """
    figures: dict[str, Figures] = {way: {} for way in paths}
    digests: dict[str, list[str]] = {way: [] for way in paths}
    with ExitStack() as stack:
        workers = {way: stack.enter_context(Worker(packages)) for way in paths}
        for way, worker in workers.items():
            worker.call("tools.serving:prepare")
            figures[way]["before"] = worker.call("tools.serving:private_bytes")
        for threads in THREADS if packages is None else THREADS[-1:]:
            for way, worker in workers.items():
                created = worker.call("tools.serving:open_session", path=str(paths[way]), threads=threads)
                figures[way].setdefault("created", created)  # the first one's: the next finds what it left
                digests[way] += [worker.call("tools.serving:answer_digest", batch=batch) for batch in BATCHES]
            for batch, repeats in BATCHES.items():
                asked = {"batch": batch, "repeats": repeats}
                calls = {w: partial(worker.call, "tools.serving:latency", **asked) for w, worker in workers.items()}
                for way, seconds in collect(settings.pick(ROUNDS, 1), calls).items():
                    figures[way][_latency(batch, threads)] = statistics.median(seconds)
            for way, worker in workers.items():
                private = worker.call("tools.serving:private_bytes") - figures[way]["before"]
                figures[way].setdefault("private", private)
                worker.call("tools.serving:close_session")
    return figures, digests


def _together(path: Path) -> Figures:
    """Return the sum of proportional set sizes of several processes: bare, with a session each, and after an answer."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(PROCESSES)]
        sums = {}
        for what, function, arguments in (
            ("bare", "prepare", {}),
            ("opened", "open_session", {"path": str(path), "threads": 1}),
            ("together", "first_answer", {}),
        ):
            for worker in workers:
                worker.send(f"tools.serving:{function}", **arguments)
            for worker in workers:
                worker.receive()
            sums[what] = float(total_pss(worker.pid for worker in workers))
    return sums


def _latency(batch: int, threads: int) -> str:
    return f"latency, batch {batch}, {threads} thread{'s' if threads > 1 else ''}"


def _rows(work: str, served: Served) -> Iterator[Row]:
    def row(what: str, key: str, unit: str, promise: Promise | None = None, **others: float) -> Row:
        values = {way: some[key] for way, some in served.figures.items()} | others
        return Row(AREA, f"{work}: {what}", unit, values, promise)

    yield row("create the session", "created", "s")
    limit = {LITTLE_MORE: served.figures[UNTUNED]["private"] + 4 * MIB}
    yield row("private memory after answers", "private", "B", Promise("within", 1, LITTLE_MORE), **limit)
    one_copy = {ONE_COPY: served.tuned_bytes + served.figures[OURS]["bare"]}
    promise = Promise("within", 1.15, ONE_COPY)
    yield row(f"{PROCESSES} processes, sum of proportional set sizes", "together", "B", promise, **one_copy)
    for key in (_latency(batch, threads) for threads in THREADS for batch in BATCHES):
        yield row(f"steady {key}", key, "s", AS_FAST)


def _sums(work: str, served: list[Served]) -> Iterator[Row]:
    """Yield one row for each figure, added up; without promise, since this ONNX Runtime may take no packed weights."""
    differing = sum(not one.equal for one in served)
    note = f"tuned answers of {differing} differ from the .onnx's in the last bits" if differing else ""
    keys = {"private": ("private memory after answers", "B")}
    keys |= {key: (f"steady {key}", "s") for key in (_latency(batch, THREADS[-1]) for batch in BATCHES)}
    for key, (what, unit) in keys.items():
        values = {way: sum(one.figures[way][key] for one in served) for way in (OURS, UNTUNED, PEER)}
        yield Row(AREA, f"{work}: {what}", unit, values, note=note)
