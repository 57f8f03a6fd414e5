"""A Record is an immutable mapping of full names to views, in saved order, that threads share; and what it tells."""

from __future__ import annotations

import difflib
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord import ModuleInfo, PackedTensor, Record, TensorInfo, TensorNotFoundError, UnsupportedError
from zcrecord.archive.archive import Archive
from zcrecord.dtypes import by_name

BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
PACKED = PackedTensor.pack(np.array([1, -2, 3]).astype("int4"))
TREE = {
    "z": BASE,
    "enc": {"weight": BASE, "rows": BASE[1:3], "n": 5, "blob": b"bytes", "ratio": 0.5},
    "a": [np.arange(3), {"bias": BASE.T}, "text"],
    "p": PACKED,
    "s": np.array(["a", "bc"]),
    "none": np.zeros((0, 3), np.int16),
    "layer": r.Layer(np.float16(2), [1, 2]),
}
NAMES = ["z", "enc.weight", "enc.rows", "a.0", "a.1.bias", "p", "s", "none", "layer.weight"]
DATA = r.saved(TREE, metadata={"b": 1, "a": "x"})
LEVELS: list[Any] = ["touch", "index", "full"]


@pytest.fixture(params=LEVELS)
def rec(request: pytest.FixtureRequest) -> Record:
    """TREE, loaded at each level of verification."""
    return zcrecord.load_record(DATA, verify=request.param)


def test_is_a_mapping_in_saved_order(rec: Record) -> None:
    assert isinstance(rec, Mapping)
    assert list(rec) == list(rec.keys()) == list(rec.names) == [n for n, _ in rec.items()] == NAMES
    assert len(rec) == len(rec.keys()) == len(rec.items()) == len(rec.values()) == 9
    assert rec
    for name, value, (_, item) in zip(rec, rec.values(), rec.items(), strict=True):
        for other in (value, item, rec.get(name)):
            r.assert_same(other, rec[name])


def test_views_of_all_tensors_can_be_iterated_more_than_once(rec: Record) -> None:
    values, items = rec.values(), rec.items()
    assert [v.shape for v in values] == [v.shape for v in values] == [v.shape for _, v in items]
    assert dict(items).keys() == dict(rec).keys()
    assert {**rec}.keys() == set(NAMES)


def test_record_of_nothing_is_false_and_empty() -> None:
    rec = r.round_trip({})
    assert not rec
    assert (list(rec), list(rec.items()), rec.get("x")) == ([], [], None)
    with pytest.raises(TensorNotFoundError, match="not in this record of 0 tensors"):
        rec["x"]


def test_missing_name_is_a_key_error_that_lists_close_names() -> None:
    rec = r.round_trip({"encoder": {"layer": [{"weight": BASE}]}, "encoder.bias": BASE, "head": BASE})
    with pytest.raises(
        KeyError, match=r"^tensor 'encoder\.layer\.1\.weight': not in this record; close names: 'enc"
    ) as e:
        rec["encoder.layer.1.weight"]
    assert isinstance(e.value, TensorNotFoundError)
    assert e.value.tensor == "encoder.layer.1.weight"
    assert "'encoder.layer.0.weight'" in str(e.value)
    with pytest.raises(TensorNotFoundError, match=r"'zzz': not in this record of 3 tensors; list\(record\) gives all"):
        rec["zzz"]
    for call in (rec.info, rec.array, rec.raw):
        with pytest.raises(TensorNotFoundError, match=r"close names: 'encoder\.bias'"):
            call("encoder.bia")


