"""Examples of the documentation work: those of docstrings and the Python blocks of README and the guides.

Each docstring's examples, and a page's blocks one after the other, run in a folder of their own that holds
`model.onnx` (the digits classifier); README's in one that holds what the quickstart leaves. A block that follows a
line `<!-- not run: why -->` is left alone.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import pkgutil
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line as c
import pytest
from guides import GUIDES, README, ROOT
from optimum_folders import copy_folder
from rich.console import Console

import zcrecord
import zcrecord.onnx
from tools import quickstart
from tools.generate import reference

TABLES = {"attacks", "bench"}  # nothing to run
PAGES = [README, *(page for page in GUIDES if page.parent.name not in TABLES)]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_ONLY_FIRST_FAILURE
BLOCK = re.compile(
    r"(?P<before>[^\n]*)\n```(?P<kind>python|pycon|console|js)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)

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
FUNCTIONS = [
    thing
    for module in map(importlib.import_module, reference.MODULES)
    for name in (module.__all__ if module.__name__ != "zcrecord.orbax" else ())  # its classes need orbax
    if inspect.isfunction(thing := getattr(module, name)) and module.__name__ != "zcrecord.errors"
]


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "tests" / "data" / "digits.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # for modules that an example makes


def run(example: doctest.DocTest) -> None:
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=said.append, clear_globs=False)
    assert not result.failed, "".join(said)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_docstring_example_works(example: doctest.DocTest) -> None:
    run(example)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_public_function_has_a_short_example_that_is_run(function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    assert "Example:" in text
    lines = re.findall(r"^\s*(?:>>>|\.\.\.) ", text, re.MULTILINE)
    assert 0 < len(lines) <= 6, f"{len(lines)} lines of example"
    assert f"{function.__module__}.{function.__name__}" in {example.name for example in EXAMPLES}


def make_what_the_quickstart_leaves() -> None:
    quickstart.act_one(Console(file=io.StringIO()), Path())


def run_blocks(text: str) -> list[re.Match[str]]:
    return [match for match in BLOCK.finditer(text) if not match["before"].startswith("<!-- not run:")]


MARKS = {
    "schema/INTEGRITY.md": [pytest.mark.needs("openssl")],  # keys are made with it
    "zcrecord/onnx/README.md": [pytest.mark.needs("gzip")],
    **{
        f"zcrecord/{room}/README.md": [pytest.mark.slow]  # they start processes
        for room in ("cli", "compat", "distributed", "embed", "fleet", "frameworks", "web")
    },
}
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def test_marked_pages_are_there() -> None:
    assert set(MARKS) < set(NAMES)


@pytest.mark.parametrize("page", [pytest.param(ROOT / name, id=name, marks=MARKS.get(name, ())) for name in NAMES])
def test_examples_of_a_page_work(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    if page == README:
        make_what_the_quickstart_leaves()
    if page == ROOT / "zcrecord" / "onnx" / "README.md":
        copy_folder("seq2seq", Path("t5"))
    blocks = run_blocks(text)
    assert blocks, f"{page} has no block to run"
    for match in blocks:
        if match["kind"] == "js":
            continue  # the next test's
        if match["kind"] == "console":
            assert c.run_console(match["code"])
            continue
        line = text.count("\n", 0, match.start("code")) + 1
        if ">>>" in match["code"]:
            # A copy of the names goes in; what the examples add comes out.
            example = doctest.DocTestParser().get_doctest(match["code"], names, f"{page.name}:{line}", str(page), line)
            run(example)
            names |= example.globs
        else:
            exec(compile("\n" * (line - 1) + match["code"], str(page), "exec", dont_inherit=True), names)


@pytest.mark.needs("node")
def test_javascript_of_a_page_works_beside_the_module(tmp_path: Path) -> None:
    blocks = run_blocks((ROOT / "zcrecord" / "web" / "README.md").read_text(encoding="utf-8"))
    standin = (ROOT / "tests" / "programs" / "js" / "web" / "webnn_standin.mjs").as_uri()
    webnn = f'''import {{ MLContext, MLGraphBuilder }} from "{standin}";
        const context = new MLContext();
        const builder = new MLGraphBuilder(context);'''
    program = "\n".join([webnn, *(match["code"] for match in blocks if match["kind"] == "js")])
    zcrecord.onnx.convert("model.onnx", "model.zcr")
    shutil.copytree(ROOT / "zcrecord" / "web" / "reader", tmp_path / "reader")
    (tmp_path / "page.mjs").write_text(program, encoding="utf-8")
    done = subprocess.run(["node", "page.mjs"], capture_output=True, text=True)
    told = "7 tensors\nFloat32Array 64x64\n8x64\n64 elements\n867 bytes of graph, 5 modules\n"
    told += "features.0.bias: 256 bytes\n7 constants\n1061 bytes of model, 1 files of weights\n"
    assert done.stdout == told, done.stderr
