"""Input, output, replaced files and reports of `onnx2zc`."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line as c
import onnx
import pytest
import records as r
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from onnx_models import model_of

import zcrecord.onnx
from zcrecord import integrity
from zcrecord.cli.dispatch import onnx2zc_main

pytestmark = pytest.mark.usefixtures("model_folder")


NO_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "given.onnx: cannot read: No such file or directory"),
    "directory": (lambda path: path.mkdir(), r"given.onnx: is a folder without a model \(\*\.onnx\)"),
    "archive": (
        c.make_empty,
        "given.onnx: this is a zcrecord archive, not an ONNX model; zcrecord convert and zcrecord to-onnx write other",
    ),
    "truncated": (lambda path: path.write_bytes(c.DIGITS.read_bytes()[:9000]), "given.onnx: .*byte 0x.* truncated"),
}


@pytest.mark.parametrize("fault", NO_MODELS)
def test_a_file_that_is_no_model_is_told_in_one_line_and_leaves_nothing(fault: str, run: c.Commands) -> None:
    make, pattern = NO_MODELS[fault]
    make(Path("given.onnx"))
    before = sorted(os.listdir())
    run.fails("onnx2zc given.onnx", f"onnx2zc: error: {pattern}")
    assert sorted(os.listdir()) == before


def names_of_digits() -> list[str]:
    zcrecord.onnx.convert("model.onnx", "names.zcr")
    return list(zcrecord.load_record("names.zcr"))


# onnx2zc


def test_a_model_without_tensors_is_told_where_its_weights_are(run: c.Commands) -> None:
    onnx.save(model_of(nodes=[onnx.helper.make_node("Relu", ["x"], ["y"])]), "bare.onnx")
    said = "weights: none as tensors; numbers in attributes of its nodes, such as those of trees, stay in the graph"
    assert said in run("onnx2zc bare.onnx") and said in run("info bare.zcr")


def test_onnx2zc_names_the_archive_after_the_model(run: c.Commands) -> None:
    out = run("onnx2zc model.onnx")
    size = Path("model.zcr").stat().st_size
    assert re.match(rf"model\.zcr: 7 tensors in \d+ modules, 27059 bytes in, {size} bytes out, 0 bytes shared, ", out)
    assert run.err == ""
    zcrecord.load_record("model.zcr", verify="full")


def test_onnx2zc_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, run: c.Commands) -> None:
    given = c.options_given(monkeypatch, zcrecord.onnx)
    run.quietly("onnx2zc model.onnx --alignment 4096 --no-sync --allow-links --force")
    wanted: dict[str, Any] = {"alignment": 4096, "durable": False, "allow_links": True, "force": True}
    wanted |= {"select": None, "exclude": None, "verify": False, "dry_run": False}
    assert {k: given[k] for k in wanted} == wanted


def test_onnx2zc_converts_what_is_chosen(run: c.Commands) -> None:
    out = run("onnx2zc model.onnx --select features --select=scale --exclude *.bias")
    assert ", 4 tensors and the graph left out, " in out
    assert list(zcrecord.load_record("model.zcr")) == ["scale", "features.0.weight", "features.2.weight"]
    run.fails("onnx2zc model.onnx --select nothing -f", "model.onnx: tensor 'nothing': not in this record of 7 names")
    assert len(zcrecord.load_record("model.zcr")) == 3


def test_onnx2zc_tries_out_without_writing(run: c.Commands) -> None:
    assert run("onnx2zc model.onnx --dry-run").startswith("model.zcr: would be written, 7 tensors in ")
    tried = run.json("onnx2zc model.onnx --dry-run")
    assert os.listdir() == ["model.onnx"]
    done = run.json("onnx2zc model.onnx")
    out = run("onnx2zc model.onnx --dry-run")
    assert out.startswith("model.zcr: would replace the file there, with --force, 7 tensors in ")
    assert {k for k in done if tried[k] != done[k]} <= {"seconds", "peak_rss", "dry_run"}


@pytest.mark.parametrize(("name", "archive"), [
    ("model.onnx.gz", "model.zcr"), ("model.onnx.zst", "model.zcr"), ("a.b", "a.zcr"), ("model", "model.zcr"),
    ("v1.0/model.onnx", "v1.0/model.zcr"),
])  # fmt: skip
def test_onnx2zc_names_the_archive_without_the_suffixes_of_the_model(name: str, archive: str, run: c.Commands) -> None:
    Path("v1.0").mkdir()
    compress: Any = {"gz": gzip.compress, "st": zstandard.compress}.get(name[-2:], bytes)
    Path(name).write_bytes(compress(c.DIGITS.read_bytes()))
    run.quietly(f"onnx2zc {name}")
    assert list(zcrecord.load_record(archive)) == names_of_digits()


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


# zcrecord to-onnx


@pytest.fixture
def converted(model_folder: Path) -> Path:
    """The archive of the model."""
    zcrecord.onnx.convert("model.onnx", "m.zcr", durable=False)
    return Path("m.zcr")


def test_to_onnx_gives_the_model_back(converted: Path, run: c.Commands) -> None:
    assert re.match(r"m\.onnx: 7 tensors in \d+ modules, \d+ bytes in, 27059 bytes out, ", run("to-onnx m.zcr"))
    assert Path("m.onnx").read_bytes() == c.DIGITS.read_bytes()
    run.fails("to-onnx m.zcr", "m.onnx: exists already; --force")
    told = run.json("to-onnx m.zcr --force --no-sync")
    assert (told["dest"], told["tensors"], told["archive_bytes"]) == ("m.onnx", 7, 27059)


def test_to_onnx_takes_what_a_trusted_key_signed_alone(converted: Path, run: c.Commands) -> None:
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    Path("pub.pem").write_bytes(public)
    run.fails("to-onnx m.zcr --key pub.pem", r"m\.zcr: is not signed$")
    assert not Path("m.onnx").exists()
    integrity.sign("m.zcr", key)
    run.quietly("to-onnx m.zcr --key pub.pem")
    assert Path("m.onnx").read_bytes() == c.DIGITS.read_bytes()


def test_to_onnx_leaves_the_weights_in_the_archive_on_request(converted: Path, run: c.Commands) -> None:
    run.quietly("to-onnx m.zcr small.onnx --external")
    assert Path("small.onnx").stat().st_size < 4000
    assert len(onnx.load("small.onnx").graph.initializer) == 7
    told = r"small\.onnx: OK, \d+ tensors, \d+ bytes in .*m\.zcr, checked: full\n"
    assert re.match(told, run("verify small.onnx"))
    assert run.json("verify small.onnx --level index")["ok"] is True
    r.damage(converted, zcrecord.load_record("m.zcr").info("features.0.weight").offset)
    run.fails("verify small.onnx", "m.zcr: tensor 'features.0.weight': .*digest does not match")
    found = run.json("verify small.onnx", status=1)
    assert (found["ok"], found["error"]["type"]) == (False, "IntegrityError")


def test_to_onnx_leaves_the_weights_in_an_onnx_model_on_request(run: c.Commands) -> None:
    out = run("to-onnx model.onnx small.onnx --external")
    size = Path("small.onnx").stat().st_size
    assert re.match(rf"small\.onnx: 7 tensors in \d+ modules, 27059 bytes in, {size} bytes out, 0 bytes shared, ", out)
    assert (run.err, size < 2000) == ("", True)
    run.fails("to-onnx model.onnx small.onnx --external", "small.onnx: exists already; --force")
    told = run.json("to-onnx model.onnx small.onnx --external -f --no-sync")
    assert (told["source"], told["dest"], told["archive_bytes"]) == ("model.onnx", "small.onnx", size)
    run.fails("to-onnx model.onnx --external", "model.onnx: source and destination are the same file")
    run.fails("to-onnx model.onnx x.onnx", "model.onnx: is an ONNX model; ")
