"""Archives over HTTP: one small tensor of a large archive, all tensors at once against one by one, parts of tensors.

The server runs on this machine and waits before each answer, as a distant one would have it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, Settings, median_seconds
from tools.range_server import Server, serving
from zcrecord.loaders import load_into, shard

AREA = "remote"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LARGE = 9  # tensors beside the small one
ROUND_TRIP = 0.02  # seconds that the server waits before it answers: another continent's are 0.1 and more
ONE_BY_ONE = "one by one"
ALL = "all of it"
RANKS = 4


class _Holes:
    """A file object that skips what is written in pieces of one size: payloads, here all zeros, become holes."""

    def __init__(self, file: Any, piece: int) -> None:
        self._file, self._piece = file, piece

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        if nbytes != self._piece:
            return int(self._file.write(data))
        self._file.seek(nbytes, 1)
        return nbytes


def write_sparse(path: Path, nbytes: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Write an archive of 10 tensors: `small`, of 16 KiB, which is returned, amid 9 of zeros that take no disk.

    All of them are a little more than `nbytes` together.
    """
    each = nbytes // LARGE // MIB * MIB + MIB
    small = np.random.default_rng(0).standard_normal(4 * KIB).astype(np.float32)
    with mmap.mmap(-1, each) as space, path.open("wb") as file:
        # Lazy ones are written as they come, the index last: what is hardest for who reads.
        record: dict[str, Any] = {
            f"large.{i}": zcrecord.LazyTensor("float32", (each // 4,), lambda: [space]) for i in range(LARGE)
        }
        last = record.pop(f"large.{LARGE - 1}")
        record |= {"small": small, "last": last}  # between others, where no other request brings it along
        zcrecord.save_record(record, _Holes(file, each))
    return small


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of the area."""
    with serving(settings.folder) as server:
        yield from _one_tensor(settings, server)
        yield _all_tensors(settings, server)
        server.delay = 0
        yield from _parts(settings, server)


def _one_tensor(settings: Settings, server: Server) -> Iterator[Row]:
    path = settings.folder / "sparse.zcr"
    size = settings.pick(GIB, 16 * MIB)
    write_sparse(path, size)
    zcrecord.load_record(f"{server.url}/sparse.zcr")["small"].sum()
    path.unlink()
    work = f"one 16 KiB tensor of an archive of {size // MIB} MiB over HTTP (10 tensors)"
    yield Row(AREA, f"{work}: requests", "", {OURS: len(server.requests)}, Promise("under", 4))
    yield Row(AREA, f"{work}: bytes fetched", "B", {OURS: server.sent}, Promise("under", 256 * KIB))


def _all_tensors(settings: Settings, server: Server) -> Row:
    count = settings.pick(100, 25)
    values = np.random.default_rng(0).standard_normal((count, 256, 64)).astype(np.float32)
    zcrecord.save_record({f"layers.{i}.weight": values[i] for i in range(count)}, settings.folder / "many.zcr")
    server.delay = ROUND_TRIP
    url = f"{server.url}/many.zcr"

    def one_by_one() -> None:
        rec = zcrecord.load_record(url)
        for name in rec:
            rec[name]

    ways = {OURS: lambda: list(zcrecord.load_record(url).values()), ONE_BY_ONE: one_by_one}
    repeats = settings.pick(3, 1)
    seconds = median_seconds(repeats, ways)
    work = f"all {count} tensors of 64 KiB over HTTP, {ROUND_TRIP * 1000:.0f} ms a round trip"
    return Row(AREA, work, "s", seconds, Promise("faster", 5, ONE_BY_ONE), samples=repeats)


def _parts(settings: Settings, server: Server) -> Iterator[Row]:
    """Yield the rows of what one of several ranks fetches: bytes that were sent, and seconds."""
    side = settings.pick(4096, 512)
    shapes = {"": (16, side, side), " of long rows": (16, side // 32, side * 32)}
    for kind, (count, rows, columns) in shapes.items():
        values = np.random.default_rng(0)
        path = settings.folder / "parts.zcr"
        tree = {f"layers.{i}.weight": values.random((rows, columns), np.float32) for i in range(count)}
        zcrecord.save_record(tree, path, durable=False)
        del tree
        record = zcrecord.load_record(f"{server.url}/parts.zcr", cache=False)
        for axis, what in enumerate(("rows", "columns")):
            if kind and not axis:
                continue
            ways: dict[str, dict[str, Any]] = {OURS: {"slices": {"*": shard(0, RANKS, axis)}}, ALL: {}}
            sent: dict[str, float] = {}
            for name, options in ways.items():
                server.forget()
                load_into(record, "host", **options)
                sent[name] = server.sent
            calls = {name: partial(load_into, record, "host", **options) for name, options in ways.items()}
            repeats = settings.pick(3, 1)
            seconds = median_seconds(repeats, calls)
            work = f"{what}{kind} of one rank of {RANKS}, {count} matrices of {path.stat().st_size / 1e9:.1f} GB, HTTP"
            yield Row(AREA, f"{work}: bytes fetched", "B", sent)
            yield Row(AREA, work, "s", seconds, samples=repeats)
        path.unlink()
