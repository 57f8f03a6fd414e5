"""Tied tensors and overlapping views share a payload; equal ones that are not tied are stored once, yet distinct."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import records as r
from exhaustive import rounds
from forge import Forge, build_index
from hypothesis import strategies as st

import zcrecord
from zcrecord import PackedTensor, StringTensor
from zcrecord.writing import sharing

BASE = np.arange(24, dtype=np.float32).reshape(4, 6)


def payloads(rec: zcrecord.Record) -> list[int | None]:
    """Return the number of the payload that each tensor lies in."""
    return [rec.info(name).payload for name in rec]


def test_tied_tensors_share_memory_across_modules() -> None:
    tree = {"embed": {"w": BASE}, "layers": [{"w": BASE.copy()}], "head": r.Layer(BASE[:], None), "z": BASE.T.T}
    tree |= {"flat": BASE.reshape(-1), "bytes": BASE.view(np.uint8), "complex": BASE.view(np.complex64)}
    rec = r.round_trip(tree)
    assert rec.info("embed.w").tied == ("embed.w", "head.weight", "z", "flat", "bytes", "complex")
    assert rec.info("layers.0.w").tied == ()
    assert len({r.address(rec[name]) for name in rec if name != "layers.0.w"}) == 1
    assert rec.nbytes == BASE.nbytes
    r.assert_same(rec.tree(), tree)
    views = r.round_trip(r.round_trip({"a": BASE, "m": {"row": BASE[2]}}).tree())
    assert views.info("a").tied == ("a", "m.row"), "views of a loaded record are tied by the memory they lie in"


def test_tied_packed_and_string_tensors_share_their_bytes() -> None:
    packed = PackedTensor.pack(r.filled(r.PACKED[0], (9,)))
    strings = StringTensor.from_strings(["a", "bc"])
    narrow = r.filled(r.PACKED[-1], (6,))
    rec = r.round_trip({"p": packed, "s": strings, "n": narrow, "m": {"p": packed, "s": strings, "n": narrow}})
    assert np.shares_memory(rec["p"].packed, rec["m.p"].packed)
    assert np.shares_memory(rec["s"].data, rec["m.s"].data)
    assert rec.info("n").tied == ("n", "m.n")


@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "with gaps"])
def test_bools_share_a_payload_with_other_bytes_only_if_all_of_those_could_be_bools(gaps: bool) -> None:
    """R72."""
    octets = np.array([[1, 0, 1, 1], [0, 0, 1, 2]], np.uint8)
    tree = {"flags": octets[:1].view(bool), "octets": octets, "last": octets[:, 3:] if gaps else octets}
    for value, shared in ((2, False), (1, True)):
        octets[1, 3] = value
        rec = r.round_trip(tree)
        assert np.shares_memory(rec["flags"], rec["octets"]) == shared
        assert np.shares_memory(rec["last"], rec["octets"])
        assert rec["flags"].tolist() == [[True, False, True, True]]
        r.assert_same(rec["octets"], octets)


def test_bools_that_overlap_nothing_dense_are_looked_at_with_the_strides_they_have() -> None:
    """R72."""
    octets = np.array([[1, 2, 0], [1, 2, 0]], np.uint8)
    rec = r.round_trip({"flags": octets[:, ::2].view(bool), "row": octets[:, ::2]})
    assert rec["flags"].tolist() == [[True, False], [True, False]]


VIEWS: dict[str, Any] = {
    "rows": lambda a: a[1:3],
    "columns": lambda a: a[:, 1:3],
    "every other row": lambda a: a[::2],
    "reversed both": lambda a: a[::-1, ::-1],
    "transposed": lambda a: a.T,
    "transposed window": lambda a: a[1:, 2:5].T,
    "element": lambda a: a[1, 2, ...],
    "diagonal": lambda a: np.einsum("ii->i", a[:, :4]),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("base", [BASE, np.asfortranarray(BASE)], ids=["C", "F"])
def test_view_inside_a_dense_saved_tensor_shares_its_memory(name: str, base: Any) -> None:
    view = VIEWS[name](base)
    for tree in ({"view": view, "base": base}, {"base": base, "view": view}):
        rec = r.round_trip(tree)
        r.assert_same(rec.tree(), tree)
        assert rec.nbytes == base.nbytes
        assert r.address(rec["view"]) - r.address(rec["base"]) == r.address(view) - r.address(base)
        assert rec["view"].strides == view.strides or view.size == 1


def test_overlapping_rows_share_only_what_a_saved_tensor_reaches() -> None:
    base = np.arange(1000)
    rec = r.round_trip({"a": base[100:300], "b": base[200:400], "c": base[400:500], "d": base[600:]})
    assert np.shares_memory(rec["a"], rec["b"])
    assert payloads(rec) == [0, 0, 1, 2]  # c touches b, but no byte is in both
    assert rec.nbytes == 8 * (300 + 100 + 400)
    assert [v[0] for v in rec.values()] == [100, 200, 400, 600]


def test_views_apart_from_each_other_all_share_with_the_base_they_lie_in() -> None:
    base = np.arange(1000)
    tree = {"2": base[500:600], "0": base, "3": base[990:], "1": base[10:20]}
    rec = r.round_trip(tree)
    assert rec.nbytes == base.nbytes
    assert all(np.shares_memory(rec["0"], rec[name]) for name in "123")
    r.assert_same(rec.tree(), tree)


def test_neighbours_stay_apart_though_a_third_view_spans_both() -> None:
    base = np.arange(20)
    rec = r.round_trip({"left": base[:10], "right": base[10:], "even": base[::2]})
    assert payloads(rec) == [0, 1, 2]
    assert rec.info("even").strides is None
    r.assert_same(rec.tree(), {"left": base[:10], "right": base[10:], "even": base[::2]})


def test_overlap_in_the_middle_of_an_element_is_stored_apart() -> None:
    raw = np.arange(40, dtype=np.uint8)
    tree = {"bytes": raw, "odd": raw[3:23].view(np.float32), "odder": raw[5:25].view(np.float32)}
    rec = r.round_trip(tree)
    r.assert_same(rec.tree(), tree)
    assert {name: rec[name].flags.aligned for name in rec} == dict.fromkeys(tree, True)


def test_strides_of_axes_of_length_one_leave_no_trace() -> None:
    usual = np.asfortranarray(np.arange(6).reshape(2, 1, 3))
    strange = np.ndarray((2, 1, 3), np.int64, usual.T.tobytes(), 0, (8, 2**60 + 3, 16))
    assert r.saved({"x": strange}) == r.saved({"x": usual})
    r.assert_same(r.round_trip({"x": strange})["x"], usual)


def test_chain_of_overlapping_views_is_one_payload_stored_once() -> None:
    base = np.arange(10_000, dtype=np.uint8)
    tree = {str(i): base[i : i + 20] for i in reversed(range(0, 9_980, 10))}
    rec = r.round_trip(tree)
    assert (set(payloads(rec)), rec.nbytes) == ({0}, 9_990)
    r.assert_same(rec.tree(), tree)


def test_a_view_stores_its_own_rows_and_no_others() -> None:
    big = np.zeros((1_000_000, 4), np.float32)
    big[:10] = np.arange(40).reshape(10, 4)
    rec = r.round_trip({"h": big[:10]})
    assert rec.nbytes == 160 and rec.archive_nbytes < 1024
    r.assert_same(rec["h"], big[:10])


@pytest.mark.parametrize("axes", [(2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_dense_permutation_keeps_its_strides(axes: tuple[int, ...]) -> None:
    array = np.arange(2 * 3 * 5).reshape(2, 3, 5).transpose(axes)
    rec = r.round_trip({"x": array})
    assert rec["x"].strides == array.strides
    assert rec.info("x").strides == tuple(s // 8 for s in array.strides)
    assert rec.nbytes == rec.info("x").nbytes == array.nbytes
    r.assert_same(rec["x"], array)


GAPS = {
    "rows": BASE[::2], "columns": BASE[:, ::3], "window": BASE[:, 1:4], "reversed": BASE[::-1],
    "transposed": BASE[::2].T, "broadcast": np.broadcast_to(BASE, (3, 4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("view", GAPS.values(), ids=GAPS)
def test_view_with_gaps_or_repeats_is_packed(view: Any) -> None:
    rec = r.round_trip({"x": view})
    assert rec.info("x").strides is None
    assert rec["x"].flags.c_contiguous
    assert rec.nbytes == rec.info("x").nbytes == view.size * 4
    r.assert_same(rec["x"], view)


def test_broadcast_of_a_saved_tensor_does_not_claim_its_payload() -> None:
    tree = {"base": BASE, "wide": np.broadcast_to(BASE, (3, 4, 6))}
    rec = r.round_trip(tree)
    r.assert_same(rec.tree(), tree)
    assert rec.nbytes == 4 * BASE.nbytes


def test_equal_tensors_that_are_not_tied_are_stored_once_and_stay_distinct() -> None:
    tree = {"a": BASE, "b": BASE.view(np.int32).copy(), "c": BASE.T.copy(), "d": [BASE.copy(), BASE]}
    rec = r.round_trip(tree | {"e": BASE.tobytes()})
    assert rec.info("a").offset == rec.info("b").offset == rec.info("d.0").offset != rec.info("c").offset
    assert rec.info("a").payload != rec.info("b").payload
    assert [rec.info(n).tied for n in rec] == [("a", "d.1"), (), (), (), ("a", "d.1")]
    assert rec.nbytes == 2 * BASE.nbytes
    assert bytes(rec.attributes["e"]) == BASE.tobytes()


def test_without_digests_only_ties_are_found() -> None:
    rec = r.round_trip({"a": BASE, "b": BASE.copy(), "c": BASE}, digest="none")
    assert rec.info("a").tied == ("a", "c")
    assert rec.info("a").offset != rec.info("b").offset
    assert rec.nbytes == 2 * BASE.nbytes
    assert rec.info("a").digest is None


def test_equal_digests_of_different_bytes_are_not_one_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcrecord.writing.equal.digest_of", lambda _: 42)
    data = r.saved({"a": np.zeros(8), "b": np.ones(8), "c": np.zeros(8), "d": np.zeros(4)})
    monkeypatch.undo()
    rec = zcrecord.load_record(data)
    assert [v.sum() for v in rec.values()] == [0, 8, 0, 0]
    assert rec.nbytes == 8 * (8 + 8 + 4)
    assert rec.info("a").offset == rec.info("c").offset


@pytest.mark.parametrize("digest", ["xxh3", "none"])
def test_report_tells_what_is_in_the_file(digest: str, tmp_path: Path) -> None:
    tree = {
        "a": BASE, "b": BASE.copy(), "m": {"c": BASE, "row": BASE[1]}, "alone": np.arange(7), "none": np.zeros((0, 3)),
        "blob": b"some bytes", "same": BASE.tobytes(), "text": "x", "packed": r.filled(r.PACKED[0], (5,)),
    }  # fmt: skip
    report = zcrecord.save_record(tree, tmp_path / "m.zcr", digest=digest, metadata={"k": b"some bytes", "e": b""})
    rec = zcrecord.load_record(tmp_path / "m.zcr", verify="full")
    used = [rec.raw(name) for name in rec if rec.info(name).nbytes] + [rec.attributes["blob"], rec.attributes["same"]]
    stored = {(r.address(np.frombuffer(u, np.uint8)), len(u)) for u in used}
    assert (report.tensors, report.tied) == (len(rec), 2) == (7, 2)
    assert report.archive_bytes == rec.archive_nbytes == (tmp_path / "m.zcr").stat().st_size
    assert report.payloads == len(stored) == (4 if digest == "xxh3" else 6)
    assert report.payload_bytes == rec.nbytes == sum(size for _, size in stored)
    assert report.deduplicated == (2 * BASE.nbytes if digest == "xxh3" else 0)


@hypothesis.given(base=r.arrays(r.WHOLE), data=st.data())
@hypothesis.settings(max_examples=rounds(200), deadline=None)
def test_whatever_views_of_one_base_are_saved_their_values_and_dense_overlaps_stay(
    base: Any, data: st.DataObject
) -> None:
    views = data.draw(st.lists(r.views(base), min_size=1, max_size=5))
    tree = {str(i): view for i, view in enumerate(views)}
    rec = r.round_trip(tree, digest="none")  # equal bytes stay apart, so that only ties share
    r.assert_same(rec.tree(), tree)
    assert rec.nbytes <= sum(v.nbytes for v in views)
    whole = [n for n, v in tree.items() if v.flags.c_contiguous and v.size and v.dtype == rec[n].dtype == base.dtype]
    for i, a in enumerate(whole):
        for b in whole[i + 1 :]:
            assert np.shares_memory(rec[a], rec[b]) == np.shares_memory(tree[a], tree[b])


def test_views_of_views_and_of_other_objects_share_as_their_memory_does() -> None:
    memory = bytearray(BASE.tobytes())
    a = np.frombuffer(memory, np.float32)
    b = np.frombuffer(memoryview(memory)[16:48], np.float32)
    rec = r.round_trip({"a": a, "b": b, "c": b[2:][::-1]})
    assert np.shares_memory(rec["a"], rec["b"])
    assert np.shares_memory(rec["a"], rec["c"])
    assert rec.nbytes == BASE.nbytes
    r.assert_same(rec.tree(), {"a": a, "b": b, "c": b[2:][::-1]})


def test_saving_a_loaded_record_keeps_what_is_tied_and_what_is_not() -> None:
    packed = r.filled(r.PACKED[0], (4,))
    first = r.round_trip({"a": BASE, "m": {"b": BASE, "row": BASE[2]}, "equal": BASE.copy(), "p": [packed]})
    second = r.round_trip(first)
    assert [(i.tied, i.payload) for i in second.infos()] == [(i.tied, i.payload) for i in first.infos()]
    assert second.nbytes == first.nbytes == BASE.nbytes + 3


@pytest.mark.slow
def test_many_views_with_gaps_over_many_rows_are_placed_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with each other, these would take a minute."""
    base = np.arange(64_000, dtype=np.uint16).reshape(8000, 8)
    tree = {f"row{i}": base[i, :6] for i in range(8000)}
    tree |= {f"pair{i}": base[i : i + 2, 1] for i in range(7999)}
    tree |= {f"inside{i}": base[i, 1:5:2] for i in range(8000)}
    compared, fits = itertools.count(), sharing._fits
    monkeypatch.setattr(sharing, "_fits", lambda *pair: (next(compared), fits(*pair))[1])
    rec = r.round_trip(tree)
    assert 0 < next(compared) <= 7999 + 8000
    assert rec.info("inside7000").payload == rec.info("row7000").payload != rec.info("pair7000").payload
    for name in ("inside7000", "pair7000"):
        r.assert_same(rec[name], tree[name])


