"""A window on a file that is read by position: large fields are passed without reading them, and it can be moved.

Nothing of the message is kept. What a field means is left to `scanner`, as with the window that only goes forward.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import SupportsIndex

from zcrecord.onnx.protobuf.reader import WINDOW, ProtobufReader, Skeleton

__all__ = ["PlacedWindow"]

STEP = 1 << 12  # bytes; what is read first where the window was moved to, and what is rather read than passed


class _Nowhere(bytearray):
    """Takes bytes and stays empty."""

    def __iadd__(self, _: object) -> _Nowhere:
        return self

    def append(self, _: SupportsIndex, /) -> None:
        pass


class _Unkept(Skeleton):
    """A skeleton that nobody wants: keeps nothing."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.tail = _Nowhere()

    def open(self, nbytes: int = 0) -> tuple[int, int, int]:  # noqa: ARG002
        return 0, 0, 0

    def close(self, mark: tuple[int, int, int]) -> None:
        pass

    def insert(self, data: object) -> None:
        pass


class PlacedWindow(ProtobufReader):
    """The bytes of a file around a place in it. `read` is that file's `OpenFile.read_at`, `nbytes` what of it counts.

    Where it was moved to it reads little at first, then twice as much each time: what is headers between large values
    costs a page each, a graph the reads of a forward window.
    """

    __slots__ = ("_nbytes", "_read_at", "_step")

    def __init__(self, read: Callable[[memoryview, int], int], nbytes: int) -> None:
        super().__init__(io.BytesIO(), _Unkept())  # which is never read: `read` below is
        self._read_at = read
        self._nbytes = nbytes
        self._step = STEP

    def read(self, buffer: memoryview) -> int:
        """Read what follows in the file, as far as it counts."""
        at = self.base + self.limit
        step, self._step = self._step, min(2 * self._step, WINDOW)
        return self._read_at(buffer[: min(step, self._nbytes - at)], at) if at < self._nbytes else 0

    def advance(self, nbytes: int) -> None:
        """Pass so many bytes; what lies further than a step behind the window is not read."""
        if nbytes - (self.limit - self.pos) <= STEP:
            super().advance(nbytes)
            return
        end = self.base + self.pos + nbytes
        if end > self._nbytes:
            raise self.fail(f"the file ends {end - self._nbytes} bytes early")
        self.move(end)

    def move(self, offset: int) -> None:
        """Stand at an offset of the file; nothing is read yet."""
        self.base, self.pos, self.limit, self._eof = offset, 0, 0, False
        self.mark = min(self.mark, 0)  # dropped stays dropped
        self._step = STEP
