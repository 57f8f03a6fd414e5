"""`zcrecord convert --jobs N`: a fleet of conversions by processes of this machine, and its report.

Runs `zcrecord.fleet.convert_one` in worker processes, starts them again when one is killed, and ends them with the
command. `zcrecord.fleet` lists the conversions, runs one, and skips models that are converted already.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from zcrecord.errors import RecordError, SourceError
from zcrecord.fleet import Job, Outcome, convert_one, plan
from zcrecord.fleet.sources import shown as shown_place
from zcrecord.storage.threads import cores

from .endings import option_advice, tell, writing
from .parsers import Arguments
from .render import Printer, Progress, counted, printers, showing_progress, shown

_TRIES = 3  # of one job, if its fault may be temporary
_KILLED = "its worker was killed {tried} times; is there enough memory for so many --jobs?"

_ending = False  # whether this worker was told to end
_working = False  # whether a job is running in this worker


class _Results:
    """Results of all jobs: outcomes, and the errors of those that failed at every try."""

    def __init__(self, jobs: list[Job], progress: Progress) -> None:
        self.outcomes: list[Outcome] = []
        self.failed: list[tuple[Job, str]] = []
        self._progress, self._done, self._bytes = progress, 0, sum(job.nbytes for job in jobs)

    def done(self, job: Job) -> None:
        """Report that one more job has ended."""
        self._done += job.nbytes
        self._progress(self._done, self._bytes)

    def count(self, state: str) -> int:
        """Return the number of jobs with this outcome."""
        return sum(outcome.state == state for outcome in self.outcomes)


def run_fleet(args: Arguments) -> int:
    """Convert all models below IN to archives below OUT; return 1 if one was refused or failed."""
    if "-" in (args.source, args.dest):
        args.refuse("--jobs is for folders and URLs, not for standard streams")
    if args.dest_format not in (None, "zcr"):
        args.refuse("--jobs makes archives; --to is for a single file or folder")
    started = time.perf_counter()
    out, errors = printers(args.quiet)
    with writing(args.source):
        options = args.values("source_format", "alignment", "max_shard_size", "durable", "force")
        jobs = plan(args.source, args.dest, **options)
        with showing_progress("zcrecord", errors) as progress:
            results = _Results(jobs, progress)
            _run(jobs, min(cores(args.jobs or None), len(jobs)), results)
    refused = [(o.job, o.error) for o in results.outcomes if o.state == "refused"]
    faults = {"refused": refused, "failed": results.failed}
    for _, message in sorted([*refused, *results.failed], key=lambda pair: pair[0].source):
        tell("zcrecord", f"error: {message}")
    _print(args, out, len(jobs), results, faults, time.perf_counter() - started)
    return 1 if any(faults.values()) else 0


def _print(
    args: Arguments,
    out: Printer,
    models: int,
    results: _Results,
    faults: dict[str, list[tuple[Job, str]]],
    seconds: float,
) -> None:
    archive_bytes = sum(outcome.nbytes for outcome in results.outcomes)
    converted, kept = results.count("converted"), results.count("kept")
    if args.json:
        named = {
            kind: [{"source": shown_place(job.source), "dest": shown_place(job.dest), "error": e} for job, e in group]
            for kind, group in faults.items()
        }
        counts = {"models": models, "converted": converted, "kept": kept}
        out.json({**counts, **named, "archive_bytes": archive_bytes, "seconds": seconds})
        return
    parts = [f"{converted} of {counted(models, 'model')} converted", f"{kept} kept"]
    parts += [f"{len(group)} {kind}" for kind, group in faults.items() if group]
    out.line(f"{shown(shown_place(args.dest))}: {', '.join(parts)}, {out.size(archive_bytes)} out, {seconds:.2f} s")


def _run(jobs: list[Job], count: int, results: _Results) -> None:
    """Run all jobs, `count` at a time; a job with a temporary fault is tried again after all others.

    The last try of a job runs alone: a killed worker ends all others, too, and only then is its job known.
    """
    waiting = deque((job, 1) for job in jobs)
    while waiting:
        with _workers(count) as workers:
            _work_off(waiting, workers, count, results)


def _work_off(waiting: deque[tuple[Job, int]], workers: ProcessPoolExecutor, count: int, results: _Results) -> None:
    """Run jobs until none is left or a worker is killed; jobs that were running then go back to `waiting`."""
    running: dict[Future[Outcome], tuple[Job, int]] = {}
    killed = False
    while running or (waiting and not killed):
        while waiting and len(running) < count and not killed and _may_start(waiting[0][1], running):
            job, tried = waiting.popleft()
            try:
                running[_submit(workers, job)] = job, tried
            except BrokenProcessPool:
                waiting.appendleft((job, tried))
                killed = True
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job, tried = running.pop(future)
            error = future.exception()
            killed |= isinstance(error, BrokenProcessPool)
            if isinstance(error, SourceError | BrokenProcessPool) and tried < _TRIES:
                waiting.append((job, tried + 1))
                continue
            if error is None:
                results.outcomes.append(future.result())
            else:
                results.failed.append((job, _error_line(job, error, tried)))
            results.done(job)


def _may_start(tried: int, running: dict[Future[Outcome], tuple[Job, int]]) -> bool:
    """Return True if a job may run beside the running ones."""
    return not running or _TRIES not in (tried, *(others for _, others in running.values()))


def _error_line(job: Job, error: BaseException, tried: int) -> str:
    """Return the error of a job that failed, as one line."""
    place = shown_place(job.source)
    if isinstance(error, BrokenProcessPool):
        return f"{place}: {_KILLED.format(tried=tried)}"
    if isinstance(error, RecordError):
        return error.located(path=place).describe(option_advice)
    if isinstance(error, MemoryError):
        return f"{place}: out of memory; run fewer --jobs"
    return f"{place}: a fault of zcrecord itself, {type(error).__name__}: {error}; please report it"


@contextlib.contextmanager
def _workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes; an exception ends them as SIGTERM ends a command, so that no scratch file is left."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True)


def _submit(workers: ProcessPoolExecutor, job: Job) -> Future[Outcome]:
    """Submit a job; a process that this starts ignores Ctrl-C, which terminals send to all: the command ends it."""
    if not hasattr(signal, "pthread_sigmask"):
        return workers.submit(_work, job)
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # here, because its start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return workers.submit(_work, job)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a worker.


def _begin() -> None:
    """Make this worker end by an exception at SIGTERM, and at once when the command has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_follow, daemon=True).start()


def _end(number: int, _frame: Any) -> None:
    """End this worker: in a job by an exception, so that scratch files are removed; between jobs at once."""
    global _ending
    if not _working:
        os._exit(128 + number)
    if not _ending:  # a second signal would come while scratch files are removed
        _ending = True
        raise SystemExit(128 + number)


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(job: Job) -> Outcome:
    global _working
    try:
        try:
            _working = True
            return convert_one(job)
        finally:
            _working = False
    except SystemExit as ended:  # the pool would take it for the job's result, and keep this worker
        os._exit(int(ended.code or 1))
