"""Packages of npm and PyPI, fetched once for the tests, below .cache.

Those of npm are pinned by tests/programs/js/package-lock.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from processes import ROOT, output

PROGRAMS = ROOT / "tests" / "programs"
CACHE = ROOT / ".cache"


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder below .cache, filled by `make` unless it is there."""
    folder = CACHE / name
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            make(Path(made))
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(made, folder)  # whole, or not there
            Path(made).mkdir(exist_ok=True)  # for the context to remove
    return folder


def node_packages() -> Path:
    """Return the folder of the pinned npm packages, installed unless they already are."""

    def make(folder: Path) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(PROGRAMS / "js" / name, folder)
        output("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=folder)

    lock = (PROGRAMS / "js" / "package-lock.json").read_bytes()
    return cached(f"node-{hashlib.sha256(lock).hexdigest()[:16]}", make) / "node_modules"


def python_packages(pinned: tuple[str, ...]) -> Path:
    """Return a folder with packages of PyPI, without those that they ask for, by the first one's name."""

    def make(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        output(*pip, "--target", folder, *pinned)

    return cached(f"{pinned[0].replace('==', '-')}-{sys.implementation.cache_tag}", make)
