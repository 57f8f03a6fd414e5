"""Annotations with parts: containers, classes and unions. Parts are read on first use: types may hold themselves."""

from __future__ import annotations

from collections import OrderedDict, abc
from functools import cached_property
from typing import Any, get_args, get_origin

import numpy as np

from zcrecord.codec.entries import ModuleKind
from zcrecord.errors import MismatchError, printable
from zcrecord.tensors.packed import PackedTensor, StringTensor

from . import fields
from .leaves import CONVERTED, EXACT, NAMED, NO, SavedModule, Want, in_words, keys_of, mismatch

SEQUENCES: dict[Any, Any] = {  # and their constructors; None: list or tuple, as it was saved
    list: list,
    tuple: tuple,
    abc.MutableSequence: list,
    abc.Sequence: None,
    abc.Collection: None,
    abc.Iterable: None,
}
MAPPINGS: dict[Any, Any] = {dict: dict, abc.Mapping: dict, abc.MutableMapping: dict, OrderedDict: OrderedDict}


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _group_dotted(module: SavedModule, names: abc.Container[str] = ()) -> dict[str, Any]:
    """Return a module's items, those of a flat mapping whose keys have dots gathered into mappings."""
    if module.kind != ModuleKind.MAPPING or not any("." in key for key in module.items):
        return module.items
    items: dict[str, Any] = {}
    groups: dict[str, SavedModule] = {}
    for key, value in module.items.items():
        head, dot, rest = key.partition(".")
        if not dot or key in names or head in module.items:
            items[key] = value
        else:
            group = groups.setdefault(head, SavedModule(ModuleKind.MAPPING, "", {}))
            group.items[rest] = value
            items[head] = group
    return items


class Sequence(Want):
    """list, tuple, Sequence: a saved list or tuple, or a mapping with the keys '0', '1' and so on.

    In tuple[A, B] each item has an annotation of its own; in tuple[T, ...] and all others they have one in common.
    """

    @cached_property
    def _items(self) -> list[Want]:
        return [self.read_hint(a) for a in get_args(self.hint) if a is not ...]

    def _parts(self, value: Any) -> list[tuple[Want, str, Any]] | None:
        """Return the want, key and value of each item; None if the value does not have such items."""
        parts = _sequence_items(value)
        fixed = get_origin(self.hint) is tuple and ... not in get_args(self.hint)
        if parts is None or (fixed and len(parts) != len(get_args(self.hint))):
            return None
        wants = self._items if fixed else (self._items or [self.read_hint(Any)]) * len(parts)
        return [(want, key, item) for want, (key, item) in zip(wants, parts, strict=True)]

    @property
    def _made_by(self) -> Any:
        return SEQUENCES[get_origin(self.hint) or self.hint]

    def rank(self, value: Any, /) -> int:
        """Return how well a value's kind and keys fit; the items count, too, of a list that is an attribute."""
        parts = self._parts(value)
        if parts is None:
            return NO
        own = EXACT if self._made_by in (None, _sequence_type(value)) else CONVERTED
        return own if isinstance(value, SavedModule) else min([own, *(want.rank(item) for want, _, item in parts)])

    def fits(self, value: Any, /) -> bool:
        parts = self._parts(value)
        return parts is not None and all(want.rank(item) for want, _, item in parts)

    def build(self, value: Any, where: str, /) -> Any:
        parts = self._parts(value)
        if parts is None:
            raise mismatch(where, self, value, _hole(value))
        items = [want.build(item, _below(where, key)) for want, key, item in parts]
        made_by = self._made_by or _sequence_type(value)
        return tuple(items) if made_by is tuple else items


def _sequence_type(value: Any) -> type | None:
    """Return list or tuple, as a value was saved; None if it was neither."""
    if isinstance(value, SavedModule):
        return list if value.kind == ModuleKind.LIST else tuple if value.kind == ModuleKind.TUPLE else None
    return list if isinstance(value, list) else tuple


def _sequence_items(value: Any) -> list[tuple[str, Any]] | None:
    """Return the keys and items of a sequence, or of a mapping numbered like one, in order; None for other values."""
    if isinstance(value, list | tuple):
        return [(str(i), item) for i, item in enumerate(value)]
    if not isinstance(value, SavedModule) or value.kind == ModuleKind.OBJECT:
        return None
    if value.is_sequence:
        return list(value.items.items())
    items = _group_dotted(value)
    keys = [str(i) for i in range(len(items))]
    return [(key, items[key]) for key in keys] if items.keys() == set(keys) else None


def _hole(value: Any) -> str:
    keys = _group_dotted(value).keys() if isinstance(value, SavedModule) and not value.is_sequence else set()
    if not any(key.isdecimal() for key in keys):
        return ""
    missing = [str(i) for i in range(len(keys)) if str(i) not in keys]
    return f"the keys of a list are '0' to '{len(keys) - 1}', and '{missing[0]}' is missing" if missing else ""


