"""Plans of loads: byte ranges, each once, in the order of the file, and the tensors in them. Reads no payload.

Everything here is arithmetic over the index. `archive.subset` chooses names, `load` carries plans out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol, SupportsIndex

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import subset
from zcrecord.archive.archive import Archive
from zcrecord.archive.name_patterns import is_pattern, matcher
from zcrecord.archive.subset import Names
from zcrecord.codec.layout import ALIGNMENT, NONE
from zcrecord.dtypes import DType
from zcrecord.errors import LimitError, RecordError, TensorNotFoundError, UnsupportedError
from zcrecord.tensors.strides import is_c_order, reach

from .protocol import LoadPlan, PayloadRef, RangeSource, Target

__all__ = [
    "MAX_IN_FLIGHT",
    "HasArchive",
    "LoadPlan",
    "Rows",
    "Slices",
    "Target",
    "archive_of",
    "plan_files",
    "plan_load",
    "shard",
]

MAX_IN_FLIGHT = 64 << 20  # bytes in flight to a device at a time, by default


class HasArchive(Protocol):
    """A record: anything with an opened archive."""

    @property
    def archive(self) -> Archive:
        """The opened archive."""


Rows = slice | Callable[[int], slice]  # of the first axis; a function is given their number
Slices = Mapping[str, Rows]


def shard(rank: int, world: int) -> Callable[[int], slice]:
    """Return the rows of one of `world` tensor-parallel ranks, for `slices=`: an equal part of the first axis.

    Raises:
        UnsupportedError: there is no such rank; or later, the rows cannot be divided equally.

    Example:
        >>> shard(1, 4)(100)
        slice(25, 50, None)
    """
    if not isinstance(rank, SupportsIndex) or not isinstance(world, SupportsIndex):
        raise UnsupportedError(f"rank {rank!r} of {world!r}: both are integers")
    rank, world = operator.index(rank), operator.index(world)
    if not 0 <= rank < world:
        raise UnsupportedError(f"rank {rank} of {world}: ranks are counted from 0")

    def rows(count: int) -> slice:
        if count % world:
            raise UnsupportedError(f"{count} rows cannot be divided equally among {world} ranks")
        return slice(count // world * rank, count // world * (rank + 1))

    return rows


def plan_load(
    record: HasArchive | Archive,
    names: Names | None = None,
    *,
    slices: Slices | None = None,
    max_in_flight: int = MAX_IN_FLIGHT,
    raw: bool = False,
) -> LoadPlan:
    """Return the plan to load chosen tensors; reads and copies no payload byte.

    A payload that several tensors share is planned once; of a tensor that is a part of a payload, only that part is. Of
    a record of mode "c" the private bytes are loaded, with edits, as its views show them.

    Args:
        record: a record, or a part of one.
        names: as `Record.select` takes them; None for all.
        slices: rows of the first axis to take, by name or pattern; the first key that matches a tensor counts.
        max_in_flight: the most bytes in flight at a time.
        raw: load tensors of strings, and of element types unknown here, as the bytes of their payload (uint8).

    Raises:
        TensorNotFoundError: a name without wildcards does not exist. UnsupportedError: a tensor of strings without
        `raw`; or rows that do not start and end on whole bytes, or are of a tensor that is not in C order.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((4, 2), np.float32)}, "model.zcr")
        >>> plan_load(zcrecord.load_record("model.zcr"), slices={"*": slice(2, 4)}).nbytes
        16
    """
    archive = archive_of(record)
    plans = plan_files(archive, names, slices=slices, max_in_flight=max_in_flight, raw=raw)
    if len(plans) > 1:
        what = f"its tensors lie in {len(plans)} shards, and a plan is for one file; load_into loads from all of them"
        raise UnsupportedError(what, path=archive.path)
    return plans[0]


def archive_of(record: Any) -> Archive:
    """Return the archive of a record, or an archive as it is.

    Raises:
        UnsupportedError: it is neither.
    """
    archive = getattr(record, "archive", record)
    if not isinstance(archive, Archive):
        what = f"a {type(record).__name__} is no record to be loaded from; load_record(source) gives one"
        raise UnsupportedError(what)
    return archive


def plan_files(
    archive: Archive, names: Names | None, *, slices: Any, max_in_flight: Any, raw: bool, fetch: bool = False
) -> list[LoadPlan]:
    """Return `plan_load`'s plan, of a catalogue one for each shard.

    With `fetch` a remote archive's payloads are fetched into memory, all together.
    """
    if slices is not None and not isinstance(slices, Mapping):
        raise UnsupportedError(f"slices= takes rows by name or pattern, as {{name: slice}}, not a {_kind(slices)}")
    limit = _whole_number(max_in_flight)
    if limit < 1:
        raise LimitError(f"max_in_flight={max_in_flight!r} is not a number of bytes")
    if names is not None:
        archive = subset.select(archive, names, None)
    chosen = _slicer(slices, archive.names(), archive.path) if slices else None
    return [_plan_file(part, chosen, limit, raw, fetch) for part in archive.parts_by_file()]


def _plan_file(
    archive: Archive, chosen: Callable[[str], Rows | None] | None, limit: int, raw: bool, fetch: bool
) -> LoadPlan:
    everything = archive.names()
    sources, regions = _PayloadSources(archive), _Regions(archive, raw)
    users: dict[int, list[tuple[str, _Region]]] = {}
    found: dict[str, Target] = {}
    for i, name in enumerate(everything):
        try:
            region = regions.of(i)
            rows = None if chosen is None else chosen(name)
            if rows is not None:
                region = _cut(region, rows)
        except RecordError as error:
            raise error.located(path=archive.path, tensor=name) from None
        if region.nbytes:
            users.setdefault(region.payload, []).append((name, region))
        else:
            found[name] = Target(sources.ref(name, region, -1, 0, 0), None)
    if fetch and users:
        sources.fetch()
    refs = [_share(sources, number, tensors, found) for number, tensors in users.items()]
    refs.sort(key=lambda ref: (ref.offset, ref.payload))
    ahead = sources.announce(refs, limit)
    targets = {name: found[name] for name in everything}
    return LoadPlan(tuple(refs), targets, limit - ahead, sources.path, sources.identity)


def _whole_number(value: Any) -> int:
    """Return an integer, of Python or numpy, as int; -1 for anything else, and for True and False."""
    try:
        return -1 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return -1


def _kind(value: Any) -> str:
    return type(value).__name__


class _Region(NamedTuple):
    """A tensor's bytes in its payload, [start, start + nbytes), and its layout in them."""

    payload: int
    start: int
    nbytes: int
    dtype: DType
    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    byte_offset: int


