"""Checkpoints by several ranks, run by `run_ranks`: each scenario returns facts for its tests."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from guides import ROOT
from ranks import Rank, serve
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zcrecord
from zcrecord.distributed import ZcrStorageReader, ZcrStorageWriter, load_views
from zcrecord.errors import MismatchError

logging.disable(logging.CRITICAL)
warnings.filterwarnings("ignore")  # of torch, about itself


def save(state: dict[str, Any], folder: Any, **options: Any) -> None:
    dcp.save(state, storage_writer=ZcrStorageWriter(folder, durable=False), **options)


def load(state: dict[str, Any], folder: Any, **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=ZcrStorageReader(folder), **options)
    return state


def failure(act: Callable[[], object]) -> str:
    """Return the text of the error of a save or a load, empty if there is none."""
    try:
        act()
    except CheckpointException as error:
        return str(error)
    return ""


def placed(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    """Return this rank's part of a tensor that all ranks have, rows by default."""
    return distribute_tensor(tensor, mesh, placements or [Shard(0)], src_data_rank=None)


def empty(like: DTensor | torch.Tensor, mesh: DeviceMesh, *placements: Any) -> Any:
    """Return zeros of the same shape, placed anew."""
    return placed(torch.zeros(like.shape, dtype=like.dtype), mesh, *placements)


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
            put(name, dict(enumerate(value)))
        elif isinstance(value, torch.Tensor):
            hashed.update(full(value.detach()).numpy().tobytes())
        else:
            hashed.update(f"{name}={value!r}".encode())

    put("", state)
    return hashed.hexdigest()


def files(rank: Rank) -> list[str]:
    """Return the names of the files in the scenario's folder, the same in all ranks."""
    dist.barrier()
    names = sorted(os.listdir(rank.scenario))
    dist.barrier()
    return names


def mapped(tensor: torch.Tensor) -> bool:
    """Return True if a tensor lies on the mapping of a checkpoint's archive."""
    address = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return "checkpoint~" in line
    return False


# A model in two dimensions, with its optimizer.


