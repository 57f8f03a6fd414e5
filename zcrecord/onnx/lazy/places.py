"""Where a tensor's values lie, noted instead of read; what is checked of them is what `values` checks.

Only the values themselves can tell how many varints a run has, and whether each is in range: that is found out when
they are read. Reading them, by way of the very same code, is left to `listing`.
"""

from __future__ import annotations

from zcrecord.errors import OnnxError
from zcrecord.onnx.protobuf.reader import ProtobufReader
from zcrecord.onnx.protobuf.schema import Tensor
from zcrecord.onnx.protobuf.values import FIELDS, Values

__all__ = ["Places"]

_WIDEST = 8  # bytes that a varint of one byte may stand for


class _Nothing:
    """Payloads that nobody wants."""

    def begin(self, _: int, /) -> None:
        pass

    def write(self, _: object, /) -> None:
        pass

    def end(self) -> int:
        return 0


class Places(Values):
    """Takes one tensor after the other as `Values` does, and passes its values."""

    def __init__(self, window: ProtobufReader) -> None:
        super().__init__(window, _Nothing())
        self._window = window

    def note(self, t: Tensor, nbytes: int) -> None:
        """Note stored bytes of a tensor, wherever they lie, as if they had been written to its payload."""
        self.begin(t, nbytes)
        t.nbytes += nbytes
        t.held = 0 if t.packed else -1

    def raw(self, t: Tensor, nbytes: int) -> None:
        """Note where a run of stored bytes lies, and pass it."""
        if not nbytes:
            return
        self.note(t, nbytes)
        if t.data_type:  # without one, bools are judged by what they are: `Values` has to look at them
            t.run = self._window.base + self._window.pos, nbytes
        self._pass(t, nbytes)

    def text(self, nbytes: int) -> None:
        """Pass the bytes of one string."""
        self._window.advance(nbytes)

    def varints(self, t: Tensor, number: int, nbytes: int) -> None:  # noqa: ARG002
        """Pass a packed run of varints."""
        self.note(t, 0)
        t.uncounted += nbytes
        self._pass(t, nbytes)

    def _pass(self, t: Tensor, nbytes: int) -> None:
        try:
            self._window.advance(nbytes)
        except OnnxError as error:
            raise error.located(tensor=t.label or None) from None

    def found(self, t: Tensor) -> int:
        """Return how many bytes of values were passed: as many as are wanted, if that many may have been."""
        if not t.uncounted:
            return t.nbytes
        need, least, most = t.expected(), max(1, t.nbytes), t.nbytes + _WIDEST * t.uncounted
        if not least <= need <= most:
            kind = t.dtype.name if t.dtype is not None else "?"
            what = f"takes {need} bytes, got {least} to {most} in {FIELDS[t.source]}"
            raise self.fail(t, f"{kind} of shape {t.dims} {what}")
        return need
