"""Parts of a record: modules, chosen tensors, other names. Records of their own, over the same memory."""

from __future__ import annotations

import dataclasses
import fnmatch
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import records as r
from exhaustive import rounds
from forge import Forge
from hypothesis import strategies as st

import zcrecord
from zcrecord import (
    FormatError,
    IntegrityError,
    NameCollisionError,
    PackedTensor,
    Record,
    TensorNotFoundError,
    UnsupportedError,
    load_record,
)
from zcrecord.codec.entries import is_attribute

BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
ONE, TWO = np.ones(3), np.arange(4)
TREE: dict[str, Any] = {
    "embed": {"weight": BASE, "n": 7, "blob": b"bytes"},
    "layers": [
        {"w": ONE, "b": TWO, "norm": r.Layer(ONE.copy(), None)},
        {"w": BASE[1:3], "b": TWO.copy(), "act": "gelu"},
        {"w": np.array(["x", "yz"]), "b": PackedTensor.pack(np.array([1, -2, 3]).astype("int4"))},
    ],
    "head": r.Pair(BASE, ONE),
    "steps": 5,
    "empty": {},
}


@pytest.fixture(params=["bytes", "touch", "c"])
def rec(request: pytest.FixtureRequest, tmp_path: Path) -> Record:
    path = tmp_path / "m.zcr"
    zcrecord.save_record(TREE, path)
    options: dict[str, Any] = {"touch": {"verify": "touch"}, "c": {"mode": "c"}}
    source: Any = path.read_bytes() if request.param == "bytes" else path
    record: Record = load_record(source, **options.get(request.param, {}))
    return record


def children(node: Any) -> list[tuple[str, Any]] | None:
    if is_attribute(node, ""):
        return None
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)]
    if isinstance(node, Mapping):
        return list(node.items())
    if hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    return [(str(i), value) for i, value in enumerate(node)] if isinstance(node, list | tuple) else None


