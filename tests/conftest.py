"""What happens to tests that need a system tool, and where tests find `tools`.

`@pytest.mark.needs("gcc")`: without that command on PATH the test is left out, and named at the end; without
"gcc -m32" where that builds no program. Under `tools/test --all` (ZCRECORD_TEST_ALL=1) nothing is left out: it fails,
and so does every skip whose reason does not start with "platform:", which is for what another operating system alone
can show.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ml_dtypes  # noqa: F401  # numpy knows "int4" and "bfloat16" by name from it
import pytest

if TYPE_CHECKING:
    from browsers import Pages
    from playwright.sync_api import Browser

ALL = os.environ.get("ZCRECORD_TEST_ALL") == "1"
LEFT_OUT = pytest.StashKey[list[str]]()
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tools` is not installed
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell have it ignored, and hand that on
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as in tools/__init__.py, for whatever imports it first


@pytest.fixture(params=["new", "old"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A path with or without a file, which is to be as it was when the test is over, and alone."""
    path = tmp_path / "m.zcr"
    if request.param == "old":
        path.write_bytes(b"old")
    yield path
    assert os.listdir(tmp_path) == (["m.zcr"] if request.param == "old" else [])
    assert request.param == "new" or path.read_bytes() == b"old"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for the tests of one file."""
    from browsers import chromium  # here, since most tests run without it

    with chromium() as running:
        yield running


@pytest.fixture
def pages(browser: Browser) -> Iterator[Pages]:
    """Makes pages; a test fails if one of them complains."""
    from browsers import Pages  # here, as above

    made = Pages(browser)
    yield made
    made.close()
    assert not made.complaints


@lru_cache
def has(tool: str) -> bool:
    """Return whether a command is on PATH; of a compiler with an option, such as 'gcc -m32', whether it builds."""
    command, *options = tool.split()
    if not options or shutil.which(command) is None:
        return shutil.which(command) is not None
    with tempfile.TemporaryDirectory() as folder:
        build = [command, *options, "-x", "c", "-", "-o", f"{folder}/main"]
        program = b"#include <stdlib.h>\nint main(void) { return 0; }\n"
        return subprocess.run(build, input=program, capture_output=True).returncode == 0


def missing_tools(item: pytest.Item) -> list[str]:
    """Return the tools that the test's marks name and this machine does not have."""
    named = [str(tool) for mark in item.iter_markers("needs") for tool in mark.args]
    return [tool for tool in named if not has(tool)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what lacks a tool, unless nothing is to be left out."""
    config.stash[LEFT_OUT] = []
    lacking = [] if ALL else [item for item in items if missing_tools(item)]
    if lacking:
        config.stash[LEFT_OUT] = [f"{item.nodeid} needs {', '.join(missing_tools(item))}" for item in lacking]
        config.hook.pytest_deselected(items=lacking)
        items[:] = [item for item in items if item not in lacking]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail what lacks a tool and was not deselected."""
    if missing := missing_tools(item):
        pytest.fail(f"needs {', '.join(missing)}, not on PATH; is it in tools/test's system_tools?", pytrace=False)


def _refuse_skip(report: Report) -> Report:
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
    if ALL and report.skipped and reason and not reason.removeprefix("Skipped: ").startswith("platform:"):
        report.outcome = "failed"
        report.longrepr = f"under --all a skip is a failure: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a test's skip into a failure under --all."""
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a module's skip into a failure under --all."""
    return _refuse_skip((yield))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what was left out, before pytest's own closing line."""
    left_out = config.stash.get(LEFT_OUT, [])
    if left_out:
        terminalreporter.section("left out for want of a system tool; tools/test --all has it installed")
        for line in left_out:
            terminalreporter.line(line)
