"""After any writes, reads, truncations and overwrites the file holds the bytes that a plain buffer would."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zcrecord.errors import UnsupportedError
from zcrecord.storage import files
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
