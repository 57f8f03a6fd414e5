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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.archive.subset import Names
from zcrecord.errors import LoadCancelledError, RecordError, TensorNotFoundError, UnsupportedError, printable
from zcrecord.storage.files import Progress, open_regular
from zcrecord.storage.memory import c_function
from zcrecord.tensors.strides import address

from .host import HostLoader, MappedLoader
from .plan import MAX_IN_FLIGHT, HasArchive, Slices, archive_of, plan_files
from .pread import ReadingLoader
from .protocol import Loader, LoadPlan, Target, sources_of

_STEP, _BEHIND = 8 << 20, 24 << 20  # bytes of the page cache let go at a time, and kept behind the last that arrived
_SAMPLES, _NEAR = 64, 1 << 16

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
    archive "cpu" gives views, too: what is loaded is fetched first. Pages of the file that a load of over 32 MiB brings
    into the page cache are taken out of it again, but not those of boxes; pages that other processes have mapped, and
    a file that was mostly there before, stay.

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
    chosen = loader_of(loader)
    _check_options(dst, progress, cancel)
    archive = archive_of(record)
    views = isinstance(chosen, MappedLoader)
    plans = plan_files(archive, names, slices=slices, max_in_flight=max_in_flight, raw=raw, views=views)
    rooms = _rooms(ChainMap(*(plan.targets for plan in plans)), dst or {}, archive.path)
    for plan in plans:
        _check_loader(chosen, plan, archive.path)
    _log_unchecked(archive, plans)
    watch = _LoadProgress(sum(plan.nbytes for plan in plans), progress, cancel, archive.path)
    out: dict[str, Any] = {}
    try:
        for plan in plans:
            watched = dataclasses.replace(plan, advance=watch.advance)
            with contextlib.nullcontext(watched) if views else _leaving_page_cache(watched) as watched:
                out |= _load(chosen, watched, rooms, watch, archive.path)
        watch.finish()
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is raised
            chosen.abort()
        raise
    return out if len(plans) == 1 else {name: out[name] for name in archive.names() if name in out}


def _log_unchecked(archive: Archive, plans: list[LoadPlan]) -> None:
    """Log the tensors of a remote archive whose bytes no digest covers."""
    names = [name for plan in plans for name in plan.unchecked] if archive.source.is_remote else []
    if not names:
        return
    import logging  # here, because few loads have anything to log

    some = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
    first = ("" if len(names) == 1 else "the first of them ") + f"'{printable(names[0])}'"
    message = "%s: no digest covers parts of payloads: %s loaded unchecked, %s"
    logging.getLogger("zcrecord").info(message, archive.path, some, first)


def loader_of(loader: Loader | str) -> Loader:
    """Return a loader as it is, or a new one by the name of its device, torch's included."""
    is_name = isinstance(loader, str) or type(loader).__module__ == "torch"  # a torch.device
    chosen: Any = loader_for(str(loader)) if is_name else loader
    if isinstance(chosen, type) or not all(hasattr(chosen, name) for name in ("can_load", "device")):
        raise UnsupportedError("loader= takes a loader, or the name of a device; see zcrecord.loaders.Loader")
    checked: Loader = chosen
    return checked


def cancel_test(cancel: Any) -> Callable[[], bool]:
    """Return a function that tells whether the user cancelled; UnsupportedError unless it is an Event or a function."""
    if cancel is not None and not hasattr(cancel, "is_set") and not callable(cancel):
        raise UnsupportedError(f"cancel= takes an Event or a function, not a {type(cancel).__name__}")
    test: Callable[[], bool] = getattr(cancel, "is_set", cancel) or bool
    return test


def _check_options(dst: Any, progress: Any, cancel: Any) -> None:
    if dst is not None and not isinstance(dst, Mapping):
        raise UnsupportedError(f"dst= takes memory by name, as {{name: array}}, not a {type(dst).__name__}")
    if progress is not None and not callable(progress):
        raise UnsupportedError(f"progress= takes a function, not a {type(progress).__name__}")
    cancel_test(cancel)


def _load(
    loader: Loader, plan: LoadPlan, rooms: Mapping[int, Any], watch: _LoadProgress, path: str | None
) -> dict[str, Any]:
    """Load one plan by the calls of the protocol; return its tensors by name."""
    watch.check()
    loader.begin(plan)
    loaded: dict[int, Any] = {}
    views: dict[int, Any] = {}
    for ref in plan.refs:
        watch.check()
        try:
            loaded[id(ref)] = loader.load(ref, rooms.get(id(ref)))
        except RecordError as error:
            raise error.located(path=ref.path or path, tensor=ref.name) from error.__cause__
        watch.begun(ref.nbytes)
    for ref, view in plan.targets.values():
        if id(ref) not in loaded:  # of 0 bytes
            loaded[id(ref)] = loader.load(ref, rooms.get(id(ref)))
        if view is not None and id(view) not in views:
            views[id(view)] = loader.view(loaded[id(ref)], view)  # type: ignore[attr-defined]  # _check_loader
    loader.finish()
    for remote in {id(source): source for ref in plan.refs for source in sources_of(ref)}.values():
        getattr(remote, "check_same", bool)()  # else bytes of two versions could be mixed
    return {name: loaded[id(ref)] if view is None else views[id(view)] for name, (ref, view) in plan.targets.items()}


