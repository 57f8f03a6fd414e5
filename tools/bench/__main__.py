"""The command line of the benchmarks; see `tools.bench`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.bench.harness import Row, Settings, machine, versions
from tools.bench.table import readme_matches, readme_with_table, terminal_table
from tools.worker import ROOT

__all__ = ["AREAS", "README", "RESULTS", "main"]

AREAS = ("small", "growth", "large", "cold", "sparse", "imports", "exchange", "convert", "session")
RESULTS = ROOT / "tools" / "bench" / "results.json"
README = ROOT / "README.md"


def main(arguments: list[str] | None = None) -> int:
    """Measure, or bring README's table up to date; a promise not kept is told, and is no error."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description="zcrecord beside its neighbours.")
    parser.add_argument("--only", nargs="+", choices=AREAS, metavar="AREA", help=f"some of {', '.join(AREAS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions: for trying it out")
    parser.add_argument("--json", type=Path, metavar="OUT", help="results file (a full run: tools/bench/results.json)")
    parser.add_argument("--update", action="store_true", help="put what was measured in the place of its areas' rows")
    parser.add_argument("--readme", action="store_true", help="put the results file's table into README.md; no run")
    parser.add_argument("--check", action="store_true", help="tell whether README.md has that table; no run")
    args = parser.parse_args(arguments)
    if args.readme or args.check:
        return _readme(args.json or RESULTS, write=args.readme)
    results = _measure(args.only or AREAS, args.quick, _console())
    if args.update and not args.quick:
        _update(results, args.json or RESULTS)
        return 0
    # A partial or quick run must not pass for the whole.
    out: Path | None = args.json or (None if args.only or args.quick else RESULTS)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"written to {out}")
    return 0


def _update(results: dict[str, Any], path: Path) -> None:
    """Replace the rows of the areas that were measured again; machine and versions have to be those of the rest."""
    before = json.loads(path.read_text(encoding="utf-8"))
    for what in ("versions", "machine"):
        if before[what] != results[what]:
            sys.exit(f"{path} is of other {what}; run everything: python -m tools.bench")
    again = {row["area"] for row in results["rows"]}
    rows = [row for row in before["rows"] if row["area"] not in again] + results["rows"]
    rows.sort(key=lambda row: AREAS.index(row["area"]))
    path.write_text(json.dumps({**before, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _console() -> Console:
    console = Console(highlight=False)
    # Into a file or a pipe rich takes 80 columns, too few for six of text.
    return console if console.is_terminal else Console(width=160, highlight=False)


def _measure(areas: tuple[str, ...], quick: bool, console: Console) -> dict[str, Any]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="zcrecord-bench-") as folder:
        settings = Settings(Path(folder), quick)
        for area in areas:
            with console.status(f"measuring {area}"):
                made = list(importlib.import_module(f"tools.bench.{area}").run(settings))
            rows += made
            console.print(terminal_table(made))
        described = machine(Path(folder))
    return {"quick": quick, "machine": described, "versions": versions(), "rows": [row.as_json() for row in rows]}


def _readme(source: Path, *, write: bool) -> int:
    results = json.loads(source.read_text(encoding="utf-8"))
    if write:
        text = README.read_text(encoding="utf-8")
        README.write_text(readme_with_table(text, results), encoding="utf-8")
        return 0
    if readme_matches(README, results):
        print("README.md has the table of the results file")
        return 0
    print("README.md's table is not that of the results file; run: python -m tools.bench --readme", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
