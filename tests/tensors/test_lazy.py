"""Tensors produced when they are written: the archive that arrays give, one piece in memory, no file on failure."""

from __future__ import annotations

import array
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import records as r
from exhaustive import rounds
from hypothesis import strategies as st

import zcrecord
from zcrecord import LazyTensor, LimitError, PackedTensor, ProducerError, UnsupportedError, load_record
from zcrecord.dtypes import DType, by_name

MIB = 1 << 20
VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)
RAW = VALUES.tobytes()


class Arrayish:
    def __init__(self, values: Any) -> None:
        self._values = values
        self.shape = values.shape

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self._values


def lazy(produce: Any, dtype: Any = "float32", shape: Any = (4, 6)) -> LazyTensor:
    return LazyTensor(dtype, shape, produce)


def rows() -> Iterator[Any]:
    yield from VALUES


# What a producer may be.

PRODUCERS: dict[str, Callable[[], Any]] = {
    "a generator": rows,
    "a function that makes a generator": lambda: rows,
    "a list of arrays": lambda: list(VALUES),
    "an iterator": lambda: iter([RAW[:7], RAW[7:]]),
    "a function that returns a list": lambda: lambda: [RAW[:40], VALUES.reshape(-1)[10:]],
    "bytes": lambda: RAW,
    "a memoryview": lambda: VALUES.data,
    "the whole array": lambda: VALUES,
    "a function that returns the whole array": lambda: VALUES.copy,
    "a whole array of another library": lambda: Arrayish(VALUES),
    "arrays of another library": lambda: [Arrayish(VALUES[:1]), Arrayish(VALUES[1:])],
    "array.arrays": lambda: [array.array("B", RAW[:48]), array.array("f", VALUES.reshape(-1)[12:].tolist())],
    "pieces of every class": lambda: [
        RAW[:5], bytearray(RAW[5:8]), memoryview(RAW)[8:10], memoryview(RAW[10:12]), b"", VALUES[:0], VALUES[0, 3:5],
        np.zeros((0, 3)).data, VALUES[0, 5], VALUES[1:],
    ],
    "arrays in either byte order": lambda: [VALUES[:2].astype(">f4"), VALUES[2:]],
    "arrays with gaps": lambda: [np.repeat(VALUES[:2], 2, axis=1)[:, ::2], np.asfortranarray(VALUES[2:])],
    "what is indexed from 0": lambda: type("Rows", (), {"__getitem__": lambda _, i: VALUES[i]})(),
}  # fmt: skip


@pytest.mark.parametrize("form", PRODUCERS)
def test_tensor_is_what_was_produced(form: str) -> None:
    data = r.saved({"before": 1, "w": lazy(PRODUCERS[form]()), "after": np.ones(3)})
    rec = load_record(data, verify="full")
    r.assert_same(rec.tree(), {"before": 1, "w": VALUES, "after": np.ones(3)})
    assert rec.content_digest() == r.round_trip({"before": 1, "w": VALUES, "after": np.ones(3)}).content_digest()


def test_nothing_is_called_before_it_is_saved_nor_for_a_tensor_without_elements(tmp_path: Path) -> None:
    calls = []

    def produce() -> Any:
        calls.append(1)
        return VALUES

    tensor = lazy(produce)
    with pytest.raises(zcrecord.SourceError, match="No such file"):
        zcrecord.save_record({"w": tensor}, tmp_path / "missing" / "m.zcr")
    with pytest.raises(zcrecord.NameCollisionError):
        zcrecord.save_record({"w": tensor, "a": {"b.c": VALUES}, "a.b": {"c": VALUES}}, tmp_path / "m.zcr")
    assert not calls
    r.assert_same(r.round_trip({"w": tensor})["w"], VALUES)
    assert len(calls) == 1
    assert r.round_trip({"w": lazy(produce, shape=(0, 6))})["w"].shape == (0, 6)
    assert len(calls) == 1


# Every element type.


