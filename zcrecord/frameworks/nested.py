"""A record nested as it was saved, with tensors of numpy, torch or jax."""

from __future__ import annotations

from typing import Any

from zcrecord.archive import unflatten
from zcrecord.errors import UnsupportedError, printable


def tree(record: Any, tensors: str = "numpy", device: Any = None, like: Any = None) -> Any:
    """Return a record nested as it was saved: dicts, lists and tuples of tensors and plain values.

    Named tuples come as tuples, dataclasses as dicts, numpy's scalars as arrays of rank 0, bytes as memoryviews.
    Tensors that torch or jax have no type for, such as strings, come as the record's own views.

    Args:
        tensors: "numpy": views, uncopied. "torch": those of one call of `Record.torch`: on the CPU on private pages,
            which may be written; tied tensors share memory. "jax": those of `Record.jax`.
        device: of torch's tensors; the CPU by default.
        like: a pytree of the same structure, such as `optimizer.init(params)` or its `jax.eval_shape`. The result has
            its structure and the saved values. Of its arrays the shapes count, and shardings other than the default
            device: each process reads the shards of its own devices. Dtypes are the saved ones.

    Raises:
        MismatchError: a leaf of `like` is not in the record, or has another shape there; or `like` has no place for a
        tensor or value of the record. UnsupportedError: arguments that exclude each other; or jax would convert
        elements of 64 bits to 32. DependencyError: torch or jax is not installed.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"state": {0: {"step": np.float32(5)}}, "betas": (0.9, 0.999)}, "run.zcr")
        >>> zcrecord.load_record("run.zcr").tree("torch")
        {'state': {0: {'step': tensor(5.)}}, 'betas': (0.9, 0.999)}
    """
    if tensors not in ("numpy", "torch", "jax"):
        raise UnsupportedError(f"tensors={printable(repr(tensors))} is not known; 'numpy', 'torch' or 'jax'")
    if device is not None and tensors != "torch":
        raise UnsupportedError("device= is for tree('torch'); jax's arrays lie on its default device")
    if like is not None and tensors != "jax":
        raise UnsupportedError("like= is for tree('jax'); load_record(..., into=) fills classes with numpy's arrays")
    archive = record.archive
    if like is not None:
        from .jax import like_template  # here, because few trees are jax's

        return like_template(record, like)
    if tensors == "numpy":
        leaves = list(archive.views())
    else:
        by_name = record.jax() if tensors == "jax" else record.torch("cpu" if device is None else device)
        leaves = [by_name[name] for name in record.names]
    return unflatten.unflatten(archive.index, 0, leaves.__getitem__, archive.payload)
