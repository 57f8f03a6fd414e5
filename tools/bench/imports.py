"""`import zcrecord` against `import numpy`, each in a fresh interpreter; the interpreter's own start is in neither."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

from tools.bench.harness import OURS, Promise, Row, Settings, collect
from tools.worker import ROOT

__all__ = ["run"]

AREA = "imports"
PEER = "numpy"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the row of import times."""
    repeats = settings.pick(40, 2)
    ways = {OURS: lambda: import_seconds("zcrecord"), PEER: lambda: import_seconds("numpy")}
    collect(1, ways)  # compiles what has no .pyc yet
    samples = collect(repeats, ways)
    seconds = {name: statistics.median(s) for name, s in samples.items()}
    yield Row(AREA, "import zcrecord", "s", seconds, Promise("within", 1.25, PEER), samples=repeats)


def import_seconds(module: str) -> float:
    """Return how long the import takes in an interpreter that has imported nothing yet."""
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return float(told.stdout)
