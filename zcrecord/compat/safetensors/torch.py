"""`safetensors.torch`, over archives: the same functions, with the same arguments.

Written are archives; read are archives and safetensors files. What differs, the package's docstring lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from .opening import on_cpu, open_record, write, write_bytes

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model"]


def save_file(
    tensors: Mapping[str, Any], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as an archive, whole or not at all; tied ones, and overlapping views, stay tied.

    Example:
        >>> import torch
        >>> w = torch.ones(2, 3)
        >>> save_file({"wte": w, "lm_head": w}, "model.safetensors")
        >>> load_file("model.safetensors")["lm_head"].sum().item()
        6.0

    Raises:
        UnsupportedError: a value is no tensor, or sparse, or metadata no text. SourceError: the file system refused.
    """
    write(tensors, filename, metadata)


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes that `save_file` writes.

    Example:
        >>> import torch
        >>> load(save({"attention": torch.arange(3)}))["attention"]
        tensor([0, 1, 2])
    """
    return write_bytes(tensors, metadata)


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
    """Write a module's parameters and buffers as an archive; tied ones under each of their names, stored once.

    `force_contiguous` writes every tensor in C order; without it a dense one keeps its strides, as channels_last.

    Example:
        >>> import torch
        >>> save_model(torch.nn.Linear(3, 2), "model.safetensors")
        >>> load_model(torch.nn.Linear(3, 2), "model.safetensors")
        ([], [])

    Raises:
        UnsupportedError: a tensor is sparse, or on the meta device. SourceError: the file system refused.
    """
    state = model.state_dict()
    write(_contiguous(state) if force_contiguous else state, filename, metadata)


def load_model(
    model: Any, filename: str | os.PathLike[str], strict: bool = True, device: Any = "cpu", *, backend: str = "mmap"
) -> tuple[list[str], list[str]]:
    """Copy a file's tensors into a module; return the names that are missing in the file, and those it has besides.

    A name is not missing where the module ties it to one that was loaded. It is unexpected where the module ties it to
    another, but the file holds two separate tensors: only one of them can be loaded.

    Example:
        >>> import torch
        >>> save_file({"weight": torch.ones(2, 3), "scale": torch.ones(2)}, "model.safetensors")
        >>> load_model(torch.nn.Linear(3, 2), "model.safetensors", strict=False)
        (['bias'], ['scale'])

    Raises:
        RuntimeError: as torch's own `load_state_dict`: a shape differs, or `strict` and a name is missing or
        unexpected. SourceError: the file cannot be read. FormatError: it is neither archive nor safetensors file.
    """
    loaded = load_file(filename, device=device, backend=backend)
    own = model.state_dict()
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    found = [name for name in own if name in loaded]
    missing = _uncovered(missing, own, found)
    unexpected = [*unexpected, *_torn(own, loaded, found)]
    if strict and (missing or unexpected):
        said = [f"Error(s) in loading state_dict for {type(model).__name__} from {os.fspath(filename)}:"]
        said += [f"Missing key(s) in state_dict: {', '.join(map(repr, missing))}"] if missing else []
        said += [f"Unexpected key(s) in state_dict: {', '.join(map(repr, unexpected))}"] if unexpected else []
        raise RuntimeError("\n\t".join(said))
    return missing, unexpected


def _contiguous(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors in C order, those that are one still one; what is no such tensor is left to be refused."""
    out, made = {}, {}
    for name, value in state.items():
        strided = str(getattr(value, "layout", "")) == "torch.strided"
        if strided and not value.is_contiguous():
            key = _view(value)
            if key not in made:
                made[key] = value.contiguous()
            value = made[key]
        out[name] = value
    return out


def _view(tensor: Any) -> tuple[Any, ...]:
    """Return what two tensors have in common if they are one; an empty one is nobody else."""
    where = tensor.data_ptr() or id(tensor)
    return tensor.device, where, tensor.dtype, tuple(tensor.shape), tensor.stride()


def _uncovered(missing: Iterable[str], own: Mapping[str, Any], found: Iterable[str]) -> list[str]:
    """Return the names whose memory lies inside no tensor that was loaded."""
    loaded: dict[Any, list[tuple[int, int]]] = {}
    for name in found:
        loaded.setdefault(_storage(own[name]), []).append(_extent(own[name]))
    out = []
    for name in missing:
        extents = loaded.get(_storage(own[name]), ()) if name in own else ()
        start, end = _extent(own[name]) if extents else (0, 0)
        if not any(lo <= start and end <= hi for lo, hi in extents):
            out.append(name)
    return out


def _torn(own: Mapping[str, Any], loaded: Mapping[str, Any], found: Iterable[str]) -> list[str]:
    """Return the names that the module ties to an earlier one, and the file does not."""
    first: dict[Any, str] = {}
    ties = [(name, first.setdefault(_view(own[name]), name)) for name in found]
    return [name for name, other in ties if name != other and _view(loaded[name]) != _view(loaded[other])]


def _storage(tensor: Any) -> tuple[Any, int]:
    pointer = tensor.untyped_storage().data_ptr()
    return tensor.device, pointer or id(tensor)


def _extent(tensor: Any) -> tuple[int, int]:
    """Return the first address a tensor reaches and one past its last."""
    reach = sum((dim - 1) * stride for dim, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start: int = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.itemsize
