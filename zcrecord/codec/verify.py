"""The rules of an index: of one tensor, at level `touch`; of every entry and of the index as a whole, at level `index`.

A rule of one payload or one tensor stands once, in `check_payload` and `check_tensor`. It compares Python's integers at
level `touch`, and numpy's columns at level `index`: `&` and `|` stand for `and` and `or`.
"""

from __future__ import annotations

import numpy as np

from zcrecord import dtypes
from zcrecord._schema import ValueForm, ValueType
from zcrecord.errors import FormatError, LimitError, printable

from .draft import check_draft_budget
from .index import Array, Index, TextPool, list_bounds
from .layout import INDEX_ALLOWANCE, MAX_ARCHIVE_SIZE, MAX_DEPTH, MAX_RANK, NONE, Header, align_up, first_children

Number = int | Array  # of one entry, or of each
Truth = bool | Array
_BIT_LIMIT = MAX_ARCHIVE_SIZE * 8
_SURELY_FITS = 2.0**58  # bits; a product in floating point below this is below the limit for certain
_STRING = dtypes.STRING.code


def _wrong_types() -> Array:
    """Return a table, by dtype | bits << 8, that is True for an element width that the type cannot have (R46, R77)."""
    allowed = np.zeros((256, 256), bool)  # by bits, dtype
    allowed[1:129, 1:] = True  # types that this version does not know take 1 to 128 bits
    for kind in dtypes.DTYPES:
        allowed[:, kind.code] = False
        allowed[kind.bits, kind.code] = True
        if kind.packed:
            allowed[8, kind.code] = True
    return ~allowed.reshape(-1)


_WRONG_TYPES = _wrong_types()
_WRONG_TYPE_BYTES = _WRONG_TYPES.tobytes()


def _first(bad: Truth) -> int | None:
    """Return the position of the first true item, 0 of a single true value; None if nothing is true."""
    if isinstance(bad, np.ndarray):
        return int(bad.argmax()) if np.count_nonzero(bad) else None
    return 0 if bad else None


def _as_signed(value: Number) -> Number:
    """Return unsigned numbers as signed ones, which subtraction and negative strides need."""
    return value.astype(np.int64) if isinstance(value, np.ndarray) else value


class PayloadRow:
    """Payload i beside the one before it, for level `touch`."""

    def __init__(self, ix: Index, header: Header, i: int) -> None:
        self.ix, self.header, self.start = ix, header, i
        self.offset, self.nbytes, self.digest = ix.payloads[i].item()
        self.before = ix.payloads[i - 1].item() if i else (0, 0, 0)


class PayloadColumns:
    """All payloads, each beside the one before it, for level `index`."""

    def __init__(self, ix: Index, header: Header) -> None:
        self.ix, self.header, self.start = ix, header, 0
        columns = np.zeros((3, len(ix.payloads) + 1), np.uint64)
        columns[:, 1:] = ix.payloads.view("<u8").reshape(-1, 3).T
        self.offset, self.nbytes, self.digest = columns[:, 1:]
        self.before = tuple(columns[:, :-1])


def check_payload(rows: PayloadRow | PayloadColumns) -> None:
    """Raise FormatError unless payloads have bytes, are aligned, inside, ascending, apart or equal (R56 to R60)."""
    header = rows.header
    start, room, alignment = header.payload_offset, header.payload_room, header.alignment
    wild = (rows.nbytes == 0) | (rows.nbytes > MAX_ARCHIVE_SIZE) | (rows.offset > MAX_ARCHIVE_SIZE)
    _refuse_payload(rows, wild, "is empty, or larger than an archive may be")  # R56
    past_end = "ends past the region of payloads ({room:#x}); the file is damaged, copy it again"
    _refuse_payload(rows, rows.offset + rows.nbytes > room, past_end)  # R56
    _refuse_payload(rows, (rows.offset + start) & (alignment - 1) != 0, "is not aligned to {alignment} bytes")  # R57
    offset, nbytes, digest = rows.before
    end = offset + nbytes
    same = (rows.offset == offset) & (rows.nbytes == nbytes)
    apart = same ^ True  # `not` does not work on columns
    _refuse_payload(rows, apart & (rows.offset < end), "overlaps the one before it, or is out of order")  # R58
    behind_hole = apart & (rows.offset > end + (header.base_alignment - 1))
    _refuse_payload(rows, behind_hole, "comes after a hole of {base_alignment} bytes or more")  # R59
    _refuse_payload(rows, same & (rows.digest != digest), "shares its range with one of another digest")  # R60
    if not rows.ix.digest_kind:
        _refuse_payload(rows, rows.digest != 0, "has a digest in an archive without")  # R60


