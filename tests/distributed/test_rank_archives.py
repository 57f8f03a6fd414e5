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
from rank_checkpoints import assert_equal, load, save, shards_in, written
from torch_devices import LazyTorch, OnDevice

import zcrecord
from zcrecord.codec.index import PAYLOAD
from zcrecord.distributed import ZcrStorageReader, load_views
from zcrecord.distributed.folder import CheckpointFolder
from zcrecord.distributed.join import joined
from zcrecord.distributed.rank_archive import Chunk, RankReport, WholeTensor, _HostBlocks
from zcrecord.errors import UnsupportedError
from zcrecord.tensors.strides import in_blocks
from zcrecord.writing.catalogue import WrittenShard

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
    values = torch.arange(5 * MIB, dtype=torch.int32).reshape(5, MIB)
    fake = LazyTorch()
    blocks = _HostBlocks(fake, torch.device("cuda")).blocks(values.as_subclass(OnDevice))
    assert b"".join(map(bytes, blocks)) == values.numpy().tobytes()
    assert fake.pinned == 8 * MIB and fake.kinds().count("wait") == 5
    fake.waits = False
    blocks = _HostBlocks(fake, torch.device("cuda")).blocks((values + 1).as_subclass(OnDevice))
    assert b"".join(map(bytes, blocks)) != (values + 1).numpy().tobytes(), "this test would notice"


def test_tensors_of_another_device_are_copied_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a device: no host view, and shape and type described."""
    from zcrecord.tensors import interop

    viewed = interop.viewed

    def described(value: Any) -> Any:
        found: Any = viewed(value)
        return interop.DeviceTensor(
            zcrecord.dtypes.from_numpy(found.dtype), tuple(value.shape), id(value), lambda: found
        )

    monkeypatch.setattr(interop, "viewed", described)
    state = {
        "w": torch.arange(3.0 * MIB).reshape(3, MIB),
        "t": torch.arange(12.0).reshape(3, 4).t(),
        "s": torch.tensor(2),
    }
    save(state, tmp_path, durable=False)
    monkeypatch.undo()
    assert_equal(load({name: torch.zeros_like(value) for name, value in state.items()}, tmp_path), state)


GROWN = """
import json, sys, warnings
import torch, torch.distributed.checkpoint as dcp
from tools.measure import begin_peak, peak_rss
from zcrecord.distributed import ZcrStorageWriter
warnings.simplefilter("ignore")

def grown(folder, make):
    state = make()
    before = begin_peak()
    dcp.save(state, storage_writer=ZcrStorageWriter(f"{sys.argv[1]}/{folder}", durable=False))
    return (peak_rss() - before) >> 20

class Cloning(dcp.DefaultSavePlanner):
    def resolve_data(self, item):
        return super().resolve_data(item).clone()

