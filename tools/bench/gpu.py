"""8 GiB to a GPU: against the bandwidth of a pinned copy, against safetensors, and against fastsafetensors without GDS.

    python -m tools.bench.gpu --json gpu.json

To be run by hand on a machine that has one; it is no area of `python -m tools.bench`. Files are warm in the page cache.
All ways take turns, each from an emptied allocator; the first turn, in which memory is pinned, is told by itself.
What has arrived is compared among them. `--device cpu --gib 0.1` tries the program where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, collect, machine, require_disk, versions
from tools.measure import MIB
from zcrecord import formats
from zcrecord.loaders import load_into
from zcrecord.loaders.torch import TorchLoader

__all__ = ["main"]

AREA = "gpu"
PINNED = "pinned copy"
SAFETENSORS, FAST = "safetensors", "fastsafetensors, no GDS"
WIDER, READS, MAPPED = f"{OURS}, 256 MiB in flight", f"{OURS}, reads=True", "tensor.to(device), one by one"
MIB_EACH = 64  # of a tensor
TURNS = 5
Way = Callable[[], dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the result as JSON, and return 0; 1 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gpu", description="zcrecord to a GPU, and others.")
    parser.add_argument("--gib", type=float, default=8, help="size of the model (default: 8)")
    parser.add_argument("--device", default="cuda:0", help="torch's name of it (default: cuda:0)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where the result goes, too")
    args = parser.parse_args(arguments)
    import torch

    if args.device != "cpu" and not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees none; nothing was measured", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="zcrecord-gpu-") as folder:
        result = _measure(Path(folder), torch.device(args.device), max(1, round(args.gib * 1024 / MIB_EACH)))
    text = json.dumps(result, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _measure(folder: Path, device: Any, count: int) -> dict[str, Any]:
    import torch

    total = count * MIB_EACH * MIB
    require_disk(folder, 3 * total)
    ours, theirs = _write(folder, count)
    ways = _ways(ours, theirs, device)
    sums = {name: _sum(way()) for name, way in ways.items()}  # warms the page cache, too
    if len(set(sums.values())) > 1:
        raise ValueError(f"not all ways loaded the same: {sums}")
    timed = {PINNED: partial(_copy_seconds, device, count)} | {n: partial(_seconds, w, device) for n, w in ways.items()}
    samples = collect(TURNS + 1, timed)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in samples.items()}
    work = f"{total / 1e9:.1f} GB in {count} tensors to {device}, files warm"
    return {
        "machine": machine(folder) | {"device": _device_name(device), "torch": torch.__version__},
        "versions": versions() | {"fastsafetensors": _version("fastsafetensors")},
        "rows": [row.as_json() for row in _rows(work, medians)],
        "gigabytes_per_second": {name: round(total / seconds / 1e9, 2) for name, seconds in medians.items()},
        "seconds": samples,
    }


def _rows(work: str, medians: dict[str, float]) -> Iterator[Row]:
    promises = [Promise("within", 1 / 0.8, PINNED), Promise("faster", 1, SAFETENSORS), Promise("faster", 1, FAST)]
    for promise in promises:
        if promise.peer in medians:
            yield Row(AREA, work, "s", medians, promise, samples=TURNS)


def _write(folder: Path, count: int) -> tuple[Path, Path]:
    """Write the same bfloat16 tensors as an archive and as safetensors, one held at a time."""
    ours, theirs = folder / "gpu.zcr", folder / "gpu.safetensors"
    shape = (MIB_EACH, MIB // 2)
    words = np.random.default_rng(0).integers(0, 1 << 14, shape, np.uint16)  # as bfloat16 all finite

    def produce(i: int) -> list[bytes]:
        return [np.roll(words, i).tobytes()]  # no tensor like another

    record = {f"blocks.{i}.weight": zcrecord.LazyTensor("bfloat16", shape, partial(produce, i)) for i in range(count)}
    zcrecord.save_record(record, ours)
    formats.convert(ours, theirs)
    return ours, theirs


def _ways(ours: Path, theirs: Path, device: Any) -> dict[str, Way]:
    record = zcrecord.load_record(ours)

    def safetensors() -> dict[str, Any]:
        from safetensors.torch import load_file

        loaded: dict[str, Any] = load_file(theirs, device=str(device))
        return loaded

    ways: dict[str, Way] = {
        OURS: lambda: load_into(record, TorchLoader(device)),
        WIDER: lambda: load_into(record, TorchLoader(device), max_in_flight=256 * MIB),
        READS: lambda: load_into(record, TorchLoader(device, reads=True)),
        MAPPED: lambda: {n: t.to(device, copy=True) for n, t in record.torch(writable=False).items()},
        SAFETENSORS: safetensors,
    }
    if importlib.util.find_spec("fastsafetensors") is not None:
        ways[FAST] = lambda: _fast(theirs, device)
    return ways


def _fast(path: Path, device: Any) -> dict[str, Any]:
    """Load as the project's own example does; tensors lie in its buffers, which they have to be kept with."""
    library: Any = importlib.import_module("fastsafetensors")  # not among this project's own needs
    loader = library.SafeTensorsFileLoader(library.SingleGroup(), device, nogds=True)
    loader.add_filenames({0: [str(path)]})
    buffers = loader.copy_files_to_device()
    return _Kept({name: buffers.get_tensor(name) for name in loader.get_keys()}, buffers, loader)


class _Kept(dict[str, Any]):
    """Tensors, with what has to be closed when they are no longer wanted."""

    def __init__(self, tensors: dict[str, Any], *owners: Any) -> None:
        super().__init__(tensors)
        self._owners = owners

    def close(self) -> None:
        self.clear()
        for owner in self._owners:
            owner.close()


def _seconds(way: Way, device: Any) -> float:
    _empty(device)
    start = time.perf_counter()
    kept = way()
    _synchronize(device)
    seconds = time.perf_counter() - start
    _let_go(kept)
    return seconds


def _copy_seconds(device: Any, count: int) -> float:
    """Return the seconds to copy that many bytes from pinned memory, too much for a cache: what the bus can do."""
    import torch

    _empty(device)
    few, each = min(count, 16), MIB_EACH * MIB
    source = torch.zeros((few, each), dtype=torch.uint8, pin_memory=device.type == "cuda")
    targets = [torch.empty(each, dtype=torch.uint8, device=device) for _ in range(count)]
    _synchronize(device)
    start = time.perf_counter()
    for i, target in enumerate(targets):
        target.copy_(source[i % few], non_blocking=True)
    _synchronize(device)
    return time.perf_counter() - start


def _sum(tensors: dict[str, Any]) -> int:
    """Return a number that tells whether the same has arrived, each word in its place."""
    import torch

    out = 0
    for i, name in enumerate(sorted(tensors)):
        words = tensors[name].view(torch.int32).flatten()
        places = torch.arange(len(words), device=words.device) % 65521
        out += (i + 1) * int((words * places).sum())
    _let_go(tensors)
    return out


def _let_go(tensors: dict[str, Any]) -> None:
    if isinstance(tensors, _Kept):
        tensors.close()
    tensors.clear()


def _empty(device: Any) -> None:
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else str(device)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
