"""Shared by tests of the command line: a folder to work in, an archive, terminals, checks of failures."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcrecord
from zcrecord.cli.dispatch import main, onnx2zc_main
from zcrecord.tensors.packed import PackedTensor

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "tests" / "data" / "digits.onnx"
COMMANDS = ("info", "ls", "tree", "verify")
ONNX2ZC = ("-c", "import sys; from zcrecord.cli.dispatch import onnx2zc_main; sys.exit(onnx2zc_main())")
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that holds the digits classifier as model.onnx, and have other processes find the package."""
    shutil.copy(DIGITS, folder / "model.onnx")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it would hide what fails when buffers are flushed


def make_archive() -> Path:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    record = {
        "encoder": {"weight": a, "tied": a, "turned": np.asfortranarray(a + 1), "heads": 2},
        "decoder": [{"bias": np.zeros(5, np.int64)}, {"bias": np.zeros(5, np.int64)}],
        "packed": PackedTensor.pack(np.array([1, -2, 3]).astype("int4")),
        "scalar": np.array(0.5),
        "rate": float("nan"),
        "note": "a text",
        "blob": b"12345",
    }
    zcrecord.save_record(record, "model.zcr", metadata={"author": "me", "tags": ["x", "y"]})
    return Path("model.zcr")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen(monkeypatch: pytest.MonkeyPatch, *arguments: str, columns: int = 100, term: str = "xterm") -> str:
    """Return a successful command's output on a terminal, without colours; a dumb one has none."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream := Terminal())
        assert main(arguments) == 0
    return STYLE.sub("", stream.getvalue()) if term == "xterm" else stream.getvalue()


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


class Commands:
    """Runs commands in this process, each given as one line or as its words; all but `onnx2zc` are of `zcrecord`.

    Calling it runs a command that succeeds, and returns its standard output; `err` is what it told.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.err = capsys, ""

    def ended(self, given: str | Sequence[str]) -> tuple[int, str]:
        """Run a command; return its exit status and standard output."""
        program, *arguments = shlex.split(given) if isinstance(given, str) else given
        status = onnx2zc_main(arguments) if program == "onnx2zc" else main([program, *arguments])
        out, self.err = self._capsys.readouterr()
        return status, out

    def __call__(self, given: str | Sequence[str]) -> str:
        status, out = self.ended(given)
        assert status == 0, self.err
        return out

    def quietly(self, line: str) -> None:
        """Run a command that succeeds and, with -q, prints nothing."""
        assert (self(f"{line} -q"), self.err) == ("", "")

    def json(self, line: str, status: int = 0) -> Any:
        """Run a command with --json; return the parsed output."""
        ended, out = self.ended(f"{line} --json")
        assert ended == status, self.err
        return json.loads(out)

    def fails(self, given: str | Sequence[str], pattern: str) -> None:
        """Check that a command fails as one does: status 1, nothing on standard output, one line that matches."""
        assert (*self.ended(given), self.err.count("\n")) == (1, "", 1), self.err
        assert re.match(r"(zcrecord|onnx2zc): error: ", self.err) and re.search(pattern, self.err), self.err

    def misused(self, given: str | Sequence[str], told: str) -> None:
        """Check that a command ends with 2, as wrong usage does, and its message has this text, or matches it."""
        with pytest.raises(SystemExit, match=r"^2$"):
            self.ended(given)
        err = " ".join(self._capsys.readouterr().err.split())
        assert told in err or re.search(told, err), err


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, timeout=300, **options)


def truncated(path: Path) -> None:
    whole = Path("whole.zcr")
    zcrecord.save_record({"w": np.zeros(1000)}, whole)
    path.write_bytes(whole.read_bytes()[:-100])


def make_empty(path: Path) -> None:
    zcrecord.save_record({}, path)


def damage(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[zcrecord.load_record(archive).info("encoder.turned").offset] ^= 1
    archive.write_bytes(data)


def options_given(monkeypatch: pytest.MonkeyPatch, module: Any) -> dict[str, Any]:
    """Have a module's `convert` note the options it is called with, from now on, in what is returned."""
    given: dict[str, Any] = {}
    real = module.convert

    def convert(source: Any, dest: Any, **options: Any) -> Any:
        given.update(options)
        return real(source, dest, **options)

    monkeypatch.setattr(module, "convert", convert)
    return given


COMMAND = re.compile(r"^\$ (?P<command>.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.MULTILINE)
SHELL = f"""
onnx2zc() {{ "{sys.executable}" -c "{ONNX2ZC[1]}" "$@"; }}
zcrecord() {{ "{sys.executable}" -m zcrecord "$@"; }}
"""


def run_console(block: str) -> int:
    """Run the commands of a console block of the documentation, in this folder; return how many there were.

    Each has to print what the block shows, where "..." at the end of a line stands for anything.
    """
    found = list(COMMAND.finditer(block))
    for match in found:
        shell = ["bash", "-c", SHELL + match["command"]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, env=environment
        )
        pattern = re.escape(match["shown"]).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, done.stdout), f"$ {match['command']}\n{done.stdout}\nshown is:\n{match['shown']}"
    return len(found)
