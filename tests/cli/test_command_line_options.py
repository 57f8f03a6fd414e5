"""Errors on the command line speak of its options, and of standard input, never of Python's arguments."""

from __future__ import annotations

import ast
import json
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
from zcrecord.cli.dispatch import main

pytestmark = pytest.mark.usefixtures("model_folder")

ARGUMENT = re.compile(r"\b(?!charset)[a-z_]+=")
# What no command ends with: loading to devices, filling, typed records, other frameworks, writing a record in Python.
IN_PYTHON_ALONE = (
    "archive/archive", "archive/digest", "archive/name_patterns", "archive/subset", "compat/", "distributed/",
    "frameworks/", "hollow/",
    "loaders/", "onnx/runtime", "onnx/selection", "onnx/session_fill", "record/", "remote/open_url",
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


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("convert model.zcr there.npz", "there.npz: exists already; --force replaces it$"),
        ("convert model.zcr x.abc", "x.abc: no format has its suffix; name one by --to: "),
        ("convert there.abc y.zcr", "name its format by --from: "),
        ("convert model.zcr x.npz --alignment 128", "alignment is for archives"),
        ("convert model.zcr x.npz --max-shard-size 1GB", "a shard size is for archives and safetensors"),
        ("attach script.sh model.zcr", "; --force attaches it$"),
        ("embed model.zcr --lang python", "choose another folder; --force replaces it$"),
        ("ls model.zcr nothing_like_it_at_all_0123456789", "7 tensors, such as '"),
    ],
)
def test_advice_is_an_option(command: str, told: str, archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("there.npz", "there.abc"):
        Path(name).write_bytes(b"\0something")
    Path("model.py").write_bytes(b"something")
    Path("script.sh").write_text("#!/bin/sh\nexit\n", encoding="utf-8")
    c.fails(capsys, main(command.split()), told)


def test_advice_in_json_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("m.onnx").write_bytes(c.DIGITS.read_bytes())
    assert main(["verify", "m.onnx", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "it was not exported with external weights" in told


def test_names_of_strangers_are_left_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    zcrecord.save_record({"force=True": np.zeros(9)}, "force=True")
    data = bytearray(Path("force=True").read_bytes())
    data[zcrecord.load_record("force=True").info("force=True").offset] ^= 1
    Path("force=True").write_bytes(data)
    c.fails(capsys, main(["verify", "force=True"]), "error: force=True: tensor 'force=True': ")


# A pipe in the place of a file, as <(...) gives one.


def piped(command: str, data: str) -> subprocess.CompletedProcess[str]:
    shell = c.SHELL + command.replace("PIPE", f"<(cat {data})")
    return subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="platform: bash")
@pytest.mark.parametrize("command", ["info", "ls", "tree", "verify", "check --key k", "diff model.zcr", "to-onnx"])
def test_pipe_in_the_place_of_a_file_is_told_to_be_given_as_standard_input(command: str, archive: Path) -> None:
    done = piped(f"zcrecord {command} PIPE {'o.onnx' if command == 'to-onnx' else ''}", str(archive))
    assert (done.returncode, done.stdout) == (2 if command.startswith("diff") else 1, "")
    told = r"zcrecord: error: /(dev|proc/self)/fd/\d+: not a regular file; pipe it in, and give - in its place\n"
    assert re.fullmatch(told, done.stderr)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="platform: bash")
@pytest.mark.parametrize(
    "command", ["sign --key k", "edit --drop k", "embed --lang c", "attach program", "detach", "serve", "tune"]
)
def test_pipe_where_only_a_file_will_do_is_told_so(command: str, archive: Path) -> None:
    shutil.copy(sys.executable, "program")
    done = piped(f"zcrecord {command} PIPE", str(archive))
    assert (done.returncode, done.stdout) == (1, "")
    told = r"zcrecord: error: /(dev|proc/self)/fd/\d+: not a regular file; copy it to one, and give that\n"
    assert re.fullmatch(told, done.stderr)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="platform: bash")
@pytest.mark.parametrize("command", ["onnx2zc", "zcrecord pack", "zcrecord report", "zcrecord to-onnx"])
def test_beside_a_pipe_there_is_no_place_for_output(command: str, archive: Path) -> None:
    done = piped(f"{command} PIPE", "model.onnx")
    assert done.returncode == 2
    assert done.stderr.endswith("error: OUT is required if the source is a pipe; - is standard output\n")
