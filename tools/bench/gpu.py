"""Loads 8 GiB to a GPU, warm and cold, beside the bandwidth of pinned copies, safetensors, fastsafetensors and Run:ai.

    python -m tools.bench.gpu                              # on a machine with a GPU; writes tools/bench/gpu.json
    python -m tools.bench.gpu --device cpu --gib 0.1       # tries the program where there is none

To be run by hand; it is no area of `python -m tools.bench`. It needs no network: the packages that are there take part.
The result has the form of tools/bench/results.json, and beside its rows

    missing    the packages and devices that this machine lacks, and what each would need
    failed     the ways that raised an error, with the error; the others are measured all the same

Each way runs in a process of its own. Warm: the ways take turns, each from an emptied allocator; the first turn, in
which memory is pinned, is told by itself. Cold: a new process for each load, once the file was dropped from the page
cache; a row says "cold" only if mincore(2) tells that not a page of it was left. What has arrived is compared.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.cold import cached_fraction, drop_cached
from tools.bench.harness import OURS, Promise, Row, collect, machine, require_disk, seconds_of, version_of, versions
from tools.bench.table import new_console, terminal_table
from tools.measure import MIB
from tools.worker import ROOT, Worker, WorkerError
from zcrecord import formats

AREA = "gpu"
RESULT = ROOT / "tools" / "bench" / "gpu.json"
PINNED, PLAIN = "pinned copy", "a plain read"
SAFETENSORS, FAST, RUNAI = "safetensors", "fastsafetensors, no GDS", "runai-model-streamer"
WIDER, EACH = f"{OURS}, 256 MiB in flight", f"{OURS}, record.torch(device)"
OWN = (OURS, WIDER, EACH)
PEERS = {SAFETENSORS: "safetensors", FAST: "fastsafetensors", RUNAI: "runai-model-streamer"}  # their packages
GIB = 8.0
MIB_EACH = 64  # of a tensor
TURNS, COLD_TURNS = 5, 3
NEARLY_ALL = 0.9  # of the pinned copy's bandwidth
WARM = 0.99  # of the pages
Load = Callable[[ExitStack], dict[str, Any]]


@dataclass
class _Findings:
    """Rows of a run, and what it lacked."""

    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the rows, and write the result; returns 1 if nothing was measured or a way failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gpu", description="zcrecord to a GPU, and others.")
    parser.add_argument("--gib", type=float, default=GIB, help=f"size of the model (default: {GIB:g})")
    parser.add_argument("--device", default="cuda:0", help="torch's name of it (default: cuda:0)")
    parser.add_argument("--json", type=Path, metavar="OUT", help=f"results file (a full run: {RESULT.name})")
    args = parser.parse_args(arguments)
    try:
        if why := _no_device(args.device):
            raise OSError(why)
        with tempfile.TemporaryDirectory(prefix="zcrecord-gpu-") as folder:
            found, result = _measure(Path(folder), args.device, max(1, round(args.gib * 1024 / MIB_EACH)))
    except OSError as error:  # of the disk, too, which says what to do
        print(f"{error}; nothing was measured", file=sys.stderr)
        return 1
    _show(found)
    whole = args.device.startswith("cuda") and args.gib == GIB and bool(found.rows)
    out = args.json or (RESULT if whole else None)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {out}")
    return 1 if found.failed or not found.rows else 0


def _no_device(device: str) -> str | None:
    """Return the reason why nothing can be loaded to a device here; None if it can."""
    try:
        import torch
    except ImportError:
        return "no torch: pip install torch, a build for CUDA"
    if device.startswith("cuda") and not torch.cuda.is_available():
        built = "is built for it and sees none" if torch.version.cuda else "is built without CUDA"
        return f"no GPU: torch {torch.__version__} {built}"
    return None


def _show(found: _Findings) -> None:
    console = new_console()
    console.print(terminal_table(found.rows))
    for row in found.rows:
        for name, figure in row.extra.get("gigabytes_per_second", {}).items():
            console.print(f"{row.work}: {name} {figure} GB/s", markup=False)
    for what, items in (("missing", found.missing), ("failed", found.failed)):
        for name, why in items.items():
            console.print(f"{what}: {name}: {why}", markup=False)


def _measure(folder: Path, device: str, count: int) -> tuple[_Findings, dict[str, Any]]:
    total = count * MIB_EACH * MIB
    require_disk(folder, 2 * total)
    found = _Findings()
    files = dict(zip(("ours", "theirs"), map(str, _write(folder, count)), strict=True))
    described = machine(folder)
    described |= _asked(found, "the device", "device_facts", device=device) or {"device": device}
    given = {"device": device, **files}
    ways = [*OWN, *_installed(found)]
    found.rows += _warm(found, [PINNED, *ways], given, total)
    found.rows += _cold(found, [PLAIN, *ways], given, total)
    known = versions() | {package: version_of(package) for package in PEERS.values()}
    rows = [row.as_json() for row in found.rows]
    whole = {"quick": count != round(GIB * 1024 / MIB_EACH), "machine": described, "versions": known, "rows": rows}
    return found, whole | {"missing": found.missing, "failed": found.failed}


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


def _installed(found: _Findings) -> Iterator[str]:
    """Yield the peers that are installed, and note the others as missing."""
    for way, package in PEERS.items():
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            found.missing[way] = f"not installed: pip install {package}"
        else:
            yield way


# Each way in a process of its own: an error, a crash or a context of one is not the others'.


def _asked(found: _Findings, way: str, name: str, /, worker: Worker | None = None, **arguments: Any) -> Any:
    """Return the result of one of this module's functions in a worker; None, and a note, if it failed."""
    target = f"tools.bench.gpu:{name}"  # not __name__, which may be __main__
    try:
        if worker is not None:
            return worker.call(target, **arguments)
        with Worker() as alone:
            return alone.call(target, **arguments)
    except WorkerError as error:
        found.failed[way] = str(error)
        return None


