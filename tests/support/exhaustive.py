"""Thinning of exhaustive families: whole under `tools/test --all`, a few members of each without it.

    @pytest.mark.exhaustive            parameters: each value of each one occurs, in as few tests as that takes
    @pytest.mark.exhaustive(keep=5)    at most five of these, spread evenly; 0 where another test is the small member
    @pytest.mark.exhaustive(keep=("a", "b"))   those in whose id one of these occurs
    for cut in some(range(n), 50)      a loop within a test: fifty of them, first and last included
    settings(max_examples=rounds(300)) random rounds: a fifth of them

Nothing is drawn: the same members run each time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["ALL", "left_to_all", "rounds", "some"]

ALL = os.environ.get("ZCRECORD_TEST_ALL") == "1"
Member = TypeVar("Member")


def some(family: Sequence[Member], few: int) -> Sequence[Member]:
    """Under --all the whole family, else `few` of it, evenly spread from the first to the last."""
    return family if ALL else spread(family, few)


def rounds(count: int) -> int:
    """Under --all so many rounds, else a fifth of them."""
    return count if ALL else -(-count // 5)


def spread(family: Sequence[Member], few: int) -> list[Member]:
    """At most `few` members, evenly spread from the first to the last; one alone is the first."""
    if len(family) <= few:
        return list(family)
    return [family[i * (len(family) - 1) // max(few - 1, 1)] for i in range(few)]


def left_to_all(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests of exhaustive families that only --all runs."""
    families: dict[tuple[Any, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            families[item.path, getattr(item, "originalname", item.name)].append(item)
    left: list[pytest.Item] = []
    for family in families.values():
        [mark, *_] = family[0].iter_markers("exhaustive")  # the closest
        kept = set(members(family, **mark.kwargs))
        left += [item for item in family if item not in kept]
    return left


def members(family: Sequence[pytest.Item], keep: int | tuple[str, ...] | None = None) -> list[pytest.Item]:
    """The few of a family that run without --all."""
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
