"""Archives whose tree of modules breaks one rule of FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from forge import NONE, Forge
from malformed import Case


def module(number: int, **fields: int) -> Callable[[Forge], Any]:
    return lambda f: f.set("modules", number, **fields)


def place(vector: str, key: str, value: int) -> Callable[[Forge], Any]:
    return lambda f: f.set(vector, key, place=value)


def swapped_places(f: Forge) -> None:
    """Give an attribute the place of a module, and the module one that nothing has."""
    f.set("modules", "bare", place=f.get("attributes", "on", "place"))


def by_module(change: Callable[[Any], Any]) -> Callable[[Forge], Any]:
    """Write out the order that is missing because it is the tensors' own, then change it."""

    def made(f: Forge) -> None:
        f.add("by_module", range(len(f.columns["tensors"])))
        change(f.columns["by_module"])

    return made


def reversed_parents(f: Forge) -> None:
    """Let a tensor of a later module come before one of an earlier one, without a `by_module` that says so."""
    tensors = f.columns["tensors"]
    tensors[[-1, -2]] = tensors[[-2, -1]]
    names = [f.name(row).encode() for row in tensors]
    f.columns["by_name"] = np.array(sorted(range(len(names)), key=names.__getitem__), "<u4")


BEFORE = "outside its parent's"
ROOT = r"^modules\[0\]: the record itself has no name, no parent, place 0, and holds all modules"
PLACES = "^modules: the places of a module's children are not 0, 1, 2, ... once each"
# fmt: off
CASES = [
    Case("R26", "reserved0", module(3, reserved0=1), "^modules: a reserved field is not zero"),
    Case("R26", "reserved1", module(3, reserved1=1 << 15), "^modules: a reserved field is not zero"),
    Case("R26", "reserved2", module(0, reserved2=1 << 31), "^modules: a reserved field is not zero"),
    Case("R37", "module 0 has a parent", module(0, parent=0), ROOT),
    Case("R37", "module 0 ends early", module(0, end=3), ROOT),
    Case("R37", "module 0 ends late", module(0, end=99), ROOT),
    Case("R37", "module 0 has a name", lambda f: f.rename("modules", 0, b"x"), ROOT),
    Case("R37", "module 0 has a key", module(0, key_size=1), ROOT),
    Case("R37", "module 0 has a place", module(0, place=1), ROOT),
    Case("R38", "its own parent", module(3, parent=3), r"^modules\[3\]: its parent 3 does not come before it"),
    Case("R38", "parent after it", module(3, parent=4), r"^modules\[3\]: its parent 4 does not come before it"),
    Case("R38", "parent NONE", module(3, parent=NONE), r"^modules\[3\]: its parent 4294967295 does not come before it"),
    Case("R38", "ends before itself", module(3, end=2), r"^modules\[3\]: its range ends at 2, " + BEFORE),
    Case("R38", "ends at itself", module(3, end=3), r"^modules\[3\]: its range ends at 3, " + BEFORE),
    Case("R38", "ends after its parent", module(2, end=4), r"^modules\[2\]: its range ends at 4, " + BEFORE),
    Case("R38", "ends at NONE", module(9, end=NONE), r"^modules\[9\]: its range ends at 4294967295, " + BEFORE),
    Case("R39", "no child behind it", module(2, parent=0), "^modules: not in pre-order, a module with descendants is"),
    Case("R39", "descendants claimed", module(4, end=6), "^modules: not in pre-order, a module with descendants is"),
    Case("R39", "no sibling behind it", module(5, parent=0), "^modules: not in pre-order, a module is not followed"),
    Case("R41", "kind 0", module(3, kind=0), "^modules: kind 0 is invalid"),
    Case("R42", "by_module beyond the tensors", by_module(lambda o: o.__setitem__(3, 13)), "^by_module: an item is"),
    Case("R42", "by_module NONE", by_module(lambda o: o.__setitem__(0, NONE)), "^by_module: an item is no tensor"),
    Case("R42", "by_module has one twice", by_module(lambda o: o.__setitem__(1, 0)), r"^by_module: not strictly"),
    Case("R42", "by_module out of order", by_module(lambda o: o.__setitem__([0, 1], [1, 0])),
         r"^by_module: not strictly ascending"),
    Case("R42", "by_module across modules", by_module(lambda o: o.__setitem__([6, 7], [7, 6])),
         r"^by_module: not strictly"),
    Case("R42", "by_module missing", reversed_parents, "^by_module is missing, but tensors are not in the order of"),
    Case("R43", "first_tensor", module(4, first_tensor=9), "^modules: first_tensor does not match the tensors'"),
    Case("R43", "first_tensor of module 0", module(0, first_tensor=1), "^modules: first_tensor does not match"),
    Case("R43", "first_tensor of a module without", module(6, first_tensor=0), "^modules: first_tensor does not match"),
    Case("R43", "first_attribute", module(4, first_attribute=0), "^modules: first_attribute does not match the"),
    Case("R43", "first_attribute NONE", module(9, first_attribute=NONE), "^modules: first_attribute does not match"),
    Case("R44", "place of a tensor twice", place("tensors", "w", 1), PLACES),
    Case("R44", "place of a tensor beyond", place("tensors", "block.x", 4), PLACES),
    Case("R44", "place of a tensor at NONE", place("tensors", "point.x", NONE), PLACES),
    Case("R44", "place of a tensor in the next module", place("tensors", "w", 25), PLACES),
    Case("R44", "place of a module", place("modules", "block", 8), PLACES),
    Case("R44", "place of a module NONE", place("modules", "layers", NONE), PLACES),
    Case("R44", "module and attribute in one place", swapped_places, PLACES),
    Case("R44", "place of an attribute", place("attributes", "n", 9), PLACES),
]
# The same rules where an archive is so plain that less needs to be checked: no attributes, or module 0 alone.
FLAT = [
    Case("R43", "first_tensor", module(0, first_tensor=1), "^modules: first_tensor does not match the tensors'"),
    Case("R43", "first_attribute", module(0, first_attribute=1), "^modules: first_attribute does not match"),
    Case("R44", "place twice", place("tensors", "t001", 0), PLACES),
    Case("R44", "place beyond", place("tensors", "t003", 4), PLACES),
    Case("R44", "place NONE", place("tensors", "t000", NONE), PLACES),
    Case("R42", "by_module out of order", lambda f: f.add("by_module", [0, 2, 1, 3]), r"^by_module: not strictly"),
    Case("R42", "by_module beyond", lambda f: f.add("by_module", [0, 1, 2, 4]), "^by_module: an item is no tensor"),
]
NESTED = [
    Case("R43", "first_tensor", module(1, first_tensor=0), "^modules: first_tensor does not match the tensors'"),
    Case("R43", "first_attribute", module(1, first_attribute=1), "^modules: first_attribute does not match"),
    Case("R44", "place of a module", place("modules", "m", 0), PLACES),
    Case("R44", "place of a tensor", place("tensors", "m.x", 1), PLACES),
]
