"""safetensors' Python package, over archives: change only the import to try zcrecord.

    from zcrecord.compat.safetensors import safe_open
    from zcrecord.compat.safetensors.torch import load_file, load_model, save_file, save_model
    from zcrecord.compat.safetensors.numpy import load, load_file, save, save_file
    from zcrecord.compat.safetensors.flax import load, load_file, save, save_file

Names, arguments and results are those of safetensors 0.8.0. All functions write zcrecord archives, whatever the suffix
of the file, and read archives and genuine safetensors files, which they distinguish by content. In addition to
safetensors, this package itself has `save_file`, `load_file`, `save` and `load`, for tensors of any library.

For a program that imports safetensors itself, such as transformers, run this before its import:

    import sys
    import zcrecord.compat.safetensors

    sys.modules["safetensors"] = zcrecord.compat.safetensors

zcrecord/compat/README.md lists the intended differences, with reasons: bytes, ties, strides, orders, wordings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

# Absolute imports, here and in the modules beside it: in sys.modules this package may have the name `safetensors`.
from zcrecord.compat.safetensors.opening import SafetensorError, safe_open, write, write_bytes
from zcrecord.compat.safetensors.specs import TensorSpec, deserialize, serialize, serialize_file
from zcrecord.errors import UnsupportedError

__all__ = [
    "SafetensorError",
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "safe_open",
    "save",
    "save_file",
    "serialize",
    "serialize_file",
]

__version__ = "0.8.0"  # of the safetensors whose names these are: programs ask for one that is new enough


def save_file(
    tensors: Mapping[str, Any], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors of numpy, torch or jax as an archive, whole or not at all; tied ones, and views, stay tied.

    Example:
        >>> import numpy as np
        >>> save_file({"w": np.ones((2, 3))}, "model.safetensors")
        >>> load_file("model.safetensors")["w"].shape
        (2, 3)

    Raises:
        UnsupportedError: a value is not a tensor, or metadata not text. SourceError: the file system reports an error.
    """
    write(tensors, filename, metadata)


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes that `save_file` writes.

    Example:
        >>> import numpy as np
        >>> save({"w": np.arange(3)})[:4]
        b'\\x89ZCR'
    """
    return write_bytes(tensors, metadata)


def load_file(
    filename: str | os.PathLike[str], framework: str = "np", device: Any = "cpu", *, backend: str = "mmap"
) -> dict[str, Any]:
    """Return all tensors of a file by name, as arrays of numpy unless another framework is named.

    Example:
        >>> import torch
        >>> save_file({"w": torch.arange(3)}, "model.safetensors")
        >>> load_file("model.safetensors", framework="pt")["w"]
        tensor([0, 1, 2])

    Raises:
        UnsupportedError, SourceError, FormatError: as `safe_open` does.
    """
    with safe_open(filename, framework, device, backend=backend) as file:
        return file.get_tensors()


def load(data: Any, framework: str = "np", device: Any = "cpu") -> dict[str, Any]:
    """Return all tensors of a file that was read into memory (any bytes-like), by name; numpy's copy the bytes once.

    Example:
        >>> import numpy as np
        >>> load(save({"w": np.arange(3)}))["w"].tolist()
        [0, 1, 2]

    Raises:
        FormatError: it is neither an archive nor a safetensors file. UnsupportedError: `data` is a path, or an unknown
            framework or device.
    """
    if isinstance(data, str | os.PathLike):
        raise UnsupportedError("load() takes the bytes of a file; load_file() takes its path")
    with safe_open(data, framework, device) as file:
        return file.get_tensors()


def _safe_open_handle(f: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> safe_open:
    """Open a file object: by its name if it has one, so from the start, else by reading it to its end."""
    if not hasattr(f, "read"):
        raise UnsupportedError(f"an open file is expected, not a {type(f).__name__}")
    name = getattr(f, "name", None)
    return safe_open(name if isinstance(name, str | os.PathLike) else f.read(), framework, device, backend=backend)
