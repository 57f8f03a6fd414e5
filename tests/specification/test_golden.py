"""The archives of tests/golden load as what their JSON says, and are what would be written today, byte for byte.

`python -m tools.generate` writes both. Here nothing is made that is missing.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import zcrecord
from tools.generate import golden
from tools.generate.__main__ import stale
from tools.generate.golden_contents import plain
from zcrecord.archive.archive import Verify, open_archive
from zcrecord.codec.layout import decode_header
from zcrecord.onnx.graph import model_parts
from zcrecord.onnx.protobuf.reader import encode_field
from zcrecord.storage.memory import Memory

FOLDER = Path(__file__).parents[1] / "golden"
CHECKPOINT = FOLDER.with_name("golden_catalogue")
CASES = golden.cases()
LEVELS = get_args(Verify)
every_case = pytest.mark.parametrize("name", CASES)
every_level = pytest.mark.parametrize("level", LEVELS)


def read(name: str) -> bytes:
    path = FOLDER / f"{name}.zcr"
    assert path.exists(), f"{path} is missing; a golden archive is never made by a test"
    return path.read_bytes()


def expected(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.json"
    assert path.exists(), f"{path} is missing; it is never made by a test"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def load(name: str, level: Any = "index") -> zcrecord.Record:
    return zcrecord.load_record(read(name), verify=level, embedded=expected(name)["embedded"])


def stored_bytes(value: Any) -> bytes:
    """The bytes a tensor's digest is over: C order, packed as stored."""
    if isinstance(value, zcrecord.StringTensor):
        return value.data.tobytes()
    if isinstance(value, zcrecord.PackedTensor):
        return value.packed.tobytes()
    return value.tobytes() if isinstance(value, np.ndarray) else bytes(value)


def digest(record: zcrecord.Record, name: str) -> str:
    unknown = record.info(name).dtype.name.startswith("unknown")
    return hashlib.sha256(stored_bytes(record.raw(name) if unknown else record[name])).hexdigest()


def tensors(record: zcrecord.Record) -> list[dict[str, Any]]:
    return [
        {
            "name": info.name,
            "module": info.module,
            "dtype": info.dtype.name,
            "bits": info.bits,
            "shape": list(info.shape),
            "strides": None if info.strides is None else list(info.strides),
            "sha256": digest(record, name),
            "tied": list(info.tied),
        }
        for name in record
        for info in [record.info(name)]
    ]


def tree(value: Any) -> Any:
    """A record's tree as the JSON has it."""
    if isinstance(value, dict) and any(isinstance(key, int) for key in value):
        return {"numbered": [[key, tree(child)] for key, child in value.items()]}
    if isinstance(value, dict):
        return {key: tree(child) for key, child in value.items()}
    if isinstance(value, list):
        return [tree(child) for child in value]
    if isinstance(value, tuple):
        return {"tuple": [tree(child) for child in value]}
    if isinstance(value, np.ndarray | zcrecord.PackedTensor | zcrecord.StringTensor):
        return {"tensor": hashlib.sha256(stored_bytes(value)).hexdigest()}
    return plain(value)


def test_every_golden_archive_is_there_and_none_is_unknown() -> None:
    wanted = {f"{name}.{kind}" for name in CASES for kind in ("zcr", "json")}
    assert {path.name for path in FOLDER.iterdir()} == wanted
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 150 << 10


@every_case
def test_header_fields_are_those_written_down(name: str) -> None:
    """R1 to R13; R8: sealed is as it was."""
    want, data = expected(name), read(name)
    record = load(name)
    whole = data[: record.archive_nbytes] if want["embedded"] == "prefix" else data[len(data) - record.archive_nbytes :]
    trailer = decode_header(whole[-64:], "trailer")
    assert trailer is not None
    for field in ("alignment", "base_alignment", "index_offset", "index_size", "payload_offset", "archive_size"):
        assert getattr(trailer, field) == want[field], field
    assert (trailer.index_crc, trailer.required_features) == (want["index_crc"], want["required_features"])
    assert (decode_header(whole[:64]) is not None) == want["sealed"]
    assert want["sealed"] or not any(whole[10:60])


@every_level
@every_case
def test_tensors_are_those_written_down(name: str, level: Verify) -> None:
    assert tensors(load(name, level)) == expected(name)["tensors"]


@every_level
@every_case
def test_modules_attributes_and_metadata_are_those_written_down(name: str, level: Verify) -> None:
    """R41: an unknown kind of module reads as a mapping. R78: unknown vectors are ignored."""
    record, want = load(name, level), expected(name)
    found = [{"name": m.name, "kind": m.kind, "type_name": m.type_name} for m in record.modules.values()]
    assert found == want["modules"]
    assert {key: plain(value) for key, value in record.attributes.items()} == want["attributes"]
    metadata = {key: plain(value) for key, value in record.metadata.items()}
    assert (metadata, list(metadata)) == (want["metadata"], list(want["metadata"]))


@every_level
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("unknown_dtype", "int4_bytes")])
def test_tree_is_the_one_written_down_children_in_order(name: str, level: Verify) -> None:
    """R44: children of every kind in one order."""
    found = tree(load(name, level).tree())
    assert json.dumps(found) == json.dumps(expected(name)["tree"])  # the order of keys too


