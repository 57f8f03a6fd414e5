"""Archives in which an attribute or metadata breaks one rule of FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge import NONE, Forge
from malformed import Case


def attribute(key: str, **fields: int) -> Callable[[Forge], Any]:
    return lambda f: f.set("attributes", key, **fields)


def metadata(key: str, **fields: int) -> Callable[[Forge], Any]:
    return lambda f: f.set("metadata", key, **fields)


def item(key: str, word: int, vector: str = "attributes") -> Callable[[Forge], Any]:
    """Change the last word of a list."""

    def change(f: Forge) -> None:
        value = f.get(vector, key, "value")
        f.columns["words"][(value & NONE) + (value >> 32) - 1] = word

    return change


def swapped(f: Forge) -> None:
    rows, at = f.columns["attributes"], f.row("attributes", "on")
    rows[[at, at + 1]] = rows[[at + 1, at]]


def list_of(start: int, count: int, beyond: bool = False) -> Callable[[Forge], Any]:
    """Let the list of integers lie elsewhere, `beyond` the words."""
    return lambda f: attribute("list", value=start + len(f.columns["words"]) * beyond | count << 32)(f)


def past_the_last(vector: str, key: str) -> Callable[[Forge], Any]:
    """Name the payload that would come next."""
    return lambda f: f.set(vector, key, value=len(f.columns["payloads"]))


POOL = r"^attributes: a list leaves the pool of \d+ words"
ORDER = r"^attributes\[\d\]: not strictly ascending by parent and place"
PLACED = r"^metadata\[1\]: it has a parent or a place"
# fmt: off
CASES = [
    Case("R26", "reserved0", attribute("on", reserved0=1), "^attributes: a reserved field is not zero"),
    Case("R26", "reserved1", attribute("on", reserved1=1 << 31), "^attributes: a reserved field is not zero"),
    Case("R26", "reserved0 of metadata", metadata("by", reserved0=1 << 15), "^metadata: a reserved field is not zero"),
    Case("R26", "reserved1 of metadata", metadata("by", reserved1=1), "^metadata: a reserved field is not zero"),
    Case("R64", "parent behind the modules", attribute("c", parent=10), r"^attributes\[\d+\]: its parent 10 is no"),
    Case("R64", "parent NONE", attribute("on", parent=NONE), r"^attributes\[1\]: its parent 4294967295 is no module"),
    Case("R64", "out of order", swapped, ORDER),
    Case("R64", "two in one place", lambda f: attribute("on", place=f.get("attributes", "note", "place"))(f), ORDER),
    Case("R64", "parents descend", attribute("on", parent=9), r"^attributes\[2\]: not strictly ascending by parent"),
    Case("R65", "metadata with a parent", metadata("raw", parent=0), PLACED),
    Case("R65", "metadata with a place", metadata("raw", place=1), PLACED),
    Case("R66", "type 7", attribute("on", type=7), r"^attributes\[1\]: type 7 or form 0 is not known"),
    Case("R66", "type 255", attribute("on", type=255), r"^attributes\[1\]: type 255 or form 0 is not known"),
    Case("R66", "form 3", attribute("on", form=3), r"^attributes\[1\]: type 1 or form 3 is not known"),
    Case("R66", "type of metadata", metadata("by", type=9), r"^metadata\[0\]: type 9 or form 0 is not known"),
    Case("R66", "form of metadata", metadata("raw", form=200), r"^metadata\[1\]: type 6 or form 200 is not known"),
    Case("R67", "list ends behind the words", list_of(-1, 2, beyond=True), POOL),
    Case("R67", "list starts behind the words", list_of(1, 0, beyond=True), POOL),
    Case("R67", "list at 2^32-1", list_of(NONE, 1), POOL),
    Case("R67", "list of texts", attribute("texts", value=NONE | 1 << 32), POOL),
    Case("R67", "list of metadata", metadata("tags", value=NONE | 1 << 32), r"^metadata: a list leaves the pool of"),
    Case("R68", "nil of 1", attribute("none", value=1), "^attributes: a nil is more than 0"),
    Case("R68", "nil of 2^63", attribute("none", value=2**63), "^attributes: a nil is more than 0"),
    Case("R68", "nil in a list", item("nones", 1), "^attributes: a nil is more than 0"),
    Case("R68", "bool of 2", attribute("on", value=2), "^attributes: a bool is more than 1"),
    Case("R68", "bool in a list", item("flags", 2**32), "^attributes: a bool is more than 1"),
    Case("R68", "bool of metadata", metadata("by", type=1, value=2), "^metadata: a bool is more than 1"),
    Case("R68", "payload one past the last", past_the_last("attributes", "blob"), "^attributes: a payload is not in"),
    Case("R68", "payload of metadata one past the last", past_the_last("metadata", "raw"), "^metadata: a payload is"),
    Case("R68", "payload behind the payloads", attribute("blob", value=99), "^attributes: a payload is not in the"),
    Case("R68", "payload of 2^32", attribute("blob", value=2**32), "^attributes: a payload is not in the index"),
    Case("R68", "payload of 2^64-1", attribute("blob", value=2**64 - 1), "^attributes: a payload is not in the index"),
    Case("R68", "payload in a list", item("blobs", NONE - 1), "^attributes: a payload is not in the index"),
    Case("R68", "payload of metadata", metadata("raw", value=99), "^metadata: a payload is not in the index"),
]
