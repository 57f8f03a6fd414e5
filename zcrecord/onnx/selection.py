"""The choice by name of the tensors that a conversion takes, made in its one pass.

A tensor's name mostly comes before its values; then values that are not wanted are passed unwritten. An initializer
whose values come first, as typed ones do, is written and taken back. Names are those of `names`, without the "~2" of
duplicates.
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
        """Return True if a tensor's values, which come now, are to be written: before its name they are."""
        name = plain_name(t.scope, t.field, t.place, t.name)
        if name is None:
            return True
        wanted = self._early[t.index] = self._test(name)
        return wanted

    def settle(self, t: TensorMessage, out: StreamWriter) -> int:
        """Return the payload of a finished tensor; if it is not wanted, LEFT_OUT, and take the payload back.

        Raises:
            OnnxError: the name changed after its values. UnsupportedError: the payload went into a pipe.
        """
        keeps, payload = self.takes(t.scope, t.field, t.place, t.name), t.values.payload
        if self._early.pop(t.index, keeps) != keeps:
            raise _late(t.label, t.offset)
        if not keeps and payload != NONE:
            out.forget(payload)
        return payload if keeps else LEFT_OUT

    def check(self, tensors: Sequence[NamedTensor]) -> None:
        """Check, with all names known, that each decision was right, and that a tensor is wanted."""
        names = [plain_name(f.scope, f.field, f.place, f.name) or "" for f in tensors]
        for name, f in zip(names, tensors, strict=True):
            if self._test(name) != (f.payload != LEFT_OUT):
                raise _late(name, f.offset)
        if all(f.payload == LEFT_OUT for f in tensors):
            raise TensorNotFoundError(self._test.text, lambda: names)


def _late(name: str, offset: int) -> OnnxError:
    what = "it is named after its values, too late for a choice by name"
    return OnnxError(f"byte {offset:#x}: {what}; convert everything, and choose when loading", tensor=name)
