"""PackedTensor and StringTensor: views of bytes that numpy has no array for, never unpacked unasked."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import numpy as np
import pytest
import records as r
from exhaustive import rounds
from hypothesis import strategies as st

from zcrecord import FormatError, PackedTensor, StringTensor, UnsupportedError
from zcrecord.dtypes import DType

EVERY = pytest.mark.parametrize("kind", r.PACKED, ids=lambda d: d.name)


@EVERY
@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (0, 4), (3, 1, 3)], ids=str)
def test_unpack_gives_back_what_was_packed(kind: DType, shape: tuple[int, ...]) -> None:
    array = r.filled(kind, shape)
    packed = PackedTensor.pack(array)
    assert (packed.shape, packed.dtype, packed.kind) == (shape, array.dtype, kind)
    assert packed.nbytes == math.ceil(math.prod(shape) * kind.bits / 8)
    got = packed.unpack()
    assert (got.shape, got.dtype, got.tobytes()) == (shape, array.dtype, array.tobytes())


@pytest.mark.parametrize("view", [lambda a: a.T, lambda a: a[::2], lambda a: a[:, ::-1]], ids=["T", "step", "reversed"])
@EVERY
def test_packs_in_c_order_whatever_the_strides(kind: DType, view: Any) -> None:
    array = view(r.filled(kind, (4, 6)))
    assert PackedTensor.pack(array).unpack().tobytes() == array.tobytes()


@pytest.mark.slow
@hypothesis.given(
    kind=st.sampled_from(r.PACKED),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    start=st.integers(-6, 6) | st.none(),
    stop=st.integers(-6, 6) | st.none(),
)
@hypothesis.settings(max_examples=rounds(300), deadline=None)
def test_slices_of_the_first_axis_are_those_of_the_array(
    kind: DType, shape: tuple[int, ...], start: int | None, stop: int | None
) -> None:
    array = r.filled(kind, shape)
    part = PackedTensor.pack(array)[start:stop]
    want = array[start:stop]
    assert (part.shape, part.unpack().tobytes()) == (want.shape, want.tobytes())
    assert part.packed.tobytes() == PackedTensor.pack(want).packed.tobytes()  # pad bits are zero, too
    r.assert_same(r.round_trip({"part": part})["part"], part)


@EVERY
def test_rows_are_taken_by_number_from_either_end(kind: DType) -> None:
    array = r.filled(kind, (3, 5))
    packed = PackedTensor.pack(array)
    assert len(packed) == 3
    for i in range(-3, 3):
        assert packed[i].shape == (5,)
        assert packed[i].unpack().tobytes() == array[i].tobytes()
    with pytest.raises(IndexError):
        packed[3]


def test_slices_that_start_on_a_byte_copy_nothing() -> None:
    packed = PackedTensor.pack(r.filled(r.PACKED[2], (6, 4)))
    odd = PackedTensor.pack(r.filled(r.PACKED[2], (7,)))
    assert np.shares_memory(packed[2:4].packed, packed.packed)
    assert np.shares_memory(packed[5].packed, packed.packed)
    assert np.shares_memory(odd[4:].packed, odd.packed)


def test_packed_tensor_refuses_what_would_unpack_or_skip() -> None:
    packed = PackedTensor.pack(np.zeros((4, 3), "int4"))
    with pytest.raises(UnsupportedError, match="step 1; unpack"):
        packed[::2]
    with pytest.raises(UnsupportedError, match=r"a packed int4 tensor is no array; \.unpack\(\)"):
        np.asarray(packed)
    with pytest.raises(UnsupportedError, match=r"a string tensor is no array; \.unpack\(\)"):
        np.asarray(StringTensor.from_strings(["a"]))


@pytest.mark.parametrize("tensor", [PackedTensor.pack(np.zeros((), "int4")), StringTensor.from_strings(["alone"], ())])
def test_tensor_of_rank_0_has_no_rows(tensor: Any) -> None:
    assert tensor.unpack().item() in (0, "alone")
    with pytest.raises(TypeError, match="rank 0 has no length"):
        len(tensor)
    with pytest.raises(IndexError, match="rank 0 has no rows"):
        tensor[0]


def test_packed_tensor_wants_exactly_its_bytes_and_a_narrow_type() -> None:
    with pytest.raises(FormatError, match=r"shape \(3,\) of int4 takes 2 packed bytes, got \(3,\)"):
        PackedTensor(np.zeros(3, np.uint8), "int4", (3,))
    wrong: list[Any] = [np.zeros(1, np.uint8), np.zeros((1, 2), np.uint8), np.zeros(2, np.int8)]
    for packed in wrong:
        with pytest.raises(FormatError, match="takes 2 packed bytes"):
            PackedTensor(packed, "int4", (3,))
    with pytest.raises(UnsupportedError, match="float32 is not packed; use a numpy array"):
        PackedTensor(np.zeros(12, np.uint8), "float32", (3,))
    with pytest.raises(UnsupportedError, match="float32 is not narrower than a byte"):
        PackedTensor.pack(np.zeros(3, np.float32))


def test_packed_bytes_with_gaps_are_saved_packed() -> None:
    spread = np.zeros(8, np.uint8)
    spread[::2] = [0x21, 0x43, 0x65, 0x87]
    got = r.round_trip({"x": PackedTensor(spread[::2], "uint4", (8,))})["x"]
    assert got.unpack().astype(int).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


STRINGS = [b"", b"a", b"\xff\xfe", "ä".encode(), b"x" * 300, b"", b"\0", b"12345678"]


def test_strings_are_taken_by_number_from_either_end() -> None:
    tensor = StringTensor.from_strings(STRINGS)
    assert list(tensor.strings()) == STRINGS
    assert [tensor[i] for i in range(-len(STRINGS), 0)] == STRINGS
    assert len(tensor) == len(STRINGS)
    with pytest.raises(IndexError):
        tensor[len(STRINGS)]


@pytest.mark.slow
@hypothesis.given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    start=st.integers(-5, 5) | st.none(),
    stop=st.integers(-5, 5) | st.none(),
)
@hypothesis.settings(max_examples=rounds(150), deadline=None)
def test_slices_of_strings_are_those_of_the_array(shape: tuple[int, ...], start: int | None, stop: int | None) -> None:
    array = np.array(["x" * (i % 11) + str(i) for i in range(math.prod(shape))], np.str_).reshape(shape)
    part = StringTensor.from_strings(array.reshape(-1).tolist(), shape)[start:stop]
    want = array[start:stop]
    assert isinstance(part, StringTensor)
    assert (part.shape, part.unpack().tolist()) == (want.shape, want.tolist())
    r.assert_same(r.round_trip({"part": part})["part"], part)


def test_rows_of_strings_are_string_tensors_until_one_string_is_left() -> None:
    tensor = StringTensor.from_strings(STRINGS, (2, 4))
    assert len(tensor) == 2
    assert tensor[-1].shape == (4,)
    assert list(tensor[1].strings()) == STRINGS[4:]
    assert tensor[1][0] == STRINGS[4]
    assert [list(tensor[i].strings()) for i in range(2)] == [STRINGS[:4], STRINGS[4:]]
    with pytest.raises(UnsupportedError, match="step 1; unpack"):
        tensor[::2]


def test_strings_unpack_to_text_or_to_bytes() -> None:
    tensor = StringTensor.from_strings(["ä", b"b", "", "c"], (2, 2))
    assert tensor.unpack().tolist() == [["ä", "b"], ["", "c"]]
    assert tensor.unpack(encoding=None).tolist() == [["ä".encode(), b"b"], [b"", b"c"]]
    with pytest.raises(UnsupportedError, match=r"string 1 of 2 is not utf-8: .*; unpack\(encoding=None\) gives bytes"):
        StringTensor.from_strings(["a", b"\xff"]).unpack()
    with pytest.raises(UnsupportedError, match="string 0 of 1 is not idna"):
        StringTensor.from_strings(["xn--99999999"]).unpack("idna")  # a UnicodeError of its own


def test_strings_of_any_bytes_round_trip() -> None:
    tensor = StringTensor.from_strings(STRINGS, (2, 4))
    got = r.round_trip({"s": tensor, "m": {"again": tensor}})
    r.assert_same(got.tree(), {"s": tensor, "m": {"again": tensor}})
    assert got.info("s").tied == ("s", "m.again")


@pytest.mark.parametrize(
    ("ends", "room", "message"),
    [
        ([0, 2, 1], 8, "do not ascend"),
        ([1, 2, 3], 8, "do not ascend"),
        ([0, 0, 0], 8, "do not ascend"),
        ([0, 2**63, 2**63], 8, "do not ascend"),
        ([0], 0, "2 strings cannot lie in 8 bytes"),
    ],
)
def test_string_tensor_checks_every_end_before_one_is_used(ends: list[int], room: int, message: str) -> None:
    data = np.frombuffer(bytes(room) + np.array(ends, "<u8").tobytes(), np.uint8)
    with pytest.raises(FormatError, match=message):
        StringTensor(data, (2,))


def test_string_tensor_wants_zeros_after_its_bytes_and_as_many_strings_as_its_shape() -> None:
    data = np.frombuffer(b"abc\0\0\0\0x" + np.array([0, 3], "<u8").tobytes(), np.uint8)
    with pytest.raises(FormatError, match="padding after its strings is not zero"):
        StringTensor(data, (1,))
    with pytest.raises(FormatError, match=r"shape \(3,\) does not hold 2 strings"):
        StringTensor.from_strings(["a", "b"], (3,))
