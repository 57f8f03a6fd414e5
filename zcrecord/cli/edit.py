"""`zcrecord edit`: change metadata, attributes, names and tensors of an archive."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from zcrecord.errors import TensorNotFoundError

from .endings import writing
from .parsers import Arguments, Parser
from .render import Printer, count_text, name_text, print_report, printers, showing_progress
from .stdio import check_file


def edit_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord edit`."""
    parser.add_argument("file", metavar="FILE", help="an archive, which is replaced")
    for option, metavar, about in (
        ("--metadata", "NAME=VALUE", "set a metadata entry"),
        ("--drop-metadata", "NAME", "remove a metadata entry"),
        ("--attribute", "NAME=VALUE", "set an attribute"),
        ("--rename", "OLD=NEW", "rename a tensor, an attribute, or a module with all below it: 'model.*=*'"),
        ("--drop", "NAME", "remove tensors, attributes, or modules with all below them: 'old.*'"),
        ("--tensor", "NAME=NPY", "add or replace a tensor by the array of a .npy file"),
        ("--tie", "NAME=OTHER", "have a tensor be another one, stored once"),
    ):
        change = lambda text, option=option: (option.lstrip("-"), text)  # noqa: E731
        # All go into one list: their order counts.
        parser.add_argument(option, dest="changes", action="append", type=change, metavar=metavar, help=about)
    parser.add_output("changed archive", "FILE")
    parser.add_output_options(stdout=False)


def edit(args: Arguments) -> int:
    """Change an archive without reading what stays: the file system clones or copies it. Changes are made in the order
    in which they are given, and appear together, or not at all. A VALUE is JSON (8, 0.5, true, [1, 2]), or else text.
    In names * stands for any text. Signatures lapse, unless only metadata change."""
    if "-" in (args.file, args.output):
        args.refuse("FILE and OUT have to be files: neither can be -")
    changes = [(option, _change_arguments(option, text, args.refuse)) for option, text in args.changes or ()]
    if not changes:
        args.refuse("no change is given; see zcrecord edit --help")
    check_file(args.file)
    _, errors = printers(args.quiet)
    with writing(args.file), showing_progress("zcrecord", errors) as progress:
        import zcrecord  # here, because only this command needs all of it

        with zcrecord.edit(args.file, args.output, progress=progress, **args.values("force", "durable")) as model:
            for option, arguments in changes:
                _CHANGES[option](model, *arguments)
    return print_report(args, model.report, _lines)


def _change_arguments(option: str, text: str, refuse: Callable[[str], Any]) -> tuple[str, ...]:
    """Return the name and the value of a change, or the name alone of what is removed; `refuse` ends the command."""
    if option.startswith("drop"):
        return (text,)
    name, equals, value = text.partition("=")
    if not name or not equals:
        refuse(f"--{option} {name_text(text)}: give a name, =, and what it gets")
    return name, value


def _json_or_text(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def _set_tensor(model: Any, name: str, path: str) -> None:
    from zcrecord.foreign.npy import map_npy

    check_file(path)
    model[name] = map_npy(path)


def _drop_metadata(model: Any, name: str) -> None:
    if name not in model.metadata:
        raise TensorNotFoundError(name, lambda: model.metadata)
    del model.metadata[name]


_CHANGES: dict[str, Callable[..., None]] = {
    "metadata": lambda model, name, text: model.metadata.__setitem__(name, _json_or_text(text)),
    "drop-metadata": _drop_metadata,
    "attribute": lambda model, name, text: model.attributes.__setitem__(name, _json_or_text(text)),
    "rename": lambda model, old, new: model.rename(old, new),
    "drop": lambda model, name: model.drop(name),
    "tensor": _set_tensor,
    "tie": lambda model, name, other: model.tie(name, other),
}


def _lines(report: Any, out: Printer) -> Iterator[str]:
    """Yield the one line that is printed of an edit's report."""
    keys = ", ".join(map(name_text, report.lapsed))
    facts = (
        count_text(report.tensors, "tensor"),
        out.size(report.archive_bytes),
        "" if report.written else "nothing changed, and nothing was written",
        f"{out.size(report.cloned_bytes)} of them cloned" if report.cloned_bytes else "",
        f"signatures left out, of {count_text(len(report.lapsed), 'key')}: {keys}" if keys else "",
        f"{report.seconds:.2f} s",
    )
    yield f"{name_text(report.dest)}: {', '.join(filter(None, facts))}"
