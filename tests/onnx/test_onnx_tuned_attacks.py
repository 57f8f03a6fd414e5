"""A tuned archive that was tampered with answers right, by its tuned part or the original graph, or is refused.

No archive ends the process, or has another file read, or an address. Sessions are made and run in another process, in
a folder with a file that must not be read. Which version of ONNX Runtime notices what is told in SECURITY.md.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_models as m
import onnxruntime as ort
import pytest
from forge import END, Forge, build_index, end_bytes, read_index
from guides import ROOT
from onnx import AttributeProto, TensorProto, numpy_helper
from onnx_graphs import branches, conv, mlp
from tuned_archives import Tuned, answers, inputs

import zcrecord
from zcrecord.codec.entries import PayloadId
from zcrecord.codec.layout import HEADER_SIZE, NONE
from zcrecord.errors import FormatError, IntegrityError, LimitError, RecordError
from zcrecord.onnx import convert, runtime, session, to_onnx, tune, tuned, tuning, untune

VERSION = tuple(map(int, ort.__version__.split(".")[:2]))
COMPARES = VERSION >= (1, 32)  # packed weights; earlier versions are given none
MODELS: dict[str, Callable[[], Any]] = {
    "mlp": mlp, "conv": conv, "branches": branches, "digits": lambda: onnx.load(ROOT / "tests" / "data" / "digits.onnx")
}  # fmt: skip
if VERSION < (1, 31):  # ONNX Runtime writes an If's own weights twice, and tuning refuses that
    del MODELS["branches"]
OTHER = "other.bin"  # in the current folder of the sessions
DIGEST = "a payload of its tuned part does not match its digest; tune it again"
SEAL = "its tuned part is for other weights or another graph; tune it again"
REFUSES = "ONNX Runtime refuses the tuned graph"
KIND = "its tuned part has no attribute '{}' of the right type"
NUMBER = r"a tensor of the tuned graph names payload '.*' of [0-9]+; convert and tune the model again"
OUTSIDE = "a tensor of the tuned graph has external data, but is no initializer; convert and tune the model again"
PROTOBUF = (
    "reaches past the end of the message|the stream ends inside a field|a length of more than 5 bytes|"
    "a tag of more than 32 bits, or 5 bytes|group 13, which was never started"
)
# Right packed weights, or none: only ONNX Runtime 1.32 looks at them at all.
PACKED = f"{REFUSES}.*Serialized pre-packed weights for node" if COMPARES else None


class Tampering(NamedTuple):
    """One way to tamper with an archive.

    Attributes:
        name: a few words.
        model: which archive is changed.
        reason: a regular expression of the reason why the tuned part is not used; None if it is used.
        change: what is done to the archive taken apart.
        answers: "right", as the original graph does; "its author's" otherwise, where it is no tampering but a graph.
    """

    name: str
    model: str
    reason: str | None
    change: Callable[[Any], Any]
    answers: str = "right"


ALL: list[Tampering] = []
Change = Callable[..., Any]


def tampering(
    model: str, reason: str | None, name: str = "", *given: Any, answers: str = "right"
) -> Callable[[Change], Change]:
    """Keep a function as a tampering, called with what is given behind the archive."""

    def keep(change: Change) -> Change:
        words = name or change.__name__.replace("_", " ")
        ALL.append(Tampering(words, model, reason, lambda archive: change(archive, *given), answers))
        return change

    return keep


# External data that are no payloads.


def external(t: Any, location: str) -> None:
    t.data_type, t.data_location = TensorProto.FLOAT, TensorProto.EXTERNAL
    t.dims.extend([16])
    for key, value in (("location", location), ("offset", "4096"), ("length", "64")):
        t.external_data.add(key=key, value=value)


def constant(graph: Any) -> Any:
    """The tensor of a new node that is a constant."""
    node = graph.node.add(op_type="Constant", output=["evil"])
    return node.attribute.add(name="value", type=AttributeProto.TENSOR).t


def used(archive: Tuned) -> None:
    """Have it read, or it might be left out."""
    archive.graph.graph.node.add(op_type="Identity", input=["evil"], output=["read"])


def elsewhere(archive: Tuned, location: str, where: str) -> None:
    graph = archive.graph.graph
    if where == "sparse":
        sparse = graph.sparse_initializer.add(dims=[16])
        sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(16)))
        sparse.values.name = "evil"
        external(sparse.values, location)
    elif where == "constant":
        external(constant(graph), location)
    else:
        found = archive.initializers if where == "added" else graph
        external(found.initializer.add(name="evil"), location)
    used(archive)


LOCATIONS = {
    "a file of the current folder": OTHER, "a file above": f"../{OTHER}", "a file of the system": "/etc/passwd",
    "an address": "*/_ORT_MEM_ADDR_/*", "the archive": "evil.zcr",
}  # fmt: skip
for _what, _location in LOCATIONS.items():
    for _where in ("initializer", "added", "constant", "sparse"):
        _reason = OUTSIDE if _where in ("constant", "sparse") else NUMBER
        tampering("mlp", _reason, f"{_what}, {_where}", _location, _where)(elsewhere)


@tampering("mlp", OUTSIDE)
def a_payload_as_a_constant(archive: Tuned) -> None:
    """ONNX Runtime looks for a constant's file in the current folder."""
    t = constant(archive.graph.graph)
    external(t, "")
    t.external_data.add(key="zcrecord", value="0")
    used(archive)


