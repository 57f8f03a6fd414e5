"""Typed records: what is saved comes back as the class it was, arrays still views; unions are told apart."""

from __future__ import annotations

import collections
import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import hypothesis
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import records as r
from exhaustive import rounds
from hypothesis import strategies as st
from typed_classes import (
    F32,
    MLP,
    B,
    Box,
    Boxes,
    Cell,
    Color,
    Count,
    Deeper,
    Derived,
    Everything,
    Fast,
    Left,
    Level,
    Linear,
    Loose,
    Node,
    Norm,
    Options,
    OwnCell,
    OwnInit,
    Right,
    Size,
    Slow,
    Twin,
    W,
    again,
    refused,
    same,
)

import zcrecord
from zcrecord import PackedTensor, StringTensor, typed


def test_nested_dataclasses_come_back_as_they_were(tmp_path: Path) -> None:
    model = MLP([Linear(W, B), Norm(scale=B), Linear(W)], Size(2), None, {"a.b": Linear(B)}, (1, 2))
    zcrecord.save_record(model, tmp_path / "m.zcr")
    assert same(zcrecord.load_record(tmp_path / "m.zcr", into=MLP), model)
    assert same(zcrecord.load_record(tmp_path / "m.zcr").into(MLP), model)


def test_module_of_a_record_is_loaded_by_itself() -> None:
    rec = r.round_trip({"encoder": {"head": Linear(W, B)}, "step": 3})
    assert same(rec.module("encoder.head").into(Linear), Linear(W, B))
    assert same(rec.select("encoder.*.weight").module("encoder.head").into(Linear), Linear(W))


def test_arrays_are_views_of_the_mapping(tmp_path: Path) -> None:
    zcrecord.save_record(MLP([Linear(W, B)], Size(1), Linear(W)), tmp_path / "m.zcr")
    rec = zcrecord.load_record(tmp_path / "m.zcr")
    model = rec.into(MLP)
    mapped = np.frombuffer(rec.archive.buffer, np.uint8)
    first = model.layers[0]
    assert isinstance(first, Linear)
    assert first.bias is not None
    assert all(np.shares_memory(a, mapped) and not a.flags.writeable for a in (first.weight, first.bias))
    rec.close()
    assert first.weight.tolist() == W.tolist()


def test_tied_tensors_stay_tied() -> None:
    model = again(MLP([Linear(W, B)], Size(1), Linear(W), {"x": Linear(W.copy())}))
    assert r.address(model.layers[0].weight) == r.address(model.head.weight)


def test_every_kind_of_attribute_fills_a_field() -> None:
    value = Everything(
        True, -(2**63), 0.1, "text", b"data", memoryview(b"view"), None, Color.RED, Level.LOW, "a", 5, Count(6),
        [1.0, 2.5], (1, "x"), "either", {"a": [1, "b"]}, (Color.RED, Color.BLUE), ["p", "q"],
    )  # fmt: skip
    got = again(value)
    assert got == value
    assert (type(got.data), type(got.view), type(got.level)) == (bytes, memoryview, Level)


def test_inherited_fields_and_defaults_are_found() -> None:
    assert same(again(Deeper([], Size(1), None, note="n")), Deeper([], Size(1), None, note="n"))
    assert same(again({"layers": [], "size": {"width": 4}, "head": None}, MLP), MLP([], Size(4), None))


def test_default_factories_give_each_instance_its_own() -> None:
    one, two = (again({"layers": [], "size": Size(1), "head": None}, MLP) for _ in range(2))
    assert one.named is not two.named


def test_class_may_hold_itself() -> None:
    chain = Node(1, Node(2, Node(3)))
    assert again(chain) == chain


def test_type_parameters_are_filled_in() -> None:
    boxes = Boxes(["a"], "b", Box("c"))
    assert again(boxes, Boxes[str]) == boxes
    assert same(again(Box(Linear(W)), Box[Linear]), Box(Linear(W)))
    assert again(Box({"a": 1}), Box).content == {"a": 1}
    refused(boxes, Boxes[int], r"tensor 'content\.0': expected int, found str 'a'")
    refused(Boxes([1], 2, Box("c")), Boxes[int], r"tensor 'third\.content': expected int, found str 'c'")


