"""Archives in which a tensor's row breaks one rule of FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from forge import NONE, Forge
from malformed import Case

from zcrecord import LimitError

TOP = 2**64 - 1


def tensor(key: str = "w", **fields: int) -> Callable[[Forge], Any]:
    return lambda f: f.set("tensors", key, **fields)


def shape(*dims: int, key: str = "w", **fields: int) -> Callable[[Forge], Any]:
    return lambda f: f.set("tensors", key, dims=f.add("dims", dims), rank=len(dims), **fields)


def strided(dims: Iterable[int], strides: Iterable[int], key: str = "w", **fields: int) -> Callable[[Forge], Any]:
    """Give a tensor (of 4-byte items, in 24 bytes) other dims and strides."""

    def change(f: Forge) -> None:
        sizes = tuple(dims)
        shape(*sizes, key=key, strides=f.add("strides", strides), **fields)(f)

    return change


OUTSIDE = "its strides reach outside its payload"
HUGE = r"its shape claims more than 2\^56 bytes"
EXACTLY = "it has a payload exactly if it has bytes, or should have"
# fmt: off
CASES = [
    Case("R26", "reserved0", tensor(reserved0=1), "a reserved field is not zero"),
    Case("R26", "reserved1", tensor(reserved1=1 << 31), "a reserved field is not zero"),
    Case("R33", "no key", tensor(key_size=0), "its key takes 0 of 1 bytes of its name"),
    Case("R33", "key longer than the name", tensor("tied", key_size=5), "its key takes 5 of 4 bytes", tensor="tied"),
    Case("R45", "parent behind the modules", tensor(parent=10), "its parent 10 is no module"),
    Case("R45", "parent NONE", tensor(parent=NONE), "its parent 4294967295 is no module"),
    Case("R46", "dtype 0", tensor(dtype=0), "dtype 0 cannot take 32 bits an element"),
    Case("R46", "float32 of 64 bits", tensor(bits=64), "dtype 18 cannot take 64 bits an element"),
    Case("R46", "float32 of 8 bits", tensor(bits=8), "dtype 18 cannot take 8 bits an element"),
    Case("R46", "int4 of 2 bits", tensor("q", bits=2), "dtype 52 cannot take 2 bits an element", tensor="q"),
    Case("R46", "string of 8 bits", tensor("s", bits=8), "dtype 64 cannot take 8 bits an element", tensor="s"),
    Case("R46", "unknown dtype of 0 bits", tensor(dtype=200, bits=0), "dtype 200 cannot take 0 bits an element"),
    Case("R46", "unknown dtype of 129 bits", tensor(dtype=200, bits=129), "dtype 200 cannot take 129 bits an element"),
    Case("R47", "rank 65", tensor(rank=65), "rank 65 is more than 64", LimitError),
    Case("R47", "rank 255", tensor(rank=255), "rank 255 is more than 64", LimitError),
    Case("R48", "dims past their pool", lambda f: f.set("tensors", "w", dims=len(f.columns["dims"]) - 1),
         "its dims leave their pool"),
    Case("R48", "dims at 2^32-1", tensor(dims=NONE), "its dims leave their pool"),
    Case("R49", "one dim", shape(2**56 // 4 + 1), HUGE, LimitError),
    Case("R49", "one dim of 2^64-1", shape(TOP), HUGE, LimitError),
    Case("R49", "product wraps to 0", shape(2**32, 2**32), HUGE, LimitError),
    Case("R49", "product wraps to 6", shape(2**63 + 3, 2), HUGE, LimitError),
    Case("R49", "64 dims of 2", shape(*[2] * 64), HUGE, LimitError),
    Case("R49", "behind a dim of 0", shape(0, 2**60, payload=NONE), HUGE, LimitError),
    Case("R49", "before a dim of 0", shape(2**60, 0, payload=NONE), HUGE, LimitError),
    Case("R49", "strings", shape(2**54, key="s"), HUGE, LimitError, tensor="s"),
    Case("R49", "packed elements", shape(2**57 + 1, key="q"), HUGE, LimitError, tensor="q"),
    Case("R50", "payload behind the payloads", tensor(payload=99), "its payload 99 is not in the index"),
    Case("R50", "payload one past the last", lambda f: f.set("tensors", "w", payload=len(f.columns["payloads"])),
         r"its payload \d+ is not in the index"),
    Case("R50", "payload at NONE-1", tensor(payload=NONE - 1), "its payload 4294967294 is not in the index"),
    Case("R50", "no payload", tensor(payload=NONE), EXACTLY),
    Case("R50", "string without payload", tensor("s", payload=NONE), EXACTLY, tensor="s"),
    Case("R50", "payload of an empty tensor", tensor("empty", payload=0), EXACTLY, tensor="empty"),
    Case("R50", "empty tensor with strides", strided((0, 3), (3, 1), "empty"), "an empty tensor has no strides",
         tensor="empty"),
    Case("R51", "byte_offset without strides", tensor(byte_offset=4), "byte_offset 4 without strides"),
    Case("R51", "byte_offset of a packed tensor", tensor("q", byte_offset=1), "byte_offset 1 without", tensor="q"),
    Case("R51", "byte_offset of a string tensor", tensor("s", byte_offset=8), "byte_offset 8 without", tensor="s"),
    Case("R51", "shape smaller than payload", shape(2, 2), "its shape takes 16 bytes, its payload has 24"),
    Case("R51", "shape larger than payload", shape(2, 3, 2**40), "its shape takes 26388279066624 bytes, its payload"),
    Case("R51", "rank 0 of more bytes", shape(), "its shape takes 4 bytes, its payload has 24"),
    Case("R51", "packed elements take a byte more", shape(5, key="q"), "its shape takes 3 bytes, its", tensor="q"),
    Case("R51", "packed elements as bytes", tensor("q", bits=8), "its shape takes 3 bytes, its payload", tensor="q"),
    Case("R51", "unknown dtype", tensor("b", dtype=99, bits=3), "its shape takes 2 bytes, its payload", tensor="b"),
    Case("R52", "strided strings", tensor("s", strides=0), "only types of whole bytes may have strides", tensor="s"),
    Case("R52", "strided packed elements", tensor("q", strides=0), "only types of whole bytes may have", tensor="q"),
    Case("R52", "strided elements of 12 bits", tensor(dtype=99, bits=12, strides=0), "only types of whole bytes may"),
    Case("R52", "strides past their pool", tensor(strides=1), "its strides leave their pool"),
    Case("R52", "strides at NONE-1", tensor(strides=NONE - 1), "its strides leave their pool"),
    Case("R53", "one element beyond", strided((2, 3), (4, 1)), OUTSIDE),
    Case("R53", "one byte beyond", strided((2, 3), (3, 1), byte_offset=1), OUTSIDE),
    Case("R53", "one element before", strided((2, 3), (-3, 1), byte_offset=8), OUTSIDE),
    Case("R53", "backwards from the start", strided((6,), (-1,)), OUTSIDE),
    Case("R53", "negative and positive axes", strided((2, 2), (-5, 1), byte_offset=20), OUTSIDE),
    Case("R53", "stride over 2^56", strided((1, 6), (2**56 + 1, 1)), OUTSIDE),
    Case("R53", "stride under -2^56", strided((1, 6), (-(2**56) - 1, 1)), OUTSIDE),
    Case("R53", "least stride", strided((2,), (-(2**63),)), OUTSIDE),
    Case("R53", "greatest stride", strided((2,), (2**63 - 1,)), OUTSIDE),
    Case("R53", "reach wraps to 0", strided((2**32 + 1,), (2**32,)), OUTSIDE),
    Case("R53", "reach times item wraps", strided((5,), (2**60,)), OUTSIDE),
    Case("R53", "sum of axes wraps", strided([2] * 53, [2**56] * 53), OUTSIDE),
    Case("R53", "axes that cancel out", strided((2, 2), (2**56, -(2**56)), byte_offset=4), OUTSIDE),
    Case("R53", "byte_offset of 2^64-4", strided((1,), (1,), byte_offset=TOP - 3), OUTSIDE),
    Case("R53", "byte_offset of 2^56+4", strided((1,), (1,), byte_offset=2**56 + 4), OUTSIDE),
    Case("R53", "rank 0 at the end", strided((), (), byte_offset=24), OUTSIDE),
    Case("R54", "byte_offset amid an element", strided((2,), (1,), byte_offset=2), "byte_offset 2 is no multiple of"),
    Case("R55", "broadcast over more than there is", strided((7,), (0,)), "its shape claims more bytes than its"),
    Case("R55", "broadcast to a terabyte", strided((2**38, 6), (0, 1)), "its shape claims more bytes than its payload"),
    Case("R71", "too many strings for the payload", shape(2**40, key="s"), "its payload cannot hold its", tensor="s"),
    Case("R71", "one string too many", shape(5, key="s"), "its payload cannot hold its strings", tensor="s"),
    Case("R71", "strings in 3 bytes", lambda f: strings_in(f, "b"), "its payload cannot hold its strings", tensor="b"),
]
# fmt: on
CASES = [case._replace(message=f"^tensor '{case.tensor}': {case.message}") for case in CASES]


def strings_in(f: Forge, key: str) -> None:
    """Call a tensor's bytes one string."""
    shape(1, key=key, dtype=64, bits=0)(f)
