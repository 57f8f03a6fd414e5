"""The code keeps its shape: imports run one way, each job is done in one place, nothing grows out of hand.

Everything is read from the source as a syntax tree; nothing but the two tests of what an import costs runs the package.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from guides import ROOT

import zcrecord
import zcrecord.onnx

# Packages, lowest first: each imports only those before it; "zcrecord" is its own `__init__`. See zcrecord/README.md.
LAYERS = [
    *("errors", "dtypes", "_schema", "codec", "tensors", "storage", "writing", "archive", "typed", "frameworks"),
    *("transport", "remote", "loaders", "foreign", "record", "zcrecord", "hollow", "integrity", "onnx", "embed"),
    *(
        "formats",
        "compat",
        "transformers",
        "lightning",
        "orbax",
        "vllm",
        "distributed",
        "fleet",
        "report",
        "cli",
        "__main__",
    ),
]

# Imports that run the other way, each with its reason beside it in the code.
UPWARDS = {
    ("zcrecord.record.record", "zcrecord.hollow"),
    ("zcrecord.storage.files", "zcrecord.record.own_shards"),
}

HOSTS = {"vllm", "tqdm"}  # a program that loads a part of ours, and what it brings along: not for us to install
GENERATED = {"zcrecord._schema", "zcrecord._schema.tables"}
CORE = {"numpy", "ml_dtypes", "xxhash", "flatbuffers"}  # what may be imported at module level
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
MOST_LINES, MOST_FUNCTION_LINES = 600, 55  # more is a sign of two responsibilities; a docstring counts for none


class Import(NamedTuple):
    """One imported module, and whether that happens only when a function is called."""

    target: str
    line: int
    lazy: bool


def modules_under(folder: str) -> dict[str, Path]:
    """Every module of a folder of the repository, by its dotted name."""
    out = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


PACKAGE = modules_under("zcrecord")
WRITTEN = {name: path for name, path in PACKAGE.items() if name not in GENERATED}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in PACKAGE.items()}


def where(module: str, line: int) -> str:
    return f"{PACKAGE[module].relative_to(ROOT)}:{line}"


@cache
def imports(module: str) -> tuple[Import, ...]:
    """Return every module that a module imports; those of a `TYPE_CHECKING` block count as any other."""
    inside = {id(n) for f in ast.walk(TREES[module]) if isinstance(f, FUNCTION) for n in ast.walk(f)}
    package = module if PACKAGE[module].name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(TREES[module]):
        lazy = id(node) in inside
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{source}.{alias.name}"
                found.append(Import(deeper if deeper in PACKAGE else source, node.lineno, lazy))
    return tuple(found)


def top(name: str) -> str:
    return name.partition(".")[0]


def room(module: str) -> str:
    """Return the package right below `zcrecord` that holds a module; "zcrecord" of its own `__init__`."""
    return module.split(".")[1] if "." in module else module


def test_every_package_has_a_layer() -> None:
    assert {room(module) for module in PACKAGE} == set(LAYERS), "LAYERS names every package and no other"


def test_the_map_has_a_line_for_every_room_and_names_modules_that_exist() -> None:
    text = (ROOT / "zcrecord" / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)))
    assert set(table) == {*LAYERS, "web"} - {"zcrecord", "__main__"}
    assert [name for name in table if name != "web"] == [name for name in LAYERS if name in table], "not in this order"
    named = set(
        re.findall(r"`((?:codec|tensors|storage|writing|archive|record|loaders|onnx|cli|remote|transport)/\w+)", text)
    )
    missing = [name for name in named if not list((ROOT / "zcrecord").glob(f"{name}*"))]
    assert named and not missing, f"not there: {missing}"


def test_packages_import_only_lower_ones() -> None:
    height = {name: i for i, name in enumerate(LAYERS)}
    upwards = [
        f"{where(module, i.line)}: imports {i.target}, which stands above it"
        for module in PACKAGE
        for i in imports(module)
        if top(i.target) == "zcrecord" and height[room(i.target)] > height[room(module)]
        if (module, i.target) not in UPWARDS
    ]
    assert not upwards, "\n".join(upwards)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {i.target for i in imports(module) if i.target in PACKAGE and (module, i.target) not in UPWARDS}
        for module in PACKAGE
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_only_core_dependencies_are_imported_at_module_level() -> None:
    eager = [
        f"{where(module, i.line)}: {i.target} is imported at module level; import it in the function that needs it"
        for module in PACKAGE
        for i in imports(module)
        if not i.lazy and top(i.target) not in {*sys.stdlib_module_names, *CORE, "zcrecord"}
    ]
    assert not eager, "\n".join(eager)


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = sum(project["optional-dependencies"].values(), project["dependencies"])
    declared = {re.split(r"[^\w]", requirement)[0] for requirement in requirements}
    used = {top(i.target) for module in PACKAGE for i in imports(module)} - set(sys.stdlib_module_names)
    used -= HOSTS
    assert used <= declared, f"not in pyproject.toml: {used - declared}"


def newly_imported(statement: str) -> set[str]:
    """Return the modules that a statement imports in a new process that has numpy."""
    code = f"import sys, numpy; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = """
    argparse asyncio concurrent difflib email flatbuffers hashlib http importlib.metadata json logging ml_dtypes
    multiprocessing fsspec onnx onnxruntime rich safetensors socket sqlite3 ssl subprocess tempfile torch
    threading unittest zcrecord.cli.dispatch zcrecord.codec.file_types zcrecord.onnx zcrecord.storage.stream_reader
    zcrecord.storage.threads zstandard
