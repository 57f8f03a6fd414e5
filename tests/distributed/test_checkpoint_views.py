"""`load_views`: tensors over the mapping of a checkpoint, for a model on the meta device, or copies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_torch
from rank_checkpoints import a_state, assert_equal, load, save, shards_in, written

import zcrecord
from tools.range_server import serving
from zcrecord.distributed import ZcrStorageReader, load_views
from zcrecord.distributed.checkpoint import Checkpoint
from zcrecord.distributed.rank_archive import Chunk
from zcrecord.distributed.reader import _box_reader
from zcrecord.distributed.views import _Views

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: on_meta(item) for key, item in value.items()}
    return [on_meta(item) for item in value] if isinstance(value, list) else value


def test_a_nested_state_comes_as_it_is_asked_for(tmp_path: Path) -> None:
    save(a_state(), tmp_path)
    like = on_meta(a_state())
    found = load_views(tmp_path, like)
    assert_equal(found, a_state())
    assert like["model"]["head"].is_meta, "what was given is not changed"
    assert list(load_views(tmp_path, {"model": {"head": like["model"]["head"]}})["model"]) == ["head"]


def test_a_model_on_the_meta_device_runs_and_learns_on_views(tmp_path: Path) -> None:
    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))

    model = make()
    save({"model": model.state_dict()}, tmp_path)
    before = (tmp_path / shards_in(tmp_path)[0]).read_bytes()
    with torch.device("meta"):
        other = make()
    other.load_state_dict(load_views(tmp_path, {"model": other.state_dict()})["model"], assign=True)
    given = torch.ones(1, 4)
    assert torch.equal(model(given), other(given))
    other(given).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert not torch.equal(model(given), other(given))
    assert (tmp_path / shards_in(tmp_path)[0]).read_bytes() == before, "a step changes no file"
    again = load_views(tmp_path, {"model": other.state_dict()})["model"]
    assert torch.equal(again["0.weight"], model.state_dict()["0.weight"])


def test_tied_views_are_one_memory_and_equal_ones_are_not(tmp_path: Path) -> None:
    w = torch.arange(6.0)
    save({"a": w, "b": w, "c": w.clone()}, tmp_path)
    views = load_views(tmp_path, {name: torch.empty(6, device="meta") for name in "abc"})
    views["a"].add_(1)
    assert torch.equal(views["b"], w + 1) and torch.equal(views["c"], w)
    assert views["a"]._version == views["b"]._version == 1


SPLIT = torch.arange(24.0).reshape(6, 4)
HALVES = [(Chunk("w", (6, 4), (i, 0), (3, 4)), SPLIT[i : i + 3]) for i in (0, 3)]


@pytest.mark.parametrize(
    "origin, extent, viewed",
    [
        ((0, 0), (3, 4), True),
        ((3, 0), (2, 4), True),
        ((4, 1), (1, 2), True),
        ((0, 1), (3, 2), False),
        ((1, 0), (4, 4), False),
        ((0, 3), (6, 1), False),
        ((0, 0), (6, 4), False),
        ((2, 0), (0, 4), False),
    ],
)
def test_a_box_is_a_view_where_it_is_contiguous_in_one_chunk(
    tmp_path: Path, origin: Any, extent: Any, viewed: bool
) -> None:
    written(tmp_path, HALVES)
    made = _Views(torch, Checkpoint(tmp_path), True, False)
    found = made._box(0, origin, extent)
    wanted = SPLIT[origin[0] : origin[0] + extent[0], origin[1] : origin[1] + extent[1]]
    assert torch.equal(found, wanted) and found.is_contiguous()
    bases = [base.untyped_storage().data_ptr() for base in made._bases.values()]
    assert (found.untyped_storage().data_ptr() in bases) == viewed


MEASURED = """
import json, sys, warnings
import torch, torch.distributed.checkpoint as dcp
from tools.measure import private_bytes
from zcrecord.distributed import ZcrStorageReader, ZcrStorageWriter, load_views
warnings.simplefilter("ignore")
state = {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(16)}
dcp.save(state, storage_writer=ZcrStorageWriter(sys.argv[1], durable=False))
like = {name: torch.empty(1 << 20, device="meta") for name in state}
copies = {name: torch.empty(1 << 20) for name in state}
del state
load_views(sys.argv[1], like)
before = private_bytes()
views = load_views(sys.argv[1], like)
total = sum(float(view.sum()) for view in views.values())
mapped = private_bytes() - before
dcp.load(copies, storage_reader=ZcrStorageReader(sys.argv[1]))
print(json.dumps([total, mapped, private_bytes() - before]))
"""


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="platform: Linux tells how much memory is a process's own")
def test_views_take_no_memory_of_their_own_even_once_they_are_read(tmp_path: Path) -> None:
    total, mapped, copied = json.loads(run_torch(MEASURED, tmp_path).stdout)
    assert total == sum(range(16)) * (1 << 20)
    assert copied >= 60 << 20, "this test would notice"
    assert mapped <= 2 << 20


# Other archives than checkpoints, and other places.


def test_an_archive_that_save_record_made_is_loaded_as_well(tmp_path: Path) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    tree = {"a": base, "t": base.T, "rows": base[1:], "n": 5, "l": [base, {"x": 1}], "none": np.zeros((0, 2), np.int8)}
    zcrecord.save_record(tree, tmp_path / "model.zcr")
    for path in (tmp_path, tmp_path / "model.zcr"):
        state = {"a": torch.zeros(3, 4), "t": torch.zeros(4, 3), "rows": torch.zeros(2, 4), "n": 0,
                 "l": [torch.zeros(3, 4), {"x": 0}], "none": torch.zeros(0, 2, dtype=torch.int8)}  # fmt: skip
        for found in (load_views(path, state), load(state, path, verify="full")):
            assert np.array_equal(found["t"].numpy(), base.T) and np.array_equal(found["rows"].numpy(), base[1:])
            assert found["n"] == 5 and found["l"][1]["x"] == 1 and np.array_equal(found["l"][0].numpy(), base)


def test_a_tensor_with_strides_is_copied_once_for_all_its_slices(tmp_path: Path) -> None:
    zcrecord.save_record({"t": np.arange(12.0).reshape(3, 4).T}, tmp_path / "model.zcr")
    checkpoint = Checkpoint(tmp_path)
    view_of_box = _box_reader(torch, checkpoint, verify=False)
    [box] = checkpoint.pieces(0)
    rows = [view_of_box(box, (i, 0), (1, 3)) for i in range(2)]
    assert [row.tolist() for row in rows] == [[[0, 4, 8]], [[1, 5, 9]]]
    assert len({row.untyped_storage().data_ptr() for row in rows}) == 1


def test_a_checkpoint_is_loaded_from_a_url(tmp_path: Path) -> None:
    written(tmp_path, HALVES, n=7)
    with serving(tmp_path) as server:
        url: Any = server.url
        state = load({"w": torch.zeros(6, 4), "n": 0}, url)
        assert torch.equal(state["w"], SPLIT) and state["n"] == 7
        assert ZcrStorageReader.validate_checkpoint_id(url)
        assert torch.equal(load_views(url, {"w": torch.empty(6, 4, device="meta")}, writable=False)["w"], SPLIT)
