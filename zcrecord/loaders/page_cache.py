"""The system's page cache, left about as a load found it: pages that the load brought in go once they are copied."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
from collections.abc import Iterator

import numpy as np

from zcrecord.remote.ranges import merged
from zcrecord.storage.files import open_regular
from zcrecord.storage.memory import c_function
from zcrecord.tensors.strides import address

from .protocol import LoadPlan

_STEP, _BEHIND = 8 << 20, 24 << 20  # bytes let go at a time, and kept behind the last that arrived
_SAMPLES, _NEAR = 64, 1 << 16


@contextlib.contextmanager
def leaving_page_cache(plan: LoadPlan) -> Iterator[LoadPlan]:
    """Yield a plan that lets the pages of its mapped file go, 32 MiB after they arrived, but for those that are mapped.

    If half of them were there before, they are somebody's, and all stay; so they do if the system does not tell.
    """
    large = plan.nbytes > _STEP + _BEHIND and hasattr(os, "posix_fadvise")
    mapped = [ref for ref in plan.refs if large and ref.path is not None and ref.buffer is not None]
    runs = merged([(ref.offset, ref.offset + ref.nbytes) for ref in mapped], _NEAR)
    base, step = [address(ref.buffer) - ref.offset for ref in mapped[:1]], max(mmap.PAGESIZE, plan.nbytes // _SAMPLES)
    pages = [base[0] + at & -mmap.PAGESIZE for start, end in runs for at in range(start, end, step)]
    state = np.ones(len(pages), np.uint8)
    if (mincore := c_function("mincore", "c_int", "c_void_p", "c_size_t", "c_void_p")) is not None:
        for i, page in enumerate(pages):
            mincore(page, 1, state[i:].ctypes.data)
    if plan.path is None or 2 * np.count_nonzero(state & 1) >= len(pages):
        yield plan
        return
    arrived = last = 0
    with open_regular(plan.path)[0] as file:

        def advance(nbytes: int, least: int = _STEP) -> None:
            nonlocal arrived, last
            plan.advance(nbytes)
            arrived += nbytes
            if arrived >= last + least:
                last, limit = arrived, runs[0][0] + arrived - _BEHIND if least else runs[-1][1]
                for start, end in ((start & -mmap.PAGESIZE, min(end, limit)) for start, end in runs if start < limit):
                    os.posix_fadvise(file.fileno(), start, end - start + mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)

        yield dataclasses.replace(plan, advance=advance)
        advance(0, 0)
