"""The text of zcrecord.js, without anything that runs it: its size, imports, errors, words and declarations."""

from __future__ import annotations

import os
import re
from graphlib import TopologicalSorter
from pathlib import Path

from web_archives import MOST, READER, WEB

import zcrecord

ROOMS = {"reader": set(), "view": set(), "page": {"reader", "view"}, "report": {"view"}}  # each may import of others
FETCHED = {"page/runtime.js": ["import(place);"]}  # onnxruntime-web, bytes that the page has checked


def imported(text: str, *, at_once: bool = False) -> set[str]:
    """Return the modules that a module imports; with `at_once` without those that it loads later."""
    pattern = r"""from\s+"([^"]+)"|^import\s+"([^"]+)\"""" if at_once else r"""(?:from|import)\s*\(?"([^"]+)"\)?"""
    return {"".join(found) for found in re.findall(pattern, text, re.MULTILINE)}


def graph(folder: Path) -> dict[str, set[str]]:
    """Return the modules below a folder, each with those that it imports, at once or later; by their paths there."""
    found = {}
    for path in sorted(folder.rglob("*.js")):
        text = re.sub(r"import\(/\*.*?\*/ *", "import(", path.read_text(encoding="utf-8"))
        unreadable = re.findall(r"""\bimport\((?!"[^"]+"\)).*""", text)
        assert unreadable == FETCHED.get(path.relative_to(folder).as_posix(), []), f"{path}: {unreadable}"
        names = [name for name in imported(text) if name.startswith(".")]
        inside = {os.path.relpath(path.parent / name, folder).replace(os.sep, "/") for name in names}
        found[path.relative_to(folder).as_posix()] = inside
    return found


def test_what_every_open_loads_is_small() -> None:
    """In all, as it stands; what is seldom used is loaded when it is."""
    loaded: dict[str, int] = {}
    due = ["./zcrecord.js"]
    while due:
        text = (READER / (name := due.pop())).read_text(encoding="utf-8")
        loaded[name] = len(text.encode())
        due += imported(text, at_once=True) - set(loaded)
    text = 'import {\n a } from "./a.js";\nexport { b } from "./b.js";\nimport("./c.js")'
    assert imported(text, at_once=True) == {"./a.js", "./b.js"}
    assert sum(loaded.values()) < MOST, loaded


def test_no_module_imports_itself_by_way_of_others_and_rooms_only_those_below_them() -> None:
    modules = graph(WEB)
    assert modules["reader/zcrecord.js"] >= {"reader/record.js", "reader/hollow.js", "reader/rules.js"}
    assert {"reader/pieces.js", "reader/responses.js"} <= modules["reader/source.js"]
    TopologicalSorter(modules).prepare()  # a CycleError names the circle
    assert set().union(*modules.values()) <= set(modules)
    for name, inside in modules.items():
        room = name.partition("/")[0]
        assert {module.partition("/")[0] for module in inside} <= ROOMS[room] | {room}, name


def test_every_module_is_free_to_use_and_imports_nothing_else() -> None:
    for path in WEB.rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("// SPDX-License-Identifier: 0BSD\n")
        outside = {name for name in imported(text) if not (name.startswith(".") and (path.parent / name).is_file())}
        assert outside <= {"node:fs/promises"}, path.name
        lines = text.splitlines()
        assert len(lines) <= 400 and max(map(len, lines)) <= 120, path.name


def test_the_errors_are_those_of_python_and_form_the_same_tree() -> None:
    text = (READER / "format.js").read_text(encoding="utf-8")
    kinds = re.findall(r"export const \[([\w,\s]+)\] = kinds\((\w+), \"([^\"]+)\"\);", text)
    assert all(re.findall(r"\w+", exported) == re.findall(r"\w+", names) for exported, _, names in kinds)
    found = {name: base for _, base, names in kinds for name in re.findall(r"\w+", names)}
    assert len(found) == 11
    for name, base in found.items():
        assert base in [parent.__name__ for parent in getattr(zcrecord, name).__mro__], name
    declared = (READER / "zcrecord.d.ts").read_text(encoding="utf-8")
    assert dict(re.findall(r"export class (\w+) extends (\w+)", declared)) == found | {"RecordError": "Error"}


def test_there_are_words_for_every_rule_that_is_checked() -> None:
    text = "".join((READER / name).read_text(encoding="utf-8") for name in ("format.js", "zcrecord.js", "embedded.js"))
    rules = set(re.findall(r"\b(?:rule|check|hold)\((\d+),", text))
    words = re.findall(r"^(\d+) \S", (READER / "rules.js").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rules) > 50 and sorted(rules, key=int) == words
