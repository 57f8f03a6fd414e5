"""A tuned archive that was tampered with answers right, by its tuned part or the original graph, or is refused.

No archive ends the process, or has another file read, or an address. Sessions are made and run in another process, in
a folder with a file that must not be read. Which version of ONNX Runtime notices what is told in SECURITY.md.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_models as m
import pytest
from forge import END, Forge, build_index, end_bytes, read_index
from onnx import AttributeProto, TensorProto, numpy_helper
from onnx_graphs import DIGITS, PACKS, READS_INNER, branches, conv, converted_in, mlp, plain, request
from tuned_archives import Tuned, answers

import zcrecord
from zcrecord.codec.entries import PayloadId
from zcrecord.codec.layout import HEADER_SIZE, NONE
from zcrecord.errors import FormatError, IntegrityError, LimitError, RecordError
from zcrecord.onnx import runtime, session, to_onnx, tune, tuned, tuning, untune

MODELS: dict[str, Callable[[], Any]] = {
    "mlp": mlp, "conv": conv, "branches": branches, "digits": lambda: onnx.load(DIGITS)
}  # fmt: skip
if not READS_INNER:
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
PACKED = f"{REFUSES}.*Serialized pre-packed weights for node" if PACKS else None


class Tampering(NamedTuple):
    """One way to tamper with an archive."""

    name: str
    model: str  # which archive is changed
    reason: str | None  # a regular expression of the reason why the tuned part is not used; None if it is used
    change: Callable[[Any], Any]  # of the archive taken apart
    answers: str = "right"  # as the original graph's; "its author's", where it is no tampering but another graph


Change = Callable[[Tuned], Any]


def unsealed(change: Change) -> Change:
    """A change under the seal from before."""

    def changed(archive: Tuned) -> None:
        change(archive)
        archive.sealed = False

    return changed


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


def branch(archive: Tuned) -> Any:
    return next(n for n in archive.graph.graph.node if n.op_type == "If").attribute[0].g


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


def a_payload_as_a_constant(archive: Tuned) -> None:
    """ONNX Runtime looks for a constant's file in the current folder."""
    t = constant(archive.graph.graph)
    external(t, "")
    t.external_data.add(key="zcrecord", value="0")
    used(archive)


def smuggled(archive: Tuned, nbytes: int, above: int) -> None:
    """protobuf's parsers cut a tag off after 32 bits: to them it is external_data, to others an unknown field."""
    tag = m.varint((13 << 3 | 2) + above, nbytes)
    pairs = (m.field(1, b"location") + m.field(2, OTHER.encode()), m.field(1, b"length") + m.field(2, b"64"))
    evil = m.field(8, b"evil") + m.field(2, 1) + m.field(1, 16) + b"\x70\x01"
    evil += b"".join(tag + m.varint(len(p)) + p for p in pairs)
    archive.back = m.field(7, m.field(5, evil))
    used(archive)


def external_data_without_entries(archive: Tuned) -> None:
    archive.graph.graph.initializer.add(name="evil", data_type=1, data_location=1, dims=[16])
    used(archive)


LOCATIONS = {
    "a file of the current folder": OTHER, "a file above": f"../{OTHER}", "a file of the system": "/etc/passwd",
    "an address": "*/_ORT_MEM_ADDR_/*", "the archive": "evil.zcr",
}  # fmt: skip
PLACES = {"initializer": NUMBER, "added": NUMBER, "constant": OUTSIDE, "sparse": OUTSIDE}
ADDRESS = LOCATIONS["an address"]
EXTERNAL = [
    *(Tampering(f"{what}, {where}", "mlp", reason, partial(elsewhere, location=location, where=where))
      for what, location in LOCATIONS.items() for where, reason in PLACES.items()),
    Tampering("a payload as a constant", "mlp", OUTSIDE, a_payload_as_a_constant),
    Tampering("a file in a function", "mlp", OUTSIDE,
              lambda a: external(constant(a.graph.functions.add(name="f", domain="d")), OTHER)),
    Tampering("a file in training_info", "mlp", OUTSIDE,
              lambda a: external(a.graph.training_info.add().algorithm.initializer.add(name="evil"), OTHER)),
    Tampering("an address in a branch", "branches", NUMBER,
              lambda a: external(branch(a).initializer.add(name="evil"), ADDRESS)),
    Tampering("an address in a constant of a branch", "branches", OUTSIDE,
              lambda a: external(constant(branch(a)), ADDRESS)),
    Tampering("a tag of more than 32 bits", "mlp", PROTOBUF, lambda a: smuggled(a, 5, 1 << 32)),
    Tampering("a tag of 6 bytes", "mlp", PROTOBUF, lambda a: smuggled(a, 6, 0)),
    # Bytes 4 to 7 are those by which ONNX Runtime knows its own format, with external data in a FlatBuffer.
    Tampering("the mark of another format", "mlp", None, lambda a: setattr(a, "front", b"\x0a\x06\0\0ORTM")),
    Tampering("external data without entries", "mlp", REFUSES, external_data_without_entries),
]  # fmt: skip