def modules_of(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    yield name, node
    for key, value in children(node) or ():
        if children(value) is not None:
            yield from modules_of(value, f"{name}.{key}" if name else key)


def picked(node: Any, keep: Callable[[str], bool], whole: Callable[[str], bool], name: str = "") -> Any:
    """Return a nested record with the tensors that are kept, as plain Python would pick them; None for nothing."""
    if whole(name):
        keep = whole = lambda _: True
    items = []
    found = whole(name)
    for key, value in children(node) or ():
        full = f"{name}.{key}" if name else key
        if is_attribute(value, ""):
            items.append((key, value))
        elif children(value) is not None:
            inner = picked(value, keep, whole, full)
            if inner is not None:
                items.append((key, inner))
                found = True
        elif keep(full):
            items.append((key, value))
            found = True
    if not found and name:
        return None
    counts = [key for key, _ in items] == [str(i) for i in range(len(items))]
    values = [value for _, value in items]
    if hasattr(node, "_fields"):
        return tuple(values) if len(values) == len(node) else dict(items)
    if isinstance(node, list | tuple) and counts:
        return values if isinstance(node, list) else tuple(values)
    return dict(items)


@pytest.mark.slow
@hypothesis.given(tree=r.trees())
@hypothesis.settings(max_examples=rounds(60), deadline=None)
def test_every_module_of_a_record_is_the_record_of_its_subtree(tree: Any) -> None:
    hypothesis.assume(r.names_are_unique(tree))
    rec = r.round_trip(tree)
    for name, node in modules_of(tree):
        part, alone = rec.module(name), r.round_trip(node)
        prefix = f"{name}." if name else ""
        r.assert_same(part.tree(), node)
        assert [prefix + n for n in part] == [n for n in rec if n.startswith(prefix) and n in map(prefix.__add__, part)]
        assert sorted(part) == sorted(alone)
        assert part.content_digest() == alone.content_digest()
        assert r.round_trip(part).content_digest() == alone.content_digest()
        assert list(part.modules) == list(alone.modules)
        assert list(part.attributes) == list(alone.attributes)
        part.verify()
        for key in part:
            info, whole = part.info(key), rec.info(prefix + key)
            assert (info.shape, info.dtype, info.strides, info.offset, info.nbytes, info.digest) == (
                whole.shape, whole.dtype, whole.strides, whole.offset, whole.nbytes, whole.digest,
            )  # fmt: skip
            assert bytes(part.raw(key)) == bytes(rec.raw(prefix + key))


def test_views_of_a_part_are_the_same_memory(rec: Record) -> None:
    for part, prefix in ((rec.module("layers"), "layers."), (rec.module("layers").module("1"), "layers.1.")):
        for name in part:
            part_bytes, whole = (np.frombuffer(raw, np.uint8) for raw in (part.raw(name), rec.raw(prefix + name)))
            assert r.address(part_bytes) == r.address(whole)
        assert part["0.w" if prefix == "layers." else "w"].flags.writeable is (rec.mode == "c")


def test_ties_inside_a_part_stay_and_those_across_it_are_not_told(rec: Record) -> None:
    assert rec.info("embed.weight").tied == ("embed.weight", "layers.1.w", "head.first")
    assert rec.module("layers").info("1.w").tied == ()
    part = rec.select(["embed", "head"])
    assert part.info("embed.weight").tied == ("embed.weight", "head.first")
    assert np.shares_memory(part["embed.weight"], part["head.first"])
    assert rec.info("layers.0.w").tied == ("layers.0.w", "head.second")
    assert part.nbytes == BASE.nbytes + 24 + 5


@pytest.mark.parametrize("name", ["layers.7", "layer", "layers.0.w", "layers.", "\ud800"])
def test_module_that_is_not_there_lists_close_names(name: str, rec: Record) -> None:
    with pytest.raises(TensorNotFoundError, match=r"not in this record|is a tensor and no module") as caught:
        rec.module(name)
    assert caught.value.tensor == name
    assert caught.value.path == rec.path
    if name in ("layer", "layers.7"):
        assert "'layers'" in str(caught.value) or "'layers.0'" in str(caught.value)


def test_start_of_names_in_a_flat_state_dict_is_no_module_but_how_to_choose_them_is_told() -> None:
    rec = r.round_trip({"0.weight": np.zeros(3), "0.bias": np.zeros(3), "1.weight": np.zeros(3)})
    told = r"'0': is no module, only how names of tensors start; '0\.\*' matches those"
    for get in (rec.module, rec.select):
        with pytest.raises(TensorNotFoundError, match=told) as raised:
            get("0")
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert rec.select("0.*").names == ("0.weight", "0.bias")
    with pytest.raises(TensorNotFoundError, match=r"'0\.bias': is a tensor and no module; record\[name\] gives it"):
        rec.module("0.bias")


def test_partial_load_is_a_selection(tmp_path: Path) -> None:
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    part = load_record(tmp_path / "m.zcr", names=["layers.0.*", "head"], rename={"layers": "blocks", "head": ""})
    block = {"w": ONE, "b": TWO, "norm": r.Layer(ONE, None)}
    r.assert_same(part.tree(), {"blocks": [block], "first": BASE, "second": ONE, "steps": 5})
    assert part.names == ("blocks.0.w", "blocks.0.b", "blocks.0.norm.weight", "first", "second")
    assert load_record(tmp_path / "m.zcr", rename={"": "model"}).names[0] == "model.embed.weight"
    with pytest.raises(TensorNotFoundError, match=r"m\.zcr: tensor 'haed': not in this record; close names: 'head'"):
        load_record(tmp_path / "m.zcr", names=["layers.*", "haed"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["embed.weigth*", "embed.weigth"], r"'embed\.weigth': not in this record; close names: 'embed\.weigh"),
        ("embed.n", r"'embed\.n': not in this record"),  # an attribute
        ("zzz", "'zzz': not in this record of 10 names, such as 'embed.weight'"),
        ("layerz", "'layerz': not in this record; close names: 'layers'"),
    ],
)
def test_name_without_wildcards_that_is_not_there_is_refused(names: Any, message: str, rec: Record) -> None:
    with pytest.raises(TensorNotFoundError, match=message):
        rec.select(names)


