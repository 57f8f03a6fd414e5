"""`load_into`: loads chosen tensors to a device, each payload once, with progress, cancellation and release on failure.

Calls a loader's methods in order. `plan` has the plans; the loaders read and copy the bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import mmap
import os
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.archive.subset import Names
from zcrecord.errors import LoadCancelledError, TensorNotFoundError, UnsupportedError, located, printable
from zcrecord.remote.ranges import Range, merged
from zcrecord.storage.files import Progress, open_regular
from zcrecord.storage.memory import c_function
from zcrecord.tensors.strides import address

from .host import HostLoader, MappedLoader
from .plan import MAX_IN_FLIGHT, HasArchive, Slices, archive_of, plan_files
from .pread import ReadingLoader
from .protocol import Loader, LoadPlan, PayloadRef, Target, sources_of

_DROP_STEP, _DROP_LAG = 8 << 20, 24 << 20  # bytes taken out of the page cache at a time, and kept behind the last read
_SAMPLES = 64  # pages by which the share of a file in the page cache is estimated

Cancel = threading.Event | Callable[[], bool]

_OWN: dict[str, Callable[[], Loader]]
_OWN = {"cpu": MappedLoader, "mapped": MappedLoader, "read": ReadingLoader, "host": HostLoader}


def loader_for(device: str) -> Loader:
    """Return a new loader for a device: "cpu" ("mapped"), "read", "host", or one of torch's, such as "cuda:0".

    Raises:
        UnsupportedError: there is no such device. DependencyError: it is one of torch's, and torch is not installed.

    Example:
        >>> loader_for("host").device
        'host'
    """
    if not isinstance(device, str):
        raise UnsupportedError(f"a {type(device).__name__} is neither a loader nor a device's name, such as 'cuda:0'")
    if device in _OWN:
        return _OWN[device]()
    from .torch import TorchLoader  # here, because torch may not be installed

    return TorchLoader(device)


def load_into(
    record: HasArchive | Archive,
    loader: Loader | str,
    names: Names | None = None,
    *,
    dst: Mapping[str, Any] | None = None,
    slices: Slices | None = None,
    max_in_flight: int = MAX_IN_FLIGHT,
    raw: bool = False,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> dict[str, Any]:
    """Load chosen tensors to a device; returns them by full name in saved order, with all bytes there.

    A payload that several tensors share is transferred once, and tied tensors are one object. Bytes are read from the
    read-only mapping, in the order of the file; of a record of mode "c" from its private bytes, with edits. Of a remote
    archive "cpu" gives views, too: what is loaded is fetched first. Pages that a load of over 32 MiB brings into the
    page cache are taken out again, but not those of boxes, of other processes, and of a file that was mostly there.

    Boxes (`slices=`) are strided views with "cpu", and compact with other loaders, which transfer no byte between their
    rows; README.md in this folder has the rules. Of a remote archive only their rows are fetched, or the MiBs that they
    lie in, if these have checksums. `LoadPlan.unchecked` names tensors that are not checked; those of a remote archive
    the logger "zcrecord" tells at level INFO.

    Args:
        record: a record, or a part of one (`Record.module`).
        loader: a loader, or the name of a device; see `loader_for`.
        names: as `Record.select` takes them; None for all.
        dst: targets by name, as the loader takes them: writable memory, or a tensor. Give one for several tied tensors.
        slices: boxes by name or pattern; the first key that matches counts. A slice is of the first axis, a tuple has
            one for each axis, and may have one `...`; `shard(rank, world, axis)` is a rank's part of an axis.
        max_in_flight: the most bytes in flight at a time; the memory that loading takes besides the tensors.
        raw: load tensors of strings, and of element types unknown here, as the bytes of their payload (uint8).
        progress: called with the bytes that have arrived, and with their total.
        cancel: a threading.Event or a function; once it is set, or returns True, loading is cancelled.

    Raises:
        TensorNotFoundError: a name without wildcards does not exist. UnsupportedError: the loader does not take an
        element type, a box does not fit its tensor, or an argument is invalid. LoadCancelledError: `cancel` was set.
        And the loader's errors. In each case the loader has released everything.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((4, 6), np.float32)}, "model.zcr")
        >>> load_into(zcrecord.load_record("model.zcr"), "host", slices={"w": np.s_[1:4, -2:]})["w"].shape
        (3, 2)
    """
    device_loader = loader_of(loader)
    _check_options(dst, progress, cancel)
    archive = archive_of(record)
    as_views = isinstance(device_loader, MappedLoader)
    plans = plan_files(archive, names, slices=slices, max_in_flight=max_in_flight, raw=raw, as_views=as_views)
    dst_of_ref = _dst_by_ref(ChainMap(*(plan.targets for plan in plans)), dst or {}, archive.path)
    for plan in plans:
        _check_loader(device_loader, plan, archive.path)
    _log_unchecked(archive, plans)
    tracker = _LoadProgress(sum(plan.nbytes for plan in plans), progress, cancel, archive.path)
    tensors: dict[str, Any] = {}
    try:
        for plan in plans:
            tracked = dataclasses.replace(plan, advance=tracker.advance)
            with contextlib.nullcontext(tracked) if as_views else _leaving_page_cache(tracked) as tracked:
                tensors |= _load(device_loader, tracked, dst_of_ref, tracker, archive.path)
        tracker.finish()
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is raised
            device_loader.abort()
        raise
    return tensors if len(plans) == 1 else {name: tensors[name] for name in archive.names() if name in tensors}


def _log_unchecked(archive: Archive, plans: list[LoadPlan]) -> None:
    """Log the tensors of a remote archive whose bytes no digest covers."""
    names = [name for plan in plans for name in plan.unchecked] if archive.source.is_remote else []
    if not names:
        return
    import logging  # here, because few loads have anything to log

    count, first = "1 tensor is", f"'{printable(names[0])}'"
    if len(names) > 1:
        count, first = f"{len(names)} tensors are", f"the first of them {first}"
    message = "%s: no digest covers parts of payloads: %s loaded unchecked, %s"
    logging.getLogger("zcrecord").info(message, archive.path, count, first)


def loader_of(loader: Loader | str) -> Loader:
    """Return a loader as it is, or a new one by its device, a name or a torch.device; UnsupportedError for others."""
    if isinstance(loader, str) or type(loader).__module__ == "torch":  # a torch.device
        return loader_for(str(loader))
    if isinstance(loader, type) or not all(hasattr(loader, name) for name in ("can_load", "device")):
        raise UnsupportedError("loader= takes a loader, or the name of a device; see zcrecord.loaders.Loader")
    return loader


def cancel_test(cancel: Any) -> Callable[[], bool]:
    """Return a function that returns True once the user cancelled; UnsupportedError for an invalid `cancel`."""
    if cancel is not None and not hasattr(cancel, "is_set") and not callable(cancel):
        raise UnsupportedError(f"cancel= takes an Event or a function, not a {type(cancel).__name__}")
    test: Callable[[], bool] = getattr(cancel, "is_set", cancel) or bool  # bool() is False: never cancelled
    return test


def _check_options(dst: Any, progress: Any, cancel: Any) -> None:
    """Raise UnsupportedError for an option of `load_into` of another type."""
    if dst is not None and not isinstance(dst, Mapping):
        raise UnsupportedError(f"dst= takes memory by name, as {{name: array}}, not a {type(dst).__name__}")
    if progress is not None and not callable(progress):
        raise UnsupportedError(f"progress= takes a function, not a {type(progress).__name__}")
    cancel_test(cancel)


def _load(
    loader: Loader, plan: LoadPlan, dst_of_ref: Mapping[int, Any], tracker: _LoadProgress, path: str | None
) -> dict[str, Any]:
    """Load one plan by the calls of the protocol; return its tensors by name. `dst_of_ref` is by the id of a ref."""
    tracker.check_cancel()
    loader.begin(plan)
    loaded: dict[int, Any] = {}
    views: dict[int, Any] = {}
    for ref in plan.refs:
        tracker.check_cancel()
        with located(path=ref.path or path, tensor=ref.name):
            loaded[id(ref)] = loader.load(ref, dst_of_ref.get(id(ref)))
        tracker.count_load(ref.nbytes)
    for ref, view in plan.targets.values():
        if id(ref) not in loaded:  # of 0 bytes
            loaded[id(ref)] = loader.load(ref, dst_of_ref.get(id(ref)))
        if view is not None and id(view) not in views:
            views[id(view)] = loader.view(loaded[id(ref)], view)  # type: ignore[attr-defined]  # _check_loader
    loader.finish()
    for source in {id(source): source for ref in plan.refs for source in sources_of(ref)}.values():
        if hasattr(source, "check_same"):  # remote: else bytes of two versions could be mixed
            source.check_same()
    return {name: loaded[id(ref)] if view is None else views[id(view)] for name, (ref, view) in plan.targets.items()}


def _reopen(plan: LoadPlan) -> io.FileIO | None:
    """Return the file that a plan has mapped, for the caller to close; None if it was replaced or removed meanwhile."""
    assert plan.path is not None, "it has mapped refs"
    with contextlib.suppress(OSError):
        file, identity = open_regular(plan.path)
        if identity == plan.identity:
            return file
        file.close()
    return None


@contextlib.contextmanager
def _leaving_page_cache(plan: LoadPlan) -> Iterator[LoadPlan]:
    """Yield a plan whose `advance` takes pages of the mapped file out of the page cache, some MiB after they were read.

    Pages that a process has mapped stay there. If the cache had half of the bytes before, others use them: all stay.
    """
    is_large = plan.nbytes > _DROP_STEP + _DROP_LAG and hasattr(os, "posix_fadvise")
    mapped = [ref for ref in plan.refs if is_large and ref.path is not None and ref.buffer is not None]
    ranges = merged((ref.offset, ref.offset + ref.nbytes) for ref in mapped) if mapped else []
    file = _reopen(plan) if mapped and not _is_mostly_cached(mapped[0], ranges) else None
    if file is None:
        yield plan
        return
    descriptor, arrived, arrived_at_drop = file.fileno(), 0, 0

    def drop(limit: int) -> None:
        for start, end in ranges:
            if start < limit:
                first_page = start & -mmap.PAGESIZE
                nbytes = min(end, limit) - first_page + mmap.PAGESIZE
                os.posix_fadvise(descriptor, first_page, nbytes, os.POSIX_FADV_DONTNEED)

    def advance(nbytes: int) -> None:
        nonlocal arrived, arrived_at_drop
        plan.advance(nbytes)
        arrived += nbytes
        if arrived >= arrived_at_drop + _DROP_STEP:
            arrived_at_drop = arrived
            drop(ranges[0][0] + arrived - _DROP_LAG)  # at most the position in the file: gaps do not arrive

    with file:
        yield dataclasses.replace(plan, advance=advance)
        drop(ranges[-1][1])


def _is_mostly_cached(ref: PayloadRef, ranges: Sequence[Range]) -> bool:
    """Return True if half of some pages of ranges of a ref's mapped file are in memory, or the system does not tell."""
    mincore = c_function("mincore", "c_int", "c_void_p", "c_size_t", "c_void_p")
    if mincore is None:
        return True
    base = address(ref.buffer) - ref.offset  # of the file's first byte
    step = max(mmap.PAGESIZE, sum(end - start for start, end in ranges) // _SAMPLES)
    pages = [base + offset & -mmap.PAGESIZE for start, end in ranges for offset in range(start, end, step)]
    states = np.ones(len(pages), np.uint8)  # bit 0: in memory; a call that fails leaves it set
    for i, page in enumerate(pages):
        mincore(page, 1, states[i:].ctypes.data)
    return bool(2 * np.count_nonzero(states & 1) >= len(pages))


def _check_loader(loader: Loader, plan: LoadPlan, path: str | None) -> None:
    """Raise UnsupportedError unless the loader can load every tensor of a plan."""
    can_load: dict[str, bool] = {}  # by element type: asked once for each
    for name, (ref, view) in plan.targets.items():
        dtype = (view or ref).dtype
        if dtype.name not in can_load:
            can_load[dtype.name] = loader.can_load(loader.device, dtype)
        reason = ""
        if not can_load[dtype.name]:
            reason = f"{type(loader).__name__} loads no {dtype.name} to {loader.device!r}"
        elif view is not None and not hasattr(loader, "view"):
            reason = f"is one of several views of its bytes, and {type(loader).__name__} makes no views"
        if reason:
            raise UnsupportedError(f"{reason}; leave it out with names=", path=path, tensor=name)


def _dst_by_ref(targets: Mapping[str, Target], dst: Mapping[str, Any], path: str | None) -> dict[int, Any]:
    """Return the caller's memory (`dst=`, by tensor name) by the id of the ref to load into it; refuse shared bytes."""
    dst_of_ref: dict[int, Any] = {}
    for name, memory in dst.items():
        if name not in targets:
            raise TensorNotFoundError(name, lambda: list(targets), path=path)
        ref, view = targets[name]
        if view is not None:
            reason = "shares its bytes with tensors of another form, so that dst= cannot have it alone"
            raise UnsupportedError(f"{reason}; load it by itself, with names=", path=path, tensor=name)
        if dst_of_ref.setdefault(id(ref), memory) is not memory:
            raise UnsupportedError("is tied to another tensor that has a dst; give it to one of them", tensor=name)
    return dst_of_ref


class _LoadProgress:
    """Progress of a load, and its cancelling. Loaders may call `advance` from any thread."""

    def __init__(self, total: int, progress: Progress | None, cancel: Cancel | None, path: str | None) -> None:
        self._total, self._progress, self._path = total, progress, path
        self._arrived = self._loaded = self._reported = 0  # bytes: by `advance`, by `load`, told to the user
        self._loader_advances = False  # whether the loader calls `advance`
        self._lock = threading.Lock()
        self._is_cancelled = cancel_test(cancel)

    def check_cancel(self) -> None:
        """Raise LoadCancelledError if the user cancelled."""
        if self._is_cancelled():
            message = f"cancelled after {self._reported} of {self._total} bytes; nothing of it is kept"
            raise LoadCancelledError(message, path=self._path)

    def advance(self, nbytes: int) -> None:
        """Report that `nbytes` more bytes have arrived; raises if the user cancelled."""
        self.check_cancel()
        with self._lock:
            self._loader_advances = True
            self._arrived += nbytes
            self._report(self._arrived)

    def count_load(self, nbytes: int) -> None:
        """Count a ref of `nbytes` that `load` returned as arrived, if the loader does not call `advance`."""
        self._loaded += nbytes
        if not self._loader_advances:
            self._report(self._loaded)

    def finish(self) -> None:
        """Call `progress` with the total at the end; no call before has the total."""
        if self._progress is not None:
            self._progress(self._total, self._total)

    def _report(self, done: int) -> None:
        if self._reported < done < self._total:
            self._reported = done
            if self._progress is not None:
                self._progress(done, self._total)
