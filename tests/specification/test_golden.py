"""The valid archives of tests/conformance are what would be written today, byte for byte, and load as the same trees.

`python -m tools.generate` writes them and their JSON, which test_conformance.py holds all readers against. Here nothing
is made that is missing.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import io
import itertools
import json
import os
import runpy
import shutil
from pathlib import Path
from typing import Any, get_args

import hypothesis
import numpy as np
import pytest
import records as r
from exhaustive import rounds
from hypothesis import strategies as st

import zcrecord
from tools.conformance import judge_contents
from tools.generate import golden, golden_catalogue, golden_edges, golden_references
from tools.generate.__main__ import stale
from tools.generate.golden_contents import elements
from zcrecord import dtypes
from zcrecord.archive.archive import Verify, open_archive
from zcrecord.codec.layout import decode_header
from zcrecord.onnx.graph import restore
from zcrecord.onnx.protobuf.reader import encode_field
from zcrecord.storage.memory import Memory

FOLDER = Path(__file__).parents[1] / "conformance" / "valid"
EDGES = FOLDER.parent / "edges"
CHECKPOINT = FOLDER.parents[1] / "data" / "catalogue"
PYTHON_READER = runpy.run_path(str(FOLDER.parent / "readers" / "reader.py"))
CASES = golden.cases()
LEVELS = get_args(Verify)
every_case = pytest.mark.parametrize("name", CASES)
every_level = pytest.mark.parametrize("level", LEVELS)


def read(name: str) -> bytes:
    return (FOLDER / f"{name}.zcr").read_bytes()


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def load(name: str, level: Any = "index") -> zcrecord.Record:
    return zcrecord.load_record(read(name), verify=level, embedded=expected(name)["embedded"])


def tree(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return tree({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        return [(key, tree(child)) for key, child in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value).__name__ if isinstance(value, list | collections.deque) else "tuple", list(map(tree, value))
    if isinstance(value, zcrecord.StringTensor):
        return "tensor", value.data.tobytes()
    if isinstance(value, np.ndarray | np.generic | zcrecord.PackedTensor):
        return "tensor", elements(value)[2]
    return bytes(value) if isinstance(value, memoryview) else value


@every_case
def test_header_fields_are_those_written_down(name: str) -> None:
    """R1 to R13; R8: sealed is as it was."""
    want, data = expected(name), read(name)
    record = load(name)
    whole = data[: record.archive_nbytes] if want["embedded"] == "prefix" else data[len(data) - record.archive_nbytes :]
    trailer = decode_header(whole[-64:], "trailer")
    assert trailer is not None
    assert trailer._asdict() == {field: want[field] for field in trailer._fields}
    assert (decode_header(whole[:64]) is not None) == want["sealed"]
    assert want["sealed"] or not any(whole[10:60])


@every_level
@every_case
def test_tree_is_the_one_written_down_children_in_order(name: str, level: Verify) -> None:
    """R44: children of every kind in one order."""
    assert tree(load(name, level).tree()) == tree(CASES[name].content.record)


@every_case
def test_equal_bytes_of_untied_tensors_lie_in_one_range(name: str) -> None:
    """R58, R63: the same range, payloads of their own."""
    record = load(name)
    for names in expected(name)["stored_once"]:
        assert len({record.info(n).offset for n in names}) == 1
        assert len({record.info(n).payload for n in names}) == len(names)


@every_case
def test_saving_again_gives_the_same_bytes(name: str) -> None:
    """R75, promise P8. If the format was changed on purpose: python -m tools.generate."""
    assert CASES[name].build() == read(name), "not the bytes that are committed"
    assert golden.expected(CASES[name], read(name)) == expected(name)


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
    want = json.loads((CHECKPOINT / "checkpoint.json").read_text(encoding="utf-8"))
    record = zcrecord.load_record(CHECKPOINT / "checkpoint.zcr", verify=level, mode=mode)
    assert list(judge_contents(want, json.loads(json.dumps(PYTHON_READER["contents"](record))))) == []
    assert tree(record.tree()) == tree(golden_catalogue.CONTENT.record)
    record.verify()


@every_level
@pytest.mark.parametrize("mode", ["r", "c"])
@pytest.mark.parametrize("name", golden_references.CONTENTS)
def test_an_archive_of_references_is_the_record_written_down(name: str, level: Verify, mode: Any) -> None:
    """The tables of references: payloads in a safetensors file, and in the archive itself."""
    folder = FOLDER.parents[1] / "data" / "references"
    want = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    record = zcrecord.load_record(folder / f"{name}.zcr", verify=level, mode=mode)
    assert list(judge_contents(want, json.loads(json.dumps(PYTHON_READER["contents"](record))))) == []
    record.verify()


def test_the_tables_of_a_checkpoint_are_tensors_to_a_reader_that_does_not_know_them() -> None:
    octets = (CHECKPOINT / "checkpoint.zcr").read_bytes()
    plain_tables = zcrecord.Record(open_archive(Memory(memoryview(octets)), verify="index"))
    assert plain_tables["first"].tolist() == [0, 1, 5, 7, 8]
    assert plain_tables["file"].tolist() == [1, 0, 1, 0, 1, 1, 0, 0xFFFFFFFF]
    assert plain_tables["origin"][1:5].tolist() == [[0, 0, 0], [0, 1, 0], [4, 0, 0], [4, 2, 0]]
    assert plain_tables["extent"][1:5].tolist() == [[4, 1, 0], [4, 3, 0], [2, 2, 0], [2, 2, 0]]


def test_onnx_model_comes_back_from_skeleton_and_tensors() -> None:
    """R80."""
    record = load("onnx")
    assert bytes(record.attributes["onnx.graph"]) == golden.onnx_model(golden.STUB)
    model = golden.onnx_model(encode_field(9, record["fc.weight"].tobytes()))
    assert b"".join(map(bytes, restore(record).parts)) == model


def test_what_is_wrong_with_the_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / golden.FOLDER
    shutil.copytree(FOLDER, folder)
    assert stale(golden, tmp_path) == {}
    (folder / "tiny.zcr").write_bytes(read("empty"))
    (folder / "tiny.json").unlink()
    (folder / "other.zcr").write_bytes(b"")
    found = {path.name: data for path, data in stale(golden, tmp_path).items()}
    assert found == {"tiny.zcr": read("tiny"), "tiny.json": (FOLDER / "tiny.json").read_bytes(), "other.zcr": None}


def test_a_later_element_type_has_archives_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive `dtypes` never changes, so that a row in `dtypes.py` is a recipe that works."""
    later = dtypes.DType(55, "uint1", 1, None, None, None, "uint8_t", "u8")
    monkeypatch.setattr(dtypes, "DTYPES", (*dtypes.DTYPES, later))
    monkeypatch.setitem(dtypes.by_code, later.code, later)
    monkeypatch.setitem(dtypes.by_name, later.name, later)
    for module in (golden, golden_edges):
        monkeypatch.setattr(module, "LATER", [later])
    made = golden.cases()
    assert made.keys() - CASES.keys() == {"dtype_uint1"}
    assert made["dtypes"].build() == CASES["dtypes"].build()
    narrow = golden_edges.cases()
    assert narrow.keys() - dict.fromkeys(path.stem for path in EDGES.glob("*.zcr")) == {"one_to_a_byte_uint1"}
    assert narrow["one_to_a_byte"].build() == (EDGES / "one_to_a_byte.zcr").read_bytes()


