"""The rules about one tensor and one payload, written once and applied to a single entry or to whole columns.

`TensorRow` holds plain integers, for the tensor that is just being touched; `TensorColumns` arrays, for all of them
at once. The rules use only what both have: comparisons, `&`, `|`, arithmetic and the few methods that each defines.
Rule numbers are FORMAT.md's. What concerns the index as a whole is left to `verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from zcrecord import dtypes
from zcrecord.errors import FormatError, LimitError

from .index import Index
from .layout import MAX_ARCHIVE_SIZE, MAX_RANK, NONE, Header

if TYPE_CHECKING:
    import numpy.typing as npt  # costs 0.6 ms at run time

__all__ = ["PayloadColumns", "PayloadRow", "TensorColumns", "TensorRow", "check_payload", "check_tensor"]

Array = np.ndarray[Any, np.dtype[Any]]
Some = Any  # an int, or an array of them
_BIT_LIMIT = MAX_ARCHIVE_SIZE * 8
_SURELY_FITS = 2.0**58  # bits; a product in floating point below this is below the limit for certain
_STRING = dtypes.STRING.code


def _types() -> npt.NDArray[np.bool_]:
    """Return which of dtype | bits << 8 are wrong: natural width, or 8 for narrow types; unknown types 1 to 128."""
    allowed = np.zeros((256, 256), bool)  # by bits, dtype
    allowed[1:129, 1:] = True
    for kind in dtypes.DTYPES:
        allowed[:, kind.code] = False
        allowed[kind.bits, kind.code] = True
        if kind.packed:
            allowed[8, kind.code] = True
    return ~allowed.reshape(-1)


_BAD_TYPES = _types()
_BAD_TYPE_BYTES = _BAD_TYPES.tobytes()


class _OneEntry:
    """Plain integers; no call into numpy."""

    ix: Index
    number: int

    def some(self, bad: Some) -> bool:
        """Return whether any entry is bad."""
        return bool(bad)

    def where(self, condition: Some, a: Some, b: Some) -> Some:
        """Return a where the condition holds, else b."""
        return a if condition else b

    def greatest(self, value: Some) -> Any:
        """Return the greatest of all entries."""
        return value

    def at(self, _: Some) -> int:
        """Return the first bad entry."""
        return self.number


class _ManyEntries:
    """Whole columns."""

    ix: Index

    def some(self, bad: Some) -> bool:
        """Return whether any entry is bad."""
        return bool(np.count_nonzero(bad))

    def where(self, condition: Some, a: Some, b: Some) -> Some:
        """Return a where the condition holds, else b."""
        return np.where(condition, a, b)

    def greatest(self, value: Some) -> Any:
        """Return the greatest of all entries."""
        return value.max()

    def at(self, bad: Some) -> int:
        """Return the first bad entry."""
        return int(np.argmax(bad))


class PayloadRow(_OneEntry):
    """Payload i beside the one before it."""

    def __init__(self, ix: Index, header: Header, i: int) -> None:
        self.ix, self.header, self.number = ix, header, i
        self.offset, self.nbytes, self.digest = ix.payloads[i].item()
        self.before = ix.payloads[i - 1].item() if i else (0, 0, 0)


class PayloadColumns(_ManyEntries):
    """All payloads, each beside the one before it."""

    def __init__(self, ix: Index, header: Header) -> None:
        self.ix, self.header = ix, header
        columns = np.zeros((3, len(ix.payloads) + 1), np.uint64)
        columns[:, 1:] = ix.payloads.view("<u8").reshape(-1, 3).T
        self.offset, self.nbytes, self.digest = columns[:, 1:]
        self.before = tuple(columns[:, :-1])


def check_payload(p: PayloadRow | PayloadColumns) -> None:
    """Payloads are not empty, aligned, inside, ascending, disjoint or the very same range, without holes (R56 to R60).

    Raises:
        FormatError: with the offsets concerned.
    """
    h = p.header
    size = h.archive_size - h.payload_offset
    wild = (p.nbytes == 0) | (p.nbytes > MAX_ARCHIVE_SIZE) | (p.offset > MAX_ARCHIVE_SIZE)
    if p.some(wild):
        raise FormatError(f"payloads[{p.at(wild)}]: empty, or larger than an archive may be")
    end = p.offset + p.nbytes
    if p.some(bad := end > size):
        raise FormatError(
            f"payload {_range(p, bad)} ends past the end of the archive ({h.archive_size:#x}); "
            "the file is truncated or damaged, copy it again"
        )
    if p.some(bad := ((p.offset + h.payload_offset) & (h.alignment - 1)) != 0):
        raise FormatError(f"payload {_range(p, bad)} is not aligned to {h.alignment} bytes")
    offset, nbytes, digest = p.before
    before = offset + nbytes
    other = (p.offset != offset) | (p.nbytes != nbytes)
    if p.some(bad := other & (p.offset < before)):
        raise FormatError(f"payload {_range(p, bad)} overlaps the one before it, or is out of order")
    if p.some(bad := other & (p.offset > before + (h.base_alignment - 1))):
        raise FormatError(f"payload {_range(p, bad)} comes after a hole of {h.base_alignment} bytes or more")
    if p.some(bad := (other == False) & (p.digest != digest)):  # noqa: E712  # `not` knows no arrays
        raise FormatError(f"payload {_range(p, bad)} shares its range with one of another digest")
    if not p.ix.digest_kind and p.some(bad := p.digest != 0):
        raise FormatError(f"payload {_range(p, bad)} has a digest in an archive without")


def _range(p: PayloadRow | PayloadColumns, bad: Some) -> str:
    offset, nbytes, _ = p.ix.payloads[p.at(bad)].item()
    start = p.header.payload_offset + offset
    return f"[{start:#x}, {start + nbytes:#x})"


class _Tensor:
    """What both forms of tensors have in common; columns of the schema's struct by their names."""

    ix: Index
    header: Header
    name: Some
    name_size: Some
    key_size: Some
    parent: Some
    place: Some
    payload: Some
    byte_offset: Some
    dims: Some
    strides: Some
    bits: Some
    rank: Some
    reserved: Some
    bad_type: Some
    string: Some
    strided: Some
    any_strided: bool
    any_string: bool

    some: Callable[[Some], bool]
    at: Callable[[Some], int]

    def refuse(self, bad: Some, message: str, kind: type[FormatError | LimitError] = FormatError) -> None:
        """Raise for the first bad entry, naming its tensor; `message` may name fields of its struct in braces."""
        if self.some(bad):
            i = self.at(bad)
            raise kind(message.format(**self.ix.tensor(i)._asdict()), tensor=self.ix.name(i))


