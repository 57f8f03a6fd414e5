"""Finds every tensor of a model in one pass, by a table of the messages that can hold one.

The skeleton gets all that is passed, each tensor with a stub in place of its values. Tensors and their values go to a
`TensorSink`; reading one is left to `tensors`, naming it to `names`.

Most nodes hold neither tensor nor graph. Those that lie side by side in the buffer are passed in step, one field each
per round, so that a model of 20,000 nodes takes some hundred numpy calls. All other nodes are read as any message is;
faults are found there alone.

Source: onnx.proto (IR version 13).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zcrecord import dtypes
from zcrecord.codec.file_types import wrong_type
from zcrecord.codec.layout import MAX_RANK
from zcrecord.errors import OnnxError, RecordError
from zcrecord.onnx.names import ATTRIBUTE, FUNCTION, GRAPH, MODEL, NODE, OPERATOR, SPARSE, TENSOR, TRAINING, Scope, seal

from . import reader as wire
from .reader import HEADER, LEN, MAX_NESTING, MAX_TEXT, OPEN_END, VARINT, Array, ProtobufReader, Skeleton, encode_varint
from .tensors import BOOL, DATA_TYPE, DIMS, NAME, RAW, STRING, TensorMessage, TensorReader, ValueSink


class ChildField(NamedTuple):
    """A field that leads on to tensors: the type of its message, and whether there may be several."""

    kind: str
    repeated: bool


# Message -> field number -> the message to descend into.
_TABLE: dict[str, dict[int, ChildField]] = {
    MODEL: {7: ChildField(GRAPH, False), 20: ChildField(TRAINING, True), 25: ChildField(FUNCTION, True)},
    GRAPH: {1: ChildField(NODE, True), 5: ChildField(TENSOR, True), 15: ChildField(SPARSE, True)},
    NODE: {5: ChildField(ATTRIBUTE, True)},
    ATTRIBUTE: {
        5: ChildField(TENSOR, False),
        6: ChildField(GRAPH, False),
        10: ChildField(TENSOR, True),
        11: ChildField(GRAPH, True),
        22: ChildField(SPARSE, False),
        23: ChildField(SPARSE, True),
    },
    SPARSE: {1: ChildField(TENSOR, False), 2: ChildField(TENSOR, False)},
    FUNCTION: {7: ChildField(NODE, True), 11: ChildField(ATTRIBUTE, True)},
    TRAINING: {1: ChildField(GRAPH, False), 2: ChildField(GRAPH, False)},
}
# Message -> field numbers of the texts that name it: a node's outputs, name and operator; name, domain, overload.
_TEXTS: dict[str, tuple[int, ...]] = {NODE: (2, 3, OPERATOR), ATTRIBUTE: (1,), FUNCTION: (1, 10, 13)}

CHILDREN = {kind: {n << 3 | LEN: child for n, child in fields.items()} for kind, fields in _TABLE.items()}  # by tag
_TEXT_TAGS = {kind: frozenset(n << 3 | LEN for n in _TEXTS.get(kind, ())) for kind in _TABLE}
_NODE_TAG = {GRAPH: 1 << 3 | LEN, FUNCTION: 7 << 3 | LEN}
_TENSOR_TAG = {GRAPH: 5 << 3 | LEN, ATTRIBUTE: 10 << 3 | LEN}
_TAGS = frozenset(b"\x08\x12\x1a\x22\x28\x32\x3a\x42\x72")  # of a model's own fields, of one byte
_LOOKED = 64  # bytes of a model that tell it from other files
_SHORT = [bytes([n]) for n in range(128)]  # varints
# Bits of the types whose raw_data is stored unchanged, whatever its bytes.
_AS_IS = {code: d.bits for code, d in dtypes.by_onnx.items() if not d.packed and code not in (BOOL, STRING)}

STUB_KEY = b"zcrecord"
# TensorProto.data_location = EXTERNAL, external_data { key, value } up to a value of so many digits.
_STUBS = [b"\x70\x01\x6a%c\x0a%c%s\x12%c" % (len(STUB_KEY) + n + 4, len(STUB_KEY), STUB_KEY, n) for n in range(20)]

_ATTRIBUTE = 5 << 3 | LEN  # NodeProto.attribute
_HOLDING = frozenset(CHILDREN[ATTRIBUTE])
_FEW = 16  # nodes; for fewer, looking at each is quicker
_MANY = 1 << 14
_ROUNDS = 200  # fields of a node

# First byte of a field, when its tag and its varint take one byte each, to the bytes before its data; 0 otherwise.
_BEFORE = {VARINT: 2, wire.FIXED64: 9, LEN: 2, wire.FIXED32: 5}
_STEP = np.array([_BEFORE.get(tag & 7, 0) if 8 <= tag < 128 else 0 for tag in range(256)])
_INNER_STEP = np.array([0 if tag in _HOLDING else step for tag, step in enumerate(_STEP)])  # in an attribute
_SIZED = np.array([8 <= tag < 128 and tag & 7 == LEN for tag in range(256)])
_VARINTS = np.array([8 <= tag < 128 and tag & 7 == VARINT for tag in range(256)])
_TYPE = 0xA0  # with a 1, the tag of AttributeProto.type, which every attribute has; its varint takes one byte


class TensorSink(ValueSink):
    """Receives the tensors that a scan finds, and their values.

    Of each tensor either `add_whole` is called, or `start`, `stub` and `finish`.

    Attributes:
        named: the tensors, in the order in which they start; None for one that is not finished.
    """

    def __init__(self) -> None:
        self.named: list[Any] = []

    def add_whole(self, scope: Scope, field: int, place: int, offset: int, name: bytes, code: int, dims: list[int],
                  data: memoryview) -> bytes:  # fmt: skip
        """Take a small tensor in the commonest form and return the fields that stand for its values.

        `data` is its raw_data, of the right length and not empty; the reader stands at its first byte.
        """
        raise NotImplementedError

    def write_whole(self) -> None:
        """Write the data that `add_whole` was given, before it becomes invalid."""

    def start(self, t: TensorMessage) -> None:
        """Number a tensor that begins."""
        t.index = len(self.named)
        self.named.append(None)

    def stub(self, t: TensorMessage, skeleton: Skeleton) -> None:
        """Add the fields that stand for a tensor's values to the skeleton."""
        skeleton.tail += stub(t.index)

    def finish(self, t: TensorMessage, tensors: TensorReader) -> None:
        """Take a tensor that was read whole; `tensors` checks it, and closes its payload."""
        raise NotImplementedError


