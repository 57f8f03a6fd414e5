"""Structure of a record (modules, attributes, ties) as one text, for formats that have no place for it.

The text has the kinds and class names of modules, attributes and metadata with their types, keys that contain dots,
ties, and the saved order. With it and the tensors, the record is restored with the same content digest. The text is
JSON, bytes are base64, and `decode_structure` checks all of it. Each format decides on the place of the text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from zcrecord.codec.conventions import CATALOGUE_TYPE, REFERENCES_TYPE
from zcrecord.codec.entries import KIND_NAMES, encodable, is_attribute
from zcrecord.errors import FormatError, RecordError, VersionError, printable
from zcrecord.writing.module_tree import state_path

from .receiver import Receiver

KEY = "zcrecord"
MAX_TEXT = 100_000_000  # bytes; the limit of a safetensors header, which contains it
_VERSION = 1


@dataclass(slots=True)
class Structure:
    """Modules, attributes, metadata and ties of a record, without its tensors.

    Attributes:
        items: modules as (position, path, kind, class name), attributes as (position, path, value). The position is the
            number of tensors that come before; items are in ascending order of it.
        paths: the keys of tensors whose names are not split at every dot.
        ties: groups of names of tensors with the same memory.
        order: all names in saved order, if the format had to store the tensors in another order.
        metadata: entries that the format's own metadata cannot represent.
        marked: True if the metadata entry 'format' was added by the writer, and is not the record's.
    """

    items: list[tuple[Any, ...]] = field(default_factory=list)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ties: list[list[str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    marked: bool = False
    _written: int = 0
    _twins: dict[str, list[str]] | None = None

    def path(self, name: str, names: Collection[str]) -> tuple[str, ...]:
        """Return the keys of a tensor by its name; `names` has the names of all tensors."""
        return self.paths.get(name) or state_path(name, names)

    def twin(self, name: str) -> str | None:
        """Return the first tensor that this one was tied to; None for the first itself. Call it in the file's order.

        The caller must check that the bytes of the two are still equal.
        """
        if self._twins is None:
            self._twins = {}
            for names in self.ties:
                group: list[str] = []  # one for all names, which are added in the order of the calls
                self._twins |= dict.fromkeys(names, group)
        twins = self._twins.get(name)
        if twins is None:
            return None
        twins.append(name)
        return twins[0] if twins[0] != name else None

    def write_items(self, out: Receiver, count: int | None = None) -> None:
        """Write modules and attributes that come before tensor number `count` and were not written; by default all."""
        while self._written < len(self.items) and (count is None or self.items[self._written][0] <= count):
            _, path, *content = self.items[self._written]
            self._written += 1
            if len(content) == 1:
                out.attribute(path, *content)
            else:
                out.module(path, *content)

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return names in saved order; unknown names come last."""
        rank = {name: i for i, name in enumerate(self.order)}
        return sorted(names, key=lambda name: rank.get(name, len(rank)))

    def encode(self) -> str | None:
        """Return the text; None if all parts are empty."""
        parts: dict[str, Any] = {
            "items": [[position, path, *map(_encode_value, content)] for position, path, *content in self.items],
            "paths": self.paths,
            "ties": self.ties,
            "order": self.order,
            "metadata": {name: _encode_value(value) for name, value in self.metadata.items()},
            "marked": self.marked,
        }
        parts = {name: value for name, value in parts.items() if value}
        if not parts:
            return None
        return json.dumps({"version": _VERSION, **parts}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _encode_value(value: Any) -> Any:
    """Return an attribute's value as JSON can hold it; see `_decode_value`."""
    if isinstance(value, bytes | memoryview):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not np.isfinite(value):
        return {"float": f"{np.float64(value).view(np.uint64):016x}"}
    if isinstance(value, tuple):
        return {"tuple": [_encode_value(v) for v in value]}
    return [_encode_value(v) for v in value] if isinstance(value, list) else value


def decode_structure(text: str | None) -> Structure:
    """Decode a structure; an empty one for None. FormatError: malformed; VersionError: of a later version."""
    if text is None:
        return Structure()
    try:
        parts = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecordError):
            raise
        _fail(f"is no JSON that can be read ({printable(str(error))})")
    if not isinstance(parts, dict) or type(parts.get("version")) is not int:
        _fail("is no JSON object with a version")
    if parts["version"] != _VERSION:
        raise VersionError(f"its 'zcrecord' entry has version {parts['version']}, this is {_VERSION}; upgrade zcrecord")
    decoders: dict[str, Callable[[Any], Any]] = {
        "items": _items,
        "paths": lambda entry: {name: _path(path, name) for name, path in _object(entry).items()},
        "ties": lambda entry: [_names(tie) for tie in _list(entry)],
        "order": _names,
        "metadata": lambda entry: {name: _value(value, name) for name, value in _object(entry).items()},
        "marked": lambda entry: entry is True or _fail("marks with something other than true"),
    }
    del parts["version"]
    if unknown := parts.keys() - decoders.keys():
        _fail(f"has an unknown part '{printable(min(unknown))}'")
    return Structure(**{name: decoders[name](value) for name, value in parts.items()})


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON as a dict; FormatError if a key is there twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        _fail("has a key twice in one object")
    return out