# Numbers, shapes and bytes of the graph.


def number(archive: Tuned, value: str) -> None:
    next(e for e in archive.weight.external_data if e.key == "zcrecord").value = value


def another_weight(archive: Tuned, *, kind: int = TensorProto.FLOAT, dims: Sequence[int] = ()) -> None:
    archive.weight.data_type = kind
    archive.weight.dims[:] = dims or archive.weight.dims


def behind(archive: Tuned, data: bytes) -> None:
    archive.back = data


def a_graph_nested_150_deep(archive: Tuned) -> None:
    deep = b"location"
    for _ in range(50):
        deep = m.field(1, m.field(5, m.field(6, deep)))
    archive.back = m.field(7, deep)


def another_graph(archive: Tuned) -> None:
    node = archive.graph.graph.node[-1]
    node.op_type = "Sub" if node.op_type == "Mul" else "Neg"


def another_text(archive: Tuned) -> None:
    archive.graph.doc_string = "another"


ALONE = "a graph of initializers alone holds something else"
BEHIND = {
    "a graph that ends inside a field": b"\x3a\xff\xff\x03location", "a group": b"\x43\x44location",
    "a graph that ends inside a varint": b"\x42\x08location\xff",
    "a length of 6 bytes": b"\x42\x88\x80\x80\x80\x80\x00location",
    "a length of 2^31": b"\x42\x80\x80\x80\x80\x08location",
}  # fmt: skip
GRAPHS = [
    *(Tampering(f"payload {value!r}", "mlp", NUMBER, partial(number, value=value))
      for value in ("", "-1", "6000", "1" * 30, "\u0661", f"../{OTHER}")),
    Tampering("a payload 20001 times", "mlp", "more than 20000 weights and packed forms, each a mapping, are too many",
              lambda a: a.initializers.initializer.extend([a.weight] * 20_001)),
    Tampering("300 packed forms of a weight", "mlp", "a tensor has more than 256 external_data keys",
              lambda a: [a.weight.external_data.add(key=f"prepacked_{i}", value="MatMul+1|0;0") for i in range(300)]),
    *(Tampering(f"a weight of type {kind}", "conv", REFUSES, partial(another_weight, kind=kind))
      for kind in (TensorProto.DOUBLE, TensorProto.STRING, 99)),
    *(Tampering(f"a weight of shape {dims}", "branches", REFUSES, partial(another_weight, dims=dims))
      for dims in ([65, 64], [-64, -64], [1 << 62, 4, 1, 64])),
    Tampering("values beside a payload", "mlp", None,
              lambda a: setattr(a.weight, "raw_data", bytes(int(np.prod(a.weight.dims)) * 4))),
    Tampering("a node beside the initializers", "mlp", ALONE, lambda a: external(constant(a.initializers), OTHER)),
    Tampering("an initializer without a payload", "mlp", ALONE,
              lambda a: a.initializers.initializer.add(name="evil", data_type=1, dims=[1], raw_data=bytes(4))),
    Tampering("a graph nested 150 deep", "mlp", "messages nested more than 100 deep", a_graph_nested_150_deep),
    *(Tampering(name, "mlp", PROTOBUF, partial(behind, data=data)) for name, data in BEHIND.items()),
    Tampering("garbage", "mlp", "a varint of more than 10 bytes", partial(behind, data=b"\xff" * 99)),
    Tampering("another graph", "mlp", None, another_graph, answers="its author's"),
    Tampering("another graph with the old seal", "mlp", SEAL, unsealed(another_text)),
    Tampering("control characters in a name", "mlp", r"refuses the tuned graph: [ -~]+\\x1b\\r[ -~]+$",
              lambda a: a.graph.graph.node.add(op_type="No\x1b\rsuch", name="x\n", input=["x"], output=["z"])),
]  # fmt: skip