def stub(index: int) -> bytes:
    """Return the fields that stand for the values of the tensor with this number."""
    digits = b"%d" % index
    return _STUBS[len(digits)] + digits


def check_start(reader: ProtobufReader) -> None:
    """Check a model's first bytes, as `check_head` does; they stay in the reader."""
    reader.fill(_LOOKED)
    check_head(bytes(reader.view[: reader.limit][:_LOOKED]))


def check_head(head: bytes) -> None:
    """Raise OnnxError if a file is empty or of another type, by its first bytes.

    Text is refused only if no model can begin with it.
    """
    if not head:
        raise OnnxError("empty, not an ONNX model")
    if fault := wrong_type(head, "an ONNX model", sure=head[0] > 127 or head[0] in _TAGS):
        raise OnnxError(fault, offset=0)


class Scanner:
    """One pass over a model."""

    def __init__(self, reader: ProtobufReader, sink: TensorSink) -> None:
        self._reader = reader
        self._sink = sink
        self._tensors = TensorReader(reader, sink)
        self._runs: dict[int, int] = {}  # offset of a run of plain nodes -> offset of its end

    def scan(self) -> Scope:
        """Read a ModelProto to the end of the stream and return its scope."""
        root = Scope(MODEL, None, 0, 0)
        self._read_message(root, OPEN_END, 0)
        self._reader.finish()
        if root.counts is None:
            raise self._reader.fail("no graph", do="this is not an ONNX model, or only the beginning of one")
        self._finish(root)
        return root

    def _read_message(self, scope: Scope, end: int, depth: int) -> None:
        """Read the fields of one message up to an offset of the stream: tensors to the sink, plain nodes unread."""
        reader, buffer = self._reader, self._reader.buffer
        if depth > MAX_NESTING:
            raise reader.fail(f"messages nested more than {MAX_NESTING} deep", do="flatten the model")
        children, texts = CHILDREN[scope.kind], _TEXT_TAGS[scope.kind]
        node_tag, tensor_tag = _NODE_TAG.get(scope.kind, -1), _TENSOR_TAG.get(scope.kind, -1)
        examined = 0  # the offset up to which nodes were, for runs of plain ones
        while reader.base + reader.pos < end:
            if reader.pos == reader.limit and reader.at_end() and end == OPEN_END:
                return
            next_tag = buffer[reader.pos]
            if next_tag == node_tag and depth < MAX_NESTING - 1:  # a node's attributes are one deeper
                offset = reader.base + reader.pos
                if offset >= examined:
                    runs, examined = _plain_runs(reader, node_tag, end)
                    self._runs |= runs
                if run_end := self._runs.pop(offset, 0):
                    reader.pos = run_end - reader.base
                    continue
            elif next_tag == tensor_tag and depth < MAX_NESTING and self._pass_whole_tensors(scope, tensor_tag, end):
                continue
            start, tag, value = reader.header(end)
            child = children.get(tag)
            if child is None:
                if tag in texts:
                    scope.keep_text(tag >> 3, reader.text(value))
                elif tag & 7 != VARINT:
                    reader.skip(tag, value, end, depth)
            elif child.kind is TENSOR:
                self._read_tensor(scope, child, tag, value, start, depth)
            else:
                self._read_child(scope, child, tag, value, start, depth)

    def _read_child(self, scope: Scope, child: ChildField, tag: int, nbytes: int, start: int, depth: int) -> None:
        """Read a message of `nbytes` in a field of `scope`, whose header began at `start` of the buffer."""
        reader = self._reader
        inner = None if scope.single is None else scope.single.get(tag)
        if inner is None:
            inner = Scope(child.kind, scope, tag >> 3, scope.count(tag))
        mark = reader.open(start, tag, nbytes)
        self._read_message(inner, reader.base + reader.pos + nbytes, depth + 1)
        reader.close(mark)
        self._end(scope, child, tag, inner)

    def _end(self, scope: Scope, child: ChildField, tag: int, inner: Scope | TensorMessage) -> None:
        """Finish a message that was read to its end, or keep one of a singular field, as another may continue it."""
        if not child.repeated:
            scope.single = {} if scope.single is None else scope.single
            scope.single[tag] = inner
        elif isinstance(inner, TensorMessage) or inner.counts is not None:  # else it holds nothing that needs its name
            self._finish(inner)

    def _finish(self, message: Scope | TensorMessage) -> None:
        """Finish a tensor, or those in a message's singular fields: nothing can be merged into them any more."""
        if isinstance(message, Scope):
            for inner in (message.single or {}).values():
                self._finish(inner)
            seal(message)
            return
        try:
            self._sink.finish(message, self._tensors)
        except RecordError as error:
            raise error.located(tensor=message.label or None, offset=message.offset) from error.__cause__

    def _read_tensor(self, scope: Scope, child: ChildField, tag: int, nbytes: int, start: int, depth: int) -> None:
        """Read one TensorProto, or a further part of one; the arguments are those of `_read_child`."""
        reader = self._reader
        if depth >= MAX_NESTING:
            raise reader.fail(f"messages nested more than {MAX_NESTING} deep", do="flatten the model")
        t = None if scope.single is None else scope.single.get(tag)
        is_further_part = t is not None
        if t is None:
            t = TensorMessage(scope, tag >> 3, scope.count(tag), reader.base + start)
            self._sink.start(t)
        mark = reader.open(start, tag, nbytes)
        body = reader.base + reader.pos
        t.parts.append((body, body + nbytes))
        self._tensors.read(t, body + nbytes, depth + 1)
        if not is_further_part and reader.skeleton is not None:
            reader.drop(reader.pos)
            self._sink.stub(t, reader.skeleton)
            reader.keep()
        reader.close(mark)
        self._end(scope, child, tag, t)

    def _pass_whole_tensors(self, scope: Scope, tag: int, end: int) -> bool:
        """Pass the next tensors that have dims, data_type, name and raw_data alone; return True if there was any.

        Exporters write little else. A tensor that differs, or is not buffered whole, is left to `_read_tensor`. Lengths
        and dims of one and two bytes are decoded in place, since a call for each would cost more than all else here.
        """
        reader, add = self._reader, self._sink.add_whole
        buffer, view, varint, length = reader.buffer, reader.view, reader.varint, reader.length
        tail = None if reader.skeleton is None else reader.skeleton.tail
        start, limit = reader.pos, min(reader.limit, end - reader.base)
        place = first_place = scope.count(tag, 0)
        while start + HEADER <= limit and buffer[start] == tag:
            size, body = buffer[start + 1], start + 2
            if size > 127:
                size, body = length(start + 1) if buffer[body] > 127 else ((buffer[body] << 7) + size - 128, body + 1)
            if (stop := body + size) > limit:
                break
            pos, count, dims = body, 1, []
            while buffer[pos] == DIMS and pos < stop:
                dim, pos = buffer[pos + 1], pos + 2
                if dim > 127:
                    dim, pos = varint(pos - 1) if buffer[pos] > 127 else ((buffer[pos] << 7) + dim - 128, pos + 1)
                dims.append(dim)
                count *= dim
            bits = _AS_IS.get(code := buffer[pos + 1])
            if bits is None or buffer[pos] != DATA_TYPE or not count or len(dims) > MAX_RANK:
                break
            pos, name = pos + 2, b""
            if buffer[pos] == NAME:
                size, pos = buffer[pos + 1], pos + 2
                if size > 127:
                    size, pos = length(pos - 1)
                name, pos = bytes(view[pos : pos + size]), pos + size
            raw_start = pos
            if pos >= stop or buffer[pos] != RAW or len(name) > MAX_TEXT:
                break
            size, pos = buffer[pos + 1], pos + 2
            if size > 127:
                size, pos = length(pos - 1) if buffer[pos] > 127 else ((buffer[pos] << 7) + size - 128, pos + 1)
            if pos + size != stop or count * bits != size * 8:
                break
            if place == first_place:
                self._tensors.close_open()
                reader.drop(start)
            reader.pos = pos
            stub = add(scope, tag >> 3, place, reader.base + start, name, code, dims, view[pos:stop])
            if tail is not None:
                tail.append(tag)
                size = raw_start - body + len(stub)
                tail += encode_varint(size) if size > 127 else _SHORT[size]
                tail += view[body:raw_start]
                tail += stub
            place, start = place + 1, stop
        if place == first_place:
            return False
        self._sink.write_whole()
        scope.count(tag, place - first_place)
        reader.pos = start
        reader.keep()
        return True