class TensorRow(_OneEntry, _Tensor):
    """Tensor i as plain integers."""

    def __init__(self, ix: Index, header: Header, i: int) -> None:
        self.ix, self.header, self.number = ix, header, i
        (self.name, self.name_size, self.key_size, self.parent, self.place, self.payload, self.byte_offset, self.dims,
         self.strides, dtype, self.bits, self.rank, reserved0, reserved1) = ix.tensors[i].item()  # fmt: skip
        self.reserved = reserved0 | reserved1
        self.bad_type = _BAD_TYPE_BYTES[dtype | self.bits << 8]
        self.string = self.any_string = dtype == _STRING
        self.strided = self.any_strided = self.strides != NONE

    def axis(self, pool: Array, starts: Some, axis: int, missing: int) -> Some:
        """Return what the pool holds for one axis, `missing` where a tensor has none."""
        return int(pool[starts + axis]) if axis < self.rank else missing

    def payload_bytes(self) -> Some:
        """Return the bytes of the payload, 0 without one, after checking its own entry."""
        if self.payload == NONE:
            return 0
        check_payload(PayloadRow(self.ix, self.header, self.payload))
        return int(self.ix.payloads["nbytes"][self.payload])


class TensorColumns(_ManyEntries, _Tensor):
    """All tensors as columns, each in one piece. Payloads are checked before."""

    def __init__(self, ix: Index, header: Header) -> None:
        self.ix, self.header = ix, header
        words = np.ascontiguousarray(ix.tensors.view("<u4").reshape(-1, 12).T)
        self.name, self.name_size, self.key_size, self.parent, self.place, self.payload = words[:6]
        self.dims, self.strides = words[8].astype(np.int64), words[9].astype(np.int64)
        kind = words[10] & 0xFFFF
        self.bits = (kind >> 8).astype(np.uint64)
        self.rank = ((words[10] >> 16) & 0xFF).astype(np.int64)
        self.reserved = (words[10] >> 24) | words[11]
        self.bad_type = _BAD_TYPES[kind]
        self.string = kind == _STRING
        self.strided = self.strides != NONE
        self.any_strided, self.any_string = self.some(self.strided), self.some(self.string)
        self.byte_offset = words[6]  # 32 bits do for "is it 0?", all that is asked without strides
        if self.any_strided or np.count_nonzero(words[7]):
            self.byte_offset = words[6] | words[7].astype(np.uint64) << np.uint64(32)

    def axis(self, pool: Array, starts: Some, axis: int, missing: int) -> Some:
        """Return what the pool holds for one axis, `missing` where a tensor has none."""
        active = self.rank > axis
        if starts is self.strides:
            active &= self.strided
        elif np.count_nonzero(active) == len(active):
            return pool[starts + axis]
        if not len(pool):
            return np.full(len(active), missing, pool.dtype)
        return np.where(active, pool[np.where(active, starts + axis, 0)], pool.dtype.type(missing))

    def payload_bytes(self) -> Some:
        """Return the bytes of each payload, 0 without one."""
        has = self.payload != NONE
        if np.count_nonzero(has) == len(has):
            return self.ix.payloads["nbytes"][self.payload]
        if not len(self.ix.payloads):
            return np.zeros(len(has), np.uint64)
        return np.where(has, self.ix.payloads["nbytes"][np.where(has, self.payload, 0)], np.uint64(0))


