"""The module tree of a record that comes one tensor at a time: paths of keys to entries.

For writing forward (`RecordWriter`, converters) and for parts of a loaded record; `flatten` takes nested values.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from zcrecord.codec.entries import (
    AttributeEntry,
    Entries,
    ModuleColumns,
    ModuleEntry,
    ModuleKind,
    TensorLayout,
    encodable,
    is_attribute,
)
from zcrecord.codec.layout import MAX_DEPTH, NONE
from zcrecord.errors import LimitError, NameCollisionError, UnsupportedError

# Limit of characters in all modules' full names: the first, and the second times those in tensors' names. Each name is
# stored in full, so without it a file of deeply nested long names would become an archive of 50 times its size.
_BASE_BUDGET, _BUDGET_FACTOR = 16 << 20, 16
_MAPPING = int(ModuleKind.MAPPING), ""
_ORDERED = (ModuleKind.LIST, ""), (ModuleKind.TUPLE, "")


class ModuleTreeBuilder:
    """Builder of a module tree from tensors and attributes; children keep the order in which they are added."""

    def __init__(self) -> None:
        # Columns, not objects: a model may have as many modules as tensors. Modules are numbered as they are added.
        self._modules_by_path: dict[tuple[str, ...], int] = {(): 0}
        self._modules: dict[str, int] = {"": 0}  # by full name
        self._prefix_sizes: list[int] = [0]  # characters of a module's full name and of the dot behind it
        self._module_parents: list[int] = [NONE]
        self._module_places: list[int] = [0]  # of modules in their parents
        self._child_counts: list[int] = [0]
        self._kinds: dict[int, tuple[int, str]] = {}  # and class names, of modules that are not plain mappings
        self._keys: dict[int, Sequence[str]] = {}  # of lists and tuples of other writers, if not 0, 1, 2 and so on
        self._attributes: dict[str, AttributeEntry] = {}  # by full name
        self._names: dict[str, int] = {}  # tensors by full name; the columns below are in their order
        self._parents: list[int] = []
        self._places: list[int] = []
        self._layout_ids: list[int] = []
        self.payloads: list[int] = []
        self._layouts: dict[TensorLayout, int] = {}
        self._name_budget = _BASE_BUDGET

    def __len__(self) -> int:
        return len(self.payloads)

    def tensor(self, path: Sequence[str], layout: TensorLayout, payload: int) -> None:
        """Add a tensor with the bytes of `payload`, a number that may still change in `payloads`.

        NameCollisionError if its name is taken, UnsupportedError if a key is empty or has NUL, LimitError if it is too
        deep, or names of modules take far more than those of tensors.
        """
        self.check_name(path)
        self.put(tuple(path[:-1]), ".".join(path), layout, payload)

    def put(self, above: tuple[str, ...], name: str, layout: TensorLayout, payload: int) -> None:
        """Add a tensor by the path of its module and its full name, of valid keys; errors are those of `tensor`."""
        self._name_budget += _BUDGET_FACTOR * len(name)
        parent = self._modules_by_path.get(above)
        if parent is None:
            parent = self._make_module(above, name)
        may_collide = name in self._modules or name in self._attributes
        if name in self._names or (may_collide and self._kind_of_child(parent, name)):
            raise NameCollisionError("this name is taken already; rename one", tensor=name)
        self._names[name] = len(self.payloads)
        self._parents.append(parent)
        self._places.append(self._child_counts[parent])
        self._child_counts[parent] += 1
        self._layout_ids.append(self._layouts.setdefault(layout, len(self._layouts)))
        self.payloads.append(payload)

    def _kind_of_child(self, parent: int, name: str) -> str:
        """Return the kind of a module's child of this full name: "a tensor", "a module", "an attribute", or ""."""
        if name in self._names and self._parents[self._names[name]] == parent:
            return "a tensor"
        if name in self._modules and self._module_parents[self._modules[name]] == parent:
            return "a module"
        return "an attribute" if name in self._attributes and self._attributes[name].parent == parent else ""

    def check_name(self, path: Sequence[str]) -> None:
        """Raise the error that `tensor` would raise for this path, before its bytes are written; add nothing."""
        name = ".".join(path)
        _check_keys(path, name)
        if name in self._names:
            raise NameCollisionError("two tensors would have this name; rename one", tensor=name)
        parent = self._module_above(path, make=False)
        if parent is not None and (kind := self._kind_of_child(parent, name)):
            raise NameCollisionError(f"{kind} has this name already; rename one", tensor=name)

    def attribute(self, path: Sequence[str], value: Any) -> None:
        """Add an attribute; errors are those of `tensor`, and UnsupportedError for a value that is not plain."""
        name = ".".join(path)
        _check_keys(path, name)
        check_attribute(value, name)
        if name in self._attributes:
            raise NameCollisionError("two attributes would have this name; rename one", tensor=name)
        parent = self._module_above(path)
        if self._kind_of_child(parent, name):
            raise NameCollisionError("this name is taken already; rename one", tensor=name)
        self._attributes[name] = AttributeEntry(path[-1], parent, self._child_counts[parent], value)
        self._child_counts[parent] += 1

    def module(
        self,
        path: Sequence[str],
        kind: int = ModuleKind.MAPPING,
        type_name: str = "",
        keys: Sequence[str] | None = None,
    ) -> None:
        """Add a module, () for the record itself, or set its kind; `keys` are a list's, if not 0, 1, 2 and so on."""
        if path:
            _check_keys(path, ".".join(path))
        number = self._module_above((*path, ""))
        self._kinds[number] = kind, type_name
        if keys is not None:
            self._keys[number] = keys

    def _module_above(self, path: Sequence[str], *, make: bool = True) -> Any:
        """Return the number of the module that a path's last key is in; without `make`, None if it is missing."""
        above = tuple(path[:-1])
        number = self._modules_by_path.get(above)
        return self._make_module(above, ".".join(path), make) if number is None else number

    def _make_module(self, above: tuple[str, ...], name: str, make: bool = True) -> Any:
        """Add the module `above`, with its parents, for a child of this full name; without `make`, only check that."""
        first = len(above)  # the number of keys of the first missing module
        while (parent := self._modules_by_path.get(above[: first - 1])) is None:
            first -= 1
        missing = name[: self._prefix_sizes[parent] + len(above[first - 1])]
        is_taken = missing in self._modules or missing in self._names or missing in self._attributes
        if first == len(above) and not is_taken and len(missing) < self._name_budget:  # the usual case
            return self._add_module(parent, above, missing) if make else None
        key_sizes = (len(key) + 1 for key in above[first - 1 :])
        _, *ends = itertools.accumulate(key_sizes, initial=self._prefix_sizes[parent])  # of missing modules, in `name`
        if self._kind_of_child(parent, missing):
            raise NameCollisionError("a tensor or an attribute has the name of this module; rename one", tensor=missing)
        if sum(ends) > self._name_budget + _BUDGET_FACTOR * (len(name) + 1):
            limit = f"{_BASE_BUDGET >> 20} MiB and {_BUDGET_FACTOR} times those of tensors"
            raise LimitError(f"names of modules would take more than {limit}; nest them less deeply", tensor=name)
        for end in ends:
            if name[: end - 1] in self._modules:
                fault = "two keys with dots lead to this name of a module; rename one"
                raise NameCollisionError(fault, tensor=name[: end - 1])
        if not make:
            return None
        for count, end in enumerate(ends, first):
            parent = self._add_module(parent, above[:count], name[: end - 1])
        return parent

    def _add_module(self, parent: int, path: tuple[str, ...], name: str) -> int:
        """Add a module to its parent, and return its number."""
        number = self._modules[name] = self._modules_by_path[path] = len(self._prefix_sizes)
        self._module_parents.append(parent)
        self._module_places.append(self._child_counts[parent])
        self._child_counts[parent] += 1
        self._prefix_sizes.append(len(name) + 1)
        self._child_counts.append(0)
        self._name_budget -= len(name)
        return number

    def entries(self, order: Sequence[int] | None = None) -> Entries:
        """Return the entries, tensors as added or in `order`; a list without the keys 0, 1, 2 is a mapping."""
        numbers, sizes, kinds = self._preorder_numbers(), self._prefix_sizes, self._final_kinds()
        module_parents = [NONE, *map(numbers.__getitem__, self._module_parents[1:])]
        module_key_sizes = map(_key_size, self._modules, [0, *map(sizes.__getitem__, self._module_parents[1:])])
        kind_columns = zip(*[kinds.get(i, _MAPPING) for i in range(len(sizes))], strict=True)
        rows = zip(self._modules, module_key_sizes, module_parents, self._module_places, *kind_columns, strict=True)
        modules = [ModuleEntry("", 0, NONE, 0, *_MAPPING)] * len(sizes)
        for number, entry in zip(numbers, map(ModuleEntry._make, rows), strict=True):
            modules[number] = entry
        attributes = sorted(self._attributes.values(), key=lambda a: [*self._places_to(a.parent), a.place])
        attributes = [a._replace(parent=numbers[a.parent]) for a in attributes]
        names, parents = list(self._names), list(map(numbers.__getitem__, self._parents))
        key_sizes = list(map(_key_size, names, map(sizes.__getitem__, self._parents)))
        columns: list[list[Any]] = [names, key_sizes, parents, self._places, self.payloads, self._layout_ids]
        if order is not None:
            rows_in_order = np.argsort(np.asarray(order, np.int64)).tolist()
            columns = [list(map(column.__getitem__, rows_in_order)) for column in columns]
        names, key_sizes, parents, places, payloads, layout_ids = map(list, columns)
        layouts = list(self._layouts)
        return Entries(names, key_sizes, parents, places, payloads, layout_ids, layouts, modules, attributes)

    def _preorder_numbers(self) -> list[int]:
        """Return each module's number in pre-order. Parents have lower numbers than their children: no recursion."""
        count = len(self._module_parents)
        sizes, numbers, next_numbers = [1] * count, [0] * count, [1] * count  # sizes: modules in one, itself included
        for i in range(count - 1, 0, -1):
            sizes[self._module_parents[i]] += sizes[i]
        for i in range(1, count):
            parent = self._module_parents[i]
            numbers[i] = next_numbers[parent]
            next_numbers[i] = numbers[i] + 1
            next_numbers[parent] += sizes[i]
        return numbers

    def _places_to(self, module: int) -> list[int]:
        """Return the places that lead to a module, by which modules sort in pre-order."""
        places = []
        while module:
            places.append(self._module_places[module])
            module = self._module_parents[module]
        return places[::-1]

    def _final_kinds(self) -> dict[int, tuple[int, str]]:
        """Return kinds and class names of all but plain mappings; a list without its keys in order is a mapping."""
        kinds = dict(self._kinds)
        if not any(kind in _ORDERED for kind in kinds.values()):
            return kinds  # the usual case
        modules = zip(self._modules, self._module_parents, self._module_places, strict=True)
        tensors = zip(self._names, self._parents, self._places, strict=True)
        attributes = ((name, a.parent, a.place) for name, a in self._attributes.items())
        for name, parent, place in itertools.chain(modules, tensors, attributes):
            if kinds.get(parent) in _ORDERED:
                keys = self._keys.get(parent, ())
                expected_key = keys[place] if place < len(keys) else str(place)
                if name[self._prefix_sizes[parent] :] != expected_key:
                    kinds[parent] = _MAPPING
        return kinds


