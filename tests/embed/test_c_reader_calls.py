"""A C program reads by zcrecord.h what Python reads: elements, strided, packed and text; the tree; values.

The program also asks for what is not there: axes, payloads and sizes past the end.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from c_programs import SANITIZERS, SOURCES, build
from costly_archives import ARCHIVES, N, repeated, start
from forge import Forge
from malformed import saved

import zcrecord
from zcrecord import PackedTensor, Record, StringTensor
from zcrecord.archive.unflatten import unflatten
from zcrecord.tensors.packed import unpack_bits

pytestmark = pytest.mark.needs("gcc")

GOLDEN = Path(__file__).parents[1] / "conformance" / "valid"
NARROW = pytest.param(("-m32",), marks=pytest.mark.needs("gcc -m32"))


@pytest.fixture(scope="module", params=[(), NARROW], ids=["own", "-m32"])
def calls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = [*SANITIZERS, "-Wno-cast-align", *request.param]
    return build("gcc", SOURCES / "calls.c", tmp_path_factory.mktemp("calls") / "calls", "-std=c99", "-O1", *flags)


def shown(value: Any) -> str:
    """Return one value of an attribute as calls.c prints it."""
    if isinstance(value, str):
        return f"text:{value.encode().hex()}"
    if isinstance(value, bytes | memoryview):
        return f"bytes:{bytes(value).hex()}"
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def tensor_line(record: Record, name: str) -> str:
    """Return the line of one tensor."""
    value, info = record[name], record.info(name)
    if isinstance(value, StringTensor):
        elements = [f"'{text}'" for text in value.unpack().ravel().tolist()]
    elif isinstance(value, PackedTensor):
        raw = unpack_bits(value.packed, info.bits, prod(info.shape)).tolist()  # numpy may lack the type
        sign = 1 << info.bits - 1 if info.dtype.name.startswith("int") else 0
        elements = [str((x ^ sign) - sign) for x in raw]
    elif info.dtype.name == "float32":
        elements = [f"{x:g}" for x in value.ravel().tolist()]
    else:
        elements = [str(x) if info.dtype.name == "uint8" else "?" for x in value.ravel().tolist()]
    contiguous = not isinstance(value, np.ndarray) or value.flags.c_contiguous
    typed = {"float32": "f32", "uint8": "u8", "float64": "f64"}.get(info.dtype.name, "data")
    kind = typed if elements and contiguous else "none"
    return " ".join(["tensor", name, kind, str(len(elements)), str(value.nbytes), *elements])


class Module(NamedTuple):
    """A module's type name, and its children by their keys."""

    type_name: str
    items: list[tuple[str, Any]]


class Tensor(NamedTuple):
    """A tensor's number."""

    number: int


def lines(record: Record, module: Module, name: str = "") -> Iterator[str]:
    """Yield the lines of a module's children, in their order."""
    for key, value in module.items:
        full = f"{name}.{key}" if name else key
        if isinstance(value, Module):
            yield f"module {full} {value.type_name}"
            yield from lines(record, value, full)
        elif isinstance(value, Tensor):
            yield tensor_line(record, full)
        else:
            values = value if isinstance(value, list | tuple) else [value]
            yield " ".join([f"attribute {name}.{key}", *map(shown, values)])


def agree(calls: Path, path: Path) -> list[str]:
    """Check that the program prints what the package reads, in either order of walking; return its lines."""
    record = zcrecord.load_record(path)
    archive = record._archive
    root = unflatten(archive.index, 0, Tensor, archive.payload, lambda _, type_name, items: Module(type_name, items))
    for options in ([], ["ordered"]):
        done = subprocess.run([calls, path, *options], capture_output=True)
        assert done.returncode == 0, (done.returncode, done.stderr.decode())
        assert done.stdout.decode().splitlines() == list(lines(record, root))
    return done.stdout.decode().splitlines()


@pytest.mark.parametrize(
    "name", ["tiny", "nested", "views", "strings", "deduplicated", "dtypes", "alignment_16", "int4_bytes"]
)
def test_reads_elements_tree_and_values_as_python_does(calls: Path, name: str) -> None:
    agree(calls, GOLDEN / f"{name}.zcr")


def test_walks_in_the_order_of_places_whatever_the_numbers_are(calls: Path, tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full(2, i, np.uint8) for i in range(9)}
    forged = Forge(saved({**tensors, "a": 1, "b": 2, "m": {"x": 3}, "n": {"y": 4}}))
    forged.columns["tensors"]["place"][:] = [12, 3, 7, 0, 8, 1, 2, 6, 5]
    forged.columns["modules"]["place"][1:] = [11, 4]  # the attributes are at 9 and 10
    (tmp_path / "model.zcr").write_bytes(forged.seal())
    agree(calls, tmp_path / "model.zcr")


def test_a_view_has_the_bytes_of_its_elements_and_not_of_what_it_is_a_view_of(calls: Path, tmp_path: Path) -> None:
    """In C order at the end of a payload: a loop over that payload's size would leave the archive."""
    forged = Forge(saved({"w": np.arange(4096, dtype=np.uint8)}))
    strides = forged.add("strides", [1])
    forged.set("tensors", "w", dims=forged.add("dims", [4]), strides=strides, byte_offset=4092)
    (tmp_path / "model.zcr").write_bytes(forged.seal())
    assert agree(calls, tmp_path / "model.zcr") == ["tensor w u8 4 4 252 253 254 255"]


# Cost.


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
