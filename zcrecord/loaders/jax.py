"""Tensors as jax's arrays that are sharded over devices: each process reads its devices' shards alone.

`frameworks.jax` has arrays on one device, and the rules of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import starmap
from typing import Any

import numpy as np

from zcrecord.archive import subset
from zcrecord.archive.archive import Archive
from zcrecord.archive.subset import Names
from zcrecord.errors import UnsupportedError, printable
from zcrecord.frameworks.jax import as_jax_input, beside_jax_views, checked_dtypes, import_jax

from .boxes import Bounds, bounds_of
from .host import MappedLoader
from .plan import first_match, views_of
from .protocol import Target


def sharded_arrays(archive: Archive, names: Names | None = None, *, shardings: Any) -> dict[str, Any]:
    """Return jax arrays by name, in saved order, each with the sharding that is asked for.

    This process reads the shards of its own devices, each once. Of a remote archive only their ranges are fetched, as
    by `load_into` with boxes; of a tensor that is split over shards of a catalogue only the pieces that they meet are
    read. On the CPU a shard whose bytes follow one another lies on the archive's own memory, where it starts at a
    multiple of 64; other shards are copied once, and all of a record of mode "c". Tied tensors with one sharding are
    one array. Tensors that jax has no type for, such as strings, come as the record's own views, on no device.

    Args:
        archive: an opened archive.
        names: as `Record.select` takes them; None for all.
        shardings: a `jax.sharding.Sharding` for all tensors; or several by name or pattern, of which the first that
            matches counts. Tensors without one lie on the default device.

    Raises:
        DependencyError: jax is not installed. TensorNotFoundError: a name without wildcards is not there.
        UnsupportedError: a sharding does not divide its tensor, or is of another type; jax would make 32 bits of a
        tensor's 64; or a shard of packed elements does not start and end on whole bytes.

    Example:
        >>> import jax, numpy as np, zcrecord
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> rows = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec("x"))
        >>> _ = zcrecord.save_record({"w": np.ones((8, 3), np.float32), "b": np.zeros(3, np.float32)}, "model.zcr")
        >>> zcrecord.load_record("model.zcr").jax(shardings={"w": rows})["w"].sharding == rows
        True
    """
    jax = import_jax()
    if names is not None:
        archive = subset.select(archive, names, None)
    sharding_of = _sharding_chooser(jax, shardings, archive)
    return beside_jax_views(archive, None, lambda part: _load_sharded(jax, part, sharding_of))


def _load_sharded(jax: Any, archive: Archive, sharding_of: Callable[[str], Any]) -> dict[str, Any]:
    """Return the tensors, of element types that jax has, as arrays by name, each with its sharding."""
    names, jax_dtypes = archive.names(), checked_dtypes(jax, archive)
    shardings = [sharding_of(name) for name in names]
    local_boxes = [_local_boxes(archive, i, names[i], sharding) for i, sharding in enumerate(shardings)]
    slices = [[tuple(starmap(slice, bounds)) for bounds in boxes] for boxes in local_boxes]
    targets = views_of(archive, dict(zip(names, slices, strict=True)))
    view_of = _view_maker()
    shared: dict[Any, Any] = {}
    arrays: dict[str, Any] = {}
    for i, (name, sharding, boxes) in enumerate(zip(names, shardings, local_boxes, strict=True)):
        parts = [targets[name, k] for k in range(len(boxes))]
        key = (sharding, *map(id, parts))  # equal for tied tensors
        if key not in shared or not parts:
            shards = {bounds: as_jax_input(view_of(target)) for bounds, target in zip(boxes, parts, strict=True)}
            if archive.mode == "c":  # else jax's arrays would change with the record's
                shards = {bounds: view.copy() for bounds, view in shards.items()}
            shared[key] = _array(jax, archive.shape(archive.row(i)), jax_dtypes[i], sharding, shards)
        arrays[name] = shared[key]
    return arrays


def _sharding_chooser(jax: Any, shardings: Any, archive: Archive) -> Callable[[str], Any]:
    """Return a function that gives the sharding of a tensor by name, None for the default device."""
    if isinstance(shardings, jax.sharding.Sharding):
        return lambda _: shardings
    if not isinstance(shardings, Mapping):
        fault = "shardings= takes a Sharding, or several by name or pattern"
        raise UnsupportedError(f"{fault}, {_not_a_sharding(shardings)}")
    for key, sharding in shardings.items():
        if not isinstance(key, str) or not isinstance(sharding, jax.sharding.Sharding):
            fault = f"shardings= maps {printable(repr(key))} to a Sharding"
            raise UnsupportedError(f"{fault}, {_not_a_sharding(sharding)}")
    return first_match(shardings, archive)


def _not_a_sharding(value: Any) -> str:
    return f"not a {type(value).__name__}; jax.sharding.NamedSharding(mesh, PartitionSpec(...)) makes one"


def _local_boxes(archive: Archive, i: int, name: str, sharding: Any) -> list[Bounds]:
    """Return the distinct boxes of a tensor that devices of this process have; without a sharding all of it."""
    shape = archive.shape(archive.row(i))
    if sharding is None:
        return [bounds_of((), shape)]
    try:
        sharding.check_compatible_aval(shape)
        indices = sharding.addressable_devices_indices_map(shape).values()
    except (ValueError, IndexError, TypeError) as error:
        reason, _, _ = str(error).partition("\n")
        message = f"its shape {shape} cannot be sharded so: {reason}"
        raise UnsupportedError(message, path=archive.path, tensor=name) from error
    return list(dict.fromkeys(bounds_of(index, shape) for index in indices))


def _view_maker() -> Callable[[Target], Any]:
    """Return a function that makes views of targets in memory; those of one payload lie over the same bytes."""
    loader, loaded = MappedLoader(), dict[int, Any]()

    def view_of(target: Target) -> Any:
        ref, view = target
        if id(ref) not in loaded:
            loaded[id(ref)] = loader.load(ref)
        return loaded[id(ref)] if view is None else loader.view(loaded[id(ref)], view)

    return view_of


def _array(jax: Any, shape: tuple[int, ...], dtype: Any, sharding: Any, shards: dict[Bounds, Any]) -> Any:
    """Return a jax array made of this process' shards; without a sharding, of the one shard on the default device."""
    if sharding is None:
        (view,) = shards.values()
        return jax.device_put(view)
    if shards:
        return jax.make_array_from_callback(shape, sharding, lambda index: shards[bounds_of(index, shape)])
    zeros = np.broadcast_to(np.zeros((), dtype), shape)  # no device of this process has any of it; jax may ask anyway
    return jax.make_array_from_callback(shape, sharding, lambda _: zeros, dtype=dtype)
