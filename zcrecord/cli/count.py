"""`zcrecord count`: print the number of tensors and of their elements."""

from __future__ import annotations

from math import prod

from .parsers import Arguments, Parser
from .render import name_text, printers
from .stdio import name_of, open_archive


def count_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord count`."""
    parser.add_archive()
    parser.add_key()
    parser.add_json("the numbers")


def count(args: Arguments) -> int:
    """Print the number of an archive's tensors and of their elements."""
    out, _ = printers()
    name = name_of(args.file)
    with open_archive(args.file, args.embedded, args.key) as record:
        tensors, elements = len(record), sum(prod(info.shape) for info in record.infos())
    if args.json:
        out.json({"file": name, "tensors": tensors, "elements": elements})
    else:
        out.line(f"{name_text(name)}: {tensors} tensors, {elements} elements")
    return 0
