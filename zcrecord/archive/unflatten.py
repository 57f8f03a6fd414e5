"""An index back to values: attributes, names' keys, and whole modules nested as they were saved.

The way there is `tree`'s; where tensors' views come from is `reader`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zcrecord.codec.conventions import ABSENT, key_of_text, value_of_object
from zcrecord.codec.entries import AttributeEntry, ModuleKind, ValueForm, ValueType
from zcrecord.codec.index import Index
from zcrecord.errors import FormatError, LimitError

_NAME_ALLOWANCE = 64  # times an index's size that full names of attributes made from it may take

Make = Callable[[int, str, list[tuple[str, Any]]], Any]


def attribute_entries(ix: Index, rows: Any, payload: Callable[[int], Any]) -> Iterator[AttributeEntry]:
    """Yield attributes, or metadata, with Python's own values; bytes come as `payload` gives them."""
    texts: dict[int, str] = {}  # lists may share words, and words texts: each is made once, or there is no end of them
    for row in rows:
        value = _attribute_value(ix, row, payload, texts)
        yield AttributeEntry(ix.text_of(row), int(row["parent"]), int(row["place"]), value)


def check_full_names(ix: Index, index_size: int) -> None:
    """Check that the full names of attributes stay in proportion: 100,000 could each repeat a module's name of a MiB.

    Raises:
        LimitError: those names add up to more than 64 times the index.
    """
    total = int(ix.modules["name_size"][ix.attributes["parent"]].sum(dtype=np.uint64))
    index_size = index_size or len(ix.text) + ix.attributes.nbytes  # an index that was made here is in no file
    if total > _NAME_ALLOWANCE * index_size:
        what = f"full names of attributes add up to {total} bytes, more than {_NAME_ALLOWANCE} times the index"
        raise LimitError(f"{what}; a module's `attributes` have them by key")


def _attribute_value(ix: Index, row: Any, payload: Callable[[int], Any], texts: dict[int, str]) -> Any:
    form, kind, word = int(row["form"]), int(row["type"]), int(row["value"])
    if form == ValueForm.SCALAR:
        return _decode_word(ix, kind, word, payload, texts)
    start, count = word & 0xFFFFFFFF, word >> 32
    items = [_decode_word(ix, kind, w, payload, texts) for w in ix.words[start : start + count].tolist()]
    return items if form == ValueForm.LIST else tuple(items)


def _decode_word(ix: Index, kind: int, word: int, payload: Callable[[int], Any], texts: dict[int, str]) -> Any:
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
        if (text := texts.get(word)) is None:
            text = texts[word] = ix.string(word & 0xFFFFFFFF, word >> 32)
        return text
    if kind == ValueType.PAYLOAD:
        return payload(word)
    raise FormatError(f"an attribute of unknown type {kind}")


def plain(kind: int, type_name: str, items: list[tuple[str, Any]]) -> Any:
    """Return a module as list, tuple or dict, or the value that it stands for; of any other class as a dict."""
    if kind == ModuleKind.LIST:
        return [value for _, value in items]
    if kind == ModuleKind.TUPLE:
        return tuple(value for _, value in items)
    if kind == ModuleKind.NUMBERED:
        return {key_of_text(key): value for key, value in items}
    value = value_of_object(type_name, items) if kind == ModuleKind.OBJECT else ABSENT
    return dict(items) if value is ABSENT else value


def unflatten(
    ix: Index, module: int, tensor: Callable[[int], Any], payload: Callable[[int], Any], make: Make = plain
) -> Any:
    """Return the subtree of one module, children in their saved order; needs a verified index.

    `make` gives a module's value from its kind, its class name, and its keys with their values; nested dicts, lists and
    tuples by default.
    """
    order, own = below(ix, module)
    last = int(ix.modules["end"][module])
    children: dict[int, list[tuple[int, str, Any]]] = {m: [] for m in range(module, last)}
    built: dict[int, Any] = {}
    modules = ix.modules
    tensors = ix.tensors[order.start : order.stop] if isinstance(order, range) else ix.tensors[order]
    for i, (parent, place, key) in zip(order, _placed(ix, tensors), strict=True):
        children[parent].append((place, key, tensor(i)))
    for a in attribute_entries(ix, ix.attributes[own], payload):
        children[a.parent].append((a.place, a.key, a.value))
    rows = modules[module:last]
    types = [ix.string(*span) for span in zip(rows["type_name"].tolist(), rows["type_name_size"].tolist(), strict=True)]
    kinds = rows["kind"].tolist()
    placed = list(_placed(ix, rows))
    for m in range(last - 1, module - 1, -1):
        items = [(key, value) for _, key, value in sorted(children[m], key=lambda child: child[0])]
        built[m] = make(kinds[m - module], types[m - module], items)
        if m > module:
            parent, place, key = placed[m - module]
            children[parent].append((place, key, built[m]))
    return built[module]


def keys_of_lists(ix: Index) -> dict[str, list[str]]:
    """Return the keys of each list and tuple by its full name, in the order of its items."""
    kinds = ix.modules["kind"]
    ordered = np.flatnonzero((kinds == ModuleKind.LIST) | (kinds == ModuleKind.TUPLE)).tolist()
    if not ordered:
        return {}
    children: dict[int, list[tuple[int, str]]] = {m: [] for m in ordered}
    rows = ix.attributes
    attributes = zip(rows["parent"].tolist(), rows["place"].tolist(), map(ix.text_of, rows), strict=True)
    for parent, place, key in itertools.chain(_placed(ix, ix.tensors), _placed(ix, ix.modules[1:]), attributes):
        if parent in children:
            children[parent].append((place, key))
    return {ix.text_of(ix.modules[m]): [key for _, key in sorted(children[m])] for m in ordered}


def _placed(ix: Index, rows: Any) -> Iterator[tuple[int, int, str]]:
    """Yield parent, place and key of tensors or modules; whole columns at once, five times faster than row by row."""
    ends = rows["name"].astype(np.int64) + rows["name_size"]
    starts = ends - rows["key_size"]
    keys = map(ix.string, starts.tolist(), rows["key_size"].tolist())
    return zip(rows["parent"].tolist(), rows["place"].tolist(), keys, strict=True)


def below(ix: Index, module: int) -> tuple[Sequence[int], slice]:
    """Return the tensors of a module's whole subtree, by module, and where its attributes lie."""
    modules = ix.modules
    last = int(modules["end"][module])
    past = [None if last == len(modules) else int(modules[c][last]) for c in ("first_tensor", "first_attribute")]
    of_tensors = slice(int(modules["first_tensor"][module]), past[0])
    tensors = range(len(ix.tensors))[of_tensors] if ix.by_module is None else ix.by_module[of_tensors].tolist()
    return tensors, slice(int(modules["first_attribute"][module]), past[1])


def key_of(ix: Index, row: Any) -> str:
    """Return the key of a module or tensor: the end of its name."""
    end, size = int(row["name"]) + int(row["name_size"]), int(row["key_size"])
    return ix.string(end - size, size)
