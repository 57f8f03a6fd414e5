"""Tensors whose elements a framework has no type for: strings, and some that are narrower than a byte.

They come as the record's own views, beside the framework's tensors, so that every saved tensor is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zcrecord.archive import subset
from zcrecord.archive.archive import Archive
from zcrecord.archive.subset import Names
from zcrecord.dtypes import DType, by_code
from zcrecord.errors import RecordError, UnsupportedError

Holds = Callable[[DType, int, tuple[int, ...]], bool]


def beside_views(
    archive: Archive, names: Names | None, holds: Holds, make: Callable[[Archive], dict[str, Any]]
) -> dict[str, Any]:
    """Return tensors by name, in saved order: those that a framework has a type for from `make`, others as views.

    `holds` tells if it has tensors of an element type, in so many bits, and a shape; `make` gets an archive of those.
    """
    if names is not None:
        archive = subset.select(archive, names, None)
    archive.ensure_all()
    kinds = map(by_code.get, set(archive.index.tensors["dtype"].tolist()))
    if all(kind and kind.bits >= 8 and holds(kind, kind.bits, ()) for kind in kinds):  # the usual case
        return make(archive)
    views = {}
    for i, name in enumerate(archive.names()):
        row = archive.row(i)
        kind = by_code.get(row.dtype)
        if kind is None or not holds(kind, row.bits, archive.shape(row)):
            views[name] = archive.view(i)
    tensors = make(subset.select(archive, lambda tensor: tensor.name not in views, None))
    return {name: views[name] if name in views else tensors[name] for name in archive.names()}


def unsupported_elements(kind: str, fault: str) -> RecordError:
    """Return the error for elements of type `kind`, which a framework has no type for; `fault` is its first part."""
    return UnsupportedError(f"{fault}; leave such out with names=lambda tensor: tensor.dtype.name != {kind!r}")
