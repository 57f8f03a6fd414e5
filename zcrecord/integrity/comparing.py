"""Compares two records by their content: tensors, modules, attributes and metadata; layout is ignored.

Payloads are read forward, a piece at a time, and no more is in memory. The command line prints the differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.codec.entries import KIND_NAMES
from zcrecord.codec.layout import DIGEST_ALLOWANCE
from zcrecord.dtypes import DType
from zcrecord.errors import LimitError
from zcrecord.record.record import Record
from zcrecord.storage.files import Progress
from zcrecord.tensors.packed import PackedTensor
from zcrecord.tensors.strides import address

Array = np.ndarray[Any, np.dtype[Any]]
Key = tuple[Any, ...]
Difference = tuple[int | None, float | int | None]  # elements that differ, and the largest absolute difference

_equal_bytes = np.array_equal  # False for another length, too
_octets_of: Any = partial(np.frombuffer, dtype=np.uint8)
_PIECE = 3 * 5 * 7 << 13  # bytes compared at a time: they fit the cache, and are whole elements of any width


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two records.

    Attributes:
        what: the kind of item that differs.
        name: the item's full name.
        change: 'added' if only the second record has the item, 'removed' if only the first has. Otherwise a tensor
            differs in 'type' (dtype or shape) or 'contents'; a module, attribute or metadata entry has 'changed'.
            'moved' if it lies in another module, and both records have both modules.
        before, after: descriptions of tensors and modules, values of attributes and metadata; for a moved item the
            names of its modules.
        elements: for contents, the number of elements that differ, and of all elements.
        largest: for contents, the largest absolute difference; None if the elements are not numbers, NaN if only NaNs
            differ.
    """

    what: Literal["tensor", "module", "attribute", "metadata"]
    name: str
    change: Literal["added", "removed", "type", "contents", "changed", "moved"]
    before: Any = None
    after: Any = None
    elements: tuple[int, int] | None = None
    largest: float | int | None = None


def compare(before: Record, after: Record, *, fast: bool = False, progress: Progress | None = None) -> Iterator[Change]:
    """Yield the differences of two records: tensors first, then modules, attributes and metadata.

    Layout, the order of mappings, ties and strides are ignored. Values are equal if all their bits are. Tensors of both
    records are read forward, a piece at a time, while the result is iterated; nothing is copied.

    Args:
        fast: do not read tensors whose payloads have the same digest (XXH3, 64 bits), but take them as equal. The
            digest detects damage, but an attacker can make two payloads with one digest.
        progress: called with the bytes compared so far, and None, since the total is not known.

    Raises:
        LimitError: many tensors are views of the same bytes, and comparing them would read over 64 times both archives;
        or attributes' full names would be far larger than the index.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.zeros(3), "b": np.ones(1)}, "a.zcr")
        >>> _ = zcrecord.save_record({"w": np.array([0, 0.5, 0])}, "b.zcr")
        >>> [c.change for c in compare(zcrecord.load_record("a.zcr"), zcrecord.load_record("b.zcr"))]
        ['contents', 'removed']
    """
    for record in (before, after):
        archive = record.archive
        archive.ensure_all()
        unflatten.check_full_names(archive.index, archive.header.index_size)
    yield from _TensorComparison(before.archive, after.archive, fast, progress).changes()
    equal = _ValueEquality()
    yield from _moved_items(before.archive, after.archive)
    old_modules, new_modules = _module_descriptions((before.archive, after.archive))
    yield from _mapping_changes("module", old_modules, new_modules, equal)
    old, new = ({name: m.attributes for name, m in record.modules.items()} for record in (before, after))
    for module in {**old, **new}:
        prefix = f"{module}." if module else ""
        yield from _mapping_changes("attribute", old.get(module, {}), new.get(module, {}), equal, prefix=prefix)
    yield from _mapping_changes("metadata", before.metadata, after.metadata, _ValueEquality())


