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
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from zcrecord.errors import RecordError, SourceError
from zcrecord.fleet import Job, Outcome, convert_one, plan
from zcrecord.fleet.sources import label
from zcrecord.storage.threads import cores

from .endings import option_advice, print_message, writing
from .parsers import Arguments
from .render import Printer, count_text, name_text, printers, showing_progress

_TRIES = 3  # of one job, if its fault may be temporary
_KILLED = "its worker was killed {tries} times; is there enough memory for so many --jobs?"
_STATES = "converted", "kept", "refused", "failed"

_is_ending = False  # whether this worker was told to end
_has_job = False  # whether a job is running in this worker


class _JobResult(NamedTuple):
    """State, error and archive size of a job's outcome, or "failed" with the error of its last try."""

    job: Job
    state: str
    error: str
    nbytes: int = 0


def run_fleet(args: Arguments) -> int:
    """Convert all models below IN to archives below OUT; return 1 if one was refused or failed."""
    if "-" in (args.source, args.dest):
        args.refuse("--jobs is for folders and URLs, not for standard streams")
    if args.dest_format not in (None, "zcr"):
        args.refuse("--jobs makes archives; --to is for a single file or folder")
    started = time.perf_counter()
    out, errors = printers(args.quiet)
    results: list[_JobResult] = []
    with writing(args.source):
        options = args.values("source_format", "alignment", "max_shard_size", "durable", "force")
        jobs = plan(args.source, args.dest, **options)
        with showing_progress("zcrecord", errors) as progress:
            total, done = sum(job.nbytes for job in jobs), 0

            def add_result(result: _JobResult) -> None:
                nonlocal done
                results.append(result)
                done += result.job.nbytes
                progress(done, total)

            _run_jobs(jobs, min(cores(args.jobs or None), len(jobs)), add_result)
    faults = [result for result in results if result.state in ("refused", "failed")]
    for fault in sorted(faults, key=lambda fault: fault.job.source):
        print_message("zcrecord", f"error: {fault.error}")
    _print_summary(args, out, results, time.perf_counter() - started)
    return 1 if faults else 0


def _print_summary(args: Arguments, out: Printer, results: list[_JobResult], seconds: float) -> None:
    """Print how many models were converted; with --json also the fault of each that was not."""
    by_state = {state: [result for result in results if result.state == state] for state in _STATES}
    counts = {state: len(group) for state, group in by_state.items()}
    models, nbytes = len(results), sum(result.nbytes for result in results)
    if args.json:
        faults = {state: list(map(_fault_json, by_state[state])) for state in ("refused", "failed")}
        out.json({"models": models, **counts, **faults, "archive_bytes": nbytes, "seconds": seconds})
        return
    parts = [f"{counts['converted']} of {count_text(models, 'model')} converted", f"{counts['kept']} kept"]
    parts += [f"{counts[state]} {state}" for state in ("refused", "failed") if counts[state]]
    out.line(f"{name_text(label(args.dest))}: {', '.join(parts)}, {out.size(nbytes)} out, {seconds:.2f} s")


def _fault_json(result: _JobResult) -> dict[str, str]:
    return {"source": label(result.job.source), "dest": label(result.job.dest), "error": result.error}


def _run_jobs(jobs: list[Job], count: int, add_result: Callable[[_JobResult], None]) -> None:
    """Run all jobs, `count` at a time, and call `add_result` for each; temporary faults are tried again at the end."""
    waiting = deque((job, 1) for job in jobs)  # with the number of the next try
    running: dict[Future[Outcome], tuple[Job, int, ProcessPoolExecutor]] = {}
    with _ending_workers():
        idle = [_new_worker() for _ in range(count)]
        while waiting or running:
            while waiting and idle:
                job, tries = waiting.popleft()
                worker = idle.pop()
                running[_submit(worker, job)] = job, tries, worker
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, tries, worker = running.pop(future)
                error = future.exception()
                idle.append(_new_worker() if isinstance(error, BrokenProcessPool) else worker)
                if error is None:
                    outcome = future.result()
                    add_result(_JobResult(job, outcome.state, outcome.error, outcome.nbytes))
                elif isinstance(error, SourceError | BrokenProcessPool) and tries < _TRIES:
                    waiting.append((job, tries + 1))
                else:
                    add_result(_JobResult(job, "failed", _error_line(job, error, tries)))
        for worker in idle:
            worker.shutdown()


def _error_line(job: Job, error: BaseException, tries: int) -> str:
    """Return the error of a job's last try in one line, with the source."""
    place = label(job.source)
    if isinstance(error, BrokenProcessPool):
        return f"{place}: {_KILLED.format(tries=tries)}"
    if isinstance(error, RecordError):
        return error.located(path=place).describe(option_advice)
    if isinstance(error, MemoryError):
        return f"{place}: out of memory; run fewer --jobs"
    return f"{place}: a fault of zcrecord itself, {type(error).__name__}: {error}; please report it"


def _new_worker() -> ProcessPoolExecutor:
    """Return a pool of one process, which starts with its first job: one that is killed breaks no other's pool."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)


@contextlib.contextmanager
def _ending_workers() -> Iterator[None]:
    """End the processes that a block started as SIGTERM ends a command, if it raises: no scratch file is left."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        started = set(multiprocessing.active_children()) - before
        for process in started:
            process.terminate()
        for process in started:
            process.join()
        raise


def _submit(worker: ProcessPoolExecutor, job: Job) -> Future[Outcome]:
    """Submit a job; a process that this starts ignores Ctrl-C, which terminals send to all: the command ends it."""
    can_block = hasattr(signal, "pthread_sigmask")  # not on Windows
    if can_block:
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # here, because its start unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return worker.submit(_run_job, job)
    except BrokenProcessPool as error:  # it was killed between two jobs
        failed: Future[Outcome] = Future()
        failed.set_exception(error)
        return failed
    finally:
        if can_block:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


# The functions below run in a worker process.


def _start_worker() -> None:
    """Make this worker end by an exception at SIGTERM, and at once when the command has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_worker)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _end_worker(number: int, _frame: Any) -> None:
    """End this worker: in a job by an exception, so that scratch files are removed; between jobs at once."""
    global _is_ending
    if not _has_job:
        os._exit(128 + number)
    if not _is_ending:  # a second signal would come while scratch files are removed
        _is_ending = True
        raise SystemExit(128 + number)


def _exit_with_parent() -> None:
    """Wait for the command's process, and end this worker at once when it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_job(job: Job) -> Outcome:
    """Run one job; ends this worker if it is told to end meanwhile."""
    global _has_job
    try:
        try:
            _has_job = True
            return convert_one(job)
        finally:
            _has_job = False
    except SystemExit as request:  # the pool would take it for the job's result, and keep this worker
        os._exit(int(request.code or 1))
