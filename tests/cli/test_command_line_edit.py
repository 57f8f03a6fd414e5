"""zcrecord edit, pack and unpack: what they take, write, replace, refuse and report."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import zcrecord
from zcrecord import integrity

pytestmark = pytest.mark.usefixtures("archive")


def edited(run: c.Commands, *arguments: str) -> zcrecord.Record:
    run(["edit", "model.zcr", *arguments])
    return zcrecord.load_record("model.zcr", verify="full")


def test_every_change_in_the_order_in_which_it_is_given(run: c.Commands) -> None:
    np.save("new.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    out = run([
        "edit", "model.zcr", "--metadata", "license=mit", "--metadata", "epochs=3", "--drop-metadata", "author",
        "--attribute", "encoder.heads=16", "--attribute", "note=another = text", "--attribute", "sizes=[1, 2]",
        "--rename", "encoder.*=*", "--tensor", "encoder.weight=new.npy", "--drop", "decoder",
        "--tie", "again=encoder.weight",
    ])  # fmt: skip
    record = zcrecord.load_record("model.zcr", verify="full")
    assert record.metadata == {"tags": ["x", "y"], "license": "mit", "epochs": 3}
    assert record.names == ("weight", "tied", "turned", "packed", "scalar", "encoder.weight", "again")
    assert record["encoder.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert record.info("again").tied == ("encoder.weight", "again")
    assert record.info("weight").tied == ("weight", "tied")
    attributes = record.attributes
    assert (attributes["heads"], attributes["note"], attributes["sizes"]) == (16, "another = text", [1, 2])
    size = Path("model.zcr").stat().st_size
    assert re.fullmatch(rf"model\.zcr: 7 tensors, {size} bytes(, \d+ bytes of them cloned)?, \d\.\d\d s\n", out)


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("true", True), ("null", None), ('"8"', "8"), ("mit", "mit"), ("", ""), ("a=b", "a=b")],
)
def test_a_value_is_json_or_else_text(text: str, value: Any, run: c.Commands) -> None:
    record = edited(run, "-q", "--metadata", f"m={text}", "--attribute", f"a.b={text}")
    assert record.metadata["m"] == record.attributes["a.b"] == value


@pytest.mark.parametrize(("arguments", "told"), [
    (["--drop", "encoder.wieght"], "'encoder.wieght': not in this record; close names: 'encoder.weight'"),
    (["--drop-metadata", "autor"], "close names: 'author'"),
    (["--attribute", 'x={"a": 1}'], "a dict; an attribute is None, bool"),
    (["--tensor", "x=objects.npy"], r"objects\.npy: an array of objects"),
    (["--tensor", "x=model.zcr"], r"model\.zcr: not an array of numpy"),
    (["--tensor", "x=cut.npy"], r"cut\.npy: its array has 800 bytes, 700 follow the header; copy it again"),
])  # fmt: skip
def test_what_cannot_be_is_one_line_and_the_archive_stays(arguments: list[str], told: str, run: c.Commands) -> None:
    np.save("objects.npy", np.array([{}], object), allow_pickle=True)
    np.save("whole.npy", np.zeros(100))
    Path("cut.npy").write_bytes(Path("whole.npy").read_bytes()[:-100])
    before = Path("model.zcr").read_bytes()
    run.fails(["edit", "model.zcr", "--metadata", "a=b", *arguments], told)
    assert Path("model.zcr").read_bytes() == before


def test_what_is_no_archive_in_a_file_is_refused(run: c.Commands) -> None:
    run.quietly("pack model.zcr")
    run.fails("edit model.zcr.zst --drop x", "is packed; unpack it, edit that, and pack it again")
    run.fails("edit https://a.b/m.zcr --drop x", "is remote; download it, and edit the file")


def test_signatures_that_lapse_are_told(run: c.Commands) -> None:
    report = integrity.sign("model.zcr", Ed25519PrivateKey.generate())
    assert f"signatures left out, of 1 key: {report.key}" in run("edit model.zcr --drop scalar")


# pack and unpack


def test_an_archive_is_packed_and_unpacked(run: c.Commands) -> None:
    before = Path("model.zcr").read_bytes()
    out = run("pack model.zcr")
    size = Path("model.zcr.zst").stat().st_size
    assert re.match(rf"model\.zcr\.zst: {len(before)} bytes unpacked, {size} bytes packed, [\d.]+%, \d+ frames, ", out)
    Path("model.zcr").unlink()
    assert run.json("unpack model.zcr.zst")["archive_bytes"] == len(before)
    assert Path("model.zcr").read_bytes() == before


@pytest.mark.slow
def test_both_go_through_pipes() -> None:
    script = f'"{sys.executable}" -m zcrecord pack - - -q < model.zcr | "{sys.executable}" -m zcrecord unpack - - -q'
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {script}"], capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (Path("model.zcr").read_bytes(), b"")


def test_what_is_no_archive_is_one_line(run: c.Commands) -> None:
    shutil.copy("model.onnx", "x.zcr")
    run.fails("pack x.zcr", "x.zcr: ")
    run.quietly("pack model.zcr")
    Path("cut.zcr.zst").write_bytes(Path("model.zcr.zst").read_bytes()[:-40])
    run.fails("unpack cut.zcr.zst", "cut.zcr.zst: ")
    assert not Path("cut.zcr").exists()