@tampering("mlp", OUTSIDE)
def a_file_in_a_function(archive: Tuned) -> None:
    external(constant(archive.graph.functions.add(name="f", domain="d")), OTHER)


@tampering("mlp", OUTSIDE)
def a_file_in_training_info(archive: Tuned) -> None:
    external(archive.graph.training_info.add().algorithm.initializer.add(name="evil"), OTHER)


@tampering("branches", NUMBER)
def an_address_in_a_branch(archive: Tuned) -> None:
    node = next(n for n in archive.graph.graph.node if n.op_type == "If")
    external(node.attribute[0].g.initializer.add(name="evil"), "*/_ORT_MEM_ADDR_/*")


@tampering("branches", OUTSIDE)
def an_address_in_a_constant_of_a_branch(archive: Tuned) -> None:
    node = next(n for n in archive.graph.graph.node if n.op_type == "If")
    external(constant(node.attribute[0].g), "*/_ORT_MEM_ADDR_/*")


@tampering("mlp", PROTOBUF, "a tag of more than 32 bits", 5, 1 << 32)
@tampering("mlp", PROTOBUF, "a tag of 6 bytes", 6, 0)
def smuggled(archive: Tuned, nbytes: int, above: int) -> None:
    """protobuf's parsers cut a tag off after 32 bits: to them it is external_data, to others an unknown field."""
    tag = m.varint((13 << 3 | 2) + above, nbytes)
    pairs = (m.field(1, b"location") + m.field(2, OTHER.encode()), m.field(1, b"length") + m.field(2, b"64"))
    evil = m.field(8, b"evil") + m.field(2, 1) + m.field(1, 16) + b"\x70\x01"
    evil += b"".join(tag + m.varint(len(p)) + p for p in pairs)
    archive.back = m.field(7, m.field(5, evil))
    used(archive)


@tampering("mlp", None)
def the_mark_of_another_format(archive: Tuned) -> None:
    """Bytes 4 to 7 are those by which ONNX Runtime knows its own format, with external data in a FlatBuffer."""
    archive.front = b"\x0a\x06\0\0ORTM"


@tampering("mlp", REFUSES)
def external_data_without_entries(archive: Tuned) -> None:
    archive.graph.graph.initializer.add(name="evil", data_type=1, data_location=1, dims=[16])
    used(archive)


# Numbers, shapes and bytes of the graph.


for _number in ("", "-1", "6000", "1e1", "1" * 30, "0x0", "\u0661", "0\n", f"../{OTHER}"):

    @tampering("mlp", NUMBER, f"payload {_number!r}", _number)
    def number(archive: Tuned, value: str) -> None:
        next(e for e in archive.weight.external_data if e.key == "zcrecord").value = value


for _number in ("", "-1", "6000"):

    @tampering("branches", NUMBER, f"payload {_number!r} in a branch", _number)
    def inner_number(archive: Tuned, value: str) -> None:
        node = next(n for n in archive.graph.graph.node if n.op_type == "If")
        t = node.attribute[0].g.initializer.add(name="evil", data_type=1, data_location=1, dims=[16])
        t.external_data.add(key="zcrecord", value=value)


@tampering("mlp", "more than 20000 weights and packed forms, each a mapping, are too many")
def a_payload_20001_times(archive: Tuned) -> None:
    weight = archive.weight
    archive.initializers.initializer.extend([weight] * 20_001)


