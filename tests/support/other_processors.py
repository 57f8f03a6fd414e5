"""Python on another processor: qemu runs this machine's programs as one that lacks what came after 2008.

And the marks of tests that differ where qemu-user runs all of them, as `tools/machines.py` has it do.

Under qemu-x86_64 it takes four to seven seconds until onnxruntime is imported, and Python computes slowly: use small
models. /proc/cpuinfo is this machine's there; CPUID is the other's, and with it the kernels that ONNX Runtime chooses.
"""

from __future__ import annotations

import os
import platform
import sys

import pytest
from processes import output

from tools.machines import EMULATED

COUNTS_MEMORY = pytest.mark.skipif(EMULATED in os.environ, reason="platform: qemu-user's own memory is counted, too")
X86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="platform: the program is x86-64's")
NO_AVX = "Nehalem"  # the oldest that numpy takes: with it no x86_64 of today has its features in common


def run_on_processor(code: str, *arguments: str, processor: str = NO_AVX) -> str:
    """Return the output of Python code that runs on another processor; a test needs("qemu-x86_64") for it.

    `processor` is a name that `qemu-x86_64 -cpu help` lists; "max" is one with AVX2 and without AVX512.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("platform: qemu-x86_64 would need a Python for Linux on x86_64")
    return output("qemu-x86_64", "-cpu", processor, sys.executable, "-c", code, *arguments)
