"""The commands' arguments, exit status and failures: one line for whatever is wrong, and never a traceback."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import pytest

import zcrecord
from zcrecord.cli import inspect
from zcrecord.cli.dispatch import main, onnx2zc_main

pytestmark = pytest.mark.usefixtures("model_folder")

# What is wrong with the input: one line each


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "given.zcr: no such file"),
    "empty": (lambda path: path.touch(), "given.zcr: the file is empty"),
    "text": (
        lambda path: path.write_text("one line\n" * 40, encoding="utf-8"),
        "given.zcr: this is a text file, not a zcrecord archive",
    ),
    "onnx": (lambda path: shutil.copy(c.DIGITS, path), "given.zcr: .*ONNX model.*onnx2zc makes an archive of it"),
    "truncated": (c.truncated, "given.zcr: .*truncated, copy it again"),
    "future": (c.of_the_future, "given.zcr: header: format version 200, this reader knows .*upgrade zcrecord"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", c.COMMANDS)
def test_a_file_that_is_no_archive_is_told_in_one_line(
    command: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, pattern = FAULTS[fault]
    make(Path("given.zcr"))
    c.fails(capsys, main([command, "given.zcr"]), pattern)


@pytest.mark.parametrize("command", ["info", "ls", "tree", "verify"])
def test_the_one_archive_in_a_folder_is_opened(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("folder")
    folder.mkdir()
    c.fails(capsys, main([command, "folder"]), "folder: is a folder without a model; name a file")
    zcrecord.save_record({"first": np.ones(3), "second": np.zeros(9)}, folder / "any.zcr", max_shard_size=50)
    assert main([command, "folder", "--json"]) == 0
    assert {"ls": '"second"', "tree": '"second"'}.get(command, '"tensors": 2') in capsys.readouterr().out
    shutil.copy(folder / "any.zcr", folder / "other.zcr")
    c.fails(capsys, main([command, "folder"]), r"folder: is a folder with several archives: any\.zcr, other\.zcr; name")


@pytest.mark.parametrize("arguments", ["ls --bad m.zcr", "convert a b --bad", "embed m.zcr --lang c --in x"])
def test_wrong_usage_prints_the_usage_of_its_command(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    command, told = arguments.partition(" ")[0], capsys.readouterr().err
    assert told.startswith(f"usage: zcrecord {command} ")
    assert f"zcrecord {command}: error: " in told


def test_no_traceback_in_a_real_process_either() -> None:
    for arguments in (("-m", "zcrecord", "ls", "missing.zcr"), (*c.ONNX2ZC, "missing.onnx")):
        done = c.python(*arguments)
        assert done.returncode == 1
        assert done.stdout == b""
        assert re.fullmatch(rb"(zcrecord|onnx2zc): error: missing\.\w+: [^\n]+\n", done.stderr)


def test_a_path_cannot_smuggle_a_line_or_an_escape_into_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    c.fails(capsys, main(["ls", "no\n\x1b[31mfile"]), r"no\\n\\x1b\[31mfile: no such file")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (MemoryError(), "zcrecord: error: out of memory"),
        (zcrecord.DependencyError("x is not installed; pip install x"), "zcrecord: error: x is not installed; pip"),
        (OSError(28, "No space left on device"), "zcrecord: error: standard output: No space left on device"),
        (PermissionError(13, "Permission denied", "a/b"), "zcrecord: error: a/b: Permission denied"),
        (KeyError("x"), "zcrecord: error: a fault of zcrecord itself, KeyError: 'x'; please report it"),
    ],
)
def test_whatever_is_raised_becomes_one_line(
    raised: Exception, told: str, archive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(inspect, "_print_info", fail)
    c.fails(capsys, main(["info", str(archive)]), f"^{re.escape(told)}")


def test_terminal_without_rich_says_how_to_install_it(
    archive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys, "stdout", c.Terminal())
    assert main(["ls", str(archive)]) == 1
    assert capsys.readouterr().err == "zcrecord: error: rich is not installed; pip install rich\n"


# Usage


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "required: COMMAND"),
        (["ls"], "required: FILE"),
        (["nonsense", "x"], "invalid choice"),
        (["ls", "x", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["info", "x", "y"], "unrecognized arguments: y"),
        (["tree", "x", "--depth", "-1"], "--depth"),
        (["verify", "x", "--level", "some"], "invalid choice"),
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    c.misused(capsys, lambda: main(arguments), told)


@pytest.mark.parametrize("command", [main, onnx2zc_main])
def test_version_names_package_and_format(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--version"])
    assert ended.value.code == 0
    version = re.escape(zcrecord.__version__)
    assert re.fullmatch(rf"(zcrecord|onnx2zc) {version}, archive format \d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", c.COMMANDS)
def test_an_archive_may_come_from_standard_input(
    command: str, archive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    c.pipe_in(monkeypatch, archive.read_bytes())
    assert main([command, "-"]) == 0
    assert capsys.readouterr().out
    c.pipe_in(monkeypatch, b"no archive at all" * 20)
    c.fails(capsys, main([command, "-"]), "standard input: this is a text file")


@pytest.mark.slow
def test_development_mode_shows_where_a_fault_is(archive: Path) -> None:
    code = """
import sys
from zcrecord.cli import dispatch, inspect
def fail(*a, **k): raise KeyError("x")
inspect._print_info = fail
sys.exit(dispatch.main(["info", "model.zcr"]))
"""
    assert b"Traceback" in c.python("-X", "dev", "-c", code).stderr
    assert b"Traceback" not in c.python("-c", code).stderr