def test_a_module_that_is_not_there_is_answered_with_modules() -> None:
    rec = r.round_trip({"a": {"w": ONE, "v": TWO}, "b": {"w": BASE}})
    with pytest.raises(TensorNotFoundError, match=r"'zzz': not in this record of 2 names, such as 'a', 'b'$"):
        rec.module("zzz")


def test_names_with_brackets_and_stars_are_found_as_they_are() -> None:
    rec = r.round_trip({"a[0]": ONE, "a0": TWO, "*": BASE, "m?": {"w": ONE}, "mx": {"w": TWO}})
    assert list(rec.select("a[0]")) == ["a[0]", "a0"]
    assert list(rec.select("a[[]0]")) == ["a[0]"]
    assert list(rec.select("[*]")) == ["*"]
    assert list(rec.select("m[?]")) == ["m?.w"]
    assert list(rec.select("A0*")) == []


def test_saved_order_is_kept_across_modules() -> None:
    rec = r.round_trip(r.Owner({"b.w": ONE, "a": TWO, "b.v": ONE, "c.x": TWO, "b.u": TWO}))
    assert rec.select(["b", "a", "c"]).names == ("b.w", "a", "b.v", "c.x", "b.u")
    assert rec.select(["c", "a", "b.u", "b.w"]).names == ("b.w", "a", "c.x", "b.u")
    assert rec.select(rename={"b": "z.y", "a": "a.b"}).names == ("z.y.w", "a.b", "z.y.v", "c.x", "z.y.u")
    assert rec.module("b").names == ("w", "v", "u")


def test_list_that_loses_members_is_a_mapping_unless_they_were_its_last(rec: Record) -> None:
    assert type(rec.select("layers.[01].*").tree()["layers"]) is list
    assert list(rec.select(["layers.1", "layers.2"]).tree()["layers"]) == ["1", "2"]
    assert rec.select("layers.1").modules["layers"].kind == "mapping"
    r.assert_same(rec.select("head.second").tree()["head"], {"second": ONE})
    r.assert_same(rec.select("head").tree()["head"], (BASE, ONE))
    assert rec.select("head").modules["head"].type_name == "Pair"


@pytest.mark.slow
@hypothesis.given(tree=r.trees(), data=st.data())
@hypothesis.settings(max_examples=rounds(120), deadline=None)
def test_selection_is_that_of_plain_python(tree: Any, data: st.DataObject) -> None:
    hypothesis.assume(r.names_are_unique(tree))
    rec = r.round_trip(tree)
    known = [*rec, *(name for name, _ in modules_of(tree))]
    patterns = [*known, *(n[:2] + "*" for n in known), *("*" + n[-2:] for n in known), *(f"?{n[1:]}" for n in known)]
    names = data.draw(st.lists(st.sampled_from([*patterns, "*", "[!a]*", "*.*"]), max_size=3))

    def matches(name: str) -> bool:
        wild = [n for n in names if any(c in n for c in "*?[")]
        return name in names or any(fnmatch.fnmatchcase(name, n) for n in wild)

    part = rec.select(names)
    want = picked(tree, matches, matches)
    r.assert_same(part.tree(), want)
    r.assert_same(r.round_trip(part).tree(), want)
    inside = [n for n, _ in modules_of(tree) if matches(n)]
    chosen = [n for n in rec if matches(n) or any(n.startswith(f"{m}.") or not m for m in inside)]
    assert set(part) <= set(chosen)
    assert list(part) == [n for n in rec if n in set(part)]
    assert part.content_digest() == r.round_trip(part).content_digest()
    some = data.draw(st.sets(st.sampled_from(list(rec)))) if len(rec) else set()
    by_predicate = rec.select(lambda info: info.name in some)
    assert list(by_predicate) == [n for n in rec if n in some]
    r.assert_same(by_predicate.tree(), picked(tree, some.__contains__, lambda _: False))


