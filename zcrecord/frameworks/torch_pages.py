"""torch tensors over a mapped file, for programs that use parts of them: only the pages of those parts are read.

The system's read-ahead would read most of the file for rows and columns of tensors; without it, each page is a request,
for which the program waits. So read-ahead is switched off, and all pages of a tensor, or of a part of one, are
requested before it is read (copied, compared, multiplied). Views (`narrow`, `[...]`, `view`, `chunk` and so on) read
nothing.

torch has no read-only tensors: a write to a read-only mapping ends the process. So a tensor gets memory of its own
before it is written. One case is not noticed: after `parameter.data = tensor` the parameter lies on the file; use
`tensor.clone()`.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from zcrecord.storage.memory import advise

from .torch import import_torch

Runs = list[tuple[int, int]]  # addresses and sizes
_REQUEST = 1 << 17  # bytes of one request: the system cuts longer ones at the device's largest request
_MAX_RUNS = 1 << 20  # runs of pages of one tensor that are requested one by one

# Methods and functions that read no element: they return views, or facts about the tensor.
_LOOKS = frozenset(
    {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point"}
    | {"is_pinned", "ndimension", "nelement", "numel", "size", "storage_offset", "stride", "untyped_storage"}
    | {"chunk", "detach", "expand", "flatten", "movedim", "narrow", "permute", "reshape", "select", "split", "squeeze"}
    | {"swapaxes", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"}
)
_WRITES = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
    | {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
)


def paged(tensor: Any, check: Callable[[Runs, bool], None] | None = None) -> Any:
    """Return a torch tensor over the same memory, whose pages are requested when it or a part of it is read.

    It is of a subclass of `torch.Tensor`; results that are not views of it are plain tensors. The first write copies
    its storage: the file and its other tensors stay as they are. `check` is called before elements are read, with the
    runs of pages to be read, and True if that is all of the tensor. It requests those that it reads, and checks them.
    """
    result = tensor.as_subclass(_tensor_class())
    result.mapped, result.check = True, check
    if hasattr(mmap, "MADV_RANDOM"):
        advise(tensor.data_ptr(), tensor.untyped_storage().nbytes(), mmap.MADV_RANDOM)
    return result


@functools.cache
def _tensor_class() -> Any:
    """Return the subclass; made at the first call, since it needs torch."""
    torch = import_torch()
    base: Any = torch.Tensor

    class PagedTensor(base):  # type: ignore[misc]  # its class is known when torch is imported
        """A tensor over a mapped file, or a view of one.

        A view has `whole`, the tensor of the file, which has `mapped`, False once it has memory of its own, and
        `check`.
        """

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            inputs = [value for value in _flatten([*args, *(kwargs or {}).values()]) if isinstance(value, cls)]
            with torch._C.DisableTorchFunctionSubclass():  # as torch's notes on subclasses do
                mapped = [value for value in inputs if _is_mapped(value)]
                _prepare_inputs(func.__name__, mapped, args, kwargs or {})
                out = func(*args, **(kwargs or {}))
                return _wrap_result(cls, out, [value for value in mapped if _whole_tensor(value).mapped])

    return PagedTensor


def _prepare_inputs(name: str, inputs: list[Any], args: Any, kwargs: Any) -> None:
    """Request the pages that a call will read, and give memory of its own to a tensor that it will write."""
    outputs = [kwargs.get("out")]
    if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
        outputs.append(args[0] if args else None)
    for tensor in inputs:
        if any(tensor is output for output in outputs):
            _make_private(tensor)
        elif name not in _LOOKS and not (name == "__getitem__" and _selects_view(args[1])):
            _request_tensor(tensor)


def _selects_view(index: Any) -> bool:
    """Return True if an index selects a view: with arrays and tensors it selects a copy."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, int | slice) for part in parts)


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of nested lists and tuples."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flatten(value)
        else:
            yield value


def _wrap_result(cls: Any, out: Any, inputs: list[Any]) -> Any:
    """Return a call's result, in which tensors over the storage of an input are of the subclass, with its `whole`."""
    if isinstance(out, list | tuple) and inputs:
        wrapped = [_wrap_result(cls, tensor, inputs) for tensor in out]
        return wrapped if isinstance(out, list) else tuple(wrapped) if type(out) is tuple else out
    if not inputs or not hasattr(out, "untyped_storage") or isinstance(out, cls):
        return out
    address = out.untyped_storage().data_ptr()
    for tensor in inputs:
        if address and tensor.untyped_storage().data_ptr() == address:
            view = out.as_subclass(cls)
            view.whole = _whole_tensor(tensor)
            return view
    return out


def _whole_tensor(tensor: Any) -> Any:
    return tensor.__dict__.get("whole", tensor)  # not stored for itself: a cycle would delay the mapping's close


def _is_mapped(tensor: Any) -> bool:
    """Return True if a tensor lies on the file; a view of a moved tensor is moved first."""
    whole = _whole_tensor(tensor)
    if not whole.mapped and tensor is not whole:
        _set_storage(tensor, whole.untyped_storage())
    return bool(whole.mapped)


def _make_private(tensor: Any) -> None:
    """Give a tensor, and the whole tensor that it is a part of, memory of their own."""
    whole = _whole_tensor(tensor)
    if whole.mapped:
        _request_tensor(whole)
        _set_storage(whole, whole.untyped_storage().clone())
        whole.mapped = False
    _set_storage(tensor, whole.untyped_storage())


def _set_storage(tensor: Any, storage: Any) -> None:
    if tensor.untyped_storage().data_ptr() != storage.data_ptr():
        tensor.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _request_tensor(tensor: Any) -> None:
    """Make the system read the pages of a tensor, without waiting, and call `check`."""
    if tensor.numel():
        runs = _page_runs(tensor.data_ptr(), tensor.element_size(), tensor.shape, tensor.stride())
        request(runs)
        whole = _whole_tensor(tensor)
        if whole.check is not None:
            whole.check(runs, tensor.numel() >= whole.numel())


def request(runs: Runs) -> None:
    """Make the system read runs of pages, without waiting."""
    for start, nbytes in runs if hasattr(mmap, "MADV_WILLNEED") else ():
        end = start + nbytes
        for address in range(start, end, _REQUEST):
            advise(address, min(_REQUEST, end - address), mmap.MADV_WILLNEED)


def _page_runs(address: int, itemsize: int, shape: Iterable[int], strides: Iterable[int]) -> Runs:
    """Return start and size of each run of neighbouring pages that hold an element; strides count elements."""
    run, count = itemsize, 1  # bytes from each start on, and the number of starts
    starts = np.zeros(1, np.int64)
    for stride, length in sorted((s * itemsize, n) for n, s in zip(shape, strides, strict=True) if n > 1 and s):
        if stride <= run or count * length > _MAX_RUNS:
            run = max(run, run + stride * (length - 1))  # without gaps, or including the gaps
        else:
            starts = np.add.outer(np.arange(length) * stride, starts).ravel()
            count *= length
    first_pages = (address + starts) // mmap.PAGESIZE
    last_pages = (address + starts + run - 1) // mmap.PAGESIZE
    gaps = np.flatnonzero(first_pages[1:] > last_pages[:-1] + 1) + 1
    lows, highs = first_pages[np.r_[0, gaps]], last_pages[np.r_[gaps - 1, len(last_pages) - 1]]
    sizes = (highs - lows + 1) * mmap.PAGESIZE
    return list(zip((lows * mmap.PAGESIZE).tolist(), sizes.tolist(), strict=True))
