"""How the command line prints: tables on a terminal, plain lines into a pipe, JSON for scripts; progress on stderr.

Names and values come from strangers: what is not printable is escaped, and rich never reads them as markup. Rows are
printed as they come, so a million of them need no memory. What is worth printing is left to `commands`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from .errors import missing_package, printable

__all__ = ["Printer", "Progress", "human", "jsonable", "showing_progress", "shown", "shown_value"]

Progress = Callable[[int, int | None], None]  # bytes done, bytes in all where that is known

_PAGE = 1000  # rows to a table: rich holds and measures all of one
_WHOLE = 1 << 31  # no text of an archive is longer
_VALUE = 200  # characters of a value
_ITEMS = 20  # of a list: a vocabulary is among what is shown
_REFRESH = 0.05  # seconds between two looks of a progress bar
_PLAIN_REFRESH = 10.0  # seconds between two lines where there is no terminal


def shown(text: str) -> str:
    """Return a name whole, in one line, with whatever could steer a terminal escaped."""
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


def jsonable(value: Any) -> Any:
    """Return an attribute's value as JSON can hold it: bytes as their number, nan and infinities as text."""
    if isinstance(value, bytes | memoryview):
        return {"nbytes": len(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return {k: jsonable(v) for k, v in value.items()} if isinstance(value, dict) else value


class Printer:
    """One text stream, and whether people look at it: `pretty` is true on a terminal."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.pretty = stream is not None and stream.isatty()
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # so that an ASCII terminal gets every name, too

    def number(self, nbytes: int) -> str:
        """Return a number of bytes for a table: rounded for people, exact for programs."""
        return human(nbytes) if self.pretty else str(nbytes)

    def size(self, nbytes: int) -> str:
        """Return the same for a sentence."""
        return human(nbytes) if self.pretty else f"{nbytes} bytes"

    def line(self, text: str) -> None:
        """Print one line; the text is escaped already."""
        if self._stream is not None:
            print(text, file=self._stream)

    def facts(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Print labels with what they say of `title`; where nobody looks, as lines 'label: value'."""
        if not self.pretty:
            for label, value in itertools.chain([("file", title)], rows):
                self.line(f"{label}: {value}")
            return
        console, (table_type, text, _) = self._console(), _rich()
        console.print(text(title, style="bold"))
        grid = table_type.grid(padding=(0, 2))
        grid.add_column(style="cyan", overflow="fold")
        grid.add_column(overflow="fold")
        for label, value in rows:
            grid.add_row(text(f"  {label}"), text(value))
        console.print(grid)

    def table(self, columns: Sequence[tuple[str, str]], rows: Iterable[tuple[str, ...]]) -> None:
        """Print rows under headings, given with the side to justify to; where nobody looks, rows of tabbed cells."""
        if not self.pretty:
            for row in rows:
                self.line("\t".join(row))
            return
        console, (table_type, text, box) = self._console(), _rich()
        rest = iter(rows)
        while page := list(itertools.islice(rest, _PAGE)):
            table = table_type(box=box)
            for place, (heading, side) in enumerate(columns):  # where it is narrow, names and notes fold, not numbers
                folds = place in (0, len(columns) - 1)
                table.add_column(heading, justify=side, overflow="fold", no_wrap=not folds)
            for row in page:
                table.add_row(*map(text, row))
            console.print(table)

    def _console(self) -> Any:
        _rich()
        from rich.console import Console

        return Console(file=self._stream, markup=False, highlight=False, emoji=False)

    def json(self, value: Any) -> None:
        """Print a value as JSON."""
        self.line(json.dumps(value, indent=1, allow_nan=False))

    def json_array(self, items: Iterable[Any]) -> None:
        """Print a JSON array, an item to a line."""
        self.line("[")
        last = ""
        for item in items:
            if last:
                self.line(last + ",")
            last = json.dumps(item, allow_nan=False)
        if last:
            self.line(last)
        self.line("]")


def _rich() -> tuple[Any, Any, Any]:
    """Return rich's Table and Text and the box of our tables; imported where a terminal is there to show them."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise missing_package("rich") from error
    return Table, Text, SIMPLE_HEAD


@contextlib.contextmanager
def showing_progress(label: str, printer: Printer) -> Iterator[Progress]:
    """Yield what to call with the bytes done: a bar that goes when the work ends, or a line now and then."""
    if printer.pretty:
        with _bar(label, printer) as update:
            yield _throttled(update, _REFRESH)
        return

    started = time.monotonic()

    def tell(done: int, total: int | None) -> None:
        seconds = time.monotonic() - started
        of = f" of {human(total)}, {100 * done // max(total, 1)}%" if total is not None else ""
        left = f", {seconds * (total - done) / done:.0f} s left" if total is not None and done else ""
        printer.line(f"{label}: {human(done)}{of}, {human(int(done / max(seconds, 1e-3)))}/s{left}")

    yield _throttled(tell, _PLAIN_REFRESH, first=False)


@contextlib.contextmanager
def _bar(label: str, printer: Printer) -> Iterator[Progress]:
    _rich()
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=printer._console(), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _throttled(call: Progress, seconds: float, *, first: bool = True) -> Progress:
    """Return `call` for frequent use: it comes through at most every so many seconds, at the end in any case."""
    due = -math.inf if first else time.monotonic() + seconds

    def maybe(done: int, total: int | None) -> None:
        nonlocal due
        if total is not None and done > total:
            total = None  # an ONNX model's external data, which nobody counted before
        now = time.monotonic()
        if now >= due or (first and done == total):
            due = now + seconds
            call(done, total)

    return maybe
