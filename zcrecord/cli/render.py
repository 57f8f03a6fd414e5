"""Output of the command line: tables on a terminal, plain lines into a pipe, JSON for scripts; progress on stderr.

Names and values come from strangers: characters that are not printable are escaped, and rich never reads markup in
them. Rows are printed one by one, so a million of them need no memory. Each command's module chooses the values.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, TextIO

from zcrecord.errors import missing_package, printable

Progress = Callable[[int, int | None], None]  # bytes done, bytes in all where that is known

NO_TENSORS = "none as tensors; numbers in attributes of its nodes, such as those of trees, stay in the graph"

_PAGE = 1000  # rows of one table: rich keeps and measures all rows of a table
_UNLIMITED = 1 << 31  # characters; no text of an archive is longer
_MAX_VALUE = 200  # characters of a value
_MAX_ITEMS = 20  # items of a list, which may be a vocabulary
_PLAIN_REFRESH = 10.0  # seconds between two lines of progress without a terminal
_GAP = 2  # characters between two columns of a table


def name_text(text: str) -> str:
    """Return a whole name in one line, its unprintable characters escaped."""
    return text if text.isprintable() else printable(text, _UNLIMITED)


def value_text(value: Any) -> str:
    """Return an attribute's value in one line of bounded length."""
    if isinstance(value, str):
        return f"'{printable(value, _MAX_VALUE)}'"
    if isinstance(value, bytes | memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple):
        items = [value_text(item) for item in value[:_MAX_ITEMS]]
        items += [f"... {len(value)} in all"] if len(value) > _MAX_ITEMS else []
        return f"[{', '.join(items)}]"
    return str(value)


