"""Two records compared by what they hold: tensors, modules, attributes, metadata; where and how it lies is no matter.

How far tensors of one type and shape are apart is `differing`'s; how it is printed, the command line's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.codec.entries import KIND_NAMES
from zcrecord.codec.layout import DIGEST_ALLOWANCE
from zcrecord.errors import LimitError
from zcrecord.record.record import Record
from zcrecord.tensors.strides import address

from .differing import differing, same

__all__ = ["Change", "compare"]

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that two records do not have in common.

    `change` is 'added' where only the second has it, 'removed' where only the first has; of a tensor else 'type'
    (dtype or shape) or 'contents', of the rest 'changed'; 'moved' if both have it and the modules it lies in, but in
    another one of those. `before` and `after` describe tensors and modules, are the values of attributes and metadata,
    and of what moved the names of its modules. Of contents, `elements` tells how many differ, of how many, and
    `largest` the largest absolute difference: None where there are no numbers, NaN where none can be told.
    """

    what: Literal["tensor", "module", "attribute", "metadata"]
    name: str
    change: Literal["added", "removed", "type", "contents", "changed", "moved"]
    before: Any = None
    after: Any = None
    elements: tuple[int, int] | None = None
    largest: float | int | None = None


def compare(
    before: Record, after: Record, *, fast: bool = False, progress: Callable[[int, int | None], None] | None = None
) -> Iterator[Change]:
    """Yield what two records do not have in common: tensors first, then modules, attributes and metadata.

    Layout, the order of mappings, ties and strides are no difference. Values are the same if all their bits are. What
    both have is read forward, a piece at a time, as it is asked for; nothing is copied.

    Args:
        fast: take tensors whose payloads have the same digest (XXH3, 64 bits) for the same, unread. Damage does not get
            past it, but somebody who wants to can make two payloads of one digest.
        progress: called with the bytes compared so far, and None: how many there will be nobody has counted.

    Raises:
        LimitError: different views of the same bytes would have to be compared for over 64 times both archives' size;
        or attributes' full names would take out of all proportion to the index.

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
    yield from _Tensors(before.archive, after.archive, fast, progress).changes()
    equal = _Equal()
    yield from _moved(before.archive, after.archive)
    yield from _mappings("module", _described(before.archive), _described(after.archive), equal)
    a, b = before.modules, after.modules
    mine, others = ({name: m.attributes for name, m in found.items()} for found in (a, b))
    for module in {**a, **b}:
        prefix = f"{module}." if module else ""
        yield from _mappings("attribute", mine.get(module, {}), others.get(module, {}), equal, prefix=prefix)
    yield from _mappings("metadata", before.metadata, after.metadata, _Equal())


class _Tensors:
    """The tensors of two archives, compared by name; what lies at one place is compared once."""

    def __init__(self, a: Archive, b: Archive, fast: bool, progress: Callable[[int, int | None], None] | None) -> None:
        self._a, self._b, self._fast, self._progress = a, b, fast, progress
        self._known: dict[tuple[Key, Key], Any] = {}
        self._left = DIGEST_ALLOWANCE * (a.header.archive_size + b.header.archive_size)
        self._done = 0

    def changes(self) -> Iterator[Change]:
        """Yield what is not the same: in the first one's order, then what is new in the second's."""
        a, b = self._a, self._b
        mine, others = a.names(), {name: j for j, name in enumerate(b.names())}
        for i, name in enumerate(mine):
            j = others.pop(name, None)
            if j is None:
                yield Change("tensor", name, "removed", before=_told(a, i))
            elif (kinds := [_kind(a, i), _kind(b, j)])[0] != kinds[1]:
                yield Change("tensor", name, "type", _told(a, i), _told(b, j))
            elif (found := self._compared(name, i, j)) is not None:
                elements = None if found[0] is None else (found[0], prod(kinds[0][2]))
                yield Change("tensor", name, "contents", elements=elements, largest=found[1])
        for name, j in others.items():
            yield Change("tensor", name, "added", after=_told(b, j))

    def _compared(self, name: str, i: int, j: int) -> Any:
        """Return by how much two tensors of one type differ, None if they do not."""
        if 0 in _kind(self._a, i)[2]:
            return None
        key = _place(self._a, i), _place(self._b, j)
        if key not in self._known:
            self._known[key] = None if self._fast and self._same_digest(i, j) else self._read(name, i, j)
        return self._known[key]

    def _read(self, name: str, i: int, j: int) -> Any:
        _, bits, shape = _kind(self._a, i)
        nbytes = dtypes.nbytes(prod(shape), bits) or len(self._a.payload(self._a.row(i).payload))
        self._left -= nbytes
        if self._left < 0:
            what = (
                f"views of the same bytes add up to more than {DIGEST_ALLOWANCE} times both archives, too much to read"
            )
            raise LimitError(what, path=self._a.path, tensor=name)
        found = differing(self._a, i, self._b, j)
        self._done += nbytes
        if self._progress:
            self._progress(self._done, None)
        return found

    def _same_digest(self, i: int, j: int) -> bool:
        """Return whether all of two tensors' bytes have one digest; False where there is none."""
        told = []
        for archive, number in ((self._a, i), (self._b, j)):
            row = archive.row(number)
            if not archive.index.digest_kind or archive.mode == "c":
                return False
            _, nbytes, digest = archive.index.payloads[row.payload].item()
            told.append((nbytes, digest, row.byte_offset, archive.strides(row)))
        return told[0] == told[1]


