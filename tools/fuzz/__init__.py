"""Fuzzing: what finds inputs that break a promise, and the tests' own pieces that it is made of.

`python -m tools.fuzz` runs it. Needs the `dev` extra, and clang-19 and rustc for the readers in C and Rust.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "data" / "corpus"
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("support", "cases")]  # which are no packages