def size_text(nbytes: int) -> str:
    """Return a number of bytes with a binary unit, as 1.5 MiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    exponent = min((nbytes.bit_length() - 1) // 10, 6)
    return f"{nbytes / (1 << 10 * exponent):,.1f} {' KMGTPE'[exponent]}iB"


def count_text(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def jsonable(value: Any) -> Any:
    """Return an attribute's value as JSON can hold it: bytes by their size, nan and infinities as text."""
    if isinstance(value, bytes | memoryview):
        return {"nbytes": len(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return {key: jsonable(item) for key, item in value.items()} if isinstance(value, dict) else value


class Column(NamedTuple):
    """A column of a table. Its cells may be broken into lines of `min_width` characters or more; with 0 never."""

    heading: str
    side: Literal["left", "right"] = "left"
    min_width: int = 0


def count_fitting(columns: Sequence[Column], rows: Sequence[tuple[str, ...]], width: int) -> int:
    """Return how many of a table's columns fit into `width` if cells are broken; never less than two."""
    from rich.cells import cell_len  # here, because tables are for terminals

    widths = []
    for i, column in enumerate(columns):
        full_width = max(map(cell_len, [column.heading, *(row[i] for row in rows)]))
        widths.append(min(full_width, column.min_width or full_width))
    count = len(columns)
    while count > 2 and sum(widths[:count]) + _GAP * (count - 1) > width:
        count -= 1
    return count


class Printer:
    """Printer of text, tables and JSON to one stream; `pretty` is True if the stream is a terminal."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.pretty = stream is not None and stream.isatty()
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # so that an ASCII terminal can show every name

    def number(self, nbytes: int) -> str:
        """Return a number of bytes for a table: rounded for people, exact for programs."""
        return size_text(nbytes) if self.pretty else str(nbytes)

    def size(self, nbytes: int) -> str:
        """Return a number of bytes for a sentence: rounded for people, exact for programs."""
        return size_text(nbytes) if self.pretty else f"{nbytes} bytes"

    def line(self, text: str) -> None:
        """Print one line of text, which has to be escaped already; nothing without a stream."""
        if self._stream is not None:
            print(text, file=self._stream)

    def facts(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Print labels and values under a title; into a pipe as lines 'label: value'."""
        if not self.pretty:
            for label, value in itertools.chain([("file", title)], rows):
                self.line(f"{label}: {value}")
            return
        _check_rich()
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="cyan", overflow="fold")
        grid.add_column(overflow="fold")
        for label, value in rows:
            grid.add_row(Text(f"  {label}"), Text(value))
        self.console().print(Text(title, style="bold"), grid, sep="\n")

    def table(self, columns: Sequence[Column], rows: Iterable[tuple[str, ...]]) -> None:
        """Print rows under headings, the first columns if not all fit; into a pipe, lines of cells and tabs."""
        if not self.pretty:
            for row in rows:
                self.line("\t".join(row))
            return
        console, remaining_rows, fewest = self.console(), iter(rows), len(columns)
        while page := list(itertools.islice(remaining_rows, _PAGE)):
            count = count_fitting(columns, page, console.width)
            console.print(_table(columns[:count], page))
            fewest = min(fewest, count)
        if fewest < len(columns):
            self.line(f"no room for {', '.join(column.heading for column in columns[fewest:])}; --json shows them")

    def console(self) -> Any:
        """Return rich's console for the terminal; DependencyError if rich is not installed."""
        _check_rich()
        from rich.console import Console

        return Console(file=self._stream, markup=False, highlight=False, emoji=False)

    def json(self, value: Any) -> None:
        """Print a value as JSON."""
        self.line(json.dumps(value, indent=1, allow_nan=False))

    def json_array(self, items: Iterable[Any]) -> None:
        """Print a JSON array, an item to a line; items are made one by one."""
        pending = "["  # printed once it is known whether a comma follows
        for item in items:
            self.line(pending)
            pending = json.dumps(item, allow_nan=False) + ","
        self.line(pending.rstrip(",") + "\n]")


def printers(quiet: bool = False) -> tuple[Printer, Printer]:
    """Return printers to standard output and to standard error, which print nothing if `quiet`."""
    return Printer(None if quiet else sys.stdout), Printer(None if quiet else sys.stderr)


def print_report(args: Any, report: Any, lines: Callable[[Any, Printer], Iterable[str]]) -> int:
    """Print a command's report, a dataclass, as JSON or by the lines that `lines` makes of it; return exit status 0."""
    out = Printer(None if args.quiet else sys.stdout)
    if args.json:
        out.json(asdict(report))
    else:
        for line in lines(report, out):
            out.line(line)
    return 0


def _table(columns: Sequence[Column], rows: Sequence[tuple[str, ...]]) -> Any:
    """Return rich's table of the first cells of rows, as many as there are columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text  # of a str rich would read markup

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.heading, justify=column.side, no_wrap=not column.min_width, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row[: len(columns)]))
    return table


def _check_rich() -> None:
    """Raise DependencyError if rich, which is needed only for a terminal, is not installed."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise missing_package("rich") from error


@contextlib.contextmanager
def showing_progress(label: str, printer: Printer) -> Iterator[Progress]:
    """Yield a progress callback: it shows a bar that disappears at the end or, into a pipe, a line now and then."""
    if not printer.pretty:
        yield _progress_lines(label, printer)
        return
    console = printer.console()
    from rich import progress as p

    text, size = p.TextColumn("{task.description}", markup=False), p.DownloadColumn(binary_units=True)
    columns = text, p.BarColumn(), size, p.TransferSpeedColumn(), p.TimeRemainingColumn()
    with p.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress_lines(label: str, printer: Printer) -> Progress:
    """Return a progress callback that prints a line every ten seconds after its first call: imports take long."""
    started = due = -math.inf

    def progress(done: int, total: int | None) -> None:
        nonlocal started, due
        now = time.monotonic()
        if started < 0:
            started, due = now, now + _PLAIN_REFRESH
        if now < due:
            return
        due, seconds = now + _PLAIN_REFRESH, now - started
        share = time_left = ""
        if total is not None and done <= total:  # more is an ONNX model's external data, which the total leaves out
            share = f" of {size_text(total)}, {100 * done // max(total, 1)}%"
            time_left = f", {seconds * (total - done) / done:.0f} s left" if done else ""
        printer.line(f"{label}: {size_text(done)}{share}, {size_text(int(done / max(seconds, 1e-3)))}/s{time_left}")

    return progress
