"""`safetensors.torch`, over archives: the same functions, with the same arguments.

Writes archives; reads archives and safetensors files. zcrecord/compat/README.md lists the differences.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from zcrecord.compat.safetensors import save, save_file
from zcrecord.compat.safetensors.opening import on_cpu, open_record
from zcrecord.compat.safetensors.opening import safe_open as safe_open  # programs import it from here, too
from zcrecord.compat.safetensors.specs import TensorSpec as TensorSpec  # and these
from zcrecord.compat.safetensors.specs import deserialize as deserialize
from zcrecord.compat.safetensors.specs import serialize as serialize
from zcrecord.compat.safetensors.specs import serialize_file as serialize_file
from zcrecord.dtypes import by_safetensors
from zcrecord.frameworks.torch import import_torch
from zcrecord.remote.ranges import RangeSet
from zcrecord.tensors.strides import is_dense, reach

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model", "storage_ptr", "storage_size"]


def load_file(filename: str | os.PathLike[str], device: Any = "cpu", *, backend: str = "mmap") -> dict[str, Any]:
    """Return all tensors of a file by name; on the CPU it copies none, and writing to them leaves the file as it is.

    Example:
        >>> import torch
        >>> save_file({"w": torch.zeros(2)}, "model.safetensors")
        >>> load_file("model.safetensors")["w"].add_(1), load_file("model.safetensors")["w"]
        (tensor([1., 1.]), tensor([0., 0.]))

    Raises:
        SourceError: the file is missing or cannot be read. FormatError: it is neither archive nor safetensors file.
        DependencyError: torch is not installed.
    """
    with open_record(filename, backend=backend, writable=on_cpu(device)) as record:
        return record.torch(device=device)


def load(data: Any) -> dict[str, Any]:
    """Return all tensors of a file that was read into memory (any bytes-like), by name. Copies the bytes once.

    Example:
        >>> import torch
        >>> load(memoryview(save({"w": torch.ones(2)})))["w"]
        tensor([1., 1.])

    Raises:
        FormatError: it is neither archive nor safetensors file. DependencyError: torch is not installed.
    """
    with open_record(data) as record:
        return record.torch()


def save_model(
    model: Any,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Write a module's parameters and buffers as an archive; a tied tensor keeps all its names and is stored once.

    `force_contiguous` writes every tensor in C order; without it a dense tensor keeps its strides (channels_last).

    Example:
        >>> import torch
        >>> save_model(torch.nn.Linear(3, 2), "model.safetensors")
        >>> load_model(torch.nn.Linear(3, 2), "model.safetensors")
        ([], [])

    Raises:
        UnsupportedError: a tensor is sparse, or on the meta device. SourceError: the file system reports an error.
    """
    state = model.state_dict()
    save_file(_contiguous(state) if force_contiguous else state, filename, metadata)


def load_model(
    model: Any, filename: str | os.PathLike[str], strict: bool = True, device: Any = "cpu", *, backend: str = "mmap"
) -> tuple[list[str], list[str]]:
    """Copy a file's tensors into a module; return the names that the file lacks, and those that the module lacks.

    A name is not missing if the module ties it to a loaded one. A name is unexpected if the module ties it to another
    but the file has two separate tensors, of which only one can be loaded.

    Example:
        >>> import torch
        >>> save_file({"weight": torch.ones(2, 3), "scale": torch.ones(2)}, "model.safetensors")
        >>> load_model(torch.nn.Linear(3, 2), "model.safetensors", strict=False)
        (['bias'], ['scale'])

    Raises:
        RuntimeError: as torch's own `load_state_dict`: a shape differs, or with `strict` a name is missing or
        unexpected. SourceError: the file cannot be read. FormatError: it is neither archive nor safetensors file.
    """
    loaded = load_file(filename, device=device, backend=backend)
    tensors = model.state_dict()
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    matching = [name for name in tensors if name in loaded]
    missing = _unloaded_names(missing, tensors, matching)
    unexpected = [*unexpected, *_untied_names(tensors, loaded, matching)]
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__} from {os.fspath(filename)}:"]
        lines += [f"Missing key(s) in state_dict: {_quote(missing)}"] if missing else []
        lines += [f"Unexpected key(s) in state_dict: {_quote(unexpected)}"] if unexpected else []
        raise RuntimeError("\n\t".join(lines))
    return missing, unexpected


