"""A plugin of pytest: tests name the system tools that they run, by marks such as `@pytest.mark.needs("gcc")`.

Names are those of `tools/system_tools.py`. Where a tool is missing its tests are left out or, under `tools/test --all`,
fail. There PATH is shadowed as well: each tool is a script that notes its use and runs the tool. A test that ran one,
itself or by a program, without a mark that names it fails: by default it would run that tool.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest
from exhaustive import ALL

from tools.system_tools import PACKAGES, has

TOOLS_RUN = pytest.StashKey[Path]()


def named_tools(item: pytest.Item) -> list[str]:
    return [str(tool) for mark in item.iter_markers("needs") for tool in mark.args]


def missing_tools(item: pytest.Item) -> list[str]:
    """Return the tools that the test's marks name and this machine does not have."""
    return [tool for tool in named_tools(item) if tool in PACKAGES and not has(tool)]


def shadow_path(config: pytest.Config) -> None:
    """Put a folder at the start of PATH in which each tool notes its use."""
    folder = Path(tempfile.mkdtemp(prefix="tools-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    config.stash[TOOLS_RUN] = folder / "run.log"
    for command in {tool.split()[0] for tool in PACKAGES}:
        if "/" not in command and (found := shutil.which(command)):
            note = f"printf '%s\\0' \"{command} $*\" >>{folder}/run.log"
            noting = f'#!/bin/sh\n{note}\nexec {shlex.quote(found)} "$@"\n'
            (folder / command).write_text(noting, encoding="utf-8")
            (folder / command).chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def pytest_configure(config: pytest.Config) -> None:
    """Under --all, note each use of a system tool."""
    if ALL:
        shadow_path(config)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Forget which tools ran while the tests were found: some ask a compiler what they are to be tried with."""
    if (log := session.config.stash.get(TOOLS_RUN, None)) is not None:
        log.unlink(missing_ok=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail what lacks a tool and was not deselected, and what names one that nothing installs."""
    if unknown := set(named_tools(item)) - PACKAGES.keys():
        pytest.fail(f"needs {', '.join(sorted(unknown))}: add it to tools/system_tools.py", pytrace=False)
    if missing := missing_tools(item):
        pytest.fail(f"needs {', '.join(missing)}, which ./tools/test --all installs", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Under --all, fail a test that ran a tool, itself or by a program it ran, and does not say that it needs it."""
    yield
    log = item.config.stash.get(TOOLS_RUN, None)
    if log is not None and log.exists():
        unnamed = tools_run(log.read_text(errors="replace", encoding="utf-8").split("\0")[:-1]) - set(named_tools(item))
        log.unlink()
        if unnamed:
            pytest.fail(f"runs {', '.join(sorted(unnamed))}; mark it with pytest.mark.needs", pytrace=False)


def tools_run(commands: Iterable[str]) -> set[str]:
    """Return the tools of tools/system_tools.py that command lines run; pip asks some for their versions alone."""
    run = set()
    for command, *options in map(str.split, commands):
        if options != ["--version"]:
            run |= {tool for tool in PACKAGES if command == tool.split()[0] and set(tool.split()[1:]) <= set(options)}
    return run
