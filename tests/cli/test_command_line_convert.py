"""Input, output, replaced files and reports of `zcrecord convert`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import command_line as c
import numpy as np
import pytest
import safetensors.numpy

import zcrecord.formats
from zcrecord.cli import render
from zcrecord.cli.dispatch import main

W = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def model(model_folder: Path) -> Path:
    safetensors.numpy.save_file({"a.w": W, "b": W}, "model.safetensors", {"format": "pt"})
    return Path("model.safetensors")


def test_converts_there_and_back(run: c.Commands, model: Path) -> None:
    out = run("convert model.safetensors model.zcr")
    before, size = model.stat().st_size, Path("model.zcr").stat().st_size
    told = rf"{before} bytes in, {size} bytes out, 24 bytes shared, \d+\.\d\d s(, at most .* of memory)?\n"
    assert re.fullmatch(rf"model\.zcr: 2 tensors in 2 modules, {told}", out) and not run.err
    out = run("convert model.zcr again.safetensors")
    assert out.startswith(f"again.safetensors: 2 tensors in 2 modules, {size} bytes in")
    assert Path("again.safetensors").read_bytes() == model.read_bytes()


def test_ties_that_are_written_again_are_told(run: c.Commands) -> None:
    zcrecord.save_record({"w": W, "v": W}, "a.zcr")
    assert "24 bytes of ties written again" in run("convert a.zcr a.safetensors")


def test_reads_standard_input_and_writes_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], model: Path
) -> None:
    c.pipe_in(monkeypatch, model.read_bytes())
    assert main(["convert", "-", "-"]) == 0
    out, err = capsysbinary.readouterr()
    assert list(zcrecord.load_record(out, verify="full")) == ["a.w", "b"]
    assert err.startswith(b"standard output: 2 tensors")
    c.pipe_in(monkeypatch, out)
    assert main(["convert", "-", "-", "--to", "safetensors", "--json"]) == 0
    again, err = capsysbinary.readouterr()
    assert again == model.read_bytes()
    told = json.loads(err)
    assert (told["source"], told["dest"], told["tensors"], told["archive_bytes"]) == (None, None, 2, len(again))


def test_replaces_only_with_force_and_never_the_source(run: c.Commands) -> None:
    Path("model.zcr").write_bytes(b"old")
    run.fails("convert model.safetensors model.zcr", "model.zcr: exists already; --force replaces it$")
    assert Path("model.zcr").read_bytes() == b"old"
    run("convert model.safetensors model.zcr --force")
    run.fails("convert model.zcr ./model.zcr --force", "source and destination are the same file")


def test_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, run: c.Commands, model: Path) -> None:
    given = c.options_given(monkeypatch, zcrecord.formats)
    model.rename("in")
    run.quietly("convert in out --from safetensors --to zcr --alignment 4096 --no-sync --force --max-shard-size 5GB")
    assert {k: v for k, v in given.items() if k != "progress"} == {
        "source_format": "safetensors", "dest_format": "zcr", "alignment": 4096, "durable": False, "force": True,
        "max_shard_size": 5 * 10**9,
    }  # fmt: skip


NO_SOURCES: dict[str, tuple[bytes | None, str]] = {
    "missing.safetensors": (None, "missing.safetensors: cannot read: No such file"),
    "page.npz": (b"<html>", "page.npz: this is a web page, not a .npz file; the download failed"),
    "text.dat": (b"what is this", "text.dat: this is a text file, which is not converted"),
    "unknown.dat": (b"\1\2what is", "unknown.dat: it has no format's first bytes.*--from: zcr, safetensors, gguf"),
    "packed.dat": (b"\x1f\x8b\x08\0", "packed.dat: the gzip stream is truncated or damaged"),
}


@pytest.mark.parametrize("name", NO_SOURCES)
def test_what_cannot_be_read_is_told_in_one_line_and_leaves_nothing(name: str, run: c.Commands) -> None:
    data, pattern = NO_SOURCES[name]
    if data is not None:
        Path(name).write_bytes(data)
    before = sorted(os.listdir())
    run.fails(f"convert {name} out.zcr", pattern)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("dest", "pattern"),
    [
        ("out.pt", "out.pt: torch is not written; choose one of zcr, safetensors, npz"),
        ("out.onnx", r"out.onnx: zcrecord to-onnx \(zcrecord.onnx.to_onnx\) writes a model from its archive"),
        ("out", "out: no format has its suffix; name one by --to: zcr, safetensors, npz"),
        ("out.npz --alignment 128", "alignment is for archives; npz has none to choose"),
        ("out.npz --max-shard-size 5GB", "a shard size is for archives and safetensors written to a path"),
    ],
)
def test_what_cannot_be_written_is_told(dest: str, pattern: str, run: c.Commands) -> None:
    before = sorted(os.listdir())
    run.fails(f"convert model.safetensors {dest}", pattern)
    assert sorted(os.listdir()) == before


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, run: c.Commands, model: Path
) -> None:
    monkeypatch.setattr(render, "_PLAIN_REFRESH", 0)
    run("convert model.safetensors model.zcr")
    size = model.stat().st_size
    assert re.search(rf"zcrecord: {size} B of {size} B, 100%, .* .?i?B/s, 0 s left\n", run.err)
    run.quietly("convert model.zcr out.npz")


# A folder, as it was downloaded.


def test_a_folder_stands_for_the_one_model_in_it(run: c.Commands, model: Path) -> None:
    for name in ("repo/model.safetensors", "repo/pytorch_model.bin", "repo/training_args.bin", "repo/README.md"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(model.read_bytes())
    run.quietly("convert repo a.zcr")
    run.quietly("convert model.safetensors b.zcr")
    assert Path("a.zcr").read_bytes() == Path("b.zcr").read_bytes()
    assert zcrecord.formats.convert("repo", "c.zcr").source == os.path.join("repo", "model.safetensors")
    Path("repo/model.safetensors").unlink()
    assert zcrecord.formats.convert("repo", "d.zcr").source == os.path.join("repo", "pytorch_model.bin")


@pytest.mark.parametrize(
    ("names", "options", "told"),
    [
        (["config.json", "a.txt"], "", "repo: is a folder without a model; name a file"),
        (["a\x1b.gguf", "b.gguf"], "", r"repo: is a folder with several models: a\\x1b.gguf, b.gguf; name"),
        (["a.safetensors"], "--from gguf", "repo: is a folder without a model"),
        (["x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors"], "", r"x-00001-of-00002.*copy their index"),
    ],
)
def test_a_folder_of_no_model_or_of_several_says_so(names: list[str], options: str, told: str, run: c.Commands) -> None:
    Path("repo").mkdir()
    for name in names:
        Path("repo", name).touch()
    run.fails(f"convert repo out.zcr {options}", told)
