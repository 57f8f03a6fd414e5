"""An archive that is edited holds what a save of the same changes would; its payloads move as little as they can."""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from exhaustive import rounds

import zcrecord
from zcrecord import (
    DestinationExistsError,
    LazyTensor,
    NameCollisionError,
    PackedTensor,
    Record,
    RecordWriter,
    SourceError,
    SourceNotFoundError,
    StringTensor,
    TensorNotFoundError,
    UnsupportedError,
    integrity,
    transport,
)
from zcrecord.codec.layout import LARGE_PAYLOAD
from zcrecord.storage import files, new_files

LARGE = np.random.default_rng(1).integers(0, 255, LARGE_PAYLOAD + 1000, np.uint8)
TREE: dict[str, Any] = {
    "model": {
        "layers": [{"w": LARGE, "b": np.arange(5.0)}, {"w": LARGE[::-1].copy(), "b": np.arange(5.0)}],
        "heads": 8,
    },
    "head": r.Pair(np.ones(3, np.float32), 2),
    "names": StringTensor.from_strings(["a", "bc"]),
    "narrow": PackedTensor.pack(np.array([1, -2, 3]).astype("int4")),
    "empty": np.zeros((0, 3)),
    "blob": b"some bytes",
    "tied": LARGE,
    "last": np.arange(100),
}


def front(path: Path) -> None:
    zcrecord.save_record(TREE, path, metadata={"author": "me", "raw": b"raw bytes"})


def back(path: Path) -> None:
    """The same record, its index last."""
    lazy = LazyTensor("float64", (100,), [np.arange(100.0)])
    zcrecord.save_record({**TREE, "last": lazy}, path, metadata={"author": "me", "raw": b"raw bytes"})


