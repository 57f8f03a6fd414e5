"""The module tree of a record that becomes known one tensor at a time: paths of keys to entries.

For writing forward (`RecordWriter`, converters) and for parts of a loaded record. Nested values that are all there are
`flatten`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from zcrecord.codec.entries import (
    AttributeEntry,
    Entries,
    ModuleEntry,
    ModuleKind,
    TensorLayout,
    encodable,
    is_attribute,
)
from zcrecord.codec.layout import MAX_DEPTH, NONE
from zcrecord.errors import LimitError, NameCollisionError, UnsupportedError

# Room for full names of modules: so many characters, and so many times those of tensors' names. Each is stored in
# full: a file of deeply nested long names would else become one of 50 times its size, and take 300 times its memory.
_ROOM, _TIMES = 16 << 20, 16
_MAPPING = int(ModuleKind.MAPPING), ""
_ORDERED = (ModuleKind.LIST, ""), (ModuleKind.TUPLE, "")


class ModuleTreeBuilder:
    """Builds a module tree from tensors and attributes that come one by one; children keep the order of their coming.

    Example:
        >>> from zcrecord.codec.entries import TensorLayout
        >>> tree = ModuleTreeBuilder()
        >>> tree.tensor(("encoder", "weight"), TensorLayout(18, 32, (2,)), payload=0)
        >>> tree.attribute(("encoder", "heads"), 8)
        >>> tree.entries().names
        ['encoder.weight']
    """

    def __init__(self) -> None:
        # Columns and not objects: a model may have as many modules as tensors. A module's number is when it came.
        self._paths: dict[tuple[str, ...], int] = {(): 0}  # every module by its keys
        self._modules: dict[str, int] = {"": 0}  # and by its full name
        self._sizes: list[int] = [0]  # characters of its full name and of the dot behind it
        self._above: list[int] = [NONE]  # the module around it, and its place there
        self._module_places: list[int] = [0]
        self._counts: list[int] = [0]  # of its children
        self._kinds: dict[int, tuple[int, str]] = {}  # and class names, of those that are no plain mappings
        self._keys: dict[int, Sequence[str]] = {}  # of lists and tuples, if they may be others than 0, 1, 2 and so on
        self._attributes: dict[str, AttributeEntry] = {}  # by full name; their parents are numbers like those above
        self._names: dict[str, int] = {}  # of tensors, and their numbers, in which order the columns below are
        self._parents: list[int] = []
        self._places: list[int] = []
        self._layout_ids: list[int] = []
        self.payloads: list[int] = []
        self._layouts: dict[TensorLayout, int] = {}
        self._room = _ROOM

    def __len__(self) -> int:
        return len(self.payloads)

    def tensor(self, path: Sequence[str], layout: TensorLayout, payload: int) -> None:
        """Add a tensor with the bytes of `payload`, a number that may still change in `payloads`.

        Raises:
            NameCollisionError: its name is taken. UnsupportedError: a key is empty or has NUL. LimitError: too deep, or
                names of modules take far more than those of tensors.
        """
        self.check_name(path)
        self.put(tuple(path[:-1]), ".".join(path), layout, payload)

    def put(self, above: tuple[str, ...], name: str, layout: TensorLayout, payload: int) -> None:
        """Add a tensor by the path of its module and its full name, which must be right and free.

        Raises:
            NameCollisionError: not so among the module's children. LimitError: names of modules take far more than
                those of tensors.
        """
        self._room += _TIMES * len(name)
        parent = self._paths.get(above)
        if parent is None:
            parent = self._make(above, name)
        other = name in self._modules or name in self._attributes
        if name in self._names or (other and self._child(parent, name)):
            raise NameCollisionError("this name is taken already", tensor=name)
        self._names[name] = len(self.payloads)
        self._parents.append(parent)
        self._places.append(self._counts[parent])
        self._counts[parent] += 1
        self._layout_ids.append(self._layouts.setdefault(layout, len(self._layouts)))
        self.payloads.append(payload)

    def _child(self, parent: int, name: str) -> str:
        """Return "a tensor", "a module" or "an attribute" if a module has such a child of this full name, else ""."""
        if name in self._names and self._parents[self._names[name]] == parent:
            return "a tensor"
        if name in self._modules and self._above[self._modules[name]] == parent:
            return "a module"
        return "an attribute" if name in self._attributes and self._attributes[name].parent == parent else ""

    def check_name(self, path: Sequence[str]) -> None:
        """Raise the error that `tensor` would, before a byte is written for it."""
        name = ".".join(path)
        _check_keys(path, name)
        if name in self._names:
            raise NameCollisionError("two tensors would have this name", tensor=name)
        parent = self._parent(path, make=False)
        if parent is not None and (what := self._child(parent, name)):
            raise NameCollisionError(f"{what} has this name already", tensor=name)

    def attribute(self, path: Sequence[str], value: Any) -> None:
        """Add an attribute.

        Raises:
            UnsupportedError: an attribute cannot have this value. NameCollisionError: the name is taken.
        """
        name = ".".join(path)
        _check_keys(path, name)
        if not is_attribute(value, name):
            what = "an attribute is None, bool, an int of 64 bits, float, str, bytes, or a list of one of these"
            raise UnsupportedError(f"a {type(value).__name__}; {what}", tensor=name)
        if name in self._attributes:
            raise NameCollisionError("two attributes would have this name", tensor=name)
        parent = self._parent(path)
        if self._child(parent, name):
            raise NameCollisionError("this name is taken already", tensor=name)
        self._attributes[name] = AttributeEntry(path[-1], parent, self._counts[parent], value)
        self._counts[parent] += 1

    def module(
        self,
        path: Sequence[str],
        kind: int = ModuleKind.MAPPING,
        type_name: str = "",
        keys: Sequence[str] | None = None,
    ) -> None:
        """Add a module, or set the kind of one; the empty path is the record itself.

        `keys` are those of a list's or a tuple's children, if other writers may have given it others than 0, 1, 2.
        """
        if path:
            _check_keys(path, ".".join(path))
        number = self._parent((*path, ""))
        self._kinds[number] = kind, type_name
        if keys is not None:
            self._keys[number] = keys

    def _parent(self, path: Sequence[str], *, make: bool = True) -> Any:
        """Return the module a path leads to but for its last key, made unless only looked for: None if not there."""
        above = tuple(path[:-1])
        known = self._paths.get(above)
        return self._make(above, ".".join(path), make) if known is None else known

    def _make(self, above: tuple[str, ...], name: str, make: bool = True) -> Any:
        """Make the module with this path, and those around it, for something that is called `name`."""
        first = len(above)  # of the modules that are missing, counted from 1
        while (here := self._paths.get(above[: first - 1])) is None:
            first -= 1
        module = name[: self._sizes[here] + len(above[first - 1])]
        taken = module in self._modules or module in self._names or module in self._attributes
        if first == len(above) and not taken and len(module) < self._room:  # as nearly always
            return self._add(here, above, module) if make else None
        sizes = itertools.accumulate((len(key) + 1 for key in above[first - 1 :]), initial=self._sizes[here])
        ends = list(sizes)[1:]
        if self._child(here, module):
            raise NameCollisionError("a tensor or an attribute has the name of this module", tensor=module)
        if sum(ends) > self._room + _TIMES * (len(name) + 1):
            what = f"names of modules would take more than {_ROOM >> 20} MiB and {_TIMES} times those of tensors"
            raise LimitError(f"{what}; nest them less deeply", tensor=name)
        for end in ends:
            if name[: end - 1] in self._modules:
                what = "two keys with dots lead to this name of a module; rename one"
                raise NameCollisionError(what, tensor=name[: end - 1])
        if not make:
            return None
        for count, end in enumerate(ends, first):
            here = self._add(here, above[:count], name[: end - 1])
        return here

    def _add(self, here: int, path: tuple[str, ...], name: str) -> int:
        """Add one module to another, by its path and its full name."""
        number = self._modules[name] = self._paths[path] = len(self._sizes)
        self._above.append(here)
        self._module_places.append(self._counts[here])
        self._counts[here] += 1
        self._sizes.append(len(name) + 1)
        self._counts.append(0)
        self._room -= len(name)
        return number

    def entries(self, order: Sequence[int] | None = None) -> Entries:
        """Return the entries so far, tensors in the order of their coming, or that of the numbers in `order`.

        A list or tuple whose keys are not 0, 1, 2 and so on is written as a mapping.
        """
        numbers, sizes, kinds = self._preorder(), self._sizes, self._final_kinds()
        above = [NONE, *map(numbers.__getitem__, self._above[1:])]
        inner_sizes = map(_size, self._modules, [0, *map(sizes.__getitem__, self._above[1:])])
        columns_of_kinds = zip(*[kinds.get(i, _MAPPING) for i in range(len(sizes))], strict=True)
        rows = zip(self._modules, inner_sizes, above, self._module_places, *columns_of_kinds, strict=True)
        modules = [ModuleEntry("", 0, NONE, 0, *_MAPPING)] * len(sizes)
        for number, entry in zip(numbers, map(ModuleEntry._make, rows), strict=True):
            modules[number] = entry
        attributes = sorted(self._attributes.values(), key=lambda a: [*self._way(a.parent), a.place])
        attributes = [a._replace(parent=numbers[a.parent]) for a in attributes]
        names, parents = list(self._names), list(map(numbers.__getitem__, self._parents))
        key_sizes = list(map(_size, names, map(sizes.__getitem__, self._parents)))
        columns: list[list[Any]] = [names, key_sizes, parents, self._places, self.payloads, self._layout_ids]
        if order is not None:
            picked = np.argsort(np.asarray(order, np.int64)).tolist()
            columns = [list(map(column.__getitem__, picked)) for column in columns]
        names, key_sizes, parents, places, payloads, layout_ids = map(list, columns)
        layouts = list(self._layouts)
        return Entries(names, key_sizes, parents, places, payloads, layout_ids, layouts, modules, attributes)

    def _preorder(self) -> list[int]:
        """Return the number of each module in pre-order, children by their places."""
        count = len(self._above)
        totals, numbers, following = [1] * count, [0] * count, [1] * count
        for i in range(count - 1, 0, -1):
            totals[self._above[i]] += totals[i]
        for i in range(1, count):
            above = self._above[i]
            numbers[i] = following[above]
            following[i] = numbers[i] + 1
            following[above] += totals[i]
        return numbers

    def _way(self, module: int) -> list[int]:
        """Return the places that lead to a module: in their order a walk through all comes by."""
        way = []
        while module:
            way.append(self._module_places[module])
            module = self._above[module]
        return way[::-1]

    def _final_kinds(self) -> dict[int, tuple[int, str]]:
        """Return kinds and class names of all but plain mappings; a list is one if it has its keys, in order."""
        kinds = dict(self._kinds)
        if any(kind in _ORDERED for kind in kinds.values()):
            modules = zip(self._modules, self._above, self._module_places, strict=True)
            tensors = zip(self._names, self._parents, self._places, strict=True)
            attributes = ((name, a.parent, a.place) for name, a in self._attributes.items())
            for name, parent, place in itertools.chain(modules, tensors, attributes):
                if kinds.get(parent) in _ORDERED:
                    keys = self._keys.get(parent, ())
                    if name[self._sizes[parent] :] != (keys[place] if place < len(keys) else str(place)):
                        kinds[parent] = _MAPPING
        return kinds


def _size(name: str, start: int) -> int:
    """Return the bytes of a key: of a name from its `start` on."""
    return len(name) - start if name.isascii() else len(name[start:].encode(errors="surrogatepass"))


def _check_keys(path: Sequence[str], name: str) -> None:
    if not path or not all(path):
        raise UnsupportedError(f"{path!r}: keys are non-empty strings")
    if "\0" in name:
        raise UnsupportedError("its name contains NUL", tensor=name)
    if not encodable(name):
        raise UnsupportedError("its name has lone surrogates, which are not UTF-8", tensor=name)
    if len(path) > MAX_DEPTH:
        raise LimitError(f"nested more than {MAX_DEPTH} deep", tensor=name)


def split_dotted(name: str) -> tuple[str, ...]:
    """Return the keys a dotted name stands for; the name whole if a part would be empty or the depth too great."""
    parts = tuple(name.split("."))
    return parts if all(parts) and len(parts) <= MAX_DEPTH else (name,)


def state_path(name: str, state: Container[str]) -> tuple[str, ...]:
    """Return the keys that a name of a `state_dict()` stands for; the name whole if `state` has a prefix of it."""
    path = split_dotted(name)
    return (name,) if any(".".join(path[:i]) in state for i in range(1, len(path))) else path


def path_of_name(name: str | Sequence[str]) -> tuple[str, ...]:
    """Return the path that a caller means: a name split at its dots, or the keys as they are given.

    Raises:
        UnsupportedError: it is neither.
    """
    if isinstance(name, str):
        return split_dotted(name)
    if not isinstance(name, list | tuple) or not all(isinstance(key, str) for key in name):
        raise UnsupportedError(f"{name!r}: a name is a str, or a tuple of keys, each a non-empty str")
    return tuple(name)
