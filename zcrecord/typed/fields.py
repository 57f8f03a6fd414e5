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

_WRAPPERS = {
    typing.Annotated,
    typing.ClassVar,
    typing.Final,
    typing.NotRequired,
    typing.Required,
    getattr(typing, "ReadOnly", typing.Required),  # from Python 3.13 on
}


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
        """Return an instance with these values of its fields; errors of the constructor pass through."""
        out = self.construct(**{f.argument: values[f.name] for f in self.fields if f.argument and f.name in values})
        for f in self.fields:
            if f.argument is None and f.name in values:
                object.__setattr__(out, f.name, values[f.name])  # frozen ones too
            elif f.default is not None:
                object.__setattr__(out, f.name, f.default())
        return out


def fields_of(hint: Any) -> ClassFields:
    """Return the fields of a class that `field_reader` takes, or of a generic one with its arguments."""
    kind: type = get_origin(hint) or hint
    reader = field_reader(kind)
    assert reader is not None
    return reader(kind, _hints(kind, get_args(hint)))


def field_reader(kind: type) -> Callable[[Any, Hints], ClassFields] | None:
    """Return the function that reads the fields of a class; None if it is of another kind."""
    if dataclasses.is_dataclass(kind):
        return _of_dataclass
    if hasattr(kind, "__attrs_attrs__"):
        return _of_attrs
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _of_namedtuple
    if dict in kind.__mro__ and hasattr(kind, "__required_keys__"):  # that of typing_extensions, too
        return _of_typed_dict
    return None


def _of_dataclass(kind: Any, hints: Hints) -> ClassFields:
    stored = {f.name for f in dataclasses.fields(kind)}
    has_init = bool(kind.__dataclass_params__.init)
    fields = []
    for f in kind.__dataclass_fields__.values():  # those of `dataclasses.fields`, and InitVars and ClassVars
        hint = hints.get(f.name, Any)
        if f.name not in stored and not isinstance(hint, dataclasses.InitVar):
            continue
        factory = (lambda f=f: f.default) if f.default_factory is dataclasses.MISSING else f.default_factory
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        argument = f.name if has_init and f.init else None
        default = None if has_init or missing else factory
        fields.append(Field(f.name, hint, argument, missing and f.init, f.name in stored, default))
    return ClassFields(kind, tuple(fields), kind if has_init else lambda: kind.__new__(kind))


def _of_attrs(kind: Any, hints: Hints) -> ClassFields:
    def construct(**arguments: Any) -> Any:  # the class has an __init__ of its own
        instance = kind.__new__(kind)
        instance.__attrs_init__(**arguments)
        return instance

    nothing = sys.modules["attr"].NOTHING
    fields = []
    for a in kind.__attrs_attrs__:
        argument = getattr(a, "alias", None) or a.name.lstrip("_")  # attrs before 22.2 has no aliases
        hint = hints.get(a.name, Any if a.type is None else a.type)
        fields.append(Field(a.name, hint, argument if a.init else None, a.init and a.default is nothing))
    return ClassFields(kind, tuple(fields), construct if hasattr(kind, "__attrs_init__") else kind)


def _of_namedtuple(kind: Any, hints: Hints) -> ClassFields:
    names = kind._fields
    return ClassFields(kind, tuple(Field(n, hints.get(n, Any), n, n not in kind._field_defaults) for n in names), kind)


def _of_typed_dict(kind: Any, hints: Hints) -> ClassFields:
    fields = []
    marked = _read_hints(kind, include_extras=True)
    for name, hint in hints.items():
        marks = {get_origin(marked[name])} | {get_origin(a) for a in get_args(marked[name])[:1]}
        required = name in kind.__required_keys__  # which has not seen marks in annotations that are text
        required = typing.Required in marks or (required and typing.NotRequired not in marks)
        fields.append(Field(name, hint, name, required))
    return ClassFields(kind, tuple(fields), dict)


def _hints(kind: type, arguments: tuple[Any, ...]) -> Hints:
    """Return the annotations of a class and its bases, with every type parameter that is known filled in."""
    hints = _read_hints(kind)
    bound: dict[type, dict[Any, Any]] = {}
    _bind(kind, _binding(kind, arguments), bound)
    known = {t: a for binding in reversed(bound.values()) for t, a in binding.items()}
    if not known:
        return hints
    owner: dict[str, type] = {}
    for base in reversed(kind.__mro__):
        owner |= dict.fromkeys(inspect.get_annotations(base), base)
    return {name: _substitute(hint, known | bound.get(owner[name], {})) for name, hint in hints.items()}


def _read_hints(kind: type, **options: Any) -> dict[str, Any]:
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


def _bind(kind: type, binding: dict[Any, Any], bound: dict[type, dict[Any, Any]]) -> None:
    bound[kind] = binding
    for base in vars(kind).get("__orig_bases__", kind.__bases__):
        origin = get_origin(base) or base
        if isinstance(origin, type) and origin is not Generic:
            _bind(origin, _binding(origin, tuple(_substitute(a, binding) for a in get_args(base))), bound)


def _binding(kind: Any, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    return dict(zip(getattr(kind, "__parameters__", ()), arguments, strict=False))


def _substitute(hint: Any, binding: Mapping[Any, Any]) -> Any:
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
