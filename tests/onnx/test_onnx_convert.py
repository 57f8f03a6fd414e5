"""Conversion: every tensor of a model, wherever it sits and however it is stored, named by one rule; nothing lost."""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models as m
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_exports import archive, pointing
from onnx_scans import converted, refused
from onnx_values import CODES, sample

import zcrecord
from tools.measure import most_allocated
from zcrecord.errors import DestinationExistsError
from zcrecord.onnx import convert, verify_external
from zcrecord.onnx.protobuf.reader import WINDOW
from zcrecord.tensors.packed import PackedTensor


def check(model: onnx.ModelProto) -> zcrecord.Record:
    """Convert a model; compare every tensor with onnx's, and the restored model with the model itself."""
    record = converted(model)
    tensors = list(m.every_tensor(model))
    assert len(record) == len(tensors)
    for value, t in zip(record.values(), tensors, strict=True):
        m.assert_equal(value, t)
    assert m.restored(record) == m.normal(model)
    return record


# Everything there is.


@pytest.mark.exhaustive(keep=40)
@pytest.mark.parametrize("path", m.packaged_models(), ids=lambda path: path.parent.name + "/" + path.stem)
def test_the_packaged_models_convert_and_come_back_whole_and_over_their_archive(path: Path, tmp_path: Path) -> None:
    model = onnx.load(path)
    check(model)
    assert pointing(archive(model, tmp_path / "m.zcr"), tmp_path / "m.onnx") == m.normal(model)
    verify_external(tmp_path / "m.onnx", full=True)


# Every type, in every form.


def test_every_type_that_onnx_has_is_known() -> None:
    missing = set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED} - set(CODES)
    assert not missing, f"zcrecord/dtypes.py lacks {sorted(map(TensorProto.DataType.Name, missing))}"


def typed(array: np.ndarray, code: int, name: str) -> TensorProto:
    """The tensor with its values in the typed field of its type, laid there as onnx.proto says."""
    t = TensorProto(name=name, data_type=code, dims=array.shape)
    flat = array.reshape(-1)
    if code == TensorProto.STRING:
        t.string_data.extend(flat.tolist())
    elif code in (TensorProto.FLOAT, TensorProto.COMPLEX64):
        t.float_data.extend(flat.view(np.float32).tolist())
    elif code in (TensorProto.DOUBLE, TensorProto.COMPLEX128):
        t.double_data.extend(flat.view(np.float64).tolist())
    elif code == TensorProto.INT64:
        t.int64_data.extend(flat.tolist())
    elif code in (TensorProto.UINT32, TensorProto.UINT64):
        t.uint64_data.extend(flat.tolist())
    elif array.dtype.itemsize == 1 and code not in (TensorProto.BOOL, TensorProto.INT8, TensorProto.UINT8):
        packed = 8 % zcrecord.dtypes.by_onnx[code].bits == 0 and zcrecord.dtypes.by_onnx[code].packed
        t.int32_data.extend((PackedTensor.pack(array).packed if packed else flat.view(np.uint8)).tolist())
    elif array.dtype.itemsize == 2 and array.dtype.kind not in "iu":
        t.int32_data.extend(flat.view(np.uint16).tolist())
    else:
        t.int32_data.extend(flat.astype(np.int64).tolist())
    return t


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3, 5), (0,), (2, 0, 3)])
@pytest.mark.parametrize("code", CODES, ids=TensorProto.DataType.Name)
def test_every_type_converts_raw_and_typed(code: int, shape: tuple[int, ...]) -> None:
    array = sample(code, shape)
    raw = typed(array, code, "raw") if code == TensorProto.STRING else numpy_helper.from_array(array, "raw")
    record = check(m.model_of(raw, typed(array, code, "typed")))
    for name in ("raw", "typed"):
        assert m.bits(m.stored(record[name])) == m.bits(array)
        assert record.info(name).dtype.onnx == code


