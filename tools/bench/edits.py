"""Edits of a large archive, beside `cp` of the file and safetensors' way of the same change: load all, save all.

On the folder's file system and, for root on Linux with xfsprogs, on XFS in a file, which clones. fsync on XFS alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, Settings, medians, require_disk, seconds_of
from tools.bench.large import make_buffers
from tools.bench.peers import PEERS, SAFETENSORS
from tools.measure import MIB, timed
from tools.worker import call_alone

AREA = "edits"
CP = "cp"
REFLINK = "cp --reflink=always"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of copied edits, then those of cloned ones."""
    mib_each = settings.pick(64, 1)
    require_disk(settings.folder, 150 * mib_each * MIB)
    archive, peer, out = (settings.folder / name for name in ("edit.zcr", "edit.safetensors", "edited"))
    buffers = make_buffers(mib_each)
    total = sum(b.nbytes for b in buffers.values())
    zcrecord.save_record(buffers, archive)
    PEERS[SAFETENSORS].save(peer, buffers)
    del buffers
    repeats = settings.pick(5, 1)
    peaks: dict[str, list[float]] = {OURS: [], SAFETENSORS: []}

    def changed(function: str, path: Path, name: str) -> float:
        _settle(path, out)
        cost = call_alone(f"tools.bench.edits:{function}", path=str(path), out=str(out))
        peaks[name].append(cost["peak"])
        return float(cost["seconds"])

    ways: dict[str, Callable[[], float]] = {
        OURS: partial(changed, "change_archive", archive, OURS),
        CP: partial(_copy, archive, out),
        SAFETENSORS: partial(changed, "change_safetensors", peer, SAFETENSORS),
    }
    what = f"change metadata of {total / 1e9:.1f} GB, copied, no fsync"
    yield Row(AREA, what, "s", medians(repeats, ways), Promise("within", 1.25, CP), samples=repeats)
    growth = {name: statistics.median(found) for name, found in peaks.items()}
    yield Row(AREA, f"{what}: peak memory above what it starts with", "B", growth, Promise("under", 32 * MIB))
    for path in (archive, peer, out):
        path.unlink()
    yield from _cloned(settings)


def _settle(path: Path, out: Path) -> None:
    """Write what came before to the disk, and read the file into the page cache."""
    out.unlink(missing_ok=True)
    os.sync()
    with open(path, "rb") as file:
        while file.read(16 * MIB):
            pass


def _copy(path: Path, out: Path, *options: str) -> float:
    _settle(path, out)
    return seconds_of(lambda: subprocess.run(["cp", *options, str(path), str(out)], check=True))


def _cloned(settings: Settings) -> Iterator[Row]:
    """Yield the rows of 10 GB on XFS; none where it cannot be had."""
    count = settings.pick(160, 2)  # tensors of 64 MiB
    require_disk(settings.folder, (count + 32) * 64 * MIB)
    with _xfs(settings.folder, (count + 16) * 64 * MIB) as disk:
        if disk is None:
            return
        path, out = disk / "large.zcr", disk / "out.zcr"
        nbytes = _make(path, count)
        repeats = settings.pick(9, 2)
        before = _used(disk)
        ways = {OURS: partial(_edit, path, out), REFLINK: partial(_copy, path, out, "--reflink=always")}
        seconds = medians(repeats, ways, uncounted=1)
        what = f"change metadata of {nbytes / 1e9:.1f} GB on XFS, fsync"
        note = f"{REFLINK}, which changes nothing and waits for no disk: {1000 * seconds.pop(REFLINK):.1f} ms"
        yield Row(AREA, what, "s", seconds, Promise("under", 0.1), note, samples=repeats)
        _edit(path, out)
        space = {OURS: float(max(_used(disk) - before, 0))}
        yield Row(AREA, f"{what}: space for both archives beyond that of one", "B", space, Promise("under", MIB))


@contextlib.contextmanager
def _xfs(folder: Path, nbytes: int) -> Iterator[Path | None]:
    """Yield a folder on an XFS of its own, None where none can be made."""
    image, disk = folder / "xfs", folder / "disk"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(nbytes)
    commands = [["mkfs.xfs", "-q", str(image)], ["mount", "-o", "loop", str(image), str(disk)]]
    made = shutil.which("mkfs.xfs") and not any(subprocess.run(c, capture_output=True).returncode for c in commands)
    try:
        yield disk if made else None
    finally:
        if made:
            subprocess.run(["umount", str(disk)], check=True)
        image.unlink()


def _used(disk: Path) -> int:
    os.sync()
    return shutil.disk_usage(disk).used


def _make(path: Path, count: int) -> int:
    """Save so many tensors of 64 MiB, none equal to another; return the archive's size."""
    block = np.random.default_rng(0).integers(0, 255, 64 * MIB, np.uint8)
    with zcrecord.RecordWriter(path) as out:
        for number in range(count):
            block[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
            out.add(f"blocks.{number}.weight", block)
    return path.stat().st_size


def _edit(path: Path, out: Path) -> float:
    def edit() -> None:
        with zcrecord.edit(path, out) as model:
            model.metadata["license"] = "mit"

    _settle(path, out)
    return seconds_of(edit)


# -- in a process of its own -----------------------------------------------------------------------------------------


def change_archive(path: str, out: str) -> dict[str, float]:
    """Change an archive into another file; return the seconds, and by how much the peak of memory grew."""
    import flatbuffers  # noqa: F401  # as the peer's package, before the clock is read

    def edit() -> None:
        with change_with(path, out, durable=False) as model:
            model.metadata["license"] = "mit"

    change_with = zcrecord.edit  # imported before the clock is read, too
    return timed(edit)


def change_safetensors(path: str, out: str) -> dict[str, float]:
    """Make the same change of a safetensors file."""
    from safetensors.numpy import load_file, save_file

    return timed(lambda: save_file(load_file(path), out, metadata={"license": "mit"}))
