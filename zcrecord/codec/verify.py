"""Every rule an index must keep, checked in whole columns before a view exists. Rule numbers are FORMAT.md's.

The rules of one tensor are `rules`'; here they are applied to all of them, or to the one just touched, and here are
those of the index as a whole. How bytes become columns is left to `index`, raw comparisons of names to `spans`, what
only the payloads' bytes can tell to `contents`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zcrecord.errors import FormatError, LimitError

from . import text_pool
from .entries import ValueForm, ValueType
from .entry_rules import PayloadColumns, TensorColumns, TensorRow, check_payload, check_tensor
from .index import Index, first_children
from .layout import HEADER_SIZE, MAX_DEPTH, NONE, SPAN_ALLOWANCE, WORDS_ALLOWANCE, Header, align_up

__all__ = ["check_header", "check_index", "check_touched"]

Array = np.ndarray[Any, np.dtype[Any]]


def _first(bad: Array) -> int | None:
    """Return the position of the first entry that breaks a rule."""
    return int(bad.argmax()) if np.count_nonzero(bad) else None


def check_header(ix: Index, header: Header) -> None:
    """Check what takes no look at an entry: counts that must agree, and where the payloads end (R13, R24, R25, R37).

    Raises:
        FormatError: naming the rule's subject, what was expected and what is there.
    """
    n = len(ix.tensors)
    if len(ix.by_name) != n:
        raise FormatError(f"index: vector 'by_name' has {len(ix.by_name)} items for {n} tensors")
    if ix.by_module is not None and len(ix.by_module) != n:
        raise FormatError(f"index: vector 'by_module' has {len(ix.by_module)} items for {n} tensors")
    if not len(ix.modules):
        raise FormatError("index: it has no modules; module 0, the record itself, is always there")
    if ix.digest_kind not in (0, 1):
        raise FormatError(f"index: digest kind {ix.digest_kind} is not known")
    region = header.archive_size - HEADER_SIZE if header.front else header.index_offset
    region -= header.payload_offset
    end = 0
    if len(ix.payloads):
        last = ix.payloads[-1]
        end = int(last["offset"]) + int(last["nbytes"])
    if align_up(end, header.alignment) != region:
        raise FormatError(f"payloads end at {end:#x} of a region of {region:#x} bytes, not within its last alignment")


def check_index(ix: Index, header: Header) -> None:
    """Check every rule of the index but those that need a payload's bytes; linear in its size.

    Raises:
        FormatError: with the tensor's name where one is concerned.
        LimitError: a size or depth beyond the format's limits.
    """
    check_header(ix, header)
    pool = ix.pool()
    pool.check_text()
    _check_budgets(ix)
    if len(ix.payloads):
        check_payload(PayloadColumns(ix, header))
    if _first(ix.by_name >= len(ix.tensors)) is not None:
        raise FormatError(f"by_name: an item is not one of the {len(ix.tensors)} tensors")
    t = TensorColumns(ix, header)
    _check_names(ix, t, pool)
    if len(ix.tensors):
        check_tensor(t)
    _check_modules(ix, pool)
    _check_attributes(ix, pool)
    _check_children(ix, t)
    _check_full_names(ix, t, pool)
    _check_collisions(ix, t, pool)
    _check_usage(ix, t)


def _check_budgets(ix: Index) -> None:
    """Spans and lists may share their pool, but not a million times (R30, R31): this keeps every later pass linear."""
    limit = len(ix.text)
    columns: list[tuple[str, Array]] = [
        ("names of tensors", ix.tensors["name_size"]),
        ("names of modules", ix.modules["name_size"]),
        ("type names", ix.modules["type_name_size"]),
        ("names of attributes", ix.attributes["name_size"]),
        ("names of metadata", ix.metadata["name_size"]),
    ]
    for what, sizes in columns:
        if not len(sizes):
            continue
        total = int(sizes.sum(dtype=np.uint64))
        if total > limit + SPAN_ALLOWANCE * len(sizes):
            raise LimitError(f"index: the {what} sum to {total} bytes, in a text pool of {limit}")
    if not len(ix.attributes) and not len(ix.metadata):
        return
    _check_lists(ix)
    for what, rows in (("attributes", ix.attributes), ("metadata", ix.metadata)):
        lists = rows["value"][rows["form"] != ValueForm.SCALAR] >> np.uint64(32)
        total = int(lists.sum(dtype=np.uint64))
        if total > len(ix.words) + WORDS_ALLOWANCE * len(rows):
            raise LimitError(f"index: the lists of {what} sum to {total} items, in a pool of {len(ix.words)} words")
    texts = [_text_values(ix, rows) for rows in (ix.attributes, ix.metadata)]
    total = sum(int((words >> np.uint64(32)).sum(dtype=np.uint64)) for words in texts)
    if total > limit + SPAN_ALLOWANCE * sum(map(len, texts)):
        raise LimitError(f"index: text values sum to {total} bytes, in a text pool of {limit}")


def _check_lists(ix: Index) -> None:
    """Every list lies in the pool of words (R67)."""
    for what, rows in (("attributes", ix.attributes), ("metadata", ix.metadata)):
        starts, counts = _lists(rows[rows["form"] != ValueForm.SCALAR])
        if (starts + counts > len(ix.words)).any():
            raise FormatError(f"{what}: a list leaves the pool of {len(ix.words)} words")


def _lists(rows: Array) -> tuple[Array, Array]:
    return (rows["value"] & np.uint64(NONE)).astype(np.int64), (rows["value"] >> np.uint64(32)).astype(np.int64)


def _list_items(ix: Index, rows: Array) -> Array:
    """Return the words of all lists in `rows`."""
    starts, counts = _lists(rows)
    parts = [ix.words[s : s + c] for s, c in zip(starts.tolist(), counts.tolist(), strict=True)]
    return np.concatenate([np.zeros(0, np.uint64), *parts])


def _text_values(ix: Index, rows: Array) -> Array:
    """Return the spans, as words, of every text value and list item."""
    texts = rows[rows["type"] == ValueType.TEXT]
    scalar = texts["form"] == ValueForm.SCALAR
    return np.concatenate((texts["value"][scalar], _list_items(ix, texts[~scalar])))


def check_touched(ix: Index, header: Header, i: int, pool: text_pool.Pool) -> None:
    """Check tensor i alone: after this, a view of it lies inside the archive (R26 to R29, R33, R45 to R60).

    Raises:
        FormatError, LimitError: naming the tensor.
    """
    one = TensorRow(ix, header, i)
    if (why := pool.bad_name(one.name, one.name_size)) is not None:
        raise FormatError(f"tensors[{i}]: its name {why}")
    check_tensor(one)


def _check_names(ix: Index, t: TensorColumns, pool: text_pool.Pool) -> None:
    """`by_name` is every tensor once, and their names, each one legal, ascend strictly in it (R27 to R29, R32)."""
    order = ix.by_name.astype(np.int64)
    starts, sizes = t.name[order], t.name_size[order]
    if (bad := pool.bad_names(starts, sizes)) is not None:
        raise FormatError(f"tensors[{order[bad[0]]}]: its name {bad[1]}")
    if (i := pool.first_not_ascending(starts, sizes)) is not None:
        name = ix.name(int(order[i]))
        raise FormatError(f"by_name[{i + 1}]: names are not strictly ascending after '{name}'", tensor=name)


def _check_modules(ix: Index, pool: text_pool.Pool) -> None:
    """Names, kinds and reserved fields of modules are right, and so is module 0 (R26 to R29, R37, R41)."""
    rows = ix.modules
    count = len(rows)
    if bool(rows["reserved0"].any() or rows["reserved1"].any() or rows["reserved2"].any()):
        raise FormatError("modules: a reserved field is not zero")
    if count > 1 and (bad := pool.bad_names(rows["name"][1:], rows["name_size"][1:])):
        raise FormatError(f"modules[{bad[0] + 1}]: its name {bad[1]}")
    if bad := pool.bad_names(rows["type_name"], rows["type_name_size"], empty=True):
        raise FormatError(f"modules[{bad[0]}]: its type name {bad[1]}")
    if bad := pool.bad_names(rows["name"][:1], rows["name_size"][:1], empty=True):
        raise FormatError(f"modules[0]: its name {bad[1]}")
    root = rows[0]
    if root["parent"] != NONE or root["end"] != count or root["name_size"] or root["key_size"] or root["place"]:
        raise FormatError("modules[0]: the record itself has no name, no parent, place 0, and holds all modules")
    if not rows["kind"].all():
        raise FormatError("modules: kind 0 is invalid")
    if count > 1:
        _check_nesting(rows)


def _check_nesting(rows: Array) -> None:
    """Modules are in pre-order, their ranges nest, none is deeper than 100 (R38 to R40)."""
    count = len(rows)
    i = np.arange(1, count)
    parent, end = rows["parent"][1:].astype(np.int64), rows["end"].astype(np.int64)
    if (j := _first(parent >= i)) is not None:
        raise FormatError(f"modules[{j + 1}]: its parent {int(parent[j])} does not come before it")
    if (j := _first((end[1:] <= i) | (end[1:] > end[parent]))) is not None:
        raise FormatError(f"modules[{j + 1}]: its range ends at {int(end[j + 1])}, outside its parent's")
    first = np.flatnonzero(np.arange(1, count + 1) < end)  # modules with descendants: the next one is a child
    if (rows["parent"][first + 1] != first).any():
        raise FormatError("modules: not in pre-order, a module with descendants is not followed by its child")
    later = np.flatnonzero(end[1:] < end[parent]) + 1  # and where a range ends inside the parent's, a sibling starts
    if (rows["parent"][end[later]] != rows["parent"][later]).any():
        raise FormatError("modules: not in pre-order, a module is not followed by its sibling")
    depth = np.bincount(np.arange(count) + 1, minlength=count + 1)[: count + 1] - np.bincount(end, minlength=count + 1)
    if int(np.cumsum(depth).max()) >= MAX_DEPTH:
        raise LimitError(f"modules: nested more than {MAX_DEPTH} deep")


def _check_attributes(ix: Index, pool: text_pool.Pool) -> None:
    """Attributes ascend by (parent, place), metadata by name; values are of known kinds, in their pool (R64 to R68)."""
    rows = ix.attributes
    if not len(rows) and not len(ix.metadata):
        return
    if (i := _first(rows["parent"] >= len(ix.modules))) is not None:
        raise FormatError(f"attributes[{i}]: its parent {int(rows['parent'][i])} is no module")
    order = rows["parent"].astype(np.uint64) << np.uint64(32) | rows["place"]
    if (i := _first(order[1:] <= order[:-1])) is not None:
        raise FormatError(f"attributes[{i + 1}]: not strictly ascending by parent and place")
    file = ix.metadata
    if (i := _first((file["parent"] != NONE) | (file["place"] != 0))) is not None:
        raise FormatError(f"metadata[{i}]: it has a parent or a place")
    for what, part in (("attributes", rows), ("metadata", file)):
        if bad := pool.bad_names(part["name"], part["name_size"]):
            raise FormatError(f"{what}[{bad[0]}]: its name {bad[1]}")
        if (part["reserved0"] | part["reserved1"]).any():
            raise FormatError(f"{what}: a reserved field is not zero")
        _check_values(ix, part, what, pool)
    if (i := pool.first_not_ascending(file["name"], file["name_size"])) is not None:
        raise FormatError(f"metadata[{i + 1}]: names are not strictly ascending")


def _check_values(ix: Index, rows: Array, what: str, pool: text_pool.Pool) -> None:
    if (i := _first((rows["type"] > ValueType.PAYLOAD) | (rows["form"] > ValueForm.TUPLE))) is not None:
        raise FormatError(f"{what}[{i}]: type {int(rows['type'][i])} or form {int(rows['form'][i])} is not known")
    for kind, most in ((ValueType.NIL, 0), (ValueType.BOOL, 1)):
        if (_values(ix, rows, kind) > most).any():
            raise FormatError(f"{what}: a {('nil', 'bool')[kind]} is more than {most}")
    refs = _values(ix, rows, ValueType.PAYLOAD)
    if ((refs != NONE) & (refs >= len(ix.payloads))).any():
        raise FormatError(f"{what}: a payload is not in the index")
    texts = _text_values(ix, rows)
    starts, sizes = (texts & np.uint64(NONE)).astype(np.uint32), (texts >> np.uint64(32)).astype(np.uint32)
    if bad := pool.bad_names(starts, sizes, empty=True, nul=True):
        raise FormatError(f"{what}: a text {bad[1]}")


def _values(ix: Index, rows: Array, kind: int) -> Array:
    """Return every word of one type, list items included."""
    picked = rows[rows["type"] == kind]
    scalar = picked["form"] == ValueForm.SCALAR
    return np.concatenate((picked["value"][scalar], _list_items(ix, picked[~scalar])))


def _check_children(ix: Index, t: TensorColumns) -> None:
    """`by_module`, first_tensor, first_attribute and the places of each module's children agree (R42 to R44)."""
    modules, count, parents = ix.modules, len(ix.modules), t.parent
    if count == 1 and ix.by_module is None and not len(ix.attributes):
        alone = np.array_equal(t.place, np.arange(len(parents), dtype=np.uint32))
        if alone and not modules["first_tensor"][0] and not modules["first_attribute"][0]:
            return  # a flat record, in order
    if ix.by_module is not None:
        order = ix.by_module
        if _first(order >= len(parents)) is not None:
            raise FormatError("by_module: an item is no tensor")
        keys = parents[order].astype(np.uint64) << np.uint64(32) | order
        if (keys[1:] <= keys[:-1]).any():
            raise FormatError("by_module: not strictly ascending by (parent, tensor)")
    elif (parents[1:] < parents[:-1]).any():
        raise FormatError("by_module is missing, but tensors are not in the order of their modules")
    if (modules["first_tensor"] != first_children(parents, count)).any():
        raise FormatError("modules: first_tensor does not match the tensors' parents")
    if (modules["first_attribute"] != first_children(ix.attributes["parent"], count)).any():
        raise FormatError("modules: first_attribute does not match the attributes' parents")
    parent = np.concatenate((parents, modules["parent"][1:], ix.attributes["parent"]))
    place = np.concatenate((t.place, modules["place"][1:], ix.attributes["place"]))
    sizes = np.bincount(parent, minlength=count)
    slots = (np.cumsum(sizes) - sizes)[parent] + place
    if (place >= sizes[parent]).any() or (np.bincount(slots, minlength=len(slots)) != 1).any():
        raise FormatError("modules: the places of a module's children are not 0, 1, 2, ... once each")


