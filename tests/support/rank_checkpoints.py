"""Checkpoints of one rank for tests: saved, loaded, compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import zcrecord
from zcrecord.codec.index import PAYLOAD
from zcrecord.distributed import ZcrStorageReader, ZcrStorageWriter
from zcrecord.distributed.folder import CheckpointFolder
from zcrecord.distributed.join import join_reports
from zcrecord.distributed.rank_archive import Chunk, RankReport, RankWriter, WholeTensor
from zcrecord.errors import RecordError
from zcrecord.writing.catalogue import WrittenShard


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    planner = options.pop("planner", None)
    dcp.save(state, storage_writer=ZcrStorageWriter(folder, **options), planner=planner, no_dist=True)


def load(state: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=ZcrStorageReader(folder, **options), no_dist=True)
    return state


def refused(kind: type[RecordError], match: str, act: Any) -> None:
    """Act, and expect that DCP wraps this error, whose message its own text has."""
    with pytest.raises(CheckpointException, match=match) as caught:
        act()
    [(error, _)] = caught.value.failures.values()
    assert type(error) is kind


def shards_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if "~" in name)


WEIGHT = torch.arange(12.0).reshape(3, 4)


def a_state() -> dict[str, Any]:
    return {
        "model": {"layers.0.weight": WEIGHT, "head": WEIGHT, "turned": WEIGHT.t(), "empty": torch.zeros(0, 3)},
        "kinds": {
            "b": torch.tensor([True, False]),
            "bf": torch.ones(3, dtype=torch.bfloat16),
            "scalar": torch.tensor(7),
        },
        "optim": {
            "state": {"layers.0.weight": {"step": torch.tensor(3.0), "exp_avg": torch.zeros(3, 4)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a", "b"], "foreach": None}, {"lr": 0.2}],
        },
        "step": 500,
    }


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def report(names: list[str], boxes: list[tuple[Any, Any]], shapes: dict[str, Any], stem: str = "a") -> RankReport:
    """Return the report of a rank that has written chunks of float32, which nothing has."""
    origin, extent = np.array(boxes, np.int64).transpose(1, 0, 2)
    rows = np.zeros(len(names), PAYLOAD)
    rows["nbytes"] = 4 * extent.prod(axis=1)
    rows["offset"] = np.cumsum([0, *rows["nbytes"]])[:-1]
    shard = WrittenShard(f"{stem}.zcr", 0, bytes(64), bytes(32), rows)
    tensors = {name: WholeTensor(18, 32, shape) for name, shape in shapes.items()}
    number = np.arange(len(names))
    return RankReport(shard, names, number, number, origin, extent, tensors, {})


def written(tmp_path: Path, chunks: list[tuple[Chunk, torch.Tensor]], **values: Any) -> zcrecord.Record:
    """Return the checkpoint that one rank with these chunks makes."""
    folder = CheckpointFolder(tmp_path, durable=False)
    name = folder.shard_name(0, 1)
    with folder.new_shard(name) as sink:
        out = RankWriter(torch, sink, {chunk.name for chunk, _ in chunks}, alignment=64, digest="xxh3")
        for chunk, tensor in chunks:
            out.add(chunk, tensor)
        report = out.finish(name, values)
    folder.commit(join_reports([report], None, None, alignment=64, digest="xxh3"), 1, {name: folder.scratch})
    return zcrecord.load_record(tmp_path / "checkpoint.zcr")
