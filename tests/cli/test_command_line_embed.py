"""`zcrecord embed`, `attach` and `detach`: what they write, what they print, and how they fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import command_line as c
import numpy as np
import pytest

import zcrecord
from zcrecord.cli.dispatch import main
from zcrecord.embed import reader_source


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    c.enter(tmp_path, monkeypatch)
    c.make_archive()
    return tmp_path


def run(*arguments: str) -> None:
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("lang", "options", "files"),
    [
        ("c", (), ["model.S", "model.h", "model_packed.bin"]),
        ("cpp", (), ["model.S", "model.hpp", "model_packed.bin"]),
        ("asm", (), ["model.S", "model.inc", "model_packed.bin"]),
        ("python", (), ["model.py", "model.pyi"]),
        ("c", ("--blob", "incbin"), ["model_blob.S", "model_blob.h"]),
        ("cpp", ("--blob", "embed"), ["model_blob.c", "model_blob.h"]),
        ("c", ("--blob", "string", "--reader"), ["model_blob.c", "model_blob.h", "zcrecord.h"]),
        ("asm", ("--blob", "incbin"), ["model_blob.S", "model_blob.inc"]),
        ("rust", ("--reader",), ["model.rs", "model_packed.bin", "zcrecord.rs"]),
        ("rust", ("--assembly",), ["model.rs", "model_packed.bin"]),
    ],
)
def test_embed_writes_the_files_of_each_language_and_names_them(
    lang: str, options: tuple[str, ...], files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run("embed", "model.zcr", "--lang", lang, "-o", "out", *options)
    assert sorted(path.name for path in Path("out").iterdir()) == files
    told = capsys.readouterr().out.splitlines()
    assert sorted(told[: len(files)]) == [f"out/{name}" for name in files]
    whole = lang == "python" or "--blob" in options
    nbytes = Path("model.zcr").stat().st_size if whole else 146
    assert told[len(files)] == f"model.zcr: 7 tensors, {nbytes} bytes, 2 inside another tensor's bytes"
    strided = [line for line in told if line.endswith(": encoder.turned")]
    if "--blob" in options:
        assert strided == ["  strided, so no member of the blob: encoder.turned"]
    else:
        assert strided == ([] if lang == "python" else ["  put into C order: encoder.turned"])
    run("embed", "model.zcr", "--lang", lang, "-o", "out", *options, "--quiet")  # what was generated may be replaced
    assert capsys.readouterr().out == ""


def test_embed_tells_what_was_repacked_renamed_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"a-b": np.ones(1), "a_b": np.ones(1), "turned": np.asfortranarray(np.eye(2)), "rest": np.ones(3)}
    zcrecord.save_record(record, "odd.zcr")
    run("embed", "odd.zcr", "--lang", "c", "--prefix", "", "--exclude", "rest")
    out = capsys.readouterr().out
    assert "1 tensor left out\n" in out
    assert "  put into C order: turned\n" in out
    assert "  a_b is a_b_2\n" in out
    run("embed", "odd.zcr", "--lang", "c", "--prefix", "p_", "--select", "a*", "--json")
    report = json.loads(capsys.readouterr().out)
    assert (report["tensors"], report["left_out"], report["repacked"]) == (2, 2, [])
    assert report["renamed"] == [["a_b", "p_a_b_2"]]
    assert "extern P_" not in Path("odd.h").read_text(encoding="utf-8")
    assert "const double p_a_b[1];" in Path("odd.h").read_text(encoding="utf-8")


def test_embed_tells_names_as_the_language_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    zcrecord.save_record({"a-b": np.ones(1), "a_b": np.ones(1), "int": np.ones(1)}, "odd.zcr")
    told = {"c": ["  a_b is odd_a_b_2"], "cpp": ["  a_b is a_b_2", "  int is t_int"], "python": []}
    told["rust"] = [
        line.replace("_b_2", "_B_2").replace("is a", "is A").replace("t_int", "T_INT") for line in told["cpp"]
    ]
    for lang, lines in told.items():
        run("embed", "odd.zcr", "--lang", lang)
        assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")] == lines
    run("embed", "odd.zcr", "--lang", "rust", "--prefix", "net_", "--name", "net")
    assert "  a_b is NET_A_B_2" in capsys.readouterr().out
    assert "pub static NET_INT: &[f64; 1]" in Path("net.rs").read_text(encoding="utf-8")


def test_embed_writes_the_readers_as_they_are_shipped() -> None:
    run("embed", "model.zcr", "--lang", "cpp", "--reader", "--quiet")
    run("embed", "model.zcr", "--lang", "rust", "--reader", "--quiet")
    for name, lang in (("zcrecord.h", "c"), ("zcrecord.rs", "rust")):
        assert Path(name).read_bytes() == reader_source(lang)
        assert b"SPDX-License-Identifier: 0BSD" in reader_source(lang)[:100]
    with pytest.raises(zcrecord.UnsupportedError, match="no reader for lang 'python'; there is one for c, cpp, rust"):
        reader_source("python")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--lang", "python", "--blob", "incbin"), "--blob means nothing to python; it is for c, cpp, asm"),
        (("--lang", "c", "--assembly"), "--assembly means nothing to c; it is for rust"),
        (("--lang", "asm", "--reader"), "--reader means nothing to asm"),
        (("--lang", "python", "--prefix", "p_"), "--prefix means nothing to python"),
        (("--lang", "java"), "invalid choice: 'java'"),
        (("--lang", "c", "--alignment", "24"), "24 is not a power of two"),
        ((), "required: --lang"),
    ],
)
def test_embed_refuses_options_that_do_not_go_together(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    c.misused(capsys, lambda: main(("embed", "model.zcr", *arguments)), told)
    assert not list(Path().glob("model.[!oz]*"))


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("model.zcr", "--select", "no.such"), "no.such"),
        (("missing.zcr",), "missing.zcr: no such file"),
        (("model.onnx",), "looks like an ONNX model.*onnx2zc"),
        (("model.zcr", "--prefix", "a b"), "a b"),
        (("model.zcr", "--section", "a b"), "section"),
        (("model.zcr", "-o", "model.onnx"), "model.onnx"),
        (("model.zcr", "-o", "taken"), "was not generated by zcrecord"),
    ],
)
def test_embed_fails_in_one_line_and_writes_nothing(
    arguments: tuple[str, ...], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken").mkdir()
    Path("taken/model.h").write_text("mine\n", encoding="utf-8")
    before = sorted(Path().rglob("*"))
    c.fails(capsys, main(("embed", "--lang", "c", *arguments)), pattern)
    assert sorted(Path().rglob("*")) == before
    assert Path("taken/model.h").read_text(encoding="utf-8") == "mine\n"


def test_attached_archive_is_found_in_the_program_which_runs_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(shutil.which("echo") or "echo", "app")
    program = Path("app").read_bytes()
    run("attach", "app", "model.zcr", "--no-sync")
    assert capsys.readouterr().out.startswith(f"app: {len(program)} bytes of program, ")
    assert subprocess.run(["./app", "as before"], capture_output=True, check=True).stdout == b"as before\n"
    run("verify", "app", "--quiet")
    with zcrecord.load_record("app") as record:
        assert record["encoder.weight"].shape == (3, 4)
    run("attach", "app", "model.zcr", "-o", "other", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["replaced_bytes"] == Path("model.zcr").stat().st_size
    assert report["program_bytes"] == len(program)
    run("detach", "app", "-o", "again.zcr")
    told = capsys.readouterr().out
    assert told.splitlines()[1] == f"app: {len(program)} bytes"
    assert Path("again.zcr").read_bytes() == Path("model.zcr").read_bytes()
    assert Path("app").read_bytes() == program
    run("detach", "other", "-o", "third.zcr", "--keep", "--quiet")
    assert zcrecord.load_record("other")["scalar"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("attach", "script", "model.zcr"), "it is a script"),
        (("attach", "model.zcr", "model.zcr"), "is an archive|is a zcrecord archive"),
        (("attach", "program", "model.onnx"), "ONNX model"),
        (("attach", "missing", "model.zcr"), "missing: no such file"),
        (("attach", "program", "model.zcr", "-o", "script"), "exists already"),
        (("detach", "program"), "no archive is attached"),
    ],
)
def test_attach_and_detach_fail_in_one_line_and_change_nothing(
    arguments: tuple[str, ...], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("script").write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    shutil.copy(sys.executable, "program")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    c.fails(capsys, main(arguments), pattern)
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_detach_keeps_the_archive_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(sys.executable, "app")
    archive = Path("model.zcr").read_bytes()
    run("attach", "app", "model.zcr", "--no-sync", "--quiet")
    run("detach", "app")
    assert capsys.readouterr().out.startswith("app.zcr: ")
    assert Path("app.zcr").read_bytes() == archive
    run("attach", "app", "model.zcr", "--no-sync", "--quiet")
    c.fails(capsys, main(("detach", "app")), "app.zcr: exists already; --force replaces it")
    Path("app.zcr").unlink()
    run("detach", "app", "--discard", "--quiet")
    assert not Path("app.zcr").exists()


@pytest.mark.parametrize("more", [["--keep"], ["-o", "x.zcr"]])
def test_detach_that_is_to_keep_and_discard_is_wrong_usage(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    c.misused(capsys, lambda: main(("detach", "program", "--discard", *more)), "--discard writes no archive")


def test_text_is_attached_to_by_force_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes.txt").write_text("größer\n" * 2000, encoding="utf-8")
    told = "notes.txt: nothing can be attached to this program: it is text, and no executable; --force attaches it"
    c.fails(capsys, main(("attach", "notes.txt", "model.zcr")), told)
    assert main(("attach", "notes.txt", "model.zcr", "--force")) == 0
