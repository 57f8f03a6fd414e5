"""Two records are compared by what they hold: every difference is told, and how it is laid out is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from exhaustive import rounds
from forge import Forge
from hypothesis import given, settings
from hypothesis import strategies as st
from records import saved

import zcrecord
from tools.measure import most_allocated
from tools.range_server import serving
from zcrecord import IntegrityError, LimitError, PackedTensor, StringTensor, UnsupportedError, transport
from zcrecord.codec.layout import DIGEST_ALLOWANCE
from zcrecord.integrity import Change, compare, comparing

GOLDEN = sorted((Path(__file__).parents[1] / "conformance" / "valid").glob("*.zcr"))


def changes(before: Any, after: Any, **options: Any) -> list[Change]:
    a, b = (x if isinstance(x, zcrecord.Record) else r.round_trip(x) for x in (before, after))
    return list(compare(a, b, **options))


def contents(before: Any, after: Any) -> tuple[Any, Any]:
    """Return the elements and the largest difference of the one tensor that differs."""
    (change,) = changes({"x": before}, {"x": after})
    assert (change.what, change.name, change.change) == ("tensor", "x", "contents")
    return change.elements, change.largest


def tree() -> dict[str, Any]:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    layers = [{"w": np.arange(5), "heads": 3}, {"w": np.arange(5)}]
    narrow = PackedTensor.pack(np.array([1, -2, 3]).astype("int4"))
    text = StringTensor.from_strings(["a", "bc"])
    empty = np.zeros((0, 3), np.int8)
    return {"a": a, "tied": a, "layers": layers, "narrow": narrow, "text": text, "empty": empty, "note": "x"}


@pytest.mark.parametrize("fast", [False, True])
def test_same_content_in_another_layout_is_no_difference(fast: bool) -> None:
    again = tree()
    again["tied"] = np.asfortranarray(again["a"]).copy(order="F")
    again["layers"][1]["w"] = np.arange(10)[::2] // 2
    again = dict(reversed(again.items()))
    other = zcrecord.load_record(r.saved(again, alignment=4096, digest="none"))
    assert changes(tree(), other, fast=fast) == []
    assert changes(other, tree(), fast=fast) == []


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_golden_archive_is_itself(path: Path) -> None:
    embedded: Any = path.stem if path.stem in ("prefix", "suffix") else None
    one, two = (zcrecord.load_record(source, embedded=embedded) for source in (path, path.read_bytes()))
    assert changes(one, two) == changes(one, two, fast=True) == []


def test_added_removed_and_retyped_tensors_are_told_in_order() -> None:
    before = {"gone": np.ones(2), "same": np.ones(3), "type": np.ones(4, np.int8), "shape": np.ones((2, 3))}
    after = {"shape": np.ones((3, 2)), "new": np.ones(1, bool), "type": np.ones(4, np.uint8), "same": np.ones(3)}
    assert changes(before, after) == [
        Change("tensor", "gone", "removed", before="float64 [2]"),
        Change("tensor", "type", "type", "int8 [4]", "uint8 [4]"),
        Change("tensor", "shape", "type", "float64 [2, 3]", "float64 [3, 2]"),
        Change("tensor", "new", "added", after="bool [1]"),
    ]


def test_modules_attributes_and_metadata_are_compared() -> None:
    nan = float("nan")
    before = {"m": {"k": 1, "t": True, "nan": nan, "b": b"x", "l": [1, 2], "zero": 0.0}, "gone": {"w": np.ones(1)}}
    after = {"m": {"k": 2, "t": 1, "nan": nan, "b": b"y", "l": (1, 2), "zero": -0.0}, "new": [np.ones(1)]}
    a, b = (zcrecord.load_record(r.saved(x, metadata={"v": i, "s": "s"})) for i, x in enumerate((before, after)))
    found = {(c.what, c.name): (c.change, c.before, c.after) for c in changes(a, b)}
    assert found.pop(("tensor", "gone.w"))[0] == "removed"
    assert found.pop(("tensor", "new.0"))[0] == "added"
    assert found.pop(("module", "gone")) == ("removed", "mapping", None)
    assert found.pop(("module", "new")) == ("added", None, "list")
    assert found.pop(("metadata", "v")) == ("changed", 0, 1)
    assert found.pop(("attribute", "m.k")) == ("changed", 1, 2)
    assert {name for _, name in found} == {"m.t", "m.b", "m.l", "m.zero"}
    assert {change for change, *_ in found.values()} == {"changed"}


def test_integers_are_measured_exactly() -> None:
    low, high = np.array([-(2**63), 5]), np.array([2**63 - 1, 5])
    assert contents(low, high) == ((1, 2), 2**64 - 1)
    assert contents(np.array([0, 2**64 - 1], np.uint64), np.array([2**64 - 1, 0], np.uint64)) == ((2, 2), 2**64 - 1)
    assert contents(np.array([2**53, 0]), np.array([2**53 + 1, 0])) == ((1, 2), 1)
    assert contents(np.array([-128], np.int8), np.array([127], np.int8)) == ((1, 1), 255)


def test_bits_decide_and_nan_hides_no_other_difference() -> None:
    nan, inf = float("nan"), float("inf")
    assert changes({"x": np.array([nan, inf])}, {"x": np.array([nan, inf])}) == []
    assert contents(np.array([0.0]), np.array([-0.0])) == ((1, 1), 0)
    assert contents(np.array([nan, 1.0]), np.array([0.0, 3.0])) == ((2, 2), 2)
    assert contents(np.array([inf, 1.0]), np.array([-inf, 3.0])) == ((2, 2), inf)
    assert contents(np.array([3 + 4j]), np.array([0j])) == ((1, 1), 5)
    elements, largest = contents(np.array([nan, 1.0]), np.array([0.0, 1.0]))
    assert elements == (1, 2)
    assert largest != largest


def test_strings_are_different_without_a_number() -> None:
    """98,303 empty strings are 786,432 zeros; so begins what holds as many zeros, and then more."""
    count = (3 << 18) // 8 - 1
    long = ["\0" * (3 << 18), *[""] * (count - 1)]
    for one, other in ((["a", "b"], ["a", "c"]), (["a", "b"], ["", "ab"]), ([""] * count, long), (long, [""] * count)):
        assert contents(*map(StringTensor.from_strings, (one, other))) == (None, None)


def test_difference_is_found_wherever_it_is_in_a_large_tensor() -> None:
    before = np.zeros((1 << 18) + 5, np.float32)
    for at in (0, 7, 196607, 196608, len(before) - 1):
        after = before.copy()
        after[at] = 2
        assert contents(before, after) == ((1, len(before)), 2)
        square, other = before[: 1 << 18].reshape(512, 512), after[: 1 << 18].reshape(512, 512)
        if at < 1 << 18:
            assert contents(np.asfortranarray(square), other) == ((1, 1 << 18), 2)
            assert contents(np.asfortranarray(square), np.asfortranarray(other)) == ((1, 1 << 18), 2)


@given(st.data())
@settings(max_examples=rounds(60), deadline=None)
def test_count_and_measure_are_those_of_numpy(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=4)))
    kind = data.draw(st.sampled_from(["float32", "int16", "complex128", "uint64", "float64"]))
    before = rng.integers(0, 4, shape).astype(kind)
    after = np.where(rng.random(shape) < 0.2, rng.integers(0, 4, shape).astype(kind), before)
    axes = data.draw(st.permutations(range(len(shape))))
    laid = np.transpose(np.ascontiguousarray(np.transpose(after, axes)), np.argsort(axes)) if shape else after
    found = changes({"x": before}, {"x": laid})
    other = before != after
    if not other.any():
        assert found == []
    else:
        apart = np.abs(before.astype(complex) - after.astype(complex)).max()
        assert (found[0].elements, found[0].largest) == ((other.sum(), other.size), apart)


def test_fast_goes_by_digests_and_slow_by_bytes() -> None:
    """A payload that was changed under a digest that was not: what damage does not do, but somebody may."""
    data = bytearray(r.saved({"x": np.zeros(100), "y": np.zeros(9)}))
    good = zcrecord.load_record(bytes(data))
    data[good.info("x").offset] ^= 1
    forged = zcrecord.load_record(bytes(data))
    assert changes(good, forged, fast=True) == []
    assert [c.name for c in changes(good, forged)] == ["x"]


def test_edits_that_are_in_no_file_yet_are_seen() -> None:
    data = r.saved({"x": np.zeros(100), "y": np.zeros(100)})
    edited = zcrecord.load_record(data, mode="c")
    edited["y"][5] = 1
    assert [c.name for c in changes(zcrecord.load_record(data), edited)] == ["y"]
    assert [c.name for c in changes(edited, zcrecord.load_record(data), fast=True)] == ["y"]


def test_tied_tensors_are_read_once() -> None:
    x = np.zeros(1 << 20)
    steps: list[int] = []
    both = {f"x{i}": x for i in range(50)}
    assert changes(both, both, progress=lambda done, total: steps.append(done)) == []
    assert steps == [x.nbytes]


@pytest.mark.slow
def test_pairs_of_payloads_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = ([np.full(50_000, i + 10 * k, np.uint8) for i in range(30)] for k in range(2))
    before = {f"{i}.{j}": rows[i] for i in range(30) for j in range(30)}
    after = {f"{i}.{j}": columns[j] for i in range(30) for j in range(30)}
    a, b = r.round_trip(before), r.round_trip(after)
    assert DIGEST_ALLOWANCE * (a.archive_nbytes + b.archive_nbytes) > 900 * 50_000
    assert len(list(compare(a, b))) > 800
    monkeypatch.setattr("zcrecord.integrity.comparing.DIGEST_ALLOWANCE", 4)
    with pytest.raises(LimitError, match=r"views of the same bytes add up to more than 4 times both archives"):
        list(compare(a, b))


@pytest.mark.slow
def test_large_tensors_are_compared_in_little_memory() -> None:
    before = np.zeros((2048, 2048), np.float32)
    after = np.asfortranarray(before)
    after[-1, -1] = 1
    a, b = r.round_trip({"x": before, "y": before.copy()}), r.round_trip({"x": after, "y": before + 1})
    assert [c.elements for c in compare(a, b)] == [(1, before.size), (before.size, before.size)]
    assert most_allocated(before.copy) >= before.nbytes, "it would be noticed"
    assert most_allocated(lambda: list(compare(a, b))) < before.nbytes // 2


def forged(tree: Any, vector: str, key: str, **fields: int) -> zcrecord.Record:
    return zcrecord.load_record(Forge(r.saved(tree)).set(vector, key, **fields).seal())


def test_what_lies_in_another_module_of_the_same_names_is_told() -> None:
    x = np.zeros(3)
    (change,) = changes({"a.b": x, "a": {}}, {"a": {"b": x}})
    assert change == Change("tensor", "a.b", "moved", "", "a")
    (change,) = changes({"a": {"b": {}}}, {"a.b": {}, "a": {}})
    assert change == Change("module", "a.b", "moved", "a", "")
    (change,) = changes({"a.b": x}, {"a": {"b": x}})
    assert (change.what, change.change) == ("module", "added"), "that says it"


def test_order_of_a_list_is_content() -> None:
    tree = {"l": [np.zeros(3), np.zeros(3)], "m": 1}
    turned = Forge(r.saved(tree)).set("tensors", "l.0", place=1).set("tensors", "l.1", place=0)
    (change,) = changes(tree, zcrecord.load_record(turned.seal()))
    assert change == Change("module", "l", "changed", "list of 0, 1", "list of 1, 0")
    (change,) = changes({"l": [np.zeros(3)] * 2}, {"l": [np.zeros(3)] * 3})
    assert (change.what, change.name, change.change) == ("tensor", "l.2", "added"), "and no other order"


def test_kinds_and_bits_that_python_has_no_word_for_are_compared() -> None:
    tree = {"m": {"x": np.zeros(3)}, "n": float("nan")}
    (change,) = changes(tree, forged(tree, "modules", "m", kind=9))
    assert change == Change("module", "m", "changed", "mapping", "unknown 9")
    (change,) = changes(tree, forged(tree, "attributes", "n", value=0xFFF8_0000_0000_0123))
    assert (change.what, change.name, change.change) == ("attribute", "n", "changed")
    assert changes(forged(tree, "attributes", "n", value=7 << 60), forged(tree, "attributes", "n", value=7 << 60)) == []


def named_a_thousand_times() -> zcrecord.Record:
    """Return a record of a list whose items are all the same 16 MiB."""
    f = Forge(r.saved({"big": np.zeros(16 << 20, np.uint8), "l": [b"x"]}))
    number, other = f.get("tensors", "big", "payload"), int(f.columns["words"][0])
    start = f.add("words", [number] * 1000 + [other])
    return zcrecord.load_record(f.set("attributes", "l", value=start | 1001 << 32).seal())


@pytest.mark.slow
def test_bytes_that_a_list_names_a_thousand_times_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    equal_bytes = comparing._equal_bytes

    def counted(x: Any, y: Any) -> bool:
        read.append(len(x))
        return equal_bytes(x, y)

    monkeypatch.setattr(comparing, "_equal_bytes", counted)
    a, b = named_a_thousand_times(), named_a_thousand_times()
    assert changes(a, b) == []
    assert sum(read) == 2 * (16 << 20) + 1, "as a tensor, as an item of the list, and the other item"


def test_full_names_beyond_the_limit_are_refused_before_anything_is_compared() -> None:
    f = Forge(r.saved({"m": {f"{i:03}": i for i in range(100)}}))
    start, size = f.text(b"x" * 100_000)
    long = zcrecord.load_record(f.set("modules", 1, name=start, name_size=size, key_size=size).seal())
    with pytest.raises(LimitError, match="full names of attributes add up to 10000000 bytes, more than 64 times"):
        changes({"w": np.zeros(3)}, long)


# Content that is expected.


TREE = {"a": np.arange(5000.0), "m": {"b": np.ones((3, 4), np.float32), "n": 5}}
DIGEST = zcrecord.load_record(saved(TREE)).content_digest()
OTHER = zcrecord.load_record(saved({**TREE, "a": np.zeros(5000)})).content_digest()
DATA = saved(TREE, alignment=4096)


def from_url(path: Path, **options: Any) -> Any:
    with serving(path.parent) as server:
        return zcrecord.load_record(f"{server.url}/{path.name}", **options)


def from_packed(path: Path, **options: Any) -> Any:
    there = path.with_suffix(".zst")
    transport.pack(path, there, force=True)
    return zcrecord.load_record(there, **options)


WAYS: dict[str, Callable[..., Any]] = {
    "mapped": zcrecord.load_record,
    "read": lambda path, **options: zcrecord.load_record(path, mmap=False, **options),
    "bytes": lambda path, **options: zcrecord.load_record(path.read_bytes(), **options),
    "copied when written": lambda path, **options: zcrecord.load_record(path, mode="c", **options),
    "touched": lambda path, **options: zcrecord.load_record(path, verify="touch", **options),
    "a part": lambda path, **options: zcrecord.load_record(path, names="m", **options),
    "packed": from_packed,
    "a URL": from_url,
}


@pytest.mark.parametrize("load", WAYS.values(), ids=WAYS)
def test_record_of_other_content_is_refused_with_both_digests(load: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    path.write_bytes(DATA)
    assert "m.b" in load(path, expect=DIGEST)
    with pytest.raises(IntegrityError, match=f"content digest {OTHER} was expected, it has {DIGEST}$"):
        load(path, expect=OTHER)


@pytest.mark.parametrize("wrong", [
    "", "sha256:", "sha256:00", DIGEST[7:], DIGEST + "0", DIGEST + "\n", DIGEST.upper(), "md5:" + DIGEST[7:],
    DIGEST.replace("sha256:", "SHA256:"), DIGEST[:-1] + "g", DIGEST[:-1] + "\uff11", 5, DIGEST.encode(), [DIGEST],
])  # fmt: skip
def test_what_is_no_digest_is_refused_before_anything_is_read(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"^expect=.* is not a content digest; give 'sha256:' and 64 hexa"):
        zcrecord.load_record(tmp_path / "not there.zcr", expect=wrong)
    with pytest.raises(UnsupportedError, match="is not a content digest"):
        zcrecord.load_record("https://localhost:1/not-there.zcr", expect=wrong)


def test_damage_that_a_digest_would_show_is_no_content_that_was_expected() -> None:
    data = bytearray(DATA)
    data[zcrecord.load_record(DATA).info("a").offset] ^= 1
    with pytest.raises(IntegrityError, match=f"content digest {DIGEST} was expected"):
        zcrecord.load_record(data, expect=DIGEST)
    forged = zcrecord.load_record(data).content_digest()
    assert len(zcrecord.load_record(data, expect=forged)) == 2, "it says what is there, verify says what was written"
