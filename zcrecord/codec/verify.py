"""Every rule of an index, checked before a view exists: in whole columns, or of the tensor that is just touched.

The rules of one tensor and one payload are written once, for both: `TensorRow` holds plain integers, `TensorColumns`
arrays, and the rules use only what both have: comparisons, `&`, `|`, arithmetic and the few methods that each defines.
Then come the rules of the index as a whole. Rule numbers are FORMAT.md's. Decoding is left to `index`, rules about the
payloads' bytes to full verification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord._schema import ValueForm, ValueType
from zcrecord.errors import FormatError, LimitError, printable

from .index import Index, TextPool, list_bounds
from .layout import INDEX_ALLOWANCE, MAX_ARCHIVE_SIZE, MAX_DEPTH, MAX_RANK, NONE, Header, align_up, first_children

Array = np.ndarray[Any, np.dtype[Any]]
Some = Any  # an int, or an array of them
_BIT_LIMIT = MAX_ARCHIVE_SIZE * 8
_SURELY_FITS = 2.0**58  # bits; a product in floating point below this is below the limit for certain
_STRING = dtypes.STRING.code


def _types() -> Array:
    """Return True for each dtype | bits << 8 that is wrong; narrow types may take 8 bits, unknown ones 1 to 128."""
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
    """One entry, as plain integers; no call into numpy.

    `some`: any entry is bad. `where`: a or b, by a condition. `at`: the number of the first bad entry.
    """

    number: int

    def some(self, bad: Some) -> bool:
        return bool(bad)

    def where(self, condition: Some, a: Some, b: Some) -> Some:
        return a if condition else b

    def greatest(self, value: Some) -> Any:
        return value

    def at(self, _: Some) -> int:
        return self.number


class _ManyEntries:
    """Whole columns; the methods are those of `_OneEntry`."""

    def some(self, bad: Some) -> bool:
        return bool(np.count_nonzero(bad))

    def where(self, condition: Some, a: Some, b: Some) -> Some:
        return np.where(condition, a, b)

    def greatest(self, value: Some) -> Any:
        return value.max()

    def at(self, bad: Some) -> int:
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
    wild = (p.nbytes == 0) | (p.nbytes > MAX_ARCHIVE_SIZE) | (p.offset > MAX_ARCHIVE_SIZE)
    if p.some(wild):
        raise FormatError(f"payloads[{p.at(wild)}]: empty, or larger than an archive may be")
    end = p.offset + p.nbytes
    if p.some(bad := end > h.payload_room):
        raise FormatError(
            f"payload {_range(p, bad)} ends past the region of payloads ({h.payload_offset + h.payload_room:#x}); "
            "the file is damaged, copy it again"
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


class _Refusing:
    """Refusal of the first bad entry, for one tensor and for many."""

    ix: Index
    some: Callable[[Some], bool]
    at: Callable[[Some], int]

    def refuse(self, bad: Some, message: str, kind: type[FormatError | LimitError] = FormatError) -> None:
        """Raise for the first bad entry, naming its tensor; `message` may name fields of its struct in braces."""
        if self.some(bad):
            i = self.at(bad)
            raise kind(message.format(**self.ix.tensor(i)._asdict()), tensor=self.ix.name(i))


class TensorRow(_OneEntry, _Refusing):
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
        """Return the items of the pool for one axis, `missing` for tensors without it."""
        return int(pool[starts + axis]) if axis < self.rank else missing

    def payload_bytes(self) -> Some:
        """Return the bytes of the payload, 0 without one, after checking its own entry."""
        if self.payload == NONE:
            return 0
        check_payload(PayloadRow(self.ix, self.header, self.payload))
        return int(self.ix.payloads["nbytes"][self.payload])


class TensorColumns(_ManyEntries, _Refusing):
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
        active = self.rank > axis
        if starts is self.strides:
            active &= self.strided
        elif np.count_nonzero(active) == len(active):
            return pool[starts + axis]
        if not len(pool):
            return np.full(len(active), missing, pool.dtype)
        return np.where(active, pool[np.where(active, starts + axis, 0)], pool.dtype.type(missing))

    def payload_bytes(self) -> Some:
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
    """Return the number of elements, zeros left out, and True if there are none; no product passes 2^56 bytes (R49)."""
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


def _first(bad: Array) -> int | None:
    """Return the position of the first entry that breaks a rule."""
    return int(bad.argmax()) if np.count_nonzero(bad) else None


def check_header(ix: Index, header: Header) -> None:
    """Check counts that must agree, and where the payloads end; looks at no entry (R13, R24, R25, R37).

    Raises:
        FormatError: naming the subject of the rule, the value expected and the one found.
    """
    n = len(ix.tensors)
    for what, column in (("by_name", ix.by_name), ("by_module", ix.by_module)):
        if column is not None and len(column) != n:
            raise FormatError(f"index: vector '{what}' has {len(column)} items for {n} tensors")
    if not len(ix.modules):
        raise FormatError("index: it has no modules; module 0, the record itself, is always there")
    if ix.digest_kind not in (0, 1):
        raise FormatError(f"index: digest kind {ix.digest_kind} is not known")
    end = sum(ix.payloads[-1].item()[:2]) if len(ix.payloads) else 0
    room = header.payload_room
    if align_up(end, header.alignment) != room:
        raise FormatError(f"payloads end at {end:#x} of a region of {room:#x} bytes, not within its last alignment")


def check_index(ix: Index, header: Header) -> None:
    """Check every rule of the index but those that need a payload's bytes; linear in its size.

    Raises:
        FormatError: with the tensor's name where one is concerned.
        LimitError: a size or depth beyond the format's limits.
    """
    check_header(ix, header)
    pool = ix.pool()
    pool.check_text()
    if header.is_draft:
        from .draft import check_draft_budget  # here, because `convert` alone comes by

        check_draft_budget(ix)
    else:
        _check_budget(ix, INDEX_ALLOWANCE * header.index_size)
    if len(ix.payloads):
        check_payload(PayloadColumns(ix, header))
    if _first(ix.by_name >= len(ix.tensors)) is not None:
        raise FormatError(f"by_name: an item is not one of the {len(ix.tensors)} tensors")
    t = TensorColumns(ix, header)
    _check_names(ix, t, pool)
    if len(ix.tensors):
        check_tensor(t)
    _check_modules(ix, pool)
    _check_attributes(ix, pool)
    _check_children(ix, t)
    _check_full_names(ix, t, pool)
    _check_collisions(ix, t, pool)
    _check_usage(ix, t)


def _check_budget(ix: Index, most: int) -> None:
    """Spans and lists take at most so many bytes of their pools, which keeps every later pass linear (R30, R31, R67).

    No byte that is shared is read before. No sum wraps: a size has 32 bits, and the items of lists, each of which may
    be a text, are within the budget when their texts are added up.
    """
    total = _sum(ix.tensors["name_size"]) + _sum(ix.modules["name_size"]) + _sum(ix.modules["type_name_size"])
    for what, rows in (("attributes", ix.attributes), ("metadata", ix.metadata)):
        if not len(rows):
            continue
        text, listed = rows["type"] == ValueType.TEXT, rows["form"] != ValueForm.SCALAR
        starts, counts = list_bounds(rows[listed])
        if (starts + counts > len(ix.words)).any():
            raise FormatError(f"{what}: a list leaves the pool of {len(ix.words)} words")
        total += _sum(rows["name_size"]) + _sum(rows["value"][text & ~listed] >> np.uint64(32)) + 16 * _sum(counts)
        if total <= most and (text & listed).any():
            before = np.zeros(len(ix.words) + 1, np.uint64)
            np.cumsum(ix.words >> np.uint64(32), out=before[1:])
            starts, counts = list_bounds(rows[text & listed])
            total += _sum(before[starts + counts] - before[starts])
    if total > most:
        raise LimitError(f"index: its names, texts and lists take {total} bytes of their pools, at most {most}")


def _sum(sizes: Array) -> int:
    return int(sizes.sum(dtype=np.uint64))


def check_touched(ix: Index, header: Header, i: int, pool: TextPool) -> None:
    """Check tensor i alone: after this, a view of it lies inside the archive (R26 to R29, R33, R45 to R60).

    Raises:
        FormatError, LimitError: naming the tensor.
    """
    one = TensorRow(ix, header, i)
    if (why := pool.bad_name(one.name, one.name_size)) is not None:
        raise FormatError(f"tensors[{i}]: its name {why}")
    check_tensor(one)


def _check_names(ix: Index, t: TensorColumns, pool: TextPool) -> None:
    """Check that `by_name` has every tensor once, in strictly ascending order of legal names (R27 to R29, R32)."""
    order = ix.by_name.astype(np.int64)
    starts, sizes = t.name[order], t.name_size[order]
    if (bad := pool.bad_names(starts, sizes)) is not None:
        raise FormatError(f"tensors[{order[bad[0]]}]: its name {bad[1]}")
    if (i := pool.first_not_ascending(starts, sizes)) is not None:
        name = ix.name(int(order[i]))
        raise FormatError(f"by_name[{i + 1}]: names are not strictly ascending after '{printable(name)}'", tensor=name)


def _check_modules(ix: Index, pool: TextPool) -> None:
    """Names, kinds and reserved fields of modules are right, and so is module 0 (R26 to R29, R37, R41)."""
    rows = ix.modules
    count = len(rows)
    if bool(rows["reserved0"].any() or rows["reserved1"].any() or rows["reserved2"].any()):
        raise FormatError("modules: a reserved field is not zero")
    if count > 1 and (bad := pool.bad_names(rows["name"][1:], rows["name_size"][1:])):
        raise FormatError(f"modules[{bad[0] + 1}]: its name {bad[1]}")
    if bad := pool.bad_names(rows["type_name"], rows["type_name_size"], empty=True):
        raise FormatError(f"modules[{bad[0]}]: its type name {bad[1]}")
    if bad := pool.bad_names(rows["name"][:1], rows["name_size"][:1], empty=True):
        raise FormatError(f"modules[0]: its name {bad[1]}")
    root = rows[0]
    if root["parent"] != NONE or root["end"] != count or root["name_size"] or root["key_size"] or root["place"]:
        raise FormatError("modules[0]: the record itself has no name, no parent, place 0, and holds all modules")
    if not rows["kind"].all():
        raise FormatError("modules: kind 0 is invalid")
    if count > 1:
        _check_nesting(rows)


def _check_nesting(rows: Array) -> None:
    """Modules are in pre-order, their ranges nest, none is deeper than 100 (R38 to R40)."""
    count = len(rows)
    i = np.arange(1, count)
    parent, end = rows["parent"][1:].astype(np.int64), rows["end"].astype(np.int64)
    if (j := _first(parent >= i)) is not None:
        raise FormatError(f"modules[{j + 1}]: its parent {int(parent[j])} does not come before it")
    if (j := _first((end[1:] <= i) | (end[1:] > end[parent]))) is not None:
        raise FormatError(f"modules[{j + 1}]: its range ends at {int(end[j + 1])}, outside its parent's")
    first = np.flatnonzero(np.arange(1, count + 1) < end)  # modules with descendants: the next one is a child
    if (rows["parent"][first + 1] != first).any():
        raise FormatError("modules: not in pre-order, a module with descendants is not followed by its child")
    later = np.flatnonzero(end[1:] < end[parent]) + 1  # and where a range ends inside the parent's, a sibling starts
    if (rows["parent"][end[later]] != rows["parent"][later]).any():
        raise FormatError("modules: not in pre-order, a module is not followed by its sibling")
    depth = np.bincount(np.arange(count) + 1, minlength=count + 1)[: count + 1] - np.bincount(end, minlength=count + 1)
    if int(np.cumsum(depth).max()) >= MAX_DEPTH:
        raise LimitError(f"modules: nested more than {MAX_DEPTH} deep")


def _check_attributes(ix: Index, pool: TextPool) -> None:
    """Attributes ascend by (parent, place), metadata by name; values are of known kinds, in their pool (R64 to R68)."""
    rows = ix.attributes
    if not len(rows) and not len(ix.metadata):
        return
    if (i := _first(rows["parent"] >= len(ix.modules))) is not None:
        raise FormatError(f"attributes[{i}]: its parent {int(rows['parent'][i])} is no module")
    order = rows["parent"].astype(np.uint64) << np.uint64(32) | rows["place"]
    if (i := _first(order[1:] <= order[:-1])) is not None:
        raise FormatError(f"attributes[{i + 1}]: not strictly ascending by parent and place")
    file = ix.metadata
    if (i := _first((file["parent"] != NONE) | (file["place"] != 0))) is not None:
        raise FormatError(f"metadata[{i}]: it has a parent or a place")
    for what, part in (("attributes", rows), ("metadata", file)):
        if bad := pool.bad_names(part["name"], part["name_size"]):
            raise FormatError(f"{what}[{bad[0]}]: its name {bad[1]}")
        if (part["reserved0"] | part["reserved1"]).any():
            raise FormatError(f"{what}: a reserved field is not zero")
        _check_values(ix, part, what, pool)
    if (i := pool.first_not_ascending(file["name"], file["name_size"])) is not None:
        raise FormatError(f"metadata[{i + 1}]: names are not strictly ascending")


def _check_values(ix: Index, rows: Array, what: str, pool: TextPool) -> None:
    if (i := _first((rows["type"] > ValueType.PAYLOAD) | (rows["form"] > ValueForm.TUPLE))) is not None:
        raise FormatError(f"{what}[{i}]: type {int(rows['type'][i])} or form {int(rows['form'][i])} is not known")
    for kind, most in ((ValueType.NIL, 0), (ValueType.BOOL, 1)):
        if (ix.values(rows, kind) > most).any():
            raise FormatError(f"{what}: a {('nil', 'bool')[kind]} is more than {most}")
    refs = ix.values(rows, ValueType.PAYLOAD)
    if ((refs != NONE) & (refs >= len(ix.payloads))).any():
        raise FormatError(f"{what}: a payload is not in the index")
    texts = ix.values(rows, ValueType.TEXT)
    starts, sizes = (texts & np.uint64(NONE)).astype(np.uint32), (texts >> np.uint64(32)).astype(np.uint32)
    if bad := pool.bad_names(starts, sizes, empty=True, nul=True):
        raise FormatError(f"{what}: a text {bad[1]}")


def _check_children(ix: Index, t: TensorColumns) -> None:
    """`by_module`, first_tensor, first_attribute and the places of each module's children agree (R42 to R44)."""
    modules, count, parents = ix.modules, len(ix.modules), t.parent
    if count == 1 and ix.by_module is None and not len(ix.attributes):
        alone = np.array_equal(t.place, np.arange(len(parents), dtype=np.uint32))
        if alone and not modules["first_tensor"][0] and not modules["first_attribute"][0]:
            return  # a flat record, in order
    if ix.by_module is not None:
        order = ix.by_module
        if _first(order >= len(parents)) is not None:
            raise FormatError("by_module: an item is no tensor")
        keys = parents[order].astype(np.uint64) << np.uint64(32) | order
        if (keys[1:] <= keys[:-1]).any():
            raise FormatError("by_module: not strictly ascending by (parent, tensor)")
    elif (parents[1:] < parents[:-1]).any():
        raise FormatError("by_module is missing, but tensors are not in the order of their modules")
    if (modules["first_tensor"] != first_children(parents, count)).any():
        raise FormatError("modules: first_tensor does not match the tensors' parents")
    if (modules["first_attribute"] != first_children(ix.attributes["parent"], count)).any():
        raise FormatError("modules: first_attribute does not match the attributes' parents")
    parent = np.concatenate((parents, modules["parent"][1:], ix.attributes["parent"]))
    place = np.concatenate((t.place, modules["place"][1:], ix.attributes["place"]))
    sizes = np.bincount(parent, minlength=count)
    slots = (np.cumsum(sizes) - sizes)[parent] + place
    if (place >= sizes[parent]).any() or (np.bincount(slots, minlength=len(slots)) != 1).any():
        raise FormatError("modules: the places of a module's children are not 0, 1, 2, ... once each")


