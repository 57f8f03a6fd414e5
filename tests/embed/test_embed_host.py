"""Promise P5 on this machine: programs use weights where they were linked, and allocate and copy nothing.

C, C++ and Rust, with weights as typed symbols and in a whole archive that is opened at run time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.hosted import build_c, build_rust, run_together, write_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="platform: /proc/PID/smaps is Linux's")

ROWS, COLUMNS = 1024, 1024
NBYTES = ROWS * COLUMNS * 4
SUM = ROWS * COLUMNS * 0.5 + 1 - 2 + 3 - 4

COMPILERS = {
    "C, gcc": ["gcc", "-std=c99"],
    "C, clang": ["clang-19", "-std=c99"],
    "C++, g++": ["g++"],
    "C++, clang": ["clang++-19"],
    "C, 32 bits": ["gcc", "-m32", "-std=c99"],
}
RUST = {"Rust": False, "Rust, global_asm!": True}  # which has no archive to open, since each tensor lies by itself
NEEDS = {"gcc": ["gcc"], "clang-19": ["clang-19"], "g++": ["gcc", "g++"], "clang++-19": ["clang++-19"]}
PROGRAMS = ("host_symbols", "host_archive")

Build = Callable[..., Path]


def languages(*names: str) -> pytest.MarkDecorator:
    """Parametrize by language, each with the tools it needs."""
    tools = {name: NEEDS[command[0]] for name, command in COMPILERS.items()} | {name: ["rustc", "cc"] for name in RUST}
    tools |= {name: ["gcc", "gcc -m32"] for name in names if "32 bits" in name}
    marked = [pytest.param(name, marks=pytest.mark.needs(*tools[name])) for name in names]
    return pytest.mark.parametrize("language", marked)


with_every_program = pytest.mark.parametrize("program", PROGRAMS)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A program in a language, with or without a deliberate copy; each is built once."""
    folder = tmp_path_factory.mktemp("host")
    archive = write_model(folder, ROWS, COLUMNS)

    @functools.cache
    def program(language: str, name: str, *, copied: bool = False) -> Path:
        if language in RUST:
            return build_rust(folder, archive, name, assembly=RUST[language], copied=copied)
        return build_c(folder, archive, name, COMPILERS[language], copied=copied)

    return program


def check_own_pages(built: Path) -> None:
    """Check that two processes at once allocate nothing, and share the weights in the program's file."""
    for ran in run_together(built, 2):
        assert (ran.told["allocations"], ran.told["bytes"]) == (0, 0)
        assert (ran.told["nbytes"], ran.told["sum"]) == (NBYTES, SUM)
        assert ran.pages.permissions == {"r--p"}
        assert ran.pages.files == {str(built)}
        assert ran.pages.private_dirty == 0
        assert ran.pages.shared >= NBYTES
        assert ran.pages.pss <= ran.pages.rss / 2 + (64 << 10)  # what lies around the weights one may have read alone


@with_every_program
@languages("C, gcc", "C, clang", "C++, g++", "C++, clang", "C, 32 bits", "Rust")
def test_processes_allocate_nothing_and_share_their_pages(build: Build, language: str, program: str) -> None:
    check_own_pages(build(language, program))


@languages("Rust, global_asm!")
def test_statics_placed_one_by_one_are_used_where_they_lie_as_well(build: Build, language: str) -> None:
    check_own_pages(build(language, "host_symbols"))


@with_every_program
@languages("C, gcc", "C++, g++", "C, 32 bits", "Rust")
def test_a_deliberate_copy_is_noticed(build: Build, language: str, program: str) -> None:
    """Means of the other tests work: malloc, operator new and Rust's allocator are counted, pages told apart."""
    built = build(language, program, copied=True)
    for ran in run_together(built, 2):
        assert (ran.told["allocations"], ran.told["bytes"], ran.told["sum"]) == (1, NBYTES, SUM)
        assert ran.pages.permissions == {"rw-p"}
        assert str(built) not in ran.pages.files
        assert ran.pages.private_dirty >= NBYTES
        assert ran.pages.shared == 0
