"""A stand-in for torch with a cuda device: as lazy as a device may be, so that whoever does not wait is found out.

Its tensors lie in the host's memory. What is copied with `non_blocking` is copied when its stream has to be done with
it, and not before: when an event behind it, or the stream, is waited for. What happens is told in `calls`, in order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_now = threading.local()  # the stream of this thread, and the number of its device


class OnDevice(torch.Tensor):  # type: ignore[misc]  # torch is not typed where mypy sees it
    """A tensor whose copies wait for their stream."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            target, source = args
            _now.stream.add("copy", lambda: _copy(target, source))
            return target
        return super().__torch_function__(func, types, args, kwargs)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # either may be on the device
        target.copy_(source)


class LazyStream:
    """Work in order, none of it done before it has to be."""

    def __init__(self, fake: LazyTorch, name: str, device: int = 0) -> None:
        self._fake, self._name, self.device = fake, name, device
        self._work: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def add(self, what: str, work: Callable[[], object]) -> None:
        self._fake.told(what, self._name)
        with self._lock:
            self._work.append(work)

    def run(self, until: Callable[[], object] | None = None) -> None:
        with self._lock:
            count = len(self._work) if until is None else self._work.index(until) + 1
            due, self._work = self._work[:count], self._work[count:]
            for work in due:
                work()

    def synchronize(self) -> None:
        self._fake.told("drain", self._name)
        if self._fake.failing == "drain":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.run()

    def wait_stream(self, other: LazyStream) -> None:
        self._fake.told("follow", self._name, other._name)


class LazyEvent:
    def __init__(self, fake: LazyTorch) -> None:
        self._fake = fake
        self._mark: Callable[[], object] | None = None
        self._stream: LazyStream | None = None
        fake.held.append(weakref.ref(self))

    def record(self, stream: LazyStream) -> None:
        self._stream, self._mark = stream, lambda: None
        stream.add("record", self._mark)

    def synchronize(self) -> None:
        self._fake.told("wait")
        self._fake.on_wait()
        assert self._stream is not None, "an event that was never recorded is not waited for"
        if self._fake.waits and self._mark in self._stream._work:
            self._stream.run(self._mark)


class LazyTorch:
    """torch, but for the calls that have to do with its device.

    Attributes:
        calls: what was called, in order.
        room: bytes of device memory that can be had.
        on_wait: what the device does before it is done with anything.
        waits: False makes events forget to wait.
        failing: "pin" or "drain" makes that fail.
        held: weak references to the events and to the pinned memory that were given out.
        contexts: the devices that a reader thread made its own: each takes memory there.
    """

    def __init__(self, room: int = 1 << 40) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.held: list[weakref.ref[Any]] = []
        self.contexts: set[int] = set()
        self.pinned = 0
        self.room, self.waits, self.failing = room, True, ""
        self.on_wait: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._users = LazyStream(self, "users")
        self.cuda = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def told(self, *call: Any) -> None:
        with self._lock:
            self.calls.append(call)

    def kinds(self) -> list[str]:
        return [call[0] for call in self.calls]

    def empty(self, shape: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Any:
        made = torch.empty(shape, dtype=dtype, device="cpu")
        if pin_memory:
            assert device == "cpu", "where there is another default device, that is taken"
            if self.failing == "pin":
                raise RuntimeError("CUDA error: out of memory")
            self.pinned += made.nbytes
            self.held.append(weakref.ref(made.untyped_storage()))
            return made
        if torch.device(device).type == "cuda":
            self.room -= made.nbytes
            if self.room < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return made.as_subclass(OnDevice)
        return made

    # What torch.cuda has.

    def Stream(self, device: Any) -> LazyStream:
        return LazyStream(self, "copies", torch.device(device).index)

    def Event(self, blocking: bool = False) -> LazyEvent:
        assert blocking
        return LazyEvent(self)

    def current_device(self) -> int:
        return 0

    def current_stream(self, _: Any) -> LazyStream:
        return self._users

    @contextmanager
    def stream(self, stream: LazyStream) -> Iterator[None]:
        _now.stream, before = stream, getattr(_now, "device", 0)
        self.set_device(stream.device)
        yield
        self.set_device(before)  # as torch does, whatever it was
        del _now.stream

    def set_device(self, device: Any) -> None:
        _now.device = device if isinstance(device, int) else torch.device(device).index
        self.contexts.add(_now.device)
