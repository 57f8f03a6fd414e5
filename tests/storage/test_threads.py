"""Work shared by threads: every item is done once, answers keep their order, the first error ends it all."""

from __future__ import annotations

import pytest

from zcrecord.storage.threads import Going, map_ordered, run_threads


def test_no_further_item_is_begun_after_an_error() -> None:
    begun: list[int] = []

    def work(item: int, _: Going) -> None:
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        run_threads(work, range(1000), 1)
    assert begun == [0]


def test_few_items_are_taken_ahead_of_those_that_are_used() -> None:
    accepted: list[int] = []
    items = (accepted.append(i) or i for i in range(100))  # type: ignore[func-returns-value]
    answers = map_ordered(lambda: lambda item: item, items, 2)
    assert next(answers) == 0 and len(accepted) <= 5
    answers.close()
