"""A small model over the files of another: it is that model, and reads its values there.

Tests of conversion and of the wire write a small model of each model that they convert, and compare a scan of it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphs
import onnx_models as m
import onnx_values
import pytest
from exhaustive import some
from onnx import TensorProto, helper, numpy_helper
from onnx_exports import outside, plain, tensors_of_every_kind
from onnx_graphs import SHARED, assert_same, private_growth
from onnx_scans import MIB, counted_reads, growth, shifted, written

from zcrecord import errors
from zcrecord.onnx import graph, scan
from zcrecord.onnx.lazy.locate import STEP


def small(path: Path, dest: Path | None = None, **options: Any) -> onnx.ModelProto:
    """The small model over the one at a path, as `onnx.load` reads it."""
    dest = dest or path.with_name("small.onnx")
    with scan(path) as tensors:
        tensors.to_onnx(dest, force=True, durable=False, **options)
    return plain(onnx.load(dest))


# The same model.


def test_a_tensor_in_every_place_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "m.onnx", m.rich_model())
    assert small(path) == m.rich_model()
    monkeypatch.setattr(graph, "INLINE", 0)
    assert small(path) == m.rich_model()
    read = onnx.load(tmp_path / "small.onnx", load_external_data=False)
    assert {t.data_location for t in m.every_tensor(read.training_info[0])} == {TensorProto.DEFAULT}
    assert {t.data_location for t in m.every_tensor(read.functions[0])} == {TensorProto.DEFAULT}
    assert sum(t.data_location == TensorProto.EXTERNAL for t in m.every_tensor(read)) > 8


def test_values_in_another_form_and_those_wanted_in_the_model_are_copied(tmp_path: Path) -> None:
    bools = np.arange(1, 301, dtype=np.uint16).astype(np.uint8) % 2  # the last is 0
    model = m.model_of(
        *tensors_of_every_kind(),
        helper.make_tensor("varints", TensorProto.INT64, [50], list(range(50))),
        helper.make_tensor("spilt", TensorProto.INT4, [301], bytes(150) + b"\xf1", raw=True),
        helper.make_tensor("twos", TensorProto.BOOL, [300], (2 * bools).tobytes(), raw=True),
    )
    model.metadata_props.add(key="author", value="me")
    path = written(tmp_path / "m.onnx", model)
    expected = m.normal(model)
    for t in expected.graph.initializer:
        if t.name == "spilt":
            t.raw_data = t.raw_data[:-1] + b"\1"
        elif t.name == "twos":
            t.raw_data = bools.tobytes()
    assert small(path) == expected
    told = outside(tmp_path / "small.onnx")
    assert set(told) == {"least", "packed", "floats", "bools"}
    infos = scan(path)
    for name, entries in told.items():
        info = infos.info(name)
        assert entries == {"location": "m.onnx", "offset": str(info.offset), "length": str(info.nbytes)}


def test_messages_of_any_size_around_the_values_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counted_reads(monkeypatch)
    tensors = []
    for i, count in enumerate([0, 3, 200, STEP // 4, STEP, 3 * STEP, 40 * STEP]):
        tensors.append(numpy_helper.from_array(np.full(count, i), f"t{i}"))
        tensors[-1].doc_string = "x" * [0, 5 * STEP, 5, STEP][i % 4]
    nodes = [helper.make_node("Relu", [f"r{i}"], [f"r{i + 1}"], alpha=1.0) for i in range(500)]
    model = m.model_of(*tensors, nodes=nodes, doc_string="y" * 9 * STEP)
    path = written(tmp_path / "m.onnx", model)
    tensors_found = scan(path)
    counted.clear()
    tensors_found.to_onnx(tmp_path / "small.onnx", durable=False)
    assert sum(counted) < path.stat().st_size // 8  # no values
    assert plain(onnx.load(tmp_path / "small.onnx")) == model


def test_external_data_of_the_original_stay_where_they_are(tmp_path: Path) -> None:
    model = onnx.ModelProto.FromString(onnx_graphs.mlp().SerializeToString())
    (tmp_path / "a" / "b").mkdir(parents=True)
    path, first, second = tmp_path / "a" / "b" / "m.onnx", tmp_path / "a" / "small.onnx", tmp_path / "again.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=100)
    whole = plain(onnx.load(path))
    assert small(path, first) == small(first, second) == whole
    inside = {"b/weights.bin", "b/m.onnx"}  # the Constant's value is in the model
    assert {entries["location"] for entries in outside(first).values()} == inside
    assert {entries["location"] for entries in outside(second).values()} == {f"a/{name}" for name in inside}
    onnx.checker.check_model(os.fspath(second))


# Readers.


MODELS: dict[str, Callable[[], tuple[onnx.ModelProto, list[dict[str, Any]]]]] = {
    "products": lambda: onnx_graphs.feeds()[0],
    "branches": lambda: onnx_graphs.feeds()[1],
    "convolutions": lambda: onnx_graphs.feeds()[2],
}


@pytest.mark.parametrize("name", MODELS)
def test_onnx_runtime_answers_with_the_same_bits_wherever_the_values_lie(name: str, tmp_path: Path) -> None:
    model, feeds = MODELS[name]()
    for offset in some(range(16), 6):
        path = written(tmp_path / "m.onnx", shifted(model, offset))
        small(path)
        assert len(outside(tmp_path / "small.onnx")) > 1
        ours, theirs = (onnx_graphs.plain(each, shared=True) for each in (tmp_path / "small.onnx", path))
        for feed in feeds:
            assert_same(ours.run(None, feed), theirs.run(None, feed))


IN_PLACE = f"""(
    options := ort.SessionOptions(), options.add_session_config_entry("session.disable_prepacking", "1"),
    ort.InferenceSession(path, options, disabled_optimizers={SHARED})
)[-1]"""


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="platform: needs Linux's smaps_rollup")
def test_onnx_runtime_copies_no_weight_and_the_measurement_would_notice(tmp_path: Path) -> None:
    path, archive = onnx_graphs.large_branches(tmp_path)
    archive.unlink()
    data = shifted(onnx.load(path), 1)
    path.write_bytes(data)
    report = scan(path).to_onnx(tmp_path / "small.onnx")
    assert report.archive_bytes < 2000
    assert private_growth(IN_PLACE, path) > 48 << 20
    assert private_growth(IN_PLACE, tmp_path / "small.onnx") < 8 << 20
    path.unlink()


# Refusals.


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A model with one tensor of 400 bytes in it and one of 400 beside it."""
    beside = onnx_values.reference("w.bin")
    beside.dims[0] = 100
    return onnx_values.write(
        tmp_path / "m", beside, numpy_helper.from_array(np.arange(100, dtype="f4"), "v"), data=bytes(400)
    )