def _refuse_payload(rows: PayloadRow | PayloadColumns, bad: Truth, message: str) -> None:
    """Raise FormatError for the first payload for which `bad` is true; `message` may name header fields in braces."""
    if bad is not False and (i := _first(bad)) is not None:
        header = rows.header
        offset, nbytes, _ = rows.ix.payloads[rows.start + i].item()
        start = header.payload_offset + offset
        why = message.format(**header._asdict(), room=header.payload_offset + header.payload_room)
        raise FormatError(f"payload [{start:#x}, {start + nbytes:#x}) {why}")


class TensorRow:
    """The entry of tensor i as plain numbers, for level `touch`; its attributes are those of TensorColumns."""

    def __init__(self, ix: Index, header: Header, i: int) -> None:
        self.ix, self.header, self.start = ix, header, i
        (self.name, self.name_size, self.key_size, self.parent, self.place, self.payload, self.byte_offset, self.dims,
         self.strides, dtype, self.bits, self.rank, reserved0, reserved1) = ix.tensors[i].item()  # fmt: skip
        self.reserved = reserved0 | reserved1
        self.wrong_type = bool(_WRONG_TYPE_BYTES[dtype | self.bits << 8])
        self.string = self.any_string = dtype == _STRING
        self.strided = self.any_strided = self.strides != NONE
        self.exact = not self.string and not self.strided
        self.size_bits = 64 if self.string else self.bits
        self.axes = self.rank

    def dim(self, axis: int) -> int:
        """Return the dim of an axis."""
        return int(self.ix.dims[self.dims + axis])

    def stride(self, axis: int) -> int:
        """Return the stride of an axis."""
        return int(self.ix.strides[self.strides + axis])

    def payload_bytes(self) -> int:
        """Return the bytes of the payload, 0 without one, after checking its own entry."""
        if self.payload == NONE:
            return 0
        check_payload(PayloadRow(self.ix, self.header, self.payload))
        return int(self.ix.payloads["nbytes"][self.payload])


class TensorColumns:
    """All tensors, for level `index`: a column for each field. Payloads are checked before."""

    def __init__(self, ix: Index, header: Header) -> None:
        self.ix, self.header, self.start = ix, header, 0
        words = np.ascontiguousarray(ix.tensors.view("<u4").reshape(-1, 12).T)
        self.name, self.name_size, self.key_size, self.parent, self.place, self.payload = words[:6]
        self.dims, self.strides = words[8].astype(np.int64), words[9].astype(np.int64)
        kind = words[10] & 0xFFFF
        self.bits = (kind >> 8).astype(np.uint64)
        self.rank = ((words[10] >> 16) & 0xFF).astype(np.int64)
        self.reserved = (words[10] >> 24) | words[11]
        self.wrong_type = _WRONG_TYPES[kind]
        self.string, self.strided = kind == _STRING, self.strides != NONE
        self.any_string, self.any_strided = bool(np.count_nonzero(self.string)), bool(np.count_nonzero(self.strided))
        self.exact = ~(self.string | self.strided)
        self.size_bits = np.where(self.string, np.uint64(64), self.bits) if self.any_string else self.bits
        self.axes = int(self.rank.max(initial=0))
        self.byte_offset = words[6]  # 32 bits do for "is it 0?", all that is asked without strides
        if self.any_strided or np.count_nonzero(words[7]):
            self.byte_offset = words[6] | words[7].astype(np.uint64) << np.uint64(32)

    def dim(self, axis: int) -> Array:
        """Return the dims of an axis, 1 of tensors without it."""
        return _take_or_default(self.ix.dims, self.dims + axis, self.rank > axis, 1)

    def stride(self, axis: int) -> Array:
        """Return the strides of an axis, 0 of tensors without it or without strides."""
        return _take_or_default(self.ix.strides, self.strides + axis, self.strided & (self.rank > axis), 0)

    def payload_bytes(self) -> Array:
        """Return the bytes of each payload, 0 without one."""
        return _take_or_default(self.ix.payloads["nbytes"], self.payload, self.payload != NONE, 0)


