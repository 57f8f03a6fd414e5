"""zcrecord.js finds the tensors of a graph that Python and protobuf find, or refuses it."""

from __future__ import annotations

import base64
import functools
import io
import json
import random
import re
import subprocess
from collections.abc import Callable
from typing import Any

import onnx
import pytest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx_models import every_tensor, field, rich_model, varint
from web_archives import SUITE

import zcrecord
from tools.fuzz.models import mutated, parse
from zcrecord import dtypes
from zcrecord.errors import OnnxError, RecordError
from zcrecord.onnx import convert
from zcrecord.onnx.names import NamedTensor, full_names
from zcrecord.onnx.protobuf.reader import ProtobufReader, Skeleton
from zcrecord.onnx.protobuf.scanner import Scanner
from zcrecord.onnx.protobuf.tensors import TensorMessage

pytestmark = pytest.mark.needs("node")
CASES = 1500
# Graphs that JavaScript refuses though protobuf reads them; no converted model of an exporter has any of it.
STRICTER = re.compile(
    r"wire type [34] is not known|its field \d+ twice|has values of its own|a dim is more than 2\^53"
    r"|more tensors than the archive"
)
Found = list[tuple[str, list[int], int]]


def skeleton() -> bytes:
    """Return the graph of a model with tensors in every place."""
    out = io.BytesIO()
    convert(io.BytesIO(rich_model().SerializeToString()), out)
    return bytes(zcrecord.load_record(out.getvalue()).attributes["onnx.graph"])


def read_by_javascript(graphs: list[bytes]) -> list[dict[str, Any]]:
    lines = "".join(base64.b64encode(graph).decode() + "\n" for graph in graphs)
    done = subprocess.run(["node", SUITE / "skeletons.mjs"], input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


class _Found:
    """Takes the tensors that the scanner finds, and refuses values."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []

    def start(self, t: TensorMessage) -> None:
        t.index = len(self.tensors)
        self.tensors.append(None)

    def stub(self, t: TensorMessage, skeleton: Skeleton) -> None:
        pass

    def finish(self, t: TensorMessage, _tensors: Any) -> None:
        self.tensors[t.index] = t

    def refuse(self, *_: Any) -> Any:
        raise OnnxError("has values of its own")

    add_whole = write_whole = begin = write = end = locate = refuse


def read_by_python(graph: bytes) -> Found:
    sink: Any = _Found()
    Scanner(ProtobufReader(io.BytesIO(graph), Skeleton()), sink).scan()
    float32 = dtypes.by_name["float32"]
    named = [NamedTensor(t.scope, t.field, t.place, t.name, 0, float32, (), 0) for t in sink.tensors]
    names = full_names(named, 1000)
    return [(name, t.dims, t.data_type) for name, t in zip(names, sink.tensors, strict=True)]


def encoded(nodes: list[Any], form: Callable[[int], bytes]) -> bytes:
    """Return a message's bytes, its tags and lengths in this form."""
    out = b""
    for number, wire, value in nodes:
        out += form(number << 3 | wire)
        if isinstance(value, int):
            out += varint(value)
            continue
        data = encoded(value, form) if isinstance(value, list) else value
        out += (form(len(data)) if wire == 2 else b"") + data
    return out


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(3)) + data[at + rng.randrange(3) :]


def mutant(graph: bytes, rng: random.Random) -> bytes:
    """Return a graph with fields moved, repeated, changed, and now and then a tag or length in another form."""

    def form(value: int) -> bytes:
        if rng.randrange(60):
            return varint(value)
        return varint(
            value | rng.choice([0, 0, rng.randint(1, 7) << 32, 1 << rng.randrange(33, 64)]), rng.randint(1, 11)
        )

    data = mutated(graph, rng, lambda octets: changed_bytes(octets, rng)) if rng.randrange(4) else graph
    nodes = parse(data) if rng.randrange(4) else None
    return data if nodes is None else encoded(nodes, form)


def difference(graph: bytes, ours: dict[str, Any]) -> str:
    """Return how JavaScript's answer differs from that of Python and protobuf; "" if it does not."""
    if "name" in ours:
        if ours["name"] not in ("FormatError", "LimitError"):
            return f"{ours['name']}: {ours['message']}"
        try:
            read_by_python(graph)
        except RecordError:
            return ""
        return "" if STRICTER.search(ours["message"]) else f"refused by JavaScript alone: {ours['message']}"
    model, tensors = base64.b64decode(ours["model"]), [tuple(t) for t in ours["tensors"]]
    try:
        theirs = read_by_python(model)
    except RecordError as error:
        return f"refused by Python alone: {error}"
    if theirs != tensors and max(kind for *_, kind in tensors) < 1 << 32:  # the archive has no such type
        return f"Python finds {theirs}, JavaScript {tensors}"
    try:
        found = list(every_tensor(onnx.ModelProto.FromString(model)))
    except DecodeError:
        return ""  # nobody reads it
    places = [[(entry.key, entry.value) for entry in t.external_data] for t in found]
    wanted = [[("location", "large"), ("offset", "0"), ("length", "1")]] * len(tensors)
    return "" if places == wanted else f"protobuf finds {places}"


