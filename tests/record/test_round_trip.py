"""Saved values come back: the tree, its order, the types of its values, its names. Element types are apart."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import hypothesis
import numpy as np
import pytest
import records as r
from exhaustive import rounds
from hypothesis import strategies as st

import zcrecord

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
