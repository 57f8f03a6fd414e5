"""Decode an index into values: attributes, keys, and whole modules nested as they were saved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from zcrecord.codec.blocks import is_blocks
from zcrecord.codec.conventions import ABSENT, key_of_text, mapping_of, value_of_object
from zcrecord.codec.entries import AttributeEntry, ModuleKind, ValueForm, ValueType
from zcrecord.codec.index import Array, Index
from zcrecord.codec.layout import NONE
from zcrecord.errors import LimitError

_NAME_ALLOWANCE = 64  # full names of attributes may take this many times the index's size
_PATH_BYTES = 1 << 20  # bytes that texts of paths may take beyond the size of the text pool

MODULE, TENSOR, ATTRIBUTE = range(3)
Child = tuple[int, int, int, int, str]  # one of these kinds, the number in its column, its parent, its place, its key

Make = Callable[[int, str, list[tuple[str, Any]]], Any]


def attribute_entries(ix: Index, rows: Any, payload: Callable[[int], Any]) -> Iterator[AttributeEntry]:
    """Yield the entries of attributes or metadata, in order; `payload` makes the values that are bytes, by number."""
    texts: dict[int, str] = {}  # by word; each is decoded once: lists may share words, and words texts
    for row in rows:
        form, kind, word = int(row["form"]), int(row["type"]), int(row["value"])
        if form == ValueForm.SCALAR:
            value = _decode_word(ix, kind, word, payload, texts)
        else:
            start, count = word & NONE, word >> 32
            items = [_decode_word(ix, kind, item, payload, texts) for item in ix.words[start : start + count].tolist()]
            value = items if form == ValueForm.LIST else tuple(items)
        yield AttributeEntry(ix.text_of(row), int(row["parent"]), int(row["place"]), value)


def metadata_entries(ix: Index, payload: Callable[[int], Any]) -> list[AttributeEntry]:
    """Return an archive's metadata, without the checksums of blocks: those are its writer's, not its user's."""
    return list(attribute_entries(ix, ix.metadata[~is_blocks(ix, ix.metadata)], payload))


def check_full_names(ix: Index, index_size: int) -> None:
    """Raise LimitError if full names of attributes take over 64 times the index: many may repeat a long module's."""
    total = int(ix.modules["name_size"][ix.attributes["parent"]].sum(dtype=np.uint64))
    index_size = index_size or len(ix.text) + ix.attributes.nbytes  # an index that was made here is in no file
    if total > _NAME_ALLOWANCE * index_size:
        fault = f"full names of attributes add up to {total} bytes, more than {_NAME_ALLOWANCE} times the index"
        raise LimitError(f"{fault}; a module's `attributes` have them by key")


def _decode_word(ix: Index, kind: int, word: int, payload: Callable[[int], Any], texts: dict[int, str]) -> Any:
    """Return one word of an attribute as Python's value; bytes as `payload` returns them, texts kept in `texts`."""
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
            text = texts[word] = ix.string(word & NONE, word >> 32)
        return text
    return payload(word)  # R66 has no other type


def plain(kind: int, type_name: str, items: list[tuple[str, Any]]) -> Any:
    """Return a module's keys and values as the list, tuple, dict or Python value it was saved from; else as a dict."""
    if kind == ModuleKind.LIST:
        return [value for _, value in items]
    if kind == ModuleKind.TUPLE:
        return tuple(value for _, value in items)
    if kind == ModuleKind.OBJECT and (value := value_of_object(type_name, items)) is not ABSENT:
        return value
    keyed = {key_of_text(key): value for key, value in items} if kind == ModuleKind.NUMBERED else dict(items)
    return mapping_of(type_name, keyed) if kind != ModuleKind.OBJECT and type_name else keyed


