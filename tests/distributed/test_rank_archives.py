"""Archives of ranks as they are written, and joined: blocks, ties, chunks of one name, memory, many chunks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_torch
from rank_checkpoints import assert_equal, load, report, save, shards_in, written
from torch_devices import LazyTorch, OnDevice

import zcrecord
from zcrecord.distributed import ZcrStorageReader, load_views
from zcrecord.distributed.folder import CheckpointFolder
from zcrecord.distributed.join import join_reports
from zcrecord.distributed.rank_archive import Chunk, _HostBlocks
from zcrecord.errors import UnsupportedError
from zcrecord.tensors import interop
from zcrecord.tensors.strides import in_blocks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
MIB = 1 << 20


# Blocks.


@pytest.mark.parametrize(
    "shape", [(), (5,), (3 * MIB,), (3, MIB), (2, 3, 5 * MIB // 4), (1, 1, 3 * MIB), (2048, 1024), (0, 4)], ids=str
)
@pytest.mark.parametrize("turned", [False, True])
def test_blocks_are_the_elements_in_c_order_a_few_mib_at_a_time(shape: Any, turned: bool) -> None:
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    values = values.T if turned else values
    parts = list(in_blocks(values, 4 * MIB))
    assert all(part.nbytes <= 4 * MIB and (part.base is not None or part is values) for part in parts)
    assert b"".join(part.tobytes() for part in parts) == values.tobytes()


def test_blocks_of_a_device_wait_for_their_copies() -> None:
    def blocks(tensor: torch.Tensor) -> bytes:
        return b"".join(map(bytes, _HostBlocks(fake, torch.device("cuda")).blocks(tensor.as_subclass(OnDevice))))

    values = torch.arange(5 * MIB, dtype=torch.int32).reshape(5, MIB)
    fake = LazyTorch()
    assert blocks(values) == values.numpy().tobytes()
    assert fake.pinned == 8 * MIB and fake.kinds().count("wait") == 5
    fake.waits = False
    assert blocks(values + 1) != (values + 1).numpy().tobytes(), "this test would notice"


def test_tensors_of_a_device_are_copied_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device without a host view of its memory: shape and type are described."""
    viewed: Any = interop.as_view

    def described(value: Any) -> Any:
        kind = zcrecord.dtypes.from_numpy(viewed(value).dtype)
        return interop.DeviceTensor(kind, tuple(value.shape), id(value), lambda: viewed(value))

    monkeypatch.setattr(interop, "as_view", described)
    rows, turned = torch.arange(3.0 * MIB).reshape(3, MIB), torch.arange(12.0).reshape(3, 4).t()
    state = {"w": rows, "t": turned, "s": torch.tensor(2)}
    save(state, tmp_path, durable=False)
    monkeypatch.undo()
    assert_equal(load({name: torch.zeros_like(value) for name, value in state.items()}, tmp_path), state)


GROWN = """
import json, sys, warnings
import torch, torch.distributed.checkpoint as dcp
from tools.measure import begin_peak, peak_rss
from zcrecord.distributed import ZcrStorageWriter
warnings.simplefilter("ignore")

def grown(folder, state):
    before = begin_peak()
    dcp.save(state, storage_writer=ZcrStorageWriter(f"{sys.argv[1]}/{folder}", durable=False))
    return (peak_rss() - before) >> 20

grown("warm", {"w": torch.ones(10)})
rows = torch.arange(16.0 * (1 << 20)).reshape(4096, 4096)
print(json.dumps([grown("a", {"w": rows}), grown("b", {"w": rows.t()})]))
"""


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="platform: Linux tells how much memory is a process's own")
def test_a_save_takes_at_most_16_mib_beside_its_tensors(tmp_path: Path) -> None:
    rows, columns = json.loads(run_torch(GROWN, tmp_path).stdout)
    assert rows <= 4 and columns <= 16, (rows, columns)


# Chunks and ties.


