"""An edited archive shares its payloads' blocks with the one before it, if the file system can clone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import zcrecord
from zcrecord.storage.new_files import copy_range

MIB = 1 << 20


@pytest.fixture(
    params=[
        pytest.param("mkfs.xfs", marks=pytest.mark.needs("mkfs.xfs", "mount")),
        pytest.param("mkfs.btrfs", marks=pytest.mark.needs("mkfs.btrfs", "mount")),
    ]
)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that clones, of its own."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(1024 * MIB)
    subprocess.run([request.param, "-q", str(image)], check=True, capture_output=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"platform: no loop device can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def used(folder: Path) -> int:
    """Return the bytes in use on a file system."""
    os.sync()
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def test_an_edit_takes_no_space_where_the_file_system_clones(disk: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {f"layers.{i}.w": random.integers(0, 255, 16 * MIB + 1000 * i, np.uint8) for i in range(16)}
    empty, path, other = used(disk), disk / "m.zcr", disk / "other.zcr"
    zcrecord.save_record(tensors, path)
    full = used(disk)
    assert full - empty > 250 * MIB, "the archive takes no space by itself, so nothing would be noticed"
    with zcrecord.edit(path) as model:
        model.metadata["text"] = "x" * 50_000
    assert used(disk) - full < MIB
    with zcrecord.edit(path, other) as model:
        model.metadata["license"] = "mit"
        model.rename("layers.*", "*")
        model.drop(["3.w", "4.w", "15.w"])
        model["new"] = np.arange(10)
    assert model.report is not None
    assert model.report.cloned_bytes > 0.999 * sum(
        a.nbytes for n, a in tensors.items() if n[7:9] not in ("3.", "4.", "15")
    )
    assert used(disk) - full < MIB, "two archives, and the space of one"
    with zcrecord.load_record(path, verify="full") as record, zcrecord.load_record(other, verify="full") as renamed:
        record.verify()
        renamed.verify()
        assert np.array_equal(record["layers.5.w"], tensors["layers.5.w"])
        assert np.array_equal(renamed["5.w"], tensors["layers.5.w"])
        assert "15.w" not in renamed


def test_ranges_are_left_where_the_system_cannot_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(8192))
    read, write = os.pipe()
    with open(tmp_path / "a", "rb") as source:
        assert copy_range(source.fileno(), 0, write, 0, 8192) == (0, False)
        monkeypatch.setattr(sys, "platform", "darwin")
        assert copy_range(source.fileno(), 0, source.fileno(), 0, 10) == (0, False)
    os.close(read)
    os.close(write)
