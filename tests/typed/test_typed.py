"""Typed records: what is saved comes back as the class it was, arrays still views; unions are told apart."""

from __future__ import annotations

import collections
import dataclasses
import pickle
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
import typed_classes as t
from exhaustive import rounds
from hypothesis import strategies as st
from typed_classes import B, Linear, W, again, refused, same

import zcrecord
from zcrecord import MismatchError, PackedTensor, StringTensor, UnsupportedError


def test_arrays_are_views_of_the_mapping(tmp_path: Path) -> None:
    zcrecord.save_record(t.MLP([Linear(W, B)], t.Size(1), Linear(W)), tmp_path / "m.zcr")
    rec = zcrecord.load_record(tmp_path / "m.zcr")
    model = rec.into(t.MLP)
    mapped = np.frombuffer(rec.archive.buffer, np.uint8)
    first = model.layers[0]
    assert isinstance(first, Linear)
    assert first.bias is not None
    assert all(np.shares_memory(a, mapped) and not a.flags.writeable for a in (first.weight, first.bias))
    rec.close()
    assert first.weight.tolist() == W.tolist()


def test_tied_tensors_stay_tied() -> None:
    model = again(t.MLP([Linear(W, B)], t.Size(1), Linear(W), {"x": Linear(W.copy())}))
    assert r.address(model.layers[0].weight) == r.address(model.head.weight)


def test_every_kind_of_attribute_fills_a_field() -> None:
    value = t.Everything(
        True, -(2**63), 0.1, "text", b"data", memoryview(b"view"), None, t.Color.RED, t.Level.LOW, "a", 5, t.Count(6),
        [1.0, 2.5], (1, "x"), "either", {"a": [1, "b"]}, (t.Color.RED, t.Color.BLUE), ["p", "q"],
    )  # fmt: skip
    got = again(value)
    assert got == value
    assert (type(got.data), type(got.view), type(got.level)) == (bytes, memoryview, t.Level)


def test_type_parameters_are_filled_in() -> None:
    boxes = t.Boxes(["a"], "b", t.Box("c"))
    assert again(boxes, t.Boxes[str]) == boxes
    assert same(again(t.Box(Linear(W)), t.Box[Linear]), t.Box(Linear(W)))
    assert again(t.Box({"a": 1}), t.Box).content == {"a": 1}
    refused(boxes, t.Boxes[int], r"tensor 'content\.0': expected int, found str 'a'")
    refused(t.Boxes([1], 2, t.Box("c")), t.Boxes[int], r"tensor 'third\.content': expected int, found str 'c'")


def test_fields_that_the_constructor_does_not_take_are_restored() -> None:
    value = t.Derived(W, seed=8)
    assert again(value).made == "from 8"
    assert again({"w": W}, t.Derived).made == "from 3"
    assert again({"w": W, "seed": 5}, t.Derived).made == "from 5"


def test_dataclass_with_a_constructor_of_its_own_is_made_without_it() -> None:
    got = again({"n": 3}, t.OwnInit)
    assert (got.n, got.names) == (3, [])
    value = t.OwnInit("four")
    value.names = ["a"]
    assert again(value) == value


@pytest.mark.parametrize("kind", [t.Options, t.Loose])
def test_typed_dicts_may_lack_what_is_not_required(kind: Any) -> None:
    assert again({"rate": 0.5, "note": "n"}, kind) == {"rate": 0.5, "note": "n"}
    assert again({"rate": 0.5}, kind) == {"rate": 0.5}
    refused({"note": "n"}, kind, f"tensor 'rate': expected float for {kind.__name__}.rate, found no such key")
    refused({"rate": 0.5, "nota": "n"}, kind, "tensor 'nota': expected no such key, found str 'n'")


