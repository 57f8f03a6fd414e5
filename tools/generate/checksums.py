"""The SHA-256 of every archive of tests/conformance, which from version 1 of the format on never change.

An archive that is listed stays as it is: lines and archives are added, and none is changed or taken away.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from . import ROOT, golden, golden_edges, invalid

SUMS = Path("tests/conformance/SHA256SUMS")
FOLDERS: tuple[Path, ...] = ()


def listed(root: Path = ROOT) -> dict[Path, str]:
    """Return the SHA-256 of each archive by its path, as the list has them; nothing without a list."""
    path = root / SUMS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {SUMS.parent / name: digest for digest, name in (line.split("  ") for line in lines)}


def frozen(root: Path = ROOT) -> set[Path]:
    """Return the archives that may not change any more."""
    return {path for path in listed(root) if (root / path).exists()}


def files() -> dict[Path, str | bytes]:
    """Return the list, in the form that `sha256sum --check` reads."""
    made = {**golden.files(), **golden_edges.files(), **invalid.files()}
    archives = {path: data for path, data in made.items() if path.suffix == ".zcr" and isinstance(data, bytes)}
    sums = {path: hashlib.sha256(data).hexdigest() for path, data in archives.items()} | listed()
    return {SUMS: "".join(f"{sums[path]}  {path.relative_to(SUMS.parent)}\n" for path in sorted(sums))}
