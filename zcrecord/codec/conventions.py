"""Python values without a type of the format, and keys that are no texts, as modules: both ways (CONVENTIONS.md).

A value becomes a module of kind OBJECT, often with one attribute, `value`. Integer keys make a mapping a NUMBERED
module, keys of other types an OBJECT with two lists.
"""

from __future__ import annotations

import collections
import datetime
import functools
import itertools
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from zcrecord._schema import ModuleKind
from zcrecord.codec.layout import MAX_DEPTH
from zcrecord.errors import LimitError, UnsupportedError

SIGNATURE_PREFIX = "zcrecord.signature."  # of a name in the metadata; the key's id follows
SOURCE_NAME = "zcrecord.source"  # in the metadata: the files and options that an archive was converted from, as JSON
TUNED_TYPE = "zcr:onnx_tuned"  # of the module that holds a tuned part, see `onnx.tuned`
REFERENCES_TYPE = "zcr:references"  # of module 0 in an archive whose payloads are ranges of other files
CATALOGUE_TYPE = "zcr:catalogue"  # of module 0 in an archive that names others, its shards

ABSENT: Any = object()  # "no value", where None is a value
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")
_MOST_BITS = 4096  # of an integer: Python refuses to print far wider ones, so no file may hold them
_NAN = 2  # the rank of NaN and of complex numbers in `_sort_key`
_MOST_ALIKE = 100  # items of one hash: a set compares each with all before it, and a file may choose the hashes
FACTORIES = {kind.__name__: kind for kind in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)}
_TIMES = {f"zcr:{kind.__name__}": kind for kind in (datetime.date, datetime.time, datetime.datetime)}


def object_of(value: Any, name: str) -> tuple[str, dict[str, Any]] | None:
    """Return type name and children, by key, of the OBJECT module that saves a value; None if no such module does.

    UnsupportedError, with the value's full name, `name`, if it would not be loaded as an equal one.
    """
    kind = type(value)
    if kind in (set, frozenset):
        return f"zcr:{kind.__name__}", {"value": sorted(value, key=lambda item: _sort_key(item, name))}
    if kind is collections.deque:
        return "zcr:deque", {"value": list(value), "maxlen": value.maxlen}
    if kind is types.SimpleNamespace or _is_of(kind, "argparse", "Namespace"):
        return "zcr:namespace" if kind is types.SimpleNamespace else "zcr:argparse_namespace", dict(vars(value))
    if is_jax_key(value):
        random: Any = sys.modules["jax"].random
        return "zcr:jax_key", {"value": random.key_data(value), "impl": str(random.key_impl(value))}
    encoded = _attribute_of(value, name)
    return None if encoded is None else (encoded[0], {"value": encoded[1]})


def _attribute_of(value: Any, name: str) -> tuple[str, Any] | None:
    """Return type name and attribute of a value for which one attribute is enough; None for others, errors as above."""
    kind = type(value)
    if isinstance(value, int):  # of more than 64 bits: narrower ones are plain attributes
        if value.bit_length() > _MOST_BITS:
            fault = f"an integer of {value.bit_length()} bits, {_MOST_BITS} are the most; save it as bytes"
            raise UnsupportedError(fault, tensor=name)
        return "zcr:int", hex(value)
    if isinstance(value, complex):
        return "zcr:complex", (value.real, value.imag)
    if isinstance(value, PurePath):
        if Path(value.as_posix()) != value:
            raise UnsupportedError(f"a {kind.__name__}, of another system; save str() of it", tensor=name)
        return "zcr:path", value.as_posix()
    if kind is datetime.timedelta:
        return "zcr:timedelta", (value.days, value.seconds, value.microseconds)
    if kind in _TIMES.values():
        if repr(kind.fromisoformat(value.isoformat())) != repr(value):
            fault = f"a {kind.__name__} with a named time zone, or a fold; save a text, and the zone's name"
            raise UnsupportedError(fault, tensor=name)
        return f"zcr:{kind.__name__}", value.isoformat()
    if _is_of(kind, "torch", "dtype"):
        return "zcr:torch_dtype", str(value).removeprefix("torch.")
    return ("zcr:torch_device", str(value)) if _is_of(kind, "torch", "device") else None


def _is_of(kind: type, module: str, name: str) -> bool:
    """Return True if a class is that of this name in a module; False while the module is not imported."""
    return kind is getattr(sys.modules.get(module), name, None)


