"""Completion scripts of the commands, for bash, zsh and fish.

Marks the arguments that are files. shtab makes the scripts from the parsers; a shell that completes does not run
zcrecord.
"""

from __future__ import annotations

from typing import Any

from zcrecord.errors import missing_package

from .convert import onnx2zc_arguments
from .parsers import Arguments, Parser, onnx2zc_parser, zcrecord_parser

_FILES = {"A", "ARCHIVE", "B", "CHECKPOINT", "FILE", "IN", "KEY", "OUT", "PACKED", "PROGRAM", "PUB", "SOURCE"}
_FOLDERS = {"DIR", "FOLDER"}


def completion_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def completion(args: Arguments) -> int:
    """Print the completion script of a shell for zcrecord and onnx2zc. In bash: eval "$(zcrecord completion bash)"; in
    zsh: eval "$(zcrecord completion zsh)"; in fish: zcrecord completion fish | source"""
    try:
        import shtab  # here, because it is an extra
    except ImportError as error:
        raise missing_package("shtab", extra="completion") from error
    parsers = zcrecord_parser(), onnx2zc_parser(onnx2zc_arguments)
    for parser in parsers:
        _mark_files(parser.with_arguments(), shtab)
    print("\n".join(shtab.complete(parser, shell=args.shell) for parser in parsers))
    return 0


def _mark_files(parser: Any, shtab: Any) -> None:
    """Have shtab complete paths for the arguments of a parser, and of its subcommands, that are files or folders."""
    for action in vars(parser)["_actions"]:  # argparse has no public list of them
        if action.metavar in _FILES:
            action.complete = shtab.FILE
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                _mark_files(command.with_arguments(), shtab)
