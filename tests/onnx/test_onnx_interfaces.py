"""A tuned graph has the inputs and outputs of its model; where ONNX Runtime gives others, the model answers.

Models of IR version 3 list their constants among the inputs, and ONNX Runtime leaves an input there whose constant it
removes, or joins with an equal one. All numbers here are small whole ones, so that every way to add them is exact.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models as m
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import archive_of, converted_in, plain, value

import zcrecord
from zcrecord.cli.dispatch import main
from zcrecord.errors import FormatError, IntegrityError, OnnxError, UnsupportedError
from zcrecord.onnx import runtime, session, to_onnx, tune, tuned_graph, tuning, verify_external
from zcrecord.onnx.protobuf.interfaces import difference, interface_of, without_constant_inputs
from zcrecord.onnx.tuned import Interfaces, read_tuned

FLOAT = TensorProto.FLOAT
X = {"x": np.arange(8, dtype=np.float32).reshape(1, 8)}


def one(number: float) -> np.ndarray:
    return np.full(1, number, np.float32)


def scaled(version: int, *, listed: bool = True) -> onnx.ModelProto:
    """Matrices and factors, two of each equal, and one that nothing uses; `listed` makes all of them inputs, too."""
    matrix = (np.arange(64, dtype=np.float32) % 5).reshape(8, 8)
    given = {"w1": matrix, "w2": matrix, "s1": one(2), "s2": one(2), "unused": one(3)}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["t"]), helper.make_node("Mul", ["t", "s1"], ["u"]),
        helper.make_node("MatMul", ["u", "w2"], ["v"]), helper.make_node("Mul", ["v", "s2"], ["y"]),
    ]  # fmt: skip
    inputs = [value("x", 1, 8), *(value(name, *array.shape) for name, array in given.items() if listed)]
    initial = [numpy_helper.from_array(array, name) for name, array in given.items()]
    return model(nodes, inputs, [value("y", 1, 8)], initial, opset=9, version=version)


def model(nodes: Any, inputs: Any, outputs: Any, initial: Any = (), *, opset: int = 14, version: int = 8) -> Any:
    graph = helper.make_graph(nodes, "m", inputs, outputs, list(initial))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=version)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return converted_in(tmp_path, scaled(3))


@pytest.fixture
def tuned_before(archive: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive as earlier versions tuned it: constants were left among the inputs, and nothing was compared."""
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "without_constant_inputs", bytes)
        patch.setattr(tuned_graph, "difference", lambda *_: None)
        tune(archive)
    return archive


def interface(made: Any) -> list[list[Any]]:
    every = made.get_inputs(), made.get_outputs(), made.get_overridable_initializers()
    return [[(v.name, v.type, v.shape) for v in values] for values in every]


# Tuning.


def test_a_model_whose_constants_are_inputs_is_tuned_without_them(archive: Path) -> None:
    original, before = plain(archive.with_name("model.onnx")), archive.read_bytes()
    assert tune(archive, verify=True).verified
    made = session(archive)
    assert tuning(made).used
    assert interface(made) == [[("x", "tensor(float)", [1, 8])], [("y", "tensor(float)", [1, 8])], []]
    assert interface(made) == interface(original)
    np.testing.assert_array_equal(made.run(None, X)[0], original.run(None, X)[0])
    to_onnx(archive, archive.with_name("again.onnx"))
    assert archive.with_name("again.onnx").read_bytes() == archive.with_name("model.onnx").read_bytes()
    zcrecord.onnx.untune(archive)
    assert archive.read_bytes() == before


def test_a_default_that_a_caller_may_override_is_one_of_the_tuned_graph(tmp_path: Path) -> None:
    archive = converted_in(tmp_path, scaled(4))
    assert tune(archive, verify=True).verified
    made, original = session(archive), plain(tmp_path / "model.onnx")
    assert tuning(made).used and interface(made) == interface(original)
    assert [v.name for v in made.get_overridable_initializers()] == ["w1", "w2", "s1", "s2", "unused"]
    answers = set()
    for more in ({}, {"w1": np.eye(8, dtype=np.float32)}, {"s2": one(7)}, {"unused": one(1)}):
        ours, theirs = (each.run(None, X | more)[0] for each in (made, original))
        np.testing.assert_array_equal(ours, theirs)
        answers.add(ours.tobytes())
    assert len(answers) == 3


def test_a_graph_of_other_inputs_is_refused_and_the_archive_stays(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "without_constant_inputs", bytes)
    before = archive.read_bytes()
    what = r"model\.zcr: cannot be tuned: ONNX Runtime's optimised graph has the input 's1', unlike the model"
    with pytest.raises(UnsupportedError, match=what):
        tune(archive)
    assert archive.read_bytes() == before and not list(archive.parent.glob(".*"))


# Archives that earlier versions tuned.


