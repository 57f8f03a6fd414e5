"""A small model and the archive it points into: that it is the right one is checked, and any other noticed."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import onnx
import pytest
import zstandard
from onnx import TensorProto
from onnx_exports import LINK, OURS, X, archive, damaged, mlp, named, outputs, outside, pointing, whole
from onnx_graphs import assert_same

import zcrecord
from zcrecord import errors
from zcrecord.onnx import convert, graph, to_onnx, verify_external

# Pointing into the archive.


def test_a_stream_cannot_point_to_an_archive_nor_can_a_model_to_memory(tmp_path: Path) -> None:
    made = archive(mlp(), tmp_path / "m.zcr")
    packed, dest = tmp_path / "m.zcr.zst", tmp_path / "m.onnx"
    zcrecord.save_record(zcrecord.load_record(made), "memory://linked/m.zcr")
    packed.write_bytes(zstandard.ZstdCompressor().compress(made.read_bytes()))
    assert whole(packed) == mlp()
    cases: list[tuple[Any, Any, str]] = [
        ("memory://linked/m.zcr", dest, "^memory://linked/m.zcr: .* a local file, and this is a URL; download it"),
        (made, io.BytesIO(), "from the folder it lies in, and a stream or a URL has none; name a path"),
        (made.read_bytes(), dest, "needs an archive in a file, and this one is in memory; save it to one"),
        (
            zcrecord.load_record(made, mode="c"),
            dest,
            r"m\.zcr: .*it may hold edits that its file does not; save",
        ),
        (zcrecord.load_record(made).select("*"), dest, r"m\.zcr: .*it is a part of its archive; save the record first"),
        (made, os.devnull, "null: a model with external weights is a regular file in a folder"),
        (made, "m\0.onnx", "no file can have this name, it contains NUL"),
        (packed, dest, r"m\.zcr\.zst: .*and these lie there compressed; unpack it first"),
    ]
    for source, to, message in cases:
        with pytest.raises(errors.RecordError, match=message):
            to_onnx(source, to, external=True)
    assert sorted(os.listdir(tmp_path)) == ["m.zcr", "m.zcr.zst"]


def test_the_archive_lies_in_the_models_folder_or_below_it(tmp_path: Path) -> None:
    model = mlp()
    for folder in ("a", "a/b", "c"):
        (tmp_path / folder).mkdir()
    made = archive(model, tmp_path / "a/b/m.zcr")
    assert pointing(made, tmp_path / "a/m.onnx") == model
    assert outside(tmp_path / "a/m.onnx")["a.w"]["location"] == "b/m.zcr"
    assert_same(outputs(tmp_path / "a/m.onnx", X), outputs(model, X))
    onnx.checker.check_model(os.fspath(tmp_path / "a/m.onnx"))
    assert verify_external(tmp_path / "a/m.onnx").archive == str(made)
    what = r"b/m\.zcr: external data must lie in the model's folder \('.*/c'\) or below it; this file lies in '.*/a/b'"
    with pytest.raises(errors.ExternalDataError, match=f"{what}: write the model there, or copy the file"):
        to_onnx(made, tmp_path / "c/m.onnx", external=True)
    assert os.listdir(tmp_path / "c") == []


def test_links_are_resolved_and_those_that_lead_out_refused(tmp_path: Path) -> None:
    model = mlp()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    made = archive(model, tmp_path / "blobs/cafe")
    (tmp_path / "snapshots/m.zcr").symlink_to("../blobs/cafe")
    with pytest.raises(errors.ExternalDataError, match=r"lies, by a link in '.*/snapshots/m\.zcr', in '.*/blobs': wri"):
        to_onnx(tmp_path / "snapshots/m.zcr", tmp_path / "snapshots/m.onnx", external=True)
    (tmp_path / "folder").symlink_to("blobs")
    assert pointing(tmp_path / "snapshots/m.zcr", tmp_path / "folder/m.onnx") == model
    assert outside(tmp_path / "blobs/m.onnx")["a.w"]["location"] == "cafe"
    assert_same(outputs(tmp_path / "blobs/m.onnx", X), outputs(model, X))
    assert verify_external(tmp_path / "folder/m.onnx").archive == str(made)


def test_a_file_of_several_names_and_a_name_that_no_location_can_have_are_refused(tmp_path: Path) -> None:
    made = archive(mlp(), tmp_path / "m.zcr")
    os.link(made, tmp_path / "other.zcr")
    with pytest.raises(errors.ExternalDataError, match=r"the file has 2 names \(hard links\), and onnx takes no .*; c"):
        to_onnx(made, tmp_path / "m.onnx", external=True)
    for name, message in (("a\\b.zcr", "a location has no backslash"), (os.fsdecode(b"a\xff.zcr"), "is not UTF-8")):
        made = archive(mlp(), tmp_path / name)
        with pytest.raises(errors.ExternalDataError, match=message):
            to_onnx(made, tmp_path / "m.onnx", external=True)


def test_an_archive_that_was_replaced_since_it_was_opened_is_refused(tmp_path: Path) -> None:
    made = archive(mlp(), tmp_path / "m.zcr")
    record = zcrecord.load_record(made)
    archive(mlp(seed=50), made)
    with pytest.raises(errors.IntegrityError, match=r"m\.zcr: was replaced since it was opened; load it again"):
        to_onnx(record, tmp_path / "m.onnx", external=True)
    made.unlink()
    with pytest.raises(errors.SourceNotFoundError, match=r"m\.zcr: no such file"):
        to_onnx(record, tmp_path / "m.onnx", external=True)


@pytest.mark.parametrize("embedded", ["prefix", "suffix"])
def test_an_archive_in_another_file_is_pointed_into(embedded: Any, tmp_path: Path) -> None:
    model = mlp()
    other, data = bytes(1 << 16), archive(model, tmp_path / "m.zcr").read_bytes()
    path = tmp_path / "program"
    path.write_bytes(other + data if embedded == "suffix" else data + other)
    record = zcrecord.load_record(path, embedded=embedded)
    assert pointing(record, tmp_path / "m.onnx") == model
    props = {p.key: p.value for p in onnx.load(tmp_path / "m.onnx").metadata_props}
    start = len(other) if embedded == "suffix" else 0
    assert props["zcrecord.payload_offset"] == str(start + record.archive.header.payload_offset)
    assert props["zcrecord.embedded"] == embedded
    assert int(outside(tmp_path / "m.onnx")["a.w"]["offset"]) == record.info("a.w").offset
    assert_same(outputs(tmp_path / "m.onnx", X), outputs(model, X))
    assert verify_external(tmp_path / "m.onnx", full=True).tensors == 4


def test_a_model_that_points_to_its_archive_converts_to_the_same_and_points_to_the_new_one(tmp_path: Path) -> None:
    model = mlp()
    model.metadata_props.add(key="author", value="me")
    made = archive(model, tmp_path / "m.zcr")
    to_onnx(made, tmp_path / "m.onnx", external=True)
    convert(tmp_path / "m.onnx", tmp_path / "again.zcr")
    first, second = (zcrecord.load_record(path) for path in (made, tmp_path / "again.zcr"))
    assert first.names == second.names
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    assert whole(second) == model  # which says nothing of an archive that it does not need
    told = bytes(graph.skeleton_of(second))
    assert {p.key for p in onnx.ModelProto.FromString(told).metadata_props} == {"author", *OURS}
    to_onnx(second, tmp_path / "again.onnx", external=True)
    pairs = [(p.key, p.value) for p in onnx.load(tmp_path / "again.onnx").metadata_props]
    assert [key for key, _ in pairs] == ["author", *OURS], "replaced, not doubled"
    assert dict(pairs)["zcrecord.archive"] == "again.zcr"
    assert verify_external(tmp_path / "again.onnx", full=True).tensors == 4


def test_metadata_props_of_a_models_own_stay(tmp_path: Path) -> None:
    model = named(notes=100_000)
    made = archive(model, tmp_path / "m.zcr")
    assert whole(made) == pointing(made, tmp_path / "m.onnx") == model
    for key, value in [*LINK.items(), ("zcrecord.archive", "n.zcr")]:  # a key of ours twice
        model.metadata_props.add(key=key, value=value)
    assert whole(archive(model, tmp_path / "m.zcr")) == model


@pytest.mark.parametrize("own", [{"zcrecord.archive": "a story of mine"}, {**LINK, "zcrecord.payload_offset": "many"}])
def test_metadata_props_of_a_models_own_under_our_keys_stay_or_are_refused(own: dict[str, str], tmp_path: Path) -> None:
    model = mlp()
    for key, value in own.items():
        model.metadata_props.add(key=key, value=value)
    made = archive(model, tmp_path / "m.zcr")
    assert whole(made) == model
    what = rf"m\.zcr: the model's own metadata_props have '{min(own)}', which external weights need"
    with pytest.raises(errors.UnsupportedError, match=what):
        to_onnx(made, tmp_path / "m.onnx", external=True)
    assert not (tmp_path / "m.onnx").exists()


# A changed archive.


def linked_pair(tmp_path: Path) -> tuple[Path, Path]:
    made = archive(mlp(), tmp_path / "m.zcr")
    to_onnx(made, tmp_path / "m.onnx", external=True)
    return made, tmp_path / "m.onnx"


def test_the_archive_it_was_written_for_is_accepted(tmp_path: Path) -> None:
    made, model = linked_pair(tmp_path)
    found = verify_external(model)
    assert (found.archive, found.tensors, found.nbytes, found.full) == (str(made), 4, (64 * 64 * 2 + 2 * 64) * 4, False)
    assert found.content_digest == zcrecord.load_record(made).content_digest()
    seen: list[Any] = []
    assert verify_external(str(model), full=True, progress=lambda *told: seen.append(told)).full
    assert seen[-1][0] == seen[-1][1] == sum(a.nbytes for a in zcrecord.load_record(made).values())


def test_another_weight_is_noticed(tmp_path: Path) -> None:
    made, model = linked_pair(tmp_path)
    other = archive(mlp(seed=50), tmp_path / "other.zcr")
    expected, found = (zcrecord.load_record(path).content_digest() for path in (made, other))
    os.replace(other, made)
    for full in (False, True):
        what = rf"m\.zcr: content digest {expected} was expected by '.*m\.onnx', it has {found}; put that archive back"
        with pytest.raises(errors.IntegrityError, match=rf"{what}, or export the model again with external=True$"):
            verify_external(model, full=full)


def test_another_layout_is_noticed(tmp_path: Path) -> None:
    made, model = linked_pair(tmp_path)
    zcrecord.save_record(zcrecord.load_record(made), tmp_path / "front.zcr")  # the index before the payloads
    os.replace(tmp_path / "front.zcr", made)
    with pytest.raises(
        errors.IntegrityError, match=r"m\.zcr: payload offset 64 was expected by '.*m\.onnx', it has \d{3,}"
    ):
        verify_external(model)


def test_equal_content_with_tensors_in_each_others_place_is_noticed(tmp_path: Path) -> None:
    made = archive(mlp(), tmp_path / "m.zcr", alignment=16)
    front = tmp_path / "front.zcr"
    zcrecord.save_record(zcrecord.load_record(made), front)
    to_onnx(front, tmp_path / "m.onnx", external=True)
    record = zcrecord.load_record(front)
    tree, order = record.tree(), list(record.names)
    swapped = {"b": {"w": tree["b"]["w"]}, "a": {"w": tree["a"]["w"], "b": tree["a"]["b"]},
               **{k: v for k, v in tree.items() if k not in "ab"}}  # fmt: skip
    zcrecord.save_record(swapped, tmp_path / "new.zcr")
    again = zcrecord.load_record(tmp_path / "new.zcr")
    assert list(again.names) != order
    assert again.content_digest() == record.content_digest()
    assert again.archive.header.payload_offset == record.archive.header.payload_offset
    os.replace(tmp_path / "new.zcr", front)
    what = r"tensor '[a-z.]+': '.*m\.onnx' expects float32 of shape \[64(, 64)?\], \d+ bytes at \d+, the archive has"
    with pytest.raises(errors.IntegrityError, match=rf"{what} float32 of shape .* bytes at \d+; export the model"):
        verify_external(tmp_path / "m.onnx")


def test_an_archive_that_only_says_more_of_itself_is_accepted(tmp_path: Path) -> None:
    made = archive(mlp(), tmp_path / "m.zcr")
    record = zcrecord.load_record(made)
    zcrecord.save_record(record, tmp_path / "front.zcr", metadata={"signed": "by me......"})
    to_onnx(tmp_path / "front.zcr", tmp_path / "m.onnx", external=True)
    crc = zcrecord.load_record(tmp_path / "front.zcr").archive.header.index_crc
    zcrecord.save_record(record, tmp_path / "front.zcr", metadata={"signed": "by another"})
    assert zcrecord.load_record(tmp_path / "front.zcr").archive.header.index_crc != crc
    assert verify_external(tmp_path / "m.onnx").tensors == 4
    damaged(tmp_path / "front.zcr", "a.w")
    with pytest.raises(errors.IntegrityError, match=r"tensor 'a\.w': its payload's digest does not match"):
        verify_external(tmp_path / "m.onnx")


def test_a_reference_that_was_changed_is_noticed(tmp_path: Path) -> None:
    made, path = linked_pair(tmp_path)
    offset = zcrecord.load_record(made).info("a.w").offset
    changes: list[tuple[Any, str]] = [
        (lambda t: setattr(t.external_data[1], "value", str(offset + 4)), "tensor 'a.w': .* expects .* at"),
        (lambda t: setattr(t, "name", "unknown"), "tensor 'unknown': .*the archive has no tensor of this name"),
        (lambda t: setattr(t, "data_type", TensorProto.INT32), "expects int32 of shape .*, the archive has float32"),
        (lambda t: t.dims.__setitem__(slice(None), [32, 128]), r"expects float32 of shape \[32, 128\]"),
    ]
    for change, message in changes:
        model = onnx.load(path, load_external_data=False)
        change(model.graph.initializer[0])
        (tmp_path / "changed.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(errors.IntegrityError, match=message):
            verify_external(tmp_path / "changed.onnx")


def test_a_missing_archive_is_one_clear_error(tmp_path: Path) -> None:
    made, model = linked_pair(tmp_path)
    made.rename(tmp_path / "elsewhere")
    with pytest.raises(errors.ExternalDataError, match=r"m\.onnx: external data 'm\.zcr': cannot be opened: No such f"):
        verify_external(model)
    made.write_bytes(b"no archive" * 40)
    with pytest.raises(errors.FormatError, match=r"m\.zcr: this is a text file, not a zcrecord archive"):
        verify_external(model)
    with pytest.raises(OSError, match=r"none\.onnx: cannot read: No such file or directory"):
        verify_external(tmp_path / "none.onnx")


def test_links_to_the_archive_are_followed_as_convert_follows_them(tmp_path: Path) -> None:
    made, model = linked_pair(tmp_path)
    (tmp_path / "real").mkdir()
    made.rename(tmp_path / "real/m.zcr")
    made.symlink_to("real/m.zcr")
    with pytest.raises(errors.ExternalDataError, match=r"it is a symbolic link; allow_links=True allows that"):
        verify_external(model)
    assert verify_external(model, allow_links=True, full=True).tensors == 4


def set_property(path: Path, key: str, value: str | None) -> None:
    model = onnx.load(path, load_external_data=False)
    (pair,) = [p for p in model.metadata_props if p.key == key] or [model.metadata_props.add(key=key)]
    if value is None:
        model.metadata_props.remove(pair)
    else:
        pair.value = value
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("key, value, kind, message", [
    ("zcrecord.archive", "../m.zcr", errors.ExternalDataError, r"leaves the model's folder through '\.\.'"),
    ("zcrecord.archive", "/etc/passwd", errors.ExternalDataError, "the location is absolute"),
    ("zcrecord.archive", "", errors.ExternalDataError, "the location is empty"),
    ("zcrecord.archive", "m.onnx", errors.FormatError, "not a zcrecord archive"),
    ("zcrecord.payload_offset", "1\x1b[2J", errors.IntegrityError, r"payload offset 1\\x1b\[2J was expected"),
    ("zcrecord.embedded", "inside", errors.OnnxError, "its 'zcrecord.embedded' is 'inside', not prefix or suffix"),
])  # fmt: skip
def test_metadata_props_of_a_model_are_not_trusted(
    key: str, value: str, kind: Any, message: str, tmp_path: Path
) -> None:
    _, model = linked_pair(tmp_path)
    set_property(model, "zcrecord.index_crc", "")  # another index: everything is read instead
    verify_external(model)
    set_property(model, key, value)
    with pytest.raises(kind, match=message):
        verify_external(model)


def test_verifying_takes_a_damaged_model_for_what_it_is(tmp_path: Path) -> None:
    _, model = linked_pair(tmp_path)
    data = model.read_bytes()
    for end in range(0, len(data), 7):
        model.write_bytes(data[:end])
        with pytest.raises(errors.RecordError, match=r"m\.onnx: "):
            verify_external(model)
