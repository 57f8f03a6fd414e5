"""README shows what the commands print: its console blocks are run, one after the other, in one folder.

What a line "..." at its end stands for may differ. The Python blocks are run by test_examples.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import command_line as c
import pytest

README = (c.ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (?P<command>.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.MULTILINE)
SHELL = f"""
onnx2zc() {{ "{sys.executable}" -c "{c.ONNX2ZC[1]}" "$@"; }}
zcrecord() {{ "{sys.executable}" -m zcrecord "$@"; }}
"""


@pytest.mark.skipif(os.name != "posix", reason="platform: README's commands are those of a POSIX shell")
def test_readme_s_commands_print_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c.enter(tmp_path, monkeypatch)
    found = [match for block in BLOCKS for match in COMMAND.finditer(block)]
    assert len(found) > 3, "README has no console blocks to run"
    for match in found:
        shell = ["bash", "-c", SHELL + match["command"]]
        done = subprocess.run(shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        pattern = re.escape(match["shown"]).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, done.stdout), f"$ {match['command']}\n{done.stdout}\nREADME has:\n{match['shown']}"


def test_readme_s_first_screen_has_what_a_stranger_looks_for() -> None:
    marks = [
        "./tools/quickstart",
        "./tools/test",
        "```python",
        "```console",
        "<!-- bench:begin -->",
        "| header, 64 bytes",
    ]
    places = [README.index(mark) for mark in marks]
    assert places == sorted(places)
    assert places[-1] < README.index("\n## ")


def test_readme_s_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (c.ROOT / target).exists(), target
