"""Packs the weights of an optimised graph a few at a time, so that no more than these are in private memory.

ONNX Runtime packs a weight for the node that uses it, and finds a packed form by the operator's name and a hash of the
bytes. A model of that node alone, with its constants and the types of its other inputs, gives the same form as the
whole graph. Nodes of one kind, of equal operators, attributes, types and shapes, have forms of equal sizes: one node of
each kind is packed first, and then the size of all forms is known.

Source: ONNX Runtime 1.32, `session_state.cc` (PrepackConstantInitializedTensors), `prepacked_weights_container.cc`,
`nchwc_ops.h` (no kernel there packs).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.errors import OnnxError
from zcrecord.onnx.protobuf.reader import VARINT, ProtobufReader, encode_field, encode_varint, read_pair
from zcrecord.onnx.protobuf.rewriting import ExternalTensor, encode_entries, rewrite_tensors
from zcrecord.onnx.protobuf.scanner import STUB_KEY
from zcrecord.record.record import Record
from zcrecord.storage.files import refusals
from zcrecord.storage.threads import cores, map_ordered
from zcrecord.tensors.strides import address

from .runtime import session_of_nodes, trim_memory
from .tuned import PACKED

_STUB = STUB_KEY.decode()
_TOGETHER, _NODE_SIZE = 32 << 20, 1 << 17  # bytes packed in one session, at most, and bytes that any node counts as
_ALIGNED = 8  # bytes of the largest elements
_PACKS_NOTHING = [b"Gather"], [b"com.microsoft.nchwc"]  # an operator, a domain; they often have the largest weights
_ZEROS = "zeros"  # a file that stands for all weights where only types matter
_OPSETS, _GRAPH = 8, 7  # of ModelProto
_NODE, _INITIALIZER, _INPUT, _OUTPUT = 1, 5, 11, 12  # of GraphProto
_NODE_INPUT, _NODE_OUTPUT, _OPERATOR, _ATTRIBUTE, _DOMAIN = 1, 2, 4, 5, 7  # of NodeProto
_KEPT = _OPERATOR, _ATTRIBUTE, _DOMAIN, 8  # of NodeProto, as well overload
_SUBGRAPHS = 6, 11  # of AttributeProto
_TENSOR_NAME, _EXTERNAL_DATA, _DATA_LOCATION = 8, 13, 14  # of TensorProto
_IR_VERSION = b"\x08\x0a"  # of all models here: 10, in which no initializer has to be an input
_TENSOR_TYPE = re.compile(r"tensor\((\w+)\)")  # as ONNX Runtime tells it
_OTHER_NAMES = {"float": "float32", "double": "float64"}


class PackedForm(NamedTuple):
    """A packed form of a weight: ONNX Runtime's key; bytes and padded size of each buffer."""

    weight: int
    key: str
    buffers: list[tuple[Any, str]]


class _Constant(NamedTuple):
    """A TensorProto without its name and external_data, and the number of its weight."""

    message: bytes
    weight: int | None


_Constants = dict[bytes, _Constant]  # by name
_Types = dict[bytes, bytes]  # TypeProtos by the names of values


class _Node(NamedTuple):
    """A NodeProto without names; its inputs: constants, TypeProtos, or b"" if left out; which outputs it has."""

    fields: bytes
    inputs: tuple[_Constant | bytes, ...]
    outputs: tuple[bool, ...]

    def kind(self) -> Any:
        """Return a key, equal for nodes that differ at most in their weights' bytes and small constants' values."""
        key: list[Any] = [self.fields, *self.outputs]
        for value in self.inputs:
            is_small = isinstance(value, _Constant) and value.weight is None
            key.append(value if isinstance(value, bytes) else len(value.message) if is_small else value.message)
        return tuple(key)

    def weights(self) -> set[int]:
        """Return the numbers of its weights."""
        return {i.weight for i in self.inputs if isinstance(i, _Constant) and i.weight is not None}

    def has_small_constants(self) -> bool:
        return any(isinstance(i, _Constant) and i.weight is None for i in self.inputs)


