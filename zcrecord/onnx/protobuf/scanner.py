"""The one pass over a model that finds every tensor in it, driven by the table in `schema`.

What it passes stays in the window's skeleton, each tensor with something else in place of its values. What becomes of
a tensor is left to a `Tensors` object, of its values to `values`.
"""

from __future__ import annotations

from zcrecord import dtypes
from zcrecord.codec.file_types import wrong_type
from zcrecord.codec.layout import MAX_RANK
from zcrecord.errors import OnnxError, printable
from zcrecord.onnx.names import seal

from .nodes import is_plain, plain_runs
from .properties import read_pair
from .reader import HEADER, LEN, MAX_NESTING, MAX_TEXT, OPEN_END, VARINT, ProtobufReader, encode_varint
from .schema import ATTRIBUTE, CHILDREN, FUNCTION, GRAPH, MODEL, NODE, TENSOR, TEXTS, Child, Scope, Tensor, Tensors
from .values import BOOL, STRING, Values

__all__ = ["Scanner", "check_head", "check_start"]

_NODE_TAG = {GRAPH: 1 << 3 | LEN, FUNCTION: 7 << 3 | LEN}
_TENSOR_TAG = {GRAPH: 5 << 3 | LEN, ATTRIBUTE: 10 << 3 | LEN}

# Tags in TensorProto. All fields of values may come packed or one by one.
_DIMS, _DIMS_PACKED, _DATA_TYPE, _SEGMENT, _NAME, _RAW_DATA = 0x08, 0x0A, 0x10, 0x1A, 0x42, 0x4A
_EXTERNAL_DATA, _DATA_LOCATION = 0x6A, 0x70
_VALUES = frozenset({0x22, 0x25, 0x2A, 0x28, 0x32, 0x3A, 0x38, _RAW_DATA, 0x52, 0x51, 0x5A, 0x58})
_EXTERNAL = 1  # data_location
_MAX_ENTRIES = 16
_TAGS = frozenset(b"\x08\x12\x1a\x22\x28\x32\x3a\x42\x72")  # of a model's own fields, of one byte
_LOOKED = 64  # bytes of a model that tell it from other files
_SHORT = [bytes([n]) for n in range(128)]  # varints
# Bits of the types whose raw_data is stored as it is, whatever is in it.
_AS_IS = {code: d.bits for code, d in dtypes.by_onnx.items() if not d.packed and code not in (BOOL, STRING)}


def check_start(window: ProtobufReader) -> None:
    """Look at a model's first bytes, which stay in the window.

    Raises:
        OnnxError: there are none, or they are those of something else, which the message names.
    """
    window.fill(_LOOKED)
    check_head(bytes(window.view[: window.limit][:_LOOKED]))


def check_head(head: bytes) -> None:
    """Do the same for first bytes that were read already; of text, which a model may begin with, only what is none.

    Raises:
        OnnxError: as `check_start` does.
    """
    if not head:
        raise OnnxError("empty, not an ONNX model")
    if what := wrong_type(head, "an ONNX model", sure=head[0] > 127 or head[0] in _TAGS):
        raise OnnxError(what, offset=0)


