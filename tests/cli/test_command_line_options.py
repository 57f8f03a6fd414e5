"""Errors on the command line speak of its options, and of standard input, never of Python's arguments."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import command_line as c
import numpy as np
import pytest

import zcrecord
from zcrecord.cli.convert import onnx2zc_arguments
from zcrecord.cli.endings import option_advice
from zcrecord.cli.parsers import Parser
from zcrecord.cli.registry import COMMANDS
from zcrecord.errors import Advice

pytestmark = pytest.mark.usefixtures("model_folder")

ARGUMENT = re.compile(r"\b(?!charset)[a-z_]+=")
# What no command ends with: loading to devices, filling, typed records, other frameworks, writing a record in Python.
IN_PYTHON_ALONE = (
    "archive/archive", "archive/digest", "archive/name_patterns", "archive/subset", "compat/", "distributed/",
    "frameworks/", "hollow/",
    "loaders/", "onnx/runtime", "onnx/session_fill", "record/", "remote/open_url",
    "storage/threads", "storage/urls", "tensors/", "transformers", "transport/packer", "typed/", "writing/sharing",
)  # fmt: skip


def sentences() -> dict[str, str]:
    """Every text with a space in it, by file and line; docstrings and generated code are none."""
    found = {}
    package = c.ROOT / "zcrecord"
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name.startswith(("_schema/", "embed/")) and name not in ("embed/attachment.py", "embed/write_files.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | docs:
                text = node.value
            if " " in text and isinstance(node, ast.expr):
                found[f"{name}:{node.lineno}:{node.col_offset}"] = text
    return found


@pytest.mark.slow
def test_no_message_that_a_command_can_print_names_an_argument() -> None:
    named = {
        where: text
        for where, text in sentences().items()
        if ARGUMENT.search(text)
        and not where.startswith((*IN_PYTHON_ALONE, "cli/"))
        and not re.match(r"(limit|cache)=", text)  # of zcrecord.remote.Cache
        and "--" not in text  # it names the option, too
    }
    assert not named, "make an `Advice` of these, or take their module into IN_PYTHON_ALONE"


def test_every_argument_that_an_advice_names_has_an_option() -> None:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (c.ROOT / "zcrecord").rglob("*.py"))
    calls = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Advice"]
    named = {
        ast.literal_eval(call.args[1]) for call in calls if call.args[1:] and not isinstance(call.args[1], ast.Name)
    }
    helps = ""
    for declare in (*(command.declare for command in COMMANDS.values()), onnx2zc_arguments):
        declare(parser := Parser())
        helps += parser.format_help()
    assert {"force", "embedded", "external"} <= named
    for argument in named - {"cache", "mmap", "storage_options"}:
        option = option_advice(Advice("{}", argument, True)).removeprefix("zcrecord to-onnx ").split()[0]
        assert option.startswith("--") and option in helps


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("convert there.abc y.zcr", "name its format by --from: "),
        ("ls model.zcr nothing_like_it_at_all_0123456789", "7 tensors, such as '"),
        ("ls more.zcr", "followed by other bytes; --embedded prefix of ls, verify and check ignores them$"),
    ],
)
def test_advice_is_an_option(command: str, told: str, archive: Path, run: c.Commands) -> None:
    Path("there.abc").write_bytes(b"\0something")
    Path("more.zcr").write_bytes(archive.read_bytes() + bytes(64))
    run.fails(command, told)


def test_advice_in_json_is_an_option_too(archive: Path, run: c.Commands) -> None:
    Path("more.zcr").write_bytes(archive.read_bytes() + bytes(64))
    assert run.json("verify more.zcr", status=1)["error"]["message"].endswith(
        "; --embedded prefix of ls, verify and check ignores them"
    )


def test_names_of_strangers_are_left_as_they_are(run: c.Commands) -> None:
    zcrecord.save_record({"force=True": np.zeros(9)}, "force=True")
    data = bytearray(Path("force=True").read_bytes())
    data[zcrecord.load_record("force=True").info("force=True").offset] ^= 1
    Path("force=True").write_bytes(data)
    run.fails("verify force=True", "error: force=True: tensor 'force=True': ")


# A pipe in the place of a file, as <(...) gives one.

INSTEAD = r"zcrecord: error: /(dev|proc/self)/fd/\d+: not a regular file; {}\n"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="platform: bash")
@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        ("ls PIPE", 1, INSTEAD.format("pipe it in, and give - in its place")),
        ("diff model.zcr PIPE", 2, INSTEAD.format("pipe it in, and give - in its place")),
        ("sign --key k PIPE", 1, INSTEAD.format("copy it to one, and give that")),
        ("pack PIPE", 2, "(.*\n)+.*error: OUT is required if the source is a pipe; - is standard output\n"),
    ],
)  # fmt: skip
def test_pipe_in_the_place_of_a_file_is_told_to_be_given_otherwise(
    command: str, status: int, told: str, archive: Path
) -> None:
    shutil.copy(sys.executable, "program")
    shell = c.SHELL + f"zcrecord {command.replace('PIPE', f'<(cat {archive})')}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, "")
    assert re.fullmatch(told, done.stderr), done.stderr