class _TensorComparison:
    """Compares the tensors of two archives by name; each pair of byte ranges once."""

    def __init__(self, a: Archive, b: Archive, fast: bool, progress: Progress | None) -> None:
        self._a, self._b, self._fast, self._progress = a, b, fast, progress
        self._known: dict[tuple[Key, Key], Difference | None] = {}
        self._allowance = DIGEST_ALLOWANCE * (a.stored_nbytes() + b.stored_nbytes())
        self._done = 0

    def changes(self) -> Iterator[Change]:
        """Yield differences of the first archive's tensors, in its order, then tensors that only the second has."""
        added = {name: _Tensor(self._b, number) for number, name in enumerate(self._b.names())}
        for number, name in enumerate(self._a.names()):
            tensor, other = _Tensor(self._a, number), added.pop(name, None)
            if other is None:
                yield Change("tensor", name, "removed", before=tensor.description())
            elif tensor.type_and_shape() != other.type_and_shape():
                yield Change("tensor", name, "type", tensor.description(), other.description())
            elif (difference := self._compare(name, tensor, other)) is not None:
                count, largest = difference
                elements = None if count is None else (count, prod(tensor.shape()))
                yield Change("tensor", name, "contents", elements=elements, largest=largest)
        for name, other in added.items():
            yield Change("tensor", name, "added", after=other.description())

    def _compare(self, name: str, tensor: _Tensor, other: _Tensor) -> Difference | None:
        """Return the difference of two tensors of one type and shape, None if they are equal; of each pair once."""
        if 0 in tensor.shape():
            return None
        key = tensor.place(), other.place()
        if key not in self._known:
            is_equal = self._fast and tensor.has_same_digest(other)
            self._known[key] = None if is_equal else self._compare_bytes(name, tensor, other)
        return self._known[key]

    def _compare_bytes(self, name: str, tensor: _Tensor, other: _Tensor) -> Difference | None:
        """Read both tensors; LimitError once all reads add up to far more than both archives."""
        row = tensor.row
        nbytes = dtypes.nbytes(prod(tensor.shape()), row.bits) or len(self._a.payload(row.payload))
        self._allowance -= nbytes
        if self._allowance < 0:
            fault = f"views of the same bytes add up to more than {DIGEST_ALLOWANCE} times both archives"
            raise LimitError(f"{fault}, too much to read", path=self._a.path, tensor=name)
        difference = _difference(tensor, other)
        self._done += nbytes
        if self._progress:
            self._progress(self._done, None)
        return difference


class _Tensor:
    """A tensor of an archive: its row in the index, and keys by which it is compared."""

    def __init__(self, archive: Archive, number: int) -> None:
        self.archive, self._number, self.row = archive, number, archive.row(number)

    def shape(self) -> tuple[int, ...]:
        return self.archive.shape(self.row)

    def strides(self) -> tuple[int, ...] | None:
        return self.archive.strides(self.row)

    def type_and_shape(self) -> Key:
        return self.row.dtype, self.row.bits, self.shape()

    def place(self) -> Key:
        """Return a key that is equal for tensors of one archive with the same bytes, type, shape and strides."""
        return self.archive.place(self.row.payload), self.row.byte_offset, *self.type_and_shape(), self.strides()

    def description(self) -> str:
        return f"{dtypes.stored_name(self.row.dtype, self.row.bits)} [{', '.join(map(str, self.shape()))}]"

    def has_same_digest(self, other: _Tensor) -> bool:
        """Return True if payloads have the same known digest, and the tensors the same offset and strides in them."""
        keys = self._digest_key(), other._digest_key()
        return keys[0] is not None and keys[0] == keys[1]

    def _digest_key(self) -> Key | None:
        archive = self.archive
        if not archive.index.digest_kind or archive.mode == "c":
            return None
        _, nbytes, digest = archive.index.payloads[self.row.payload].item()
        return nbytes, digest, self.row.byte_offset, self.strides()

    def elements(self) -> Array:
        """Return an array of opaque elements of the tensor's width, strided or not."""
        if self.strides() is not None:
            return self.archive.elements(self._number)
        width = np.dtype((np.void, self.row.bits >> 3))
        return np.frombuffer(self.archive.payload(self.row.payload), width).reshape(self.shape())


