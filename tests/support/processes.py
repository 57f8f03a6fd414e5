"""Programs that tests run, which have to succeed, and the memory of Python code in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def output(*command: str | Path, **options: Any) -> str:
    """Run a command that has to succeed; return what it prints."""
    words = list(map(str, command))
    done: subprocess.CompletedProcess[str] = subprocess.run(words, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(words)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-8000:]}"
    return done.stdout


def quiet(*command: str | Path, **options: Any) -> str:
    """Run a command that has to succeed and to complain of nothing; return what it prints."""
    words = list(map(str, command))
    done: subprocess.CompletedProcess[str] = subprocess.run(words, capture_output=True, text=True, **options)
    assert done.returncode == 0 and not done.stderr, f"{' '.join(words)}\n{done.stderr[-8000:]}"
    return done.stdout


def run_python(code: str, *arguments: object, ok: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own, where a crash or a leak harms no other test."""
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **options)
    if ok:
        assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    return done


MEASURED = """
import sys
from tools.measure import memory, peak_rss
{setup}
private, peak = memory().private, peak_rss()
{work}
print(memory().private - private, peak_rss() - peak)
"""


def growth(setup: str, work: str, *arguments: object) -> tuple[int, int]:
    """Return the bytes of private memory, and of the peak of all memory, that this work adds to a fresh process."""
    code = MEASURED.format(setup=setup, work=work)
    private, peak = output(sys.executable, "-c", code, *map(str, arguments), cwd=ROOT).split()[-2:]
    return int(private), int(peak)
