"""Generated files: `python -m tools.generate` writes all of them, `--check` says which of them are stale.

A module of this package is a generator. It has `files()`, which returns the whole text or bytes of each file that it
generates, by path from the repository's root; and `FOLDERS`, in which nothing else may lie.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# `forge` and `specification`, the cases of which invalid archives of the kit are made, and `attacks`.
sys.path += [str(ROOT / "tests" / folder) for folder in ("support", "cases", ".")]


def committed(folder: Path) -> dict[Path, str | bytes]:
    """Return the files of a folder of the kit: from version 1 of the format on they stay, whatever made them."""
    return {folder / path.name: path.read_bytes() for path in sorted((ROOT / folder).iterdir())}
