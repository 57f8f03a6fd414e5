"""Back to ONNX: the model that was converted, whole again, or small and pointing into its archive."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_exports
import onnx_models as m
import pytest
from exhaustive import some
from onnx import TensorProto, helper, numpy_helper
from onnx_exports import LINK, X, archive, damaged, floats, mlp, named, outputs, outside, pointing, stub, whole
from onnx_graphs import assert_same

import zcrecord
from zcrecord import errors
from zcrecord.onnx import convert, graph, session, to_onnx, verify_external
from zcrecord.onnx.protobuf.rewriting import encode_properties

# The whole model.


@pytest.mark.exhaustive(keep=40)
@pytest.mark.parametrize("path", m.packaged_models(), ids=lambda path: path.parent.name + "/" + path.stem)
def test_the_packaged_models_come_back_both_ways(path: Path, tmp_path: Path) -> None:
    model = onnx.load(path)
    made = archive(model, tmp_path / "m.zcr")
    assert whole(made) == pointing(made, tmp_path / "m.onnx") == m.normal(model)
    verify_external(tmp_path / "m.onnx", full=True)


def test_a_tensor_in_every_place_comes_back_both_ways(tmp_path: Path) -> None:
    made = archive(m.rich_model(), tmp_path / "m.zcr")
    assert whole(made) == pointing(made, tmp_path / "m.onnx") == m.rich_model()


def test_initializers_of_the_graph_and_of_graphs_in_it_stay_outside_all_others_come_in(tmp_path: Path) -> None:
    model = m.rich_model()
    for seed, t in enumerate(m.every_tensor(model)):
        if t.data_type == TensorProto.FLOAT and len(t.dims) == 1 and t.dims[0] > 1:
            t.CopyFrom(numpy_helper.from_array(floats(80, seed=seed), t.name))
    function_body = helper.make_graph([], "f", [], [], [numpy_helper.from_array(floats(80), "in_function")])
    model.functions[0].node.append(helper.make_node("If", ["x"], ["y"], name="if", then_branch=function_body))
    made = archive(model, tmp_path / "m.zcr")
    assert whole(made) == pointing(made, tmp_path / "m.onnx") == m.normal(model)
    small = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for inside in (small.training_info[0], small.functions[0], small.graph.sparse_initializer[0]):
        assert {t.data_location for t in m.every_tensor(inside)} == {TensorProto.DEFAULT}
    assert sum(t.data_location == TensorProto.EXTERNAL for t in m.every_tensor(small)) == 8  # of branches, loops
    assert verify_external(tmp_path / "m.onnx", full=True).tensors == 8


def test_what_readers_want_in_the_model_goes_into_it(tmp_path: Path) -> None:
    model = m.model_of(*onnx_exports.tensors_of_every_kind())
    made = archive(model, tmp_path / "m.zcr")
    assert whole(made) == pointing(made, tmp_path / "m.onnx") == m.normal(model)
    references, record = outside(tmp_path / "m.onnx"), zcrecord.load_record(made)
    assert set(references) == {"least", "packed", "floats", "bools"}
    for name, entries in references.items():
        info = record.info(name)
        assert entries == {"location": "m.zcr", "offset": str(info.offset), "length": str(info.nbytes)}


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    model = mlp(again=floats(64, 64, seed=1))  # equals a.w
    made = archive(model, tmp_path / "m.zcr")
    report = to_onnx(made, tmp_path / "w.onnx")
    assert (report.source, report.dest) == (str(made), str(tmp_path / "w.onnx"))
    assert (report.tensors, report.modules, report.renamed) == (6, 4, 0)
    assert report.archive_bytes == (tmp_path / "w.onnx").stat().st_size
    assert report.input_bytes == made.stat().st_size
    assert report.payload_bytes == sum(a.nbytes for a in zcrecord.load_record(made).values())
    assert report.repeated_bytes == 64 * 64 * 4
    assert report.seconds > 0
    report = to_onnx(made, tmp_path / "e.onnx", external=True)
    assert report.payload_bytes == 64 * 4 + 4  # the Constant and the scalar
    assert report.repeated_bytes == 0
    assert report.archive_bytes == (tmp_path / "e.onnx").stat().st_size < 2500


def test_a_source_may_be_a_path_bytes_or_a_record(tmp_path: Path) -> None:
    model = mlp()
    made = archive(model, tmp_path / "m.zcr")
    data = made.read_bytes()
    copied = zcrecord.load_record(made, mode="c")
    for source in (made, str(made), data, bytearray(data), zcrecord.load_record(made), copied):
        assert whole(source) == model
    copied["a.w"][0, 0] = 7
    assert numpy_helper.to_array(whole(copied).graph.initializer[0])[0, 0] == 7


def test_a_model_goes_into_a_pipe(tmp_path: Path) -> None:
    tensors = numpy_helper.from_array(np.arange(1_000_000), "w"), helper.make_tensor("t", 7, [3], [1, -1, 300])
    model = m.model_of(*tensors)
    drain, end = os.pipe()
    with ThreadPoolExecutor(1) as pool, open(drain, "rb") as source:
        data = pool.submit(source.read)
        with open(end, "wb", buffering=0) as dest:
            assert to_onnx(archive(model, tmp_path / "m.zcr"), dest).dest is None
        assert onnx.ModelProto.FromString(data.result()) == m.normal(model)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    made = archive(m.model_of(numpy_helper.from_array(np.arange(1_000_000), "w")), tmp_path / "m.zcr")
    seen: list[tuple[int, int | None]] = []
    for external in (False, True):
        seen.clear()
        dest = tmp_path / f"{external}.onnx"
        report = to_onnx(made, dest, external=external, progress=lambda *told: seen.append(told))
        assert len(seen) > 2
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1] == (report.archive_bytes + external * 8_000_000,) * 2


def test_the_same_archive_gives_the_same_bytes(tmp_path: Path) -> None:
    made = archive(m.rich_model(), tmp_path / "m.zcr")
    first, second = io.BytesIO(), io.BytesIO()
    to_onnx(made, first)
    to_onnx(made.read_bytes(), second)
    assert first.getvalue() == second.getvalue()
    for name in "ab":
        to_onnx(made, tmp_path / name, external=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# Records that were changed.


def edited(path: Path, change: Callable[[Any], None]) -> Path:
    """The record at a path, loaded as a tree, changed and saved beside it."""
    tree = zcrecord.load_record(path).tree()
    change(tree)
    dest = path.with_name("edited.zcr")
    zcrecord.save_record(tree, dest)
    return dest


def test_a_tree_that_is_saved_again_gives_the_same_model_though_its_order_is_another(tmp_path: Path) -> None:
    model = mlp()
    made = archive(model, tmp_path / "m.zcr")
    again = edited(made, lambda tree: None)
    names = [zcrecord.load_record(path).names for path in (made, again)]
    assert names[0] != names[1]
    assert whole(again) == pointing(again, tmp_path / "m.onnx") == model
    assert_same(outputs(tmp_path / "m.onnx", X), outputs(model, X))
    assert_same(session(again, memory="speed").run(None, X), outputs(model, X))


def test_a_tensor_that_was_replaced_is_in_the_model(tmp_path: Path) -> None:
    model = mlp()
    new = floats(64, 64, seed=77)

    def change(tree: Any) -> None:
        tree["b"]["w"] = new
        tree["more"] = np.ones(5)  # which the model knows nothing of

    made = edited(archive(model, tmp_path / "m.zcr"), change)
    model.graph.initializer[1].raw_data = new.tobytes()
    assert whole(made) == pointing(made, tmp_path / "m.onnx") == model
    assert_same(outputs(tmp_path / "m.onnx", X), outputs(model, X))


def test_a_tensor_that_is_not_in_c_order_is_packed_into_the_model(tmp_path: Path) -> None:
    model = mlp()

    def change(tree: Any) -> None:
        tree["a"]["w"] = np.asfortranarray(tree["a"]["w"])

    made = edited(archive(model, tmp_path / "m.zcr"), change)
    assert zcrecord.load_record(made).info("a.w").strides == (1, 64)
    assert whole(made) == pointing(made, tmp_path / "m.onnx") == model
    assert set(outside(tmp_path / "m.onnx")) == {"b.w", "a.b"}
    assert to_onnx(made, tmp_path / "m.onnx", external=True, force=True).repeated_bytes == 64 * 64 * 4
    assert_same(outputs(tmp_path / "m.onnx", X), outputs(model, X))
    assert verify_external(tmp_path / "m.onnx", full=True).tensors == 2


@pytest.mark.parametrize("value, message", [
    (np.ones((64, 64)), r"tensor 'a\.w': attribute 'onnx\.graph': the skeleton has data_type 1 and shape \[64, 64\], "
                        r"the archive float64 and \[64, 64\]"),
    (np.ones((64, 65), "f4"), r"the archive float32 and \[64, 65\]"),
    (None, r"tensor 'a\.w': attribute 'onnx\.graph': the model has a tensor of this name, the archive does not; save "
           "the record with all it had"),
])  # fmt: skip
def test_a_tensor_of_another_type_or_shape_or_none_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    def change(tree: Any) -> None:
        tree["more"] = np.ones(5)
        if value is None:
            del tree["a"]["w"]
        else:
            tree["a"]["w"] = value

    made = edited(archive(mlp(), tmp_path / "m.zcr"), change)
    for external in (False, True):
        with pytest.raises(errors.FormatError, match=message):
            to_onnx(made, tmp_path / "m.onnx", external=external)
    assert not (tmp_path / "m.onnx").exists()


def test_a_closed_record_is_refused(tmp_path: Path) -> None:
    record = zcrecord.load_record(archive(mlp(), tmp_path / "m.zcr"))
    record.close()
    with pytest.raises(errors.UnsupportedError, match="the record is closed"):
        to_onnx(record, io.BytesIO())


BARE = m.field(1, 64) + m.field(2, TensorProto.FLOAT) + m.field(8, b"w")  # a tensor without a stub


@pytest.mark.parametrize("skeleton, kind, message", [
    (m.wire_model(stub("1")), errors.FormatError, "its stub says '1', not the number of one of 1 tensors"),
    (m.wire_model(stub("x")), errors.FormatError, "its stub says 'x'"),
    (m.wire_model(stub("0"), stub("0")), errors.FormatError, "its stub says '0'"),
    (m.wire_model(BARE), errors.FormatError, "its stub says ''"),
    (m.wire_model(BARE + m.field(9, bytes(256))), errors.FormatError, "of its own"),
    (m.wire_model(stub("0", more=m.field(9, bytes(256)))), errors.FormatError, "of its own"),
    (m.wire_model(stub("0", dims=(65,))), errors.FormatError, r"the skeleton has data_type 1 and shape \[65\], the ar"),
    (m.wire_model(stub("0", more=m.field(2, 99))), errors.FormatError, "its data_type 99 is not known here; upgrade z"),
    (m.wire_model(stub("0", b"v")), errors.FormatError, "tensor 'v': .*the archive does not"),
    (m.wire_model(stub("0", b"")), errors.OnnxError, "an initializer has no name"),
    (m.wire_model(stub("0")) + b"\x72\x7f", errors.OnnxError, "reaches past the end|ends 127 bytes early"),
    (b"\x3a\x7f", errors.OnnxError, "field 7 reaches past the end|the stream ends inside a field"),
    (b"", errors.OnnxError, "no graph"),
])  # fmt: skip
def test_a_hostile_skeleton_is_one_typed_error(skeleton: bytes, kind: type, message: str, tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.ones(64, "f4"), "onnx.graph": skeleton}, tmp_path / "m.zcr")
    for external in (False, True):
        with pytest.raises(kind, match=message) as caught:
            to_onnx(tmp_path / "m.zcr", tmp_path / "m.onnx", external=external)
        assert str(caught.value).startswith(str(tmp_path / "m.zcr"))
    with pytest.raises(kind, match=message):
        session(tmp_path / "m.zcr")
    assert os.listdir(tmp_path) == ["m.zcr"]


@pytest.mark.slow
def test_a_skeleton_cut_off_or_changed_anywhere_gives_a_model_or_a_typed_error(tmp_path: Path) -> None:
    record = m.converted(named(notes=10))
    skeleton = bytes(graph.skeleton_of(record))
    tensors = {name: record[name] for name in record}
    worked = 0
    for i in range(len(skeleton)):
        flipped = skeleton[:i] + bytes([skeleton[i] ^ 0x81]) + skeleton[i + 1 :]
        for data in (skeleton[:i], flipped):
            out = io.BytesIO()
            zcrecord.save_record({**tensors, "onnx.graph": data}, out)
            with contextlib.suppress(errors.RecordError):
                to_onnx(out.getvalue(), io.BytesIO())
                worked += 1
    assert 0 < worked < 2 * len(skeleton)


@pytest.mark.parametrize("pair", [b"\x0a\x7f", b"\x33\x3a\x8d\x00", b"\x80", b"\x0a\x01k\x12\x7fv"])
def test_a_pair_that_is_malformed_in_itself_comes_back_as_it_was(pair: bytes, tmp_path: Path) -> None:
    ours = encode_properties(LINK)
    around = named(notes=10).SerializeToString() + m.field(14, pair) + ours + encode_properties({"after": "it"})
    convert(io.BytesIO(around), tmp_path / "m.zcr")
    to_onnx(tmp_path / "m.zcr", tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == around.replace(ours, b"")


# The whole of it, or nothing.


def test_an_existing_file_is_replaced_only_on_request_and_the_archive_never(tmp_path: Path) -> None:
    made, dest = archive(mlp(), tmp_path / "m.zcr"), tmp_path / "m.onnx"
    dest.write_bytes(b"precious")
    for external in (False, True):
        with pytest.raises(errors.DestinationExistsError, match=r"m\.onnx: exists already; force=True replaces it"):
            to_onnx(made, dest, external=external)
        assert dest.read_bytes() == b"precious"
    to_onnx(made, dest, force=True)
    assert onnx.load(dest) == mlp()
    (tmp_path / "link").symlink_to(made)
    for source in (made, zcrecord.load_record(made)):
        for dest in (made, tmp_path / "link"):
            with pytest.raises(errors.DestinationExistsError, match="source and destination are the same file"):
                to_onnx(source, dest, force=True)


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("name", ["b.w", "scale", "names"])
def test_a_damaged_payload_is_named_and_nothing_is_left(name: str, external: bool, tmp_path: Path) -> None:
    model = mlp(scale=np.full(10, 0.5, "f4"))
    model.graph.initializer.append(helper.make_tensor("names", TensorProto.STRING, [9], [b"some text"] * 9))
    made, dest = archive(model, tmp_path / "m.zcr"), tmp_path / "m.onnx"
    dest.write_bytes(b"precious")
    damaged(made, name)
    with pytest.raises(errors.IntegrityError, match=rf"m\.zcr: tensor '{name}': its payload's digest does not match"):
        to_onnx(made, dest, external=external, force=True)
    assert dest.read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.zcr"]


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("raised", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_the_old_file_and_no_scratch(
    external: bool, raised: BaseException, tmp_path: Path
) -> None:
    model = mlp(more=floats(600, 600))
    made, dest = archive(model, tmp_path / "m.zcr"), tmp_path / "m.onnx"
    dest.write_bytes(b"precious")
    total = to_onnx(made, tmp_path / "other", external=external).archive_bytes

    def stop(done: int, of: int | None) -> None:
        if of is not None and done > of - total:  # writing has begun
            raise raised

    with pytest.raises(type(raised)):
        to_onnx(made, dest, external=external, force=True, progress=stop)
    assert dest.read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.zcr", "other"]


def test_a_full_disk_is_one_typed_error(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("platform: no /dev/full")
    with pytest.raises(errors.SourceError, match=r"/dev/full: .*No space left on device"):
        to_onnx(archive(mlp(), tmp_path / "m.zcr"), "/dev/full")


def test_more_than_protobuf_holds_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, dest = archive(mlp(), tmp_path / "m.zcr"), tmp_path / "m.onnx"
    size = to_onnx(made, dest).archive_bytes
    monkeypatch.setattr(graph, "MAX_LENGTH", size - 1)
    what = rf"{size} bytes in one model, and protobuf holds at most {size - 1}; external=True leaves"
    out = io.BytesIO()
    with pytest.raises(errors.LimitError, match=what):
        to_onnx(made, out)
    assert out.getvalue() == b""
    with pytest.raises(errors.LimitError, match=what):
        to_onnx(made, dest, force=True)
    assert dest.stat().st_size == size
    to_onnx(made, dest, force=True, external=True)
    monkeypatch.setattr(graph, "MAX_LENGTH", 100)
    with pytest.raises(errors.LimitError, match=r"save the record again with np\.ascontiguousarray of its arrays"):
        to_onnx(made, dest, force=True, external=True)


# Memory.

SIZE = 128 << 20


@pytest.fixture(scope="module")
def large_archive(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An archive of one matrix in C order, one that is not, small tensors, and many strings."""
    folder = tmp_path_factory.mktemp("large")
    tensors = [numpy_helper.from_array(np.full(100, i, np.uint16), f"small{i}") for i in range(500)]
    tensors.append(numpy_helper.from_array(np.ones((1024, SIZE // 4096), "f4"), "w"))
    strings = [b"x" * (i % 200) for i in range(100_000)]
    tensors.append(helper.make_tensor("names", TensorProto.STRING, [100_000], strings))
    made = archive(m.model_of(*tensors), folder / "m.zcr")
    strided = edited(made, lambda tree: tree.update(w=np.asfortranarray(tree["w"])))
    yield made, strided
    shutil.rmtree(folder)


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("external", [False, True])
def test_no_more_than_a_few_mib_are_held_and_the_measurement_would_notice(external: bool, large_archive: Any) -> None:
    made = large_archive[0]
    dest = made.with_name("m.onnx")
    setup = "from zcrecord.onnx import to_onnx, graph\nimport zcrecord, io"
    if not external:
        all_of_it = f"b''.join(graph.restore(zcrecord.load_record({str(made)!r})).parts)"
        assert m.peak_growth(setup, all_of_it) > SIZE
    work = f"to_onnx({str(made)!r}, {str(dest)!r}, external={external}, durable=False)"
    assert m.peak_growth(setup, work) < 32 << 20
    assert (dest.stat().st_size > SIZE) is not external
    if not external:
        assert m.peak_growth("import onnx", f"onnx.save(onnx.load({str(dest)!r}), {str(dest)!r})") > SIZE
    else:
        work = f"verify_external({str(dest)!r}, full=True)"
        assert m.peak_growth("from zcrecord.onnx import verify_external", work) < 32 << 20
    dest.unlink()


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
def test_what_is_not_in_c_order_is_packed_a_part_at_a_time(large_archive: Any) -> None:
    strided = large_archive[1]
    dest = strided.with_name("s.onnx")
    setup = "from zcrecord.onnx import to_onnx"
    for external in some((False, True), 1):
        work = f"to_onnx({str(strided)!r}, {str(dest)!r}, external={external}, durable=False, force=True)"
        assert m.peak_growth(setup, work) < 64 << 20
        assert dest.stat().st_size > SIZE
    dest.unlink()
