"""Saved values come back: the tree, its order, the types of its values, its names. Element types are apart."""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import math
import struct
import tempfile
import types
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import records as r
import torch
from digest_trees import LISTS, swapped
from exhaustive import rounds
from hypothesis import strategies as st

import zcrecord
from zcrecord import LimitError, MismatchError, PackedTensor, RecordError, RecordWriter, StringTensor
from zcrecord.codec import conventions
from zcrecord.dtypes import DType
from zcrecord.formats import convert

ONE = np.ones(3, np.float32)
TWO = np.arange(4, dtype=np.int64)


@hypothesis.given(tree=r.trees(), digest=st.sampled_from(["xxh3", "none"]), alignment=st.sampled_from(r.ALIGNMENTS))
@hypothesis.settings(max_examples=rounds(200), deadline=None)
def test_tree_is_what_was_saved(tree: Any, digest: str, alignment: int) -> None:
    hypothesis.assume(r.names_are_unique(tree))
    rec = r.round_trip(tree, digest=digest, alignment=alignment)
    r.assert_same(rec.tree(), tree)


@pytest.mark.slow
@hypothesis.given(tree=r.trees())
@hypothesis.settings(max_examples=rounds(60), deadline=None)
def test_loaded_record_and_its_tree_can_be_saved_again(tree: Any) -> None:
    hypothesis.assume(r.names_are_unique(tree))
    rec = r.round_trip(tree)
    r.assert_same(r.round_trip(rec.tree()).tree(), tree)
    again = r.round_trip(rec)
    r.assert_same(again.tree(), tree)
    assert list(again) == list(rec)
    assert again.content_digest() == rec.content_digest()


def test_tensors_keep_their_order_across_modules() -> None:
    rec = r.round_trip({"b": {"w": ONE}, "z": ONE, "a": {"w": TWO, "in": {"w": TWO}, "a": ONE}, "y": TWO})
    assert list(rec) == ["b.w", "z", "a.w", "a.in.w", "a.a", "y"]


def test_dataclass_comes_back_as_dict_and_keeps_its_class_name() -> None:
    rec = r.round_trip(r.Layer({"layer": r.Layer(ONE, None)}, r.Pair(1, TWO)))
    r.assert_same(rec.tree(), {"weight": {"layer": {"weight": ONE, "bias": None}}, "bias": (1, TWO)})
    kinds = [(m.kind, m.type_name) for m in rec.modules.values()]
    assert kinds == [("object", "Layer"), ("mapping", ""), ("object", "Layer"), ("tuple", "Pair")]


def test_any_mapping_is_a_module() -> None:
    tree = OrderedDict(b=MappingProxyType({"w": ONE, "n": 1}), a=TWO)
    r.assert_same(r.round_trip(tree).tree(), {"b": {"w": ONE, "n": 1}, "a": TWO})


ENDS = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1, 2**63, 2**64 - 1]
QUIET = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_1234))[0]
FLOATS = [0.0, -0.0, 1.5, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, QUIET]


@pytest.mark.parametrize(
    "value",
    [None, True, False, *ENDS, *FLOATS, "", "text", "zwölf €", "a\0b", "\n", b"", b"\0", b"bytes" * 9],
    ids=repr,
)
def test_attribute_keeps_its_type_and_every_bit(value: Any) -> None:
    tree = {"alone": value, "list": [value, value], "tuple": (value,), "w": ONE, "in": {"value": value}}
    rec = r.round_trip(tree)
    r.assert_same(rec.tree(), tree)
    r.assert_same(rec.attributes, {k: tree[k] for k in ("alone", "list", "tuple")} | {"in.value": value})


