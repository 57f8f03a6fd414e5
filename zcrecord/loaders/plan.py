"""Plans of loads: byte ranges, each once, in the order of the file, and the tensors in them. Reads no payload.

Everything here is arithmetic over the index; `boxes` has that of parts of tensors, `payload_sources` finds the bytes.
`archive.subset` chooses names, `load` carries plans out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import subset
from zcrecord.archive.archive import Archive
from zcrecord.archive.by_file import parts_by_file
from zcrecord.archive.name_patterns import is_pattern, matcher
from zcrecord.archive.private_copy import check_apart
from zcrecord.archive.subset import Names
from zcrecord.codec.layout import ALIGNMENT
from zcrecord.errors import LimitError, RecordError, TensorNotFoundError, UnsupportedError

from .boxes import Box, is_box
from .payload_sources import PayloadSources
from .protocol import LoadPlan, PayloadRef, Target
from .regions import Region, Regions, pools_of

__all__ = ["MAX_IN_FLIGHT", "HasArchive", "Slices", "archive_of", "plan_files", "plan_load", "views_of"]

Key = TypeVar("Key", bound=Hashable)

MAX_IN_FLIGHT = 64 << 20  # bytes in flight to a device at a time, by default


class HasArchive(Protocol):
    """A record: anything with an opened archive."""

    @property
    def archive(self) -> Archive:
        """The opened archive."""


Slices = Mapping[str, Box]


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
        slices: boxes to take, by name or pattern; the first key that matches a tensor counts. See `load_into`.
        max_in_flight: the most bytes in flight at a time.
        raw: load tensors of strings, and of element types unknown here, as the bytes of their payload (uint8).

    Raises:
        TensorNotFoundError: a name without wildcards does not exist. UnsupportedError: a tensor of strings without
        `raw`; or a box that has more axes than its tensor, a step, or bounds within a byte of packed elements.

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
    archive: Archive, names: Names | None, *, slices: Any, max_in_flight: Any, raw: bool, views: bool = False
) -> list[LoadPlan]:
    """Return `plan_load`'s plan, of a catalogue one for each shard.

    With `views` the bytes of each tensor are in memory, and boxes are strided views of them: see `PayloadSources`.
    """
    if slices is not None and not isinstance(slices, Mapping):
        raise UnsupportedError(f"slices= takes boxes by name or pattern, as {{name: slice}}, not a {_kind(slices)}")
    limit = _whole_number(max_in_flight)
    if limit < 1:
        raise LimitError(f"max_in_flight={max_in_flight!r} is not a number of bytes")
    if names is not None:
        archive = subset.select(archive, names, None)
    chosen = _slicer(slices, archive.names(), archive.path) if slices else None
    plans, pools = [], pools_of(archive)
    for part in parts_by_file(archive):
        sources, names_here = PayloadSources(part, views), part.names()
        boxes = [(i, name, None if chosen is None else chosen(name)) for i, name in enumerate(names_here)]
        refs, found = _targets(part, sources, boxes, names_here, Regions(part, raw, pools))
        numbers = {ref.payload for ref in refs if ref.payload >= 0}  # a server may claim any size of the rest
        if part.mode == "r":
            used = sum(nbytes for *_, nbytes in {part.place(number) for number in numbers})
        else:  # each is memory of its own
            used = sum(map(part.source.nbytes, numbers))
        stored = min(part.source.opened_nbytes(), part.header.index_size + used)
        check_apart(sum(ref.nbytes for ref in refs), stored, part.path)
        ahead = sources.announce(limit)
        targets = {name: found[name] for name in names_here}
        plans.append(LoadPlan(tuple(refs), targets, limit - ahead, sources.path, sources.identity))
    return plans


def views_of(archive: Archive, boxes: Mapping[str, Sequence[Box]]) -> dict[tuple[str, int], Target]:
    """Return targets whose bytes are in memory for several boxes of each tensor, by its name and the box's number.

    Tensors that share their bytes and a box are one target. Of a remote archive the boxes' ranges are fetched, all
    together, and of a catalogue only from the shards that they lie in.

    Raises:
        UnsupportedError: as `plan_load`.
    """
    out: dict[tuple[str, int], Target] = {}
    pools = pools_of(archive)
    for part in parts_by_file(archive):
        names = part.names()
        wanted = [(i, (name, k), box) for i, name in enumerate(names) for k, box in enumerate(boxes[name])]
        out |= _targets(part, PayloadSources(part, views=True), wanted, names, Regions(part, False, pools))[1]
    return out


def _targets(
    archive: Archive,
    sources: PayloadSources,
    wanted: Iterable[tuple[int, Key, Box | None]],
    names: list[str],
    regions: Regions,
) -> tuple[list[PayloadRef], dict[Key, Target]]:
    """Return the refs to load for boxes of tensors, in the order of the file, and the target of each by its key."""
    users: dict[Hashable, list[tuple[Key, str, Region]]] = {}
    empty: list[tuple[Key, str, Region]] = []
    for i, key, box in wanted:
        try:
            region = regions.of(i, box)
        except RecordError as error:
            raise error.located(path=archive.path, tensor=names[i]) from None
        if region.nbytes:
            users.setdefault(sources.shared_by(region), []).append((key, names[i], region))
        else:
            empty.append((key, names[i], region))
    sources.prepare([region for tensors in users.values() for _, _, region in tensors])
    found = {key: Target(sources.empty(name, region), None) for key, name, region in empty}
    refs = [_share(sources, tensors, found) for tensors in users.values()]
    refs.sort(key=lambda ref: (ref.offset, ref.payload))
    return refs, found


def _whole_number(value: Any) -> int:
    """Return an integer, of Python or numpy, as int; -1 for anything else, and for True and False."""
    try:
        return -1 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return -1


def _kind(value: Any) -> str:
    return type(value).__name__


def _share(sources: PayloadSources, tensors: list[tuple[Key, str, Region]], found: dict[Key, Target]) -> PayloadRef:
    """Return the ref to load for all tensors of a payload, and add their targets to `found`."""
    _, first, region = tensors[0]
    regions = {region for _, _, region in tensors} if len(tensors) > 1 else {region}
    if len(regions) == 1:  # all tensors are one and the same
        ref = sources.ref(first, region)
        target = Target(ref, None)
        for key, _, _ in tensors:
            found[key] = target
        return ref
    start = min(region.start for region in regions) // ALIGNMENT * ALIGNMENT  # keeps the alignment of every tensor
    stop = max(region.start + region.nbytes for region in regions)
    octets = Region(region.payload, start, stop - start, dtypes.by_name["uint8"], 8, (stop - start,), None, 0)
    ref = sources.ref(first, octets)
    targets: dict[Region, Target] = {}
    for key, name, region in tensors:
        if region not in targets:
            targets[region] = Target(ref, sources.ref(name, region, octets))
        found[key] = targets[region]
    return ref


def _slicer(slices: Slices, names: Iterable[str], path: str | None) -> Callable[[str], Box | None]:
    """Return a function that gives the box to load of a tensor by name, None for all.

    Raises:
        TensorNotFoundError: a key without wildcards is no tensor's name. UnsupportedError: a key is no name.
    """
    known = set(names)
    tests: list[tuple[Callable[[str], bool], Box]] = []
    for key, box in slices.items():
        if not isinstance(key, str) or not is_box(box):
            what = f"slices= maps names or patterns to slices, or tuples of them, and not {key!r} to {box!r}"
            raise UnsupportedError(f"{what}; write slice(i, i + 1) for one index")
        if key not in known and not is_pattern(key):
            raise TensorNotFoundError(key, lambda: sorted(known), path=path)
        tests.append((key.__eq__ if key in known else matcher([key]), box))
    return lambda name: next((box for test, box in tests if test(name)), None)
