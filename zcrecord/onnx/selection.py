"""The choice by name of the tensors that a conversion takes, made as values come by.

A tensor's name is mostly known before its values are, and then one that is not wanted is passed without a byte written.
An initializer whose values come first, as typed ones do, is written and taken back. Names are those of `names`, without
the "~2" of equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from zcrecord.archive.name_patterns import NameFilter
from zcrecord.codec.layout import NONE
from zcrecord.errors import OnnxError, TensorNotFoundError
from zcrecord.onnx.protobuf.tensors import TensorMessage
from zcrecord.writing.writers import StreamWriter

from .names import LEFT_OUT, NamedTensor, Scope, plain_name


class Selection:
    """Decides for each tensor of a model if it is converted."""

    def __init__(self, test: NameFilter) -> None:
        self._test = test
        self._early: dict[int, bool] = {}  # number of a tensor -> the decision that was made before its values came

    def takes(self, scope: Scope, field: int, place: int, name: bytes) -> bool:
        """Return True if a tensor is wanted, by its name as far as it is known."""
        return self._test(plain_name(scope, field, place, name) or "")

    def decide(self, t: TensorMessage) -> bool:
        """Return True if a tensor's values, which come now, are to be written: without a name as yet they are."""
        name = plain_name(t.scope, t.field, t.place, t.name)
        if name is None:
            return True
        wanted = self._early[t.index] = self._test(name)
        return wanted

    def settle(self, t: TensorMessage, out: StreamWriter) -> int:
        """Return the payload of a finished tensor: LEFT_OUT if it is not wanted, its payload taken back from `out`.

        Raises:
            OnnxError: it was named after its values, and they were decided by another name. UnsupportedError: they are
                on their way through a pipe.
        """
        keeps, payload = self.takes(t.scope, t.field, t.place, t.name), t.values.payload
        if self._early.pop(t.index, keeps) != keeps:
            raise _late(t.label, t.offset)
        if not keeps and payload != NONE:
            out.forget(payload)
        return payload if keeps else LEFT_OUT

    def check(self, tensors: Sequence[NamedTensor]) -> None:
        """Check, now that all names are known, that each tensor was treated by its own, and that there is one.

        Raises:
            TensorNotFoundError: no tensor is wanted. OnnxError: one was named after its values came.
        """
        names = [plain_name(f.scope, f.field, f.place, f.name) or "" for f in tensors]
        for name, f in zip(names, tensors, strict=True):
            if self._test(name) != (f.payload != LEFT_OUT):
                raise _late(name, f.offset)
        if all(f.payload == LEFT_OUT for f in tensors):
            raise TensorNotFoundError(self._test.text, lambda: names)


def _late(name: str, offset: int) -> OnnxError:
    what = "it is named after its values, too late for a choice by name"
    return OnnxError(f"byte {offset:#x}: {what}; convert everything, and choose when loading", tensor=name)
