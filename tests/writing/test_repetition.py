"""Names, texts and lists that repeat are stored once as long as readers take the index, and else again."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import records as r
from exhaustive import rounds
from forge import Forge, build_index
from hypothesis import strategies as st

import zcrecord

SIZES = [1, 2, 31, 32, 33, 111, 112, 113, 127, 128, 129, 255, 256, 257, 511, 512, 513, 767, 768, 769, 3000]
TEXTS = st.builds(lambda letter, size: letter * size, st.sampled_from("xyé"), st.sampled_from(SIZES))
VALUES = (
    TEXTS
    | st.lists(TEXTS, max_size=3).map(lambda texts: texts * 40)
    | st.sampled_from([2**63, 7]).map(lambda number: [number] * 64)
)
RECORDS = st.recursive(
    st.dictionaries(TEXTS, VALUES, max_size=5),
    lambda inner: st.dictionaries(TEXTS, inner | VALUES, max_size=5) | st.lists(inner, max_size=20),
    max_leaves=20,
)


def within(data: bytes) -> int:
    """Check that an archive keeps to R30, and that it loads; returns the size of its index."""
    forged = Forge(data)
    assert forged.budget_left() >= 0
    zcrecord.load_record(data, verify="full").tree()
    return len(build_index(forged.columns, forged.digest_kind))


@pytest.mark.parametrize("count", [2000, pytest.param(50_000, marks=pytest.mark.exhaustive(keep=0))])
def test_a_text_is_stored_twice_only_where_the_budget_is_nearly_used_up(count: int) -> None:
    """R30, R31."""
    exhausted = 0
    for record, metadata in r.repetitive(count):
        data = r.saved(record, metadata=metadata)
        size, forged = within(data), Forge(data)
        texts = bytes(forged.columns["text"]).split(b"\0")[:-1]
        if len(set(texts)) < len(texts):
            assert forged.budget_left() < 6 * size
            exhausted += 1
    assert exhausted > 3


@pytest.mark.slow
@hypothesis.given(RECORDS, st.dictionaries(TEXTS, VALUES, max_size=20))
@hypothesis.settings(max_examples=rounds(100))
def test_no_record_is_too_repetitive_to_be_saved(record: Any, metadata: dict[str, Any]) -> None:
    """R30, R31."""
    within(r.saved(record if isinstance(record, dict) else {"list": record}, metadata=metadata))


def test_what_is_repeated_a_few_times_is_stored_once() -> None:
    few = {f"m{i}": {"name": "x" * 3000, "list": ["y" * 100] * 3, "sizes": [1, 2, 3]} for i in range(10)}
    forged = Forge(r.saved(few))
    assert bytes(forged.columns["text"]).count(b"x" * 3000) == bytes(forged.columns["text"]).count(b"y" * 100) == 1
    assert len(forged.columns["words"]) == 6
