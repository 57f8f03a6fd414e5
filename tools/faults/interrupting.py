"""Saves whose Nth system call fails, does half of its work or is the process's last, for every N that they make.

Runs in a process into which `calls.c` was loaded: `python -m tools.faults.interrupting FOLDER [--quick] [SAVE ...]`
prints what came of it as JSON. After each the path holds the old file or the new one, whole; what failed says so by
one typed error, and has left nothing beside it and no file open; what was killed has left what the next save clears.
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
    """Compile what is loaded before the C library."""
    out = folder / "calls.so"
    flags = ["-shared", "-fPIC", "-O1", "-fno-builtin", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(out), "-ldl"], check=True)
    return out


def run_in(calls: Path, folder: Path, *names: str, quick: bool = False) -> dict[str, Any]:
    """Interrupt these saves, or all, in a process of their own; returns what `interrupt` does, by save."""
    command = [sys.executable, "-W", "error", "-m", __name__, str(folder), *["--quick"] * quick, *names]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "LD_PRELOAD": str(calls), "LANGUAGE": "C"}  # else argparse looks for translations
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def interrupt(name: str, folder: Path, *, quick: bool = False) -> dict[str, Any]:
    """Interrupt one save at every call; returns how many calls it makes, how often what was done, and what is wrong.

    A quick one has two kinds of error and, where a file is there before, one of death.
    """
    control = ctypes.CDLL(None)
    control.fault_last.restype = ctypes.c_char_p
    sources = folder / "sources"
    if not sources.exists():
        sources.mkdir()
        prepare(sources)
    save = SAVES[name]
    told: dict[str, Any] = {"calls": 0, "failed": 0, "survived": 0, "killed": 0, "wrong": [], "hit": {}}
    hit: collections.Counter[str] = collections.Counter()
    for old in save.states(sources):
        case = Case(name, sources, folder / "work", old, {})
        case.reset()
        if (error := case.run()) is not None:  # everything is imported by now
            raise RuntimeError(f"{name}: {error}")
        case = case._replace(new=case.content())
        case.reset()
        control.fault_plan(Mode.COUNT, 0, 0)
        case.run()
        told["calls"] = max(told["calls"], control.fault_stop())
        _short(control, case, told)
        for mode, number in QUICK[:2] if quick else ERRORS:
            _fail(control, case, mode, number, told, hit)
        for mode in QUICK[2:] * bool(old) if quick else KILLS:
            _kill(control, case, mode, told)
    told["hit"] = dict(sorted(hit.items()))
    return told


def _open_files(collect: bool = False) -> int:
    if collect:  # what an exception held in a cycle
        gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _complain(told: dict[str, Any], case: Case, what: str, problems: Any) -> None:
    state = "old" if case.old else "new"
    told["wrong"] += [f"{case.name} ({state}), {what}: {problem}" for problem in problems]


def _short(control: Any, case: Case, told: dict[str, Any]) -> None:
    """Have each read and write do half of what is left; this is no error."""
    case.reset()
    control.fault_plan(Mode.SHORT, 0, 0)
    error = case.run()
    control.fault_stop()
    _complain(told, case, "short reads and writes", [f"raised {error}"] if error else case.wrong(None, ""))


def _fail(
    control: Any, case: Case, mode: Mode, number: int, told: dict[str, Any], hit: collections.Counter[str]
) -> None:
    for at in range(1, _MOST):
        case.reset()
        files = _open_files()
        control.fault_plan(mode, at, number)
        try:
            error = case.run()
        except Exception as untyped:
            error = f"{type(untyped).__name__}: {untyped}"
        control.fault_stop()
        which = control.fault_last().decode()
        if not which:
            return
        hit[which] += 1
        told["failed" if error else "survived"] += 1
        what = f"{mode.name} {errno.errorcode[number]} at call {at}, {which}"
        _complain(told, case, what, case.wrong(error, "all" if mode is Mode.FAIL_FROM else which))
        if _open_files() > files and _open_files(collect=True) > files:
            _complain(told, case, what, ["left a file open"])
    raise RuntimeError(f"{case.name}: more than {_MOST} calls")


def _kill(control: Any, case: Case, mode: Mode, told: dict[str, Any]) -> None:
    """A fork dies in the middle; the next save clears what it left."""
    case.reset()
    for at in range(1, _MOST):
        child = os.fork()
        if not child:
            control.fault_plan(mode, at, 0)
            os._exit(0 if case.run() is None else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            return _complain(told, case, f"{mode.name} at call {at}", [f"exit status {status}"] if status else [])
        told["killed"] += 1
        _complain(told, case, f"{mode.name} at call {at}", list(case.killed()))
        case.reset()
    raise RuntimeError(f"{case.name}: more than {_MOST} calls")


def main(arguments: list[str]) -> int:
    """Print what came of it."""
    folder, *names = arguments
    quick = names[:1] == ["--quick"]
    told = {name: interrupt(name, Path(folder), quick=quick) for name in names[quick:] or SAVES}
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
