"""Anything with DLPack, `__array__` or the buffer protocol is saved; views go out through DLPack without a copy."""

from __future__ import annotations

import array
import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import torch

import zcrecord
from zcrecord.dtypes import DTYPES, DType, by_name
from zcrecord.errors import ProducerError, UnsupportedError
from zcrecord.tensors import interop
from zcrecord.writing import flatten

CPU, CUDA = 1, 2
NUMPY_2_1 = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # exports read-only arrays, copies from devices
EXPORTED = [d for d in DTYPES if d.numpy is not None and d.numpy.isbuiltin != 2]
ONE = np.arange(6, dtype=np.float32).reshape(2, 3)


class Exporter:
    """A tensor of some library, by DLPack, shape and dtype. On a device it hands out copies for the host alone."""

    def __init__(self, values: r.Array, device: int = CPU) -> None:
        self._values, self._device = values, device
        self.copies = 0
        self.shape, self.dtype = values.shape, values.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, *, dl_device: Any = None, copy: bool | None = None, **options: Any) -> Any:
        if self._device != CPU:
            if dl_device != (CPU, 0) or not copy:
                raise BufferError("lives on a device")
            self.copies += 1
            return self._values.copy().__dlpack__(**options)
        return self._values.__dlpack__(**options)


class Array:
    """A tensor of a library that knows numpy's own protocol."""

    def __init__(self, values: r.Array) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> r.Array:
        return self._values


class WithBoth(Array):
    """One that knows DLPack as far as it goes."""

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise BufferError("no such type")


# In.


def test_what_exports_dlpack_is_saved_from_its_own_memory() -> None:
    values = ONE.T
    seen = interop.as_array(Exporter(values))
    assert isinstance(seen, np.ndarray)
    assert r.address(seen) == r.address(values)
    assert seen.strides == values.strides
    exporter = Exporter(ONE)
    rec = r.round_trip({"a": exporter, "b": exporter, "own": ONE[1:]})
    assert rec["a"].tolist() == ONE.tolist()
    assert set(rec.info("a").tied) == {"a", "b", "own"}


def test_numpys_own_protocol_serves_where_dlpack_does_not() -> None:
    half = r.filled(by_name["bfloat16"], (3,))
    for value in (Array(half), WithBoth(half)):
        seen = interop.as_array(value)
        assert isinstance(seen, np.ndarray)
        assert r.address(seen) == r.address(half)


def test_what_lies_on_a_device_is_copied_when_it_is_written_and_once() -> None:
    there, other = Exporter(ONE, CUDA), Exporter(ONE + 1, CUDA)
    assert isinstance(flatten.as_tensor(there, "x"), zcrecord.LazyTensor)
    assert there.copies == 0
    record = {"a": there, "tied": there, "b": other}
    if not NUMPY_2_1:
        with pytest.raises(UnsupportedError, match="tensor 'a': numpy cannot copy this Exporter from its device: "):
            r.saved(record)
        return
    rec = r.round_trip(record)
    assert there.copies == other.copies == 1
    assert rec["a"].tolist() == rec["tied"].tolist() == ONE.tolist()
    assert rec["b"].tolist() == (ONE + 1).tolist()
    assert set(rec.info("a").tied) == {"a", "tied"}


def test_pieces_of_a_lazy_tensor_may_lie_on_a_device() -> None:
    lazy = zcrecord.LazyTensor("float32", (2, 3), (Exporter(row[None], CUDA) for row in ONE))
    if not NUMPY_2_1:
        with pytest.raises(ProducerError, match=r"tensor 'x': .*numpy cannot copy this Exporter from its device: "):
            r.saved({"x": lazy})
        return
    assert r.round_trip({"x": lazy})["x"].tolist() == ONE.tolist()


def test_an_exporter_that_hands_out_no_copy_is_named() -> None:
    class Old(Exporter):
        def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
            raise BufferError("lives on a device")

    message = r"tensor 'm\.x': numpy cannot copy this Old from its device: .*; hand over a copy in the host's memory"
    with pytest.raises(UnsupportedError, match=message):
        r.saved({"m": {"x": Old(ONE, CUDA)}})


def test_element_types_that_the_format_does_not_have_are_named_before_anything_is_fetched() -> None:
    there = Exporter(np.zeros(2, "V3"), CUDA)
    with pytest.raises(UnsupportedError, match=r"tensor 'm\.x': dtype \|V3 has no place in an archive"):
        r.saved({"m": {"x": there}})
    assert there.copies == 0


BUFFERS: dict[str, tuple[Any, list[Any]]] = {
    "array of floats": (array.array("f", [1, 2, 3]), [1, 2, 3]),
    "empty array": (array.array("d"), []),
    "ctypes": ((ctypes.c_float * 3 * 2).from_buffer_copy(ONE.tobytes()), ONE.tolist()),
    "ctypes, one": (ctypes.c_int32(5), 5),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", BUFFERS)
def test_typed_buffers_are_tensors_in_their_own_memory(name: str) -> None:
    value, expected = BUFFERS[name]
    seen = interop.as_array(value)
    assert isinstance(seen, np.ndarray)
    if seen.size:
        assert np.shares_memory(seen, np.frombuffer(value, seen.dtype))
    assert r.round_trip({"x": value})["x"].tolist() == expected


CHARACTERS: Any = "w" if sys.version_info >= (3, 13) else "u"  # the one warns then, the other was not there before


class Pair(ctypes.Structure):
    """A buffer of two fields."""

    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_int))


@pytest.mark.parametrize(
    "value, message",
    [
        (array.array(CHARACTERS, "ab"), "dtype <U1 has no place in an archive"),
        ((ctypes.c_void_p * 3)(), "numpy cannot view this c_void_p_Array_3: "),
        (Pair(), r"dtype \[\('a', .* has no place in an archive"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_buffers_of_other_things_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"tensor 'x': {message}"):
        r.saved({"x": value})


# Out.


def opened(folder: Path, record: Any, mode: Any = "r") -> zcrecord.Record:
    zcrecord.save_record(record, folder / "model.zcr", durable=False)
    return zcrecord.load_record(folder / "model.zcr", mode=mode)


@pytest.mark.parametrize("kind", EXPORTED, ids=lambda d: d.name)
def test_numpy_and_torch_take_writable_views_through_dlpack_without_a_copy(kind: DType, tmp_path: Path) -> None:
    view = opened(tmp_path, {"x": np.zeros((2, 3), kind.numpy)}, mode="c")["x"]
    for taken in (np.from_dlpack(view), torch.from_dlpack(view).numpy()):
        assert (taken.dtype, taken.shape, r.address(taken)) == (kind.numpy, (2, 3), r.address(view))
    taken[0] = 1
    assert view.tolist() == np.from_dlpack(view).tolist() == [[1] * 3, [0] * 3]


def test_numpy_takes_read_only_views_as_such(tmp_path: Path) -> None:
    view = opened(tmp_path, {"x": ONE})["x"]
    if not NUMPY_2_1:
        with pytest.raises(BufferError, match="readonly"):
            np.from_dlpack(view)
        return
    taken = np.from_dlpack(view)
    assert r.address(taken) == r.address(view)
    assert not taken.flags.writeable