def _contiguous(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors in C order, tied ones still tied; only others than C order are copied."""
    tensors, copies = dict(state), {}
    for name, value in state.items():
        # Sparse tensors and values that are no tensors are refused by `save_file`.
        if str(getattr(value, "layout", "")) == "torch.strided" and not value.is_contiguous():
            key = _view_key(value)
            if key not in copies:
                copies[key] = value.contiguous()
            tensors[name] = copies[key]
    return tensors


def _view_key(tensor: Any) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors if they are the same view of memory; unique for empty tensors."""
    return tensor.device, tensor.data_ptr() or id(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _unloaded_names(missing: Iterable[str], tensors: Mapping[str, Any], loaded_names: Iterable[str]) -> list[str]:
    """Return the missing names of a module's `tensors` whose memory was not loaded under other names either."""
    loaded_views, loaded_ranges = set[Any](), dict[Any, RangeSet]()
    for name in loaded_names:
        tensor = tensors[name]
        loaded_views.add(_view_key(tensor))
        if is_dense(tensor.shape, tensor.stride()):  # the gaps of any other were not loaded
            loaded_ranges.setdefault(_storage_key(tensor), RangeSet()).add(*_extent(tensor))

    def is_loaded(tensor: Any) -> bool:
        ranges = loaded_ranges.get(_storage_key(tensor))
        return _view_key(tensor) in loaded_views or (ranges is not None and not ranges.missing(*_extent(tensor)))

    return [name for name in missing if name not in tensors or not is_loaded(tensors[name])]


def _untied_names(tensors: Mapping[str, Any], loaded: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return those of `names` that the module's `tensors` tie to an earlier one, and the file's `loaded` do not."""
    first: dict[Any, str] = {}
    ties = [(name, first.setdefault(_view_key(tensors[name]), name)) for name in names]
    return [n for n, earlier in ties if n != earlier and _view_key(loaded[n]) != _view_key(loaded[earlier])]


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in sorted(names))  # torch's and safetensors' form: programs search for it


def _storage_key(tensor: Any) -> tuple[Any, int]:
    return tensor.device, storage_ptr(tensor) or id(tensor)


def _extent(tensor: Any) -> tuple[int, int]:
    """Return the first address of a tensor's elements, and the address past its last."""
    start: int = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    return start, start + (reach(tensor.shape, tensor.stride())[1] + 1) * tensor.itemsize


# Names that transformers, vLLM, torch and others import from safetensors.torch, though many are private there.


def storage_ptr(tensor: Any) -> int:
    """Return the address of the memory that a tensor is a view of; 0 if it has no memory.

    Example:
        >>> import torch
        >>> w = torch.ones(2, 3)
        >>> storage_ptr(w) == storage_ptr(w[1]) != w[1].data_ptr()
        True
    """
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # devices without addresses
        return 0


def storage_size(tensor: Any) -> int:
    """Return the size in bytes of the memory that a tensor is a view of.

    Example:
        >>> import torch
        >>> storage_size(torch.ones(2, 3)[1])
        24
    """
    return int(tensor.untyped_storage().nbytes())


def _end_ptr(tensor: Any) -> int:
    return _extent(tensor)[1]


def _is_complete(tensor: Any) -> bool:
    whole: bool = tensor.numel() * tensor.itemsize == storage_size(tensor)
    return whole and bool(tensor.data_ptr() == storage_ptr(tensor))


def _find_shared_tensors(state_dict: Mapping[str, Any]) -> list[set[str]]:
    """Return groups of names whose tensors overlap, directly or by others; tensors without memory are in no group."""
    names_by_storage: dict[Any, list[str]] = {}
    for name, tensor in state_dict.items():
        if tensor.device.type != "meta" and storage_ptr(tensor) and storage_size(tensor):
            names_by_storage.setdefault((*_storage_key(tensor), storage_size(tensor)), []).append(name)
    groups: list[set[str]] = []
    for names in names_by_storage.values():
        group_end = -1
        for start, end, name in sorted((*_extent(state_dict[name]), name) for name in names):
            if start >= group_end:
                groups.append(set())
            groups[-1].add(name)
            group_end = max(group_end, end)
    return groups


def _remove_duplicate_names(
    state_dict: Mapping[str, Any],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
) -> dict[str, list[str]]:
    """Return, for groups of overlapping tensors, the name to keep and the names to leave out.

    The tensor to keep covers its whole storage. If several do, names in `preferred_names` come first, names in
    `discard_names` last, and then the first by alphabet.

    Raises:
        RuntimeError: no tensor of a group covers its whole storage; safetensors raises the same.
    """
    preferred, discarded = set(preferred_names or ()), set(discard_names or ())
    duplicates: dict[str, list[str]] = {}
    for group in _find_shared_tensors(state_dict):
        complete = {name for name in group if _is_complete(state_dict[name])}
        if not complete:
            fault = "none of them is all of the memory that it is a view of; save clones of them"
            raise RuntimeError(f"{', '.join(sorted(group))}: {fault}")
        name = min(complete & preferred or complete - discarded or complete)
        if len(group) > 1:
            duplicates[name] = sorted(group - {name})
    return duplicates


def _types() -> dict[str, Any]:
    """Return torch's dtypes by safetensors' names, as far as this torch has them."""
    torch = import_torch()
    dtypes = {name: kind.torch and getattr(torch, kind.torch, None) for name, kind in by_safetensors.items()}
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


def _getdtype(dtype_str: str) -> Any:
    return _types()[dtype_str]


def __getattr__(name: str) -> Any:
    if name == "_TYPES":  # here, because the import of this module works without torch
        return _types()
    if name == "_SIZE":
        return {dtype: dtype.itemsize for dtype in _types().values()}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
