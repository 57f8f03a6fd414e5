"""Arrays of jax that are sharded by rows over eight devices, against orbax and safetensors' slices by hand.

The devices are made of this machine's CPU. orbax is left out where it is not installed (pip install orbax-checkpoint).
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness import OURS, Promise, Row, Settings, medians, require_disk, seconds_of
from tools.measure import MIB, private_bytes
from tools.worker import Worker, call_alone

AREA = "jax"
BY_HAND, ORBAX = "safetensors by hand", "orbax"
DEVICES = 8
MATRICES = 16


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of the area."""
    side = settings.pick(4096, 256)
    total = MATRICES * side * side * 4
    require_disk(settings.folder, 4 * total)
    ways = [OURS, BY_HAND, *([ORBAX] if importlib.util.find_spec("orbax") else [])]
    call_alone("tools.bench.jax:save_all", folder=str(settings.folder), side=side, ways=ways)
    repeats = settings.pick(7, 1)
    with ExitStack() as stack:
        restore = {way: partial(stack.enter_context(Worker()).call, "tools.bench.jax:restore_seconds") for way in ways}
        calls = {way: partial(call, way=way, folder=str(settings.folder)) for way, call in restore.items()}
        seconds = medians(repeats, calls, uncounted=1)
    work = f"jax, {total / 1e9:.1f} GB in {MATRICES} matrices over {DEVICES} devices of one CPU, rows"
    yield Row(AREA, f"{work}: ready", "s", seconds, Promise("under", max(0.01 * total / 1e9, 0.01)), samples=repeats)
    grown = partial(call_alone, "tools.bench.jax:private_growth", folder=str(settings.folder))
    private = {way: float(grown(way=way)) for way in ways}
    yield Row(AREA, f"{work}: private memory", "B", private, Promise("under", 4 * MIB))


# -- in the worker ---------------------------------------------------------------------------------------------------


def _sharding() -> Any:
    """Return a sharding over eight devices, which are made of the CPU before jax is imported."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ.update(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))


def save_all(folder: str, side: int, ways: list[str]) -> None:
    """Save the same square matrices as an archive, as safetensors, and sharded with orbax: 16 of 4096^2 are 1.1 GB."""
    sharding = _sharding()
    import jax
    from safetensors.numpy import save_file

    import zcrecord

    values = np.random.default_rng(0)
    matrices = {f"blocks.{i}.weight": values.random((side, side), np.float32) for i in range(MATRICES)}
    zcrecord.save_record(matrices, Path(folder, "m.zcr"))
    save_file(matrices, Path(folder, "m.safetensors"))
    if ORBAX in ways:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as saver:
            saver.save(Path(folder, "orbax"), {name: jax.device_put(a, sharding) for name, a in matrices.items()})
    os.sync()


def _restored(way: str, folder: str, sharding: Any) -> Any:
    """Return the sharded arrays, restored one way."""
    import jax

    if way == OURS:
        import zcrecord

        found: Any = zcrecord.load_record(Path(folder, "m.zcr")).jax(shardings=sharding)
    elif way == ORBAX:
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


def restore_seconds(way: str, folder: str) -> float:
    """Restore all matrices one way; return the seconds until they are ready."""
    sharding = _sharding()
    gc.collect()
    return seconds_of(lambda: _restored(way, folder, sharding))


def private_growth(way: str, folder: str) -> int:
    """Return by how much the private memory of this process grows while all matrices are restored one way."""
    sharding = _sharding()
    import jax

    jax.block_until_ready(jax.device_put(np.zeros((DEVICES, DEVICES), np.float32), sharding))
    gc.collect()
    before = private_bytes()
    kept = _restored(way, folder, sharding)
    gc.collect()
    assert all(array.sharding == sharding for array in kept.values())
    return private_bytes() - before