def _take_or_default(pool: Array, places: Array, present: Array, default: int) -> Array:
    """Return the items of a pool at the places that are `present`, `default` for the others."""
    if np.count_nonzero(present) == len(present):
        return pool[places]
    if not len(pool):
        return np.full(len(present), default, pool.dtype)
    return np.where(present, pool[np.where(present, places, 0)], pool.dtype.type(default))


def _refuse(
    rows: TensorRow | TensorColumns, bad: Truth, message: str, kind: type[FormatError | LimitError] = FormatError
) -> None:
    """Raise `kind` for the first tensor for which `bad` is true; `message` may name fields of its entry in braces."""
    if bad is not False and (i := _first(bad)) is not None:
        i += rows.start
        raise kind(message.format(**rows.ix.tensor(i)._asdict()), tensor=rows.ix.name(i))


def check_tensor(rows: TensorRow | TensorColumns) -> None:
    """Raise unless a view of each tensor lies inside its payload (R26, R33, R45 to R55, R71, R77); not of its name."""
    ix, strided = rows.ix, rows.strided
    _refuse(rows, rows.reserved != 0, "a reserved field is not zero")  # R26
    _refuse(rows, rows.rank > MAX_RANK, f"rank {{rank}} is more than {MAX_RANK}", LimitError)  # R47
    _refuse(rows, rows.parent >= len(ix.modules), "its parent {parent} is no module")  # R45
    wrong_key = (rows.key_size == 0) | (rows.key_size > rows.name_size)
    _refuse(rows, wrong_key, "its key takes {key_size} of {name_size} bytes of its name")  # R33
    _refuse(rows, rows.wrong_type, "dtype {dtype} cannot take {bits} bits an element")  # R46, R77
    _refuse(rows, rows.dims + rows.rank > len(ix.dims), "its dims leave their pool")  # R48
    missing = (rows.payload != NONE) & (rows.payload >= len(ix.payloads))
    _refuse(rows, missing, "its payload {payload} is not in the index")  # R50
    if rows.any_strided:
        no_bytes = rows.string | (rows.bits & 7 != 0)
        _refuse(rows, strided & no_bytes, "only types of whole bytes may have strides")  # R52
        _refuse(rows, strided & (rows.strides + rows.rank > len(ix.strides)), "its strides leave their pool")  # R52
    count = _count(rows)  # R49
    need = (count * rows.size_bits + 7) >> 3
    available = rows.payload_bytes()  # R56 to R60
    misses = (count == 0) != (rows.payload == NONE)
    _refuse(rows, misses, "it has a payload exactly if it has bytes, or should have")  # R50
    _refuse(rows, (rows.strides == NONE) & (rows.byte_offset != 0), "byte_offset {byte_offset} without strides")  # R51
    if rows.any_string:
        short = (available < (count + 1) * 8) | (available & 7 != 0)
        _refuse(rows, rows.string & (count > 0) & short, "its payload cannot hold its strings")  # R71
    if (i := _first(bad := rows.exact & (need != available))) is not None:
        takes, has = (v[i] if isinstance(v, np.ndarray) else v for v in (need, available))
        _refuse(rows, bad, f"its shape takes {takes} bytes, its payload has {has}")  # R51
    if rows.any_strided:
        _refuse(rows, strided & (count == 0), "an empty tensor has no strides")  # R50
        _refuse(rows, strided & _reach_outside(rows, available), "its strides reach outside its payload")  # R53
        misplaced = strided & (rows.byte_offset % (rows.size_bits + 7 >> 3) != 0)
        _refuse(rows, misplaced, "byte_offset {byte_offset} is no multiple of its element size")  # R54
        _refuse(rows, strided & (need > available), "its shape claims more bytes than its payload has")  # R55


