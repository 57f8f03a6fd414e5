"""Everything that is tried with an input, as with a stranger's file; nothing but RecordError may be raised.

Beyond that: what opened at level `full` is usable throughout; and a converted model is read, given back and converted
again without a difference, and `scan` says the same of it as `convert`.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import zcrecord
from zcrecord.errors import LimitError, RecordError, UnsupportedError
from zcrecord.onnx import convert, scan, to_onnx, tuned
from zcrecord.record.record import Record
from zcrecord.tensors.packed import PackedTensor, StringTensor

LEVELS: tuple[Any, ...] = ("touch", "index", "index", "index", "full", "full", "full", "full")
EMBEDDED: tuple[Any, ...] = (None, None, None, None, None, None, "prefix", "suffix")


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, PackedTensor):
        assert value.unpack().shape == value.shape
        return value.packed.tobytes()
    if isinstance(value, StringTensor):
        assert value.unpack(None).shape == value.shape
        return bytes(value.data)
    return np.asarray(value).tobytes()


def _touch_each(record: Record) -> None:
    for name in record.names:
        info = record.info(name)
        assert info.name == name
        raw = record.raw(name)
        try:
            assert name in record
            value = record[name]
        except UnsupportedError:  # an element type that this reader does not know
            assert raw is not None
            continue
        assert len(_bytes_of(value)) >= info.nbytes * (not isinstance(value, np.ndarray))


def _touch_values(record: Record) -> None:
    for value in [*record.attributes.values(), *record.metadata.values()]:
        for item in value if isinstance(value, list | tuple) else [value]:
            assert isinstance(item, memoryview | bytes | str | int | float | bool | None), item


def _look_around(record: Record) -> None:
    assert len(record) == len(record.names)
    assert record.nbytes >= 0
    assert all(record.module(path) is not None for path in record.modules)
    str(record.tree())
    repr(record)


def _get_anything(record: Record) -> None:
    for name in ("w", "m.z", "a.b.c", "", "no such name"):
        record.get(name)


def _look_at_tuning(record: Record) -> None:
    """Read a tuned part as sessions, `tune` and `untune` do; nothing of it is checked when a record is verified."""
    archive = record.archive
    try:
        part = tuned.read_tuned(archive)
        for target in part.targets if part else ():
            with contextlib.suppress(RecordError):  # most digests and seals do not match
                target.check(archive)
            with contextlib.suppress(RecordError):
                assert target.model(archive, "model.zcr", 0, packed=True).data
        if part:
            tuned.untuned(archive, part)
            pieces = list(tuned.bytes_before(archive, part))
            ends = [0, *(offset + len(data) for offset, data in pieces)]
            assert all(offset >= end for (offset, _), end in zip(pieces, ends, strict=False))
    except RecordError as error:
        assert str(error)


ACTIONS: tuple[Callable[[Record], Any], ...] = (
    _get_anything, _touch_each, _touch_values, _look_around, _look_at_tuning, Record.verify, Record.content_digest,
)  # fmt: skip


def archive(data: bytes) -> bool:
    """Load an archive and ask for everything; returns whether it opened."""
    dice = data[-4] if len(data) > 3 else 0  # of the CRC that ends a trailer: the same whenever the input is
    level = LEVELS[dice >> 3 & 7]
    try:
        record = zcrecord.load_record(data, verify=level, embedded=EMBEDDED[dice & 7])
    except RecordError as error:
        assert str(error)
        return False
    for action in ACTIONS:
        try:
            action(record)
        except (LimitError, UnsupportedError) as error:
            assert str(error)
        except RecordError as error:
            assert str(error)
            assert level != "full", f"{action.__name__} of what was verified: {error!r}"
    return True


def _converted(source: bytes, dry_run: bool = False) -> bytes | None:
    out = io.BytesIO()
    try:
        convert(io.BytesIO(source), out, dry_run=dry_run)
    except RecordError as error:
        assert str(error)
        return None
    return out.getvalue()


def model(data: bytes) -> bool:
    """Convert a model in memory, and look at what comes of some; returns whether it is one."""
    dice = sum(data[-8:]) & 31
    whole = _converted(data, dry_run=dice > 3)
    if whole is None or dice > 3:
        return whole is not None
    record = zcrecord.load_record(whole, verify="full")
    if dice:
        return True
    back = io.BytesIO()
    try:
        to_onnx(record, back)
    except RecordError as error:  # the skeleton is kept as it is, and what no reader of tensors needs is not looked at
        assert str(error)
        return True
    again = _converted(back.getvalue())
    assert again is not None
    assert zcrecord.load_record(again).content_digest() == record.content_digest()
    _scanned(data, record)
    return True


def _scanned(data: bytes, record: Record) -> None:
    """Check that a scan finds what the conversion found; a scan has to have a file, this one lies in memory."""
    memory = os.memfd_create("model")
    try:
        os.write(memory, data)
        with scan(f"/proc/self/fd/{memory}", mmap=False) as tensors:
            assert tensors.names == record.names
            for name in tensors.names:
                assert _bytes_of(tensors[name]) == _bytes_of(record[name]), name
    finally:
        os.close(memory)
