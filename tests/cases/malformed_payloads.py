"""Archives in which a payload's row breaks one rule of FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from forge import Forge
from malformed import Case


def payload(number: int, **fields: int) -> Callable[[Forge], Any]:
    """Change fields of one payload of `sequence(4)`: 16 bytes at 0, 64, 128 and 192 each."""
    return lambda f: f.set("payloads", number, **fields)


def hole(before: int) -> Callable[[Forge], Any]:
    def change(f: Forge) -> None:
        f.payload[64 * before : 64 * before] = bytes(64)
        f.columns["payloads"]["offset"][before:] += np.uint64(64)

    return change


EMPTY = r"^payload \[.*\) is empty, or larger than an archive may be"
PAST = r"^payload \[0x[0-9a-f]+, 0x[0-9a-f]+\) ends past the region of payloads \(0x[0-9a-f]+\); the file is damaged"
ORDER = r"^payload \[0x[0-9a-f]+, 0x[0-9a-f]+\) overlaps the one before it, or is out of order"
HOLE = r"^payload \[0x[0-9a-f]+, 0x[0-9a-f]+\) comes after a hole of 64 bytes or more"
# fmt: off
CASES = [
    Case("R56", "no bytes", payload(1, nbytes=0), EMPTY, tensor="t001"),
    Case("R56", "2^56+1 bytes", payload(1, nbytes=2**56 + 1), EMPTY, tensor="t001"),
    Case("R56", "2^64-1 bytes", payload(1, nbytes=2**64 - 1), EMPTY, tensor="t001"),
    Case("R56", "at 2^56+64", payload(1, offset=2**56 + 64), EMPTY, tensor="t001"),
    Case("R56", "end wraps to 0", payload(1, offset=2**64 - 64, nbytes=64), EMPTY, tensor="t001"),
    Case("R56", "a byte of the trailer", payload(2, nbytes=128 + 1), PAST, tensor="t002"),
    Case("R56", "a byte past the archive", payload(1, nbytes=256 + 64 - 64 + 1), PAST, tensor="t001"),
    Case("R56", "at 2^56", payload(1, offset=2**56), PAST, tensor="t001"),
    Case("R56", "starts inside, 2^56 bytes", payload(1, nbytes=2**56), PAST, tensor="t001"),
    Case("R57", "unaligned by 16", payload(1, offset=80), r"^payload \[0x.*\) is not aligned to 64", tensor="t001"),
    Case("R57", "unaligned by 1", payload(2, offset=127), r"^payload \[0x.*\) is not aligned to 64", tensor="t002"),
    Case("R58", "into the next", payload(1, nbytes=65), ORDER, tensor="t002"),
    Case("R58", "inside the one before", payload(2, offset=64, nbytes=8), ORDER, tensor="t002"),
    Case("R58", "before the one before", payload(2, offset=0), ORDER, tensor="t002"),
    Case("R59", "hole before the first", hole(0), HOLE, tensor="t000"),
    Case("R59", "hole before the last", hole(3), HOLE, tensor="t003"),
]