@pytest.mark.parametrize(
    "kind, value, want",
    [
        (dict[str, int], {"a": 1}, {"a": 1}),
        (collections.OrderedDict[str, int], {"b": 1}, collections.OrderedDict(b=1)),
        (dict[t.Color, int], {"red": 1}, {t.Color.RED: 1}),
        (dict[str, Any], t.Node(1), {"value": 1, "next": None}),
        (dict[str, tuple[()]], {"a": ()}, {"a": ()}),
        (dict[str, list[None]], {"a": [None]}, {"a": [None]}),
        (dict[str, tuple[int, float]], {"a": [1, 2]}, {"a": (1, 2.0)}),
        (dict[str, Sequence[int]], {"a": (1, 2), "b": [3]}, {"a": (1, 2), "b": [3]}),
        (dict[str, Iterable[int]], {"a": {"1": 2, "0": 1}}, {"a": [1, 2]}),
        (dict[str, PurePosixPath], {"a": "/b"}, {"a": PurePosixPath("/b")}),
        (dict[str, Literal[t.Color.RED, b"x"]], {"a": "red", "b": b"x"}, {"a": t.Color.RED, "b": b"x"}),
        (dict[str, bool | int], {"a": np.True_, "b": 3}, {"a": True, "b": 3}),
        (dict[str, np.int8], {"a": np.int8(3)}, {"a": np.int8(3)}),
        (dict[str, float], {"a": np.array(0.5, "bfloat16"), "b": np.array(2, "float8_e4m3fn")}, {"a": 0.5, "b": 2.0}),
        (list[object], [{"a": (1,)}], [{"a": (1,)}]),
    ],
)
def test_containers_and_scalars_become_what_the_annotation_says(kind: Any, value: Any, want: Any) -> None:
    got = again(value, kind)
    assert (type(got), got) == (type(want), want)
    items, wanted = ((v.values() if isinstance(v, dict) else v) for v in (got, want))
    assert list(map(type, items)) == list(map(type, wanted))


@pytest.mark.parametrize("count", [0, 3, 12])
def test_numbered_mapping_fills_a_list_in_the_order_of_its_numbers(count: int) -> None:
    backwards = {str(i): Linear(np.full(1, i, np.float32)) for i in reversed(range(count))}
    assert [int(layer.weight[0]) for layer in again(backwards, list[Linear])] == list(range(count))
    assert isinstance(again(backwards, tuple[Linear, ...]), tuple)


def test_flat_names_with_dots_fill_nested_classes() -> None:
    flat = {"layers.0.weight": W, "layers.1.scale": B, "head.weight": W, "head.bias": B, "named.x.weight": W}
    want = t.MLP([Linear(W), t.Norm(scale=B)], t.Size(1), Linear(W, B), {"x": Linear(W)})
    assert same(again({**flat, "size": t.Size(1)}, t.MLP), want)
    assert same(again(r.Owner({**flat, "size.width": 1, "size.height": 1}), t.MLP), want)


def test_packed_and_string_tensors_fill_fields_of_their_types() -> None:
    kind: Any = dict[str, PackedTensor | StringTensor | t.F32]
    got = again({"p": PackedTensor.pack(np.ones(3, "int4")), "s": np.array(["a", "b"]), "w": W}, kind)
    assert [type(v) for v in got.values()] == [PackedTensor, StringTensor, np.ndarray]


ARRAYS: list[Any] = [
    np.ndarray, npt.NDArray[Any], npt.NDArray[np.floating[Any]], npt.NDArray[np.int8 | np.float32],
    np.ndarray[tuple[int, int], np.dtype[np.float32]], npt.ArrayLike,
]  # fmt: skip


@pytest.mark.parametrize("kind", ARRAYS, ids=str)
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


def test_a_part_is_loaded_as_a_record_is() -> None:
    rec = r.round_trip(t.MLP([Linear(W)], t.Size(1), Linear(W)))
    assert same(rec.module("head").into(Linear), Linear(W))


# Unions.


def test_union_is_told_apart_by_the_saved_class_name_first() -> None:
    kind: Any = list[Linear | t.Twin]
    assert [type(v) for v in again([t.Twin(W), Linear(W)], kind)] == [t.Twin, Linear]


def test_union_is_told_apart_by_keys_then() -> None:
    kind: Any = list[Linear | t.Norm | dict[str, int] | list[int] | list[t.Size] | t.F32 | None]
    value = [{"scale": B}, {"weight": B}, {"a": 1}, [1], [t.Size(1)], B, None]
    kinds = [type(v) for v in again(value[:2], list[Linear | t.Norm])]
    assert kinds == [t.Norm, Linear]
    got = again(value[2:], kind)
    assert got[:3] == [{"a": 1}, [1], [t.Size(1)]]
    assert (type(got[3]), got[4]) == (np.ndarray, None)


def test_union_is_told_apart_by_literals_last() -> None:
    assert again([{"mode": "slow"}, {"mode": "fast"}], list[t.Fast | t.Slow]) == [t.Slow("slow"), t.Fast("fast")]


def test_union_of_generic_classes_is_told_apart_by_their_contents() -> None:
    assert again(t.Box(1), t.Box[str] | t.Box[int]) == t.Box(1)