def _key_size(name: str, start: int) -> int:
    """Return the size in UTF-8 of a full name's last key, which starts at a character."""
    return len(name) - start if name.isascii() else len(name[start:].encode(errors="surrogatepass"))


def check_attribute(value: Any, name: str) -> None:
    """Raise UnsupportedError unless an attribute can have this value."""
    if not is_attribute(value, name):
        rule = "an attribute is None, bool, an int of 64 bits, float, str, bytes, or a list of one of these"
        raise UnsupportedError(f"a {type(value).__name__}; {rule}", tensor=name)


def _check_keys(path: Sequence[str], name: str) -> None:
    """Raise UnsupportedError or LimitError unless a path, whose full name is `name`, can be stored."""
    if not path or not all(path):
        raise UnsupportedError(f"{path!r}: keys are non-empty strings")
    if "\0" in name:
        raise UnsupportedError("its name contains NUL; rename it", tensor=name)
    if not encodable(name):
        raise UnsupportedError("its name has lone surrogates, which are not UTF-8; rename it", tensor=name)
    if len(path) > MAX_DEPTH:
        raise LimitError(f"nested more than {MAX_DEPTH} deep; join some of its keys", tensor=name)


def split_dotted(name: str) -> tuple[str, ...]:
    """Return the keys of a dotted name; the whole name if a key would be empty, or the depth too great."""
    parts = tuple(name.split("."))
    return parts if all(parts) and len(parts) <= MAX_DEPTH else (name,)


