"""Archives that no fuzzer comes by, and that are too large to be kept: thousands of names, names of one hash."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
from forge import Forge
from malformed import saved

TOP = (1 << 64) - 1
MIX = 0x9E3779B97F4A7C15  # of the hash by which zcrecord.codec.index looks for names that are there twice


def crafted() -> Iterator[bytes]:
    yield from (start.ljust(200, b"\1") for start in (b"\x28\xb5\x2f\xfd", b"GGUF", b"\x08\x08\x12"))
    yield from _many_names()
    yield saved(dict.fromkeys(_of_one_hash(16), 1))
    yield _scalar_with_strides()
    yield _text_at_the_end()
    yield _module_of_another_name()
    yield _one_module_too_deep()


def _many_names() -> Iterator[bytes]:
    """Names that differ at once, late, or very late, in order and not; more than are compared together, and fewer."""
    starts = ["", "x" * 40, "x" * 70]
    for start in starts:
        yield from _in_every_order([f"{start}{i:04}" for i in range(80)])
    yield from _in_every_order([f"{i:04}{'x' * 40}" for i in range(70)] + [f"y{'x' * 40}{i:04}" for i in range(20)])
    yield from _in_every_order([f"t{i:05}" for i in range(2100)])


def _in_every_order(names: list[str]) -> Iterator[bytes]:
    data = saved(dict.fromkeys(names, np.zeros(0, np.uint8)))
    yield data
    for at in (0, len(names) - 2):
        forged = Forge(data)
        order = forged.columns["by_name"]
        order[[at, at + 1]] = order[[at + 1, at]]
        yield forged.seal()
        forged = Forge(data)
        row = forged.columns["tensors"]
        for field in ("name", "name_size", "key_size"):
            row[field][at] = row[field][at + 1]
        yield forged.seal()


def _of_one_hash(size: int) -> list[str]:
    """Return two names of so many bytes and one hash, which are not one name."""
    rng = random.Random(1)

    def mixed(word: bytes) -> int:
        product = (size ^ int.from_bytes(word, "big")) * MIX & TOP
        return product ^ product >> 29

    while True:
        first, other, tail = (bytes(rng.choices(range(97, 123), k=8)) for _ in range(3))
        fitting = (mixed(first) ^ mixed(other) ^ int.from_bytes(tail, "big")).to_bytes(8, "big")
        if all(33 <= c < 127 and c != ord(".") for c in fitting):
            return [(first + tail).decode(), (other + fitting).decode()]


def _scalar_with_strides() -> bytes:
    """R52: the strides of a scalar are none, and so is the pool of strides, with others of higher rank beside it."""
    forged = Forge(saved({"s": np.float32(1), "v": np.ones(3, np.float32)}))
    return forged.set("tensors", "s", strides=0).seal()


def _text_at_the_end() -> bytes:
    """The pool of texts ends the index, so that there is nothing behind it where the index is all there is."""
    names = {f"{i}{'y' * (i % 9)}": np.zeros(0, np.uint8) for i in range(80)}  # more than are compared one by one
    forged = Forge(saved({"m": {"a": 1, "b": np.ones(1)}, "n": {"c": "text"}, "names": names}))
    forged.columns["text"] = forged.columns.pop("text")
    return forged.seal()


def _module_of_another_name() -> bytes:
    """R34: more names than are compared one by one start with another module's name, which differs late."""
    module = "m" * 40
    forged = Forge(saved({module: {f"t{i:03}": np.zeros(0, np.uint8) for i in range(80)}}))
    return forged.rename("modules", module, b"m" * 39 + b"n").seal()


def _one_module_too_deep() -> bytes:
    """R40: 101 modules, each in the one before it."""
    record: dict[str, object] = {}
    for _ in range(99):
        record = {"m": record}
    forged = Forge(saved(record))
    rows = forged.columns["modules"]
    last = rows[-1:].copy()
    last["parent"] = len(rows) - 1
    forged.add("modules", last)
    forged.columns["modules"]["end"] = len(rows) + 1
    return forged.seal()
