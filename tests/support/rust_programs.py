"""Rust programs that tests build around zcrecord.rs and generated modules, by every rustc that is there.

The oldest one that the sources are for is Debian 12's, 1.63; a newer one on PATH is asked as well.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

from exhaustive import whole
from processes import quiet

SOURCES = Path(__file__).parents[1] / "programs" / "rust"
READER = Path(__file__).parents[2] / "zcrecord" / "embed" / "zcrecord.rs"
DEBIANS = "/usr/bin/rustc"
CHECKED = ("-C", "opt-level=1", "-C", "debug-assertions=on", "-C", "overflow-checks=on")


@lru_cache
def compilers() -> list[str]:
    """Return each rustc: that on PATH, and that of the system if it is of another version; by default none."""
    found: dict[str, str] = {}
    for command in ("rustc", DEBIANS):
        if whole() and shutil.which(command):
            version = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
            found.setdefault(version, command)
    return list(found.values())


def editions(rustc: str) -> list[str]:
    """Return the editions that a compiler takes, from 2018 on; without it, or by default, one."""

    def takes(edition: str) -> bool:
        command = [rustc, "--edition", edition, "--print", "cfg", "-"]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0

    return list(filter(takes, ("2018", "2021", "2024"))) if rustc in compilers() else ["2021"]


def command(rustc: str, source: Path, out: Path, *flags: str, edition: str = "2021") -> list[str]:
    return [rustc, "--edition", edition, "-D", "warnings", *flags, str(source), "-o", str(out)]


def compile_rust(rustc: str, source: Path, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(rustc, source, out, *flags), capture_output=True, text=True, cwd=out.parent)


def build(rustc: str, source: Path, out: Path, *flags: str, edition: str = "2021") -> Path:
    """Compile a file; anything that the compiler has to say fails."""
    quiet(*command(rustc, source, out, *flags, edition=edition), cwd=out.parent)
    return out


def checker(folder: Path) -> Path:
    """Build the checker of readers.py by the first compiler."""
    return build(compilers()[0], SOURCES / "checker.rs", folder / "rust", *CHECKED)
