"""RecordWriter: a record written one tensor at a time is the one that could have been saved at once, or no file."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import records as r
from exhaustive import rounds

import zcrecord
from zcrecord import (
    LazyTensor,
    LimitError,
    NameCollisionError,
    PackedTensor,
    ProducerError,
    RecordWriter,
    SourceError,
    StringTensor,
    TensorNotFoundError,
    UnsupportedError,
    load_record,
)
from zcrecord.codec.entries import is_attribute

ONE = np.ones(3, np.float32)
TWO = np.arange(4)


def written(write: Callable[[RecordWriter], Any], **options: Any) -> zcrecord.Record:
    """Return the record that a function writes."""
    file = io.BytesIO()
    with RecordWriter(file, **options) as out:
        write(out)
    return load_record(file.getvalue(), verify="full")


def write_all(record: Any, out: RecordWriter, path: tuple[str, ...] = ()) -> None:
    """Write a nested record, one value at a time."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        kind, name = "object", type(record).__name__
        items = [(f.name, getattr(record, f.name)) for f in dataclasses.fields(record)]
    elif isinstance(record, Mapping):
        kind, name, items = "mapping", "", [*record.items()]
    elif hasattr(record, "_fields"):
        kind, name, items = "tuple", type(record).__name__, [*record._asdict().items()]
    else:
        kind, name, items = type(record).__name__, "", [(str(i), value) for i, value in enumerate(record)]
    out.module(path or "", kind, name)
    for key, value in items:
        if is_attribute(value, key):
            out.attribute((*path, key), value)
        elif isinstance(value, np.ndarray | PackedTensor | StringTensor):
            out.add((*path, key), value)
        else:
            write_all(value, out, (*path, key))


@pytest.mark.slow
@hypothesis.given(tree=r.trees())
@hypothesis.settings(max_examples=rounds(150), deadline=None)
def test_record_written_bit_by_bit_is_the_one_that_is_saved_at_once(tree: Any) -> None:
    hypothesis.assume(r.names_are_unique(tree))
    rec, saved = written(lambda out: write_all(tree, out)), r.round_trip(tree)
    r.assert_same(rec.tree(), tree)
    assert rec.names == saved.names
    assert list(rec.modules) == list(saved.modules)
    assert list(rec.attributes) == list(saved.attributes)
    assert rec.content_digest() == saved.content_digest()


def test_every_kind_of_tensor_may_be_added(tmp_path: Path) -> None:
    strided = np.arange(12.0).reshape(3, 4)
    tree = {
        "a": {"w": ONE, "t": strided.T, "gaps": strided[:, ::2], "n": 5, "many": [b"12", b"", b"3"]},
        "p": PackedTensor.pack(np.array([1, -2, 3]).astype("int4")), "narrow": np.array([1, 2, 3]).astype("uint2"),
        "s": StringTensor.from_strings(["x", "yz"]), "text": np.array(["x", "yz"]), "scalar": np.array(3.0),
        "swapped": TWO.astype(">i8"), "empty": np.zeros((0, 3)),
    }  # fmt: skip
    with RecordWriter(tmp_path / "m.zcr", metadata={"by": "me"}) as out:
        write_all(tree, out)
        out.add("lazy", LazyTensor("float32", (3,), [ONE]))
        out.tie("again", "a.w")
        out.tie("nothing", "empty")
        with out.tensor("pieces", "float32", (3,)) as opened:
            opened.write(ONE[:1])
            opened.write(ONE[1:].tobytes())
        out.attribute("blob", memoryview(b"12"))
        out.module("a", "object", "Layer")
        out.module("void")
        out.metadata["later"] = 1
    rec = load_record(tmp_path / "m.zcr", verify="full")
    more = {"lazy": ONE, "again": ONE, "nothing": np.zeros((0, 3)), "pieces": ONE, "blob": b"12", "void": {}}
    r.assert_same(rec.tree(), tree | more)
    assert rec.metadata == {"by": "me", "later": 1}
    assert (rec.info("a.w").tied, rec.info("lazy").tied) == (("a.w", "again"), ())
    assert (rec.modules["a"].kind, rec.modules["a"].type_name) == ("object", "Layer")
    assert out.report is not None
    assert (out.report.tensors, out.report.archive_bytes) == (14, (tmp_path / "m.zcr").stat().st_size)
    assert (out.report.tied, out.report.payload_bytes) == (1, rec.nbytes)
    assert rec.nbytes == 12 + 96 + 48 + 2 + 1 + 32 + 8 + 32 + 2 + 1


