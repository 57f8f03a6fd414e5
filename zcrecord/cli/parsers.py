"""Argument parsers of `zcrecord` and `onnx2zc`, the arguments that several commands have, and the types of values.

Wrong usage ends in SystemExit with status 2, as argparse has it. A command's own arguments are left to its module.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from zcrecord import __version__
from zcrecord.codec.layout import ALIGNMENT, VERSION, check_alignment
from zcrecord.errors import LimitError, printable
from zcrecord.storage.files import is_url, parse_size

from .registry import COMMANDS

_TRUST = "an archive that its owner did not sign is refused; of several keys, one suffices"


class Arguments(argparse.Namespace):
    """Parsed arguments, with `prog`; `refuse(message)` prints the usage and ends with status 2."""

    def values(self, *names: str) -> dict[str, Any]:
        """Return some of the values by name, to be handed on."""
        return {name: getattr(self, name) for name in names}


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations; `declare` adds its arguments when needed, so that few modules are imported."""

    def __init__(self, *, declare: Callable[[Parser], None] | None = None, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._declare = declare

    def with_arguments(self) -> Parser:
        """Return this parser, after declaring its arguments once."""
        declare, self._declare = self._declare, None
        if declare is not None:
            declare(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the known arguments, as argparse does."""
        self.with_arguments()
        return super().parse_known_args(args, namespace)

    def flag(self, *names: str, help: str, **options: Any) -> None:
        """Declare an option without a value."""
        self.add_argument(*names, action="store_true", help=help, **options)

    def add_archive(self) -> None:
        """Add the argument FILE, an archive or standard input, and the option --embedded."""
        self.add_argument("file", metavar="FILE", help="an archive; - for standard input, read into memory")
        about = "read the archive at the end (suffix) or start of FILE (default: at the end, if FILE is a program)"
        self.add_argument("--embedded", choices=("suffix", "prefix"), help=about)

    def add_key(self, about: str = _TRUST, *, required: bool = False) -> None:
        """Add the option --key, a file with a public key, which may be given several times."""
        help_text = f"public key, PEM or OpenSSH; {about}"
        self.add_argument("--key", action="append", required=required, metavar="PUB", help=help_text)

    def add_json(self, content: str, where: str = "") -> None:
        """Add the option --json."""
        self.flag("--json", help=f"print {content} as JSON{where}")

    def add_selection(self, left_out: str = "leave out tensors whose names match") -> None:
        """Add the options --select and --exclude."""
        about = "only tensors whose names match, such as 'encoder.*'; may be given several times"
        self.add_argument("--select", action="append", metavar="PATTERN", help=about)
        self.add_argument("--exclude", action="append", metavar="PATTERN", help=left_out)

    def add_output(self, result: str, source: str) -> None:
        """Add the option --output of a command that else replaces its source."""
        about = f"write the {result} to OUT, and leave {source} unchanged"
        self.add_argument("--output", "-o", metavar="OUT", help=about)

    def add_threads(self, about: str) -> None:
        """Add the option --threads; without it, and for 0, its value is None."""
        help_text = f"{about} (default: one for each core)"
        self.add_argument("--threads", type=lambda text: natural(text) or None, metavar="N", help=help_text)

    def add_quiet(self) -> None:
        """Add the option --quiet."""
        self.flag("--quiet", "-q", help="print errors only")

    def add_alignment(self) -> None:
        """Add the option --alignment of an archive that is written."""
        about = f"alignment of every payload of an archive, a power of two from 16 to 65536 (default: {ALIGNMENT})"
        self.add_argument("--alignment", type=alignment, default=ALIGNMENT, metavar="BYTES", help=about)

    def add_output_options(self, replaced: str = "replace OUT if it exists", *, stdout: bool = True) -> None:
        """Add the options of everything that writes a file: --force, --no-sync, --quiet, --json.

        `replaced` is the help of --force. `stdout` says that OUT may be standard output.
        """
        self.flag("--force", "-f", help=replaced)
        about = "do not wait until the file is safe from power loss"
        self.add_argument("--no-sync", dest="durable", action="store_false", help=about)
        self.add_quiet()
        self.add_json("the report", ", on standard error if OUT is -" if stdout else "")

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and end with status 2."""
        if sys.stderr is not None:
            self.print_usage(sys.stderr)
            print(f"{self.prog}: error: {message}", file=sys.stderr)
        self.exit(2)


def _add_version(parser: Parser) -> None:
    parser.add_argument("--version", action="version", version=f"{parser.prog} {__version__}, archive format {VERSION}")


def zcrecord_parser() -> Parser:
    """Return the parser of `zcrecord`, with one for each command; see `Parser.with_arguments`."""
    about = """Inspect, convert, sign, serve and embed archives of model weights. Sizes are in bytes; - is standard
        input. For the options of a command: zcrecord COMMAND --help"""
    parser = Parser(prog="zcrecord", description=about)
    _add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS.values():
        own = commands.add_parser(command.name, help=command.purpose, declare=command.declare)
        own.set_defaults(refuse=own.error, prog="zcrecord")
    return parser


def parse_zcrecord(arguments: Sequence[str] | None) -> Arguments:
    """Return the arguments of `zcrecord`. Patterns may follow options, which argparse before Python 3.13 refuses."""
    parser = zcrecord_parser()
    args = Arguments()
    _, unknown = parser.parse_known_args(arguments, args)
    if unknown and (not hasattr(args, "patterns") or any(text.startswith("-") for text in unknown)):
        args.refuse(f"unrecognized arguments: {printable(' '.join(unknown))}")
    if unknown:
        args.patterns = [*args.patterns, *unknown]
    return args


def onnx2zc_parser(declare: Callable[[Parser], None]) -> Parser:
    """Return the parser of `onnx2zc`, whose arguments `declare` declares."""
    parser = Parser(prog="onnx2zc", declare=declare)
    parser.set_defaults(refuse=parser.error, prog="onnx2zc")
    _add_version(parser)
    return parser


def choose_dest(args: Arguments, old_suffixes: tuple[str, ...], new_suffix: str) -> None:
    """Set OUT, if it was not given, to the source's name with the new suffix instead of an old one; or refuse that."""
    if args.dest is not None:
        return
    name = str(args.source)
    if is_url(name):
        args.refuse("OUT is required if the source is a URL")
    if name == "-":
        if sys.stdout is not None and sys.stdout.isatty():
            args.refuse("OUT is required if IN is standard input and standard output is a terminal")
        args.dest = "-"
        return
    with contextlib.suppress(OSError, ValueError):  # other faults are reported when it is opened
        if stat.S_ISFIFO(os.stat(name).st_mode):  # such as <(...): OUT cannot have its name
            args.refuse("OUT is required if the source is a pipe; - is standard output")
    for suffix in old_suffixes:
        name = name.removesuffix(suffix)
    has_other_suffix = bool(old_suffixes) and name == args.source  # which is replaced, whatever it is
    if has_other_suffix and not new_suffix:
        args.refuse(f"OUT is required if IN does not end in {old_suffixes[0]}")
    path = Path(name)
    args.dest = str(path.with_suffix(new_suffix)) if has_other_suffix and path.name else f"{name}{new_suffix}"


def natural(text: str) -> int:
    """Parse a whole number from 0 on; as `alignment` and `size`, a type of argparse with its error."""
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"'{printable(text)}' is not a whole number, 0 or more")
    return number


def alignment(text: str) -> int:
    """Parse the alignment of payloads, a power of two in the limits of the format."""
    try:
        return check_alignment(natural(text))
    except LimitError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def size(text: str) -> int:
    """Parse a number of bytes from 1 on, such as 5GB."""
    if nbytes := parse_size(text):
        return nbytes
    raise argparse.ArgumentTypeError(f"'{printable(text)}' is not a size, such as 5GB or 500MiB")
