"""Python values without a type of the format, as modules, and integer keys, as text: both ways (CONVENTIONS.md).

A value becomes a module of kind OBJECT with one attribute, `value`; integer keys make a mapping a NUMBERED module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from zcrecord.errors import UnsupportedError, printable

SIGNATURE_PREFIX = "zcrecord.signature."  # of a name in the metadata; the key's id follows
SOURCE_NAME = "zcrecord.source"  # in the metadata: the files and options that an archive was converted from, as JSON
TUNED_TYPE = "zcr:onnx_tuned"  # of the module that holds a tuned part, see `onnx.tuned`
REFERENCES_TYPE = "zcr:references"  # of module 0 in an archive whose payloads are ranges of other files
CATALOGUE_TYPE = "zcr:catalogue"  # of module 0 in an archive that names others, its shards

ABSENT: Any = object()  # no value, where None is one
_INT, _COMPLEX, _DTYPE, _DEVICE = "zcr:int", "zcr:complex", "zcr:torch_dtype", "zcr:torch_device"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")
_MOST_BITS = 4096  # Python refuses to print far wider ones: a file is not to bring them
_HEXADECIMAL = re.compile(rf"-?0x[0-9a-f]{{1,{_MOST_BITS // 4}}}")


def object_of(value: Any, name: str) -> tuple[str, Any] | None:
    """Return the type name, and the attribute `value`, of the module that stands for a value; None if none does."""
    if isinstance(value, int):  # one of more than 64 bits: all others are attributes
        if value.bit_length() > _MOST_BITS:
            what = f"an integer of {value.bit_length()} bits, {_MOST_BITS} are the most; save it as bytes"
            raise UnsupportedError(what, tensor=name)
        return _INT, hex(value)
    if isinstance(value, complex):
        return _COMPLEX, (value.real, value.imag)
    torch = sys.modules.get("torch")  # such a value is there only once torch is imported
    if isinstance(value, getattr(torch, "dtype", ())):
        return _DTYPE, str(value).removeprefix("torch.")
    return (_DEVICE, str(value)) if isinstance(value, getattr(torch, "device", ())) else None


def value_of_object(type_name: str, items: list[tuple[str, Any]]) -> Any:
    """Return the value that an OBJECT module stands for, or ABSENT; no torch value before torch is imported."""
    make = _VALUES.get(type_name)
    if make is None or len(items) != 1 or items[0][0] != "value":
        return ABSENT
    return make(items[0][1])


def _integer(value: Any) -> Any:
    if not isinstance(value, str) or not _HEXADECIMAL.fullmatch(value):
        return ABSENT
    number = int(value, 16)
    wide = not -(1 << 63) <= number < 1 << 64  # all others are INT or UINT
    return number if wide and hex(number) == value else ABSENT


def _complex(value: Any) -> Any:
    pair = isinstance(value, tuple) and list(map(type, value)) == [float, float]
    return complex(*value) if pair else ABSENT


def _dtype(value: Any) -> Any:
    torch = sys.modules.get("torch")
    known = vars(torch).get(value) if torch is not None and isinstance(value, str) else None
    return known if isinstance(known, getattr(torch, "dtype", ())) else ABSENT


def _device(value: Any) -> Any:
    torch: Any = sys.modules.get("torch")
    try:
        return torch.device(value) if torch is not None and isinstance(value, str) else ABSENT
    except (AttributeError, RuntimeError):  # torch is being imported, or knows no such kind of device
        return ABSENT


_VALUES = {_INT: _integer, _COMPLEX: _complex, _DTYPE: _dtype, _DEVICE: _device}


def text_keys(items: Mapping[Any, Any], module: str) -> dict[str, Any]:
    """Return the items of a mapping with integers among its keys, those as text; UnsupportedError for other keys."""
    out: dict[str, Any] = {}
    for key, value in items.items():
        fault = ""
        if isinstance(key, int | np.integer) and not isinstance(key, bool):
            if not -(1 << 63) <= key < 1 << 64:
                wide = printable(hex(int(key)), 40)
                fault = f"the key {wide} is an integer outside -2^63 to 2^64 - 1; make it a text"
        elif not isinstance(key, str):
            fault = f"key {printable(repr(key))} is a {type(key).__name__}; keys are non-empty strings or integers"
        elif isinstance(key_of_text(key), int):
            fault = f"the key {printable(repr(key))} is a text that reads as an integer, and others are integers"
            fault += "; make all of them integers, or texts"
        if fault:
            raise UnsupportedError(f"in '{printable(module)}': {fault}" if module else f"in the record: {fault}")
        out[key if isinstance(key, str) else str(int(key))] = value
    return out


def key_of_text(text: str) -> str | int:
    """Return a key of a NUMBERED module: an integer if the text is one in canonical form, of 64 bits."""
    if _INTEGER.fullmatch(text) and -(1 << 63) <= (number := int(text)) < 1 << 64:
        return number
    return text
