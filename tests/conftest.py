"""Tests that are left out by default, and fixtures that many tests share.

By default neither tests that run a system tool run, nor those that are slow, measure, or try every case; they are
counted at the end. See `exhaustive.py`. Of a path (`pytest tests/codec`) all tests run but those for which this machine
lacks the tool. A test that wants a package which PyPI does not have for this machine is skipped (`absent_packages.py`).

Under `tools/test --all` (ZCRECORD_TEST_ALL=1) nothing is left out: what lacks a tool fails (`named_tools.py`), and so
does every skip whose reason does not start with "platform:", which is for what another operating system alone can show.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import absent_packages
import hypothesis
import ml_dtypes  # noqa: F401  # numpy knows "int4" and "bfloat16" by name from it
import named_tools
import pytest
from exhaustive import ALL, KINDS, left_out_by_default, run_whole, whole

from tools.system_tools import PACKAGES, has

if TYPE_CHECKING:
    from browsers import Pages
    from buckets import S3
    from command_line import Commands
    from playwright.sync_api import Browser

    from tools.range_server import Server

LEFT_OUT = pytest.StashKey[dict[str, int]]()  # tests left out of each kind, or for want of each tool
NAMED = pytest.StashKey[bool]()  # whether paths were given
FROZEN = pytest.StashKey[int]()  # modules that were there when objects were frozen last
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

gc.disable()  # until all tests are found: a third of the time that takes
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell have it ignored, and hand that on
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")  # a loaded machine is no fault
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


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run commands in, with the digits classifier as model.onnx."""
    import command_line  # here, since most tests run without it

    command_line.enter(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def archive(model_folder: Path) -> Path:
    """An archive in that folder, with something of all that archives can have."""
    import command_line  # here, as above

    return command_line.make_archive()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Commands:
    """Runs commands in this process."""
    import command_line  # here, as above

    return command_line.Commands(capsys)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    """An S3 server, for all tests that need one."""
    from buckets import serving_s3  # here, as above

    with serving_s3() as serving:
        yield serving


@pytest.fixture
def s3(s3_server: S3) -> Iterator[S3]:
    """The S3 server with an empty bucket named "bucket"; answers every request again at the end."""
    s3_server.empty()
    yield s3_server
    s3_server.answers = lambda _: None


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """fsspec's files in memory, none at first; temporary files lie in a folder that is empty again at the end."""
    import fsspec  # here, as above

    fs = fsspec.filesystem("memory")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    assert os.listdir(tmp_path / "temporary") == []


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of a folder with `m.zcr`, the archive of `remote_archives.WEIGHTS`; readers hardly wait to retry."""
    from records import saved  # here, as above
    from remote_archives import WEIGHTS

    from tools.range_server import serving

    monkeypatch.setattr("zcrecord.remote.file._FIRST_WAIT", 0.001)
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "m.zcr").write_bytes(saved(WEIGHTS))
    with serving(folder) as state:
        yield state


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder for a cache, which does not exist yet."""
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for the tests of one file."""
    from browsers import chromium  # here, as above

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


def pytest_configure(config: pytest.Config) -> None:
    """Leave nothing out of a path, but what absent packages and tools need."""
    config.stash[LEFT_OUT] = {}
    config.pluginmanager.register(absent_packages)
    config.pluginmanager.register(named_tools)
    given = config.args_source is config.ArgsSource.ARGS
    config.stash[NAMED] = named = getattr(config, "workerinput", {}).get("named", given)
    if named and "ZCRECORD_EMULATED" not in os.environ:  # emulated processors are slow
        run_whole()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell pytest's other processes, to which paths are always given, whether some were given to this one."""
    node.workerinput["named"] = node.config.stash[NAMED]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what does not run by default or, of a path, what lacks a tool."""
    if ALL:
        return
    if config.stash[NAMED]:
        left_out = {item: tools[0] for item in items if (tools := named_tools.missing_tools(item))}
    else:
        left_out = dict.fromkeys(filter(named_tools.named_tools, items), "needs")
    if not whole():
        left_out |= left_out_by_default([item for item in items if item not in left_out])
    config.stash[LEFT_OUT] = dict(Counter(left_out.values()).most_common())
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def freeze(config: pytest.Config) -> None:
    """Once many modules have come, keep garbage collections from going through them: torch's alone take 50 ms."""
    if len(sys.modules) > config.stash.get(FROZEN, 0) + 100:
        gc.collect()
        gc.freeze()
        config.stash[FROZEN] = len(sys.modules)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage from here on, but not what was imported."""
    gc.freeze()  # uncollected: going through all that was imported takes seconds
    gc.enable()
    session.config.stash[FROZEN] = len(sys.modules)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze what earlier tests imported."""
    freeze(item.config)


def _refuse_skip(report: Report) -> Report:
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
    if ALL and report.skipped and reason and not reason.removeprefix("Skipped: ").startswith("platform:"):
        report.outcome = "failed"
        report.longrepr = f"under --all a skip is a failure: {reason}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """Print no dot for a test that passed, unless somebody looks on."""
    quiet = report.passed and not config.get_verbosity() > 0 and not sys.stdout.isatty()
    return ("passed" if report.when == "call" else "", "", "") if quiet else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a test's skip into a failure under --all."""
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a module's skip into a failure under --all."""
    return _refuse_skip((yield))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what was left out to the process that collects the results, where there are several."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what another process left out; all of them collect the same tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell in a few lines what was left out or, under --all, found, before pytest's own closing line."""
    left_out = config.stash[LEFT_OUT]
    lines = [f"{count} tests {KINDS[kind]}" for kind, count in left_out.items() if kind in KINDS]
    if tools := [f"{tool} {count}" for tool, count in left_out.items() if tool in PACKAGES]:
        lines.append(f"tests for want of a system tool: {', '.join(tools)}")
    if ALL:
        terminalreporter.section("system tools")
        lines = [f"found: {', '.join(filter(has, PACKAGES))}"]
    elif lines:
        terminalreporter.section("left out; ./tools/test --all runs everything, ./tools/test PATH all tests of a path")
    for line in lines:
        folded = textwrap.wrap(line, 118, subsequent_indent="  ", break_on_hyphens=False)
        terminalreporter.write_line("\n".join(folded))