def forms_of(weight: int, entries: Mapping[str, str], file: Any) -> Iterator[PackedForm]:
    """Yield the packed forms of a weight that its external_data entries name, as views of ONNX Runtime's file."""
    for entry, value in entries.items():
        if PACKED.fullmatch(entry):
            key, *places = value.split("|")
            parts = (place.split(";") for place in places)
            buffers = [(file[int(offset) : int(offset) + int(nbytes)], padded) for offset, nbytes, padded in parts]
            yield PackedForm(weight, key, buffers)


class WeightPacker:
    """Packs the weights of one graph.

    Attributes:
        sizes: bytes of all buffers of packed forms, at most.
        scratch_bytes: bytes in the scratch folder at a time, at most.
    """

    def __init__(self, record: Record, model: bytes, weights: Sequence[Any], folder: str, threads: int | None) -> None:
        """Pack the weights of one node of each kind, in a ModelProto whose stubs number `weights`, arrays of bytes.

        Raises:
            OnnxError: ONNX Runtime refuses the model, or that of a node.
        """
        self._record, self._weights, self._folder = record, weights, folder
        self._file_numbers, self._threads, self._large = itertools.count(), min(2, cores(threads)), threading.Lock()
        with Path(folder, _ZEROS).open("wb") as file:
            file.truncate(max((w.nbytes for w in weights), default=0))
        fields = _fields(model)
        self._head = _IR_VERSION + b"".join(encode_field(_OPSETS, opset) for opset in fields[_OPSETS])
        nodes = list(dict.fromkeys(self._nodes(fields[_GRAPH][-1], {}, {}, dict)))
        samples = {node.kind(): node for node in reversed(nodes)}
        groups = list(self._groups(samples.values()))
        self._sample_forms = list(self._pack_groups(groups))
        sizes: dict[Any, list[int]] = {kind: [] for kind in samples}
        for group, forms in zip(groups, self._sample_forms, strict=True):
            kinds = {weight: node.kind() for node in group for weight in node.weights()}
            for form in forms:
                sizes[kinds[form.weight]] += [data.nbytes for data, _ in form.buffers]
        self.sizes = [size for node in nodes for size in sizes[node.kind()]]
        # A kind whose sample packs nothing is tried nevertheless where the values of small constants may differ.
        tried = {kind for kind, sample in samples.items() if sizes[kind] or sample.has_small_constants()}
        self._others = [node for node in nodes if node.kind() in tried and node is not samples[node.kind()]]
        nbytes = list(map(self._nbytes, self._others))
        self.scratch_bytes = 2 * min(2 * self._threads * max([_TOGETHER, *nbytes]), sum(nbytes))

    def forms(self) -> Iterator[PackedForm]:
        """Yield the packed forms, each key once: ONNX Runtime refuses a model that names one twice."""
        keys: set[str] = set()
        packed = itertools.chain(self._sample_forms, self._pack_groups(self._groups(self._others)))
        for form in itertools.chain.from_iterable(packed):
            if form.key not in keys:
                keys.add(form.key)
                yield form
        trim_memory()

    def _groups(self, nodes: Iterable[_Node]) -> Iterator[list[_Node]]:
        """Yield nodes to pack in one session: a large one alone, or several small ones that share no weight."""
        group: list[_Node] = []
        weights: set[int] = set()
        nbytes = 0
        for node in nodes:
            nbytes += self._nbytes(node)
            if group and (nbytes > _TOGETHER or weights & node.weights()):
                yield group
                group, weights, nbytes = [], set(), self._nbytes(node)
            group.append(node)
            weights |= node.weights()
        if group:
            yield group

    def _nbytes(self, node: _Node) -> int:
        return _NODE_SIZE + sum(int(self._weights[n].nbytes) for n in node.weights())

    def _nodes(
        self, graph: bytes, parent_constants: _Constants, outer_constants: _Constants, outer_types: Callable[[], _Types]
    ) -> Iterator[_Node]:
        """Yield the nodes with weights to pack of a GraphProto and of the graphs in its nodes.

        `outer_constants` are those of all graphs around it, `outer_types` returns the TypeProtos of the values there,
        by name. ONNX Runtime packs of these only `parent_constants`, those of the next graph around.
        """
        fields = _fields(graph)
        inputs = dict(map(_name_and_type, fields.get(_INPUT, [])))
        own = {n: c for n, c in map(_constant, fields.get(_INITIALIZER, [])) if n not in inputs}  # not to be overridden
        constants = outer_constants | own
        weights = {name for name, c in (parent_constants | own).items() if c.weight is not None}
        types = functools.cache(lambda: self._types(fields.get(_NODE, []), constants, outer_types() | inputs))
        for message in fields.get(_NODE, []):
            node = _fields(message)
            for attribute in map(_fields, node.get(_ATTRIBUTE, [])):
                for inner in itertools.chain(*(attribute.get(number, []) for number in _SUBGRAPHS)):
                    yield from self._nodes(inner, own, constants, types)
            names = node.get(_NODE_INPUT, [])
            packs = node[_OPERATOR] not in _PACKS_NOTHING and node.get(_DOMAIN) not in _PACKS_NOTHING
            if packs and not weights.isdisjoint(names):
                values: list[Any] = [constants.get(name) or (types().get(name) if name else b"") for name in names]
                if None in values:
                    raise OnnxError(f"an input of {node[_OPERATOR]} is no tensor")
                unnamed = b"".join(raw for number, raw, _ in _split_fields(message) if number in _KEPT)
                yield _Node(unnamed, tuple(values), tuple(map(bool, node.get(_NODE_OUTPUT, []))))

    def _types(self, nodes: list[bytes], constants: _Constants, values: _Types) -> _Types:
        """Return the TypeProtos by name of `values`, which are given, and of the nodes' outputs, by ONNX Runtime."""
        outputs = {name for message in nodes for name in _fields(message).get(_NODE_OUTPUT, []) if name}
        graph = [encode_field(_NODE, message) for message in nodes]
        graph += [_initializer(name, c, _STUB) for name, c in constants.items()]
        graph += [_value_info(_INPUT, name, kind) for name, kind in values.items() if name not in outputs]
        graph += [_value_info(_OUTPUT, name) for name in sorted(outputs)]

        def refer_to_zeros(t: ExternalTensor, _: str) -> bytes:
            return t.encode({"location": _ZEROS, "length": str(self._weights[int(t.entries[_STUB])].nbytes)})

        path = Path(self._folder, "types.onnx")
        path.write_bytes(rewrite_tensors(memoryview(self._model(graph)), refer_to_zeros))
        return values | dict(_output_types(session_of_nodes(self._record, str(path))))

    def _pack_groups(self, groups: Iterable[list[_Node]]) -> Iterator[list[PackedForm]]:
        return map_ordered(lambda: refusals(self._folder)(self._pack), groups, self._threads)

    def _graph(self, nodes: list[_Node]) -> tuple[Iterable[bytes], dict[str, Any]]:
        """Return the fields of a GraphProto of these nodes alone, and their weights by location.

        Values get new names; a weight is named, and located, by its number.
        """
        graph: dict[bytes, None] = {}  # in order; a weight that a node uses twice is there once
        weights: dict[str, Any] = {}
        names = map(b"v%d".__mod__, itertools.count())
        for node in nodes:
            fields = [node.fields]
            for value in node.inputs:
                name = next(names) if value else b""
                if isinstance(value, bytes):
                    graph |= {_value_info(_INPUT, name, value): None} if value else {}
                else:
                    if value.weight is not None:
                        name = b"%d" % value.weight
                        weights[name.decode()] = self._weights[value.weight]
                    graph[_initializer(name, value, "location")] = None
                fields.append(encode_field(_NODE_INPUT, name))
            outputs = [next(names) if is_present else b"" for is_present in node.outputs]
            fields += [encode_field(_NODE_OUTPUT, name) for name in outputs]
            graph[encode_field(_NODE, b"".join(fields))] = None
            graph |= dict.fromkeys(_value_info(_OUTPUT, name) for name in outputs if name)
        return graph, weights

    def _pack(self, nodes: list[_Node]) -> list[PackedForm]:
        """Return the packed forms of the nodes' weights, views of a file that was unlinked and lives as long as they.

        ONNX Runtime takes memory for a large weight twice, to pack and to write it: so one thread at a time has any. It
        would copy a weight that is not aligned as well. What small weights took is kept for the next ones.
        """
        graph, weights = self._graph(nodes)
        path = Path(self._folder, str(next(self._file_numbers)))
        data = path.with_suffix(".data")
        files = [path, data]
        forms: list[PackedForm] = []
        is_large = sum(map(len, weights.values())) > 2 * _TOGETHER
        with self._large if is_large else contextlib.nullcontext():
            for name, weight in weights.items() if is_large else ():
                trim_memory()
                if address(weight) % _ALIGNED:
                    files.append(path.with_suffix(f".{name}"))
                    weight.tofile(files[-1])
                    weights[name] = np.memmap(files[-1], np.uint8, "r")
            session_of_nodes(self._record, self._model(graph), weights, path)
        packed = np.memmap(data, np.uint8, "r")

        def collect_forms(t: ExternalTensor, _place: str) -> None:
            number, _ = _constant(t.rest)
            forms.extend(forms_of(int(number), t.entries, packed))

        rewrite_tensors(memoryview(path.read_bytes()), collect_forms)
        for file in files:
            with contextlib.suppress(OSError):  # Windows removes no file that is mapped
                file.unlink()
        return forms

    def _model(self, graph: Iterable[bytes]) -> bytes:
        return self._head + encode_field(_GRAPH, encode_field(2, b"g") + b"".join(graph))


