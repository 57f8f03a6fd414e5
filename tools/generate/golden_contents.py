"""Expected contents of an archive of given values, from schema/FORMAT.md alone: nothing here reads an archive."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import hashlib
import itertools
import struct
import types
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from zcrecord import PackedTensor, StringTensor, dtypes

KINDS = {"mapping": 1, "list": 2, "tuple": 3, "object": 4, "numbered": 5}
TYPES = {type(None): 0, bool: 1, int: 2, float: 4, str: 5, bytes: 6}
UINT = 3


@dataclasses.dataclass(frozen=True)
class Content:
    """A record, and what its values do not tell.

    Attributes:
        order: full names of the tensors as saved, where not that of the walk; and of modules that come last.
        ties: names that share a payload; `stored_once`: names whose payloads, of different numbers, are the very same
            range (R63).
        strides: in elements, of tensors that are not in C order.
        codes: (dtype, bits) of tensors whose type is not their array's.
        keys: of lists and tuples whose keys are not 0, 1, 2, ..., by their names: one for each item.
    """

    record: Any
    order: list[str] = dataclasses.field(default_factory=list)
    ties: list[list[str]] = dataclasses.field(default_factory=list)
    stored_once: list[list[str]] = dataclasses.field(default_factory=list)
    strides: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    codes: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    keys: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


class _Tensor(NamedTuple):
    name: str
    module: str
    key: str
    place: int
    code: int
    bits: int
    shape: tuple[int, ...]
    data: bytes


class _Module(NamedTuple):
    name: str
    module: str
    key: str
    place: int
    kind: int
    type_name: str
    children: list[str]


class _Attribute(NamedTuple):
    name: str
    module: str
    key: str
    place: int
    value: Any


_Child = _Tensor | _Module | _Attribute


def describe(content: Content) -> dict[str, Any]:
    """Return tensors, modules, attributes, metadata and content digest as JSON: tests/conformance/README.md."""
    found = list(_walk(content, content.record))
    tensors = [f for f in found if isinstance(f, _Tensor)]
    order = content.order or [t.name for t in tensors]
    tied = {name: group for group in content.ties for name in group}
    return {
        "content_digest": content_digest(content),
        "tensors": [
            {
                "name": t.name,
                "module": t.module,
                "dtype": t.code,
                "bits": t.bits,
                "shape": list(t.shape),
                "strides": list(content.strides[t.name]) if t.name in content.strides else None,
                "nbytes": len(t.data),
                "tied": tied.get(t.name, []),
                "elements": t.data.hex(),
            }
            for t in sorted(tensors, key=lambda t: order.index(t.name))
        ],
        "stored_once": content.stored_once,
        "modules": [
            {"name": f.name, "kind": f.kind, "type_name": f.type_name, "children": f.children}
            for f in sorted(found, key=lambda f: order.index(f.name) if f.name in content.order else -1)
            if isinstance(f, _Module)
        ],
        "attributes": [
            {"module": f.module, "key": f.key, **_values(f.value)} for f in found if isinstance(f, _Attribute)
        ],
        "metadata": [{"key": key, **_values(content.metadata[key])} for key in sorted(content.metadata)],
    }


def _values(value: Any) -> dict[str, Any]:
    """Return type, form and values of an attribute as JSON: floats' bits and bytes in hexadecimal."""
    kind, form, items = _typed(value)
    return {"type": kind, "form": form, "values": [_plain(item) for item in items]}


def _plain(item: Any) -> Any:
    if isinstance(item, float):
        return struct.pack(">d", item).hex()
    return item.hex() if isinstance(item, bytes) else item


