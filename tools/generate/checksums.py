"""The SHA-256 of every archive of tests/conformance, which from version 1 of the format on never change.

The kit's version is byte 8 of its archive valid/tiny.zcr. While that is 0, everything is generated anew. From 1 on an
archive that is listed stays as it is: lines and archives are added, and none is changed or taken away.
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
    return {path for path in listed(root) if invalid.version_of(root) and (root / path).exists()}


def files() -> dict[Path, str | bytes]:
    """Return the list, in the form that `sha256sum --check` reads."""
    made = {**golden.files(), **golden_edges.files(), **invalid.files()}
    sums = {path: hashlib.sha256(data).hexdigest() for path, data in made.items() if isinstance(data, bytes)}
    if invalid.COMMITTED:
        sums |= listed()
    return {SUMS: "".join(f"{sums[path]}  {path.relative_to(SUMS.parent)}\n" for path in sorted(sums))}