def _check_full_names(ix: Index, t: TensorColumns, pool: text_pool.Pool) -> None:
    """A full name is the module's name, a dot and the key; in module 0 the key alone (R34)."""
    modules = ix.modules[1:]
    inner = [np.ascontiguousarray(modules[c]) for c in ("name", "name_size", "key_size", "parent")]
    for what, columns in (("tensors", [t.name, t.name_size, t.key_size, t.parent]), ("modules", inner)):
        nested = columns[3] != 0
        if np.count_nonzero(columns[2][~nested] != columns[1][~nested]):
            raise FormatError(f"{what}: the name of one in module 0 is not its key")
        if not np.count_nonzero(nested):
            continue
        whole = np.count_nonzero(nested) == len(nested)
        name, size, key, parent = columns if whole else (c[nested] for c in columns)
        prefix = ix.modules["name_size"][parent]
        split = (key != 0) & (size == prefix + np.uint64(1) + key)
        if what == "tensors" and np.count_nonzero(split) == len(split) and _start_as_modules(ix, t, pool):
            continue
        split &= pool.octets[name + np.where(split, prefix, 0)] == ord(".")
        split &= pool.equal(name, ix.modules["name"][parent], np.where(split, prefix, 0))
        if (i := _first(~split)) is not None:
            full = ix.string(int(name[i]), int(size[i]))
            raise FormatError(f"{what}: '{full}' is not its module's name, a dot and its key")