def _fail(fault: str) -> NoReturn:
    raise FormatError(f"its 'zcrecord' entry {fault}; if it is not zcrecord's, or was changed, remove it") from None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else _fail("has something other than an object where one is due")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else _fail("has something other than a list where one is due")


def _text(value: Any) -> str:
    """Return a value that is text; FormatError for any other."""
    if not isinstance(value, str):
        _fail("has something other than text where text is due")
    if not encodable(value):
        _fail("has text with lone surrogates, which are not UTF-8")
    return value


def _names(value: Any) -> list[str]:
    return [_text(name) for name in _list(value)]


def _path(value: Any, name: str | None = None) -> tuple[str, ...]:
    """Return a list of keys as a path; FormatError unless they make up the `name` of a tensor, if there is one."""
    path = tuple(_names(value))
    if name is not None and ".".join(path) != name:
        _fail(f"splits '{printable(name)}' into other keys")
    return path


def _items(value: Any) -> list[tuple[Any, ...]]:
    """Decode modules and attributes as `Structure.items`; FormatError if one is malformed."""
    out: list[tuple[Any, ...]] = []
    for item in _list(value):
        if not isinstance(item, list) or not 3 <= len(item) <= 4 or type(item[0]) is not int:
            _fail("has an item that is neither a module nor an attribute")
        position, path = item[0], _path(item[1])
        if out and position < out[-1][0]:
            _fail("has items out of order")
        if len(item) == 3:
            out.append((position, path, _value(item[2], ".".join(path))))
        elif not path and item[3] in (CATALOGUE_TYPE, REFERENCES_TYPE):
            _fail("gives the record the type name of archives that name other files")
        elif item[2] in KIND_NAMES.values():
            out.append((position, path, item[2], _text(item[3])))
        else:
            _fail("has a module of unknown kind")
    return out


def _value(encoded: Any, name: str) -> Any:
    """Decode the value of an attribute; FormatError if no attribute can have it."""
    value = _decode_value(encoded)
    if isinstance(value, dict) or not is_attribute(value, name):
        _fail(f"has a value for '{printable(name)}' that no attribute has")
    return value


def _decode_value(value: Any, *, inside: bool = False) -> Any:
    """Decode a value as `_encode_value` encodes it; `inside` a list or tuple further lists are not decoded."""
    if isinstance(value, list):
        return _items_of(value, inside)
    if not isinstance(value, dict):
        return _text(value) if isinstance(value, str) else value
    if len(value) != 1:
        _fail("has an object of an unknown type for a value")
    ((kind, inner),) = value.items()
    try:
        if kind == "bytes":
            return base64.b64decode(_text(inner), validate=True)
        if kind == "float" and len(_text(inner)) == 16:
            return float(np.uint64(int(inner, 16)).view(np.float64))
    except (ValueError, OverflowError) as error:
        if isinstance(error, RecordError):
            raise
        _fail(f"has a malformed value of type {kind}")
    if kind != "tuple":
        _fail("has an object of an unknown type for a value")
    return tuple(_items_of(_list(inner), inside))


def _items_of(values: list[Any], inside: bool) -> list[Any]:
    """Decode the items of a list; a list inside another, which no attribute has, is read as empty, however deep."""
    return [] if inside else [_decode_value(v, inside=True) for v in values]
