"""The system's page cache, left about as a load found it: pages that the load brought in go once they are copied."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
from collections.abc import Iterator

import numpy as np

from zcrecord.storage.files import open_regular
from zcrecord.storage.memory import c_function
from zcrecord.tensors.strides import address

from .protocol import LoadPlan

_STEP, _BEHIND = 8 << 20, 24 << 20  # bytes let go at a time, and kept behind the last that arrived
_SAMPLES, _NEAR = 64, 1 << 16


@contextlib.contextmanager
def leaving_page_cache(plan: LoadPlan) -> Iterator[LoadPlan]:
    """Yield a plan that lets the pages of its mapped file go, 32 MiB after they arrived; at the end all.

    If half of the file's pages were there before, they are somebody's, and all stay; so they do if the system does not
    tell. It never takes pages that a process has mapped.
    """
    mapped = [ref for ref in plan.refs if ref.path is not None and ref.buffer is not None]
    places = [(ref, at) for ref in mapped for at in range(0, ref.nbytes, _STEP)]
    samples = [address(ref.buffer) + at for ref, at in places[:: len(places) // _SAMPLES + 1]]
    mincore, there = c_function("mincore", "c_int", "c_void_p", "c_size_t", "c_void_p"), np.ones(len(samples), np.uint8)
    if mincore is not None and hasattr(os, "posix_fadvise") and plan.nbytes > _STEP + _BEHIND:
        for i, sample in enumerate(samples):
            mincore(sample & -mmap.PAGESIZE, 1, there[i:].ctypes.data)
    if plan.path is None or 2 * np.count_nonzero(there & 1) >= len(there):
        yield plan
        return
    ends, arrived, gone = np.cumsum([min(_STEP, ref.nbytes - at) for ref, at in places]).tolist(), 0, 0
    with open_regular(plan.path)[0] as file:

        def let_go(start: int, end: int) -> None:
            os.posix_fadvise(file.fileno(), start & -mmap.PAGESIZE, end - start + mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)

        def advance(nbytes: int) -> None:
            nonlocal arrived, gone
            plan.advance(nbytes)
            arrived += nbytes
            while gone < len(ends) and ends[gone] + _BEHIND <= arrived:
                ref, at = places[gone]
                let_go(ref.offset + max(0, at - _STEP), ref.offset + min(at + _STEP, ref.nbytes))
                gone += 1

        yield dataclasses.replace(plan, advance=advance)
        start = end = mapped[0].offset  # once more, for pages that were mapped still, or that reach into the next step
        for ref in mapped:
            if ref.offset > end + _NEAR:
                let_go(start, end)
                start = ref.offset
            end = max(end, ref.offset + ref.nbytes)
        let_go(start, end)
