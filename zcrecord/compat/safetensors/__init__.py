"""safetensors' Python package, over archives: change the import, and nothing else, to try zcrecord.

    from zcrecord.compat.safetensors import safe_open
    from zcrecord.compat.safetensors.torch import load_file, load_model, save_file, save_model
    from zcrecord.compat.safetensors.numpy import load, load_file, save, save_file

Names, arguments and results are those of safetensors 0.8.0. What is written are zcrecord archives, whatever the name
of the file; archives and genuine safetensors files are read alike, told apart by their content. Beyond it, this package
has `save_file`, `load_file`, `save` and `load` itself, for tensors of any library.

What differs, and why:

- Tied tensors and overlapping views are saved, once, and come back tied: `save_file` refuses none, and `save_model`
  drops no name. Tensors of any strides are saved, as they are or packed.
- Arrays of numpy are not copied: they lie on a private mapping whose pages are copied when they are written. They may
  be written as safetensors' may, and two calls for one name give the same memory, as torch's do there.
- `keys()` are in saved order, not sorted; `sorted(f.keys())` is what safetensors gives.
- `safe_open` has `len`, `in`, iteration and `f[name]` besides; slices may have negative bounds, and take whatever
  index the framework takes. An index out of bounds is an IndexError for numpy too.
- More types: bfloat16, float8 and 4-bit ones in numpy (ml_dtypes; those narrower than a byte as PackedTensor),
  complex128, strings. `get_dtype()` gives numpy's name for those safetensors has none for.
- `load` takes a memoryview, or any bytes-like.
- Names are not empty and have no NUL.
- Frameworks are torch, numpy and jax; not TensorFlow, MLX and Paddle. `serialize`, `deserialize` and `TensorSpec`,
  which deal in addresses, are not there.
- Every error is a `SafetensorError`, which is `zcrecord.RecordError`, and says where and what to do; a missing file is
  a FileNotFoundError, too, a missing name a KeyError, a value that cannot be saved a TypeError (there a ValueError).
  `load_model` raises torch's RuntimeError, as there.
- `load_model` returns two lists, as safetensors' documentation says; there the first is a set.
- A saved file survives power loss: file and folder are synced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .opening import SafetensorError, safe_open, write, write_bytes

__all__ = ["SafetensorError", "load", "load_file", "safe_open", "save", "save_file"]


def save_file(
    tensors: Mapping[str, Any], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors of numpy, torch or jax as an archive, whole or not at all.

    Example:
        >>> import numpy as np
        >>> save_file({"w": np.ones((2, 3))}, "model.safetensors")
        >>> load_file("model.safetensors")["w"].shape
        (2, 3)

    Raises:
        UnsupportedError: a value is no tensor, or metadata no text. SourceError: the file system refused.
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
    """Return all tensors of a file that was read into memory (any bytes-like), by name.

    Example:
        >>> import numpy as np
        >>> load(save({"w": np.arange(3)}))["w"].tolist()
        [0, 1, 2]
    """
    with safe_open(data, framework, device) as file:
        return file.get_tensors()
