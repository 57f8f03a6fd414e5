"""The budget of version 0, a draft: the one rule in which it differs from version 1. `convert` alone reads drafts."""

from __future__ import annotations

from typing import Any

import numpy as np

from zcrecord.errors import FormatError, LimitError

from .entries import ValueForm, ValueType
from .index import Index, list_bounds

_SPAN_ALLOWANCE = 256  # bytes for each entry of a column, beyond the pool's, that its spans may take
_WORDS_ALLOWANCE = 32  # items for each attribute, beyond the pool's, that lists may have


def check_draft_budget(ix: Index) -> None:
    """Check that spans and lists take little more than their pools, which bounds what a draft costs as R30 does."""
    columns: list[tuple[str, Any]] = [
        ("names of tensors", ix.tensors["name_size"]),
        ("names of modules", ix.modules["name_size"]),
        ("type names", ix.modules["type_name_size"]),
        ("names of attributes", ix.attributes["name_size"]),
        ("names of metadata", ix.metadata["name_size"]),
    ]
    for what, rows in (("attributes", ix.attributes), ("metadata", ix.metadata)):
        starts, counts = list_bounds(rows[rows["form"] != ValueForm.SCALAR])
        if (starts + counts > len(ix.words)).any():
            raise FormatError(f"{what}: a list leaves the pool of {len(ix.words)} words")
        if (total := int(counts.sum())) > len(ix.words) + _WORDS_ALLOWANCE * len(rows):
            raise LimitError(f"index: the lists of {what} take {total} items of a pool of {len(ix.words)} words")
        columns.append((f"texts of {what}", ix.values(rows, ValueType.TEXT) >> np.uint64(32)))
    for what, sizes in columns:
        if (total := int(sizes.sum(dtype=np.uint64))) > len(ix.text) + _SPAN_ALLOWANCE * len(sizes):
            raise LimitError(f"index: the {what} take {total} bytes of a text pool of {len(ix.text)}")
