"""Shared by tests of the command line: a folder to work in, an archive, terminals, checks of failures."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcrecord
from zcrecord.cli.dispatch import main
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
    """Return an archive with a tree, ties, equal bytes, strides, narrow types, attributes and metadata."""
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
    """A stream that says it is a terminal."""

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


def fails(capsys: pytest.CaptureFixture[str], status: int, pattern: str, start: str = "zcrecord: error: ") -> None:
    """Check that a command failed as one: exit status 1, nothing on standard output, one line that matches."""
    out, err = capsys.readouterr()
    assert status == 1
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith(start), err
    assert re.search(pattern, err), err


def misused(capsys: pytest.CaptureFixture[str], run: Callable[[], object], told: str) -> None:
    """Check that a command ends with 2, as wrong usage does, and its message has this text, or matches it."""
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    err = " ".join(capsys.readouterr().err.split())
    assert told in err or re.search(told, err), err


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, timeout=300, **options)


def safetensors(path: Path) -> None:
    header = b'{"w":{"dtype":"U8","shape":[200],"data_offsets":[0,200]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(200))


def truncated(path: Path) -> None:
    whole = Path("whole.zcr")
    zcrecord.save_record({"w": np.zeros(1000)}, whole)
    path.write_bytes(whole.read_bytes()[:-100])


def of_the_future(path: Path) -> None:
    zcrecord.save_record({"w": np.zeros(1000)}, path)
    data = bytearray(path.read_bytes())
    data[8] = 200
    path.write_bytes(data)


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
