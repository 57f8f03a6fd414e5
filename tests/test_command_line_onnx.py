"""What onnx2zc takes, writes, replaces and reports."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import command_line as c
import onnx
import pytest

import zcrecord.onnx
from zcrecord import render
from zcrecord.cli import main, onnx2zc_main


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c.enter(tmp_path, monkeypatch)


NO_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "given.onnx: cannot read: No such file or directory"),
    "directory": (lambda path: path.mkdir(), "given.onnx: cannot read: Is a directory"),
    "empty": (lambda path: path.touch(), "given.onnx: empty, not an ONNX model"),
    "archive": (c.of_the_future, "given.onnx: this is a zcrecord archive already, not an ONNX model"),
    "text": (lambda path: path.write_text('{"a": 1}'), "given.onnx: this is text .*not an ONNX model"),
    "safetensors": (c.safetensors, "given.onnx: byte 0x"),
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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "required: IN"),
        (["a", "b", "c"], "unrecognized"),
        (["a", "--alignment", "48"], "alignment 48 is not a power"),
    ],
)
def test_wrong_usage_of_onnx2zc_is_status_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        onnx2zc_main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


# onnx2zc


def test_onnx2zc_names_the_archive_after_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert onnx2zc_main(["model.onnx"]) == 0
    out, err = capsys.readouterr()
    size = Path("model.zcr").stat().st_size
    assert re.match(rf"model\.zcr: 7 tensors in \d+ modules, 27059 bytes in, {size} bytes out, 0 bytes shared, ", out)
    assert err == ""
    zcrecord.load_record("model.zcr", verify="full")


def test_onnx2zc_replaces_an_archive_only_with_force(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.zcr").write_bytes(b"old")
    c.fails(capsys, onnx2zc_main(["model.onnx"]), "model.zcr: exists already; .*--force", "onnx2zc: error: ")
    assert Path("model.zcr").read_bytes() == b"old"
    assert onnx2zc_main(["model.onnx", "--force"]) == 0
    zcrecord.load_record("model.zcr", verify="full")


@pytest.mark.parametrize("options", [[], ["--force"]])
def test_onnx2zc_never_replaces_the_model_itself(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy("model.onnx", "model.zcr")
    c.fails(capsys, onnx2zc_main(["model.zcr", *options]), "model.zcr: .*same file", "onnx2zc: error: ")
    assert Path("model.zcr").read_bytes() == c.DIGITS.read_bytes()


def test_onnx2zc_reports_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert onnx2zc_main(["model.onnx", "out.zcr", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["source"], told["dest"], told["tensors"]) == ("model.onnx", "out.zcr", 7)
    assert told["archive_bytes"] == Path("out.zcr").stat().st_size
    assert told["input_bytes"] == c.DIGITS.stat().st_size


def test_onnx2zc_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = c.options_given(monkeypatch, zcrecord.onnx)
    assert onnx2zc_main(["model.onnx", "--alignment", "4096", "--no-sync", "--allow-links", "--force", "--quiet"]) == 0
    wanted = {"alignment": 4096, "durable": False, "allow_links": True, "force": True}
    assert {k: given[k] for k in wanted} == wanted
    assert capsys.readouterr() == ("", "")
    record = zcrecord.load_record("model.zcr")
    assert all(record.info(name).offset % 4096 == 0 for name in record)


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
    c.fails(capsys, onnx2zc_main(["-", "x.zcr"]), "standard input: this is text", "onnx2zc: error: ")
    c.pipe_in(monkeypatch, c.DIGITS.read_bytes())
    c.fails(capsys, onnx2zc_main(["-", "out.zcr"]), "out.zcr: exists already", "onnx2zc: error: ")


def test_closed_standard_streams_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    c.fails(capsys, onnx2zc_main(["-", "out.zcr"]), "standard input: it is closed", "onnx2zc: error: ")
    c.fails(capsys, main(["ls", "-"]), "standard input: it is closed")


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "_PLAIN_REFRESH", 0)
    assert onnx2zc_main(["model.onnx"]) == 0
    assert "onnx2zc: 26.4 KiB of 26.4 KiB, 100%\n" in capsys.readouterr().err
    assert onnx2zc_main(["model.onnx", "--force", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_progress_knows_the_size_of_a_redirected_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_PLAIN_REFRESH", 0)
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    with open("model.onnx") as model:
        monkeypatch.setattr(sys, "stdin", model)
        assert onnx2zc_main(["-", "out.zcr"]) == 0
    assert "of 26.4 KiB, 100%" in errors.getvalue()


def test_a_signal_s_own_handler_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert onnx2zc_main(["model.onnx"]) == 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_progress_past_the_size_of_the_model_is_that_of_its_external_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = onnx.load("model.onnx")
    onnx.save_model(model, "split.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    monkeypatch.setattr(render, "_PLAIN_REFRESH", 0)
    assert onnx2zc_main(["split.onnx"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("split.zcr: 7 tensors")
    assert len(re.findall(r"^onnx2zc: [\d.]+ KiB$", err, re.MULTILINE)) > 1
    assert all(int(percent) <= 100 for percent in re.findall(r"(\d+)%", err))
