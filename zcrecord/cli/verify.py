"""`zcrecord verify`: check an archive for damage, or that an ONNX model still has the archive it was written for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zcrecord.archive.archive import Verify
from zcrecord.archive.damage import Damage
from zcrecord.archive.info import child_of_type
from zcrecord.codec.conventions import TUNED_TYPE
from zcrecord.errors import RecordError
from zcrecord.record.record import Record

from .endings import error_json, located
from .parsers import Arguments, Parser
from .render import Printer, count_text, name_text, printers, showing_progress
from .stdio import name_of, open_archive

_MAX_NAMES = 5  # shown of each kind for a damaged range; --json has all


def verify_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord verify`."""
    parser.add_archive()
    parser.add_key()
    parser.add_json("the result")
    about = "touch: check headers and structure; index: also every rule of the index; full (default): also all digests"
    parser.add_argument("--level", choices=("touch", "index", "full"), default="full", help=about)
    parser.flag("--digest", help="print the content digest, which does not depend on the layout")
    parser.add_quiet()


def verify(args: Arguments) -> int:
    """Check an archive, and list everything that is damaged. The exit status is 1 if the archive is not valid. For an
    .onnx file whose weights lie in an archive (to-onnx --external), check that the archive is still the same."""
    name = name_of(args.file)
    out, errors = printers(args.quiet)
    is_model = args.file.lower().endswith(".onnx") and args.embedded is None
    result: dict[str, Any] = {"file": name, "ok": True}
    if is_model and args.key:
        args.refuse("--key is about archives, not .onnx files")
    with located(name):
        try:
            facts = (_check_model if is_model else _check_archive)(args, result, out, errors)
        except RecordError as error:
            damage = error.damage
            if args.json:
                listed = {} if is_model else {"damage": [asdict(d) for d in damage]}
                out.json({**result, "ok": False, "error": error_json(error), **listed})
            elif len(damage) > 1 or any(d.nbytes and not d.tensors for d in damage):  # the error names a single tensor
                for part in damage:
                    out.line(f"{name_text(part.path or name)}: {_damage_line(part)}")
            raise
    if args.json:
        out.json(result)
    else:
        out.line(f"{name_text(name)}: OK, {facts}")
        if args.digest:
            out.line(f"{name_text(name)}: {result['content_digest']}")
    return 0


def _check_archive(args: Arguments, result: dict[str, Any], out: Printer, errors: Printer) -> str:
    """Check an archive at the level of --level; add what is known of it to the result, and return that in words."""
    level: Verify = args.level
    result["level"] = level
    verify: Verify = "touch" if level == "touch" else "index"
    with open_archive(args.file, args.embedded, args.key, verify) as record:
        _check_level(level, record, errors)
        result |= {"tensors": len(record), "archive_nbytes": record.archive_nbytes, "content_digest": None}
        if args.digest:
            with showing_progress("hashing", errors) as progress:
                result["content_digest"] = record.content_digest(progress=progress)
        source = record.archive.source
        result["checksums"] = bool(record.archive.index.digest_kind) or any(True for _ in source.member_sums())
    facts = f"{count_text(result['tensors'], 'tensor')}, {out.size(result['archive_nbytes'])}, checked: {level}"
    return facts if level != "full" or result["checksums"] else f"{facts}, but there are no checksums of payloads"


def _check_level(level: Verify, record: Record, errors: Printer) -> None:
    """Make the checks of a level that opening the archive does not make."""
    if level == "full":
        with showing_progress("verifying", errors) as progress:
            record.verify(progress=progress)
        if child_of_type(record.archive, TUNED_TYPE) is not None:
            from zcrecord.onnx.tuned import check_interfaces  # here, because few archives are tuned

            check_interfaces(record.archive)
    elif level == "index" and record.archive.source.file_names:
        from zcrecord.archive.digest import check_indexes  # here, because few archives have shards

        check_indexes(record.archive)


def _damage_line(damage: Damage) -> str:
    """Return a damaged range, its users and its fault as one line; the fault alone for a range of no bytes."""
    if not damage.nbytes:
        return damage.what
    users = [("tensor", damage.tensors), ("attribute", damage.attributes), ("metadata", damage.metadata)]
    labels = [f"{kind} '{name_text(name)}'" for kind, names in users for name in names[:_MAX_NAMES]]
    more = sum(len(names[_MAX_NAMES:]) for _, names in users)
    labels += [f"{more} more"] if more else []
    users_text = f" of {', '.join(labels)}" if labels else ""
    return f"[{damage.offset:#x}, {damage.offset + damage.nbytes:#x}){users_text}: {damage.what}"


def _check_model(args: Arguments, result: dict[str, Any], out: Printer, errors: Printer) -> str:
    """Check that the archive of an ONNX model is the one it was written for; the result as for `_check_archive`."""
    from zcrecord import onnx

    with showing_progress("verifying", errors) as progress:
        report = onnx.verify_external(args.file, full=args.level == "full", progress=progress)
    result |= asdict(report)
    facts = f"{count_text(report.tensors, 'tensor')}, {out.size(report.nbytes)} in {name_text(report.archive)}"
    return f"{facts}, checked: {'full' if report.full else 'index'}"
