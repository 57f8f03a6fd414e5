"""Work shared by threads: every item is done once, answers keep their order, the first error ends it all."""

from __future__ import annotations

import pytest

from zcrecord import UnsupportedError
from zcrecord.storage.threads import Going, cores, each_piece, map_ordered, run_threads


def test_no_further_item_is_begun_after_an_error() -> None:
    begun: list[int] = []

    def work(item: int, _: Going) -> None:
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        run_threads(work, range(1000), 1)
    assert begun == [0]


def test_exception_of_the_one_who_is_told_ends_the_work() -> None:
    begun: list[int] = []

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        each_piece(lambda piece: begun.append(piece) or piece, range(1000), threads=1, done=stop)  # type: ignore[func-returns-value]
    assert begun == [0]


def test_few_items_are_taken_ahead_of_those_that_are_used() -> None:
    accepted: list[int] = []
    items = (accepted.append(i) or i for i in range(100))  # type: ignore[func-returns-value]
    answers = map_ordered(lambda: lambda item: item, items, 2)
    assert next(answers) == 0 and len(accepted) <= 5
    answers.close()


@pytest.mark.parametrize("threads", [0, 2.0])
def test_number_of_threads_that_is_none_is_refused(threads: int) -> None:
    with pytest.raises(UnsupportedError, match="expected a number of at least 1, or None for all cores"):
        cores(threads)
