"""Terminals of any width: nothing is wider than they are, names are there, and no number is broken."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

import command_line as c
import numpy as np
import pytest
from rich.cells import cell_len

import zcrecord
from zcrecord.cli import inspect, render
from zcrecord.cli.dispatch import main

pytestmark = pytest.mark.usefixtures("model_folder")

WIDTHS = [20, 40, 80, 120]


@pytest.fixture
def archive() -> Path:
    weights = np.zeros((1024, 768), np.float32)
    block = {"attn": {"c_attn": {"weight": np.ones((768, 2304), np.float32), "bias": np.zeros(2304)}, "scale": 0.125}}
    record = {
        "transformer": {"h": [block], "experts": np.zeros((2, 3, 4, 5, 6, 7, 8, 9), np.int8)},
        "wte": {"weight": weights},
        "lm_head": {"weight": weights},
        "重み": np.zeros(3),
        "epoch": 123456789012345,
    }
    zcrecord.save_record(
        record, "model.zcr", metadata={"license": "Apache-2.0", "a.long.key.of.metadata": 1234567890}, durable=False
    )
    record["lm_head"] = {"weight": np.zeros((1024, 769), np.float16)}
    record["epoch"] = 123456789012346
    zcrecord.save_record(record, "other.zcr", durable=False)
    return Path("model.zcr")


def shown(monkeypatch: pytest.MonkeyPatch, columns: int, *arguments: str) -> str:
    """Return a command's output on a terminal of that width; checks that no line is wider, but for a single word."""
    monkeypatch.setenv("TERM", "dumb")  # no colours, no progress
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as patch:
        stream = c.Terminal()
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        with contextlib.suppress(SystemExit):
            main(arguments)
    wide = [line for line in stream.getvalue().splitlines() if cell_len(line) > columns and len(line.split()) > 1]
    assert not wide
    return stream.getvalue()


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+", text))


COMMANDS = ["ls FILE", "tree FILE", "info FILE --no-digest", "diff FILE other.zcr", "verify FILE", "ls FILE *.weight"]
FAILING = ["ls missing.zcr", "nonsense", "ls FILE transformer.h.0.attn.c_attn.wieght"]
USAGE = ["info", "--help", "ls --help", "convert --help", "embed --help"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("command", [*COMMANDS, *FAILING])
def test_nothing_is_wider_than_the_terminal_and_no_number_is_broken(
    command: str, columns: int, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = command.replace("FILE", str(archive)).split()
    wide = shown(monkeypatch, 400, *arguments)
    narrow = shown(monkeypatch, columns, *arguments)
    assert numbers(narrow) <= numbers(wide)
    assert narrow.strip()
    assert "…" not in narrow


@pytest.mark.parametrize("columns", WIDTHS[1:])
@pytest.mark.parametrize("command", USAGE)
def test_usage_and_help_are_not_wider_than_the_terminal(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "usage: zcrecord" in shown(monkeypatch, columns, *command.split())


@pytest.mark.parametrize("columns", WIDTHS)
def test_names_are_there_at_every_width(columns: int, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the left, folded where they have to be; what has no room is named at the end."""
    heading, _, *lines = shown(monkeypatch, columns, "ls", str(archive)).splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith("no room for")), len(lines))
    names = [re.split(r" {2,}", line)[0].strip() for line in lines[:end] if line[0] != " "]
    assert "".join(names) == "".join(zcrecord.load_record(archive))
    gone = {column.heading for column in inspect.COLUMNS} - set(heading.split())
    told = " ".join(lines[end:])
    assert all(name in told for name in gone)
    assert bool(gone) == (columns < 120)
    assert columns < 40 or "bytes" in heading


@pytest.mark.skipif(os.name != "posix", reason="platform: terminals of POSIX")
@pytest.mark.parametrize("columns", [40, 120])
def test_width_is_that_of_the_terminal_itself(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.delenv("COLUMNS", raising=False)
    with open(ours, "rb"), open(theirs, "w", encoding="utf-8") as terminal:
        assert render.columns_of(terminal) == columns
        monkeypatch.setenv("COLUMNS", "33")
        assert render.columns_of(terminal) == 33
