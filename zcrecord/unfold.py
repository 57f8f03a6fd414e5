"""An index back to values: attributes, names' keys, and whole modules nested as they were saved.

The way there is `tree`'s; where tensors' views come from is `reader`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .entries import AttributeEntry, ModuleEntry, ModuleKind, ValueForm, ValueType
from .errors import FormatError
from .index import Index
from .tree import Flat

__all__ = ["attribute_entries", "from_index", "key_of", "unflatten"]


def from_index(ix: Index, payload: Callable[[int], Any]) -> Flat:
    """Return a loaded record ready to be saved again, but for its tensors' forms: order, kinds and places stay."""
    found = []
    for row in ix.modules:
        key_size, parent, place, kind = (int(row[c]) for c in ("key_size", "parent", "place", "kind"))
        found.append(ModuleEntry(ix.text_of(row), key_size, parent, place, kind, ix.text_of(row, "type_name")))
    flat = Flat(found[0].kind, found[0].type_name)
    flat.modules = found
    flat.names = [ix.name(i) for i in range(len(ix.tensors))]
    flat.key_sizes, flat.parents, flat.places = (ix.tensors[c].tolist() for c in ("key_size", "parent", "place"))
    flat.attributes = list(attribute_entries(ix, ix.attributes, payload))
    return flat


def attribute_entries(ix: Index, rows: Any, payload: Callable[[int], Any]) -> Iterator[AttributeEntry]:
    """Yield attributes, or metadata, with Python's own values; bytes come as `payload` gives them."""
    for row in rows:
        value = _attribute_value(ix, row, payload)
        yield AttributeEntry(ix.text_of(row), int(row["parent"]), int(row["place"]), value)


def _attribute_value(ix: Index, row: Any, payload: Callable[[int], Any]) -> Any:
    form, kind, word = int(row["form"]), int(row["type"]), int(row["value"])
    if form == ValueForm.SCALAR:
        return _decode_word(ix, kind, word, payload)
    start, count = word & 0xFFFFFFFF, word >> 32
    items = [_decode_word(ix, kind, int(w), payload) for w in ix.words[start : start + count]]
    return items if form == ValueForm.LIST else tuple(items)


def _decode_word(ix: Index, kind: int, word: int, payload: Callable[[int], Any]) -> Any:
    if kind == ValueType.NIL:
        return None
    if kind == ValueType.BOOL:
        return bool(word)
    if kind == ValueType.INT:
        return word - (1 << 64) if word >> 63 else word
    if kind == ValueType.UINT:
        return word
    if kind == ValueType.FLOAT:
        return float(np.uint64(word).view(np.float64))
    if kind == ValueType.TEXT:
        return ix.string(word & 0xFFFFFFFF, word >> 32)
    if kind == ValueType.PAYLOAD:
        return payload(word)
    raise FormatError(f"an attribute of unknown type {kind}")


def unflatten(ix: Index, module: int, tensor: Callable[[int], Any], payload: Callable[[int], Any]) -> Any:
    """Return the subtree of one module as nested dicts, lists and tuples, children in their saved order.

    A module of a kind this version does not know, like a dataclass, comes as a dict. Needs a verified index.
    """
    last = int(ix.modules["end"][module])
    children: dict[int, list[tuple[int, str, Any]]] = {m: [] for m in range(module, last)}
    built: dict[int, Any] = {}
    modules = ix.modules
    past = [None if last == len(modules) else modules[c][last] for c in ("first_tensor", "first_attribute")]
    of_tensors, own = (
        slice(modules["first_tensor"][module], past[0]),
        slice(modules["first_attribute"][module], past[1]),
    )
    order = range(len(ix.tensors))[of_tensors] if ix.by_module is None else ix.by_module[of_tensors].tolist()
    for i in order:
        row = ix.tensors[i]
        children[int(row["parent"])].append((int(row["place"]), key_of(ix, row), tensor(i)))
    for a in attribute_entries(ix, ix.attributes[own], payload):
        children[a.parent].append((a.place, a.key, a.value))
    for m in range(last - 1, module - 1, -1):
        row = modules[m]
        items = sorted(children[m], key=lambda child: child[0])
        kind = int(row["kind"])
        if kind in (ModuleKind.LIST, ModuleKind.TUPLE):
            built[m] = [v for _, _, v in items] if kind == ModuleKind.LIST else tuple(v for _, _, v in items)
        else:
            built[m] = {k: v for _, k, v in items}
        if m > module:
            children[int(row["parent"])].append((int(row["place"]), key_of(ix, row), built[m]))
    return built[module]


def key_of(ix: Index, row: Any) -> str:
    """Return the key of a module or tensor: the end of its name."""
    end, size = int(row["name"]) + int(row["name_size"]), int(row["key_size"])
    return ix.string(end - size, size)
