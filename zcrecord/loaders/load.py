"""`load_into`: chosen tensors of a record to a device, each payload once, watched, and let go of where it fails.

Knows the order of calls to a loader. What is loaded is `planning`'s, how the loaders'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

from zcrecord.archive.archive import Archive
from zcrecord.archive.subset import Names
from zcrecord.errors import LoadCancelledError, RecordError, TensorNotFoundError, UnsupportedError
from zcrecord.storage.files import Progress

from .host import HostLoader, MappedLoader
from .plan import MAX_IN_FLIGHT, HasArchive, Slices, archive_of, plan_archive
from .pread import ReadingLoader
from .protocol import Loader, LoadPlan

__all__ = ["load_into", "loader_for", "loader_of"]

Cancel = threading.Event | Callable[[], bool]

_OWN: dict[str, Callable[[], Loader]] = {
    "cpu": MappedLoader,
    "mapped": MappedLoader,
    "read": ReadingLoader,
    "host": HostLoader,
}


def loader_for(device: str) -> Loader:
    """Return a new loader for a device: "cpu" ("mapped"), "read", "host", or one of torch's, such as "cuda:0".

    Raises:
        UnsupportedError: there is no such device. DependencyError: it is one of torch's, which is not installed.

    Example:
        >>> loader_for("host").device
        'host'
    """
    if not isinstance(device, str):
        raise UnsupportedError(f"a {type(device).__name__} is neither a loader nor a device's name")
    if device in _OWN:
        return _OWN[device]()
    from .torch import TorchLoader  # here, because not everybody has torch

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
    """Return chosen tensors on a device, by full name in saved order; all bytes are there.

    A payload that several tensors share is transferred once, and tied tensors are one and the same object. What is read
    is the read-only mapping, in the order of the file; of a record of mode "c" its private bytes, edits and all. Of a
    remote archive "cpu" gives views, too: what is chosen is fetched first, whole payloads, their digests checked.

    Args:
        record: a record, or a part of one (`Record.module`).
        loader: what brings them there, or the name of a device; see `loader_for`.
        names: as `Record.select` takes them; None for all.
        dst: by name, where tensors are to go, as the loader takes it: bytes of memory that may be written, or a tensor.
            Of tied tensors one has it.
        slices: which rows of the first axis to take, by name or pattern, as slices or as `shard(rank, world)`.
        max_in_flight: how many bytes may be on their way at a time: what it takes of memory besides the tensors.
        raw: take tensors of strings, and of types that are not known here, as the bytes of their payload (uint8).
        progress: called with the bytes that have arrived, and with all there are.
        cancel: a threading.Event, or a function: where it is set, or says True, loading is given up.

    Raises:
        TensorNotFoundError: a name without wildcards is not there. UnsupportedError: the loader has no such elements,
        a tensor is of strings, or what was asked for is not possible. LoadCancelledError: `cancel` said so. Whatever
        the loader raises. In each case the loader has let go of what was begun.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((4, 2), np.float32)}, "model.zcr")
        >>> load_into(zcrecord.load_record("model.zcr"), "host", slices={"w": slice(1, 4)})["w"].shape
        (3, 2)
    """
    chosen = loader_of(loader)
    _check_options(dst, progress, cancel)
    archive = archive_of(record)
    fetch = isinstance(chosen, MappedLoader)
    plan = plan_archive(archive, names, slices=slices, max_in_flight=max_in_flight, raw=raw, fetch=fetch)
    path = archive.path
    _check_loader(chosen, plan, path)
    rooms = _rooms(plan, dst or {}, path)
    watch = _LoadProgress(plan.nbytes, progress, cancel, path)
    try:
        out = _load(chosen, dataclasses.replace(plan, advance=watch.advance), rooms, watch, path)
        watch.finish()
    except BaseException:
        with contextlib.suppress(Exception):  # what went wrong first is what is told
            chosen.abort()
        raise
    return out


def loader_of(loader: Loader | str) -> Loader:
    """Return a loader as it is, or a new one by its device's name, of torch's devices too.

    Raises:
        UnsupportedError: it is neither, or there is no such device. DependencyError: torch is not installed.
    """
    named = isinstance(loader, str) or type(loader).__module__ == "torch"  # a torch.device
    chosen: Any = loader_for(str(loader)) if named else loader
    if isinstance(chosen, type) or not all(hasattr(chosen, name) for name in ("can_load", "device")):
        raise UnsupportedError("loader= takes a loader, or the name of a device; see zcrecord.loaders.Loader")
    made: Loader = chosen
    return made


def _check_options(dst: Any, progress: Any, cancel: Any) -> None:
    if dst is not None and not isinstance(dst, Mapping):
        raise UnsupportedError(f"dst= takes memory by name, as {{name: array}}, not a {type(dst).__name__}")
    if progress is not None and not callable(progress):
        raise UnsupportedError(f"progress= takes a function, not a {type(progress).__name__}")
    if cancel is not None and not hasattr(cancel, "is_set") and not callable(cancel):
        raise UnsupportedError(f"cancel= takes an Event or a function, not a {type(cancel).__name__}")


def _load(
    loader: Loader, plan: LoadPlan, rooms: Mapping[int, Any], watch: _LoadProgress, path: str | None
) -> dict[str, Any]:
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
    for remote in {id(ref.source): ref.source for ref in plan.refs if ref.source is not None}.values():
        getattr(remote, "check_same", bool)()  # or bytes of two versions could have come
    return {name: loaded[id(ref)] if view is None else views[id(view)] for name, (ref, view) in plan.targets.items()}


def _check_loader(loader: Loader, plan: LoadPlan, path: str | None) -> None:
    """Raise UnsupportedError unless the loader can load every tensor of a plan."""
    able: dict[str, bool] = {}
    for name, (ref, view) in plan.targets.items():
        dtype = (view or ref).dtype
        if dtype.name not in able:
            able[dtype.name] = loader.can_load(loader.device, dtype)
        if not able[dtype.name]:
            what = f"{type(loader).__name__} brings no {dtype.name} to {loader.device!r}; leave it out with names="
            raise UnsupportedError(what, path=path, tensor=name)
        if view is not None and not hasattr(loader, "view"):
            what = f"is one of several views of its bytes, of which {type(loader).__name__} makes none"
            raise UnsupportedError(f"{what}; leave it out with names=", path=path, tensor=name)


def _rooms(plan: LoadPlan, dst: Mapping[str, Any], path: str | None) -> dict[int, Any]:
    """Return where each ref is to go.

    Raises:
        TensorNotFoundError: a name of `dst` is not among what is loaded. UnsupportedError: it shares its bytes.
    """
    rooms: dict[int, Any] = {}
    for name, room in dst.items():
        if name not in plan.targets:
            raise TensorNotFoundError(name, lambda: list(plan.targets), path=path)
        ref, view = plan.targets[name]
        if view is not None:
            what = "shares its bytes with tensors of another form, so that dst= cannot have it alone"
            raise UnsupportedError(f"{what}; load it by itself, with names=", path=path, tensor=name)
        if rooms.setdefault(id(ref), room) is not room:
            raise UnsupportedError("is tied to another tensor that has a dst; give it to one of them", tensor=name)
    return rooms


class _LoadProgress:
    """How far it is, whom to tell, and whether to give up. Loaders may call `advance` from any thread."""

    def __init__(self, total: int, progress: Progress | None, cancel: Cancel | None, path: str | None) -> None:
        self._total, self._progress, self._path = total, progress, path
        self._arrived = self._begun = self._told = 0
        self._telling = False  # the loader says what has arrived
        self._lock = threading.Lock()
        asked: Any = cancel
        self._cancelled: Callable[[], bool] | None = getattr(asked, "is_set", asked)

    def check(self) -> None:
        """Raise LoadCancelledError where the user gave up."""
        if self._cancelled is not None and self._cancelled():
            what = f"given up after {self._told} of {self._total} bytes, as cancel= said; nothing of it is kept"
            raise LoadCancelledError(what, path=self._path)

    def advance(self, nbytes: int) -> None:
        """Say that so many more bytes have arrived; raises where the user gave up."""
        self.check()
        with self._lock:
            self._telling = True
            self._arrived += nbytes
            self._tell(self._arrived)

    def begun(self, nbytes: int) -> None:
        """Say that `load` returned; where the loader does not tell what has arrived, that counts."""
        self._begun += nbytes
        if not self._telling:
            self._tell(self._begun)

    def finish(self) -> None:
        """Say that everything is there, and nothing before said that."""
        if self._progress is not None:
            self._progress(self._total, self._total)

    def _tell(self, done: int) -> None:
        if self._told < done < self._total:
            self._told = done
            if self._progress is not None:
                self._progress(done, self._total)