@tampering("mlp", "a tensor has more than 256 external_data keys")
def entries_of_packed_weights_300_times(archive: Tuned) -> None:
    for i in range(300):
        archive.weight.external_data.add(key=f"prepacked_{i}", value="MatMul+1|0;0")


for _name, _type in {"float64": 11, "no": 99, "string": 8, "int4": 22}.items():

    @tampering("conv", REFUSES, f"a weight of {_name} type", _type)
    def another_type(archive: Tuned, kind: int) -> None:
        archive.weight.data_type = kind


for _dims in ([1, 1], [65, 64], [-64, -64], [1 << 62, 4, 1, 64]):

    @tampering("branches", REFUSES, f"a weight of shape {_dims}", _dims)
    def another_shape(archive: Tuned, dims: list[int]) -> None:
        archive.weight.dims[:] = dims


@tampering("mlp", None)
def values_beside_a_payload(archive: Tuned) -> None:
    archive.weight.raw_data = bytes(int(np.prod(archive.weight.dims)) * 4)


@tampering("mlp", "a graph of initializers alone holds something else")
def a_node_beside_the_initializers(archive: Tuned) -> None:
    external(constant(archive.initializers), OTHER)


@tampering("mlp", "a graph of initializers alone holds something else")
def an_initializer_without_a_payload(archive: Tuned) -> None:
    archive.initializers.initializer.add(name="evil", data_type=1, dims=[1], raw_data=bytes(4))


@tampering("mlp", "messages nested more than 100 deep")
def a_graph_nested_150_deep(archive: Tuned) -> None:
    deep = b"location"
    for _ in range(50):
        deep = m.field(1, m.field(5, m.field(6, deep)))
    archive.back = m.field(7, deep)


@tampering("mlp", PROTOBUF, "a graph that ends inside a field", b"\x3a\xff\xff\x03location")
@tampering("mlp", PROTOBUF, "a graph that ends inside a varint", b"\x42\x08location\xff")
@tampering("mlp", PROTOBUF, "a length of 6 bytes", b"\x42\x88\x80\x80\x80\x80\x00location")
@tampering("mlp", PROTOBUF, "a length of 2^31", b"\x42\x80\x80\x80\x80\x08location")
@tampering("mlp", PROTOBUF, "a group", b"\x43\x44location")
@tampering("mlp", "a varint of more than 10 bytes", "a graph of garbage", b"\xff" * 99)
def behind(archive: Tuned, data: bytes) -> None:
    archive.back = data


@tampering("mlp", None, answers="its author's")
def another_graph(archive: Tuned) -> None:
    node = archive.graph.graph.node[-1]
    node.op_type = "Sub" if node.op_type == "Mul" else "Neg"


@tampering("mlp", SEAL)
def another_graph_with_the_old_seal(archive: Tuned) -> None:
    archive.graph.doc_string, archive.sealed = "another", False


@tampering("mlp", r"refuses the tuned graph: [ -~]+\\x1b\\r[ -~]+$")
def control_characters_in_a_name(archive: Tuned) -> None:
    archive.graph.graph.node.add(op_type="No\x1b\rsuch", name="x\n", input=["x"], output=["z"])


# Inputs and outputs, which a caller knows from the model.


UNLIKE = "its tuned graph {}, unlike the model; tune it again"


@tampering("mlp", UNLIKE.format("has the input 's1'"))
def an_input_more(archive: Tuned) -> None:
    """So it is left where a constant that was an input, too, was removed: sessions failed when they were run."""
    archive.graph.graph.input.add(name="s1").CopyFrom(archive.graph.graph.input[0])
    archive.graph.graph.input[-1].name = "s1"


@tampering("mlp", UNLIKE.format("lacks the input 'x'"))
def an_input_with_a_default(archive: Tuned) -> None:
    archive.graph.graph.initializer.append(numpy_helper.from_array(np.zeros((2, 64), np.float32), "x"))


@tampering("mlp", UNLIKE.format("has the input 'x' with another type or shape"))
def an_input_of_another_shape(archive: Tuned) -> None:
    archive.graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2


@tampering("mlp", UNLIKE.format("has the input 'x' with another type or shape"))
def an_input_of_another_type(archive: Tuned) -> None:
    archive.graph.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE


