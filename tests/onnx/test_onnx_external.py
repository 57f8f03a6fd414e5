"""External data is read where the rules allow it and nowhere else; each refusal names the rule."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import onnx
import onnx_models as m
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_scans import assert_same
from onnx_values import DATA, reference, write

import zcrecord
from zcrecord.errors import ExternalDataError, OnnxError, RecordError, SourceError
from zcrecord.onnx import convert, external_data, scan


def read(path: Path, **options: Any) -> zcrecord.Record:
    """The record of a model in a file; a scan finds the same tensors."""
    out = io.BytesIO()
    convert(path, out, **options)
    record = zcrecord.load_record(out.getvalue())
    record.verify()
    for mmap in (True, False):
        assert_same(scan(path, mmap=mmap, **options), record)
    return record


def refused(path: Path, message: str, kind: type[RecordError] = ExternalDataError, **options: Any) -> None:
    """Check that conversion and scan refuse a model with this message, which names model and tensor."""
    with pytest.raises(kind, match=rf"model\.onnx: tensor 'w': {message}") as caught:
        convert(path, io.BytesIO(), **options)
    for mmap in (True, False):
        with pytest.raises(kind) as scanned:
            scan(path, mmap=mmap, **options).load_all()
        assert (type(scanned.value), str(scanned.value)) == (type(caught.value), str(caught.value))


# What is allowed.


@pytest.mark.parametrize("entries", [
    {}, {"offset": "000", "length": "24"}, {"checksum": "da39a3ee5e6b4b0d3255bfef95601890afd80709"},
], ids=str)  # fmt: skip
def test_offset_length_and_checksum_may_be_left_out_or_given(entries: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "m", reference(**entries))
    assert (read(path)["w"] == DATA).all()
    assert (numpy_helper.to_array(onnx.load(path).graph.initializer[0]) == DATA).all()


@pytest.mark.parametrize("location", ["sub/w.bin", "./sub/w.bin", "sub//w.bin", "sub/../sub/w.bin", "ü b.bin"])
def test_locations_are_paths_in_the_models_folder(location: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m", reference(location))
    (tmp_path / "m" / "sub").mkdir()
    (tmp_path / "m" / location).write_bytes(DATA.tobytes())
    assert (read(path)["w"] == DATA).all()


def test_tensors_in_attributes_and_subgraphs_may_be_external(tmp_path: Path) -> None:
    sub = helper.make_graph([], "s", [], [], [reference(offset="0", length="24")])
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=sub, value=reference(name=""))
    path = write(tmp_path / "m")
    path.write_bytes(m.model_of(nodes=[node]).SerializeToString())
    record = read(path)
    assert all((record[name] == DATA).all() for name in ("if.then_branch.w", "if.value"))
    assert convert(path, io.BytesIO()).input_bytes == path.stat().st_size + 2 * DATA.nbytes


def test_an_empty_tensor_needs_no_file(tmp_path: Path) -> None:
    t = reference("absent.bin")
    t.dims[0] = 0
    assert read(write(tmp_path / "m", t))["w"].shape == (0,)


def test_entries_without_the_mark_and_an_empty_raw_data_beside_it_do_not_count(tmp_path: Path) -> None:
    own, empty = numpy_helper.from_array(DATA, "own"), reference()
    own.external_data.add(key="location", value="../old")
    empty.raw_data = b""
    record = read(write(tmp_path / "m", own, empty))
    assert all((value == DATA).all() for value in record.values())


# What is not.


@pytest.mark.parametrize("location, message", [
    (None, "external data: no location; every tensor kept outside the model needs one"),
    ("", "external data '': the location is empty"),
    ("w\0.bin", r"external data 'w\\x00.bin': the location contains NUL"),
    ("/etc/passwd", "external data '/etc/passwd': the location is absolute; it must be relative to the model's folder"),
    ("../w.bin", "external data '../w.bin': the location leaves the model's folder through '..'"),
    ("sub/../../w.bin", "the location leaves the model's folder through '..'|external data .*'..'"),
    (".", "external data '.': the location is the model's folder itself"),
    ("a/..", "external data 'a/..': the location is the model's folder itself"),
    ("..\\w.bin", r"external data '..\\w.bin': a location has no backslash and no drive"),
    ("C:w.bin", "external data 'C:w.bin': a location has no backslash and no drive"),
    ("absent.bin", "external data 'absent.bin': cannot be opened: No such file or directory; it belongs beside the m"),
    ("sub", "external data 'sub': it is not a regular file"),
])  # fmt: skip
def test_locations_that_break_a_rule_are_refused(location: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(DATA.tobytes())  # in the parent: a traversal would find it
    path = write(tmp_path / "m", reference(location))
    (tmp_path / "m" / "sub").mkdir()
    refused(path, message)


@pytest.mark.parametrize("entries, message", [
    ({"offset": "-1"}, "offset '-1' is not a non-negative decimal integer"),
    ({"offset": "0x10"}, "offset '0x10' is not a non-negative decimal integer"),
    ({"offset": "\u0661"}, "offset '\u0661' is not"),
    ({"offset": ""}, "offset '' is not"),
    ({"offset": "9" * 40}, "offset '9+' is not"),
    ({"length": "-24"}, "length '-24' is not a non-negative decimal integer"),
    ({"length": "23"}, "length 23, but the tensor's shape and type take 24 bytes"),
    ({"length": "9223372036854775807"}, "length 9223372036854775807, but the tensor's shape and type take 24 bytes"),
    ({"offset": "1"}, r"bytes 1 to 25 are past its end \(24\); the file is truncated or belongs to another model"),
    ({"offset": "9223372036854775807"}, "bytes 9223372036854775807 to 9223372036854775831 are past its end"),
    ({"size": "24"}, "unknown key 'size', known are location, offset, length, checksum, basepath"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_entries_that_break_a_rule_are_refused(entries: dict[str, str], message: str, tmp_path: Path) -> None:
    refused(write(tmp_path / "m", reference(**entries)), f"external data 'w.bin': {message}")


@pytest.mark.parametrize("link, target, location, message", [
    ("link", "../other/w.bin", "link", "a symbolic link leads out of the model's folder; allow_links=True allows that"),
    ("sub", "../other", "sub/w.bin", "a symbolic link leads out of the model's folder"),
    ("link", "w.bin", "link", "it is a symbolic link; allow_links=True allows that"),
])  # fmt: skip
def test_a_symbolic_link_is_refused(link: str, target: str, location: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "w.bin").write_bytes(DATA.tobytes())
    path = write(tmp_path / "m", reference(location))
    (tmp_path / "m" / link).symlink_to(target)
    refused(path, f"external data '{location}': {message}")
    assert (read(path, allow_links=True)["w"] == DATA).all()


def test_a_file_with_several_names_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m", reference("twin.bin"))
    os.link(tmp_path / "m" / "w.bin", tmp_path / "m" / "twin.bin")
    refused(path, r"external data 'twin.bin': the file has 2 names \(hard links\); allow_links=True allows that")
    assert (read(path, allow_links=True)["w"] == DATA).all()


def test_a_named_pipe_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    path = write(tmp_path / "m", reference("pipe"))
    os.mkfifo(tmp_path / "m" / "pipe")
    for allow_links in (False, True):
        refused(path, "external data 'pipe': it is not a regular file", allow_links=allow_links)


@pytest.mark.parametrize("swap", ["file", "link"])
def test_a_file_swapped_between_check_and_opening_is_noticed(
    swap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m", reference())
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(24))
    real_open = os.open

    def late(name: str, *args: int, **options: int) -> int:
        if name == "w.bin":
            inside = tmp_path / "m" / name
            inside.unlink()
            inside.symlink_to(secret) if swap == "link" else secret.rename(inside)
        return real_open(name, *args, **options)

    monkeypatch.setattr("zcrecord.onnx.external_data.os.open", late)
    what = "external data 'w.bin': (it was replaced by another file|cannot be opened: Too many levels)"
    with pytest.raises(ExternalDataError, match=what):
        convert(path, io.BytesIO())


def hugging_face(root: Path, target: str) -> Path:
    """A repository of a Hugging Face cache, in which a snapshot's files are links."""
    repository = root / "models--some--model"
    snapshot = repository / "snapshots" / "0123abc" / "onnx"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "cafe").write_bytes(DATA.tobytes())
    (repository / "blobs" / "model").write_bytes(m.model_of(reference("model.onnx_data")).SerializeToString())
    (snapshot / "model.onnx").symlink_to("../../../blobs/model")
    (snapshot / "model.onnx_data").symlink_to(target)
    return snapshot / "model.onnx"


