"""1.6 GB that is not in the page cache, until every byte was touched: mapped, and read into memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, Settings, medians, require_disk, seconds_of
from tools.bench.large import make_buffers
from tools.bench.peers import PEERS, SAFETENSORS_TORCH
from tools.measure import MIB, begin_peak, peak_rss
from tools.worker import call_alone

AREA = "cold"
READ = "zcrecord, mmap=False"
PLAIN = "a plain read"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of a file that has to come from the disk."""
    mib_each = settings.pick(64, 1)
    require_disk(settings.folder, 50 * mib_each * MIB)
    archive, peer = settings.folder / "cold.zcr", settings.folder / "cold.safetensors"
    buffers = make_buffers(mib_each)
    total = sum(b.nbytes for b in buffers.values())
    zcrecord.save_record(buffers, archive)
    PEERS[SAFETENSORS_TORCH].save(peer, buffers)
    del buffers
    os.sync()
    files = {OURS: archive, READ: archive, SAFETENSORS_TORCH: peer, PLAIN: archive}
    touch = partial(call_alone, "tools.bench.cold:touch_seconds")
    repeats = settings.pick(5, 1)
    found = medians(repeats, {way: partial(touch, way=way, path=str(path)) for way, path in files.items()})
    peers = {way: found[way] for way in (SAFETENSORS_TORCH, PLAIN)}
    promise = Promise("within", 1.1, min(peers, key=peers.__getitem__))
    work = f"{total / 1e9:.1f} GB not in the page cache, until every byte was touched"
    yield Row(AREA, f"{work}: mapped", "s", {OURS: found[OURS], **peers}, promise, samples=repeats)
    yield Row(AREA, f"{work}: mmap=False", "s", {OURS: found[READ], **peers}, promise, samples=repeats)
    for what, most, function, path in (
        ("load_into, left in the page cache", 32 * MIB, "left_bytes", archive),
        ("a tensor by pread, private memory besides it", 2 * MIB, "bytes_beside", peer),
    ):
        found = medians(1, {OURS: partial(call_alone, f"tools.bench.cold:{function}", path=str(path))})
        yield Row(AREA, f"{total / 1e9:.1f} GB not in the page cache: {what}", "B", found, Promise("under", most))


def drop_cached(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cached_fraction(path: str) -> float:
    """Return the fraction of a file's pages that are in the page cache, by mincore(2)."""
    size = os.path.getsize(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
        octets = np.frombuffer(mapping, np.uint8)
        present = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        start, out = (ctypes.c_void_p(array.ctypes.data) for array in (octets, present))
        failed = ctypes.CDLL(None, use_errno=True).mincore(start, ctypes.c_size_t(size), out)
        del octets  # or the mapping could not be closed
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return float((present & 1).mean())


def touch_seconds(way: str, path: str) -> float:
    """Drop the file from the page cache, load it one way and add up all of it; return the seconds."""
    if way == SAFETENSORS_TORCH:
        import safetensors.torch  # noqa: F401  # imports are not what is measured
        import torch  # noqa: F401
    drop_cached(path)
    return seconds_of(lambda: [a.reshape(-1).view(np.uint64).sum() for a in _arrays(way, Path(path))])


def left_bytes(path: str) -> float:
    """Drop the file from the page cache, load it into memory; return the bytes that are in the page cache then."""
    record = zcrecord.load_record(path)
    drop_cached(path)
    record.load_into("host")
    return cached_fraction(path) * os.path.getsize(path)


def bytes_beside(path: str) -> float:
    """Return the private memory that one tensor of a safetensors file takes by pread, besides its own bytes."""
    from zcrecord.compat.safetensors import safe_open

    with safe_open(path, "np", backend="pread") as file:
        name = file.keys()[0]
        file.get_tensor(name)  # for what it imports
        begin_peak()
        before, tensor = peak_rss(), file.get_tensor(name)
        return float(peak_rss() - before - int(tensor.nbytes))


def _arrays(way: str, path: Path) -> list[np.ndarray[Any, Any]]:
    if way == SAFETENSORS_TORCH:
        return [t.numpy() for t in PEERS[way].all(path).values()]
    if way == PLAIN:
        data = path.read_bytes()
        return [np.frombuffer(data, np.uint8)[: len(data) // 8 * 8]]
    return list(zcrecord.load_record(path, mmap=way == OURS).values())
