"""README and the guides that lie in the rooms they are about."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CONTRIBUTING", "GUIDES", "MAP", "README", "REFERENCE", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / ".github" / "CONTRIBUTING.md"
MAP = ROOT / "zcrecord" / "README.md"  # of the source
REFERENCE = ROOT / "zcrecord" / "reference"  # generated, from docstrings whose examples run as such
GUIDES = [
    *sorted(p for p in (ROOT / "zcrecord").rglob("README.md") if p != MAP and p.parent != REFERENCE),
    ROOT / "schema" / "INTEGRITY.md",
    ROOT / "tests" / "attacks" / "README.md",
    ROOT / "tools" / "bench" / "README.md",
]