class _PayloadSources:
    """Sources of an archive's payloads: memory, a file, or a remote archive's read-ahead."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        file = archive.file
        self.path = None if file is None else file[0]
        self.identity = None if file is None else file[1]
        remote = archive.remote
        self._ahead: Any = remote.read_ahead() if hasattr(remote, "read_ahead") else None
        self._source: RangeSource | None = self._ahead or remote
        self._start = archive.offset + archive.header.payload_offset
        self._offsets = archive.index.payloads["offset"].tolist()

    def fetch(self) -> None:
        """Fetch all payloads of a remote archive into memory, checked; does nothing for other archives."""
        if self._ahead is not None:
            self._archive.bring()
            self._source = self._ahead = None

    def announce(self, refs: list[PayloadRef], max_in_flight: int) -> int:
        """Plan the read-ahead of a remote archive; returns the share of `max_in_flight` that it takes."""
        if self._ahead is None:
            return 0
        rows = self._archive.index.payloads
        checked = bool(self._archive.index.digest_kind)
        expected = []
        for ref in refs:
            _, nbytes, digest = rows[ref.payload].item()
            whole = checked and nbytes == ref.nbytes  # parts have no digest of their own
            expected.append((ref.offset, ref.nbytes, digest if whole else None, ref.name))
        self._ahead.expect(expected, max_in_flight // 2)
        return max_in_flight // 2

    def ref(self, name: str, region: _Region, payload: int, start: int, stop: int) -> PayloadRef:
        """Return a ref of the bytes [start, stop) of a payload, which hold a tensor's region."""
        buffer = None
        if payload < 0:
            buffer, offset = memoryview(b""), self._start
        else:
            offset = self._start + self._offsets[payload] + start
            if self._source is None:
                buffer = self._archive.payload(payload)[start:stop]
        return PayloadRef(
            name=name,
            path=self.path if payload >= 0 else None,
            buffer=buffer,
            source=self._source if payload >= 0 else None,
            offset=offset,
            nbytes=stop - start,
            dtype=region.dtype,
            bits=region.bits,
            shape=region.shape,
            strides=region.strides,
            payload=payload,
            byte_offset=region.start - start + region.byte_offset if payload >= 0 else 0,
        )


def _share(
    sources: _PayloadSources, payload: int, tensors: list[tuple[str, _Region]], found: dict[str, Target]
) -> PayloadRef:
    """Return the ref to load for all tensors of a payload, and add their targets to `found`."""
    first, region = tensors[0]
    regions = {region for _, region in tensors} if len(tensors) > 1 else {region}
    if len(regions) == 1:  # all tensors are one and the same
        ref = sources.ref(first, region, payload, region.start, region.start + region.nbytes)
        target = Target(ref, None)
        for name, _ in tensors:
            found[name] = target
        return ref
    start = min(region.start for region in regions) // ALIGNMENT * ALIGNMENT  # keeps the alignment of every tensor
    stop = max(region.start + region.nbytes for region in regions)
    octets = _Region(payload, start, stop - start, dtypes.by_name["uint8"], 8, (stop - start,), None, 0)
    ref = sources.ref(first, octets, payload, start, stop)
    targets: dict[_Region, Target] = {}
    for name, region in tensors:
        if region not in targets:
            targets[region] = Target(ref, sources.ref(name, region, payload, start, stop))
        found[name] = targets[region]
    return ref


