"""Which tensors of a model are converted, where not all of them are to be: decided by name, as values come by.

A tensor's name is mostly known before its values are, and then what is not wanted is passed without a byte written.
An initializer whose values come first, as typed ones do, is written and taken back. Names are those of `names`, without
the "~2" that tells equal ones apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zcrecord.archive.name_patterns import NameFilter
from zcrecord.codec.layout import NONE
from zcrecord.errors import OnnxError, TensorNotFoundError
from zcrecord.onnx.protobuf.reader import ProtobufReader
from zcrecord.onnx.protobuf.schema import Scope, Tensor
from zcrecord.onnx.protobuf.values import Values

from .names import LEFT_OUT, NamedTensor, plain_name

__all__ = ["Chosen", "ChosenValues"]


class Chosen:
    """Payloads of which only those of wanted tensors are written; `out` is what they are written to."""

    def __init__(self, out: Any, test: NameFilter) -> None:
        self._out = out
        self._test = test
        self._next = self._writing = True
        self._early: dict[int, bool] = {}  # number of a tensor -> what was decided before its values came

    def takes(self, scope: Scope, field: int, place: int, name: bytes) -> bool:
        """Return whether a tensor is wanted, by its name as far as it is known."""
        return self._test(plain_name(scope, field, place, name) or "")

    def about(self, t: Tensor) -> None:
        """Note that the payload begun next is this tensor's."""
        name = plain_name(t.scope, t.field, t.place, t.name)
        self._next = name is None or self._test(name)
        if name is not None:
            self._early[t.index] = self._next

    def begin(self, nbytes: int, /) -> None:
        """Start a payload of the tensor that was named last."""
        self._writing = self._next
        if self._writing:
            self._out.begin(nbytes)

    def write(self, data: Any, /) -> None:
        """Append to it."""
        if self._writing:
            self._out.write(data)

    def end(self) -> int:
        """Finish it; return its id, NONE if it was not written."""
        return int(self._out.end()) if self._writing else NONE

    def settle(self, t: Tensor) -> int:
        """Return what a finished tensor has for a payload: LEFT_OUT where it is not wanted, its payload taken back.

        Raises:
            OnnxError: its name came after its values, and is not what they were decided by. UnsupportedError: they are
                on their way through a pipe.
        """
        keeps = self.takes(t.scope, t.field, t.place, t.name)
        if self._early.pop(t.index, keeps) != keeps:
            raise _late(t.label, t.offset)
        if not keeps and t.payload != NONE:
            self._out.forget(t.payload)
        return t.payload if keeps else LEFT_OUT

    def check(self, found: Sequence[NamedTensor]) -> None:
        """Check, now that all names are known, that each tensor was treated by its own, and that there is one.

        Raises:
            TensorNotFoundError: no tensor is wanted. OnnxError: one was named after its values came.
        """
        names = [plain_name(f.scope, f.field, f.place, f.name) or "" for f in found]
        for name, f in zip(names, found, strict=True):
            if self._test(name) != (f.payload != LEFT_OUT):
                raise _late(name, f.offset)
        if all(f.payload == LEFT_OUT for f in found):
            raise TensorNotFoundError(self._test.text, lambda: names)


def _late(name: str, offset: int) -> OnnxError:
    what = "it is named after its values, too late for a choice by name"
    return OnnxError(f"byte {offset:#x}: {what}; convert everything, and choose when loading", tensor=name)


class ChosenValues(Values):
    """Values of which those that are not wanted are passed and checked, and not written."""

    def __init__(self, window: ProtobufReader, out: Chosen) -> None:
        super().__init__(window, out)
        self._chosen = out

    def begin(self, t: Tensor, estimate: int) -> None:
        """Start a tensor's payload, unless it is the one that is open."""
        self._chosen.about(t)
        super().begin(t, estimate)