def is_jax_key(value: Any) -> bool:
    """Return True for one of jax's typed PRNG keys, a jax.Array whose elements numpy cannot view."""
    jax: Any = sys.modules.get("jax")
    kind = getattr(jax, "Array", None)
    return kind is not None and isinstance(value, kind) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _sort_key(value: Any, name: str, depth: int = 0, *, loaded: bool = False) -> tuple[Any, ...]:
    """Return a sort key for items of sets and keys of dicts, the same on every machine.

    If `loaded` from a file, sets inside are distinct, and sort by identity: else each level would sort all below it.
    UnsupportedError if the value would not be loaded as an equal key, LimitError if it is nested too deep.
    """
    kind = type(value)
    if depth > MAX_DEPTH:
        raise LimitError(f"a key nested more than {MAX_DEPTH} deep", tensor=name or None)
    if value is None:
        return (0,)
    if kind in (bool, int, float) and value == value:  # NaN has no place among the numbers
        return (1, value)
    if kind in (float, complex):
        return (_NAN, repr(value))
    if kind is str:
        return (3, value)
    if isinstance(value, tuple):
        return (4, *(_sort_key(item, name, depth + 1, loaded=loaded) for item in value))
    if kind is frozenset and loaded:
        return (5, id(value))
    if kind is frozenset:
        return (5, *sorted(_sort_key(item, name, depth + 1) for item in value))
    encoded = None if isinstance(value, np.generic) else _attribute_of(value, name)
    if encoded is None or encoded[0].startswith("zcr:torch"):
        fault = f"a {kind.__name__} as a key, or in a set, has no equal when it is loaded"
        raise UnsupportedError(f"{fault}; make it a text, number, tuple or date", tensor=name or None)
    return (6, *encoded)


def value_of_object(type_name: str, items: list[tuple[str, Any]]) -> Any:
    """Return the value that an OBJECT module stands for; ABSENT for other modules.

    A file never makes Python import a package: values of torch and jax are made only if these are imported already.
    """
    if type_name in _NAMESPACES:
        return _namespace(type_name, items)
    make, *keys = _VALUES.get(type_name, (None,))
    children = dict(items)
    return make(*map(children.__getitem__, keys)) if make and children.keys() == set(keys) else ABSENT


def _namespace(type_name: str, items: list[tuple[str, Any]]) -> Any:
    """Return a SimpleNamespace, or argparse's Namespace, with these attributes."""
    import argparse  # its import takes milliseconds, and few need it

    space = types.SimpleNamespace() if type_name == _NAMESPACES[0] else argparse.Namespace()
    vars(space).update(items)  # by setattr a file could set `__class__`
    return space


def _wide_int(text: str) -> int:
    """Return an integer of more than 64 bits by its hexadecimal digits; ValueError for a narrower one."""
    number = int(text, 16)
    if -(1 << 63) <= number < 1 << 64:
        raise ValueError("an attribute holds it")
    return number


_MAKERS: dict[str, Callable[[Any], Any]] = {  # of values for which one attribute is enough, by type name
    "zcr:int": _wide_int, "zcr:complex": lambda parts: complex(*parts), "zcr:path": Path,
    "zcr:timedelta": lambda parts: datetime.timedelta(*parts),
    **{name: kind.fromisoformat for name, kind in _TIMES.items()},
}  # fmt: skip


def _value_of_attribute(type_name: str, attribute: Any) -> Any:
    """Return the value that `_attribute_of` saves as exactly this type name and attribute; ABSENT if there is none."""
    try:
        value = _MAKERS[type_name](attribute) if isinstance(attribute, str | tuple) else ABSENT
        saved = _attribute_of(value, "")
    except (OverflowError, TypeError, ValueError, UnsupportedError):
        return ABSENT
    return value if repr(saved) == repr((type_name, attribute)) else ABSENT  # so that 1 is not 1.0, and NaN is NaN


def _torch_dtype(name: Any) -> Any:
    """Return torch's dtype of a name; ABSENT without one, or while torch is not imported."""
    torch = sys.modules.get("torch")
    dtype = vars(torch).get(name) if torch is not None and isinstance(name, str) else None
    return dtype if isinstance(dtype, getattr(torch, "dtype", ())) else ABSENT


def _torch_device(name: Any) -> Any:
    """Return torch's device of a name; ABSENT without one, or while torch is not imported."""
    torch: Any = sys.modules.get("torch")
    try:
        return torch.device(name) if torch is not None and isinstance(name, str) else ABSENT
    except (AttributeError, RuntimeError):  # torch is being imported, or knows no such kind of device
        return ABSENT


def _jax_key(data: Any, impl: Any) -> Any:
    """Return jax's PRNG key of these words and implementation; ABSENT without one, or while jax is not imported."""
    jax: Any = sys.modules.get("jax")
    try:
        return jax.random.wrap_key_data(data, impl=impl) if jax is not None and isinstance(impl, str) else ABSENT
    except (AttributeError, TypeError, ValueError):  # jax is being imported, or knows no such keys
        return ABSENT


