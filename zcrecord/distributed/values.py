"""Values other than tensors, and the paths of names: a state dict's leaves as children of a module tree, both ways.

None, bool, int, float, str and bytes are attributes, and lists, tuples and dicts of them attributes or modules, as
`save_record` makes them; sets, deques, paths, dates and others the modules of `codec.conventions`. Everything else is
the bytes that torch.save gives, in a module of type name `zcr:torch_save`. CONVENTIONS.md has the convention.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zcrecord.codec.conventions import object_of
from zcrecord.codec.entries import Entries, ModuleKind, encodable, is_attribute, value_type
from zcrecord.codec.layout import NONE
from zcrecord.errors import LimitError, NameCollisionError, UnsupportedError
from zcrecord.writing.flatten import children_of
from zcrecord.writing.module_tree import ModuleTreeBuilder

PICKLED = "zcr:torch_save"  # type name of a module whose attribute `value` has an object's bytes by torch.save
_MOST_DEPTH = 16  # of lists and dicts within a value; others are pickled
_MOST_BITS = 4096  # of an integer; larger ones are pickled
_SCALARS = (bool, int, float, str, bytes, type(None))
Path = tuple[str | int, ...]


class PickledValue(NamedTuple):
    """An object as the bytes that torch.save gives."""

    data: bytes


def is_plain(value: Any, depth: int = 0) -> bool:
    """Return True for a value that an archive holds as it is, and gives back equal and of the same type."""
    kind = type(value)
    if kind is str and not encodable(value):
        return False
    if kind in _SCALARS:
        return value_type(value) is not None or value.bit_length() <= _MOST_BITS
    if depth >= _MOST_DEPTH:
        return False
    if kind in (list, tuple):
        return all(is_plain(item, depth + 1) for item in value)
    if kind is dict:
        valid_keys = all(type(key) is str and key and encodable(key) and not set(key) & {".", "\0"} for key in value)
        return valid_keys and all(is_plain(item, depth + 1) for item in value.values())
    if isinstance(value, int | complex | pathlib.PurePath) and kind not in (complex, type(pathlib.Path())):
        return False  # a subclass, which would come back as its base
    try:
        stand_in = object_of(value, "")
    except (LimitError, UnsupportedError):
        return False
    return stand_in is not None and is_plain(stand_in[1], depth)


class StateTree:
    """The module tree of a state dict whose tensors and values come one by one, each with its path.

    A path is the keys that lead to a leaf: text in a mapping, an integer in a list. A name is its path joined by dots.

    Args:
        paths: of all leaves, in the order in which they will come.

    Attributes:
        objects: names of values that are modules.
        others: paths that differ from those of the tree, where a place in a module of kind LIST is an integer and any
            other key a text; complete after `entries`.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._tree = ModuleTreeBuilder()
        self.objects: list[str] = []
        self.others: list[Path] = []
        self._with_places: list[Path] = []  # paths through lists
        self._lists = _whole_lists(paths)

    def tensor(self, path: Path, layout: Any, payload: int = NONE) -> None:
        """Add a tensor; errors are those of `ModuleTreeBuilder.tensor`, if no path is free for it."""
        self._add(path, lambda keys: self._tree.tensor(keys, layout, payload))

    def value(self, path: Path, value: Any) -> None:
        """Add a value, one that `is_plain` or a PickledValue; errors are those of `ModuleTreeBuilder`."""
        is_module = self._add(path, lambda keys: self._add_value(keys, value))
        if is_module:
            self.objects.append(".".join(map(str, path)))

    def entries(self) -> Entries:
        """Return the entries, in which lists are modules of kind LIST; called once, at the end."""
        for keys in self._lists:
            with contextlib.suppress(NameCollisionError, LimitError, UnsupportedError):  # its items have other paths
                self._tree.module(keys, ModuleKind.LIST)
        entries = self._tree.entries()
        lists = {module.name for module in entries.modules if module.kind == ModuleKind.LIST}
        for path in self._with_places:
            above = (".".join(map(str, path[:depth])) for depth, key in enumerate(path) if isinstance(key, int))
            if not lists.issuperset(above):
                self.others.append(path)
        return entries

    def _add(self, path: Path, add: Callable[[tuple[str, ...]], Any]) -> Any:
        """Return `add(keys)` for the keys of a path, or its name as the only key if the tree has no place for them."""
        keys = tuple(map(str, path))
        try:
            result = add(keys)
        except (NameCollisionError, LimitError, UnsupportedError):
            if len(keys) == 1:
                raise
            result = add((".".join(keys),))
            self.others.append(path)
        else:
            if any(isinstance(key, int) for key in path):
                self._with_places.append(path)
        return result

    def _add_value(self, keys: tuple[str, ...], value: Any) -> bool:
        """Add a value at its keys; return True if it is a module, False if it is an attribute."""
        name = ".".join(keys)
        if isinstance(value, PickledValue):
            self._tree.check_name(keys)
            self._tree.module(keys, ModuleKind.OBJECT, PICKLED)
            self._tree.attribute((*keys, "value"), value.data)
            return True
        if is_attribute(value, name):
            self._tree.attribute(keys, value)
            return False
        kind, type_name, items = children_of(value, name)
        assert kind is not None, "a plain value"
        self._tree.check_name(keys)
        self._tree.module(keys, kind, type_name)
        for key, item in items:
            self._add_value((*keys, key), item)
        return True


def _whole_lists(paths: Iterable[Path]) -> set[tuple[str, ...]]:
    """Return the keys that lead to lists, except lists that lack items, or whose items do not come in their order."""
    counts: dict[tuple[str, ...], int] = {}  # items so far; -1 for all that are no such lists
    for path in paths:
        keys = tuple(map(str, path))
        for depth, key in enumerate(path):
            count = counts.get(keys[:depth], 0 if depth else -1)
            in_order = isinstance(key, int) and max(count - 1, 0) <= key <= count
            counts[keys[:depth]] = max(count, int(key) + 1) if in_order else -1
    return {keys for keys, count in counts.items() if count > 0}


def path_to_text(path: Path) -> str:
    """Return a path as JSON, an array of strings and integers."""
    return json.dumps(list(path), ensure_ascii=False, separators=(",", ":"))


def path_from_text(text: Any) -> Path | None:
    """Return the path of a text by `path_to_text`; None for any other value, since metadata may be of any writer."""
    try:
        keys = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return tuple(keys) if isinstance(keys, list) and _are_keys(keys) else None


def paths_of(planner_data: Any) -> Mapping[str, Path] | None:
    """Return planner data if they are those of DCP's default planner, a path by name; None for any others."""
    if not isinstance(planner_data, dict):
        return None
    for name, path in planner_data.items():
        if type(path) is not tuple or not _are_keys(path) or ".".join(map(str, path)) != name:
            return None
    return planner_data


def _are_keys(keys: Sequence[Any]) -> bool:
    return bool(keys) and all(type(key) is str or type(key) is int for key in keys)
