"""The fuzzers of zcrecord.h and zcrecord.rs: how they are built, run, and what they said.

tests/programs/c/fuzz.c is the driver of both. For C it runs under AddressSanitizer and UBSan; for Rust the reader,
built with overflow checks and debug assertions, is compared with the C one on every input.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from . import CORPUS, ROOT

CLANG = "clang-19"
C_FLAGS = ["-std=c11", "-O2", "-g", f"-I{ROOT / 'zcrecord' / 'embed'}"]
SANITIZERS = ["-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", "-DCHECKER_ASAN"]
RUST_FLAGS = [
    "--edition", "2021", "-A", "dead_code", "--crate-type", "staticlib", "-C", "panic=abort", "-C", "opt-level=2",
    "-C", "debug-assertions=on", "-C", "overflow-checks=on", "-C", "codegen-units=1", "-C", "passes=sancov-module",
    "-C", "llvm-args=-sanitizer-coverage-level=3", "-C", "llvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-C", "llvm-args=-sanitizer-coverage-pc-table", "-C", "llvm-args=-sanitizer-coverage-trace-compares",
]  # fmt: skip
MOST = 4096  # bytes of an input
# What AddressSanitizer keeps of freed memory, so that a fuzzer's own does not grow.
ENVIRONMENT = {**os.environ, "ASAN_OPTIONS": "quarantine_size_mb=16:malloc_context_size=4"}


class Outcome(NamedTuple):
    """Result of a fuzzer: inputs tried, edges (and features of them) reached, and the end of its output."""

    clean: bool
    executions: int
    edges: int
    features: int
    tail: str


def build(what: str, folder: Path) -> Path:
    source, out = ROOT / "tests" / "programs" / "c" / "fuzz.c", folder / f"fuzz_{what}"
    if what == "c":
        subprocess.run([CLANG, *C_FLAGS, *SANITIZERS, source, "-o", out], check=True)
        return out
    library = folder / "libfuzz_rust.a"
    subprocess.run(["rustc", *RUST_FLAGS, ROOT / "tests" / "programs" / "rust" / "fuzz.rs", "-o", library], check=True)
    subprocess.run([CLANG, *C_FLAGS, "-DFUZZ_RUST", "-fsanitize=fuzzer", source, library, "-o", out], check=True)
    return out


def outcome(done: subprocess.CompletedProcess[str]) -> Outcome:
    """Parse the output of libFuzzer, or of atheris."""
    text = done.stdout + done.stderr
    tried = re.findall(r"stat::number_of_executed_units: (\d+)", text)
    reached = re.findall(r"cov: (\d+) ft: (\d+)", text)
    edges, features = map(int, reached[-1]) if reached else (0, 0)
    clean = done.returncode == 0 and bool(tried)
    return Outcome(clean, int(tried[-1]) if tried else 0, edges, features, text[-4000:])


def options(runs: int, seed: int, found: Path) -> list[str]:
    """Return the arguments that every one of the fuzzers takes."""
    found.mkdir(parents=True, exist_ok=True)
    return [f"-runs={runs}", f"-seed={seed}", "-timeout=10", "-print_final_stats=1", f"-artifact_prefix={found}/"]


def fuzz(program: Path, runs: int, *, seed: int, found: Path, folder: Path) -> Outcome:
    """Run a fuzzer from the kept corpus on; new inputs go to `folder`, those that show a fault to `found`."""
    command = [str(program), str(folder), str(CORPUS / "archive"), f"-max_len={MOST}", *options(runs, seed, found)]
    # By a shell that forks: the peak memory of a child that Python starts counts from Python's own, and has a limit.
    command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    return outcome(subprocess.run(command, capture_output=True, text=True, errors="replace", env=ENVIRONMENT))