def test_numbers_of_numpy_are_tensors_and_its_text_is_an_attribute() -> None:
    rec = r.round_trip({"double": np.float64(1.5), "text": np.str_("a"), "half": np.float16(2.5), "flag": np.True_})
    assert rec.attributes == {"text": "a"}
    assert {n: (v.dtype, v.shape, v.item()) for n, v in rec.items()} == {
        "double": (np.dtype(np.float64), (), 1.5),
        "half": (np.dtype(np.float16), (), 2.5),
        "flag": (np.dtype(bool), (), True),
    }


LONG = "läng." * 2000
NAMES = [
    "a", "a.b", ".", "..", ".a", "a.", "a..b", "a/b/c", "/", "\\", " ", "'", '"', "\n", "\x01", "\x7f", "é", "e\u0301",
    "名前", "Ω" * 33, "\ufffd", "\uffff", "\U00010000", "\U0001f600", "\ud7ff", LONG, LONG + "x", LONG[:-1],
    *("p" * n for n in (7, 8, 9, 31, 32, 33, 63, 64, 65, 255, 256, 257)),
    *("p" * 31 + c for c in "aAz~é"),
]  # fmt: skip


def test_every_name_is_found_again() -> None:
    rec = r.round_trip({name: np.full(2, i) for i, name in enumerate(NAMES)})
    assert list(rec) == NAMES
    for i, name in enumerate(NAMES):
        assert name in rec
        assert rec[name].tolist() == [i, i]
    assert not [name for name in NAMES if name + "?" in rec or name[:-1] + "?" in rec]


def test_every_name_may_be_a_module_an_attribute_or_metadata() -> None:
    tree = {"m": {name: {"w": ONE, name: 1} for name in NAMES}, **{name: [ONE] for name in NAMES}}
    rec = r.round_trip(tree, metadata=dict.fromkeys(NAMES, 2))
    r.assert_same(rec.tree(), tree)
    assert rec.metadata == dict.fromkeys(NAMES, 2)
    assert rec.attributes == {f"m.{name}.{name}": 1 for name in NAMES}


@pytest.mark.parametrize("verify", ["touch", "index", "full"])
def test_names_are_ordered_by_bytes_and_not_by_utf16(verify: Any) -> None:
    names = ["\U00010000", "\uffff", "z", "\U0010ffff", "\ue000", "é", "Z"]  # surrogates sort before \ue000 in UTF-16
    rec = zcrecord.load_record(r.saved({n: np.full(1, i) for i, n in enumerate(names)}), verify=verify)
    assert [int(rec[n][0]) for n in names] == list(range(len(names)))


def test_flat_mapping_with_dots_stays_flat() -> None:
    tree = {"encoder.0.weight": ONE, "encoder.0": TWO, "encoder": ONE}
    rec = r.round_trip(tree)
    assert list(rec.modules) == [""]
    r.assert_same(rec.tree(), tree)


def test_dotted_names_of_a_state_dict_become_modules() -> None:
    rec = r.round_trip(r.Owner({"enc.0.weight": ONE, "enc.0.bias": TWO, "enc.1.weight": ONE, "steps": 3, "scale": TWO}))
    assert list(rec) == ["enc.0.weight", "enc.0.bias", "enc.1.weight", "scale"]
    assert list(rec.modules) == ["", "enc", "enc.0", "enc.1"]
    want = {"enc": {"0": {"weight": ONE, "bias": TWO}, "1": {"weight": ONE}}, "steps": 3, "scale": TWO}
    r.assert_same(rec.tree(), want)


def test_state_dict_may_hold_modules_among_its_values() -> None:
    rec = r.round_trip(r.Owner({"b": {"x": ONE}, "a.w": TWO, "c": [ONE, TWO], "a.b": r.Layer(ONE, 1)}))
    assert list(rec) == ["b.x", "a.w", "c.0", "c.1", "a.b.weight"]
    r.assert_same(rec.tree(), {"b": {"x": ONE}, "a": {"w": TWO, "b": r.Layer(ONE, 1)}, "c": [ONE, TWO]})


DEEP = [".".join(["x"] * 100), ".".join(["x"] * 101), ".".join(["y"] * 5000)]