class _Regions:
    """Regions of all tensors of an archive, whose whole index was checked; its columns are read once, for speed."""

    def __init__(self, archive: Archive, raw: bool) -> None:
        rows = archive.index.tensors
        fields = ("payload", "dtype", "bits", "dims", "rank", "strides", "byte_offset")
        self._rows = list(zip(*(rows[field].tolist() for field in fields), strict=True))
        self._dims, self._strides = archive.index.dims.tolist(), archive.index.strides.tolist()
        self._nbytes = archive.index.payloads["nbytes"].tolist()
        self._raw = raw

    def of(self, i: int) -> _Region:
        """Return a tensor's region.

        Raises:
            UnsupportedError: it is of strings, or of an unknown element type.
        """
        payload, code, bits, dims, rank, at, byte_offset = self._rows[i]
        nbytes = 0 if payload == NONE else self._nbytes[payload]
        kind = dtypes.by_code.get(code)
        if kind is None or kind is dtypes.STRING:
            if not self._raw:
                what = f"dtype code {code} is not known" if kind is None else "no device has tensors of strings"
                raise UnsupportedError(f"{what}; leave it out with names=, or take its bytes with raw=True")
            return _Region(payload, 0, nbytes, dtypes.by_name["uint8"], 8, (nbytes,), None, 0)
        shape = tuple(self._dims[dims : dims + rank])
        if at == NONE:
            return _Region(payload, 0, nbytes, kind, bits, shape, None, 0)
        item, strides = bits // 8, tuple(self._strides[at : at + rank])
        lowest, highest = reach(shape, strides)
        low, high = byte_offset + lowest * item, byte_offset + (highest + 1) * item
        stored = None if is_c_order(shape, strides) else strides
        return _Region(payload, low, high - low, kind, bits, shape, stored, byte_offset - low)


def _slicer(slices: Slices, names: Iterable[str], path: str | None) -> Callable[[str], Rows | None]:
    """Return a function that gives the rows to load of a tensor by name, None for all.

    Raises:
        TensorNotFoundError: a key without wildcards is no tensor's name. UnsupportedError: a key is no name.
    """
    known = set(names)
    tests: list[tuple[Callable[[str], bool], Rows]] = []
    for key, rows in slices.items():
        if not isinstance(key, str) or not (isinstance(rows, slice) or callable(rows)):
            raise UnsupportedError(f"slices= maps names or patterns to slices, and not {key!r} to {rows!r}")
        if key not in known and not is_pattern(key):
            raise TensorNotFoundError(key, lambda: sorted(known), path=path)
        tests.append((key.__eq__ if key in known else matcher([key]), rows))
    return lambda name: next((rows for test, rows in tests if test(name)), None)


def _cut(region: _Region, rows: Rows) -> _Region:
    """Return the region of some rows of a tensor.

    Raises:
        UnsupportedError: it has no rows, they are no range, or they do not start and end on whole bytes.
    """
    if not region.shape:
        raise UnsupportedError("slices= takes rows of the first axis, and this tensor has no axis")
    if region.strides is not None:
        raise UnsupportedError("slices= takes rows of tensors in C order, and this one is strided; load it whole")
    wanted = rows if isinstance(rows, slice) else rows(region.shape[0])
    try:
        start, stop, step = wanted.indices(region.shape[0])
    except (TypeError, AttributeError):
        raise UnsupportedError(f"slices= takes ranges of rows, and not {wanted!r}") from None
    if step != 1:
        raise UnsupportedError(f"slices= takes rows one after the other, and not every {step}th")
    stop = max(start, stop)
    shape = (stop - start, *region.shape[1:])
    bits = prod(region.shape[1:]) * region.bits
    if start * bits % 8 or (stop * bits % 8 and stop < region.shape[0]):
        what = f"rows {start} to {stop} of {bits} bits each do not start and end on whole bytes"
        raise UnsupportedError(f"{what}; take {8 // _shared_with_8(bits)} rows at a time, or a multiple")
    count = dtypes.nbytes(prod(shape), region.bits)
    return region._replace(start=region.start + start * bits // 8, nbytes=count, shape=shape)


def _shared_with_8(bits: int) -> int:
    """Return the greatest power of two, 8 at the most, that divides a number of bits."""
    return min(bits & -bits, 8)
