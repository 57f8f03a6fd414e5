"""What a C program reads by zcrecord.h is what Python reads: elements, strided, packed and text; the tree; values."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from c_programs import SANITIZERS, SOURCES, build

import zcrecord
from zcrecord import PackedTensor, Record, StringTensor
from zcrecord.unfold import unflatten

pytestmark = pytest.mark.needs("gcc")

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = [*SANITIZERS, "-Wno-cast-align"]
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
    elements: list[str] = []
    if isinstance(value, StringTensor):
        elements = [f"'{text}'" for text in value.unpack().ravel().tolist()]
    elif isinstance(value, PackedTensor):
        raw = value.unpack()
        signed = info.dtype.name.startswith("int")
        elements = [str(int(x)) for x in (raw.astype(np.int8) if signed else raw.view(np.uint8)).ravel()]
    elif info.dtype.name == "float32":
        elements = [f"{x:g}" for x in value.ravel().tolist()]
    else:
        elements = [str(x) if info.dtype.name == "uint8" else "?" for x in value.ravel().tolist()]
    count = len(elements)
    contiguous = not isinstance(value, np.ndarray) or value.flags.c_contiguous
    typed = {"float32": "f32", "uint8": "u8", "float64": "f64"}.get(info.dtype.name, "data")
    return " ".join(["tensor", name, typed if count and contiguous else "none", str(count), *elements])


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


@pytest.mark.parametrize(
    "name", ["tiny", "nested", "views", "strings", "deduplicated", "dtypes", "alignment_16", "int4_bytes"]
)
def test_reads_elements_tree_and_values_as_python_does(calls: Path, name: str) -> None:
    path = GOLDEN / f"{name}.zcr"
    done = subprocess.run([calls, path], capture_output=True)
    assert done.returncode == 0, (done.returncode, done.stderr.decode())
    record = zcrecord.load_record(path)
    archive = record._archive
    root = unflatten(archive.index, 0, Tensor, archive.payload, lambda _, type_name, items: Module(type_name, items))
    assert done.stdout.decode().splitlines() == list(lines(record, root))