@pytest.mark.slow
def test_mutated_graphs_are_read_as_python_and_protobuf_read_them_or_refused() -> None:
    rng, graph = random.Random(20261130), skeleton()
    graphs = [graph, *(mutant(graph, rng) for _ in range(CASES))]
    answers = read_by_javascript(graphs)
    differences = [(g, d) for g, a in zip(graphs, answers, strict=True) if (d := difference(g, a))]
    assert differences == []
    assert CASES // 10 < sum("model" in answer for answer in answers) < CASES // 2


PLACE = [field(14, 1), field(13, [field(1, b"location"), field(2, b"/etc/passwd")])]
W = field(5, [field(8, b"w"), field(2, 1), field(1, 3)])
HIDDEN = [field(8, b"w"), field(2, 1), *PLACE]
DEEP = functools.reduce(lambda inner, number: field(number, inner), [6, 5, 1] * 33, W)  # the tensor is 101 deep


def hidden(tag: bytes) -> bytes:
    """Return a graph with an initializer behind this tag, which protobuf may read as field 5."""
    data = b"".join(HIDDEN)
    return field(7, W + tag + varint(len(data)) + data)


@pytest.mark.parametrize(
    ("rule", "graph", "message"),
    [
        ("O3", field(7, W) + b"\x08" + b"\x80" * 10 + b"\x01", "a varint has more than 10 bytes"),
        ("O4", hidden(varint(5 << 3 | 2 | 1 << 32)), "a tag is more than 4294967295"),
        ("O4", hidden(varint(5 << 3 | 2 | 7 << 32)), "a tag is more than 4294967295"),
        ("O4", hidden(varint(5 << 3 | 2, 6)), "or has more than 5 bytes"),
        ("O4", field(7, W + b"\x2a" + varint(0, 6)), "a length is more than 2147483647, or has more than 5 bytes"),
        ("O5", field(7, W + b"\x02\x00"), "a field ends past its message"),
        ("O6", field(7, W + b"\x2e\x00"), "wire type 6 is not known"),
        ("O7", field(7, W + b"\x2a\x05"), "a field ends past its message"),
        ("O8", field(7, W + b"\x2a" + varint(1 << 31)), "a length is more than 2147483647"),
        ("O9", field(7, W + b"\x2b\x34"), "wire type 3 is not known"),
        ("O9", field(7, W + b"\x2c"), "wire type 4 is not known"),
        ("O10", field(7, DEEP), "messages are nested more than 100 deep"),
        ("O12", field(7, [W, field(1, field(5, [b"\x2a\x05"]))]), "a field ends past its message"),
        ("O18", field(7, field(5, [field(8, b"w"), field(2, 1), b"\x0a\x01\x83\x01\x01"])), "dims end inside a varint"),
        ("O29", field(7, field(5, [field(8, b"w"), field(3, b"")])), "'w' has values of its own"),
        ("O31", field(7, field(5, [field(8, b"\xff"), field(2, 1)])), "that is not UTF-8"),
        ("O32", field(7, W * 2), "two initializers of one graph are called 'w'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_graph_that_breaks_a_rule_of_models_is_refused(rule: str, graph: bytes, message: str) -> None:
    (ours,) = read_by_javascript([graph])
    assert ours.get("name") == "FormatError" and message in ours["message"], (rule, ours)
    with pytest.raises(RecordError):
        read_by_python(graph)


def test_fields_of_a_tensor_with_another_wire_type_are_no_name_shape_or_type() -> None:
    unknown = [b"\x40\x03", b"\x12\x01\x07", b"\x0d\x01\x00\x00\x00", b"\x45\x00\x00\x00\x00"]
    graph = field(7, field(5, [field(8, b"w"), field(2, 1), field(1, 3), *unknown]))
    (ours,) = read_by_javascript([graph])
    assert ours["tensors"] == [["w", [3], 1]] and difference(graph, ours) == ""


def test_a_model_has_no_more_tensors_than_its_archive() -> None:
    nodes = field(7, [field(1, field(5, b"\x2a\x00"))] * 1001)
    (ours,) = read_by_javascript([nodes])
    assert ours["message"].startswith("the model has more tensors than the archive")
