"""Archives in which a span of text, or a name, breaks one rule of FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from forge import Forge
from malformed import Case


class Target(NamedTuple):
    """Something that has a span, and how the reader speaks of it."""

    what: str
    put: Callable[[Forge, int, int], Any]  # a span in its place
    message: str
    may_be_empty: bool = False
    may_hold_nul: bool = False


def field(vector: str, key: str, name: str = "name") -> Callable[[Forge, int, int], Any]:
    """Put a span into one field of the row with a name."""
    return lambda f, start, size: f.set(vector, key, **{name: start, f"{name}_size": size})


def value(vector: str, key: str) -> Callable[[Forge, int, int], Any]:
    """Put a span into the value of an attribute that is one text."""
    return lambda f, start, size: f.set(vector, key, value=start | size << 32)


def item(f: Forge, start: int, size: int) -> None:
    """Put a span into the second item of a list of texts."""
    at = f.get("attributes", "texts", "value") & 0xFFFFFFFF
    f.columns["words"][at + 1] = start | size << 32


TARGETS = [
    Target("name of a tensor", field("tensors", "w"), r"^tensors\[0\]: its name "),
    Target("name of a module", field("modules", "block"), r"^modules\[1\]: its name "),
    Target("name of module 0", field("modules", ""), r"^modules\[0\]: its name ", may_be_empty=True),
    Target("type name", field("modules", "point", "type_name"), r"^modules\[\d\]: its type name ", may_be_empty=True),
    Target("name of an attribute", field("attributes", "note"), r"^attributes\[\d\]: its name "),
    Target("name of metadata", field("metadata", "raw"), r"^metadata\[1\]: its name "),
    Target("text", value("attributes", "note"), "^attributes: a text ", may_be_empty=True, may_hold_nul=True),
    Target("text in a list", item, "^attributes: a text ", may_be_empty=True, may_hold_nul=True),
    Target("text of metadata", value("metadata", "by"), "^metadata: a text ", may_be_empty=True, may_hold_nul=True),
]


def sort_names(f: Forge) -> None:
    """Bring `by_name` in order again."""
    names = [f.name(row).encode() for row in f.columns["tensors"]]
    f.columns["by_name"] = np.array(sorted(range(len(names)), key=names.__getitem__), "<u4")


def tensor(key: str, name: bytes, key_size: int) -> Callable[[Forge], Any]:
    def change(f: Forge) -> None:
        f.rename("tensors", key, name).set("tensors", f.row("tensors", name.decode()), key_size=key_size)
        sort_names(f)

    return change


def module(key: str, name: bytes, key_size: int) -> Callable[[Forge], Any]:
    """Rename a module, and not what is in it."""
    return lambda f: f.rename("modules", key, name).set("modules", name.decode(), key_size=key_size)


def same_module(f: Forge) -> None:
    """Give a module of module 0 the full name that another's child has."""
    f.rename("modules", "apart", b"bare.sub").set("modules", f.row("modules", "bare.sub") + 1, key_size=8)


# fmt: off
FULL_NAMES = [
    Case("R34", "key of a tensor in module 0 is a part", tensor("w", b"a.w", 1), "^tensors: the name of one in"),
    Case("R34", "key of a module in module 0 is a part", module("bare", b"a.bare", 4), "^modules: the name of one in"),
    Case("R34", "no dot", tensor("block.x", b"block_x", 1), "^tensors: 'block_x' is not its module's name, a dot and"),
    Case("R34", "another module's name", tensor("block.x", b"blocc.x", 1), "^tensors: 'blocc.x' is not its module's"),
    Case("R34", "key longer than what follows the dot", tensor("block.x", b"block.x", 3), "^tensors: 'block.x' is"),
    Case("R34", "key shorter than what follows the dot", tensor("block.x", b"block.xy", 1), "^tensors: 'block.xy' is"),
    Case("R34", "name shorter than its module's", tensor("block.x", b"b.x", 1), "^tensors: 'b.x' is not its module's"),
    Case("R34", "module in a module without a dot", module("bare.sub", b"bare-sub", 3), "^modules: 'bare-sub' is not"),
    Case("R34", "module with another's name", module("bare.sub", b"bore.sub", 3), "^modules: 'bore.sub' is not its"),
    Case("R34", "module in a module without a key", module("bare.sub", b"bare.", 0), "^modules: 'bare.' is not its"),
    Case("R35", "module of another's full name", same_module, r"^modules\[\d\]: another module has its name"),
    Case("R36", "attribute and tensor", lambda f: f.rename("attributes", "note", b"w"), r"^modules\[0\]: two of its"),
    Case("R36", "attribute and attribute", lambda f: f.rename("attributes", "note", b"on"), r"^modules\[0\]: .* key"),
    Case("R36", "attribute and module", lambda f: f.rename("attributes", "note", b"block"), r"^modules\[0\]: .* key"),
    Case("R36", "module and tensor", tensor("w", b"block", 5), r"^modules\[0\]: two of its children have the key"),
    Case("R36", "in another module", lambda f: f.rename("attributes", "n", b"x"), r"^modules\[1\]: .* children have"),
    Case("R65", "metadata out of order", lambda f: f.rename("metadata", "raw", b"a"), r"^metadata\[1\]: names are"),
    Case("R65", "metadata of one name", lambda f: f.rename("metadata", "raw", b"by"), r"^metadata\[1\]: names are"),
]
