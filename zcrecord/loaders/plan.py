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
_Keyed = tuple[Key, str, Region]  # the caller's key of a box, the tensor's name, the box's bytes

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
    archive: Archive, names: Names | None, *, slices: Any, max_in_flight: Any, raw: bool, as_views: bool = False
) -> list[LoadPlan]:
    """Return `plan_load`'s plan, of a catalogue one for each shard; `as_views` all bytes are in memory: no copies."""
    limit = _checked_limit(max_in_flight)
    if slices is not None and not isinstance(slices, Mapping):
        kind = type(slices).__name__
        raise UnsupportedError(f"slices= takes boxes by name or pattern, as {{name: slice}}, not a {kind}")
    if names is not None:
        archive = subset.select(archive, names, None)
    box_of: Callable[[str], Box | None] = _box_chooser(slices, archive) if slices else lambda _: None
    plans, pools = [], (archive.index.dims.tolist(), archive.index.strides.tolist())
    for part in parts_by_file(archive):
        sources, part_names = PayloadSources(part, as_views), part.names()
        boxes = [(i, name, box_of(name)) for i, name in enumerate(part_names)]
        refs, targets = _targets(part, sources, boxes, part_names, Regions(part, raw, pools))
        _check_sizes(part, refs)
        read_ahead_nbytes = sources.announce(limit)
        in_order = {name: targets[name] for name in part_names}
        plans.append(LoadPlan(tuple(refs), in_order, limit - read_ahead_nbytes, sources.path, sources.identity))
    return plans


def _checked_limit(max_in_flight: Any) -> int:
    """Return `max_in_flight` as an int; LimitError unless it is a whole number from 1 on."""
    is_index = isinstance(max_in_flight, SupportsIndex) and not isinstance(max_in_flight, bool | np.bool_)
    if not is_index or operator.index(max_in_flight) < 1:
        raise LimitError(f"max_in_flight={max_in_flight!r} is not a number of bytes")
    return operator.index(max_in_flight)


def _check_sizes(archive: Archive, refs: list[PayloadRef]) -> None:
    """Raise LimitError if refs would take far more memory than the bytes that the archive stores for them."""
    numbers = {ref.payload for ref in refs if ref.payload >= 0}  # no others: a server may claim any size of the file
    if archive.mode == "r":
        used_nbytes = sum(nbytes for *_, nbytes in {archive.place(number) for number in numbers})
    else:  # each is memory of its own
        used_nbytes = sum(map(archive.source.nbytes, numbers))
    stored_nbytes = min(archive.source.opened_nbytes(), archive.header.index_size + used_nbytes)
    check_apart(sum(ref.nbytes for ref in refs), stored_nbytes, archive.path)


def views_of(archive: Archive, boxes: Mapping[str, Sequence[Box]]) -> dict[tuple[str, int], Target]:
    """Return targets in memory for boxes of tensors, by name and the box's number; fetches remote ranges together."""
    all_targets: dict[tuple[str, int], Target] = {}
    pools = archive.index.dims.tolist(), archive.index.strides.tolist()
    for part in parts_by_file(archive):
        names = part.names()
        keyed = [(i, (name, k), box) for i, name in enumerate(names) for k, box in enumerate(boxes[name])]
        regions = Regions(part, raw=False, pools=pools)
        _, targets = _targets(part, PayloadSources(part, as_views=True), keyed, names, regions)
        all_targets |= targets
    return all_targets


def _targets(
    archive: Archive,
    sources: PayloadSources,
    boxes: Iterable[tuple[int, Key, Box | None]],
    names: list[str],
    regions: Regions,
) -> tuple[list[PayloadRef], dict[Key, Target]]:
    """Return the refs to load for boxes (tensor number, key, box), in the order of the file, and targets by key."""
    groups: dict[Hashable, list[_Keyed[Key]]] = {}  # of tensors that one ref loads
    empty: list[_Keyed[Key]] = []
    for i, key, box in boxes:
        try:
            region = regions.region(i, box)
        except RecordError as error:  # a context manager would take a microsecond for each tensor
            raise error.located(path=archive.path, tensor=names[i]) from None
        if region.nbytes:
            groups.setdefault(sources.shared_by(region), []).append((key, names[i], region))
        else:
            empty.append((key, names[i], region))
    sources.prepare([region for group in groups.values() for _, _, region in group])
    targets = {key: Target(sources.empty(name, region), None) for key, name, region in empty}
    refs = [_add_shared_ref(sources, group, targets) for group in groups.values()]
    refs.sort(key=lambda ref: (ref.offset, ref.payload))
    return refs, targets


def _add_shared_ref(sources: PayloadSources, tensors: list[_Keyed[Key]], targets: dict[Key, Target]) -> PayloadRef:
    """Return the ref to load for all tensors of a payload, and add their targets: views of it if their bytes differ."""
    _, first_name, region = tensors[0]
    if all(other == region for _, _, other in tensors):
        ref = sources.ref(first_name, region)
        targets |= dict.fromkeys((key for key, _, _ in tensors), Target(ref, None))
        return ref
    start = min(region.start for _, _, region in tensors) // ALIGNMENT * ALIGNMENT  # keeps every tensor's alignment
    stop = max(region.start + region.nbytes for _, _, region in tensors)
    octets = Region.raw(region.payload, start, stop - start)
    ref = sources.ref(first_name, octets)
    views: dict[Region, Target] = {}
    for key, name, region in tensors:
        if region not in views:
            views[region] = Target(ref, sources.ref(name, region, octets))
        targets[key] = views[region]
    return ref


def _box_chooser(slices: Slices, archive: Archive) -> Callable[[str], Box | None]:
    """Return a function that gives the box to load of a tensor by name, None for all; see `first_match`."""
    for key, box in slices.items():
        if not isinstance(key, str) or not is_box(box):
            message = f"slices= maps names or patterns to slices, or tuples of them, and not {key!r} to {box!r}"
            raise UnsupportedError(f"{message}; write slice(i, i + 1) for one index")
    return first_match(slices, archive)


def first_match(values: Mapping[str, Value], archive: Archive) -> Callable[[str], Value | None]:
    """Return a function from a tensor's name to the value of the first key, name or pattern, that matches, or None."""
    known = set(archive.names())
    exact: dict[str, tuple[int, Value | None]] = {}  # position among all keys, and value
    patterns: list[tuple[int, Callable[[str], bool], Value]] = []
    for position, (key, value) in enumerate(values.items()):
        if key in known:
            exact[key] = position, value
        elif is_pattern(key):
            patterns.append((position, matcher([key]), value))
        else:
            raise TensorNotFoundError(key, lambda: sorted(known), path=archive.path)

    def choose(name: str) -> Value | None:
        exact_position, exact_value = exact.get(name, (len(values), None))
        for position, matches, value in patterns:
            if position < exact_position and matches(name):
                return value
        return exact_value

    return choose
