"""Saves on a disk that is full, at several degrees, a small tmpfs of its own; then there is room again.

`python -m tools.faults.filling FOLDER` is run by `fill_disks`, in a namespace of mounts where FOLDER is that disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .cases import Case
from .saves import SAVES, prepare

_ROOM = 3 << 20  # bytes of the disk
_MOUNT = f'mount -t tmpfs -o size={_ROOM} none "$0" && exec "$@"'
_PARTS = (0, 0.1, 0.5, 0.9)  # of what a save needs is free


def mounting() -> list[str] | None:
    """Return the command by which this process may mount for itself alone, None if it may not."""
    for command in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        with tempfile.TemporaryDirectory() as folder:
            if not subprocess.run([*command, "sh", "-c", _MOUNT, folder, "true"], capture_output=True).returncode:
                return command
    return None


def run_on_disk(command: list[str], folder: Path, *arguments: str) -> str:
    """Run Python where `folder` is a small disk; returns what it prints."""
    whole = [*command, "sh", "-c", _MOUNT, str(folder), sys.executable, "-W", "error", *arguments]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(whole, cwd=root, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-4000:]}")
    return done.stdout


def fill_disks(command: list[str], folder: Path) -> dict[str, Any]:
    """Run every save on a full disk; returns how many were refused, and the faults."""
    results: dict[str, Any] = json.loads(run_on_disk(command, folder, "-m", __name__, str(folder)))
    return results


def _fill(case: Case, part: float) -> tuple[bool, list[str]]:
    """Save where too little is free; returns True if that was refused, and the faults."""
    case.reset()
    ballast = case.folder.parent / "ballast"
    disk = os.statvfs(case.folder)
    free = disk.f_bavail * disk.f_frsize - int(part * sum(map(len, case.new.values()))) // disk.f_frsize * disk.f_frsize
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free)
    before = os.statvfs(case.folder).f_bavail
    error = case.attempt()
    wrong = list(case.wrong(error, ""))
    if error is not None and os.statvfs(case.folder).f_bavail != before:
        wrong.append("less is free than before")
    ballast.unlink()
    error_then = case.run()
    wrong += [f"then, with room: {problem}" for problem in case.wrong(error_then, "")]
    wrong += [f"then, with room: {error_then}"] if error_then else []
    return error is not None, [f"{case.name}, {part:.0%} free: {problem}" for problem in wrong]


def main(arguments: list[str]) -> int:
    """Print the results as JSON."""
    saves, refused = 0, 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        sources = Path(name)
        prepare(sources)
        for what, save in SAVES.items():
            for old in save.states(sources):
                case = Case.after_one_save(what, sources, Path(arguments[0]) / "work", old)
                for part in _PARTS:
                    one, problems = _fill(case, part)
                    saves += 1
                    refused += one
                    wrong += problems
    print(json.dumps({"saves": saves, "refused": refused, "wrong": wrong}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
