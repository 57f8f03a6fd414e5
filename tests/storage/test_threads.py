"""Work shared by threads: every item is done once, answers keep their order, the first error ends it all."""

from __future__ import annotations

import threading

import pytest

from zcrecord import UnsupportedError
from zcrecord.storage.threads import Going, cores, each_piece, map_ordered, run_threads


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_every_item_is_done_once_by_however_many_threads(threads: int) -> None:
    done: list[int] = []
    run_threads(lambda item, _: done.append(item), range(20), threads)
    assert sorted(done) == list(range(20))


def test_no_further_item_is_begun_after_an_error() -> None:
    begun: list[int] = []

    def work(item: int, _: Going) -> None:
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        run_threads(work, range(1000), 1)
    assert begun == [0]


@pytest.mark.parametrize("threads", [1, 4])
def test_bytes_that_are_done_are_told_to_the_calling_thread_alone(threads: int) -> None:
    reports: list[tuple[int, int]] = []
    each_piece(
        len, [b"a" * n for n in range(9)], threads=threads, advance=lambda n: reports.append((n, threading.get_ident()))
    )
    assert sorted(n for n, _ in reports) == list(range(9))
    assert {thread for _, thread in reports} == {threading.get_ident()}


def test_exception_of_the_one_who_is_told_ends_the_work() -> None:
    begun: list[int] = []

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        each_piece(lambda piece: begun.append(piece) or piece, range(1000), threads=1, advance=stop)  # type: ignore[func-returns-value]
    assert begun == [0]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_answers_come_in_the_order_of_the_items_from_state_of_each_thread(threads: int) -> None:
    started: list[int] = []

    def start() -> object:
        started.append(threading.get_ident())
        return lambda item: item * item

    assert list(map_ordered(start, range(100), threads)) == [i * i for i in range(100)]  # type: ignore[arg-type]
    assert len(started) == len(set(started)) <= threads


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
