"""A record as instances of classes: a saved tree against annotations, arrays still views.

Each annotation has a class in `leaves` or `containers` that builds its values. An unknown class takes the values that
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
from .leaves import Annotation, Array, FromValue, Instance, Number, OneOf, SavedModule, TorchClass, plain

T = TypeVar("T")

_BY_TYPE: dict[Any, type[Annotation]] = {  # exactly this type
    **dict.fromkeys((bool, int, float, complex), Number),
    **dict.fromkeys(containers.SEQUENCES, containers.Sequence),
    **dict.fromkeys(containers.MAPPINGS, containers.Dict),
    bytes: FromValue,
    np.ndarray: Array,
}
_BY_BASE: dict[type, type[Annotation]] = {Enum: FromValue, PurePath: FromValue, np.generic: Number, object: Instance}


def into(archive: Archive, kind: type[T]) -> T:
    """Return an archive's record as a `kind`; arrays are views that keep its memory, only attributes are copied.

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
        tree = unflatten.unflatten(archive.index, 0, views.__getitem__, archive.payload, _build_module)
        instance: T = _annotation_of(hint).build(tree, "")
        return instance


def _build_module(kind: int, type_name: str, items: list[tuple[str, Any]]) -> Any:
    """Return a saved module as a SavedModule, or as the value that its type's name stands for, such as a complex."""
    if kind == ModuleKind.OBJECT and type_name.startswith("zcr:"):
        value = conventions.value_of_object(type_name, [(key, plain(item)) for key, item in items])
        if value is not conventions.ABSENT:
            return value
    return SavedModule(kind, type_name, dict(items))


def _annotation_of(hint: Any) -> Annotation:
    """Return the Annotation of a type hint, one object for equal hints; UnsupportedError if it cannot be read."""
    try:
        hash(hint)
    except TypeError:  # it has something in it that is no type
        return _make_annotation(hint)
    return _cached_annotation(hint)


def _make_annotation(hint: Any) -> Annotation:
    """Return a new Annotation of a type hint; its parts are made when first used, since types may hold themselves."""
    hint = type(None) if hint is None else fields.bare(hint)
    if isinstance(hint, str | ForwardRef) or hint is Self:
        raise UnsupportedError(f"the annotation {hint!r} cannot be read where it stands; name the class itself")
    return _class_of(hint)(hint, _annotation_of)


_cached_annotation = lru_cache(maxsize=1024)(_make_annotation)  # bounded: classes made while running can go


def _class_of(hint: Any) -> type[Annotation]:
    """Return the subclass of Annotation that builds the values of a type hint."""
    origin = get_origin(hint)
    kind = origin or hint
    if origin in (Union, types.UnionType):
        return containers.Choice
    if origin is Literal:
        return OneOf
    if not isinstance(kind, type) or kind in (Any, object):  # Any is a class, too
        return Annotation
    if fields.field_reader(kind):
        return containers.Class
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    if kind.__module__.partition(".")[0] == "torch" and kind.__name__ not in ("dtype", "device"):
        return TorchClass
    return next(annotation for base, annotation in _BY_BASE.items() if issubclass(kind, base))