def _plain_runs(reader: ProtobufReader, tag: int, end: int) -> tuple[dict[int, int], int]:
    """Return the next runs of plain nodes, offset -> end; and the offset up to which nodes were examined.

    A plain node holds neither tensor nor graph. `end` is the offset at which the nodes' message ends, `tag` that of
    their field, one byte.
    """
    buffer, pos, limit = reader.buffer, reader.pos, min(reader.limit, end - reader.base)
    starts: list[int] = []
    ends: list[int] = []
    while pos < limit and buffer[pos] == tag:
        nbytes, start = buffer[pos + 1], pos + 2
        if nbytes > 127:
            nbytes, start = nbytes & 127 | buffer[start] << 7, start + 1
        if nbytes > 16383 or start + nbytes > limit or len(starts) == _MANY:  # three bytes of length, or cut off
            break
        pos = start + nbytes
        starts.append(start)
        ends.append(pos)
    examined = reader.base + max(pos, reader.pos + 1)
    if len(starts) < _FEW:
        return {}, examined
    are_plain = _are_plain(np.frombuffer(reader.view, np.uint8), np.array(starts), np.array(ends))
    edges = np.flatnonzero(np.diff(are_plain, prepend=False, append=False)).tolist()
    bounds = [reader.base + reader.pos, *(reader.base + e for e in ends)]
    return {bounds[first]: bounds[end] for first, end in zip(edges[0::2], edges[1::2], strict=True)}, examined


