"""Back to ONNX: the model that was converted, whole again, or small and pointing into its archive."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_exports
import onnx_models as m
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_exports import LINK, X, archive, damaged, floats, mlp, named, outputs, outside, pointing, stub, whole
from onnx_graphs import assert_same

import zcrecord
from zcrecord import errors
from zcrecord.onnx import convert, graph, session, to_onnx, verify_external
from zcrecord.onnx.protobuf.rewriting import encode_properties

# The whole model.


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
    assert sum(t.data_location == TensorProto.EXTERNAL for t in m.every_tensor(small)) == 9  # of branches, loops
    assert verify_external(tmp_path / "m.onnx", full=True).tensors == 9


def test_what_readers_want_in_the_model_goes_into_it(tmp_path: Path) -> None:
    model = m.model_of(*onnx_exports.tensors_of_every_kind())
    made = archive(model, tmp_path / "m.zcr")
    assert whole(made) == pointing(made, tmp_path / "m.onnx") == m.normal(model)
    references, record = outside(tmp_path / "m.onnx"), zcrecord.load_record(made)
    assert set(references) == {"least", "packed", "floats", "bools"}
    for name, entries in references.items():
        info = record.info(name)
        assert entries == {"location": "m.zcr", "offset": str(info.offset), "length": str(info.nbytes)}


def test_a_source_may_be_a_path_bytes_or_a_record(tmp_path: Path) -> None:
    model = mlp()
    made = archive(model, tmp_path / "m.zcr")
    data = made.read_bytes()
    copied = zcrecord.load_record(made, mode="c")
    for source in (made, str(made), data, bytearray(data), zcrecord.load_record(made), copied):
        assert whole(source) == model
    copied["a.w"][0, 0] = 7
    assert numpy_helper.to_array(whole(copied).graph.initializer[0])[0, 0] == 7


# Records that were changed.


def edited(path: Path, change: Callable[[Any], None]) -> Path:
    """The record at a path, loaded as a tree, changed and saved beside it."""
    tree = zcrecord.load_record(path).tree()
    change(tree)
    dest = path.with_name("edited.zcr")
    zcrecord.save_record(tree, dest)
    return dest


def test_a_tree_that_is_changed_and_saved_gives_its_model_though_its_order_is_another(tmp_path: Path) -> None:
    model, new = mlp(), floats(64, 64, seed=77)

    def change(tree: Any) -> None:
        tree["b"]["w"] = new
        tree["more"] = np.ones(5)  # which the model knows nothing of

    made = archive(model, tmp_path / "m.zcr")
    again = edited(made, change)
    names = [zcrecord.load_record(path).names for path in (made, again)]
    assert names[0] != tuple(name for name in names[1] if name != "more")
    model.graph.initializer[1].raw_data = new.tobytes()
    assert whole(again) == pointing(again, tmp_path / "m.onnx") == model
    assert_same(outputs(tmp_path / "m.onnx", X), outputs(model, X))
    assert_same(session(again, memory="speed").run(None, X), outputs(model, X))


def test_a_tensor_that_is_not_in_c_order_is_packed_into_the_model(tmp_path: Path) -> None:
    model = mlp()

    def change(tree: Any) -> None:
        tree["a"]["w"] = np.asfortranarray(tree["a"]["w"])

    made = edited(archive(model, tmp_path / "m.zcr"), change)
    assert zcrecord.load_record(made).info("a.w").strides == (1, 64)
    assert whole(made) == pointing(made, tmp_path / "m.onnx") == model
    assert set(outside(tmp_path / "m.onnx")) == {"b.w", "a.b", ""}  # "": of the Constant node
    assert to_onnx(made, tmp_path / "m.onnx", external=True, force=True).repeated_bytes == 64 * 64 * 4
    assert_same(outputs(tmp_path / "m.onnx", X), outputs(model, X))
    assert verify_external(tmp_path / "m.onnx", full=True).tensors == 3


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


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
def test_no_more_than_a_few_mib_are_held_and_the_measurement_would_notice(tmp_path: Path) -> None:
    """Of a matrix, in C order or not, and many strings."""
    strings = helper.make_tensor("names", TensorProto.STRING, [100_000], [b"x" * (i % 200) for i in range(100_000)])
    matrix = numpy_helper.from_array(np.ones((1024, SIZE // 4096), "f4"), "w")
    made, dest = archive(m.model_of(matrix, strings), tmp_path / "m.zcr"), tmp_path / "m.onnx"
    strided = edited(made, lambda tree: tree.update(w=np.asfortranarray(tree["w"])))
    setup = "from zcrecord.onnx import graph, to_onnx, verify_external\nimport zcrecord"

    def exported(source: Path, external: bool) -> int:
        options = f"external={external}, durable=False, force=True"
        return m.peak_growth(setup, f"to_onnx({str(source)!r}, {str(dest)!r}, {options})")

    held = f"b''.join(graph.restore(zcrecord.load_record({str(made)!r})).parts)"
    assert m.peak_growth(setup, held) > SIZE
    assert exported(made, False) < 32 << 20
    assert exported(strided, False) < 64 << 20
    assert dest.stat().st_size > SIZE
    assert exported(made, True) < 32 << 20
    assert m.peak_growth(setup, f"verify_external({str(dest)!r}, full=True)") < 32 << 20
