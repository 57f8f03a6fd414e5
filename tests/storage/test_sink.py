"""After any writes, reads, truncations and overwrites the file holds the bytes that a plain buffer would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcrecord
from zcrecord.errors import UnsupportedError
from zcrecord.storage import files
from zcrecord.storage.new_files import copy_range
from zcrecord.storage.sink import NullSink


def pieces(rng: Any) -> bytes:
    size = rng.choice([0, 1, 63, 5000, 32768, 32769, 300_000], p=[0.05, 0.3, 0.3, 0.2, 0.05, 0.05, 0.05])
    return bytes(rng.bytes(int(size)))


@pytest.mark.parametrize("seed", range(8))
def test_a_file_is_what_a_buffer_would_be(seed: int, tmp_path: Path) -> None:
    rng, path, expected = np.random.default_rng(seed), tmp_path / "m", bytearray()
    with files.open_sink(path, durable=False) as out:
        for _ in range(400):
            step = int(rng.integers(10))
            if step == 7 and expected:
                start = int(rng.integers(len(expected)))
                size = int(rng.integers(len(expected) - start + 1))
                assert out.read_back(start, size) == expected[start : start + size]
            elif step == 8 and expected:
                start = len(expected) - int(rng.integers(min(len(expected), 50_000)))
                out.rewind(start)
                del expected[start:]
            elif step == 9 and len(expected) > 100:
                start = int(rng.integers(len(expected) - 100))
                out.patch(start, b"patch")
                expected[start : start + 5] = b"patch"
            else:
                data = pieces(rng)
                out.write(data)
                expected += data
            assert out.position == len(expected)
    assert path.read_bytes() == expected


def test_small_writes_are_gathered_into_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = os.write, []

    def counted(fd: int, data: Any) -> int:
        calls.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", counted)
    with files.open_sink(tmp_path / "m", durable=False) as out:
        for _ in range(10_000):
            out.write(b"x" * 64)
    assert sum(calls) == 640_000
    assert len(calls) < 10


def test_null_sink_counts_and_gives_nothing_back() -> None:
    out = NullSink()
    out.write(np.ones(3))
    assert out.position == 24 and out.can_rewind and not out.keeps
    with pytest.raises(UnsupportedError, match=r"bytes \[0, 8\) were written and not kept"):
        out.read_back(0, 8)
    out.rewind(8)
    assert out.position == 8


# File systems that clone.


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
