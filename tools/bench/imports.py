"""`import zcrecord` against `import numpy`, each in a fresh interpreter; the interpreter's own start is in neither."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial

from tools.bench.harness import OURS, Promise, Row, Settings, collect
from tools.worker import ROOT

AREA = "imports"
PEER = "numpy"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the row of import times."""
    repeats = settings.pick(40, 2)
    with tempfile.TemporaryDirectory() as compiled:  # as an installation has it, whatever this shell says
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = compiled
        ways = {name: partial(import_seconds, name, environment) for name in (OURS, PEER)}
        collect(1, ways)  # compiles
        samples = collect(repeats, ways)
    seconds = {name: statistics.median(s) for name, s in samples.items()}
    yield Row(AREA, "import zcrecord", "s", seconds, Promise("within", 1.25, PEER), samples=repeats)


def import_seconds(module: str, environment: dict[str, str]) -> float:
    """Return how long the import takes in an interpreter that has imported nothing yet."""
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, env=environment
    )
    return float(told.stdout)
