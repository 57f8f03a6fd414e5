"""Packs the weights of an optimised graph a few at a time, so that no more than these are in private memory.

ONNX Runtime packs a weight for the node that uses it, and finds a packed form by the operator's name and a hash of the
bytes. A model of that node alone, with its constants and the types of its other inputs, gives the same form as the
whole graph. Nodes of one class, of equal operators, attributes, types and shapes, have forms of equal sizes: one node
of each class is packed first, and then the size of all forms is known.

Source: ONNX Runtime 1.32, `session_state.cc` (PrepackConstantInitializedTensors), `prepacked_weights_container.cc`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.onnx.protobuf.reader import VARINT, ProtobufReader, encode_field, encode_varint, read_pair
from zcrecord.onnx.protobuf.rewriting import ExternalTensor, encode_entries, rewrite
from zcrecord.onnx.protobuf.scanner import STUB_KEY
from zcrecord.storage.threads import cores, map_ordered

from .runtime import session_of_nodes, trim_memory
from .tuned import PACKED

_STUB = STUB_KEY.decode()
_TOGETHER, _MOST_NODES = 32 << 20, 256  # bytes of weights, and nodes, of one session; a larger weight is alone in one
_NOT_PACKED = b"Gather"  # an operator that packs nothing, and often has the largest weight
_ZEROS = "zeros"  # a file that stands for all weights where only types matter
_OPSETS, _GRAPH = 8, 7  # of ModelProto
_NODE, _INITIALIZER, _INPUT, _OUTPUT = 1, 5, 11, 12  # of GraphProto
_NODE_INPUT, _NODE_OUTPUT, _OPERATOR, _ATTRIBUTE = 1, 2, 4, 5  # of NodeProto
_KEPT = {_OPERATOR, _ATTRIBUTE, 7, 8}  # of NodeProto, as well domain and overload
_SUBGRAPHS = 6, 11  # of AttributeProto
_SHAPE, _TENSOR_NAME, _EXTERNAL = {1, 2}, 8, {13, 14}  # of TensorProto; shape: dims and data_type
_IR_VERSION = b"\x08\x0a"  # of all models here: 10, in which no initializer has to be an input
_TENSOR_TYPE = re.compile(r"tensor\((\w+)\)")  # as ONNX Runtime tells it
_OTHER_NAMES = {"float": "float32", "double": "float64"}


class NotPackedAlone(Exception):  # noqa: N818  # no error: ONNX Runtime packs the whole graph instead
    """ONNX Runtime refuses a model of some nodes alone."""


class PackedForm(NamedTuple):
    """A packed form of a weight: ONNX Runtime's key, and the bytes and padded size of each buffer."""

    weight: int
    key: str
    buffers: list[tuple[Any, str]]


class _Constant(NamedTuple):
    """A TensorProto without its name and external_data; the number of its weight; its type and shape alone."""

    message: bytes
    weight: int | None
    shape: bytes


class _Node(NamedTuple):
    """A node with weights: its NodeProto without names, what each input is, and which outputs it has."""

    rest: bytes
    inputs: list[_Constant | bytes]  # bytes: a TypeProto, empty for an input that is left out
    outputs: list[bool]

    @property
    def kind(self) -> Any:
        return self.rest, *(i.shape if isinstance(i, _Constant) else i for i in self.inputs), *self.outputs

    @property
    def constants(self) -> list[_Constant]:
        return [i for i in self.inputs if isinstance(i, _Constant)]


def forms_of(weight: int, entries: Mapping[str, str], written: Any) -> Iterator[PackedForm]:
    """Yield the packed forms that external_data name in a file that ONNX Runtime wrote, an array."""
    for entry, value in entries.items():
        if PACKED.fullmatch(entry):
            key, *buffers = value.split("|")
            places = (buffer.split(";") for buffer in buffers)
            yield PackedForm(weight, key, [(written[int(at) : int(at) + int(n)], padded) for at, n, padded in places])