@hypothesis.given(names=st.lists(st.text("ab.", min_size=1, max_size=6), unique=True, max_size=12))
@hypothesis.example(names=DEEP)
@hypothesis.settings(max_examples=rounds(150), deadline=None)
def test_any_state_dict_keeps_its_names_and_their_order(names: list[str]) -> None:
    rec = r.round_trip(r.Owner({name: np.full(1, i) for i, name in enumerate(names)}))
    assert list(rec) == names
    assert [int(v[0]) for v in rec.values()] == list(range(len(names)))


METADATA = {
    "z": None, "flag": True, "int": -5, "big": 2**64 - 1, "float": math.inf, "text": "ä\0b", "bytes": b"abc", "no": b"",
    "list": [1, 2], "words": ("a", "b"), "none": [], "blobs": [b"x", b"", b"x"], "ints": r.Pair(1, 2),
}  # fmt: skip


def test_metadata_comes_back_by_name_and_may_be_replaced() -> None:
    rec = r.round_trip({"w": ONE, "int": 1}, metadata=METADATA)
    r.assert_same(rec.metadata, {key: METADATA[key] for key in sorted(METADATA)})
    assert (rec.attributes, list(rec)) == ({"int": 1}, ["w"])
    assert r.round_trip(rec, metadata={"j": 2}).metadata == {"j": 2}
    assert r.round_trip(rec, metadata={}).metadata == {}


def test_modules_nest_a_hundred_deep() -> None:
    tree: Any = {"w": ONE}
    for _ in range(99):
        tree = {"m": tree}
    rec = r.round_trip(tree)
    assert len(rec.modules) == 100
    r.assert_same(rec.tree(), tree)


@pytest.mark.parametrize("value", [memoryview(b"abc"), memoryview(b"abcd").cast("B", (2, 2)), memoryview(b"")], ids=len)
def test_read_only_memoryview_is_bytes(value: memoryview) -> None:
    rec = r.round_trip({"x": value, "l": [value, b"x"]}, metadata={"x": value})
    r.assert_same(rec.tree(), {"x": bytes(value), "l": [bytes(value), b"x"]})
    r.assert_same(rec.metadata, {"x": bytes(value)})


# Element types and shapes.


SHAPES = [(), (1,), (3,), (2, 3), (3, 1, 5), (0,), (3, 0, 2), (0, 2**40), (1,) * 64, (2, 1) * 5 + (3,)]
EVERY = pytest.mark.parametrize("kind", r.NUMERIC, ids=lambda d: d.name)


@pytest.mark.exhaustive
@EVERY
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"rank{len(s)}x{math.prod(s)}")
def test_every_dtype_and_shape_comes_back(kind: DType, shape: tuple[int, ...]) -> None:
    array = r.filled(kind, shape)
    rec = r.round_trip({"x": array, "m": {"x": array}})
    r.assert_same(rec.tree(), {"x": array, "m": {"x": array}})
    info = rec.info("m.x")
    assert (info.dtype, info.bits, info.shape, info.strides) == (kind, kind.bits, shape, None)
    assert info.nbytes == math.ceil(math.prod(shape) * kind.bits / 8)


NARROW = [d for d in r.WHOLE if d.bits <= 16 and d.name != "bool"]


@pytest.mark.parametrize("kind", NARROW, ids=lambda d: d.name)
def test_every_bit_pattern_survives(kind: DType) -> None:
    assert kind.numpy is not None
    array = np.arange(1 << kind.bits, dtype=np.uint32).astype(f"<u{kind.bits // 8}").view(kind.numpy)
    assert r.round_trip({"x": array})["x"].tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", r.PACKED, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(), (7,), (4, 2, 3), (0, 4)], ids=str)