def test_bools_become_0_and_1_and_bits_after_the_last_packed_element_zero() -> None:
    record = converted(m.model_of(
        TensorProto(name="b", data_type=TensorProto.BOOL, dims=[3], raw_data=b"\x00\x01\xfe"),
        TensorProto(name="c", data_type=TensorProto.BOOL, dims=[3], int32_data=[0, 1, 254]),
        TensorProto(name="n", data_type=TensorProto.UINT4, dims=[3], raw_data=b"\x21\xf3"),
        TensorProto(name="d", data_type=TensorProto.UINT2, dims=[5], int32_data=[0xE4, 0xFF]),
    ))  # fmt: skip
    assert record["b"].view(np.uint8).tolist() == record["c"].view(np.uint8).tolist() == [0, 1, 1]
    assert record["n"].packed.tolist() == [0x21, 0x03]
    assert record["d"].packed.tolist() == [0xE4, 0x03]
    assert record["n"].unpack().astype(int).tolist() == [1, 2, 3]


# Everywhere a tensor can sit.


def test_tensors_are_found_everywhere_and_named_after_their_place() -> None:
    record = check(m.rich_model())
    assert set(record.names) == {
        "layer.0.weight", "const.value", "several.ts.0", "several.ts.1",
        "several.gs.0.w", "several.gs.0.loop.body.w", "several.gs.1.w", "several.gs.1.loop.body.w",
        "several.sp.values", "several.sp.indices", "several.sps.0.values", "several.sps.0.indices",
        "several.sps.1.values", "several.sps.1.indices", "sparse.w.values", "sparse.w.indices",
        "branches.then_branch.w", "branches.then_branch.loop.body.w",
        "branches.else_branch.w", "branches.else_branch.loop.body.w",
        "function.my.domain:Fun.k.value", "function.my.domain:Fun.default",
        "training_info.0.initialization.m", "training_info.0.algorithm.w", "training_info.0.algorithm.loop.body.w",
    }  # fmt: skip
    assert record["several.gs.1.loop.body.w"].tolist() == [20.5, 20.5]
    assert "layer.0" in record.modules
    assert "function.my.domain:Fun" in record.modules  # parts that are not initializers' names are not split
    assert record.info("layer.0.weight").module == "layer.0"


def test_a_model_without_tensors_converts() -> None:
    assert len(check(m.model_of(nodes=[helper.make_node("Relu", ["x"], ["y"])]))) == 0


# Names.


def names(*inits: str, nodes: Any = ()) -> list[str]:
    """The names in the archive of a model with these initializers."""
    return list(check(m.model_of(*(numpy_helper.from_array(np.arange(2), n) for n in inits), nodes=nodes)).names)


def test_initializers_keep_their_names_exactly() -> None:
    odd = ["a", "a.b", "a.b.c", "x.y", ".", "..", "a..b", "end.", ".start", "/model/layers.0/MatMul", "é.ü"]
    odd += ["w" * 10000, "deep" + ".d" * 150, "onnx.graph", "a b\n"]
    assert names(*odd) == odd


def test_names_are_split_into_modules_where_no_tensor_is_in_the_way() -> None:
    record = m.converted(m.model_of(*(numpy_helper.from_array(np.arange(2), n) for n in
                                      ["m.l.w", "m.l.b", "m.s", "m.s.t", "m.s.t.u", "a..b"])))  # fmt: skip
    modules = {name: record.info(name).module for name in record}
    assert modules == {"m.l.w": "m.l", "m.l.b": "m.l", "m.s": "m", "m.s.t": "m", "m.s.t.u": "m", "a..b": ""}
    assert list(record.modules) == ["", "m", "m.l"]


