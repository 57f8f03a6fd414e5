"""`zcrecord tune`, and `onnx2zc --tune`: make an archive's model as fast as the .onnx on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from zcrecord.errors import RecordError
from zcrecord.storage.folders import archive_in

from .endings import writing
from .parsers import Arguments, Parser, add_output_options, natural
from .render import Printer, counted, printers, showing_progress, shown
from .stdio import check_file, opened_archive


def tune_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord tune`."""
    parser.description = """Have ONNX Runtime optimise the model of an archive for this machine, and add what it makes
        to the archive: the optimised graph and the packed weights. Processes that serve the archive then answer as fast
        as from the .onnx, and share one copy of the weights. The model and its tensors stay as they are. Signatures
        lapse, since they are of the whole archive."""
    about = "an archive made from ONNX, or a folder with one; it is replaced unless OUT is given"
    parser.add_argument("source", metavar="ARCHIVE", help=about)
    about = "write the tuned archive to OUT, and leave ARCHIVE unchanged"
    parser.add_argument("dest", metavar="OUT", nargs="?", help=about)
    about = "number of threads that ONNX Runtime may use (default: one for each core)"
    parser.add_argument("--threads", type=natural, metavar="N", help=about)
    about = "remove what tuning added, for all machines; gives back the bytes from before, with their signatures"
    parser.add_argument("--remove", action="store_true", help=about)
    add_output_options(parser, stdout=False)


def tune(args: Arguments) -> int:
    """Tune an archive, or remove its tuned part."""
    if "-" in (args.source, args.dest):
        args.refuse("ARCHIVE and OUT have to be files: neither can be -")
    if args.remove and args.threads is not None:
        args.refuse("--threads is for tuning, and --remove tunes nothing")
    check_file(args.source)
    if os.path.isdir(args.source):
        args.source = archive_in(args.source)
    out, errors = printers(args.quiet)
    with writing(args.source):
        options = {"dest": args.dest, "threads": args.threads, "remove": args.remove}
        report = run_tuning(args.source, args, errors, **options)
    if args.json:
        out.json(asdict(report))
    else:
        print_tuning(report, args.dest or args.source, out)
    return 0


def run_tuning(
    source: str,
    args: Arguments,
    progress_on: Printer,
    *,
    dest: str | None = None,
    threads: int | None = None,
    verify: bool = False,
    remove: bool = False,
) -> Any:
    """Tune the archive at `source`, into `dest` if given; prints the archive's size before writing it."""
    from zcrecord import onnx

    options: dict[str, Any] = {"force": args.force, "durable": not args.no_sync}
    with contextlib.ExitStack() as stack:
        options["progress"] = _announcing(source, args.dest or source, progress_on, stack, remove)
        if remove:
            return onnx.untune(source, dest, **options)
        try:
            return onnx.tune(source, dest, threads=threads or None, verify=verify, **options)
        except RecordError as error:
            error.path = args.source if error.path == source else error.path  # the archive may be a scratch file
            raise


def _announcing(
    source: str, dest: str, errors: Printer, stack: contextlib.ExitStack, remove: bool
) -> Callable[[int, int], None]:
    """Return a progress callback that first prints the size of the archive to come."""
    from zcrecord.onnx.tuned import size_before

    shows: list[Callable[[int, int | None], None]] = []

    def progress(done: int, total: int) -> None:
        if not shows:
            with opened_archive(source) as record:
                before = size_before(record.archive)
            least = "" if remove else "at most "
            ratio = "" if remove else f", {total / before:.2f} times the {errors.size(before)} without the tuned part"
            errors.line(f"{shown(dest)}: will have {least}{errors.size(total)}{ratio}")
            shows.append(stack.enter_context(showing_progress("zcrecord", errors)))
        shows[0](done, total)

    return progress


def print_tuning(report: Any, name: str, out: Printer) -> None:
    """Print the report of tuning an archive, or of removing its tuned part."""
    out.facts(shown(name), _facts(report, out) if report.targets else _facts_of_removal(report, out))


def _facts(report: Any, out: Printer) -> Iterator[tuple[str, str]]:
    """Yield the labels and values of a report of tuning."""
    from zcrecord.onnx.target import TuningTarget

    for target in report.targets:
        yield "tuned for", TuningTarget.decode(target).words()
    weights = f"{report.packed} of {counted(report.weights, 'weight')}"
    if any(report.modules):
        yield "models", ", ".join(map(shown, report.modules))
    yield "packed", f"{weights}, {out.size(report.packed_bytes)}; the optimised graph takes the others as they are"
    yield "archive", f"{out.size(report.archive_bytes)}"
    before = report.content_digest_before
    yield "digest before", f"{before}, and that of the untuned part still: graph and weights are untouched"
    yield "digest now", report.content_digest
    if report.verified:
        yield "verified", "the tuned graph was run, and gave the model's answers"
    if report.lapsed:
        keys = ", ".join(map(shown, report.lapsed))
        yield "signatures", f"lapsed, of {counted(len(report.lapsed), 'key')}: {keys}; sign the tuned archive again"
    yield from _last_facts(report)


def _facts_of_removal(report: Any, out: Printer) -> Iterator[tuple[str, str]]:
    yield "removed", "the tuned part; the archive has the bytes from before it was tuned"
    yield "archive", out.size(report.archive_bytes)
    yield "digest now", f"{report.content_digest}, that of the untuned part before"
    yield from _last_facts(report)


def _last_facts(report: Any) -> Iterator[tuple[str, str]]:
    for model in report.models:
        yield "written again", f"{shown(model)}, whose weights lie in the archive"
    yield "seconds", f"{report.seconds:.2f}"
