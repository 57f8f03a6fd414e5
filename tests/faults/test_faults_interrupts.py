"""Ctrl-C at any step of a save, in a process that goes on: no file stays open, and no name stays taken.

A signal is handled between two steps of the interpreter, so it is raised there, at one step after the other: of the
package's own code, and of contextlib, which unwinds it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from exhaustive import ALL

import zcrecord

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: Linux lists open files")
PACKAGE = Path(zcrecord.__file__).parent
WHERE = (str(PACKAGE / "storage"), str(PACKAGE / "record"), contextlib.__file__)
FEW, MANY = 60, 1000  # steps of each kind of save that are interrupted, and under --all
OLD = {"a": np.arange(3000), "b": np.arange(3000) + 1}
NEW = {"a": np.ones(3000), "b": np.zeros(3000)}


class Steps:
    """Counts steps of the interpreter, and raises KeyboardInterrupt before one of them."""

    def __init__(self, last: int) -> None:
        self.last, self.count = last, 0

    def enter(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(WHERE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, _frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count == self.last:
                raise KeyboardInterrupt
        return self.step


def steps_of(save: Callable[[], object], last: int = -1) -> int:
    """Run a save up to a step; returns how many it took."""
    steps, before = Steps(last), sys.gettrace()
    with contextlib.suppress(KeyboardInterrupt):
        sys.settrace(steps.enter)
        try:
            save()
        finally:
            sys.settrace(before)
    return steps.count


def saved(path: Path) -> None:
    zcrecord.save_record(NEW, path, durable=False)


def edited(path: Path) -> None:
    with zcrecord.edit(path, durable=False) as model:
        model.metadata["new"] = 1


def sharded(path: Path) -> None:
    zcrecord.save_record(NEW, path, durable=False, max_shard_size=24_000)


def files_of(path: Path) -> set[str]:
    """Return the names of a record's files, all of which are whole; none if it is not there."""
    if not path.exists():
        return set()
    with zcrecord.load_record(path, verify="full") as record:
        return {path.name, *record.archive.source.file_names}


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@LINUX
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops what comes in a __del__
@pytest.mark.parametrize("save", [saved, edited, sharded])
def test_ctrl_c_at_any_step_leaves_no_file_open_and_nothing_that_the_next_save_does_not_remove(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "work" / "m.zcr"

    def reset() -> None:
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        zcrecord.save_record(OLD, path, durable=False, max_shard_size=24_000 if save is sharded else None)

    for _ in range(2):  # the first imports
        reset()
        steps = steps_of(lambda: save(path))
    assert steps > 1000, "nothing is traced here, so nothing was tried"
    gc.collect()
    gc.freeze()  # or each look at open files goes through all that other tests have imported
    left = set()
    for last in range(1, steps, max(steps // (MANY if ALL else FEW), 1)):
        reset()
        before = open_files()
        steps_of(lambda: save(path), last)
        assert open_files() <= before, f"a file stays open after step {last}"  # fewer: what other tests left open
        left |= {*os.listdir(path.parent)} - files_of(path)
        save(path)
        assert {*os.listdir(path.parent)} == files_of(path), f"files stay after step {last}"
    assert save is sharded or not left, "of one file, nothing is left even until the next save"