def test_a_session_of_an_archive_tuned_before_has_the_model_answer_and_says_why(tuned_before: Path) -> None:
    made, original = session(tuned_before), plain(tuned_before.with_name("model.onnx"))
    found = tuning(made)
    assert not found.used and tuning(tuned_before) == found
    what = "its tuned graph has the input 's1', unlike the model; tune it again"
    assert found.reason == what
    with zcrecord.load_record(tuned_before) as record:
        interfaces, part = Interfaces(record.archive), read_tuned(record.archive)
        assert part is not None
        for _ in range(2):  # a target that failed fails again
            with pytest.raises(FormatError, match=what):
                interfaces.check_target(part.targets[0])
    np.testing.assert_array_equal(made.run(None, X)[0], original.run(None, X)[0])
    tune(tuned_before)
    assert tuning(tuned_before).used


def test_it_is_not_exported(tuned_before: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = tuned_before.with_name("small.onnx")
    with caplog.at_level(logging.WARNING, "zcrecord"):
        to_onnx(tuned_before, small, external=True)
    assert "the original graph is written, not the tuned one: its tuned graph has the input" in caplog.text
    ours, theirs = plain(small), plain(tuned_before.with_name("model.onnx"))
    np.testing.assert_array_equal(ours.run(None, X)[0], theirs.run(None, X)[0])
    with pytest.raises(UnsupportedError, match="no tuned graph to write: its tuned graph has the input"):
        to_onnx(tuned_before, small, external=True, tuned=True, force=True)


def test_the_command_verify_finds_it(tuned_before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tuned_before), "--level", "index"]) == 0
    assert main(["verify", str(tuned_before)]) == 1
    assert "its tuned graph has the input" in capsys.readouterr().err
    tune(tuned_before)
    assert main(["verify", str(tuned_before)]) == 0


