"""A scan lists what a conversion finds, without reading a payload, and gives out the same values: views or one copy.

What the tests of conversion and of the wire say of `convert` they say here of `scan` too: they are run again with a
`convert` that does both and compares.
"""

from __future__ import annotations

import inspect
import io
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_models as m
import onnx_values
import pytest
import test_onnx_convert
import test_onnx_external
import test_onnx_wire
from exhaustive import KINDS, whole
from onnx import TensorProto, helper, numpy_helper
from onnx_scans import MIB, assert_same, at, counted, growth, stored_bytes, written  # noqa: F401  # one is a fixture

import zcrecord
from zcrecord.errors import (
    ExternalDataError,
    OnnxError,
    RecordError,
    SourceError,
    SourceNotFoundError,
    TensorNotFoundError,
    UnsupportedError,
)
from zcrecord.onnx import OnnxTensors, convert, scan
from zcrecord.onnx.lazy import files
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


def cases_of(*modules: ModuleType) -> Iterator[Any]:
    """The tests of modules, with each of their parameters, as far as they need nothing else."""
    for module in modules:
        for name, test in vars(module).items():
            if not name.startswith("test_"):
                continue
            marks = getattr(test, "pytestmark", ())
            alone = {mark.name for mark in marks if mark.name != "exhaustive" or mark.kwargs.get("keep") == 0}
            if not whole() and alone & KINDS.keys():
                continue
            parameters = [mark.args[:2] for mark in marks if mark.name == "parametrize"]
            axes = [[args.replace(" ", "").split(","), values] for args, values in parameters]
            if set(inspect.signature(test).parameters) != {arg for args, _ in axes for arg in args}:
                continue
            for number, values in enumerate(itertools.product(*(values for _, values in axes))):
                given: dict[str, Any] = {}
                for (args, _), value in zip(axes, values, strict=True):
                    given |= dict(zip(args, value if len(args) > 1 else [value], strict=True))
                yield pytest.param(test, given, id=f"{name}-{number}")


