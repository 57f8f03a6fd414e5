"""Plans of loads: byte ranges, each once, in the order of the file, and the tensors in them; reads no payload.

`boxes` has the arithmetic of parts of tensors, `payload_sources` finds the bytes, `load` carries plans out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, TypeVar

import numpy as np

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
from .regions import Region, Regions

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
_Boxed = tuple[Key, str, Region]  # a key, and name and region of a tensor

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
        slices: boxes to load, by name or pattern; the first key that matches a tensor counts. See `load_into`.
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
        reason = f"its tensors lie in {len(plans)} shards, and a plan is for one file; load_into loads from all of them"
        raise UnsupportedError(reason, path=archive.path)
    return plans[0]


def archive_of(record: Any) -> Archive:
    """Return the archive of a record, or an archive as it is; UnsupportedError for anything else."""
    archive = getattr(record, "archive", record)
    if not isinstance(archive, Archive):
        raise UnsupportedError(f"a {type(record).__name__} is not a record; load_record(source) gives one")
    return archive


def plan_files(
    archive: Archive, names: Names | None, *, slices: Any, max_in_flight: Any, raw: bool, views: bool = False
) -> list[LoadPlan]:
    """Return `plan_load`'s plan, of a catalogue one for each shard; for `views` see `PayloadSources`."""
    if slices is not None and not isinstance(slices, Mapping):
        kind = type(slices).__name__
        raise UnsupportedError(f"slices= takes boxes by name or pattern, as {{name: slice}}, not a {kind}")
    whole = isinstance(max_in_flight, SupportsIndex) and not isinstance(max_in_flight, bool | np.bool_)
    if not whole or (limit := operator.index(max_in_flight)) < 1:
        raise LimitError(f"max_in_flight={max_in_flight!r} is not a number of bytes")
    if names is not None:
        archive = subset.select(archive, names, None)
    box_of: Callable[[str], Box | None] = _slicer(slices, archive) if slices else lambda _: None
    plans, pools = [], _pools(archive)
    for part in parts_by_file(archive):
        sources, part_names = PayloadSources(part, views), part.names()
        boxes = [(i, name, box_of(name)) for i, name in enumerate(part_names)]
        refs, targets = _targets(part, sources, boxes, part_names, Regions(part, raw, pools))
        _check_sizes(part, refs)
        ahead = sources.announce(limit)
        in_order = {name: targets[name] for name in part_names}
        plans.append(LoadPlan(tuple(refs), in_order, limit - ahead, sources.path, sources.identity))
    return plans


def _check_sizes(archive: Archive, refs: list[PayloadRef]) -> None:
    """Raise LimitError if refs would take far more than the bytes that the archive stores for them."""
    numbers = {ref.payload for ref in refs if ref.payload >= 0}  # a server may claim any size of the rest
    if archive.mode == "r":
        used = sum(nbytes for *_, nbytes in {archive.place(number) for number in numbers})
    else:  # each is memory of its own
        used = sum(map(archive.source.nbytes, numbers))
    stored = min(archive.source.opened_nbytes(), archive.header.index_size + used)
    check_apart(sum(ref.nbytes for ref in refs), stored, archive.path)


def views_of(archive: Archive, boxes: Mapping[str, Sequence[Box]]) -> dict[tuple[str, int], Target]:
    """Return targets in memory for boxes of tensors, by name and the box's number; fetches remote ranges together."""
    out: dict[tuple[str, int], Target] = {}
    pools = _pools(archive)
    for part in parts_by_file(archive):
        names = part.names()
        keyed = [(i, (name, k), box) for i, name in enumerate(names) for k, box in enumerate(boxes[name])]
        out |= _targets(part, PayloadSources(part, views=True), keyed, names, Regions(part, False, pools))[1]
    return out


def _pools(archive: Archive) -> tuple[list[int], list[int]]:
    """Return the dims and strides of all tensors of an archive."""
    return archive.index.dims.tolist(), archive.index.strides.tolist()


def _targets(
    archive: Archive,
    sources: PayloadSources,
    boxes: Iterable[tuple[int, Key, Box | None]],
    names: list[str],
    regions: Regions,
) -> tuple[list[PayloadRef], dict[Key, Target]]:
    """Return the refs to load for boxes of tensors, in the order of the file, and the target of each by its key."""
    groups: dict[Hashable, list[_Boxed[Key]]] = {}  # of tensors that one ref loads
    empty: list[_Boxed[Key]] = []
    for i, key, box in boxes:
        try:
            region = regions.region(i, box)
        except RecordError as error:
            raise error.located(path=archive.path, tensor=names[i]) from None
        if region.nbytes:
            groups.setdefault(sources.shared_by(region), []).append((key, names[i], region))
        else:
            empty.append((key, names[i], region))
    sources.prepare([region for group in groups.values() for _, _, region in group])
    targets = {key: Target(sources.empty(name, region), None) for key, name, region in empty}
    refs = [_share(sources, group, targets) for group in groups.values()]
    refs.sort(key=lambda ref: (ref.offset, ref.payload))
    return refs, targets


def _share(sources: PayloadSources, tensors: list[_Boxed[Key]], targets: dict[Key, Target]) -> PayloadRef:
    """Return the ref to load for all tensors of a payload, and add their targets."""
    _, first, region = tensors[0]
    regions = {region for _, _, region in tensors} if len(tensors) > 1 else {region}
    if len(regions) == 1:
        ref = sources.ref(first, region)
        targets |= dict.fromkeys((key for key, _, _ in tensors), Target(ref, None))
        return ref
    start = min(region.start for region in regions) // ALIGNMENT * ALIGNMENT  # keeps the alignment of every tensor
    stop = max(region.start + region.nbytes for region in regions)
    octets = Region.raw(region.payload, start, stop - start)
    ref = sources.ref(first, octets)
    views: dict[Region, Target] = {}
    for key, name, region in tensors:
        if region not in views:
            views[region] = Target(ref, sources.ref(name, region, octets))
        targets[key] = views[region]
    return ref


def _slicer(slices: Slices, archive: Archive) -> Callable[[str], Box | None]:
    """Return a function that gives the box to load of a tensor by name, None for all; see `first_match`."""
    for key, box in slices.items():
        if not isinstance(key, str) or not is_box(box):
            message = f"slices= maps names or patterns to slices, or tuples of them, and not {key!r} to {box!r}"
            raise UnsupportedError(f"{message}; write slice(i, i + 1) for one index")
    return first_match(slices, archive)


def first_match(values: Mapping[str, Value], archive: Archive) -> Callable[[str], Value | None]:
    """Return a function from a tensor's name to the value of the first key, a name or a pattern, that matches it."""
    known = set(archive.names())
    exact: dict[str, tuple[int, Value | None]] = {}  # with their places among all keys
    patterns: list[tuple[int, Callable[[str], bool], Value]] = []
    for place, (key, value) in enumerate(values.items()):
        if key in known:
            exact[key] = place, value
        elif is_pattern(key):
            patterns.append((place, matcher([key]), value))
        else:
            raise TensorNotFoundError(key, lambda: sorted(known), path=archive.path)

    def choose(name: str) -> Value | None:
        place, value = exact.get(name, (len(values), None))
        return next((other for at, test, other in patterns if at < place and test(name)), value)

    return choose
