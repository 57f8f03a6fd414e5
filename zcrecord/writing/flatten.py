"""Flattening: a nested record to entries. A full name is the module's name, a dot and the key.

The values' bytes are left to `sharing`, writing to `writers`.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from zcrecord.codec import conventions
from zcrecord.codec.entries import (
    AttributeEntry,
    Entries,
    ModuleEntry,
    ModuleKind,
    encodable,
    is_attribute,
    list_type,
    value_type,
)
from zcrecord.codec.layout import MAX_DEPTH, NONE
from zcrecord.dtypes import from_numpy
from zcrecord.errors import LimitError, NameCollisionError, RecordError, UnsupportedError, located, printable
from zcrecord.tensors import interop
from zcrecord.tensors.lazy import LazyTensor
from zcrecord.tensors.packed import PackedTensor, StringTensor

from .module_tree import state_path

_LISTED = 20  # refused values that an error names
_TENSORS = np.ndarray | np.generic | PackedTensor | StringTensor | LazyTensor


class FlatRecord(Entries):
    """The entries of a record, the value of each tensor, and the errors of values that cannot be saved."""

    __slots__ = ("refused", "values")

    def __init__(self, kind: int, type_name: str) -> None:
        super().__init__(modules=[ModuleEntry("", 0, NONE, 0, kind, type_name)])
        self.values: list[Any] = []
        self.refused: list[UnsupportedError] = []

    def check_values(self) -> None:
        """Raise UnsupportedError if values cannot be saved; it names all of them, or the first twenty."""
        if len(self.refused) == 1:
            raise self.refused[0]
        if self.refused:
            faults = "; ".join(f"'{printable(error.tensor or '')}': {error.text()}" for error in self.refused[:_LISTED])
            more = f"; and {len(self.refused) - _LISTED} more" if len(self.refused) > _LISTED else ""
            raise UnsupportedError(f"{len(self.refused)} values cannot be saved: {faults}{more}")

    def check_names(self) -> None:
        """Raise unless full names can be stored, and differ among tensors, among modules, and among attributes."""
        modules = [module.name for module in self.modules]
        prefixes = [f"{name}." if name else "" for name in modules]
        attributes = [prefixes[attribute.parent] + attribute.key for attribute in self.attributes]
        for kind, names in ("tensors", self.names), ("modules", modules), ("attributes", attributes):
            joined = "".join(names)
            if "\0" in joined:
                raise UnsupportedError("its name contains NUL; rename it", tensor=next(n for n in names if "\0" in n))
            if not encodable(joined):
                bad = next(n for n in names if not encodable(n))
                raise UnsupportedError("its name has lone surrogates, which are not UTF-8; rename it", tensor=bad)
            if len(set(names)) != len(names):
                name = next(name for name, count in Counter(names).items() if count > 1)
                raise NameCollisionError(f"two {kind} get this name, as dots separate keys; rename one", tensor=name)


def flatten(record: Any) -> FlatRecord:
    """Return the entries of a nested record, in its own order; copies no tensor.

    Mappings, lists, tuples, dataclasses, attrs classes and jax's pytrees become modules; None, bool, int, float, str,
    bytes and lists of one of these become attributes. Sets, deques, paths, dates and others become the modules of
    `codec.conventions`, and so do mappings with keys that are neither texts nor integers of 64 bits. An Enum's member
    is saved as its value, an object with `state_dict()`, such as a torch module, as the result, with names split at
    dots.

    Raises:
        UnsupportedError: values or keys that the format cannot hold, all in one error. LimitError: nested over 100
        deep. NameCollisionError: two tensors, or two modules, would share a full name.
    """
    state = _state_of(record)
    kind, type_name, items = children_of(record if state is None else _nest(state), "")
    if kind is None:
        value = f"the class {record.__name__}" if isinstance(record, type) else f"a {type(record).__name__}"
        raise UnsupportedError(f"a record is a mapping, list, tuple or dataclass, not {value}")
    flat = FlatRecord(kind, "" if isinstance(record, Mapping) and kind != ModuleKind.OBJECT else type_name)
    _walk(flat, "", 0, items, 1)
    flat.check_values()
    flat.check_names()
    if state is not None:  # tensors are grouped by module now; the owner's order may mix them
        ranks = {name: i for i, name in enumerate(state)}
        order = sorted(range(len(flat.names)), key=lambda i: _rank(flat.names[i], ranks))
        for column in (flat.names, flat.key_sizes, flat.parents, flat.places, flat.values):
            column[:] = [column[i] for i in order]
    return flat


def _state_of(value: Any) -> Mapping[str, Any] | None:
    """Return the `state_dict()` of an object, None of one without it; UnsupportedError if that is not by names."""
    if isinstance(value, type) or not callable(getattr(value, "state_dict", None)):
        return None
    state = value.state_dict()
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise UnsupportedError(f"state_dict() of {type(value).__name__} is not a mapping from names to tensors")
    return state


def _rank(name: str, ranks: Mapping[str, int]) -> int:
    """Return the rank of a name, or of its longest prefix, in whole keys, that has one."""
    while name and name not in ranks:
        name = name.rpartition(".")[0]
    return ranks.get(name, len(ranks))


def children_of(value: Any, name: str) -> tuple[int | None, str, Iterable[tuple[str, Any]]]:
    """Return kind (None if it is no module), class name and (key, child) pairs; UnsupportedError for a bad key."""
    if type(value) is dict and set(map(type, value)) <= {str} and "" not in value:
        return ModuleKind.MAPPING, "", value.items()
    if isinstance(value, Mapping):
        kind, type_name, children = conventions.keyed_children(value, name)
        return kind, type_name, children.items()
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        if names is not None:
            return ModuleKind.TUPLE, type(value).__name__, zip(names, value, strict=True)
        return ModuleKind.TUPLE, "", ((str(i), v) for i, v in enumerate(value))
    if isinstance(value, list):
        return ModuleKind.LIST, "", ((str(i), v) for i, v in enumerate(value))
    if isinstance(value, type | _TENSORS) or (interop.is_foreign(value) and not conventions.is_jax_key(value)):
        return None, "", ()
    fields = _fields(value)
    pytree = interop.pytree_children(value)
    if pytree is not None:
        return ModuleKind.OBJECT, type(value).__name__, _pytree_items(list(pytree), fields)
    if fields is not None:
        return ModuleKind.OBJECT, type(value).__name__, fields.items()
    state = _state_of(value)
    if state is not None:
        return ModuleKind.MAPPING, "", _nest(state).items()
    stand_in = conventions.object_of(value, name)
    if stand_in is None:
        return None, "", ()
    type_name, children = stand_in
    return ModuleKind.OBJECT, type_name, children.items()


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass's or an attrs class's instance; None of others."""
    fields = getattr(type(value), "__attrs_attrs__", None)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
    if fields is None:
        return None
    try:
        return {field.name: getattr(value, field.name) for field in fields}
    except AttributeError as error:
        raise UnsupportedError(f"a field of this {type(value).__name__} has no value yet: {error}") from error


