"""Every save, interrupted at every system call it makes: the file before or the new one, one typed error, no litter.

`tools.faults` has the saves and what is done to them; here each runs with fewer kinds of error.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.faults.interrupting import build, run_in
from tools.faults.saves import SAVES

pytestmark = pytest.mark.needs("gcc")
SHM = Path("/dev/shm")  # the system calls are the same there, and no disk is waited for


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[str, Any]]:
    """Results of all saves, each in turn in one process."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as name:
        folder = Path(name)
        yield run_in(build(folder), folder, quick=True)


@pytest.mark.parametrize("name", SAVES)
def test_interrupted_save_leaves_the_old_file_or_the_new_one_and_says_which(name: str, reports: dict[str, Any]) -> None:
    assert not reports[name]["wrong"], "\n".join(reports[name]["wrong"][:20])


@pytest.mark.parametrize("name", SAVES)
def test_interruptions_reach_every_step_of_a_save(name: str, reports: dict[str, Any]) -> None:
    """Or the test above would not notice."""
    result = reports[name]
    assert result["calls"] >= 15
    assert result["failed"] >= 15
    assert result["killed"] >= 15
    assert {"write", "fsync", "close", "rename", "flock"} <= set(result["hit"])
