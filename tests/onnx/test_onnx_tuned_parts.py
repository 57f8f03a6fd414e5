"""A tuned part stays in its archive, for ONNX Runtime alone: nothing else that archives are for hands it out."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx_graphs import PACKS, converted_in, digits_in, graph_model, value
from processes import growth

import zcrecord
from zcrecord import formats
from zcrecord.cli.dispatch import main
from zcrecord.embed.generator import generate
from zcrecord.errors import OnnxError
from zcrecord.loaders import load_into
from zcrecord.onnx import session, tune, tuning, untune

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same model twice: untuned in one folder, tuned in another."""
    folder = tmp_path_factory.mktemp("tuned")
    for name in ("plain", "tuned"):
        (folder / name).mkdir()
        digits_in(folder / name, tuned=name == "tuned")
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
    {"lang": "c"}, {"lang": "asm"}, {"lang": "rust"}, {"lang": "rust", "assembly": True}, {"lang": "python"},
    {"lang": "python", "select": "features"}, {"lang": "c", "blob": "incbin"}, {"lang": "c", "blob": "string"},
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
    for name in ("model_untuned.zcr", "model_blob.h"):
        (tmp_path / name).write_bytes(b"mine")
        with pytest.raises(zcrecord.errors.DestinationExistsError, match=f"{name}: was not generated"):
            generate(tuned, tmp_path, lang="c", blob="incbin")
        assert [p.name for p in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()


def test_a_generation_that_fails_leaves_what_was_generated_before(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(tuned, tmp_path, lang="c", blob="incbin")
    (tmp_path / "model_untuned.zcr").write_bytes(b"of an archive from before")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(zcrecord.errors.SourceError, match="No space left on device"):
        generate(tuned, tmp_path, lang="c", blob="incbin")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_gc")
@pytest.mark.parametrize("place", ["optimise", *(["pack", "sample"] if PACKS else [])])
def test_a_disk_that_is_full_while_onnx_runtime_writes_is_told_as_that(
    place: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, nodes = sys.modules["zcrecord.onnx.tuned_graph"], sys.modules["zcrecord.onnx.packing"]

    def fails(*_: Any) -> None:
        if place == "optimise":
            monkeypatch.setattr(shutil, "disk_usage", lambda _: (1 << 30, 1 << 30, 4096))
            raise OnnxError("ONNX Runtime makes no session of the model: mend the model")
        raise OSError(28, "No space left on device")

    owner, name = {"optimise": (made, "optimise"), "pack": (nodes, "_fields")}.get(place, (nodes.WeightPacker, "_pack"))
    monkeypatch.setattr(owner, name, fails)
    monkeypatch.setattr(made, "_are_weights_remade", lambda _: True)  # weights are mapped
    with pytest.raises(zcrecord.errors.SourceError, match=r"4096 are free|cannot write: No space left on device"):
        tune(plain, tmp_path / "out.zcr")
    assert not list(tmp_path.iterdir())
    if sys.version_info >= (3, 12):  # there a cycle stays
        gc.collect()
    if sys.platform == "linux":
        assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8"), "removed files take no room"


def test_an_archive_keeps_its_tuned_part_and_other_formats_get_the_model_alone(
    plain: Path, tuned: Path, tmp_path: Path
) -> None:
    for source in (plain, tuned):
        formats.convert(source, tmp_path / f"{source.parent.name}.safetensors")
    assert (tmp_path / "tuned.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    formats.convert(tuned, tmp_path / "again.zcr", alignment=256)
    assert tuning(session(tmp_path / "again.zcr")).used
    assert zcrecord.load_record(tmp_path / "again.zcr").layout.deduplicated == 0


def test_diff_says_that_only_the_tuned_part_differs(
    plain: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(plain), str(tuned)]) == 1
    out, err = capsys.readouterr()
    assert err == "only the tuned parts differ: attributes, and signatures, which lapse; every tensor is the same\n"
    assert {line.split("\t")[1] for line in out.splitlines()} == {"module", "attribute"}
    other = zcrecord.load_record(tuned).tree()
    other["scale"] = other["scale"] + 1
    zcrecord.save_record(other, tmp_path / "other.zcr")
    assert main(["diff", str(plain), str(tmp_path / "other.zcr")]) == 1
    assert capsys.readouterr().err == ""
    assert main(["diff", str(tuned), str(tuned)]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@LINUX
def test_a_private_copy_of_a_tuned_archive_copies_no_weight(tmp_path: Path) -> None:
    """Of a matrix product, whose weight ONNX Runtime packs, and a look-up in a table."""
    nodes = [helper.make_node("Gather", ["table", "i"], ["x"]), helper.make_node("MatMul", ["x", "weight"], ["y"])]
    paths = []
    for size in (2048, 64):
        (tmp_path / str(size)).mkdir()
        weights = {name: np.random.default_rng(0).standard_normal((size, size), "f4") for name in ("table", "weight")}
        model = graph_model(nodes, [value("i", "n", kind=TensorProto.INT64)], [value("y", "n", size)], weights)
        paths.append(converted_in(tmp_path / str(size), model, tuned=True))
    assert tuning(session(paths[0])).used
    setup = """
import zcrecord
def load(path):
    record = zcrecord.load_record(path, mode="c")
    return record, record.attributes, [view.shape for view in record.values()]
load(sys.argv[2])
"""
    loaded, _ = growth(setup, "kept = load(sys.argv[1])\nkept[0]['weight'][0] += 1", *paths)
    copied, _ = growth(setup, "kept = [view.copy() for view in load(sys.argv[1])[0].values()]", *paths)
    assert copied > 32 << 20  # it would notice
    assert loaded < 1 << 20
    record = zcrecord.load_record(paths[0], mode="c")
    record["weight"][0] += 1
    assert not tuning(session(record)).used
    untune(paths[0])
    assert not np.array_equal(record["weight"], zcrecord.load_record(paths[0])["weight"])
