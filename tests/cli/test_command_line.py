"""The commands' arguments, exit status and failures: one line for whatever is wrong, and never a traceback."""

from __future__ import annotations

import argparse
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
from zcrecord.cli.parsers import size

pytestmark = pytest.mark.usefixtures("model_folder")

# What is wrong with the input: one line each.

FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "given.zcr: no such file"),
    "onnx": (lambda path: shutil.copy(c.DIGITS, path), "given.zcr: .*ONNX model.*onnx2zc makes an archive of it"),
    "truncated": (c.truncated, "given.zcr: .*truncated, copy it again"),
}


@pytest.mark.parametrize(
    ("command", "fault"), [*(("info", fault) for fault in FAULTS), *((name, "truncated") for name in c.COMMANDS[1:])]
)
def test_a_file_that_is_no_archive_is_told_in_one_line(command: str, fault: str, run: c.Commands) -> None:
    make, pattern = FAULTS[fault]
    make(Path("given.zcr"))
    run.fails(f"{command} given.zcr", pattern)


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_the_one_archive_in_a_folder_is_opened(command: str, run: c.Commands) -> None:
    folder = Path("folder")
    folder.mkdir()
    run.fails(f"{command} folder", "folder: is a folder without a model; name a file")
    zcrecord.save_record({"first": np.ones(3), "second": np.zeros(9)}, folder / "any.zcr", max_shard_size=50)
    assert {"ls": '"second"', "verify": '"tensors": 2'}[command] in run(f"{command} folder --json")
    shutil.copy(folder / "any.zcr", folder / "other.zcr")
    run.fails(f"{command} folder", r"folder: is a folder with several archives: any\.zcr, other\.zcr; name")


def test_a_path_cannot_smuggle_a_line_or_an_escape_into_an_error(run: c.Commands) -> None:
    run.fails(["ls", "no\n\x1b[31mfile"], r"no\\n\\x1b\[31mfile: no such file")


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
    raised: Exception, told: str, archive: Path, run: c.Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(inspect, "_facts", fail)
    run.fails("info model.zcr", f"^{re.escape(told)}")


def test_terminal_without_rich_says_how_to_install_it(
    archive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys, "stdout", c.Terminal())
    assert main(["ls", str(archive)]) == 1
    assert capsys.readouterr().err == "zcrecord: error: rich is not installed; pip install rich\n"


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_an_archive_may_come_from_standard_input(
    command: str, archive: Path, run: c.Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    c.pipe_in(monkeypatch, archive.read_bytes())
    assert run(f"{command} -")
    c.pipe_in(monkeypatch, b"no archive at all" * 20)
    run.fails(f"{command} -", "standard input: this is a text file")
    monkeypatch.setattr(sys, "stdin", None)
    run.fails(f"{command} -", "standard input: is closed")


@pytest.mark.slow
def test_development_mode_shows_where_a_fault_is(archive: Path) -> None:
    code = """
import sys
from zcrecord.cli import dispatch, inspect
def fail(*a, **k): raise KeyError("x")
inspect._facts = fail
sys.exit(dispatch.main(["info", "model.zcr"]))
"""
    assert b"Traceback" in c.python("-X", "dev", "-c", code).stderr
    assert b"Traceback" not in c.python("-c", code).stderr


# Usage.


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ls", "usage: zcrecord ls .* zcrecord ls: error: .*required: FILE"),
        ("nonsense x", "invalid choice"),
        ("ls x --nonsense", "zcrecord ls: error: unrecognized arguments: --nonsense"),
        ("info x y", "unrecognized arguments: y"),
        ("tree x --depth -1", "--depth"),
        ("diff - -", "only one of the two can be standard input"),
        ("convert a", "required: OUT"),
        ("convert a b --alignment 48", "alignment 48 is not a power"),
        ("convert a b --from pickle", "format 'pickle' is not known; zcr, safetensors, gguf, onnx, torch, npz"),
        ("convert a b --to x\x1b", r"format 'x\\x1b' is not known"),
        ("convert a b --max-shard-size 0", "is not a size, such as 5GB"),
        ("convert a b --jobs -1", "--jobs: '-1' is not a whole number, 0 or more"),
        ("convert - b --jobs 2", "--jobs is for folders and URLs, not for standard streams"),
        ("convert a b --jobs 2 --to npz", "--jobs makes archives; --to is for a single file or folder"),
        ("onnx2zc model.onnx x.zcr --verify --dry-run", "--verify reads IN and OUT a second time"),
        ("onnx2zc model.onnx - --tune", "--tune needs two files: neither IN nor OUT can be -"),
        ("onnx2zc a.onnx --tune --exclude b", "--tune needs the graph, which --select and --exclude leave out"),
        ("onnx2zc a.onnx --tune --dry-run", "--tune takes the archive that is written, and --dry-run writes none"),
        ("to-onnx m.zcr - --external", "--external needs two files: neither ARCHIVE nor OUT can be -"),
        ("to-onnx m.zcr --tuned", "--tuned and --no-tuned are about models with --external"),
        ("to-onnx m.onnx x --external --module a", "--tuned and --module are about archives, not .onnx files"),
        ("tune -", "ARCHIVE and OUT have to be files: neither can be -"),
        ("tune m.zcr --remove --threads 1", "--threads is for tuning, and --remove tunes nothing"),
        ("unpack m.zcr", "OUT is required if IN does not end in .zst"),
        ("pack https://host/m.zcr", "OUT is required if the source is a URL"),
        ("pack m.zcr --level 23", "level 23 is not from 1 to 22"),
        ("edit m.zcr", "no change is given"),
        ("edit m.zcr --rename a", "--rename a: give a name, =, and what it gets"),
        ("edit m.zcr --drop x -o -", "neither can be -"),
        ("embed m.zcr --lang python --blob incbin", "--blob means nothing to python; it is for c, cpp, asm"),
        ("embed m.zcr --lang c --alignment 24", "24 is not a power of two"),
        ("detach p --discard --keep", "--discard writes no archive"),
        ("serve https://example.org/m.zcr", "serve needs a file, not standard input or a URL"),
    ],
)  # fmt: skip
def test_wrong_usage_is_status_2(line: str, told: str, run: c.Commands) -> None:
    run.misused(line, told)


@pytest.mark.parametrize("text", ["", "GB", "0", "-1", "5 apples", "5GBB", "1e400", "nan", "5Bi", "1.2.3MB"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size, such as 5GB"):
        size(text)


def test_sizes_are_understood() -> None:
    gigabytes = [size(text) for text in ("5GB", "5gb", "5G")]
    assert [*gigabytes, size("7"), size("7B"), size("1.5KiB"), size("2MiB")] == [5 * 10**9] * 3 + [7, 7, 1536, 1 << 21]


@pytest.mark.parametrize("command", [main, onnx2zc_main])
def test_version_names_package_and_format(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        command(["--version"])
    version = re.escape(zcrecord.__version__)
    assert re.fullmatch(rf"(zcrecord|onnx2zc) {version}, archive format \d+\n", capsys.readouterr().out)
