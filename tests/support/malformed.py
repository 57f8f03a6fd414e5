"""Shared by tests of malformed archives: the archives they start from, and the shape of a case.

A case breaks one rule of FORMAT.md in a valid archive, which is then sealed again: nothing but that rule is broken.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from forge import Forge
from records import saved as saved

from zcrecord import FormatError, PackedTensor, RecordError, StringTensor
from zcrecord.archive.archive import Verify

LEVELS: tuple[Verify, ...] = ("touch", "index", "full")
Point = namedtuple("Point", ["x", "y"])  # how a record of its own type name comes about


@cache
def _rich() -> bytes:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    record = {
        "w": w,
        "tied": w,
        "t": w.T,
        "empty": np.zeros((0, 3), np.int16),
        "q": PackedTensor.pack(np.array([1, -2, 3]).astype(ml_dtypes.int4)),
        "s": StringTensor.from_strings(["a", "", "xyz"]),
        "b": np.array([True, False, True]),
        "block": {"x": np.ones(2), "n": 3, "y": np.arange(3, dtype=np.int8), "deep": {"z": np.ones(1, np.int16)}},
        "layers": [{"k": np.full(4, i, np.uint8)} for i in range(2)],
        "bare": {"a": 1, "sub": {"b": 2}}, "apart": {"c": 3},
        "point": Point(np.ones(3, np.float16), 1.5),
        "none": None, "on": True, "note": "é", "blob": b"bytes", "big": 2**63, "list": [1, 2, 3], "nones": [None, None],
        "flags": [True, False], "texts": ("a", "", "b"), "blobs": [b"x", b""], "nothing": [],
    }  # fmt: skip
    return saved(record, metadata={"by": "test", "raw": b"meta", "tags": ["x", "y"]})


def rich() -> Forge:
    """Return an archive with something of everything, taken apart."""
    return Forge(_rich())


@cache
def _compact() -> bytes:
    w = np.arange(4, dtype=np.int16).reshape(2, 2)
    q = PackedTensor.pack(np.zeros(1, ml_dtypes.int4))
    inner = {"s": StringTensor.from_strings(["a"]), "q": q, "n": [1], "x": "y"}
    return saved({"w": w, "t": w.T, "m": inner, "c": b"d"}, metadata={"k": True})


def compact() -> Forge:
    """Return an archive with one of most things, small enough to try every byte of it, taken apart."""
    return Forge(_compact())


_W = np.arange(6, dtype=np.float32).reshape(2, 3)
PLAIN = {"w": _W, "same": _W, "z": np.ones(40, np.uint8), "m": {"z": np.ones(3, np.uint8)}, "n": 7}


@cache
def _plain() -> bytes:
    return saved(PLAIN)


def plain(*, front: bool = True, sealed: bool = True) -> Forge:
    return Forge(_plain(), front=front, sealed=sealed)


def sequence(count: int) -> Forge:
    """Return an archive of tensors t000, t001, ... with a payload of their own each, taken apart."""
    return Forge(saved({f"t{i:03}": np.full(16, i & 255, np.uint8) for i in range(count)}))


class Case(NamedTuple):
    """One rule broken.

    Attributes:
        rule: its number in FORMAT.md.
        what: what is wrong, for the test's id.
        change: how, on an archive taken apart; what it returns does not matter.
        message: a regular expression that the error's message matches.
        error: exactly the error's type.
        tensor: whose touch shows the fault, where it is one tensor's.
    """

    rule: str
    what: str
    change: Callable[[Forge], Any]
    message: str
    error: type[RecordError] = FormatError
    tensor: str = "w"


def broken(case: Case, archive: Forge) -> bytes:
    """Return an archive with the case's rule broken, sealed again."""
    case.change(archive)
    return archive.seal()


def cases(found: Iterable[Case]) -> pytest.MarkDecorator:
    """Return the mark that runs a test once for each case, under its rule's number."""
    return pytest.mark.parametrize("case", [pytest.param(c, id=f"{c.rule}-{c.what.replace(' ', '_')}") for c in found])


def refused(case: Case, action: Callable[..., Any], *arguments: Any) -> RecordError:
    """Check that an action on the arguments is refused as the case says, and return the error."""
    with pytest.raises(case.error, match=case.message) as caught:
        action(*arguments)
    assert type(caught.value) is case.error
    return caught.value