def in_pieces(draw: st.DrawFn, kind: DType, values: r.Array) -> list[Any]:
    flat = values.reshape(-1)
    step = 4 if kind.packed else 1  # elements that fill whole bytes, whatever their width
    cuts = sorted(draw(st.lists(st.integers(0, len(flat) // step), max_size=4)))
    pieces: list[Any] = []
    for lo, hi in zip([0, *cuts], [*cuts, -(-len(flat) // step)], strict=True):
        part = flat[lo * step : hi * step]
        how = draw(st.sampled_from(["array", "column", "bytes", "packed", "swapped", "gaps", "reversed"]))
        if how == "packed" and kind.packed:
            pieces.append(PackedTensor.pack(part))
        elif how == "bytes":
            pieces.append((PackedTensor.pack(part).packed if kind.packed else part).tobytes())
        elif how == "swapped" and kind in r.SWAPPABLE and part.dtype.byteorder != "|":
            pieces.append(part.astype(part.dtype.newbyteorder(">")) if part.dtype.isbuiltin == 1 else part)
        elif how == "column":
            pieces.append(part[:, None])
        elif how == "gaps":
            pieces.append(np.repeat(part, 2)[::2])
        elif how == "reversed":
            pieces.append(part[::-1].copy()[::-1])
        else:
            pieces.append(part)
    return pieces


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[DType, r.Array, list[Any]]:
    kind = draw(st.sampled_from(r.NUMERIC))
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    values = r.filled(kind, shape, draw(st.integers(0, 1 << 32)))
    return kind, values, in_pieces(draw, kind, values)


@hypothesis.given(cut=cut_tensors(), seekable=st.booleans(), written=st.booleans())
@hypothesis.settings(max_examples=rounds(300), deadline=None)
def test_any_tensor_cut_into_any_pieces_is_the_one_that_was_cut(
    cut: tuple[DType, r.Array, list[Any]], seekable: bool, written: bool
) -> None:
    kind, values, pieces = cut
    sink = io.BytesIO() if seekable else r.OneWay()
    if written:
        with zcrecord.RecordWriter(sink) as out, out.tensor("w", kind.name, values.shape) as opened:
            for piece in pieces:
                opened.write(piece)
    else:
        zcrecord.save_record({"w": LazyTensor(kind.name, values.shape, iter(pieces))}, sink)
    rec = load_record(sink.getvalue(), verify="full")
    r.assert_same(rec["w"], values)
    assert rec.content_digest() == r.round_trip({"w": values}).content_digest()


@pytest.mark.parametrize("spelt", ["float32", np.float32, ">f4", by_name["float32"]])
def test_dtype_may_be_spelt_in_every_way(spelt: Any) -> None:
    tensor = lazy(RAW, spelt)
    assert (tensor.kind.name, tensor.shape, tensor.nbytes) == ("float32", (4, 6), 96)
    assert repr(tensor) == "LazyTensor(float32, shape=(4, 6))"
    r.assert_same(r.round_trip({"w": tensor})["w"], VALUES)


def test_bytes_that_are_no_bools_become_true() -> None:
    pieces: list[Any] = [bytes([0, 2, 255]), np.array([0, 7], np.uint8).view(np.bool_), b"\1"]
    rec = r.round_trip({"w": lazy(pieces, "bool", (6,))})
    assert rec["w"].tolist() == [False, True, True, False, True, True]
    assert rec["w"].view(np.uint8).max() == 1


def test_bits_after_the_last_element_become_zero() -> None:
    rec = r.round_trip({"w": lazy([b"\x21", b"\xf3"], "uint4", (3,))})
    assert rec["w"].unpack().astype(int).tolist() == [1, 2, 3]
    assert rec["w"].packed[-1] == 3
    packed = PackedTensor(np.array([0x21, 0xF3], np.uint8), "uint4", (3,))
    assert r.saved({"w": lazy(packed, "uint4", (3,))}) == r.saved({"w": lazy([packed[:2], packed[2:]], "uint4", (3,))})


@pytest.mark.parametrize("count", [1, 3, 5])
def test_piece_that_ends_within_a_byte_is_refused_unless_it_is_the_last(count: int) -> None:
    values = np.zeros(9, ml_dtypes.int4)
    for piece in (values[:count], PackedTensor.pack(values[:count])):
        with pytest.raises(
            ProducerError, match="tensor 'w': a piece of int4 ends within a byte; have all but the last"
        ):
            r.saved({"w": lazy([piece, values[count:]], "int4", (9,))})
    r.assert_same(r.round_trip({"w": lazy([values[:8], values[8:]], "int4", (9,))})["w"], values)


# What is refused when it is declared.


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ((-1,), LimitError, r"^shape \(-1,\) has a negative dimension$"),
        ((0, 1 << 60), LimitError, r"claims more than 2\^56 bytes"),
        ((1 << 30, 1 << 30), LimitError, r"claims more than 2\^56 bytes"),
        ((1,) * 65, LimitError, "is of more than 64 dimensions"),
        ((2.5,), UnsupportedError, r"^a shape is a sequence of integers, not \(2\.5,\)$"),
        (5, UnsupportedError, "^a shape is a sequence of integers, not 5$"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_shape_that_no_archive_holds_is_refused(shape: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        lazy(b"", shape=shape)


@pytest.mark.parametrize("dtype", [None, "nope", object, "string"])
def test_element_type_that_no_archive_has_is_refused(dtype: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"is no element type|has no place in an archive|strings cannot be"):
        lazy(b"", dtype)


# What is refused when it is produced.

WRONG: dict[str, tuple[Any, str]] = {
    "too little": (RAW[:-1], "96 bytes were declared, 95 produced"),
    "nothing": ([], "96 bytes were declared, 0 produced"),
    "too much": (RAW + b"x", "96 bytes were declared, at least 97 produced"),
    "without an end": (iter(lambda: b"abc", None), "96 bytes were declared, at least 99 produced"),
    "another dtype": (VALUES.astype("f8"), r"declared as float32, a piece is float64; convert it with \.astype"),
    "packed": ([PackedTensor.pack(np.zeros(192, "int4"))], "declared as float32, a piece is int4"),
    "another shape": (VALUES.T, r"declared with shape \(4, 6\), produced with \(6, 4\)"),
    "None": (None, "a NoneType is neither bytes, nor an array, nor an iterable of them"),
    "Python's numbers": ([1.0, 2.0], "a piece cannot be stored: a float is neither a tensor"),
    "text": ("abcd", "a piece cannot be stored: a str is neither a tensor"),
    "objects": ([np.array([None])], "a piece cannot be stored: dtype object has no place in an archive"),
    "not contiguous": ([np.asfortranarray(VALUES).data], r"a piece is not contiguous; hand over its \.tobytes"),
    "None among the pieces": ([RAW[:48], None, RAW[48:]], "a piece cannot be stored: a NoneType is neither"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_what_was_declared_leaves_no_file(what: str, path: Path) -> None:
    produce, message = WRONG[what]
    if isinstance(produce, Iterator):
        produce = iter(lambda: b"abc", None)
    with pytest.raises(ProducerError, match=rf"^tensor 'm\.w': {message}"):
        zcrecord.save_record({"a": VALUES, "m": {"w": lazy(produce)}, "z": lazy(RAW)}, path)


def raising(error: BaseException, after: int) -> Iterator[Any]:
    yield from VALUES[:after]
    raise error


ERRORS = [
    FileNotFoundError(2, "theirs", "input.bin"), KeyboardInterrupt("theirs"), zcrecord.FormatError("theirs"),
    SystemExit(3), TypeError("theirs"),
]  # fmt: skip


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_a_producer_raises_goes_through_as_it_is(error: BaseException, called: bool, path: Path) -> None:
    def fail() -> Any:
        raise error

    for dest in (path, os.devnull, io.BytesIO(), r.OneWay()):
        with pytest.raises(type(error)) as caught:
            zcrecord.save_record({"a": VALUES, "w": lazy(fail if called else raising(error, 2))}, dest)
        assert caught.value is error
        assert error.__cause__ is None


@pytest.mark.parametrize("left", ["done", "too much", "wrong"])
def test_generators_and_files_are_closed_however_it_ends(left: str, tmp_path: Path) -> None:
    closed = []

    def produce() -> Iterator[Any]:
        try:
            yield from VALUES
            if left != "done":
                yield 5 if left == "wrong" else RAW
        finally:
            closed.append(1)

    with contextlib.nullcontext() if left == "done" else pytest.raises(ProducerError):
        zcrecord.save_record({"w": lazy(produce())}, tmp_path / "m.zcr")
    assert closed == [1]
    with open(tmp_path / "input", "w+b") as file:
        file.write(RAW.replace(b"\n", b"x"))
        file.seek(0)
        zcrecord.save_record({"w": lazy(file)}, tmp_path / "m.zcr")
        assert file.closed


def test_values_are_produced_once(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    tensor = lazy(rows())
    zcrecord.save_record({"w": tensor}, path)
    before = path.read_bytes()
    with pytest.raises(ProducerError, match="tensor 'w': its values were produced already; make a new LazyTensor"):
        zcrecord.save_record({"w": tensor}, path)
    assert path.read_bytes() == before


# Ties, and records around lazy tensors.


def test_one_object_in_two_places_is_one_tied_tensor_produced_once() -> None:
    calls = []

    def produce() -> Any:
        calls.append(1)
        return VALUES

    tensor = lazy(produce)
    rec = r.round_trip({"a": tensor, "m": [VALUES, tensor], "b": lazy(VALUES)})
    assert calls == [1]
    assert rec.info("a").tied == ("a", "m.1")
    assert rec.info("b").tied == ()
    assert np.shares_memory(rec["a"], rec["m.1"])
    writable = load_record(rec.archive.buffer, mode="c")
    writable["m.1"][:] = 5
    assert (writable["a"] == 5).all()
    assert (writable["b"] == VALUES).all()
    assert (writable["m.0"] == VALUES).all()


def test_lazy_tensors_of_one_key_are_one_tensor_in_their_own_shapes() -> None:
    key = ("storage", 7)
    tree = {
        "a": LazyTensor("float32", (4, 6), rows(), key=key),
        "b": LazyTensor("float32", (24,), rows(), key=key),
        "c": LazyTensor("int32", (24,), VALUES.astype(np.int32).reshape(-1), key=key),
        "d": LazyTensor("float32", (4, 6), rows(), key=("storage", 8)),
    }
    rec = r.round_trip(tree)
    assert rec.info("a").tied == ("a", "b")
    r.assert_same(rec["b"], VALUES.reshape(-1))
    r.assert_same(rec["c"], VALUES.astype(np.int32).reshape(-1))
    assert not np.shares_memory(rec["a"], rec["c"])
    assert rec.info("d").tied == ()


def test_record_around_a_lazy_tensor_is_saved_as_ever() -> None:
    base, strings = np.arange(40.0), np.array(["a", "bc"])
    packed = PackedTensor.pack(np.array([1, -2, 3], ml_dtypes.int4))
    around = {
        "tied": base, "again": base, "part": base[4:20:2], "t": base.reshape(8, 5).T, "gaps": base[::3],
        "s": strings, "p": packed, "narrow": np.ones(3, ml_dtypes.uint2), "swapped": base.astype(">f8"),
        "empty": np.zeros((0, 3)), "layer": r.Layer(base[:4], 3), "pair": r.Pair(base, None), "list": [1, base, "x"],
        "blob": b"blob", "blobs": [b"blob", memoryview(b"12"), b""], "text": "ü", "n": 1 << 63, "floats": [1.0, 2.5],
    }  # fmt: skip
    metadata = {"b": b"more", "m": memoryview(b"7"), "n": 1}
    eager = r.round_trip({**around, "w": VALUES}, metadata=metadata)
    for sink in (io.BytesIO(), r.OneWay()):
        zcrecord.save_record({**around, "w": lazy(rows())}, sink, metadata=metadata)
        rec = load_record(sink.getvalue(), verify="full")
        r.assert_same(rec.tree(), eager.tree())
        r.assert_same(rec.metadata, eager.metadata)
        assert rec.names == eager.names
        assert rec.content_digest() == eager.content_digest()
        assert [i.tied for i in rec.infos()] == [i.tied for i in eager.infos()]
        assert [i.strides for i in rec.infos()] == [i.strides for i in eager.infos()]


# Memory.


PEAK = """
import json, sys
import numpy as np
import zcrecord
from tools.measure import peak_rss
path, how = sys.argv[1:]

def pieces(count):
    for i in range(count):
        yield np.full(1 << 20, i, np.uint8)

def save(count):
    if how == 'writer':
        with zcrecord.RecordWriter(path, durable=False) as out, out.tensor('w', 'u1', (count, 1 << 20)) as w:
            for piece in pieces(count):
                w.write(piece)
        return
    made = list(pieces(count)) if how == 'kept' else pieces(count)
    zcrecord.save_record({'w': zcrecord.LazyTensor('uint8', (count, 1 << 20), made)}, path, durable=False)

save(4)
before = peak_rss()
save(256)
print(json.dumps(peak_rss() - before))
"""


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@pytest.mark.skipif(sys.platform == "win32", reason="platform: the peak is not told")
def test_peak_memory_is_a_piece_whatever_the_record(tmp_path: Path) -> None:
    grown = {how: json.loads(r.run_python(PEAK, tmp_path / "m.zcr", how).stdout) for how in ("lazy", "writer", "kept")}
    assert grown["lazy"] < 6 * MIB and grown["writer"] < 10 * MIB
    assert grown["kept"] >= 250 * MIB, "pieces that are kept would be noticed"