# Inputs and outputs, which a caller knows from the model.


def an_input_more(archive: Tuned) -> None:
    """So it is left where a constant that was an input, too, was removed: sessions failed when they were run."""
    archive.graph.graph.input.add(name="s1").CopyFrom(archive.graph.graph.input[0])
    archive.graph.graph.input[-1].name = "s1"


INTERFACES = [  # `test_onnx_interfaces.py` has every difference
    Tampering("an input more", "mlp", "its tuned graph has the input 's1', unlike the model; tune it", an_input_more),
    Tampering("an output of another name", "mlp", "its tuned graph has the output 'z', unlike the model; tune it again",
              lambda a: setattr(a.graph.graph.output[0], "name", "z")),
]  # fmt: skip


# Packed weights.


def buffers(archive: Tuned, change: Callable[[list[str]], Any]) -> None:
    """Change the buffers that the largest packed weight names, as "number;size"."""
    key, *found = archive.packed[0].value.split("|")
    change(found)
    archive.packed[0].value = "|".join([key, *found])


def packed_payload(archive: Tuned) -> int:
    """Return the number of the first packed payload."""
    return archive.payloads[int(archive.packed[0].value.split("|")[1].split(";")[0])]


def two_packed_weights_exchanged(archive: Tuned) -> None:
    one, two = archive.packed[:2]
    (first, a), (second, b) = (e.value.split("|", 1) for e in (one, two))
    one.value, two.value = f"{first}|{b}", f"{second}|{a}"


def zeros_as_a_packed_weight(archive: Tuned) -> None:
    archive.sources[packed_payload(archive)] = bytes(len(archive.sources[packed_payload(archive)]))


def a_packed_weight_of_one_byte(archive: Tuned) -> None:
    """Before 1.32 a kernel would read what lies behind it."""
    added = f"{archive.add(b'x')};0"
    buffers(archive, lambda found: found.__setitem__(0, added))


def another_key_of_packed_weights(archive: Tuned) -> None:
    archive.packed[0].value = re.sub(r"\d(?=\|)", lambda d: str(9 - int(d[0])), archive.packed[0].value, count=1)


def packed_weights_left_out(archive: Tuned) -> None:
    for t in archive.initializers.initializer:
        for entry in [e for e in t.external_data if e.key.startswith("prepacked")]:
            t.external_data.remove(entry)


def packed_value(archive: Tuned, value: str) -> None:
    archive.packed[0].value = value