def _moved_items(a: Archive, b: Archive) -> Iterator[Change]:
    """Yield tensors and modules that the second archive has in another module, if both have both modules."""
    modules = [set(map(archive.index.text_of, archive.index.modules)) for archive in (a, b)]
    kinds: tuple[Literal["tensor", "module"], ...] = ("tensor", "module")
    for kind in kinds:
        parents, other_parents = _parents(a, kind), _parents(b, kind)
        for name, before in parents.items():
            after = other_parents.get(name, before)
            if before != after and after in modules[0] and before in modules[1]:
                yield Change(kind, name, "moved", before, after)


def _parents(archive: Archive, kind: str) -> dict[str, str]:
    """Return the full name of the module of each tensor, or of each module, by full name."""
    ix = archive.index
    rows = ix.tensors if kind == "tensor" else ix.modules[1:]
    modules = list(map(ix.text_of, ix.modules))
    return dict(zip(map(ix.text_of, rows), map(modules.__getitem__, rows["parent"].tolist()), strict=True))


def _module_descriptions(archives: tuple[Archive, Archive]) -> list[dict[str, str]]:
    """Return the kind and class of each module by name, for both archives; of reordered lists also the keys."""
    orders = [unflatten.keys_of_lists(archive.index) for archive in archives]
    shared = orders[0].keys() & orders[1].keys()
    reordered = {name for name in shared if _is_reordered(orders[0][name], orders[1][name])}
    results = []
    for archive, order in zip(archives, orders, strict=True):
        descriptions = {}
        for row in archive.index.modules:
            name, type_name = archive.index.text_of(row), archive.index.text_of(row, "type_name")
            kind = int(row["kind"])
            keys = f" of {', '.join(order[name])}" if name in reordered else ""
            descriptions[name] = f"{KIND_NAMES.get(kind, f'unknown {kind}')} {type_name}".strip() + keys
        results.append(descriptions)
    return results


def _is_reordered(a: list[str], b: list[str]) -> bool:
    shared = set(a) & set(b)
    return [key for key in a if key in shared] != [key for key in b if key in shared]


def _mapping_changes(
    kind: Any, before: Mapping[str, Any], after: Mapping[str, Any], equal: _ValueEquality, *, prefix: str = ""
) -> Iterator[Change]:
    """Yield the differences of two mappings; `prefix` is put before each key, as the name of its module."""
    for key, value in before.items():
        if key not in after:
            yield Change(kind, prefix + key, "removed", before=value)
        elif not equal(value, after[key]):
            yield Change(kind, prefix + key, "changed", value, after[key])
    for key, value in after.items():
        if key not in before:
            yield Change(kind, prefix + key, "added", after=value)