warm = grown("warm", lambda: {"w": torch.ones(10)})
rows = torch.arange(16.0 * (1 << 20)).reshape(4096, 4096)
print(json.dumps({"rows": grown("a", lambda: {"w": rows}), "columns": grown("b", lambda: {"w": rows.t()})}))
"""


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="platform: Linux tells how much memory is a process's own")
def test_a_save_takes_at_most_16_mib_beside_its_tensors(tmp_path: Path) -> None:
    grown = json.loads(run_torch(GROWN, tmp_path).stdout)
    assert grown["rows"] <= 4 and grown["columns"] <= 16, grown


# Chunks and ties.


def test_a_rank_may_have_several_chunks_of_one_name(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    parts = [(Chunk("a.w", (6, 2), (i, 0), (2, 2)), whole[i : i + 2]) for i in (4, 0, 2)]
    other = Chunk("a.w~2", (1,), (0,), (1,)), torch.ones(1)
    record = written(tmp_path, [*parts, other])
    assert record["a.w"].tolist() == whole.tolist() and record["a.w~2"].tolist() == [1]
    assert set(zcrecord.load_record(tmp_path / shards_in(tmp_path)[0]).names) == {"a.w", "a.w~2", "a.w~3", "a.w~4"}
    record.verify()


def test_tensors_of_which_some_chunks_are_the_same_memory_are_not_tied(tmp_path: Path) -> None:
    same, apart = torch.arange(4.0).reshape(2, 2), torch.ones(2, 2)
    a = [(Chunk("a", (4, 2), (0, 0), (2, 2)), same), (Chunk("a", (4, 2), (2, 0), (2, 2)), apart)]
    b = [(Chunk("b", (4, 2), (0, 0), (2, 2)), same), (Chunk("b", (4, 2), (2, 0), (2, 2)), apart + 1)]
    c = [(Chunk("c", (4, 2), (2, 0), (2, 2)), same), (Chunk("c", (4, 2), (0, 0), (2, 2)), apart)]
    record = written(tmp_path, [*a, *b, *c, (Chunk("whole", (2, 2), (0, 0), (2, 2)), same)])
    assert not any(info.tied for info in record.infos())
    assert record["b"].tolist() == [[0, 1], [2, 3], [2, 2], [2, 2]] and record["c"][2:].tolist() == [[0, 1], [2, 3]]
    record.verify()


def test_packed_elements_are_whole_or_refused(tmp_path: Path) -> None:
    pairs = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 4)
    save({"w": pairs}, tmp_path)
    record = zcrecord.load_record(tmp_path / "checkpoint.zcr")
    assert record.info("w").shape == (2, 8) and record.info("w").dtype.name == "float4_e2m1fn"
    out = load({"w": torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path)
    assert torch.equal(out["w"].view(torch.uint8), pairs.view(torch.uint8))
    views = load_views(tmp_path, {"w": pairs.to("meta")})
    assert torch.equal(views["w"].view(torch.uint8), pairs.view(torch.uint8))
    with pytest.raises(UnsupportedError, match=r"tensor 'w': float4_e2m1fn elements do not fill whole bytes"):
        written(tmp_path, [(Chunk("w", (4, 4), (0, 0), (2, 4)), pairs)])


# Many chunks: what is there for each is done on columns.


def many(tensors: int, chunks: int, ranks: int) -> list[RankReport]:
    """Return the reports of ranks that have tensors of 4 rows a chunk, dealt out to all ranks in turn."""
    reports = []
    for rank in range(ranks):
        mine = np.arange(rank, chunks, ranks)
        rows = np.zeros(tensors * len(mine), PAYLOAD)
        rows["nbytes"] = 4 * 4 * 8
        rows["offset"] = np.arange(len(rows)) * 128
        origin = np.zeros((len(rows), 2), np.int64)
        origin[:, 0] = np.tile(mine * 4, tensors)
        names = [f"layers.{i}.weight" for i in range(tensors) for _ in mine]
        number = np.arange(len(rows))
        shard = WrittenShard(f"checkpoint~{rank:016x}-{rank + 1:05}-of-{ranks:05}.zcr", 0, bytes(64), bytes(32), rows)
        told = {f"layers.{i}.weight": WholeTensor(18, 32, (4 * chunks, 8)) for i in range(tensors)}
        box = np.tile(np.array([[4, 8]]), (len(rows), 1))
        reports.append(RankReport(shard, names, number, number, origin, box, told, {}))
    return reports


def test_metadata_are_made_for_the_names_that_are_loaded_alone(tmp_path: Path) -> None:
    tree = joined(many(50, 40, 8), {f"layers.{i}.weight": ("layers", i, "weight") for i in range(50)}, None,
                  alignment=64, digest=None)  # fmt: skip
    CheckpointFolder(tmp_path, durable=False).commit(tree, 0, {})
    metadata = ZcrStorageReader(tmp_path).read_metadata()
    names = metadata.state_dict_metadata
    assert len(names) == 50 and "layers.3.weight" in names and "layers.50.weight" not in names
    assert list(names)[:2] == ["layers.0.weight", "layers.1.weight"] and not names._made
    found = names["layers.7.weight"]
    assert found.size == torch.Size([160, 8]) and len(found.chunks) == 40 and list(names._made) == ["layers.7.weight"]
    assert [chunk.offsets[0] for chunk in found.chunks] == list(range(0, 160, 4))
    assert metadata.planner_data["layers.7.weight"] == ("layers", 7, "weight") and len(metadata.planner_data) == 50
    with pytest.raises(KeyError):
        names["other"]
    with pytest.raises(KeyError):
        metadata.planner_data["other"]
