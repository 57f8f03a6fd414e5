"""What the commands that compare print: verify, diff, sign and check, as lines or, if `as_json`, as JSON.

Arguments are `cli`'s, terminals and escapes `render`'s. What is wrong is raised as the library raises it; with
`as_json` it is printed before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from zcrecord.archive.damage import Damage
from zcrecord.archive.views import Verify
from zcrecord.errors import FormatError, RecordError
from zcrecord.integrity.comparing import Change, compare
from zcrecord.record.load import load_record
from zcrecord.record.record import Record

from .option_words import spoken_message
from .render import Column, Printer, jsonable, showing_progress, shown, shown_value

__all__ = ["check", "diff", "sign", "verify", "verify_external"]

_COLUMNS = (
    Column(""),
    Column("what"),
    Column("name", breaks="fold"),
    Column("before", leaves=1, breaks="words"),
    Column("after", leaves=1, breaks="words"),
    Column("difference", leaves=1, breaks="words"),
)
_GLANCE = 5  # names beside a damaged range; --json has all


def verify(
    source: Any, name: str, out: Printer, progress_on: Printer, *, level: Verify, digest: bool, as_json: bool
) -> None:
    """Open an archive, check it as thoroughly as `level` says, and print that it is sound, or all that is damaged.

    Raises:
        RecordError: it is not sound.
    """
    told: dict[str, Any] = {"file": name, "ok": True, "level": level}
    try:
        with load_record(source, verify="touch" if level == "touch" else "index") as record:
            if level == "full":
                with showing_progress("verifying", progress_on) as progress:
                    record.verify(progress=progress)
            told |= {"tensors": len(record), "archive_nbytes": record.archive_nbytes}
            told["content_digest"] = _digest(record, progress_on) if digest else None
    except RecordError as error:
        damage = error.damage if isinstance(error, FormatError) else ()
        if as_json:
            out.json({**told, "ok": False, "error": _error_json(error), "damage": [asdict(d) for d in damage]})
        elif len(damage) > 1 or any(not d.tensors for d in damage):  # the one tensor is in the error
            for d in damage:
                out.line(f"{shown(name)}: {_damaged(d)}")
        raise
    if as_json:
        out.json(told)
        return
    size = out.size(told["archive_nbytes"])
    tensors = "1 tensor" if told["tensors"] == 1 else f"{told['tensors']} tensors"
    out.line(f"{shown(name)}: OK, {tensors}, {size}, checked: {level}")
    if digest:
        out.line(f"{shown(name)}: {told['content_digest']}")


def _digest(record: Record, progress_on: Printer) -> str:
    with showing_progress("hashing", progress_on) as progress:
        return record.content_digest(progress=progress)


def _damaged(damage: Damage) -> str:
    """Return a damaged range, and what uses it, in one line."""
    users = [("tensor", damage.tensors), ("attribute", damage.attributes), ("metadata", damage.metadata)]
    told = [f"{what} '{shown(name)}'" for what, names in users for name in names[:_GLANCE]]
    more = sum(len(names[_GLANCE:]) for _, names in users)
    told += [f"{more} more"] if more else []
    used = f" of {', '.join(told)}" if told else ""
    return f"[{damage.offset:#x}, {damage.offset + damage.nbytes:#x}){used}: {damage.what}"


def _error_json(error: RecordError) -> dict[str, Any]:
    about = {"type": type(error).__name__, "message": spoken_message(error.message)}
    return {**about, "tensor": error.tensor, "offset": error.offset}


def verify_external(model: str, out: Printer, progress_on: Printer, *, level: Verify, as_json: bool) -> None:
    """Check that the archive beside an ONNX model is the one it was written for, and print that it is.

    Raises:
        RecordError: it is not.
    """
    from zcrecord import onnx

    try:
        with showing_progress("verifying", progress_on) as progress:
            report = onnx.verify_external(model, full=level == "full", progress=progress)
    except RecordError as error:
        if as_json:
            out.json({"file": model, "ok": False, "error": _error_json(error)})
        raise
    if as_json:
        out.json({"file": model, "ok": True, **asdict(report)})
        return
    tensors = "1 tensor" if report.tensors == 1 else f"{report.tensors} tensors"
    what = f"{tensors}, {out.size(report.nbytes)} in {shown(report.archive)}"
    out.line(f"{shown(model)}: OK, {what}, checked: {'full' if report.full else 'index'}")


def diff(
    before: Record, after: Record, names: tuple[str, str], out: Printer, progress_on: Printer,
    *, fast: bool, metadata: bool, as_json: bool,
) -> bool:  # fmt: skip
    """Print what two records do not have in common, as it is found; returns whether that is anything."""
    different = False

    def found(progress: Any) -> Iterator[Change]:
        nonlocal different
        for change in compare(before, after, fast=fast, progress=progress):
            if change.what != "metadata" or metadata:
                different = True
                yield change

    with showing_progress("comparing", progress_on) as progress:
        changes: Iterable[Change] = found(progress)
        if as_json or out.pretty:  # a progress bar would be in the way of the table
            changes = list(changes)
        else:
            out.table(_COLUMNS, map(_change_cells, changes))
    if as_json:
        told = [_change_json(change) for change in changes]
        out.json({"before": names[0], "after": names[1], "same": not different, "changes": told})
    elif out.pretty:
        out.table(_COLUMNS, map(_change_cells, changes), _change_line)
    return different


def _change_json(change: Change) -> dict[str, Any]:
    told = {"what": change.what, "name": change.name, "change": change.change}
    told |= {"before": jsonable(change.before), "after": jsonable(change.after)}
    differing, elements = change.elements or (None, None)
    return {**told, "differing": differing, "elements": elements, "largest": jsonable(change.largest)}


def _change_cells(change: Change) -> tuple[str, ...]:
    sign = {"added": "+", "removed": "-"}.get(change.change, "!")
    described = change.what in ("tensor", "module")
    values = []
    for value, other in ((change.before, "added"), (change.after, "removed")):
        nothing = change.change in (other, "contents")
        values.append("" if nothing else shown(value) if described else shown_value(value))
    apart = ""
    if change.change == "contents":
        apart = "contents" if change.elements is None else f"{change.elements[0]} of {change.elements[1]} elements"
        apart += "" if change.largest is None else f", by {change.largest:.6g} at most"
    return sign, change.what, shown(change.name), *values, apart


def _change_line(cells: tuple[str, ...]) -> str:
    """Return the cells of a change as one line, for a terminal with no room for columns."""
    sign, what, name, before, after, apart = cells
    values = f"{before} -> {after}" if before and after else before or after
    told = ", ".join(part for part in (values, apart) if part)
    return f"{sign} {what} {name}" + (f": {told}" if told else "")


def sign(
    path: str, key: str, dest: str | None, out: Printer, progress_on: Printer,
    *, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Sign an archive, and print what was signed.

    Raises:
        RecordError: it cannot be.
    """
    from zcrecord.integrity import signing  # here, because few need cryptography

    with showing_progress("signing", progress_on) as progress:
        report = signing.sign(path, key, dest, progress=progress, **options)
    if as_json:
        out.json(asdict(report))
        return
    again = ", in the place of its last signature" if report.replaced else ""
    out.line(f"{shown(report.dest)}: {report.content_digest} signed by the key {report.key}{again}")


def check(record: Record, name: str, keys: Sequence[str], out: Printer, progress_on: Printer, *, as_json: bool) -> None:
    """Check that the owner of each key signed what a record holds, and print so.

    Raises:
        RecordError: one of them did not.
    """
    from zcrecord.integrity import signing

    told: dict[str, Any] = {"file": name, "ok": True, "signed_by": signing.signers(record), "checked": []}
    try:
        with showing_progress("checking", progress_on) as progress:
            for key in keys:
                told["checked"].append({"file": key, "key": signing.check(record, key, progress=progress)})
    except RecordError as error:
        if as_json:
            out.json({**told, "ok": False, "error": _error_json(error)})
        raise
    if as_json:
        out.json(told)
        return
    for checked in told["checked"]:
        out.line(f"{shown(name)}: OK, signed by the key {checked['key']} ({shown(checked['file'])})")
