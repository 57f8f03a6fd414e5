"""An archive's tensors as torch's: over the archive's own memory where torch can use it, copied where it cannot.

==============  ======================================================================================================
CPU             over a private mapping of the file, one for each call, uncopied: a page is copied at its first write,
                which changes only the tensor and those tied to it; equal ones that are not tied have storages of their
                own. In mode "c" over the record's own memory. Negative strides, which torch does not have, are copied;
                all tensors are copied if the file was replaced or removed since the record was opened
device          one copy, on the device, one tensor at a time; tied ones once
writable=False  over the read-only mapping, on the CPU, which processes share. **Any in-place write then ends the
                process**: torch has no read-only tensors
numpy, DLPack   the record's own views, uncopied, and `np.from_dlpack` of them. `torch.from_dlpack` treats a read-only
                view as writable, and the first write to it ends the process: use `torch_tensors`
==============  ======================================================================================================

A float4_e2m1fn_x2 of torch has two elements to an entry, so that the last axis is half as long. Tensors that torch has
no type for, such as strings and int4, come as the record's own views, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.archive.archive import Archive
from zcrecord.archive.subset import Names
from zcrecord.codec.layout import NONE
from zcrecord.dtypes import Array as Array
from zcrecord.dtypes import DType
from zcrecord.errors import UnsupportedError, missing_package
from zcrecord.tensors.interop import FLOAT4_PAIRS
from zcrecord.tensors.packed import PackedTensor

from .elements import beside_views, unsupported_elements


def torch_tensors(
    archive: Archive, device: Any = "cpu", names: Names | None = None, writable: bool = True
) -> dict[str, Any]:
    """Return torch tensors by name, in saved order, as `Module.load_state_dict(..., assign=True)` takes them.

    Each has a storage of its payload's size, tied ones have one; the mapping lives as long as any of them.

    Raises:
        DependencyError: torch is not installed. TensorNotFoundError: no tensor has a name without wildcards.
        UnsupportedError: an unknown device. SourceError: the file was changed in place since it was opened.
    """
    torch = import_torch()
    target = torch_device(torch, device)

    def tensors(archive: Archive) -> dict[str, Any]:
        private = writable and target.type == "cpu" and archive.mode == "r"
        copied = private and archive.source.gone
        memory = archive.private() if private and not copied else archive
        return dict(zip(archive.names(), _TorchTensors(torch, memory, target, copied=copied).tensors(), strict=True))

    return beside_torch_views(archive, names, tensors)


def beside_torch_views(
    archive: Archive, names: Names | None, make: Callable[[Archive], dict[str, Any]]
) -> dict[str, Any]:
    """Return tensors by name: those that torch has a type for from `make`, the others as views of the record."""
    torch = import_torch()

    def holds(kind: DType, bits: int, shape: tuple[int, ...]) -> bool:
        try:
            torch_dtype(torch, kind, bits)
            torch_shape(kind, bits, shape)
        except UnsupportedError:
            return False
        return True

    return beside_views(archive, names, holds, make)


def import_torch() -> Any:
    """Return torch; raise DependencyError if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise missing_package("torch", extra="torch") from error
    return torch


def torch_device(torch: Any, device: Any) -> Any:
    """Return a torch.device; raise UnsupportedError if torch does not have this device here."""
    if device == "cpu":
        return torch.device("cpu")
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, TypeError) as error:  # AssertionError: torch was built without CUDA
        raise UnsupportedError(f"torch has no device {device!r} here: {error}") from error
    return target


def torch_dtype(torch: Any, kind: DType, bits: int) -> Any:
    """Return torch's dtype for an element type in so many bits, for float4 that of pairs, or UnsupportedError."""
    name = FLOAT4_PAIRS if kind.name == "float4_e2m1fn" and bits == kind.bits else kind.torch
    dtype = getattr(torch, name or "", None)
    if dtype is None:
        raise unsupported_elements(kind.name, f"torch {torch.__version__} has no dtype for {kind.name}")
    return dtype


def torch_bytes(torch: Any, octets: Any) -> Any:
    """Return a torch tensor of uint8 over bytes, uncopied; **a write to read-only ones ends the process**."""
    view: Array = np.frombuffer(octets, np.uint8)
    return torch.from_numpy(view if view.flags.writeable else _as_writable(view))