class Dict(Want):
    """dict[str, T], dict[int, T] or Mapping: a saved mapping, or an object as one."""

    @cached_property
    def _parts(self) -> tuple[Want, Want]:
        key, item, *_ = (*get_args(self.hint), Any, Any)
        return self.read_hint(key), self.read_hint(item)

    def rank(self, value: Any, /) -> int:
        if not isinstance(value, SavedModule) or value.is_sequence:
            return NO
        return CONVERTED if value.kind == ModuleKind.OBJECT else EXACT

    def fits(self, value: Any, /) -> bool:
        if not self.rank(value):
            return False
        key, item = self._parts
        items = self._items(value)
        return all(map(key.rank, value.keys_of(items))) and all(map(item.rank, items.values()))

    def _items(self, value: SavedModule) -> dict[str, Any]:
        """Return a mapping's items, a flat one's gathered if only then they fit."""
        _, item = self._parts
        grouped = _group_dotted(value)
        gather = grouped is not value.items and not all(map(item.rank, value.items.values()))
        return grouped if gather and all(map(item.rank, grouped.values())) else value.items

    def build(self, value: Any, where: str, /) -> Any:
        if not self.rank(value):
            raise mismatch(where, self, value)
        key, item = self._parts
        items = self._items(value)
        keys = [key.build(k, where) for k in value.keys_of(items)]
        values = [item.build(v, _below(where, k)) for k, v in items.items()]
        return MAPPINGS[get_origin(self.hint) or self.hint](zip(keys, values, strict=True))


class Class(Want):
    """A dataclass, attrs class, NamedTuple or TypedDict: a saved object, NamedTuple or mapping, by its keys."""

    @cached_property
    def _fields(self) -> fields.ClassFields:
        return fields.fields_of(self.hint)

    @cached_property
    def _wants(self) -> dict[str, Want]:
        return {f.name: self.read_hint(f.hint) for f in self._fields.fields}

    def _items(self, value: Any) -> dict[str, Any] | None:
        return _group_dotted(value, self._wants) if isinstance(value, SavedModule) and value.has_names else None

    def _has_its_keys(self, items: dict[str, Any]) -> bool:
        return items.keys() <= self._wants.keys() and all(f.name in items for f in self._fields.fields if f.required)

    def rank(self, value: Any, /) -> int:
        items = self._items(value)
        if items is None:
            return NO
        if value.type_name == self._fields.kind.__name__:
            return NAMED
        own = CONVERTED if value.kind in (ModuleKind.MAPPING, ModuleKind.NUMBERED) else EXACT
        return own if self._has_its_keys(items) else NO

    def fits(self, value: Any, /) -> bool:
        items = self._items(value)
        if items is None or not self._has_its_keys(items):
            return False
        return all(self._wants[key].rank(item) for key, item in items.items())

    def build(self, value: Any, where: str, /) -> Any:
        items, wants = self._items(value), self._wants
        if items is None:
            raise mismatch(where, self, value)
        values = {}
        for f in self._fields.fields:
            if f.name in items:
                values[f.name] = wants[f.name].build(items[f.name], _below(where, f.name))
            elif f.required:
                raise self._missing_key_error(f.name, items, where)
        if len(values) < len(items):
            raise self._extra_key_error(items, where)
        try:
            instance = self._fields.make(values)
        except (TypeError, ValueError) as error:
            fault = f"{self} refuses these values: {type(error).__name__}: {printable(str(error))}"
            raise MismatchError(fault, tensor=where or None) from error
        for f in self._fields.fields:
            if f.argument is None and not hasattr(instance, f.name):
                raise self._missing_key_error(f.name, items, where)
        return instance

    def _extra_key_error(self, items: dict[str, Any], where: str) -> MismatchError:
        key = next(key for key in items if key not in self._wants)
        known = f"its fields are {keys_of(self._wants)}" if self._wants else "it has no fields"
        fault = f"expected no such key, found {in_words(items[key])}: {self} has no field for it, {known}"
        # names= selects tensors and modules; an attribute cannot be left out by it.
        selectable = isinstance(items[key], SavedModule | np.ndarray | PackedTensor | StringTensor)
        advice = "add one, or leave this out with names=" if selectable else "add one"
        return MismatchError(f"{fault}; {advice}", tensor=_below(where, key))

    def _missing_key_error(self, name: str, items: dict[str, Any], where: str) -> MismatchError:
        others = [key for key in items if key not in self._wants]
        fault = f"expected {self._wants[name]} for {self}.{name}, found no such key"
        advice = "give the field a default if records may lack it"
        if others:
            fault += f", but {keys_of(others)}, for which there is no field"
            advice = "load it with rename= if it is the same"
        if not all(f.stored for f in self._fields.fields if f.name == name):
            advice = "no InitVar is saved; give it a default"
        return MismatchError(f"{fault}; {advice}", tensor=_below(where, name))


class Choice(Want):
    """A union: the member that fits best; it is an error if several fit alike."""

    @cached_property
    def _members(self) -> list[Want]:
        return [self.read_hint(a) for a in get_args(self.hint)]

    def rank(self, value: Any, /) -> int:
        return max(member.rank(value) for member in self._members)

    def fits(self, value: Any, /) -> bool:
        return any(member.fits(value) for member in self._members)

    def build(self, value: Any, where: str, /) -> Any:
        ranks = [member.rank(value) for member in self._members]
        best = max(ranks)
        fitting = [member for member, rank in zip(self._members, ranks, strict=True) if rank == best]
        if best == NO:
            several = [member for member in self._members if member.hint is not type(None)]
            if len(several) == 1:  # and its own error says more
                return several[0].build(value, where)
            raise mismatch(where, self, value)
        if len(fitting) > 1 and isinstance(value, SavedModule):
            fitting = [member for member in fitting if member.fits(value)] or fitting
            differ = bool(value.items) or any(isinstance(member, Class) for member in fitting)
        else:
            differ = best == CONVERTED
        if len(fitting) > 1 and differ:
            names = " and ".join(map(str, fitting))
            advice = "save an instance of the class that is meant, or name one class"
            fault = f"expected one of {self}, found {in_words(value)}, which fits {names} alike; {advice}"
            raise MismatchError(fault, tensor=where or None)
        return fitting[0].build(value, where)

    def __str__(self) -> str:
        return " | ".join(map(str, self._members))
