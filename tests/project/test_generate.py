"""Generated files are as the generators would write them; a deleted row is noticed without a compiler."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shutil
from pathlib import Path

import pytest

import zcrecord
from tools.generate import __main__ as command
from tools.generate import element_types, reference
from zcrecord.dtypes import DTYPES, DType, by_name

ROOT = Path(__file__).resolve().parents[2]
SEVEN = DType(200, "int7", 7, None, None, None, "uint8_t", "u8")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files that have blocks, which the generator takes for the repository."""
    for path in element_types.BLOCKS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    monkeypatch.setattr(element_types, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("generator", command.GENERATORS, ids=lambda g: g.__name__.rpartition(".")[2])
def test_generated_files_are_as_generated(generator: command.Generator) -> None:
    assert [str(path) for path in command.stale(generator)] == [], "run python -m tools.generate"


def test_an_element_type_more_is_a_row_in_each_block() -> None:
    before, after = element_types.files(), element_types.files([*DTYPES, SEVEN])
    rows = {
        "schema/FORMAT.md": ["| 200 | `int7` | 7 | - | - | - | - | `uint8_t` | `u8` |"],
        "schema/zcrecord.fbs": [" INT7 = 200"],
        "zcrecord/embed/zcrecord.h": [" ZCR_INT7 = 200", " ZCR_INT7, 7,"],
        "zcrecord/embed/zcrecord.rs": ['INT7 "int7" 200 7,'],
        "zcrecord/web/reader/format.js": ["200 int7:Int8"],
        "tests/programs/c/calls.c": ["case ZCR_INT7:"],
    }
    assert {str(path) for path in after if after[path] != before[path]} == set(rows)
    for path, found in rows.items():
        assert all(row in after[Path(path)] and row not in before[Path(path)] for row in found)


def test_the_name_of_a_float_says_how_it_is_read() -> None:
    float5 = dataclasses.replace(by_name["float4_e2m1fn"], code=200, name="float5_e2m2fn", bits=5)
    text = element_types.files([*DTYPES, float5])[Path("zcrecord/web/page/values.js")]
    assert '  float5_e2m2fn: [2, 2, 1, "finite"],\n' in text


# The API reference.


FILES = reference.files()


def test_every_public_name_and_method_has_a_section() -> None:
    errors = FILES[reference.PAGES / "errors.md"]
    for name in set(reference.MODULES) - {"zcrecord.errors", "zcrecord.orbax"}:  # whose names need orbax
        module = importlib.import_module(name)
        page = FILES[reference.PAGES / f"{name.removeprefix('zcrecord.')}.md"]
        for public in module.__all__:
            thing = getattr(module, public)
            is_error = isinstance(thing, type) and issubclass(thing, Exception)
            assert f"\n## {public}\n" in (errors if is_error and module is zcrecord else page), f"{name}.{public}"
            if isinstance(thing, type) and not is_error:
                methods = {key for key, value in vars(thing).items() if inspect.isfunction(value)} - {"advance"}
                missing = [key for key in methods if key[0] != "_" and f"\n### {public}.{key}\n" not in page]
                assert not missing, f"{name}.{public}: {missing}"


def test_links_of_the_reference_lead_somewhere() -> None:
    for path, text in FILES.items():
        headings = {found.lower() for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        for target in re.findall(r"\]\(([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            assert not file or path.parent / file in FILES, f"{path}: {target}"
            assert not anchor or anchor in headings, f"{path}: {target}"
