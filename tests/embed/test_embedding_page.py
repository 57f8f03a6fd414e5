"""zcrecord/embed/README.md: its programs build without a warning and run, as the page shows them, in one folder.

A block with a file's name after its language is that file; `sh` blocks are run one after the other. Its Python and
console blocks are run by test_examples.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import command_line as c
import pytest

import zcrecord

PAGE = (c.ROOT / "zcrecord" / "embed" / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="platform: the page's commands are those of a POSIX shell")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the page works in: the model, the page's files, and the commands of the package on PATH."""
    shutil.copy(c.DIGITS, tmp_path / "digits.onnx")
    scripts = tmp_path / "bin"
    scripts.mkdir()
    for name, function in (("zcrecord", "main"), ("onnx2zc", "onnx2zc_main")):
        code = f"import sys; from zcrecord.cli.dispatch import {function}; sys.exit({function}())"
        (scripts / name).write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n", encoding="utf-8")
        (scripts / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(scripts), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(c.ROOT), prepend=os.pathsep)
    for _, name, text in BLOCK.findall(PAGE):
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(script: str, folder: Path) -> str:
    """Run commands of the page, which have to succeed and to complain of nothing; return what they print."""
    done = subprocess.run(["sh", "-e"], input=script, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, script + done.stdout + done.stderr
    assert not done.stderr, f"{script}: {done.stderr}"
    return done.stdout


@pytest.mark.needs("gcc", "rustc", "cc")
def test_programs_of_the_page_build_and_run_as_it_shows_them(folder: Path) -> None:
    told = [run(text, folder) for language, name, text in BLOCK.findall(PAGE) if language == "sh" and not name]
    runs = [text for text in told if "10 x 32" in text or "[10, 32]" in text]
    assert len(runs) == 5, told
    assert runs[4] == "10 x 32 of its own\n"
    assert "classifier.weight float32" in runs[2]


@pytest.mark.needs("avr-gcc", "simavr")
def test_avr_program_reads_its_own_flash_and_has_no_weight_in_its_ram(folder: Path) -> None:
    run("onnx2zc digits.onnx digits.zcr --quiet", folder)
    done = subprocess.run(["sh", "-e", "avr.sh"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    bias = zcrecord.load_record(folder / "digits.zcr")["classifier.bias"]
    assert f"{bias.sum():.4f}, current" in done.stdout + done.stderr
    sizes = run("avr-size avr.elf", folder).splitlines()[1].split()
    assert int(sizes[1]) + int(sizes[2]) < 64  # .data and .bss; the tensor has 40 bytes, the strings are the program's
