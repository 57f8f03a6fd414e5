"""Annotations without parts, such as scalars, bytes and arrays: how well a value fits, and the instance built of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np

from zcrecord.archive import unflatten
from zcrecord.codec import conventions
from zcrecord.codec.entries import ModuleKind
from zcrecord.errors import MismatchError, UnsupportedError, printable
from zcrecord.tensors.packed import PackedTensor, StringTensor

from .fields import bare

# How well a value fits: of several alternatives in an annotation the best counts.
NO, ANYTHING, CONVERTED, EXACT, NAMED = range(5)

_SHOWN = 8  # keys in an error
_NUMBERS = {bool: "b", int: "iu", float: "f", complex: "c"}  # and the kinds of numpy's elements that stand for them


@dataclass(frozen=True, slots=True, eq=False)
class SavedModule:
    """A saved module with all that `unflatten.plain` loses: its kind, its class's name, and a tuple's keys."""

    kind: int
    type_name: str
    items: dict[str, Any]

    @property
    def is_sequence(self) -> bool:
        """True for a list or tuple; a NamedTuple is one, too."""
        return self.kind in (ModuleKind.LIST, ModuleKind.TUPLE)

    @property
    def has_names(self) -> bool:
        """True if its keys are names, and not numbers of places."""
        return not self.is_sequence or bool(self.type_name)

    def saved_keys(self, items: dict[str, Any]) -> list[str | int]:
        """Return the keys of its items as they were saved: those of a NUMBERED module may be integers."""
        return list(map(conventions.key_of_text, items) if self.kind == ModuleKind.NUMBERED else items)


def plain(value: Any) -> Any:
    """Return a value as `Record.tree` has it: saved modules become mappings, lists and so on, all else stays."""
    if not isinstance(value, SavedModule):
        return value
    return unflatten.plain(value.kind, value.type_name, [(k, plain(v)) for k, v in value.items.items()])


class Annotation:
    """Tests and builds the values of a type hint; `of_part` gives the Annotation of a part. This one takes anything."""

    def __init__(self, hint: Any, of_part: Callable[[Any], Annotation]) -> None:
        self.hint, self.of_part = hint, of_part

    def rank(self, _value: Any, /) -> int:
        """Return how well a value fits, from NO (0) to NAMED; of a module's children only the keys count."""
        return ANYTHING

    def fits(self, value: Any, /) -> bool:
        """Return True if a value fits, and its children too as far as their `rank` tells."""
        return bool(self.rank(value))

    def build(self, value: Any, where: str, /) -> Any:
        """Build the instance of a value that lies at the path `where`; MismatchError if it does not fit."""
        if not self.rank(value):
            raise mismatch(where, self, value, self.advice(value))
        return self.convert(value)

    def convert(self, value: Any, /) -> Any:
        """Return the instance of a value that fits."""
        return plain(value)

    def advice(self, _value: Any, /) -> str:
        """Return advice for a value that does not fit, empty if there is none."""
        return ""

    def __str__(self) -> str:
        return hint_text(self.hint)


class Instance(Annotation):
    """An instance of a class, given as it is: str, None, memoryview, PackedTensor, ...; its own isinstance decides."""

    def rank(self, value: Any, /) -> int:
        try:
            return EXACT if isinstance(plain(value), self.hint) else NO
        except TypeError:  # a Protocol that is for type checkers alone, say
            return ANYTHING

    def advice(self, value: Any, /) -> str:
        if isinstance(value, SavedModule) and self.hint not in (str, memoryview, type(None)):
            return "classes that are filled are dataclasses, attrs classes, NamedTuples and TypedDicts"
        return "arrays come as np.ndarray, as they were saved" if isinstance(value, np.ndarray) else ""


class Number(Annotation):
    """bool, int, float or complex, or a scalar type of numpy: an attribute, or a tensor of rank 0."""

    def rank(self, value: Any, /) -> int:
        if type(value) is self.hint:
            return EXACT
        if not isinstance(value, np.ndarray):
            in_range = self.hint is float and type(value) is int and abs(value) <= sys.float_info.max
            return CONVERTED if in_range and float(value) == value else NO
        if issubclass(self.hint, np.generic):
            return CONVERTED if value.shape == () and issubclass(value.dtype.type, self.hint) else NO
        is_float = self.hint is float and "float" in value.dtype.name  # numpy gives those of ml_dtypes another kind
        return ANYTHING if value.shape == () and (is_float or value.dtype.kind in _NUMBERS[self.hint]) else NO

    def convert(self, value: Any, /) -> Any:
        if not isinstance(value, np.ndarray):
            return self.hint(value)
        return value[()] if issubclass(self.hint, np.generic) else value.item()