class Scanner:
    """One pass over a model."""

    def __init__(self, window: ProtobufReader, values: Values, tensors: Tensors) -> None:
        self._window = window
        self._values = values
        self._tensors = tensors
        self._runs: dict[int, int] = {}  # offset of a run of plain nodes -> offset of its end

    def scan(self) -> Scope:
        """Read a ModelProto to the end of the stream and return its scope.

        Raises:
            OnnxError: it is malformed, or uses what is not supported; with the byte at which that was noticed.
        """
        root = Scope(MODEL, None, 0, 0)
        self._message(root, OPEN_END, 0)
        self._window.finish()
        if root.counts is None:
            raise self._window.fail("no graph", do="this is not an ONNX model, or only the beginning of one")
        self._finish(root)
        return root

    def _message(self, scope: Scope, end: int, depth: int) -> None:
        window = self._window
        if depth > MAX_NESTING:
            raise window.fail(f"messages nested more than {MAX_NESTING} deep", do="flatten the model")
        children, texts = CHILDREN[scope.kind], TEXTS[scope.kind]
        node_tag, tensor_tag, judged = _NODE_TAG.get(scope.kind, -1), _TENSOR_TAG.get(scope.kind, -1), 0
        while window.base + window.pos < end:
            if window.pos == window.limit and window.at_end() and end == OPEN_END:
                return
            ahead = window.buffer[window.pos]
            if ahead == node_tag:
                here = window.base + window.pos
                if here >= judged:
                    runs, judged = plain_runs(window, node_tag, end)
                    self._runs |= runs
                past = self._runs.pop(here, 0)
                if past:
                    window.pos = past - window.base
                    continue
            elif ahead == tensor_tag and depth < MAX_NESTING and self._pass_whole_tensors(scope, tensor_tag, end):
                continue
            start, tag, value = window.header(end)
            child = children.get(tag)
            if child is None:
                if tag in texts:
                    scope.name(tag >> 3, window.text(value))
                elif tag & 7 != VARINT:
                    window.skip(tag, value, end, depth)
            elif child.kind is TENSOR:
                self._tensor(scope, child, tag, value, start, depth)
            elif child.kind is not NODE or not self._pass_plain_node(tag, value, start):
                self._child(scope, child, tag, value, start, depth)

    def _pass_plain_node(self, tag: int, nbytes: int, start: int) -> bool:
        """Pass a node without tensors and graphs; of any other, pass nothing."""
        window = self._window
        if nbytes <= window.limit - window.pos:
            plain = is_plain(window, window.pos + nbytes)
        else:
            window.drop(start)
            plain = window.hold(nbytes) and is_plain(window, window.pos + nbytes)
            if plain:
                window.skeleton.tail += encode_varint(tag) + encode_varint(nbytes)
                window.keep()
        if plain:
            window.pos += nbytes
        return plain

    def _child(self, scope: Scope, child: Child, tag: int, nbytes: int, start: int, depth: int) -> None:
        """Read a message that may hold tensors."""
        window, skeleton = self._window, self._window.skeleton
        window.drop(start)
        inner = (scope.single or {}).get(tag)
        if not isinstance(inner, Scope):
            inner = Scope(child.kind, scope, tag >> 3, scope.count(tag))
        skeleton.tail += encode_varint(tag)
        mark = skeleton.open(nbytes)
        window.keep()
        self._message(inner, window.base + window.pos + nbytes, depth + 1)
        window.drop(window.pos)
        skeleton.close(mark)
        window.keep()
        self._close(scope, child, tag, inner)

    def _close(self, scope: Scope, child: Child, tag: int, inner: Scope | Tensor) -> None:
        """Finish what one message held, unless a second one may be merged into it."""
        if not child.repeated:
            scope.single = {} if scope.single is None else scope.single
            scope.single[tag] = inner
        elif isinstance(inner, Scope):
            self._finish(inner)
        else:
            self._tensors.finish(inner)

    def _finish(self, scope: Scope) -> None:
        """Finish the tensors in singular fields, now that nothing can be merged into the message any more."""
        for inner in (scope.single or {}).values():
            if isinstance(inner, Scope):
                self._finish(inner)
            else:
                self._tensors.finish(inner)
        seal(scope)

    def _tensor(self, scope: Scope, child: Child, tag: int, nbytes: int, start: int, depth: int) -> None:
        """Read one TensorProto, or a further part of one."""
        window, skeleton = self._window, self._window.skeleton
        if depth >= MAX_NESTING:
            raise window.fail(f"messages nested more than {MAX_NESTING} deep", do="flatten the model")
        window.drop(start)
        t = (scope.single or {}).get(tag)
        again = isinstance(t, Tensor)
        if not isinstance(t, Tensor):
            t = Tensor(scope, tag >> 3, scope.count(tag), window.base + start)
            self._tensors.start(t)
        skeleton.tail += encode_varint(tag)
        mark = skeleton.open()
        window.keep()
        body = window.base + window.pos
        t.parts.append((body, body + nbytes))
        self.fields(t, body + nbytes, depth + 1)
        window.drop(window.pos)
        if not again:
            self._tensors.stub(t, skeleton)
        skeleton.close(mark)
        window.keep()
        self._values.settle(t)
        self._close(scope, child, tag, t)

    def _pass_whole_tensors(self, scope: Scope, tag: int, end: int) -> bool:
        """Pass the tensors next in the window, as long as each is dims, data_type, name and raw_data, no more.

        Exporters write little else. One that differs, or is not whole in the window, is left to be read thoroughly:
        nothing of it is passed, and nothing refused. Returns whether there was any.
        """
        window, buffer, view = self._window, self._window.buffer, self._window.view
        varint, length, store, tail = window.varint, window.length, self._tensors.whole, window.skeleton.tail
        start, limit = window.pos, min(window.limit, end - window.base)
        place = first_place = scope.count(tag, 0)
        while start + HEADER <= limit and buffer[start] == tag:
            nbytes, first = buffer[start + 1], start + 2
            if nbytes > 127:
                short = (buffer[first] << 7) + nbytes - 128, first + 1
                nbytes, first = length(start + 1) if buffer[first] > 127 else short
            stop = first + nbytes
            if stop > limit:
                break
            at, count, dims = first, 1, []
            while buffer[at] == _DIMS and at < stop:
                dim, at = buffer[at + 1], at + 2
                if dim > 127:
                    dim, at = varint(at - 1) if buffer[at] > 127 else ((buffer[at] << 7) + dim - 128, at + 1)
                dims.append(dim)
                count *= dim
            code = buffer[at + 1]
            bits = _AS_IS.get(code)
            if bits is None or buffer[at] != _DATA_TYPE or not count or len(dims) > MAX_RANK:
                break
            at, name = at + 2, b""
            if buffer[at] == _NAME:
                size, at = buffer[at + 1], at + 2
                if size > 127:
                    size, at = length(at - 1)
                name, at = bytes(view[at : at + size]), at + size
            kept = at
            if at >= stop or buffer[at] != _RAW_DATA or len(name) > MAX_TEXT:
                break
            size, at = buffer[at + 1], at + 2
            if size > 127:
                size, at = length(at - 1) if buffer[at] > 127 else ((buffer[at] << 7) + size - 128, at + 1)
            if at + size != stop or count * bits != size * 8:
                break
            if place == first_place:
                window.drop(start)
            window.pos = at
            stub = store(scope, tag >> 3, place, window.base + start, name, code, dims, view[at:stop])
            tail.append(tag)
            size = kept - first + len(stub)
            tail += encode_varint(size) if size > 127 else _SHORT[size]
            tail += view[first:kept]
            tail += stub
            place, start = place + 1, stop
        if place == first_place:
            return False
        self._tensors.passed()
        scope.count(tag, place - first_place)
        window.pos = start
        window.keep()
        return True

    def fields(self, t: Tensor, end: int, depth: int = 0) -> None:
        """Read the fields of a TensorProto from where the window stands up to `end`, an offset in the stream."""
        window, before = self._window, t.data_type  # of the part before: protobuf merges what comes in several
        while window.base + window.pos < end:
            start, tag, value = window.header(end)
            if tag == _DIMS:
                self._dim(t, value)
            elif tag == _DATA_TYPE:
                if before not in (0, value & 0xFFFFFFFF):
                    what = f"data_type {before} in one part, and {value & 0xFFFFFFFF} in another"
                    raise window.fail(what, start, tensor=t.label, do="export the model again")
                t.data_type = value & 0xFFFFFFFF
            elif tag == _NAME:
                t.name = window.text(value)
            elif tag in _VALUES:
                self._values.take(t, tag, value, start, end)
            elif tag in (_EXTERNAL_DATA, _DATA_LOCATION):
                window.drop(start)
                if tag == _EXTERNAL_DATA:
                    self._entry(t, window.base + window.pos + value)
                elif value > _EXTERNAL:
                    what = f"data_location {value} is neither DEFAULT nor EXTERNAL"
                    raise window.fail(what, start, tensor=t.label, do="upgrade zcrecord")
                else:
                    t.external = value == _EXTERNAL
                window.keep()
            elif tag == _DIMS_PACKED:
                self._packed_dims(t, value)
            elif tag == _SEGMENT:
                do = "join the segments and export the model again"
                raise window.fail("it is one segment of a tensor, which is not supported", start, tensor=t.label, do=do)
            elif tag & 7 != VARINT:
                window.skip(tag, value, end, depth)

    def _dim(self, t: Tensor, value: int) -> None:
        t.dims.append(value if value < 1 << 63 else value - (1 << 64))
        if len(t.dims) > MAX_RANK:
            raise self._window.fail(f"more than {MAX_RANK} dimensions", tensor=t.label, do="reshape the tensor")

    def _packed_dims(self, t: Tensor, nbytes: int) -> None:
        window = self._window
        data = window.text(min(nbytes, 10 * MAX_RANK + 10))
        at = window.pos - len(data)
        while at < window.pos:
            value, at = window.varint(at)
            self._dim(t, value)
        if at > window.pos:
            raise window.fail("dims end inside a varint", tensor=t.label)

    def _entry(self, t: Tensor, end: int) -> None:
        """Read one key and value of external_data."""
        window = self._window
        key, text = read_pair(window, end)
        t.entries = {} if t.entries is None else t.entries
        if key in t.entries or len(t.entries) == _MAX_ENTRIES:
            what = f"external_data key '{printable(key)}' twice" if key in t.entries else "too many external_data keys"
            raise window.fail(what, tensor=t.label, do="export the model again")
        t.entries[key] = text
