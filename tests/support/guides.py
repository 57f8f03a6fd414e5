"""README and the guides that lie in the rooms they are about."""

from __future__ import annotations

from pathlib import Path

__all__ = ["GUIDES", "README", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUIDES = [
    *sorted((ROOT / "zcrecord").rglob("README.md")),
    ROOT / "schema" / "INTEGRITY.md",
    ROOT / "tests" / "attacks" / "README.md",
    ROOT / "tools" / "bench" / "README.md",
]