def test_narrow_elements_saved_again_are_the_same(kind: DType, shape: tuple[int, ...]) -> None:
    data = r.saved({"x": r.filled(kind, shape), "m": {"y": r.filled(kind, (9, 5), 1)}})
    rec, private = zcrecord.load_record(data), zcrecord.load_record(data, mode="c")
    unpacked = {"x": rec["x"].unpack(), "m": {**rec.module("m")}}
    for again in (rec, rec.tree(), unpacked, private, private.tree()):
        assert r.saved(again) == data


@pytest.mark.parametrize("rank", [65, 256])
def test_rank_above_64_is_refused_for_the_classes_that_could_have_it(rank: int) -> None:
    shape = (1,) * rank
    for tensor in (PackedTensor(np.ones(1, np.uint8), "int4", shape), StringTensor.from_strings(["a"], shape)):
        with pytest.raises(LimitError, match=rf"tensor 'm\.x': rank {rank} is more than 64"):
            r.saved({"m": {"x": tensor}})


TEXTS = [[], ["a"], ["", "x", ""], ["ä", "名前", "\U0001f600"], ["x" * 1000, "y"], ["12345678"], ["a b", "\n"]]


@pytest.mark.parametrize("texts", TEXTS, ids=lambda t: ascii(t)[:15])
def test_arrays_of_text_come_back_as_string_tensors(texts: list[str]) -> None:
    array = np.array(texts, np.str_)
    big, wide = array.astype(array.dtype.newbyteorder(">")), array.astype(np.dtypes.StringDType())
    rec = r.round_trip({"x": array, "big": big, "wide": wide, "step": array[::-1], "flat": array.reshape(1, -1).T})
    assert rec["x"].unpack().tolist() == rec["big"].unpack().tolist() == rec["wide"].unpack().tolist() == texts
    assert rec["step"].unpack().tolist() == texts[::-1]
    assert rec["flat"].shape == (len(texts), 1)
    assert rec["flat"].unpack().tolist() == [[text] for text in texts]
    assert rec.info("x").dtype.name == "string"


@pytest.mark.parametrize("digest", ["xxh3", "none", None])
@pytest.mark.parametrize("alignment", r.ALIGNMENTS)
def test_every_alignment_and_digest_gives_the_same_record(digest: str | None, alignment: int) -> None:
    tree = {d.name: r.filled(d, (3, 5)) for d in r.NUMERIC} | {"large": np.arange(1 << 17), "s": np.array(["a"])}
    rec = r.round_trip(tree, alignment=alignment, digest=digest)
    r.assert_same(rec.tree(), tree)
    for name in rec:
        info = rec.info(name)
        assert info.offset % alignment == 0
        assert info.alignment >= (max(alignment, 16384) if name == "large" else alignment)
        assert (info.digest is None) == (digest != "xxh3")


def test_arrays_over_any_memory_are_saved(tmp_path: Path) -> None:
    want = np.arange(12, dtype=np.float32)
    want.tofile(tmp_path / "raw")
    readonly = want.copy()
    readonly.flags.writeable = False
    tree = {
        "memmap": np.memmap(tmp_path / "raw", np.float32, "r"),
        "bytes": np.frombuffer(want.tobytes(), np.float32),
        "unaligned": np.frombuffer(b"x" + want.tobytes(), np.uint8)[1:].view(np.float32),
        "ctypes": np.ctypeslib.as_array((ctypes.c_float * 12)(*want)),
        "readonly": readonly,
        "subclass": want.view(np.recarray),
    }
    rec = r.round_trip(tree)
    assert {name: view.tolist() for name, view in rec.items()} == dict.fromkeys(tree, want.tolist())
    assert {type(view) for view in rec.values()} == {np.ndarray}


# Whatever is accepted.


