"""`zcrecord diff`: the differences of two archives."""

from __future__ import annotations

from typing import Any

from zcrecord.archive.info import child_of_type
from zcrecord.codec.conventions import TUNED_TYPE
from zcrecord.integrity import SIGNATURE_PREFIX, Change, compare
from zcrecord.record.record import Record

from .endings import run_command
from .parsers import Arguments, Parser
from .render import Column, jsonable, name_text, printers, showing_progress, value_text
from .stdio import open_archive

_COLUMNS = (
    *(Column(""), Column("what"), Column("name", min_width=20)),
    *(Column(heading, min_width=12) for heading in ("before", "after", "difference")),
)


def diff_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord diff`."""
    parser.add_argument("file", metavar="A", help="an archive; one of the two may be - for standard input")
    parser.add_argument("other", metavar="B", help="an archive")
    about = "do not read payloads with equal digests, but take them as equal; only for archives from trusted sources"
    parser.flag("--fast", help=about)
    parser.flag("--no-metadata", help="do not compare metadata, which include signatures")
    parser.add_quiet()
    parser.add_json("the differences")


def diff(args: Arguments) -> int:
    """Compare the contents of two archives; their layout is ignored. Exit status 0 if they are the same, 1 if they
    differ, 2 for an error. On a terminal a table; into a pipe lines of +, - or !, kind, name, before, after and
    difference, separated by tabs. If only what zcrecord tune adds differs, a line on standard error says so."""
    if args.file == args.other == "-":
        args.refuse("only one of the two can be standard input")
    is_different = False

    def compare_archives() -> int:
        nonlocal is_different
        with open_archive(args.file) as before, open_archive(args.other) as after:
            is_different = _print_changes(before, after, args)
        return 0

    status = run_command("zcrecord", compare_archives)  # 1 for a fault, which is 2 here
    if status == 0:
        return int(is_different)
    return 2 if status == 1 else status


def _print_changes(before: Record, after: Record, args: Arguments) -> bool:
    """Print the differences of two records; return True if there are any."""
    out, errors = printers(args.quiet)
    with showing_progress("comparing", errors) as progress:
        compared = compare(before, after, fast=args.fast, progress=progress)
        changes = [change for change in compared if change.what != "metadata" or not args.no_metadata]
    if args.json:
        listed = list(map(_change_json, changes))
        out.json({"before": args.file, "after": args.other, "same": not changes, "changes": listed})
    else:
        out.table(_COLUMNS, map(_change_cells, changes))
    is_tuned = any(child_of_type(record.archive, TUNED_TYPE) is not None for record in (before, after))
    if changes and all(map(_may_be_tuning, changes)) and is_tuned:
        errors.line("only the tuned parts differ: attributes, and signatures, which lapse; every tensor is the same")
    return bool(changes)


def _may_be_tuning(change: Change) -> bool:
    """Return True if tuning an archive could have made a change, going by names."""
    if change.what == "metadata":
        return change.name.startswith(SIGNATURE_PREFIX)
    return change.what in ("module", "attribute") and change.name.startswith("onnx.tuned")


def _change_json(change: Change) -> dict[str, Any]:
    fields = {"what": change.what, "name": change.name, "change": change.change}
    fields |= {"before": jsonable(change.before), "after": jsonable(change.after)}
    differing, elements = change.elements or (None, None)
    return {**fields, "differing": differing, "elements": elements, "largest": jsonable(change.largest)}


def _change_cells(change: Change) -> tuple[str, ...]:
    """Return a change as the cells of a row; of equal contents, and of what is absent, before and after are empty."""
    sign = {"added": "+", "removed": "-"}.get(change.change, "!")
    text = name_text if change.what in ("tensor", "module") else value_text  # of those a description, not a value
    before = "" if change.change in ("added", "contents") else text(change.before)
    after = "" if change.change in ("removed", "contents") else text(change.after)
    difference = ""
    if change.change == "contents":
        difference = "contents" if change.elements is None else "{} of {} elements".format(*change.elements)
        difference += "" if change.largest is None else f", by {change.largest:.6g} at most"
    return sign, change.what, name_text(change.name), before, after, difference
