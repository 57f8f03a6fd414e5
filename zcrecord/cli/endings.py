"""Ends of commands: exit status, one line for every error, signals, no scratch file left behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from zcrecord.errors import Advice, DependencyError, RecordError, SourceError, printable

_INTERRUPTED, _PIPE_CLOSED = 130, 141  # exit statuses of shells: 128 + SIGINT, 128 + SIGPIPE
_REPEATED = 1.0  # seconds: the terminal sends SIGINT to the whole group, and a parent (make, npm, uv) may send it on
_MAX_MESSAGE = 2000  # characters
_OPTIONS = {  # for arguments whose option does not have their name; "" if there is none
    "cache": "$ZCRECORD_CACHE",
    "dest_format": "--to",
    "embedded": "--embedded {} of ls, verify and check",
    "external": "zcrecord to-onnx --external",
    "mmap": "",
    "source_format": "--from",
    "storage_options": "the URL, as https://user:password@host/",
}


def option_advice(advice: Advice) -> str:
    """Return an error's advice with an option in the place of the Python argument; "" if no option does it."""
    option = _OPTIONS.get(advice.argument, "--" + advice.argument.replace("_", "-"))
    return advice.text.format(option.format(advice.value)) if option else ""


def error_json(error: RecordError) -> dict[str, Any]:
    """Return an error for `--json`."""
    message = error.text(option_advice)
    return {"type": type(error).__name__, "message": message, "tensor": error.tensor, "offset": error.offset}


@contextlib.contextmanager
def writing(name: str) -> Iterator[None]:
    """Run a block that writes files: errors name the input, and an interrupted block leaves no scratch file."""
    with located(name), _ending_on_signals():
        try:
            yield
        except BrokenPipeError as error:  # a conversion without a reader has failed
            _discard_stdout()
            where = getattr(error, "path", None) or "standard output"
            raise SourceError("the reader closed the pipe; the output is incomplete", path=where) from None


@contextlib.contextmanager
def located(name: str) -> Iterator[None]:
    """Add the input's name to errors of a block that have no path, but not to those of a missing package."""
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

    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # Windows has no SIGHUP
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup has SIGHUP ignored
                handlers[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupted_once(*, last: bool) -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt at most once a second, so that it does not interrupt cleaning up.

    If the block is the `last` of this process, Ctrl-C afterwards ends the process at once. Has no effect outside the
    main thread, or if the program has its own handler of SIGINT, such as a shell's background job, which ignores it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored_until = 0.0

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal ignored_until
        if (now := time.monotonic()) >= ignored_until:
            ignored_until = now + _REPEATED
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, (lambda *_: os._exit(_INTERRUPTED)) if last else handler)
        if last:
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # else Ctrl-C kills the ending interpreter


def run_command(prog: str, work: Callable[[], int]) -> int:
    """Return the exit status of `work`, or of its error, which becomes one line on standard error, no traceback."""
    try:
        try:
            return work()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, so that a failed flush is reported
    except BrokenPipeError:
        _discard_stdout()
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        print_message(prog, "interrupted")
        return _INTERRUPTED
    except MemoryError:
        print_message(prog, "error: out of memory")
    except RecordError as error:
        print_message(prog, f"error: {error.describe(option_advice)}")
    except OSError as error:  # the library's own are RecordErrors
        print_message(prog, f"error: {error.filename or 'standard output'}: {error.strerror or error}")
        _discard_stdout()
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        report = f"{type(error).__name__}: {error}; please report it, python -X dev shows where"
        print_message(prog, f"error: a fault of {prog} itself, {report}")
    return 1


def print_message(prog: str, text: str) -> None:
    """Print a line on standard error, unless it is closed; the text is escaped, and cut if it is very long."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"{prog}: {printable(text, _MAX_MESSAGE)}", file=sys.stderr)


def _discard_stdout() -> None:
    """Redirect standard output to the null device if it fails: the interpreter flushes it again at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
