"""README and the guides that lie in the rooms they are about."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / ".github" / "CONTRIBUTING.md"
RELEASING = ROOT / ".github" / "RELEASING.md"
MAP = ROOT / "zcrecord" / "README.md"  # of the source
REFERENCE = ROOT / "zcrecord" / "reference"  # generated, from docstrings whose examples run as such
GENERATION = ROOT / "zcrecord" / "onnx" / "README.generation.md"  # its examples run in tests/onnx
ENGINES = ROOT / "zcrecord" / "frameworks" / "README.engines.md"  # in tests/frameworks/test_engines.py
PACKAGES = [ROOT / "zcrecord" / page for page in ("embed/README.c.md", "embed/README.rust.md", "web/reader/README.md")]
GUIDES = [
    *sorted(p for p in (ROOT / "zcrecord").rglob("README.md") if p not in (MAP, *PACKAGES) and p.parent != REFERENCE),
    ROOT / "schema" / "INTEGRITY.md",
    ROOT / "tests" / "attacks" / "README.md",
    ROOT / "tools" / "bench" / "README.md",
]