"""


def test_import_of_zcrecord_brings_little_beside_numpy() -> None:
    imported = newly_imported("import zcrecord")
    assert "zcrecord.archive.archive" in imported
    assert not imported & set(HEAVY.split())


def test_conversion_and_command_line_need_neither_onnx_nor_rich_to_start() -> None:
    imported = newly_imported("import zcrecord.onnx, zcrecord.cli.dispatch")
    assert {"zcrecord.onnx.convert", "zcrecord.cli.dispatch"} <= imported
    assert not imported & {"google.protobuf", "onnx", "onnxruntime", "rich", "torch", "zstandard"}


def test_no_module_grows_past_600_lines() -> None:
    paths = [*WRITTEN.values(), *modules_under("tools").values()]
    lines = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in paths}
    long = {path: count for path, count in lines.items() if count > MOST_LINES}
    assert not long, f"split along a seam: {long}"


def lines_of_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def test_no_function_grows_past_55_lines() -> None:
    long = [
        f"{where(module, node.lineno)}: {node.name} has {count} lines"
        for module in WRITTEN
        for node in ast.walk(TREES[module])
        if isinstance(node, FUNCTION) and (count := lines_of_code(node)) > MOST_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_every_module_says_what_it_knows() -> None:
    bare = [where(module, 1) for module in WRITTEN if not ast.get_docstring(TREES[module])]
    assert not bare, f"no docstring: {bare}"


def test_private_names_stay_in_their_module() -> None:
    found = [(module, *private) for module in WRITTEN for private in foreign_names(TREES[module])]
    told = [f"{where(module, line)}: uses {name} of another module" for module, name, line in found]
    assert not told, "\n".join(told)


def foreign_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield private names that are imported, and those read as attributes in a module that defines no such name."""
    own = {"_replace", "_asdict", "_fields", "_field_defaults", "_make", "_exit"}  # of NamedTuples and of os, public
    own |= {"_C", "_get_weights_iterator"}  # of torch, in its notes on subclasses; of vLLM, which has no public one
    own |= {"_schema", "__version__"}
    read = []
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # __slots__
            own.add(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            read.append((node.attr, node.lineno))
        elif isinstance(node, ast.ImportFrom):
            read += [(alias.name, node.lineno) for alias in node.names if alias.name.startswith("_")]
    yield from ((name, line) for name, line in read if name not in own)


def in_the_systems_encoding(source: str) -> Iterator[int]:
    """Yield the lines that read or write a text without an encoding: by another than UTF-8 on Windows."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        if "encoding" in named or None in named:
            continue
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "write_text"):
            if len(call.args) <= (call.func.attr == "write_text"):
                yield call.lineno
        elif isinstance(call.func, ast.Name) and call.func.id == "open":
            mode = named.get("mode", call.args[1] if len(call.args) > 1 else ast.Constant("r"))
            if isinstance(mode, ast.Constant) and "b" not in str(mode.value):
                yield call.lineno


def test_texts_are_utf_8_whatever_the_system_prefers() -> None:
    sources = [path for folder in ("zcrecord", "tests", "tools") for path in modules_under(folder).values()]
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    told = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, text in texts.items()
        if "_text(" in text or "open(" in text  # parsing all of them takes seconds
        for line in in_the_systems_encoding(text)
    ]
    assert not told, f'encoding="utf-8" is missing: {told}'
    assert list(in_the_systems_encoding("p.read_text()\np.write_text(t)\nopen(p)\nopen(p, 'w')")) == [1, 2, 3, 4]
    assert not list(in_the_systems_encoding("p.read_text('utf-8')\nopen(p, 'rb')\nos.open(p, 0)\nopen(p, mode)"))


# A way through the package enters few modules.


FOLDER = ROOT / "zcrecord"
TREE = {"encoder": {"w": np.ones((3, 4), np.float32), "layers": [1, 2, np.ones(2)]}, "name": "x"}


def modules_entered(work: Callable[[], Any]) -> set[str]:
    """Return the modules of the package in which a function is entered, once everything is imported."""
    work()
    entered = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{FOLDER}/"):
            entered.add(Path(frame.f_code.co_filename).relative_to(FOLDER).with_suffix("").as_posix())

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return entered


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Any]]:
    folder = tmp_path_factory.mktemp("ways")
    model = ROOT / "tests" / "data" / "digits.onnx"
    zcrecord.save_record(TREE, folder / "m.zcr")
    zcrecord.onnx.convert(model, folder / "model.zcr")
    record = zcrecord.load_record(folder / "m.zcr")
    return {
        "record[name]": lambda: record["encoder.w"],
        "load_record": lambda: zcrecord.load_record(folder / "m.zcr"),
        "save_record": lambda: zcrecord.save_record(TREE, folder / "saved.zcr"),
        "convert": lambda: zcrecord.onnx.convert(model, folder / "converted.zcr", force=True),
        "session": lambda: zcrecord.onnx.session(folder / "model.zcr"),
        "fill_by": lambda: zcrecord.load_record(folder / "m.zcr").hollow().fill_by("host"),
    }


@pytest.mark.parametrize(
    "way, most",
    [("record[name]", 4), ("load_record", 10), ("save_record", 13), ("convert", 20), ("session", 22), ("fill_by", 31)],
)
def test_a_way_enters_few_modules(way: str, most: int, ways: dict[str, Callable[[], Any]]) -> None:
    entered = modules_entered(ways[way])
    assert 2 < len(entered) <= most, sorted(entered)


# Docstrings begin with a verb and its object, or with a noun phrase.


QUESTION = re.compile(r"(?i)((return|yield)s? )?(what|who|which|where|whether)(ever)?\b")
BLOCKS = ast.stmt | ast.ExceptHandler | ast.match_case
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def heads(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and first line of each docstring."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in nodes:
        # Not into expressions, of which there are ten times as many.
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, BLOCKS)]
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring.partition("\n")[0]


@pytest.mark.parametrize("folder", ["zcrecord", "tools", "tests"])
def test_no_docstring_begins_with_a_question_word(folder: str) -> None:
    told = [
        f"{path.relative_to(ROOT)}:{line}: {head}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, head in heads(path)
        if QUESTION.match(head)
    ]
    assert not told, "name the thing, or begin with a verb:\n" + "\n".join(told)
