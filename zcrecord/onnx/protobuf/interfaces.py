"""The inputs and outputs of a model's graph: read and compared; constants are removed from the inputs.

Before version 4 of the IR each initializer had to be an input as well, and was a constant all the same. From version 4
on an initializer among the inputs is a default, which a caller may override.

Source: onnx's docs/IR.md; onnx.proto for the fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zcrecord.errors import printable

from .reader import LEN, OPEN_END, VARINT, ProtobufReader, Skeleton, encode_varint

OVERRIDABLE = 4  # the IR version from which on an initializer among the inputs is a default
_VERSION, _GRAPH = 1 << 3 | VARINT, 7 << 3 | LEN  # tags of ModelProto
_INITIALIZER, _INPUT, _OUTPUT, _SPARSE = (n << 3 | LEN for n in (5, 11, 12, 15))  # of GraphProto
_NAME, _TYPE, _TENSOR_NAME, _VALUES = (n << 3 | LEN for n in (1, 2, 8, 1))  # ValueInfo, TensorProto, SparseTensorProto

# Messages in a TypeProto by their tags: tensors and sparse ones, with a shape of dimensions; sequences, maps, optional.
_DIMENSION: dict[int, Any] = {}
_TENSOR = {2 << 3 | LEN: {1 << 3 | LEN: _DIMENSION}}
_TYPES: dict[int, Any] = {1 << 3 | LEN: _TENSOR, 8 << 3 | LEN: _TENSOR}
_TYPES |= {n << 3 | LEN: {inner << 3 | LEN: _TYPES} for n, inner in ((4, 1), (5, 2), (9, 1))}
_DIM_PARAM, _OPEN = 2 << 3 | LEN, 0  # tag of a dimension's name, and the tag that stands for it here


class ModelInterface(NamedTuple):
    """The inputs and outputs of a model's graph, in order: names with the bytes of their TypeProto."""

    version: int  # of the IR
    inputs: list[tuple[str, bytes]]
    outputs: list[tuple[str, bytes]]
    initializers: set[str]  # their names

    def required(self) -> list[tuple[str, bytes]]:
        """Return the inputs that a caller has to feed."""
        return [(name, kind) for name, kind in self.inputs if name not in self.initializers]

    def defaults(self) -> list[tuple[str, bytes]]:
        """Return the inputs that a caller may feed, or leave at their defaults."""
        if self.version < OVERRIDABLE:
            return []
        return [(name, kind) for name, kind in self.inputs if name in self.initializers]

    def joined(self, graph: ModelInterface) -> ModelInterface:
        """Return the interface of the model with another graph merged into its own, as protobuf merges them."""
        inputs, outputs = self.inputs + graph.inputs, self.outputs + graph.outputs
        return ModelInterface(self.version, inputs, outputs, self.initializers | graph.initializers)


def interface_of(model: Any) -> ModelInterface:
    """Return the interface of a ModelProto, in a file or in memory."""
    interface = ModelInterface(0, [], [], set())
    reader = ProtobufReader(model)
    for _, tag, value in reader.fields():
        if tag == _VERSION:
            interface = interface._replace(version=value)
        elif tag == _GRAPH:
            _add_graph(reader, reader.offset + value, interface)
    return interface


def graph_interface_of(graph: Any) -> ModelInterface:
    """Return the interface of a GraphProto in memory."""
    interface = ModelInterface(0, [], [], set())
    _add_graph(ProtobufReader(graph), OPEN_END, interface)
    return interface


def difference(model: ModelInterface, graph: ModelInterface) -> str | None:
    """Return the first difference of another graph's interface from the model's, as the end of a sentence; or None.

    The other graph may have the type or shape of an output that the model leaves open.
    """
    values_by_kind = {
        "input": (model.required(), graph.required()),
        "output": (model.outputs, graph.outputs),
        "input with a default": (model.defaults(), graph.defaults()),
    }
    for kind, (in_model, in_graph) in values_by_kind.items():
        model_types, graph_types = dict(in_model), dict(in_graph)
        for verb, names, others in (("has", graph_types, model_types), ("lacks", model_types, graph_types)):
            if differing := [name for name in names if name not in others]:
                more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
                return f"{verb} the {kind} '{printable(differing[0], 60)}'{more}"
        if [name for name, _ in in_model] != [name for name, _ in in_graph]:
            return f"has the {kind}s in another order"
        for (name, expected), (_, actual) in zip(in_model, in_graph, strict=True):
            if expected != actual and not _is_same_type(expected, actual, may_add=kind == "output"):
                return f"has the {kind} '{printable(name, 60)}' with another type or shape"
    return None


