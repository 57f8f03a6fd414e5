"""Reads a TensorProto: its fields, and its values from the stream into a payload.

raw_data passes unchanged; typed data is decoded a piece at a time; strings get the table of ends that archives have.
Values become canonical: bools are 0 or 1, bits after the last packed element are zero. The messages around tensors are
left to `scanner`, the payloads to a `ValueSink`.

Source: onnx.proto's comments on TensorProto, and `onnx.numpy_helper.to_array`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK, NONE
from zcrecord.dtypes import DType
from zcrecord.errors import LimitError, OnnxError, printable
from zcrecord.onnx.names import Scope
from zcrecord.tensors.packed import pack_bits

from .reader import LEN, SLACK, VARINT, Array, ProtobufReader, VarintDecoder, encode_varint, read_pair

BOOL, STRING, UINT32 = 9, 8, 12  # data_type
MAX_EARLY = 1 << 20  # bytes of varints that may come before the data_type that explains them
_PIECE = 1 << 17  # bytes of varints decoded at a time: they fit a cache
_TOGETHER = 1 << 16  # single varints, or bytes of single floats, that are written together
_WIDEST = 8  # bytes that a varint of one byte may stand for
_MAX_ENTRIES = 16  # of external_data
_EXTERNAL = 1  # data_location
_AGAIN = "export the model again"
_TOO_LONG = "{} holds a varint of more than 10 bytes"
_CONTINUED = re.compile(rb"[\x80-\xff]{10}")  # bytes of a varint that an eleventh one follows

# Tags in TensorProto. All fields of values may come packed or one by one.
DIMS, DATA_TYPE, NAME, RAW = 0x08, 0x10, 0x42, 0x4A
_DIMS_PACKED, _SEGMENT, _EXTERNAL_DATA, _DATA_LOCATION = 0x0A, 0x1A, 0x6A, 0x70
_VALUES = frozenset({0x22, 0x25, 0x2A, 0x28, 0x32, 0x3A, 0x38, RAW, 0x52, 0x51, 0x5A, 0x58})

FLOAT_DATA, INT32_DATA, STRING_DATA, INT64_DATA, RAW_DATA, DOUBLE_DATA, UINT64_DATA = 4, 5, 6, 7, 9, 10, 11
FIELDS = {4: "float_data", 5: "int32_data", 6: "string_data", 7: "int64_data", 9: "raw_data", 10: "double_data",
          11: "uint64_data"}  # fmt: skip


def _int32_form(kind: DType) -> tuple[str, int, int]:
    """Return numpy type, minimum and maximum of entries of int32_data: elements, or bytes of packed elements."""
    bits = kind.bits
    if kind.name == "bool":
        return "?", -(2**31), 2**31 - 1
    if kind.name.startswith("int") and not kind.packed:
        return f"<i{bits // 8}", -(1 << bits - 1), (1 << bits - 1) - 1
    return f"<u{-(-bits // 8)}", 0, 255 if kind.packed and 8 % bits == 0 else (1 << bits) - 1


_INT32_FORMS = {  # of the types that have no other field, by ONNX data_type
    code: _int32_form(kind)
    for code, kind in dtypes.by_onnx.items()
    if 0 < kind.bits <= 32 and kind.c not in ("uint32_t", "float")
}
_TYPES = {
    RAW_DATA: set(dtypes.by_onnx) - {STRING},
    FLOAT_DATA: {code for code, kind in dtypes.by_onnx.items() if kind.c == "float"},
    INT32_DATA: set(_INT32_FORMS),
    STRING_DATA: {STRING},
    INT64_DATA: {code for code, kind in dtypes.by_onnx.items() if kind.c == "int64_t"},
    DOUBLE_DATA: {code for code, kind in dtypes.by_onnx.items() if kind.c == "double"},
    UINT64_DATA: {code for code, kind in dtypes.by_onnx.items() if kind.c in ("uint32_t", "uint64_t")},
}


class ValueState:
    """The values of one tensor as far as they were read; an instance has only the attributes that have changed."""

    field: int = 0  # of TensorProto, in which they came
    nbytes: int = 0  # passed so far, in stored form
    unread: int = 0  # bytes of varints passed without decoding them, not counted in `nbytes`
    payload: int = NONE
    closed: bool = False  # the payload is finished
    stored: tuple[int, int] | None = None  # data_type, and for packed ones the count, as they were stored
    last_byte: int = -1  # not written until it is known which of its bits count
    top: int = 0  # the greatest byte seen before the data_type was known
    early: bytearray | None = None  # varints that came before the data_type
    rest: Array | None = None  # of 3, 5 or 6 bits, say; not yet enough to pack
    ends: array[int] | None = None  # of strings


class TensorMessage:
    """The fields of one TensorProto as far as it was read, and its place in the model."""

    __slots__ = ("data_type", "dims", "entries", "external", "field", "index", "name", "offset", "parts", "place",
                 "scope", "values")  # fmt: skip

    def __init__(self, scope: Scope, field: int, place: int, offset: int) -> None:
        self.scope = scope  # the message that holds it
        self.field = field  # of that message
        self.place = place  # among those of the field
        self.offset = offset  # in the stream
        self.index = -1  # its number, for the sink
        self.parts: list[tuple[int, int]] = []  # of the stream, from offset to offset: protobuf may split a message
        self.name = b""
        self.dims: list[int] = []
        self.data_type = 0
        self.external = False
        self.entries: dict[str, str] | None = None  # of external_data
        self.values = ValueState()

    @property
    def dtype(self) -> DType | None:
        """Its element type; None if data_type is missing or unknown."""
        return dtypes.by_onnx.get(self.data_type)

    @property
    def packed(self) -> bool:
        """True if its elements are narrower than a byte, or its type is unknown."""
        kind = self.dtype
        return kind is None or kind.packed

    def expected(self) -> int:
        """Return the bytes that its shape and type take; of strings, those of the table of their ends."""
        kind = self.dtype
        if kind is None:
            return 0
        count = prod(self.dims)
        if kind is dtypes.STRING:
            return 8 * (count + 1) if count else 0
        return dtypes.nbytes(count, kind.bits)

    @property
    def label(self) -> str:
        """Its name for messages."""
        return self.name.decode("utf-8", "replace")


class ValueSink:
    """Receives the values of tensors, one payload at a time; this one drops them."""

    def begin(self, t: TensorMessage, nbytes: int) -> None:
        """Start the payload of a tensor, of about so many bytes."""

    def write(self, data: Any) -> None:
        """Append to the payload."""

    def end(self) -> int:
        """Finish the payload and return its id."""
        return 0

    def locate(self, _t: TensorMessage, _offset: int, _nbytes: int, /) -> bool:
        """Return True to take a run of values by its place in the stream: it is passed unread, and not written."""
        return False


class TensorReader:
    """Reads one TensorProto after the other from a stream, and passes their values to a sink.

    A payload stays open while its message continues elsewhere, as protobuf allows for a singular field that occurs
    twice, but not while another tensor's values come in between.
    """

    def __init__(self, reader: ProtobufReader, sink: ValueSink) -> None:
        self._reader = reader
        self._sink = sink
        self._open: TensorMessage | None = None
        self._decoder = VarintDecoder()

    def read(self, t: TensorMessage, end: int, depth: int = 0) -> None:
        """Read the fields of a TensorProto, or of a further part of one, up to an offset in the stream."""
        try:
            self._read_fields(t, end, depth)
        except OnnxError as error:
            error.located(tensor=t.label or None)
            raise

    def _read_fields(self, t: TensorMessage, end: int, depth: int) -> None:
        """Read the fields of a TensorProto; values that came before their type are decoded at the end."""
        reader, before = self._reader, t.data_type  # of the part before: protobuf merges the parts of a message
        while reader.base + reader.pos < end:
            start, tag, value = reader.header(end)
            if tag == DIMS:
                self._add_dim(t, value)
            elif tag == DATA_TYPE:
                if before not in (0, value & 0xFFFFFFFF):
                    raise self.fail(f"data_type {before} in one part, and {value & 0xFFFFFFFF} in another", start)
                t.data_type = value & 0xFFFFFFFF
            elif tag == NAME:
                t.name = reader.text(value)
            elif tag in _VALUES:
                self._read_values(t, tag, value, start, end)
            elif tag in (_EXTERNAL_DATA, _DATA_LOCATION):
                reader.drop(start)
                if tag == _EXTERNAL_DATA:
                    self._read_entry(t, reader.base + reader.pos + value)
                elif value > _EXTERNAL:
                    fault = f"data_location {value} is neither DEFAULT nor EXTERNAL"
                    raise reader.fail(fault, start, do="upgrade zcrecord")
                else:
                    t.external = value == _EXTERNAL
                reader.keep()
            elif tag == _DIMS_PACKED:
                self._read_packed_dims(t, value)
            elif tag == _SEGMENT:
                advice = "join the segments and export the model again"
                raise reader.fail("it is one segment of a tensor, which is not supported", start, do=advice)
            elif tag & 7 != VARINT:
                reader.skip(tag, value, end, depth)
        self._write_early(t)

    def _add_dim(self, t: TensorMessage, value: int) -> None:
        t.dims.append(value if value < 1 << 63 else value - (1 << 64))
        if len(t.dims) > MAX_RANK:
            raise self._reader.fail(f"more than {MAX_RANK} dimensions", do="reshape the tensor")

    def _read_packed_dims(self, t: TensorMessage, nbytes: int) -> None:
        reader = self._reader
        data = reader.text(min(nbytes, 10 * MAX_RANK + 10))  # one dim more than allowed, of 10 bytes each, is refused
        pos = reader.pos - len(data)
        while pos < reader.pos:
            value, pos = reader.varint(pos)
            self._add_dim(t, value)
        if pos > reader.pos:
            raise reader.fail("dims end inside a varint")

    def _read_entry(self, t: TensorMessage, end: int) -> None:
        key, text = read_pair(self._reader, end)
        t.entries = {} if t.entries is None else t.entries
        if key in t.entries:
            raise self.fail(f"external_data key '{printable(key)}' twice")
        if len(t.entries) == _MAX_ENTRIES:
            raise self.fail("too many external_data keys")
        t.entries[key] = text

    def _read_values(self, t: TensorMessage, tag: int, value: int, start: int, end: int) -> None:
        """Pass and store one value field: a run or a single element, and the single ones that follow.

        `start` is the reader's position of its header, `end` the offset at which the tensor's message ends.
        """
        reader, number, kind = self._reader, tag >> 3, tag & 7
        reader.drop(start)
        if kind != LEN or value or number in (RAW_DATA, STRING_DATA):  # an empty run is no value
            self._claim_field(t, number, start)
            self._write_early(t)  # in order
            if number == RAW_DATA:
                self._read_raw(t, value)
            elif number == STRING_DATA:
                self._read_string(t, value)
            elif number in (FLOAT_DATA, DOUBLE_DATA):
                self._read_floats(t, tag, value, end)
            elif kind == LEN:
                self._read_packed_run(t, number, value)
            else:
                self._read_varints(t, tag, value, end)
        reader.keep()

    def fail(self, fault: str, pos: int | None = None) -> OnnxError:
        """Return the error for a fault of a tensor, at a position of the reader."""
        return self._reader.fail(fault, pos, do=_AGAIN)

    def _claim_field(self, t: TensorMessage, number: int, start: int) -> None:
        """Note the field of the values, at `start`; OnnxError for another one, raw_data twice, or a closed payload."""
        values = t.values
        if values.field and (values.field != number or number == RAW_DATA):
            twice = "twice" if values.field == number else f"besides {FIELDS[values.field]}"
            raise self.fail(f"{FIELDS[number]} {twice}; values come in one field, once", start)
        if values.closed:
            raise self.fail("values in two places, with those of another tensor in between", start)
        values.field = number
        if t.data_type and t.data_type not in _TYPES[number]:
            raise self._wrong_field(t)

    def _wrong_field(self, t: TensorMessage) -> OnnxError:
        if t.dtype is None:
            return self._unknown_type(t)
        field = " or ".join(FIELDS[n] for n, types in _TYPES.items() if t.data_type in types)
        return self.fail(f"{t.dtype.name} keeps its values in {field}, got {FIELDS[t.values.field]}")

    def _unknown_type(self, t: TensorMessage) -> OnnxError:
        fault = f"data_type {t.data_type} is not known here" if t.data_type else "no data_type"
        return self._reader.fail(fault, do=f"{_AGAIN}, or upgrade zcrecord")

    def write(self, t: TensorMessage, data: Any, estimate: int = 0) -> None:
        """Make values in stored form canonical, and append them to the payload, of about `estimate` bytes in all."""
        values = t.values
        if self._open is not t:
            self._begin(t, estimate or len(data))
        values.nbytes += len(data)
        if not t.data_type or t.data_type == BOOL:
            octets = np.frombuffer(data, np.uint8)
            top = int(octets.max(initial=0))
            if not t.data_type:
                values.top = max(values.top, top)  # refused if they turn out to be bools
            elif top > 1:
                data = (octets != 0).view(np.uint8).data
        if not len(data):
            return
        if values.last_byte >= 0:
            self._sink.write(bytes([values.last_byte]))
            values.last_byte = -1
        if t.packed:  # the last byte of all may have pad bits to clear
            values.last_byte = data[-1]
            data = data[:-1]
        self._sink.write(data)

    def count(self, t: TensorMessage, nbytes: int) -> None:
        """Count bytes as values of a tensor without writing any: those of external data that are not copied."""
        self._begin(t, nbytes)
        t.values.nbytes += nbytes
        t.values.last_byte = 0 if t.packed else -1

    def _begin(self, t: TensorMessage, estimate: int) -> None:
        """Begin the tensor's payload, of about so many bytes, unless it is open; closes another one."""
        if self._open is not t:
            self.close_open()
            self._sink.begin(t, max(estimate, t.expected()))
            self._open = t
            t.values.stored = t.data_type, -1

    def _pass_unread(self, t: TensorMessage, nbytes: int, counted: int) -> bool:
        """Return True if the sink takes the next bytes by their place: they are passed, and `counted` are counted."""
        reader = self._reader
        if not nbytes or not self._sink.locate(t, reader.base + reader.pos, nbytes):
            return False
        self.count(t, counted)
        reader.advance(nbytes)
        return True

    def _read_raw(self, t: TensorMessage, nbytes: int) -> None:
        if not self._pass_unread(t, nbytes, nbytes):
            for chunk in self._reader.chunks(nbytes):
                self.write(t, chunk, nbytes)

    def _read_floats(self, t: TensorMessage, tag: int, nbytes: int, end: int) -> None:
        """Store floats, whose bytes on the wire are those of raw_data, and the single ones that follow."""
        number = tag >> 3
        size = 4 if number == FLOAT_DATA else 8
        if tag & 7 != LEN:
            data = bytearray(self._reader.text(size))
            while len(data) < _TOGETHER and self._is_next(tag, end):
                self._reader.header(end)
                data += self._reader.text(size)
            self.write(t, memoryview(data))
        elif nbytes % size:
            raise self.fail(f"{FIELDS[number]} of {nbytes} bytes, not a multiple of {size}")
        else:
            self._read_raw(t, nbytes)

    def _is_next(self, tag: int, end: int) -> bool:
        """Return True if the next field of the message that ends at this offset is buffered, and has this tag."""
        reader = self._reader
        return reader.pos < reader.limit and reader.base + reader.pos < end and reader.buffer[reader.pos] == tag

    def _read_packed_run(self, t: TensorMessage, number: int, nbytes: int) -> None:
        """Decode a packed run of varints, or keep it until its data_type is known."""
        if t.data_type or number == INT64_DATA:
            self._decode_run(t, number, nbytes)
        else:
            early = self._keep_early(t, self._reader.chunks(nbytes), nbytes)
            if long := _CONTINUED.search(early, len(early) - nbytes):  # now, while its offset is known
                raise self.fail(_TOO_LONG.format(FIELDS[number]), self._reader.pos - len(early) + long.start())
            if early[-1] > 127:  # the next bytes belong to another run
                raise self._reader.fail(f"{FIELDS[number]} ends inside a varint")

    def _decode_run(self, t: TensorMessage, number: int, nbytes: int) -> None:
        """Decode a packed run of varints piece by piece."""
        if self._pass_unread(t, nbytes, 0):
            t.values.unread += nbytes
            return
        reader, left = self._reader, nbytes
        while left:
            size = min(left, _PIECE, reader.limit - reader.pos)
            end = reader.pos + size
            while end > reader.pos and reader.buffer[end - 1] > 127:
                end -= 1
            if end == reader.pos:
                if size == left or size > 10:
                    raise reader.fail(f"{FIELDS[number]} ends inside a varint")
                if reader.fill(min(left, 16)) <= size:
                    raise reader.fail(f"the stream ends inside {FIELDS[number]}")
                continue
            data = np.frombuffer(reader.view[reader.pos : end + SLACK], np.uint8)
            self.write(t, self._decode_varints(t, number, data, end - reader.pos), left)
            left -= end - reader.pos
            reader.pos = end

    def _decode_varints(self, t: TensorMessage, number: int, data: Any, nbytes: int) -> Any:
        """Return `nbytes` bytes of varints, with SLACK behind them, as the bytes that are stored."""
        try:
            numbers = self._decoder.decode(data, nbytes)
        except ValueError as error:
            pos = self._reader.pos + int(error.args[0])
            raise self._reader.fail(_TOO_LONG.format(FIELDS[number]), pos) from None
        return self._to_stored_form(t, number, numbers)

    def _to_stored_form(self, t: TensorMessage, number: int, numbers: Any) -> Any:
        """Return decoded varints as the bytes that are stored; OnnxError for one out of the type's range."""
        if number == INT64_DATA:
            return numbers.astype("<u8", copy=False).view(np.uint8).data
        if number == UINT64_DATA:
            if t.data_type == UINT32 and numbers.itemsize > 4 and int(numbers.max(initial=0)) >> 32:
                raise self._out_of_range(t, int(numbers.max()))
            return numbers.astype("<u4" if t.data_type == UINT32 else "<u8", copy=False).view(np.uint8).data
        try:
            elements = _narrow(numbers, *_INT32_FORMS[t.data_type])
        except ValueError as error:
            raise self._out_of_range(t, int(error.args[1])) from None
        kind = dtypes.by_onnx[t.data_type]
        if kind.packed and 8 % kind.bits:  # one to an entry: they are packed here
            rest = t.values.rest
            elements = elements if rest is None else np.concatenate((rest, elements))
            whole = len(elements) & -8
            t.values.rest, elements = elements[whole:], pack_bits(elements[:whole], kind.bits)
        return elements.view(np.uint8).data

    def _out_of_range(self, t: TensorMessage, value: int) -> OnnxError:
        name = dtypes.by_onnx[t.data_type].name
        return self.fail(f"{FIELDS[t.values.field]} holds {value}, out of range for {name}")

    def _keep_early(self, t: TensorMessage, chunks: Iterable[Any], nbytes: int) -> bytearray:
        """Keep varints until the data_type comes that explains them; return all that are kept, not a copy."""
        values = t.values
        early = values.early = bytearray() if values.early is None else values.early
        if nbytes + len(early) > MAX_EARLY:
            fault = f"more than {MAX_EARLY} bytes of {FIELDS[values.field]} before the data_type that explains them"
            raise self.fail(fault)
        for chunk in chunks:
            early += chunk
        return early

    def _read_varints(self, t: TensorMessage, tag: int, value: int, end: int) -> None:
        """Store a varint that was read, and the single ones that follow."""
        reader, number, values = self._reader, tag >> 3, [value]
        while len(values) < _TOGETHER and self._is_next(tag, end):
            values.append(reader.header(end)[2])
        if t.data_type or number == INT64_DATA:
            self.write(t, self._to_stored_form(t, number, np.array(values, np.uint64)))
        else:
            data = b"".join(map(encode_varint, values))
            self._keep_early(t, (data,), len(data))

    def _read_string(self, t: TensorMessage, nbytes: int) -> None:
        values = t.values
        if values.ends is None:
            values.ends = array("Q", [0])
        self._begin(t, nbytes)
        if not self._pass_unread(t, nbytes, 0):
            for chunk in self._reader.chunks(nbytes):
                self._sink.write(chunk)
        values.nbytes += nbytes
        values.ends.append(values.nbytes)

    def _write_early(self, t: TensorMessage) -> None:
        """Decode and write the values that were kept until the data_type came, if it came."""
        values = t.values
        if values.early and t.data_type:
            if t.data_type not in _TYPES[values.field]:
                raise self._wrong_field(t)
            early, values.early = values.early, None
            data = np.frombuffer(early + bytes(SLACK), np.uint8)
            self.write(t, self._decode_varints(t, values.field, data, len(early)))

    def close_open(self) -> None:
        """Finish the payload that is open."""
        if self._open is not None:
            self._close(self._open)

    def _finish_values(self, t: TensorMessage) -> None:
        """Pack and write the elements of less than a byte that are left over."""
        values = t.values
        if values.rest is not None and len(values.rest):
            kind, rest, values.rest = t.dtype, values.rest, None
            bits = kind.bits if kind is not None and kind.packed else 8  # of another type it is refused later
            self.write(t, pack_bits(rest, bits).data)

    def _close(self, t: TensorMessage) -> None:
        """End the open payload: with a table of strings' ends, or a last byte, its bits after the last element zero."""
        values = t.values
        self._finish_values(t)
        if values.ends is not None:
            self._sink.write(bytes(-values.nbytes % 8))
            self._sink.write(np.frombuffer(values.ends, np.uint64).astype("<u8", copy=False).view(np.uint8))
        elif values.last_byte >= 0:
            used = prod(t.dims) * t.dtype.bits % 8 if t.dtype is not None and t.dtype.packed else 0
            self._sink.write(bytes([values.last_byte & ((1 << used) - 1) if used else values.last_byte]))
            values.last_byte = -1
            values.stored = t.data_type, prod(t.dims)
        values.payload = self._sink.end()
        values.closed = True
        self._open = None

    def finish(self, t: TensorMessage) -> tuple[int, ...]:
        """Check a whole tensor, finish its payload and return its shape; OnnxError if type and values do not fit."""
        values, shape = t.values, self._checked_shape(t)
        self._write_early(t)
        self._finish_values(t)
        if values.field and t.data_type not in _TYPES[values.field]:
            raise self._wrong_field(t)
        self._check_count(t)
        if self._open is t:
            self._close(t)
        if values.top > 1 and t.data_type == BOOL:
            raise self.fail("bools other than 0 and 1 before the data_type that explains them")
        unchanged = (t.data_type, -1), (t.data_type, prod(shape)), (0, -1)
        if values.stored is not None and values.stored not in unchanged:
            raise self.fail("data_type or shape change after the values")
        return shape

    def _check_count(self, t: TensorMessage) -> None:
        """Raise OnnxError unless the value count fits the shape, or may: unread varints are not counted."""
        values, unit, need = t.values, "bytes", t.expected()
        least = most = values.nbytes
        if t.data_type == STRING:
            least = most = len(values.ends) - 1 if values.ends is not None else 0
            unit, need = "strings", prod(t.dims)
        elif values.unread:
            least, most = max(1, values.nbytes), values.nbytes + _WIDEST * values.unread
        if not least <= need <= most:
            kind = dtypes.by_onnx[t.data_type].name
            field = FIELDS[values.field] if values.field else "external data" if t.external else "no value field"
            got = f"{least} to {most}" if values.unread else str(least)
            raise self.fail(f"{kind} of shape {t.dims} takes {need} {unit}, got {got} in {field}")

    def _checked_shape(self, t: TensorMessage) -> tuple[int, ...]:
        if t.dtype is None:
            raise self._unknown_type(t)
        if min(t.dims, default=0) < 0:
            raise self.fail(f"a negative dimension in {t.dims}")
        if prod(d for d in t.dims if d) * max(1, t.dtype.bits // 8) > MAX_ARCHIVE_SIZE:
            raise LimitError(f"shape {t.dims} is more than 2^56 bytes", offset=t.offset)
        return tuple(t.dims)


def _narrow(values: Array, kind: str, low: int, high: int) -> Array:
    """Return the values of int32_data, cut to 32 bits as by every protobuf parser, as the type that is stored.

    `kind`, `low` and `high` are those of `_int32_form`. A value out of range is a ValueError: its index and the value.
    """
    if values.dtype.itemsize > 4:
        values = values.astype(np.uint32)
    values = values.astype(np.int32) if values.dtype.itemsize < 4 else values.view(np.int32)
    if kind == "?":
        values = values != 0
    elif kind != "<i4" and (wrong := (values < low) | (values > high)).any():
        i = int(wrong.argmax())
        raise ValueError(i, int(values[i]))
    stored: Array = values.astype(kind)
    return stored
