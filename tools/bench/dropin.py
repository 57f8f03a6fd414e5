"""A genuine safetensors file of 10,000 tensors read through the stand-in for safetensors, beside safetensors itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tools.bench.harness import BURST, OURS, Promise, Row, Settings, median_seconds
from tools.bench.peers import PEERS, SAFETENSORS
from tools.bench.small import COUNT, make_tensors

AREA = "dropin"
PACKAGES = {OURS: "zcrecord.compat.safetensors", SAFETENSORS: "safetensors"}  # only the import differs


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of one tensor, and of all of them, taken in the ways that people write."""
    count = settings.pick(COUNT, 500)
    tensors = make_tensors(count)
    path = settings.folder / "dropin.safetensors"
    PEERS[SAFETENSORS].save(path, tensors)
    wanted = iter(np.random.default_rng(1).integers(0, count, 1 << 20).tolist())
    names = list(tensors)

    def one(package: str) -> object:
        with importlib.import_module(package).safe_open(path, framework="np") as file:
            return file.get_tensor(names[next(wanted)])

    def each(package: str) -> dict[str, Any]:
        with importlib.import_module(package).safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # safetensors' is no mapping

    def load_file(module: str, package: str) -> object:
        return importlib.import_module(f"{package}.{module}").load_file(path)

    ways: dict[str, tuple[Callable[[str], object], float]] = {
        "open and get one": (one, 2),
        "load_file, numpy": (partial(load_file, "numpy"), 1.1),
        "get_tensor for each of f.keys(), numpy": (each, 1.1),
        "load_file, torch": (partial(load_file, "torch"), 1.1),
    }
    repeats = settings.pick(15, 1)
    for what, (way, limit) in ways.items():
        seconds = median_seconds(repeats, {name: partial(way, package) for name, package in PACKAGES.items()})
        work = f"drop-in, a .safetensors of {count:,} x 1 KB: {what}"
        yield Row(AREA, work, "s", seconds, Promise("within", limit, SAFETENSORS), samples=repeats * BURST)
