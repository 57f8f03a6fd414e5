"""By default neither what is slow, measures or runs a tool is run, nor more than a few members of exhaustive families.

Of a path all of it runs, and under --all all there is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
@pytest.mark.slow
def test_lacks_a_tool(): pass

@pytest.mark.needs("cc")
def test_runs_a_tool(): pass

@pytest.mark.slow
@pytest.mark.measured
def test_measures(): pass

@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("name", [pytest.param("large", marks=pytest.mark.slow), "small", "other"])
def test_small_member(name): pass

@pytest.mark.parametrize("cut", some(range(1000), 2))
def test_loop(cut): pass

@pytest.mark.parametrize("round", range(rounds(10)))
def test_round(round): pass
"""


def told_by_pytest(folder: Path, *arguments: str, **environment: str) -> str:
    """Run pytest on the families with the real conftest, on a machine that has none of the system tools."""
    (folder / "test_families.py").write_text(FAMILIES, encoding="utf-8")
    paths = [str(ROOT / place) for place in (".", "tests", "tests/support")]
    settings = {"PATH": "", "PYTHONPATH": os.pathsep.join(paths), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *arguments], cwd=folder, env=settings, capture_output=True, text=True, check=True)
    return done.stdout


def test_each_value_of_each_parameter_runs_and_the_rest_is_counted(tmp_path: Path) -> None:
    told = told_by_pytest(tmp_path, "--collect-only")
    found = [line.partition("::test_")[2] for line in told.splitlines() if "::" in line]
    assert found[:5] == ["grid[0-x]", "grid[1-y]", "grid[2-z]", "grid[3-x]", "grid[4-x]"]
    assert found[5:] == [
        "list[0]", "list[50]", "list[100]", "named[one]", "named[three]", "small_member[small]",
        "loop[0]", "loop[999]", "round[0]", "round[1]",
    ]  # fmt: skip
    assert "\n111 tests of families that try every case: a few of each family ran\n" in told
    kinds = "2 tests that run a system tool\n1 tests that measure what the machine decides\n1 tests that are slow"
    assert f"\n{kinds}\n" in told


COUNT = 15 + 101 + 3 + 1 + 1 + 1 + 1 + 3 + 1000 + 10


@pytest.mark.slow
def test_all_of_a_path_runs_but_what_lacks_a_tool(tmp_path: Path) -> None:
    told = told_by_pytest(tmp_path, "--collect-only", "test_families.py")
    assert told.count("::") == COUNT - 2
    assert "\ntests for want of a system tool: gcc 1, cc 1\n" in told


@pytest.mark.slow
def test_further_processes_of_pytest_leave_out_the_same(tmp_path: Path) -> None:
    assert "\n15 passed, " in told_by_pytest(tmp_path, "-n", "1")