def _opened_again(plan: LoadPlan) -> io.FileIO | None:
    """Open the file that a plan has mapped; None if it was replaced or removed, which its mapping outlives."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        file, identity = open_regular(plan.path or "")
        stack.enter_context(file)
        if identity == plan.identity:
            stack.pop_all()
            return file
    return None


@contextlib.contextmanager
def _leaving_page_cache(plan: LoadPlan) -> Iterator[LoadPlan]:
    """Yield a plan that lets the pages of its mapped file go, 32 MiB after they arrived, but for those that are mapped.

    If half of them were there before, they are somebody's, and all stay; so they do if the system does not tell.
    """
    large = plan.nbytes > _STEP + _BEHIND and hasattr(os, "posix_fadvise")
    mapped = [ref for ref in plan.refs if large and ref.path is not None and ref.buffer is not None]
    runs: list[tuple[int, int]] = []
    for ref in mapped:  # in the order of the file
        start = runs.pop()[0] if runs and ref.offset <= runs[-1][1] + _NEAR else ref.offset
        runs.append((start, ref.offset + ref.nbytes))
    base, step = [address(ref.buffer) - ref.offset for ref in mapped[:1]], max(mmap.PAGESIZE, plan.nbytes // _SAMPLES)
    pages = [base[0] + at & -mmap.PAGESIZE for start, end in runs for at in range(start, end, step)]
    state = np.ones(len(pages), np.uint8)
    if (mincore := c_function("mincore", "c_int", "c_void_p", "c_size_t", "c_void_p")) is not None:
        for i, page in enumerate(pages):
            mincore(page, 1, state[i:].ctypes.data)
    file = None if 2 * np.count_nonzero(state & 1) >= len(pages) else _opened_again(plan)
    if file is None:
        yield plan
        return
    arrived = last = 0
    with file:

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


def _check_loader(loader: Loader, plan: LoadPlan, path: str | None) -> None:
    """Raise UnsupportedError unless the loader can load every tensor of a plan."""
    able: dict[str, bool] = {}
    for name, (ref, view) in plan.targets.items():
        dtype = (view or ref).dtype
        if dtype.name not in able:
            able[dtype.name] = loader.can_load(loader.device, dtype)
        reason = ""
        if not able[dtype.name]:
            reason = f"{type(loader).__name__} loads no {dtype.name} to {loader.device!r}"
        elif view is not None and not hasattr(loader, "view"):
            reason = f"is one of several views of its bytes, and {type(loader).__name__} makes no views"
        if reason:
            raise UnsupportedError(f"{reason}; leave it out with names=", path=path, tensor=name)


def _rooms(targets: Mapping[str, Target], dst: Mapping[str, Any], path: str | None) -> dict[int, Any]:
    """Return the `dst` of each ref that has one; a tensor that shares its bytes with other views has none."""
    rooms: dict[int, Any] = {}
    for name, room in dst.items():
        if name not in targets:
            raise TensorNotFoundError(name, lambda: list(targets), path=path)
        ref, view = targets[name]
        if view is not None:
            reason = "shares its bytes with tensors of another form, so that dst= cannot have it alone"
            raise UnsupportedError(f"{reason}; load it by itself, with names=", path=path, tensor=name)
        if rooms.setdefault(id(ref), room) is not room:
            raise UnsupportedError("is tied to another tensor that has a dst; give it to one of them", tensor=name)
    return rooms


class _LoadProgress:
    """Progress of a load, and its cancelling. Loaders may call `advance` from any thread."""

    def __init__(self, total: int, progress: Progress | None, cancel: Cancel | None, path: str | None) -> None:
        self._total, self._progress, self._path = total, progress, path
        self._arrived = self._begun = self._reported = 0
        self._advances = False  # the loader calls `advance`
        self._lock = threading.Lock()
        self._cancelled = cancel_test(cancel)

    def check(self) -> None:
        """Raise LoadCancelledError if the user cancelled."""
        if self._cancelled():
            message = f"cancelled after {self._reported} of {self._total} bytes; nothing of it is kept"
            raise LoadCancelledError(message, path=self._path)

    def advance(self, nbytes: int) -> None:
        """Report that `nbytes` more bytes have arrived; raises if the user cancelled."""
        self.check()
        with self._lock:
            self._advances = True
            self._arrived += nbytes
            self._report(self._arrived)

    def begun(self, nbytes: int) -> None:
        """Report that `load` returned; counts if the loader does not call `advance`."""
        self._begun += nbytes
        if not self._advances:
            self._report(self._begun)

    def finish(self) -> None:
        """Call `progress` with the total at the end; no call before has the total."""
        if self._progress is not None:
            self._progress(self._total, self._total)

    def _report(self, done: int) -> None:
        if self._reported < done < self._total:
            self._reported = done
            if self._progress is not None:
                self._progress(done, self._total)
