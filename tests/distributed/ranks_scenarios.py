"""Checkpoints by four ranks, run by `test_checkpoints_of_ranks`: each scenario returns facts for its tests."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Rank, serve
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zcrecord
from zcrecord.distributed import ZcrStorageReader, ZcrStorageWriter, load_views

logging.disable(logging.CRITICAL)
warnings.filterwarnings("ignore")  # of torch, about itself


def placed(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    """Return this rank's part of a tensor that all ranks have."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def empty(like: DTensor | torch.Tensor, mesh: DeviceMesh | None = None, *placements: Any) -> Any:
    """Return zeros of the same shape, placed anew."""
    zeros = torch.zeros(like.shape, dtype=like.dtype)
    return zeros if mesh is None else placed(zeros, mesh, *placements)


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def digest(state: Any) -> str:
    """Return a digest of all values of a state, whatever its layout."""
    hashed = hashlib.sha256()

    def put(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                put(f"{name}.{key}", value[key])
        elif isinstance(value, list):
            for i, item in enumerate(value):
                put(f"{name}.{i}", item)
        elif isinstance(value, torch.Tensor):
            hashed.update(full(value.detach()).numpy().tobytes())
        else:
            hashed.update(f"{name}={value!r}".encode())

    put("", state)
    return hashed.hexdigest()


def files(rank: Rank) -> list[str]:
    """Return the names of the files in the scenario's folder, the same in all ranks."""
    dist.barrier()
    found = sorted(os.listdir(rank.scenario))
    dist.barrier()
    return found


def mapped(tensor: torch.Tensor) -> bool:
    """Return True if a tensor lies on the mapping of a checkpoint's archive."""
    at = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= at < end:
                return "checkpoint~" in line
    return False


# A model in two dimensions, with its optimizer.


class Block(nn.Module):  # type: ignore[misc]  # mypy takes torch for Any
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 42), nn.Linear(42, 16), nn.LayerNorm(16)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):  # type: ignore[misc]  # mypy takes torch for Any
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("table", torch.arange(10))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(mesh: DeviceMesh, seed: int) -> tuple[Any, Any]:
    """Return a model, sharded over a mesh of one or two dimensions, and its optimizer after a step."""
    from torch.distributed.fsdp import fully_shard  # here, as below, because few runs need what it imports
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model = Net()
    over = mesh["dp"] if mesh.ndim == 2 else mesh
    for layer in model.layers:
        if mesh.ndim == 2:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (seed + 1), betas=(0.8, 0.9))
    model(torch.full((3, 16), 0.5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "epoch": 3}


def model_in_two_dimensions(rank: Rank) -> Any:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one = init_device_mesh("cpu", (4,))
    model, optimizer = sharded(two, 0)
    state = state_of(model, optimizer)
    saved = digest(state)
    dcp.save(state, storage_writer=ZcrStorageWriter(rank.scenario))
    found: dict[str, Any] = {
        "placements": str(state["model"]["layers.0.up.weight"].placements),
        "saved": saved,
        "files": files(rank),
    }
    for name, mesh in (("same", two), ("one", one)):
        other = sharded(mesh, 1)
        into = state_of(*other)
        found[f"before {name}"] = digest(into)
        dcp.load(into, storage_reader=ZcrStorageReader(rank.scenario, verify="full"))
        set_state_dict(*other, model_state_dict=into["model"], optim_state_dict=into["optim"])
        found[name] = digest(state_of(*other))
    views = load_views(rank.scenario, state)
    found["views"] = digest(views)
    found["mapped"] = mapped(views["model"]["layers.1.down.weight"])
    pair = dist.new_group([0, 1])
    if rank.number < 2:
        half = sharded(DeviceMesh.from_group(pair, "cpu"), 2)
        into = state_of(*half)
        dcp.load(into, storage_reader=ZcrStorageReader(rank.scenario), process_group=pair)
        found["half"] = digest(into)
    return found


# Layouts.


def resharding(rank: Rank) -> Any:
    mesh, two = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(5)
    values = {"big": torch.randn(10, 6), "few": torch.randn(3, 5), "bits": torch.randn(8, 4, 2).to(torch.bfloat16)}
    layouts = {
        "rows": (mesh, [Shard(0)]),
        "columns": (mesh, [Shard(1)]),
        "replicated": (mesh, [Replicate()]),
        "grid": (two, [Shard(0), Shard(1)]),
        "hybrid": (two, [Replicate(), Shard(0)]),
        "twice": (two, [Shard(0), Shard(0)]),
    }
    wrong, count = [], 0
    for kind, (over, how) in layouts.items():
        folder = rank.scenario / kind
        state = {name: placed(value, over, *how) for name, value in values.items()} | {"plain": values["big"]}
        dcp.save(state, storage_writer=ZcrStorageWriter(folder, durable=False))
        for other, (onto, to) in layouts.items():
            into = {name: empty(value, onto, *to) for name, value in values.items()} | {"plain": empty(values["big"])}
            views = load_views(folder, into)
            dcp.load(into, storage_reader=ZcrStorageReader(folder))
            for name, value in (values | {"plain": values["big"]}).items():
                count += 1
                wrong += [f"{kind} to {other}: {name}"] * (not torch.equal(full(into[name]), value))
                wrong += [f"views of {kind} to {other}: {name}"] * (not torch.equal(full(views[name]), value))
            if kind == other == "rows":
                wrong += ["no views of the same rows"] * (not mapped(views["big"]))
    return {"wrong": wrong, "count": count}


def ties(rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    embedding = placed(torch.arange(40.0).reshape(8, 5), mesh, Shard(0))
    both = torch.arange(6.0)
    state = {
        "embed": {"weight": embedding}, "head": {"weight": embedding}, "first": both, "second": both,
        "local": embedding.to_local(), "moments": [placed(torch.zeros(8, 5), mesh, Shard(0)) for _ in range(2)],
    }  # fmt: skip
    dcp.save(state, storage_writer=ZcrStorageWriter(rank.scenario))
    record = zcrecord.load_record(rank.scenario / "checkpoint.zcr")
    into = {"embed": {"weight": empty(embedding, mesh, Shard(0))}, "head": {"weight": empty(embedding, mesh, Shard(0))}}
    views = load_views(rank.scenario, into)
    views["embed"]["weight"].to_local().add_(1)
    return {
        "tied": {info.name: info.tied for info in record.infos()},
        "head": record["head.weight"].tolist(),
        "nbytes": sum((rank.scenario / name).stat().st_size for name in files(rank) if "~" in name),
        "stepped": views["head"]["weight"].to_local().flatten()[0].item() - embedding.to_local().flatten()[0].item(),
    }


# The protocol.


class Failing(DefaultSavePlanner):  # type: ignore[misc]  # mypy takes torch for Any
    """Fails in one rank, after it has given some tensors."""

    def __init__(self, failing: bool) -> None:
        super().__init__()
        self.left = 1 if failing else 1 << 30

    def resolve_data(self, write_item: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")
        return super().resolve_data(write_item)


def a_rank_that_fails(rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (4,))

    def state(value: float) -> dict[str, Any]:
        return {name: placed(torch.full((8, 2), value), mesh, Shard(0)) for name in "abc"}

    def now() -> float:
        into = state(0.0)
        dcp.load(into, storage_reader=ZcrStorageReader(rank.scenario))
        return float(full(into["b"])[7, 1])

    dcp.save(state(1.0), storage_writer=ZcrStorageWriter(rank.scenario))
    before = files(rank)
    writer = ZcrStorageWriter(rank.scenario)
    try:
        dcp.save(state(2.0), storage_writer=writer, planner=Failing(rank.number == 2))
        told = ""
    except CheckpointException as error:
        told = str(error)
    failed = files(rank)
    kept = now()
    dcp.save(state(3.0), storage_writer=writer)
    return {"before": before, "failed": failed, "kept": kept, "after": files(rank), "now": now(), "told": told}


def plans_that_are_cached(rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (rank.world,))
    found = []
    for turn in range(3):
        state = {"w": placed(torch.full((8, 2), float(turn)), mesh, Shard(0)), "turn": turn}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=ZcrStorageWriter(rank.scenario), planner=planner)
        into = {"w": empty(state["w"], mesh, Shard(0)), "turn": None}
        dcp.load(into, storage_reader=ZcrStorageReader(rank.scenario))
        found.append([float(full(into["w"])[7, 1]), into["turn"], len(files(rank))])
    return found


def asynchronous_saves(rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    w = placed(torch.full((8, 2), 1.0), mesh, Shard(0))
    found: dict[str, Any] = {}
    stagers: Sequence[tuple[str, Any]] = [
        ("default", None),
        ("options", DefaultStager(StagingOptions(False, False, False, False))),
        ("threaded", DefaultStager(StagingOptions(False, False, True, False))),
    ]
    for name, stager in stagers:
        with torch.no_grad():
            w.to_local().fill_(1.0)
        folder = rank.scenario / name
        done = dcp.async_save({"w": w, "tied": w, "n": 5}, storage_writer=ZcrStorageWriter(folder), async_stager=stager)
        if hasattr(done, "staging_completion"):
            done.staging_completion.result()
            done = done.upload_completion
        with torch.no_grad():
            w.to_local().fill_(2.0)  # training goes on
        done.result()
        into = {"w": empty(w, mesh, Shard(0)), "n": 0}
        dcp.load(into, storage_reader=ZcrStorageReader(folder))
        tied = zcrecord.load_record(folder / "checkpoint.zcr").info("w").tied
        found[name] = [full(into["w"]).unique().tolist(), into["n"], tied]
        if stager is not None:
            stager.close()
    return found


def a_part_of_the_ranks(rank: Rank) -> Any:
    group = dist.new_group([1, 3])
    if rank.number in (1, 3):
        mesh = DeviceMesh.from_group(group, "cpu")
        state = {"w": placed(torch.arange(6.0).reshape(3, 2), mesh, Shard(0))}
        dcp.save(state, storage_writer=ZcrStorageWriter(rank.scenario), process_group=group)
    return {"files": files(rank), "w": zcrecord.load_record(rank.scenario / "checkpoint.zcr")["w"].tolist()}


def folders_that_are_not_shared(rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    folder = rank.scenario / f"node-{rank.number // 2}"
    try:
        dcp.save({"w": placed(torch.ones(8, 2), mesh, Shard(0))}, storage_writer=ZcrStorageWriter(folder))
        told = ""
    except CheckpointException as error:
        told = str(error)
    return told, sorted(os.listdir(rank.scenario / "node-0"))


def ranks_that_opened_different_checkpoints(rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    w = placed(torch.ones(8, 2), mesh, Shard(0))
    for name in ("old", "new"):
        dcp.save({"w": w}, storage_writer=ZcrStorageWriter(rank.scenario / name))
    folder = rank.scenario / ("old" if rank.number == 2 else "new")
    try:
        dcp.load({"w": w}, storage_reader=ZcrStorageReader(folder))
    except CheckpointException as error:
        return str(error)
    return ""


if __name__ == "__main__":
    serve(
        [
            model_in_two_dimensions, resharding, ties, a_rank_that_fails, plans_that_are_cached, asynchronous_saves,
            a_part_of_the_ranks, folders_that_are_not_shared, ranks_that_opened_different_checkpoints,
        ]
    )  # fmt: skip