def _count(rows: TensorRow | TensorColumns) -> Number:
    """Return the number of elements; LimitError if the dims that are not 0 claim more than 2^56 bytes (R49)."""
    count: Number = 1
    product: Number = 1  # of the dims but zeros
    size = rows.size_bits * 1.0  # in bits, and in floating point, which cannot wrap
    for axis in range(rows.axes):
        dim = rows.dim(axis)
        factor = dim + (dim == 0)
        size = size * factor
        if _first(size >= _SURELY_FITS) is not None:  # exactly, by division, before anything is multiplied
            past = factor > _BIT_LIMIT // rows.size_bits // product
            _refuse(rows, past, "its shape claims more than 2^56 bytes", LimitError)
        count, product = count * dim, product * factor
    return count


def _reach_outside(rows: TensorRow | TensorColumns, available: Number) -> Truth:
    """Return True for strides beyond their limits, or a first or last byte outside the payload (R53); never wraps."""
    limit = MAX_ARCHIVE_SIZE
    low: Number = 0
    high: Number = 0
    outside: Truth = rows.byte_offset > limit
    for axis in range(rows.axes):
        dim, stride = _as_signed(rows.dim(axis)), rows.stride(axis)
        steps = dim - (dim > 0)
        max_stride = limit // (steps + (steps == 0))
        outside = outside | (stride > max_stride) | (stride < -max_stride)
        reach = stride * steps
        low, high = low + reach * (reach < 0), high + reach * (reach > 0)
    outside = outside | (high > limit) | (low < -limit)
    first, item = _as_signed(rows.byte_offset), _as_signed(rows.size_bits + 7 >> 3)
    outside = outside | (first + low * item < 0)
    return outside | (first + (high + 1) * item > _as_signed(available))


def check_header(ix: Index, header: Header) -> None:
    """Raise FormatError unless counts agree and payloads end where the header says (R13, R24, R25, R37)."""
    count = len(ix.tensors)
    for vector, column in (("by_name", ix.by_name), ("by_module", ix.by_module)):
        if column is not None and len(column) != count:
            raise FormatError(f"index: vector '{vector}' has {len(column)} items for {count} tensors")
    if not len(ix.modules):
        raise FormatError("index: it has no modules; module 0, the record itself, is always there")
    if ix.digest_kind not in (0, 1):
        raise FormatError(f"index: digest kind {ix.digest_kind} is not known")
    end = sum(ix.payloads[-1].item()[:2]) if len(ix.payloads) else 0
    room = header.payload_room
    if align_up(end, header.alignment) != room:
        raise FormatError(f"payloads end at {end:#x} of a region of {room:#x} bytes, not within its last alignment")


def check_index(ix: Index, header: Header) -> None:
    """Raise unless the index keeps every rule that needs no payload byte; in time linear in its size."""
    check_header(ix, header)
    pool = TextPool(ix.text, ix.memory)
    pool.check_text()
    if header.is_draft:
        check_draft_budget(ix)
    else:
        _check_budget(ix, INDEX_ALLOWANCE * header.index_size)
    if len(ix.payloads):
        check_payload(PayloadColumns(ix, header))
    if _first(ix.by_name >= len(ix.tensors)) is not None:
        raise FormatError(f"by_name: an item is not one of the {len(ix.tensors)} tensors")
    tensors = TensorColumns(ix, header)
    _check_names(ix, tensors, pool)
    if len(ix.tensors):
        check_tensor(tensors)
    _check_modules(ix, pool)
    _check_attributes(ix, pool)
    _check_children(ix, tensors)
    _check_full_names(ix, tensors, pool)
    _check_collisions(ix, tensors, pool)
    _check_usage(ix, tensors)