def sharded(mesh: DeviceMesh, seed: int) -> tuple[Any, Any]:
    """Return a model, sharded over a mesh of one or two dimensions, and its optimizer after a step."""
    from torch.distributed.fsdp import fully_shard  # here, as below, because few runs need what it imports
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 42), nn.ReLU(), nn.Linear(42, 16))
    model.register_buffer("table", torch.arange(10))
    if mesh.ndim == 2:
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"] if mesh.ndim == 2 else mesh)
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
    state = state_of(*sharded(two, 0))
    dcp.save(state, storage_writer=ZcrStorageWriter(rank.scenario))
    found: dict[str, Any] = {
        "placements": str(state["model"]["1.weight"].placements),
        "saved": digest(state),
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
    found |= {"views": digest(views), "mapped": mapped(views["model"]["3.weight"])}
    pair = dist.new_group([0, 1])
    if rank.number < 2:
        half = sharded(DeviceMesh.from_group(pair, "cpu"), 2)
        found["half"] = digest(load(state_of(*half), rank.scenario, process_group=pair))
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
    expected = values | {"plain": values["big"]}
    for kind, (over, placements) in layouts.items():
        folder = rank.scenario / kind
        save({**expected, **{name: placed(value, over, *placements) for name, value in values.items()}}, folder)
        for other, (onto, to) in layouts.items():
            into = {name: empty(value, onto, *to) for name, value in values.items()}
            into["plain"] = torch.zeros_like(values["big"])
            views = load_views(folder, into)
            load(into, folder)
            for name, value in expected.items():
                count += 1
                wrong += [f"{kind} to {other}: {name}"] * (not torch.equal(full(into[name]), value))
                wrong += [f"views of {kind} to {other}: {name}"] * (not torch.equal(full(views[name]), value))
            if kind == other == "rows":
                wrong += ["no views of the same rows"] * (not mapped(views["big"]))
    return {"wrong": wrong, "count": count}


def ties(rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    embedding, both = placed(torch.arange(40.0).reshape(8, 5), mesh), torch.arange(6.0)
    state = {
        "embed": {"weight": embedding}, "head": {"weight": embedding}, "first": both, "second": both,
        "local": embedding.to_local(), "moments": [placed(torch.zeros(8, 5), mesh) for _ in range(2)],
    }  # fmt: skip
    save(state, rank.scenario)
    record = zcrecord.load_record(rank.scenario / "checkpoint.zcr")
    views = load_views(rank.scenario, {name: {"weight": empty(embedding, mesh)} for name in ("embed", "head")})
    views["embed"]["weight"].to_local().add_(1)
    return {
        "tied": {info.name: info.tied for info in record.infos()},
        "head": record["head.weight"].tolist(),
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
        return {name: placed(torch.full((8, 2), value), mesh) for name in "abc"}

    def now() -> float:
        return float(full(load(state(0.0), rank.scenario)["b"])[7, 1])

    save(state(1.0), rank.scenario)
    before = files(rank)
    writer = ZcrStorageWriter(rank.scenario)
    told = failure(lambda: dcp.save(state(2.0), storage_writer=writer, planner=Failing(rank.number == 2)))
    failed, kept = files(rank), now()
    dcp.save(state(3.0), storage_writer=writer)
    return {"before": before, "failed": failed, "kept": kept, "after": files(rank), "now": now(), "told": told}


def plans_that_are_cached(rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (rank.world,))
    found = []
    for turn in range(3):
        state = {"w": placed(torch.full((8, 2), float(turn)), mesh), "turn": turn}
        save(state, rank.scenario, planner=DefaultSavePlanner(enable_plan_caching=True))
        into = load({"w": empty(state["w"], mesh), "turn": None}, rank.scenario)
        found.append([float(full(into["w"])[7, 1]), into["turn"], len(files(rank))])
    return found


def saved_without_collectives(rank: Rank) -> Any:
    mesh, whole = init_device_mesh("cpu", (rank.world,)), torch.arange(24.0).reshape(8, 3)

    def state(of: torch.Tensor, *to: Any, **more: Any) -> dict[str, Any]:
        tensors = {"w": placed(of, mesh, *to), "both": placed(of, mesh, Replicate()), "here": of * 2}
        return {**tensors, "n": 7, f"of {rank.number}": [rank.number], **more}

    for _ in range(2):
        save(state(whole), rank.scenario, use_collectives=False)
    try:
        save(state(whole, odd=torch.ones(rank.number)), rank.scenario, use_collectives=False)
        told = ""
    except MismatchError as error:
        told = str(error)
    into, record = (
        load(state(whole * 0, Shard(1)), rank.scenario),
        zcrecord.load_record(rank.scenario / "checkpoint.zcr"),
    )
    record.verify()
    if not rank.number:
        save({"n": 1}, rank.folder / "alone", use_collectives=False, no_dist=True)  # waits for no other rank
    values = sorted(record.attributes)
    return {"equal": digest(into) == digest(state(whole)), "files": len(files(rank)), "told": told, "values": values}


def asynchronous_saves(rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    w = placed(torch.full((8, 2), 1.0), mesh)
    found = []
    options = [StagingOptions(False, False, threaded, False) for threaded in (False, True)]
    stagers: list[Any] = [None, *map(DefaultStager, options)]
    for number, stager in enumerate(stagers):
        w.to_local().fill_(1.0)
        folder = rank.scenario / str(number)
        done = dcp.async_save({"w": w, "tied": w, "n": 5}, storage_writer=ZcrStorageWriter(folder), async_stager=stager)
        if hasattr(done, "staging_completion"):
            done.staging_completion.result()
            done = done.upload_completion
        w.to_local().fill_(2.0)  # training goes on
        done.result()
        into = load({"w": empty(w, mesh), "n": 0}, folder)
        tied = zcrecord.load_record(folder / "checkpoint.zcr").info("w").tied
        found.append([full(into["w"]).unique().tolist(), into["n"], tied])
        if stager is not None:
            stager.close()
    return found


def a_part_of_the_ranks(rank: Rank) -> Any:
    group = dist.new_group([1, 3])
    if rank.number in (1, 3):
        w = placed(torch.arange(6.0).reshape(3, 2), DeviceMesh.from_group(group, "cpu"))
        save({"w": w}, rank.scenario, process_group=group)
    return {"files": files(rank), "w": zcrecord.load_record(rank.scenario / "checkpoint.zcr")["w"].tolist()}


def folders_that_are_not_shared(rank: Rank) -> Any:
    w = placed(torch.ones(8, 2), init_device_mesh("cpu", (4,)))
    told = failure(lambda: save({"w": w}, rank.scenario / f"node-{rank.number // 2}"))
    return told, sorted(os.listdir(rank.scenario / "node-0"))


def ranks_that_opened_different_checkpoints(rank: Rank) -> Any:
    w = placed(torch.ones(8, 2), init_device_mesh("cpu", (4,)))
    for name in ("old", "new"):
        save({"w": w}, rank.scenario / name)
    return failure(lambda: load({"w": w}, rank.scenario / ("old" if rank.number == 2 else "new")))


# Run by name.


def saved_and_loaded_in_a_bucket(rank: Rank) -> dict[str, Any]:
    """Save twice, fail once; load rows as they are, as columns, whole, and as views; save while training goes on."""
    options = json.loads((rank.folder / "options.json").read_text(encoding="utf-8"))
    mesh, url = init_device_mesh("cpu", (rank.world,)), "s3://bucket/run/7"
    writer = ZcrStorageWriter(url, storage_options=options)

    def state(value: float, placement: Any = None) -> dict[str, Any]:
        whole = torch.arange(8 * 6, dtype=torch.float32).reshape(8, 6) + value
        w, moments = (placed(tensor, mesh, placement or Shard(0)) for tensor in (whole, whole.double() * 2))
        return {"model": {"w": w}, "optim": {"exp_avg": moments, "lr": 0.5}, "step": int(value)}

    def loaded(placement: Any = None) -> str:
        into = state(0.0, placement)
        dcp.load(into, storage_reader=ZcrStorageReader(url, storage_options=options))
        return digest(into)

    for value in (1.0, 2.0):
        dcp.save(state(value), storage_writer=writer)
    broken = state(3.0) | ({"no": torch.ones(3).to_sparse()} if rank.number else {})
    told = failure(lambda: dcp.save(broken, storage_writer=writer))
    found = [loaded(), loaded(Shard(1)), loaded(Replicate())]
    found.append(digest(load_views(url, state(0.0), storage_options=options)))
    dcp.async_save(state(4.0, Shard(1)), storage_writer=writer).result()
    dist.barrier()
    return {"told": told, "saved": digest(state(2.0)), "loaded": found, "after": loaded(), "last": digest(state(4.0))}


def the_guides_example(rank: Rank) -> Any:
    """Run all blocks of the guide up to the one that looks into the checkpoint, with the group of these ranks."""
    guide = ROOT / "zcrecord" / "distributed" / "README.md"
    text, _, _ = guide.read_text(encoding="utf-8").partition("## Look into a checkpoint")
    blocks = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    alone = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)\n'
    code = "\n".join(blocks)
    assert code.count(alone) == 1 and len(blocks) == 4
    rank.scenario.mkdir(exist_ok=True)
    os.chdir(rank.scenario)
    torch.manual_seed(0)  # all ranks begin with one model, as under torchrun with a seed
    groups, real = [], dcp.async_save

    def noting(*args: Any, process_group: Any = None, **options: Any) -> Any:
        groups.append(process_group)
        return real(*args, process_group=process_group, **options)

    dcp.async_save, names = noting, dict[str, Any]()
    exec(compile(code.replace(alone, ""), str(guide), "exec", dont_inherit=True), names)
    dist.barrier()
    own = [group not in (None, dist.group.WORLD) for group in groups]
    return {"own groups": own, "steps": zcrecord.load_record("run/checkpoint.zcr").attributes["step"]}


if __name__ == "__main__":
    serve(
        [
            model_in_two_dimensions, resharding, ties, a_rank_that_fails, plans_that_are_cached, asynchronous_saves,
            saved_without_collectives, a_part_of_the_ranks,
            folders_that_are_not_shared, ranks_that_opened_different_checkpoints,
        ],
        [saved_and_loaded_in_a_bucket, the_guides_example],
    )  # fmt: skip