def packed_weights_between_aligned_places(archive: Tuned) -> None:
    """Before 1.32 a kernel would end the process."""
    archive.alignment, archive.pages = 16, False
    before = sum(-(-len(source) // 16) * 16 for source in archive.sources[: packed_payload(archive)])
    archive.graph.doc_string += "x" * 16 * ((before // 16 + 1) % 4 == 0)


NO_FORM = r"packed weights '.*' are not 'key\|payload;size\|\.\.\.'"
FORMS = [
    Tampering("two packed weights exchanged", "mlp", PACKED, two_packed_weights_exchanged),
    Tampering("zeros as a packed weight", "mlp", PACKED, zeros_as_a_packed_weight),
    Tampering("a packed weight of one byte", "mlp", PACKED, a_packed_weight_of_one_byte),
    Tampering("a packed weight of no bytes", "mlp", PACKED,
              lambda a: buffers(a, lambda found: found.__setitem__(0, ";0"))),
    Tampering("a packed weight twice", "mlp", PACKED, lambda a: buffers(a, lambda found: found.append(found[0]))),
    Tampering("another key of packed weights", "mlp", None, another_key_of_packed_weights),
    Tampering("packed weights left out", "mlp", None, packed_weights_left_out),
    *(Tampering(f"packed {value!r}", "mlp", NO_FORM if PACKS else None, partial(packed_value, value=value))
      for value in ("", "MatMul+1|", "MatMul+1|0", "MatMul+1|0;-1", "MatMul+1|0;0;0", "|0;0")),
    Tampering("a packed weight that is no payload", "mlp", NUMBER if PACKS else None,
              lambda a: buffers(a, lambda found: found.__setitem__(0, "6000;0"))),
    Tampering("packed weights between aligned places", "mlp",
              "packed weights are not aligned to 64 bytes" if PACKS else None, packed_weights_between_aligned_places),
]  # fmt: skip


# Entries of the index, whose CRC is right again.


def two_payloads_exchanged(archive: Tuned) -> None:
    archive.payloads[0], archive.payloads[1] = archive.payloads[1], archive.payloads[0]


def two_weights_of_the_model_exchanged(archive: Tuned) -> None:
    found, names = archive.entries.payloads, archive.entries.names
    one, two = names.index("a.w"), names.index("b.w")
    found[one], found[two] = found[two], found[one]


def zeros(archive: Tuned, number: int) -> None:
    archive.sources[number] = bytes(len(archive.sources[number]))


OF_KIND = {tuned.GRAPH: "text", tuned.INITIALIZERS: 7, tuned.SEAL: 1, tuned.TARGET: PayloadId(0)}
ENTRIES: list[tuple[str, str, str, Change]] = [
    *((f"'{key}' of another type", "mlp", KIND.format(key), partial(Tuned.set, key=key, value=value))
      for key, value in OF_KIND.items()),
    *((f"'payloads': {value}", "mlp", reason, partial(Tuned.set, key=tuned.PAYLOADS, value=value))
      for value, reason in ((PayloadId(0), KIND.format(tuned.PAYLOADS)), ([PayloadId(NONE)], "no list of payloads"),
                            ([], "for other weights"))),
    *((f"no '{key}'", "mlp", SEAL, partial(Tuned.set, key=key, value=PayloadId(NONE)))
      for key in (tuned.GRAPH, tuned.INITIALIZERS)),
    ("the graph is another payload", "mlp", SEAL, lambda a: a.set(tuned.GRAPH, a.target.initializers)),
    ("two payloads exchanged", "mlp", SEAL, two_payloads_exchanged),
    ("two weights of the model exchanged", "mlp", SEAL, two_weights_of_the_model_exchanged),
    ("a weight of the model replaced", "mlp", SEAL,
     lambda a: zeros(a, a.entries.payloads[a.entries.names.index("a.w")])),
    ("a weight of the tuned graph replaced", "conv", SEAL,
     lambda a: zeros(a, next(n for n in a.payloads if n not in a.entries.payloads))),
    *((f"the seal {seal!r}", "mlp", SEAL, partial(Tuned.set, key=tuned.SEAL, value=seal)) for seal in ("", "0" * 64)),
    ("a target with a blank", "conv", "the target of a tuning .*exactly the fields",
     partial(Tuned.set, key=tuned.TARGET, value="{} ")),
    ("the target of another machine", "conv", "made for",
     lambda a: a.set(tuned.TARGET, a.value(tuned.TARGET).replace('"onnxruntime":"', '"onnxruntime":"9'))),
    # Convolutions with blocks of another size are wrong answers without an error.
    ("a graph of another machine under the name of this one", "conv", SEAL, another_text),
]  # fmt: skip
INDEX = [Tampering(name, model, reason, unsealed(change)) for name, model, reason, change in ENTRIES]
ALL = [*EXTERNAL, *GRAPHS, *INTERFACES, *FORMS, *INDEX]


# Tests.


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tuned archives of the models, by their names; all with packed weights, as an author may have them everywhere."""
    folder = tmp_path_factory.mktemp("models")
    out = {}
    for name, model in MODELS.items():
        (folder / name).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "_COMPARES_SINCE", (1, 21))
            out[name] = converted_in(folder / name, model(), tuned=True)
    return out


def original(path: Path) -> list[Any]:
    """Answers of the original graph and weights of an archive."""
    to_onnx(path, path.with_suffix(".onnx"), force=True)
    made = plain(path.with_suffix(".onnx"))
    return list(made.run(None, request(made)))


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
    assert len({case.name for case in cases}) == len(cases) > 1
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
    path = folder / (name if place == "file" else "model.zcr")
    path.write_bytes(archives["mlp"].read_bytes())
    made = session(path)
    assert tuning(made).reason == "the path of its file is not UTF-8, as ONNX Runtime wants it"
    for ours, theirs in zip(made.run(None, request(made)), original(archives["mlp"]), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-4, 1e-4)


# Sizes.


def test_a_graph_too_large_for_onnx_runtime_is_not_copied(
    archives: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "MAX_LENGTH", 100)
    assert re.fullmatch(r"its tuned graph has \d+ bytes; ONNX Runtime takes 2 GiB", str(tuning(archives["mlp"]).reason))


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
def test_thousands_of_targets_cost_no_more_than_their_archive(archives: dict[str, Path], tmp_path: Path) -> None:
    """All of them name the same texts and payloads, which the budget of an index bounds."""
    archive = Tuned(archives["mlp"])
    target = archive.value(tuned.TARGET)
    others = [target.replace('"nchwc_block":', f'"nchwc_block":{i}') for i in range(1, 3000)]
    more_targets(archive, [{tuned.TARGET: other} for other in others])
    archive.sealed = False
    archive.set(tuned.TARGET, target.replace('"nchwc_block":', '"nchwc_block":99'))
    path = archive.write(tmp_path / "model.zcr")
    setup = f"from zcrecord.onnx import session, tuning; session({str(archives['mlp'])!r})"
    grown = m.peak_growth(setup, f"assert len(str(tuning(session({str(path)!r})).reason)) < 2000")
    assert grown < (32 << 20) + 16 * path.stat().st_size


# What the archive was before.


BEFORE = {
    "magic alone": "is no header, index and trailer",
    "short": "its magic is missing", "another header": "is no header, index and trailer",
    "a damaged index": "the index does not match its CRC", "no payload": "is no header, index and trailer",
    "too few": "names other payloads than the archive has",
    "longer": "is no header, index and trailer",
    "renamed": "is of another model", "larger": "payloads end at", "huge": "says that it had",
}  # fmt: skip


@pytest.mark.parametrize("what", BEFORE)
def test_an_archive_from_before_that_does_not_fit_is_refused(
    what: str, archives: dict[str, Path], tmp_path: Path
) -> None:
    archive = Tuned(archives["mlp"])
    number = archive.value(tuned.BEFORE, archive.module)
    before = archive.sources[number]
    if what == "no payload":
        archive.set(tuned.BEFORE, PayloadId(NONE), archive.module)
    elif what == "too few":
        archive.set(tuned.PAYLOADS, archive.value(tuned.PAYLOADS, archive.module)[1:], archive.module)
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
    damaged = {
        "magic alone": before[:8], "short": before[:-8],
        "another header": before[:12] + b"x" + before[13:],
        "a damaged index": before[:80] + bytes([before[80] ^ 1]) + before[81:],
    }  # fmt: skip
    if what in damaged:
        return damaged[what]
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


def more_targets(archive: Tuned, changes: list[dict[str, Any]]) -> None:
    """Add a target as the first for each change of its attributes."""
    entries, of_target = archive.entries, archive.module + 1
    own = [a for a in entries.attributes if a.parent == of_target]
    module = entries.modules[of_target]
    for i, changed in enumerate(changes, 1):
        parent = len(entries.modules)
        entries.modules.append(module._replace(name=f"onnx.tuned.{i}", key_size=len(str(i)), place=module.place + i))
        entries.attributes += [a._replace(parent=parent, value=changed.get(a.key, a.value)) for a in own]


def test_targets_that_share_a_graph_and_no_initializers_are_bounded(archives: dict[str, Path], tmp_path: Path) -> None:
    archive = Tuned(archives["mlp"])
    archive.graph.doc_string = "x" * 100_000
    others = [archive.payloads[archive.add(m.field(10, b"%d" % i))] for i in range(300)]  # a doc_string
    archive.payloads = archive.payloads[:-300]
    more_targets(archive, [{tuned.INITIALIZERS: number} for number in others])
    path, message = (
        archive.write(tmp_path / "m.zcr"),
        "its tuned targets share graphs of more than 64 times the archive",
    )
    with zcrecord.load_record(path) as record, pytest.raises(LimitError, match=message):
        tuned.check_interfaces(record.archive)
