"""An archive's tensors as jax's: over the archive's own memory where jax can use it, copied where it cannot.

==============  ======================================================================================================
CPU             over the mapping, uncopied: elements of whole bytes, in C order, at an address that is a multiple of
                64, as in archives unless `alignment=` was less; all other tensors, and all in mode "c", are copied
device          one copy, on the device
==============  ======================================================================================================

`loaders.jax` has arrays that are sharded over devices.

A pytree (named tuples, optimizer states, other classes that jax knows) is built like a template; the values come from
the record, by the keys on the path to each leaf, under which the tree was saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.archive.payloads import check_views
from zcrecord.archive.subset import Names
from zcrecord.codec import conventions
from zcrecord.codec.entries import ModuleKind
from zcrecord.codec.index import numpy_type
from zcrecord.dtypes import Array
from zcrecord.errors import MismatchError, located, missing_package, printable
from zcrecord.tensors.interop import path_key

from .elements import beside_views, unsupported_elements
from .torch import shared_payloads

_ADVICE = "make the template from the saved object, such as optimizer.init(params)"


def jax_arrays(archive: Archive, names: Names | None = None) -> dict[str, Any]:
    """Return jax arrays by name, in saved order, on jax's default device; tied ones are one and the same array.

    The table above tells which are copied. Donating an uncopied array to a jitted function is safe: jax writes to no
    memory that it does not own. Tensors that jax has no type for, such as strings, come as the record's own views.

    Raises:
        DependencyError: jax is not installed. TensorNotFoundError: no tensor has a name without wildcards.
        UnsupportedError: jax would convert elements of 64 bits to 32; set `jax_enable_x64`, or leave the tensor out.
        LimitError: copies of different views of the same bytes would be far larger than the archive.
    """
    jax = import_jax()
    return beside_jax_views(archive, names, lambda part: dict(zip(part.names(), _arrays(jax, part), strict=True)))


def beside_jax_views(
    archive: Archive, names: Names | None, make: Callable[[Archive], dict[str, Any]]
) -> dict[str, Any]:
    """Return tensors by name: those that jax has a type for from `make`, the others as views of the record."""
    jax = import_jax()

    @functools.cache
    def has_type(dtype: np.dtype[Any] | None) -> bool:
        try:
            return dtype is not None and jax.device_put(np.zeros(1, dtype)) is not None
        except (TypeError, ValueError, RuntimeError):
            return False

    return beside_views(archive, names, lambda kind, _bits, _shape: has_type(kind.numpy), make)


def import_jax() -> Any:
    """Return jax; raise DependencyError if it is not installed."""
    try:
        import jax
    except ImportError as error:
        raise missing_package("jax", extra="jax") from error
    return jax


def _arrays(jax: Any, archive: Archive) -> Iterator[Any]:
    """Yield every tensor as an array of jax, in saved order; tied ones as one and the same array."""
    copy = functools.partial(jax.numpy.array, copy=True)
    put: Callable[[Array], Any] = jax.device_put if archive.mode == "r" else copy
    checked_dtypes(jax, archive)
    shared = shared_payloads(archive)
    tied: dict[Any, Any] = {}
    for i, (number, view) in enumerate(zip(archive.index.tensors["payload"].tolist(), archive.views(), strict=True)):
        if number not in shared:
            yield put(as_jax_input(view))
            continue
        row = archive.row(i)
        key = number, row.byte_offset, row.dtype, archive.shape(row), archive.strides(row)
        if key not in tied:
            tied[key] = put(as_jax_input(view))
        yield tied[key]


def checked_dtypes(jax: Any, archive: Archive) -> list[np.dtype[Any]]:
    """Return each tensor's numpy dtype; UnsupportedError if jax would convert it, LimitError as `jax_arrays`."""
    check_views(archive)
    codes = archive.index.tensors["dtype"].tolist()
    dtype_of = {code: numpy_type(code) for code in codes}
    for code, dtype in dtype_of.items():
        converted = jax.device_put(np.zeros(1, dtype)).dtype
        if converted != dtype:
            enable = 'jax.config.update("jax_enable_x64", True)'
            fault = f"jax would make {converted} of {dtype}, unless {enable} comes first"
            error = unsupported_elements(dtype.name, fault)
            raise error.located(path=archive.path, tensor=archive.index.name(codes.index(code)))
    return [dtype_of[code] for code in codes]


def as_jax_input(view: Any) -> Array:
    """Return a view as an array that jax takes; narrow elements are unpacked."""
    return view if isinstance(view, np.ndarray) else view.unpack()


class _Branch(NamedTuple):
    """A saved module: its items by their keys as text, and whether it is an object of a class."""

    items: dict[str, Any]
    is_object: bool


class _Leaf(NamedTuple):
    """A tensor or attribute, which may be a leaf of the template."""

    value: Any
    is_tensor: bool