RENAMES: dict[str, tuple[Any, dict[str, str]]] = {
    "names, then patterns in turn": ({"layers": "x", re.compile("^x"): "y", re.compile("^y"): "z"}, {
        "layers.0.w": "z.0.w", "head.first": "head.first"}),
    "to names without dots": (lambda name: name.replace(".", "/"), {"layers.0.w": "layers/0/w"}),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", RENAMES)
def test_names_are_changed_by(what: str, rec: Record) -> None:
    rename, want = RENAMES[what]
    part = rec.select(rename=rename)
    old = list(rec)
    assert len(part) == len(old)
    for name, new in want.items():
        assert part.names[old.index(name)] == new
        assert bytes(part.raw(new)) == bytes(rec.raw(name))
    part.verify()
    again = r.round_trip(part)
    assert again.names == part.names
    assert again.content_digest() == part.content_digest()


def test_renamed_module_keeps_kind_class_and_attributes(rec: Record) -> None:
    part = rec.select(rename={"layers": "blocks", "layers.0.norm": "norm", "embed": "e.f"})
    assert (part.modules["blocks"].kind, part.modules["norm"].kind) == ("list", "object")
    assert part.modules["norm"].type_name == "Layer"
    assert part.attributes.items() >= {"e.f.n": 7, "blocks.1.act": "gelu", "norm.bias": None, "steps": 5}.items()
    assert bytes(part.attributes["e.f.blob"]) == b"bytes"
    assert list(part.tree()["blocks"][0]) == ["w", "b"]


def test_module_whose_members_all_went_elsewhere_is_not_left_behind(rec: Record) -> None:
    part = rec.select(rename=lambda name: name.replace("embed.", "tokens."))
    assert "embed" not in part.modules
    assert next(iter(part.tree())) == "tokens"
    part = rec.select(rename={re.compile(r"^layers\.0\.w$"): "first"})
    assert "layers.0" in part.modules
    assert "empty" in rec.select(rename=lambda name: name.upper().lower()).modules
    assert "EMPTY" in rec.select(rename=str.upper).modules


def test_record_may_be_put_into_a_module_and_taken_out_again() -> None:
    for tree in ([ONE, TWO], (ONE, 5), r.Layer(ONE, "x"), r.Pair(ONE, TWO), {"w": {"v": ONE}}, {}, {"n": 1}):
        rec = r.round_trip(tree)
        inside = rec.select(rename={"": "model.net"})
        r.assert_same(inside.tree(), {"model": {"net": tree}})
        back = inside.select(rename={"model.net": ""})
        r.assert_same(back.tree(), tree)
        assert back.content_digest() == rec.content_digest()
        assert inside.module("model.net").content_digest() == rec.content_digest()


def test_module_with_members_of_others_is_a_mapping() -> None:
    tree = {"l": [ONE, TWO], "p": r.Pair(ONE, TWO), "o": r.Layer(ONE, TWO), "w": BASE}
    rec = r.round_trip(tree)
    for name in ("l", "p", "o"):
        own = r.round_trip(tree[name])
        r.assert_same(rec.select(name, rename={name: "x.y"}).tree(), {"x": {"y": own.tree()}})
        assert rec.select(name, rename={name: ""}).content_digest() == own.content_digest()
        part = rec.select([name, "w"], rename={"w": f"{name}.2"})
        first, second = rec.module(name).names
        r.assert_same(part.tree(), {name: {first: ONE, second: TWO, "2": BASE}})
        assert (part.modules[name].kind, part.modules[name].type_name) == ("mapping", "")
        assert rec.select([name, "w"], rename={name: ""}).modules[""].kind == "mapping"
    both = rec.select(["l", "o"], rename={"l": "x", "o": "x"})
    r.assert_same(both.tree(), {"x": {"0": ONE, "1": TWO, "weight": ONE, "bias": TWO}})
    moved = rec.select("p", rename={"p.first": "first"})
    r.assert_same(moved.tree(), {"p": {"second": TWO}, "first": ONE})


COLLIDING: dict[str, Any] = {
    "two tensors": {"embed.weight": "x", "head.first": "x"},
    "two modules' tensors": {"layers.0": "x", "layers.1": "x"},
    "a tensor and a module": {"embed.weight": "layers"},
    "a tensor and an attribute": {"embed.weight": "steps"},
    "a pattern's": {re.compile(r"layers\.\d"): "layers.0"},
}


@pytest.mark.parametrize("what", COLLIDING)
def test_names_that_collide_are_refused(what: str, rec: Record) -> None:
    with pytest.raises(NameCollisionError, match=r"name"):
        rec.select(rename=COLLIDING[what])
    part = rec.select(["layers.0.w", "layers.1.b"], rename={"layers.0": "x", "layers.1": "x"})
    assert part.names == ("x.w", "x.b")


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ("embed", "^rename= takes a mapping or a function, not a str"),
        ({5: "a"}, "^rename= maps names, or compiled patterns of text, to names, and not 5 to 'a'"),
        ({"a": 5}, "^rename= maps names, or compiled patterns of text, to names, and not 'a' to 5"),
        ({re.compile(b"a"): "b"}, "and not re.compile"),
        ({"a": str.upper}, "and not 'a' to <method"),
        (lambda _: None, "rename= gave a NoneType for this name"),
        (lambda _: "", "keys are non-empty strings"),
        (lambda n: n + "\0", "its name contains NUL"),
        (lambda n: n + "\ud800", "its name has lone surrogates"),
    ],
    ids=range(9),
)
def test_renaming_that_is_none_is_refused(rename: Any, message: str, rec: Record) -> None:
    with pytest.raises(UnsupportedError, match=message):
        rec.select(rename=rename)