def test_fields_that_the_constructor_does_not_take_are_restored() -> None:
    value = Derived(W, seed=8)
    assert again(value).made == "from 8"
    assert again({"w": W}, Derived).made == "from 3"
    assert again({"w": W, "seed": 5}, Derived).made == "from 5"


def test_dataclass_with_a_constructor_of_its_own_is_made_without_it() -> None:
    got = again({"n": 3}, OwnInit)
    assert (got.n, got.names) == (3, [])
    value = OwnInit("four")
    value.names = ["a"]
    assert again(value) == value


def test_attrs_classes_round_trip() -> None:
    cell = Cell(W, extent=5, units=[1, 2])
    cell.made = "otherwise"
    got = again(cell)
    assert same(got._weight, W)
    assert (type(got), got.size, got.units, got.made) == (Cell, 5, [1, 2], "otherwise")
    assert again({"_weight": W}, Cell).size == 4
    assert again(OwnCell("abc")) == OwnCell("abc")
    refused({"size": 4}, Cell, r"tensor '_weight': expected an array of float32 for Cell\._weight")
    refused({"n": "a"}, OwnCell, r"tensor 'n': expected int, found str 'a'")


def test_namedtuples_round_trip_by_their_field_names() -> None:
    assert again(Size(2, 3)) == Size(2, 3)
    assert again({"height": 3, "width": 2}, Size) == Size(2, 3)
    assert again({"width": 2}, Size) == Size(2)
    untyped = collections.namedtuple("untyped", ["a", "b"])
    assert again(untyped(1, "b")) == untyped(1, "b")
    assert again(Size(2, 3), tuple[int, ...]) == (2, 3)
    refused((2, 3), dict[str, Size], "found a tuple of 2")
    refused([2, "a"], Size, "expected Size, found a list of 2")


@pytest.mark.parametrize("kind", [Options, Loose])
def test_typed_dicts_may_lack_what_is_not_required(kind: Any) -> None:
    assert again({"rate": 0.5, "note": "n"}, kind) == {"rate": 0.5, "note": "n"}
    assert again({"rate": 0.5}, kind) == {"rate": 0.5}
    refused({"note": "n"}, kind, f"tensor 'rate': expected float for {kind.__name__}.rate, found no such key")
    refused({"rate": 0.5, "nota": "n"}, kind, "tensor 'nota': expected no such key, found str 'n'")


@pytest.mark.parametrize(
    "kind, value, want",
    [
        (dict[str, int], {"a": 1}, {"a": 1}),
        (Mapping[str, int], {"a": 1}, {"a": 1}),
        (collections.OrderedDict[str, int], {"b": 1}, collections.OrderedDict(b=1)),
        (dict[Color, int], {"red": 1}, {Color.RED: 1}),
        (dict, {"a": [1]}, {"a": [1]}),
        (dict[str, Any], Node(1), {"value": 1, "next": None}),
        (dict[str, tuple[()]], {"a": ()}, {"a": ()}),
        (dict[str, list[None]], {"a": [None]}, {"a": [None]}),
        (dict[str, list[int]], {"a": (1, 2)}, {"a": [1, 2]}),
        (dict[str, tuple[int, float]], {"a": [1, 2]}, {"a": (1, 2.0)}),
        (dict[str, Sequence[int]], {"a": (1, 2), "b": [3]}, {"a": (1, 2), "b": [3]}),
        (dict[str, Iterable[int]], {"a": {"1": 2, "0": 1}}, {"a": [1, 2]}),
        (dict[str, PurePosixPath], {"a": "/b"}, {"a": PurePosixPath("/b")}),
        (dict[str, Literal[Color.RED, b"x"]], {"a": "red", "b": b"x"}, {"a": Color.RED, "b": b"x"}),
        (dict[str, float], {"a": np.float64(1.5)}, {"a": 1.5}),
        (dict[str, bool | int], {"a": np.True_, "b": 3}, {"a": True, "b": 3}),
        (dict[str, np.int8], {"a": np.int8(3)}, {"a": np.int8(3)}),
        (list[object], [{"a": (1,)}], [{"a": (1,)}]),
        (list, [{"a": (1, "b")}], [{"a": (1, "b")}]),
    ],
)
def test_containers_and_scalars_become_what_the_annotation_says(kind: Any, value: Any, want: Any) -> None:
    got = again(value, kind)
    assert got == want
    assert type(got) is type(want)
    assert [type(v) for v in (got.values() if isinstance(got, dict) else got)] == [
        type(v) for v in (want.values() if isinstance(want, dict) else want)
    ]