def _pytree_items(children: list[tuple[str, Any]], fields: dict[str, Any] | None) -> Iterable[tuple[str, Any]]:
    """Return a pytree's items to save: its children, and fields of plain values; not functions, which the class has."""
    by_key = dict(children)
    if fields is None or not by_key.keys() <= fields.keys():
        return children
    return ((key, by_key.get(key, field)) for key, field in fields.items() if key in by_key or _is_plain(field))


def _is_plain(value: Any) -> bool:
    return (list_type(value) if isinstance(value, list | tuple) else value_type(value)) is not None


def _walk(flat: FlatRecord, name: str, module: int, items: Iterable[tuple[str, Any]], depth: int) -> None:
    """Add a module's children to `flat`, those of inner modules included, in saved order."""
    prefix = name + "." if module else ""
    children = dict(items)
    if _add_arrays(flat, prefix, module, children):
        return
    for place, (key, value) in enumerate(children.items()):
        if not isinstance(key, str) or not key:
            refuse_key(key, name)
        try:
            _add_child(flat, prefix + key, key, (module, place), value, depth)
        except UnsupportedError as error:
            error.located(tensor=prefix + key)
            flat.refused.append(error)


def _add_child(flat: FlatRecord, full: str, key: str, parent: tuple[int, int], value: Any, depth: int) -> None:
    """Add a value, in modules that lie `depth` deep; `parent` is the module's number, and the value's place in it."""
    module, place = parent
    value = value.value if isinstance(value, Enum) else value
    if is_attribute(value, full):
        flat.attributes.append(AttributeEntry(key, module, place, value))
        return
    kind, type_name, inner = children_of(value, full)
    size = len(key.encode(errors="surrogatepass"))
    if kind is None:
        _add_tensors(flat, [full], [size], module, [place], [as_tensor(value, full)])
        return
    if depth >= MAX_DEPTH:
        raise LimitError(f"nested more than {MAX_DEPTH} deep; does the record contain itself?", tensor=full)
    flat.modules.append(ModuleEntry(full, size, module, place, kind, type_name))
    _walk(flat, full, len(flat.modules) - 1, inner, depth + 1)


