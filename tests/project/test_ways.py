"""A way through the package enters few modules: a reader follows a load, a save or a conversion in few files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from guides import ROOT

import zcrecord
import zcrecord.onnx

PACKAGE = ROOT / "zcrecord"
TREE = {"encoder": {"w": np.ones((3, 4), np.float32), "layers": [1, 2, np.ones(2)]}, "name": "x"}


def modules_entered(work: Callable[[], Any]) -> set[str]:
    """Return the modules of the package in which a function is entered, once everything is imported."""
    work()
    entered = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            entered.add(Path(frame.f_code.co_filename).relative_to(PACKAGE).with_suffix("").as_posix())

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return entered


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Any]]:
    folder = tmp_path_factory.mktemp("ways")
    model = ROOT / "tests" / "data" / "digits.onnx"
    zcrecord.save_record(TREE, folder / "m.zcr")
    zcrecord.onnx.convert(model, folder / "model.zcr")
    record = zcrecord.load_record(folder / "m.zcr")
    return {
        "record[name]": lambda: record["encoder.w"],
        "load_record": lambda: zcrecord.load_record(folder / "m.zcr"),
        "save_record": lambda: zcrecord.save_record(TREE, folder / "saved.zcr"),
        "convert": lambda: zcrecord.onnx.convert(model, folder / "converted.zcr", force=True),
        "session": lambda: zcrecord.onnx.session(folder / "model.zcr"),
        "fill_by": lambda: zcrecord.load_record(folder / "m.zcr").hollow().fill_by("host"),
    }


@pytest.mark.parametrize(
    "way, most",
    [("record[name]", 4), ("load_record", 10), ("save_record", 12), ("convert", 19), ("session", 22), ("fill_by", 29)],
)
def test_a_way_enters_few_modules(way: str, most: int, ways: dict[str, Callable[[], Any]]) -> None:
    entered = modules_entered(ways[way])
    assert 2 < len(entered) <= most, sorted(entered)
