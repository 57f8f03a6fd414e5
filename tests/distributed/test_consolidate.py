"""`consolidate` makes one archive of a checkpoint by many ranks, as function and command; and needs no torch."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import records as r
from split_catalogues import Box, boxes_along, outline_of, save_split

import zcrecord
from zcrecord import formats
from zcrecord.archive.sharded import ShardedSource
from zcrecord.cli.dispatch import main
from zcrecord.distributed import consolidate
from zcrecord.errors import DestinationExistsError, FormatError
from zcrecord.integrity import compare

W = np.arange(60, dtype=np.float32).reshape(6, 10)
TREE = {
    "model": {"w": W, "tied": W, "bias": np.arange(5.0)},
    "optim": {"state": {"w": {"exp_avg": W * 2, "step": np.float32(7)}}, "param_groups": [{"lr": 0.1, "fused": None}]},
    "epoch": 3,
    "random": b"\0state",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of three ranks, in a folder of its own."""
    (tmp_path / "ckpt").mkdir()
    splits = {"model.w": boxes_along(0, 3, W.shape), "optim.state.w.exp_avg": boxes_along(1, 3, W.shape)}
    save_split(tmp_path / "ckpt" / "checkpoint.zcr", TREE, splits, metadata={"run": "a"})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ckpt"


def is_whole(path: str) -> bool:
    """Return True if an archive has all of TREE."""
    record, expected = zcrecord.load_record(path, verify="full"), r.round_trip(TREE, metadata={"run": "a"})
    assert record.info("model.w").payload == record.info("model.tied").payload
    return record.content_digest() == expected.content_digest() and record.metadata == expected.metadata


@pytest.mark.parametrize("source", ["ckpt", "ckpt/checkpoint.zcr"])
def test_the_whole_checkpoint_becomes_one_archive(source: str, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    told: list[tuple[int, int | None]] = []
    report = consolidate(source, "one.zcr", progress=lambda *seen: told.append(seen))
    assert (report.tensors, report.source, report.dest) == (5, os.path.join("ckpt", "checkpoint.zcr"), "one.zcr")
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] == 2 * W.nbytes + 5 * 8 + 4
    with pytest.raises(DestinationExistsError):
        consolidate(source, "one.zcr")
    consolidate(source, "one.zcr", force=True)
    assert is_whole("one.zcr")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_limit_gives_shards_of_whole_tensors_and_a_folder_the_small_files_too(folder: Path) -> None:
    consolidate(folder, "model.zcr", max_shard_size=300)
    assert len(list(Path().glob("model-*-of-*.zcr"))) == 2
    assert is_whole("model.zcr")
    again = zcrecord.load_record("model.zcr")
    assert all(len(again.archive.source.pieces(i)) == 1 for i in range(len(again.archive.index.payloads)))
    (folder / "config.json").write_text("{}", encoding="utf-8")
    consolidate(folder, "made/")
    assert sorted(os.listdir("made")) == ["config.json", "model.zcr"]


