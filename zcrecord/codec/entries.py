"""What an index says, as Python values: the columns of tensors, the modules, the attributes and their types.

How they become bytes is left to `index`, where they come from to `tree`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from zcrecord._schema import ModuleKind, ValueForm, ValueType
from zcrecord.errors import LimitError

__all__ = [
    "DIGEST_NAMES",
    "KIND_NAMES",
    "AttributeEntry",
    "Entries",
    "ModuleEntry",
    "ModuleKind",
    "PayloadId",
    "TensorLayout",
    "ValueForm",
    "ValueType",
    "change_values",
    "digest_kind",
    "list_type",
    "value_type",
]


KIND_NAMES = {
    ModuleKind.MAPPING: "mapping",
    ModuleKind.LIST: "list",
    ModuleKind.TUPLE: "tuple",
    ModuleKind.OBJECT: "object",
    ModuleKind.NUMBERED: "numbered",
}

DIGEST_NAMES = {0: "none", 1: "xxh3"}


class PayloadId(int):
    """The index of a payload, as the value of an attribute that holds bytes."""


class TensorLayout(NamedTuple):
    """How a tensor's elements lie in its payload; `byte_offset` in bytes, strides in elements (None: C order)."""

    dtype: int
    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    byte_offset: int = 0


class ModuleEntry(NamedTuple):
    """One module; a list of them is in pre-order, the record itself first."""

    name: str
    key_size: int
    parent: int
    place: int
    kind: int
    type_name: str


class AttributeEntry(NamedTuple):
    """One value that is no tensor: None, bool, int, float, str, a PayloadId (bytes), or a list or tuple of one kind."""

    key: str
    parent: int
    place: int
    value: Any


@dataclass(slots=True, eq=False, repr=False)
class Entries:
    """Everything an index says. Tensors are columns, one item each, so that ten thousand cost no more than lists.

    `key_sizes` count UTF-8 bytes, `payloads` number the rows of `payload_rows` (NONE: no bytes), `layout_ids` those of
    `layouts`. Modules are in pre-order, the record itself first.
    """

    names: list[str] = field(default_factory=list)
    key_sizes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    payloads: Any = field(default_factory=list)
    layout_ids: list[int] = field(default_factory=list)
    layouts: list[TensorLayout] = field(default_factory=list)
    modules: list[ModuleEntry] = field(default_factory=list)
    attributes: list[AttributeEntry] = field(default_factory=list)
    metadata: list[AttributeEntry] = field(default_factory=list)
    payload_rows: Any = ()
    digest_kind: int = 0


def change_values(rows: list[AttributeEntry], change: Callable[[Any], Any]) -> None:
    """Put `change(value)` in the place of every value, and of every item where that is a list or tuple."""
    for i, a in enumerate(rows):
        if not isinstance(a.value, list | tuple):
            rows[i] = a._replace(value=change(a.value))
        else:
            rows[i] = a._replace(value=(list if isinstance(a.value, list) else tuple)(map(change, a.value)))


def digest_kind(digest: str | None) -> int:
    """Return the schema's code for a digest's name, 'xxh3' or 'none'.

    Raises:
        LimitError: another name.
    """
    if digest in (None, "none"):
        return 0
    if digest == "xxh3":
        return 1
    raise LimitError(f"digest {digest!r} is not known; 'xxh3' or 'none'")


def value_type(value: Any) -> int | None:
    """Return the ValueType of a scalar attribute (R68, R69); None where it has none (a 65-bit integer, say)."""
    if value is None:
        return int(ValueType.NIL)
    if isinstance(value, bool):
        return int(ValueType.BOOL)
    if isinstance(value, np.number | np.bool_):
        return None  # a tensor of rank 0, whatever its width: some of them are Python's numbers, too
    if isinstance(value, PayloadId | bytes) or (isinstance(value, memoryview) and value.readonly and value.contiguous):
        return int(ValueType.PAYLOAD)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            return None
        return int(ValueType.INT if value < 1 << 63 else ValueType.UINT)
    if isinstance(value, float):
        return int(ValueType.FLOAT)
    return int(ValueType.TEXT) if isinstance(value, str) else None


def list_type(values: Sequence[Any]) -> int | None:
    """Return the one ValueType of all items (R69), NIL for none, or None where they have no type in common."""
    kinds = {value_type(v) for v in values}
    if kinds == {ValueType.INT, ValueType.UINT} and min(values) >= 0:
        return int(ValueType.UINT)
    if len(kinds) > 1:
        return None
    return kinds.pop() if kinds else int(ValueType.NIL)
