"""The results as tables, from the results file alone: on the terminal, and between two markers of a page.

README.md shows the rows of HEADLINES, tools/bench/README.md all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tools.bench.harness import OURS, Row
from tools.measure import MIB

__all__ = ["BEGIN", "END", "HEADLINES", "MEASURED", "markdown", "page_with_table", "terminal_table"]

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
MEASURED = "measured"  # what was other, where a row was measured again after the rest
HEADINGS = ("work", OURS, "beside it", "ratio", "promised", "reached")
HEADLINES = (
    "open and get one tensor of 10,000 x 1 KB, whole index verified",
    "save 10,000 x 1 KB, digests on, no fsync",
    "drop-in, a .safetensors of 10,000 x 1 KB: open and get one",
    "load 1.6 GB in 24 tensors: private memory",
    "onnx2zc on a model of 1.6 GB: peak memory above the import",
    "onnx2zc on a model of 1.6 GB, no fsync",
    "ONNX Runtime, GPT, 1.6 GB: create the session",
    "ONNX Runtime, GPT, 1.6 GB: steady latency, batch 1",
    "4 ONNX Runtime sessions, one weight in two branches, 537 MB: memory",
    "host device, 1.6 GB to memory that is there",
    "one 16 KiB tensor of an archive of 1024 MiB over HTTP (10 tensors): bytes fetched",
    "all of an archive of 1024 MiB into GPU buffers in Chromium: growth of the JavaScript heap",
    "every digest of 1.6 GB, mapped, one thread",
    "load 256 KB of weights that are part of a program: allocations",
    "gcc, 64 MiB of weights to an object file",
    "arrays out of a Python constant of 64 MiB: allocated",
    "Cortex-M3, zcrecord.h: code to open, find and verify",
    "Cortex-M3, zcrecord.h: instructions to find one of 1,000 tensors",
)


def terminal_table(rows: Iterable[Row]) -> Table:
    """Return the rows for a terminal."""
    table = Table(box=SIMPLE_HEAD)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in (OURS, "ratio") else "left")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def markdown(results: dict[str, Any], works: tuple[str, ...] | None = None) -> str:
    """Return what stands between the markers: the table, where a peer wins, and what it was measured on.

    Raises:
        ValueError: `works`, the rows that are wanted, names one that is not there.
    """
    rows = [Row.from_json(r) for r in results["rows"]]
    if works is not None:
        if missing := set(works) - {row.work for row in rows}:
            raise ValueError(f"the results have no row {min(missing)!r}")
        rows = [row for row in rows if row.work in works]
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|--:|---|--:|---|---|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    machine, versions = results["machine"], results["versions"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_mib'] // 1024} GiB, {machine['file_system']}"
    what = ", ".join(f"{name} {version}" for name, version in versions.items() if name != OURS)
    lines += ["", *_wins(rows), ""]
    lines += [
        f"Measured on {machine['date']}, {where}, files warm in the page cache but where it says otherwise; {what}."
    ]
    lines += [f"Measured again on {when}: {'; '.join(works)}." for when, works in _again(rows).items()]
    lines += ["Medians of interleaved runs, from `tools/bench/results.json`; `python -m tools.bench` makes them again."]
    return "\n".join(lines)


def _again(rows: list[Row]) -> dict[str, list[str]]:
    """Return the rows that were measured after the rest, by what was other."""
    out: dict[str, list[str]] = {}
    for row in rows:
        if other := row.extra.get(MEASURED):
            told = ", ".join(
                [other.get("date", "the same day"), *(f"{k} {v}" for k, v in other.items() if k != "date")]
            )
            out.setdefault(told, []).append(row.work)
    return out


def page_with_table(page: str, results: dict[str, Any], works: tuple[str, ...] | None = None) -> str:
    """Return a page's text with the table put between its markers.

    Raises:
        ValueError: the markers are not there, or not in that order; or as `markdown`.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN} and {END} for the table to go between")
    return f"{before}{BEGIN}\n{markdown(results, works)}\n{END}{after}"


def _cells(row: Row) -> tuple[str, ...]:
    peers = {name: value for name, value in row.values.items() if name != OURS}
    beside = ", ".join(f"{name} {_quantity(value, row.unit)}" for name, value in peers.items())
    work = f"{row.work} ({row.note})" if row.note else row.work
    reached = "" if row.promise is None else "yes" if row.promise.reached(row.values) else "**no**"
    return work, _quantity(row.values[OURS], row.unit), beside, _ratio(row), _promised(row), reached


def _ratio(row: Row) -> str:
    """Return our value against the peer's, in the words of the promise, so that the two can be compared."""
    promise, ours = row.promise, row.values[OURS]
    if promise is not None and promise.peer is None:
        return ""  # a limit; a growth of nothing has no ratio
    # What is ours in another setting is not a peer.
    peer = promise.peer if promise else next((n for n in row.values if not n.startswith(OURS)), None)
    if peer is None:
        return ""
    factor = row.values[peer] / ours
    if promise and promise.kind == "within":
        return f"{1 / factor:.2f}x"
    return f"{_factor(factor)} faster" if factor >= 1 else f"{_factor(1 / factor)} slower"


def _factor(factor: float) -> str:
    return f"{factor:.0f}x" if factor >= 20 else f"{factor:.1f}x" if factor >= 2 else f"{factor:.2f}x"


def _promised(row: Row) -> str:
    promise = row.promise
    if promise is None:
        return ""
    if promise.peer is None:
        return f"under {_quantity(promise.limit, row.unit)}"
    return f"{promise.limit:g}x faster" if promise.kind == "faster" else f"within {promise.limit:g}x"


def _wins(rows: list[Row]) -> list[str]:
    """Return a line for each peer that is more than a twentieth ahead of us.

    Not for a floor: `cp`, or `import numpy`, which is part of ours, can only be approached.
    """
    lost = []
    for row in rows:
        floor = row.promise.peer if row.promise and row.promise.kind == "within" else None
        for name, value in row.values.items():
            if name != floor and not name.startswith(OURS) and value < 0.95 * row.values[OURS]:
                ours, theirs = (_quantity(v, row.unit) for v in (row.values[OURS], value))
                lost.append(f"- {row.work}: {name} {theirs}, {OURS} {ours}")
    return ["Where others win:", "", *lost] if lost else ["Nothing beside it was ahead by more than a twentieth."]


def _quantity(value: float, unit: str) -> str:
    if unit == "B":
        if abs(value) < 10_000:
            return f"{value:,.0f} B"
        if abs(value) < MIB:
            return f"{value / 1024:,.1f} KiB"
        return f"{value / MIB:,.0f} MiB" if abs(value) >= 10 * MIB else f"{value / MIB:.2f} MiB"
    if unit != "s":
        return f"{value:,.0f} {unit}".rstrip()
    if value >= 1:
        return f"{value:.2f} s"
    if value < 1e-5:
        return f"{value * 1e6:.2f} µs"
    digits = 0 if value >= 0.1 else 1 if value >= 0.01 else 2 if value >= 1e-3 else 3
    return f"{value * 1e3:.{digits}f} ms"
