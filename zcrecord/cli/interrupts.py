"""Ctrl-C on the command line: one line on standard error and exit status 130, from the first import on.

Handles SIGINT if this process is one of our commands; a program that only imports zcrecord keeps its own handler.
Each command removes its own scratch files.

Imports only modules that the interpreter has loaded already (not `signal`, which imports `enum`): until this module has
run, Ctrl-C is a traceback.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` is made of; typeshed does not have it
import os
import sys
import time

STATUS = 130  # 128 + SIGINT, as shells have it
_COMMANDS = ("zcrecord", "onnx2zc")
_ECHO = 1.0  # seconds: the terminal sends SIGINT to the whole group, and a parent (make, npm, uv) may send it on

_line = b""  # printed when the process ends at once


def _started_as() -> str | None:
    """Return the name of our command that runs in this process, by a script or `python -m`; None for other programs."""
    arguments = getattr(sys, "argv", None) or [""]
    if arguments[0] == "-m":  # its value until Python has found the module
        module = sys.orig_argv[-len(arguments)] if len(sys.orig_argv) >= len(arguments) else ""
        return "zcrecord" if module == "zcrecord" or (module[:1] == "-" and module.endswith("mzcrecord")) else None
    name = os.path.basename(arguments[0]).removesuffix(".exe")
    return name if name in _COMMANDS else None


def _end(_number: int, _frame: object) -> None:
    try:  # noqa: SIM105  # contextlib is not loaded yet
        os.write(2, _line)
    except OSError:
        pass
    os._exit(STATUS)


def _guard_imports() -> None:
    """Make Ctrl-C end this process at once, if it is one of our commands: no file is open yet.

    A KeyboardInterrupt would end in a traceback out of a half-imported module, and some extension modules lose it.
    """
    global _line
    if (command := _started_as()) is None or _signal.getsignal(_signal.SIGINT) is not _signal.default_int_handler:
        return  # such as a shell's background job, which ignores SIGINT
    _line = f"{command}: interrupted\n".encode()
    try:
        _signal.signal(_signal.SIGINT, _end)
    except ValueError:  # not the main thread
        return
    import atexit

    atexit.register(_signal.signal, _signal.SIGINT, _signal.SIG_IGN)  # else it kills an interpreter that closes down


class raised_once:  # noqa: N801  # reads as a context manager does
    """Context in which Ctrl-C raises KeyboardInterrupt, at most once a second, so that cleaning up is not interrupted.

    Has no effect outside the main thread, or if the program has its own handler of SIGINT.
    """

    def __init__(self) -> None:
        self._due = 0.0
        self._before: object = None

    def __enter__(self) -> None:
        before = _signal.getsignal(_signal.SIGINT)
        if before is _end or before is _signal.default_int_handler:
            try:
                _signal.signal(_signal.SIGINT, self._interrupt)
            except ValueError:  # not the main thread
                return
            self._before = before

    def _interrupt(self, _number: int, _frame: object) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _ECHO
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        global _line
        if self._before is not None:
            if self._due:
                _line = b""  # printed already; from now on Ctrl-C only ends the process
            _signal.signal(_signal.SIGINT, self._before)


_guard_imports()
