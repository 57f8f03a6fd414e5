"""Branches of the code under test that inputs reach, by coverage.py.

Knows what of the package checks an archive: the modules and functions of `VERIFIER`. What writers alone use
is left out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
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
        "u16_at", "Header.is_draft", "Header.front", "_check_version", "decode_header", "_check_extents",
        "_fault_without_magic", "too_short", "locate", "certificate_table", "unsigned_size", "_agreed_header",
        "align_up", "first_children",
    },
}  # fmt: skip

AT_IMPORT = {"verify.py:_wrong_types"}  # a table, made before any input


class Reached(NamedTuple):
    """The number of branches; lines and branches not reached, as `file:function: line` or `line -> line`."""

    branches: int
    missing: list[str]


def reached(run: Callable[[], Any]) -> Reached:
    """Return the branches of the verifier that a call reaches, without a module's own lines, which run on import."""
    paths = [str(PACKAGE / name) for name in VERIFIER]
    measured = coverage.Coverage(data_file=None, branch=True, include=paths, config_file=False, messages=False)
    measured.set_option("run:disable_warnings", ["module-not-measured", "module-not-imported", "no-data-collected"])
    with measured.collect():
        run()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        measured.json_report(outfile=str(report))
        files = json.loads(report.read_text(encoding="utf-8"))["files"]
    branches = 0
    missing = []
    for path, file in files.items():
        names = VERIFIER[Path(path).name]
        for name, function in file["functions"].items():
            where = f"{Path(path).name}:{name}"
            if not name or where in AT_IMPORT or (names is not None and name not in names):
                continue
            branches += function["summary"]["num_branches"]
            missing += [f"{where}: {line}" for line in function["missing_lines"]]
            missing += [f"{where}: {a} -> {b}" for a, b in function["missing_branches"]]
    return Reached(branches, missing)
