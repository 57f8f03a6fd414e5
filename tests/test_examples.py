"""What the documentation shows works: the docstrings' examples and README's Python blocks.

Each docstring's examples, and README's blocks one after the other, run in a folder of their own that holds
`model.onnx` (the digits classifier). A block that follows a line `<!-- not run: why -->` is left alone.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shutil
from pathlib import Path

import pytest

import zcrecord

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_ONLY_FIRST_FAILURE
BLOCK = re.compile(r"(?P<before>[^\n]*)\n```(?:python|pycon)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
MODULES = [
    found.name
    for found in pkgutil.walk_packages(zcrecord.__path__, "zcrecord.")
    if found.name.rpartition(".")[2] != "__main__" and "._schema" not in found.name
]
EXAMPLES = [
    test
    for module in ["zcrecord", *MODULES]
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module))
    if test.examples
]


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "tests" / "data" / "digits.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)


def run(example: doctest.DocTest) -> None:
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=said.append, clear_globs=False)
    assert not result.failed, "".join(said)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_docstring_example_works(example: doctest.DocTest) -> None:
    run(example)


def test_readme_examples_work() -> None:
    text = README.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = [match for match in BLOCK.finditer(text) if not match["before"].startswith("<!-- not run:")]
    assert blocks, "README has no Python block to run"
    for match in blocks:
        line = text.count("\n", 0, match.start("code")) + 1
        if ">>>" in match["code"]:
            # A copy of the names goes in; what the examples add comes out.
            example = doctest.DocTestParser().get_doctest(match["code"], names, f"README.md:{line}", str(README), line)
            run(example)
            names |= example.globs
        else:
            exec(compile("\n" * (line - 1) + match["code"], str(README), "exec"), names)
