"""Input, output, replaced files and reports of `onnx2zc`."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line as c
import onnx
import pytest
import zstandard

import zcrecord.onnx
from zcrecord.cli import render
from zcrecord.cli.dispatch import main, onnx2zc_main

pytestmark = pytest.mark.usefixtures("model_folder")


NO_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "given.onnx: cannot read: No such file or directory"),
    "directory": (lambda path: path.mkdir(), r"given.onnx: is a folder without a model \(\*\.onnx\)"),
    "empty": (lambda path: path.touch(), "given.onnx: empty, not an ONNX model"),
    "archive": (
        c.of_the_future,
        "given.onnx: this is a zcrecord archive, not an ONNX model; zcrecord convert and zcrecord to-onnx write other",
    ),
    "text": (
        lambda path: path.write_text('{"a": 1}', encoding="utf-8"),
        "given.onnx: this is JSON text, not an ONNX model",
    ),
    "safetensors": (
        c.safetensors,
        "given.onnx: this is a safetensors file, not an ONNX model; zcrecord convert makes an archive of it",
    ),
    "truncated": (lambda path: path.write_bytes(c.DIGITS.read_bytes()[:9000]), "given.onnx: byte 0x.* truncated"),
}


@pytest.mark.parametrize("fault", NO_MODELS)
def test_a_file_that_is_no_model_is_told_in_one_line_and_leaves_nothing(
    fault: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make, pattern = NO_MODELS[fault]
    make(Path("given.onnx"))
    before = sorted(tmp_path.iterdir())
    c.fails(capsys, onnx2zc_main(["given.onnx"]), pattern, "onnx2zc: error: ")
    assert sorted(tmp_path.iterdir()) == before


# onnx2zc


def test_onnx2zc_names_the_archive_after_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert onnx2zc_main(["model.onnx"]) == 0
    out, err = capsys.readouterr()
    size = Path("model.zcr").stat().st_size
    assert re.match(rf"model\.zcr: 7 tensors in \d+ modules, 27059 bytes in, {size} bytes out, 0 bytes shared, ", out)
    assert err == ""
    zcrecord.load_record("model.zcr", verify="full")


@pytest.mark.parametrize("options", [[], ["--force"]])
def test_onnx2zc_never_replaces_the_model_itself(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy("model.onnx", "model.zcr")
    c.fails(capsys, onnx2zc_main(["model.zcr", *options]), "model.zcr: .*same file", "onnx2zc: error: ")
    assert Path("model.zcr").read_bytes() == c.DIGITS.read_bytes()


def test_onnx2zc_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = c.options_given(monkeypatch, zcrecord.onnx)
    assert onnx2zc_main(["model.onnx", "--alignment", "4096", "--no-sync", "--allow-links", "--force", "--quiet"]) == 0
    wanted: dict[str, Any] = {"alignment": 4096, "durable": False, "allow_links": True, "force": True}
    wanted |= {"select": None, "exclude": None, "verify": False, "dry_run": False}
    assert {k: given[k] for k in wanted} == wanted
    assert capsys.readouterr() == ("", "")
    record = zcrecord.load_record("model.zcr")
    assert all(record.info(name).offset % 4096 == 0 for name in record)


def test_onnx2zc_converts_what_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert onnx2zc_main(["model.onnx", "--select", "features", "--select=scale", "--exclude", "*.bias"]) == 0
    assert ", 4 tensors and the graph left out, " in capsys.readouterr().out
    assert list(zcrecord.load_record("model.zcr")) == ["scale", "features.0.weight", "features.2.weight"]
    message = "model.onnx: tensor 'nothing': not in this record of 7 tensors"
    c.fails(capsys, onnx2zc_main(["model.onnx", "--select", "nothing", "-f"]), message, "onnx2zc: error: ")
    assert len(zcrecord.load_record("model.zcr")) == 3


def test_onnx2zc_tries_out_without_writing(capsys: pytest.CaptureFixture[str]) -> None:
    assert onnx2zc_main(["model.onnx", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("model.zcr: would be written, 7 tensors in ")
    assert os.listdir() == ["model.onnx"]
    assert onnx2zc_main(["model.onnx", "--dry-run", "--json"]) == 0
    tried = json.loads(capsys.readouterr().out)
    assert onnx2zc_main(["model.onnx", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert onnx2zc_main(["model.onnx", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("model.zcr: would replace the file there, with --force, 7 tensors in ")
    different = {"seconds", "peak_rss", "dry_run"}
    assert {k: v for k, v in tried.items() if k not in different} == {k: done[k] for k in done if k not in different}


def test_onnx2zc_verifies_what_it_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    assert onnx2zc_main(["model.onnx", "--verify"]) == 0
    assert ", verified, " in capsys.readouterr().out
    for arguments in (["-", "x.zcr"], ["model.onnx", "-"], ["model.onnx", "x.zcr", "--dry-run"]):
        with pytest.raises(SystemExit) as ended:
            onnx2zc_main([*arguments, "--verify"])
        assert ended.value.code == 2
        assert "--verify reads IN and OUT a second time: both have to be files" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "archive"), [
    ("model.onnx.gz", "model.zcr"), ("model.onnx.zst", "model.zcr"), ("model.gz", "model.zcr"), ("a.b", "a.zcr"),
    ("model", "model.zcr"), ("v1.0/model.onnx", "v1.0/model.zcr"), ("model.ONNX", "model.zcr"),
])  # fmt: skip
def test_onnx2zc_names_the_archive_without_the_suffixes_of_the_model(name: str, archive: str) -> None:
    import gzip

    Path("v1.0").mkdir()
    data = c.DIGITS.read_bytes()
    Path(name).write_bytes(
        gzip.compress(data) if name.endswith("gz") else zstandard.compress(data) if name.endswith("zst") else data
    )
    assert onnx2zc_main([name, "--quiet"]) == 0
    assert list(zcrecord.load_record(archive)) == names_of_digits()


# zcrecord to-onnx


def test_to_onnx_gives_the_model_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert onnx2zc_main(["model.onnx", "m.zcr", "-q"]) == 0
    assert main(["to-onnx", "m.zcr"]) == 0
    assert re.match(r"m\.onnx: 7 tensors in \d+ modules, \d+ bytes in, 27059 bytes out, ", capsys.readouterr().out)
    assert Path("m.onnx").read_bytes() == c.DIGITS.read_bytes()
    c.fails(capsys, main(["to-onnx", "m.zcr"]), "m.onnx: exists already; .*--force")
    assert main(["to-onnx", "m.zcr", "--force", "--json", "--no-sync"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["dest"], told["tensors"], told["archive_bytes"]) == ("m.onnx", 7, 27059)


def test_to_onnx_leaves_the_weights_in_the_archive_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert onnx2zc_main(["model.onnx", "m.zcr", "-q"]) == 0
    assert main(["to-onnx", "m.zcr", "small.onnx", "--external", "-q"]) == 0
    assert Path("small.onnx").stat().st_size < 4000
    assert len(onnx.load("small.onnx").graph.initializer) == 7
    assert main(["verify", "small.onnx"]) == 0
    assert re.match(r"small\.onnx: OK, \d+ tensors, \d+ bytes in .*m\.zcr, checked: full\n", capsys.readouterr().out)
    assert main(["verify", "small.onnx", "--level", "index", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    data = bytearray(Path("m.zcr").read_bytes())
    data[zcrecord.load_record("m.zcr").info("features.0.weight").offset] ^= 1
    Path("m.zcr").write_bytes(data)
    c.fails(capsys, main(["verify", "small.onnx"]), "m.zcr: tensor 'features.0.weight': .*digest does not match")
    assert main(["verify", "small.onnx", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["error"]["type"]) == (False, "IntegrityError")
    with pytest.raises(SystemExit) as ended:
        main(["to-onnx", "m.zcr", "-", "--external"])
    assert ended.value.code == 2


def test_to_onnx_leaves_the_weights_in_an_onnx_model_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-onnx", "model.onnx", "small.onnx", "--external"]) == 0
    size = Path("small.onnx").stat().st_size
    out, err = capsys.readouterr()
    assert re.match(rf"small\.onnx: 7 tensors in \d+ modules, 27059 bytes in, {size} bytes out, 0 bytes shared, ", out)
    assert err == ""
    assert size < 2000
    c.fails(
        capsys, main(["to-onnx", "model.onnx", "small.onnx", "--external"]), "small.onnx: exists already; .*--force"
    )
    assert main(["to-onnx", "model.onnx", "small.onnx", "--external", "-f", "--json", "--no-sync"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["source"], told["dest"], told["archive_bytes"]) == ("model.onnx", "small.onnx", size)
    for dest in ([], ["model.onnx", "--force"]):
        message = "model.onnx: source and destination are the same file"
        c.fails(capsys, main(["to-onnx", "model.onnx", *dest, "--external"]), message)
    c.fails(capsys, main(["to-onnx", "model.onnx", "x.onnx"]), "model.onnx: this looks like an ONNX model, not a ")
    Path("packed.onnx").write_bytes(zstandard.compress(Path("model.onnx").read_bytes()))
    c.fails(capsys, main(["to-onnx", "packed.onnx", "x.onnx", "--external"]), "packed.onnx: .*zstd")
    os.mkfifo("pipe.onnx")
    c.fails(
        capsys, main(["to-onnx", "pipe.onnx", "x.onnx", "--external"]), "pipe.onnx: not a regular file, .*convert it"
    )
    expected = onnx.load("model.onnx")
    found = onnx.load("small.onnx")
    for t in found.graph.initializer:
        t.ClearField("data_location")
    assert found == expected


def test_to_onnx_goes_through_pipes(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert onnx2zc_main(["model.onnx", "m.zcr", "-q"]) == 0
    c.pipe_in(monkeypatch, Path("m.zcr").read_bytes())
    assert main(["to-onnx", "-", "-", "-q"]) == 0
    assert capsysbinary.readouterr() == (c.DIGITS.read_bytes(), b"")


def test_onnx2zc_writes_the_archive_to_standard_output_and_its_report_to_standard_error(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert onnx2zc_main(["model.onnx", "-"]) == 0
    out, err = capsysbinary.readouterr()
    assert list(zcrecord.load_record(out, verify="full")) == names_of_digits()
    assert err.startswith(b"standard output: 7 tensors")
    assert onnx2zc_main(["model.onnx", "-", "--json"]) == 0
    out, err = capsysbinary.readouterr()
    assert len(zcrecord.load_record(out)) == json.loads(err)["tensors"]


def names_of_digits() -> list[str]:
    zcrecord.onnx.convert("model.onnx", "names.zcr")
    return list(zcrecord.load_record("names.zcr"))


def test_onnx2zc_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    c.pipe_in(monkeypatch, c.DIGITS.read_bytes())
    assert onnx2zc_main(["-", "out.zcr"]) == 0
    assert capsys.readouterr().out.startswith("out.zcr: 7 tensors")
    assert list(zcrecord.load_record("out.zcr", verify="full")) == names_of_digits()
    c.pipe_in(monkeypatch, b"<html>")
    c.fails(capsys, onnx2zc_main(["-", "x.zcr"]), "standard input: this is a web page, not an", "onnx2zc: error: ")
    c.pipe_in(monkeypatch, c.DIGITS.read_bytes())
    c.fails(capsys, onnx2zc_main(["-", "out.zcr"]), "out.zcr: exists already", "onnx2zc: error: ")


def test_closed_standard_streams_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    c.fails(capsys, onnx2zc_main(["-", "out.zcr"]), "standard input: is closed", "onnx2zc: error: ")
    c.fails(capsys, main(["ls", "-"]), "standard input: is closed")


def test_progress_knows_the_size_of_a_redirected_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_PLAIN_REFRESH", 0)
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    with open("model.onnx", encoding="utf-8") as model:
        monkeypatch.setattr(sys, "stdin", model)
        assert onnx2zc_main(["-", "out.zcr"]) == 0
    assert "of 26.4 KiB, 100%" in errors.getvalue()


def test_progress_past_the_size_of_the_model_is_that_of_its_external_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = onnx.load("model.onnx")
    onnx.save_model(model, "split.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    monkeypatch.setattr(render, "_PLAIN_REFRESH", 0)
    assert onnx2zc_main(["split.onnx"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("split.zcr: 7 tensors")
    assert len(re.findall(r"^onnx2zc: [\d.]+ KiB, [\d.]+ \w+/s$", err, re.MULTILINE)) > 1
    assert all(int(percent) <= 100 for percent in re.findall(r"(\d+)%", err))