@pytest.mark.exhaustive(keep=60)
@pytest.mark.parametrize("test, given", list(cases_of(test_onnx_wire, test_onnx_convert)))
def test_what_holds_of_a_conversion_holds_of_a_scan(
    test: Any, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"

    def both(source: Any, dest: Any, **options: Any) -> Any:
        if not isinstance(source, io.BytesIO) or not isinstance(dest, io.BytesIO):
            return convert(source, dest, **options)
        path.unlink(missing_ok=True)  # some file systems flush what replaces another's contents
        written(path, source.getvalue())
        try:
            report = convert(source, dest, **options)
        except RecordError as error:
            with pytest.raises(type(error)) as caught:
                scan(path).load_all()
            assert caught.type is type(error)
            assert caught.value.path == str(path)
            raise
        assert_same(scan(path), zcrecord.load_record(dest.getvalue()))
        return report

    for module in (m, test_onnx_wire, test_onnx_convert):
        monkeypatch.setattr(module, "convert", both)
    test(**given)


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("seed", range(6))
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


@pytest.mark.parametrize("code", onnx_values.NUMBERS, ids=TensorProto.DataType.Name)
def test_every_type_is_read_from_external_data(code: int, tmp_path: Path) -> None:
    array = onnx_values.sample(code, (33,))
    data = numpy_helper.from_array(array).raw_data
    for offset in (0, 1):
        t = onnx_values.reference(offset=str(offset))
        t.data_type, t.dims[0] = code, 33
        tensors = compared(onnx_values.write(tmp_path / str(offset), t, data=bytes(offset) + data))
        info = tensors.info("w")
        assert info.field == "external_data"
        assert info.file == os.path.realpath(tmp_path / str(offset) / "w.bin")
        assert info.offset == offset
        assert info.copied == (offset % max(1, info.dtype.bits // 8) != 0)


# Without reading a payload.


def test_a_scan_reads_no_payload(tmp_path: Path, counted: list[int]) -> None:  # noqa: F811
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
    assert [infos[n].field for n in ("raw_data", "float_data", "int64_data", "string_data")] == [
        "raw_data", "float_data", "int64_data", "string_data",
    ]  # fmt: skip
    assert sum(counted) < 64 << 10 < path.stat().st_size // 100
    tensors["int64_data"]
    assert MIB < sum(counted) < MIB + (128 << 10)  # that tensor alone
    scan(path, mmap=False).load_all()
    assert sum(counted) > path.stat().st_size


def test_small_tensors_and_a_graph_are_read_in_few_reads(tmp_path: Path, counted: list[int]) -> None:  # noqa: F811
    nodes = [helper.make_node("Relu", [f"r{i}"], [f"r{i + 1}"], alpha=1.0) for i in range(20_000)]
    model = m.model_of(*(numpy_helper.from_array(np.arange(8), f"w{i}") for i in range(10_000)), nodes=nodes)
    path = written(tmp_path / "m.onnx", model)
    assert len(scan(path)) == 10_000
    assert len(counted) < 20
    assert sum(counted) <= path.stat().st_size


def sparse_model(path: Path, size: int) -> Path:
    """A model with one tensor of zeros, "w", that takes no room on the disk and is aligned to 8 bytes."""
    head = m.field(1, size // 4) + m.field(2, TensorProto.FLOAT) + m.field(8, b"w") + b"\x4a" + m.varint(size)
    graph = b"\x2a" + m.varint(len(head) + size) + head
    start = m.field(1, 9) + b"\x3a" + m.varint(len(graph) + size)
    start = m.field(2, b"x" * (-(len(start) + len(graph) + 2) % 8)) + start
    with path.open("wb") as file:
        file.write(start + graph)
        file.truncate(len(start + graph) + size)
    return path


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
for name in ("onnx", "google", "google.protobuf", "onnxruntime", "torch", "ml_dtypes"):
    sys.modules[name] = None
import zcrecord.onnx
with zcrecord.onnx.scan({str(path)!r}) as tensors:
    print(len(tensors.load_all()), tensors["layer.0.weight"].tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "25 [0.0, 1.0, 2.0, 3.0]"


# Views and copies.


@pytest.mark.parametrize("kind", ["<f2", "<f4", "<f8", "<c16", "i1", "?"])
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


def test_copies_are_aligned_as_payloads_are(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", at(1, numpy_helper.from_array(FLOATS, "w")))
    for options in ({}, {"mmap": False}):
        assert scan(path, **options)["w"].ctypes.data % 64 == 0


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


def test_what_is_not_canonical_is_copied_and_made_so(tmp_path: Path) -> None:
    bools = TensorProto(name="b", data_type=TensorProto.BOOL, dims=[3], raw_data=b"\x00\x01\xfe")
    nibbles = TensorProto(name="n", data_type=TensorProto.UINT4, dims=[3], raw_data=b"\x21\xf3")
    sixes = TensorProto(name="s", data_type=TensorProto.UINT2, dims=[1], raw_data=b"\xff")
    tensors = compared(written(tmp_path / "m.onnx", m.model_of(bools, nibbles, sixes)))
    assert tensors["b"].view(np.uint8).tolist() == [0, 1, 1]
    assert tensors["n"].packed.tolist() == [0x21, 0x03]
    assert tensors["s"].packed.tolist() == [0x03]
    assert not np.shares_memory(tensors["b"], tensors["b"])
    assert not any(info.copied for info in tensors.infos())  # nobody has looked at them
    bools.raw_data, nibbles.raw_data = b"\x00\x01\x01", b"\x21\x03"
    tensors = compared(written(tmp_path / "n.onnx", m.model_of(bools, nibbles)))
    assert np.shares_memory(tensors["b"], tensors["b"])
    assert np.shares_memory(tensors["n"].packed, tensors["n"].packed)


def test_without_mapping_every_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", at(0, numpy_helper.from_array(FLOATS, "w")))
    tensors = scan(path, mmap=False)
    assert tensors.info("w").copied
    first, second = tensors["w"], tensors["w"]
    assert not np.shares_memory(first, second)
    os.truncate(path, 0)
    assert first.tolist() == second.tolist() == FLOATS.tolist()
    with pytest.raises(SourceError, match=r"tensor 'w': became shorter than the \d+ bytes it had"):
        tensors["w"]


def test_a_file_that_became_shorter_before_it_was_mapped_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", at(0, numpy_helper.from_array(FLOATS, "w")))
    tensors = scan(path)
    os.truncate(path, 20)
    with pytest.raises(SourceError, match=r"tensor 'w': became shorter than the \d+ bytes it had"):
        tensors["w"]


def test_a_file_that_is_replaced_stays_what_it_was(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", m.model_of(helper.make_tensor("w", TensorProto.INT64, [2], [1, -1])))
    tensors = scan(path)
    os.replace(written(tmp_path / "new", b"something else"), path)
    assert tensors["w"].tolist() == [1, -1]


def test_a_file_that_was_changed_in_place_is_an_error(tmp_path: Path) -> None:
    data = m.model_of(helper.make_tensor("w", TensorProto.INT8, [2], [1, 2])).SerializeToString()
    path = written(tmp_path / "m.onnx", data)
    tensors = scan(path)
    changed = data.replace(m.field(2, TensorProto.INT8) + m.field(5, b"\1\2"), m.field(2, 2) + m.field(5, b"\1\2"))
    assert changed != data
    written(path, changed)  # the same file
    with pytest.raises(SourceError, match=r"tensor 'w': was changed since it was scanned; scan it again"):
        tensors["w"]


def test_everything_at_once_is_what_each_is(tmp_path: Path) -> None:
    tensors = scan(written(tmp_path / "m.onnx", m.rich_model()))
    eager = tensors.load_all()
    assert tuple(eager) == tensors.names
    assert all(stored_bytes(value) == stored_bytes(tensors[name]) for name, value in eager.items())
    assert sum(value.nbytes for value in eager.values()) == tensors.nbytes
    apart = scan(tmp_path / "m.onnx", mmap=False).load_all()
    (tmp_path / "m.onnx").unlink()
    assert all(stored_bytes(value) == stored_bytes(eager[name]) for name, value in apart.items())


# A mapping.


@pytest.mark.parametrize("shape", [[], [1], [3]])
def test_strings_that_are_all_empty_are_empty(tmp_path: Path, shape: list[int]) -> None:
    count = int(np.prod(shape))
    strings = TensorProto(name="s", data_type=TensorProto.STRING, dims=shape, string_data=[b""] * count)
    tensors = scan(written(tmp_path / "m.onnx", m.model_of(strings)))
    assert tensors.info("s").offset is None
    assert list(tensors["s"].strings()) == [b""] * count


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
        UnsupportedError, match=r"tensor 's': a StringTensor is no ndarray; use tensors\[name\]\.unpack"
    ):
        tensors.array("s")
    for ask in (tensors.__getitem__, tensors.info, tensors.array):
        with pytest.raises(TensorNotFoundError, match=r"m\.onnx: tensor 'weight': .*close names: 'enc\.weight'"):
            ask("weight")
    with pytest.raises(KeyError):
        tensors["weight"]


def test_an_empty_tensor_lies_nowhere(tmp_path: Path) -> None:
    raw = numpy_helper.from_array(np.zeros((0, 3), "f4"), "raw")
    none = TensorProto(name="none", data_type=TensorProto.FLOAT, dims=[0])
    tensors = compared(written(tmp_path / "m.onnx", m.model_of(raw, none)))
    assert [(i.field, i.offset, i.nbytes, i.copied) for i in tensors.infos()] == [
        ("raw_data", None, 0, False), ("", None, 0, False),
    ]  # fmt: skip


def test_leaving_ends_lookups_and_views_stay_valid(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", at(0, numpy_helper.from_array(FLOATS, "w")))
    with scan(path) as tensors:
        view = tensors["w"]
    uses: list[Any] = [
        len, list, lambda t: t["w"], lambda t: t.info("w"), lambda t: list(t.infos()), lambda t: "w" in t,
        lambda t: t.get("w"), lambda t: t.load_all(), lambda t: t.names, lambda t: t.nbytes,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(UnsupportedError, match=r"m\.onnx: the record is closed; views taken before stay valid"):
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
    with pytest.raises(TensorNotFoundError, match="close names: 'w'"), scan(path) as tensors:
        tensors["ww"]


def test_files_are_let_go_of(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()
    path = onnx_values.write(tmp_path / "m", onnx_values.reference(), numpy_helper.from_array(FLOATS, "v"))
    tensors = scan(path)
    tensors.load_all()
    assert tensors.close()
    if sys.platform == "linux":
        assert set(os.listdir("/proc/self/fd")) == before


def test_open_files_are_not_pickled(tmp_path: Path) -> None:
    tensors = scan(written(tmp_path / "m.onnx", m.model_of()))
    with pytest.raises(UnsupportedError, match=r"m\.onnx: open files cannot be pickled; scan the path again"):
        pickle.dumps(tensors)


@pytest.mark.parametrize("how", ["mapped", "preadv", "lseek"])
def test_threads_may_share_it(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [numpy_helper.from_array(np.full(500 + i, i, "<i4"), f"w{i}") for i in range(50)]
    tensors += [helper.make_tensor(f"t{i}", TensorProto.INT64, [300], [i] * 300) for i in range(50)]
    for i in range(80):
        t = onnx_values.reference(f"{i}.bin", f"x{i}")
        np.full(6, i, "<f4").tofile(tmp_path / f"{i}.bin")
        tensors.append(t)
    real = os.lseek

    def seek(*given: int) -> int:
        position = real(*given)
        time.sleep(1e-5)  # another thread's turn
        return position

    if how == "lseek":  # as on Windows
        monkeypatch.delattr(os, "preadv", raising=False)
        monkeypatch.setattr(os, "lseek", seek)
    shared = scan(written(tmp_path / "m.onnx", m.model_of(*tensors)), mmap=how == "mapped")
    wrong: list[str] = []

    def ask(seed: int) -> None:
        names = np.random.default_rng(seed).permutation(shared.names)
        wrong.extend(name for name in names if set(shared[name].tolist()) != {int(name[1:])})

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_closing_while_others_read_harms_nobody(tmp_path: Path) -> None:
    path = written(
        tmp_path / "m.onnx", m.model_of(*(numpy_helper.from_array(np.full(99, i), f"w{i}") for i in range(9)))
    )
    for _ in range(20):
        tensors = scan(path)
        wrong: list[BaseException] = []

        def ask(tensors: OnnxTensors = tensors, wrong: list[BaseException] = wrong) -> None:
            try:
                for i in itertools.cycle(range(9)):
                    assert set(tensors[f"w{i}"].tolist()) == {i}
            except UnsupportedError:
                return
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        tensors.close()
        for thread in threads:
            thread.join()
        assert not wrong


# External data.


def test_external_data_is_a_view_of_its_file(tmp_path: Path) -> None:
    reference = onnx_values.reference
    path = onnx_values.write(
        tmp_path / "m", reference(), reference(name="again"), reference(name="odd", offset="1"), data=bytes(40)
    )
    tensors = compared(path)
    assert np.shares_memory(tensors["w"], tensors["again"])  # it is the same part of the same file
    assert not np.shares_memory(tensors["w"], tensors["odd"])
    assert [info.copied for info in tensors.infos()] == [False, False, True]


def test_a_scan_opens_no_external_data(tmp_path: Path) -> None:
    absent = [onnx_values.reference(f"{i}/absent.bin", f"w{i}") for i in range(100)]
    tensors = scan(written(tmp_path / "m.onnx", m.model_of(*absent, numpy_helper.from_array(FLOATS, "v"))))
    assert tensors.info("w7").file == os.path.realpath(tmp_path / "7" / "absent.bin")
    assert tensors["v"].tolist() == FLOATS.tolist()
    what = r"m\.onnx: tensor 'w7': external data '7/absent\.bin': cannot be opened: No such file or directory"
    with pytest.raises(ExternalDataError, match=what):
        tensors["w7"]
    with pytest.raises(ExternalDataError, match="tensor 'w0': external data"):
        tensors.load_all()


def external_cases() -> Iterator[Any]:
    """Return the cases of `test_onnx_external`, with their options."""
    for test in (
        test_onnx_external.test_locations_that_break_a_rule_are_refused,
        test_onnx_external.test_entries_that_break_a_rule_are_refused,
        test_onnx_external.test_a_symbolic_link_out_of_the_folder_is_refused,
        test_onnx_external.test_a_link_to_a_folder_outside_is_refused,
        test_onnx_external.test_a_symbolic_link_inside_the_folder_is_refused_too,
        test_onnx_external.test_the_folder_itself_may_be_reached_through_a_link,
        test_onnx_external.test_a_file_with_several_names_is_refused,
        test_onnx_external.test_a_named_pipe_is_refused_and_does_not_hang,
        test_onnx_external.test_links_inside_one_hugging_face_repository_are_accepted,
        test_onnx_external.test_links_out_of_a_hugging_face_repository_are_refused,
        test_onnx_external.test_external_data_beside_values_is_refused,
        test_onnx_external.test_a_tensor_of_unknown_type_is_refused_for_that,
        test_onnx_external.test_strings_cannot_be_external,
        test_onnx_external.test_bools_and_packed_elements_are_made_canonical,
        test_onnx_external.test_offset_length_and_checksum_may_be_left_out_or_given,
        test_onnx_external.test_locations_are_paths_in_the_models_folder,
        test_onnx_external.test_values_are_taken_from_the_offset,
        test_onnx_external.test_an_empty_tensor_needs_no_file,
        test_onnx_external.test_entries_of_a_tensor_that_is_not_external_are_left_out,
        test_onnx_external.test_an_empty_raw_data_beside_external_data_is_no_value,
        test_onnx_external.test_tensors_in_attributes_and_subgraphs_may_be_external,
    ):
        marks = [mark.args[:2] for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
        args, values = marks[0] if marks else ("", [()])
        names = [name for name in args.replace(" ", "").split(",") if name]
        for number, value in enumerate(values):
            given = dict(zip(names, value if len(names) > 1 else [value], strict=False))
            yield pytest.param(test, given, id=f"{test.__name__}-{number}")


@pytest.mark.parametrize("test, given", list(external_cases()))
def test_the_rules_of_external_data_are_those_of_a_conversion(
    test: Any, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def both(source: Any, dest: Any, **options: Any) -> Any:
        seen.append(source)
        try:
            report = convert(source, dest, **options)
        except RecordError as error:
            for mapped in (True, False):
                with pytest.raises(type(error)) as caught:
                    scan(source, mmap=mapped, **options).load_all()
                assert str(caught.value) == str(error)
            raise
        compared(source, **options)
        return report

    monkeypatch.setattr(test_onnx_external, "convert", both)
    test(**given, tmp_path=tmp_path)
    assert seen


def test_the_end_of_a_file_that_is_mapped_already_is_heeded(tmp_path: Path) -> None:
    reference = onnx_values.reference
    tensors = scan(onnx_values.write(tmp_path / "m", reference(), reference(name="v", offset="4")))
    kept = tensors["w"]
    with pytest.raises(ExternalDataError, match=r"tensor 'v': external data 'w\.bin': bytes 4 to 28 are past its end"):
        tensors["v"]
    assert kept.tolist() == FLOATS.tolist()


def test_external_data_may_not_come_between_the_values_of_another_tensor(tmp_path: Path) -> None:
    start, rest = (m.field(4, part.tobytes()) for part in (FLOATS[:2], FLOATS[2:]))
    head = m.field(1, 6) + m.field(2, TensorProto.FLOAT)
    between = onnx_values.reference().SerializeToString()
    parts = [m.field(5, head + start), m.field(10, between), m.field(5, rest)]
    node = m.field(1, [m.field(2, b"c"), m.field(5, [m.field(1, b"value"), *parts])])
    path = onnx_values.write(tmp_path / "m")
    written(path, m.wire_model(graph=node))
    for read in (scan, lambda path: convert(path, io.BytesIO())):
        with pytest.raises(OnnxError, match="values in two places, with those of another tensor in between"):
            read(path)


def test_a_file_of_external_data_that_ends_early_is_an_error_at_access(tmp_path: Path) -> None:
    path = onnx_values.write(tmp_path / "m", onnx_values.reference(), data=bytes(23))
    tensors = scan(path)
    assert tensors.info("w").nbytes == 24
    what = r"model\.onnx: tensor 'w': external data 'w\.bin': bytes 0 to 24 are past its end \(23\); the file is trunca"
    with pytest.raises(ExternalDataError, match=what):
        tensors["w"]


def test_many_files_of_external_data_take_few_descriptors(tmp_path: Path) -> None:
    count = 400
    for i in range(count):
        np.full(6, i, "<f4").tofile(tmp_path / f"{i}.bin")
    model = m.model_of(*(onnx_values.reference(f"{i}.bin", f"w{i}") for i in range(count)))
    tensors = scan(written(tmp_path / "m.onnx", model))
    folder = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    before = len(os.listdir(folder))
    for i in range(count):
        assert tensors[f"w{i}"][0] == i
    assert len(os.listdir(folder)) - before < 80
    kept = tensors.load_all()
    assert [value[0] for value in kept.values()] == list(range(count))
    assert len(os.listdir(folder)) - before < 340
    assert not np.shares_memory(tensors[f"w{count - 1}"], kept[f"w{count - 1}"])
    assert np.shares_memory(tensors["w0"], kept["w0"])
    del kept
    tensors.close()
    assert len(os.listdir(folder)) <= before


# What is no model, or no file.


def test_a_model_that_ends_early_is_noticed_without_reading_on(tmp_path: Path) -> None:
    path = sparse_model(tmp_path / "m.onnx", 8 * MIB)
    size = path.stat().st_size
    for cut in (1, 4096, 8 * MIB - STEP):
        os.truncate(path, size - cut)
        with pytest.raises(
            OnnxError, match=r"m\.onnx: tensor 'w': byte 0x[0-9a-f]+: .* ends \d+ bytes early; the model"
        ):
            scan(path)


def test_more_elements_than_its_varints_can_hold_are_refused_at_once(tmp_path: Path) -> None:
    t = m.field(1, 1 << 40) + m.field(2, TensorProto.INT64) + m.field(8, b"w") + m.field(7, bytes(100))
    with pytest.raises(OnnxError, match=r"int64 of shape \[\d+\] takes \d+ bytes, got 1 to 800 in int64_data"):
        scan(written(tmp_path / "m.onnx", m.wire_model(t)))


def test_varints_of_an_empty_tensor_are_refused_at_once(tmp_path: Path) -> None:
    t = m.field(1, 0) + m.field(2, TensorProto.INT64) + m.field(8, b"w") + m.field(7, bytes(3))
    with pytest.raises(OnnxError, match=r"int64 of shape \[0\] takes 0 bytes, got 1 to 24 in int64_data"):
        scan(written(tmp_path / "m.onnx", m.wire_model(t)))


def test_what_only_values_tell_is_an_error_at_access(tmp_path: Path) -> None:
    count = m.field(1, 3) + m.field(2, TensorProto.INT8) + m.field(8, b"w") + m.field(5, b"\x01\x02\x03\x04")
    above = m.field(1, 1) + m.field(2, TensorProto.INT8) + m.field(8, b"v") + m.field(5, m.varint(128))
    tensors = scan(written(tmp_path / "m.onnx", m.wire_model(count, above)))
    with pytest.raises(OnnxError, match=r"m\.onnx: tensor 'w': byte 0x.*takes 3 bytes, got 4 in int32_data"):
        tensors["w"]
    with pytest.raises(OnnxError, match=r"m\.onnx: tensor 'v': byte 0x.*int32_data holds 128, out of range for int8"):
        tensors["v"]


def test_a_device_that_takes_the_models_place_after_the_look_at_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    regular = os.stat(__file__)
    monkeypatch.setattr(Path, "stat", lambda _: regular)
    with pytest.raises(SourceError, match=r"not a regular file, .* convert it instead"):
        scan(os.devnull)


def test_only_a_regular_file_can_be_scanned(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match=r"pipe: not a regular file, .* convert it instead"):
        scan(tmp_path / "pipe")
    with pytest.raises(SourceError, match="cannot read: Is a directory"):
        scan(tmp_path)
    with pytest.raises(SourceNotFoundError, match=r"no\.onnx: cannot read: No such file or directory"):
        scan(tmp_path / "no.onnx")
    with pytest.raises(UnsupportedError, match="a stream cannot be gone back in for values; name a file to scan"):
        scan(io.BytesIO())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="a NoneType is neither a path"):
        scan(None)  # type: ignore[arg-type]


def test_a_disk_that_fails_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    path = written(tmp_path / "m.onnx", m.model_of(helper.make_tensor("w", TensorProto.INT64, [1], [300])))
    tensors = scan(path)
    monkeypatch.setattr(files, "read_some", fail)
    with pytest.raises(SourceError, match=r"m\.onnx: tensor 'w': cannot read: Input/output error"):
        tensors["w"]
    with pytest.raises(SourceError, match=r"m\.onnx: cannot read: Input/output error"):
        scan(path)


def test_the_models_path_may_be_a_link(tmp_path: Path) -> None:
    written(tmp_path / "m.onnx", m.model_of(numpy_helper.from_array(FLOATS, "w")))
    (tmp_path / "link").symlink_to("m.onnx")
    tensors = scan(tmp_path / "link")
    assert tensors.info("w").file == os.path.realpath(tmp_path / "m.onnx")
    assert onnx.load(tmp_path / "link").graph.initializer[0].name in tensors
