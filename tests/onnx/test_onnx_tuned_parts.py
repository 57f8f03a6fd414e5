"""A tuned part stays in its archive, for ONNX Runtime alone: nothing else that archives are for hands it out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from guides import ROOT
from onnx import TensorProto, helper, numpy_helper

import zcrecord
from zcrecord import formats
from zcrecord.cli.dispatch import main
from zcrecord.embed.attachment import attach, detach
from zcrecord.embed.generator import generate
from zcrecord.loaders import load_into
from zcrecord.onnx import convert, session, tune, tuning, untune

DIGITS = ROOT / "tests" / "data" / "digits.onnx"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same model twice: untuned in one folder, tuned in another."""
    folder = tmp_path_factory.mktemp("tuned")
    for name in ("plain", "tuned"):
        (folder / name).mkdir()
    convert(DIGITS, folder / "plain" / "model.zcr")
    tune(folder / "plain" / "model.zcr", folder / "tuned" / "model.zcr")
    return folder


@pytest.fixture
def plain(folder: Path) -> Path:
    return folder / "plain" / "model.zcr"


@pytest.fixture
def tuned(folder: Path) -> Path:
    return folder / "tuned" / "model.zcr"


def test_tensors_are_those_of_the_model_however_they_are_asked_for(plain: Path, tuned: Path) -> None:
    before, after = zcrecord.load_record(plain), zcrecord.load_record(tuned)
    names = list(before)
    state = after.torch()
    assert list(dict(after)) == list(state) == list(load_into(after, "host")) == names
    assert all(torch.equal(state[name], torch.from_numpy(before[name].copy())) for name in names)
    assert list(after.hollow()) == names
    for part in (after.select("features.*"), after.module("features")):
        assert "onnx.tuned" not in part.tree() and not [key for key in part.attributes if "tuned" in key]


@pytest.mark.parametrize("options", [
    {"lang": "c"}, {"lang": "cpp"}, {"lang": "asm"}, {"lang": "rust"}, {"lang": "rust", "assembly": True},
    {"lang": "python"}, {"lang": "python", "select": "features"}, {"lang": "c", "blob": "incbin"},
    {"lang": "c", "blob": "embed"}, {"lang": "c", "blob": "string"}, {"lang": "asm", "blob": "incbin"},
], ids=lambda options: "-".join(map(str, options.values())))  # fmt: skip
def test_programs_get_the_archive_without_the_tuned_part(
    options: dict[str, Any], plain: Path, tuned: Path, tmp_path: Path
) -> None:
    made = {}
    for source in (plain, tuned):
        out = tmp_path / source.parent.name
        report = generate(source, out, **options)
        assert generate(source, out, **options) == report  # what was generated before is replaced
        assert (report.archive, report.tensors) == (str(source), 7 if "select" not in options else 4)
        assert sorted(report.files) == sorted(map(str, out.iterdir()))
        made[source] = report
    assert made[tuned].nbytes == made[plain].nbytes
    untuned = tmp_path / "tuned" / "model_untuned.zcr"
    included = options.get("blob") in ("incbin", "embed") or options == {"lang": "rust"}
    assert untuned.exists() == included
    if included:
        assert untuned.read_bytes() == plain.read_bytes()
        texts = [path.read_text(encoding="utf-8") for path in (tmp_path / "tuned").iterdir() if path != untuned]
        assert any('"model_untuned.zcr"' in text for text in texts)
    elif options.get("blob") == "string" or options["lang"] == "python":
        assert {p.name: p.read_bytes() for p in (tmp_path / "tuned").iterdir()} == {
            p.name: p.read_bytes() for p in (tmp_path / "plain").iterdir()
        }


def test_a_file_of_someone_else_is_not_replaced_by_the_untuned_archive(tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "model_untuned.zcr").write_bytes(b"mine")
    with pytest.raises(zcrecord.errors.DestinationExistsError, match=r"model_untuned\.zcr: was not generated"):
        generate(tuned, tmp_path, lang="c", blob="incbin")
    assert [p.name for p in tmp_path.iterdir()] == ["model_untuned.zcr"]
    (tmp_path / "model_untuned.zcr").unlink()
    (tmp_path / "model_blob.h").write_bytes(b"mine")
    with pytest.raises(zcrecord.errors.DestinationExistsError, match=r"model_blob\.h: was not generated"):
        generate(tuned, tmp_path, lang="c", blob="incbin")
    assert [p.name for p in tmp_path.iterdir()] == ["model_blob.h"]


