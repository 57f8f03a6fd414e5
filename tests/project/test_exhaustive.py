"""Exhaustive families run whole under --all, and without it a few members of each that show what there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from exhaustive import spread

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = """
import pytest
from exhaustive import rounds, some

@pytest.mark.exhaustive
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", range(5))
def test_grid(a, b): pass

@pytest.mark.exhaustive(keep=3)
@pytest.mark.parametrize("n", range(101))
def test_list(n): pass

@pytest.mark.exhaustive(keep=("one", "three"))
@pytest.mark.parametrize("word", ["one", "two", "three"])
def test_named(word): pass

@pytest.mark.exhaustive(keep=0)
def test_none(): pass

@pytest.mark.needs("gcc")
@pytest.mark.exhaustive(keep=0)
def test_lacks_a_tool(): pass

@pytest.mark.parametrize("cut", some(range(1000), 2))
def test_loop(cut): pass

@pytest.mark.parametrize("round", range(rounds(10)))
def test_round(round): pass
"""


def collected(folder: Path, **environment: str) -> str:
    """Collect the families with the real conftest, on a machine that has none of the system tools."""
    (folder / "test_families.py").write_text(FAMILIES)
    paths = [str(ROOT / place) for place in (".", "tests", "tests/support")]
    settings = {"PATH": "", "PYTHONPATH": os.pathsep.join(paths), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--collect-only"]
    done = subprocess.run(
        [*command, "test_families.py"], cwd=folder, env=settings, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_each_value_of_each_parameter_runs_and_the_rest_is_counted(tmp_path: Path) -> None:
    told = collected(tmp_path)
    found = [line.partition("::test_")[2] for line in told.splitlines() if "::" in line]
    assert found[:5] == ["grid[0-x]", "grid[1-y]", "grid[2-z]", "grid[3-x]", "grid[4-x]"]
    assert found[5:] == [
        "list[0]", "list[50]", "list[100]", "named[one]", "named[three]",
        "loop[0]", "loop[999]", "round[0]", "round[1]",
    ]  # fmt: skip
    assert "\n110 tests of families that try every case: a few of each family ran\n" in told
    assert "\n1 tests for want of a system tool: gcc 1\n" in told


def test_all_of_it_runs_under_all(tmp_path: Path) -> None:
    told = collected(tmp_path, ZCRECORD_TEST_ALL="1")
    assert told.count("::") == 15 + 101 + 3 + 1 + 1 + 1000 + 10
    assert "left out" not in told


@pytest.mark.parametrize(("few", "expected"), [(1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, [*range(10)]), (0, [])])
def test_members_are_spread_from_the_first_to_the_last(few: int, expected: list[int]) -> None:
    assert spread(range(10), few) == expected