@tampering("mlp", UNLIKE.format("has the output 'evil' and 1 more"))
def two_outputs_more(archive: Tuned) -> None:
    for name in ("evil", "worse"):
        archive.graph.graph.output.add(name=name).type.tensor_type.elem_type = TensorProto.FLOAT


@tampering("mlp", UNLIKE.format("has the output 'z'"))
def an_output_of_another_name(archive: Tuned) -> None:
    archive.graph.graph.output[0].name = "z"


@tampering("mlp", UNLIKE.format("has the output 'y' with another type or shape"))
def an_output_of_another_type(archive: Tuned) -> None:
    archive.graph.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE


# Packed weights.


def buffers(archive: Tuned, change: Callable[[list[str]], Any]) -> None:
    """Change the buffers that the largest packed weight names, as "number;size"."""
    entry = archive.packed[0]
    key, *found = entry.value.split("|")
    change(found)
    entry.value = "|".join([key, *found])


@tampering("mlp", PACKED)
def two_packed_weights_exchanged(archive: Tuned) -> None:
    one, two = archive.packed[:2]
    (first, a), (second, b) = (e.value.split("|", 1) for e in (one, two))
    one.value, two.value = f"{first}|{b}", f"{second}|{a}"


@tampering("mlp", PACKED)
def zeros_as_a_packed_weight(archive: Tuned) -> None:
    number = int(archive.packed[0].value.split("|")[1].split(";")[0])
    at = archive.payloads[number]
    archive.sources[at] = bytes(len(archive.sources[at]))


@tampering("mlp", PACKED)
def a_packed_weight_of_one_byte(archive: Tuned) -> None:
    """Before 1.32 a kernel would read what lies behind it."""
    number = archive.add(b"x")
    buffers(archive, lambda found: found.__setitem__(0, f"{number};0"))


@tampering("mlp", PACKED)
def a_packed_weight_of_no_bytes(archive: Tuned) -> None:
    buffers(archive, lambda found: found.__setitem__(0, ";0"))


@tampering("mlp", PACKED)
def a_packed_weight_twice(archive: Tuned) -> None:
    buffers(archive, lambda found: found.append(found[0]))


@tampering("mlp", None)
def another_key_of_packed_weights(archive: Tuned) -> None:
    archive.packed[0].value = re.sub(r"\d(?=\|)", lambda d: str(9 - int(d[0])), archive.packed[0].value, count=1)


@tampering("mlp", None)
def packed_weights_left_out(archive: Tuned) -> None:
    for t in archive.initializers.initializer:
        for entry in [e for e in t.external_data if e.key.startswith("prepacked")]:
            t.external_data.remove(entry)


for _value in ("", "MatMul+1", "MatMul+1|", "MatMul+1|0", "MatMul+1|0;-1", "MatMul+1|0;0;0", "a b|0;0", "|0;0"):

    @tampering("mlp", "packed weights '.*' are no key and payloads" if COMPARES else None, f"packed {_value!r}", _value)
    def packed_value(archive: Tuned, value: str) -> None:
        archive.packed[0].value = value


@tampering("mlp", NUMBER if COMPARES else None)
def a_packed_weight_that_is_no_payload(archive: Tuned) -> None:
    buffers(archive, lambda found: found.__setitem__(0, "6000;0"))