def _check_full_names(ix: Index, t: TensorColumns, pool: TextPool) -> None:
    """A full name is the module's name, a dot and the key; in module 0 the key alone (R34)."""
    modules = ix.modules[1:]
    inner = [np.ascontiguousarray(modules[c]) for c in ("name", "name_size", "key_size", "parent")]
    for what, columns in (("tensors", [t.name, t.name_size, t.key_size, t.parent]), ("modules", inner)):
        nested = columns[3] != 0
        if np.count_nonzero(columns[2][~nested] != columns[1][~nested]):
            raise FormatError(f"{what}: the name of one in module 0 is not its key")
        if not np.count_nonzero(nested):
            continue
        whole = np.count_nonzero(nested) == len(nested)
        name, size, key, parent = columns if whole else (c[nested] for c in columns)
        prefix = ix.modules["name_size"][parent]
        split = (key != 0) & (size == prefix + np.uint64(1) + key)
        if what == "tensors" and np.count_nonzero(split) == len(split) and _start_as_modules(ix, t, pool):
            continue
        split &= pool.octets[name + np.where(split, prefix, 0)] == ord(".")
        split &= pool.equal(name, ix.modules["name"][parent], np.where(split, prefix, 0))
        if (i := _first(~split)) is not None:
            full = ix.string(int(name[i]), int(size[i]))
            raise FormatError(f"{what}: '{printable(full)}' is not its module's name, a dot and its key")


