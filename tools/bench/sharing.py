"""One archive served by four processes at once: what they take together, against one copy of the weights.

Every process is measured three times in its life: bare, having imported everything and done the same work on next to
nothing; over the archive; and with a copy of its own, which the figures have to notice. They are ONNX Runtime sessions
on a model whose If has one matrix in both branches, and on a tuned GPT, and torch workers, forked and spawned, by hand
and by a DataLoader.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from tools.bench.harness import OURS, Promise, Row, Settings, require_disk
from tools.bench.session import SPEED, UNTUNED, size_text
from tools.measure import MIB, memory
from tools.models import branches, gpt
from tools.worker import Worker, call_alone, call_at_once

AREA = "sharing"
PROCESSES = 4
MIB_IN_ALL = 512
BARE, SHARED, OWN = WAYS = ("bare", "shared", "own")  # stages of a worker, in this order
STARTS = ("fork", "spawn", "DataLoader, fork", "DataLoader, spawn")
ONE_COPY = "one copy and four bare processes"
PATIENCE = 120  # seconds after which a worker that does not answer has failed


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of four processes over one archive."""
    mib = settings.pick(MIB_IN_ALL, 8)
    require_disk(settings.folder, 9 * mib * MIB)
    paths = write_models(settings.folder, mib)
    sums, speed = serve(paths), _for_speed(paths)
    work = f"{PROCESSES} ONNX Runtime sessions, one weight in two branches, {size_text(mib)}: memory"
    yield _row(work, sums, paths[SHARED], {SPEED: speed, ".onnx": sums[OWN]})
    # Each weight of a tuned archive is used in one form, packed or as it was.
    (folder := settings.folder / "gpt").mkdir()
    paths = write_models(folder, mib, gpt.write_gpt)
    tuned = paths | {SHARED: str(folder / "tuned.zcr")}
    call_alone("tools.serving:tune", source=paths[SHARED], dest=tuned[SHARED])
    sums = serve(tuned)
    others = {UNTUNED: serve(paths)[SHARED], SPEED: _for_speed(paths), ".onnx": sums[OWN]}
    work = f"{PROCESSES} ONNX Runtime sessions, GPT, {size_text(mib)}: memory"
    yield _row(work, sums, paths[SHARED], others)
    path = write_archive(settings.folder, mib)
    for start in STARTS[: settings.pick(len(STARTS), 1)]:
        sums = call_alone("tools.bench.sharing:torch_workers", path=str(path), start=start)
        work = f"{PROCESSES} torch workers ({start}) over one archive of {size_text(mib)}: memory"
        yield _row(work, sums, path, {"a clone in each": sums[OWN]})


def _for_speed(paths: dict[str, str]) -> int:
    return serve({BARE: paths[BARE], OWN: paths[SHARED]}, memory="speed")[OWN]


def _row(work: str, sums: dict[str, int], archive: str | Path, others: dict[str, int]) -> Row:
    values = {OURS: sums[SHARED], ONE_COPY: os.path.getsize(archive) + sums[BARE], **others}
    note = "sum of proportional set sizes"
    return Row(AREA, work, "B", {k: float(v) for k, v in values.items()}, Promise("within", 1.15, ONE_COPY), note)


def total_pss(pids: Iterable[int]) -> int:
    """Return the sum of proportional set sizes: what the processes take together, shared pages counted once."""
    return sum(memory(pid).pss for pid in pids)


# -- ONNX Runtime ----------------------------------------------------------------------------------------------------


def write_models(
    folder: Path, mib: int, write: Callable[[IO[bytes], int], object] = branches.write_branches
) -> dict[str, str]:
    """Write a model, by default the one whose If has a matrix in both branches: tiny, as an archive, and as .onnx."""
    paths = {BARE: str(folder / "tiny.onnx"), SHARED: str(folder / "model.zcr"), OWN: str(folder / "model.onnx")}
    for way, size in ((BARE, 1), (OWN, mib)):
        with open(paths[way], "wb") as sink:
            write(sink, size)
    call_alone("tools.serving:convert", source=paths[OWN], dest=paths[SHARED])
    return paths


