"""`zcrecord pack` and `zcrecord unpack`: archives compressed for transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .convert import run_conversion
from .parsers import Arguments, Parser, add_output_options, choose_dest, natural
from .render import Printer, counted
from .stdio import taking_urls


def pack_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord pack`."""
    parser.description = """Compress an archive for transport. The result consists of zstd frames, which begin where
        payloads begin; zstd -d decompresses it, too."""
    parser.add_argument("source", metavar="ARCHIVE", help="an archive; - for standard input")
    parser.add_argument("dest", metavar="OUT", nargs="?", help="default: ARCHIVE.zst")
    about = "level of zstd, from 1 to 22 (default: 1); higher levels take longer and gain little on weights"
    parser.add_argument("--level", type=natural, default=1, metavar="N", help=about)
    _add_threads(parser)
    add_output_options(parser)


def pack(args: Arguments) -> int:
    """Pack an archive."""
    from zcrecord import transport

    choose_dest(args, (), ".zst")
    if not 1 <= args.level <= 22:
        args.refuse(f"level {args.level} is not from 1 to 22")
    return run_conversion(
        "zcrecord", args, taking_urls(transport.pack), _facts, level=args.level, threads=args.threads or None
    )


def unpack_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord unpack`."""
    parser.description = "Decompress a packed archive to the original bytes, and check them."
    parser.add_argument("source", metavar="PACKED", help="a packed archive; - for standard input")
    parser.add_argument("dest", metavar="OUT", nargs="?", help="default: PACKED without .zst")
    _add_threads(parser)
    add_output_options(parser)


def unpack(args: Arguments) -> int:
    """Unpack an archive."""
    from zcrecord import transport

    choose_dest(args, (".zst",), "")
    return run_conversion("zcrecord", args, taking_urls(transport.unpack), _facts, threads=args.threads or None)


def _add_threads(parser: Parser) -> None:
    parser.add_argument("--threads", type=natural, metavar="N", help="number of threads (default: one for each core)")


def _facts(report: Any, out: Printer) -> Iterator[str]:
    yield f"{out.size(report.archive_bytes)} unpacked"
    yield f"{out.size(report.packed_bytes)} packed, {100 * report.packed_bytes / report.archive_bytes:.1f}%"
    yield counted(report.frames, "frame") if report.frames is not None else ""
