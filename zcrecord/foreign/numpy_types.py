"""numpy's arrays and scalars in a checkpoint of torch, without numpy's own unpickling.

Here stand-ins record the arguments in the pickle. They are checked before an array is made: it has a plain element
type, and the pickle has all its bytes. The names are those of pickle protocol 2, which `torch.save` uses.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np

from zcrecord.errors import UnsupportedError, printable

from .pickled import Function, Stateful

_ORDERS: tuple[Any, ...] = "<", ">", "|", "="
_MAX_RANK = 32  # of numpy 1
_MAX_ELEMENTS = 1 << 59  # zeros left out: numpy makes no array of 2^63 bytes, and no plain type has over 16
_PLAIN = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)")


class _PickledDtype(Stateful):
    """Stand-in for a dtype in a pickle: `numpy.dtype('f8', False, True)`, then (3, '<', ...)."""

    __slots__ = ("_name",)

    def __init__(self, name: Any = "", *_: Any) -> None:
        self.state = None
        self._name = name if isinstance(name, str) else type(name).__name__

    def dtype(self, path: str) -> np.dtype[Any]:
        """Return the dtype; raises UnsupportedError unless it is one of plain numbers."""
        order: Any = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "="
        if not _PLAIN.fullmatch(self._name) or order not in _ORDERS:
            fault = f"a numpy array of dtype {printable(repr(self._name), 60)}; only plain numbers can be read"
            raise UnsupportedError(f"{fault}, save it as such or as a tensor of torch", tensor=path or None)
        return np.dtype(self._name).newbyteorder(order)


class PickledArray(Stateful):
    """Stand-in for an array in a pickle, `_reconstruct(...)` and its state, or for a scalar, `scalar(dtype, bytes)`."""

    __slots__ = ("_array",)

    def __init__(self, *arguments: Any) -> None:
        self.state = (1, (), *arguments[:1], False, *arguments[1:])
        self._array: np.ndarray[Any, Any] | None = None

    def array(self, path: str) -> np.ndarray[Any, Any]:
        """Return the array, over the pickle's bytes, the same at each call; UnsupportedError unless of numbers."""
        if self._array is None:
            state = self.state if isinstance(self.state, tuple) and len(self.state) == 5 else (None,) * 5
            _version, shape, dtype, is_fortran, data = state
            sizes = shape if isinstance(shape, tuple) and len(shape) <= _MAX_RANK else (-1,)
            are_lengths = all(type(n) is int and n >= 0 for n in sizes)
            if (
                not are_lengths
                or prod(n or 1 for n in sizes) >= _MAX_ELEMENTS
                or not isinstance(dtype, _PickledDtype)
                or not isinstance(is_fortran, bool)
            ):
                fault = "no valid pickle of a numpy array; save it as a tensor of torch"
                raise UnsupportedError(fault, tensor=path or None)
            element = dtype.dtype(path)
            if not isinstance(data, bytes) or prod(sizes) * element.itemsize != len(data):
                fault = f"a numpy array of shape {shape} and dtype {element} with other bytes than it takes"
                raise UnsupportedError(f"{fault}; copy the file again", tensor=path or None)
            self._array = np.ndarray(sizes, element, data, order="F" if is_fortran else "C")
        return self._array

    def scalar(self, path: str) -> Any:
        """Return the one integer of an array of rank 0, as a key of the dict at `path`; UnsupportedError for others."""
        array = self.array(path)
        if array.ndim:
            raise UnsupportedError(f"a numpy array of shape {array.shape} is a key; save a number", tensor=path or None)
        if array.dtype.kind not in "iu":  # others may have one hash, so that a dict compares them all
            fault = f"a numpy number of dtype {array.dtype} is a key; keys are non-empty strings or integers"
            raise UnsupportedError(fault, tensor=path or None)
        return array[()]


NAMES: dict[str, Any] = {  # of numpy 1, whose core is "core", and of numpy 2
    "numpy.dtype": Function(_PickledDtype),
    "numpy.ndarray": Function(PickledArray),
    **{f"numpy.{core}.multiarray._reconstruct": Function(PickledArray) for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": Function(PickledArray) for core in ("core", "_core")},
}