def serve(paths: dict[str, str], given: dict[str, Any] | None = None, **options: Any) -> dict[str, int]:
    """Return, by way, what four processes take together that answer requests over that way's model at once.

    Every process takes both branches each time. `given` and `options`, these for archives alone, are as
    `tools.serving` has them.

    Raises:
        AssertionError: answers differ among the processes, or between the two forms of the model.
    """
    sums, answers = {}, {}
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(PROCESSES)]
        call_at_once(workers, "tools.serving:prepare")
        for way, path in paths.items():
            own = options if path.endswith(".zcr") else {}
            call_at_once(workers, "tools.serving:open_session", path=path, **own)
            ask = partial(call_at_once, workers, "tools.serving:first_answer", given=given)
            answers[way] = [[values for _, values in ask(condition=condition)] for condition in (False, True)]
            sums[way] = total_pss(worker.pid for worker in workers)
    for way, found in answers.items():
        assert all(one == of_branch[0] for of_branch in found for one in of_branch), f"{way}: processes differ: {found}"
    if SHARED in answers and OWN in answers:
        np.testing.assert_allclose(answers[SHARED], answers[OWN], rtol=1e-3, atol=1e-4)
    return sums


# -- torch -----------------------------------------------------------------------------------------------------------


def write_archive(folder: Path, mib: int) -> Path:
    """Write 8 equally large matrices, `mib` MiB in all, of which a worker can say whether it read them all."""
    import zcrecord

    path = folder / "shared.zcr"
    weights = {f"blocks.{i}.weight": np.full((mib, MIB // 32), i + 1, np.float32) for i in range(8)}
    zcrecord.save_record(weights, path, durable=False)
    return path


def torch_workers(path: str, start: str) -> dict[str, int]:
    """Return, by way, what this process and four torch workers of it take together, over the archive at `path`.

    To be called in a process of its own, which has the record opened before it starts the workers: forked ones inherit
    it, spawned ones get it pickled, that is, by its path.

    Raises:
        AssertionError: a worker's tensors were not what was saved.
    """
    import torch

    import zcrecord

    torch.set_num_threads(1)  # threads of the parent would be missing in a forked child, and it waits for them
    record = zcrecord.load_record(path)
    by_loader, method = start.startswith("DataLoader"), start.rpartition(" ")[2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forking where there are threads
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than the machine has cores
        return (_loader_sums if by_loader else _process_sums)(Stages(record), method)


class Stages:
    """Work of one worker at each stage; picklable, with objects of the worker's own."""

    def __init__(self, record: Any) -> None:
        self._record = record
        self._tensors: Any = None

    def __getitem__(self, way: str) -> tuple[int, float]:
        """Hold the tensors this way, read them all, and return the process's number and what they add up to."""
        import torch

        torch.set_num_threads(1)
        names = list(self._record)[:1] if way == BARE else None
        self._tensors = self._record.torch(names=names, writable=False)
        if way == BARE:  # one row: everything on the way is imported and in place, and next to nothing read
            self._tensors = {name: tensor[:1] for name, tensor in self._tensors.items()}
        elif way == OWN:
            self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        return os.getpid(), float(sum(tensor.mean().item() for tensor in self._tensors.values()))


def _process_sums(stages: Stages, method: str) -> dict[str, int]:
    context: Any = multiprocessing.get_context(method)
    barrier, results = context.Barrier(PROCESSES + 1), context.SimpleQueue()
    arguments = (stages, barrier, results)
    workers = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()

    def stage(_: str) -> list[tuple[int, float]]:
        barrier.wait(PATIENCE)
        return [results.get() for _ in workers]

    try:
        return _sums(stage, lambda: barrier.wait(PATIENCE))
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _work(stages: Stages, barrier: threading.Barrier, results: Any) -> None:
    for way in WAYS:
        found = stages[way]
        barrier.wait(PATIENCE)  # all have read everything; what follows is put while nobody is measured
        results.put(found)
        barrier.wait(PATIENCE)


def _loader_sums(stages: Any, method: str) -> dict[str, int]:
    from torch.utils.data import DataLoader

    asked: list[str] = []
    loader: Any = DataLoader(
        stages, batch_size=None, sampler=asked, num_workers=PROCESSES, multiprocessing_context=method,
        persistent_workers=True, prefetch_factor=1, collate_fn=_unchanged, timeout=PATIENCE,
    )  # fmt: skip

    def stage(way: str) -> list[tuple[int, float]]:
        asked[:] = [way] * PROCESSES  # handed out in turn, so one to each worker
        return list(loader)

    return _sums(stage, lambda: None)


def _unchanged(sample: Any) -> Any:
    return sample


def _sums(stage: Callable[[str], list[tuple[int, float]]], done: Callable[[], object]) -> dict[str, int]:
    sums = {}
    for way in WAYS:
        found = stage(way)
        pids, means = {pid for pid, _ in found}, {mean for _, mean in found}
        assert len(pids) == PROCESSES, f"{way}: the work was done by {len(pids)} processes"
        assert means == {1.0 if way == BARE else 36.0}, f"{way}: other bytes than were saved: {means}"
        sums[way] = total_pss([os.getpid(), *pids])
        done()
    return sums