def _set_of(kind: Callable[[Any], Any], items: Any) -> Any:
    """Return a set or frozenset of a list of items; ABSENT unless they are distinct."""
    return kind(items) if _are_distinct(items) else ABSENT


def _are_distinct(items: Any) -> bool:
    """Return True for a list of distinct values that may be keys, at most 100 of one hash.

    A file can choose numbers that make a hash table slow, so equal ones and equal hashes are looked for by sorting.
    """
    if not isinstance(items, list):
        return False
    if not {str}.issuperset(map(type, items)):
        try:
            keys = sorted(_sort_key(item, "", loaded=True) for item in items)
        except (LimitError, UnsupportedError):
            return False
        hashes = sorted(map(hash, items))
        if any(a == b and a[0] != _NAN for a, b in itertools.pairwise(keys)):
            return False
        if any(a == b for a, b in zip(hashes, hashes[_MOST_ALIKE:], strict=False)):
            return False
    return len(set(items)) == len(items)


def _deque(items: Any, limit: Any) -> Any:
    """Return a deque of a list of items, of this `maxlen`; ABSENT unless that is None or an int they do not exceed."""
    fits = isinstance(items, list) and (limit is None or (type(limit) is int and len(items) <= limit <= sys.maxsize))
    return collections.deque(items, limit) if fits else ABSENT


def _dict(keys: Any, values: Any) -> Any:
    """Return a dict of a list of keys and one of values; ABSENT unless keys are distinct, and as many."""
    fits = _are_distinct(keys) and isinstance(values, list) and len(keys) == len(values)
    return dict(zip(keys, values, strict=True)) if fits else ABSENT


_NAMESPACES = "zcr:namespace", "zcr:argparse_namespace"
_VALUES: dict[str, tuple[Callable[..., Any], *tuple[str, ...]]] = {  # by type name: a function of these children
    **{name: (functools.partial(_value_of_attribute, name), "value") for name in _MAKERS},
    **{f"zcr:{kind.__name__}": (functools.partial(_set_of, kind), "value") for kind in (set, frozenset)},
    "zcr:deque": (_deque, "value", "maxlen"),
    "zcr:dict": (_dict, "keys", "values"),
    "zcr:torch_dtype": (_torch_dtype, "value"), "zcr:torch_device": (_torch_device, "value"),
    "zcr:jax_key": (_jax_key, "value", "impl"),
}  # fmt: skip


def mapping_type(value: Mapping[Any, Any]) -> str:
    """Return the type name of a mapping's module; "" for a dict, or a defaultdict whose factory is not in FACTORIES."""
    if type(value) is collections.OrderedDict:
        return "zcr:ordered_dict"
    factory = getattr(value, "default_factory", None) if type(value) is collections.defaultdict else None
    name = getattr(factory, "__name__", "")
    return f"zcr:defaultdict:{name}" if factory is not None and FACTORIES.get(name) is factory else ""


def mapping_of(type_name: str, items: dict[Any, Any]) -> Any:
    """Return items as the mapping that a type name stands for: an OrderedDict, a defaultdict, or the dict itself."""
    if type_name == "zcr:ordered_dict":
        return collections.OrderedDict(items)
    factory = FACTORIES.get(type_name.removeprefix("zcr:defaultdict:")) if type_name.startswith("zcr:d") else None
    return items if factory is None else collections.defaultdict(factory, items)


def keyed_children(value: Mapping[Any, Any], name: str) -> tuple[int, str, dict[str, Any]]:
    """Return ModuleKind, type name and children of a mapping; UnsupportedError for a key that loading would change."""
    if all(isinstance(key, str) for key in value) and "" not in value:
        return ModuleKind.MAPPING, mapping_type(value), dict(value)
    if all(map(_is_numbered, value)):
        children = {key if isinstance(key, str) else str(int(key)): item for key, item in value.items()}
        return ModuleKind.NUMBERED, mapping_type(value), children
    for key in value:
        _sort_key(key, name)  # raises for a key that would not be loaded as an equal one
    return ModuleKind.OBJECT, "zcr:dict", {"keys": list(value), "values": list(value.values())}


def _is_numbered(key: Any) -> bool:
    """Return True for a key of a NUMBERED module: an integer of 64 bits, or a text that does not read as one."""
    if isinstance(key, str):
        return key != "" and not isinstance(key_of_text(key), int)
    return isinstance(key, int | np.integer) and not isinstance(key, bool) and -(1 << 63) <= int(key) < 1 << 64


def key_of_text(text: str) -> str | int:
    """Return a key of a NUMBERED module: an integer if the text is one in canonical form, of 64 bits."""
    if _INTEGER.fullmatch(text) and -(1 << 63) <= (number := int(text)) < 1 << 64:
        return number
    return text
