"""A tensor's values on their way from the stream to a payload, in whichever of ONNX's forms they come.

raw_data goes through as it is; typed data is decoded chunk by chunk; strings get the ends the archive wants. What is
not canonical is made so: bools are 0 or 1, bits after the last packed element are zero. Which message a tensor sits
in is left to `scanner`.

Source: onnx.proto's comments on TensorProto, and `onnx.numpy_helper.to_array`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from math import prod
from typing import Any, Protocol

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK
from zcrecord.errors import LimitError, OnnxError
from zcrecord.tensors.packed import pack_bits

from . import varints
from .reader import LEN, ProtobufReader, encode_varint
from .schema import Tensor
from .varints import Decoder

__all__ = ["Payloads", "Values"]

BOOL, STRING, UINT32 = 9, 8, 12  # data_type
MAX_EARLY = 1 << 20  # bytes of varints that may come before the data_type that explains them
_PIECE = 1 << 17  # bytes of varints decoded at a time: what fits a cache
_AHEAD = 1 << 8  # bytes looked at first for single elements that follow
_LONGEST = 11  # bytes of the longest of them, its tag included
_FLUSH = 1 << 16  # bytes of single elements written at a time
_AGAIN = "export the model again"

FLOAT_DATA, INT32_DATA, STRING_DATA, INT64_DATA, RAW_DATA, DOUBLE_DATA, UINT64_DATA = 4, 5, 6, 7, 9, 10, 11
FIELDS = {4: "float_data", 5: "int32_data", 6: "string_data", 7: "int64_data", 9: "raw_data", 10: "double_data",
          11: "uint64_data"}  # fmt: skip
_TYPES = {
    RAW_DATA: set(dtypes.by_onnx) - {STRING},
    FLOAT_DATA: {code for code, kind in dtypes.by_onnx.items() if kind.c == "float"},
    INT32_DATA: set(varints.STORED),
    STRING_DATA: {STRING},
    INT64_DATA: {code for code, kind in dtypes.by_onnx.items() if kind.c == "int64_t"},
    DOUBLE_DATA: {code for code, kind in dtypes.by_onnx.items() if kind.c == "double"},
    UINT64_DATA: {code for code, kind in dtypes.by_onnx.items() if kind.c in ("uint32_t", "uint64_t")},
}


class Payloads(Protocol):
    """What values are written to: `streaming.StreamWriter`, or something that refuses them."""

    def begin(self, nbytes: int, /) -> None:
        """Start a payload of about so many bytes."""

    def write(self, data: Any, /) -> None:
        """Append to it."""

    def end(self) -> int:
        """Finish it and return its id."""


class Values:
    """Takes the values of one tensor after the other from a window and writes them to payloads.

    A payload may stay open while its tensor's message is continued elsewhere, as protobuf allows for a field that is
    given twice; not while another tensor's values come in between.
    """

    def __init__(self, window: ProtobufReader, out: Payloads) -> None:
        self._window = window
        self._out = out
        self._open: Tensor | None = None
        self._decoder = Decoder()

    def take(self, t: Tensor, tag: int, value: int, start: int, end: int) -> None:
        """Pass one value field whose header was read, a run or a single element, and store what it holds.

        `start` is the window's position of the header, `end` the stream's offset at which the tensor's message ends.
        """
        window = self._window
        number, kind = tag >> 3, tag & 7
        window.drop(start)
        if kind != LEN or value or number in (RAW_DATA, STRING_DATA):  # an empty run is no value
            self._claim(t, number, start)
            if kind == LEN or t.early:
                self.settle(t)  # in order
            if number == RAW_DATA:
                self.raw(t, value)
            elif number == STRING_DATA:
                self._string(t, value)
            elif number in (FLOAT_DATA, DOUBLE_DATA):
                self._fixed(t, tag, value, end)
            elif kind == LEN:
                self._packed(t, number, value)
            else:
                self._single(t, tag, value, end)
        window.keep()

    def fail(self, t: Tensor, what: str, pos: int | None = None) -> OnnxError:
        """Return the error for something wrong with a tensor's values at a position of the window."""
        return self._window.fail(what, pos, tensor=t.label, do=_AGAIN)

    def _claim(self, t: Tensor, number: int, start: int) -> None:
        """Note that the tensor's values are in this field; refuse a second one."""
        if t.source and (t.source != number or number == RAW_DATA):
            twice = "twice" if t.source == number else f"besides {FIELDS[t.source]}"
            raise self.fail(t, f"{FIELDS[number]} {twice}; values come in one field, once", start)
        if t.closed:
            raise self.fail(t, "values in two places, with those of another tensor in between", start)
        t.source = number
        if t.data_type and t.data_type not in _TYPES[number]:
            raise self._mismatch(t)

    def _mismatch(self, t: Tensor) -> OnnxError:
        if t.dtype is None:
            return self._unknown(t)
        wanted = " or ".join(FIELDS[n] for n, types in _TYPES.items() if t.data_type in types)
        return self.fail(t, f"{t.dtype.name} keeps its values in {wanted}, got {FIELDS[t.source]}")

    def _unknown(self, t: Tensor) -> OnnxError:
        what = f"data_type {t.data_type} is not known here" if t.data_type else "no data_type"
        return self._window.fail(what, tensor=t.label, do=f"{_AGAIN}, or upgrade zcrecord")

    def write(self, t: Tensor, data: Any, estimate: int = 0) -> None:
        """Append stored bytes, as a flat bytes-like, to the tensor's payload; made canonical on the way."""
        if self._open is not t:
            self.begin(t, estimate or len(data))
        t.nbytes += len(data)
        if not t.data_type or t.data_type == BOOL:
            raw = np.frombuffer(data, np.uint8)
            top = int(raw.max(initial=0))
            if not t.data_type:
                t.top = max(t.top, top)
            elif top > 1:
                data = (raw != 0).view(np.uint8).data
        if not len(data):
            return
        if t.held >= 0:
            self._out.write(bytes([t.held]))
            t.held = -1
        if t.packed:
            t.held = data[-1]
            data = data[:-1]
        self._out.write(data)

    def begin(self, t: Tensor, estimate: int) -> None:
        """Start the tensor's payload of about so many bytes, unless it is the one that is open."""
        if self._open is not t:
            self.close_open()
            self._out.begin(max(estimate, t.expected()))
            self._open = t
            t.stored = t.data_type, -1

    def raw(self, t: Tensor, nbytes: int) -> None:
        """Pass stored bytes, as they are in raw_data."""
        for chunk in self._window.chunks(nbytes):
            self.write(t, chunk, nbytes)

    def _fixed(self, t: Tensor, tag: int, nbytes: int, end: int) -> None:
        """Floats: their bytes on the wire are those of raw_data. Single ones that follow are taken along."""
        window, number = self._window, tag >> 3
        size = 4 if number == FLOAT_DATA else 8
        if tag & 7 == LEN:
            if nbytes % size:
                raise self.fail(t, f"{FIELDS[number]} of {nbytes} bytes, not a multiple of {size}")
            self.raw(t, nbytes)
            return
        for chunk in window.chunks(size):
            self._gather(t, chunk)
        for ahead in self._ahead(tag, end):
            run = ahead[: len(ahead) // (size + 1) * (size + 1)].reshape(-1, size + 1)
            same = run[:, 0] == tag
            count = len(same) if same.all() else int(same.argmin())
            window.pos += count * (size + 1)
            self._gather(t, run[:count, 1:].tobytes())

    def _ahead(self, tag: int, end: int) -> Iterator[Any]:
        """Yield what the window holds of the message that ends at this offset, as long as it goes on with this tag.

        Each is larger than the one before: what is looked at costs little more than what the caller then passes.
        """
        window = self._window
        most, passed, here = _AHEAD, 0, 0
        while here <= passed + _LONGEST and window.pos < min(window.limit, end - window.base):
            if window.buffer[window.pos] != tag:
                return
            start = window.pos
            here = min(window.limit - start, end - window.base - start, most)
            yield np.frombuffer(window.view[start : start + here], np.uint8)
            passed = window.pos - start
            if not passed:
                return
            most = min(most << 3, _PIECE)

    def _gather(self, t: Tensor, data: Any) -> None:
        """Collect single elements to write them together."""
        if t.pending is None:
            t.pending = bytearray()
        t.pending += data
        if len(t.pending) >= _FLUSH:
            self._flush(t)

    def _flush(self, t: Tensor) -> None:
        if t.pending:
            pending, t.pending = t.pending, None
            self.write(t, memoryview(pending))

    def _packed(self, t: Tensor, number: int, nbytes: int) -> None:
        if t.data_type or number == INT64_DATA:
            self.varints(t, number, nbytes)
        else:
            self._check_early(t, nbytes)
            data = b"".join(bytes(chunk) for chunk in self._window.chunks(nbytes))
            if data[-1] > 127:  # what comes after it is another run's
                raise self._window.fail(f"{FIELDS[number]} ends inside a varint", tensor=t.label)
            self._wait(t, data)

    def varints(self, t: Tensor, number: int, nbytes: int) -> None:
        """Pass a packed run of varints, decoded a piece at a time; what is cut in two waits for the rest."""
        window = self._window
        left = nbytes
        while left:
            here = min(left, _PIECE, window.limit - window.pos)
            end = window.pos + here
            while end > window.pos and window.buffer[end - 1] > 127:
                end -= 1
            if end == window.pos:
                if here == left or here > 10:
                    raise window.fail(f"{FIELDS[number]} ends inside a varint", tensor=t.label)
                if window.fill(min(left, 16)) <= here:
                    raise window.fail(f"the stream ends inside {FIELDS[number]}", tensor=t.label)
                continue
            data = np.frombuffer(window.view[window.pos : end + varints.SLACK], np.uint8)
            self.write(t, self._decoded(t, number, data, end - window.pos), left)
            left -= end - window.pos
            window.pos = end

    def _decoded(self, t: Tensor, number: int, data: Any, nbytes: int) -> Any:
        try:
            found = self._decoder.decode(data, nbytes)
        except ValueError as error:
            what = f"{FIELDS[number]} holds a varint of more than 10 bytes"
            raise self._window.fail(what, self._window.pos + int(error.args[0]), tensor=t.label) from None
        return self._stored(t, number, found)

    def _stored(self, t: Tensor, number: int, found: Any) -> Any:
        """Return decoded varints as the bytes that are stored."""
        if number == INT64_DATA:
            return found.astype("<u8", copy=False).view(np.uint8).data
        if number == UINT64_DATA:
            if t.data_type == UINT32 and found.itemsize > 4 and int(found.max(initial=0)) >> 32:
                raise self._out_of_range(t, int(found.max()))
            return found.astype("<u4" if t.data_type == UINT32 else "<u8", copy=False).view(np.uint8).data
        try:
            values = varints.narrow(found, varints.STORED[t.data_type])
        except ValueError as error:
            raise self._out_of_range(t, int(error.args[1])) from None
        if t.dtype is not None and t.dtype.packed and 8 % t.dtype.bits:  # one to an entry: they are packed here
            values = np.concatenate((t.rest, values))
            whole = len(values) & -8
            t.rest, values = values[whole:], pack_bits(values[:whole], t.dtype.bits)
        return values.view(np.uint8).data

    def _out_of_range(self, t: Tensor, value: int) -> OnnxError:
        kind = t.dtype.name if t.dtype is not None else "?"
        return self.fail(t, f"{FIELDS[t.source]} holds {value}, out of range for {kind}")

    def _check_early(self, t: Tensor, nbytes: int) -> None:
        if nbytes + len(t.early or b"") > MAX_EARLY:
            what = f"more than {MAX_EARLY} bytes of {FIELDS[t.source]} before the data_type that explains them"
            raise self.fail(t, what)

    def _wait(self, t: Tensor, data: bytes) -> None:
        """Hold varints until the data_type comes."""
        t.early = bytearray() if t.early is None else t.early
        t.early += data

    def _single(self, t: Tensor, tag: int, value: int, end: int) -> None:
        """Integers one to a field, as proto2 writes what is not packed. Those that follow are taken along."""
        window, number = self._window, tag >> 3
        self._singles(t, number, np.array([value], np.uint64))
        for data in self._ahead(tag, end):
            padded = np.frombuffer(window.view[window.pos : window.pos + len(data) + varints.SLACK], np.uint8)
            found, passed = self._decoder.pairs(padded, len(data), tag)
            self._singles(t, number, found)
            window.pos += passed

    def _singles(self, t: Tensor, number: int, found: Any) -> None:
        if t.data_type or number == INT64_DATA:
            self._gather(t, self._stored(t, number, found))
        else:
            data = b"".join(map(encode_varint, found.tolist()))
            self._check_early(t, len(data))
            self._wait(t, data)

    def _string(self, t: Tensor, nbytes: int) -> None:
        if t.ends is None:
            t.ends = array("Q", [0])
        self.begin(t, nbytes)
        self.text(nbytes)
        t.nbytes += nbytes
        t.ends.append(t.nbytes)

    def text(self, nbytes: int) -> None:
        """Pass the bytes of one string."""
        for chunk in self._window.chunks(nbytes):
            self._out.write(chunk)

    def settle(self, t: Tensor) -> None:
        """Store what waited, as far as it can be: at the end of a tensor's message, before values of another form."""
        if t.early and t.data_type:
            if t.data_type not in _TYPES[t.source]:
                raise self._mismatch(t)
            early, t.early = t.early, None
            data = np.frombuffer(early + bytes(varints.SLACK), np.uint8)
            self.write(t, self._decoded(t, t.source, data, len(early)))
        self._flush(t)

    def close_open(self) -> None:
        """Finish the payload that is open, if any, before another is begun."""
        if self._open is not None:
            self._close(self._open)

    def _flush_rest(self, t: Tensor) -> None:
        """Write the last elements that were not enough to pack."""
        if len(t.rest):
            bits = t.dtype.bits if t.dtype is not None and t.dtype.packed else 8  # of another type it is refused later
            t.rest, last = t.rest[:0], pack_bits(t.rest, bits)
            self.write(t, last.data)

    def _close(self, t: Tensor) -> None:
        self._flush(t)
        self._flush_rest(t)
        if t.ends is not None:
            self._out.write(bytes(-t.nbytes % 8))
            self._out.write(np.frombuffer(t.ends, np.uint64).astype("<u8", copy=False).view(np.uint8))
        elif t.held >= 0:
            self._close_packed(t)
        t.payload = self._out.end()
        t.closed = True
        self._open = None

    def _close_packed(self, t: Tensor) -> None:
        """Write the last byte, its bits after the last element zero."""
        kind = t.dtype
        used = prod(t.dims) * kind.bits % 8 if kind is not None and kind.packed else 0
        self._out.write(bytes([t.held & ((1 << used) - 1) if used else t.held]))
        t.held = -1
        t.stored = t.data_type, prod(t.dims)

    def finish(self, t: Tensor) -> tuple[int, ...]:
        """Check a whole tensor against its shape, finish its payload and return the shape.

        Raises:
            OnnxError: no or an unknown data_type, a negative dimension, too few or too many values. LimitError: a
                rank or size that no archive holds.
        """
        shape = self._shape(t)
        self.settle(t)
        self._flush_rest(t)
        if t.source and t.data_type not in _TYPES[t.source]:
            raise self._mismatch(t)
        found, what, need = self.found(t), "bytes", t.expected()
        if t.data_type == STRING:
            found, what, need = (len(t.ends) - 1 if t.ends is not None else 0), "strings", prod(shape)
        if found != need:
            kind = t.dtype.name if t.dtype is not None else "?"
            where = FIELDS[t.source] if t.source else "external data" if t.external else "no value field"
            raise self.fail(t, f"{kind} of shape {list(shape)} takes {need} {what}, got {found} in {where}")
        if self._open is t:
            self._close(t)
        if t.top > 1 and t.data_type == BOOL:
            raise self.fail(t, "bools other than 0 and 1 before the data_type that says what they are")
        if t.stored is not None and t.stored not in ((t.data_type, -1), (t.data_type, prod(shape)), (0, -1)):
            raise self.fail(t, "data_type or shape change after the values")
        return shape

    def found(self, t: Tensor) -> int:
        """Return how many bytes of values, in stored form, were passed."""
        return t.nbytes

    def _shape(self, t: Tensor) -> tuple[int, ...]:
        if t.dtype is None:
            raise self._unknown(t)
        if len(t.dims) > MAX_RANK:
            raise LimitError(f"rank {len(t.dims)} is more than {MAX_RANK}", tensor=t.label, offset=t.offset)
        if min(t.dims, default=0) < 0:
            raise self.fail(t, f"a negative dimension in {t.dims}")
        if prod(d for d in t.dims if d) * max(1, t.dtype.bits // 8) > MAX_ARCHIVE_SIZE:
            raise LimitError(f"shape {t.dims} is more than 2^56 bytes", tensor=t.label, offset=t.offset)
        return tuple(t.dims)