def _start_as_modules(ix: Index, t: TensorColumns, pool: TextPool) -> bool:
    """Return True if every tensor's name starts with its module's and a dot; all are long enough, and in order.

    Of the names in a module the first and the last tell: names between two that start alike start so, too.
    """
    ranks = np.empty(len(t.name), np.uint32)
    ranks[ix.by_name] = np.arange(len(ranks), dtype=np.uint32)
    parents = t.parent
    if ix.by_module is not None:
        ranks, parents = ranks[ix.by_module], parents[ix.by_module]
    starts = np.concatenate(([0], np.flatnonzero(parents[1:] != parents[:-1]) + 1))
    ends = ix.by_name[np.concatenate((np.minimum.reduceat(ranks, starts), np.maximum.reduceat(ranks, starts)))]
    ends = ends[t.parent[ends] != 0]
    modules = ix.modules[t.parent[ends]]
    names, prefixes = t.name[ends], modules["name_size"]
    dots = pool.octets[names + prefixes] == ord(".")
    return bool(dots.all() and pool.equal(names, modules["name"], prefixes).all())


def _check_collisions(ix: Index, t: TensorColumns, pool: TextPool) -> None:
    """No two modules share a full name; within a module no two children of any kind share a key (R35, R36)."""
    modules, attributes = ix.modules, ix.attributes
    if len(modules) == 1 and not len(attributes):
        return  # tensors alone: `by_name` has shown their names to be unique
    if (i := pool.first_repeated(modules["name"], modules["name_size"], np.zeros(len(modules), np.uint32))) is not None:
        raise FormatError(f"modules[{i}]: another module has its name")
    mixed = np.zeros(len(modules), bool)
    mixed[modules["parent"][1:]] = True
    mixed[attributes["parent"]] = True
    near = mixed[t.parent]
    near_size = t.key_size[near]
    near_start = t.name[near] + t.name_size[near] - near_size
    inner = modules[1:]
    inner_start = inner["name"] + inner["name_size"] - inner["key_size"]
    starts = np.concatenate((near_start, inner_start, attributes["name"]))
    sizes = np.concatenate((near_size, inner["key_size"], attributes["name_size"]))
    parents = np.concatenate((t.parent[near], inner["parent"], attributes["parent"]))
    if (i := pool.first_repeated(starts, sizes, parents)) is not None:
        key = ix.string(int(starts[i]), int(sizes[i]))
        raise FormatError(f"modules[{int(parents[i])}]: two of its children have the key '{printable(key)}'")


def _check_usage(ix: Index, t: TensorColumns) -> None:
    """Every payload belongs to something: an archive carries no stowaways (R61)."""
    count = len(ix.payloads)
    if count <= len(t.payload) and np.array_equal(t.payload[:count], np.arange(count, dtype=np.uint32)):
        return  # as they mostly are
    used = np.zeros(count + 1, bool)
    used[np.minimum(t.payload, len(ix.payloads))] = True
    for rows in filter(len, (ix.attributes, ix.metadata)):
        used[np.minimum(ix.values(rows, ValueType.PAYLOAD), np.uint64(len(ix.payloads)))] = True
    if (i := _first(~used[:-1])) is not None:
        raise FormatError(f"payloads[{i}]: no tensor and no attribute uses it")
