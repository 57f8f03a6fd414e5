"""The module tree: pre-order, depth, places of children, and the counts by which a module finds what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from forge import NONE, STRUCTS, Forge
from malformed import Case, cases, plain, refused, rich, saved, sequence

import zcrecord
from zcrecord import FormatError, LimitError

# The modules of `rich`: 0 itself, 1 block, 2 block.deep, 3 layers, 4 layers.0, 5 layers.1, 6 bare, 7 bare.sub, ...


def module(number: int, **fields: int) -> Callable[[Forge], Any]:
    """Change fields of one module."""
    return lambda f: f.set("modules", number, **fields)


def place(vector: str, key: str, value: int) -> Callable[[Forge], Any]:
    """Change the place of one child."""
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
    Case("R39", "no child behind it", module(2, parent=0),
         "^modules: not in pre-order, a module with descendants is not"),
    Case("R39", "descendants claimed", module(4, end=6),
         "^modules: not in pre-order, a module with descendants is not"),
    Case("R39", "no sibling behind it", module(5, parent=0),
         "^modules: not in pre-order, a module is not followed by its"),
    Case("R41", "kind 0", module(3, kind=0), "^modules: kind 0 is invalid"),
    Case("R42", "by_module beyond the tensors", by_module(lambda o: o.__setitem__(3, 13)),
         "^by_module: an item is no tensor"),
    Case("R42", "by_module NONE", by_module(lambda o: o.__setitem__(0, NONE)), "^by_module: an item is no tensor"),
    Case("R42", "by_module has one twice", by_module(lambda o: o.__setitem__(1, 0)),
         r"^by_module: not strictly ascending by \(parent"),
    Case("R42", "by_module out of order", by_module(lambda o: o.__setitem__([0, 1], [1, 0])),
         r"^by_module: not strictly ascending"),
    Case("R42", "by_module across modules", by_module(lambda o: o.__setitem__([6, 7], [7, 6])),
         r"^by_module: not strictly"),
    Case("R42", "by_module missing", reversed_parents,
         "^by_module is missing, but tensors are not in the order of their"),
    Case("R43", "first_tensor", module(4, first_tensor=9),
         "^modules: first_tensor does not match the tensors' parents"),
    Case("R43", "first_tensor of module 0", module(0, first_tensor=1), "^modules: first_tensor does not match"),
    Case("R43", "first_tensor of a module without", module(6, first_tensor=0), "^modules: first_tensor does not match"),
    Case("R43", "first_attribute", module(4, first_attribute=0),
         "^modules: first_attribute does not match the attributes'"),
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
# fmt: on


@cases(CASES)
def test_refuses_tree_of_modules(case: Case) -> None:
    archive = rich()
    case.change(archive)
    data = archive.seal()
    refused(case, lambda: zcrecord.load_record(data))
    refused(case, lambda: zcrecord.load_record(data, verify="full"))


@cases(CASES)
def test_touch_refuses_tree_of_modules_when_it_is_asked_for(case: Case) -> None:
    archive = rich()
    case.change(archive)
    record = zcrecord.load_record(archive.seal(), verify="touch")
    assert record["block.deep.z"].tolist() == [1]
    for action in (record.tree, lambda: record.modules, lambda: record.attributes, lambda: record.metadata):
        refused(case, action)
    refused(case, record.verify)
    refused(case, record.content_digest)


# The same rules where an archive is so plain that less needs to be checked: no attributes, or module 0 alone.
# fmt: off
FLAT = [
    Case("R43", "first_tensor", module(0, first_tensor=1),
         "^modules: first_tensor does not match the tensors' parents"),
    Case("R43", "first_attribute", module(0, first_attribute=1), "^modules: first_attribute does not match"),
    Case("R44", "place twice", place("tensors", "t001", 0), PLACES),
    Case("R44", "place beyond", place("tensors", "t003", 4), PLACES),
    Case("R44", "place NONE", place("tensors", "t000", NONE), PLACES),
    Case("R42", "by_module out of order", lambda f: f.add("by_module", [0, 2, 1, 3]),
         r"^by_module: not strictly ascending"),
    Case("R42", "by_module beyond", lambda f: f.add("by_module", [0, 1, 2, 4]), "^by_module: an item is no tensor"),
]
NESTED = [
    Case("R43", "first_tensor", module(1, first_tensor=0),
         "^modules: first_tensor does not match the tensors' parents"),
    Case("R43", "first_attribute", module(1, first_attribute=1), "^modules: first_attribute does not match"),
    Case("R44", "place of a module", place("modules", "m", 0), PLACES),
    Case("R44", "place of a tensor", place("tensors", "m.x", 1), PLACES),
]
# fmt: on


@cases(FLAT)
def test_refuses_children_of_a_flat_record(case: Case) -> None:
    archive = sequence(4)
    case.change(archive)
    refused(case, zcrecord.load_record, archive.seal())


@cases(NESTED)
def test_refuses_children_of_a_record_without_attributes(case: Case) -> None:
    archive = Forge(saved({"w": np.ones(1), "m": {"x": np.ones(1)}}))
    case.change(archive)
    refused(case, zcrecord.load_record, archive.seal())


def test_places_are_the_order_of_the_tree_and_not_that_of_the_tensors() -> None:
    """R44."""
    archive = sequence(4)
    archive.columns["tensors"]["place"] = [3, 2, 1, 0]
    record = zcrecord.load_record(archive.seal())
    assert list(record) == ["t000", "t001", "t002", "t003"]
    assert list(record.tree()) == ["t003", "t002", "t001", "t000"]


def chain(depth: int) -> bytes:
    """Return an archive of modules nested in each other, module 0 included."""
    archive = Forge(saved({}))
    rows = np.zeros(depth, STRUCTS["Module"])
    rows["kind"], rows["end"], rows["key_size"] = 1, depth, 1
    rows["parent"] = np.arange(depth) - 1
    rows[0] = archive.columns["modules"][0]
    rows["end"][0] = depth
    for i in range(1, depth):
        rows["name"][i], rows["name_size"][i] = archive.text(b".".join([b"a"] * i))
    archive.columns["modules"] = rows
    return archive.seal()


def test_modules_are_nested_at_most_100_deep() -> None:
    """R40."""
    assert len(zcrecord.load_record(chain(100)).modules) == 100
    with pytest.raises(LimitError, match=r"^modules: nested more than 100 deep$"):
        zcrecord.load_record(chain(101))


def test_depth_is_bounded_in_a_tree_of_many_branches() -> None:
    """R40: the deepest module is none of the last."""
    record: dict[str, Any] = {}
    for _ in range(98):
        record = {"a": record}
    archive = Forge(saved({"x": {}, "deep": record, "y": {"z": {}}}))
    zcrecord.load_record(archive.seal())
    rows = archive.columns["modules"]
    last = archive.row("modules", "y") - 1
    extra = np.insert(rows, last + 1, rows[last])
    extra["parent"][last + 1] = last
    extra["parent"][last + 2 :] += (extra["parent"][last + 2 :] > last).astype("<u4")
    extra["end"][extra["end"] > last] += 1
    archive.columns["modules"] = extra
    with pytest.raises(LimitError, match=r"^modules: nested more than 100 deep$"):
        zcrecord.load_record(archive.seal())


def test_module_of_unknown_kind_is_read_as_a_mapping() -> None:
    """R41."""
    archive = plain()
    archive.set("modules", "m", kind=200)
    record = zcrecord.load_record(archive.seal())
    assert list(record.tree()["m"]) == ["z"]
    assert record.modules["m"].kind == "mapping"


def test_by_module_may_say_what_could_be_left_out() -> None:
    """R42: only writers must leave it out."""
    archive = plain()
    archive.add("by_module", range(4))
    assert list(zcrecord.load_record(archive.seal()).tree()) == list(zcrecord.load_record(plain().seal()).tree())


def test_tensors_may_be_saved_in_another_order_than_that_of_their_modules() -> None:
    """R42."""
    archive = rich()
    reversed_parents(archive)
    count = len(archive.columns["tensors"])
    archive.add("by_module", [*range(count - 2), count - 1, count - 2])
    record = zcrecord.load_record(archive.seal())
    assert list(record)[-2:] == ["point.x", "layers.1.k"]
    with pytest.raises(FormatError, match=r"^by_module: not strictly ascending"):
        zcrecord.load_record(_with(archive, [*range(count)]).seal())


def _with(archive: Forge, order: list[int]) -> Forge:
    archive.columns["by_module"] = np.array(order, "<u4")
    return archive
