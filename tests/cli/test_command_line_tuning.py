"""`zcrecord tune` and `onnx2zc --tune`: what they take, tell, write and refuse; every file whole, or as it was."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import command_line as c
import numpy as np
import onnxruntime as ort
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import zcrecord
from zcrecord.cli.dispatch import main, onnx2zc_main
from zcrecord.integrity.signing import sign
from zcrecord.onnx import convert, target, tune, tuning
from zcrecord.record.save import stored_entries
from zcrecord.storage.files import open_sink
from zcrecord.writing.writers import StreamWriter

PACKS = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32)


@pytest.fixture(autouse=True)
def _in_a_folder_with_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c.enter(tmp_path, monkeypatch)
    convert("model.onnx", "model.zcr")


def told(text: str) -> dict[str, str]:
    """The facts that were printed, by their labels."""
    return dict(line.split(": ", 1) for line in text.splitlines())


def test_an_archive_is_tuned_in_its_place_and_the_size_is_told_before(capsys: pytest.CaptureFixture[str]) -> None:
    before = zcrecord.load_record("model.zcr").content_digest()
    assert main(["tune", "model.zcr", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    size = Path("model.zcr").stat().st_size
    ahead = re.fullmatch(
        r"model\.zcr: will have at most (\d+) bytes, ([\d.]+) times the 28568 bytes without the tuned part\n", err
    )
    assert ahead is not None
    assert size <= int(ahead[1]) < size + 4 * 4096 and float(ahead[2]) == round(int(ahead[1]) / 28568, 2)
    facts = told(out)
    assert facts["file"] == "model.zcr"
    assert facts["tuned for"].startswith(f"onnxruntime {ort.__version__} (build ")
    assert "CPUExecutionProvider, " in facts["tuned for"]
    assert facts["archive"] == f"{size} bytes"
    assert facts["digest before"] == f"{before}, and that of the untuned part still: graph and weights are untouched"
    assert facts["digest now"] == zcrecord.load_record("model.zcr").content_digest() != before
    assert "signatures" not in facts
    if PACKS:
        assert facts["packed"].startswith("3 of 5 weights, 26624 bytes; ")
    assert tuning("model.zcr").used


def test_removing_gives_the_bytes_from_before_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("model.zcr").read_bytes()
    assert main(["tune", "model.zcr", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["tune", "model.zcr", "again.zcr", "--remove", "-q"]) == 0
    assert main(["tune", "model.zcr", "--remove"]) == 0
    out, err = capsys.readouterr()
    assert err == "model.zcr: will have 28568 bytes\n"
    assert told(out)["removed"] == "the tuned part; the archive has the bytes from before it was tuned"
    assert Path("model.zcr").read_bytes() == Path("again.zcr").read_bytes() == before
    c.fails(capsys, main(["tune", "model.zcr", "--remove"]), "model.zcr: is not tuned; there is nothing to remove")


def test_out_gets_the_tuned_archive_and_is_replaced_only_with_force(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("model.zcr").read_bytes()
    assert main(["tune", "model.zcr", "out.zcr", "--quiet"]) == 0
    tuned = Path("out.zcr").read_bytes()
    assert Path("model.zcr").read_bytes() == before != tuned
    c.fails(capsys, main(["tune", "model.zcr", "out.zcr"]), "out.zcr: exists already; --force replaces it")
    c.fails(capsys, main(["tune", "model.zcr", "model.zcr"]), "model.zcr: source and destination are the same file")
    Path("out.zcr").write_bytes(b"old")
    assert main(["tune", "model.zcr", "out.zcr", "--force", "--no-sync", "-q"]) == 0
    assert Path("out.zcr").read_bytes() == tuned


def test_the_report_is_json_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "model.zcr", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["source"], report["input_bytes"]) == ("model.zcr", 28568)
    assert report["archive_bytes"] == Path("model.zcr").stat().st_size
    assert report["content_digest_before"] != report["content_digest"]
    (target,) = report["targets"]
    assert json.loads(target)["onnxruntime"] == ort.__version__
    assert main(["tune", "model.zcr", "--json", "--remove"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"] == []


def test_signatures_that_lapse_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    signed = sign("model.zcr", Ed25519PrivateKey.generate())
    assert main(["tune", "model.zcr"]) == 0
    lapsed = told(capsys.readouterr().out)["signatures"]
    assert lapsed == f"lapsed, of 1 key: {signed.key}; sign the tuned archive again"


@pytest.mark.parametrize(("arguments", "message"), [
    (["-"], "ARCHIVE and OUT have to be files: neither can be -"),
    (["model.zcr", "-"], "ARCHIVE and OUT have to be files: neither can be -"),
    (["model.zcr", "--remove", "--threads", "1"], "--threads is for tuning, and --remove tunes nothing"),
    (["model.zcr", "--threads", "x"], "is not a whole number, 0 or more"),
    ([], "required: ARCHIVE"),
])  # fmt: skip
def test_wrong_usage_is_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    c.misused(capsys, lambda: main(["tune", *arguments]), message)


def test_what_cannot_be_tuned_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    c.fails(capsys, main(["tune", "missing.zcr"]), "missing.zcr: ")
    c.fails(capsys, main(["tune", "model.onnx"]), "model.onnx: this looks like an ONNX model, not a ")
    assert main(["pack", "model.zcr", "-q"]) == 0
    c.fails(capsys, main(["tune", "model.zcr.zst"]), "model.zcr.zst: is packed, or remote; unpack or download it")
    zcrecord.save_record(zcrecord.load_record("model.zcr"), "bare.zcr", digest="none")
    c.fails(
        capsys, main(["tune", "bare.zcr"]), "bare.zcr: has no digests, .*; zcrecord convert writes one with digests"
    )
    assert main(["convert", "bare.zcr", "whole.zcr", "-q"]) == main(["tune", "whole.zcr", "-q"]) == 0
    c.make_archive()
    c.fails(capsys, main(["tune", "model.zcr"]), "model.zcr: no attribute 'onnx.graph'")
    os.mkfifo("pipe")
    convert("model.onnx", "model.zcr", force=True)
    c.fails(capsys, main(["tune", "model.zcr", "pipe"]), "pipe: a tuned archive is a regular file in a folder")


def test_errors_of_onnx_runtime_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = c.DIGITS.read_bytes().replace(b"\x04Gemm", b"\x04Jemm")
    assert model != c.DIGITS.read_bytes()
    Path("unknown.onnx").write_bytes(model)
    convert("unknown.onnx", "unknown.zcr")
    before = Path("unknown.zcr").read_bytes()
    c.fails(capsys, main(["tune", "unknown.zcr"]), "unknown.zcr: ONNX Runtime .* makes no session of the model: .*Jemm")
    assert Path("unknown.zcr").read_bytes() == before


# info


def test_info_shows_the_targets_and_that_one_fits_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "model.zcr"]) == 0
    assert "tuned" not in told(capsys.readouterr().out)
    before = Path("model.zcr").stat().st_size
    tune("model.zcr")
    more = Path("model.zcr").stat().st_size - before
    assert main(["info", "model.zcr"]) == 0
    facts = told(capsys.readouterr().out)
    assert facts["tuned"] == f"{more} bytes more than the {before} bytes without the tuned part"
    pattern = rf"onnxruntime {re.escape(ort.__version__)} \(build .*, CPU with .*; \d+ bytes; fits this machine"
    assert re.fullmatch(pattern, facts["tuned for"])
    assert main(["info", "model.zcr", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tuned"]
    assert (found["nbytes"], found["untuned_nbytes"]) == (more, before)
    (target,) = found["targets"]
    assert (target["fits"], target["misfit"], target["onnxruntime"]) == (True, None, ort.__version__)
    assert 0 < target["nbytes"] < more and target["cpu"] == sorted(target["cpu"])


def test_info_says_why_a_target_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune("model.zcr")
    here = target.this_target(ort)
    monkeypatch.setattr(target, "this_target", lambda *_: replace(here, onnxruntime="9.9.9"))
    assert main(["info", "model.zcr"]) == 0
    reason = f"made for onnxruntime {ort.__version__}, this is 9.9.9"
    assert told(capsys.readouterr().out)["tuned for"].endswith(f"; does not fit this machine: {reason}")
    assert main(["info", "model.zcr", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["tuned"]["targets"]
    assert (found["fits"], found["misfit"]) == (False, reason)


def test_info_of_a_tuned_archive_needs_no_onnx_runtime(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune("model.zcr")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["info", "model.zcr"]) == 0
    assert told(capsys.readouterr().out)["tuned for"].endswith("; fits this machine or not: needs onnxruntime to tell")
    assert main(["info", "model.zcr", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["tuned"]["targets"]
    assert (found["fits"], found["misfit"]) == (None, None)


def test_info_of_a_tuned_part_that_is_broken_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    tune("model.zcr")
    with zcrecord.load_record("model.zcr") as record, open_sink("broken.zcr") as sink:
        entries, out = stored_entries(record.archive), StreamWriter(sink, alignment=64)
        for number in range(len(record.archive.index.payloads)):
            out.store(np.frombuffer(record.archive.payload(number), np.uint8))
        entries.attributes = [a._replace(value=1) if a.key == "seal" else a for a in entries.attributes]
        out.finish(entries)
    fault = "its tuned part has no attribute 'seal' of the right type; convert and tune the model again"
    assert main(["info", "broken.zcr"]) == 0
    assert told(capsys.readouterr().out)["tuned"] == f"cannot be used: {fault}"
    assert main(["info", "broken.zcr", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tuned"] == {"fault": fault}


# onnx2zc --tune


def test_onnx2zc_tunes_what_it_converts(capsys: pytest.CaptureFixture[str]) -> None:
    assert onnx2zc_main(["model.onnx", "out.zcr", "--tune", "--verify"]) == 0
    out, err = capsys.readouterr()
    assert re.match(
        r"out\.zcr: will have at most \d+ bytes, [\d.]+ times the 28568 bytes without the tuned part\n", err
    )
    line, *facts = out.splitlines()
    assert re.match(r"out\.zcr: 7 tensors in \d+ modules, 27059 bytes in, 28568 bytes out, .*verified, ", line)
    assert told("\n".join(facts))["archive"] == f"{Path('out.zcr').stat().st_size} bytes"
    tune("model.zcr")
    assert Path("out.zcr").read_bytes() == Path("model.zcr").read_bytes()
    c.fails(capsys, onnx2zc_main(["model.onnx", "--tune"]), "model.zcr: exists already; --force", "onnx2zc: error: ")
    assert onnx2zc_main(["model.onnx", "--tune", "--force", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["dest"], report["tensors"], report["tuning"]["source"]) == ("model.zcr", 7, "model.onnx")
    assert sorted(os.listdir()) == ["model.onnx", "model.zcr", "out.zcr"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["-", "x.zcr"], "--tune needs two files: neither IN nor OUT can be -"),
    (["model.onnx", "-"], "--tune needs two files: neither IN nor OUT can be -"),
    (["model.onnx", "--select", "scale"], "--tune needs the graph, which --select and --exclude leave out"),
    (["model.onnx", "--exclude", "scale"], "--tune needs the graph, which --select and --exclude leave out"),
    (["model.onnx", "--dry-run"], "--tune takes the archive that is written, and --dry-run writes none"),
])  # fmt: skip
def test_onnx2zc_tunes_a_whole_file_to_a_file_alone(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    c.misused(capsys, lambda: onnx2zc_main([*arguments, "--tune"]), message)


def test_onnx2zc_leaves_out_as_it_was_if_tuning_fails(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.onnx").write_bytes(c.DIGITS.read_bytes().replace(b"\x04Gemm", b"\x04Jemm"))
    before = Path("model.zcr").read_bytes()
    c.fails(capsys, onnx2zc_main(["model.onnx", "--tune", "-f"]), "error: model.onnx: ONNX Runtime", "onnx2zc: error: ")
    assert Path("model.zcr").read_bytes() == before
    assert sorted(os.listdir()) == ["model.onnx", "model.zcr"]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="platform: signals of POSIX")
@pytest.mark.parametrize("command", ["main(['tune', 'model.zcr'])", "onnx2zc_main(['model.onnx', '--tune', '-f'])"])
def test_ctrl_c_while_onnx_runtime_works_leaves_every_file(command: str) -> None:
    before = {path: Path(path).read_bytes() for path in os.listdir()}
    code = f"""
import os, signal, sys
from zcrecord.cli.dispatch import main, onnx2zc_main
from zcrecord.onnx import tuner
real = tuner.optimise
def stop(*args):
    real(*args)
    os.kill(os.getpid(), signal.SIGINT)
tuner.optimise = stop
sys.exit({command})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    name = b"onnx2zc" if "onnx2zc" in command else b"zcrecord"
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, b"", name + b": interrupted\n")
    assert {path: Path(path).read_bytes() for path in os.listdir()} == before
