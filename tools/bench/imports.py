"""`import zcrecord` against `import numpy`, each in a fresh interpreter; the interpreter's own start is in neither."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from tools.bench.harness import OURS, Promise, Row, Settings, medians
from tools.worker import ROOT

AREA = "imports"
PEER = "numpy"


def run(settings: Settings) -> Iterator[Row]:
    repeats = settings.pick(40, 2)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(settings.folder)  # as an installation has it, whatever this shell says
    ways = {name: partial(import_seconds, name, environment) for name in (OURS, PEER)}
    seconds = medians(repeats, ways, uncounted=1)  # the first compiles
    yield Row(AREA, "import zcrecord", "s", seconds, Promise("within", 1.25, PEER), samples=repeats)


def import_seconds(module: str, environment: dict[str, str]) -> float:
    """Return how long the import takes in an interpreter that has imported nothing yet."""
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    command = [sys.executable, "-c", code]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment).stdout)