def torch_shape(kind: DType, bits: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's shape in torch; UnsupportedError if packed elements do not make pairs in the last axis."""
    if bits >= 8:
        return shape
    if not shape or shape[-1] % 2:
        fault = f"shape {shape} of {kind.name}, of which torch has two to an entry of the last axis"
        raise unsupported_elements(kind.name, fault)
    return (*shape[:-1], shape[-1] // 2)


def shared_payloads(archive: Archive) -> set[int]:
    """Return the numbers of payloads that more than one tensor uses."""
    payloads = archive.index.tensors["payload"]
    numbers, counts = np.unique(payloads[payloads != NONE], return_counts=True)
    return set(numbers[counts > 1].tolist())


class _TorchTensors:
    """An archive's tensors as torch's, tied ones over one storage."""

    def __init__(self, torch: Any, archive: Archive, device: Any, *, copied: bool) -> None:
        self._torch, self._archive, self._device, self._copied = torch, archive, device, copied
        self._bases: dict[int, Any] = {}  # payloads that several tensors use, as one tensor of bytes each
        self._forms: dict[Any, tuple[Any, Any]] = {}

    def tensors(self) -> Iterator[Any]:
        """Yield every tensor, in saved order."""
        shared = shared_payloads(self._archive)
        rows, from_numpy = self._archive.index.tensors, self._torch.from_numpy
        payloads = rows["payload"].tolist()
        is_plain = (rows["strides"] == NONE) & (rows["payload"] != NONE) & (rows["bits"] >= 8)
        is_direct = (is_plain & (self._device.type == "cpu" and self._archive.mode == "c")).tolist()
        plain_dtypes: set[np.dtype[Any]] = set()  # that torch takes without conversion
        for i, (number, view) in enumerate(zip(payloads, self._archive.views(), strict=True)):
            if number in shared:
                yield self._tied_tensor(i, number, view)
            elif is_direct[i] and view.dtype in plain_dtypes:  # the usual case
                yield from_numpy(view)
            else:
                tensor = self._untied_tensor(view)
                if is_direct[i] and self._torch_form(view)[1] is view.dtype and from_numpy(view).dtype is tensor.dtype:
                    plain_dtypes.add(view.dtype)
                yield tensor

    def _torch_form(self, view: Any) -> tuple[Any, Any]:
        """Return torch's dtype for a view, and a dtype of numpy for the same bytes that torch takes."""
        key = getattr(view, "kind", None) or getattr(view, "dtype", None)
        if key not in self._forms:
            if isinstance(view, np.ndarray):
                kind, bits, carrier = dtypes.from_numpy(view.dtype), 8 * view.itemsize, view.dtype
            else:
                kind, bits, carrier = view.kind, view.kind.bits, np.dtype(np.uint8)
            if carrier.isbuiltin == 2:  # ml_dtypes', which torch does not know
                carrier = np.dtype(np.uint8 if carrier.itemsize == 1 else np.int16)
            self._forms[key] = torch_dtype(self._torch, kind, bits), carrier
        return self._forms[key]

    def _untied_tensor(self, view: Any) -> Any:
        """Return the only tensor of a payload: over its bytes, or a copy on another device, or of negative strides."""
        dtype, carrier = self._torch_form(view)
        if isinstance(view, PackedTensor):
            view = view.packed.reshape(torch_shape(view.kind, view.kind.bits, view.shape))
        if not view.size:
            return self._torch.empty(view.shape, dtype=dtype, device=self._device)  # whatever the default device
        if carrier is not view.dtype:
            view = view.view(carrier)
        if min(view.strides, default=0) < 0:
            view = view.copy()
        tensor = self._torch.from_numpy(self._writable_array(view))
        return (tensor if tensor.dtype is dtype else tensor.view(dtype)).to(self._device)

    def _writable_array(self, view: Array) -> Array:
        """Return an array that torch treats as writable: this one, or a copy if the file cannot be mapped again."""
        if view.flags.writeable:
            return view
        return view.copy("K") if self._copied else _as_writable(view)

    def _tied_tensor(self, i: int, number: int, view: Any) -> Any:
        """Return tensor i, one of several of payload `number`, over the storage that they share."""
        dtype, _ = self._torch_form(view)
        base = self._payload_tensor(number)
        base = base[: len(base) // dtype.itemsize * dtype.itemsize].view(dtype)
        if isinstance(view, PackedTensor):
            return base.view(torch_shape(view.kind, view.kind.bits, view.shape)).detach()
        if min(view.strides, default=0) < 0:
            return self._untied_tensor(view)
        strides = tuple(s // view.itemsize for s in view.strides)
        # A detached tensor is not a view for autograd, but shares the count of in-place writes with its tied ones.
        return base.as_strided(view.shape, strides, self._archive.row(i).byte_offset // view.itemsize).detach()

    def _payload_tensor(self, number: int) -> Any:
        """Return a payload's bytes as one tensor, on the device; the same one at each call."""
        if number not in self._bases:
            octets, offset = self._archive.source.locate(number)
            nbytes = self._archive.index.payloads[number]["nbytes"]
            view: Array = np.ndarray(nbytes, np.uint8, octets, offset)
            self._bases[number] = self._torch.from_numpy(self._writable_array(view)).to(self._device)
        return self._bases[number]


def _as_writable(view: Array) -> Array:
    """Return an array over read-only memory that says it is writable, so that torch does not warn; keeps `view`."""
    interface = view.__array_interface__
    interface["data"] = interface["data"][0], False
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=view))
