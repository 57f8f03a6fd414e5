"""Fields of classes: of dataclasses, attrs classes, NamedTuples and TypedDicts, all described alike.

attrs is not imported: a program that has such a class has imported it.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, get_args, get_origin

from zcrecord.errors import UnsupportedError, printable

Hints = Mapping[str, Any]

_WRAPPERS = {typing.Annotated, typing.ClassVar, typing.Final, typing.NotRequired, typing.Required}
_WRAPPERS.add(getattr(typing, "ReadOnly", typing.Required))  # from Python 3.13 on


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of a class, and its annotation."""

    name: str
    hint: Any
    argument: str | None  # of the constructor, that sets it; None if it is set after construction
    required: bool
    stored: bool = True  # not an `InitVar`, which instances do not have, so that `save_record` leaves it out
    default: Callable[[], Any] | None = None  # for classes without a constructor that makes it


@dataclasses.dataclass(frozen=True, slots=True)
class ClassFields:
    """A class, its fields in order, and its constructor."""

    kind: type
    fields: tuple[Field, ...]
    construct: Callable[..., Any]

    def make(self, values: Mapping[str, Any]) -> Any:
        """Return an instance with these values of its fields, by name; errors of the constructor pass through."""
        arguments = {f.argument: values[f.name] for f in self.fields if f.argument and f.name in values}
        instance = self.construct(**arguments)
        for f in self.fields:
            if f.argument is None and f.name in values:
                object.__setattr__(instance, f.name, values[f.name])  # of frozen classes, too
            elif f.default is not None:
                object.__setattr__(instance, f.name, f.default())
        return instance


def fields_of(hint: Any) -> ClassFields:
    """Return the fields of a class that `field_reader` knows, or of a generic one with arguments: `Pair[int, str]`."""
    kind: type = get_origin(hint) or hint
    reader = field_reader(kind)
    assert reader is not None
    return reader(kind, _hints(kind, get_args(hint)))


def field_reader(kind: type) -> Callable[[Any, Hints], ClassFields] | None:
    """Return the function that reads the fields of a class; None if it is of another kind."""
    if dataclasses.is_dataclass(kind):
        return _dataclass_fields
    if hasattr(kind, "__attrs_attrs__"):
        return _attrs_fields
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _namedtuple_fields
    if dict in kind.__mro__ and hasattr(kind, "__required_keys__"):  # that of typing_extensions, too
        return _typed_dict_fields
    return None


def _dataclass_fields(kind: Any, hints: Hints) -> ClassFields:
    stored = {f.name for f in dataclasses.fields(kind)}
    has_init = bool(kind.__dataclass_params__.init)
    fields = []
    for f in kind.__dataclass_fields__.values():  # those of `dataclasses.fields`, and InitVars and ClassVars
        hint = hints.get(f.name, Any)
        if f.name not in stored and not isinstance(hint, dataclasses.InitVar):  # a ClassVar
            continue
        factory = (lambda f=f: f.default) if f.default_factory is dataclasses.MISSING else f.default_factory
        has_default = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        argument = f.name if has_init and f.init else None
        default = factory if has_default and not has_init else None
        required = f.init and not has_default
        fields.append(Field(f.name, hint, argument, required, stored=f.name in stored, default=default))
    return ClassFields(kind, tuple(fields), kind if has_init else lambda: kind.__new__(kind))


def _attrs_fields(kind: Any, hints: Hints) -> ClassFields:
    def construct(**arguments: Any) -> Any:  # the class has an __init__ of its own
        instance = kind.__new__(kind)
        instance.__attrs_init__(**arguments)
        return instance

    no_default = sys.modules["attr"].NOTHING
    fields = []
    for a in kind.__attrs_attrs__:
        argument = getattr(a, "alias", None) or a.name.lstrip("_")  # attrs before 22.2 has no aliases
        hint = hints.get(a.name, Any if a.type is None else a.type)
        fields.append(Field(a.name, hint, argument if a.init else None, a.init and a.default is no_default))
    return ClassFields(kind, tuple(fields), construct if hasattr(kind, "__attrs_init__") else kind)


