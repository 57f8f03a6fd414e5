"""A Record is an immutable mapping of full names to views, in saved order, that threads share; and what it tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import xxhash

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
    assert rec and weakref.ref(rec)() is rec
    values, items = rec.values(), rec.items()
    for _ in range(2):
        for name, value, (_, item) in zip(rec, values, items, strict=True):
            for other in (value, item, rec.get(name), rec[np.str_(name)]):
                r.assert_same(other, rec[name])
    nothing = r.round_trip({})
    assert (bool(nothing), list(nothing), list(nothing.items()), nothing.get("x")) == (False, [], [], None)


def test_missing_name_is_a_key_error_that_lists_close_names() -> None:
    rec = r.round_trip({"encoder": {"layer": [{"weight": BASE}]}, "encoder.bias": BASE, "head": BASE})
    with pytest.raises(KeyError, match=r"^tensor 'encoder\.layer\.1\.weight': not in this record; close names: ") as e:
        rec["encoder.layer.1.weight"]
    assert isinstance(e.value, TensorNotFoundError)
    assert e.value.tensor == "encoder.layer.1.weight"
    assert "'encoder.layer.0.weight'" in str(e.value)
    with pytest.raises(TensorNotFoundError, match="'zzz': not in this record of 3 names"):
        rec["zzz"]
    for call in (rec.info, rec.array, rec.raw):
        with pytest.raises(TensorNotFoundError, match=r"close names: 'encoder\.bias'"):
            call("encoder.bia")


@pytest.mark.parametrize(
    "key",
    [5, None, b"z", ("z",), ["z"], "", "Z", "z ", "z\0", "zz", "enc", "enc.", ".z", "enc.n", "\ud800", "\U0010ffff"],
    ids=ascii,
)
def test_other_keys_are_missing_before_and_after_many_lookups(key: Any, rec: Record) -> None:
    for _ in range(3):
        assert key not in rec
        assert rec.get(key) is None
        with pytest.raises(TensorNotFoundError, match="not in this record"):
            rec[key]
        for _ in range(50):
            assert "z" in rec


IDIOMS: dict[str, Callable[[Record, list[str]], Any]] = {
    "dict(record)": lambda rec, _: dict(rec),
    "names from elsewhere": lambda rec, names: dict(zip(names, [rec[name] for name in names], strict=True)),
    "get": lambda rec, names: {name: rec.get(name) for name in names},
    "values": lambda rec, names: dict(zip(names, rec.values(), strict=True)),
}


@pytest.mark.parametrize("mode", ["r", "c"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_all_tensors_read_few_rows(idiom: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_record_is_immutable_and_equal_only_to_itself(rec: Record) -> None:
    other = zcrecord.load_record(DATA)
    assert rec == rec
    assert rec != other
    assert rec != dict(rec)
    assert len({rec, other, rec}) == 2
    with pytest.raises(TypeError):
        rec["z"] = BASE  # type: ignore[index]
    with pytest.raises(TypeError):
        del rec["z"]  # type: ignore[attr-defined]


def test_what_a_caller_does_to_the_answers_does_not_reach_the_record(rec: Record) -> None:
    rec.attributes.clear()
    rec.metadata.clear()
    rec.modules.clear()
    rec.tree().clear()
    rec.modules["enc"].attributes.clear()
    r.assert_same(rec.tree(), TREE | {"layer": r.Layer(np.array(2, np.float16), [1, 2])})
    assert rec.modules["enc"].attributes["n"] == 5
    assert rec.metadata == {"a": "x", "b": 1}


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
    for info in (packed, strings):
        assert info.digest == xxhash.xxh3_64_intdigest(bytes(rec.raw(info.name)))


def test_raw_is_the_whole_payload_read_only(rec: Record) -> None:
    assert bytes(rec.raw("z")) == bytes(rec.raw("enc.rows")) == BASE.tobytes()
    assert rec.raw("z").readonly
    assert bytes(rec.raw("p")) == PACKED.packed.tobytes()
    assert len(rec.raw("none")) == 0


def test_array_is_an_ndarray_or_an_error(rec: Record) -> None:
    assert rec.array("z").tolist() == BASE.tolist()
    for name, kind in (("p", "PackedTensor"), ("s", "StringTensor")):
        with pytest.raises(
            UnsupportedError, match=rf"tensor '{name}': a {kind} is not an ndarray; use record\[name\]\.unpack"
        ):
            rec.array(name)


def test_modules_and_sums_tell_kind_class_and_size_of_each_subtree(rec: Record) -> None:
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
    attributes = {"enc.n": 5, "enc.blob": b"bytes", "enc.ratio": 0.5, "a.2": "text", "layer.bias": [1, 2]}
    r.assert_same(rec.attributes, attributes)
    assert rec.nbytes == size + 24 + 2 + 32 + 2 + len(b"bytes")
    assert rec.archive_nbytes == len(DATA)


def test_repr_names_the_file_and_the_state(tmp_path: Path) -> None:
    (tmp_path / "m.zcr").write_bytes(DATA)
    rec = zcrecord.load_record(tmp_path / "m.zcr")
    assert repr(rec) == f"<Record {tmp_path / 'm.zcr'}: 9 tensors>"
    rec.close()
    assert repr(rec) == f"<Record {tmp_path / 'm.zcr'}: closed>"
    assert repr(zcrecord.load_record(DATA)) == "<Record bytes: 9 tensors>"


LOOKUPS: dict[str, Callable[[Record], Any]] = {
    "[]": lambda rec: rec["z"],
    "[] of a missing name": lambda rec: rec["missing"],
    "in": lambda rec: "z" in rec,
    "len": len,
    "list": list,
    "values": lambda rec: list(rec.values()),
    "items": lambda rec: list(rec.items()),
    "save": r.saved,
    **{name: methodcaller(name, "z") for name in ("get", "array", "raw", "info")},
    **{name: methodcaller(name) for name in ("tree", "verify", "content_digest")},
    **{name: attrgetter(name) for name in ("names", "modules", "attributes", "metadata", "nbytes", "archive_nbytes")},
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
