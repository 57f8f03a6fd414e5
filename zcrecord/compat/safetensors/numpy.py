"""`safetensors.numpy`, over archives: the same functions, with the same arguments.

Writes archives; reads archives and safetensors files. zcrecord/compat/README.md lists the differences.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zcrecord.compat.safetensors.opening import open_record, write, write_bytes
from zcrecord.compat.safetensors.opening import safe_open as safe_open  # programs import it from here, too
from zcrecord.compat.safetensors.specs import TensorSpec as TensorSpec  # and these
from zcrecord.compat.safetensors.specs import deserialize as deserialize
from zcrecord.compat.safetensors.specs import serialize as serialize
from zcrecord.compat.safetensors.specs import serialize_file as serialize_file

__all__ = ["load", "load_file", "save", "save_file"]


def save_file(
    tensor_dict: Mapping[str, Any], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays as an archive, whole or not at all; arrays of any strides and byte order come back equal.

    Example:
        >>> import numpy as np
        >>> save_file({"embedding": np.zeros((512, 1024))}, "model.safetensors", metadata={"format": "np"})
        >>> load_file("model.safetensors")["embedding"].shape
        (512, 1024)

    Raises:
        UnsupportedError: a value is not a tensor, or metadata not text. SourceError: the file system reports an error.
    """
    write(tensor_dict, filename, metadata)


def save(tensor_dict: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes that `save_file` writes.

    Example:
        >>> import numpy as np
        >>> load(save({"attention": np.arange(3)}))["attention"].tolist()
        [0, 1, 2]
    """
    return write_bytes(tensor_dict, metadata)


def load_file(filename: str | os.PathLike[str], *, backend: str = "mmap") -> dict[str, Any]:
    """Return all arrays of a file by name; copies none. They may be written, and the file stays as it is.

    Example:
        >>> import numpy as np
        >>> save_file({"w": np.zeros(2)}, "model.safetensors")
        >>> w = load_file("model.safetensors")["w"]
        >>> w += 1
        >>> w.tolist(), load_file("model.safetensors")["w"].tolist()
        ([1.0, 1.0], [0.0, 0.0])

    Raises:
        SourceError: the file is missing or cannot be read. FormatError: it is neither archive nor safetensors file.
    """
    with open_record(filename, backend=backend) as record:
        return dict(record.items())


def load(data: Any) -> dict[str, Any]:
    """Return all arrays of a file that was read into memory (any bytes-like), by name. Copies the bytes once.

    Example:
        >>> import numpy as np
        >>> load(memoryview(save({"w": np.ones(2)})))["w"].tolist()
        [1.0, 1.0]

    Raises:
        FormatError: it is neither archive nor safetensors file. UnsupportedError: its bytes are not contiguous.
    """
    with open_record(data) as record:
        return dict(record.items())
