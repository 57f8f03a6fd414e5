"""Rules for payload bytes that depend on the element type: bools are 0 or 1, pad bits are zero.

They check whole payloads, or pieces of them. Strings are checked by their views (R71).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import prod
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.errors import FormatError

from .index import Index
from .layout import NONE

_BOOL = dtypes.by_name["bool"].code


class ElementRules:
    """Checks that bools are 0 or 1 (R72), and the bits after the last packed element 0 (R70); each place once."""

    def __init__(self, ix: Index, place_of: Callable[[int], Hashable]) -> None:
        """Collect the rules of an index's tensors by place; `place_of` returns a payload's place by its number."""
        self._ix = ix
        rows = ix.tensors
        filled = rows["payload"] != NONE
        self.strings: list[int] = np.flatnonzero(filled & (rows["dtype"] == dtypes.STRING.code)).tolist()  # tensors
        self._bools: dict[Hashable, int] = {}  # by place: the first tensor of bools
        for i in np.flatnonzero(filled & (rows["dtype"] == _BOOL)).tolist():
            self._bools.setdefault(place_of(int(rows["payload"][i])), i)
        packed = [kind.code for kind in dtypes.DTYPES if kind.packed]
        self._pads: dict[Hashable, dict[int, int]] = {}  # by place, and by used bits of the last byte: the first tensor
        for i in np.flatnonzero(filled & (rows["bits"] < 8) & np.isin(rows["dtype"], packed)).tolist():
            start, rank = int(rows["dims"][i]), int(rows["rank"][i])
            if used_bits := prod(ix.dims[start : start + rank].tolist()) * int(rows["bits"][i]) % 8:
                self._pads.setdefault(place_of(int(rows["payload"][i])), {}).setdefault(used_bits, i)

    def payloads(self) -> list[tuple[Hashable, int]]:
        """Return place and number of each payload that has a rule; those with pad bits come first."""
        packed = {place: next(iter(tensors.values())) for place, tensors in self._pads.items()}
        users = [*packed.items(), *self._bools.items()]
        return [(place, int(self._ix.tensors["payload"][i])) for place, i in users]

    def check(self, place: Hashable, piece: np.ndarray[Any, np.dtype[np.uint8]], *, last: bool) -> None:
        """Raise FormatError if a piece of a place's payload breaks its rules; the error names the first such tensor."""
        if last:
            for bits, i in self._pads.get(place, {}).items():
                if piece[-1] >> bits:
                    raise FormatError("the pad bits after its last element are not zero", tensor=self._ix.name(i))
        if place in self._bools and piece.max() > 1:
            raise FormatError("a bool is neither 0 nor 1", tensor=self._ix.name(self._bools[place]))