@pytest.fixture(params=[front, back], ids=["index in front", "index at the back"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The path of an archive with everything that archives can have."""
    request.param(tmp_path / "m.zcr")
    return tmp_path / "m.zcr"


def edited(path: Path) -> Record:
    """Return the archive, every rule and digest of it checked, as the only file in its folder."""
    record = zcrecord.load_record(path, verify="full")
    record.verify()
    assert os.listdir(path.parent) == [path.name]
    return record


def saved(path: Path, tree: Any, **options: Any) -> Path:
    zcrecord.save_record(tree, path / "m.zcr", **options)
    return path / "m.zcr"


def offsets(record: Record) -> dict[str, int]:
    return {info.name: info.offset for info in record.infos()}


def test_metadata_change_and_nothing_else_does(path: Path) -> None:
    before = zcrecord.load_record(path)
    digest, old = before.content_digest(), before.layout
    with zcrecord.edit(path) as model:
        assert model.metadata.keys() == {"author", "raw"}
        model.metadata |= {"license": "mit", "tags": ["x", "y"], "more": b"raw bytes"}
        del model.metadata["author"]
    record = edited(path)
    assert record.metadata == {"raw": b"raw bytes", "license": "mit", "tags": ["x", "y"], "more": b"raw bytes"}
    assert record.content_digest() == digest
    assert (record.layout.front, record.layout.alignment) == (old.front, old.alignment)
    assert record.layout.deduplicated == old.deduplicated + len(b"raw bytes")
    assert record.names == before.names


def test_payloads_stay_on_the_blocks_that_they_were_on(path: Path) -> None:
    before = offsets(zcrecord.load_record(path))
    for size in (3, 10, 5000, 40_000):
        with zcrecord.edit(path) as model:
            model.metadata["text"] = "x" * size
        after = offsets(edited(path))
        assert {(offset - before[name]) % 4096 for name, offset in after.items() if offset} == {0}
        assert size > 3 or after == before, "as long as the index fits in front of them they do not move"


def test_attributes_are_set_added_and_removed(path: Path) -> None:
    with zcrecord.edit(path) as model:
        assert dict(model.attributes) == {"model.heads": 8, "head.second": 2, "blob": b"some bytes"}
        new = {"model.heads": 16, "model.layers.0.rate": 0.5, "note": ["a", "b"]}
        model.attributes.update(new | {"raw": [b"raw bytes", b"", b"new bytes"], "copy": model.attributes["blob"]})
        assert model.attributes["raw"] == [b"raw bytes", b"", b"new bytes"]
        del model.attributes["blob"]
        assert "blob" not in model.attributes
        assert len(model.attributes) == 6
    record = edited(path)
    bytes_set = {"copy": b"some bytes", "raw": [b"raw bytes", b"", b"new bytes"]}
    assert record.attributes == new | {"head.second": 2} | bytes_set
    assert record.tree()["model"]["heads"] == 16


def test_views_with_rows_and_no_bytes_are_set_as_no_bytes(path: Path) -> None:
    empty = np.zeros((3, 0), np.uint8).data.toreadonly()
    with zcrecord.edit(path) as model:
        model.attributes["nothing"] = model.metadata["nothing"] = empty
        model.attributes["one"] = np.array(7, np.uint8).data.toreadonly()
    record = edited(path)
    assert (record.attributes["nothing"], record.attributes["one"], record.metadata["nothing"]) == (b"", b"\7", b"")


def test_tensors_are_replaced_in_their_places_added_and_removed(path: Path) -> None:
    with zcrecord.edit(path) as model:
        names = list(model)
        model["model.layers.0.b"] = np.arange(6, dtype=np.float32)
        model["model.layers.2.w"] = LARGE + 1
        model["model.extra.deep.x"] = np.float32(1)
        model["none"] = np.zeros((0, 2), np.int8)
        model["texts"] = np.array(["x", "yz"])
        assert model["model.layers.2.w"].shape == LARGE.shape
        assert "none" in model
        assert len(model) == len(names) + 4
        del model["last"], model["texts"]
        assert "last" not in model
        assert len(model) == len(names) + 2
    record = edited(path)
    assert list(record) == [*names[:-1], "model.layers.2.w", "model.extra.deep.x", "none"]
    assert record["model.layers.0.b"].tolist() == [0, 1, 2, 3, 4, 5]
    assert (record["model.layers.2.w"] == LARGE + 1).all()
    tree = record.tree()
    assert isinstance(tree["model"]["layers"], list)
    assert len(tree["model"]["layers"]) == 3
    assert isinstance(tree["head"], tuple)


def test_tied_tensors_stay_tied_and_one_of_them_may_go(path: Path) -> None:
    with zcrecord.edit(path) as model:
        model.tie("again", "model.layers.1.w")
        model.tie("last", "again")
        model.rename("tied", "other")
        del model["model.layers.0.w"]
    record = edited(path)
    assert record.info("again").tied == ("model.layers.1.w", "last", "again")
    assert record.info("other").tied == ()
    assert (record["other"] == LARGE).all()
    assert (record["last"] == LARGE[::-1]).all()


def test_new_tensors_that_share_memory_are_tied_and_views_share_their_payload(path: Path) -> None:
    base = np.arange(10_000)
    with zcrecord.edit(path) as model:
        model["a"], model["b"], model["part"], model["c"] = base, base, base[100:200], base.copy()
        model.rename("b", "d")
        model.tie("e", "part")
    record = edited(path)
    assert record.info("a").tied == ("a", "d", "part", "e")
    assert record.info("c").tied == ()
    assert record.info("c").offset == record.info("a").offset
    assert record["e"].tolist() == base[100:200].tolist()


def test_a_payload_is_kept_while_another_view_uses_it(tmp_path: Path) -> None:
    base = np.arange(1000)
    path = saved(tmp_path, {"all": base, "some": base[10:20], "x": np.ones(7)})
    size = path.stat().st_size
    with zcrecord.edit(path) as model:
        del model["all"]
    assert edited(path)["some"].tolist() == list(range(10, 20))
    assert size - 200 < path.stat().st_size < size
    with zcrecord.edit(path) as model:
        del model["some"]
    assert edited(path).names == ("x",)
    assert path.stat().st_size < 1000


def test_dropped_payloads_leave_their_space_and_none_of_their_bytes(path: Path) -> None:
    secret = np.frombuffer(b"a secret that is to be forgotten" * 4, np.uint8)
    with zcrecord.edit(path) as model:
        model["before"], model["secret"], model["after"] = np.ones(3), secret, np.ones((600, 600))
    assert b"to be forgotten" in path.read_bytes()
    size = path.stat().st_size
    with zcrecord.edit(path) as model:
        model.drop(["secret", "model.layers", "tied"])
    edited(path)
    assert b"to be forgotten" not in path.read_bytes()
    assert path.stat().st_size < size - 2 * LARGE.nbytes


def test_lazy_tensors_are_written_piece_by_piece(path: Path) -> None:
    pieces = [np.full((1, 70_000), i, np.int32) for i in range(4)]
    with zcrecord.edit(path) as model:
        model["lazy"] = LazyTensor("int32", (4, 70_000), iter(pieces))
        model["after"] = np.arange(3)
    record = edited(path)
    assert (record["lazy"] == np.concatenate(pieces)).all()
    assert record["after"].tolist() == [0, 1, 2]


TREE_NAMES = [
    "model.layers.0.w", "model.layers.0.b", "model.layers.1.w", "model.layers.1.b", "head.first", "names", "narrow",
    "empty", "tied", "last",
]  # fmt: skip


def test_names_are_dropped_as_select_chooses_them(path: Path) -> None:
    with zcrecord.edit(path) as model:
        model.drop("*.b")
        model.drop(lambda info: info.dtype.name == "int4")
        model.drop("model.heads")
        model.drop(["blob", "na*s"])
        assert list(model) == [n for n in TREE_NAMES if not n.endswith(".b") and n not in ("narrow", "names")]
        model.drop("model.layers.0")
        model.drop("head.first")
    record = edited(path)
    assert record.attributes == {"head.second": 2}
    assert record.modules["model.layers"].kind == record.modules["head"].kind == "mapping", "they lost an item"


def test_modules_that_are_empty_by_a_drop_go_and_others_stay(tmp_path: Path) -> None:
    tree = {"a": {"x": {"w": np.ones(1)}, "y": {}}, "b": {"w": np.ones(2), "n": 1}, "c": {"d": {"w": np.ones(3)}}}
    path = saved(tmp_path, tree)
    with zcrecord.edit(path) as model:
        model.drop("*.w")
    assert edited(path).tree() == {"a": {"y": {}}, "b": {"n": 1}}


RENAMES: list[Any] = [
    ("model.*", "*"), ("model", ""), ({"model": ""},), (re.compile(r"^model\."), ""),
    (lambda name: name.removeprefix("model."),),
]  # fmt: skip


@pytest.mark.parametrize("rename", RENAMES)
def test_names_are_changed_as_select_changes_them(rename: Any, path: Path) -> None:
    with zcrecord.edit(path) as model:
        model.rename(*rename)
    record = edited(path)
    assert record.names[:2] == ("layers.0.w", "layers.0.b")
    assert record.attributes["heads"] == 8
    assert record.modules["layers"].kind == "list"
    assert record.info("tied").tied == ("layers.0.w", "tied")


def test_a_new_name_goes_into_the_module_with_the_longest_name_that_begins_it(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": {"b.c": {"d": {"w": np.ones(1)}}}})
    with zcrecord.edit(path) as model:
        model["a.b.c.d.v"] = np.ones(1)
        model["a.b.x"] = np.ones(1)
    tree = edited(path).tree()
    assert tree["a"]["b.c"]["d"].keys() == {"w", "v"}
    assert tree["a"]["b"].keys() == {"x"}
    saved(tmp_path, {"a.w": np.ones(1), "b.c.w": np.ones(2)})
    with zcrecord.edit(path) as model:
        model["a.b"] = np.ones(3)
    assert list(edited(path).tree()) == ["a.w", "b.c.w", "a.b"], "names of a flat record are flat"


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in flat.items():
        here = out
        *above, key = name.split(".")
        for part in above:
            here = here.setdefault(part, {})
        here[key] = value
    return out


@pytest.mark.parametrize("seed", range(rounds(60)))
def test_any_edits_give_what_a_save_of_the_result_gives(seed: int, tmp_path: Path) -> None:
    """The content digest is that of the tree that the same edits make of a dict; so are the bytes that are stored."""
    draw, made = random.Random(seed), np.random.default_rng(seed)
    sizes = [1, 30, 700, 5000, 70_000, LARGE_PAYLOAD // 8, LARGE_PAYLOAD // 8 + 3]
    path = tmp_path / "m.zcr"
    tensors: dict[str, Any] = {}
    attributes: dict[str, Any] = {}

    def value() -> Any:
        if tensors and draw.random() < 0.2:
            return draw.choice(list(tensors.values())).copy()
        return made.integers(0, 1 << 40, draw.choice(sizes))

    def name() -> str:
        return f"{draw.choice('abc')}.{draw.choice('de')}.{draw.choice('fghij')}"

    def change(model: Any) -> None:
        step = draw.choice(["put", "put", "delete", "drop", "rename", "attribute", "tie"])
        if step == "attribute":
            attributes["a.number"] = model.attributes["a.number"] = draw.choice([1, 0.5, "x", b"bytes", [1, 2]])
        if step == "put":
            key = name()
            tensors[key] = model[key] = value()
        if step in ("put", "attribute") or not tensors:
            return
        chosen = draw.choice(list(tensors))
        if step == "delete":
            del tensors[chosen], model[chosen]
        elif step == "drop":
            model.drop(f"{chosen[0]}.*")
            for names in (tensors, attributes):
                for gone in [n for n in names if n[0] == chosen[0]]:
                    del names[gone]
        elif step == "rename":
            new = f"{chosen}{draw.randrange(1000)}"
            model.rename(chosen, new)
            tensors[new] = tensors.pop(chosen)
        else:
            key = name()
            model.tie(key, chosen)
            tensors[key] = tensors[chosen]

    for _ in range(draw.randrange(12)):
        tensors[name()] = value()
    alignment = draw.choice([16, 64, 4096, 65536])
    if draw.random() < 0.5:
        zcrecord.save_record(nested(tensors), path, alignment=alignment)
    else:
        with RecordWriter(path, alignment=alignment) as out:
            for key, array in tensors.items():
                out.add(key, array)
    for _ in range(3):
        with zcrecord.edit(path) as model:
            for _ in range(draw.randrange(6)):
                change(model)
            assert set(model) == set(tensors)
            assert all(np.array_equal(model[n], array) for n, array in tensors.items())
        record = edited(path)
        wanted = zcrecord.load_record(r.saved(nested({**tensors, **attributes})))
        assert record.content_digest() == wanted.content_digest()
        assert record.nbytes == wanted.nbytes


def test_the_same_edit_gives_the_same_bytes_whatever_copies_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, made = path.read_bytes(), []
    for copies in (True, True, False):
        path.write_bytes(data)
        if not copies:
            monkeypatch.setattr(new_files, "copy_range", lambda *_: (0, False))
        with zcrecord.edit(path) as model:
            model.metadata["license"] = "mit"
            model.drop("model.layers.0.w")
            model["new"] = LARGE * 2
        edited(path)
        made.append(path.read_bytes())
    assert made[0] == made[1] == made[2]


def test_an_edit_that_changes_nothing_writes_nothing(path: Path) -> None:
    zcrecord.save_record(zcrecord.load_record(path), path)
    before = files.identity_of(str(path))
    with zcrecord.edit(path) as model:
        model.metadata["author"] = "me"
        model["last"] = model["last"]
    assert model.report is not None
    assert not model.report.written
    assert files.identity_of(str(path)) == before
    with zcrecord.edit(path, path.parent / "other.zcr"):
        pass
    assert (path.parent / "other.zcr").read_bytes() == path.read_bytes()


VALID = r.ROOT / "tests" / "conformance" / "valid"
GOLDEN = [p for p in sorted(VALID.glob("*.zcr")) if p.stem not in ("prefix", "suffix")]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.stem)
def test_every_golden_archive_can_be_edited(golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    path.write_bytes(golden.read_bytes())
    before = zcrecord.load_record(path)
    with zcrecord.edit(path) as model:
        model.metadata["text"] = "x" * 3000
    record = edited(path)
    assert record.names == before.names
    assert {n: m.kind for n, m in record.modules.items()} == {n: m.kind for n, m in before.modules.items()}
    if golden.stem != "unknown_dtype":  # it has no content digest
        assert record.content_digest() == before.content_digest()
    with zcrecord.edit(path) as model:
        for number, name in enumerate(before):
            model.rename(name, f"new.{number}")
        model["more"] = np.arange(5)
    assert edited(path).names == (*(f"new.{n}" for n in range(len(before))), "more")


def test_an_edit_that_fails_leaves_the_archive_as_it_was(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="unforeseen"), zcrecord.edit(path) as model:
        model.metadata["license"] = "mit"
        raise RuntimeError("unforeseen")
    message = "tensor 'lazy': 40 bytes were declared, 8 produced"
    with pytest.raises(zcrecord.ProducerError, match=message), zcrecord.edit(path) as model:
        model["lazy"] = LazyTensor("int64", (5,), [np.arange(1)])
    with pytest.raises(UnsupportedError, match="metadata 'x': values are"), zcrecord.edit(path) as model:
        model.metadata["x"] = object()
    assert path.read_bytes() == before
    edited(path)


def test_an_archive_that_is_replaced_meanwhile_is_not_lost(path: Path) -> None:
    with pytest.raises(SourceError, match="was replaced meanwhile"), zcrecord.edit(path) as model:
        model.metadata["license"] = "mit"
        zcrecord.save_record({"newer": np.ones(1)}, path)
    assert edited(path).names == ("newer",)

    def replace(done: int, total: int) -> None:
        zcrecord.save_record({"newest": np.ones(1)}, path)

    with pytest.raises(SourceError, match="was replaced meanwhile"), zcrecord.edit(path, progress=replace) as model:
        model["w"] = np.ones(1)
    assert edited(path).names == ("newest",)


def test_another_destination_gets_the_result_and_the_archive_stays(path: Path) -> None:
    before, other = path.read_bytes(), path.parent / "other.zcr"
    calls: list[tuple[int, int]] = []
    with zcrecord.edit(path, other, progress=lambda *call: calls.append(call)) as model:
        model.drop("last")
    assert path.read_bytes() == before
    assert "last" not in zcrecord.load_record(other, verify="full")
    assert model.report is not None
    assert (model.report.dest, model.report.archive_bytes) == (str(other), other.stat().st_size)
    assert sorted(calls) == calls
    assert {total for _, total in calls} == {other.stat().st_size}
    with pytest.raises(DestinationExistsError, match="exists already; force=True replaces it"):
        zcrecord.edit(path, other).__enter__()
    with zcrecord.edit(path, other, force=True) as model:
        model.drop("tied")
    assert "last" in zcrecord.load_record(other)


def test_a_name_that_is_taken_is_refused_with_the_archive_named(path: Path) -> None:
    with pytest.raises(NameCollisionError, match=r"m\.zcr: tensor 'last': "), zcrecord.edit(path) as model:
        model.rename("tied", "last")
    with pytest.raises(NameCollisionError, match=r"m\.zcr: tensor 'model\.heads': "), zcrecord.edit(path) as model:
        model["model.heads"] = np.ones(1)
    with pytest.raises(NameCollisionError, match=r"m\.zcr: tensor 'last': "), zcrecord.edit(path) as model:
        model["last.w"] = np.ones(1)
        model.attributes["last"] = 1
    edited(path)


REFUSED: list[tuple[Callable[[Any], Any], type[zcrecord.RecordError], str]] = [
    (lambda m: m["lest"], TensorNotFoundError, "tensor 'lest': not in this record; close names: 'last'"),
    (lambda m: m.__delitem__("lest"), TensorNotFoundError, "close names: 'last'"),
    (lambda m: m.drop("model.laers"), TensorNotFoundError, "close names: 'model.layers'"),
    (lambda m: m.rename("model.laers", "x"), TensorNotFoundError, "close names: 'model.layers"),
    (lambda m: m.rename({"lest": "x"}), TensorNotFoundError, "close names: 'last'"),
    (lambda m: m.tie("x", "lest"), TensorNotFoundError, "close names: 'last'"),
    (lambda m: m.attributes.__delitem__("model.haeds"), TensorNotFoundError, "close names: 'model.heads'"),
    (lambda m: m.__setitem__("x", 5), UnsupportedError, "a int is not a tensor; see .attributes"),
    (lambda m: m.__setitem__("x", object()), UnsupportedError, "tensor 'x': "),
    (lambda m: m.__setitem__("", np.ones(1)), UnsupportedError, "'': a name is a non-empty str"),
    (lambda m: m.attributes.__setitem__("x", np.ones(1)), UnsupportedError, "a ndarray; an attribute is None, bool"),
    (lambda m: m.rename("a.*", "b"), UnsupportedError, r"'a.\*' has 1 \*, the new name 'b' 0; give both the same"),
    (lambda m: m.rename("last"), UnsupportedError, "rename takes a new name for 'last'"),
    (lambda m: m.rename({"last": "x"}, "y"), UnsupportedError, "takes a new name with an old one alone"),
    (lambda m: m.drop(5), UnsupportedError, "takes a pattern, several, or a function"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_a_change_that_cannot_be_is_refused(
    change: Callable[[Any], Any], error: type[zcrecord.RecordError], message: str, path: Path
) -> None:
    with pytest.raises(error, match=message), zcrecord.edit(path) as model:
        change(model)
    edited(path)


def test_outside_of_its_block_nothing_is_edited(path: Path) -> None:
    model = zcrecord.edit(path)
    for use in (lambda: model["last"], lambda: "last" in model, lambda: model.drop("last"), lambda: model.attributes):
        with pytest.raises(UnsupportedError, match="only inside a with block"):
            use()
    with model:
        model.drop("last")
    with pytest.raises(UnsupportedError, match="only inside a with block"):
        model["w"] = np.ones(1)


def test_only_an_archive_alone_in_a_local_file_is_edited(path: Path) -> None:
    for source in (path.read_bytes(), io.BytesIO(), None):
        with pytest.raises(UnsupportedError, match="edit takes the path of an archive, not a "):
            zcrecord.edit(source)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="is remote; download it, and edit the file"):
        zcrecord.edit("https://example.com/m.zcr")
    transport.pack(path, packed := path.parent / "m.zcr.zst")
    (app := path.parent / "app").write_bytes(b"\x7fELF" + bytes(65532) + path.read_bytes())
    with RecordWriter(tuned := path.parent / "tuned.zcr") as out:
        out.module(("onnx.tuned",), type_name="zcr:onnx_tuned")
        out.attribute(("onnx.tuned", "before"), b"x")
    for place, message in (
        (packed, "is packed; unpack it, edit that"),
        (app, "attached to a program; detach it"),
        (tuned, r"is tuned.*; remove the tuned part \(untune"),
        (path.parent / "nothing.zcr", "no such file"),
    ):
        with pytest.raises((UnsupportedError, SourceNotFoundError), match=message):
            zcrecord.edit(place).__enter__()
    with pytest.raises(UnsupportedError, match="is a regular file"), zcrecord.edit(path, os.devnull):
        pass


def test_catalogues_and_their_shards_are_refused_with_advice(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full(100_000, i) for i in range(4)}
    zcrecord.save_record(tensors, tmp_path / "model.zcr", max_shard_size=2_000_000)
    shard, alone = tmp_path / "model-00001-of-00002.zcr", tmp_path / "alone-00001-of-00002.zcr"
    (tmp_path / "elsewhere.zcr").symlink_to(shard)
    with pytest.raises(UnsupportedError, match="is a catalogue of shards"):
        zcrecord.edit(tmp_path / "model.zcr").__enter__()
    for source in (shard, tmp_path / "elsewhere.zcr"):
        with pytest.raises(UnsupportedError, match=r"is a shard of model\.zcr, .*name another file"):
            zcrecord.edit(source).__enter__()
    with zcrecord.edit(shard, alone) as model:
        model.drop("t0")
    with zcrecord.edit(alone) as model:
        model.drop("t1")
    assert len(zcrecord.load_record(tmp_path / "model.zcr")) == 4


def test_signatures_stay_valid_where_only_metadata_change_and_lapse_otherwise(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    signed = integrity.sign(path, key)
    with zcrecord.edit(path) as model:
        model.metadata["license"] = "mit"
    assert integrity.check_signature(edited(path), key.public_key()) == signed.key
    assert model.report is not None and model.report.lapsed == ()
    with zcrecord.edit(path) as model:
        model.drop("last")
    assert model.report is not None and model.report.lapsed == (signed.key,)
    assert integrity.signers(edited(path)) == ()
    assert edited(path).metadata["license"] == "mit"
