"""Rules for payload bytes that depend on the element type: bools are 0 or 1, pad bits are zero.

Local and remote archives use the same check, for whole payloads or for pieces of them. Strings are checked by their
views (R71). Rules for entries of the index are in `verify`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.errors import FormatError

from .index import Index
from .layout import NONE

__all__ = ["ElementRules"]

_BOOL = dtypes.by_name["bool"].code


class ElementRules:
    """Bools are 0 or 1 (R72), the bits after the last packed element 0 (R70), however many tensors share a payload.

    Attributes:
        strings: numbers of the tensors of strings that have bytes.
    """

    def __init__(self, ix: Index) -> None:
        self._ix = ix
        rows = ix.tensors
        used = rows["payload"] != NONE
        self.strings: list[int] = np.flatnonzero(used & (rows["dtype"] == dtypes.STRING.code)).tolist()
        starts = np.zeros(len(rows), np.uint64)
        starts[used] = ix.payloads["offset"][rows["payload"][used]]
        bools = np.flatnonzero(used & (rows["dtype"] == _BOOL))
        _, first = np.unique(starts[bools], return_index=True)
        chosen = bools[np.sort(first)]
        self._bools: dict[int, int] = dict(zip(starts[chosen].tolist(), chosen.tolist(), strict=True))
        narrow = [kind.code for kind in dtypes.DTYPES if kind.packed]
        self._pads: dict[int, dict[int, int]] = {}  # by start: bits of the last byte that are elements', and a tensor
        for i in np.flatnonzero(used & (rows["bits"] < 8) & np.isin(rows["dtype"], narrow)).tolist():
            at, rank = int(rows["dims"][i]), int(rows["rank"][i])
            count = 1
            for dim in ix.dims[at : at + rank].tolist():
                count *= dim
            if left := count * int(rows["bits"][i]) % 8:
                self._pads.setdefault(int(starts[i]), {}).setdefault(left, i)

    def payloads(self) -> Iterator[tuple[int, int]]:
        """Yield start and number of each payload that has a rule to keep; pad bits come first."""
        for start, i in [(s, next(iter(p.values()))) for s, p in self._pads.items()] + list(self._bools.items()):
            yield start, int(self._ix.tensors["payload"][i])

    def check(self, start: int, piece: np.ndarray[Any, np.dtype[np.uint8]], *, last: bool) -> None:
        """Check a piece of the payload that starts so many bytes behind the first; `last`: it ends with the payload.

        Raises:
            FormatError: a rule is broken; names the first tensor that needs it kept.
        """
        if last:
            for bits, i in self._pads.get(start, {}).items():
                if piece[-1] >> bits:
                    raise FormatError("the pad bits after its last element are not zero", tensor=self._ix.name(i))
        if start in self._bools and piece.max() > 1:
            raise FormatError("a bool is neither 0 nor 1", tensor=self._ix.name(self._bools[start]))