@pytest.mark.parametrize("names", [5, [None], b"embed", [b"embed"], {"embed": 1, 2: 3}])
def test_names_that_are_none_are_refused(names: Any, rec: Record) -> None:
    with pytest.raises(UnsupportedError, match=r"^names= takes "):
        rec.select(names)
    with pytest.raises(UnsupportedError, match=r"^a module's name is a str, not a "):
        rec.module(names)


KEYS = st.sampled_from(["a", "b", "c", "a1"])
FLAT = st.dictionaries(st.lists(KEYS, min_size=1, max_size=4).map(".".join), st.integers(0, 100), max_size=8)


@pytest.mark.slow
@hypothesis.given(
    flat=FLAT,
    rename=st.dictionaries(st.lists(KEYS, max_size=3).map(".".join), st.lists(KEYS, max_size=2).map(".".join)),
)
@hypothesis.settings(max_examples=rounds(150), deadline=None)
def test_renaming_by_prefix_is_that_of_plain_python(flat: dict[str, int], rename: dict[str, str]) -> None:
    def new(name: str) -> str:
        parts = name.split(".")
        for end in range(len(parts), -1, -1):
            prefix = ".".join(parts[:end])
            if prefix in rename:
                return ".".join(filter(None, [rename[prefix], *parts[end:]]))
        return name

    rec = r.round_trip(r.Owner({name: np.array(value) for name, value in flat.items()}))
    want = [new(name) for name in rec]
    prefixes = {".".join(name.split(".")[:end]) for name in want for end in range(1, name.count(".") + 1)}
    if "" in want or len(set(want)) < len(want):
        with pytest.raises((NameCollisionError, UnsupportedError)):
            rec.select(rename=rename)
        return
    try:
        part = rec.select(rename=rename)
    except NameCollisionError:
        assert prefixes & set(want), "a tensor's name is a module's"
        return
    assert list(part) == want
    assert [int(part[name]) for name in want] == list(flat.values())
    assert prefixes & set(want) or not want or prefixes == set(part.modules) - {""}


