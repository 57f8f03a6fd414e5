"""The module tree of a record that becomes known one tensor at a time: paths of keys to entries.

For who writes forward (`RecordWriter`, converters) and who picks from a loaded record. Nested values that are all
there are `tree`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np

from .entries import AttributeEntry, Entries, Form, ModuleEntry, ModuleKind
from .errors import LimitError, NameCollisionError, UnsupportedError
from .layout import MAX_DEPTH
from .tree import Flat, encodable, is_attribute, split_dotted

__all__ = ["Outline", "path_of_name"]

# What full names of modules may take: so many characters, and so many times those of tensors' names. Each is stored in
# full: a file of deeply nested long names would else become one of 50 times its size, and take 300 times its memory.
_ROOM, _TIMES = 16 << 20, 16


class _Module:
    """One module: its children by key, in the order in which they came."""

    __slots__ = ("children", "kind", "type_name")

    def __init__(self, kind: int = ModuleKind.MAPPING, type_name: str = "") -> None:
        self.kind, self.type_name = kind, type_name
        self.children: dict[str, _Module | _Attribute | int] = {}

    def told_kind(self) -> int:
        counted = self.kind in (ModuleKind.LIST, ModuleKind.TUPLE) and not self.type_name
        if counted and any(key != str(i) for i, key in enumerate(self.children)):
            return int(ModuleKind.MAPPING)
        return self.kind


class _Attribute:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Outline:
    """Modules, tensors and attributes as they are told, each by its path; children keep the order of their first word.

    Example:
        >>> from zcrecord.entries import Form
        >>> outline = Outline()
        >>> outline.tensor(("encoder", "weight"), Form(18, 32, (2,)), payload=0)
        >>> outline.attribute(("encoder", "heads"), 8)
        >>> outline.entries().names
        ['encoder.weight']
    """

    def __init__(self) -> None:
        self._root = _Module()
        self._known: dict[Sequence[str], _Module] = {}  # modules by their paths
        self._names: set[str] = set()  # of tensors, and below of attributes and modules
        self._attributes: set[str] = set()
        self._modules: set[str] = set()
        self._room = _ROOM
        self._forms: dict[Form, int] = {}
        self._form_ids: list[int] = []
        self.payloads: list[int] = []

    def __len__(self) -> int:
        return len(self.payloads)

    def tensor(self, path: Sequence[str], form: Form, payload: int) -> None:
        """Add a tensor whose bytes are those of `payload`, a number that may still change in `payloads`.

        Raises:
            NameCollisionError: its name is taken. UnsupportedError: a key is empty or has NUL. LimitError: too deep, or
                names of modules take far more than those of tensors.
        """
        self.check(path)
        self.put(path, ".".join(path), form, payload)

    def put(self, path: Sequence[str], name: str, form: Form, payload: int) -> None:
        """Add a tensor of which the caller knows that its keys are right and that its full name, `name`, is free.

        Raises:
            NameCollisionError: not so among the module's children. LimitError: names of modules take far more than
                those of tensors.
        """
        self._room += _TIMES * len(name)
        siblings = self._parent(path).children
        if siblings.setdefault(path[-1], number := len(self.payloads)) != number:
            raise NameCollisionError("this name is taken already", tensor=name)
        self._names.add(name)
        self._form_ids.append(self._forms.setdefault(form, len(self._forms)))
        self.payloads.append(payload)

    def check(self, path: Sequence[str]) -> None:
        """Raise what `tensor` would, before a byte is written for it."""
        name = ".".join(path)
        _check_keys(path, name)
        if name in self._names:
            raise NameCollisionError("two tensors would have this name", tensor=name)
        parent = self._parent(path, make=False)
        if parent is not None and path[-1] in parent.children:
            what = "a module" if isinstance(parent.children[path[-1]], _Module) else "an attribute"
            raise NameCollisionError(f"{what} has this name already", tensor=name)

    def attribute(self, path: Sequence[str], value: Any) -> None:
        """Add an attribute.

        Raises:
            UnsupportedError: no attribute has such a value. NameCollisionError: the name is taken.
        """
        name = ".".join(path)
        _check_keys(path, name)
        if not is_attribute(value, name):
            what = "an attribute is None, bool, an int of 64 bits, float, str, bytes, or a list of one of these"
            raise UnsupportedError(f"a {type(value).__name__}; {what}", tensor=name)
        if name in self._attributes:
            raise NameCollisionError("two attributes would have this name", tensor=name)
        self._put(path, _Attribute(value))
        self._attributes.add(name)

    def module(self, path: Sequence[str], kind: int = ModuleKind.MAPPING, type_name: str = "") -> None:
        """Add a module, or say what kind one is; the empty path is the record itself."""
        here = self._root
        if path:
            _check_keys(path, ".".join(path))
            here = self._parent((*path, ""))
        here.kind, here.type_name = kind, type_name

    def _parent(self, path: Sequence[str], *, make: bool = True) -> Any:
        """Return the module a path leads to but for its last key, made unless only looked for: None if not there."""
        above = tuple(path[:-1])
        known = self._known.get(above)
        if known is None and (found := self._find(path, make)) is not None:
            self._known[above] = known = found
        return known

    def _find(self, path: Sequence[str], make: bool) -> Any:
        here = self._root
        for depth, key in enumerate(path[:-1]):
            found = here.children.get(key)
            if found is None:
                self._check_room(path, depth)
                new = [".".join(path[:end]) for end in range(depth + 1, len(path))]
                if not self._modules.isdisjoint(new):
                    what = "two keys with dots lead to this name of a module; rename one"
                    raise NameCollisionError(what, tensor=next(n for n in new if n in self._modules))
                if not make:
                    return None
                self._modules.update(new)
                self._room -= sum(map(len, new))
                for missing in path[depth:-1]:
                    inner = _Module()
                    here.children[missing] = inner
                    here = inner
                return here
            if not isinstance(found, _Module):
                what = "a tensor or an attribute has the name of this module"
                raise NameCollisionError(what, tensor=".".join(path[: depth + 1]))
            here = found
        return here

    def _check_room(self, path: Sequence[str], depth: int) -> None:
        """Refuse modules from this depth on whose names would take too much, before they are made."""
        sizes = accumulate(len(key) + 1 for key in path[:-1])
        if sum(islice(sizes, depth, None)) > self._room + _TIMES * sum(len(key) + 1 for key in path):
            what = f"names of modules would take more than {_ROOM >> 20} MiB and {_TIMES} times those of tensors"
            raise LimitError(f"{what}; nest them less deeply", tensor=".".join(path))

    def _put(self, path: Sequence[str], child: _Attribute | int) -> None:
        siblings = self._parent(path).children
        if path[-1] in siblings:
            raise NameCollisionError("this name is taken already", tensor=".".join(path))
        siblings[path[-1]] = child

    def entries(self, order: Sequence[int] | None = None) -> Entries:
        """Return everything told so far, tensors in the order in which they came, or that of the numbers in `order`.

        A list or tuple whose keys are not 0, 1, 2 and so on is told as a mapping.

        Raises:
            NameCollisionError: two modules, or two attributes, have one full name.
        """
        flat = Flat(self._root.told_kind(), self._root.type_name)
        _walk(flat, "", 0, self._root)
        flat.check_names()
        came = np.array(flat.values, np.int64)  # the walk was by module
        flat.sort(np.argsort(came if order is None else np.asarray(order, np.int64)[came]).tolist())
        flat.payloads = [self.payloads[i] for i in flat.values]
        flat.form_ids, flat.forms = [self._form_ids[i] for i in flat.values], list(self._forms)
        return flat


def _walk(flat: Flat, name: str, number: int, module: _Module) -> None:
    before = f"{name}." if number else ""
    for place, (key, child) in enumerate(module.children.items()):
        size = len(key) if key.isascii() else len(key.encode(errors="surrogatepass"))
        if isinstance(child, int):
            flat.add(before + key, size, number, place, child)
        elif isinstance(child, _Module):
            full = before + key
            flat.modules.append(ModuleEntry(full, size, number, place, child.told_kind(), child.type_name))
            _walk(flat, full, len(flat.modules) - 1, child)
        else:
            flat.attributes.append(AttributeEntry(key, number, place, child.value))


def _check_keys(path: Sequence[str], name: str) -> None:
    if not path or not all(path):
        raise UnsupportedError(f"{path!r}: keys are non-empty strings")
    if "\0" in name:
        raise UnsupportedError("its name contains NUL", tensor=name)
    if not encodable(name):
        raise UnsupportedError("its name has lone surrogates, which are not UTF-8", tensor=name)
    if len(path) > MAX_DEPTH:
        raise LimitError(f"nested more than {MAX_DEPTH} deep", tensor=name)


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
