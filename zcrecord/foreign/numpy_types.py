"""numpy's arrays and scalars in a checkpoint of torch, without numpy's own unpickling.

`torch.load(weights_only=True)` refuses them, since numpy's functions for them are not safe for untrusted files. Here
stand-ins of the same names record the arguments in the pickle. They are checked before an array is made: it has a plain
element type, and the pickle has all its bytes. The names are those of pickle protocol 2, which `torch.save` uses.
"""

from __future__ import annotations

import contextlib
import re
from math import prod
from typing import Any

import numpy as np

from zcrecord.errors import UnsupportedError, printable

_PLAIN = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)")


class _Dtype:
    """Stand-in for a dtype in a pickle: `numpy.dtype('f8', False, True)`, then (3, '<', ...)."""

    _order: Any

    def __init__(self, name: Any = "", *_: Any) -> None:
        self._name, self._order = name, "="  # both may be anything

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1:
            self._order = state[1]

    def dtype(self, path: str) -> np.dtype[Any]:
        """Return the dtype; raises UnsupportedError unless it is one of plain numbers."""
        if not isinstance(self._name, str) or not _PLAIN.fullmatch(self._name) or self._order not in list("<>|="):
            what = f"a numpy array of dtype {printable(repr(self._name), 60)}; only plain numbers can be read"
            raise UnsupportedError(f"{what}, save it as such or as a tensor of torch", tensor=path or None)
        return np.dtype(self._name).newbyteorder(self._order)


class Noted:
    """Stand-in for an array in a pickle, `_reconstruct(...)` and its state, or of a scalar, `scalar(dtype, bytes)`."""

    def __init__(self, *arguments: Any) -> None:
        self._state: Any = (1, (), *arguments[:1], False, *arguments[1:])
        self._array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def array(self, path: str) -> np.ndarray[Any, Any]:
        """Return the array, the same one each time: a view of the bytes in the pickle.

        Raises:
            UnsupportedError: the elements are not plain numbers, or the number of bytes does not fit the shape.
        """
        if self._array is None:
            state = self._state if isinstance(self._state, tuple) and len(self._state) == 5 else (None,) * 5
            _, shape, dtype, is_fortran, data = state
            sizes = shape if isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape) else None
            # numpy makes no array whose dims, zeros left out, come to 2^63 bytes; no plain type has over 16.
            sound = sizes is not None and len(sizes) <= 32 and prod(n or 1 for n in sizes) < 1 << 59
            if sizes is None or not sound or not isinstance(dtype, _Dtype) or not isinstance(is_fortran, bool):
                what = "no valid pickle of a numpy array; save it as a tensor of torch"
                raise UnsupportedError(what, tensor=path or None)
            kind = dtype.dtype(path)
            if not isinstance(data, bytes) or prod(sizes) * kind.itemsize != len(data):
                what = f"a numpy array of shape {shape} and dtype {kind} with other bytes than it takes"
                raise UnsupportedError(f"{what}; copy the file again", tensor=path or None)
            self._array = np.ndarray(sizes, kind, data, order="F" if is_fortran else "C")
        return self._array

    def scalar(self, path: str) -> Any:
        """Return the one number of an array of rank 0, which can be a key.

        Raises:
            UnsupportedError: as `array`, or its rank is another.
        """
        array = self.array(path)
        if array.ndim:
            raise UnsupportedError(f"a numpy array of shape {array.shape} is a key; save a number", tensor=path or None)
        return array[()]


class _NoBytes:
    """Stand-in for the call that makes empty bytes in pickles of protocol 2."""

    def __new__(cls, *_: Any) -> Any:
        return b""


def _named(name: str, base: type) -> type:
    """Return a class with a full name, which torch uses for the class or function of that name."""
    module, _, short = name.rpartition(".")
    return type(short, (base,), {"__module__": module, "__qualname__": short})


_STAND_INS = [
    _named("numpy.dtype", _Dtype),
    _named("numpy.ndarray", object),
    _named("builtins.bytes", _NoBytes),
    *(
        _named(f"numpy.{core}.multiarray.{what}", Noted)
        for core in ("core", "_core")  # of numpy 1, and of numpy 2
        for what in ("_reconstruct", "scalar")
    ),
]


def allowed(torch: Any) -> Any:
    """Return a context in which `torch.load` uses the stand-ins.

    The context has no effect before torch 2.5, or if the caller has allowed numpy's own functions.
    """
    safe = getattr(torch.serialization, "safe_globals", None)
    if safe is None or any("numpy" in str(getattr(f, "__module__", f)) for f in torch.serialization.get_safe_globals()):
        return contextlib.nullcontext()
    return safe(_STAND_INS)
