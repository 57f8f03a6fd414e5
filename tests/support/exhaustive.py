"""Choice of the tests that run by default: none that is slow or measures, and few members of exhaustive families.

    @pytest.mark.slow                  over 0.1 seconds of the processor, and a smaller test holds most of its promise
    @pytest.mark.measured              compares to a limit what the machine decides: resident memory, time, the order of
                                       threads, answers of another library
    @pytest.mark.exhaustive            parameters: each value of each one occurs, in as few tests as that takes
    @pytest.mark.exhaustive(keep=5)    at most five of these, spread evenly; 0 where another test is the small member
    @pytest.mark.exhaustive(keep=("a", "b"))   those in whose id one of these occurs
    for cut in some(range(n), 50)      a loop within a test: fifty of them, first and last included
    settings(max_examples=rounds(300)) random rounds: a fifth of them

`tools/test --all` runs everything, and so does pytest with a path everything there. Nothing is drawn: the same members
run each time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

ALL = os.environ.get("ZCRECORD_TEST_ALL") == "1"
KINDS = {  # of tests that do not run by default: the mark, and the words for their number
    "needs": "that run a system tool",
    "measured": "that measure what the machine decides",
    "slow": "that are slow",
    "exhaustive": "of families that try every case: a few of each family ran",
}
Member = TypeVar("Member")
_whole = ALL


def whole() -> bool:
    """Return True if nothing is left out but what lacks a tool: under --all, and of a path."""
    return _whole


def run_whole() -> None:
    """Leave nothing out from here on; before tests are collected."""
    global _whole
    _whole = True


def some(family: Sequence[Member], few: int) -> Sequence[Member]:
    """Return `few` of a family, evenly spread from the first to the last, or the whole one."""
    return family if whole() else spread(family, few)


def rounds(count: int) -> int:
    """Return a fifth of so many rounds, or all of them."""
    return count if whole() else -(-count // 5)


def spread(family: Sequence[Member], few: int) -> list[Member]:
    """At most `few` members, evenly spread from the first to the last; one alone is the first."""
    if len(family) <= few:
        return list(family)
    return [family[i * (len(family) - 1) // max(few - 1, 1)] for i in range(few)]


def left_out_by_default(items: Sequence[pytest.Item]) -> dict[pytest.Item, str]:
    """Return the tests that do not run by default, each with its kind, but for those that run a tool."""
    marks = {item: {mark.name for mark in item.iter_markers()} for item in items}
    kinds: tuple[str, ...] = ("exhaustive", "slow", "measured")
    left = {item: kind for item, named in marks.items() for kind in kinds if kind in named}
    families: dict[tuple[Any, ...], list[pytest.Item]] = defaultdict(list)
    for item, kind in left.items():
        if kind == "exhaustive":
            families[item.path, getattr(item, "originalname", item.name)].append(item)
    for family in families.values():
        [mark, *_] = family[0].iter_markers("exhaustive")  # the closest
        for item in members(family, **mark.kwargs):
            del left[item]
    return left


def members(family: Sequence[pytest.Item], keep: int | tuple[str, ...] | None = None) -> list[pytest.Item]:
    """Return the few of a family that run by default."""
    if isinstance(keep, tuple):
        return [item for item in family if any(part in item.name for part in keep)]
    few = each_value_once(family)
    return few if keep is None else spread(few, keep)


def each_value_once(family: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Members with which each value of each parameter occurs: always the first of those that bring most new values."""
    kept: list[pytest.Item] = []
    seen: set[tuple[str, int]] = set()
    left = {item: values_of(item) for item in family}
    while left:
        best, most = family[0], 0
        for item, values in left.items():
            if len(values - seen) > most:
                best, most = item, len(values - seen)
                if most == len(values):
                    break
        if not most:
            break
        seen |= left.pop(best)
        kept.append(best)
    return kept or list(family[:1])


def values_of(item: pytest.Item) -> set[tuple[str, int]]:
    """Each parameter's name and the identity of its value; what is marked lives as long as its items."""
    callspec = getattr(item, "callspec", None)
    return {(name, id(value)) for name, value in callspec.params.items()} if callspec else set()