def _warm(found: _Findings, ways: Sequence[str], given: dict[str, Any], total: int) -> Iterator[Row]:
    """Yield the rows of files in the page cache, of every way that loads what the others do."""
    with ExitStack() as stack:
        workers = {way: stack.enter_context(Worker()) for way in ways}
        sums = {way: _asked(found, way, "loaded_sum", worker, way=way, **given) for way, worker in workers.items()}
        arrived = {way: number for way, number in sums.items() if number is not None and way != PINNED}
        usual = statistics.mode(arrived.values()) if arrived else None
        for way in [way for way, number in arrived.items() if number != usual]:
            found.failed[way] = "the tensors that it loaded are others"
        timed = {
            way: partial(_one, found, way, worker, given | {"nbytes": total})
            for way, worker in workers.items()
            if way not in found.failed
        }
        samples = {way: seconds for way, seconds in collect(TURNS + 1, timed).items() if way not in found.failed}
    if (cached := min(cached_fraction(given[file]) for file in ("ours", "theirs"))) < WARM:
        found.missing["warm files"] = f"the page cache holds {cached:.0%} of one; lower --gib"
    promises = [Promise("within", 1 / NEARLY_ALL, PINNED), *(Promise("faster", 1, peer) for peer in PEERS)]
    extra = {"cached": cached, "first": {way: seconds[0] for way, seconds in samples.items()}}
    yield from _rows(f"{_work(given, total)}, warm", {w: s[1:] for w, s in samples.items()}, total, promises, extra)


def _one(found: _Findings, way: str, worker: Worker, given: dict[str, Any]) -> float:
    seconds = None if way in found.failed else _asked(found, way, "load_seconds", worker, way=way, **given)
    return math.nan if seconds is None else float(seconds)


def _cold(found: _Findings, ways: Sequence[str], given: dict[str, Any], total: int) -> Iterator[Row]:
    """Yield the rows of files that are not in the page cache; none, and a note, where they stay in it."""
    samples: dict[str, list[float]] = {}
    left = 0.0
    for _ in range(COLD_TURNS):
        for way in ways:
            cost = None if way in found.failed else _asked(found, way, "cold_load", way=way, **given)
            if cost is not None:
                samples.setdefault(way, []).append(cost["seconds"])
                left = max(left, cost["cached"])
    if left:
        found.missing["cold files"] = f"{left:.1%} of one stayed in the page cache; set TMPDIR to a disk's file system"
        return
    samples = {way: seconds for way, seconds in samples.items() if way not in found.failed}
    promises = [Promise("faster", 1, peer) for peer in PEERS]
    yield from _rows(f"{_work(given, total)}, cold", samples, total, promises, {"cached": left})


def _work(given: dict[str, Any], total: int) -> str:
    return f"{total / 1e9:.1f} GB to {given['device']}"


def _rows(
    work: str, samples: dict[str, list[float]], total: int, promises: Sequence[Promise], extra: dict[str, Any]
) -> Iterator[Row]:
    """Yield a row of our ways and the floors, which has the first promise, and one for each peer that took part."""
    medians = {way: statistics.median(seconds) for way, seconds in samples.items()}
    if OURS not in medians:
        return
    speeds = {way: round(total / seconds / 1e9, 2) for way, seconds in medians.items()}
    extra = {**extra, "gigabytes_per_second": speeds, "seconds": samples}
    kept = [promise for promise in promises if promise.peer in medians]
    first = kept.pop(0) if kept and kept[0].peer not in PEERS else None
    own = {way: seconds for way, seconds in medians.items() if way not in PEERS}
    yield Row(AREA, work, "s", own, first, samples=len(samples[OURS]), extra=extra)
    for promise in kept:
        values = {way: medians[way] for way in (OURS, str(promise.peer))}
        yield Row(AREA, work, "s", values, promise, samples=len(samples[OURS]))


def device_facts(device: str) -> dict[str, Any]:
    """Return the name and memory of a device, and the versions of torch and CUDA."""
    import torch

    where = torch.device(device)
    facts: dict[str, Any] = {"device": device, "torch": torch.__version__}
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        memory = properties.total_memory // MIB
        facts |= {"device": properties.name, "device_memory_mib": memory, "cuda": torch.version.cuda}
    return facts


