"""The results as tables, from the results file alone: on the terminal, and between two markers of a page.

The README beside this module shows those with a goal; the repository's shows what `reasons` makes of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tools.bench.harness import OURS, Row
from tools.measure import MIB

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
# Work that ours consists of, too: it can only be approached.
FLOORS = ("an archive of 1 MiB", "1,000 tensors", "cat | cat", "cp", "cp and fsync", "memcpy", "numpy", "os.write",
          "one copy and four bare processes", "the tensors")  # fmt: skip
MEASURED = "measured"  # what was other, where a row was measured again after the rest
HEADINGS = ("work", OURS, "compared with", "ratio", "promised", "reached")


def new_console() -> Console:
    """Return a console; into a file or a pipe it is 160 characters wide, since rich takes too few columns there."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=160, highlight=False)


def terminal_table(rows: Iterable[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in (OURS, "ratio") else "left")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def rows_of(results: dict[str, Any]) -> list[Row]:
    return [Row.from_json(row) for row in results["rows"]]


def markdown(results: dict[str, Any]) -> str:
    """Return the rows that have a goal, those of one subject under its name, and what they were measured on."""
    shown = [row for row in rows_of(results) if row.promise is not None]
    lines = ["| work | zcrecord | other | goal |", "|---|--:|--:|---|"]
    for subject, group in itertools.groupby(shown, lambda row: row.work.rpartition(": ")[0]):
        rows = list(group)
        if together := bool(subject) and len(rows) > 2:
            lines.append(f"| **{subject}** | | | |")
        lines += [_line(row, row.work.rpartition(": ")[2] if together else row.work) for row in rows]
    machine, versions = results["machine"], results["versions"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_mib'] // 1024} GiB, {machine['file_system']}"
    what = ", ".join(f"{name} {version}" for name, version in versions.items() if name != OURS)
    lines += ["", f"Measured on {machine['date']}, {where}; {what}."]
    lines += [f"Measured again on {when}: {', '.join(areas)}." for when, areas in _again(shown).items()]
    return "\n".join(lines)


def _line(row: Row, work: str) -> str:
    """Return a row of the page: of the others the one that the goal is about, or the best."""
    _, ours, _, _, goal, reached = _cells(row)
    others = {name: value for name, value in row.values.items() if not name.startswith(OURS)}
    peer = row.promise.peer if row.promise and row.promise.peer else min(others, key=others.__getitem__, default=None)
    beside = f"{quantity(row.values[peer], row.unit)} {peer}" if peer else ""
    cells = (work, ours, beside, goal if reached == "yes" else f"{goal}: {reached}")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _again(rows: list[Row]) -> dict[str, list[str]]:
    """Return the areas that were measured after the rest, by what was other."""
    out: dict[str, dict[str, None]] = {}
    for row in rows:
        if other := row.extra.get(MEASURED):
            when = ", ".join(
                [other.get("date", "the same day"), *(f"{k} {v}" for k, v in other.items() if k != "date")]
            )
            out.setdefault(when, {})[row.area] = None
    return {when: list(areas) for when, areas in out.items()}


def page_with(page: str, made: str) -> str:
    """Return a page's text with `made` put between its markers.

    Raises:
        ValueError: the markers are not there, or not in that order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN} and {END} for the table to go between")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def _cells(row: Row) -> tuple[str, ...]:
    peers = {name: value for name, value in row.values.items() if name != OURS}
    beside = ", ".join(f"{name} {quantity(value, row.unit)}" for name, value in peers.items())
    work = f"{row.work} ({row.note})" if row.note else row.work
    reached = "" if row.promise is None else "yes" if row.promise.reached(row.values) else "**no**"
    return work, quantity(row.values[OURS], row.unit), beside, _ratio(row), _promised(row), reached


def _ratio(row: Row) -> str:
    """Return our value against the peer's, in the words of the promise, so that the two can be compared."""
    promise, ours = row.promise, row.values[OURS]
    if promise is not None and promise.peer is None:
        return ""  # a limit; a growth of nothing has no ratio
    # What is ours in another setting is not a peer.
    peer = promise.peer if promise else next((n for n in row.values if not n.startswith(OURS)), None)
    if peer is None or not row.values[OURS] or not row.values[peer]:
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
        return f"under {quantity(promise.limit, row.unit)}"
    return f"{promise.limit:g}x faster" if promise.kind == "faster" else f"within {promise.limit:g}x"


def wins(rows: list[Row]) -> list[tuple[Row, str]]:
    """Return each row with a peer that is more than a twentieth ahead of us, floors left out."""
    ahead = []
    for row in rows:
        names = [name for name in row.values if name not in FLOORS and not name.startswith(OURS)]
        ahead += [(row, name) for name in names if row.values[name] < 0.95 * row.values[OURS]]
    return ahead


def quantity(value: float, unit: str) -> str:
    """Return a figure with three digits and its unit."""
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