def refused(kind: type[Exception], message: str, path: Path, dest: Any, **options: Any) -> None:
    before = sorted(path.parent.rglob("*"))
    with scan(path, allow_links=True) as tensors, pytest.raises(kind, match=message):
        tensors.to_onnx(dest, **options)
    assert sorted(path.parent.rglob("*")) == before


def test_a_destination_is_a_file_that_holds_no_original(original: Path, tmp_path: Path) -> None:
    dest = original.with_name("small.onnx")
    data = original.with_name("w.bin")
    no_folder = r"model\.onnx: a small model refers to its files from the folder .*; name a path"
    for error, message, nowhere in (
        (errors.UnsupportedError, no_folder, io.BytesIO()),
        (errors.UnsupportedError, no_folder, "memory://models/small.onnx"),
        (errors.UnsupportedError, "null: a small model is a regular file in a folder; name one", os.devnull),
        (errors.DestinationExistsError, r"model\.onnx: source and destination are the same", original),
        (errors.DestinationExistsError, r"w\.bin: source and destination are the same file", data),
    ):
        refused(error, message, original, nowhere, force=True)
    assert data.read_bytes() == bytes(400)
    dest.write_bytes(b"old")
    refused(errors.DestinationExistsError, r"small\.onnx: exists already; force=True replaces it", original, dest)
    assert dest.read_bytes() == b"old"
    small(original, dest)


