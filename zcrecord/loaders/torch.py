"""Loader to torch's devices, by a ring of staging buffers that are filled while others are copied (`staging`).

Knows torch's streams, events and pinned memory, and makes tensors over bytes on a device. Plans are left to `plan`,
torch's element types to `frameworks.torch`. To cuda, which is the name of AMD's devices, too, buffers are pinned, and
copied on a stream of its own, so that reading and copying overlap; tests have a stand-in for `torch.cuda`, and
`tools/bench/gpu.py` measures it. To other devices, the CPU included, each copy is waited for; "meta" is refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from zcrecord.dtypes import DType
from zcrecord.errors import LimitError, UnsupportedError, located
from zcrecord.frameworks.torch import import_torch, torch_device, torch_dtype, torch_shape
from zcrecord.tensors.strides import reach

from .protocol import LoadPlan, PayloadRef
from .staging import DeviceCopier, StagingRing

_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by the size of an element
_MOST_READERS = 8  # one of them moves about 8 GB/s, a device takes up to 60


class TorchLoader:
    """Loads tensors to one torch device; each payload once, so that tied tensors are one, and views share storage.

    Device memory beyond the tensors' own is needed for negative strides and for `dst` of other strides: a copy of that
    tensor. In host memory there is the ring, at most `max_in_flight` bytes, for cuda pinned.

    Args:
        device: a torch.device, or its name.
        readers: number of threads that fill buffers; None for one per core, 8 at the most.

    Raises:
        DependencyError: torch is not installed. UnsupportedError: it has no such device here, or that is "meta".

    Example:
        >>> import numpy as np, zcrecord
        >>> from zcrecord.loaders import load_into
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> load_into(zcrecord.load_record("model.zcr"), TorchLoader("cpu"))["w"].sum()
        tensor(6.)
    """

    def __init__(self, device: Any = "cuda", *, readers: int | None = None) -> None:
        self._torch = import_torch()
        target_device = torch_device(self._torch, device)
        if target_device.type == "meta":
            raise UnsupportedError("tensors on torch's device 'meta' have no bytes to be loaded; use record.info(name)")
        if target_device.type == "cuda" and target_device.index is None:
            target_device = self._torch.device("cuda", self._torch.cuda.current_device())
        if readers is not None and readers < 1:
            raise LimitError(f"readers={readers}: at least one has to read")
        self._device, self._readers = target_device, readers or min(os.cpu_count() or 1, _MOST_READERS)
        self.device = str(target_device)
        self._copier = DeviceCopier(self._torch, target_device)
        self._ring: StagingRing | None = None
        self._late_copies: list[tuple[Any, Callable[[], Any]]] = []  # on the device: targets, and functions of sources

    def can_load(self, device: str, dtype: DType) -> bool:
        """Return True for this device and torch's element types; of float4_e2m1fn it has pairs."""
        try:
            target = self._torch.device(device)
            torch_dtype(self._torch, dtype, dtype.bits)
        except (RuntimeError, TypeError):  # element types that torch does not have raise a TypeError
            return False
        own = self._device
        return target.type == own.type and (None in (target.index, own.index) or target.index == own.index)

    def begin(self, plan: LoadPlan) -> None:
        """Allocate the ring of host buffers; LimitError if there is too little memory that can be pinned."""
        self.abort()
        self._ring = StagingRing(self._copier, plan, self._readers)
        plan.advance(0)  # bytes are not there when `load` returns; the ring reports them

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the tensor of a ref, on the device; its bytes are there after `finish`, in `dst` if that is given."""
        with located(path=ref.path, tensor=ref.name):
            if dst is not None:
                return self._load_into(ref, dst)
            if not ref.nbytes:
                dtype, shape = self._torch_form(ref)
                return self._empty(shape, dtype)
            return self._load_new(ref)

    def _torch_form(self, ref: PayloadRef) -> tuple[Any, tuple[int, ...]]:
        """Return torch's dtype and shape of a ref."""
        return torch_dtype(self._torch, ref.dtype, ref.bits), torch_shape(ref.dtype, ref.bits, ref.shape)

    def _load_new(self, ref: PayloadRef) -> Any:
        """Return a new tensor on the device, to which the ring will copy the bytes."""
        octets = self._empty((ref.nbytes,), self._torch.uint8)
        tensor = self.view(octets, ref)
        self._send(ref, octets)
        return tensor

    def view(self, loaded: Any, ref: PayloadRef) -> Any:
        """Return a tensor as a view of loaded bytes; with negative strides a copy."""
        with located(path=ref.path, tensor=ref.name):
            dtype, shape = self._torch_form(ref)
        with self._outside_inference_mode():
            return self._view(loaded, ref, dtype, shape)

    def finish(self) -> None:
        """Wait until all bytes are there, and release the ring; raises the errors of reading."""
        ring = self._ring
        if ring is None:
            return
        ring.finish()
        for target, make_source in self._late_copies:
            target.copy_(make_source())
        if self._late_copies:
            self._copier.synchronize()
        self._ring, self._late_copies = None, []

    def abort(self) -> None:
        """Wait for reads and copies under way, and release ring, readers and events. Never raises."""
        ring, self._ring, self._late_copies = self._ring, None, []
        if ring is not None:
            ring.abort()

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new tensor on the device without values; LimitError if there is no memory for it."""
        try:
            with self._outside_inference_mode():
                return self._torch.empty(shape, dtype=dtype, device=self._device)
        except RuntimeError as error:  # torch.OutOfMemoryError of a device, RuntimeError of the CPU
            message = f"{self.device} has no room for {math.prod(shape) * dtype.itemsize} bytes"
            raise LimitError(f"{message}; load fewer tensors with names=, or parts of them with slices=") from error

    def _outside_inference_mode(self) -> AbstractContextManager[object]:
        """Return a context for new tensors that reader threads may write to, which are not in inference mode."""
        return self._torch.inference_mode(False) if self._torch.is_inference_mode_enabled() else nullcontext()

    def _send(self, ref: PayloadRef, octets: Any) -> None:
        """Queue a ref's bytes for `octets`, a flat tensor of bytes on the device."""
        if self._ring is None:
            raise UnsupportedError("begin(plan) comes before load(ref)")
        self._copier.follow()
        self._ring.send(ref, octets)

    def _load_into(self, ref: PayloadRef, dst: Any) -> Any:
        """Load a ref into the caller's tensor, which must have its dtype, shape and device."""
        torch = self._torch
        dtype, shape = self._torch_form(ref)
        if not isinstance(dst, torch.Tensor) or (dst.dtype, tuple(dst.shape)) != (dtype, shape):
            actual = f"{dst.dtype} of shape {tuple(dst.shape)}" if isinstance(dst, torch.Tensor) else type(dst).__name__
            raise UnsupportedError(f"dst has to be {dtype} of shape {shape}, and is {actual}")
        if not self.can_load(str(dst.device), ref.dtype):
            raise UnsupportedError(f"dst has to be on {self.device}, and is on {dst.device}")
        if not ref.nbytes:
            return dst
        target = dst.detach()  # `dst` may be a parameter
        has_other_bytes = target.is_conj() or target.is_neg() or target.is_inference()  # in memory, than its values
        if ref.strides is None and target.is_contiguous() and not has_other_bytes:
            self._send(ref, target.reshape(-1).view(torch.uint8))
        else:
            tensor = self._load_new(ref)
            self._copy_later(target, lambda: tensor)
        return dst

    def _view(self, loaded: Any, ref: PayloadRef, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Return the tensor of a ref over loaded bytes; with negative strides a copy, made once its bytes are there."""
        itemsize = dtype.itemsize
        elements = loaded[: len(loaded) // itemsize * itemsize].view(dtype)
        # Detached, it is no view for autograd, but shares the version counter with tensors it is tied to.
        if ref.strides is None:
            count = math.prod(shape)
            return elements[ref.byte_offset // itemsize :][:count].view(shape).detach()
        lowest_reached, _ = reach(shape, ref.strides)
        lowest = ref.byte_offset // itemsize + lowest_reached
        forward = elements.as_strided(shape, [abs(s) for s in ref.strides], lowest).detach()
        backward = [axis for axis, stride in enumerate(ref.strides) if stride < 0]
        return self._flip_later(forward, backward) if backward else forward  # torch has no negative strides

    def _flip_later(self, tensor: Any, axes: list[int]) -> Any:
        """Return a copy of a tensor with some axes flipped, made once its bytes are there."""
        flipped = self._empty(tuple(tensor.shape), tensor.dtype)
        # torch flips neither all of its unsigned integers nor floats of 8 bits.
        carrier = getattr(self._torch, _CARRIERS.get(tensor.dtype.itemsize, ""), tensor.dtype)
        target, source = flipped.view(carrier), tensor.view(carrier)
        self._copy_later(target, lambda: source.flip(axes))
        return flipped

    def _copy_later(self, target: Any, make_source: Callable[[], Any]) -> None:
        """Copy what `make_source` returns to `target` once all bytes are there: in `finish`, without a load now."""
        if self._ring is None:
            target.copy_(make_source())
        else:
            self._late_copies.append((target, make_source))
