"""The budget of version 0, a draft: the one rule in which it differs from version 1. `convert` alone reads drafts."""

from __future__ import annotations

import numpy as np

from zcrecord.errors import FormatError, LimitError

from .entries import ValueForm, ValueType
from .index import Index, list_bounds

_DRAFT_SPANS, _DRAFT_WORDS = 256, 32  # bytes of text for each entry, items for each attribute, beyond the pools


def check_draft_budget(ix: Index) -> None:
    """Raise LimitError if the spans of a column take far more than their pool, FormatError for a list outside it."""
    names = [("names of tensors", ix.tensors), ("names of modules", ix.modules)]
    names += [("names of attributes", ix.attributes), ("names of metadata", ix.metadata)]
    columns = [(label, rows["name_size"]) for label, rows in names] + [("type names", ix.modules["type_name_size"])]
    for table, rows in (("attributes", ix.attributes), ("metadata", ix.metadata)):
        starts, counts = list_bounds(rows[rows["form"] != ValueForm.SCALAR])
        if (starts + counts > len(ix.words)).any():
            raise FormatError(f"{table}: a list leaves the pool of {len(ix.words)} words")
        if (total := int(counts.sum(dtype=np.uint64))) > len(ix.words) + _DRAFT_WORDS * len(rows):
            raise LimitError(f"index: the lists of {table} take {total} items of a pool of {len(ix.words)} words")
        columns.append((f"texts of {table}", ix.values(rows, ValueType.TEXT) >> np.uint64(32)))
    for label, sizes in columns:
        if (total := int(sizes.sum(dtype=np.uint64))) > len(ix.text) + _DRAFT_SPANS * len(sizes):
            raise LimitError(f"index: the {label} take {total} bytes of a text pool of {len(ix.text)}")
