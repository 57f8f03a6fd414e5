"""Checkpoints by ranks in a bucket, run by `test_checkpoint_urls`, which says in options.json how to reach it."""

from __future__ import annotations

import json
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Rank, serve
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from zcrecord.distributed import ZcrStorageReader, ZcrStorageWriter, load_views

logging.disable(logging.CRITICAL)
warnings.filterwarnings("ignore")  # of torch, about itself

FOLDER = "s3://bucket/run/7"


def a_model(rank: Rank, *placements: Any, value: float = 0.0) -> dict[str, Any]:
    """Return a state whose tensors are split over all ranks."""
    mesh = init_device_mesh("cpu", (rank.world,))
    whole = torch.arange(8 * 6, dtype=torch.float32).reshape(8, 6) + value
    split = [distribute_tensor(t, mesh, placements, src_data_rank=None) for t in (whole, whole.double() * 2)]
    return {"model": {"w": split[0]}, "optim": {"exp_avg": split[1], "lr": 0.5}, "step": int(value)}


def facts(state: dict[str, Any]) -> list[Any]:
    """Return the sums of a state's tensors, and its step."""
    tensors = (state["model"]["w"], state["optim"]["exp_avg"])
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return [*(float(t.sum()) for t in full), state["step"]]


def saved_and_loaded_in_a_bucket(rank: Rank) -> dict[str, Any]:
    """Save twice, fail once; load rows as they are, as columns, whole, and as views."""
    options = json.loads((rank.folder / "options.json").read_text(encoding="utf-8"))
    writer = ZcrStorageWriter(storage_options=options)
    for value in (1.0, 2.0):
        dcp.save(a_model(rank, Shard(0), value=value), checkpoint_id=FOLDER, storage_writer=writer)
    told = ""
    broken = {**a_model(rank, Shard(0), value=3.0), **({"no": torch.ones(3).to_sparse()} if rank.number else {})}
    try:
        dcp.save(broken, checkpoint_id=FOLDER, storage_writer=writer)
    except CheckpointException as error:
        told = str(error)
    found: dict[str, Any] = {"saved": facts(a_model(rank, Shard(0), value=2.0)), "told": told}
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("whole", Replicate())):
        state = a_model(rank, placement)
        dcp.load(state, checkpoint_id=FOLDER, storage_reader=ZcrStorageReader(storage_options=options))
        found[name] = facts(state)
    found["views"] = facts(load_views(FOLDER, a_model(rank, Shard(0)), storage_options=options))
    future = dcp.async_save(a_model(rank, Shard(1), value=4.0), checkpoint_id=FOLDER, storage_writer=writer)
    future.result()
    dist.barrier()
    state = a_model(rank, Shard(0))
    dcp.load(state, checkpoint_id=FOLDER, storage_reader=ZcrStorageReader(storage_options=options))
    found["after"] = [facts(a_model(rank, Shard(0), value=4.0)), facts(state)]
    return found


if __name__ == "__main__":
    serve([saved_and_loaded_in_a_bucket])