# What the processes do.


def loaded_sum(way: str, device: str, ours: str, theirs: str) -> int:
    """Load one way; return a number that tells whether the same has arrived, each word in its place."""
    import torch

    if way == PINNED:
        return 0
    out = 0
    with ExitStack() as stack:
        tensors = _loads(way, torch.device(device), ours, theirs)(stack)
        for i, name in enumerate(sorted(tensors)):
            assert tensors[name].device == torch.device(device), tensors[name].device
            words = tensors[name].view(torch.int32).flatten()
            places = torch.arange(len(words), device=words.device) % 65521
            out += (i + 1) * int((words * places).sum())
        tensors.clear()
    _empty(torch.device(device))
    return out


def load_seconds(way: str, device: str, ours: str, theirs: str, *, nbytes: int) -> float:
    """Return the seconds to load all tensors one way, or to copy `nbytes` from pinned memory."""
    import torch

    where = torch.device(device)
    _empty(where)
    seconds = _copy_seconds(where, nbytes) if way == PINNED else _load_seconds(_loads(way, where, ours, theirs), where)
    _empty(where)  # the other processes need the room
    return seconds


def _load_seconds(load: Load, device: Any) -> float:
    tensors: dict[str, Any] = {}

    def load_all() -> None:
        tensors.update(load(stack))
        _synchronize(device)

    with ExitStack() as stack:
        seconds = seconds_of(load_all)
        tensors.clear()
    return seconds


def cold_load(way: str, device: str, ours: str, theirs: str) -> dict[str, float]:
    """Drop a way's file from the page cache and load it; return the fraction that was left of it, and the seconds."""
    import torch

    where = torch.device(device)
    torch.ones(1, device=where).sum().item()  # a context takes a second, which is no part of loading
    _loads(way, where, ours, theirs)  # imports are none, either
    path = theirs if way in PEERS else ours
    drop_cached(path)
    return {"cached": cached_fraction(path), "seconds": load_seconds(way, device, ours, theirs, nbytes=0)}


def _loads(way: str, device: Any, ours: str, theirs: str) -> Load:
    """Return a function that opens a file and loads it one way; imports what it takes.

    Its argument closes what the tensors lie in, when they are no longer wanted.
    """
    if way in PEERS:
        module = importlib.import_module("safetensors.torch" if way == SAFETENSORS else PEERS[way].replace("-", "_"))
        load = {SAFETENSORS: _safetensors, FAST: _fast, RUNAI: _streamed}[way]
        return partial(load, module, theirs, device)
    if way == PLAIN:
        return partial(_read, ours)
    if way == EACH:
        return lambda _: zcrecord.load_record(ours).torch(device, writable=False)
    from zcrecord.loaders import load_into
    from zcrecord.loaders.plan import MAX_IN_FLIGHT
    from zcrecord.loaders.torch import TorchLoader

    most = 256 * MIB if way == WIDER else MAX_IN_FLIGHT
    # Not the device's name: for "cpu" that gives views of the mapping.
    return lambda _: load_into(zcrecord.load_record(ours), TorchLoader(device), max_in_flight=most)


def _safetensors(module: Any, path: str, device: Any, _: ExitStack) -> dict[str, Any]:
    loaded: dict[str, Any] = module.load_file(path, device=str(device))
    return loaded


def _fast(module: Any, path: str, device: Any, stack: ExitStack) -> dict[str, Any]:
    """Load as the project's own example does; tensors lie in its buffers."""
    loader = module.SafeTensorsFileLoader(module.SingleGroup(), str(device), nogds=True)
    stack.callback(loader.close)
    loader.add_filenames({0: [path]})
    buffers = loader.copy_files_to_device()
    stack.callback(buffers.close)
    return {name: buffers.get_tensor(name) for name in loader.get_keys()}


def _streamed(module: Any, path: str, device: Any, _: ExitStack) -> dict[str, Any]:
    """Load as vLLM does: the tensors that the streamer yields are the caller's."""
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_file(path, device=str(device))
        return dict(streamer.get_tensors())


def _read(path: str, _: ExitStack) -> dict[str, Any]:
    buffer = memoryview(bytearray(16 * MIB))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return {}


def _copy_seconds(device: Any, nbytes: int) -> float:
    """Return the seconds to copy that many bytes from pinned memory, too much for a cache: what the bus can do."""
    import torch

    source = torch.zeros(min(nbytes, 1024 * MIB), dtype=torch.uint8, pin_memory=device.type == "cuda")
    targets = torch.empty(nbytes, dtype=torch.uint8, device=device).split(64 * MIB)

    def copy_all() -> None:
        for i, target in enumerate(targets):
            at = i * 64 * MIB % len(source)
            target.copy_(source[at : at + len(target)], non_blocking=True)
        _synchronize(device)

    _synchronize(device)
    return seconds_of(copy_all)


def _empty(device: Any) -> None:
    import torch

    gc.collect()
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
