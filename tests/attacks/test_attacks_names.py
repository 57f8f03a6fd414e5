"""Hostile names reach no terminal and no generated code, wherever they stand and whatever is said of them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import command_line as c
import embedded as e
import numpy as np
import pytest
from rust_programs import build, compilers

import zcrecord
from attacks import names
from attacks.names import NAMES, PATHS
from zcrecord import RecordError, formats
from zcrecord.cli.dispatch import main, onnx2zc_main
from zcrecord.onnx import convert, scan

BIDI = re.compile("[\u202a-\u202e\u2066-\u2069\u200b-\u200f\u00ad\ufeff\u2028\u2029]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return names.archive(tmp_path_factory.mktemp("names"))


def check_harmless(text: str) -> None:
    """Fail unless a terminal only writes this down, left to right."""
    shown = text.replace("\n", "").replace("\t", "")
    assert shown.isprintable(), [ch for ch in shown if not ch.isprintable()][:5]
    assert not BIDI.search(shown)


def test_the_check_would_notice_every_name_that_needs_it() -> None:
    for name in [*names.ESCAPES, *names.INVISIBLE[:-1], "back\rhere", "\x85next", "\u2028line"]:
        with pytest.raises(AssertionError):
            check_harmless(name)


COMMANDS = ["info", "ls", "tree", "verify"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_names_are_escaped_in_what_commands_print(
    command: str, hostile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([command, str(hostile)]) == 0
    out, err = capsys.readouterr()
    check_harmless(out + err)
    if command == "ls":
        assert out.count("\n") == len(zcrecord.load_record(hostile)), "a name broke a line, or a line is missing"
        shown = c.seen(monkeypatch, "ls", str(hostile), columns=500)
        assert not [name for name in names.MARKUP if name not in shown], "markup is shown as it is"
    for term in ("xterm", "dumb"):
        check_harmless(c.seen(monkeypatch, command, str(hostile), term=term))


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_ascii_and_has_the_names(command: str, hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--json", str(hostile)]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    check_harmless(out)
    told = json.loads(out)
    if command == "info":
        assert told["metadata"] == {**{name: name for name in NAMES}, "list": NAMES}
    elif command in ("ls", "tree"):
        assert set(NAMES) <= {row["name" if command == "ls" else "key"] for row in told}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.exhaustive(keep=4)
@pytest.mark.parametrize("name", PATHS)
def test_a_hostile_path_is_escaped(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = here / f"{name}.zcr", here / f"bad {name}.zcr"
    zcrecord.save_record({"w": np.ones(3)}, good, durable=False)
    bad.write_bytes(good.read_bytes()[:-3])
    (here / f"{name}.onnx").write_bytes(b"\x08\x09")
    said = ""
    for path, status in ((good, 0), (bad, 1), (here / f"absent {name}", 1)):
        for command in COMMANDS:
            assert main([command, os.fspath(path)]) == status
    assert main(["convert", os.fspath(good), os.fspath(here / f"{name}.safetensors")]) == 0
    assert main(["convert", os.fspath(good), os.fspath(here / f"{name}.nothing")]) == 1
    assert onnx2zc_main([os.fspath(here / f"{name}.onnx")]) == 1
    assert main(["embed", "--lang", "c", "-o", f"out {name}", os.fspath(good)]) == 0
    assert main(["embed", "--lang", "c", "-o", f"out {name}", "--prefix", name, os.fspath(good)]) == 1
    said = "".join(capsys.readouterr())
    check_harmless(said)


def errors_of(hostile: Path, folder: Path, name: str) -> Iterator[RecordError]:
    """Yield an error about a name, from each place that says one."""
    record, damaged = zcrecord.load_record(hostile), bytearray(hostile.read_bytes())
    damaged[record.info(name).offset] ^= 1
    for work in (
        lambda: zcrecord.load_record(bytes(damaged), verify="full"),
        lambda: record[f"{name}?"],
        lambda: record.array(f"{name}?"),
        lambda: zcrecord.save_record({name: {name: object()}}, folder / "no.zcr"),
        lambda: zcrecord.save_record({name: {name: 1}, f"{name}.{name}": np.ones(1)}, "/dev/null/x"),
        lambda: formats.convert(hostile, folder / "x.npz", source_format=name),
    ):
        with pytest.raises(RecordError) as caught:
            work()
        yield caught.value


@pytest.mark.slow
def test_errors_about_hostile_names_are_one_harmless_line(hostile: Path, tmp_path: Path) -> None:
    for error in (error for name in NAMES for error in errors_of(hostile, tmp_path, name)):
        assert "\n" not in str(error)
        check_harmless(str(error))
        assert len(str(error)) < 3000, "names are cut"


def test_a_message_is_escaped_even_where_who_words_it_forgets_to() -> None:
    assert str(RecordError("has '\x1b[2J\n'", tensor="\u202e")) == r"tensor '\u202e': has '\x1b[2J\n'"


def test_names_of_other_formats_are_escaped_when_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in names.foreign(here):
        dest = source.with_suffix(".zcr")
        assert main(["convert", source.name, dest.name, "--force"]) == 0, capsys.readouterr().err
        assert set(NAMES) <= set(zcrecord.load_record(dest))
        assert main(["tree", dest.name]) == 0
        check_harmless("".join(capsys.readouterr()))
    assert len(scan(here / "in.onnx")) == 2 * len(NAMES)


@pytest.mark.slow
def test_errors_about_names_of_other_formats_are_one_harmless_line(here: Path) -> None:
    """Files are cut, and bytes put in, wherever names may stand; all converters are asked."""
    found: set[str] = set()
    for source in names.foreign(here):
        data = source.read_bytes()
        cuts = range(40, len(data), len(data) // 40)
        for changed in [data[:cut] + rest for cut in cuts for rest in (b"\xfe" + data[cut + 1 :], b"")]:
            source.write_bytes(changed)
            for work in (formats.convert, convert):
                try:
                    work(source, here / "x.zcr", force=True, durable=False)
                except RecordError as error:
                    found.add(str(error))
    assert len(found) > 60
    assert any("\\x1b" in text for text in found), "no error says a name"
    for text in found:
        assert "\n" not in text
        check_harmless(text)


EVIL = 'a; int x;\n"b??\\ $(touch evil)'


@pytest.fixture(scope="module")
def sources(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of an evil name, with everything generated there from an archive of evil names."""
    folder = tmp_path_factory.mktemp("generated") / EVIL
    folder.mkdir()
    archive = folder / 'n\u202e"\n*.zcr'
    archive.write_bytes(hostile.read_bytes())
    options = ["--quiet", "--name", "net", "-o", str(folder), str(archive)]
    for language in ("c", "cpp", "asm", "rust", "python"):
        assert main(["embed", "--lang", language, *options]) == 0
    return folder


