"""Tensors where their bytes are already: views of the record's own mapping or buffer. Copies nothing.

Here is, too, how a tensor is made over any bytes of this machine's memory, which the other loaders use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zcrecord.dtypes import DType
from zcrecord.errors import UnsupportedError
from zcrecord.tensors.packed import PackedTensor

from .protocol import LoadPlan, PayloadRef

__all__ = ["MappedLoader", "as_tensor", "room_of"]

Octets = np.ndarray[Any, np.dtype[np.uint8]]


def as_tensor(octets: Octets, ref: PayloadRef) -> Any:
    """Return the ndarray or PackedTensor that `ref` describes, over the bytes it names; keeps them alive.

    `octets` has to be an array: of a memoryview numpy keeps only what that is of, and a mapping could be closed.
    """
    if ref.bits < 8:
        return PackedTensor(octets, ref.dtype, ref.shape)
    strides = None if ref.strides is None else tuple(s * ref.bits // 8 for s in ref.strides)
    return np.ndarray(ref.shape, ref.dtype.numpy, octets, ref.byte_offset, strides)


def room_of(dst: Any, ref: PayloadRef) -> Octets:
    """Return memory that a caller gave, as bytes; it has to be as large as what goes there.

    Raises:
        UnsupportedError: it cannot be written, is not contiguous, or is of another size.
    """
    try:
        if isinstance(dst, np.ndarray) and dst.dtype.isbuiltin != 1 and dst.flags.c_contiguous:
            dst = dst.reshape(-1).view(np.uint8)  # numpy gives no buffer of what is not its own
        octets = memoryview(dst)
        readonly = octets.readonly
        octets = octets.cast("B") if octets.nbytes else memoryview(bytearray())  # nothing is not cast
    except (TypeError, ValueError, BufferError) as error:
        kind = type(dst).__name__
        raise UnsupportedError(f"dst= of a {kind} has no contiguous bytes: {error}", tensor=ref.name) from None
    if readonly:
        raise UnsupportedError("dst= cannot be written; give memory of your own", tensor=ref.name)
    if len(octets) != ref.nbytes:
        what = f"dst= has {len(octets)} bytes, the tensor {ref.nbytes}"
        raise UnsupportedError(f"{what}; make it np.empty({ref.nbytes}, np.uint8)", tensor=ref.name)
    return np.frombuffer(octets, np.uint8)


class MappedLoader:
    """Views of the record's own bytes, read-only: what `record[name]` gives, but for mode "c", whose bytes these show.

    Each keeps the mapping alive. Rows of the first axis, and parts of payloads, are views, too. Of a remote archive
    `load_into` has whole payloads fetched first, as getting a view does.
    """

    device = "cpu"

    def can_load(self, device: str, dtype: DType) -> bool:
        """Return whether it is this machine's memory, and a type with elements of a fixed size."""
        return device in ("cpu", "mapped") and dtype.bits > 0

    def begin(self, plan: LoadPlan) -> None:
        """Get ready: there is nothing to do."""

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the tensor.

        Raises:
            UnsupportedError: its bytes are not in memory; or they are to be copied to `dst`.
        """
        if dst is not None:
            raise UnsupportedError("a view copies nothing, so it takes no dst=; load it into 'host' or 'read'")
        if ref.buffer is None:
            raise UnsupportedError("its bytes are not in this machine's memory; load it into 'host' or 'read'")
        return as_tensor(np.frombuffer(ref.buffer, np.uint8), ref)

    def view(self, loaded: Octets, ref: PayloadRef) -> Any:
        """Return one of several tensors of a payload."""
        return as_tensor(loaded, ref)

    def finish(self) -> None:
        """Return at once."""

    def abort(self) -> None:
        """Let go: there is nothing to let go of."""
