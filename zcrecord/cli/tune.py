"""`zcrecord tune`, and `onnx2zc --tune`: make an archive's model as fast as the .onnx on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from zcrecord.errors import RecordError
from zcrecord.storage.folders import archive_in

from .endings import writing
from .parsers import Arguments, Parser
from .render import Printer, count_text, name_text, printers, showing_progress
from .stdio import check_file, open_archive


def tune_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord tune`."""
    about = "an archive made from ONNX, or a folder with one; it is replaced unless OUT is given"
    parser.add_argument("source", metavar="ARCHIVE", help=about)
    about = "write the tuned archive to OUT, and leave ARCHIVE unchanged"
    parser.add_argument("dest", metavar="OUT", nargs="?", help=about)
    parser.add_threads("number of threads that ONNX Runtime may use")
    about = "remove what tuning added, for all machines; gives back the bytes from before, with their signatures"
    parser.flag("--remove", help=about)
    parser.add_output_options(stdout=False)


def tune(args: Arguments) -> int:
    """Have ONNX Runtime optimise the model of an archive for this machine, and add what it makes to the archive: the
    optimised graph and the packed weights. Processes that serve the archive then answer as fast as from the .onnx, and
    share one copy of the weights. The model and its tensors stay as they are. Signatures lapse, since they are of the
    whole archive."""
    if "-" in (args.source, args.dest):
        args.refuse("ARCHIVE and OUT have to be files: neither can be -")
    if args.remove and args.threads is not None:
        args.refuse("--threads is for tuning, and --remove tunes nothing")
    check_file(args.source)
    if os.path.isdir(args.source):
        args.source = archive_in(args.source)
    out, errors = printers(args.quiet)
    with writing(args.source):
        report = run_tuning(args.source, args, errors, **args.values("dest", "threads", "remove"))
    if args.json:
        out.json(asdict(report))
    else:
        print_tuning(report, args.dest or args.source, out)
    return 0


def run_tuning(
    source: str,
    args: Arguments,
    errors: Printer,
    *,
    dest: str | None = None,
    threads: int | None = None,
    verify: bool = False,
    remove: bool = False,
) -> Any:
    """Tune an archive, into `dest` if given, or remove its tuned part; print the new size first. Return the report."""
    from zcrecord import onnx
    from zcrecord.onnx.tuned import size_before

    show_progress: Any = None  # from `showing_progress`, once the size is printed

    def print_size(total: int) -> None:
        nonlocal show_progress
        if show_progress is not None:  # the archive is written once more, in another way
            return
        with open_archive(source) as record:
            before = size_before(record.archive)
        bound = "" if remove else "at most "
        ratio = "" if remove else f", {total / before:.2f} times the {errors.size(before)} without the tuned part"
        errors.line(f"{name_text(args.dest or source)}: will have {bound}{errors.size(total)}{ratio}")
        show_progress = stack.enter_context(showing_progress("zcrecord", errors))

    with contextlib.ExitStack() as stack:
        options = args.values("force", "durable") | {"planned": print_size}
        options["progress"] = lambda done, total: show_progress(done, total)
        if remove:
            return onnx.untune(source, dest, **options)
        try:
            return onnx.tune(source, dest, threads=threads, verify=verify, **options)
        except RecordError as error:
            error.path = args.source if error.path == source else error.path  # the archive may be a scratch file
            raise


def print_tuning(report: Any, name: str, out: Printer) -> None:
    """Print the report of tuning an archive, or of removing its tuned part."""
    out.facts(name_text(name), _facts(report, out))


def _facts(report: Any, out: Printer) -> Iterator[tuple[str, str]]:
    """Yield labels and values of the report; without targets the tuned part was removed."""
    from zcrecord.onnx.target import TuningTarget

    for target in report.targets:
        yield "tuned for", TuningTarget.decode(target).words()
    if report.targets and any(report.modules):
        yield "models", ", ".join(map(name_text, report.modules))
    if report.targets:
        weights = f"{report.packed} of {count_text(report.weights, 'weight')}"
        yield "packed", f"{weights}, {out.size(report.packed_bytes)}; the optimised graph takes the others as they are"
    else:
        yield "removed", "the tuned part; the archive has the bytes from before it was tuned"
    yield "archive", out.size(report.archive_bytes)
    if report.targets:
        before = report.content_digest_before
        yield "digest before", f"{before}, still the digest of graph and weights, which did not change"
    yield "digest now", report.content_digest + ("" if report.targets else ", as before the archive was tuned")
    if report.verified:
        yield "verified", "the tuned graph was run, and gave the model's answers"
    if report.lapsed:
        keys = ", ".join(map(name_text, report.lapsed))
        yield "signatures", f"lapsed, of {count_text(len(report.lapsed), 'key')}: {keys}; sign the tuned archive again"
    for model in report.models:
        yield "written again", f"{name_text(model)}, whose weights lie in the archive"
    yield "seconds", f"{report.seconds:.2f}"
