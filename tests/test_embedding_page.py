"""docs/embedding.md: its programs build without a warning and run, as the page shows them, in one folder.

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

PAGE = (c.ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="platform: the page's commands are those of a POSIX shell"),
    pytest.mark.needs("gcc", "rustc", "cc"),
]


def test_programs_of_the_page_build_and_run_as_it_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(c.DIGITS, tmp_path / "digits.onnx")
    scripts = tmp_path / "bin"
    scripts.mkdir()
    for name, function in (("zcrecord", "main"), ("onnx2zc", "onnx2zc_main")):
        code = f"import sys; from zcrecord.cli import {function}; sys.exit({function}())"
        (scripts / name).write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
        (scripts / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(scripts), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(c.ROOT), prepend=os.pathsep)
    told = []
    for language, name, text in BLOCK.findall(PAGE):
        if name:
            (tmp_path / name).write_text(text)
        elif language == "sh":
            done = subprocess.run(["sh", "-e"], input=text, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, text + done.stdout + done.stderr
            assert not done.stderr, f"{text}: {done.stderr}"
            told.append(done.stdout)
    runs = [text for text in told if "10 x 32" in text or "[10, 32]" in text]
    assert len(runs) == 4, told
    assert "classifier.weight float32" in runs[2]