@pytest.mark.parametrize("inits, at_once", [
    ("m.l.w b m.l.b \u00e9.s onnx.graph", True), ("m.l.w onnx.graph.w", False), ("m.s m.s.t", False), ("m a..b", False),
])  # fmt: skip
def test_names_put_at_once_give_the_bytes_of_names_put_one_by_one(
    inits: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = m.model_of(*(numpy_helper.from_array(np.arange(i % 2 + 2), n) for i, n in enumerate(inits.split())))
    module, made, ways = sys.modules[convert.__module__], [], []

    def put(way: Any, *given: Any) -> Any:
        entries = way(*given)
        ways.append(entries is not None)
        return entries

    for way in (module.entries_by_columns, lambda *_: None):
        monkeypatch.setattr(module, "entries_by_columns", partial(put, way))
        made.append(io.BytesIO())
        report = convert(io.BytesIO(model.SerializeToString()), made[-1], metadata={"m.l": "\u00e9", "\u00e9": ["m"]})
        assert report.modules == len(zcrecord.load_record(made[-1].getvalue()).modules)
    assert ways == [at_once, False]
    assert made[0].getvalue() == made[1].getvalue()


def test_other_names_give_way_and_are_counted() -> None:
    constants = [m.constant("n", i) for i in range(3)]
    model = m.model_of(numpy_helper.from_array(np.arange(2), "n.value"), nodes=constants)
    out = io.BytesIO()
    report = convert(io.BytesIO(model.SerializeToString()), out)
    record = zcrecord.load_record(out.getvalue())
    assert report.renamed == 3
    assert record["n.value"].tolist() == [0, 1]
    assert [record[f"n.value~{i + 2}"].tolist() for i in range(3)] == [[0], [1], [2]]


def test_a_node_may_have_the_name_of_a_module_or_a_tensor() -> None:
    constants = [m.constant(name) for name in ("m.l", "w", "m", "onnx.graph", "a.b")]
    assert names("m.l.w", "w", "a", nodes=constants) == [
        "m.l.value", "w.value", "m.value", "onnx.graph.value", "a.b.value", "m.l.w", "w", "a",
    ]  # fmt: skip


def test_nodes_without_name_or_output_are_told_apart() -> None:
    node = helper.make_node("Sink", ["x"], [], value=numpy_helper.from_array(np.arange(2)))
    assert names(nodes=[node, node]) == ["_.value", "_.value~2"]


def test_names_of_nodes_that_no_archive_can_hold_are_changed() -> None:
    node = m.field(
        1, [m.field(3, b"a\0\xff"), m.field(5, [m.field(1, b"v"), m.field(5, m.field(1, 0) + m.field(2, 1))])]
    )
    assert converted(m.wire_model(graph=node)).names == ("a\ufffd\ufffd.v",)


@pytest.mark.parametrize("raw, message", [
    (b"", "an initializer has no name"),
    (b"a\0b", "an initializer has a name with NUL in it"),
    (b"a\xff", "an initializer has a name that is not UTF-8"),
])  # fmt: skip
def test_names_of_initializers_that_no_archive_can_hold_are_refused(raw: bytes, message: str) -> None:
    t = m.field(1, 0) + m.field(2, 1) + (m.field(8, raw) if raw else b"")
    refused(m.wire_model(t), f"byte 0x[0-9a-f]+: {message}")


def test_two_initializers_of_one_graph_may_not_share_a_name() -> None:
    t = numpy_helper.from_array(np.arange(2), "w")
    sub = helper.make_graph([], "s", [], [], [t, t])
    sparse = m.model_of(t)
    sparse.graph.sparse_initializer.append(helper.make_sparse_tensor(t, t, [5]))
    for model in (m.model_of(t, t), m.model_of(nodes=[helper.make_node("If", [], ["y"], then_branch=sub)]), sparse):
        refused(model.SerializeToString(), "two initializers of one graph are called 'w'; rename one")


def test_long_names_of_nested_tensors_cannot_multiply() -> None:
    tensor = m.field(10, m.field(1, 0) + m.field(2, 1))
    node = m.field(1, [m.field(3, b"n" * 60000), m.field(5, m.field(1, b"a") + tensor * 5000)])
    with pytest.raises(ValueError, match="the names of nested tensors take more than 8 times the input"):
        m.converted(m.wire_model(graph=node))


def test_names_too_deep_to_be_split_take_memory_by_their_own_size_not_by_that_of_their_modules() -> None:
    names = [f"{i:x}{'.d' * 127}".encode() for i in range(1000)]
    model = m.wire_model(*(m.field(1, 0) + m.field(2, 1) + m.field(8, name) for name in names))
    assert most_allocated(lambda: convert(io.BytesIO(model), io.BytesIO())) < 32 * len(model)


# Storing once.


def test_equal_payloads_are_stored_once_and_stay_distinct() -> None:
    array = np.arange(1000.0)
    model = m.model_of(*(numpy_helper.from_array(array, n) for n in "abc"), numpy_helper.from_array(-array, "d"))
    out = io.BytesIO()
    report = convert(io.BytesIO(model.SerializeToString()), out)
    record = zcrecord.load_record(out.getvalue())
    assert report.shared_bytes == 2 * array.nbytes
    assert report.payload_bytes < 2 * array.nbytes + 1000
    assert np.shares_memory(record["a"], record["c"])
    assert record.info("a").tied == ()
    assert record.info("a").payload != record.info("c").payload


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(m.rich_model().SerializeToString())
    report = convert(tmp_path / "m.onnx", tmp_path / "m.zcr")
    assert report.source == str(tmp_path / "m.onnx")
    assert report.dest == str(tmp_path / "m.zcr")
    assert report.tensors == 25
    assert report.modules == len(zcrecord.load_record(tmp_path / "m.zcr").modules)
    assert report.input_bytes == (tmp_path / "m.onnx").stat().st_size
    assert report.archive_bytes == (tmp_path / "m.zcr").stat().st_size
    assert report.renamed == 0
    assert report.seconds > 0
    assert report.peak_rss is None or report.peak_rss > 1 << 20


def test_payloads_have_the_alignment_asked_for() -> None:
    model = m.model_of(*(numpy_helper.from_array(np.arange(n), f"w{n}") for n in (1, 3, 50, 200_000)))
    for alignment in (16, 64, 4096):
        record = m.converted(model, alignment=alignment)
        assert all(record.info(name).offset % alignment == 0 for name in record)
        assert record.info("w200000").offset % 16384 == 0


# Sources and destinations.


def test_the_destination_may_not_be_the_source(tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    source.write_bytes(m.rich_model().SerializeToString())
    (tmp_path / "link").symlink_to(source)
    for dest in (source, tmp_path / "link"):
        with pytest.raises(DestinationExistsError, match="source and destination are the same file"):
            convert(source, dest, force=True)


def test_progress_is_told_in_bytes_and_ends_at_the_total(tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    source.write_bytes(m.model_of(numpy_helper.from_array(np.arange(500_000), "w")).SerializeToString())
    seen: list[tuple[int, int | None]] = []
    piped: list[tuple[int, int | None]] = []
    convert(source, tmp_path / "m.zcr", progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (source.stat().st_size, source.stat().st_size)
    convert(io.BytesIO(source.read_bytes()), io.BytesIO(), progress=lambda done, total: piped.append((done, total)))
    assert piped[-1] == (source.stat().st_size, None)


def test_a_scan_never_seeks_and_never_asks_for_more_than_the_window() -> None:
    source = m.Forward(m.model_of(numpy_helper.from_array(np.arange(3 * WINDOW), "w")).SerializeToString())
    convert(source, io.BytesIO())
    assert 0 < source.asked <= WINDOW


# Memory.


def test_a_conversion_allocates_a_window_and_the_graph_however_large_the_payload(tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    weights = numpy_helper.from_array(np.ones(4 << 20, np.float32), "w")
    source.write_bytes(m.model_of(weights, numpy_helper.from_array(np.arange(9), "v")).SerializeToString())
    assert most_allocated(lambda: convert(source, tmp_path / "m.zcr", durable=False, force=True)) < 4 << 20
    assert most_allocated(source.read_bytes) > 16 << 20, "holding it would be noticed"
