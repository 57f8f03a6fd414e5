"""A record nested as it was saved, with tensors of numpy, torch or jax; or as a pytree built like another.

Such a pytree's structure (named tuples, optimizer states, other classes that jax knows) is a template's; what fills it
is the record's, found by the keys on the way to each leaf, under which `tree` saved it. The tensors are `handover`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.codec import conventions
from zcrecord.codec.entries import ModuleKind
from zcrecord.errors import MismatchError, RecordError, UnsupportedError, printable
from zcrecord.tensors.interop import path_key

__all__ = ["tree"]

_KINDS = ("numpy", "torch", "jax")
_TODO = "make the template of what was saved, such as optimizer.init(params)"


class _Module(NamedTuple):
    """A saved module: its items by their keys as text, and whether it is an object of a class."""

    items: dict[str, Any]
    is_object: bool


class _Leaf(NamedTuple):
    """A tensor or attribute, which the template may have a place for."""

    value: Any
    is_tensor: bool


def tree(record: Any, tensors: str = "numpy", device: Any = None, like: Any = None) -> Any:
    """Return a record nested as it was saved: dicts, lists and tuples of tensors and plain values.

    Named tuples come as tuples, dataclasses as dicts, numpy's scalars as arrays of rank 0, bytes as memoryviews. What
    torch or jax have no type for is refused; leave it out with `record.select(...)`.

    Args:
        record: a Record.
        tensors: "numpy": views, uncopied. "torch": those of one call of `Record.torch`: on the CPU on private pages,
            which may be written, tied ones one memory. "jax": those of `Record.jax`.
        device: where torch's are; the CPU by default.
        like: a pytree of the same structure, such as `optimizer.init(params)` or what `jax.eval_shape` gives for it, to
            be built anew of what was saved. Its arrays give shapes, no values, and dtypes are those that were saved;
            None and other structure stay as they are in it.

    Raises:
        MismatchError: a leaf of `like` is not in the record, or has another shape there; or `like` has no place for a
        tensor or value of the record. UnsupportedError: arguments that do not go together, a tensor of
        elements that torch or jax have no type for. DependencyError: torch or jax is not installed.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"state": {0: {"step": np.float32(5)}}, "betas": (0.9, 0.999)}, "run.zcr")
        >>> zcrecord.load_record("run.zcr").tree("torch")
        {'state': {0: {'step': tensor(5.)}}, 'betas': (0.9, 0.999)}
    """
    archive = record.archive
    _check(tensors, device, like)
    if tensors == "numpy":
        found = list(archive.views())
    else:
        by_name = record.jax() if tensors == "jax" else record.torch("cpu" if device is None else device)
        found = [by_name[name] for name in record.names]
    if like is not None:
        return _filled(archive, found, like)
    return unflatten.unflatten(archive.index, 0, found.__getitem__, archive.payload)


def _check(tensors: object, device: object, like: object) -> None:
    """Raise UnsupportedError for arguments that do not go together."""
    if tensors not in _KINDS:
        raise UnsupportedError(f"tensors={printable(repr(tensors))} is not known; 'numpy', 'torch' or 'jax'")
    if device is not None and tensors != "torch":
        raise UnsupportedError("device= is for tree('torch'); jax's arrays lie on its default device")
    if like is not None and tensors != "jax":
        raise UnsupportedError("like= is for tree('jax'); load_record(..., into=) fills classes with numpy's arrays")


def _filled(archive: Archive, tensors: Sequence[Any], like: Any) -> Any:
    """Return a pytree of the structure of `like`, each leaf the tensor or attribute that was saved at its place."""
    from .handover import import_jax  # here, because few trees are jax's

    tree_util = import_jax().tree_util
    leaves, structure = tree_util.tree_flatten_with_path(like)
    root = unflatten.unflatten(archive.index, 0, lambda i: _Leaf(tensors[i], True), archive.payload, _made)
    used: set[int] = set()
    try:
        values = [_found(root, path, leaf, used) for path, leaf in leaves]
        for where, left in _left(root, "", used):
            what = f"expected no such key, found {_told(left)}: like= has no place for it"
            raise MismatchError(f"{what}; {_TODO}", tensor=where)
    except RecordError as error:
        raise error.located(path=archive.path) from error.__cause__
    return tree_util.tree_unflatten(structure, values)


def _made(kind: int, type_name: str, items: list[tuple[str, Any]]) -> Any:
    children = {key: value if isinstance(value, _Module | _Leaf) else _Leaf(value, False) for key, value in items}
    if kind == ModuleKind.OBJECT:
        value = conventions.value_of_object(type_name, [(key, child.value) for key, child in _leaves_of(children)])
        if value is not conventions.ABSENT:
            return _Leaf(value, False)
    return _Module(children, kind == ModuleKind.OBJECT)


def _leaves_of(children: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the items of a module all of whose children are leaves, none of any other."""
    return list(children.items()) if all(isinstance(child, _Leaf) for child in children.values()) else []


def _found(root: _Module, path: Sequence[Any], leaf: Any, used: set[int]) -> Any:
    """Return what the record has at a leaf's place."""
    here: Any = root
    keys = [str(path_key(step)) for step in path]
    for depth, key in enumerate(keys):
        inner = here.items.get(key) if isinstance(here, _Module) else _item(here, key, used)
        if inner is None:
            where = ".".join(keys[: depth + 1])
            raise MismatchError(f"expected {_wanted(leaf)}, found no such key; {_TODO}", tensor=where)
        here = inner
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    fits = isinstance(here, _Leaf) and (here.is_tensor or not is_array)
    if fits and here.is_tensor and is_array:
        fits = tuple(leaf.shape) == tuple(here.value.shape)  # an optimizer's dtypes may not be those of its init
    if not fits:
        raise MismatchError(f"expected {_wanted(leaf)}, found {_told(here)}; {_TODO}", tensor=".".join(keys) or None)
    used.add(id(here))
    return here.value


def _item(here: Any, key: str, used: set[int]) -> Any:
    """Return one item of a list or tuple that is an attribute; None if there is none."""
    if not isinstance(here, _Leaf) or not isinstance(here.value, list | tuple) or not key.isdecimal():
        return None
    used.add(id(here))
    return _Leaf(here.value[int(key)], False) if int(key) < len(here.value) else None


def _left(here: Any, where: str, used: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield what no leaf of the template took; None and empty lists are structure, as plain fields of a class are."""
    for key, child in here.items.items():
        name = f"{where}.{key}" if where else key
        if isinstance(child, _Module):
            yield from _left(child, name, used)
        elif id(child) not in used and (child.is_tensor or not (here.is_object or child.value in (None, [], ()))):
            yield name, child


def _wanted(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"an array of {leaf.dtype}, shape {tuple(leaf.shape)}"
    return f"a value as {printable(repr(leaf), 60)}"


def _told(found: Any) -> str:
    if isinstance(found, _Module):
        return "a module"
    if found.is_tensor:
        return f"an array of {found.value.dtype}, shape {tuple(found.value.shape)}"
    value = found.value
    return "None" if value is None else f"{type(value).__name__} {printable(repr(value), 60)}"
