"""`safetensors.flax`, over archives: the same functions, with the same arguments. It needs jax, not flax.

Writes archives; reads archives and safetensors files. zcrecord/compat/README.md lists the differences.
"""

from __future__ import annotations

import os
from typing import Any

from zcrecord.compat.safetensors import save, save_file
from zcrecord.compat.safetensors.opening import open_record
from zcrecord.compat.safetensors.opening import safe_open as safe_open  # programs import it from here, too

__all__ = ["load", "load_file", "save", "save_file"]


def load_file(filename: str | os.PathLike[str], *, backend: str = "mmap") -> dict[str, Any]:
    """Return all tensors of a file by name, as jax arrays on its default device; see `Record.jax` on copies.

    Example:
        >>> from jax import numpy as jnp
        >>> save_file({"w": jnp.zeros(2)}, "model.safetensors")
        >>> load_file("model.safetensors")["w"].tolist()
        [0.0, 0.0]

    Raises:
        SourceError: the file is missing or cannot be read. FormatError: it is neither archive nor safetensors file.
        DependencyError: jax is not installed. UnsupportedError: jax would convert elements of 64 bits to 32.
    """
    with open_record(filename, backend=backend, writable=False) as record:
        return record.jax()


def load(data: Any) -> dict[str, Any]:
    """Return all tensors of a file that was read into memory (any bytes-like), by name.

    Example:
        >>> from jax import numpy as jnp
        >>> load(memoryview(save({"w": jnp.ones(2)})))["w"].tolist()
        [1.0, 1.0]

    Raises:
        FormatError: it is neither archive nor safetensors file. DependencyError: jax is not installed.
    """
    with open_record(data, writable=False) as record:
        return record.jax()
