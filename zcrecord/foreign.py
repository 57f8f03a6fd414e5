"""Tensors of other libraries as numpy arrays: a view where their memory is the host's, a copy where it is a device's.

Nothing is imported for it: who hands over a torch tensor has imported torch. The way back is `handover`'s.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import UnsupportedError
from .tensors import PackedTensor

__all__ = ["as_array"]


def as_array(value: Any) -> np.ndarray[Any, np.dtype[Any]] | PackedTensor:
    """Return any library's tensor as an ndarray, or as a PackedTensor where its elements are narrower than a byte.

    Raises:
        UnsupportedError: it is no tensor, or one that numpy cannot view.
    """
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise UnsupportedError(f"numpy cannot view this {type(value).__name__}: {error}") from error
    if hasattr(value, "__array__"):
        return np.asarray(value)
    raise UnsupportedError(f"a {type(value).__name__} is neither a tensor, an attribute nor a module")
