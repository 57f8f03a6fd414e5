"""The text of zcrecord.js, without anything that runs it: its size, what it imports, errors, words and declarations."""

from __future__ import annotations

import re

from web_archives import READER

import zcrecord

MOST = 30_000  # bytes that every `open` loads


def imported(text: str, *, at_once: bool = False) -> set[str]:
    """Return the modules that a module imports: all, or only those that load with it."""
    pattern = r"""from\s+"([^"]+)"|^import\s+"([^"]+)\"""" if at_once else r"""(?:from|import)\s*\(?"([^"]+)"\)?"""
    return {"".join(found) for found in re.findall(pattern, text, re.MULTILINE)}


def test_what_every_open_loads_is_small() -> None:
    """In all, as it stands; what is seldom used is loaded when it is."""
    loaded: dict[str, int] = {}
    due = ["./zcrecord.js"]
    while due:
        text = (READER / (name := due.pop())).read_text()
        loaded[name] = len(text.encode())
        due += imported(text, at_once=True) - set(loaded)
    assert imported('import {\n a } from "./a.js";\nexport { b } from "./b.js";\nimport("./c.js")', at_once=True) == {
        "./a.js",
        "./b.js",
    }
    assert sum(loaded.values()) < MOST, loaded


def test_every_module_is_free_to_use_and_imports_nothing_else() -> None:
    for path in READER.glob("*.js"):
        text = path.read_text()
        assert text.startswith("// SPDX-License-Identifier: 0BSD\n")
        assert imported(text) <= {f"./{p.name}" for p in READER.glob("*.js")} | {"node:fs/promises"}, path.name
        lines = text.splitlines()
        assert len(lines) <= 400 and max(map(len, lines)) <= 120, path.name


def test_the_errors_are_those_of_python_and_form_the_same_tree() -> None:
    text = (READER / "format.js").read_text()
    kinds = re.findall(r"export const \[([\w,\s]+)\] = kinds\((\w+), \"([^\"]+)\"\);", text)
    assert all(re.findall(r"\w+", exported) == re.findall(r"\w+", names) for exported, _, names in kinds)
    found = {name: base for _, base, names in kinds for name in re.findall(r"\w+", names)}
    assert len(found) == 11
    for name, base in found.items():
        assert base in [parent.__name__ for parent in getattr(zcrecord, name).__mro__], name
    declared = (READER / "zcrecord.d.ts").read_text()
    assert dict(re.findall(r"export class (\w+) extends (\w+)", declared)) == found | {"RecordError": "Error"}


def test_there_are_words_for_every_rule_that_is_checked() -> None:
    text = "".join((READER / name).read_text() for name in ("format.js", "zcrecord.js", "embedded.js"))
    rules = set(re.findall(r"\b(?:rule|check|hold)\((\d+),", text))
    words = re.findall(r"^(\d+) \S", (READER / "rules.js").read_text(), re.MULTILINE)
    assert len(rules) > 50 and sorted(rules, key=int) == words


def test_every_option_that_is_read_is_declared() -> None:
    """An option that the declarations do not have is refused by whoever checks types, whatever the code does."""
    text = (READER / "zcrecord.d.ts").read_text()
    declared = dict(re.findall(r"export interface (\w+)[^{]*{\n(.*?)\n}", text, re.DOTALL))
    options = {
        "OpenOptions": {"signal", "onProgress", "verify", "embedded", "fetch", "headers", "cache", "allowWhole"},
        "TensorOptions": {"signal", "onProgress", "verify"},
        "UploadOptions": {"signal", "onProgress", "maxInFlight", "usage", "verify"},
        "VerifyOptions": {"signal", "onProgress", "maxInFlight"},
    }
    inherited = re.findall(r"^  (\w+)\?:", declared["Cancellable"] + declared["Reading"], re.MULTILINE)
    assert set(inherited) == {"signal", "onProgress"}
    for name, wanted in options.items():
        found = {*re.findall(r"^  (\w+)\?:", declared[name], re.MULTILINE), *inherited}
        assert found == wanted, name
        code = "".join(path.read_text() for path in READER.glob("*.js"))
        assert all(re.search(rf"[{{,(]\s*{option}\b", code) for option in wanted)
