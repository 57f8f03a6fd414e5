"""The commands of `zcrecord`, a row for each. To add one: a module of this folder, a row here, tests.

A row's module has two functions named after the command, dashes as underscores: `NAME_arguments(parser)`, which
declares its arguments, and `NAME(args)`, which runs it and returns the exit status; its docstring is the description in
the help. The module is imported when its command is run, asked for help, or completed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Command(NamedTuple):
    """One command: its name, one line of help, and the module of this folder that has its two functions."""

    name: str
    purpose: str
    module: str

    def function(self, suffix: str = "") -> Callable[[Any], Any]:
        """Return the function that runs the command or, with "_arguments", the one that declares its arguments."""
        module = importlib.import_module(f".{self.module}", __package__)
        function: Callable[[Any], Any] = getattr(module, self.name.replace("-", "_") + suffix)
        return function

    def declare(self, parser: Any) -> None:
        """Declare the command's arguments and description."""
        parser.description = self.function().__doc__
        self.function("_arguments")(parser)


COMMANDS = {
    command.name: command
    for command in (
        Command("info", "print sizes, types, attributes and metadata", "inspect"),
        Command("ls", "list tensors", "inspect"),
        Command("tree", "show modules, tensors and attributes as a tree", "inspect"),
        Command("verify", "check an archive for damage", "verify"),
        Command("sign", "sign an archive", "signatures"),
        Command("check", "check the signatures of an archive", "signatures"),
        Command("diff", "compare two archives", "diff"),
        Command("edit", "change metadata, attributes, names and tensors of an archive", "edit"),
        Command("convert", "convert archives from and to other formats", "convert"),
        Command("consolidate", "make one archive of a checkpoint by many ranks", "convert"),
        Command("index", "make an archive that names the weights in files of other formats", "convert"),
        Command("to-onnx", "write the ONNX model of an archive", "convert"),
        Command("tune", "make the model of an archive as fast as the .onnx on this machine", "tune"),
        Command("pack", "compress an archive for transport, to .zcr.zst", "convert"),
        Command("unpack", "decompress a packed archive", "convert"),
        Command("report", "show an archive as a web page in one file", "convert"),
        Command("embed", "write source code with tensors as constants", "embed"),
        Command("attach", "append an archive to an executable", "embed"),
        Command("detach", "remove an attached archive from an executable", "embed"),
        Command("serve", "show an archive in a browser", "serve"),
        Command("completion", "print the completion script of a shell", "completion"),
    )
}
