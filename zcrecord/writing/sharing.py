"""Plan of payloads: tensors that lie in the same memory share one.

A payload holds only bytes that a saved tensor reaches. Dense tensors (C order, or a permutation of it) whose bytes
overlap make a run, which is one payload; a view with gaps that lies inside a run joins it. Other tensors with gaps are
packed into C order. Knows addresses; nothing of names, files or offsets.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.entries import TensorLayout
from zcrecord.dtypes import Array, DType, Octets
from zcrecord.tensors.lazy import LazyTensor
from zcrecord.tensors.packed import PackedTensor, StringTensor
from zcrecord.tensors.strides import address, addresses, as_bytes, extent, is_dense, memory_order

_BOOL = dtypes.by_name["bool"]
_MOST_CACHED = 1 << 26  # bytes of packed copies that are held; further ones are made twice, for digest and write


class PayloadPlan:
    """The payloads of a record: `layout_ids[i]` and `source_ids[i]` are tensor i's layout and source (-1: empty)."""

    def __init__(self, tensor_count: int) -> None:
        self.layout_ids = [0] * tensor_count
        self.source_ids = [-1] * tensor_count
        self.layouts: list[TensorLayout] = []
        self.sources: list[Any] = []  # SplitSource, LazyTensor, or an array in C order that has the buffer protocol
        self._numbers: dict[TensorLayout, int] = {}
        self.copied_bytes = 0  # bytes of packed copies among the sources

    def layout_id(self, layout: TensorLayout) -> int:
        """Return the number of a layout, which is added if no equal one is known."""
        number = self._numbers.setdefault(layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        return number

    def put(self, tensors: list[int], layout: TensorLayout, source: int) -> None:
        """Set layout and source of identical tensors, given by number."""
        layout_id = self.layout_id(layout)
        for i in tensors:
            self.layout_ids[i], self.source_ids[i] = layout_id, source

    def renumber(self) -> None:
        """Renumber layouts and sources by the first tensor that uses them: addresses leave no trace in the file."""
        new_sources: dict[int, int] = {-1: -1}
        self.source_ids = [new_sources.setdefault(old, len(new_sources) - 1) for old in self.source_ids]
        self.sources = [self.sources[old] for old in new_sources if old >= 0]
        new_layouts: dict[int, int] = {}
        self.layout_ids = [new_layouts.setdefault(old, len(new_layouts)) for old in self.layout_ids]
        self.layouts = [self.layouts[old] for old in new_layouts]


class SplitSource(NamedTuple):
    """The bytes of one payload as arrays, to be written one after the other."""

    parts: list[Array]
    nbytes: int


@dataclass(slots=True)
class _Run:
    """Memory [lo, hi) that dense members cover without a gap."""

    lo: int
    hi: int
    members: list[_Member]
    source: int = -1  # its number in the plan, once it is placed


class _Member(NamedTuple):
    """One distinct array with bytes: its addresses [lo, hi), and how it may be stored."""

    array: Array
    kind: DType
    lo: int
    hi: int
    dense: bool
    needs_own_payload: bool  # packed elements, strings, bytes to be swapped, or a copy with other bits
    tensors: list[int]  # the numbers of those that are this array
    shape: tuple[int, ...]


def chunks(source: SplitSource | Array) -> Iterator[Array]:
    """Yield a source's bytes as contiguous uint8 arrays; packs parts with gaps, one at a time."""
    return map(as_bytes, source.parts if isinstance(source, SplitSource) else [source])


def plan_sharing(tensors: list[Any]) -> PayloadPlan:
    """Return a plan of the payloads of arrays and tensors; copies only what must be packed or byte-swapped."""
    plan = PayloadPlan(len(tensors))
    simple, raw = _simple_arrays(tensors, plan)
    members: dict[Any, _Member] = {}
    if len(simple) < len(tensors):
        lazy: dict[Any, int] = {}
        for i in sorted(set(range(len(tensors))).difference(simple)):
            if isinstance(tensors[i], LazyTensor):
                _place_lazy(i, tensors[i], plan, lazy)
            else:
                _add_member(i, tensors[i], plan, members)
    else:
        own_memory = not any([t.base is not None for t in tensors])  # noqa: C419  # twice as fast as a generator
        if (own_memory and len(set(map(id, tensors))) == len(tensors)) or not _overlapping(raw, []).any():
            plan.source_ids, plan.sources = list(range(len(tensors))), raw
            return plan
    is_overlapping = _overlapping(raw, list(members.values()))
    for i, array, overlaps in zip(simple, raw, is_overlapping.tolist(), strict=True):
        if overlaps:
            _add_member(i, tensors[i], plan, members)
        else:
            plan.source_ids[i] = len(plan.sources)
            plan.sources.append(array)
    for group in _overlapping_groups(list(members.values())):
        for part in _without_bools(group):
            _place_group(part, plan)
    if members or len(simple) < len(tensors):
        plan.renumber()
    return plan


def _place_lazy(i: int, tensor: LazyTensor, plan: PayloadPlan, sources: dict[Any, int]) -> None:
    """Put tensor i, which is yet to be produced, into `plan`; all with one key share the source of the first."""
    source = -1
    if tensor.nbytes:
        source = sources.setdefault((tensor.key, tensor.kind.code, tensor.nbytes), len(plan.sources))
        if source == len(plan.sources):
            plan.sources.append(tensor)
    plan.put([i], TensorLayout(tensor.kind.code, tensor.kind.bits, tensor.shape), source)


def _simple_arrays(tensors: list[Any], plan: PayloadPlan) -> tuple[list[int], list[SplitSource | Array]]:
    """Return numbers and bytes of the arrays that are stored as they lie; put their layouts into `plan`. By columns."""
    all_arrays = set(map(type, tensors)) <= {np.ndarray}
    numbers = range(len(tensors)) if all_arrays else [i for i, t in enumerate(tensors) if type(t) is np.ndarray]
    arrays = tensors if all_arrays else [tensors[i] for i in numbers]
    element_types = [t.dtype for t in arrays]
    layouts = _layout_ids(element_types, [t.shape for t in arrays], plan)
    contiguous = [t.flags.c_contiguous for t in arrays]
    if -1 in layouts or not all(contiguous):
        usable = [n for n, layout in enumerate(layouts) if layout >= 0 and contiguous[n]]
        numbers, arrays, layouts = ([column[n] for n in usable] for column in (numbers, arrays, layouts))
    if len(arrays) == len(tensors):
        plan.layout_ids = layouts
    else:
        for i, layout in zip(numbers, layouts, strict=True):
            plan.layout_ids[i] = layout
    foreign = any(dtype.isbuiltin != 1 for dtype in set(element_types))  # they have no buffer protocol
    return list(numbers), [as_bytes(t) for t in arrays] if foreign else arrays


def _layout_ids(element_types: list[Any], shapes: list[Any], plan: PayloadPlan) -> list[int]:
    """Return the number in `plan` of each array's layout, -1 for arrays that are empty or not stored as they lie."""
    number, last_dtype, last_shape = -1, None, None
    numbers = []
    for dtype, shape in zip(element_types, shapes, strict=True):
        if dtype is not last_dtype or shape != last_shape:  # tensors of one layout often follow one another
            kind = dtypes.from_numpy(dtype)
            usable = dtype == kind.numpy and kind.bits >= 8 and kind is not _BOOL and 0 not in shape
            number = plan.layout_id(TensorLayout(kind.code, kind.bits, shape)) if usable else -1
            last_dtype, last_shape = dtype, shape
        numbers.append(number)
    return numbers


def _overlapping(raw: list[Any], members: list[_Member]) -> Array:
    """Return for each C-order array in `raw` whether it overlaps another one or a member."""
    lo = np.array([*addresses(raw), *(member.lo for member in members)], np.int64)
    hi = np.array([*(array.nbytes for array in raw), *(member.hi - member.lo for member in members)], np.int64) + lo
    order = np.argsort(lo, kind="stable")
    end_so_far = np.maximum.accumulate(hi[order])
    overlaps_earlier = lo[order][1:] < end_so_far[:-1]
    out = np.zeros(len(lo), bool)
    out[order[1:][overlaps_earlier]] = True
    out[order[:-1][overlaps_earlier]] = True
    return out[: len(raw)]


def _memory_of(tensor: Any) -> tuple[Array, DType]:
    """Return the array that has a tensor's bytes, and the tensor's element type."""
    if isinstance(tensor, StringTensor):
        return tensor.data, dtypes.STRING
    if isinstance(tensor, PackedTensor):
        return tensor.packed, tensor.kind
    return tensor, dtypes.from_numpy(tensor.dtype)


def _add_member(i: int, tensor: Any, plan: PayloadPlan, members: dict[Any, _Member]) -> None:
    """Add tensor i to the member of the same memory and form, a new one if need be; place it if it has no bytes."""
    array, kind = _memory_of(tensor)
    needs_own_payload = array is not tensor
    if array.size == 0:
        plan.put([i], TensorLayout(kind.code, kind.bits, tuple(tensor.shape)), -1)
        return
    lo, hi = extent(array)
    key = (lo, array.shape, array.strides, array.dtype, kind.code, needs_own_payload, tuple(tensor.shape))
    if (member := members.get(key)) is not None:
        member.tensors.append(i)
        return
    if not array.dtype.isnative:
        needs_own_payload = True  # its bytes are swapped when they are needed
    elif (normalised := _normalised(array, kind, tensor)) is not array:
        array, needs_own_payload = normalised, True
        lo, hi = extent(array)
    dense = needs_own_payload or _fills_extent(array)  # in its own payload it is in C order
    members[key] = _Member(array, kind, lo, hi, dense, needs_own_payload, [i], tuple(tensor.shape))


def _normalised(array: Array, kind: DType, tensor: Any) -> Array:
    """Return the array if the format takes its bytes, else a copy: packed, padding bits zero, bools 0 or 1."""
    if isinstance(tensor, PackedTensor):
        bits_in_last = prod(tensor.shape) * kind.bits % 8
        if bits_in_last and array[-1] >> bits_in_last:
            array = array.copy()
            array[-1] &= (1 << bits_in_last) - 1
        return array
    if kind.packed:
        return PackedTensor.pack(array).packed
    if array.dtype == np.bool_ and array.view(np.uint8).max() > 1:
        return np.asarray(array.view(np.uint8) != 0)  # the comparison of an array of rank 0 is a scalar
    return array


def _fills_extent(array: Array) -> bool:
    """Return True if an array has no gaps between its first and its last byte."""
    flags = array.flags
    return flags.c_contiguous or flags.f_contiguous or is_dense(array.shape, array.strides, array.itemsize)


def _overlapping_groups(members: list[_Member]) -> list[list[_Member]]:
    """Return members by memory, sorted by address: groups that do not overlap one another. Sorts the list itself."""
    members.sort(key=lambda member: (member.lo, -member.hi))
    groups: list[list[_Member]] = []
    end = -1
    for member in members:
        if member.lo >= end:
            groups.append([])
        groups[-1].append(member)
        end = max(end, member.hi)
    return groups


def _without_bools(group: list[_Member]) -> list[list[_Member]]:
    """Return a group as it is, or its bools as a second group if other members have bytes that are not 0 or 1 (R72)."""
    others = [member for member in group if member.kind is not _BOOL]
    bools = [member for member in group if member.kind is _BOOL]
    if not bools or all(int(part.max()) <= 1 for member in others for part in _octets(member.array)):
        return [group]
    return [others, bools]


def _octets(array: Array) -> Iterator[Octets]:
    """Yield the bytes of an array in any order; copies arrays with gaps, a row at a time."""
    if _fills_extent(array):
        return iter([memory_order(array)])
    return map(as_bytes, array if array.ndim > 1 else array[None])


def _runs_of(group: list[_Member]) -> tuple[list[_Run], list[_Member]]:
    """Return the runs of a group's dense members, ascending, and the members that need a payload of their own."""
    runs: list[_Run] = []
    separate = [member for member in group if member.needs_own_payload]
    for member in group:
        if member.needs_own_payload or not member.dense:
            continue
        if not runs or member.lo >= runs[-1].hi:
            runs.append(_Run(member.lo, member.hi, [member]))
        elif (member.lo - runs[-1].lo) % member.array.itemsize == 0:
            runs[-1].hi = max(runs[-1].hi, member.hi)
            runs[-1].members.append(member)
        else:
            separate.append(member)  # none of its elements starts where one of the run does
    return runs, separate


def _place_group(group: list[_Member], plan: PayloadPlan) -> None:
    """Put the members of a group into `plan`: runs of dense ones, views inside these, and others by themselves."""
    runs, separate = _runs_of(group)
    for run in runs:
        run.source = len(plan.sources)
        plan.sources.append(_run_source(run))
        for member in run.members:
            _place_view(member, plan, run)
    for member in group:
        if not member.dense:
            runs_before = bisect.bisect_right(runs, member.lo, key=lambda run: run.lo)  # runs ascend and are apart
            if runs_before and _fits(member, runs[runs_before - 1]):
                _place_view(member, plan, runs[runs_before - 1])
            else:
                separate.append(member)
    for member in separate:
        _place_separately(member, plan)


def _fits(member: _Member, run: _Run) -> bool:
    """Return True if a view with gaps lies inside a run, and strides in whole elements describe it there."""
    array = member.array
    if member.lo < run.lo or member.hi > run.hi:
        return False
    if array.nbytes > run.hi - run.lo:  # an expanded view must not claim more bytes than its payload has (R55)
        return False
    start = address(array) - run.lo
    return all(step % array.itemsize == 0 for step in (start, *array.strides))


def _run_source(run: _Run) -> SplitSource | Array:
    """Return the bytes of a run, each taken from the first member that has it; no copy."""
    pieces: list[Array] = []
    end = run.lo
    for member in run.members:  # ascending by lo, and each overlaps what came before it
        if member.hi > end:
            pieces.append(memory_order(member.array)[end - member.lo :])
            end = member.hi
    return pieces[0] if len(pieces) == 1 else SplitSource(pieces, run.hi - run.lo)


def _place_separately(member: _Member, plan: PayloadPlan) -> None:
    """Give a member a payload of its own, in C order; hold a copy for that only up to _MOST_CACHED bytes in all."""
    array = member.array
    plan.put(member.tensors, TensorLayout(member.kind.code, member.kind.bits, member.shape), len(plan.sources))
    copied = 0 if array.flags.c_contiguous and array.dtype.isnative else array.nbytes
    if plan.copied_bytes + copied <= _MOST_CACHED:
        plan.copied_bytes += copied
        plan.sources.append(as_bytes(array))
    else:
        plan.sources.append(SplitSource([array], array.nbytes))


def _place_view(member: _Member, plan: PayloadPlan, run: _Run) -> None:
    """Put a member into `plan` as a view of a run's payload: all of it, or a part by offset and strides."""
    layout = TensorLayout(member.kind.code, member.kind.bits, member.shape)
    if (member.lo, member.hi) != (run.lo, run.hi) or not member.array.flags.c_contiguous:
        item = member.array.itemsize
        strides = tuple(s // item if dim > 1 else 0 for s, dim in zip(member.array.strides, member.shape, strict=True))
        layout = layout._replace(byte_offset=address(member.array) - run.lo, strides=strides)
    plan.put(member.tensors, layout, run.source)


def layout_of(tensor: Any) -> TensorLayout:
    """Return the layout of a tensor that has a payload of its own, in C order."""
    kind = tensor.kind if isinstance(tensor, LazyTensor) else _memory_of(tensor)[1]
    return TensorLayout(kind.code, kind.bits, tuple(tensor.shape))
