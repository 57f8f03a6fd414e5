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
from .leaves import CONVERTED, EXACT, NAMED, NO, Annotation, SavedModule, in_words, mismatch, quote_keys

SEQUENCES: dict[Any, Any] = {  # and their constructors; None: list or tuple, as it was saved
    list: list,
    tuple: tuple,
    abc.MutableSequence: list,
    abc.Sequence: None,
    abc.Collection: None,
    abc.Iterable: None,
}
MAPPINGS: dict[Any, Any] = {dict: dict, abc.Mapping: dict, abc.MutableMapping: dict, OrderedDict: OrderedDict}


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _group_dotted(module: SavedModule, names: abc.Container[str] = ()) -> dict[str, Any]:
    """Return a module's items; of a mapping, those with keys such as "a.b" as mappings, unless `names` has the key."""
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


class Sequence(Annotation):
    """list, tuple, Sequence: a saved list or tuple, or a mapping with the keys '0', '1' and so on.

    In tuple[A, B] each item has an annotation of its own; in tuple[T, ...] and all others they have one in common.
    """

    @cached_property
    def _item_annotations(self) -> list[Annotation]:
        return [self.of_part(hint) for hint in get_args(self.hint) if hint is not ...]

    def _parts(self, value: Any) -> list[tuple[Annotation, str, Any]] | None:
        """Return the annotation, key and value of each item; None if the value is no sequence, or of another length."""
        items = _sequence_items(value)
        is_fixed = get_origin(self.hint) is tuple and ... not in get_args(self.hint)
        if items is None or (is_fixed and len(items) != len(get_args(self.hint))):
            return None
        own = self._item_annotations
        annotations = own if is_fixed else (own or [self.of_part(Any)]) * len(items)
        return [(annotation, key, item) for annotation, (key, item) in zip(annotations, items, strict=True)]

    @property
    def _constructor(self) -> Any:
        return SEQUENCES[get_origin(self.hint) or self.hint]

    def rank(self, value: Any, /) -> int:
        """Return how well a value's kind and keys fit; the items count, too, of a list that is an attribute."""
        parts = self._parts(value)
        if parts is None:
            return NO
        own = EXACT if self._constructor in (None, _sequence_type(value)) else CONVERTED
        return own if isinstance(value, SavedModule) else min([own, *(part.rank(item) for part, _, item in parts)])

    def fits(self, value: Any, /) -> bool:
        parts = self._parts(value)
        return parts is not None and all(annotation.rank(item) for annotation, _, item in parts)

    def build(self, value: Any, where: str, /) -> Any:
        parts = self._parts(value)
        if parts is None:
            raise mismatch(where, self, value, _missing_key_advice(value))
        items = [annotation.build(item, _join(where, key)) for annotation, key, item in parts]
        constructor = self._constructor or _sequence_type(value)
        return tuple(items) if constructor is tuple else items


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


def _missing_key_advice(value: Any) -> str:
    """Return advice for a mapping that would be numbered like a list, were no key missing; empty for other values."""
    keys = _group_dotted(value).keys() if isinstance(value, SavedModule) and not value.is_sequence else set()
    if not any(key.isdecimal() for key in keys):
        return ""
    missing = [str(i) for i in range(len(keys)) if str(i) not in keys]
    return f"the keys of a list are '0' to '{len(keys) - 1}', and '{missing[0]}' is missing" if missing else ""


class Dict(Annotation):
    """dict[str, T], dict[int, T] or Mapping: a saved mapping, or an object as one."""

    @cached_property
    def _parts(self) -> tuple[Annotation, Annotation]:
        key, item, *_ = (*get_args(self.hint), Any, Any)
        return self.of_part(key), self.of_part(item)

    def rank(self, value: Any, /) -> int:
        if not isinstance(value, SavedModule) or value.is_sequence:
            return NO
        return CONVERTED if value.kind == ModuleKind.OBJECT else EXACT

    def fits(self, value: Any, /) -> bool:
        if not self.rank(value):
            return False
        key, item = self._parts
        items = self._items(value)
        return all(map(key.rank, value.saved_keys(items))) and all(map(item.rank, items.values()))

    def _items(self, value: SavedModule) -> dict[str, Any]:
        """Return a module's items; those of a flat mapping are gathered by `_group_dotted` if they fit only then."""
        _, item = self._parts
        if all(map(item.rank, value.items.values())):
            return value.items
        grouped = _group_dotted(value)
        return grouped if all(map(item.rank, grouped.values())) else value.items

    def build(self, value: Any, where: str, /) -> Any:
        if not self.rank(value):
            raise mismatch(where, self, value)
        key, item = self._parts
        items = self._items(value)
        keys = [key.build(k, where) for k in value.saved_keys(items)]
        values = [item.build(v, _join(where, k)) for k, v in items.items()]
        return MAPPINGS[get_origin(self.hint) or self.hint](zip(keys, values, strict=True))