def test_a_generation_that_fails_leaves_what_was_generated_before(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(tuned, tmp_path, lang="c", blob="incbin")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "model_untuned.zcr" in before
    (tmp_path / "model_untuned.zcr").write_bytes(b"of an archive from before")
    before["model_untuned.zcr"] = b"of an archive from before"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(zcrecord.errors.SourceError, match="No space left on device"):
        generate(tuned, tmp_path, lang="c", blob="incbin")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_other_formats_get_the_model_without_the_tuned_part(
    suffix: str, plain: Path, tuned: Path, tmp_path: Path
) -> None:
    for source in (plain, tuned):
        formats.convert(source, tmp_path / f"{source.parent.name}.{suffix}")
    assert (tmp_path / f"tuned.{suffix}").read_bytes() == (tmp_path / f"plain.{suffix}").read_bytes()


def test_an_archive_converted_to_an_archive_is_tuned_still(tuned: Path, tmp_path: Path) -> None:
    formats.convert(tuned, tmp_path / "again.zcr", alignment=256)
    assert tuning(session(tmp_path / "again.zcr")).used


def test_an_attached_archive_keeps_its_tuned_part(tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"a program\n" * 9)
    attach(tmp_path / "program", tuned, tmp_path / "served", force=True)
    assert tuning(session(tmp_path / "served")).used
    detach(tmp_path / "served", tmp_path / "detached", force=True)
    assert (tmp_path / "detached").read_bytes() == tuned.read_bytes()
    assert (tmp_path / "served").read_bytes() == (tmp_path / "program").read_bytes()


def test_diff_says_that_only_the_tuned_part_differs(
    plain: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "only the tuned parts differ: attributes, and signatures, which lapse; every tensor is the same\n"
    assert main(["diff", str(plain), str(tuned)]) == 1
    out, err = capsys.readouterr()
    assert err == said
    assert {line.split("\t")[1] for line in out.splitlines()} == {"module", "attribute"}
    other = zcrecord.load_record(tuned).tree()
    other["scale"] = other["scale"] + 1
    zcrecord.save_record(other, tmp_path / "other.zcr")
    assert main(["diff", str(plain), str(tmp_path / "other.zcr")]) == 1
    assert capsys.readouterr().err == ""
    assert main(["diff", str(tuned), str(tuned)]) == 0
    assert capsys.readouterr() == ("", "")


MEASURED = """
import gc, json, sys
import numpy as np
import zcrecord
from tools.measure import memory

path, small = sys.argv[1:]
def load(path):
    record = zcrecord.load_record(path, mode="c")
    return record, record.attributes, [view.shape for view in record.values()]

load(small)
gc.collect()
before = memory().private
kept = load(path)
gc.collect()
loaded = memory().private - before
copies = [view.copy() for view in kept[0].values()]
copied = memory().private - before
kept[0]["weight"][0] += 1
print(json.dumps([loaded, copied - loaded]))
"""


def product(size: int) -> onnx.ModelProto:
    """A matrix product, whose weight ONNX Runtime packs, and a look-up in a table, which it takes as it is."""
    rng = np.random.default_rng(size)
    values = {name: rng.standard_normal((size, size), dtype=np.float32) for name in ("table", "weight")}
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "i"], ["x"]), helper.make_node("MatMul", ["x", "weight"], ["y"])], "g",
        [helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", size])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@LINUX
def test_a_private_copy_of_a_tuned_archive_copies_no_weight(tmp_path: Path) -> None:
    for name, size in (("large", 2048), ("small", 64)):
        onnx.save(product(size), tmp_path / f"{name}.onnx")
        convert(tmp_path / f"{name}.onnx", tmp_path / f"{name}.zcr")
        tune(tmp_path / f"{name}.zcr")
    assert tuning(session(tmp_path / "large.zcr")).used
    command = [sys.executable, "-c", MEASURED, *(str(tmp_path / f"{name}.zcr") for name in ("large", "small"))]
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=ROOT, check=True)
    loaded, copied = json.loads(done.stdout)
    assert copied > 32 << 20  # it would notice
    assert loaded < 1 << 20
    record = zcrecord.load_record(tmp_path / "large.zcr", mode="c")
    record["weight"][0] += 1
    assert not tuning(session(record)).used
    untune(tmp_path / "large.zcr")
    assert not np.array_equal(record["weight"], zcrecord.load_record(tmp_path / "large.zcr")["weight"])
