"""How the neighbours save and load the same tensors: safetensors with numpy and with torch, npz, torch.load, gguf.

Each is used as its documentation shows it. None is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SAFETENSORS = "safetensors"
SAFETENSORS_TORCH = "safetensors torch"
NPZ = "npz"
TORCH = "torch.load(mmap)"
GGUF = "gguf"

Tensors = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One neighbour: `save` writes tensors, `one` gets one of them by name, `all` gets all, as it gives them."""

    suffix: str
    save: Callable[[Path, Tensors], None]
    one: Callable[[Path, str], object]
    all: Callable[[Path], dict[str, Any]]


def _st_save(path: Path, tensors: Tensors) -> None:
    from safetensors.numpy import save_file

    save_file(dict(tensors), path)


def _st_one(framework: str, path: Path, name: str) -> object:
    from safetensors import safe_open

    with safe_open(path, framework=framework) as file:
        return file.get_tensor(name)


def _st_all(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping


def _torch_tensors(tensors: Tensors) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in tensors.items()}


def _stt_save(path: Path, tensors: Tensors) -> None:
    from safetensors.torch import save_file

    save_file(_torch_tensors(tensors), path)


def _stt_all(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    loaded: dict[str, Any] = load_file(path)
    return loaded


def _npz_save(path: Path, tensors: Tensors) -> None:
    np.savez(path, **tensors)  # type: ignore[arg-type]


def _npz_one(path: Path, name: str) -> object:
    with np.load(path) as file:
        return file[name]


def _npz_all(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return dict(file)


def _torch_save(path: Path, tensors: Tensors) -> None:
    import torch

    torch.save(_torch_tensors(tensors), path)


def _torch_all(path: Path) -> dict[str, Any]:
    import torch

    loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return loaded


def save_gguf(path: Path, tensors: Tensors, words: int = 0) -> None:
    """Write a GGUF file, with a vocabulary of so many words."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    if words:
        writer.add_array("tokenizer.ggml.tokens", [f"word{i}" for i in range(words)])
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_all(path: Path) -> dict[str, Any]:
    import gguf

    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}


PEERS = {
    SAFETENSORS: Peer("safetensors", _st_save, partial(_st_one, "np"), _st_all),
    SAFETENSORS_TORCH: Peer("pt.safetensors", _stt_save, partial(_st_one, "pt"), _stt_all),
    NPZ: Peer("npz", _npz_save, _npz_one, _npz_all),
    TORCH: Peer("pt", _torch_save, lambda path, name: _torch_all(path)[name], _torch_all),
    GGUF: Peer("gguf", save_gguf, lambda path, name: _gguf_all(path)[name], _gguf_all),
}