def _start_as_modules(ix: Index, t: TensorColumns, pool: text_pool.Pool) -> bool:
    """Return whether every tensor's name starts with its module's and a dot; all are long enough, and in order.

    Of the names in a module the first and the last tell: what lies between two that start alike starts so, too.
    """
    ranks = np.empty(len(t.name), np.uint32)
    ranks[ix.by_name] = np.arange(len(ranks), dtype=np.uint32)
    parents = t.parent
    if ix.by_module is not None:
        ranks, parents = ranks[ix.by_module], parents[ix.by_module]
    starts = np.concatenate(([0], np.flatnonzero(parents[1:] != parents[:-1]) + 1))
    ends = ix.by_name[np.concatenate((np.minimum.reduceat(ranks, starts), np.maximum.reduceat(ranks, starts)))]
    ends = ends[t.parent[ends] != 0]
    modules = ix.modules[t.parent[ends]]
    names, prefixes = t.name[ends], modules["name_size"]
    dots = pool.octets[names + prefixes] == ord(".")
    return bool(dots.all() and pool.equal(names, modules["name"], prefixes).all())


def _check_collisions(ix: Index, t: TensorColumns, pool: text_pool.Pool) -> None:
    """No two modules share a full name; within a module no two children of any kind share a key (R35, R36)."""
    modules, attributes = ix.modules, ix.attributes
    if len(modules) == 1 and not len(attributes):
        return  # tensors alone: `by_name` has shown their names to be unique
    if (i := pool.first_repeated(modules["name"], modules["name_size"], np.zeros(len(modules), np.uint32))) is not None:
        raise FormatError(f"modules[{i}]: another module has its name")
    mixed = np.zeros(len(modules), bool)
    mixed[modules["parent"][1:]] = True
    mixed[attributes["parent"]] = True
    near = mixed[t.parent]
    near_size = t.key_size[near]
    near_start = t.name[near] + t.name_size[near] - near_size
    inner = modules[1:]
    inner_start = inner["name"] + inner["name_size"] - inner["key_size"]
    starts = np.concatenate((near_start, inner_start, attributes["name"]))
    sizes = np.concatenate((near_size, inner["key_size"], attributes["name_size"]))
    parents = np.concatenate((t.parent[near], inner["parent"], attributes["parent"]))
    if (i := pool.first_repeated(starts, sizes, parents)) is not None:
        key = ix.string(int(starts[i]), int(sizes[i]))
        raise FormatError(f"modules[{int(parents[i])}]: two of its children have the key '{key}'")


def _check_usage(ix: Index, t: TensorColumns) -> None:
    """Every payload belongs to something: an archive carries no stowaways (R61)."""
    count = len(ix.payloads)
    if count <= len(t.payload) and np.array_equal(t.payload[:count], np.arange(count, dtype=np.uint32)):
        return  # as they mostly are
    used = np.zeros(count + 1, bool)
    used[np.minimum(t.payload, len(ix.payloads))] = True
    for rows in filter(len, (ix.attributes, ix.metadata)):
        used[np.minimum(_values(ix, rows, ValueType.PAYLOAD), np.uint64(len(ix.payloads)))] = True
    if (i := _first(~used[:-1])) is not None:
        raise FormatError(f"payloads[{i}]: no tensor and no attribute uses it")
