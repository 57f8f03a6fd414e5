"""Archives with a wrong payload, which only the level full finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from forge import Forge
from malformed import Case

from zcrecord import IntegrityError
from zcrecord.dtypes import by_name


def flipped(key: str, vector: str = "tensors") -> Callable[[Forge], Any]:
    """Change one bit of a payload's first byte."""

    def change(f: Forge) -> None:
        f.payload[f.bytes_of(key, vector).start] ^= 1

    return change


def written(key: str, at: int, value: int) -> Callable[[Forge], Any]:
    """Write one byte of a payload, and make the digests right again."""

    def change(f: Forge) -> None:
        where = f.bytes_of(key)
        f.payload[where.stop + at if at < 0 else where.start + at] = value
        f.digest()

    return change


def packed(kind: str, count: int, last: int) -> Callable[[Forge], Any]:
    """Call `b`'s three bytes elements of a narrow type, the last byte `last`."""
    code, bits = by_name[kind].code, by_name[kind].bits

    def change(f: Forge) -> None:
        f.set("tensors", "b", dtype=code, bits=bits, dims=f.add("dims", [count]), rank=1)
        written("b", -1, last)(f)

    return change


def ends(*values: int) -> Callable[[Forge], Any]:
    """Write the ends of the strings "a", "", "xyz": 4 bytes, zeros to 8, then 0, 1, 1, 4."""

    def change(f: Forge) -> None:
        where = f.bytes_of("s")
        f.payload[where.start + 8 : where.stop] = np.array(values, "<u8").tobytes()
        f.digest()

    return change


DIGEST = r"payload \[0x[0-9a-f]+, 0x[0-9a-f]+\): its digest does not match; the file is damaged, copy it again$"
ENDS = "^tensor 's': the ends of its strings do not ascend from 0 to the end of their bytes$"
PAD = "^tensor 'b': the pad bits after its last element are not zero$"
# fmt: off
STRINGS = [
    Case("R71", "first end is not 0", ends(1, 1, 1, 4), ENDS),
    Case("R71", "ends descend", ends(0, 2, 1, 4), ENDS),
    Case("R71", "last end past the bytes", ends(0, 1, 1, 9), ENDS),
    Case("R71", "last end at 2^64-1", ends(0, 1, 1, 2**64 - 1), ENDS),
    Case("R71", "last end 8 short", ends(0, 0, 0, 0), ENDS),
    Case("R71", "padding", written("s", 4, 1), "^tensor 's': the padding after its strings is not zero$"),
    Case("R71", "last byte of the padding", written("s", 7, 1), "^tensor 's': the padding after its strings is not"),
]
CASES = [
    *STRINGS,
    Case("R70", "bits 4 to 7 behind three of 4", written("q", -1, 0x13), "^tensor 'q': the pad bits after its last"),
    Case("R70", "top bit behind three of 4", written("q", -1, 0x83), "^tensor 'q': the pad bits after its last"),
    Case("R70", "behind three of 6", packed("float6_e2m3fn", 3, 4), PAD),
    Case("R70", "behind five of 4", packed("uint4", 5, 0x10), PAD),
    Case("R70", "behind nine of 2", packed("int2", 9, 4), PAD),
    Case("R72", "bool of 2", written("b", 1, 2), "^tensor 'b': a bool is neither 0 nor 1$"),
    Case("R72", "bool of 255", written("b", -1, 255), "^tensor 'b': a bool is neither 0 nor 1$"),
    Case("R73", "byte of a tied tensor", flipped("w"), "^tensor 'w': " + DIGEST, IntegrityError),
    Case("R73", "byte of a string tensor", flipped("s"), "^tensor 's': " + DIGEST, IntegrityError),
    Case("R73", "byte of a packed tensor", flipped("q"), "^tensor 'q': " + DIGEST, IntegrityError),
    Case("R73", "byte of an attribute", flipped("blob", "attributes"), "^" + DIGEST, IntegrityError),
    Case("R73", "byte of metadata", flipped("raw", "metadata"), "^" + DIGEST, IntegrityError),
    Case("R73", "digest", lambda f: f.set("payloads", 1, digest=0), "^tensor 'q': " + DIGEST, IntegrityError),
]