def _is_same_type(expected: bytes, actual: bytes, *, may_add: bool) -> bool:
    """Return True if two TypeProtos are equal or, if it `may_add` fields, the actual one has all of the expected."""
    a, b = (_fields_of_type(ProtobufReader(data), len(data), _TYPES, 0) for data in (expected, actual))
    return a == b or (may_add and _includes(b, a))


def _includes(larger: Any, smaller: Any) -> bool:
    """Return True if a type has all fields of another one, but for the names of open dimensions."""
    if not isinstance(smaller, tuple):
        return bool(larger == smaller)
    for tag in {tag for tag, _ in smaller} - {_OPEN}:
        few, many = ([value for t, value in fields if t == tag] for fields in (smaller, larger))
        if len(few) != len(many) or not all(map(_includes, many, few)):
            return False
    return True


def without_constant_inputs(model: Any) -> bytes:
    """Return a ModelProto without constants among its inputs: one of an IR before version 4 becomes version 4."""
    interface = interface_of(model)
    if interface.version >= OVERRIDABLE:
        return bytes(model)
    skeleton, input_names = Skeleton(), iter([name for name, _ in interface.inputs])
    reader = ProtobufReader(model, skeleton)
    for start, tag, value in reader.fields():
        if tag != _GRAPH:
            continue
        end, mark = reader.offset + value, reader.open(start, tag, value)
        for field_start, field_tag, nbytes in reader.fields(end):
            if field_tag == _INPUT and next(input_names) in interface.initializers:
                reader.drop(field_start)
                reader.advance(nbytes)
                reader.keep()
        reader.close(mark)
    reader.finish()
    return b"".join([*skeleton.finish(), encode_varint(_VERSION), encode_varint(OVERRIDABLE)])  # the last one counts


def _add_graph(reader: ProtobufReader, end: int, interface: ModelInterface) -> None:
    """Add the inputs, outputs and initializers of a GraphProto that ends at an offset."""
    for _, tag, value in reader.fields(end):
        field_end = reader.offset + value
        if tag in (_INPUT, _OUTPUT):
            (interface.inputs if tag == _INPUT else interface.outputs).append(_value_info(reader, field_end))
        elif tag == _INITIALIZER:
            interface.initializers.add(_tensor_name(reader, field_end))
        elif tag == _SPARSE:
            for _, inner_tag, nbytes in reader.fields(field_end):
                if inner_tag == _VALUES:
                    interface.initializers.add(_tensor_name(reader, reader.offset + nbytes))


def _value_info(reader: ProtobufReader, end: int) -> tuple[str, bytes]:
    """Return the name and TypeProto of a ValueInfoProto that ends at an offset."""
    name, kind = "", b""
    for _, tag, value in reader.fields(end):
        if tag == _NAME:
            name = reader.text(value).decode("utf-8", "replace")
        elif tag == _TYPE:
            kind += reader.text(value)  # protobuf joins messages so
    return name, kind


def _fields_of_type(reader: ProtobufReader, end: int, children: dict[int, Any], depth: int) -> tuple[Any, ...]:
    """Return the fields of a type, sorted by tag: equal types are equal, whatever their order of fields."""
    fields: list[tuple[int, Any]] = []
    for _, tag, value in reader.fields(end, depth):
        if tag in children:
            fields.append((tag, _fields_of_type(reader, reader.offset + value, children[tag], depth + 1)))
        elif tag & 7 == VARINT:
            if children is not _DIMENSION or value < 1 << 63:  # a negative dimension is open, as one without a value
                fields.append((tag, value))
        elif tag & 7 == LEN and value:
            fields.append((_OPEN if children is _DIMENSION and tag == _DIM_PARAM else tag, reader.text(value)))
    return tuple(sorted(fields, key=lambda field: field[0]))


def _tensor_name(reader: ProtobufReader, end: int) -> str:
    name = b""
    for _, tag, value in reader.fields(end):
        if tag == _TENSOR_NAME:
            name = reader.text(value)
    return name.decode("utf-8", "replace")
