"""A record as instances of classes: a saved tree against annotations, arrays still views.

Each annotation has a class in `leaves` or `containers` that fills it. An unknown class takes the values that
`isinstance` accepts, any other annotation every value. The name of a saved class matters only among members of a union.
"""

from __future__ import annotations

import types
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from typing import Any, ForwardRef, Literal, Self, TypeVar, Union, get_origin

import numpy as np

from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.archive.payloads import check_blobs
from zcrecord.codec import conventions
from zcrecord.codec.entries import ModuleKind
from zcrecord.errors import UnsupportedError, located

from . import containers, fields
from .leaves import Array, FromValue, Instance, Number, OneOf, SavedModule, TorchClass, Want, plain

T = TypeVar("T")

_KINDS: dict[Any, type[Want]] = {
    **dict.fromkeys((bool, int, float, complex), Number),
    **dict.fromkeys(containers.SEQUENCES, containers.Sequence),
    **dict.fromkeys(containers.MAPPINGS, containers.Dict),
    bytes: FromValue,
    np.ndarray: Array,
}
_BASES: dict[type, type[Want]] = {Enum: FromValue, PurePath: FromValue, np.generic: Number, object: Instance}


def into(archive: Archive, kind: type[T]) -> T:
    """Return an archive's record as a `kind`; arrays are views of it, only attributes are copied.

    Raises:
        MismatchError: a field is missing, or of another kind. UnsupportedError: nothing is loaded into such a `kind`.
        LimitError: copies of bytes that attributes share would be far larger than the archive.
    """
    with located(path=archive.path):
        hint: Any = fields.bare(kind)
        if hint is not Any and not isinstance(hint, type) and get_origin(hint) is None:
            fault = f"a record is loaded into a class, or a type such as list[Layer], not into a {type(kind).__name__}"
            raise UnsupportedError(fault)
        views = list(archive.views())
        check_blobs(archive)
        tree = unflatten.unflatten(archive.index, 0, views.__getitem__, archive.payload, _module)
        instance: T = _reader_of(hint).build(tree, "")
        return instance


def _module(kind: int, type_name: str, items: list[tuple[str, Any]]) -> Any:
    if kind == ModuleKind.OBJECT and type_name.startswith("zcr:"):
        value = conventions.value_of_object(type_name, [(key, plain(item)) for key, item in items])
        if value is not conventions.ABSENT:
            return value
    return SavedModule(kind, type_name, dict(items))


def _reader_of(hint: Any) -> Want:
    try:
        hash(hint)
    except TypeError:  # it has something in it that is no type
        return _make_reader(hint)
    return _remembered(hint)


def _make_reader(hint: Any) -> Want:
    """Return the reader of an annotation; its parts are read when first used, since types may hold themselves."""
    hint = type(None) if hint is None else fields.bare(hint)
    if isinstance(hint, str | ForwardRef) or hint is Self:
        raise UnsupportedError(f"the annotation {hint!r} cannot be read where it stands; name the class itself")
    return _class_of(hint)(hint, _reader_of)


_remembered = lru_cache(maxsize=1024)(_make_reader)  # so that classes made while running can go


def _class_of(hint: Any) -> type[Want]:
    """Return the class of wants that reads an annotation."""
    origin = get_origin(hint)
    kind = origin or hint
    if origin in (Union, types.UnionType):
        return containers.Choice
    if origin is Literal:
        return OneOf
    if not isinstance(kind, type) or kind in (Any, object):  # Any is a class, too
        return Want
    if fields.field_reader(kind):
        return containers.Class
    if kind in _KINDS:
        return _KINDS[kind]
    if kind.__module__.partition(".")[0] == "torch" and kind.__name__ not in ("dtype", "device"):
        return TorchClass
    return next(want for base, want in _BASES.items() if issubclass(kind, base))
