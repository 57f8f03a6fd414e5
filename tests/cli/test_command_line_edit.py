"""zcrecord edit: the changes that it takes, their order, what it writes, refuses and reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import pytest

import zcrecord
from zcrecord.cli.dispatch import main
from zcrecord.storage.files import identity_of

pytestmark = pytest.mark.usefixtures("archive")


def edited(*arguments: str) -> zcrecord.Record:
    assert main(["edit", "model.zcr", *arguments]) == 0
    return zcrecord.load_record("model.zcr", verify="full")


def test_every_change_in_the_order_in_which_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("new.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    record = edited(
        "--metadata", "license=mit", "--metadata", "epochs=3", "--drop-metadata", "author",
        "--attribute", "encoder.heads=16", "--attribute", "note=another = text", "--attribute", "sizes=[1, 2]",
        "--rename", "encoder.*=*", "--tensor", "encoder.weight=new.npy", "--drop", "decoder",
        "--tie", "again=encoder.weight",
    )  # fmt: skip
    assert record.metadata == {"tags": ["x", "y"], "license": "mit", "epochs": 3}
    assert record.names == ("weight", "tied", "turned", "packed", "scalar", "encoder.weight", "again")
    assert record["encoder.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert record.info("again").tied == ("encoder.weight", "again")
    assert record.info("weight").tied == ("weight", "tied")
    attributes = record.attributes
    assert (attributes["heads"], attributes["note"], attributes["sizes"]) == (16, "another = text", [1, 2])
    size = Path("model.zcr").stat().st_size
    told = capsys.readouterr().out
    assert re.fullmatch(rf"model\.zcr: 7 tensors, {size} bytes(, \d+ bytes of them cloned)?, \d\.\d\d s\n", told)


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("0.5", 0.5), ("true", True), ("null", None), ('"8"', "8"), ("mit", "mit"), ("", ""), ("a=b", "a=b")],
)
def test_a_value_is_json_or_else_text(text: str, value: Any) -> None:
    record = edited("-q", "--metadata", f"m={text}", "--attribute", f"a.b={text}")
    assert record.metadata["m"] == record.attributes["a.b"] == value


def test_the_archive_stays_where_another_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("model.zcr").read_bytes()
    assert main(["edit", "model.zcr", "--drop", "packed", "-o", "out.zcr", "--json", "--no-sync"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["dest"], report["written"], report["tensors"]) == ("out.zcr", True, 6)
    assert report["archive_bytes"] == Path("out.zcr").stat().st_size
    assert Path("model.zcr").read_bytes() == before
    c.fails(
        capsys, main(["edit", "model.zcr", "--drop", "packed", "-o", "out.zcr"]), r"out\.zcr: exists already; --force"
    )
    assert main(["edit", "model.zcr", "--drop", "scalar", "-o", "out.zcr", "-f", "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_nothing_is_written_where_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    before = identity_of("model.zcr")
    edited("--metadata", "author=me")
    assert "nothing changed, and nothing was written" in capsys.readouterr().out
    assert identity_of("model.zcr") == before


@pytest.mark.parametrize(("arguments", "told"), [
    ([], "no change is given"),
    (["--rename", "a"], "--rename a: give a name, =, and what it gets"),
    (["--metadata", "=x"], "give a name"),
    (["--drop", "x", "-o", "-"], "neither can be -"),
])  # fmt: skip
def test_wrong_usage_is_status_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    c.misused(capsys, lambda: main(["edit", "model.zcr", *arguments]), told)


@pytest.mark.parametrize(("arguments", "told"), [
    (["--drop", "encoder.wieght"], "'encoder.wieght': not in this record; close names: 'encoder.weight'"),
    (["--drop", "nope*"], r"'nope\*': not in this record; close names"),
    (["--drop", "encoder.*", "--drop", "encoder.*"], r"'encoder\.\*': not in this record"),
    (["--rename", "nope*=x*"], r"'nope\*': not in this record"),
    (["--drop-metadata", "autor"], "close names: 'author'"),
    (["--rename", "scalar=packed"], "tensor 'packed': "),
    (["--attribute", 'x={"a": 1}'], "a dict; an attribute is None, bool"),
    (["--metadata", 'x={"a": 1}'], "metadata 'x': values are None, bool"),
    (["--tensor", "x=model.zcr"], r"model\.zcr: not an array of numpy"),
    (["--tensor", "x=nothing.npy"], r"nothing\.npy: no such file"),
    (["--tensor", "x=objects.npy"], r"objects\.npy: an array of objects"),
    (["--tensor", "x=cut.npy"], r"cut\.npy: its array has 800 bytes, 700 follow the header; copy it again"),
    (["--tensor", "x=start.npy"], r"start\.npy: ends within its \.npy header"),
    (["--tie", "x=y"], "'y': not in this record"),
])  # fmt: skip
def test_what_cannot_be_is_one_line_and_the_archive_stays(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save("objects.npy", np.array([{}], object), allow_pickle=True)
    np.save("whole.npy", np.zeros(100))
    Path("cut.npy").write_bytes(Path("whole.npy").read_bytes()[:-100])
    Path("start.npy").write_bytes(Path("whole.npy").read_bytes()[:20])
    before = Path("model.zcr").read_bytes()
    c.fails(capsys, main(["edit", "model.zcr", "--metadata", "a=b", *arguments]), told)
    assert Path("model.zcr").read_bytes() == before


def test_what_is_no_archive_in_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "model.zcr", "-q"]) == 0
    c.fails(
        capsys, main(["edit", "model.zcr.zst", "--drop", "x"]), "is packed; unpack it, edit that, and pack it again"
    )
    zcrecord.save_record({"w": np.ones(900), "v": np.ones(800)}, "many.zcr", max_shard_size=9000)
    c.fails(capsys, main(["edit", "many.zcr", "--drop", "w"]), "is a catalogue of shards; make one archive of it")
    c.fails(capsys, main(["edit", "https://a.b/m.zcr", "--drop", "x"]), "is remote; download it, and edit the file")
    c.fails(capsys, main(["edit", "model.onnx", "--drop", "x"]), r"model\.onnx: ")


def test_signatures_that_lapse_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from zcrecord import integrity

    report = integrity.sign("model.zcr", Ed25519PrivateKey.generate())
    edited("--drop", "scalar")
    assert f"signatures left out, of 1 key: {report.key}" in capsys.readouterr().out
