"""One tensor: type, shape, payload and strides. After these rules a view lies inside its payload.

Each is shown twice: when the whole index is checked at open, and at `touch` when that one tensor is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from forge import NONE, Forge
from malformed import Case, cases, refused, rich, saved
from strided_views import Strided, archive_of, elements_of

import zcrecord
from zcrecord import LimitError, PackedTensor, UnsupportedError

TOP = 2**64 - 1


def tensor(key: str = "w", **fields: int) -> Callable[[Forge], Any]:
    """Change fields of one tensor."""
    return lambda f: f.set("tensors", key, **fields)


def shape(*dims: int, key: str = "w", **fields: int) -> Callable[[Forge], Any]:
    """Give a tensor other dims; it keeps its payload."""
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
    Case("R33", "key longer than the name", tensor("tied", key_size=5), "its key takes 5 of 4 bytes of its name",
         tensor="tied"),
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
    Case("R51", "byte_offset of a packed tensor", tensor("q", byte_offset=1), "byte_offset 1 without strides",
         tensor="q"),
    Case("R51", "byte_offset of a string tensor", tensor("s", byte_offset=8), "byte_offset 8 without strides",
         tensor="s"),
    Case("R51", "shape smaller than payload", shape(2, 2), "its shape takes 16 bytes, its payload has 24"),
    Case("R51", "shape larger than payload", shape(2, 3, 2**40),
         "its shape takes 26388279066624 bytes, its payload has 24"),
    Case("R51", "rank 0 of more bytes", shape(), "its shape takes 4 bytes, its payload has 24"),
    Case("R51", "packed elements take a byte more", shape(5, key="q"), "its shape takes 3 bytes, its payload has 2",
         tensor="q"),
    Case("R51", "packed elements as bytes", tensor("q", bits=8), "its shape takes 3 bytes, its payload has 2",
         tensor="q"),
    Case("R51", "unknown dtype", tensor("b", dtype=99, bits=3), "its shape takes 2 bytes, its payload has 3",
         tensor="b"),
    Case("R52", "strided strings", tensor("s", strides=0), "only types of whole bytes may have strides", tensor="s"),
    Case("R52", "strided packed elements", tensor("q", strides=0), "only types of whole bytes may have strides",
         tensor="q"),
    Case("R52", "strided elements of 12 bits", tensor(dtype=99, bits=12, strides=0),
         "only types of whole bytes may have"),
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
    Case("R54", "byte_offset amid an element", strided((2,), (1,), byte_offset=2),
         "byte_offset 2 is no multiple of its element size"),
    Case("R55", "broadcast over more than there is", strided((7,), (0,)),
         "its shape claims more bytes than its payload has"),
    Case("R55", "broadcast to a terabyte", strided((2**38, 6), (0, 1)), "its shape claims more bytes than its payload"),
    Case("R71", "too many strings for the payload", shape(2**40, key="s"), "its payload cannot hold its strings",
         tensor="s"),
    Case("R71", "one string too many", shape(5, key="s"), "its payload cannot hold its strings", tensor="s"),
    Case("R71", "strings in 3 bytes", lambda f: strings_in(f, "b"), "its payload cannot hold its strings", tensor="b"),
]
# fmt: on
CASES = [case._replace(message=f"^tensor '{case.tensor}': {case.message}") for case in CASES]


def strings_in(f: Forge, key: str) -> None:
    """Call a tensor's bytes one string."""
    shape(1, key=key, dtype=64, bits=0)(f)