def test_part_of_a_part_is_a_part(rec: Record) -> None:
    part = rec.select(["layers", "embed"], rename={"layers": "blocks"})
    inner = part.select("blocks.[01].*", rename={"blocks.1": "second"}).module("blocks")
    r.assert_same(inner.tree(), [{"w": ONE, "b": TWO, "norm": {"weight": ONE, "bias": None}}])
    assert inner.archive.part_of is not None
    assert r.address(inner["0.w"]) == r.address(rec["layers.0.w"])
    assert part.module("embed").select("*").module("").names == ("weight",)
    if rec.path and rec.mode == "r":
        for record in (part, inner, inner.select("*")):
            assert pickle.loads(pickle.dumps(record)).content_digest() == record.content_digest()


def test_saving_a_part_saves_the_part_alone(rec: Record, tmp_path: Path) -> None:
    part = rec.select(["layers.0", "head"], rename={"layers": "blocks"})
    report = zcrecord.save_record(part, tmp_path / "part.zcr")
    again = load_record(tmp_path / "part.zcr", verify="full")
    r.assert_same(again.tree(), part.tree())
    assert again.names == part.names
    assert again.content_digest() == part.content_digest()
    assert again.info("blocks.0.w").tied == ("blocks.0.w", "head.second")
    assert report.payload_bytes == BASE.nbytes + ONE.nbytes + TWO.nbytes
    rows = r.round_trip(rec.select("layers.1"))
    assert rows.nbytes == BASE.nbytes + TWO.nbytes, "the whole payload that rows are a view of"


def test_verify_of_a_part_reads_its_own_payloads_alone(tmp_path: Path) -> None:
    data = bytearray(r.saved(TREE))
    rec = load_record(bytes(data))
    data[rec.info("layers.2.b").offset] ^= 1
    damaged = load_record(bytes(data))
    damaged.module("embed").verify()
    damaged.select(["layers.0", "head"]).verify()
    for part, name in ((damaged.module("layers"), "2.b"), (damaged.select("*.b", rename={"layers": "x"}), "x.2.b")):
        with pytest.raises(IntegrityError, match=rf"tensor '{name}': payload .*: its digest does not match"):
            part.verify()
    steps: list[tuple[int, int]] = []
    rec.module("layers").verify(progress=lambda done, total: steps.append((done, total)))
    assert steps and steps[-1][0] == steps[-1][1]


def test_part_of_a_record_with_elements_of_an_unknown_type() -> None:
    data = Forge(r.saved({"m": {"w": TWO, "v": ONE}})).set("tensors", "m.w", dtype=200).seal()
    part = load_record(data).module("m")
    assert bytes(part.raw("w")) == TWO.tobytes()
    assert part["v"].tolist() == ONE.tolist()
    with pytest.raises(UnsupportedError, match=r"tensor 'w': dtype code 200 is not known; \.raw\(name\)"):
        part["w"]
    assert bytes(r.round_trip(part).raw("w")) == TWO.tobytes()


def test_part_of_a_malformed_index_is_refused_as_the_whole_is() -> None:
    rec = load_record(Forge(r.saved(TREE)).set("modules", 3, kind=0).seal(), verify="touch")
    assert rec["embed.weight"].shape == (4, 6)
    for call in (lambda: rec.module("embed"), lambda: rec.select("head"), lambda: rec.prefetch("head")):
        with pytest.raises(FormatError, match="modules: kind 0 is invalid"):
            call()


def test_a_part_keeps_the_metadata_of_its_file() -> None:
    metadata = {"blob": b"12345", "tags": ["x", "y"]}
    tree = {"a": {"w": np.ones(3)}, "b": np.zeros(3), "blob": b"12345"}
    record = load_record(r.saved(tree, metadata=metadata))
    for part in (record.module("a"), record.select("b"), record.select(rename={"a": "c"}).module("c")):
        for each in (part, load_record(r.saved(part), verify="full")):
            assert {**each.metadata, "blob": bytes(each.metadata["blob"])} == metadata
