"""A C program reads by zcrecord.h what Python reads: elements, strided, packed and text; the tree; values.

The program also asks for what is not there: axes, payloads and sizes past the end.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from c_programs import SANITIZERS, SOURCES, build
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
