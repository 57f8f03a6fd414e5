"""A scan lists the tensors of a conversion without reading a payload; their values are views or one copy.

Tests of conversion, of the wire and of external data compare a scan with each conversion.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
import onnx_values
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_scans import MIB, assert_same, at, counted_reads, growth, sparse_model, written
from records import run_python

import zcrecord
from zcrecord import errors
from zcrecord.onnx import OnnxTensors, convert, scan
from zcrecord.onnx.lazy.locate import STEP
from zcrecord.tensors.packed import StringTensor

FLOATS = np.arange(6, dtype="<f4")


def compared(path: Path, **options: Any) -> OnnxTensors:
    """The scan of a model, once it was compared with the conversion, mapped and not."""
    out = io.BytesIO()
    convert(path, out, **options)
    record = zcrecord.load_record(out.getvalue())
    assert_same(scan(path, mmap=False, **options), record)
    tensors = scan(path, **options)
    assert_same(tensors, record)
    return tensors


# The same as a conversion.


@pytest.mark.parametrize("seed", range(2))
def test_tensors_of_all_sizes_are_found_wherever_the_window_was_moved(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    tensors = []
    for i in range(120):
        count = int(rng.choice([0, 1, 3, 200, STEP // 4, STEP, 3 * STEP, 40 * STEP]) * rng.random())
        array = rng.integers(-100, 100, count)
        if rng.random() < 0.7:
            t = numpy_helper.from_array(array.astype(rng.choice(["<i1", "<i4", "<f4", "<f8"])), f"t{i}")
        else:
            code = int(rng.choice([TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT8, TensorProto.DOUBLE]))
            t = helper.make_tensor(f"t{i}", code, [count], array.tolist())
        t.doc_string = "x" * int(rng.choice([0, 0, 5, STEP, 5 * STEP]))
        tensors.append(t)
    nodes = [helper.make_node("Relu", [f"r{i}"], [f"r{i + 1}"], alpha=1.0) for i in range(500)]
    compared(written(tmp_path / "m.onnx", m.model_of(*tensors, nodes=nodes)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("code", onnx_values.NUMBERS, ids=TensorProto.DataType.Name)
def test_every_type_is_read_from_external_data(code: int, tmp_path: Path) -> None:
    array = onnx_values.sample(code, (33,))
    original = numpy_helper.from_array(array)
    data = original.raw_data
    for offset in (0, 1):
        t = onnx_values.reference(offset=str(offset))
        t.data_type, t.dims[0] = code, 33
        tensors = compared(onnx_values.write(tmp_path / str(offset), t, data=bytes(offset) + data))
        m.assert_equal(tensors["w"], original)
        info = tensors.info("w")
        assert info.field == "external_data"
        assert info.file == os.path.realpath(tmp_path / str(offset) / "w.bin")
        assert info.offset == offset
        assert info.copied == (offset % max(1, info.dtype.bits // 8) != 0)


# Without reading a payload.


def test_a_scan_reads_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counted_reads(monkeypatch)
    array = np.full(MIB, 7)
    typed = [
        helper.make_tensor("float_data", TensorProto.FLOAT, [MIB], array),
        helper.make_tensor("int64_data", TensorProto.INT64, [MIB], array),
        TensorProto(name="string_data", data_type=TensorProto.STRING, dims=[1], string_data=[bytes(MIB)]),
    ]
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(array))
    model = m.model_of(numpy_helper.from_array(array, "raw_data"), *typed, nodes=[constant])
    path = written(tmp_path / "m.onnx", model)
    tensors = scan(path)
    infos = {info.name: info for info in tensors.infos()}
    assert all(infos[name].field == name for name in ("raw_data", "float_data", "int64_data", "string_data"))
    assert sum(counted) < 64 << 10 < path.stat().st_size // 100
    tensors["int64_data"]
    assert MIB < sum(counted) < MIB + (128 << 10)  # that tensor alone
    scan(path, mmap=False).load_all()
    assert sum(counted) > path.stat().st_size


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")
def test_a_scan_and_its_views_take_no_memory_and_the_measurement_would_notice(tmp_path: Path) -> None:
    size = 128 * MIB
    path = sparse_model(tmp_path / "m.onnx", size)
    private, peak = growth("import onnx", f"model = onnx.load({str(path)!r})")
    assert private > size
    assert peak > size
    setup = "import zcrecord.onnx"
    private, peak = growth(setup, f"tensors = zcrecord.onnx.scan({str(path)!r}); w = tensors['w']")
    assert private < 4 * MIB
    assert peak < 4 * MIB
    private, _ = growth(setup, f"w = zcrecord.onnx.scan({str(path)!r})['w']; assert w.sum() == 0")
    assert private < 4 * MIB  # pages that were touched are the page cache's
    private, _ = growth(setup, f"w = zcrecord.onnx.scan({str(path)!r}, mmap=False)['w']")
    assert size < private < size + 4 * MIB


@pytest.mark.slow
def test_it_needs_neither_onnx_nor_protobuf(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", m.rich_model())
    code = f"""
