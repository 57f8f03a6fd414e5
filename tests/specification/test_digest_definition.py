"""The content digest's definition: each part is needed, and equal contents alone share one.

The bytes are those of tools/generate/golden_contents.py, made from the page; the package's digest is compared with it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import records as r
from digest_trees import BASE, LISTS, long_name, swapped
from exhaustive import rounds
from forge import Forge
from hypothesis import strategies as st

import zcrecord
from tools.generate import golden
from tools.generate.golden_contents import Content, content_digest, content_parts
from zcrecord import dtypes

GOLDEN = golden.cases()

X = np.arange(6, dtype=np.float32)
Layer = type("Layer", (r.Layer,), {})
Block = type("Block", (r.Layer,), {})
NARROW, INT4 = np.array([7], np.int8), dtypes.by_name["int4"].code
WORDS = [1, 0, 0, 8, int.from_bytes(b"bbbbbbbb", "little"), 2, 0, 5]  # an item, then {"bbbbbbbb": 5}


class Pair(NamedTuple):
    """Two contents that only one part of the digest tells apart, and what makes the archive of the second."""

    one: Content
    other: Content
    forge: Callable[[bytes], bytes] | None = None


def pair(one: Any, other: Any) -> Pair:
    return Pair(Content(one), Content(other))


def turned(items: list[Any], vector: str) -> Pair:
    """Return a list of two items, and it with the items in the other order and the same keys."""

    def turn(data: bytes) -> bytes:
        return Forge(data).set(vector, "0", place=1).set(vector, "1", place=0).seal()

    return Pair(Content(items), Content(items[::-1], keys={"": ["1", "0"]}), turn)


def with_each_other_s_key(data: bytes) -> bytes:
    f = Forge(data)
    names = [f.get("attributes", i, "name") for i in (1, 0)]
    return f.set("attributes", 0, name=names[0]).set("attributes", 1, name=names[1]).seal()


# fmt: off
PAIRS = {
    "module: module": pair({"a": {"b": {"c": {}}}}, {"a": {"b": {}, "c": {}}}),
    "module: place": turned([{}, {}], "modules"),
    "module: key": pair({"a": {}}, {"b": {}}),
    "module: kind": pair({"m": {"0": X}}, {"m": {0: X}}),
    "module: type name": pair(Layer(X, None), Block(X, None)),
    "tensor: module": pair({"a": {"x": X}, "b": {}}, {"a": {}, "b": {"x": X}}),
    "tensor: place": turned([X, X], "tensors"),
    "tensor: key": pair({"a": X}, {"b": X}),
    "tensor: dtype": pair({"a": X}, {"a": X.view(np.int32)}),
    "tensor: bits": Pair(
        Content({"w": NARROW.astype(ml_dtypes.int4)}), Content({"w": NARROW}, codes={"w": (INT4, 8)}),
        lambda data: Forge(data).set("tensors", "w", dtype=INT4, bits=8).seal()),
    "tensor: dims": pair({"a": X.reshape(2, 3)}, {"a": X.reshape(3, 2)}),
    "tensor: elements": pair({"a": X}, {"a": X + 1}),
    "attribute: module": pair({"a": {"n": 1}, "b": {}}, {"a": {}, "b": {"n": 1}}),
    "attribute: place": Pair(Content([5, "t"]), Content(["t", 5], keys={"": ["1", "0"]}), with_each_other_s_key),
    "attribute: key": pair({"a": 1}, {"b": 1}),
    "attribute: type": pair({"a": 0}, {"a": 0.0}),
    "attribute: form": pair({"a": [1]}, {"a": (1,)}),
    "attribute: number of words": pair({"aaaaaaaa": [1], "bbbbbbbb": 5}, {"aaaaaaaa": WORDS}),
    "attribute: bool": pair({"a": False}, {"a": True}),
    "attribute: int": pair({"a": 1}, {"a": 2}),
    "attribute: float": pair({"a": 0.0}, {"a": -0.0}),
    "attribute: str": pair({"a": "x"}, {"a": "y"}),
    "attribute: bytes": pair({"a": b"x"}, {"a": b"y"}),
}
# fmt: on

FRAMES = ["tag", "number of modules", "number of tensors", "tensor: rank"]  # they only divide others


def archive(content: Content, forge: Callable[[bytes], bytes] | None = None) -> bytes:
    data = r.saved(content.record)
    return forge(data) if forge else data


def joined(parts: Iterable[tuple[str, bytes]], *without: str) -> bytes:
    return b"".join(part for name, part in parts if name not in without)


@pytest.mark.parametrize("part", PAIRS)
def test_each_part_alone_tells_two_contents_apart(part: str) -> None:
    one, other, forge = PAIRS[part]
    digests = [
        zcrecord.load_record(data, verify="full").content_digest() for data in (archive(one), archive(other, forge))
    ]
    assert digests == [content_digest(one), content_digest(other)]
    assert digests[0] != digests[1]
    assert joined(content_parts(one), part) == joined(content_parts(other), part)


def test_every_part_is_in_a_golden_archive() -> None:
    found = {name for case in GOLDEN.values() for name, _ in content_parts(case.content)}
    assert found == PAIRS.keys() | {*FRAMES, "attribute: NoneType"}, "the words of None are 0"


def test_two_golden_archives_have_the_same_full_names_in_other_modules() -> None:
    records = [zcrecord.load_record(GOLDEN[name].build()) for name in ("dots", "dots_nested")]
    assert len({(*sorted(x.names), *sorted(x.modules), *sorted(x.attributes)) for x in records}) == 1
    assert len({x.content_digest() for x in records}) == 2


@hypothesis.given(tree=r.trees())
@hypothesis.settings(max_examples=rounds(60), deadline=None)
def test_digest_of_any_tree_is_the_package_s(tree: Any) -> None:
    hypothesis.assume(r.names_are_unique(tree))
    assert zcrecord.load_record(r.saved(tree)).content_digest() == content_digest(Content(tree))


VALUES = st.sampled_from([None, 0, False, 0.0, -0.0, "", b"", X, X[:0], X.view(np.int32)])
KEYS = st.sampled_from(["a", "b", "a.b", "0"])
SMALL = st.recursive(
    VALUES,
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=2)
        | st.dictionaries(st.integers(0, 1), inner, max_size=2)
        | st.lists(inner, max_size=2)
        | st.tuples(inner)
    ),
    max_leaves=3,
)


def known(value: Any) -> Any:
    """Return a form of a value that is equal for equal values alone, the order of a mapping aside."""
    if isinstance(value, dict):
        return "dict", frozenset((type(key), key, known(child)) for key, child in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(known, value))
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return type(value), struct.pack("<d", value) if isinstance(value, float) else value


def is_saved(tree: Any) -> bool:
    """Return False if a list of plain values, an attribute, has the full name of another."""
    with contextlib.suppress(zcrecord.NameCollisionError):
        return bool(r.saved(tree))
    return False


@pytest.mark.slow
@hypothesis.given(trees=st.lists(st.dictionaries(KEYS, SMALL, max_size=2), min_size=2, max_size=12))
@hypothesis.settings(max_examples=rounds(40), deadline=None)
def test_small_records_share_a_digest_if_and_only_if_they_are_equal(trees: list[Any]) -> None:
    trees = [tree for tree in trees if r.names_are_unique(tree) and is_saved(tree)]
    trees += [{key: tree[key] for key in reversed(tree)} for tree in trees]
    digests = [zcrecord.load_record(r.saved(tree)).content_digest() for tree in trees]
    for (a, one), (b, other) in itertools.combinations(zip(trees, digests, strict=True), 2):
        assert (known(a) == known(b)) == (one == other), (a, b)


# What enters the digest, and what does not.


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