class _ValueEquality:
    """Compares values by type and bits: True is not 1, and a NaN equals only the same NaN.

    Bytes that several items of a list share are read once. All compared values must outlive this object.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], bool] = {}

    def __call__(self, x: Any, y: Any) -> bool:
        if isinstance(x, bytes | memoryview) and isinstance(y, bytes | memoryview):
            return len(x) == len(y) and (not len(x) or self._equal_buffers(x, y))
        if type(x) is not type(y):
            return False
        if isinstance(x, list | tuple):
            return len(x) == len(y) and all(map(self, x, y))
        if isinstance(x, float):
            return np.float64(x).tobytes() == np.float64(y).tobytes()
        return bool(x == y)

    def _equal_buffers(self, x: bytes | memoryview, y: bytes | memoryview) -> bool:
        u, v = np.frombuffer(x, np.uint8), np.frombuffer(y, np.uint8)
        key = address(u), address(v), len(u)
        if key not in self._known:
            pieces = (slice(start, start + _PIECE) for start in range(0, len(u), _PIECE))
            self._known[key] = all(_equal_bytes(u[piece], v[piece]) for piece in pieces)
        return self._known[key]


def _difference(tensor: _Tensor, other: _Tensor) -> Difference | None:
    """Return the difference of two tensors of one type and shape; None if all bits are equal.

    0.0 and -0.0 differ, and two NaNs may. The largest difference ignores pairs with a NaN, unless all differing pairs
    have one. It is exact for integers. Strings and unknown types give (None, None).
    """
    bits, kind = tensor.row.bits, dtypes.by_code.get(tensor.row.dtype)
    if kind is None or kind.numpy is None:
        return (None, None) if any(not _equal_bytes(*pair) for pair in _pieces(tensor, other)) else None
    count, largest = 0, None
    remaining = prod(tensor.shape())
    for octets, other_octets in _pieces(tensor, other):
        elements = min(remaining, 8 * len(octets) // bits)
        remaining -= elements
        if not _equal_bytes(octets, other_octets):
            values, other_values = (_values(piece, kind, bits, elements) for piece in (octets, other_octets))
            differs = _as_integers(values) != _as_integers(other_values)
            if differs.ndim > 1:  # two integers of one element
                differs = differs.any(axis=-1)
            count += int(np.count_nonzero(differs))
            difference = _largest_difference(values[differs], other_values[differs])
            if largest is None or np.isnan(largest) or difference > largest:
                largest = difference
    return (count, largest) if count else None


def _pieces(tensor: _Tensor, other: _Tensor) -> Iterator[tuple[Array, Array]]:
    """Yield the bytes of two tensors in C order, a piece of each at a time."""
    if tensor.strides() is None and other.strides() is None:
        blocks, other_blocks = (map(_octets_of, t.archive.blocks(t.row.payload)) for t in (tensor, other))
        yield from _paired_pieces(blocks, other_blocks)
        return
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    arrays: Any = [tensor.elements(), other.elements()]
    nbytes = tensor.row.bits >> 3
    for u, v in np.nditer(arrays, flags=flags, order="C", buffersize=_PIECE // nbytes // 8 * 8):
        yield np.ascontiguousarray(u).view(np.uint8), np.ascontiguousarray(v).view(np.uint8)


def _paired_pieces(a: Iterator[Array], b: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
    """Yield the bytes of two payloads together, a piece of each at a time; the rest of a longer one comes alone."""
    x = y = np.zeros(0, np.uint8)
    while True:
        x, y = (x if len(x) else next(a, x)), (y if len(y) else next(b, y))
        if not len(x) and not len(y):
            return
        nbytes = min(len(x) or _PIECE, len(y) or _PIECE, _PIECE)
        yield x[:nbytes], y[:nbytes]
        x, y = x[nbytes:], y[nbytes:]


def _values(piece: Array, kind: DType, bits: int, elements: int) -> Array:
    if bits < 8:
        return PackedTensor(piece, kind, (elements,)).unpack()
    assert kind.numpy is not None
    return piece.view(kind.numpy)


def _as_integers(values: Array) -> Array:
    """Return elements as unsigned integers of their width; two per element of 16 bytes."""
    nbytes = values.dtype.itemsize
    return values.view(np.uint64).reshape(-1, 2) if nbytes == 16 else values.view(f"u{nbytes}")


def _largest_difference(u: Array, v: Array) -> float | int:
    """Return the largest absolute difference; NaN only if all differences are NaN."""
    name = u.dtype.name
    if name == "bool":
        return 1
    if name.startswith(("int", "uint")):
        wide: Any = np.uint64 if name == "uint64" else np.int64
        u, v = u.astype(wide), v.astype(wide)
        return int((np.maximum(u, v).view(np.uint64) - np.minimum(u, v).view(np.uint64)).max())
    with np.errstate(all="ignore"):
        wide = np.complex128 if name.startswith("complex") else np.float64
        distances = np.abs(u.astype(wide) - v.astype(wide))
        known = distances[~np.isnan(distances)]
        return float(known.max()) if len(known) else float("nan")