def _split_fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield the number of each field of a message, all its bytes, and those behind its tag and length."""
    reader = ProtobufReader(message)
    for start, tag, value in reader.fields(reader.limit):
        end = reader.pos + (value if tag & 7 != VARINT else 0)
        yield tag >> 3, bytes(reader.view[start:end]), bytes(reader.view[reader.pos : end])


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the texts and messages in a message, by the numbers of their fields."""
    fields: dict[int, list[bytes]] = {}
    for number, _, body in _split_fields(message):
        fields.setdefault(number, []).append(body)
    return fields


def _constant(message: bytes) -> tuple[bytes, _Constant]:
    """Return the name and the constant of a TensorProto, whose only external_data entry is the weight's number."""
    name, weight, fields = b"", None, b""
    for number, raw, body in _split_fields(message):
        if number == _TENSOR_NAME:
            name = body
        elif number == _EXTERNAL_DATA:
            _, text = read_pair(ProtobufReader(body), len(body))
            weight = int(text)
        elif number != _DATA_LOCATION:
            fields += raw
    return name, _Constant(fields, weight)


def _initializer(name: bytes, constant: _Constant, key: str) -> bytes:
    external = b"" if constant.weight is None else encode_entries({key: str(constant.weight)})
    return encode_field(_INITIALIZER, constant.message + encode_field(_TENSOR_NAME, name) + external)


def _name_and_type(message: bytes) -> tuple[bytes, bytes]:
    fields = _fields(message)
    return fields[1][-1], b"".join(fields.get(2, []))


def _value_info(number: int, name: bytes, kind: bytes | None = None) -> bytes:
    return encode_field(number, encode_field(1, name) + (encode_field(2, kind) if kind else b""))


def _output_types(session: Any) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and TypeProto of each output of a session that is a tensor."""
    for value in session.get_outputs():
        match = _TENSOR_TYPE.fullmatch(value.type)
        kind = dtypes.by_name.get(_OTHER_NAMES.get(match[1], match[1])) if match else None
        if kind is not None and kind.onnx is not None:
            sizes = (b"\x08" + encode_varint(n) if isinstance(n, int) and n >= 0 else b"" for n in value.shape)
            shape = encode_field(2, b"".join(encode_field(1, size) for size in sizes)) if value.shape else b""
            yield value.name.encode(), encode_field(1, b"\x08" + encode_varint(kind.onnx) + shape)