def state_path(name: str, state: Container[str]) -> tuple[str, ...]:
    """Return the keys of a name in a `state_dict()`; the whole name if `state` has a prefix of it."""
    path = split_dotted(name)
    return (name,) if any(".".join(path[:i]) in state for i in range(1, len(path))) else path


def state_entries(names: Sequence[str], max_text: int = _BASE_BUDGET) -> Entries | None:
    """Return the entries of a flat `state_dict`, computed by columns; payloads and layouts are empty.

    Equal to those of a `ModuleTreeBuilder` that gets each tensor by its `state_path`. Names must be distinct, and such
    as can be stored. None if only the builder can do it: a name stays whole, modules lie too deep, or their names take
    more than `max_text` characters.
    """
    text, module_names = "\0".join(["", *names, ""]), [name.rpartition(".")[0] for name in names]
    if any(empty_key in text for empty_key in ("..", "\0.", ".\0")):
        return None
    tree = _with_ancestors(module_names, min(max_text, _BASE_BUDGET))
    if tree is None or not tree[0].keys().isdisjoint(names):
        return None
    modules, parent_names = tree
    module_parents = np.fromiter(map(modules.__getitem__, parent_names), np.intp)
    tensor_parents = np.fromiter(map(modules.__getitem__, module_names), np.intp)
    del parent_names, module_names, tree  # as large as the names
    depths = _depths(module_parents)
    if depths.max() >= MAX_DEPTH:
        return None
    tensor_count, module_count = len(names), len(modules)
    places, numbers, sizes = _preorder(tensor_parents, module_parents, depths)
    size_of: Any = len if text.isascii() else lambda name: len(name.encode())
    name_sizes = np.fromiter(map(size_of, modules), np.intp)
    key_starts = np.where(depths, name_sizes + 1, 0)  # in the full names of a module's children
    preorder, full_names = np.argsort(numbers), list(modules)
    columns = ModuleColumns(
        names=[full_names[i] for i in preorder.tolist()],
        key_sizes=(name_sizes - key_starts[module_parents])[preorder],
        parents=np.append(NONE, numbers[module_parents][preorder[1:]]),
        places=np.append(0, places[tensor_count:])[preorder],
        ends=np.arange(module_count) + sizes[preorder],
    )
    key_sizes = np.fromiter(map(size_of, names), np.intp) - key_starts[tensor_parents]
    return Entries(list(names), key_sizes, numbers[tensor_parents], places[:tensor_count], module_columns=columns)


