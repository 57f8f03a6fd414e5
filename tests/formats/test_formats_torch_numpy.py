"""Arrays and scalars of numpy in a checkpoint are read without numpy's own unpickling, or refused by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import torch
from torch_files import converted, saved

import zcrecord

RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]
SCALAR: Any = np.float64(1).__reduce__()[0]
NUMPY = [
    np.arange(6, dtype=np.uint32), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.ones((2, 0), np.int8),
    np.array(True), np.arange(3, dtype=">i2"), np.float64(0.1), np.float16(2), np.int64(-3), np.bool_(False),
    np.complex64(1j), np.array([1 + 2j]), np.zeros((1,) * 32),
]  # fmt: skip


@pytest.mark.parametrize("value", NUMPY, ids=lambda value: f"{value.dtype.str} {value.shape}"[:12])
def test_numbers_of_numpy_come_as_save_record_saves_them(value: Any, tmp_path: Path) -> None:
    state = {"best": value, "again": [value, b""]}
    record = saved(state, tmp_path)
    assert np.array_equal(record["best"], value)
    assert record["best"].dtype == value.dtype.newbyteorder("<")
    assert record.content_digest() == r.round_trip(state).content_digest()
    assert record.info("best").tied == (("best", "again.0") if value.size else ())
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "m.pt", weights_only=True)  # what is allowed, is while converting alone


def test_functions_of_numpy_that_the_caller_allows_are_called(tmp_path: Path) -> None:
    value = np.arange(3)
    torch.save({"a": value}, tmp_path / "m.pt")
    own = [RECONSTRUCT, np.ndarray, np.dtype, np.dtypes.Int64DType]
    with torch.serialization.safe_globals(own):
        assert converted(tmp_path / "m.pt")["a"].tolist() == [0, 1, 2]


class Pickled:
    """A call that a pickle of its own making asks for."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


FORGED = {
    "no state": Pickled(RECONSTRUCT, np.ndarray, (1 << 40,), "d"),
    "too few bytes": Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (1 << 40,), np.dtype("f8"), False, b"x")),
    "less than none": Pickled(
        RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (-1,), np.dtype("f8"), False, b"12345678")
    ),
    "no shape": Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, 2.5, np.dtype("f8"), False, b"12345678")),
    "no dtype": Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (1,), "f8", False, b"12345678")),
    "a list": Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (1,), np.dtype("O"), False, [1])),
    "a dtype made of text": Pickled(SCALAR, Pickled(np.dtype, "f8,O"), b"12345678"),
    "a large scalar": Pickled(SCALAR, Pickled(np.dtype, "V999999999"), b"x"),
}


@pytest.mark.parametrize("name", FORGED)
def test_arrays_of_numpy_that_are_none_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(zcrecord.UnsupportedError, match=r"m\.pt: tensor 'x\.0': (a|no) numpy array"):
        saved({"x": [FORGED[name]]}, tmp_path)