def test_ambiguous_union_is_refused() -> None:
    match = r"expected one of Linear \| Twin, found a mapping with 'weight', which fits Linear and Twin alike; save an"
    refused([{"weight": W}], list[Linear | t.Twin], r"tensor '0': " + match)
    refused(
        {"a": "red"}, dict[str, t.Color | PurePosixPath], r"found str 'red', which fits Color \('red', 'blue'\) and"
    )


@pytest.mark.parametrize("kind", [dict[str, Linear] | dict[str, t.Twin], list[Linear] | dict[str, Linear]])
def test_empty_mapping_is_never_ambiguous(kind: Any) -> None:
    assert again({"a": {}}, dict[str, kind]) == {"a": {}}


def test_union_without_a_member_that_fits_is_refused() -> None:
    refused(
        {"a": {"w": W}},
        dict[str, Linear | t.Size],
        r"tensor 'a': expected Linear \| Size, found a mapping with 'w'",
    )
    refused({"a": 1.5}, dict[str, int | str], r"expected int \| str, found float 1\.5")
    refused({"a": {"weight": 1}}, dict[str, Linear | None], r"tensor 'a\.weight': expected an array of float32, found")


def test_unions_nested_as_deep_as_records_go_are_decided_level_by_level() -> None:
    chain: t.Left | t.Right | None = None
    tree: dict[str, Any] | None = None
    for i in range(99):
        chain = t.Left(chain) if i % 3 else t.Right(chain)
        tree = {"next": tree}
    assert again(chain) == chain
    refused(
        tree, t.Left, r"tensor 'next': expected one of Left \| Right \| None, found a mapping with 'next', which fits"
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
    kinds: list[Kind] = [
        (list[inner], lists), (tuple[inner, ...], lists.map(tuple)), (tuple[inner, int], st.tuples(values, st.just(1))),
        (dict[str, inner], st.dictionaries(r.KEYS, values, max_size=3)), (inner | None, st.none() | values),
    ]  # fmt: skip
    return st.sampled_from(kinds)


LEAVES: list[Kind] = [
    (bool, st.booleans()),
    (int, st.integers(-(2**63), 2**64 - 1)),
    (float, st.floats()),
    (str, st.text(st.characters(codec="utf-8"), max_size=9)),
    (bytes, st.binary(max_size=9)),
    (t.Color, st.sampled_from(t.Color)),
    (t.Size, st.builds(t.Size, st.integers(0, 9), st.integers(0, 9))),
    (t.F32, st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape, np.float32))),
    (Linear | t.Norm, st.sampled_from([Linear(W, B), Linear(B), t.Norm(scale=W, eps=2.5)])),
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


# Records that do not match.


def test_missing_field_is_named(tmp_path: Path) -> None:
    zcrecord.save_record({"layers": [{"weight": W}, {"scale": B, "eps": 1}, {"wieght": W}]}, tmp_path / "m.zcr")
    kind: Any = dict[str, tuple[Linear, t.Norm, Linear]]
    match = (
        r"m\.zcr: tensor 'layers\.2\.weight': expected an array of float32 for Linear\.weight, found no such key, but "
        "'wieght', for which there is no field; load it with rename= if it is the same$"
    )
    with pytest.raises(MismatchError, match=match) as caught:
        zcrecord.load_record(tmp_path / "m.zcr", into=kind)
    assert (caught.value.tensor, caught.value.path) == ("layers.2.weight", str(tmp_path / "m.zcr"))