class Pipe(io.RawIOBase):
    data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)


@pytest.mark.parametrize("digest", ["xxh3", "none"])
def test_every_sink_gets_the_same_record(digest: str, tmp_path: Path) -> None:
    pipe, file = Pipe(), io.BytesIO(b"before")
    file.seek(0, 2)
    for dest in (tmp_path / "m.zcr", pipe, file):
        with RecordWriter(dest, digest=digest, alignment=256, durable=False) as out:
            for name in ("a", "b", "m.a"):
                out.add(name, TWO)
            out.tie("m.c", "b")
    assert file.getvalue()[6:] == (tmp_path / "m.zcr").read_bytes()
    for data in ((tmp_path / "m.zcr").read_bytes(), pipe.data):
        rec = load_record(data, verify="full")
        r.assert_same(rec.tree(), {"a": TWO, "b": TWO, "m": {"a": TWO, "c": TWO}})
        assert rec.info("b").tied == ("b", "m.c")
        assert {info.offset % 256 for info in rec.infos()} == {0}
        writable = load_record(data, mode="c")
        writable["a"][:] = 9
        assert writable["b"].tolist() == TWO.tolist()


def test_names_are_split_at_dots_and_tuples_are_taken_as_they_are() -> None:
    def write(out: RecordWriter) -> None:
        for name in ("m.a", ("m", "b.c"), ["x.y"], "..", ("k",) * 100):
            out.add(name, ONE)
        out.attribute(("m", "n.o"), 1)
        out.tie("t", "x.y")
        out.tie(("u.v",), ("m", "b.c"))

    rec = written(write)
    assert ".".join(["k"] * 100) in rec.names
    want = {"m": {"a": ONE, "b.c": ONE, "n.o": 1}, "x.y": ONE, "..": ONE, "t": ONE, "u.v": ONE}
    r.assert_same(rec.select(lambda info: info.name[0] != "k").tree(), want)
    assert rec.info("t").tied == ("x.y", "t")


# Names that collide, or cannot be, before any byte is written for them.

TAKEN: dict[str, tuple[Any, type[Exception], str]] = {
    "a tensor's": ("m.w", NameCollisionError, "tensor 'm.w': two tensors would have this name"),
    "a module's": ("m", NameCollisionError, "tensor 'm': a module has this name already"),
    "an attribute's": ("m.n", NameCollisionError, "tensor 'm.n': an attribute has this name already"),
    "below a tensor": ("m.w.x", NameCollisionError, "tensor 'm.w': a tensor or an attribute has the name of this mod"),
    "below an attribute": ("m.n.x", NameCollisionError, "tensor 'm.n': a tensor or an attribute has the name of this"),
    "a module's, by another path": (("p.q", "v"), NameCollisionError, "tensor 'p.q': two keys with dots lead to this"),
    "empty": ("", UnsupportedError, r"\('',\): keys are non-empty strings"),
    "no keys": ((), UnsupportedError, r"\(\): keys are non-empty strings"),
    "a number": (5, UnsupportedError, "5: a name is a str, or a tuple of keys"),
    "a number among the keys": (("a", 0), UnsupportedError, r"\('a', 0\): a name is a str, or a tuple of keys"),
    "NUL": ("a\0b", UnsupportedError, "its name contains NUL"),
    "no UTF-8": ("\ud800", UnsupportedError, "its name has lone surrogates, which are not UTF-8"),
    "too deep": (("k",) * 101, LimitError, "nested more than 100 deep"),
}


ADDING: dict[str, Callable[[RecordWriter, Any, Any], Any]] = {
    "add": lambda out, name, _: out.add(name, TWO),
    "tensor": lambda out, name, _: out.tensor(name, "float32", (3,)).__enter__(),
    "tie": lambda out, name, _: out.tie(name, "m.w"),
    "lazy": lambda out, name, produce: out.add(name, LazyTensor("float32", (3,), produce)),
}


@pytest.mark.parametrize("way", ADDING)
@pytest.mark.parametrize("taken", TAKEN)
def test_name_that_cannot_be_is_refused_before_a_byte_is_written(taken: str, way: str) -> None:
    name, kind, message = TAKEN[taken]
    file, calls = io.BytesIO(), []
    with RecordWriter(file) as out:
        out.add("m.w", ONE)
        out.attribute("m.n", 1)
        out.add("p.q.w", ONE)
        before = file.tell()
        with pytest.raises(kind, match=message):
            ADDING[way](out, name, lambda: calls.append(1))
        assert file.tell() == before
        assert not calls
        out.add("more", ONE)
    want = {"m": {"w": ONE, "n": 1}, "p": {"q": {"w": ONE}}, "more": ONE}
    r.assert_same(load_record(file.getvalue(), verify="full").tree(), want)