def _with_ancestors(names: list[str], max_text: int) -> tuple[dict[str, int], list[str]] | None:
    """Return numbers of modules and their ancestors by name, and parents' names; None if names are too long."""
    numbers, parents, level = {"": 0}, [""], names
    while level:
        new = [name for name in dict.fromkeys(level) if name not in numbers]
        numbers.update(zip(new, itertools.count(len(numbers))))
        max_text -= sum(map(len, new))
        if max_text < 0:
            return None
        level = [name.rpartition(".")[0] for name in new]
        parents += level
    return numbers, parents


def _depths(module_parents: Any) -> Any:
    """Return the depth of each module, 0 of the record itself, up to MAX_DEPTH."""
    depths, ancestors = np.append(0, np.ones(len(module_parents) - 1, np.intp)), module_parents
    while ancestors.any() and depths.max() < MAX_DEPTH:
        depths += ancestors > 0
        ancestors = module_parents[ancestors]
    return depths


def _preorder(tensor_parents: Any, module_parents: Any, depths: Any) -> tuple[Any, Any, Any]:
    """Return the places of tensors, then modules; the modules' numbers in pre-order; and their sizes in modules.

    A module's size counts itself. Its place follows from its first tensor. Each step is of whole columns, by depth.
    """
    tensor_count, module_count = len(tensor_parents), len(module_parents)
    first, sizes = np.full(module_count, tensor_count), np.ones(module_count, np.intp)  # first: the first tensor inside
    first[tensor_parents[::-1]] = np.arange(tensor_count)[::-1]
    by_depth = np.argsort(depths, kind="stable")
    levels = np.split(by_depth, np.searchsorted(depths[by_depth], np.arange(1, depths.max() + 1)))[1:]
    for level in reversed(levels):
        np.minimum.at(first, module_parents[level], first[level])
        np.add.at(sizes, module_parents[level], sizes[level])
    parents = np.append(tensor_parents, module_parents[1:])
    places, order = _places(parents, np.append(np.arange(tensor_count), first[1:]))
    modules = order[order >= tensor_count] - tensor_count + 1  # without the record; by parent and place
    before = np.zeros(module_count, np.intp)  # modules that lie before each one in its parent, with those inside them
    ends = np.cumsum(sizes[modules])
    before[modules] = ends - sizes[modules]
    before[modules] -= before[modules][np.searchsorted(module_parents[modules], module_parents[modules])]
    numbers = np.zeros(module_count, np.intp)
    for level in levels:
        numbers[level] = numbers[module_parents[level]] + 1 + before[level]
    return places, numbers, sizes


def _places(parents: Any, order: Any) -> tuple[Any, Any]:
    """Return the place of each child in its parent, by ascending `order`, and the children by parent and place."""
    by_parent = np.lexsort((order, parents))
    sorted_parents = parents[by_parent]
    places = np.zeros(len(parents), np.intp)
    places[by_parent] = np.arange(len(parents)) - np.searchsorted(sorted_parents, sorted_parents)
    return places, by_parent


def path_of_name(name: str | Sequence[str]) -> tuple[str, ...]:
    """Return the keys of a name, which is split at its dots, or given as keys; UnsupportedError if it is neither."""
    if isinstance(name, str):
        return split_dotted(name)
    if not isinstance(name, list | tuple) or not all(isinstance(key, str) for key in name):
        raise UnsupportedError(f"{name!r}: a name is a str, or a tuple of keys, each a non-empty str")
    return tuple(name)