def test_close_names_are_searched_for_only_when_the_message_is_wanted(
    rec: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[Any] = []

    def search(*args: Any, **_: Any) -> list[str]:
        searches.append(args)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", search)
    for _ in range(100):
        assert rec.get("enc.weigh") is None
        assert rec.get("enc.weigh", 7) == 7
        assert "enc.weigh" not in rec
    with pytest.raises(KeyError) as caught:
        rec["enc.weigh"]
    assert not searches
    str(caught.value)
    assert searches


def test_missing_key_among_ten_thousand_costs_no_search_until_its_message_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = r.round_trip({f"layers.{i}.weight": BASE for i in range(10_000)})
    search, searched = difflib.get_close_matches, []

    def noted(word: str, candidates: Any, **options: Any) -> list[str]:
        searched.append(len(candidates))
        return search(word, candidates, **options)

    monkeypatch.setattr(difflib, "get_close_matches", noted)
    errors = []
    for i in range(10_000):
        assert f"layers.{i}.weigth" not in many
        assert many.get(f"layers.{i}.weigth") is None
        try:
            many[f"layers.{i}.weigth"]
        except TensorNotFoundError as error:
            errors.append(error)
    assert len(errors) == 10_000
    assert not searched
    text = str(errors[77])
    assert "'layers.77.weigth': not in this record; close names: " in text
    assert str(errors[77]) == text
    assert len(searched) == 1, "one message was asked for, twice"
    assert searched[0] <= 2000, "however many names there are"


@pytest.mark.parametrize("key", [5, None, b"z", ("z",), ["z"], 1.5, object()], ids=lambda k: type(k).__name__)
def test_key_that_is_no_text_is_missing(key: Any, rec: Record) -> None:
    assert key not in rec
    assert rec.get(key) is None
    with pytest.raises(TensorNotFoundError, match="not in this record"):
        rec[key]


@pytest.mark.parametrize(
    "key", ["", "Z", "z ", "z\0", "zz", "enc", "enc.", ".z", "enc.n", "a.2", "\ud800", "\U0010ffff"], ids=ascii
)
def test_what_is_no_tensor_is_missing_before_and_after_many_lookups(key: str, rec: Record) -> None:
    for _ in range(3):
        assert key not in rec
        assert rec.get(key) is None
        with pytest.raises(TensorNotFoundError, match="not in this record"):
            rec[key]
        for _ in range(50):
            assert "z" in rec


@pytest.mark.parametrize("verify", LEVELS)
def test_lookups_agree_before_and_after_many_of_them(verify: Any) -> None:
    names = [f"layers.{i}.{part}" for i in range(100) for part in ("w", "b")]
    data = r.saved({name: np.full(2, i) for i, name in enumerate(names)})
    for seed in range(3):
        rec = zcrecord.load_record(data, verify=verify)
        for i in np.random.default_rng(seed).permutation(len(names)).tolist():
            assert rec[names[i]].tolist() == [i, i]
            assert names[i] + "x" not in rec


IDIOMS: dict[str, Callable[[Record, list[str]], Any]] = {
    "dict(record)": lambda rec, _: dict(rec),
    "a comprehension": lambda rec, _: {name: rec[name] for name in rec},
    "names from elsewhere": lambda rec, names: dict(zip(names, [rec[name] for name in names], strict=True)),
    "get": lambda rec, names: {name: rec.get(name) for name in names},
    "values": lambda rec, names: dict(zip(names, rec.values(), strict=True)),
}


@pytest.mark.parametrize("mode", ["r", "c"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_whoever_asks_for_all_tensors_reads_few_rows_of_the_index(
    idiom: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {f"layers.{i}.{part}": np.full((2, 3), i) for i in range(300) for part in ("w", "b")}
    tree = {name: value.T if name.endswith("b") else value + 1000 for name, value in tree.items()}
    rec = zcrecord.load_record(r.saved(tree), mode=mode)
    asked: list[int] = []
    original = Archive.row

    def row(archive: Archive, i: int) -> Any:
        asked.append(i)
        return original(archive, i)

    monkeypatch.setattr(Archive, "row", row)
    found = IDIOMS[idiom](rec, list(tree))
    assert len(asked) < 40, "the others come from columns that were prepared once"
    assert list(found) == list(tree)
    for name, value in tree.items():
        r.assert_same(found[name], value)


def test_name_may_be_of_a_class_of_text(rec: Record) -> None:
    assert rec[np.str_("enc.weight")].tolist() == BASE.tolist()


def test_records_are_equal_only_to_themselves(rec: Record) -> None:
    other = zcrecord.load_record(DATA)
    assert rec == rec
    assert rec != other
    assert rec != dict(rec)
    assert len({rec, other, rec}) == 2


def test_record_cannot_be_changed(rec: Record) -> None:
    with pytest.raises(TypeError):
        rec["z"] = BASE  # type: ignore[index]
    with pytest.raises(TypeError):
        del rec["z"]  # type: ignore[attr-defined]
    for name in ("path", "names", "nbytes", "other"):
        with pytest.raises(AttributeError):
            setattr(rec, name, 1)


def test_what_a_caller_does_to_the_answers_does_not_reach_the_record(rec: Record) -> None:
    rec.attributes.clear()
    rec.metadata.clear()
    rec.modules.clear()
    rec.tree().clear()
    rec.modules["enc"].attributes.clear()
    r.assert_same(rec.tree(), TREE | {"layer": r.Layer(np.array(2, np.float16), [1, 2])})
    assert rec.modules["enc"].attributes["n"] == 5
    assert rec.metadata == {"a": "x", "b": 1}


@pytest.mark.parametrize("verify", LEVELS)
def test_threads_share_a_record(verify: Any) -> None:
    names = [f"layers.{i}.weight" for i in range(500)]
    rec = zcrecord.load_record(r.saved({name: np.full(3, i) for i, name in enumerate(names)}), verify=verify)
    failures: list[Any] = []
    start = threading.Barrier(8)

    def look(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        try:
            for i in rng.integers(0, 500, 300).tolist():
                assert rec[names[i]].tolist() == [i] * 3
                assert rec.get(names[i] + "?") is None
                assert rec.info(names[i]).name == names[i]
            assert [int(v[0]) for v in rec.values()] == list(range(500))
            assert list(rec) == names
        except Exception as error:  # a thread's own failure would go unseen
            failures.append(error)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_info_tells_everything_about_a_tensor(rec: Record) -> None:
    at = DATA.index(BASE.tobytes())
    info = rec.info("enc.rows")
    assert info == TensorInfo(
        name="enc.rows", dtype=by_name["float32"], shape=(2, 6), strides=(6, 1), offset=at + 24, nbytes=48,
        alignment=info.alignment, payload=0, digest=info.digest, tied=("z", "enc.weight", "enc.rows", "a.1.bias"),
        bits=32, module="enc",
    )  # fmt: skip
    assert at % info.alignment == 0
    assert info.digest == rec.info("z").digest
    assert (rec.info("a.1.bias").strides, rec.info("a.1.bias").module) == ((1, 6), "a.1")
    assert (rec.info("z").strides, rec.info("z").module) == (None, "")


def test_info_tells_about_tensors_that_are_no_arrays(rec: Record) -> None:
    packed, strings, none = rec.info("p"), rec.info("s"), rec.info("none")
    assert (packed.dtype.name, packed.bits, packed.shape, packed.nbytes) == ("int4", 4, (3,), 2)
    assert (strings.dtype.name, strings.shape, strings.nbytes) == ("string", (2,), 8 + 24)
    assert (none.dtype.name, none.shape, none.nbytes, none.payload, none.digest) == ("int16", (0, 3), 0, None, None)
    assert none.tied == packed.tied == ()


def test_digest_of_info_is_that_of_the_payload(rec: Record) -> None:
    import xxhash

    for name in NAMES:
        if rec.info(name).nbytes:
            assert rec.info(name).digest == xxhash.xxh3_64_intdigest(bytes(rec.raw(name)))


def test_infos_cannot_be_changed(rec: Record) -> None:
    for frozen in (rec.info("z"), rec.modules["enc"]):
        with pytest.raises(AttributeError):
            frozen.name = "x"  # type: ignore[misc]


def test_raw_is_the_whole_payload_read_only(rec: Record) -> None:
    assert bytes(rec.raw("z")) == bytes(rec.raw("enc.rows")) == BASE.tobytes()
    assert rec.raw("z").readonly
    assert bytes(rec.raw("p")) == PACKED.packed.tobytes()
    assert len(rec.raw("none")) == 0


def test_array_is_an_ndarray_or_an_error(rec: Record) -> None:
    assert rec.array("z").tolist() == BASE.tolist()
    for name, kind in (("p", "PackedTensor"), ("s", "StringTensor")):
        with pytest.raises(
            UnsupportedError, match=rf"tensor '{name}': a {kind} is no ndarray; use record\[name\]\.unpack"
        ):
            rec.array(name)


def test_modules_tell_kind_class_and_size_of_each_subtree(rec: Record) -> None:
    size = BASE.nbytes
    enc = {"n": 5, "blob": rec.attributes["enc.blob"], "ratio": 0.5}
    all_bytes = 3 * size + 48 + 24 + 2 + 32 + 2
    assert list(rec.modules.values()) == [
        ModuleInfo("", "mapping", "", 9, all_bytes, {}),
        ModuleInfo("enc", "mapping", "", 2, size + 48, enc),
        ModuleInfo("a", "list", "", 2, 24 + size, {"2": "text"}),
        ModuleInfo("a.1", "mapping", "", 1, size, {}),
        ModuleInfo("layer", "object", "Layer", 1, 2, {"bias": [1, 2]}),
    ]
    assert list(rec.modules) == ["", "enc", "a", "a.1", "layer"]


def test_attributes_come_by_full_name(rec: Record) -> None:
    want = {"enc.n": 5, "enc.blob": b"bytes", "enc.ratio": 0.5, "a.2": "text", "layer.bias": [1, 2]}
    r.assert_same(rec.attributes, want)


def test_sizes_count_each_payload_once(rec: Record) -> None:
    assert rec.nbytes == BASE.nbytes + 24 + 2 + 32 + 2 + len(b"bytes")
    assert rec.archive_nbytes == len(DATA)


def test_repr_names_the_file_and_the_state(tmp_path: Path) -> None:
    (tmp_path / "m.zcr").write_bytes(DATA)
    rec = zcrecord.load_record(tmp_path / "m.zcr")
    assert repr(rec) == f"<Record {tmp_path / 'm.zcr'}: 9 tensors>"
    rec.close()
    assert repr(rec) == f"<Record {tmp_path / 'm.zcr'}: closed>"
    assert repr(zcrecord.load_record(DATA)) == "<Record bytes: 9 tensors>"


def test_record_can_be_referred_to_weakly(rec: Record) -> None:
    assert weakref.ref(rec)() is rec


LOOKUPS: dict[str, Callable[[Record], Any]] = {
    "[]": lambda rec: rec["z"],
    "[] of a missing name": lambda rec: rec["missing"],
    "get": lambda rec: rec.get("z"),
    "in": lambda rec: "z" in rec,
    "len": len,
    "list": list,
    "names": lambda rec: rec.names,
    "values": lambda rec: list(rec.values()),
    "items": lambda rec: list(rec.items()),
    "array": lambda rec: rec.array("z"),
    "raw": lambda rec: rec.raw("z"),
    "info": lambda rec: rec.info("z"),
    "tree": lambda rec: rec.tree(),
    "modules": lambda rec: rec.modules,
    "attributes": lambda rec: rec.attributes,
    "metadata": lambda rec: rec.metadata,
    "nbytes": lambda rec: rec.nbytes,
    "archive_nbytes": lambda rec: rec.archive_nbytes,
    "verify": lambda rec: rec.verify(),
    "content_digest": lambda rec: rec.content_digest(),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("what", LOOKUPS)
def test_lookups_end_with_the_record(what: str, used: bool, rec: Record) -> None:
    with rec as same:
        assert same is rec
        if used:
            assert [rec[name].shape for name in list(rec) * 10]
    with pytest.raises(UnsupportedError, match="the record is closed; views taken before stay valid"):
        LOOKUPS[what](rec)