class WeightPacker:
    """Packs the weights of one graph.

    Attributes:
        packed_bytes, buffers: the size of all packed forms, and the number of their buffers, at most.
        in_work: bytes in the scratch folder at a time, at most.
    """

    def __init__(self, model: bytes, weights: Sequence[Any], folder: str, threads: int | None) -> None:
        """Pack a node of each class, in a ModelProto whose stubs number weights, which are arrays of bytes.

        Raises:
            NotPackedAlone: ONNX Runtime refuses the model, or that of a node.
        """
        self._weights, self._folder, self._files = weights, folder, itertools.count()
        self._threads = min(2, cores(threads))
        Path(folder, _ZEROS).touch()
        os.truncate(os.path.join(folder, _ZEROS), max((w.nbytes for w in weights), default=0))
        fields = _fields(model)
        self._head = _IR_VERSION + b"".join(encode_field(_OPSETS, opset) for opset in fields[_OPSETS])
        nodes = list(self._nodes(fields[_GRAPH][-1], {}, dict))
        first = {node.kind: node for node in reversed(nodes)}
        self._samples = list(self._packed([node] for node in first.values()))
        sizes = {
            kind: [buffer.nbytes for form in forms for buffer, _ in form.buffers]
            for kind, forms in zip(first, self._samples, strict=True)
        }
        self.packed_bytes = sum(sum(sizes[node.kind]) for node in nodes)
        self.buffers = sum(len(sizes[node.kind]) for node in nodes)

        def may_pack(node: _Node) -> bool:
            """Return False for a node that was packed, or packs nothing, as an equal one but for the weights."""
            sample = first[node.kind]
            values = ([c.message for c in n.constants] for n in (node, sample))
            return node is not sample and (bool(sizes[node.kind]) or next(values) != next(values))

        self._groups = list(self._grouped(filter(may_pack, nodes)))
        largest = max((sum(map(self._nbytes, group)) for group in self._groups), default=0)
        self.in_work = 4 * self._threads * largest  # the weights and their forms, waiting or in work

    def forms(self) -> Iterator[PackedForm]:
        """Yield the packed forms, each key once: ONNX Runtime refuses a model that names one twice."""
        known: set[str] = set()
        while self._samples:
            yield from _new_forms(self._samples.pop(0), known)
        for forms in self._packed(self._groups):
            yield from _new_forms(forms, known)

    def _nbytes(self, node: _Node) -> int:
        return sum(self._weights[c.weight].nbytes for c in node.constants if c.weight is not None)

    def _grouped(self, nodes: Iterable[_Node]) -> Iterator[list[_Node]]:
        group: list[_Node] = []
        nbytes = 0
        for node in nodes:
            if group and (nbytes + self._nbytes(node) > _TOGETHER or len(group) == _MOST_NODES):
                yield group
                group, nbytes = [], 0
            group.append(node)
            nbytes += self._nbytes(node)
        if group:
            yield group

    def _nodes(
        self, graph: bytes, around: dict[str, _Constant], outer: Callable[[], dict[str, bytes]]
    ) -> Iterator[_Node]:
        """Yield the nodes with weights of a graph and of those in it; `around` it are constants, and types of values.

        The types are asked for only if there is such a node, or for the model itself.
        """
        fields = _fields(graph)
        inputs = dict(map(_name_and_type, fields.get(_INPUT, [])))
        constants = around | dict(map(_constant, fields.get(_INITIALIZER, [])))
        constants = {name: c for name, c in constants.items() if name not in inputs}  # which callers may override
        types = functools.cache(lambda: self._types(fields.get(_NODE, []), constants, outer() | inputs))
        if not around:
            types()
        for message in fields.get(_NODE, []):
            node = _fields(message)
            for attribute in map(_fields, node.get(_ATTRIBUTE, [])):
                for inner in itertools.chain(*(attribute.get(number, []) for number in _SUBGRAPHS)):
                    yield from self._nodes(inner, constants, types)
            names = [name.decode() for name in node.get(_NODE_INPUT, [])]
            found: list[Any] = [constants.get(name) for name in names]
            if node[_OPERATOR] == [_NOT_PACKED] or all(c is None or c.weight is None for c in found):
                continue
            found = [c or (types().get(name) if name else b"") for c, name in zip(found, names, strict=True)]
            if None in found:
                raise NotPackedAlone(names)
            rest = b"".join(raw for number, raw, _ in _split(message) if number in _KEPT)
            yield _Node(rest, found, [bool(name) for name in node.get(_NODE_OUTPUT, [])])

    def _types(self, nodes: list[bytes], constants: dict[str, _Constant], values: dict[str, bytes]) -> dict[str, bytes]:
        """Return the TypeProto of the tensors around some nodes, and of their outputs, by name."""
        outputs = {name for message in nodes for name in _fields(message).get(_NODE_OUTPUT, []) if name}
        graph = [encode_field(_NODE, message) for message in nodes]
        graph += [_initializer(name, c, {_STUB: str(c.weight)}) for name, c in constants.items()]
        graph += [_value(_INPUT, name, kind) for name, kind in values.items() if name.encode() not in outputs]
        graph += [encode_field(_OUTPUT, encode_field(1, name)) for name in sorted(outputs)]

        def zeros(t: ExternalTensor, _: str) -> bytes:
            nbytes = self._weights[int(t.entries[_STUB])].nbytes
            return t.encode({"location": _ZEROS, "offset": "0", "length": str(nbytes)})

        path = Path(self._folder, "types.onnx")
        path.write_bytes(rewrite(memoryview(self._model(graph)), zeros))
        try:
            told = session_of_nodes(str(path)).get_outputs()
        except Exception as error:
            raise NotPackedAlone(str(error)) from error
        return values | {value.name: kind for value in told if (kind := _type(value))}

    def _packed(self, groups: Iterable[list[_Node]]) -> Iterator[list[PackedForm]]:
        return map_ordered(lambda: self._pack, groups, self._threads)

    def _pack(self, nodes: list[_Node]) -> list[PackedForm]:
        """Return the packed forms of the weights of some nodes; they lie in a file that has no name any more."""
        graph: list[bytes] = []
        weights: dict[int, bytes] = {}
        names = (f"v{n}" for n in itertools.count())
        for node in nodes:
            inputs = []
            for value in node.inputs:
                name = next(names) if value else ""
                if not isinstance(value, _Constant):
                    graph += [_value(_INPUT, name, value)] if name else []
                elif value.weight is None:
                    graph.append(_initializer(name, value, {}))
                else:
                    name, size = str(value.weight), str(self._weights[value.weight].nbytes)
                    entries = {"location": name, "offset": "0", "length": size}
                    weights[value.weight] = _initializer(name, value, entries)
                inputs.append(encode_field(_NODE_INPUT, name.encode()))
            outputs = [next(names) if there else "" for there in node.outputs]
            fields = *inputs, *(encode_field(_NODE_OUTPUT, name.encode()) for name in outputs), node.rest
            graph.append(encode_field(_NODE, b"".join(fields)))
            graph += [encode_field(_OUTPUT, encode_field(1, name.encode())) for name in outputs if name]
        path = Path(self._folder, str(next(self._files)))
        given = {str(n): self._weights[n] for n in weights}
        forms: list[PackedForm] = []
        try:
            session_of_nodes(self._model([*graph, *weights.values()]), given, path)
            trim_memory()
            data = path.with_suffix(".data")
            written = np.memmap(data, np.uint8, "r")

            def collect(t: ExternalTensor, _: str) -> None:
                number = next(body for number, _, body in _split(t.rest) if number == _TENSOR_NAME)
                forms.extend(forms_of(int(number), t.entries, written))

            rewrite(memoryview(path.read_bytes()), collect)
        except MemoryError:
            raise
        except Exception as error:  # ONNX Runtime's have no common class
            raise NotPackedAlone(str(error)) from error
        for file in (path, data):
            with contextlib.suppress(OSError):  # Windows removes no file that is mapped
                file.unlink()
        return forms

    def _model(self, graph: Iterable[bytes]) -> bytes:
        return self._head + encode_field(_GRAPH, encode_field(2, b"g") + b"".join(graph))


