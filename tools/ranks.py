"""Ranks of a sharded training run on this machine: gloo, FSDP2, a Llama's names and shapes, and AdamW's state.

    with Ranks() as ranks:
        ranks.join(2)
        ranks.call("build", layers=2, width=64, vocabulary=1000, sharded="rows", filled=True)
        seconds = ranks.call("save", way="zcrecord", folder="checkpoint")

Each rank is a worker process, and keeps its model between calls. Nothing is trained: the values are random.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections import OrderedDict
from types import TracebackType
from typing import Any, Literal, Self

from tools.measure import private_bytes, timed
from tools.worker import Worker, call_at_once

OURS, FILES, HUGGING_FACE = "zcrecord", "FileSystemWriter", "HuggingFaceStorageWriter"
Sharded = Literal["rows", "columns"]
_kept: dict[str, Any] = {}  # of a rank: its state dict, and what it was built from


class Ranks:
    """Worker processes of which some are the ranks of a process group; leaving the context ends them."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._active: list[Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="zcrecord-ranks-")

    def join(self, count: int) -> None:
        """Make a new process group of `count` ranks; the ranks of the last one leave it."""
        if self._active:
            self.call("leave")
        os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it
        while len(self._workers) < count:
            self._workers.append(Worker().__enter__())
        self._active = self._workers[:count]
        meeting = tempfile.mktemp(dir=self._folder.name)
        for rank, worker in enumerate(self._active):
            worker.send("tools.ranks:join", rank=rank, count=count, meeting=meeting)
        for worker in self._active:
            worker.receive()

    def call(self, function: str, **arguments: Any) -> list[Any]:
        """Call a function of this module in all ranks at once; return their results."""
        return call_at_once(self._active, f"tools.ranks:{function}", **arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.__exit__(kind, error, trace)
        self._folder.cleanup()


# -- in each rank ----------------------------------------------------------------------------------------------------


def join(rank: int, count: int, meeting: str) -> None:
    """Join a process group whose members meet in a file."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    gc.freeze()  # or each collection before a measurement goes through all of torch's modules
    warnings.filterwarnings("ignore")  # torch's own, of what it does itself
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    gc.disable()  # as torchtitan and Megatron do: a collection of everything takes as long as half of a save
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)


def leave() -> None:
    """Leave the process group and forget the state."""
    import torch.distributed as dist

    _kept.clear()
    gc.collect()
    dist.destroy_process_group()


def build(layers: int, width: int, vocabulary: int, sharded: Sharded, filled: bool, trained: bool = True) -> int:
    """Make this rank's part of model and optimizer, random or zeros; return the bytes of all ranks together.

    Without `trained` there is no optimizer.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict

    _kept.clear()
    gc.collect()
    model = _sharded(_model(layers, width, vocabulary), sharded)
    weights, moments = get_state_dict(model, torch.optim.AdamW(model.parameters()) if trained else [])
    state = {"model": weights, "optim": moments} if trained else {"model": weights}
    _kept.update(state=state, model=(layers, width, vocabulary, sharded))
    total = 0
    for tensor in _tensors():
        total += tensor.nbytes
        local = tensor.to_local()
        local.uniform_(-1, 1) if filled else local.zero_()
    dist.barrier()
    return total


def _model(layers: int, width: int, vocabulary: int) -> Any:
    """Return a module with a Llama's names and shapes; it is never called."""
    from torch import nn

    def linear(inputs: int, outputs: int) -> Any:
        return nn.Linear(inputs, outputs, bias=False)

    def named(**parts: Any) -> Any:
        return nn.Sequential(OrderedDict(parts))

    def block() -> Any:
        inner = width * 8 // 3 // 64 * 64
        return named(
            self_attn=named(**{f"{name}_proj": linear(width, width) for name in "qkvo"}),
            mlp=named(gate_proj=linear(width, inner), up_proj=linear(width, inner), down_proj=linear(inner, width)),
            input_layernorm=nn.RMSNorm(width),
            post_attention_layernorm=nn.RMSNorm(width),
        )

    blocks = nn.Sequential(*(block() for _ in range(layers)))
    inside = named(embed_tokens=nn.Embedding(vocabulary, width), layers=blocks, norm=nn.RMSNorm(width))
    return named(model=inside, lm_head=linear(width, vocabulary))


def _sharded(model: Any, sharded: Sharded) -> Any:
    """Have FSDP2 shard a model over the ranks, layer by layer, by rows or the matrices by columns."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(parameter: Any) -> Any:
        return Shard(parameter.dim() - 1)

    how = {"shard_placement_fn": place} if sharded == "columns" else {}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def _tensors() -> list[Any]:
    """Return the sharded tensors of the state, the optimizer's among them."""
    state = _kept["state"]
    told = state["optim"]["state"].values() if "optim" in state else ()
    moments = [tensor for each in told for tensor in each.values() if tensor.dim()]
    return [*state["model"].values(), *moments]


def count() -> int:
    return len(_tensors())


def checksum() -> float:
    """Return the sum of all elements of all ranks."""
    import torch
    import torch.distributed as dist

    sums = torch.stack([tensor.to_local().sum(dtype=torch.float64) for tensor in _tensors()]).sum()
    dist.all_reduce(sums)
    return float(sums)


def writer(way: str, folder: str, *, durable: bool) -> Any:
    if way == OURS:
        return importlib.import_module("zcrecord.distributed").ZcrStorageWriter(folder, durable=durable)
    if way == FILES:
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(folder, sync_files=durable)
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    made = HuggingFaceStorageWriter(folder, save_distributed=True)
    made.sync_files = durable  # its constructor does not take that
    return made


def reader(way: str, folder: str) -> Any:
    if way == OURS:
        return importlib.import_module("zcrecord.distributed").ZcrStorageReader(folder)
    if way == FILES:
        from torch.distributed.checkpoint import FileSystemReader

        return FileSystemReader(folder)
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(folder)


def _state(way: str) -> dict[str, Any]:
    """Return the state to be saved; without the optimizer's settings for a format of tensors alone."""
    state: dict[str, Any] = _kept["state"]
    if way != HUGGING_FACE or "optim" not in state:
        return state
    return {**state, "optim": {"state": state["optim"]["state"]}}


def _settle(emptied: str | None = None) -> None:
    """Return freed memory to the system, empty a folder and write what others have left to the disk; then meet."""
    import torch.distributed as dist

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or a later peak would hide in what an earlier one has left
    if emptied and dist.get_rank() == 0:
        shutil.rmtree(emptied, ignore_errors=True)
        os.sync()
    dist.barrier()


def save(way: str, folder: str, durable: bool = True) -> dict[str, float]:
    """Save to a new folder; return the seconds, and by how much the peak of memory grew."""
    import torch.distributed.checkpoint as dcp

    made = writer(way, folder, durable=durable)
    _settle(folder)
    return timed(lambda: dcp.save(_state(way), storage_writer=made))


def save_in_background(way: str, folder: str, durable: bool = True) -> dict[str, float]:
    """Save likewise by `async_save`; return the seconds until it returns, too, and the bytes of the rank's tensors."""
    import torch.distributed.checkpoint as dcp

    made = writer(way, folder, durable=durable)
    returned = []

    def save_and_wait() -> None:
        start = time.perf_counter()
        saving = dcp.async_save(_state(way), storage_writer=made)
        returned.append(time.perf_counter() - start)
        getattr(saving, "upload_completion", saving).result()

    _settle(folder)
    nbytes = float(sum(tensor.to_local().nbytes for tensor in _tensors()))
    return {**timed(save_and_wait), "returned": returned[0], "nbytes": nbytes}


def load(way: str, folder: str) -> dict[str, float]:
    """Load into the state, which is zeros before; return the seconds, and by how much the peak of memory grew."""
    import torch.distributed.checkpoint as dcp

    for tensor in _tensors():
        tensor.to_local().zero_()
    _settle()
    return timed(lambda: dcp.load(_state(way), storage_reader=reader(way, folder)))


def load_views(folder: str) -> dict[str, float]:
    """Load the model as views, for one on the meta device; return the seconds, and how private memory grew."""
    import torch

    views = importlib.import_module("zcrecord.distributed").load_views
    layers, width, vocabulary, sharded = _kept["model"]
    with torch.device("meta"):
        weights = _sharded(_model(layers, width, vocabulary), sharded).state_dict()
    _kept.pop("views", None)
    _settle()
    before, start = private_bytes(), time.perf_counter()
    _kept["views"] = views(folder, {"model": weights})
    return {"seconds": time.perf_counter() - start, "private": float(private_bytes() - before)}