def _are_plain(data: Array, starts: Array, ends: Array) -> npt.NDArray[np.bool_]:
    """Return True for each node in [start, end) of `data` that certainly is plain and well formed."""
    are_plain = np.zeros(len(starts), bool)
    nodes = np.arange(len(starts))  # undecided ones; with an element for each, the next four arrays
    pos, stop = starts, ends  # stop: of the attribute a node is in, otherwise of the node
    inside = np.zeros(len(starts), bool)  # an attribute
    for _ in range(_ROUNDS):
        leaving = inside & (pos == stop)
        stop = np.where(leaving, ends[nodes], stop)
        inside &= ~leaving
        are_plain[nodes[~inside & (pos == stop)]] = True
        unfinished = pos < stop
        nodes, pos, stop, inside = nodes[unfinished], pos[unfinished], stop[unfinished], inside[unfinished]
        if len(nodes) < _FEW:
            break
        pos, stop, inside, may_be_plain = _advance(data, pos, stop, inside)
        nodes, pos = nodes[may_be_plain], pos[may_be_plain]
        stop, inside = stop[may_be_plain], inside[may_be_plain]
    return are_plain


def _advance(data: Array, pos: Array, stop: Array, inside: Array) -> tuple[Array, Array, Array, Array]:
    """Pass one field of each node, or step into an attribute.

    Returns the new `pos`, `stop` and `inside` of `_are_plain`, and True for each node that may still be plain.
    """
    tag, first, second = data.take(pos), data.take(pos + 1), data.take(pos + 2)
    step = np.where(inside, _INNER_STEP.take(tag), _STEP.take(tag))
    has_length = _SIZED.take(tag)
    is_wide = has_length & (first > 127)  # a length of two bytes, or more
    length = np.where(has_length, first & 127, 0) + np.where(is_wide, second.astype(np.int64) << 7, 0)
    may_be_plain = (step > 0) & ~(is_wide & (second > 127))
    is_type = inside & (tag == _TYPE) & (first == 1) & (second < 128)
    body = pos + np.where(is_type, 3, step + is_wide)
    (long,) = np.nonzero(_VARINTS.take(tag) & (first > 127))
    if len(long):  # a negative number takes 10 bytes
        is_last = data.take(pos[long, None] + np.arange(2, 11)) < 128
        body[long] += is_last.argmax(1) + 1
        may_be_plain[long] &= is_last.any(1)
    entering = ~inside & (tag == _ATTRIBUTE)
    end = body + length
    may_be_plain = (may_be_plain | is_type) & (end <= stop)
    return np.where(entering, body, end), np.where(entering, end, stop), inside | entering, may_be_plain
