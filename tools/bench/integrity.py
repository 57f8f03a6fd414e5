"""Cost of checks: digests beside reading the same bytes once with numpy, the index beside safetensors.

The bytes are those of a mapped file in the page cache. Each call opens the file anew, so that all find the mapping's
pages unmapped, and all pay for mapping them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import BURST, OURS, Promise, Row, Settings, collect, median_seconds, require_disk
from tools.bench.large import make_buffers
from tools.bench.peers import PEERS, SAFETENSORS
from tools.bench.small import make_tensors
from tools.measure import MIB
from zcrecord.archive import damage
from zcrecord.storage.threads import cores

AREA = "integrity"
SUM = "numpy sum"
SHA = "hashlib's SHA-256"
COUNT = 10_000
EQUAL = 1.25  # four fifths of its speed
LINEAR = 2.0  # times what a tensor takes among 10,000: a million's columns lie in no cache


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of digests, then those of the index alone."""
    yield from _digests(settings)
    yield from _index(settings)


def _digests(settings: Settings) -> Iterator[Row]:
    mib_each = settings.pick(64, 2)
    require_disk(settings.folder, 30 * mib_each * MIB)
    large, small = settings.folder / "large.zcr", settings.folder / "many.zcr"
    buffers = make_buffers(mib_each)
    total = sum(b.nbytes for b in buffers.values())
    zcrecord.save_record(buffers, large, durable=False)
    del buffers
    many = make_tensors(settings.pick(COUNT, 500))
    zcrecord.save_record(many, small, durable=False)
    repeats = settings.pick(7, 1)
    work, within = f"{total / 1e9:.1f} GB, mapped", Promise("within", EQUAL, SUM)
    for threads in sorted({1, cores()}):
        seconds = _medians(repeats, {OURS: partial(_check, large, threads), SUM: partial(_sum, large, threads)})
        how = "one thread" if threads == 1 else f"{threads} threads"
        yield Row(AREA, f"every digest of {work}, {how}", "s", seconds, within, samples=repeats)
    seconds = _medians(repeats, {OURS: partial(_check, small, 1), SUM: partial(_sum, small, 1)})
    yield Row(AREA, f"every digest of {len(many):,} x 1 KB, one thread", "s", seconds, within, samples=repeats)
    repeats = settings.pick(3, 1)
    seconds = _medians(repeats, {OURS: partial(_content_digest, large), SHA: partial(_sha256, large)})
    note = "ours with all threads, theirs with the one that it can use"
    yield Row(AREA, f"content digest of {work}", "s", seconds, None, note, samples=repeats)
    for path in (large, small):
        path.unlink()


def _medians(repeats: int, ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of single calls in turn, after one that is not counted: too long for bursts."""

    def seconds(way: Callable[[], object]) -> float:
        start = time.perf_counter()
        way()
        return time.perf_counter() - start

    timed = {name: partial(seconds, way) for name, way in ways.items()}
    collect(1, timed)
    return {name: float(np.median(s)) for name, s in collect(repeats, timed).items()}


def _check(path: Path, threads: int) -> None:
    with zcrecord.load_record(path) as record:
        assert not damage.find(record.archive, threads=threads)


def _sum(path: Path, threads: int) -> None:
    with zcrecord.load_record(path) as record:
        arrays = [array.reshape(-1).view(np.uint64) for array in record.values()]
        if threads == 1:
            for array in arrays:
                array.sum()
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(np.sum, arrays))
        del arrays


def _content_digest(path: Path) -> None:
    with zcrecord.load_record(path) as record:
        record.content_digest()


def _sha256(path: Path) -> None:
    import hashlib

    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")


def _index(settings: Settings) -> Iterator[Row]:
    count = settings.pick(COUNT, 500)
    tensors: dict[str, Any] = make_tensors(count)
    archive, peer = settings.folder / "index.zcr", settings.folder / "index.safetensors"
    zcrecord.save_record(tensors, archive, durable=False)
    PEERS[SAFETENSORS].save(peer, tensors)
    repeats = settings.pick(30, 1)
    seconds = median_seconds(repeats, {OURS: partial(zcrecord.load_record, archive), SAFETENSORS: partial(_open, peer)})
    work, promise = f"open, all of the index of {count:,} tensors verified", Promise("faster", 4, SAFETENSORS)
    yield Row(AREA, work, "s", seconds, promise, samples=repeats * BURST)
    most = settings.pick(1_000_000, 2_000)
    each: dict[int, float] = {}
    for n in (count, most // 10, most):
        values = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
        layers = {f"block_{i // 100}.part_{i % 100}": values[i].copy() for i in range(n)}
        zcrecord.save_record({"layers": layers}, archive, alignment=16, durable=False)
        each[n] = median_seconds(settings.pick(5, 1), {OURS: partial(zcrecord.load_record, archive)})[OURS] / n
    of = {f"{OURS}, of {n:,}": s for n, s in each.items() if n != most}
    work, promise = f"index verified, for each of {most:,} tensors", Promise("within", LINEAR, f"{OURS}, of {count:,}")
    yield Row(AREA, work, "s", {OURS: each[most], **of}, promise, samples=settings.pick(5, 1) * BURST)
    for path in (archive, peer):
        path.unlink()


def _open(path: Path) -> object:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return file.keys()
