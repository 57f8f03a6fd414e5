"""Archives of random strided tensors, and their elements by plain arithmetic: numbers of any size, bytes one by one."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from forge import Forge
from malformed import saved
from readers import Question

from zcrecord import dtypes

FAR = 2**56  # the largest stride that there is (R53)
ROOM = 512  # bytes of each payload
# By bytes of a float: bits of it that a copy by way of a number may change.
FLOATS = {
    2: ("01fc", "017c", "ff7f", "807f", "81ff", "0080"),
    4: ("e573a87f", "0100a0ff", "0100807f", "ffffffff", "00000080", "01000000"),
    8: ("010000000000f07f", "e5730000a0aaf4ff", "ffffffffffffffff", "0000000000000080", "0100000000000000"),
}


class Strided(NamedTuple):
    """One tensor and the payload that it lies in; `offset` is in bytes, strides in elements."""

    code: int
    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    payload: bytes


def elements_of(view: Strided) -> bytes:
    """Return a tensor's elements in C order."""
    item = view.bits // 8
    out = []
    for place in product(*map(range, view.shape)):
        at = view.offset + item * sum(i * step for i, step in zip(place, view.strides, strict=True))
        assert 0 <= at <= len(view.payload) - item
        out.append(view.payload[at : at + item])
    return b"".join(out)


@cache
def _base(count: int) -> Forge:
    return Forge(saved({f"t{i:04}": np.full(ROOM // 4, i, np.uint32).view(np.uint8) for i in range(count)}))


def archive_of(views: Sequence[Strided]) -> bytes:
    """Return an archive of tensors t0000, t0001, ..., each over a payload of its own, of `ROOM` bytes."""
    forged = Forge(_base(len(views)).seal())
    rows, starts = forged.columns["tensors"], forged.columns["payloads"]["offset"][forged.columns["tensors"]["payload"]]
    for i, view in enumerate(views):
        assert len(view.payload) == ROOM
        rows["dtype"][i], rows["bits"][i], rows["rank"][i] = view.code, view.bits, len(view.shape)
        rows["byte_offset"][i] = view.offset
        rows["dims"][i], rows["strides"][i] = forged.add("dims", view.shape), forged.add("strides", view.strides)
        forged.payload[int(starts[i]) : int(starts[i]) + ROOM] = view.payload
    return forged.digest().seal()


def questions(seed: int, count: int) -> list[tuple[Question, bytes]]:
    """Return archives of random strided tensors, 30 in each, and all their elements."""
    views = [*random_views(seed, count)]
    parts = [views[at : at + 30] for at in range(0, count, 30)]
    return [(Question(archive_of(part)), b"".join(map(elements_of, part))) for part in parts]


def told(elements: bytes) -> str:
    """Return the answer of a checker to `--elements`: the CRC-32 of their hexadecimal digits."""
    return f"{zlib.crc32(elements.hex().encode()):08x}"


def random_views(seed: int, count: int) -> Iterator[Strided]:
    """Yield tensors that all rules allow, of every dtype of whole bytes in turn, unknown ones among them."""
    rng = random.Random(seed)
    types = [(kind.code, max(kind.bits, 8)) for kind in dtypes.by_code.values() if kind.bits]
    for i in range(count):
        code, bits = types[i % len(types)] if rng.random() < 0.9 else (rng.randint(65, 255), 8 * rng.randint(1, 16))
        yield random_view(rng, code, bits)


def random_view(rng: random.Random, code: int, bits: int) -> Strided:
    """Return a tensor of a type: strides that repeat, overlap, go back, and of axes of one item anything at all."""
    item, room = bits // 8, ROOM // (bits // 8)
    shape: list[int] = []
    strides: list[int] = []
    low = high = 0
    for _ in range(rng.choice((0, 1, 2, 2, 3, 3, 4, 6, 64))):
        dim = rng.choice((1, 1, 2, 3, 5, rng.randint(1, 40)))
        step = rng.choice((0, 1, -1, 2, -3, rng.randint(-9, 9), rng.randint(-room, room)))
        reach = (dim - 1) * step
        if high - low + abs(reach) >= room or dim * prod(shape) > room:
            dim, reach = 1, 0
        if dim == 1:
            far = rng.choice((FAR, -FAR, 2**53 + 1, 1 - 2**53, FAR - 1, rng.randint(-FAR, FAR)))
            step = rng.choice((step, far))
        low, high = low + min(0, reach), high + max(0, reach)
        shape.append(dim)
        strides.append(step)
    first = rng.randint(-low, room - 1 - high)
    return Strided(code, bits, tuple(shape), tuple(strides), first * item, _octets(rng, code, item))


def _octets(rng: random.Random, code: int, item: int) -> bytes:
    """Return random bytes, of bools 0 and 1; of types as wide as a float half of them are `FLOATS`."""
    out = rng.randbytes(ROOM)
    if code == dtypes.by_name["bool"].code:
        return bytes(byte & 1 for byte in out)
    widths = [width for width in FLOATS if item % width == 0]
    if not widths:
        return out
    width = rng.choice(widths)
    odd = [bytes.fromhex(one) for one in FLOATS[width]]
    return b"".join(rng.choice((out[at : at + width], rng.choice(odd))) for at in range(0, ROOM, width))