WORDS = st.text("ab_é\n", min_size=1, max_size=3)
INTS = st.one_of(st.integers(-20, 20), st.sampled_from([-(2**63), 2**63 - 1, 2**63, 2**64 - 1]))
WIDE = st.one_of(st.integers(), st.integers(-(2**500), 2**500), st.sampled_from([2**64, -(2**63) - 1]))
NUMBERS = ["f2", "f4", "f8", "i1", "i8", "u1", "u8", "c8", "c16", "?"]
NUMPY = st.builds(lambda kind, number: np.dtype(kind).type(number), st.sampled_from(NUMBERS), st.integers(0, 1))
PLAIN = st.one_of(
    st.none(), st.booleans(), WIDE, st.floats(), st.complex_numbers(), st.text(max_size=5), st.binary(max_size=5),
    NUMPY, st.sampled_from(["0", "-1", "torch", b"", "", [], (), {}]),
)  # fmt: skip
TORCH = st.sampled_from([torch.arange(3), torch.ones(2, 2).bfloat16(), torch.zeros(0), torch.tensor(1.5)])
HASHED = st.one_of(st.none(), st.booleans(), WIDE, st.floats(allow_nan=False), WORDS, st.tuples(WORDS, INTS))
TIMES = st.one_of(st.datetimes(), st.times()).map(lambda time: time.replace(fold=0))
STANDING = st.one_of(
    st.sets(HASHED, max_size=4), st.frozensets(HASHED, max_size=4), st.dictionaries(HASHED, INTS, max_size=3),
    st.builds(collections.deque, st.lists(HASHED, max_size=3), st.none() | st.integers(3, 9)),
    st.dictionaries(WORDS, INTS, max_size=3).map(lambda items: collections.defaultdict(int, items)),
    st.builds(lambda value: types.SimpleNamespace(a=value), HASHED),
    st.builds(lambda value: argparse.Namespace(a=value), HASHED),
    st.builds(Path, WORDS), st.dates(), TIMES, st.timedeltas(),
)  # fmt: skip
DTYPES = st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size([2, 3])])
ODD_KEYS = st.sampled_from(["", "a\0", "\ud800", True, 1.0, None, (1,), b"k", 2**64, -(2**70), "1", "a.b", np.int64(3)])
ODD = st.sampled_from([{b"a"}, range(2), object, np.dtype("f4"), "\ud800", slice(1), torch.strided])


def nested(leaves: Any, keys: Any, *, tuples: bool = True) -> Any:
    """Records of these leaves, nested in every way, under these keys."""
    inner = st.recursive(
        leaves,
        lambda x: st.one_of(
            st.lists(x, max_size=3),
            st.lists(x, max_size=3).map(tuple),
            st.dictionaries(keys, x, max_size=4),
            st.dictionaries(keys, x, max_size=3).map(collections.OrderedDict),
            st.dictionaries(keys, st.integers(0, 9), max_size=3).map(collections.Counter),
            *([st.builds(r.Pair, x, x)] if tuples else []),
        ),
        max_leaves=8,
    )
    return st.builds(lambda value: {"run": value}, inner)


