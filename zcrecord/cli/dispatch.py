"""Entry points of the commands `zcrecord` and `onnx2zc`: parse the arguments, run the command, return a status.

Exit status: 0; 1 if the input is at fault, the disk, or the reader of a conversion; 2 for wrong usage. `diff` has
the statuses of diff: 1 if there are differences, 2 for any fault. Ctrl-C ends every command with 130. A command that
only prints ends with 141, silently, when the reader of its pipe is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from .endings import interrupted_once, run_command
from .parsers import Arguments, onnx2zc_parser, parse_zcrecord
from .registry import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `zcrecord` and return its exit status; wrong usage, --help and --version end in SystemExit."""

    def work() -> int:
        args = parse_zcrecord(arguments)
        return int(COMMANDS[args.command].function()(args))

    with interrupted_once(last=arguments is None):
        return run_command("zcrecord", work)


def onnx2zc_main(arguments: Sequence[str] | None = None) -> int:
    """Run `onnx2zc` and return its exit status; wrong usage, --help and --version end in SystemExit."""

    def work() -> int:
        from .convert import onnx2zc, onnx2zc_arguments

        return onnx2zc(onnx2zc_parser(onnx2zc_arguments).parse_args(arguments, Arguments()))

    with interrupted_once(last=arguments is None):
        return run_command("onnx2zc", work)
