"""`consolidate` makes one archive of a checkpoint by many ranks, as function and command; and needs no torch."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import records as r
from split_catalogues import boxes_along, save_split

import zcrecord
from zcrecord.cli.dispatch import main
from zcrecord.distributed import consolidate
from zcrecord.errors import DestinationExistsError

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