def check_tensor(t: TensorRow | TensorColumns) -> None:
    """After this, a view of the tensor lies inside (R26, R33, R45 to R55, R71, R77); its name is checked apart.

    Raises:
        FormatError, LimitError: naming the tensor.
    """
    t.refuse(t.reserved != 0, "a reserved field is not zero")
    t.refuse(t.rank > MAX_RANK, f"rank {{rank}} is more than {MAX_RANK}", LimitError)
    t.refuse(t.parent >= len(t.ix.modules), "its parent {parent} is no module")
    t.refuse(
        (t.key_size == 0) | (t.key_size > t.name_size), "its key takes {key_size} of {name_size} bytes of its name"
    )
    t.refuse(t.bad_type, "dtype {dtype} cannot take {bits} bits an element")
    t.refuse(t.dims + t.rank > len(t.ix.dims), "its dims leave their pool")
    t.refuse((t.payload != NONE) & (t.payload >= len(t.ix.payloads)), "its payload {payload} is not in the index")
    if t.any_strided:
        t.refuse(t.strided & (t.string | (t.bits & 7 != 0)), "only types of whole bytes may have strides")
        t.refuse(t.strided & (t.strides + t.rank > len(t.ix.strides)), "its strides leave their pool")
    bits = t.where(t.string, 64, t.bits) if t.any_string else t.bits
    count, empty = _count(t, bits)
    available = t.payload_bytes()
    t.refuse(empty != (t.payload == NONE), "it has a payload exactly if it has bytes, or should have")
    plain = t.strided == False  # noqa: E712  # `not` knows no arrays
    t.refuse(plain & (t.byte_offset != 0), "byte_offset {byte_offset} without strides")
    need = (count * bits + 7) >> 3
    if t.any_string:
        short = (available < (count + 1) * 8) | (available & 7 != 0)
        t.refuse(t.string & (empty == False) & short, "its payload cannot hold its strings")  # noqa: E712
        plain = plain & (t.string == False)  # noqa: E712
    if t.some(bad := plain & (empty == False) & (need != available)):  # noqa: E712
        i = t.at(bad) if isinstance(t, TensorColumns) else None
        want, got = (need, available) if i is None else (int(need[i]), int(available[i]))
        t.refuse(bad, f"its shape takes {want} bytes, its payload has {got}")
    if t.any_strided:
        t.refuse(empty & t.strided, "an empty tensor has no strides")
        _check_strides(t, need, available)


def _count(t: TensorRow | TensorColumns, bits: Some) -> tuple[Some, Some]:
    """Return the number of elements, zeros left out, and whether there are none; no product passes 2^56 bytes (R49)."""
    product = t.where(t.rank >= 0, np.uint64(1) if isinstance(t, TensorColumns) else 1, 1)
    size = bits * 1.0  # an upper bound that cannot wrap
    empty = t.rank < 0
    for axis in range(int(t.greatest(t.rank))):
        dim = t.axis(t.ix.dims, t.dims, axis, 1)
        zero = dim == 0
        if t.some(zero):
            empty = empty | zero
            dim = t.where(zero, 1, dim)
        size = size * dim
        if t.greatest(size) >= _SURELY_FITS:  # exactly, by division, before anything is multiplied
            t.refuse(dim > _BIT_LIMIT // bits // product, "its shape claims more than 2^56 bytes", LimitError)
        product = product * dim
    return product, empty


def _check_strides(t: TensorRow | TensorColumns, need: Some, available: Some) -> None:
    """Lowest and highest element reached stay inside the payload; each axis bounded by division first (R53 to R55)."""
    limit = MAX_ARCHIVE_SIZE
    low, high = t.rank * 0, t.rank * 0
    wild = t.rank < 0
    for axis in range(int(t.greatest(t.rank))):
        reach = _signed(t.axis(t.ix.dims, t.dims, axis, 1)) - 1
        stride = t.axis(t.ix.strides, t.strides, axis, 0)
        far = (stride > limit) | (stride < -limit)
        stride = t.where(far, 0, stride)
        far = far | (abs(stride) > limit // t.where(reach > 1, reach, 1))
        step = stride * t.where(far, 0, reach)
        low, high = low + t.where(step < 0, step, 0), high + t.where(step > 0, step, 0)
        wild = wild | far | (high > limit) | (low < -limit)
        low, high = t.where(wild, 0, low), t.where(wild, 0, high)
    item = _signed(t.where(t.strided, t.bits >> 3, 1))
    first = _signed(t.where(t.byte_offset > limit, limit + 1, t.byte_offset))
    outside = wild | (first + low * item < 0) | (first + (high + 1) * item > _signed(available))
    t.refuse(t.strided & outside, "its strides reach outside its payload")
    t.refuse(t.strided & (first % item != 0), "byte_offset {byte_offset} is no multiple of its element size")
    t.refuse(t.strided & (need > available), "its shape claims more bytes than its payload has")


def _signed(value: Some) -> Some:
    return value if isinstance(value, int) else value.astype(np.int64)
