"""Scanned models compared with their archives, and reads counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
import pytest
from onnx import TensorProto

import zcrecord
from zcrecord.onnx import OnnxTensors
from zcrecord.onnx.lazy import files
from zcrecord.storage.memory import read_some
from zcrecord.tensors.packed import PackedTensor, StringTensor

MIB = 1 << 20


def stored_bytes(value: Any) -> bytes:
    """The bytes of a tensor as an archive has them."""
    if isinstance(value, PackedTensor):
        return value.packed.tobytes()
    return value.data.tobytes() if isinstance(value, StringTensor) else value.tobytes()


def assert_same(tensors: OnnxTensors, record: zcrecord.Record) -> None:
    """Compare a scan with the archive of the same model: names, order, types, shapes, and every byte."""
    assert tensors.names == record.names
    for info, theirs in zip(tensors.infos(), record.infos(), strict=True):
        ours, value = tensors[info.name], record[info.name]
        assert type(ours) is type(value)
        assert ours.dtype == value.dtype
        assert (info.dtype, info.shape, info.nbytes) == (theirs.dtype, theirs.shape, ours.nbytes)
        assert ours.shape == value.shape == info.shape
        assert stored_bytes(ours) == stored_bytes(value)
        if isinstance(ours, np.ndarray):
            assert ours.flags.aligned
            assert not ours.flags.writeable


def written(path: Path, model: Any) -> Path:
    """A model, as a ModelProto or as bytes, in a file."""
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


@pytest.fixture()
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of a file."""
    read: list[int] = []

    def counting(fd: int, buffer: memoryview, offset: int) -> int:
        read.append(real(fd, buffer, offset))
        return read[-1]

    real = read_some
    monkeypatch.setattr(files, "read_some", counting)
    return read


MEASURED = """
import sys
from tools.measure import memory, peak_rss
{setup}
private, peak = memory().private, peak_rss()
{work}
print(memory().private - private, peak_rss() - peak)
"""


def growth(setup: str, work: str) -> tuple[int, int]:
    """The bytes of private memory, and of the peak of all memory, that this work adds to a fresh process."""
    code = MEASURED.format(setup=setup, work=work)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    private, peak = done.stdout.split()[-2:]
    return int(private), int(peak)


def at(offset: int, t: TensorProto) -> bytes:
    """A model whose one initializer has its raw_data at a multiple of 16, and this much further."""
    model = m.model_of(t)
    for pad in range(16):
        model.producer_name = "x" * pad
        data: bytes = model.SerializeToString()
        if data.index(t.raw_data) % 16 == offset:
            return data
    raise AssertionError