class Class(Annotation):
    """A dataclass, attrs class, NamedTuple or TypedDict: a saved object, NamedTuple or mapping, by its keys."""

    @cached_property
    def _fields(self) -> fields.ClassFields:
        return fields.fields_of(self.hint)

    @cached_property
    def _annotations(self) -> dict[str, Annotation]:
        return {field.name: self.of_part(field.hint) for field in self._fields.fields}

    def _items(self, value: Any) -> dict[str, Any] | None:
        return _group_dotted(value, self._annotations) if isinstance(value, SavedModule) and value.has_names else None

    def _has_its_keys(self, items: dict[str, Any]) -> bool:
        required = {field.name for field in self._fields.fields if field.required}
        return required <= items.keys() <= self._annotations.keys()

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
        return all(self._annotations[key].rank(item) for key, item in items.items())

    def build(self, value: Any, where: str, /) -> Any:
        items = self._items(value)
        if items is None:
            raise mismatch(where, self, value)
        values = {}
        for field in self._fields.fields:
            if field.name in items:
                annotation = self._annotations[field.name]
                values[field.name] = annotation.build(items[field.name], _join(where, field.name))
            elif field.required:
                raise self._missing_key_error(field, items, where)
        if len(values) < len(items):
            raise self._extra_key_error(items, where)
        try:
            instance = self._fields.make(values)
        except (TypeError, ValueError) as error:
            fault = f"{self} refuses these values: {type(error).__name__}: {printable(str(error))}"
            raise MismatchError(fault, tensor=where or None) from error
        for field in self._fields.fields:  # set by no constructor, so without a default it is missing only now
            if field.argument is None and not hasattr(instance, field.name):
                raise self._missing_key_error(field, items, where)
        return instance

    def _extra_key_error(self, items: dict[str, Any], where: str) -> MismatchError:
        key = next(key for key in items if key not in self._annotations)
        known = f"its fields are {quote_keys(self._annotations)}" if self._annotations else "it has no fields"
        fault = f"expected no such key, found {in_words(items[key])}: {self} has no field for it, {known}"
        # names= selects tensors and modules; an attribute cannot be left out by it.
        selectable = isinstance(items[key], SavedModule | np.ndarray | PackedTensor | StringTensor)
        advice = "add one, or leave this out with names=" if selectable else "add one"
        return MismatchError(f"{fault}; {advice}", tensor=_join(where, key))

    def _missing_key_error(self, field: fields.Field, items: dict[str, Any], where: str) -> MismatchError:
        extra = [key for key in items if key not in self._annotations]
        fault = f"expected {self._annotations[field.name]} for {self}.{field.name}, found no such key"
        advice = "give the field a default if records may lack it"
        if extra:
            fault += f", but {quote_keys(extra)}, for which there is no field"
            advice = "load it with rename= if it is the same"
        if not field.stored:
            advice = "no InitVar is saved; give it a default"
        return MismatchError(f"{fault}; {advice}", tensor=_join(where, field.name))


class Choice(Annotation):
    """A union: the member that fits best; it is an error if several fit alike."""

    @cached_property
    def _members(self) -> list[Annotation]:
        return [self.of_part(hint) for hint in get_args(self.hint)]

    def rank(self, value: Any, /) -> int:
        return max(member.rank(value) for member in self._members)

    def fits(self, value: Any, /) -> bool:
        return any(member.fits(value) for member in self._members)

    def build(self, value: Any, where: str, /) -> Any:
        best = self.rank(value)
        if best == NO:
            members = [member for member in self._members if member.hint is not type(None)]
            if len(members) == 1:  # and its own error says more
                return members[0].build(value, where)
            raise mismatch(where, self, value)
        fitting = [member for member in self._members if member.rank(value) == best]
        may_differ = best == CONVERTED  # in the instances that they build
        if len(fitting) > 1 and isinstance(value, SavedModule):
            fitting = [member for member in fitting if member.fits(value)] or fitting
            may_differ = bool(value.items) or any(isinstance(member, Class) for member in fitting)
        if len(fitting) > 1 and may_differ:
            names = " and ".join(map(str, fitting))
            advice = "save an instance of the class that is meant, or name one class"
            fault = f"expected one of {self}, found {in_words(value)}, which fits {names} alike; {advice}"
            raise MismatchError(fault, tensor=where or None)
        return fitting[0].build(value, where)

    def __str__(self) -> str:
        return " | ".join(map(str, self._members))
