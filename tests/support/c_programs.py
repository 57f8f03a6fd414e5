"""C programs that tests build around zcrecord.h: the flags it must stay quiet under, and the checkers made of it."""

from __future__ import annotations

import platform
from pathlib import Path

from processes import quiet
from readers import Checker

SOURCES = Path(__file__).parents[1] / "programs" / "c"
HEADER = Path(__file__).parents[2] / "zcrecord" / "embed" / "zcrecord.h"
WARNINGS = [
    "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wcast-qual", "-Wcast-align",
    "-Wunused", "-Werror",
]  # fmt: skip
# Other processors' gcc has no -m32, and under qemu-user, as tools/machines.py has it, no sanitizer runs.
THOROUGH = platform.machine() == "x86_64"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DCHECKER_ASAN", "-g"] if THOROUGH else []
COMPILERS = ("gcc", "gcc -m32", "clang-19") if THOROUGH else ("gcc",)  # those that build the checkers


def build(compiler: str, source: Path, out: Path, *flags: str) -> Path:
    """Compile a program with zcrecord.h, warnings being errors; what a compiler says otherwise fails."""
    quiet(compiler, *WARNINGS, f"-I{HEADER.parent}", *flags, source, "-o", out)
    return out


def checkers(folder: Path) -> list[Checker]:
    """Build the checker of readers.py: under sanitizers by both compilers, for 32 bits, and without GNU loads.

    On other processors than x86 gcc alone builds it: optimised for size, and without GNU loads.
    """
    source = SOURCES / "checker.c"

    def checker(compiler: str, name: str, *flags: str) -> Checker:
        return [build(compiler, source, folder / name, *flags)]

    portable = checker("gcc", "portable", "-std=c99", "-O3", "-DZCR_PORTABLE")
    if not THOROUGH:
        return [checker("gcc", "gcc", "-std=c99", "-Os"), portable]
    return [
        checker("gcc", "gcc", "-std=c99", "-O1", *SANITIZERS),
        checker("clang-19", "clang", "-std=c11", "-O2", *SANITIZERS),
        checker("gcc", "gcc32", "-std=c99", "-m32", "-Os", *SANITIZERS),
        portable,
    ]