@every_level
@every_case
def test_content_digest_is_the_one_of_the_specification(name: str, level: Verify) -> None:
    """R76: worked out from the values by code of its own."""
    assert load(name, level).content_digest() == expected(name)["content_digest"]


@every_case
def test_equal_bytes_of_untied_tensors_lie_in_one_range(name: str) -> None:
    """R58, R63: the same range, payloads of their own."""
    record = load(name)
    for names in expected(name)["stored_once"]:
        assert len({record.info(n).offset for n in names}) == 1
        assert len({record.info(n).payload for n in names}) == len(names)


@every_case
def test_every_golden_archive_passes_full_verification(name: str) -> None:
    load(name).verify()


@every_case
def test_saving_again_gives_the_same_bytes(name: str) -> None:
    """R75, promise P8. If the format was changed on purpose: python -m tools.generate."""
    assert CASES[name].build() == read(name), "not the bytes that are committed"
    assert golden.expected(CASES[name], read(name)) == (FOLDER / f"{name}.json").read_text()


@pytest.mark.parametrize(
    "name", ["tiny", "empty", "numbered", "dtypes", "strings", "views", "alignment_16", "alignment_4096"]
)
def test_saving_what_was_loaded_keeps_the_content(name: str) -> None:
    record = load(name)
    again = io.BytesIO()
    zcrecord.save_record(record.tree(), again)
    assert zcrecord.load_record(again.getvalue()).content_digest() == expected(name)["content_digest"]


@pytest.mark.parametrize("name", ["tiny", "empty", "strings", "alignment_4096"])
def test_saving_what_was_loaded_gives_the_same_bytes(name: str) -> None:
    alignment = expected(name)["alignment"]
    again = io.BytesIO()
    zcrecord.save_record(load(name).tree(), again, alignment=alignment)
    assert again.getvalue() == read(name)


def test_tensors_of_an_unknown_type_are_offered_raw_and_refused_as_views() -> None:
    """R77."""
    record = load("unknown_dtype")
    assert bytes(record.raw("narrow")) == b"\x35"
    with pytest.raises(zcrecord.UnsupportedError, match=r"dtype code 200 is not known; .raw\(name\) gives its bytes"):
        record["known"]


@every_level
@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_checkpoint_whose_tensors_are_split_is_the_record_written_down(level: Verify, mode: Any) -> None:
    """The catalogue's tables: first, origin and extent."""
    want = json.loads((CHECKPOINT / "checkpoint.json").read_text())
    record = zcrecord.load_record(CHECKPOINT / "checkpoint.zcr", verify=level, mode=mode)
    assert tensors(record) == want["tensors"]
    found = [{"name": m.name, "kind": m.kind, "type_name": m.type_name} for m in record.modules.values()]
    assert found == want["modules"]
    assert {key: plain(value) for key, value in record.attributes.items()} == want["attributes"]
    assert {key: plain(value) for key, value in record.metadata.items()} == want["metadata"]
    assert json.dumps(tree(record.tree())) == json.dumps(want["tree"])
    assert record.content_digest() == want["content_digest"]
    record.verify()


def test_the_tables_of_a_checkpoint_are_tensors_to_a_reader_that_does_not_know_them() -> None:
    octets = (CHECKPOINT / "checkpoint.zcr").read_bytes()
    plain_tables = zcrecord.Record(open_archive(Memory(memoryview(octets)), verify="index"))
    assert plain_tables["first"].tolist() == [0, 1, 5, 7, 8]
    assert plain_tables["file"].tolist() == [1, 0, 1, 0, 1, 1, 0, 0xFFFFFFFF]
    assert plain_tables["origin"][1:5].tolist() == [[0, 0, 0], [0, 1, 0], [4, 0, 0], [4, 2, 0]]
    assert plain_tables["extent"][1:5].tolist() == [[4, 1, 0], [4, 3, 0], [2, 2, 0], [2, 2, 0]]


def test_int4_one_to_a_byte_is_an_array() -> None:
    """R46: a type below 8 bits may have 8."""
    record = load("int4_bytes")
    assert (record.info("w").bits, record["w"].dtype.name, record["w"].astype(int).tolist()) == (8, "int4", [-8, -1, 7])


def test_onnx_model_comes_back_from_skeleton_and_tensors() -> None:
    """R80."""
    record = load("onnx")
    assert bytes(record.attributes["onnx.graph"]) == golden.onnx_model(golden.STUB)
    model = golden.onnx_model(encode_field(9, record["fc.weight"].tobytes()))
    assert b"".join(map(bytes, model_parts(record))) == model


def test_what_is_wrong_with_the_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / golden.FOLDER
    shutil.copytree(FOLDER, folder)
    assert stale(golden, tmp_path) == {}
    (folder / "tiny.zcr").write_bytes(read("empty"))
    (folder / "tiny.json").unlink()
    (folder / "other.zcr").write_bytes(b"")
    found = {path.name: data for path, data in stale(golden, tmp_path).items()}
    assert found == {"tiny.zcr": read("tiny"), "tiny.json": (FOLDER / "tiny.json").read_bytes(), "other.zcr": None}