def test_generated_files_are_ascii_and_have_no_trigraphs(sources: Path) -> None:
    made = [path for path in sources.iterdir() if path.suffix != ".zcr"]
    assert {path.suffix for path in made} >= {".S", ".h", ".hpp", ".inc", ".rs", ".py"}
    for path in made:
        text = path.read_bytes().decode("ascii")
        assert path.suffix in (".rs", ".py") or "??" not in text


MAIN = """#include "net.h"
int main(void) { return %s; }
"""


@pytest.mark.needs("gcc", "g++", "clang-19")
@pytest.mark.parametrize("compiler", ["gcc", "g++", "clang"])
def test_c_of_hostile_names_holds_the_values(compiler: str, sources: Path, tmp_path: Path) -> None:
    header = (sources / "net.h").read_text(encoding="utf-8")
    found = re.findall(r"^extern \S+ const float (net_\w+)\[3\]|const float (net_\w+)\[", header, re.MULTILINE)
    arrays = [a or b for a, b in found]
    assert len(arrays) == len(set(arrays)) >= len(NAMES)
    source = tmp_path / ("main.cpp" if "++" in compiler else "main.c")
    source.write_text(
        MAIN % " || ".join(f"{name}[1] != {i}.0f" for i, name in enumerate(arrays[: len(NAMES)])), encoding="utf-8"
    )
    out = e.compiled(e.COMPILERS[compiler], tmp_path / "main", [source, sources / "net.S"], f"-I{sources}")
    e.quiet(out)
    assert not (tmp_path / "evil").exists()


@pytest.mark.needs("rustc", "cc")
def test_rust_of_hostile_names_and_paths_compiles_and_holds_the_values(sources: Path, tmp_path: Path) -> None:
    source = tmp_path / "main.rs"
    lines = f"#[path = {json.dumps(str(sources / 'net.rs'))}]\nmod net;\n"
    names_of = re.findall(r"pub static (\w+): \S* ?\[f32; 3\]", (sources / "net.rs").read_text(encoding="utf-8"))
    assert len(set(names_of)) == len(names_of) >= len(NAMES)
    checks = "".join(f"assert_eq!(net::{name}[1], {i}.0);\n" for i, name in enumerate(names_of[: len(NAMES)]))
    source.write_text(f"{lines}fn main() {{\n{checks}}}\n", encoding="utf-8")
    e.quiet(build(compilers()[0], source, tmp_path / "main"))


def test_python_of_hostile_names_and_paths_is_imported_and_holds_the_archive(sources: Path) -> None:
    spec = importlib.util.spec_from_file_location("net_of_evil", sources / "net.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held = [value for value in vars(module).values() if isinstance(value, bytes) and len(value) > 1000]
    assert zcrecord.load_record(held[0])["class"].tolist() == [NAMES.index("class")] * 3
    assert "net_of_evil" not in sys.modules
