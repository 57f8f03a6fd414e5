"""The public API: names and signatures, docstrings with examples, errors that travel well."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcrecord
import zcrecord.onnx
from tools.generate import reference
from zcrecord import errors

MODULES = [importlib.import_module(name) for name in reference.MODULES if name != "zcrecord.errors"]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_is_in_order_and_true(module: Any) -> None:
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), name))  # constants first
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("module", [zcrecord, zcrecord.onnx], ids=lambda module: module.__name__)
def test_all_lists_every_public_name_of_a_package_that_only_gathers(module: Any) -> None:
    modules = {name for name, value in vars(module).items() if inspect.ismodule(value)}
    seen = (
        {name for name in vars(module) if not name.startswith("_")} - modules - {"annotations", "TYPE_CHECKING", "Any"}
    )
    assert seen <= set(module.__all__), f"public, but not in __all__: {sorted(seen - set(module.__all__))}"


Definition = ast.FunctionDef | ast.ClassDef


def documented(kind: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the methods of a class that have a docstring, of their own or of a method that they override."""
    own = {node.name for node in kind.body if isinstance(node, Definition) and ast.get_docstring(node)}
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in kind.bases}
    return own.union(*(documented(classes[name], classes) for name in bases & classes.keys()))


def test_everything_public_has_a_docstring() -> None:
    package = Path(zcrecord.__file__).parent
    paths = [path for path in package.rglob("*.py") if "_schema" not in path.parts]
    public = [
        (path, node)
        for path in paths
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, Definition) and node.name[0] != "_"
    ]
    classes = {node.name: node for _, node in public if isinstance(node, ast.ClassDef)}
    documented_names = {
        (path, node.name) for path, node in public if ast.get_docstring(node)
    }  # one of several overloads
    bare = [f"{path.name} {node.name}" for path, node in public if (path, node.name) not in documented_names]
    for path, kind in public:
        if isinstance(kind, ast.ClassDef):
            methods = {node.name for node in kind.body if isinstance(node, Definition) and node.name[0] != "_"}
            bare += [f"{path.name} {kind.name}.{name}" for name in methods - documented(kind, classes)]
    assert not bare, bare


# Errors.

KINDS = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
BRANCH = re.compile(r"(?P<indent>[ │]*)[├└]── (?P<name>\w+)(?:\((?P<builtin>\w+)\))?")


def drawn() -> dict[str, set[str]]:
    """Return each error of the drawing in errors.py with the bases it has there."""
    bases: dict[str, set[str]] = {}
    path = ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        if match := BRANCH.match(line.strip("\n").removeprefix("    ")):
            path = path[: len(match["indent"]) // 4 + 1]
            bases[match["name"]] = {path[-1], match["builtin"]} - {None}
            path.append(match["name"])
    return bases


def test_errors_form_the_tree_that_is_drawn() -> None:
    assert drawn() == {kind.__name__: {base.__name__ for base in kind.__bases__} for kind in KINDS}
    assert {kind.__name__ for kind in KINDS} <= set(zcrecord.__all__)


def an_error(kind: type[zcrecord.RecordError]) -> zcrecord.RecordError:
    """Return an error of this kind that says everything it can say."""
    if issubclass(kind, zcrecord.TensorNotFoundError):
        error: zcrecord.RecordError = kind("head.weigth", lambda: ["head.weight", "b"], path="dir/model.zcr")
    elif issubclass(kind, zcrecord.SourceError):
        error = kind("no such file", path="dir/model.zcr", tensor="head.weigth", errno=2)
    else:
        advice = errors.Advice("{} mends it", "force", True)
        error = kind("is wrong", path="dir/model.zcr", tensor="head.weigth", advice=advice)
    return error.located(path="elsewhere", offset=0x40)


@pytest.mark.parametrize("protocol", ["copy", "deepcopy", *range(pickle.HIGHEST_PROTOCOL + 1)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_error_survives_copying_and_pickling(kind: type[zcrecord.RecordError], protocol: str | int) -> None:
    error = an_error(kind)
    again = getattr(copy, protocol) if isinstance(protocol, str) else lambda e: pickle.loads(pickle.dumps(e, protocol))
    other = again(error)
    assert type(other) is kind
    attributes = [
        "path",
        "tensor",
        "offset",
        "message",
        "advice",
        "args",
        *(["errno"] if isinstance(error, OSError) else []),
    ]
    assert [getattr(other, name) for name in attributes] == [getattr(error, name) for name in attributes]
    assert (error.path, error.tensor, error.offset) == ("dir/model.zcr", "head.weigth", 0x40)
    assert str(other) == str(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_error_says_where_and_what_in_one_line(kind: type[zcrecord.RecordError]) -> None:
    text = str(an_error(kind))
    assert text.startswith("dir/model.zcr: tensor 'head.weigth': ")
    if kind is zcrecord.TensorNotFoundError:
        assert text.endswith("not in this record; close names: 'head.weight'")
    assert str(kind()) is not None
    assert "\n" not in text


def test_names_from_strangers_cannot_forge_lines_or_flood_the_screen() -> None:
    text = str(zcrecord.FormatError("is wrong", path="a\nb\x1b[31m", tensor="x" * 100_000))
    assert "a\\nb\\x1b[31m" in text
    assert len(text) < 400


# Values.


@pytest.fixture
def record(tmp_path: Path) -> zcrecord.Record:
    zcrecord.save_record({"w": np.ones(3, np.float32), "m": {"s": 1}}, tmp_path / "m.zcr")
    return zcrecord.load_record(tmp_path / "m.zcr")


def test_reports_and_infos_are_frozen_values(record: zcrecord.Record, tmp_path: Path) -> None:
    report = zcrecord.save_record({"w": np.ones(3)}, tmp_path / "n.zcr")
    for value in (report, record.info("w"), record.modules["m"], record.info("w").dtype):
        assert dataclasses.is_dataclass(value)
        assert not hasattr(value, "__dict__")
        for field in dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)


def test_public_types_have_slots(record: zcrecord.Record) -> None:
    packed = zcrecord.PackedTensor(np.zeros(2, np.uint8), "int4", (4,))
    for value in (record, packed, zcrecord.StringTensor.from_strings(["a"])):
        assert not hasattr(value, "__dict__")
        with pytest.raises(AttributeError):
            value.scratch = 1  # type: ignore[union-attr]


def test_record_attributes_cannot_be_set(record: zcrecord.Record) -> None:
    for name, member in vars(zcrecord.Record).items():
        if isinstance(member, property):
            with pytest.raises(AttributeError):
                setattr(record, name, None)