def _new_forms(forms: Iterable[PackedForm], known: set[str]) -> Iterator[PackedForm]:
    for form in forms:
        if form.key not in known:
            known.add(form.key)
            yield form


def _split(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield the number of each field of a message, all its bytes, and those behind its tag and length."""
    reader = ProtobufReader(message)
    for start, tag, value in reader.fields(reader.limit):
        end = reader.pos + (value if tag & 7 != VARINT else 0)
        yield tag >> 3, bytes(reader.view[start:end]), bytes(reader.view[reader.pos : end])


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the texts and messages in a message, by the numbers of their fields."""
    fields: dict[int, list[bytes]] = {}
    for number, _, body in _split(message):
        fields.setdefault(number, []).append(body)
    return fields


def _constant(message: bytes) -> tuple[str, _Constant]:
    name, weight, parts, shape = "", None, [], []
    for number, raw, body in _split(message):
        if number == _TENSOR_NAME:
            name = body.decode()
        elif number not in _EXTERNAL:
            parts.append(raw)
            shape += [raw] if number in _SHAPE else []
        elif body:
            weight = int(read_pair(ProtobufReader(body), len(body))[1])
    return name, _Constant(b"".join(parts), weight, b"".join(shape))


def _initializer(name: str, constant: _Constant, entries: dict[str, str]) -> bytes:
    external = b"" if constant.weight is None else encode_entries(entries)
    return encode_field(_INITIALIZER, constant.message + encode_field(_TENSOR_NAME, name.encode()) + external)


def _name_and_type(message: bytes) -> tuple[str, bytes]:
    fields = _fields(message)
    return fields[1][-1].decode(), b"".join(fields.get(2, []))


def _value(number: int, name: str, kind: bytes) -> bytes:
    return encode_field(number, encode_field(1, name.encode()) + encode_field(2, kind))


def _type(value: Any) -> bytes | None:
    """Return the TypeProto of a tensor that a session tells of; None for sequences and the like."""
    found = _TENSOR_TYPE.fullmatch(value.type)
    kind = dtypes.by_name.get(_OTHER_NAMES.get(found[1], found[1])) if found else None
    if kind is None or kind.onnx is None:
        return None
    sizes = (b"\x08" + encode_varint(n) if isinstance(n, int) and n >= 0 else b"" for n in value.shape)
    shape = encode_field(2, b"".join(encode_field(1, size) for size in sizes)) if value.shape else b""
    return encode_field(1, b"\x08" + encode_varint(kind.onnx) + shape)