def _add_arrays(flat: FlatRecord, prefix: str, module: int, children: Mapping[str, Any]) -> bool:
    """Add a module's children, without a loop over them, if all are plain arrays; return True if it did."""
    keys, values = list(children), list(children.values())
    if set(map(type, values)) != {np.ndarray} or set(map(type, keys)) != {str} or not all(keys):
        return False
    try:
        for dtype in {v.dtype for v in values}:
            from_numpy(dtype)
    except UnsupportedError:
        return False  # the caller finds out which one
    sizes = map(len, keys if "".join(keys).isascii() else [k.encode(errors="surrogatepass") for k in keys])
    _add_tensors(flat, [prefix + k for k in keys] if prefix else keys, sizes, module, range(len(keys)), values)
    return True


def _add_tensors(
    flat: FlatRecord, names: list[str], key_sizes: Iterable[int], module: int, places: Iterable[int], values: list[Any]
) -> None:
    """Add tensors of one module, as columns."""
    flat.names += names
    flat.key_sizes += key_sizes
    flat.parents += [module] * len(names)
    flat.places += places
    flat.values += values


def refuse_key(key: Any, module: str) -> None:
    """Raise UnsupportedError for a key that is empty or not text; `module` is the full name of the module with it."""
    place = f"in '{module}'" if module else "in the record"
    fault = "an empty key" if key == "" else f"key {key!r} is a {type(key).__name__}"
    raise UnsupportedError(f"{place}: {fault}; keys are non-empty strings or integers")


def as_tensor(value: Any, path: str) -> Any:
    """Return a value as ndarray or tensor of this package, a device's as a LazyTensor; UnsupportedError for others."""
    if isinstance(value, PackedTensor | StringTensor | LazyTensor):
        return value
    if isinstance(value, bytearray | memoryview | mmap.mmap):
        fault = "a mutable buffer; pass bytes for an attribute, np.frombuffer(...) for a tensor"
        raise UnsupportedError(fault, tensor=path)
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedError("a masked array; save .filled() and the mask as two tensors", tensor=path)
    try:
        native = isinstance(value, np.ndarray | np.generic)
        array: Any = np.asarray(value) if native else interop.as_view(value)
        if isinstance(array, interop.DeviceTensor):
            return LazyTensor(array.kind, array.shape, lambda: _fetch(array, path), key=array.key)
        if native and array.dtype.kind in "UT":
            texts = array.reshape(-1).tolist()
            if not all(map(encodable, texts)):
                raise UnsupportedError("a text with lone surrogates, which are not UTF-8; save its bytes")
            return StringTensor.from_strings(texts, array.shape)
        if isinstance(array, np.ndarray):
            from_numpy(array.dtype)  # raises if the format has no such type
    except RecordError as error:
        raise error.located(tensor=path) from error.__cause__
    return array


def _fetch(tensor: interop.DeviceTensor, path: str) -> Any:
    """Return a device's tensor in host memory; errors have its name."""
    with located(tensor=path):
        return tensor.fetch()


def _nest(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `state_dict()` as nested dicts; a name stays whole if a tensor's name is a prefix of it."""
    out: dict[str, Any] = {}
    for name, value in state.items():
        path = state_path(name, state)
        module = out
        for key in path[:-1]:
            module = module.setdefault(key, {})
        module[path[-1]] = value
    return out


def metadata_entries(metadata: Any) -> list[AttributeEntry]:
    """Return a file's metadata as entries; UnsupportedError for a name or value that the format cannot hold."""
    if not isinstance(metadata, Mapping):
        raise UnsupportedError(f"metadata is a mapping from names to plain values, not a {type(metadata).__name__}")
    if set(map(type, metadata.values())) - {str}:  # a namedtuple counts as a plain tuple
        metadata = {key: tuple(v) if isinstance(v, tuple) else v for key, v in metadata.items()}
    for key, value in metadata.items():
        place = f"metadata {key!r}"
        if not isinstance(key, str) or not key or "\0" in key or not is_attribute(key, place):
            raise UnsupportedError(f"{place}: names are non-empty strings without NUL")
        if not is_attribute(value, place):
            raise UnsupportedError(f"{place}: values are None, bool, int, float, str, bytes, or lists of one of these")
    return [AttributeEntry(key, NONE, 0, value) for key, value in metadata.items()]