@pytest.mark.parametrize("alignment", [0, 3, 1 << 17, "4"])
def test_an_alignment_is_a_power_of_two(alignment: Any, original: Path) -> None:
    what = f"model.onnx: alignment {alignment!r} is not a power of two from 1 to 65536"
    refused(errors.LimitError, what, original, original.with_name("small.onnx"), alignment=alignment)


def test_an_original_that_was_changed_or_replaced_is_refused(original: Path) -> None:
    dest, data = original.with_name("small.onnx"), original.read_bytes()
    tensors = scan(original)
    original.write_bytes(data.replace(b"w.bin", b"v.bin"))  # the same file, of the same size
    with pytest.raises(errors.SourceError, match=r"model\.onnx: was changed since it was scanned; scan it again"):
        tensors.to_onnx(dest)
    original.write_bytes(data + m.field(2, b"me"))
    what = "was changed or replaced since it was scanned; scan it again"
    with pytest.raises(errors.SourceError, match=rf"model\.onnx: {what}"):
        tensors.to_onnx(dest)
    original.write_bytes(data)
    tensors.to_onnx(dest)
    for name, tensor in (("w.bin", "tensor 'w': "), ("model.onnx", "")):
        tensors = scan(original)
        tensors.load_all()  # opens the files
        path = original.with_name(name)
        os.replace(written(original.with_name("new"), path.read_bytes()), path)
        with pytest.raises(errors.SourceError, match=rf"{name}: {tensor}{what}"):
            tensors.to_onnx(dest, force=True)


def test_external_data_that_are_missing_or_too_short_are_refused(original: Path) -> None:
    where, dest = r"model\.onnx: tensor 'w': external data 'w\.bin'", original.with_name("small.onnx")
    original.with_name("w.bin").write_bytes(bytes(399))
    refused(errors.ExternalDataError, f"{where}: bytes 0 to 400 are past its end", original, dest)
    original.with_name("w.bin").unlink()
    refused(errors.ExternalDataError, f"{where}: cannot be opened: No such file", original, dest)


def test_values_that_do_not_fit_are_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    t = helper.make_tensor("w", TensorProto.INT8, [200], [1] * 200)
    data = m.model_of(t).SerializeToString()
    path = written(tmp_path / "m.onnx", data.replace(m.field(5, bytes([1] * 200)), m.field(5, b"\xff\3" * 100)))
    dest = tmp_path / "small.onnx"
    dest.write_bytes(b"old")
    refused(errors.OnnxError, r"m\.onnx: tensor 'w': ", path, dest, force=True)
    assert dest.read_bytes() == b"old"


def test_more_than_one_model_may_hold_is_refused(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_LENGTH", 400)
    small(original)
    what = r"model\.onnx: \d+ bytes in one model, and protobuf holds at most 400; convert the model, and exp"
    refused(errors.LimitError, what, original, original.with_name("large.onnx"), alignment=65536)


@pytest.mark.exhaustive(keep=0)
@pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")
def test_inlined_values_are_held_one_at_a_time(tmp_path: Path) -> None:
    tensors = [numpy_helper.from_array(np.full(4 * MIB, i, np.int32), f"w{i}") for i in range(5)]
    path = written(tmp_path / "m.onnx", m.model_of(*tensors))
    del tensors
    work = f"zcrecord.onnx.scan({str(path)!r}).to_onnx({str(tmp_path / 's.onnx')!r}, alignment=65536, durable=False)"
    _, peak = growth("import zcrecord.onnx", work)
    assert (tmp_path / "s.onnx").stat().st_size > 80 * MIB
    assert 16 * MIB < peak < 40 * MIB
