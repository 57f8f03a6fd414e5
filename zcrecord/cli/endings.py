"""Ends of commands: exit status, one line for every error, signals, no scratch file left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from zcrecord.errors import DependencyError, RecordError, SourceError, printable

from . import interrupts
from .option_words import spoken
from .render import wrapped

_PIPE_CLOSED = 141  # 128 + SIGPIPE, as shells have it
_LONGEST = 2000  # characters of an error


@contextlib.contextmanager
def writing(name: str) -> Iterator[None]:
    """Run a block that writes files: errors name the input, and an interrupted block leaves no scratch file."""
    with located(name), _ending_on_signals(), _reporting_closed_pipe():
        yield


@contextlib.contextmanager
def _reporting_closed_pipe() -> Iterator[None]:
    """Turn a closed pipe into an error: a conversion without a reader has failed."""
    try:
        yield
    except BrokenPipeError as error:
        _spare_stdout()
        where = getattr(error, "path", None) or "standard output"
        raise SourceError("the reader closed the pipe; the output is incomplete", path=where) from None


@contextlib.contextmanager
def located(name: str) -> Iterator[None]:
    """Add the input's name to errors that have no path."""
    try:
        yield
    except DependencyError:
        raise
    except RecordError as error:
        raise error.located(path=name) from error.__cause__


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises, so that scratch files are removed."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")):
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup has SIGHUP ignored
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def guarded(prog: str, work: Callable[[], int]) -> int:
    """Run `work` and return its exit status; every error becomes one line on standard error, never a traceback."""
    with interrupts.raised_once():
        return _status(prog, work)


def _status(prog: str, work: Callable[[], int]) -> int:
    """Run `work`; print its error as one line, and return its exit status."""
    try:
        try:
            return work()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, so that a failed flush is reported
    except BrokenPipeError:
        _spare_stdout()
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        tell(prog, "interrupted")
        return interrupts.STATUS
    except MemoryError:
        tell(prog, "error: out of memory")
    except RecordError as error:
        tell(prog, f"error: {spoken(error)}")
    except OSError as error:  # the library's own are RecordErrors
        tell(prog, f"error: {error.filename or 'standard output'}: {error.strerror or error}")
        _spare_stdout()
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        what = f"{type(error).__name__}: {error}; please report it, python -X dev shows where"
        tell(prog, f"error: a fault of {prog} itself, {what}")
    return 1


def tell(prog: str, what: str) -> None:
    """Print a line on standard error, unless it is closed; the line is escaped, and cut if it is very long."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(wrapped(f"{prog}: {printable(what, _LONGEST)}", sys.stderr), file=sys.stderr)


def _spare_stdout() -> None:
    """Redirect a failed standard output to the null device: the interpreter flushes it again at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
