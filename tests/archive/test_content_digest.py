"""The content digest is of what a record holds: the same however that is laid out, another for any change of it."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import hypothesis
import numpy as np
import pytest
import records as r
from digest_trees import BASE, LISTS, long_name, swapped
from exhaustive import rounds
from forge import Forge
from hypothesis import strategies as st

import zcrecord

TREE = {"a": BASE, "m": {"w": BASE, "n": 1, "x": {"v": np.arange(5)}}, "l": [np.ones(3), "text"], "b": b"blob"}


def digest(tree: Any, **options: Any) -> str:
    return zcrecord.load_record(r.saved(tree, **options)).content_digest()


def shuffled(tree: Any, rng: random.Random) -> Any:
    if isinstance(tree, Mapping):
        items = list(tree.items())
        rng.shuffle(items)
        return {key: shuffled(value, rng) for key, value in items}
    return [shuffled(v, rng) for v in tree] if type(tree) is list else tree


WANT = digest(TREE)
assert re.fullmatch(r"sha256:[0-9a-f]{64}", WANT)


@pytest.mark.slow
@hypothesis.given(tree=r.trees(), seed=st.integers(0, 99))
@hypothesis.settings(max_examples=rounds(60), deadline=None)
def test_order_alignment_and_payload_digests_of_any_tree_do_not_enter(tree: Any, seed: int) -> None:
    hypothesis.assume(r.names_are_unique(tree))
    other = digest(shuffled(tree, random.Random(seed)), alignment=16, digest="none", metadata={"k": 1})
    assert other == digest(tree, alignment=4096)


@pytest.mark.parametrize("options", [{"alignment": 65536}, {"digest": "none"}, {"metadata": {"k": b"v"}}], ids=str)
def test_options_of_saving_do_not_enter(options: Any) -> None:
    assert digest(TREE, **options) == WANT


def test_view_is_not_taken_for_its_base() -> None:
    """The view's shape and strides, written one after the other, are the base's shape."""
    base = np.arange(18.0).reshape(2, 3, 3, 1)
    view = base.reshape(-1)[:6].reshape(2, 3)
    want = digest({"a": view.copy(), "b": base.copy()})
    assert digest({"a": view, "b": base}) == want
    base[1] += 1
    assert digest({"a": view, "b": base}) != want


@pytest.mark.parametrize(("items", "vector", "names"), LISTS.values(), ids=LISTS)
def test_order_of_a_list_enters_though_its_keys_stay(items: Any, vector: str, names: tuple[str, str]) -> None:
    """R76: no reader refuses places that are not the keys, but what was signed is the list."""
    data = r.saved({"m": items})
    turned = zcrecord.load_record(swapped(data, vector, *names), verify="full")
    assert turned.content_digest() != zcrecord.load_record(data).content_digest()
    assert str(turned.tree()["m"]) != str(zcrecord.load_record(data).tree()["m"])


@pytest.mark.parametrize("kind", [1, 4, 5, 77])
def test_order_of_a_module_that_is_no_list_does_not_enter(kind: int) -> None:
    """R76: neither in a mapping, the fields of an object nor in a kind of a later version."""
    data = Forge(r.saved({"m": {"a": BASE, "b": BASE + 1}})).set("modules", "m", kind=kind).seal()
    turned = zcrecord.load_record(swapped(data, "tensors", "m.a", "m.b"), verify="full")
    assert turned.content_digest() == zcrecord.load_record(data).content_digest()


def test_a_long_name_of_a_module_is_hashed_once() -> None:
    """R76: its attributes' full names, 10 MB, would be more than an index of 110 kB may ask for."""
    record = zcrecord.load_record(long_name())
    with pytest.raises(zcrecord.LimitError, match="full names of attributes add up to 10000000 bytes"):
        record.attributes  # noqa: B018
    assert record.content_digest() == digest({"x" * 100_000: {f"{i:03}": i for i in range(100)}})


@pytest.mark.parametrize("count", [50, 100])
def test_no_alignment_decides_that_there_is_a_digest(count: int) -> None:
    """R76: 64 KiB between payloads are none of the bytes that views may add up to 64 times."""
    base = np.arange(65536, dtype=np.uint8)
    record = {f"v{i:03}": base[i : 65436 + i] for i in range(count)} | {f"t{i}": np.full(i + 1, i) for i in range(6)}
    answers = set()
    for alignment in (16, 65536):
        archive = zcrecord.load_record(r.saved(record, alignment=alignment))
        try:
            answers.add(archive.content_digest())
        except zcrecord.LimitError as error:
            answers.add(error.message)
    (answer,) = answers
    assert answer.startswith("sha256:" if count == 50 else "different views of the same bytes add up to more than 64")
