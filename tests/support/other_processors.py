"""Python on another processor: qemu runs this machine's programs as one that lacks what came after 2008.

It takes four to seven seconds until onnxruntime is imported, and computes slowly: use small models. /proc/cpuinfo is
this machine's there; CPUID is the other's, and with it the kernels that ONNX Runtime chooses.
"""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

__all__ = ["NO_AVX", "run_on_processor"]

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
