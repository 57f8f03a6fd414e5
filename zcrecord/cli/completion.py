"""Completion scripts of the commands, for bash, zsh and fish.

Knows which arguments are files. The scripts are shtab's, made of the parsers; when a shell completes, nothing of
zcrecord runs.
"""

from __future__ import annotations

import argparse
from typing import Any

from zcrecord.errors import missing_package

from .arguments import onnx2zc_parser, zcrecord_parser

__all__ = ["script"]

_FILES = {"A", "ARCHIVE", "B", "FILE", "IN", "KEY", "OUT", "PACKED", "PROGRAM", "PUB"}
_FOLDERS = {"DIR"}


def script(shell: str) -> str:
    """Return what a shell is to run so that it completes `zcrecord` and `onnx2zc`.

    Raises:
        DependencyError: shtab is not installed.
    """
    try:
        import shtab  # here, because it is an extra
    except ImportError as error:
        raise missing_package("shtab", extra="completion") from error
    parsers = zcrecord_parser(), onnx2zc_parser()
    for parser in parsers:
        _mark(parser, shtab)
    return "\n".join(shtab.complete(parser, shell=shell) for parser in parsers)


def _mark(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Say of each argument whether it is a file or a folder, those of subcommands included."""
    for action in vars(parser)["_actions"]:
        named = str(action.metavar)
        if named in _FILES or named in _FOLDERS:
            action.complete = shtab.FILE if named in _FILES else shtab.DIRECTORY
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                _mark(command, shtab)
