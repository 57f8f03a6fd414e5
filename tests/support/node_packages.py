"""Packages fetched once for the tests, below .cache: those of npm pinned by tests/programs/js/package-lock.json."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
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
