"""Branches of the code under test that inputs reach, by coverage.py; and the fewest inputs that reach them all.

Knows what of the package checks an archive: the modules and functions of `VERIFIER`. What writers alone use
is left out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import coverage

from . import ROOT

PACKAGE = ROOT / "zcrecord" / "codec"
# Modules; of those that hold more, the functions that read.
VERIFIER: dict[str, set[str] | None] = {
    "verify.py": None,
    "index.py": None,
    "layout.py": {
        "u16_at", "Header.front", "_check_version", "decode_header", "_check_extents", "_foreign", "_program",
        "too_short", "locate", "certificate_table", "unsigned_size", "_sealed", "align_up", "first_children",
    },
}  # fmt: skip

AT_IMPORT = {"verify.py:_types"}  # a table, made before any input


class Reached(NamedTuple):
    """How much was reached; lines and branches that were not, as `file:function: line` or `line -> line`."""

    branches: int
    lines: int
    missing: list[str]


def _measured(paths: Iterable[Path]) -> coverage.Coverage:
    found = coverage.Coverage(
        data_file=None, branch=True, include=[str(path) for path in paths], config_file=False, messages=False
    )
    found.set_option("run:disable_warnings", ["module-not-measured", "module-not-imported", "no-data-collected"])
    return found


def reached(run: Callable[[], Any], wanted: dict[str, set[str] | None] | None = None) -> Reached:
    """Return the branches of the verifier that a call reaches, without a module's own lines, which run on import."""
    wanted = VERIFIER if wanted is None else wanted
    measured = _measured(PACKAGE / name for name in wanted)
    with measured.collect():
        run()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        measured.json_report(outfile=str(report))
        files = json.loads(report.read_text(encoding="utf-8"))["files"]
    branches = lines = 0
    missing = []
    for path, file in files.items():
        names = wanted[Path(path).name]
        for name, function in file["functions"].items():
            where = f"{Path(path).name}:{name}"
            if not name or where in AT_IMPORT or (names is not None and name not in names):
                continue
            branches += function["summary"]["num_branches"]
            lines += function["summary"]["num_statements"]
            missing += [f"{where}: {line}" for line in function["missing_lines"]]
            missing += [f"{where}: {a} -> {b}" for a, b in function["missing_branches"]]
    return Reached(branches, lines, missing)


def fewest(inputs: Sequence[bytes], run: Callable[[bytes], Any], files: Iterable[Path]) -> list[bytes]:
    """Return inputs that together reach every branch that all of them reach; short ones are preferred."""
    paths = list(files)
    measured = _measured(paths)
    ordered = sorted(set(inputs), key=lambda data: (len(data), data))
    with measured.collect():
        for number, data in enumerate(ordered):
            measured.switch_context(str(number))
            run(data)
    told = measured.get_data()
    chosen: list[bytes] = []
    known: set[tuple[str, tuple[int, int]]] = set()
    for number, one in enumerate(ordered):
        told.set_query_context(str(number))
        arcs = {(path.name, arc) for path in paths for arc in told.arcs(str(path)) or ()}
        if not arcs <= known:
            known |= arcs
            chosen.append(one)
    return chosen