def _namedtuple_fields(kind: Any, hints: Hints) -> ClassFields:
    fields = [Field(name, hints.get(name, Any), name, name not in kind._field_defaults) for name in kind._fields]
    return ClassFields(kind, tuple(fields), kind)


def _typed_dict_fields(kind: Any, hints: Hints) -> ClassFields:
    fields = []
    full_hints = _read_hints(kind, include_extras=True)
    for name, hint in hints.items():
        full_hint = full_hints[name]
        marks = {get_origin(full_hint), *map(get_origin, get_args(full_hint)[:1])}  # ReadOnly may be around a mark
        is_listed = name in kind.__required_keys__  # made without the marks in annotations that are text
        required = typing.Required in marks or (is_listed and typing.NotRequired not in marks)
        fields.append(Field(name, hint, name, required))
    return ClassFields(kind, tuple(fields), dict)


def _hints(kind: type, arguments: tuple[Any, ...]) -> Hints:
    """Return the annotations of a class and its bases, with every type parameter that is known filled in."""
    hints = _read_hints(kind)
    bindings: dict[type, dict[Any, Any]] = {}
    _collect_bindings(kind, arguments, bindings)
    known = {parameter: hint for binding in reversed(bindings.values()) for parameter, hint in binding.items()}
    if not known:
        return hints
    owner: dict[str, type] = {}
    for base in reversed(kind.__mro__):
        owner |= dict.fromkeys(inspect.get_annotations(base), base)
    return {name: _substitute(hint, known | bindings.get(owner[name], {})) for name, hint in hints.items()}


def _read_hints(kind: type, **options: Any) -> dict[str, Any]:
    """Return a class's annotations with their texts evaluated; UnsupportedError if a name in them is not known."""
    try:
        try:
            return typing.get_type_hints(kind, **options)
        except NameError:  # a class in a function may name itself, and make_dataclass writes 'typing.Any'
            names: dict[str, Any] = {base.__name__: base for base in kind.__mro__}
            return typing.get_type_hints(kind, localns={**names, "typing": typing}, **options)
    except Exception as error:
        fault = f"the annotations of {kind.__qualname__} cannot be read: {printable(str(error))}"
        advice = "define what they name at module level, and not for type checkers alone"
        raise UnsupportedError(f"{fault}; {advice}") from error


def _collect_bindings(kind: Any, arguments: tuple[Any, ...], bindings: dict[type, dict[Any, Any]]) -> None:
    """Add to `bindings` the type parameters of a class and of each base, with the hints that stand for them."""
    binding = bindings[kind] = dict(zip(getattr(kind, "__parameters__", ()), arguments, strict=False))
    for base in vars(kind).get("__orig_bases__", kind.__bases__):
        origin = get_origin(base) or base
        if isinstance(origin, type) and origin is not Generic:
            _collect_bindings(origin, tuple(_substitute(hint, binding) for hint in get_args(base)), bindings)


def _substitute(hint: Any, binding: Mapping[Any, Any]) -> Any:
    """Return a hint with its type parameters replaced as far as `binding` has them."""
    if isinstance(hint, TypeVar):
        return binding.get(hint, hint)
    parameters = () if isinstance(hint, type) else getattr(hint, "__parameters__", ())
    if not any(p in binding for p in parameters):
        return hint
    return hint[tuple(binding.get(p, p) for p in parameters)]


def bare(hint: Any) -> Any:
    """Return an annotation reduced to the type of its value: without Annotated, Final, NewType or an alias's name.

    A type parameter that nothing fills in stands for its bound, its constraints, or anything.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, dataclasses.InitVar):
        return bare(hint.type)
    if origin in _WRAPPERS:
        return bare(arguments[0])
    if hasattr(hint, "__supertype__"):
        return bare(hint.__supertype__)
    if isinstance(hint, TypeVar):
        return bare(hint.__bound__ or (typing.Union[hint.__constraints__] if hint.__constraints__ else Any))  # noqa: UP007
    for alias in (hint, origin):
        if type(alias).__name__ == "TypeAliasType":  # of Python 3.12, or of typing_extensions
            return bare(_substitute(alias.__value__, dict(zip(alias.__type_params__, arguments, strict=False))))
    return hint
