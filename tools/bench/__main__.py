"""The command line of the benchmarks; see `tools.bench`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.bench.harness import Row, Settings, machine, on_path, versions
from tools.bench.reasons import figures
from tools.bench.table import MEASURED, markdown, new_console, page_with, terminal_table
from tools.worker import ROOT, reused_processes

AREAS = (
    "small", "shards", "dropin", "foreign", "large", "cold", "sparse", "convert", "session", "embedding", "sharing",
    "resident", "integrity", "edits", "distributed", "consolidate", "fleet", "report",
)  # fmt: skip
NEEDS = {
    "embedding": ("gcc", "clang-19", "make", "arm-none-eabi-gcc", "qemu-system-arm"),
    "report": ("chromium",),
}  # tools of the system; a quick run does without
RESULTS = ROOT / "tools" / "bench" / "results.json"
SAME_MACHINE = ("cpu", "cores", "memory_mib", "file_system")
PAGES = {ROOT / "README.md": figures, ROOT / "tools" / "bench" / "README.md": markdown}  # what each shows


def main(arguments: list[str] | None = None) -> int:
    """Measure, or bring the pages' tables up to date; a promise not kept is shown, and is no error."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description="zcrecord beside its neighbours.")
    parser.add_argument("--only", nargs="+", choices=AREAS, metavar="AREA", help=f"some of {', '.join(AREAS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions: for trying it out")
    parser.add_argument("--json", type=Path, metavar="OUT", help="results file (a full run: tools/bench/results.json)")
    parser.add_argument("--update", action="store_true", help="put what was measured in the place of its areas' rows")
    parser.add_argument("--readme", action="store_true", help="put the results file's figures into their pages; no run")
    parser.add_argument("--check", action="store_true", help="tell whether the pages have those; no run")
    args = parser.parse_args(arguments)
    if args.readme or args.check:
        return _pages(args.json or RESULTS, write=args.readme)
    out: Path | None = args.json or (None if args.only or args.quick else RESULTS)
    results = _measure(args.only or AREAS, args.quick, new_console(), None if args.update else out)
    if args.update and not args.quick:
        out = args.json or RESULTS
        results = _updated(json.loads(out.read_text(encoding="utf-8")), results, out)
        _write(results, out)
    if out is not None:  # a partial or quick run must not pass for the whole
        print(f"written to {out}")
    return 0


def _updated(before: dict[str, Any], results: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return results with the rows of the areas that were measured again, which say what differs from the rest."""
    if any(before["machine"][what] != results["machine"][what] for what in SAME_MACHINE):
        sys.exit(f"{path} is of another machine; run everything: python -m tools.bench")
    then, now = ({**each["machine"], **each["versions"]} for each in (before, results))
    if other := {what: value for what, value in now.items() if value != then.get(what)}:
        for row in results["rows"]:
            row["extra"] = row["extra"] | {MEASURED: other}
    again = {row["area"] for row in results["rows"]}
    rows = [row for row in before["rows"] if row["area"] not in again] + results["rows"]
    return {**before, "rows": sorted(rows, key=lambda row: AREAS.index(row["area"]))}


def _measure(areas: tuple[str, ...], quick: bool, console: Console, out: Path | None) -> dict[str, Any]:
    """Return the results of areas; `out` has them after each area, so that an hour's figures outlive a fault."""
    rows: list[Row] = []
    missing = [tool for area in areas for tool in NEEDS.get(area, ()) if not (quick or on_path(tool))]
    if missing:  # which is said now, and not after an hour
        sys.exit(f"{', '.join(missing)} not on PATH; ./tools/test --all installs what the measurements need")
    for area in areas:
        own = tempfile.TemporaryDirectory(prefix="zcrecord-bench-")  # of no area before it are files left
        with own as folder, console.status(f"measuring {area}"), reused_processes() if quick else nullcontext():
            made = list(importlib.import_module(f"tools.bench.{area}").run(Settings(Path(folder), quick)))
        rows += made
        console.print(terminal_table(made))
        described = machine(Path(tempfile.gettempdir()))
        rows_made = [row.as_json() for row in rows]
        results = {"quick": quick, "machine": described, "versions": versions(), "rows": rows_made}
        if out is not None:
            _write(results, out)
    return results


def _write(results: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _pages(source: Path, *, write: bool) -> int:
    results = json.loads(source.read_text(encoding="utf-8"))
    for page, shown in PAGES.items():
        text = page.read_text(encoding="utf-8")
        made = page_with(text, shown(results))
        if write:
            page.write_text(made, encoding="utf-8")
        elif made != text:
            print(f"{page}: not the results file's figures; run: python -m tools.bench --readme", file=sys.stderr)
            return 1
    print("README.md and tools/bench/README.md have the results file's figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