def test_attributes_and_modules_that_collide_are_refused_and_change_nothing() -> None:
    def write(out: RecordWriter) -> None:
        out.add("m.w", ONE)
        out.attribute("m.n", 1)
        for name in ("m.w", "m.n", "m", ("m.n",)):
            with pytest.raises(NameCollisionError):
                out.attribute(name, 2)
        for name in ("m.w", "m.n", "m.w.x"):
            with pytest.raises(NameCollisionError, match="has the name of this module"):
                out.module(name)
        with pytest.raises(NameCollisionError, match=r"^tensor 'm\.x': two keys with dots lead to this"):
            out.module("m.x.y")
            out.module(("m.x",))
        for value in ({"a": 1}, ONE, object(), 1 << 70, [1, ONE], "\ud800", [1, "a"], bytearray(b"x")):
            with pytest.raises(UnsupportedError):
                out.attribute("bad", value)
        for kind in ("dict", None, 3, ["list"]):
            with pytest.raises(UnsupportedError, match=r"kind .* is not known; mapping, list, tuple, object"):
                out.module("bad", kind)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="a type name is a str, not a int"):
            out.module("bad", "object", 3)  # type: ignore[arg-type]
        for value in (3, "text", None, b"bytes", [1, 2], {}, object(), [ONE], bytearray(4)):
            with pytest.raises(UnsupportedError, match=r"^tensor 'm\.y': "):
                out.add("m.y", value)
        with pytest.raises(TensorNotFoundError, match=r"'m\.v': not in this record; close names: 'm\.w'"):
            out.tie("x", "m.v")
        with pytest.raises(TensorNotFoundError):
            out.tie("x", ("m.w", ""))
        out.module("list", "list")
        for name in ("list.1", "list.0"):  # they do not count from 0
            out.add(name, ONE)

    want = {"m": {"w": ONE, "n": 1, "x": {"y": {}}}, "list": {"1": ONE, "0": ONE}}
    r.assert_same(written(write).tree(), want)


def test_parts_share_what_they_share() -> None:
    base = np.arange(24.0).reshape(4, 6)
    file = io.BytesIO()
    with RecordWriter(file) as out:
        parts = out.parts([base, base[1:3], base.T, base.copy(), base, base[:, 0]])
        for number, part in enumerate(reversed(parts)):
            out.add(f"w{number}", part)
        out.add("once more", parts[0])
        out.parts([np.ones(1000)])  # not added, so not written
    rec = load_record(file.getvalue(), verify="full")
    r.assert_same(list(rec.values()), [base[:, 0], base, base, base.T, base[1:3], base, base])
    assert rec.info("w0").tied == ("w0", "w1", "w3", "w4", "w5", "once more")
    assert rec.nbytes == base.nbytes
    writable = load_record(file.getvalue(), mode="c")
    writable["w1"][:] = 0
    assert [not view.any() for view in writable.values()] == [True, True, False, True, True, True, True]


def test_parts_of_another_writer_are_refused() -> None:
    with RecordWriter(io.BytesIO()) as one, RecordWriter(io.BytesIO()) as other:
        (part,) = one.parts([TWO])
        one.add("p", part)
        with pytest.raises(UnsupportedError, match=r"tensor 'p': one of the \.parts\(\.\.\.\) of another RecordWriter"):
            other.add("p", part)


CALLS: list[Callable[[RecordWriter], Any]] = [
    lambda out: out.add("x", ONE), lambda out: out.tie("x", "a"), lambda out: out.attribute("x", 1),
    lambda out: out.module("x"), lambda out: out.tensor("x", "u1", (1,)).__enter__(),
]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_writer_writes_only_inside_its_block_and_only_once(fails: bool, tmp_path: Path) -> None:
    def check_closed() -> None:
        for call in CALLS:
            with pytest.raises(UnsupportedError, match="a RecordWriter writes only inside its with block"):
                call(out)

    out = RecordWriter(tmp_path / "m.zcr")
    assert not os.listdir(tmp_path)
    check_closed()
    with pytest.raises(KeyError) if fails else contextlib.nullcontext(), out:
        out.add("a", ONE)
        assert out.report is None
        with pytest.raises(UnsupportedError, match="this RecordWriter was used before; make a new one"), out:
            pass
        if fails:
            raise KeyError
    assert (out.report is None) == fails
    check_closed()
    with pytest.raises(UnsupportedError, match="this RecordWriter was used before; make a new one"), out:
        pass
    assert os.listdir(tmp_path) == ([] if fails else ["m.zcr"])