def _check_budget(ix: Index, limit: int) -> None:
    """Raise LimitError if spans and lists take over `limit` bytes, which bounds all later passes (R30, R31, R67)."""
    total = _sum(ix.tensors["name_size"]) + _sum(ix.modules["name_size"]) + _sum(ix.modules["type_name_size"])
    for table, rows in (("attributes", ix.attributes), ("metadata", ix.metadata)):
        if not len(rows):
            continue
        is_text, is_list = rows["type"] == ValueType.TEXT, rows["form"] != ValueForm.SCALAR
        starts, counts = list_bounds(rows[is_list])
        if (starts + counts > len(ix.words)).any():
            raise FormatError(f"{table}: a list leaves the pool of {len(ix.words)} words")
        text_sizes = rows["value"][is_text & ~is_list] >> np.uint64(32)
        total += _sum(rows["name_size"]) + _sum(text_sizes) + 16 * _sum(counts)
        if total <= limit and (is_text & is_list).any():
            before = np.zeros(len(ix.words) + 1, np.uint64)  # by word, the bytes of the texts before it
            np.cumsum(ix.words >> np.uint64(32), out=before[1:])
            starts, counts = list_bounds(rows[is_text & is_list])
            total += _sum(before[starts + counts] - before[starts])
    if total > limit:
        raise LimitError(f"index: its names, texts and lists take {total} bytes of their pools, at most {limit}")


def _sum(sizes: Array) -> int:
    return int(sizes.sum(dtype=np.uint64))


def check_touched(ix: Index, header: Header, i: int, pool: TextPool) -> None:
    """Check tensor i alone: after this, a view of it lies inside the archive (R26 to R29, R33, R45 to R60)."""
    tensor = TensorRow(ix, header, i)
    if (reason := pool.bad_name(tensor.name, tensor.name_size)) is not None:
        raise FormatError(f"tensors[{i}]: its name {reason}")
    check_tensor(tensor)


def _check_names(ix: Index, tensors: TensorColumns, pool: TextPool) -> None:
    """Check that `by_name` has every tensor once, in strictly ascending order of legal names (R27 to R29, R32)."""
    order = ix.by_name.astype(np.int64)
    starts, sizes = tensors.name[order], tensors.name_size[order]
    if (bad := pool.bad_names(starts, sizes)) is not None:
        raise FormatError(f"tensors[{order[bad.number]}]: its name {bad.reason}")
    if (i := pool.first_not_ascending(starts, sizes)) is not None:
        name = ix.name(int(order[i]))
        raise FormatError(f"by_name[{i + 1}]: names are not strictly ascending after '{printable(name)}'", tensor=name)


def _check_modules(ix: Index, pool: TextPool) -> None:
    """Check names, kinds and reserved fields of modules, and module 0 (R26 to R29, R37, R41)."""
    rows = ix.modules
    count = len(rows)
    if bool(rows["reserved0"].any() or rows["reserved1"].any() or rows["reserved2"].any()):
        raise FormatError("modules: a reserved field is not zero")
    if count > 1 and (bad := pool.bad_names(rows["name"][1:], rows["name_size"][1:])):
        raise FormatError(f"modules[{bad.number + 1}]: its name {bad.reason}")
    if bad := pool.bad_names(rows["type_name"], rows["type_name_size"], empty=True):
        raise FormatError(f"modules[{bad.number}]: its type name {bad.reason}")
    if bad := pool.bad_names(rows["name"][:1], rows["name_size"][:1], empty=True):
        raise FormatError(f"modules[0]: its name {bad.reason}")
    root = rows[0]
    if root["parent"] != NONE or root["end"] != count or root["name_size"] or root["key_size"] or root["place"]:
        raise FormatError("modules[0]: the record itself has no name, no parent, place 0, and holds all modules")
    if not rows["kind"].all():
        raise FormatError("modules: kind 0 is invalid")
    if count > 1:
        _check_nesting(rows)


