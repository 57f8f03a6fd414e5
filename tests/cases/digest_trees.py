"""Records and archives of which every reader has to compute the same content digest."""

from __future__ import annotations

from typing import Any

import numpy as np
import records as r
from forge import Forge

BASE = np.arange(12, dtype=np.float32).reshape(3, 4)


def swapped(data: bytes, vector: str, *names: str) -> bytes:
    """Return an archive of which two children of a module, of these names, have each other's place."""
    f = Forge(data)
    places = [f.get(vector, name, "place") for name in names]
    for name, place in zip(names, reversed(places), strict=True):
        f.set(vector, name, place=place)
    return f.seal()


LISTS: dict[str, tuple[Any, str, tuple[str, str]]] = {
    "modules": ([{"w": BASE}, {"w": BASE + 1}], "modules", ("m.0", "m.1")),
    "tensors": ([BASE, BASE + 1], "tensors", ("m.0", "m.1")),
    "more than ten": ([np.full(2, i) for i in range(12)], "tensors", ("m.1", "m.10")),
    "a tuple": ((BASE, BASE + 1), "tensors", ("m.0", "m.1")),
    "a named tuple": (r.Pair(BASE, BASE + 1), "tensors", ("m.first", "m.second")),
}


def long_name() -> bytes:
    """Return an archive of a module with a name of 100 kB, and a hundred attributes in it."""
    f = Forge(r.saved({"m": {f"{i:03}": i for i in range(100)}}))
    start, size = f.text(b"x" * 100_000)
    return f.set("modules", 1, name=start, name_size=size, key_size=size).seal()
