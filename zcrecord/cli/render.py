"""Output of the command line: tables on a terminal, plain lines into a pipe, JSON for scripts; progress on stderr.

Names and values come from strangers: characters that are not printable are escaped, and rich never reads markup in
them. Rows are printed one by one, so a million of them need no memory. Each command's module chooses the values.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, TextIO

from zcrecord.errors import missing_package, printable

Progress = Callable[[int, int | None], None]  # bytes done, bytes in all where that is known

NO_TENSORS = "none as tensors; numbers in attributes of its nodes, such as those of trees, stay in the graph"

_PAGE = 1000  # rows of one table: rich keeps and measures all rows of a table
_WHOLE = 1 << 31  # no text of an archive is longer
_VALUE = 200  # characters of a value
_ITEMS = 20  # items of a list, which may be a vocabulary
_REFRESH = 0.05  # seconds between two looks of a progress bar
_PLAIN_REFRESH = 10.0  # seconds between two lines where there is no terminal
_USUAL = 80  # columns of a terminal of unknown width
_GAP = 2  # columns between two of a table's
_NAME = 20  # least width of a column of names; other columns are left out first
_TEXT = 12  # least width of a column of notes
_LONGEST_NUMBER = 24  # characters of a float, or of an integer of 64 bits with its comma
_LABEL = 18  # least width of labels


def shown(text: str) -> str:
    """Return a whole name in one line, its unprintable characters escaped."""
    return text if text.isprintable() else printable(text, _WHOLE)


def shown_value(value: Any) -> str:
    """Return an attribute's value in one line of bounded length."""
    if isinstance(value, str):
        return f"'{printable(value, _VALUE)}'"
    if isinstance(value, bytes | memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple):
        items = [shown_value(v) for v in value[:_ITEMS]]
        more = [f"... {len(value)} in all"] if len(value) > _ITEMS else []
        return f"[{', '.join(items + more)}]"
    return str(value)