def _check_nesting(rows: Array) -> None:
    """Check that modules are in pre-order, their ranges nest, and none is deeper than 100 (R38 to R40)."""
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
    """Check the order of attributes and metadata, and that values have known types and lie in pools (R64 to R68)."""
    rows = ix.attributes
    if not len(rows) and not len(ix.metadata):
        return
    if (i := _first(rows["parent"] >= len(ix.modules))) is not None:
        raise FormatError(f"attributes[{i}]: its parent {int(rows['parent'][i])} is no module")
    order = rows["parent"].astype(np.uint64) << np.uint64(32) | rows["place"]
    if (i := _first(order[1:] <= order[:-1])) is not None:
        raise FormatError(f"attributes[{i + 1}]: not strictly ascending by parent and place")
    metadata = ix.metadata
    if (i := _first((metadata["parent"] != NONE) | (metadata["place"] != 0))) is not None:
        raise FormatError(f"metadata[{i}]: it has a parent or a place")
    for table, entries in (("attributes", rows), ("metadata", metadata)):
        if bad := pool.bad_names(entries["name"], entries["name_size"]):
            raise FormatError(f"{table}[{bad.number}]: its name {bad.reason}")
        if (entries["reserved0"] | entries["reserved1"]).any():
            raise FormatError(f"{table}: a reserved field is not zero")
        _check_values(ix, entries, table, pool)
    if (i := pool.first_not_ascending(metadata["name"], metadata["name_size"])) is not None:
        raise FormatError(f"metadata[{i + 1}]: names are not strictly ascending")


def _check_values(ix: Index, rows: Array, table: str, pool: TextPool) -> None:
    """Raise FormatError unless the values of attributes have known types and lie in range (R66 to R68)."""
    if (i := _first((rows["type"] > ValueType.PAYLOAD) | (rows["form"] > ValueForm.TUPLE))) is not None:
        raise FormatError(f"{table}[{i}]: type {int(rows['type'][i])} or form {int(rows['form'][i])} is not known")
    for kind, name, limit in ((ValueType.NIL, "nil", 0), (ValueType.BOOL, "bool", 1)):
        if (ix.values(rows, kind) > limit).any():
            raise FormatError(f"{table}: a {name} is more than {limit}")
    payloads = ix.values(rows, ValueType.PAYLOAD)
    if ((payloads != NONE) & (payloads >= len(ix.payloads))).any():
        raise FormatError(f"{table}: a payload is not in the index")
    texts = ix.values(rows, ValueType.TEXT)
    starts, sizes = (texts & np.uint64(NONE)).astype(np.uint32), (texts >> np.uint64(32)).astype(np.uint32)
    if bad := pool.bad_names(starts, sizes, empty=True, nul=True):
        raise FormatError(f"{table}: a text {bad.reason}")


def _check_children(ix: Index, tensors: TensorColumns) -> None:
    """Check `by_module`, first_tensor, first_attribute and the places of each module's children (R42 to R44)."""
    modules, count, parents = ix.modules, len(ix.modules), tensors.parent
    if count == 1 and ix.by_module is None and not len(ix.attributes):
        in_order = np.array_equal(tensors.place, np.arange(len(parents), dtype=np.uint32))
        if in_order and not modules["first_tensor"][0] and not modules["first_attribute"][0]:
            return  # a flat record, in order
    _check_module_order(ix, parents)
    if (modules["first_tensor"] != first_children(parents, count)).any():
        raise FormatError("modules: first_tensor does not match the tensors' parents")
    if (modules["first_attribute"] != first_children(ix.attributes["parent"], count)).any():
        raise FormatError("modules: first_attribute does not match the attributes' parents")
    parent = np.concatenate((parents, modules["parent"][1:], ix.attributes["parent"]))
    place = np.concatenate((tensors.place, modules["place"][1:], ix.attributes["place"]))
    sizes = np.bincount(parent, minlength=count)
    slots = (np.cumsum(sizes) - sizes)[parent] + place
    if (place >= sizes[parent]).any() or (np.bincount(slots, minlength=len(slots)) != 1).any():
        raise FormatError("modules: the places of a module's children are not 0, 1, 2, ... once each")