def test_links_inside_one_hugging_face_repository_are_accepted(tmp_path: Path) -> None:
    path = hugging_face(tmp_path, "../../../blobs/cafe")
    assert (read(path)["w"] == DATA).all()


@pytest.mark.parametrize("target", ["../../../../secret", "../../../../other/blobs/cafe", "../../../refs/main"])
def test_links_out_of_a_hugging_face_repository_are_refused(target: str, tmp_path: Path) -> None:
    path = hugging_face(tmp_path, target)
    for place in ("secret", "other/blobs/cafe", "models--some--model/refs/main"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(DATA.tobytes())
    refused(path, "external data 'model.onnx_data': a symbolic link leads out of the model's folder")


def test_external_data_beside_values_is_refused(tmp_path: Path) -> None:
    for values in ({"raw_data": DATA.tobytes()}, {"float_data": DATA.tolist()}):
        t = reference()
        t.MergeFrom(TensorProto(**values))
        refused(write(tmp_path / "m", t), "has external data and values of its own; it may have one", OnnxError)


def test_a_tensor_of_unknown_type_and_strings_are_refused_for_that(tmp_path: Path) -> None:
    t = reference(length="24")
    t.data_type = 99
    refused(write(tmp_path / "m", t), r"byte 0x[0-9a-f]+: data_type 99 is not known here", OnnxError)
    t.data_type = TensorProto.STRING
    refused(write(tmp_path / "m", t), "strings cannot be external data")


def test_a_disk_that_fails_or_a_file_that_shrinks_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    path = write(tmp_path / "m", reference())
    for read_some, message in ((fail, "cannot read: Input/output error"), (lambda *_: 0, "became shorter than the 24")):
        monkeypatch.setattr(external_data, "read_some", read_some)
        with pytest.raises(SourceError, match=rf"w\.bin: tensor 'w': {message}"):
            convert(path, io.BytesIO())