def human(nbytes: int) -> str:
    """Return a number of bytes with a unit."""
    if nbytes < 1024:
        return f"{nbytes} B"
    exponent = min((nbytes.bit_length() - 1) // 10, 6)
    return f"{nbytes / (1 << 10 * exponent):,.1f} {' KMGTPE'[exponent]}iB"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def jsonable(value: Any) -> Any:
    """Return an attribute's value as JSON can hold it: bytes as their number, nan and infinities as text."""
    if isinstance(value, bytes | memoryview):
        return {"nbytes": len(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return {k: jsonable(v) for k, v in value.items()} if isinstance(value, dict) else value


class Column(NamedTuple):
    """A column of a table. On a narrow terminal those with the highest `leaves` are left out first; 0 always stays.

    A cell is broken anywhere ("fold", for names), between words ("words"), or not at all ("").
    """

    heading: str
    side: Literal["left", "right"] = "left"
    leaves: int = 0
    breaks: Literal["", "words", "fold"] = ""


def fitting_widths(columns: Sequence[Column], rows: Sequence[tuple[str, ...]], width: int) -> list[int]:
    """Return the width of each column of a table that is to fit into `width`; 0 for a column that is left out.

    Columns of names are left out last. A number is never broken: a column too narrow for it is left out.
    """
    from rich.cells import cell_len  # here, because tables are for terminals

    cells = [[column.heading, *(row[place] for row in rows)] for place, column in enumerate(columns)]
    natural = [max(map(cell_len, column)) for column in cells]
    least = natural[:]
    for place, column in enumerate(columns):
        if column.breaks == "words":
            longest = max(cell_len(word) for cell in cells[place] for word in cell.split() or [""])
            least[place] = min(natural[place], max(longest, _TEXT), _LONGEST_NUMBER)
        elif column.breaks == "fold":
            least[place] = min(natural[place], _TEXT if column.leaves else max(_NAME, width // 2))
    visible = set(range(len(columns)))
    while sum(least[place] + _GAP for place in visible) - _GAP > width:
        first = max(columns[place].leaves for place in visible)
        if not first:
            break
        visible -= {place for place in visible if columns[place].leaves == first}
    spare = width - sum(least[place] + _GAP for place in visible) + _GAP
    widths = [least[place] if place in visible else 0 for place in range(len(columns))]
    for place in sorted(visible, key=lambda place: columns[place].leaves):
        more = min(max(spare, 0), natural[place] - least[place])
        widths[place], spare = widths[place] + more, spare - more
    if spare < 0:  # narrower than any name should be
        names = max(visible, key=lambda place: widths[place])
        widths[names] = max(widths[names] + spare, 1)
    return widths


def columns_of(stream: TextIO | None) -> int:
    """Return the width of a terminal, from the environment or the terminal itself; 80 if neither gives it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns):
        return int(columns)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(stream.fileno()).columns or _USUAL  # type: ignore[union-attr]
    return _USUAL


def wrapped(text: str, stream: TextIO) -> str:
    """Return a line broken between words, never within a number, if the stream is a terminal; else the line itself."""
    if not stream.isatty() or len(text) <= (width := columns_of(stream)):
        return text
    import textwrap  # here, because most lines fit

    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


class Printer:
    """Printer of text, tables and JSON to one stream; `pretty` is True if the stream is a terminal."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.pretty = stream is not None and stream.isatty()
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # so that an ASCII terminal can show every name

    def number(self, nbytes: int) -> str:
        """Return a number of bytes for a table: rounded for people, exact for programs."""
        return human(nbytes) if self.pretty else str(nbytes)

    def size(self, nbytes: int) -> str:
        """Return a number of bytes for a sentence: rounded for people, exact for programs."""
        return human(nbytes) if self.pretty else f"{nbytes} bytes"

    def line(self, text: str) -> None:
        """Print one line, on a terminal broken between words; the text is escaped already."""
        if self._stream is not None:
            print(wrapped(text, self._stream), file=self._stream)

    def _print(self, text: str) -> None:
        if self._stream is not None:
            print(text, file=self._stream)

    def facts(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Print labels and values under a title; into a pipe as lines 'label: value'."""
        if not self.pretty:
            for label, value in itertools.chain([("file", title)], rows):
                self.line(f"{label}: {value}")
            return
        console, (table_type, text, _) = self.console(), _rich()
        console.print(text(title, style="bold"))
        labelled = [(f"  {label}", value) for label, value in rows]
        most = max(console.width // 3, _LABEL)
        width = max((len(label) for label, _ in labelled if len(label) <= most), default=0)
        for label, value in labelled:
            if len(label) > width:  # contains a name: printed above its value, so that neither is narrow
                console.print(text(label, style="cyan", overflow="fold"))
            grid = table_type.grid(padding=(0, 2, 0, 0))
            grid.add_column(style="cyan", width=width)
            grid.add_column(overflow="fold")
            grid.add_row(text(label if len(label) <= width else ""), text(value))
            console.print(grid)

    def table(
        self,
        columns: Sequence[Column],
        rows: Iterable[tuple[str, ...]],
        narrow: Callable[[tuple[str, ...]], str] | None = None,
    ) -> None:
        """Print rows under headings, at most as wide as the terminal; into a pipe, lines of cells separated by tabs.

        If the terminal is too narrow, columns with `leaves` are left out; or, with `narrow`, each row becomes the line
        that `narrow` returns.
        """
        if not self.pretty:
            for row in rows:
                self.line("\t".join(row))
            return
        console = self.console()
        missing: dict[str, None] = {}
        rest = iter(rows)
        while page := list(itertools.islice(rest, _PAGE)):
            widths = fitting_widths(columns, page, console.width)
            if narrow is not None and not all(widths):
                for row in page:
                    self.line(narrow(row))
                continue
            console.print(_table(columns, page, widths))
            missing |= dict.fromkeys(c.heading for c, width in zip(columns, widths, strict=True) if not width)
        if missing:
            self.line(f"no room for {', '.join(missing)}; --json shows them")

    def console(self) -> Any:
        """Return rich's console for the terminal."""
        _rich()
        from rich.console import Console

        width, height = columns_of(self._stream), 25  # without a height, rich ignores the width of a dumb terminal
        return Console(file=self._stream, width=width, height=height, markup=False, highlight=False, emoji=False)

    def json(self, value: Any) -> None:
        """Print a value as JSON."""
        self._print(json.dumps(value, indent=1, allow_nan=False))

    def json_array(self, items: Iterable[Any]) -> None:
        """Print a JSON array, an item to a line."""
        before = "["
        for item in items:
            self._print(before)
            before = json.dumps(item, allow_nan=False) + ","
        self._print(before.rstrip(",") + "\n]")


def printers(quiet: bool = False) -> tuple[Printer, Printer]:
    """Return printers to standard output and to standard error, which print nothing if `quiet`."""
    return Printer(None if quiet else sys.stdout), Printer(None if quiet else sys.stderr)


def print_report(args: Any, report: Any, lines: Callable[[Any, Printer], Iterable[str]]) -> int:
    """Print a command's report, as JSON or in the words of `lines`; return the exit status."""
    out = Printer(None if args.quiet else sys.stdout)
    if args.json:
        out.json(asdict(report))
    else:
        for line in lines(report, out):
            out.line(line)
    return 0


def _table(columns: Sequence[Column], rows: Sequence[tuple[str, ...]], widths: Sequence[int]) -> Any:
    table_type, text, box = _rich()
    table = table_type(box=box, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    visible = [place for place, width in enumerate(widths) if width]
    for place in visible:
        column = columns[place]
        table.add_column(column.heading, justify=column.side, width=widths[place], overflow="fold")
    for row in rows:
        table.add_row(*(text(row[place]) for place in visible))
    return table


def _rich() -> tuple[Any, Any, Any]:
    """Return rich's Table and Text and the box of our tables; rich is imported only for a terminal."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise missing_package("rich") from error
    return Table, Text, SIMPLE_HEAD


@contextlib.contextmanager
def showing_progress(label: str, printer: Printer) -> Iterator[Progress]:
    """Yield a progress callback: it shows a bar that disappears at the end or, into a pipe, a line now and then."""

    def print_line(done: int, total: int | None, seconds: float) -> None:
        share = f" of {human(total)}, {100 * done // max(total, 1)}%" if total is not None else ""
        left = f", {seconds * (total - done) / done:.0f} s left" if total is not None and done else ""
        printer.line(f"{label}: {human(done)}{share}, {human(int(done / max(seconds, 1e-3)))}/s{left}")

    if printer.pretty:
        with _bar(label, printer) as update:
            yield _throttled(update, _REFRESH, at_once=True)
    else:
        yield _throttled(print_line, _PLAIN_REFRESH, at_once=False)


@contextlib.contextmanager
def _bar(label: str, printer: Printer) -> Iterator[Callable[[int, int | None, float], None]]:
    _rich()
    from rich import progress as p

    text, size = p.TextColumn("{task.description}", markup=False), p.DownloadColumn(binary_units=True)
    columns = text, p.BarColumn(), size, p.TransferSpeedColumn(), p.TimeRemainingColumn()
    with p.Progress(*columns, console=printer.console(), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total, _: bar.update(task, completed=done, total=total)


def _throttled(show: Callable[[int, int | None, float], None], every: float, *, at_once: bool) -> Progress:
    """Return a callback that calls `show` at most once in `every` seconds, with the seconds since its own first call.

    With `at_once` the first call is shown, and the last. The clock starts late because imports take longer than many
    conversions.
    """
    started = due = -math.inf

    def progress(done: int, total: int | None) -> None:
        nonlocal started, due
        now = time.monotonic()
        if started < 0:
            started, due = now, now + (0 if at_once else every)
        if total is not None and done > total:
            total = None  # an ONNX model's external data, which the total does not include
        if now >= due or (at_once and done == total):
            due = now + every
            show(done, total, now - started)

    return progress
