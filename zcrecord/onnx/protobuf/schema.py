"""Where a model can hold tensors, as a table, and what is remembered of the messages on the way to one.

Source: onnx.proto (IR version 13). Reading them is left to `scanner`.
"""

from __future__ import annotations

from array import array
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zcrecord import dtypes
from zcrecord.codec.layout import NONE
from zcrecord.dtypes import DType

from .reader import LEN, Skeleton

__all__ = ["CHILDREN", "Scope", "Tensor", "Tensors"]

MODEL, GRAPH, NODE, ATTRIBUTE = "ModelProto", "GraphProto", "NodeProto", "AttributeProto"
TENSOR, SPARSE, FUNCTION, TRAINING = "TensorProto", "SparseTensorProto", "FunctionProto", "TrainingInfoProto"


class Child(NamedTuple):
    """A field that leads on to tensors: the message it holds, and whether there may be several."""

    kind: str
    repeated: bool


# Message -> field number -> what to descend into.
_TABLE: dict[str, dict[int, Child]] = {
    MODEL: {7: Child(GRAPH, False), 20: Child(TRAINING, True), 25: Child(FUNCTION, True)},
    GRAPH: {1: Child(NODE, True), 5: Child(TENSOR, True), 15: Child(SPARSE, True)},
    NODE: {5: Child(ATTRIBUTE, True)},
    ATTRIBUTE: {
        5: Child(TENSOR, False),
        6: Child(GRAPH, False),
        10: Child(TENSOR, True),
        11: Child(GRAPH, True),
        22: Child(SPARSE, False),
        23: Child(SPARSE, True),
    },
    SPARSE: {1: Child(TENSOR, False), 2: Child(TENSOR, False)},
    FUNCTION: {7: Child(NODE, True), 11: Child(ATTRIBUTE, True)},
    TRAINING: {1: Child(GRAPH, False), 2: Child(GRAPH, False)},
}
# Message -> field numbers of the texts that name it: a node's outputs and name; name, domain, overload.
_TEXTS: dict[str, tuple[int, ...]] = {NODE: (2, 3), ATTRIBUTE: (1,), FUNCTION: (1, 10, 13)}

CHILDREN = {kind: {n << 3 | LEN: child for n, child in fields.items()} for kind, fields in _TABLE.items()}  # by tag
TEXTS = {kind: frozenset(n << 3 | LEN for n in _TEXTS.get(kind, ())) for kind in _TABLE}
SPARSE_INITIALIZER = 15  # of GraphProto
_NO_ELEMENTS = np.zeros(0, np.uint8)


class Scope:
    """A message that holds tensors, and the texts that name it; those of a field that is given twice are one."""

    __slots__ = ("counts", "field", "kind", "own", "parent", "place", "single", "texts")

    def __init__(self, kind: str, parent: Scope | None, field: int, place: int) -> None:
        self.kind = kind
        self.parent = parent
        self.field = field  # of the parent, in which it sits
        self.place = place  # among those of that field
        self.texts: dict[int, bytes] | None = None
        self.counts: dict[int, int] | None = None
        self.single: dict[int, Scope | Tensor] | None = None  # what may still be merged into
        self.own: tuple[str, ...] = ()  # what it adds to names, once `names` sealed it

    def name(self, field: int, text: bytes) -> None:
        """Note a text: the first of a node's outputs, the last of everything else."""
        if self.texts is None:
            self.texts = {}
        if self.kind is not NODE or field != 2 or field not in self.texts:
            self.texts[field] = text

    def count(self, tag: int, more: int = 1) -> int:
        """Return how many fields with this tag were counted before, and count so many more."""
        if self.counts is None:
            self.counts = {}
        place = self.counts.get(tag, 0)
        self.counts[tag] = place + more
        return place


class Tensor:
    """One TensorProto as far as it was read. `scope` and `field` say where it sits, `index` is its number."""

    __slots__ = ("closed", "data_type", "dims", "early", "ends", "entries", "external", "field", "held", "index",
                 "name", "nbytes", "offset", "parts", "payload", "pending", "place", "rest", "run", "scope", "source",
                 "stored", "top", "uncounted")  # fmt: skip

    def __init__(self, scope: Scope, field: int, place: int, offset: int) -> None:
        self.scope = scope
        self.field = field
        self.place = place  # among those of the field it sits in
        self.offset = offset  # in the stream
        self.parts: list[tuple[int, int]] = []  # of the stream, from offset to offset: its fields, where they were read
        self.index = -1
        self.name = b""
        self.dims: list[int] = []
        self.data_type = 0
        self.external = False
        self.entries: dict[str, str] | None = None
        self.source = 0  # the field its values came in
        self.nbytes = 0  # of values seen, in stored form
        self.payload = NONE
        self.closed = False  # the payload is finished
        self.stored: tuple[int, int] | None = None  # data_type, and for packed ones the count, as they were stored
        self.held = -1  # the last byte, until it is known which of its bits count
        self.top = 0  # the greatest byte seen before the data_type was known
        self.early: bytearray | None = None  # varints that came before the data_type
        self.pending: bytearray | None = None  # single elements, to be written together
        self.rest: npt.NDArray[np.uint8] = _NO_ELEMENTS  # of 3, 5 or 6 bits, say; not yet enough to pack
        self.ends: array[int] | None = None  # of strings
        self.run = (0, 0)  # where its values were passed last without a look at them: offset and bytes
        self.uncounted = 0  # bytes of varints passed like that

    @property
    def dtype(self) -> DType | None:
        """The table's entry for its data_type, None if it has none yet or one that is not known."""
        return dtypes.by_onnx.get(self.data_type)

    @property
    def packed(self) -> bool:
        """Whether its elements are, or for all we know may be, narrower than a byte."""
        kind = self.dtype
        return kind is None or kind.packed

    def expected(self) -> int:
        """Return the bytes its shape and type call for; of strings, those of the table of their ends."""
        kind = self.dtype
        if kind is None:
            return 0
        count = prod(self.dims)
        if kind is dtypes.STRING:
            return 8 * (count + 1) if count else 0
        return dtypes.nbytes(count, kind.bits)

    @property
    def label(self) -> str:
        """Its name for messages."""
        return self.name.decode("utf-8", "replace")


class Tensors:
    """What becomes of the tensors a scan finds. Either `whole` is called for one, or the three others in order."""

    def whole(self, scope: Scope, field: int, place: int, offset: int, name: bytes, code: int, dims: list[int],
              data: memoryview) -> bytes:  # fmt: skip
        """Take a small tensor in the commonest form and return the fields that stand for its values.

        `data` is its raw_data, of the right length, valid until `passed`; the window stands where it begins.
        """
        raise NotImplementedError

    def passed(self) -> None:
        """Use the data that `whole` was given: the window moves on."""

    def start(self, t: Tensor) -> None:
        """Note that a tensor begins: number it."""

    def stub(self, t: Tensor, skeleton: Skeleton) -> None:
        """Add fields to the skeleton that stand for a tensor's values: its message is about to close."""

    def finish(self, t: Tensor) -> None:
        """Take a tensor of which all was read."""
