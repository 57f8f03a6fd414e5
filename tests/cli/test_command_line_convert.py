"""Input, output, replaced files and reports of `zcrecord convert`."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import pytest
import safetensors.numpy

import zcrecord.formats
from zcrecord.cli import render
from zcrecord.cli.dispatch import main

W = np.arange(6, dtype=np.float32).reshape(2, 3)
np_peer: Any = safetensors.numpy
NOTHING = zcrecord.formats.ConvertReport(None, None, 0, 0, 0, 0, 0, 0, 0, 0.0, None)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c.enter(tmp_path, monkeypatch)
    np_peer.save_file({"a.w": W, "b": W}, "model.safetensors", {"format": "pt"})


def test_converts_there_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "model.safetensors", "model.zcr"]) == 0
    out, err = capsys.readouterr()
    sizes = {p.name: p.stat().st_size for p in Path().iterdir()}
    told = f"{sizes['model.safetensors']} bytes in, {sizes['model.zcr']} bytes out, 24 bytes shared, "
    assert re.fullmatch(rf"model\.zcr: 2 tensors in 2 modules, {told}\d+\.\d\d s(, at most .* of memory)?\n", out)
    assert err == ""
    assert main(["convert", "model.zcr", "again.safetensors"]) == 0
    assert capsys.readouterr().out.startswith(
        f"again.safetensors: 2 tensors in 2 modules, {sizes['model.zcr']} bytes in"
    )
    assert Path("again.safetensors").read_bytes() == Path("model.safetensors").read_bytes()


def test_ties_that_are_written_again_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    zcrecord.save_record({"w": W, "v": W}, "a.zcr")
    assert main(["convert", "a.zcr", "a.safetensors"]) == 0
    assert "24 bytes of ties written again" in capsys.readouterr().out


def test_reads_standard_input_and_writes_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    c.pipe_in(monkeypatch, Path("model.safetensors").read_bytes())
    assert main(["convert", "-", "-"]) == 0
    out, err = capsysbinary.readouterr()
    assert list(zcrecord.load_record(out, verify="full")) == ["a.w", "b"]
    assert err.startswith(b"standard output: 2 tensors")
    c.pipe_in(monkeypatch, out)
    assert main(["convert", "-", "-", "--to", "safetensors", "--json"]) == 0
    again, err = capsysbinary.readouterr()
    assert again == Path("model.safetensors").read_bytes()
    told = json.loads(err)
    assert (told["source"], told["dest"], told["tensors"], told["archive_bytes"]) == (None, None, 2, len(again))


def test_replaces_only_with_force_and_never_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.zcr").write_bytes(b"old")
    c.fails(capsys, main(["convert", "model.safetensors", "model.zcr"]), "model.zcr: exists already; .*--force")
    assert Path("model.zcr").read_bytes() == b"old"
    assert main(["convert", "model.safetensors", "model.zcr", "--force"]) == 0
    capsys.readouterr()
    same = ["convert", "model.zcr", "./model.zcr", "--force"]
    c.fails(capsys, main(same), "source and destination are the same file")


def test_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = c.options_given(monkeypatch, zcrecord.formats)
    Path("in").write_bytes(Path("model.safetensors").read_bytes())
    options = ["--from", "safetensors", "--to", "zcr", "--alignment", "4096", "--no-sync", "--force", "--quiet"]
    assert main(["convert", "in", "out", *options]) == 0
    assert capsys.readouterr() == ("", "")
    assert {k: v for k, v in given.items() if k != "progress"} == {
        "source_format": "safetensors", "dest_format": "zcr", "alignment": 4096, "durable": False, "force": True,
        "max_shard_size": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "size, nbytes",
    [("7", 7), ("7B", 7), ("5GB", 5 * 10**9), ("5gb", 5 * 10**9), ("5G", 5 * 10**9), ("1.5KiB", 1536),
     ("2MiB", 1 << 21), ("500mb", 5 * 10**8), ("1TB", 10**12)],
)  # fmt: skip
def test_sizes_are_understood(size: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(zcrecord.formats, "convert", lambda *_, **options: given.update(options) or NOTHING)
    assert main(["convert", "model.safetensors", "out.safetensors", "--max-shard-size", size]) == 0
    assert given["max_shard_size"] == nbytes


@pytest.mark.parametrize(
    "arguments, told",
    [
        ([], "required: IN, OUT"),
        (["a"], "required: OUT"),
        (["a", "b", "c"], "unrecognized"),
        (["a", "b", "--alignment", "48"], "alignment 48 is not a power"),
        (["a", "b", "--from", "pickle"], "format 'pickle' is not known; zcr, safetensors, gguf, onnx, torch, npz"),
        (["a", "b", "--to", "x\x1b"], r"format 'x\\x1b' is not known"),
        *((["a", "b", "--max-shard-size", size], "is not a size, such as 5GB") for size in
          ("", "GB", "0", "-1", "5 apples", "5GBB", "1e400", "nan", "5Bi", "1.2.3MB")),
    ],
)  # fmt: skip
def test_wrong_usage_is_status_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    c.misused(capsys, lambda: main(["convert", *arguments]), told)


NO_SOURCES: dict[str, tuple[bytes | None, str]] = {
    "missing.safetensors": (None, "missing.safetensors: cannot read: No such file"),
    "empty.safetensors": (b"", "empty.safetensors: 0 bytes are too few for a safetensors file"),
    "pointer.safetensors": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "this is a Git LFS pointer, not a safetensors file; fetch the file itself with git lfs pull",
    ),
    "page.npz": (b"<html>", "page.npz: this is a web page, not a .npz file; the download failed"),
    "short.zcr": (b"\x89ZCR\r\n\x1a\n", "short.zcr: .* the file is truncated"),
    "page.dat": (b"<html>", "page.dat: this is a web page, which is not converted; the download failed"),
    "text.dat": (b"what is this", "text.dat: this is a text file, which is not converted"),
    "unknown.dat": (
        b"\1\2what is this",
        "unknown.dat: it has no format's first bytes.*--from.*: zcr, safetensors, gguf",
    ),
    "packed.dat": (b"\x1f\x8b\x08\0", "packed.dat: the gzip stream is truncated or damaged"),
}


@pytest.mark.parametrize("name", NO_SOURCES)
def test_what_cannot_be_read_is_told_in_one_line_and_leaves_nothing(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data, pattern = NO_SOURCES[name]
    if data is not None:
        Path(name).write_bytes(data)
    before = sorted(tmp_path.iterdir())
    c.fails(capsys, main(["convert", name, "out.zcr"]), pattern)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "dest, options, pattern",
    [
        ("out.pt", [], "out.pt: torch is not written; what is: zcr, safetensors, npz"),
        ("out.onnx", [], r"out.onnx: zcrecord to-onnx \(zcrecord.onnx.to_onnx\) writes a model from its archive"),
        ("out", [], "out: no format has its suffix; name one by --to: zcr, safetensors, npz"),
        ("out.npz", ["--alignment", "128"], "--alignment is for archives; npz has none to choose"),
        ("out.npz", ["--max-shard-size", "5GB"], "--max-shard-size is for archives and safetensors written to a path"),
    ],
)
def test_what_cannot_be_written_is_told(
    dest: str, options: list[str], pattern: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    c.fails(capsys, main(["convert", "model.safetensors", dest, *options]), pattern)
    assert sorted(tmp_path.iterdir()) == before


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "_PLAIN_REFRESH", 0)
    assert main(["convert", "model.safetensors", "model.zcr"]) == 0
    size = Path("model.safetensors").stat().st_size
    assert re.search(rf"zcrecord: {size} B of {size} B, 100%, .* .?i?B/s, 0 s left\n", capsys.readouterr().err)
    assert main(["convert", "model.zcr", "out.npz", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_the_time_left_is_reckoned_from_the_first_byte(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with render.showing_progress("zcrecord", render.Printer(sys.stderr)) as progress:
        now += 1000  # packages are imported
        progress(1, 1500)
        assert capsys.readouterr().err == ""
        now += 11
        progress(750, 1500)
    assert capsys.readouterr().err == "zcrecord: 750 B of 1.5 KiB, 50%, 68 B/s, 11 s left\n"


# A folder, as it was downloaded


def test_a_folder_stands_for_the_one_model_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("repo/model.safetensors", "repo/pytorch_model.bin", "repo/training_args.bin", "repo/README.md"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(Path("model.safetensors").read_bytes())
    assert main(["convert", "repo", "a.zcr", "--quiet"]) == 0
    assert main(["convert", "model.safetensors", "b.zcr", "--quiet"]) == 0
    assert Path("a.zcr").read_bytes() == Path("b.zcr").read_bytes()
    assert zcrecord.formats.convert("repo", "c.zcr").source == os.path.join("repo", "model.safetensors")
    Path("repo/model.safetensors").unlink()
    assert zcrecord.formats.convert("repo", "d.zcr").source == os.path.join("repo", "pytorch_model.bin")


@pytest.mark.parametrize(
    "names, options, told",
    [
        ([], [], "repo: is a folder without a model; name a file that can be converted"),
        (["config.json", "a.txt"], [], "repo: is a folder without a model"),
        (
            ["a.safetensors", "b.safetensors"],
            [],
            "repo: is a folder with several models: a.safetensors, b.safetensors;",
        ),
        (["a\x1b.gguf", "b.gguf"], [], r"several models: a\\x1b.gguf, b.gguf; name"),
        (["a.safetensors"], ["--from", "gguf"], "repo: is a folder without a model"),
        (["x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors"], [], "several models: x-00001-of-00002"),
    ],
)
def test_a_folder_of_no_model_or_of_several_says_so(
    names: list[str], options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("repo").mkdir()
    for name in names:
        Path("repo", name).touch()
    c.fails(capsys, main(["convert", "repo", "out.zcr", *options]), told)