def test_a_rank_may_have_several_chunks_of_one_name(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    parts = [(Chunk("a.w", (6, 2), (i, 0), (2, 2)), whole[i : i + 2]) for i in (4, 0, 2)]
    record = written(tmp_path, [*parts, (Chunk("a.w~2", (1,), (0,), (1,)), torch.ones(1))])
    assert record["a.w"].tolist() == whole.tolist() and record["a.w~2"].tolist() == [1]
    assert set(zcrecord.load_record(tmp_path / shards_in(tmp_path)[0]).names) == {"a.w", "a.w~2", "a.w~3", "a.w~4"}
    record.verify()


def test_tensors_of_which_some_chunks_are_the_same_memory_are_not_tied(tmp_path: Path) -> None:
    same, other = torch.arange(4.0).reshape(2, 2), torch.ones(2, 2)
    chunks = {"a": (same, other), "b": (same, other + 1), "c": (other, same)}
    rows = [(Chunk(n, (4, 2), (2 * i, 0), (2, 2)), half) for n, both in chunks.items() for i, half in enumerate(both)]
    record = written(tmp_path, [*rows, (Chunk("whole", (2, 2), (0, 0), (2, 2)), same)])
    assert not any(info.tied for info in record.infos())
    assert record["b"].tolist() == [[0, 1], [2, 3], [2, 2], [2, 2]] and record["c"][2:].tolist() == [[0, 1], [2, 3]]
    record.verify()


def test_packed_elements_are_whole_or_refused(tmp_path: Path) -> None:
    pairs = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 4)
    save({"w": pairs}, tmp_path)
    record = zcrecord.load_record(tmp_path / "checkpoint.zcr")
    assert record.info("w").shape == (2, 8) and record.info("w").dtype.name == "float4_e2m1fn"
    zeros = {"w": torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    for found in (load(zeros, tmp_path), load_views(tmp_path, {"w": pairs.to("meta")})):
        assert torch.equal(found["w"].view(torch.uint8), pairs.view(torch.uint8))
    with pytest.raises(UnsupportedError, match=r"tensor 'w': float4_e2m1fn elements do not fill whole bytes"):
        written(tmp_path, [(Chunk("w", (4, 4), (0, 0), (2, 4)), pairs)])


def test_metadata_are_made_for_the_names_that_are_loaded_alone(tmp_path: Path) -> None:
    """Of 50 tensors of 40 chunks, dealt out to 8 ranks in turn."""
    paths = {f"layers.{i}.weight": ("layers", i, "weight") for i in range(50)}
    reports = []
    for rank in range(8):
        boxes = [((4 * row, 0), (4, 8)) for _ in paths for row in range(rank, 40, 8)]
        names = [name for name in paths for _ in range(5)]
        stem = f"checkpoint~{rank:016x}-{rank + 1:05}-of-00008"
        reports.append(report(names, boxes, dict.fromkeys(paths, (160, 8)), stem))
    CheckpointFolder(tmp_path, durable=False).commit(
        join_reports(reports, paths, None, alignment=64, digest=None), 0, {}
    )
    metadata = ZcrStorageReader(tmp_path).read_metadata()
    by_name = metadata.state_dict_metadata
    assert len(by_name) == 50 and "layers.3.weight" in by_name and "layers.50.weight" not in by_name
    assert list(by_name)[:2] == ["layers.0.weight", "layers.1.weight"] and not by_name._metadata
    found = by_name["layers.7.weight"]
    assert found.size == torch.Size([160, 8]) and list(by_name._metadata) == ["layers.7.weight"]
    assert [chunk.offsets[0] for chunk in found.chunks] == list(range(0, 160, 4))
    assert metadata.planner_data["layers.7.weight"] == ("layers", 7, "weight") and len(metadata.planner_data) == 50
    for mapping in (by_name, metadata.planner_data):
        with pytest.raises(KeyError):
            mapping["other"]