@pytest.mark.slow
def test_it_needs_no_torch(folder: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None
import zcrecord.distributed
print(zcrecord.distributed.consolidate(sys.argv[1], sys.argv[2]).tensors)
"""
    assert r.run_python(code, folder, folder.parent / "one.zcr").stdout == "5\n"


def test_the_command_does_as_convert_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("convert", "consolidate"):
        assert main([command, "ckpt", f"{command}.zcr", "--no-sync"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
    assert re.match(r"consolidate\.zcr: 5 tensors in 7 modules, \d+ bytes in, \d+ bytes out, ", out)
    assert Path("consolidate.zcr").read_bytes() == Path("convert.zcr").read_bytes()
    assert main(["consolidate", str(folder / "checkpoint.zcr"), "shards.zcr", "--max-shard-size", "300", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 5
    assert main(["consolidate", "ckpt", "convert.zcr"]) == 1
    assert capsys.readouterr().err == "zcrecord: error: convert.zcr: exists already; --force replaces it\n"


# Split tensors, block by block.


Array = np.ndarray[Any, np.dtype[Any]]
RNG = np.random.default_rng(7)
CUBE, BIAS = RNG.random((6, 4, 5), np.float32), np.arange(9.0)
TILINGS: dict[str, Sequence[Box]] = {
    "rows": boxes_along(0, 4, CUBE.shape),
    "columns": boxes_along(2, 5, CUBE.shape),
    "the axis between": boxes_along(1, 3, CUBE.shape),
    "two axes": [np.s_[:3, :2], np.s_[:3, 2:], np.s_[3:, :1], np.s_[3:, 1:]],
    "a pinwheel": [np.s_[:2, :3], np.s_[:5, 3:], np.s_[5:, 1:], np.s_[2:, :1], np.s_[2:5, 1:3]],
    "single elements": [tuple(slice(a, a + 1) for a in at) for at in np.ndindex(6, 4, 5)],
}  # fmt: skip


def checkpoint(path: Path, boxes: Sequence[Box], cube: Array = CUBE) -> dict[str, Any]:
    """Save a checkpoint whose tensors of the shape of CUBE are split, and return its tree."""
    tree = {
        "model": {"w": cube, "tied": cube, "mask": cube > 0.5, "half": cube.astype(ml_dtypes.bfloat16)},
        "optimizer": {"state": {0: {"exp_avg": np.zeros_like(cube), "step": np.float32(3)}}, "lr": 0.001},
        "more": [np.zeros_like(cube), np.arange(200)[::2], np.array(["a", "bc"])],
        "random": b"state" * 9,
        "epoch": 7,
    }
    whole = ("model.w", "model.mask", "model.half", "optimizer.state.0.exp_avg", "more.0")
    save_split(path, tree, dict.fromkeys(whole, boxes), metadata={"picture": b"png", "run": "a"})
    return tree


def never(*_: Any) -> Any:
    raise AssertionError("a split tensor was assembled")


@pytest.fixture
def unassembled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedSource, "_assembled_bytes", never)


def equal(path: Path, tree: dict[str, Any]) -> bool:
    """Return True if an archive holds a tree, all of it."""
    expected = io.BytesIO()
    zcrecord.save_record(tree, expected, metadata={"picture": b"png", "run": "a"})
    return not list(compare(zcrecord.load_record(expected.getvalue()), zcrecord.load_record(path)))


@pytest.mark.usefixtures("unassembled")
@pytest.mark.parametrize("tiling", TILINGS)
def test_one_archive_has_everything_that_the_shards_have(tiling: str, tmp_path: Path) -> None:
    tree = checkpoint(tmp_path / "checkpoint.zcr", TILINGS[tiling])
    source = zcrecord.load_record(tmp_path / "checkpoint.zcr")
    report = zcrecord.save_record(source, tmp_path / "one.zcr")
    assert (report.tensors, report.tied) == (9, 1) and report.deduplicated == CUBE.nbytes, "the zeros are there twice"
    record = zcrecord.load_record(tmp_path / "one.zcr", verify="full")
    assert record.info("model.w").payload == record.info("model.tied").payload
    assert equal(tmp_path / "one.zcr", tree) and record.content_digest() == source.content_digest()


@pytest.mark.usefixtures("unassembled")
def test_a_part_of_a_checkpoint_is_saved_like_the_whole(tmp_path: Path) -> None:
    checkpoint(tmp_path / "checkpoint.zcr", TILINGS["columns"])
    zcrecord.save_record(zcrecord.load_record(tmp_path / "checkpoint.zcr").select("model.*"), tmp_path / "model.zcr")
    record = zcrecord.load_record(tmp_path / "model.zcr", verify="full")
    assert list(record.names) == ["model.w", "model.tied", "model.mask", "model.half"]
    assert np.array_equal(record["model.tied"], CUBE)


@pytest.mark.usefixtures("unassembled")
def test_other_formats_digests_and_comparisons_take_it_in_blocks_too(tmp_path: Path) -> None:
    save_split(tmp_path / "checkpoint.zcr", {"w": CUBE, "b": BIAS}, {"w": TILINGS["columns"]})
    save_split(tmp_path / "rows.zcr", {"w": CUBE + (CUBE > 0.9), "b": BIAS}, {"w": TILINGS["rows"]})
    zcrecord.save_record({"w": CUBE, "b": BIAS}, tmp_path / "one.zcr")
    formats.convert(tmp_path / "checkpoint.zcr", tmp_path / "m.safetensors")
    formats.convert(tmp_path / "m.safetensors", tmp_path / "back.zcr")
    records = {name: zcrecord.load_record(tmp_path / f"{name}.zcr") for name in ("checkpoint", "rows", "one", "back")}
    assert np.array_equal(records["back"]["w"], CUBE)
    assert records["checkpoint"].content_digest() == records["one"].content_digest()
    for name in ("checkpoint", "one"):
        (change,) = compare(records[name], records["rows"])
        assert change.name == "w" and change.elements == (int(np.count_nonzero(CUBE > 0.9)), CUBE.size)
    assert not list(compare(records["checkpoint"], records["one"]))


def test_edits_of_a_private_copy_are_saved(tmp_path: Path) -> None:
    checkpoint(tmp_path / "checkpoint.zcr", TILINGS["columns"])
    record = zcrecord.load_record(tmp_path / "checkpoint.zcr", mode="c")
    record["model.w"][1, 2, 3] = 77
    zcrecord.save_record(record, tmp_path / "one.zcr")
    saved = zcrecord.load_record(tmp_path / "one.zcr")
    assert saved["model.w"][1, 2, 3] == saved["model.tied"][1, 2, 3] == 77
    assert np.count_nonzero(saved["model.w"] != CUBE) == 1


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        ({"extent": np.full((2, 3), 1 << 63, np.uint64)}, "'w': its pieces in the shards do not tile it"),
        ({"payload": np.array([0, 1], np.uint32)}, "names payloads that this shard does not have"),
    ],
)
def test_pieces_that_do_not_fit_leave_the_old_archive(forged: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "one.zcr").write_bytes(b"old")
    save_split(tmp_path / "checkpoint.zcr", {"w": CUBE}, {"w": boxes_along(0, 2, CUBE.shape)}, forged=forged)
    names = sorted(os.listdir(tmp_path))
    record = zcrecord.load_record(tmp_path / "checkpoint.zcr")
    for most in (None, 100):
        with pytest.raises(FormatError, match=message):
            zcrecord.save_record(record, tmp_path / "one.zcr", max_shard_size=most)
        assert (tmp_path / "one.zcr").read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == names


@pytest.mark.parametrize(
    "value", [zcrecord.PackedTensor.pack((np.arange(16) - 8).astype(ml_dtypes.int4)), np.array(["a", "b", "cde", ""])]
)
def test_elements_that_are_no_whole_bytes_cannot_be_split(value: Any, tmp_path: Path) -> None:
    zcrecord.save_record({"w": value}, tmp_path / "one.zcr", digest="none")
    octets = np.array(zcrecord.load_record(tmp_path / "one.zcr").raw("w"))
    forged = {"outline": outline_of(tmp_path / "one.zcr")}
    save_split(tmp_path / "checkpoint.zcr", {"w": octets}, {"w": boxes_along(0, 2, octets.shape)}, forged=forged)
    with pytest.raises(FormatError, match="'w': its pieces in the shards do not tile it"):
        zcrecord.save_record(zcrecord.load_record(tmp_path / "checkpoint.zcr"), tmp_path / "one.zcr")


SHRINKING = """
import os, sys
import zcrecord
from zcrecord.errors import RecordError
source, shard, dest = sys.argv[1:]
try:
    zcrecord.save_record(zcrecord.load_record(source), dest, progress=lambda *_: os.truncate(shard, 5000))
except RecordError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells beforehand that pages can be read")
def test_a_shard_that_shrinks_meanwhile_is_an_error_and_no_crash(tmp_path: Path) -> None:
    values = np.ones((1024, 2048), np.float32)
    save_split(tmp_path / "checkpoint.zcr", {"w": values}, {"w": boxes_along(1, 2, values.shape)})
    shard = tmp_path / "checkpoint-00002-of-00003.zcr"
    text = r.run_python(SHRINKING, tmp_path / "checkpoint.zcr", shard, tmp_path / "one.zcr").stdout
    assert text.startswith(f"SourceError {shard}: ")
    assert "cannot be read any more; did it become shorter" in text
    assert not (tmp_path / "one.zcr").exists()
