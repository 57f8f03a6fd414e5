"""Changes of ONNX models that stay protobuf: fields are moved, repeated, left out or changed, and lengths made right.

Knows the wire format alone, and of the package nothing: what is imported before it is instrumented guides no fuzzer.
A field of bytes that reads as a message is taken for one, which may be a mistake: so is what a fuzzer tries.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Raw = Callable[[bytes], bytes]
# Number, wire type, and what it holds: a number, fixed bytes, bytes or a message.
Node = tuple[int, int, "int | bytes | list[Node]"]
DEEPEST = 12
NUMBERS = (*range(1, 15), 16, 20, 21, 22, 25, 26, 0, 1 << 29)
FIXED = {1: 8, 5: 4}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise IndexError


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def parse(data: bytes, depth: int = 0) -> list[Node] | None:
    """Return the fields of a message, those of the messages in it likewise; None if it is none."""
    nodes: list[Node] = []
    at = 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            number, wire = key >> 3, key & 7
            if wire == 0:
                value, at = _varint(data, at)
                nodes.append((number, wire, value))
                continue
            size = FIXED.get(wire)
            if wire == 2:
                size, at = _varint(data, at)
            if size is None or not number or at + size > len(data):
                return None
            part = data[at : at + size]
            at += size
            inner = parse(part, depth + 1) if wire == 2 and len(part) > 1 and depth < DEEPEST else None
            nodes.append((number, wire, part if inner is None else inner))
    except IndexError:
        return None
    return nodes


def encoded(nodes: list[Node]) -> bytes:
    out = []
    for number, wire, value in nodes:
        out.append(_encoded(number << 3 | wire))
        if isinstance(value, int):
            out.append(_encoded(value & ((1 << 64) - 1)))
            continue
        data = encoded(value) if isinstance(value, list) else value
        if wire == 2:
            out.append(_encoded(len(data)))
        out.append(data)
    return b"".join(out)


def _lists(nodes: list[Node]) -> list[list[Node]]:
    found = [nodes]
    for _, _, value in nodes:
        if isinstance(value, list):
            found += _lists(value)
    return found


def _telling(rng: random.Random, old: int) -> int:
    small = rng.randrange(24)
    return (small, old + 1, max(0, old - 1), 1 << rng.randrange(64), (1 << 64) - 1 - small)[rng.randrange(5)]


def _changed(node: Node, rng: random.Random, raw: Raw) -> Node:
    """Return a field with another value, sometimes another number."""
    number, wire, value = node
    if rng.randrange(6) == 0:
        return rng.choice(NUMBERS), wire, value
    if isinstance(value, int):
        return number, wire, _telling(rng, value)
    if isinstance(value, list):
        return number, wire, [node] if rng.randrange(2) else raw(encoded(value))
    if wire != 2:
        return number, wire, raw(value)[: len(value)].ljust(len(value), b"\0")
    if rng.randrange(4) == 0:  # lengths are what values are checked by
        return number, wire, value[: rng.randrange(len(value) + 1)] + bytes(rng.randrange(9))
    return number, wire, raw(value)


def _change(lists: list[list[Node]], rng: random.Random, raw: Raw) -> None:
    here = rng.choice(lists)
    if not here:
        return
    at = rng.randrange(len(here))
    match rng.randrange(8):
        case 0:
            del here[at]
        case 1:
            here.insert(rng.randrange(len(here) + 1), here[at])
        case 2:
            there = rng.randrange(len(here))
            here[at], here[there] = here[there], here[at]
        case 3:
            other = rng.choice(lists)
            here.insert(at, rng.choice(other) if other else (rng.choice(NUMBERS), 0, rng.randrange(24)))
        case _:
            here[at] = _changed(here[at], rng, raw)


def mutated(data: bytes, rng: random.Random, raw: Raw) -> bytes:
    """Return another model, or what looks like one; the same for the same state of `rng`."""
    nodes = parse(data) if rng.randrange(16) else None
    if nodes is None:
        return raw(data)
    lists = _lists(nodes)
    try:
        for _ in range(1 + rng.randrange(2) * rng.randrange(4)):
            _change(lists, rng, raw)
        return encoded(nodes)
    except RecursionError:  # a message was put into itself
        return raw(data)