@pytest.mark.parametrize("count", [0, 3, 12])
def test_numbered_mapping_fills_a_list_in_the_order_of_its_numbers(count: int) -> None:
    backwards = {str(i): Linear(np.full(1, i, np.float32)) for i in reversed(range(count))}
    assert [int(layer.weight[0]) for layer in again(backwards, list[Linear])] == list(range(count))
    assert isinstance(again(backwards, tuple[Linear, ...]), tuple)


def test_flat_names_with_dots_fill_nested_classes() -> None:
    flat = {"layers.0.weight": W, "layers.1.scale": B, "head.weight": W, "head.bias": B, "named.x.weight": W}
    want = MLP([Linear(W), Norm(scale=B)], Size(1), Linear(W, B), {"x": Linear(W)})
    assert same(again({**flat, "size": Size(1)}, MLP), want)
    assert same(again(r.Owner({**flat, "size.width": 1, "size.height": 1}), MLP), want)


def test_packed_and_string_tensors_fill_fields_of_their_types() -> None:
    kind: Any = dict[str, PackedTensor | StringTensor | F32]
    got = again({"p": PackedTensor.pack(np.ones(3, "int4")), "s": np.array(["a", "b"]), "w": W}, kind)
    assert [type(v) for v in got.values()] == [PackedTensor, StringTensor, np.ndarray]


@pytest.mark.parametrize(
    "kind",
    [
        np.ndarray,
        npt.NDArray[Any],
        npt.NDArray[np.floating[Any]],
        npt.NDArray[np.int8 | np.float32],
        np.ndarray[tuple[int, int], np.dtype[np.float32]],
        np.ndarray[Any, np.dtype[Any]],
        npt.ArrayLike,
        Any,
    ],
    ids=str,
)
def test_array_annotations_take_what_they_name(kind: Any) -> None:
    assert same(again({"w": W}, dict[str, kind])["w"], W)


def test_array_annotations_know_ml_dtypes() -> None:
    half = W.astype("bfloat16")
    assert same(again({"w": half}, dict[str, npt.NDArray[ml_dtypes.bfloat16]])["w"], half)
    refused({"w": half}, dict[str, npt.NDArray[np.float16]], "expected an array of float16, found an array of bfloat16")


class _Square(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, np.ndarray) and value.shape[0] == value.shape[1]


class Square(metaclass=_Square):
    """An annotation that checks shapes by isinstance, as jaxtyping's do."""


def test_annotation_that_is_a_class_of_no_known_kind_checks_for_itself() -> None:
    kind: Any = dict[str, Square]
    assert same(again({"w": W[:, :2]}, kind)["w"], W[:, :2])
    refused({"w": W}, kind, r"tensor 'w': expected Square, found an array of float32, shape \(2, 3\)")


def test_annotation_that_is_neither_class_nor_known_takes_anything() -> None:
    odd = dataclasses.make_dataclass("odd", [("w", 5), ("x", typing.NoReturn), "y"])
    assert same(again({"w": W, "x": [1], "y": {"a": W}}, odd).y["a"], W)


def test_plain_tree_is_structured_as_a_record_is() -> None:
    tree = r.round_trip(MLP([Linear(W)], Size(1), Linear(W))).tree()
    assert same(typed.structure(list[Linear], tree["layers"]), [Linear(W)])
    assert typed.structure(Size, Size(1, 2)) == Size(1, 2)


# Unions.


def test_union_is_told_apart_by_the_saved_class_name_first() -> None:
    kind: Any = list[Linear | Twin]
    assert [type(v) for v in again([Twin(W), Linear(W)], kind)] == [Twin, Linear]


def test_union_is_told_apart_by_keys_then() -> None:
    kind: Any = list[Linear | Norm | dict[str, int] | list[int] | list[Size] | F32 | None]
    value = [{"scale": B}, {"weight": B}, {"a": 1}, [1], [Size(1)], B, None]
    kinds = [type(v) for v in again(value[:2], list[Linear | Norm])]
    assert kinds == [Norm, Linear]
    got = again(value[2:], kind)
    assert got[:3] == [{"a": 1}, [1], [Size(1)]]
    assert (type(got[3]), got[4]) == (np.ndarray, None)