def _check_module_order(ix: Index, parents: Array) -> None:
    """Raise FormatError unless `by_module` has each tensor once, by parent; without it parents must ascend (R42)."""
    if ix.by_module is not None:
        if _first(ix.by_module >= len(parents)) is not None:
            raise FormatError("by_module: an item is no tensor")
        keys = parents[ix.by_module].astype(np.uint64) << np.uint64(32) | ix.by_module
        if (keys[1:] <= keys[:-1]).any():
            raise FormatError("by_module: not strictly ascending by (parent, tensor)")
    elif (parents[1:] < parents[:-1]).any():
        raise FormatError("by_module is missing, but tensors are not in the order of their modules")


def _check_full_names(ix: Index, tensors: TensorColumns, pool: TextPool) -> None:
    """Check that a full name is the module's name, a dot and the key, or in module 0 the key alone (R34)."""
    modules = ix.modules[1:]
    of_modules = [np.ascontiguousarray(modules[c]) for c in ("name", "name_size", "key_size", "parent")]
    of_tensors = [tensors.name, tensors.name_size, tensors.key_size, tensors.parent]
    for table, (starts, sizes, key_sizes, parents) in (("tensors", of_tensors), ("modules", of_modules)):
        nested = parents != 0
        if np.count_nonzero(key_sizes[~nested] != sizes[~nested]):
            raise FormatError(f"{table}: the name of one in module 0 is not its key")
        if not np.count_nonzero(nested):
            continue
        start, size, key_size, parent = (c[nested] for c in (starts, sizes, key_sizes, parents))
        prefix = ix.modules["name_size"][parent]
        valid = (key_size != 0) & (size == prefix + np.uint64(1) + key_size)
        valid &= pool.octets[start + np.where(valid, prefix, 0)] == ord(".")
        valid &= pool.equal(start, ix.modules["name"][parent], np.where(valid, prefix, 0))
        if (i := _first(~valid)) is not None:
            full = ix.string(int(start[i]), int(size[i]))
            raise FormatError(f"{table}: '{printable(full)}' is not its module's name, a dot and its key")


def _check_collisions(ix: Index, tensors: TensorColumns, pool: TextPool) -> None:
    """Check that no two modules have one full name, and no two children of a module one key (R35, R36)."""
    modules, attributes = ix.modules, ix.attributes
    if len(modules) == 1 and not len(attributes):
        return  # tensors alone: `by_name` has shown their names to be unique
    if (i := pool.first_repeated(modules["name"], modules["name_size"], np.zeros(len(modules), np.uint32))) is not None:
        raise FormatError(f"modules[{i}]: another module has its name")
    inner = modules[1:]
    has_others = np.zeros(len(modules), bool)  # than tensors, whose keys are unique as their names are
    has_others[inner["parent"]] = True
    has_others[attributes["parent"]] = True
    beside = has_others[tensors.parent]  # tensors beside such children
    key_sizes = tensors.key_size[beside]
    key_starts = tensors.name[beside] + tensors.name_size[beside] - key_sizes
    inner_starts = inner["name"] + inner["name_size"] - inner["key_size"]
    starts = np.concatenate((key_starts, inner_starts, attributes["name"]))
    sizes = np.concatenate((key_sizes, inner["key_size"], attributes["name_size"]))
    parents = np.concatenate((tensors.parent[beside], inner["parent"], attributes["parent"]))
    if (i := pool.first_repeated(starts, sizes, parents)) is not None:
        key = ix.string(int(starts[i]), int(sizes[i]))
        raise FormatError(f"modules[{int(parents[i])}]: two of its children have the key '{printable(key)}'")


def _check_usage(ix: Index, tensors: TensorColumns) -> None:
    """Check that every payload is used by a tensor, an attribute or metadata (R61)."""
    count = len(ix.payloads)
    if count <= len(tensors.payload) and np.array_equal(tensors.payload[:count], np.arange(count, dtype=np.uint32)):
        return  # as they mostly are
    used = np.zeros(count + 1, bool)
    used[np.minimum(tensors.payload, len(ix.payloads))] = True
    for rows in filter(len, (ix.attributes, ix.metadata)):
        used[np.minimum(ix.values(rows, ValueType.PAYLOAD), np.uint64(len(ix.payloads)))] = True
    if (i := _first(~used[:-1])) is not None:
        raise FormatError(f"payloads[{i}]: no tensor and no attribute uses it")