@pytest.mark.parametrize(
    "value, kind, match",
    [
        ({}, Linear, r"^tensor 'weight': .*found no such key; give the field a default if records may lack it$"),
        ({"weight": W, "extra": B}, Linear, r"tensor 'extra': expected no such key, found an array of float32, shape "
         r"\(3,\): Linear has no field for it, its fields are 'weight', 'bias'; add one, or leave this out with"),
        ({"weight": W, "n": 1}, Linear, r"tensor 'n': .*found int 1: .*; add one$"),
        ({"weight": W.astype(float)}, Linear, r"tensor 'weight': expected an array of float32, found an array of "
         r"float64, shape \(2, 3\); annotate what is there, or save what is annotated"),
        ({"w": W}, dict[str, np.ndarray[tuple[int], np.dtype[Any]]], r"expected an array with 1 axes, found an array"),
        ({"weight": PackedTensor.pack(np.ones(3, "int4"))}, Linear, r"found a PackedTensor of int4, shape \(3,\); "
         r"annotate it PackedTensor, whose unpack\(\) gives an array"),
        ([W], Linear, "^expected Linear, found a list of 1"),
        ({"a": W}, dict[str, Linear], r"tensor 'a': expected Linear, found an array of float32, shape \(2, 3\)"),
        ({"a": Linear(W)}, dict[str, list[t.F32]], "found a Linear with 'weight', 'bias'"),
        ({"a": t.Size(1)}, dict[str, dict[str, int]], r"expected dict\[str, int\], found a Size with 'width', 'heig"),
        ({"0": W, "2": W}, list[t.F32], "found a mapping with '0', '2'; the keys of a list are '0' to '1', and '1' is"),
        ({"a": [1, "b"]}, dict[str, list[int]], r"tensor 'a\.1': expected int, found str 'b'"),
        ({"a": 1}, dict[str, Mapping[str, int]], r"expected Mapping\[str, int\], found int 1"),
        ({"a": True}, dict[str, int], "expected int, found bool True"),
        ({"a": 2**4095}, dict[str, float], "expected float, found int 5221944407065762533"),
        ({"a": -(2**1024)}, dict[str, float | str], r"expected float \| str, found int -179769313486231590"),
        ({"a": W}, dict[str, float], r"expected float, found an array of float32, shape \(2, 3\)"),
        ({"a": "b"}, dict[str, bytes], "expected bytes, found str 'b'"),
        ({"a": b"bcd"}, dict[str, str], "expected str, found 3 bytes"),
        ({"a": "green"}, dict[str, t.Color], r"expected Color \('red', 'blue'\), found str 'green'"),
        ({"green": 1}, dict[t.Color, int], r"expected Color \('red', 'blue'\), found str 'green'"),
        ({"a": 1}, dict[str, PurePosixPath], "expected a str for PurePosixPath, found int 1"),
        ({"a": True}, dict[str, Literal[1]], r"expected Literal\[1\], found bool True"),
        ({"a": {"b": 1}}, dict[str, r.Owner], "expected Owner, found a mapping with 'b'; classes that are filled are"),
        ({"a": "b\n" * 99}, dict[str, int], r"found str 'b\\nb"),
    ],
)  # fmt: skip
def test_mismatch_names_the_path_what_was_expected_and_what_is_there(value: Any, kind: Any, match: str) -> None:
    refused(value, kind, match)


def test_first_mismatch_in_the_order_of_fields_is_told() -> None:
    refused({"head": 1, "size": 2, "layers": []}, t.MLP, "tensor 'size'")


def test_what_a_constructor_refuses_is_a_mismatch_with_its_place() -> None:
    match = r"tensor 'a': Stubborn refuses these values: ValueError: n must not be negative"
    with pytest.raises(MismatchError, match=match) as caught:
        again({"a": {"n": -1, "later": "x"}}, dict[str, t.Stubborn])
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_field_that_nothing_sets_is_missing() -> None:
    assert again({"n": 1, "later": "x"}, t.Stubborn).later == "x"
    refused({"n": 1}, t.Stubborn, r"tensor 'later': expected str for Stubborn\.later, found no such key")
    refused(
        {}, t.NeedsSeed, r"tensor 'seed': expected int for NeedsSeed\.seed, .*; no InitVar is saved; give it a default"
    )


def test_torch_fields_are_refused_with_the_way_to_tensors() -> None:
    tensor = type("Tensor", (), {"__module__": "torch"})
    kind = dataclasses.make_dataclass("Module", [("weight", tensor | None)])
    match = r"tensor 'weight': no record is loaded into a field of type torch\.Tensor; .*record\.torch\(\) gives torch"
    refused({"weight": W}, kind, match, UnsupportedError)


@pytest.mark.parametrize(
    "kind, match",
    [
        (t.Unreadable, "the annotations of Unreadable cannot be read: name 'NoSuchName' is not defined; define what"),
        ("MLP", "a record is loaded into a class, or a type such as .*, not into a str"),
        (Linear(W), "not into a Linear"),
        (dict[str, "Linear"], "the annotation 'Linear' cannot be read where it stands; name the class itself"),
        (dict.__class_getitem__((str, vars(typing)["Self"])), r"the annotation typing\.Self cannot be read"),
    ],
)
def test_annotations_that_cannot_be_read_are_refused(kind: Any, match: str) -> None:
    refused({"x": 1}, kind, match, UnsupportedError)
