"""`zcrecord tune` and `onnx2zc --tune`: what they take, tell, write and refuse; every file whole, or as it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import command_line as c
import numpy as np
import onnxruntime as ort
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import zcrecord
from zcrecord.errors import SourceError
from zcrecord.integrity.signing import sign
from zcrecord.onnx import convert, tune, tuning
from zcrecord.record.save import stored_entries
from zcrecord.storage.files import open_sink
from zcrecord.writing.writers import StreamWriter

PACKS = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32)


pytestmark = pytest.mark.usefixtures("converted")


@pytest.fixture
def converted(model_folder: Path) -> None:
    convert("model.onnx", "model.zcr")


def told(text: str) -> dict[str, str]:
    """The facts that were printed, by their labels."""
    return dict(line.split(": ", 1) for line in text.splitlines())


def test_an_archive_is_tuned_in_its_place_and_the_size_is_told_before(run: c.Commands) -> None:
    before = zcrecord.load_record("model.zcr").content_digest()
    facts = told(run("tune model.zcr --threads 1"))
    size = Path("model.zcr").stat().st_size
    pattern = r"model\.zcr: will have at most (\d+) bytes, ([\d.]+) times the 28568 bytes without the tuned part\n"
    assert (ahead := re.fullmatch(pattern, run.err))
    assert size <= int(ahead[1]) < size + 4 * 4096 and float(ahead[2]) == round(int(ahead[1]) / 28568, 2)
    assert (facts["file"], facts["archive"]) == ("model.zcr", f"{size} bytes")
    assert facts["tuned for"].startswith(f"onnxruntime {ort.__version__} (build ")
    assert "CPUExecutionProvider, " in facts["tuned for"]
    assert facts["digest before"] == f"{before}, still the digest of graph and weights, which did not change"
    assert facts["digest now"] == zcrecord.load_record("model.zcr").content_digest() != before
    assert "signatures" not in facts
    if PACKS:
        assert facts["packed"].startswith("3 of 5 weights, 26624 bytes; ")
    assert tuning("model.zcr").used


def test_removing_gives_the_bytes_from_before_and_says_so(run: c.Commands) -> None:
    before = Path("model.zcr").read_bytes()
    run.quietly("tune model.zcr")
    run.quietly("tune model.zcr again.zcr --remove")
    facts = told(run("tune model.zcr --remove"))
    assert run.err == "model.zcr: will have 28568 bytes\n"
    assert facts["removed"] == "the tuned part; the archive has the bytes from before it was tuned"
    assert Path("model.zcr").read_bytes() == Path("again.zcr").read_bytes() == before
    run.fails("tune model.zcr --remove", "model.zcr: is not tuned; there is nothing to remove")


def test_out_gets_the_tuned_archive_and_is_replaced_only_with_force(run: c.Commands) -> None:
    before = Path("model.zcr").read_bytes()
    run.quietly("tune model.zcr out.zcr")
    tuned = Path("out.zcr").read_bytes()
    assert Path("model.zcr").read_bytes() == before != tuned
    run.fails("tune model.zcr out.zcr", "out.zcr: exists already; --force replaces it")
    run.fails("tune model.zcr model.zcr", "model.zcr: source and destination are the same file")
    Path("out.zcr").write_bytes(b"old")
    run.quietly("tune model.zcr out.zcr --force --no-sync")
    assert Path("out.zcr").read_bytes() == tuned


def test_signatures_that_lapse_are_named(run: c.Commands) -> None:
    signed = sign("model.zcr", Ed25519PrivateKey.generate())
    lapsed = told(run("tune model.zcr"))["signatures"]
    assert lapsed == f"lapsed, of 1 key: {signed.key}; sign the tuned archive again"


def test_what_cannot_be_tuned_is_one_line(run: c.Commands) -> None:
    run.fails("tune missing.zcr", "missing.zcr: ")
    run.quietly("pack model.zcr")
    run.fails("tune model.zcr.zst", "model.zcr.zst: is packed, or remote; unpack or download it")
    os.mkfifo("pipe")
    run.fails("tune model.zcr pipe", "pipe: a tuned archive is a regular file in a folder")
    c.make_archive()
    run.fails("tune model.zcr", "model.zcr: no attribute 'onnx.graph'")


# info


def test_info_shows_the_targets_and_that_one_fits_this_machine(run: c.Commands) -> None:
    assert "tuned" not in told(run("info model.zcr"))
    before = Path("model.zcr").stat().st_size
    tune("model.zcr")
    more = Path("model.zcr").stat().st_size - before
    facts = told(run("info model.zcr"))
    assert facts["tuned"] == f"{more} bytes more than the {before} bytes without the tuned part"
    pattern = rf"onnxruntime {re.escape(ort.__version__)} \(build .*, CPU with .*; \d+ bytes; fits this machine"
    assert re.fullmatch(pattern, facts["tuned for"])
    found = run.json("info model.zcr")["tuned"]
    assert (found["nbytes"], found["untuned_nbytes"]) == (more, before)
    (target,) = found["targets"]
    assert (target["fits"], target["misfit"], target["onnxruntime"]) == (True, None, ort.__version__)
    assert 0 < target["nbytes"] < more and target["cpu"] == sorted(target["cpu"])


def test_info_of_a_tuned_archive_needs_no_onnx_runtime(monkeypatch: pytest.MonkeyPatch, run: c.Commands) -> None:
    tune("model.zcr")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    last = "; fits this machine or not: needs onnxruntime to tell"
    assert told(run("info model.zcr"))["tuned for"].endswith(last)
    (found,) = run.json("info model.zcr")["tuned"]["targets"]
    assert (found["fits"], found["misfit"]) == (None, None)


def test_info_of_a_tuned_part_that_is_broken_says_so(run: c.Commands) -> None:
    tune("model.zcr")
    with zcrecord.load_record("model.zcr") as record, open_sink("broken.zcr") as sink:
        entries, out = stored_entries(record.archive), StreamWriter(sink, alignment=64)
        for number in range(len(record.archive.index.payloads)):
            out.store(np.frombuffer(record.archive.payload(number), np.uint8))
        entries.attributes = [a._replace(value=1) if a.key == "seal" else a for a in entries.attributes]
        out.finish(entries)
    fault = "its tuned part has no attribute 'seal' of the right type; convert and tune the model again"
    assert told(run("info broken.zcr"))["tuned"] == f"cannot be used: {fault}"
    assert run.json("info broken.zcr")["tuned"] == {"fault": fault}


# onnx2zc --tune


def test_onnx2zc_tunes_what_it_converts(run: c.Commands) -> None:
    line, *facts = run("onnx2zc model.onnx out.zcr --tune --verify").splitlines()
    assert re.match(r"out\.zcr: will have at most \d+ bytes, [\d.]+ times the 28568 bytes without", run.err)
    assert re.match(r"out\.zcr: 7 tensors in \d+ modules, 27059 bytes in, 28568 bytes out, .*verified, ", line)
    assert told("\n".join(facts))["archive"] == f"{Path('out.zcr').stat().st_size} bytes"
    tune("model.zcr")
    assert Path("out.zcr").read_bytes() == Path("model.zcr").read_bytes()
    run.fails("onnx2zc model.onnx --tune", "onnx2zc: error: model.zcr: exists already; --force")
    report = run.json("onnx2zc model.onnx --tune --force")
    assert (report["dest"], report["tensors"], report["tuning"]["source"]) == ("model.zcr", 7, "model.onnx")
    assert sorted(os.listdir()) == ["model.onnx", "model.zcr", "out.zcr"]


def test_a_full_disk_while_onnx2zc_converts_is_an_error_of_out(
    run: c.Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, dest: str, **_: object) -> None:
        raise SourceError("cannot write: No space left on device", path=dest)

    monkeypatch.setattr("zcrecord.onnx.convert", full)
    run.fails("onnx2zc model.onnx out.zcr --tune", "onnx2zc: error: out.zcr: cannot write: No space left")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="platform: signals of POSIX")
@pytest.mark.parametrize("command", ["main(['tune', 'model.zcr'])", "onnx2zc_main(['model.onnx', '--tune', '-f'])"])
def test_ctrl_c_while_onnx_runtime_works_leaves_every_file(command: str) -> None:
    before = {path: Path(path).read_bytes() for path in os.listdir()}
    code = f"""
import os, signal, sys
from zcrecord.cli.dispatch import main, onnx2zc_main
from zcrecord.onnx import tuned_graph
real = tuned_graph.optimise
def stop(*args):
    real(*args)
    os.kill(os.getpid(), signal.SIGINT)
tuned_graph.optimise = stop
sys.exit({command})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    name = b"onnx2zc" if "onnx2zc" in command else b"zcrecord"
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, b"", name + b": interrupted\n")
    assert {path: Path(path).read_bytes() for path in os.listdir()} == before
