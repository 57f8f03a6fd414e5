"""Saves whose Nth system call fails, does half of its work or is the process's last, for every N that they make.

Runs in a process into which `calls.c` was loaded: `python -m tools.faults.interrupting FOLDER [--quick] [SAVE ...]`
prints the results as JSON. After each the path holds the old file or the new one, whole; a save that failed has raised
one typed error, and left nothing beside it and no file open; the next save clears the remains of one that was killed.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import gc
import json
import os
import signal
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

from .cases import Case
from .saves import SAVES, prepare

SOURCE = Path(__file__).with_name("calls.c")
_MOST = 3000  # calls of one save


class Mode(IntEnum):
    """Fate of a system call, as in calls.c."""

    COUNT = 0
    FAIL_ONE = 1
    FAIL_FROM = 2
    FULL_FROM = 3
    SHORT = 4
    KILL = 5
    KILL_HALFWAY = 6


ERRORS = [
    (Mode.FAIL_ONE, errno.EIO),
    (Mode.FAIL_ONE, errno.ENOSPC),
    (Mode.FAIL_ONE, errno.EINTR),
    (Mode.FAIL_ONE, errno.ESTALE),
    (Mode.FAIL_FROM, errno.EIO),
    (Mode.FULL_FROM, errno.ENOSPC),
    (Mode.FULL_FROM, errno.EDQUOT),
]
KILLS = [Mode.KILL, Mode.KILL_HALFWAY]
QUICK = (Mode.FAIL_ONE, errno.EIO), (Mode.FULL_FROM, errno.ENOSPC), Mode.KILL_HALFWAY


def build(folder: Path) -> Path:
    """Compile the library that is loaded before the C library."""
    out = folder / "calls.so"
    flags = ["-shared", "-fPIC", "-O1", "-fno-builtin", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(out), "-ldl"], check=True)
    return out


def run_in(calls: Path, folder: Path, *names: str, quick: bool = False) -> dict[str, Any]:
    """Interrupt these saves, or all, in a process of their own; returns the results of `interrupt`, by save."""
    command = [sys.executable, "-W", "error", "-m", __name__, str(folder), *["--quick"] * quick, *names]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "LD_PRELOAD": str(calls), "LANGUAGE": "C"}  # else argparse looks for translations
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def interrupt(name: str, folder: Path, *, quick: bool = False) -> dict[str, Any]:
    """Interrupt one save at every call; returns how many calls it makes, counts of the outcomes, and the faults.

    A quick one tries two kinds of error and, where a file is there before, one of death.
    """
    control = ctypes.CDLL(None)
    control.fault_last.restype = ctypes.c_char_p
    sources = folder / "sources"
    if not sources.exists():
        sources.mkdir()
        prepare(sources)
    save = SAVES[name]
    results: dict[str, Any] = {"calls": 0, "failed": 0, "survived": 0, "killed": 0, "wrong": [], "hit": {}}
    hit: collections.Counter[str] = collections.Counter()
    for old in save.states(sources):
        case = Case.after_one_save(name, sources, folder / "work", old)
        control.fault_plan(Mode.COUNT, 0, 0)
        case.run()
        results["calls"] = max(results["calls"], control.fault_stop())
        _short(control, case, results)
        for mode, number in QUICK[:2] if quick else ERRORS:
            _fail(control, case, mode, number, results, hit)
        for mode in QUICK[2:] * bool(old) if quick else KILLS:
            _kill(control, case, mode, results)
    results["hit"] = dict(sorted(hit.items()))
    return results


def _open_files(collect: bool = False) -> int:
    if collect:  # what an exception held in a cycle
        gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _complain(results: dict[str, Any], case: Case, what: str, problems: Any) -> None:
    state = "old" if case.old else "new"
    results["wrong"] += [f"{case.name} ({state}), {what}: {problem}" for problem in problems]


def _short(control: Any, case: Case, results: dict[str, Any]) -> None:
    """Have each read and write do half of what is left, which is not an error."""
    case.reset()
    control.fault_plan(Mode.SHORT, 0, 0)
    error = case.run()
    control.fault_stop()
    _complain(results, case, "short reads and writes", [f"raised {error}"] if error else case.wrong(None, ""))


def _fail(
    control: Any, case: Case, mode: Mode, number: int, results: dict[str, Any], hit: collections.Counter[str]
) -> None:
    for at in range(1, _MOST):
        case.reset()
        files = _open_files()
        control.fault_plan(mode, at, number)
        error = case.attempt()
        control.fault_stop()
        which = control.fault_last().decode()
        if not which:
            return
        hit[which] += 1
        results["failed" if error else "survived"] += 1
        what = f"{mode.name} {errno.errorcode[number]} at call {at}, {which}"
        _complain(results, case, what, case.wrong(error, "all" if mode is Mode.FAIL_FROM else which))
        if _open_files() > files and _open_files(collect=True) > files:
            _complain(results, case, what, ["left a file open"])
    raise RuntimeError(f"{case.name}: more than {_MOST} calls")


def _kill(control: Any, case: Case, mode: Mode, results: dict[str, Any]) -> None:
    """A fork dies in the middle; the next save clears what it left."""
    case.reset()
    for at in range(1, _MOST):
        child = os.fork()
        if not child:
            control.fault_plan(mode, at, 0)
            os._exit(0 if case.run() is None else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            return _complain(results, case, f"{mode.name} at call {at}", [f"exit status {status}"] if status else [])
        results["killed"] += 1
        _complain(results, case, f"{mode.name} at call {at}", list(case.killed()))
        case.reset()
    raise RuntimeError(f"{case.name}: more than {_MOST} calls")


def main(arguments: list[str]) -> int:
    """Print the results as JSON."""
    folder, *names = arguments
    quick = names[:1] == ["--quick"]
    results = {name: interrupt(name, Path(folder), quick=quick) for name in names[quick:] or SAVES}
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