# The same bytes from everywhere.


BUILD = """
import hashlib, io, sys
import numpy as np, zcrecord
base = np.arange(600, dtype=np.float32).reshape(20, 30)
tree = {f'layer.{i}': {'w': np.full((i + 1, 3), i), 'rows': base[i : i + 5], 'n': i, 's': 'text'} for i in range(15)}
tree['f'] = base.T
tree['tied'] = base
tree['equal'] = base.copy()
tree['gaps'] = base[:, ::2]
tree['large'] = np.arange(200_000)
tree['strings'] = np.array(['a', 'bc'])
tree['blob'] = b'bytes'
metadata = {k: k for k in 'zyxabc'}
"""
TO_BYTES = BUILD + "file = io.BytesIO(); zcrecord.save_record(tree, file, metadata=metadata); data = file.getvalue()\n"
DIGEST = TO_BYTES + "print(hashlib.sha256(data).hexdigest())"


def built() -> bytes:
    """Return the archive that BUILD describes, made in this process."""
    names: dict[str, Any] = {}
    exec(TO_BYTES, names)
    data: bytes = names["data"]
    return data


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_same_record_gives_the_same_bytes_in_another_process(seed: str) -> None:
    done = r.run_python(
        DIGEST, env={**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo", "PYTHONMALLOC": "malloc"}
    )
    assert done.stdout.strip() == hashlib.sha256(built()).hexdigest()


@pytest.mark.slow
@hypothesis.given(tree=r.trees(), alignment=st.sampled_from([16, 64, 4096]))
@hypothesis.settings(max_examples=rounds(50), deadline=None)
def test_archive_is_the_same_from_other_memory(tree: Any, alignment: int) -> None:
    hypothesis.assume(r.names_are_unique(tree))
    data = r.saved(tree, alignment=alignment)
    assert r.saved(tree, alignment=alignment) == data
    elsewhere = memoryview(bytes(128) + data)[128:]
    first, second = (zcrecord.load_record(source).tree() for source in (data, elsewhere))
    assert r.saved(first, alignment=alignment) == r.saved(second, alignment=alignment)


@pytest.mark.parametrize("sink", ["pipe", "file", "BytesIO"])
def test_archive_is_the_same_in_every_sink(sink: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(BUILD, names)
    if sink == "file":
        with open(tmp_path / "m", "w+b") as file:
            zcrecord.save_record(names["tree"], file, metadata=names["metadata"])
        assert (tmp_path / "m").read_bytes() == built()
        return
    memory = r.OneWay() if sink == "pipe" else io.BytesIO()
    zcrecord.save_record(names["tree"], memory, metadata=names["metadata"])
    assert memory.getvalue() == built()


def test_order_of_metadata_leaves_no_trace() -> None:
    orders = itertools.permutations([("b", 1), ("a", "x"), ("c", b"y")])
    assert len({r.saved({"w": np.ones(3)}, metadata=dict(order)) for order in orders}) == 1
