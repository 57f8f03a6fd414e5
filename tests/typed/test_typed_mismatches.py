"""Records that do not match a class are refused: one typed error with path, expected type and found one."""

from __future__ import annotations

import dataclasses
import pickle
import typing
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import pytest
import records as r
import typed_classes as t
from typed_classes import B, Linear, W, again, refused

import zcrecord
from zcrecord import MismatchError, PackedTensor, UnsupportedError


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
