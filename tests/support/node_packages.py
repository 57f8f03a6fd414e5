"""The npm packages that tests use, pinned by tests/programs/js/package-lock.json and installed once, below .cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PROGRAMS = Path(__file__).parents[1] / "programs"
ROOT = PROGRAMS.parents[1]


def node_packages() -> Path:
    """Return the folder of the pinned npm packages, installed unless they already are."""
    lock = (PROGRAMS / "js" / "package-lock.json").read_bytes()
    folder = ROOT / ".cache" / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(PROGRAMS / "js" / name, scratch)
            install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(install, cwd=scratch, capture_output=True, text=True)
            assert done.returncode == 0, f"{install}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            os.rename(scratch, folder)  # whole, or not there
            Path(scratch).mkdir()  # for the context to remove
    return folder / "node_modules"