def test_accepts_what_the_cases_start_from() -> None:
    record = zcrecord.load_record(rich().seal(), verify="full")
    assert record["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.shares_memory(record["w"], record["t"])
    assert record.info("t").strides is not None


@cases(CASES)
def test_refuses_tensor_at_open(case: Case) -> None:
    archive = rich()
    case.change(archive)
    data = archive.seal()
    error = refused(case, lambda: zcrecord.load_record(data))
    assert error.tensor == case.tensor
    refused(case, lambda: zcrecord.load_record(data, verify="full"))


@cases(CASES)
def test_touch_refuses_the_same_tensor_whatever_is_asked_of_it(case: Case) -> None:
    archive = rich()
    case.change(archive)
    data = archive.seal()
    record = zcrecord.load_record(data, verify="touch")
    for action in (record.__getitem__, record.get, record.array, record.info, record.raw, record.__contains__):
        assert refused(case, action, case.tensor).tensor == case.tensor


@cases(CASES)
def test_touch_refuses_the_same_tensor_among_all(case: Case) -> None:
    archive = rich()
    case.change(archive)
    data = archive.seal()
    for action in (list, lambda r: list(r.values()), lambda r: list(r.items()), lambda r: r.tree(), lambda r: r.nbytes):
        assert refused(case, action, zcrecord.load_record(data, verify="touch")).tensor == case.tensor


@cases(CASES)
def test_touch_leaves_the_other_tensors_alone(case: Case) -> None:
    archive = rich()
    case.change(archive)
    record = zcrecord.load_record(archive.seal(), verify="touch")
    assert record["block.y"].tolist() == [0, 1, 2]
    assert record["layers.1.k"].tolist() == [1] * 4


# fmt: off
LEGAL = [
    ("one row again and again", strided((3, 2), (0, 1)), [[0, 1]] * 3),
    ("backwards from the end", strided((6,), (-1,), byte_offset=20), [5, 4, 3, 2, 1, 0]),
    ("both ends reached", strided((2, 2), (-5, 0), byte_offset=20), [[5, 5], [0, 0]]),
    ("rank 0 amid the payload", strided((), (), byte_offset=20), 5),
    ("an axis of 1 with any stride", strided((1, 2), (2**56, 5)), [[0, 5]]),
    ("an axis of 1 with any stride backwards", strided((1, 2), (-(2**56), 5)), [[0, 5]]),
    ("less than the payload", strided((2,), (3,), byte_offset=8), [2, 5]),
    ("rank 64", shape(*[1] * 62, 2, 3), np.arange(6).reshape(*[1] * 62, 2, 3).tolist()),
]
# fmt: on


@pytest.mark.parametrize(("change", "expected"), [pytest.param(*case[1:], id=case[0]) for case in LEGAL])
def test_accepts_what_just_keeps_the_rules(change: Callable[[Forge], Any], expected: Any) -> None:
    """R47, R52, R53, R54, R55."""
    archive = rich()
    change(archive)
    data = archive.seal()
    for record in (zcrecord.load_record(data), zcrecord.load_record(data, verify="touch")):
        assert record["w"].tolist() == expected


def test_unknown_dtype_is_bounded_and_offered_raw() -> None:
    """R46, R77."""
    archive = rich()
    archive.set("tensors", "w", dtype=200, bits=32)
    record = zcrecord.load_record(archive.seal(), verify="full")
    with pytest.raises(UnsupportedError, match=r"dtype code 200 is not known; \.raw\(name\) gives its bytes"):
        record["w"]
    assert len(record.raw("w")) == 24
    assert record.info("w").bits == 32


def test_unknown_dtype_with_strides_is_offered_as_its_elements_in_c_order() -> None:
    """R76, R77."""
    views = [Strided(200, 24, (2, 1, 3), (3, 2**56, -1), 6, bytes(range(256)) * 2)]
    elements = np.frombuffer(elements_of(views[0]), np.uint8)
    record = zcrecord.load_record(archive_of(views), verify="full")
    with pytest.raises(UnsupportedError, match=r"\.raw\(name\) gives its bytes"):
        record["t0000"]
    raw = record.raw("t0000")
    assert (bytes(raw), raw.readonly, record.info("t0000").nbytes) == (elements.tobytes(), True, len(elements))
    plain = Forge(saved({"t0000": elements}))
    plain.set("tensors", 0, dtype=200, bits=24, rank=3, dims=plain.add("dims", views[0].shape))
    assert record.content_digest() == zcrecord.load_record(plain.seal()).content_digest()


def test_narrow_type_may_be_stored_one_to_a_byte() -> None:
    """R46."""
    archive = rich()
    shape(2, key="q", bits=8)(archive)
    value = zcrecord.load_record(archive.seal())["q"]
    assert value.shape == (2,)
    assert not isinstance(value, PackedTensor)


def test_touch_checks_a_tensor_before_its_every_use_until_it_passed() -> None:
    archive = rich()
    archive.set("tensors", "w", rank=65)
    record = zcrecord.load_record(archive.seal(), verify="touch")
    for _ in range(40):
        with pytest.raises(LimitError, match=r"^tensor 'w': rank 65 is more than 64$"):
            record["w"]
