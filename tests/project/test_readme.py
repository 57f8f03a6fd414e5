"""README shows what the commands print: its console blocks are run, one after the other, in one folder.

What a line "..." at its end stands for may differ. The Python blocks are run by test_examples.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import command_line as c
import guides
import pytest

README = guides.README.read_text(encoding="utf-8")
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(os.name != "posix", reason="platform: README's commands are those of a POSIX shell")
def test_readme_s_commands_print_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c.enter(tmp_path, monkeypatch)
    assert sum(map(c.run_console, BLOCK.findall(README))) > 3, "README has no console blocks to run"


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
    for page in (guides.README, *guides.GUIDES):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page}: {target}"
