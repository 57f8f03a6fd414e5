"""External data is read where the rules allow it and nowhere else.

`tests/attacks/external.py` breaks each rule, and looks at what is said.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import onnx
import onnx_models as m
import pytest
from onnx import helper, numpy_helper
from onnx_scans import assert_same
from onnx_values import DATA, reference, write

import zcrecord
from zcrecord.errors import ExternalDataError, RecordError, SourceError
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


@pytest.mark.parametrize("link, target, location", [
    ("link", "../other/w.bin", "link"), ("sub", "../other", "sub/w.bin"), ("link", "w.bin", "link"),
])  # fmt: skip
def test_a_symbolic_link_is_followed_on_request_alone(link: str, target: str, location: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "w.bin").write_bytes(DATA.tobytes())
    path = write(tmp_path / "m", reference(location))
    (tmp_path / "m" / link).symlink_to(target)
    refused(path, f"external data '{location}': .* symbolic link.*; allow_links=True allows that")
    assert (read(path, allow_links=True)["w"] == DATA).all()


def test_a_file_with_several_names_is_read_on_request_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "m", reference())
    os.link(tmp_path / "m" / "w.bin", tmp_path / "m" / "twin.bin")
    refused(path, r"external data 'w.bin': the file has 2 names \(hard links\); allow_links=True allows that")
    assert (read(path, allow_links=True)["w"] == DATA).all()


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


def test_a_disk_that_fails_or_a_file_that_shrinks_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    path = write(tmp_path / "m", reference())
    for read_some, message in ((fail, "cannot read: Input/output error"), (lambda *_: 0, "became shorter than the 24")):
        monkeypatch.setattr(external_data, "read_some", read_some)
        with pytest.raises(SourceError, match=rf"w\.bin: tensor 'w': {message}"):
            convert(path, io.BytesIO())