def like_template(record: Any, like: Any, *, keep_numpy: bool = False) -> Any:
    """Return a pytree of the structure of `like`; each leaf is the tensor or attribute saved under its keys.

    With `keep_numpy` a leaf that is numpy's in `like` is the record's view, and never converted for jax.
    MismatchError: the record lacks a leaf, or has one of another shape, or one that `like` has no place for.
    """
    tree_util, archive = import_jax().tree_util, record.archive
    leaves, structure = tree_util.tree_flatten_with_path(like)
    numpy_leaves = (path for path, leaf in leaves if keep_numpy and isinstance(leaf, np.ndarray | np.generic))
    as_numpy = set(map(_dotted_name, numpy_leaves))
    names = None if as_numpy.isdisjoint(record.names) else lambda tensor: tensor.name not in as_numpy
    by_name = record.jax(names, shardings=_shardings(record, leaves) or None)
    tensors = [record[name] if name in as_numpy else by_name[name] for name in record.names]
    root = unflatten.unflatten(archive.index, 0, lambda i: _Leaf(tensors[i], True), archive.payload, _branch_or_leaf)
    used: set[Any] = set()  # leaves by their identities, items of lists by that and their number
    with located(path=archive.path):
        values = [_value_at(root, path, leaf, used) for path, leaf in leaves]
        for unused_name, value in _unused_values(root, "", used):
            fault = f"expected no such key, found {_describe(value)}: like= has no place for it"
            raise MismatchError(f"{fault}; {_ADVICE}", tensor=unused_name)
    return tree_util.tree_unflatten(structure, values)


def _shardings(record: Any, leaves: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the shardings of a template's leaves by names of tensors, except those on the default device."""
    jax = import_jax()
    default, out = jax.sharding.SingleDeviceSharding(jax.devices()[0]), {}
    for path, leaf in leaves:
        name, sharding = _dotted_name(path), getattr(leaf, "sharding", None)
        is_sharded = isinstance(sharding, jax.sharding.Sharding) and sharding != default
        if is_sharded and name in record and record.info(name).shape == tuple(leaf.shape):
            out[name] = sharding
    return out


def _dotted_name(path: Sequence[Any]) -> str:
    return ".".join(str(path_key(step)) for step in path)


def _branch_or_leaf(kind: int, type_name: str, items: list[tuple[str, Any]]) -> _Branch | _Leaf:
    """Return a module as a branch; as a leaf if it is an object that stands for one value, such as a complex number."""
    children = {key: value if isinstance(value, _Branch | _Leaf) else _Leaf(value, False) for key, value in items}
    leaves = [(key, child.value) for key, child in children.items() if isinstance(child, _Leaf)]
    if kind == ModuleKind.OBJECT and len(leaves) == len(children):
        value = conventions.value_of_object(type_name, leaves)
        if value is not conventions.ABSENT:
            return _Leaf(value, _is_array(value))  # True for a typed PRNG key
    return _Branch(children, kind == ModuleKind.OBJECT)


def _value_at(root: _Branch, path: Sequence[Any], leaf: Any, used: set[Any]) -> Any:
    """Return the record's value under a leaf's keys, noted in `used`; MismatchError if none fits the leaf."""
    node: Any = root
    keys = [str(path_key(step)) for step in path]
    for depth, key in enumerate(keys):
        inner = node.items.get(key) if isinstance(node, _Branch) else _use_item(node, key, used)
        if inner is None:
            name = ".".join(keys[: depth + 1])
            raise MismatchError(f"expected {_describe_leaf(leaf)}, found no such key; {_ADVICE}", tensor=name)
        node = inner
    fits = isinstance(node, _Leaf) and (node.is_tensor or not _is_array(leaf))
    if fits and _is_array(leaf):
        fits = tuple(leaf.shape) == tuple(node.value.shape)  # an optimizer's dtypes may not be those of its init
    if not fits:
        fault = f"expected {_describe_leaf(leaf)}, found {_describe(node)}"
        raise MismatchError(f"{fault}; {_ADVICE}", tensor=".".join(keys) or None)
    used.add(id(node))
    return node.value


def _use_item(node: Any, key: str, used: set[Any]) -> Any:
    """Return one item of an attribute that is a list or tuple, and note it as used; None for any other node or key."""
    items = node.value if isinstance(node, _Leaf) and isinstance(node.value, list | tuple) else ()
    if not key.isdecimal() or int(key) >= len(items):
        return None
    used.add((id(node), int(key)))
    return _Leaf(items[int(key)], False)


def _is_used(leaf: _Leaf, used: set[Any]) -> bool:
    """Return True if a leaf was used as a whole, or every item of its list or tuple was."""
    items = leaf.value if isinstance(leaf.value, list | tuple) and leaf.value else None
    return id(leaf) in used or (items is not None and all((id(leaf), i) in used for i in range(len(items))))


def _unused_values(branch: Any, prefix: str, used: set[Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values that no leaf of the template used, except None, empty lists, and objects' attributes."""
    for key, child in branch.items.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(child, _Branch):
            yield from _unused_values(child, name, used)
        elif not _is_used(child, used) and (child.is_tensor or not (branch.is_object or child.value in (None, [], ()))):
            yield name, child


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _describe_leaf(leaf: Any) -> str:
    if _is_array(leaf):
        return f"an array of {leaf.dtype}, shape {tuple(leaf.shape)}"
    return f"a value as {printable(repr(leaf), 60)}"


def _describe(node: _Branch | _Leaf) -> str:
    """Return a saved module, tensor or attribute in words, for an error."""
    if isinstance(node, _Branch):
        return "a module"
    if node.is_tensor:
        return f"an array of {node.value.dtype}, shape {tuple(node.value.shape)}"
    return "None" if node.value is None else f"{type(node.value).__name__} {printable(repr(node.value), 60)}"