def unflatten(
    ix: Index, module: int, tensor: Callable[[int], Any], payload: Callable[[int], Any], make: Make = plain
) -> Any:
    """Return a module's subtree as nested Python values, in saved order; the index must be verified.

    `tensor` and `payload` return the value of a tensor or of bytes by number, `make` that of a module.
    """
    _, own = below(ix, module)
    rows = ix.modules[module : int(ix.modules["end"][module])]
    types = [ix.string(*span) for span in zip(rows["type_name"].tolist(), rows["type_name_size"].tolist(), strict=True)]
    kinds = rows["kind"].tolist()
    values = [entry.value for entry in attribute_entries(ix, ix.attributes[own], payload)]
    items: list[list[tuple[int, str, Any]]] = [[] for _ in kinds]  # by module: place, key and value
    modules = [(module, 0, 0, "")]
    for kind, number, parent, place, key in children(ix, module):
        if kind == MODULE:
            modules.append((number, parent, place, key))
        else:
            value = tensor(number) if kind == TENSOR else values[number - own.start]
            items[parent - module].append((place, key, value))

    paths: dict[Any, Any] = {}  # each is made once: its parts take several times the text, which many may share
    budget = _PATH_BYTES + len(ix.text)
    for number, parent, place, key in reversed(modules):  # those inside before those around them
        m = number - module
        saved = [(key, value) for _, key, value in sorted(items[m], key=lambda child: child[0])]
        text = saved[0][1] if types[m] == "zcr:path" and saved and isinstance(saved[0][1], str) else ""
        value = paths.get(text)
        if value is None:
            if (budget := budget - len(text)) < 0:
                raise LimitError("texts of paths overlap; the archive is malicious")
            value = make(kinds[m], types[m], saved)
            if isinstance(value, PurePath):
                paths[text] = value
        if m:
            items[parent - module].append((place, key, value))
    return value


def keys_of_lists(ix: Index) -> dict[str, list[str]]:
    """Return the keys of each list and tuple by its full name, in the order of its items."""
    kinds = ix.modules["kind"]
    ordered = np.flatnonzero((kinds == ModuleKind.LIST) | (kinds == ModuleKind.TUPLE)).tolist()
    if not ordered:
        return {}
    items: dict[int, list[tuple[int, str]]] = {m: [] for m in ordered}
    for _, _, parent, place, key in children(ix):
        if parent in items:
            items[parent].append((place, key))
    return {ix.text_of(ix.modules[m]): [key for _, key in sorted(items[m])] for m in ordered}


def children(ix: Index, module: int = 0) -> Iterator[Child]:
    """Yield all below a module, its whole subtree: modules in pre-order, then tensors by module, then attributes."""
    tensors, own = below(ix, module)
    modules = np.arange(module + 1, int(ix.modules["end"][module]))
    for kind, numbers, rows in ((MODULE, modules, ix.modules[modules]), (TENSOR, tensors, ix.tensors[tensors])):
        ends, sizes = rows["name"].astype(np.int64) + rows["name_size"], rows["key_size"]
        keys = map(ix.string, (ends - sizes).tolist(), sizes.tolist())  # columns at once, five times faster than rows
        yield from _children_of_kind(kind, numbers.tolist(), rows, keys)
    rows = ix.attributes[own]
    yield from _children_of_kind(ATTRIBUTE, range(own.start, own.start + len(rows)), rows, map(ix.text_of, rows))


def _children_of_kind(kind: int, numbers: Sequence[int], rows: Array, keys: Iterator[str]) -> Iterator[Child]:
    """Return an iterator over children of one kind, by their numbers, entries and keys."""
    kinds = itertools.repeat(kind, len(rows))
    return zip(kinds, numbers, rows["parent"].tolist(), rows["place"].tolist(), keys, strict=True)


def below(ix: Index, module: int) -> tuple[Array, slice]:
    """Return the numbers of the tensors in a module's whole subtree, by module, and the slice of its attributes."""
    end = int(ix.modules["end"][module])
    first_tensors = np.append(ix.modules["first_tensor"], len(ix.tensors))
    first_attributes = np.append(ix.modules["first_attribute"], len(ix.attributes))
    tensors = np.arange(first_tensors[module], first_tensors[end])
    attributes = slice(int(first_attributes[module]), int(first_attributes[end]))
    return tensors if ix.by_module is None else ix.by_module[tensors], attributes


def key_of(ix: Index, row: Any) -> str:
    """Return the key of a module or tensor: the end of its name."""
    end, size = int(row["name"]) + int(row["name_size"]), int(row["key_size"])
    return ix.string(end - size, size)