def test_union_is_told_apart_by_literals_last() -> None:
    assert again([{"mode": "slow"}, {"mode": "fast"}], list[Fast | Slow]) == [Slow("slow"), Fast("fast")]


def test_union_of_generic_classes_is_told_apart_by_their_contents() -> None:
    assert again(Box(1), Box[str] | Box[int]) == Box(1)


def test_ambiguous_union_is_refused() -> None:
    match = r"expected one of Linear \| Twin, found a mapping with 'weight', which fits Linear and Twin alike; save an"
    refused([{"weight": W}], list[Linear | Twin], r"tensor '0': " + match)
    refused({"a": "red"}, dict[str, Color | PurePosixPath], r"found str 'red', which fits Color \('red', 'blue'\) and")


@pytest.mark.parametrize("kind", [dict[str, Linear] | dict[str, Twin], list[Linear] | dict[str, Linear]])
def test_empty_mapping_is_never_ambiguous(kind: Any) -> None:
    assert again({"a": {}}, dict[str, kind]) == {"a": {}}


def test_union_without_a_member_that_fits_is_refused() -> None:
    refused({"a": {"w": W}}, dict[str, Linear | Size], r"tensor 'a': expected Linear \| Size, found a mapping with 'w'")
    refused({"a": 1.5}, dict[str, int | str], r"expected int \| str, found float 1\.5")
    refused({"a": {"weight": 1}}, dict[str, Linear | None], r"tensor 'a\.weight': expected an array of float32, found")


def test_unions_nested_as_deep_as_records_go_are_decided_level_by_level() -> None:
    chain: Left | Right | None = None
    tree: dict[str, Any] | None = None
    for i in range(99):
        chain = Left(chain) if i % 3 else Right(chain)
        tree = {"next": tree}
    assert again(chain) == chain
    refused(
        tree, Left, r"tensor 'next': expected one of Left \| Right \| None, found a mapping with 'next', which fits"
    )


# Any class.

Kind = tuple[Any, st.SearchStrategy[Any]]


def _dataclass_of(parts: list[Kind], options: dict[str, bool]) -> Kind:
    fields = [(f"f{i}", kind) for i, (kind, _) in enumerate(parts)]
    make: Any = dataclasses.make_dataclass
    made = make(f"Made{len(parts)}", fields, **options)
    return made, st.builds(made, **{f"f{i}": values for i, (_, values) in enumerate(parts)})


def _containers(kind: Kind) -> st.SearchStrategy[Kind]:
    inner: Any = kind[0]
    values = kind[1]
    lists = st.lists(values, max_size=3)
    return st.sampled_from(
        [
            (list[inner], lists),
            (tuple[inner, ...], lists.map(tuple)),
            (tuple[inner, int], st.tuples(values, st.just(1))),
            (dict[str, inner], st.dictionaries(r.KEYS, values, max_size=3)),
            (inner | None, st.none() | values),
        ]
    )


LEAVES: list[Kind] = [
    (bool, st.booleans()),
    (int, st.integers(-(2**63), 2**64 - 1)),
    (float, st.floats()),
    (str, st.text(st.characters(codec="utf-8"), max_size=9)),
    (bytes, st.binary(max_size=9)),
    (Color, st.sampled_from(Color)),
    (Size, st.builds(Size, st.integers(0, 9), st.integers(0, 9))),
    (F32, st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape, np.float32))),
    (Linear | Norm, st.sampled_from([Linear(W, B), Linear(B), Norm(scale=W, eps=2.5)])),
]
OPTIONS = st.sampled_from([{}, {"frozen": True}, {"slots": True}, {"frozen": True, "slots": True, "kw_only": True}])
KINDS = st.recursive(
    st.sampled_from(LEAVES),
    lambda kinds: kinds.flatmap(_containers) | st.builds(_dataclass_of, st.lists(kinds, max_size=4), OPTIONS),
    max_leaves=8,
)


@hypothesis.given(data=st.data(), made=st.builds(_dataclass_of, st.lists(KINDS, min_size=1, max_size=5), OPTIONS))
@hypothesis.settings(max_examples=rounds(150), deadline=None)
def test_instance_of_any_class_comes_back_equal(data: st.DataObject, made: Kind) -> None:
    kind, values = made
    value = data.draw(values)
    hypothesis.assume(r.names_are_unique(value))
    assert same(r.round_trip(value).into(kind), value)