# Texts and records that repeat themselves.


SIZES = [1, 2, 31, 32, 33, 111, 112, 113, 127, 128, 129, 255, 256, 257, 511, 512, 513, 767, 768, 769, 3000]
TEXTS = st.builds(lambda letter, size: letter * size, st.sampled_from("xyé"), st.sampled_from(SIZES))
VALUES = (
    TEXTS
    | st.lists(TEXTS, max_size=3).map(lambda texts: texts * 40)
    | st.sampled_from([2**63, 7]).map(lambda number: [number] * 64)
)
RECORDS = st.recursive(
    st.dictionaries(TEXTS, VALUES, max_size=5),
    lambda inner: st.dictionaries(TEXTS, inner | VALUES, max_size=5) | st.lists(inner, max_size=20),
    max_leaves=20,
)


def within(data: bytes) -> int:
    """Check that an archive keeps to R30, and that it loads; returns the size of its index."""
    forged = Forge(data)
    assert forged.budget_left() >= 0
    zcrecord.load_record(data, verify="full").tree()
    return len(build_index(forged.columns, forged.digest_kind))


@pytest.mark.parametrize("count", [2000, pytest.param(50_000, marks=pytest.mark.exhaustive(keep=0))])
def test_a_text_is_stored_twice_only_where_the_budget_is_nearly_used_up(count: int) -> None:
    """R30, R31."""
    exhausted = 0
    for record, metadata in r.repetitive(count):
        data = r.saved(record, metadata=metadata)
        size, forged = within(data), Forge(data)
        texts = bytes(forged.columns["text"]).split(b"\0")[:-1]
        if len(set(texts)) < len(texts):
            assert forged.budget_left() < 6 * size
            exhausted += 1
    assert exhausted > 3


@pytest.mark.slow
@hypothesis.given(RECORDS, st.dictionaries(TEXTS, VALUES, max_size=20))
@hypothesis.settings(max_examples=rounds(100))
def test_no_record_is_too_repetitive_to_be_saved(record: Any, metadata: dict[str, Any]) -> None:
    """R30, R31."""
    within(r.saved(record if isinstance(record, dict) else {"list": record}, metadata=metadata))


def test_what_is_repeated_a_few_times_is_stored_once() -> None:
    few = {f"m{i}": {"name": "x" * 3000, "list": ["y" * 100] * 3, "sizes": [1, 2, 3]} for i in range(10)}
    forged = Forge(r.saved(few))
    assert bytes(forged.columns["text"]).count(b"x" * 3000) == bytes(forged.columns["text"]).count(b"y" * 100) == 1
    assert len(forged.columns["words"]) == 6