def _kind(archive: Archive, i: int) -> tuple[int, int, tuple[int, ...]]:
    row = archive.row(i)
    return row.dtype, row.bits, archive.shape(row)


def _place(archive: Archive, i: int) -> Key:
    """Return what two tensors of one archive have in common that are the same bytes in the same form."""
    row = archive.row(i)
    at = row.payload if archive.mode == "c" else int(archive.index.payloads["offset"][row.payload])
    return at, row.byte_offset, row.bits, row.dtype, archive.shape(row), archive.strides(row)


def _told(archive: Archive, i: int) -> str:
    code, bits, shape = _kind(archive, i)
    kind = dtypes.by_code.get(code)
    name = f"unknown {code}" if kind is None else kind.name
    stored = "" if kind is not None and kind.bits == bits else f" in {bits} bits"
    return f"{name}{stored} [{', '.join(map(str, shape))}]"


def _moved(a: Archive, b: Archive) -> Iterator[Change]:
    """Yield what lies in another module, though both archives have both modules: the names do not tell."""
    mine, others = unflatten.astray(a.index), unflatten.astray(b.index)
    if mine == others:
        return
    modules = [set(map(archive.index.text_of, archive.index.modules)) for archive in (a, b)]
    whats: tuple[Literal["tensor", "module"], ...] = ("tensor", "module")
    for what, was, now in zip(whats, mine, others, strict=True):
        homes = [_homes(archive, what, {**was, **now}) for archive in (a, b)]
        for name, before in homes[0].items():
            after = homes[1].get(name, before)
            if before != after and after in modules[0] and before in modules[1]:
                yield Change(what, name, "moved", before, after)


def _homes(archive: Archive, what: str, names: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the modules of those of an archive's tensors, or modules, that are among `names`."""
    ix = archive.index
    rows = ix.tensors if what == "tensor" else ix.modules[1:]
    found = zip(map(ix.text_of, rows), rows["parent"].tolist(), strict=True)
    return {name: ix.text_of(ix.modules[parent]) for name, parent in found if name in names}


def _described(archive: Archive) -> dict[str, str]:
    """Return each module's kind and class, and the order of its items where their keys do not tell it."""
    ix = archive.index
    turned = unflatten.turned(ix)
    out = {}
    for row in ix.modules:
        name, kind = ix.text_of(row), int(row["kind"])
        told = f"{KIND_NAMES.get(kind, f'unknown {kind}')} {ix.text_of(row, 'type_name')}".strip()
        out[name] = f"{told} of {', '.join(turned[name])}" if name in turned else told
    return out


def _mappings(
    what: Any, before: Mapping[str, Any], after: Mapping[str, Any], equal: _Equal, *, prefix: str = ""
) -> Iterator[Change]:
    for key, value in before.items():
        if key not in after:
            yield Change(what, prefix + key, "removed", before=value)
        elif not equal(value, after[key]):
            yield Change(what, prefix + key, "changed", value, after[key])
    for key, value in after.items():
        if key not in before:
            yield Change(what, prefix + key, "added", after=value)


class _Equal:
    """Whether two values are of one type and the same, bit by bit: True is not 1, and a NaN only the same NaN.

    Bytes are read once, however many items of a list they are: for values that are all kept while this is.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], bool] = {}

    def __call__(self, x: Any, y: Any) -> bool:
        if isinstance(x, bytes | memoryview) and isinstance(y, bytes | memoryview):
            return len(x) == len(y) and (not len(x) or self._octets(x, y))
        if type(x) is not type(y):
            return False
        if isinstance(x, list | tuple):
            return len(x) == len(y) and all(map(self, x, y))
        if isinstance(x, float):
            return np.float64(x).tobytes() == np.float64(y).tobytes()
        return bool(x == y)

    def _octets(self, x: bytes | memoryview, y: bytes | memoryview) -> bool:
        key = address(x), address(y), len(x)
        if key not in self._known:
            self._known[key] = same(x, y)
        return self._known[key]