def test_a_small_model_that_was_written_of_it_is_found(tuned_before: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuned_before.with_name("small.onnx")
    with monkeypatch.context() as patch:
        patch.setattr(Interfaces, "check_target", lambda *_: None)
        to_onnx(tuned_before, small, external=True)
    what = r"small\.onnx: it has the input 's1', unlike the model in '.*model\.zcr'; export the model again"
    with pytest.raises(IntegrityError, match=what):
        verify_external(small)
    assert main(["verify", str(small)]) == 1


# Answers compared.


def test_answers_that_differ_are_found_before_the_archive_is_replaced(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime optimises a model of the same inputs and outputs, with other answers."""
    before, changed = archive.read_bytes(), scaled(3)
    changed.graph.node[1].op_type = "Add"
    record, real = zcrecord.load_record(archive_of(changed)), runtime.optimise
    monkeypatch.setattr(tuned_graph, "optimise", lambda _, *more: real(record, *more))
    what = r"model\.zcr: cannot be tuned: the tuned graph gives other values of .*'y'"
    with pytest.raises(UnsupportedError, match=what):
        tune(archive, verify=True)
    assert archive.read_bytes() == before and not list(archive.parent.glob(".*"))
    assert not tune(archive).verified
    assert tuning(archive).used, "nothing but the answers tells"


def test_random_numbers_are_not_compared(tmp_path: Path) -> None:
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["r"]), helper.make_node("Relu", ["x"], ["y"])]
    made = model(nodes, [value("x", "n", 3)], [value("y", "n", 3), value("r", "n", 3)])
    assert tune(converted_in(tmp_path, made), verify=True).verified


@pytest.mark.parametrize("what", ["shape", "type"])
def test_a_model_that_runs_on_no_generated_inputs_is_logged(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "shape":
        node, initial = helper.make_node("Reshape", ["x", "s"], ["y"]), numpy_helper.from_array(np.array([7, 11]), "s")
        made = model([node], [value("x", "n")], [value("y", 7, 11)], [initial])
        told = "the model runs on no inputs generated for it: .*Reshape"
    else:
        listed = helper.make_tensor_sequence_value_info("x", FLOAT, None)
        node = helper.make_node("SequenceLength", ["x"], ["y"])
        made = model([node], [listed], [value("y", kind=TensorProto.INT64)])
        told = r"no input of type seq\(tensor\(float\)\)"
    archive = converted_in(tmp_path, made)
    with caplog.at_level(logging.WARNING, "zcrecord"):
        assert not tune(archive, verify=True).verified
    assert re.search(rf"model\.zcr: the tuned graph's answers are not compared: .*{told}", caplog.text, re.DOTALL)
    assert tuning(tmp_path / "model.zcr").used


# Reading.


def test_constants_come_off_the_inputs_and_nothing_else_changes() -> None:
    original = scaled(3)
    data = original.SerializeToString() + m.field(99, b"unknown") + b"\x83\x01\x84\x01"  # and a group
    found = onnx.ModelProto.FromString(without_constant_inputs(data))
    assert [v.name for v in found.graph.input] == ["x"] and found.ir_version == 4
    for kept in (original, found):
        kept.ClearField("ir_version")
        del kept.graph.input[:]
        kept.DiscardUnknownFields()
    assert found == original
    later = scaled(4).SerializeToString()
    assert without_constant_inputs(later) == later


def test_a_graph_in_several_pieces_is_read_as_one() -> None:
    """As protobuf joins them; names that come later count, and sparse initializers."""
    sparse = m.field(15, m.field(1, m.field(8, b"s")))
    graph = [m.field(11, m.field(1, b"s")), m.field(11, m.field(1, b"no") + m.field(1, b"x")), sparse]
    data = m.field(1, 3) + b"".join(m.field(7, piece) for piece in graph)
    assert [name for name, _ in interface_of(data).required()] == ["x"]
    kept = onnx.ModelProto.FromString(without_constant_inputs(data))
    assert [v.name for v in kept.graph.input] == ["x"]


TYPES = {
    "tensor": helper.make_tensor_type_proto(FLOAT, ["n", 4]),
    "sequence": helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, ["n", 4])),
    "optional": helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, ["n", 4])),
    "map": helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(FLOAT, ["n", 4])),
    "sparse": helper.make_sparse_tensor_type_proto(FLOAT, ["n", 4]),
}
CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "another element type": (lambda tensor: setattr(tensor, "elem_type", TensorProto.DOUBLE), False),
    "another size": (lambda tensor: setattr(tensor.shape.dim[1], "dim_value", 5), False),
    "another rank": (lambda tensor: tensor.shape.dim.add(), False),
    "a size of an open dimension": (lambda tensor: setattr(tensor.shape.dim[0], "dim_value", 5), True),
    "another name of an open dimension": (lambda tensor: setattr(tensor.shape.dim[0], "dim_param", "m"), True),
    "no shape": (lambda tensor: tensor.ClearField("shape"), False),
    "a denotation": (lambda tensor: setattr(tensor.shape.dim[0], "denotation", "BATCH"), True),
}


@pytest.mark.parametrize("kind", TYPES)
def test_types_and_shapes_are_compared_and_an_output_may_be_told_more_exactly(kind: str) -> None:
    def of(change: Callable[[Any], Any], where: str) -> Any:
        made = onnx.TypeProto.FromString(TYPES[kind].SerializeToString())
        inner = made
        while not hasattr(inner, "shape"):
            inner = getattr(inner, inner.WhichOneof("value")) if isinstance(inner, onnx.TypeProto) else (
                inner.value_type if hasattr(inner, "value_type") else inner.elem_type
            )  # fmt: skip
        change(inner)
        graph = onnx.GraphProto(name="g")
        getattr(graph, where).add(name="v", doc_string="about").type.CopyFrom(made)
        return interface_of(onnx.ModelProto(ir_version=8, graph=graph).SerializeToString())

    for where in ("input", "output"):
        same = of(lambda _: None, where)
        assert difference(same, of(lambda _: None, where)) is None
        for name, (change, more) in CHANGES.items():
            found = difference(same, of(change, where))
            told = None if more and where == "output" else f"has the {where} 'v' with another type or shape"
            assert found == told, name
    open_shape = of(lambda tensor: tensor.ClearField("shape"), "output")
    assert difference(open_shape, same) is None
    unnamed = of(lambda tensor: tensor.shape.dim[0].Clear(), "input")
    assert difference(unnamed, of(lambda tensor: setattr(tensor.shape.dim[0], "dim_value", -1), "input")) is None


def test_what_differs_is_told_in_a_few_words() -> None:
    def of(inputs: str, outputs: str, initial: str = "", version: int = 8) -> Any:
        graph = onnx.GraphProto(name="g")
        for where, names in ((graph.input, inputs), (graph.output, outputs), (graph.initializer, initial)):
            for name in names.split():
                where.add(name=name)
        return interface_of(onnx.ModelProto(ir_version=version, graph=graph).SerializeToString())

    model = of("a b d", "y z", "d e")
    told = {
        "has the input 'c\\n'": of("a b d", "y z", "d").__class__(8, [("a", b""), ("b", b""), ("c\n", b"")], [], set()),
        "lacks the input 'b'": of("a d", "y z", "d"),
        "has the inputs in another order": of("b a d", "y z", "d"),
        "lacks the output 'y' and 1 more": of("a b d", "", "d"),
        "has the outputs in another order": of("a b d", "z y", "d"),
        "has the input with a default 'e'": of("a b d e", "y z", "d e"),
        "lacks the input with a default 'd'": of("a b d", "y z", "d", version=3),
    }
    assert {words: difference(model, other) for words, other in told.items()} == {words: words for words in told}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x3a\x05\x5a", "reaches past the end|ends inside a field"),
        (m.field(7, m.field(11, b"\x0a\x7f")), "reaches past the end of the message"),
        (m.field(7, m.field(11, m.field(1, b"x" * 70_000))), "a name of 70000 bytes"),
    ],
)
def test_a_malformed_model_is_one_error(data: bytes, message: str) -> None:
    with pytest.raises(OnnxError, match=message):
        interface_of(data)


def test_a_type_that_is_nested_without_end_is_one_error() -> None:
    deep = b""
    for _ in range(500):
        deep = m.field(4, m.field(1, deep))
    with pytest.raises(OnnxError, match="messages nested more than 100 deep"):
        difference(*(interface_of(m.field(7, m.field(11, m.field(2, each)))) for each in (deep, b"")))