class FromValue(Annotation):
    """A class whose constructor takes the saved value: an Enum a member's value, a Path a str, bytes a view."""

    def convert(self, value: Any, /) -> Any:
        if not issubclass(self.hint, Enum) and not isinstance(value, memoryview if self.hint is bytes else str):
            raise TypeError("bytes are made of a memoryview, a path of a str")
        return self.hint(bytes(value) if isinstance(value, memoryview) else plain(value))

    def rank(self, value: Any, /) -> int:
        try:
            self.convert(value)
        except (TypeError, ValueError):
            return NO
        return CONVERTED

    def __str__(self) -> str:
        if not issubclass(self.hint, Enum):
            return "bytes" if self.hint is bytes else f"a str for {hint_text(self.hint)}"
        return f"{hint_text(self.hint)} ({printable(', '.join(repr(m.value) for m in self.hint))})"


class OneOf(Annotation):
    """A Literal: one of its values, or its Enum member with that value."""

    def _matching(self, value: Any) -> list[Any]:
        """Return the Literal's values, or Enum members, that have this value; empty if none has."""
        value = bytes(value) if isinstance(value, memoryview) else value
        values = [(m.value if isinstance(m, Enum) else m, m) for m in get_args(self.hint)]
        return [member for known, member in values if type(known) is type(value) and known == value]

    def rank(self, value: Any, /) -> int:
        return EXACT if self._matching(value) else NO

    def convert(self, value: Any, /) -> Any:
        return self._matching(value)[0]


class Array(Annotation):
    """An ndarray, with the element types and the number of axes that the annotation gives, if any."""

    def __init__(self, hint: Any, of_part: Callable[[Any], Annotation]) -> None:
        super().__init__(hint, of_part)
        shape, dtype, *_ = [*get_args(hint), Any, Any]
        sizes = get_args(shape)
        self._axes = len(sizes) if get_origin(shape) is tuple and ... not in sizes else None
        element = bare((get_args(dtype) or (Any,))[0])
        alternatives = get_args(element) if get_origin(element) in (Union, UnionType) else (element,)
        self._types = tuple(map(_scalar_type, alternatives))

    def rank(self, value: Any, /) -> int:
        if not isinstance(value, np.ndarray) or not issubclass(value.dtype.type, self._types):
            return NO
        return EXACT if self._axes in (None, value.ndim) else NO

    def convert(self, value: Any, /) -> Any:
        return value

    def advice(self, value: Any, /) -> str:
        is_view = isinstance(value, PackedTensor | StringTensor)
        return f"annotate it {type(value).__name__}, whose unpack() gives an array" if is_view else ""

    def __str__(self) -> str:
        names = [t.__name__ for t in self._types if t is not np.generic]
        axes = "" if self._axes is None else f" with {self._axes} axes"
        return "an array" + (" of " + " or ".join(names) if names else "") + axes


def _scalar_type(hint: Any) -> type:
    """Return the numpy scalar type of an annotation of elements, np.generic if it does not name a type."""
    kind = get_origin(bare(hint)) or bare(hint)
    if not isinstance(kind, type) or kind is Any:
        return np.generic
    return kind if issubclass(kind, np.generic) else np.dtype(kind).type


class TorchClass(Annotation):
    """A class of torch, which no field is filled with."""

    def rank(self, _value: Any, /) -> int:
        return NO

    def build(self, _value: Any, where: str, /) -> Any:
        fault = f"no record is loaded into a field of type torch.{self.hint.__name__}"
        advice = "annotate it np.ndarray; record.torch() gives torch tensors, by name"
        raise UnsupportedError(f"{fault}; {advice}", tensor=where or None)


def mismatch(where: str, annotation: Annotation, value: Any, advice: str = "") -> MismatchError:
    """Return the error for a value at the path `where` that does not fit; without advice it has a general one."""
    advice = advice or "annotate what is there, or save what is annotated"
    return MismatchError(f"expected {annotation}, found {in_words(value)}; {advice}", tensor=where or None)


def in_words(value: Any) -> str:
    """Describe a value for an error message: its kind, and its size or keys."""
    if isinstance(value, SavedModule) and not value.has_names:
        return f"a {'list' if value.kind == ModuleKind.LIST else 'tuple'} of {len(value.items)}"
    if isinstance(value, SavedModule):
        kind = f"a {printable(value.type_name)}" if value.type_name else "a mapping"
        return f"{kind} with {quote_keys(value.items)}" if value.items else f"{kind} that is empty"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name}, shape {value.shape}"
    if isinstance(value, PackedTensor):
        return f"a PackedTensor of {value.kind.name}, shape {value.shape}"
    if isinstance(value, StringTensor):
        return f"a StringTensor of shape {value.shape}"
    if isinstance(value, memoryview):
        return f"{value.nbytes} bytes"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"{type(value).__name__} {printable(repr(value), 60)}"


def quote_keys(keys: Collection[str]) -> str:
    """Return keys in quotes for an error message, at most `_SHOWN` of them and the number of the others."""
    quoted = [f"'{printable(key, 60)}'" for key in list(keys)[:_SHOWN]]
    return ", ".join(quoted) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")


def hint_text(hint: Any) -> str:
    """Return a type hint as it is written in source, without the names of modules: "list[Layer]"."""
    text = hint.__name__ if isinstance(hint, type) else repr(hint)
    return "None" if hint is type(None) else re.sub(r"(?:\b\w+\.|<locals>\.)+(?=\w)", "", text)
