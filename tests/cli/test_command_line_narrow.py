"""Tables on narrow terminals: names are folded and the last columns left out, and no number is broken."""

from __future__ import annotations

import re
import sys

import command_line as c
import numpy as np
import pytest
from rich.cells import cell_len

import zcrecord
from zcrecord.cli.dispatch import main
from zcrecord.cli.render import Column, count_fitting

pytestmark = pytest.mark.usefixtures("model_folder")


def shown(monkeypatch: pytest.MonkeyPatch, columns: int, *arguments: str) -> str:
    """Return a command's output on a terminal of that width."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as patch:
        stream = c.Terminal()
        patch.setattr(sys, "stdout", stream)
        main(arguments)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", ["ls model.zcr", "tree model.zcr", "diff model.zcr other.zcr"])
def test_no_table_is_wider_than_the_terminal(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.zeros((1024, 768), np.float32)
    block = {"attn": {"c_attn": {"weight": np.ones((768, 2304), np.float32), "bias": np.zeros(2304)}, "scale": 0.125}}
    record = {
        "transformer": {"h": [block]},
        "wte": {"weight": weights},
        "lm_head": {"weight": weights},
        "重み": weights,
    }
    zcrecord.save_record(record, "model.zcr", durable=False)
    zcrecord.save_record({**record, "wte": {"weight": np.ones((2, 3))}}, "other.zcr", durable=False)
    lines = shown(monkeypatch, columns, *command.split()).splitlines()
    assert max(map(cell_len, lines)) <= columns
    numbers = set(re.findall(r"\d+", shown(monkeypatch, 400, *command.split())))
    assert set(re.findall(r"\d+", "\n".join(lines))) <= numbers
    assert "…" not in "".join(lines)


def test_last_columns_are_left_out_first() -> None:
    columns = [Column("name", min_width=20), Column("size", "right"), Column("note", min_width=12), Column("end")]
    row = ("n" * 50, "9" * 12, "x" * 40, "e" * 10)
    assert [count_fitting(columns, [row], width) for width in (60, 59, 48, 47, 10)] == [4, 3, 3, 2, 2]
