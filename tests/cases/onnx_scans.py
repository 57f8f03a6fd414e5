"""Models that are converted, scanned and written small: each way gives the same tensors, or the same refusal."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models as m
import pytest
from onnx import TensorProto
from processes import growth as growth

import zcrecord
from zcrecord.errors import OnnxError, RecordError
from zcrecord.onnx import OnnxTensors, convert, external_data, graph, scan
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
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def converted(model: Any) -> zcrecord.Record:
    """A record of a model; a scan of it, and of a small model over it, has the same tensors."""
    record = m.converted(model)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "INLINE", 0)
        path, small = written(Path(folder, "model.onnx"), model), Path(folder, "small.onnx")
        with scan(path) as tensors:
            assert_same(tensors, record)
            tensors.to_onnx(small, durable=False)
        with scan(small) as tensors:
            assert_same(tensors, record)
    return record


def refused(data: bytes, message: str, kind: type[RecordError] = OnnxError) -> RecordError:
    """Check that conversion and scan of a model are refused with this message and a byte; return the error."""
    with pytest.raises(kind, match=message) as caught:
        convert(io.BytesIO(data), io.BytesIO())
    assert caught.value.offset is not None or not data
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, "model.onnx"), data)
        with pytest.raises(kind) as scanned:
            scan(path).load_all()
    assert (type(scanned.value), scanned.value.path) == (type(caught.value), str(path))
    return caught.value


def sparse_model(path: Path, size: int) -> Path:
    """A model with one tensor of zeros, "w", that takes no room on the disk and is aligned to 8 bytes."""
    head = m.field(1, size // 4) + m.field(2, TensorProto.FLOAT) + m.field(8, b"w") + b"\x4a" + m.varint(size)
    inner = b"\x2a" + m.varint(len(head) + size) + head
    start = m.field(1, 9) + b"\x3a" + m.varint(len(inner) + size)
    start = m.field(2, b"x" * (-(len(start) + len(inner) + 2) % 8)) + start
    with path.open("wb") as file:
        file.write(start + inner)
        file.truncate(len(start + inner) + size)
    return path


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of a scanned file from now on."""
    read: list[int] = []

    def counting(fd: int, buffer: memoryview, offset: int) -> int:
        read.append(read_some(fd, buffer, offset))
        return read[-1]

    monkeypatch.setattr(external_data, "read_some", counting)
    return read


def shifted(model: onnx.ModelProto, by: int) -> bytes:
    """A model whose largest raw_data lies at a multiple of 16, and this much further."""
    largest = max(m.every_tensor(model), key=lambda t: len(t.raw_data))
    for pad in range(16):
        model.producer_name = "x" * pad
        data: bytes = model.SerializeToString()
        if data.index(largest.raw_data) % 16 == by:
            return data
    raise AssertionError


def at(offset: int, t: TensorProto) -> bytes:
    return shifted(m.model_of(t), offset)