import sys
sys.modules |= dict.fromkeys(["onnx", "google", "google.protobuf", "onnxruntime", "torch", "ml_dtypes"])
import zcrecord.onnx
print(len(zcrecord.onnx.scan({str(path)!r}).load_all()))
"""
    assert run_python(code).stdout.strip() == "25"


# Views and copies.


@pytest.mark.parametrize("kind", ["<f2", "<c16", "?"])
def test_a_tensor_is_a_view_where_it_is_aligned_and_a_copy_elsewhere(kind: str, tmp_path: Path) -> None:
    array = np.array([1, 1, 0, 1, 0, 0, 1, 1] * 7, np.uint8).astype(kind)
    for offset in range(16):
        data = at(offset, numpy_helper.from_array(array, "w"))
        tensors = compared(written(tmp_path / "m.onnx", data))
        info = tensors.info("w")
        assert info.offset is not None
        assert data[info.offset : info.offset + info.nbytes] == array.tobytes()
        assert info.file == os.path.realpath(tmp_path / "m.onnx")
        assert info.copied == (offset % array.itemsize != 0)
        assert np.shares_memory(tensors["w"], tensors["w"]) == (not info.copied)
        assert tensors["w"].flags.aligned


def test_packed_floats_are_views_and_those_in_pieces_are_not(tmp_path: Path) -> None:
    head = m.field(1, 6) + m.field(2, TensorProto.FLOAT) + m.field(8, b"w")
    for pad in range(4):
        data = m.field(2, b"x" * pad) + m.wire_model(head + m.field(4, FLOATS.tobytes()))
        info = compared(written(tmp_path / "m.onnx", data)).info("w")
        assert info.offset == data.index(FLOATS.tobytes())
        assert info.copied == (info.offset % 4 != 0)
    first, rest = FLOATS[:1].tobytes(), FLOATS[1:].tobytes()
    single = b"\x25" + first
    for values in (m.field(4, first) + m.field(4, rest), single + m.field(4, rest), m.field(4, rest) + single):
        info = compared(written(tmp_path / "m.onnx", m.wire_model(head + values))).info("w")
        assert (info.offset, info.copied, info.field, info.nbytes) == (None, True, "float_data", 24)


@pytest.mark.parametrize("singles, count", [(1, 2), (2, 5), (3, 4), (4, 6)])
def test_elements_of_6_bits_may_come_single_and_packed_together(singles: int, count: int, tmp_path: Path) -> None:
    code = zcrecord.dtypes.by_name["float6_e2m3fn"].onnx
    assert code is not None
    head = m.field(1, count) + m.field(2, code) + m.field(8, b"w")
    single, packed = m.field(5, 33) * singles, m.field(5, bytes(range(1, count - singles + 1)))
    for values in (single + packed, packed + single):
        tensors = compared(written(tmp_path / "m.onnx", m.wire_model(head + values)))
        assert tensors["w"].nbytes == -(-count * 6 // 8)


def test_values_that_are_not_canonical_are_copied(tmp_path: Path) -> None:
    def tensors(bools: bytes, nibbles: bytes) -> OnnxTensors:
        b = TensorProto(name="b", data_type=TensorProto.BOOL, dims=[3], raw_data=bools)
        n = TensorProto(name="n", data_type=TensorProto.UINT4, dims=[3], raw_data=nibbles)
        return compared(written(tmp_path / "m.onnx", m.model_of(b, n)))

    for bools, nibbles, views in ((b"\x00\x01\xfe", b"\x21\xf3", False), (b"\x00\x01\x01", b"\x21\x03", True)):
        found = tensors(bools, nibbles)
        assert not any(info.copied for info in found.infos())  # before anybody has read them
        assert np.shares_memory(found["b"], found["b"]) == views
        assert np.shares_memory(found["n"].packed, found["n"].packed) == views


def test_without_mapping_every_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", at(0, numpy_helper.from_array(FLOATS, "w")))
    mapped, tensors = scan(path), scan(path, mmap=False)
    assert tensors.info("w").copied
    first, second = tensors["w"], tensors["w"]
    assert not np.shares_memory(first, second)
    assert first.ctypes.data % 64 == 0
    os.truncate(path, 0)
    assert first.tolist() == second.tolist() == FLOATS.tolist()
    for each in (tensors, mapped):
        with pytest.raises(errors.SourceError, match=r"tensor 'w': became shorter than the \d+ bytes it had"):
            each["w"]


def test_a_file_that_is_replaced_stays_what_it_was_and_one_that_is_changed_in_place_is_an_error(tmp_path: Path) -> None:
    data = m.model_of(helper.make_tensor("w", TensorProto.INT8, [2], [1, 2])).SerializeToString()
    path = written(tmp_path / "m.onnx", data)
    tensors = scan(path)
    os.replace(written(tmp_path / "new", data.replace(b"w", b"v")), path)
    assert tensors["w"].tolist() == [1, 2]
    written(path, data)
    tensors = scan(path)
    changed = data.replace(m.field(2, TensorProto.INT8) + m.field(5, b"\1\2"), m.field(2, 2) + m.field(5, b"\1\2"))
    assert changed != data
    written(path, changed)  # the same file
    with pytest.raises(errors.SourceError, match=r"tensor 'w': was changed since it was scanned; scan it again"):
        tensors["w"]


# A mapping.


def test_it_is_a_mapping_in_the_models_order(tmp_path: Path) -> None:
    strings = TensorProto(name="s", data_type=TensorProto.STRING, dims=[2], string_data=[b"a", b"bc"])
    tensors = scan(written(tmp_path / "m.onnx", m.model_of(numpy_helper.from_array(FLOATS, "enc.weight"), strings)))
    assert list(tensors) == ["enc.weight", "s"]
    assert [type(value) for value in tensors.values()] == [np.ndarray, StringTensor]
    assert "s" in tensors
    assert "t" not in tensors
    assert 5 not in tensors  # type: ignore[comparison-overlap]
    assert tensors.get("t") is None
    assert list(tensors.get("s").strings()) == [b"a", b"bc"]
    assert tensors.array("enc.weight").tolist() == FLOATS.tolist()
    assert repr(tensors) == f"<OnnxTensors {tmp_path / 'm.onnx'}: 2 tensors>"
    assert tensors.path == str(tmp_path / "m.onnx")
    assert tensors == tensors
    assert tensors != scan(tmp_path / "m.onnx")
    assert len({tensors, scan(tmp_path / "m.onnx")}) == 2
    with pytest.raises(
        errors.UnsupportedError, match=r"tensor 's': a StringTensor is no ndarray; use tensors\[name\]\.unp"
    ):
        tensors.array("s")
    for ask in (tensors.__getitem__, tensors.info, tensors.array):
        with pytest.raises(errors.TensorNotFoundError, match=r"m\.onnx: tensor 'weight': .*close names: 'enc\.weight'"):
            ask("weight")
    with pytest.raises(errors.UnsupportedError, match=r"m\.onnx: open files cannot be pickled; scan the path again"):
        pickle.dumps(tensors)


def test_tensors_without_a_byte_lie_nowhere(tmp_path: Path) -> None:
    raw = numpy_helper.from_array(np.zeros((0, 3), "f4"), "raw")
    none = TensorProto(name="none", data_type=TensorProto.FLOAT, dims=[0])
    strings = TensorProto(name="s", data_type=TensorProto.STRING, dims=[3], string_data=[b""] * 3)
    tensors = compared(written(tmp_path / "m.onnx", m.model_of(raw, none, strings)))
    told = [(i.field, i.offset, i.nbytes, i.copied) for i in tensors.infos()]
    assert told[:2] == [("raw_data", None, 0, False), ("", None, 0, False)]
    assert tensors.info("s").offset is None and list(tensors["s"].strings()) == [b""] * 3


def test_leaving_ends_lookups_and_views_stay_valid(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", at(0, numpy_helper.from_array(FLOATS, "w")))
    with scan(path) as tensors:
        view = tensors["w"]
    uses: list[Any] = [
        len, list, lambda t: t["w"], lambda t: t.info("w"), lambda t: list(t.infos()), lambda t: "w" in t,
        lambda t: t.get("w"), lambda t: t.load_all(), lambda t: t.names, lambda t: t.nbytes,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(errors.UnsupportedError, match=r"m\.onnx: the record is closed; views taken before stay va"):
            use(tensors)
    assert repr(tensors) == f"<OnnxTensors {path}: closed>"
    assert view.tolist() == FLOATS.tolist()
    assert not tensors.close()
    part = view[2:4]
    del view
    assert not tensors.close()
    assert part.tolist() == [2, 3]
    del part
    assert tensors.close()
    with pytest.raises(errors.TensorNotFoundError, match="close names: 'w'"), scan(path) as tensors:
        tensors["ww"]


@pytest.mark.slow
def test_closing_while_others_read_harms_nobody(tmp_path: Path) -> None:
    model = m.model_of(*(numpy_helper.from_array(np.full(99, i), f"w{i}") for i in range(9)))
    path = written(tmp_path / "m.onnx", model)

    def ask(tensors: OnnxTensors) -> None:
        with contextlib.suppress(errors.UnsupportedError):
            for i in itertools.cycle(range(9)):
                assert set(tensors[f"w{i}"].tolist()) == {i}

    for _ in range(20):
        with ThreadPoolExecutor(3) as pool:
            tensors = scan(path)
            asked = [pool.submit(ask, tensors) for _ in range(3)]
            tensors.close()
            assert [each.result() for each in asked] == [None] * 3


# External data.


def test_external_data_is_a_view_of_its_file(tmp_path: Path) -> None:
    odd = onnx_values.reference(name="odd", offset="1")
    tensors = onnx_values.reference(), onnx_values.reference(name="again"), odd
    found = compared(onnx_values.write(tmp_path / "m", *tensors, data=bytes(40)))
    assert np.shares_memory(found["w"], found["again"])  # it is the same part of the same file
    assert not np.shares_memory(found["w"], found["odd"])
    assert [info.copied for info in found.infos()] == [False, False, True]


def test_a_scan_opens_no_external_data(tmp_path: Path) -> None:
    absent = [onnx_values.reference(f"{i}/absent.bin", f"w{i}") for i in range(100)]
    tensors = scan(written(tmp_path / "m.onnx", m.model_of(*absent, numpy_helper.from_array(FLOATS, "v"))))
    assert tensors.info("w7").file == os.path.realpath(tmp_path / "7" / "absent.bin")
    assert tensors["v"].tolist() == FLOATS.tolist()
    what = r"m\.onnx: tensor 'w7': external data '7/absent\.bin': cannot be opened: No such file or directory"
    with pytest.raises(errors.ExternalDataError, match=what):
        tensors["w7"]
    with pytest.raises(errors.ExternalDataError, match="tensor 'w0': external data"):
        tensors.load_all()


def test_many_files_of_external_data_take_few_descriptors(tmp_path: Path) -> None:
    count = 400
    for i in range(count):
        np.full(6, i, "<f4").tofile(tmp_path / f"{i}.bin")
    model = m.model_of(*(onnx_values.reference(f"{i}.bin", f"w{i}") for i in range(count)))
    folder = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    before = len(os.listdir(folder))
    tensors = scan(written(tmp_path / "m.onnx", model))
    for i in range(count):
        assert tensors[f"w{i}"][0] == i
    assert len(os.listdir(folder)) - before < 80
    kept = tensors.load_all()
    assert [value[0] for value in kept.values()] == list(range(count))
    assert len(os.listdir(folder)) - before < 340
    assert not np.shares_memory(tensors[f"w{count - 1}"], kept[f"w{count - 1}"])
    assert np.shares_memory(tensors["w0"], kept["w0"])
    del kept
    assert tensors.close()
    assert len(os.listdir(folder)) <= before


# What is no model, or no file.


def test_a_model_that_ends_early_is_noticed_without_reading_on(tmp_path: Path) -> None:
    path = sparse_model(tmp_path / "m.onnx", 8 * MIB)
    size = path.stat().st_size
    for cut in (1, 4096, 8 * MIB - STEP):
        os.truncate(path, size - cut)
        with pytest.raises(errors.OnnxError, match=r"m\.onnx: tensor 'w': byte 0x[0-9a-f]+: .* ends \d+ bytes early"):
            scan(path)


def test_faults_of_values_are_errors_at_access(tmp_path: Path) -> None:
    count = m.field(1, 3) + m.field(2, TensorProto.INT8) + m.field(8, b"w") + m.field(5, b"\x01\x02\x03\x04")
    above = m.field(1, 1) + m.field(2, TensorProto.INT8) + m.field(8, b"v") + m.field(5, m.varint(128))
    tensors = scan(written(tmp_path / "m.onnx", m.wire_model(count, above)))
    with pytest.raises(errors.OnnxError, match=r"m\.onnx: tensor 'w': byte 0x.*takes 3 bytes, got 4 in int32_data"):
        tensors["w"]
    with pytest.raises(errors.OnnxError, match=r"m\.onnx: tensor 'v': byte 0x.*int32_data holds 128, out of range for"):
        tensors["v"]


def test_a_device_that_takes_the_models_place_after_the_look_at_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    regular = os.stat(__file__)
    monkeypatch.setattr(Path, "stat", lambda _: regular)
    with pytest.raises(errors.SourceError, match=r"not a regular file, .* convert it instead"):
        scan(os.devnull)


def test_only_a_regular_file_can_be_scanned(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.SourceError, match=r"pipe: not a regular file, .* convert it instead"):
        scan(tmp_path / "pipe")
    with pytest.raises(errors.SourceError, match="cannot read: Is a directory"):
        scan(tmp_path)
    with pytest.raises(errors.SourceNotFoundError, match=r"no\.onnx: cannot read: No such file or directory"):
        scan(tmp_path / "no.onnx")
    with pytest.raises(errors.UnsupportedError, match="a stream cannot be read in any order; name a file to scan"):
        scan(io.BytesIO())  # type: ignore[arg-type]
    with pytest.raises(errors.UnsupportedError, match="a NoneType is neither a path"):
        scan(None)  # type: ignore[arg-type]