@tampering("mlp", "packed weights are not aligned to 64 bytes" if COMPARES else None)
def packed_weights_between_aligned_places(archive: Tuned) -> None:
    """Before 1.32 a kernel would end the process."""
    archive.alignment, archive.pages = 16, False
    number = int(archive.packed[0].value.split("|")[1].split(";")[0])
    at = archive.payloads[number]
    before = sum(-(-len(source) // 16) * 16 for source in archive.sources[:at])
    archive.graph.doc_string += "x" * 16 * ((before // 16 + 1) % 4 == 0)


# Entries of the index, whose CRC is right again.


for _key, _other in {tuned.GRAPH: "text", tuned.INITIALIZERS: 7, tuned.SEAL: 1, tuned.TARGET: b""}.items():

    @tampering("mlp", KIND.format(_key), f"'{_key}' of another type", _key, _other)
    def another_kind(archive: Tuned, key: str, other: Any) -> None:
        archive.sealed = False
        archive.set(key, PayloadId(0) if other == b"" else other)


@tampering("mlp", KIND.format(tuned.PAYLOADS), "'payloads' of one payload", PayloadId(0))
@tampering("mlp", "no list of payloads", "'payloads' with an empty one", [PayloadId(NONE)])
@tampering("mlp", "no list of payloads", "'payloads' of numbers", [0, 1])
@tampering("mlp", "for other weights", "no 'payloads'", [])
def other_payloads(archive: Tuned, value: Any) -> None:
    archive.sealed = False
    archive.set(tuned.PAYLOADS, value)


@tampering("mlp", SEAL, "no 'graph'", tuned.GRAPH)
@tampering("mlp", SEAL, "no 'initializers'", tuned.INITIALIZERS)
def nothing(archive: Tuned, key: str) -> None:
    archive.sealed = False
    archive.set(key, PayloadId(NONE))


@tampering("mlp", SEAL)
def the_graph_is_another_payload(archive: Tuned) -> None:
    archive.sealed = False
    archive.set(tuned.GRAPH, archive.target.initializers)


@tampering("mlp", SEAL)
def two_payloads_exchanged(archive: Tuned) -> None:
    archive.sealed = False
    archive.payloads[0], archive.payloads[1] = archive.payloads[1], archive.payloads[0]


@tampering("mlp", SEAL)
def two_weights_of_the_model_exchanged(archive: Tuned) -> None:
    archive.sealed = False
    found, names = archive.entries.payloads, archive.entries.names
    one, two = names.index("a.w"), names.index("b.w")
    found[one], found[two] = found[two], found[one]


@tampering("mlp", SEAL)
def a_weight_of_the_model_replaced(archive: Tuned) -> None:
    archive.sealed = False
    number = archive.entries.payloads[archive.entries.names.index("a.w")]
    archive.sources[number] = bytes(len(archive.sources[number]))


@tampering("conv", SEAL)
def a_weight_of_the_tuned_graph_replaced(archive: Tuned) -> None:
    archive.sealed = False
    added = next(n for n in archive.payloads if n not in archive.entries.payloads)
    archive.sources[added] = bytes(len(archive.sources[added]))


@tampering("mlp", SEAL, "an empty seal", "")
@tampering("mlp", SEAL, "a seal of zeros", "0" * 64)
def another_seal(archive: Tuned, value: str) -> None:
    archive.sealed = False
    archive.set(tuned.SEAL, value)


TARGETS = {
    "no JSON": ("{", "is not JSON"), "an empty target": ("", "is not JSON"), "a list": ("[]", "exactly the fields"),
    "a target of 9000 characters": ("[" * 9000, "has 9000 characters, at most 8192 are allowed"),
    "a deep target": ("[" * 8000, "is not JSON"), "a target with a blank": ("{} ", "exactly the fields"),
}  # fmt: skip
for _name, (_text, _reason) in TARGETS.items():

    @tampering("conv", f"the target of a tuning .*{_reason}", _name, _text)
    def target(archive: Tuned, text: str) -> None:
        archive.sealed = False
        archive.set(tuned.TARGET, text)


for _old, _new in {
    '"nchwc_block":': '"nchwc_block":9',
    '"onnxruntime":"': '"onnxruntime":"9',
    '"cpu":[': '"cpu":["0",',
}.items():

    @tampering("conv", "made for|the CPU lacks", f"{_new} in the target", _old, _new)
    def other_machine(archive: Tuned, old: str, new: str) -> None:
        archive.sealed = False
        archive.set(tuned.TARGET, archive.value(tuned.TARGET).replace(old, new))


@tampering("conv", SEAL)
def a_graph_of_another_machine_under_the_name_of_this_one(archive: Tuned) -> None:
    """Convolutions with blocks of another size are wrong answers without an error."""
    archive.graph.doc_string, archive.sealed = "of blocks of another size", False


# Tests.


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tuned archives of the models, by their names; all with packed weights, as an author may have them everywhere."""
    folder = tmp_path_factory.mktemp("models")
    out = {}
    for name, model in MODELS.items():
        path = folder / f"{name}.onnx"
        path.write_bytes(model().SerializeToString())
        out[name] = path.with_suffix(".zcr")
        convert(path, out[name])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "_COMPARES_SINCE", (1, 21))
            tune(out[name])
    return out


def original(path: Path) -> list[Any]:
    """Answers of the original graph and weights of an archive."""
    to_onnx(path, path.with_suffix(".onnx"), force=True)
    made = ort.InferenceSession(path.with_suffix(".onnx"), providers=["CPUExecutionProvider"])
    return list(made.run(None, inputs(made)))


def wrong(case: Tampering, answer: dict[str, Any], expected: list[Any]) -> str:
    """Return the fault of an answer; empty if it is as it has to be."""
    if "error" in answer:
        return f"{case.name}: {answer['error']}"
    reason = answer["reason"]
    if (reason is None) != (case.reason is None) or not re.search(case.reason or "", reason or ""):
        return f"{case.name}: {reason!r}, not {case.reason!r}"
    same = [np.allclose(a, b, 1e-4, 1e-4) for a, b in zip(answer["outputs"], expected, strict=True)]
    return "" if all(same) == (case.answers == "right") else f"{case.name}: the answers are not {case.answers}"


@pytest.mark.measured
@pytest.mark.exhaustive(keep=("conv",))
@pytest.mark.parametrize("model", [name for name in MODELS if name != "digits"])
def test_every_tampering_is_answered_right_or_by_its_reason(
    model: str, archives: dict[str, Path], tmp_path: Path
) -> None:
    cases = [case for case in ALL if case.model == model]
    assert len({case.name for case in cases}) == len(cases) > 5
    (tmp_path / "sessions").mkdir()
    for file in (tmp_path / OTHER, tmp_path / "sessions" / OTHER):
        file.write_bytes(np.full(4096, 7, np.float32).tobytes())
    paths = []
    for number, case in enumerate(cases):
        archive = Tuned(archives[model])
        case.change(archive)
        paths.append(archive.write(tmp_path / f"{number}.zcr"))
    answered = answers(paths, tmp_path / "sessions")
    told = [wrong(case, answer, original(path)) for case, answer, path in zip(cases, answered, paths, strict=True)]
    assert not list(filter(None, told))


def flipped(path: Path, number: int, dest: Path) -> Path:
    """Write an archive with another byte in the middle of a payload."""
    data = bytearray(path.read_bytes())
    with zcrecord.load_record(path) as record:
        header, row = record.archive.header, record.archive.index.payloads[number]
        data[header.payload_offset + int(row["offset"]) + int(row["nbytes"]) // 2] ^= 0x40
    dest.write_bytes(data)
    return dest


@pytest.mark.measured
@pytest.mark.exhaustive(keep=("mlp",))
@pytest.mark.parametrize("model", MODELS)
def test_a_damaged_byte_is_found_before_it_is_used(model: str, archives: dict[str, Path], tmp_path: Path) -> None:
    """In the graph, its initializers, weights that tuning added, packed ones. Sessions do not look at `before`."""
    archive = Tuned(archives[model])
    target, own = archive.target, set(archive.entries.payloads)
    with zcrecord.load_record(archives[model]) as record:
        found = target.model(record.archive, "", 0, packed=True)
    numbers = {target.graph: DIGEST, archive.value(tuned.BEFORE, archive.module): None}
    numbers |= dict.fromkeys({n for n in (target.initializers, *found.weights) if n not in own | {NONE}}, DIGEST)
    numbers |= dict.fromkeys(found.packed - own, PACKED)
    assert bool(found.packed) == (model in ("mlp", "digits", "branches"))
    cases = [Tampering(f"a byte of payload {n}", model, reason, id) for n, reason in numbers.items()]
    paths = [flipped(archives[model], n, tmp_path / f"{n}.zcr") for n in numbers]
    expected = original(archives[model])
    told = [wrong(case, answer, expected) for case, answer in zip(cases, answers(paths, tmp_path), strict=True)]
    assert not list(filter(None, told))


def test_damaged_weights_of_the_model_are_found_as_verify_says(archives: dict[str, Path], tmp_path: Path) -> None:
    path = flipped(archives["mlp"], Tuned(archives["mlp"]).entries.payloads[0], tmp_path / "model.zcr")
    assert tuning(session(path)).used
    with pytest.raises(IntegrityError, match="its digest does not match"):
        session(zcrecord.load_record(path, verify="full"))


def test_a_damaged_index_is_refused(archives: dict[str, Path], tmp_path: Path) -> None:
    data = bytearray(archives["mlp"].read_bytes())
    data[-HEADER_SIZE - 9] ^= 1
    (tmp_path / "model.zcr").write_bytes(data)
    with pytest.raises(IntegrityError, match="CRC"):
        session(tmp_path / "model.zcr")


def test_rows_of_the_index_that_were_exchanged_are_noticed(archives: dict[str, Path], tmp_path: Path) -> None:
    """Its CRC is right again; a payload's digest is that of another."""
    archive = Tuned(archives["conv"])
    for number in (archive.target.graph, *archive.payloads):
        forged = Forge(archives["conv"].read_bytes())
        forged.columns["payloads"]["digest"][number] ^= np.uint64(1)
        (tmp_path / "model.zcr").write_bytes(forged.seal())
        reason = tuning(session(tmp_path / "model.zcr")).reason
        assert reason == (DIGEST if number == archive.target.graph else SEAL)


def test_a_tuned_part_of_another_type_is_none(archives: dict[str, Path], tmp_path: Path) -> None:
    archive = Tuned(archives["mlp"])
    found = archive.entries.modules
    found[archive.module] = found[archive.module]._replace(type_name="zcr:onnx_tuneD")
    archive.sealed = False
    with pytest.raises(AssertionError):
        Tuned(archive.write(tmp_path / "model.zcr"))
    assert tuning(session(tmp_path / "model.zcr")).reason == "it is not tuned"


@pytest.mark.measured
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="file names are UTF-8 there")
@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_path_that_is_not_utf_8_has_the_original_graph_answer(
    place: str, archives: dict[str, Path], tmp_path: Path
) -> None:
    name = os.fsdecode(b"\xff\xfe.zcr")
    folder = tmp_path / name if place == "folder" else tmp_path
    folder.mkdir(exist_ok=True)
    for model in archives:
        path = folder / (name if place == "file" else "model.zcr")
        path.write_bytes(archives[model].read_bytes())
        made = session(path)
        assert tuning(made).reason == "the path of its file is not UTF-8, as ONNX Runtime wants it"
        expected = original(archives[model])
        for ours, theirs in zip(made.run(None, inputs(made)), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, 1e-4, 1e-4)


# Sizes.


def test_a_graph_too_large_for_onnx_runtime_is_not_copied(
    archives: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "_MODEL_LIMIT", 100)
    assert re.fullmatch(r"its tuned graph has \d+ bytes; ONNX Runtime takes 2 GiB", str(tuning(archives["mlp"]).reason))


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
def test_thousands_of_targets_cost_no_more_than_their_archive(archives: dict[str, Path], tmp_path: Path) -> None:
    """All of them name the same texts and payloads, which the budget of an index bounds."""
    archive = Tuned(archives["mlp"])
    entries, first = archive.entries, archive.module + 1
    attributes, module = [a for a in entries.attributes if a.parent == first], entries.modules[first]
    for i in range(1, 3000):
        number = len(entries.modules)
        entries.modules.append(module._replace(name=f"onnx.tuned.{i}", key_size=len(str(i)), place=module.place + i))
        for a in attributes:
            value = a.value.replace('"nchwc_block":', f'"nchwc_block":{i}') if a.key == tuned.TARGET else a.value
            entries.attributes.append(a._replace(parent=number, value=value))
    archive.sealed = False
    archive.set(tuned.TARGET, archive.value(tuned.TARGET).replace('"nchwc_block":', '"nchwc_block":99'))
    path = archive.write(tmp_path / "model.zcr")
    setup = f"from zcrecord.onnx import session, tuning; session({str(archives['mlp'])!r})"
    grown = m.peak_growth(setup, f"assert len(str(tuning(session({str(path)!r})).reason)) < 2000")
    assert grown < (32 << 20) + 16 * path.stat().st_size


# What the archive was before.


BEFORE = {
    "one byte": "is no header, index and trailer", "magic alone": "is no header, index and trailer",
    "short": "its magic is missing", "another header": "is no header, index and trailer",
    "a damaged index": "the index does not match its CRC", "no payload": "is no header, index and trailer",
    "too few": "names other payloads than the archive has", "exchanged": "names other payloads|is of another model",
    "longer": "is no header, index and trailer",
    "renamed": "is of another model", "larger": "payloads end at", "huge": "says that it had",
}  # fmt: skip


@pytest.mark.parametrize("what", BEFORE)
def test_an_archive_from_before_that_does_not_fit_is_refused(
    what: str, archives: dict[str, Path], tmp_path: Path
) -> None:
    """By untune and tune; the file stays, and sessions are as they were."""
    archive = Tuned(archives["mlp"])
    number = archive.value(tuned.BEFORE, archive.module)
    before = archive.sources[number]
    if what == "no payload":
        archive.set(tuned.BEFORE, PayloadId(NONE), archive.module)
    elif what in ("too few", "exchanged"):
        originals = archive.value(tuned.PAYLOADS, archive.module)
        originals = originals[1:] if what == "too few" else [originals[1], originals[0], *originals[2:]]
        archive.set(tuned.PAYLOADS, originals, archive.module)
    else:
        archive.sources[number] = other_before(before, what)
    path = archive.write(tmp_path / "model.zcr")
    data = path.read_bytes()
    for change in (untune, tune):
        with pytest.raises(RecordError, match=BEFORE[what]) as caught:
            change(path)
        assert type(caught.value) in (FormatError, IntegrityError, LimitError)
    assert path.read_bytes() == data and [p.name for p in tmp_path.iterdir()] == ["model.zcr"]
    assert tuning(session(path)).used


def other_before(before: bytes, what: str) -> bytes:
    """Return header, index and trailer changed: bytes that are none, or others whose CRCs are right."""
    plain = {
        "one byte": b"x", "magic alone": before[:8], "short": before[:-8],
        "another header": before[:12] + b"x" + before[13:],
        "a damaged index": before[:80] + bytes([before[80] ^ 1]) + before[81:],
    }  # fmt: skip
    if what in plain:
        return plain[what]
    end = {name: np.frombuffer(before[-HEADER_SIZE:], END)[0][name] for name in END.names or () if name != "crc"}
    kind, columns = read_index(before[HEADER_SIZE:-HEADER_SIZE])
    if what == "renamed":
        at = columns["text"].tobytes().index(b"a.w")
        columns["text"][at + 2] = ord("v")
    index = bytes(build_index(columns, kind))
    start = {"huge": 1 << 50, "larger": 1 << 17}.get(what, int(end["index_offset"]))
    size = start + len(index) + HEADER_SIZE
    end |= {"index_offset": start, "index_size": len(index), "archive_size": size}
    index += bytes(8) * (what == "longer")
    end["index_crc"] = zlib.crc32(index)
    head = end_bytes(end) if before[:HEADER_SIZE] == before[-HEADER_SIZE:] else before[:HEADER_SIZE]
    return head + index + end_bytes(end)


def more_targets(archive: Tuned, initializers: list[PayloadId]) -> None:
    """Add a target with the graph of the first for each of some payloads of initializers."""
    entries, of_target = archive.entries, archive.module + 1
    own = [a for a in entries.attributes if a.parent == of_target]
    module = entries.modules[of_target]
    for i, number in enumerate(initializers, 1):
        changed = {tuned.INITIALIZERS: PayloadId(number)}
        parent = len(entries.modules)
        entries.modules.append(module._replace(name=f"onnx.tuned.{i}", key_size=len(str(i)), place=module.place + i))
        entries.attributes += [a._replace(parent=parent, value=changed.get(a.key, a.value)) for a in own]


def test_a_graph_that_many_targets_share_is_read_once(
    archives: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Tuned(archives["mlp"])
    more_targets(archive, [archive.target.initializers] * 300)
    path = archive.write(tmp_path / "m.zcr")
    calls: list[str] = []

    def counted(work: Any, given: Any) -> Any:
        calls.append(work.__name__)
        return work(given)

    for name in ("interface_of", "graph_interface_of", "_all_skeletons"):
        monkeypatch.setattr(tuned, name, functools.partial(counted, getattr(tuned, name)))
    with zcrecord.load_record(path) as record:
        tuned.check_interfaces(record.archive)
    assert sorted(calls) == ["_all_skeletons", "graph_interface_of", "interface_of", "interface_of"]


def test_targets_that_share_a_graph_and_no_initializers_are_bounded(archives: dict[str, Path], tmp_path: Path) -> None:
    archive = Tuned(archives["mlp"])
    archive.graph.doc_string = "x" * 100_000
    others = [archive.payloads[archive.add(m.field(10, b"%d" % i))] for i in range(300)]  # a doc_string
    archive.payloads = archive.payloads[:-300]
    more_targets(archive, others)
    path, message = (
        archive.write(tmp_path / "m.zcr"),
        "its tuned targets share graphs of more than 64 times the archive's",
    )
    with zcrecord.load_record(path) as record, pytest.raises(LimitError, match=message):
        tuned.check_interfaces(record.archive)