def test_options_are_checked_before_anything_is_opened(path: Path) -> None:
    for options, message in (
        ({"alignment": 48}, "alignment 48"), ({"digest": "md5"}, "digest 'md5' is not known"),
    ):  # fmt: skip
        with pytest.raises(LimitError, match=message):
            RecordWriter(path, **options)
    with pytest.raises(UnsupportedError, match="metadata 'x': values are None, bool"):
        RecordWriter(path, metadata={"x": ONE}).__enter__()
    with pytest.raises(SourceError, match="cannot write: No such file or directory"):
        RecordWriter(path.parent / "missing" / "m.zcr").__enter__()
    with pytest.raises(UnsupportedError, match="metadata 'x': values are None, bool"), RecordWriter(path) as out:
        out.metadata["x"] = ONE


def test_one_tensor_is_written_at_a_time() -> None:
    def write(out: RecordWriter) -> None:
        out.add("a", ONE)
        with out.tensor("w", "float32", (3,)) as opened:
            opened.write(ONE[:1])
            for call in CALLS:
                with pytest.raises(UnsupportedError, match="tensor 'w' is not finished; one is written at a time"):
                    call(out)
            for piece in (ONE, ONE.astype("f8")[:1], None, "x", b"123456789"):  # refused pieces are not there
                with pytest.raises(ProducerError):
                    opened.write(piece)
            opened.write(ONE[1:])
        with pytest.raises(ProducerError, match="12 bytes were declared, at least 13 produced"):
            opened.write(b"x")
        out.add("c", TWO)

    r.assert_same(written(write).tree(), {"a": ONE, "w": ONE, "c": TWO})


def fill(out: RecordWriter, pieces: list[Any]) -> None:
    with out.tensor("m.w", "float32", (3,)) as opened:
        for piece in pieces:
            opened.write(piece)


UNFINISHED: dict[str, tuple[Callable[[RecordWriter], Any], str]] = {
    "too little": (lambda out: fill(out, [ONE[:2]]), "12 bytes were declared, 8 produced"),
    "nothing": (lambda out: fill(out, []), "12 bytes were declared, 0 produced"),
    "too much": (lambda out: fill(out, [ONE, b"x"]), "12 bytes were declared, at least 13 produced"),
    "another dtype": (lambda out: fill(out, [TWO]), "declared as float32, a piece is int64"),
    "a lazy tensor's too little": (lambda out: out.add("m.w", LazyTensor("f4", (3,), [b""])), "12 bytes were declared"),
    "a lazy tensor's error": (lambda out: out.add("m.w", LazyTensor("f4", (3,), lambda: 1 // 0)), "by zero"),
}


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("what", UNFINISHED)
def test_unfinished_tensor_leaves_no_file(what: str, swallowed: bool, path: Path) -> None:
    call, message = UNFINISHED[what]
    kind = ZeroDivisionError if "zero" in message else ProducerError
    last = "tensor 'm.w': was left unfinished by an error; nothing is written" if swallowed else message
    with pytest.raises(ProducerError if swallowed else kind, match=last), RecordWriter(path) as out:
        out.add("a", ONE)
        with pytest.raises(kind, match=message) if swallowed else contextlib.nullcontext():
            call(out)
        if swallowed:
            with pytest.raises(UnsupportedError, match=r"tensor 'm\.w' is not finished"):
                out.add("b", ONE)


def test_pieces_in_fortran_order_stay_so() -> None:
    values = np.arange(24.0).reshape(2, 3, 4)

    def write(out: RecordWriter) -> None:
        with out.tensor("f", "float64", (2, 3, 4), order="F") as opened:
            opened.write(values.T[:2].tobytes())
            opened.write(values.T[2:])
        with out.tensor("vector", "float64", (1, 24, 1), order="F") as opened:
            opened.write(values)
        with out.tensor("empty", "float64", (2, 0), order="F"):
            pass
        with pytest.raises(UnsupportedError, match="tensor 'p': int4 does not fill whole bytes"):
            out.tensor("p", "int4", (2, 2), order="F").__enter__()

    rec = written(write)
    r.assert_same(rec.tree(), {"f": values, "vector": values.reshape(1, 24, 1), "empty": np.zeros((2, 0))})
    assert rec["f"].flags.f_contiguous
    assert rec.info("vector").strides is None