def _children(value: Any) -> tuple[str, str, dict[str, Any]] | None:
    """Return kind, type name and children of what is a module."""
    if isinstance(value, set):  # texts
        return "object", "zcr:set", {"value": sorted(value)}
    if isinstance(value, collections.deque):
        return "object", "zcr:deque", {"value": list(value), "maxlen": value.maxlen}
    if isinstance(value, PurePath):
        return "object", "zcr:path", {"value": value.as_posix()}
    if isinstance(value, datetime.datetime):
        return "object", "zcr:datetime", {"value": value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return "object", "zcr:timedelta", {"value": (value.days, value.seconds, value.microseconds)}
    if isinstance(value, types.SimpleNamespace):
        return "object", "zcr:namespace", vars(value)
    if isinstance(value, dict) and not all(type(key) in (str, int) for key in value):
        return "object", "zcr:dict", {"keys": list(value), "values": list(value.values())}
    if isinstance(value, collections.OrderedDict):
        return "mapping", "zcr:ordered_dict", dict(value)
    if isinstance(value, collections.defaultdict):
        return "mapping", "zcr:defaultdict:list", dict(value)
    if isinstance(value, dict) and any(isinstance(key, int) for key in value):
        return "numbered", "", {str(key): child for key, child in value.items()}
    if isinstance(value, dict):
        return "mapping", "", value
    if isinstance(value, complex):
        return "object", "zcr:complex", {"value": (value.real, value.imag)}
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "object", "zcr:int", {"value": hex(value)}
    if dataclasses.is_dataclass(value):
        return "object", type(value).__name__, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    fields = getattr(value, "_fields", None)
    if fields is not None:
        return "tuple", type(value).__name__, dict(zip(fields, value, strict=True))
    if isinstance(value, list | tuple) and not _is_attribute(value):
        return type(value).__name__, "", {str(i): v for i, v in enumerate(value)}
    return None


def _is_attribute(value: Any) -> bool:
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return len({type(v) for v in value}) < 2 and all(_is_attribute(v) and type(v) in TYPES for v in value)
    return type(value) in TYPES and not (isinstance(value, int) and not -(2**63) <= value < 2**64)


def _walk(
    content: Content, value: Any, name: str = "", module: str = "", key: str = "", place: int = 0
) -> Iterator[_Child]:
    parts = _children(value)
    if parts is not None:
        kind, type_name, children = parts
        keys = content.keys.get(name, list(children))
        yield _Module(name, module, key, place, KINDS[kind], type_name, keys)
        for at, (inner, child) in enumerate(zip(keys, children.values(), strict=True)):
            yield from _walk(content, child, f"{name}.{inner}" if name else inner, name, inner, at)
    elif _is_attribute(value):
        yield _Attribute(name, module, key, place, value)
    else:
        code, bits, data = elements(value)
        code, bits = content.codes.get(name, (code, bits))
        yield _Tensor(name, module, key, place, code, bits, value.shape, data)


def elements(array: Any) -> tuple[int, int, bytes]:
    """Return dtype, bits and the bytes that are stored for an array, or a tensor that is packed already."""
    if isinstance(array, PackedTensor):
        return array.kind.code, array.kind.bits, array.packed.tobytes()
    if isinstance(array, StringTensor) or array.dtype.kind == "U":
        found = array.strings() if isinstance(array, StringTensor) else map(str.encode, array.ravel().tolist())
        texts = list(found)
        ends = np.array([0, *itertools.accumulate(map(len, texts))], "<u8").tobytes()
        joined = b"".join(texts)
        return dtypes.STRING.code, 0, joined + bytes(-len(joined) % 8) + ends if texts else b""
    kind = dtypes.by_name[array.dtype.name]
    raw = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    data = np.frombuffer(raw.tobytes(), np.uint8)
    if kind.bits < 8:
        data = np.packbits(np.unpackbits(data[:, None], axis=1, count=kind.bits, bitorder="little"), bitorder="little")
    return kind.code, kind.bits, data.tobytes()


def content_digest(content: Content) -> str:
    return "sha256:" + hashlib.sha256(b"".join(part for _, part in content_parts(content))).hexdigest()


def content_parts(content: Content) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of FORMAT.md's section "Content digest" part by part, each after the name of its part."""
    found = list(_walk(content, content.record))
    modules = sorted((f for f in found if isinstance(f, _Module)), key=lambda m: m.name.encode())
    numbers = {m.name: number for number, m in enumerate(modules)}
    lists = {m.name for m in modules if m.kind in (KINDS["list"], KINDS["tuple"])}

    def child(what: str, f: _Child) -> Iterator[tuple[str, bytes]]:
        yield f"{what}: module", _u64(numbers[f.module])
        yield f"{what}: place", _u64(f.place if f.module in lists else 0)
        yield f"{what}: key", _text(f.key)

    yield "tag", b"zcrecord content digest 2\n"
    yield "number of modules", _u64(len(modules))
    for m in modules:
        yield from child("module", m)
        yield "module: kind", _u64(m.kind)
        yield "module: type name", _text(m.type_name)
    tensors = sorted((f for f in found if isinstance(f, _Tensor)), key=lambda t: t.name.encode())
    yield "number of tensors", _u64(len(tensors))
    for t in tensors:
        yield from child("tensor", t)
        yield "tensor: dtype", _u64(t.code)
        yield "tensor: bits", _u64(t.bits)
        yield "tensor: rank", _u64(len(t.shape))
        yield "tensor: dims", _u64(*t.shape)
        yield "tensor: elements", hashlib.sha256(t.data).digest()
    attributes = (f for f in found if isinstance(f, _Attribute))
    for a in sorted(attributes, key=lambda a: (numbers[a.module], a.key.encode())):
        yield from child("attribute", a)
        yield from _value(a.value)


def _u64(*numbers: int) -> bytes:
    return b"".join((n % 2**64).to_bytes(8, "little") for n in numbers)


def _text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return _u64(len(data)) + data


def _value(value: Any) -> Iterator[tuple[str, bytes]]:
    kind, form, items = _typed(value)
    yield "attribute: type", _u64(kind)
    yield "attribute: form", _u64(form)
    yield "attribute: number of words", _u64(len(items))
    for item in items:
        yield f"attribute: {type(item).__name__}", _word(item)


def _typed(value: Any) -> tuple[int, int, list[Any]]:
    """Return ValueType and ValueForm of a value, and its items, one of a scalar."""
    form = 1 if isinstance(value, list) else 2 if isinstance(value, tuple) else 0
    items = list(value) if form else [value]
    kind = TYPES[type(items[0])] if items else 0
    return (UINT if kind == TYPES[int] and max(items) >= 2**63 else kind), form, items


def _word(item: Any) -> bytes:
    if isinstance(item, str):
        return _text(item)
    if isinstance(item, bytes):
        return hashlib.sha256(item).digest()
    return np.float64(item).tobytes() if isinstance(item, float) else _u64(int(item or 0))
