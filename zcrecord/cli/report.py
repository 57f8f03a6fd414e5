"""`zcrecord report`: an archive as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .convert import run_conversion
from .parsers import Arguments, Parser, add_output_options, choose_dest
from .render import Printer, counted


def report_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord report`."""
    parser.description = """Write an archive's tree, largest tensors, file layout and metadata as one HTML file, which
        needs no server. The same archive gives the same file."""
    parser.add_argument("source", metavar="FILE", help="an archive, or the URL of one; - for standard input")
    about = "HTML file; - for standard output (default: FILE with the suffix .html; standard output if FILE is -)"
    parser.add_argument("--output", "-o", dest="dest", metavar="OUT", help=about)
    about = "show the content digest, too; reads the whole archive"
    parser.add_argument("--digest", action="store_true", help=about)
    add_output_options(parser)


def report(args: Arguments) -> int:
    """Write the page of an archive."""
    from zcrecord import report as pages

    choose_dest(args, (".zst", ".zcr"), ".html")
    return run_conversion("zcrecord", args, pages.report, _facts, digest=args.digest)


def _facts(report: Any, out: Printer) -> Iterator[str]:
    yield f"{counted(report.tensors, 'tensor')} in {counted(report.modules, 'module')}"
    yield f"{out.size(report.archive_bytes)} of archive"
    yield f"{out.size(report.html_bytes)} of page"
