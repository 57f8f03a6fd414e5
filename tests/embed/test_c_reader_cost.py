"""Cost of a hostile archive to zcr_verify: time that grows as n log(n) with its index, in basic blocks executed.

And what it may cost to verify payloads that several tensors share, and to walk through children in any order.

100,000 entries of one kind share what an archive of a few MB can hold once. A block is a few instructions; their number
is the same in every run.
"""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from c_programs import SOURCES, build
from costly_archives import ARCHIVES, N, repeated, start
from forge import Forge
from malformed import saved

pytestmark = pytest.mark.needs("gcc")

ALLOWANCE = 16  # times its size that an index may repeat its names, texts and lists (R30)
HOSTILE = ["names of tensors", "names of attributes", "texts", "short lists of texts", "chain of modules",
           "strided tensors of rank 64", "pool of NULs"]  # fmt: skip


def keys_alike(vector: str) -> Forge:
    """Give all attributes or modules names that differ in nothing, as long as the budget allows: sorting reads them."""
    f = start()
    column = repeated(f, vector, N // 5)
    begin, size = f.text(b"x" * (ALLOWANCE * column.itemsize))
    column["name"][1:], column["name_size"][1:] = begin, size
    if vector == "modules":
        column["key_size"][1:], column["parent"][1:] = size, 0
        column["end"] = np.arange(len(column)) + 1
        column["end"][0] = len(column)
        column["place"][1:] = np.arange(1, len(column))
        column["first_attribute"][2:] = len(f.columns["attributes"])
    return f


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cost")
    flags = ["-std=c99", "-O1"]
    counter = build("gcc", SOURCES / "cost.c", folder / "counter.o", "-c", "-DCOUNTER", *flags)
    return build("gcc", SOURCES / "cost.c", folder / "cost", "-fsanitize-coverage=trace-pc", *flags, str(counter))


def blocks(counting: Path, data: bytes, what: str = "verify") -> tuple[int, int]:
    """Return the result of verifying, or of another job of cost.c, and the blocks it takes."""
    path = counting.parent / "hostile.zcr"
    path.write_bytes(data)
    done = subprocess.run([counting, path, what], capture_output=True, text=True, check=True)
    path.unlink()
    status, count = done.stdout.split()
    return int(status), int(count)


def most(data: bytes) -> float:
    """Return how many blocks are allowed: of the archive and of what it may repeat, log(n) times each byte."""
    return 4 * (1 + ALLOWANCE) * len(data) * math.log2(N)


@pytest.mark.parametrize("name", HOSTILE)
def test_time_to_verify_is_bounded_by_the_index(counting: Path, name: str) -> None:
    data = ARCHIVES[name][0]().seal()
    assert blocks(counting, data)[1] < most(data)


@pytest.mark.parametrize("vector", ["attributes", "modules"])
def test_time_to_sort_names_that_are_alike_is_bounded_by_the_index(counting: Path, vector: str) -> None:
    data = keys_alike(vector).seal()
    status, count = blocks(counting, data)
    assert status == 36  # and so its names were sorted
    assert count < most(data)


def test_count_notices_work_that_grows_with_the_square(counting: Path) -> None:
    """Each of 100,000 names compared with each, or one of a MB looked at for each, would be far past the bound."""
    data = ARCHIVES["tensors"][0]().seal()
    status, count = blocks(counting, data)
    assert status == 0 and count > len(data)  # each byte of the index was looked at
    assert most(data) < N * N < N << 20


@pytest.mark.parametrize("tied", [True, False])
def test_bools_are_looked_through_once_for_all_that_share_them(counting: Path, tied: bool) -> None:
    """Both as one payload, and as payloads of the very same range."""
    size, views = 1 << 16, 300
    data = np.zeros(size, bool)
    archive = saved({f"t{i:03}": data if tied else data.copy() for i in range(views)})
    assert len(archive) < 2 * size
    assert len(Forge(archive).columns["payloads"]) == (1 if tied else views)
    status, verified = blocks(counting, archive)
    assert status == 0
    status, all_of_it = blocks(counting, archive, "payloads")
    assert status == 0
    assert size < all_of_it - verified < 10 * size < views * size


def backwards(count: int) -> bytes:
    """Return an archive whose tensors' places run against their numbers."""
    forged = Forge(saved({f"t{i:05}": np.zeros(1, np.uint8) for i in range(count)}))
    forged.columns["tensors"]["place"] = np.arange(count)[::-1]
    return forged.seal()


def test_a_walk_in_any_order_is_linear_with_memory_of_its_own_and_looks_at_places_alone_without(counting: Path) -> None:
    linear = []
    for count in (1000, 4000):
        status, walked = blocks(counting, backwards(count), "ordered")
        assert status == 128  # ZCR_NOT_FOUND, after the last
        linear.append(walked)
    assert linear[1] < 5 * linear[0] < 1000 * 1000
    status, walked = blocks(counting, backwards(1000), "walk")
    assert status == 128
    assert 1000**2 // 2 < walked < 20 * 1000**2 // 2  # to check each tensor takes more than 50
