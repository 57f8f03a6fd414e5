"""Arrays of jax that are sharded over eight devices, against orbax and against safetensors' slices by hand.

The devices are made of this machine's CPU. orbax is left out where it is not installed (pip install orbax-checkpoint).
"""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.harness import OURS, Promise, Row, Settings, collect, require_disk
from tools.bench.loading import MATRICES, make_matrices
from tools.measure import MIB, memory
from tools.worker import Worker, call_alone

AREA = "jax"
BY_HAND, ORBAX = "safetensors by hand", "orbax"
DEVICES = 8


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of the area."""
    side = settings.pick(4096, 256)
    total = MATRICES * side * side * 4
    require_disk(settings.folder, 4 * total)
    ways = {OURS: "ours", BY_HAND: "by hand"}
    if importlib.util.find_spec("orbax"):
        ways[ORBAX] = "orbax"
    call_alone("tools.bench.jax:save_all", folder=str(settings.folder), side=side, ways=list(ways.values()))
    repeats = settings.pick(7, 1)
    for what in ("rows", "columns"):
        seconds = _medians(settings.folder, repeats, ways, what)
        work = f"jax, {total / 1e9:.1f} GB in {MATRICES} matrices over {DEVICES} devices of one CPU, {what}"
        promise = Promise("under", max(0.01 * total / 1e9, 0.01)) if what == "rows" else None
        yield Row(AREA, f"{work}: ready", "s", seconds, promise, samples=repeats)
        alone = partial(call_alone, "tools.bench.jax:private_growth", folder=str(settings.folder), what=what)
        private = {name: float(alone(way=way)) for name, way in ways.items()}
        promise = Promise("under", 4 * MIB) if what == "rows" else None
        yield Row(AREA, f"{work}: private memory", "B", private, promise)


def _medians(folder: Path, repeats: int, ways: dict[str, str], what: str) -> dict[str, float]:
    """Return the median seconds of each way, each in a process of its own, after one call that is not counted."""
    target = "tools.bench.jax:restore_seconds"
    calls: dict[str, Callable[[], float]] = {}
    workers = [Worker() for _ in ways]
    try:
        for worker, (name, way) in zip(workers, ways.items(), strict=True):
            calls[name] = partial(worker.call, target, way=way, folder=str(folder), what=what)
        collect(1, calls)
        return {name: statistics.median(seconds) for name, seconds in collect(repeats, calls).items()}
    finally:
        for worker in workers:
            worker.__exit__(None, None, None)


# -- in the worker ---------------------------------------------------------------------------------------------------


def _sharding(what: str) -> Any:
    """Return a sharding over eight devices, which are made of the CPU before jax is imported."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ.update(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))
    return NamedSharding(mesh, PartitionSpec("x") if what == "rows" else PartitionSpec(None, "x"))


def save_all(folder: str, side: int, ways: list[str]) -> None:
    """Save the same matrices as an archive, as safetensors, and sharded by rows with orbax."""
    sharding = _sharding("rows")
    import jax
    from safetensors.numpy import save_file

    import zcrecord

    matrices = make_matrices(side)
    zcrecord.save_record(matrices, Path(folder, "m.zcr"))
    save_file(matrices, Path(folder, "m.safetensors"))
    if "orbax" in ways:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as saver:
            saver.save(Path(folder, "orbax"), {name: jax.device_put(a, sharding) for name, a in matrices.items()})
    os.sync()


def _restored(way: str, folder: str, sharding: Any) -> Any:
    """Return the sharded arrays, restored one way."""
    import jax

    if way == "ours":
        import zcrecord

        found: Any = zcrecord.load_record(Path(folder, "m.zcr")).jax(shardings=sharding)
    elif way == "orbax":
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as saver:
            shapes = saver.metadata(Path(folder, "orbax")).item_metadata.tree
            wanted = {n: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=sharding) for n, m in shapes.items()}
            found = saver.restore(Path(folder, "orbax"), wanted)
    else:
        from safetensors import safe_open

        found = {}
        with safe_open(Path(folder, "m.safetensors"), framework="np") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                part = file.get_slice(name)
                found[name] = jax.make_array_from_callback(tuple(part.get_shape()), sharding, part.__getitem__)
    return jax.block_until_ready(found)


def restore_seconds(way: str, folder: str, what: str) -> float:
    """Restore all matrices one way; return the seconds until they are ready."""
    sharding = _sharding(what)
    gc.collect()
    start = time.perf_counter()
    kept = _restored(way, folder, sharding)
    seconds = time.perf_counter() - start
    assert all(array.sharding == sharding for array in kept.values())
    return seconds


def private_growth(way: str, folder: str, what: str) -> int:
    """Return by how much the private memory of this process grows while all matrices are restored one way."""
    sharding = _sharding(what)
    import jax
    import numpy as np

    jax.block_until_ready(jax.device_put(np.zeros((DEVICES, DEVICES), np.float32), sharding))
    gc.collect()
    before = memory()
    kept = _restored(way, folder, sharding)
    gc.collect()
    after = memory()
    del kept
    return ((after and after.private) or 0) - ((before and before.private) or 0)