def expected(value: Any) -> Any:
    """Return the value that comes back: an equal one, maybe of another class."""
    if isinstance(value, torch.Tensor):
        return value.numpy() if value.dtype != torch.bfloat16 else value
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, dict) and type(value) not in (dict, collections.OrderedDict, collections.Counter):
        return value
    if isinstance(value, dict):
        return {int(k) if isinstance(k, np.integer) else k: expected(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(expected, value))
    return value


def check(got: Any, want: Any) -> None:
    """Fail unless it came back, with the types of keys."""
    if isinstance(want, dict):
        assert [(type(key), key) for key in got] == [(type(key), key) for key in want]
        for key, value in want.items():
            check(got[key], value)
    elif isinstance(want, list | tuple):
        assert (type(got), len(got)) == (type(want), len(want))
        for one, other in zip(got, want, strict=True):
            check(one, other)
    elif isinstance(want, torch.Tensor):
        assert np.asarray(got).tobytes() == want.view(torch.int16).numpy().tobytes()
    else:
        r.assert_same(got, want)


def saved(value: Any) -> zcrecord.Record | None:
    """Return the record of a value, None if it is refused with the place named."""
    try:
        return r.round_trip(value)
    except RecordError as error:
        assert error.tensor is not None or "values cannot be saved: 'run" in str(error), error
        assert "run" in str(error)
        return None


def converted(value: Any) -> zcrecord.Record | None:
    """Return the record of what torch saved, None if it is refused with the place named."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.pt"
        torch.save(value, path)
        try:
            convert(path, path.with_suffix(".zcr"))
        except RecordError as error:
            assert "tensor 'run" in str(error) or "in 'run" in str(error) or "holds an object of" in str(error), error
            return None
        return zcrecord.load_record(path.with_suffix(".zcr").read_bytes(), verify="full")


KEYS = st.one_of(WORDS, INTS)
ODD_TREES = nested(st.one_of(PLAIN, ODD), st.one_of(KEYS, ODD_KEYS))


@hypothesis.given(value=nested(st.one_of(PLAIN, TORCH, DTYPES, STANDING), KEYS))
@hypothesis.settings(max_examples=rounds(200), deadline=None)
def test_every_state_of_a_run_comes_back(value: Any) -> None:
    record = saved(value)
    assert record is not None
    check(record.tree(), expected(value))


@hypothesis.given(value=nested(st.one_of(PLAIN, TORCH, DTYPES, STANDING), KEYS, tuples=False))
@hypothesis.settings(max_examples=rounds(100), deadline=None)
def test_every_state_that_torch_saved_comes_back(value: Any) -> None:
    record = converted(value)
    assert record is not None
    check(record.tree(), expected(value))
    assert record.content_digest() == r.round_trip(value).content_digest()


@pytest.mark.parametrize("door", [saved, converted])
@hypothesis.given(value=ODD_TREES)
@hypothesis.settings(max_examples=rounds(150), deadline=None)
def test_anything_comes_back_or_is_refused_with_its_place(door: Any, value: Any) -> None:
    if (record := door(value)) is not None:
        check(record.tree(), expected(value))


def test_this_notices_a_key_that_becomes_text() -> None:
    with pytest.raises(AssertionError):
        check({"a": {"0": 1}}, {"a": {0: 1}})


@pytest.mark.parametrize(("items", "vector", "names"), LISTS.values(), ids=LISTS)
def test_lists_of_others_stay_lists(items: Any, vector: str, names: tuple[str, str], tmp_path: Path) -> None:
    """R76: no reader refuses places that are not the keys, so that items are where their places say."""
    path = tmp_path / "m.zcr"
    path.write_bytes(swapped(r.saved({"m": items, "w": np.ones(3)}), vector, *names))
    record = zcrecord.load_record(path, verify="full")
    whole = record.tree()
    assert isinstance(whole["m"], list | tuple)
    r.assert_same(record.select(None, rename={"m": "n"}).tree(), {"n": whole["m"], "w": whole["w"]})
    with zcrecord.edit(path, tmp_path / "edited.zcr") as edited:
        edited["more"] = np.ones(2)
    r.assert_same(zcrecord.load_record(tmp_path / "edited.zcr").tree(), whole | {"more": np.ones(2)})


# Keys that are integers.


MOMENT = {"step": np.array(5.0), "exp_avg": ONE}
STATE = {"state": {0: MOMENT, 1: MOMENT, 10: {"n": 1}}, "groups": [{"lr": 0.1, "params": [0, 1, 10]}]}
# Of these only the first three read as integers.
NUMERALS = ["0", "-1", str(2**64 - 1)]
NUMERALS += ["01", "-0", "+1", "1.0", " 1", "1_0", "0x1", "١", "１", str(2**64), "9" * 5000, "a"]


def keys(tree: Any) -> list[tuple[type, Any]]:
    """Keys with their types: 1 and True and 1.0 are the same key to a dict."""
    return [(type(key), key) for key in tree]


def test_integers_stay_integers_in_their_order() -> None:
    record = {np.int64(7): ONE, -1: 1, 2**64 - 1: None, -(2**63): {"a": {3: ONE}}, 0: [{5: ONE}], "name": {}}
    rec = r.round_trip(record)
    r.assert_same(rec.tree(), record)
    assert keys(rec.tree()) == [(type(key), key) for key in (7, *list(record)[1:])]
    assert list(rec) == ["7", f"{-(2**63)}.a.3", "0.0.5"], "names are text"
    assert [m.kind for m in rec.modules.values()] == ["numbered", "mapping", "numbered", "list", "numbered", "mapping"]
    for again in (r.round_trip(rec), r.round_trip(rec.tree())):
        r.assert_same(again.tree(), record)
        assert again.content_digest() == rec.content_digest()


def test_text_stays_text_even_if_it_reads_as_an_integer() -> None:
    texts = [key for key in NUMERALS if not isinstance(conventions.key_of_text(key), int)]
    assert texts == NUMERALS[3:]
    for record, kind in (({5: ONE} | dict.fromkeys(texts, ONE), "numbered"), (dict.fromkeys(NUMERALS, ONE), "mapping")):
        rec = r.round_trip(record)
        assert keys(rec.tree()) == keys(record)
        assert rec.modules[""].kind == kind


def test_integers_and_their_texts_have_other_content() -> None:
    numbers, texts = r.round_trip({"s": {0: ONE}}), r.round_trip({"s": {"0": ONE}})
    assert list(numbers) == list(texts)
    assert numbers.content_digest() != texts.content_digest()
    assert numbers.content_digest() == r.round_trip({"s": {0: ONE}}, alignment=4096, digest="none").content_digest()


def test_parts_of_a_record_keep_the_integers() -> None:
    rec = r.round_trip(STATE)
    r.assert_same(rec.module("state").tree(), STATE["state"])
    r.assert_same(rec.module("state.0").tree(), MOMENT)
    r.assert_same(rec.select("state.1.*").tree(), {"state": {1: MOMENT}})
    r.assert_same(rec.select("state.1", rename={"state.1": "state.4"}).tree(), {"state": {4: MOMENT}})
    r.assert_same(rec.select("state.1", rename={"state": ""}).tree(), {1: MOMENT})
    joined = r.round_trip({"state": {0: ONE}, "head": ONE}).select(rename={"head": "state.x"})
    r.assert_same(joined.tree(), {"state": {0: ONE, "x": ONE}})


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_other_formats_bring_the_integers_back(suffix: str, tmp_path: Path) -> None:
    zcrecord.save_record(STATE | {"wide": 2**80, "z": 1j}, tmp_path / "m.zcr")
    convert(tmp_path / "m.zcr", tmp_path / f"m{suffix}")
    convert(tmp_path / f"m{suffix}", tmp_path / "again.zcr")
    again = zcrecord.load_record(tmp_path / "again.zcr")
    assert again.content_digest() == zcrecord.load_record(tmp_path / "m.zcr").content_digest()
    assert keys(again.tree()["state"]) == [(int, 0), (int, 1), (int, 10)]


def test_key_of_any_length_costs_nothing_and_is_text(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "m.zcr") as out:
        out.module("", "numbered")
        for key in NUMERALS:
            out.attribute((key,), 1)
    found = zcrecord.load_record(tmp_path / "m.zcr").tree()
    assert keys(found) == [(int, 0), (int, -1), (int, 2**64 - 1), *((str, key) for key in NUMERALS[3:])]


@dataclasses.dataclass
class Moment:
    step: float
    exp_avg: Any


class Run(NamedTuple):
    state: dict[int, Moment]
    epoch: int


def test_integers_are_the_keys_of_a_typed_dict() -> None:
    run = zcrecord.load_record(r.saved({"state": {0: MOMENT, 7: MOMENT}, "epoch": 3}), into=Run)
    assert keys(run.state) == [(int, 0), (int, 7)]
    assert run.state[7].step == 5.0


def test_union_takes_the_dict_whose_keys_fit() -> None:
    both = dict[str, dict[str, int] | dict[int, int]]
    found: Any = zcrecord.load_record(r.saved({"a": {1: 2}, "b": {"1": 2}}), into=both)
    assert found == {"a": {1: 2}, "b": {"1": 2}}
    mixed: Any = zcrecord.load_record(r.saved({1: 2, "x": 3}), into=dict[int | str, int])
    assert mixed == {1: 2, "x": 3}


def test_integers_are_no_texts_and_texts_no_integers() -> None:
    with pytest.raises(MismatchError, match=r"tensor 's': expected str, found int 0"):
        zcrecord.load_record(r.saved({"s": {0: 1}}), into=dict[str, dict[str, int]])
    with pytest.raises(MismatchError, match=r"tensor 's': expected int, found str '0'"):
        zcrecord.load_record(r.saved({"s": {"0": 1}}), into=dict[str, dict[int, int]])


def test_values_without_a_type_of_their_own_fill_fields() -> None:
    class Values(NamedTuple):
        wide: int
        phase: complex
        dtype: torch.dtype
        device: torch.device
        any: Any
        several: list[int]

    values = Values(2**90, 1 - 2j, torch.bfloat16, torch.device("cuda:1"), -(2**64), [2**64, 1])
    assert zcrecord.load_record(r.saved(values), into=Values) == values


FORGED: list[tuple[str, Any]] = [
    ("zcr:int", "5"), ("zcr:int", "0x05"), ("zcr:int", "0X5"), ("zcr:int", "0x"), ("zcr:int", 5), ("zcr:int", ["0x5"]),
    ("zcr:int", "0x1" + "0" * 1024), ("zcr:int", "0x5"), ("zcr:int", hex(2**64 - 1)), ("zcr:int", hex(-(2**63))),
    ("zcr:complex", 1.0), ("zcr:complex", (1.0,)), ("zcr:complex", (1, 2)), ("zcr:complex", "1j"),
    ("zcr:complex", [1.0, 2.0]),
    ("zcr:torch_dtype", "Tensor"), ("zcr:torch_dtype", "load"), ("zcr:torch_dtype", "_inductor"),
    ("zcr:torch_dtype", 1), ("zcr:torch_device", "nowhere"), ("zcr:torch_device", ""), ("zcr:torch_device", 0),
    ("zcr:later", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("type_name", "value"), FORGED)
def test_module_that_only_says_it_stands_for_a_value_is_an_object(type_name: str, value: Any, tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "m.zcr") as out:
        out.module("x", "object", type_name)
        out.attribute("x.value", value)
        out.module("y", "object", "zcr:complex")
        out.attribute("y.value", (1.0, 2.0))
        out.attribute("y.more", 1)
    record = zcrecord.load_record(tmp_path / "m.zcr")
    r.assert_same(record.tree(), {"x": {"value": value}, "y": {"value": (1.0, 2.0), "more": 1}})


LOADED = """
import sys, zcrecord
record = zcrecord.load_record(sys.argv[1])
print(record.tree(), "torch" in sys.modules)
print(record.tree("torch"))
"""


@pytest.mark.exhaustive(keep=0)
def test_no_file_has_torch_imported_and_until_it_is_its_values_are_objects(tmp_path: Path) -> None:
    zcrecord.save_record({"dtype": torch.float16, "device": torch.device("cpu"), "n": 1}, tmp_path / "m.zcr")
    before, after = r.run_python(LOADED, tmp_path / "m.zcr").stdout.splitlines()
    assert before == "{'dtype': {'value': 'float16'}, 'device': {'value': 'cpu'}, 'n': 1} False"
    assert after == "{'dtype': torch.float16, 'device': device(type='cpu'), 'n': 1}"
