"""FORMAT.md, CONVENTIONS.md and zcrecord.fbs as data: tables, rules, the hex example; structs, enums and vectors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FORMAT = (ROOT / "schema" / "FORMAT.md").read_text(encoding="utf-8")
CONVENTIONS = (ROOT / "schema" / "CONVENTIONS.md").read_text(encoding="utf-8")
PAGES = f"{FORMAT}\n{CONVENTIONS}"
FBS = re.sub(r"//.*", "", (ROOT / "schema" / "zcrecord.fbs").read_text(encoding="utf-8"))

NAMES = {"ubyte": "u8", "ushort": "u16", "uint": "u32", "ulong": "u64", "int": "i32", "long": "i64"}
SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i32": 4, "i64": 8}
LEVELS = {"open", "entry", "index", "full", "writers"}


class Field(NamedTuple):
    offset: int
    type: str
    name: str


class Vector(NamedTuple):
    number: int
    name: str
    item: str


def section(title: str) -> str:
    """Return the text under a heading, up to the next of its level or above."""
    found = re.search(rf"^(##+) {re.escape(title)}.*?\n(.*?)(?=^##+ |\Z)", PAGES, re.MULTILINE | re.DOTALL)
    assert found, f"no page has a section '{title}'"
    return found[2]


def table(title: str) -> list[dict[str, str]]:
    """Return the rows of the one table in a section, by column; code marks are taken off."""
    lines = [line.strip().strip("|").split("|") for line in section(title).splitlines() if line.startswith("|")]
    cells = [[cell.strip().strip("`") for cell in line] for line in lines]
    assert cells, f"section '{title}' has no table"
    head, rule, *rows = cells
    assert all(set(cell) == {"-"} for cell in rule), f"section '{title}' has more than a table"
    return [dict(zip(head, row, strict=True)) for row in rows]


def rules() -> dict[int, tuple[str, str]]:
    """Return level and text of every rule, its lines joined, by its number."""
    found = re.findall(r"^\*\*R(\d+)\.\*\* \[(\w+)\] (.*?)(?=\n\n|\Z)", PAGES, re.MULTILINE | re.DOTALL)
    return {int(number): (level, " ".join(text.split())) for number, level, text in found}


def hex_example() -> bytes:
    """Return the bytes of the tiny archive, after checking that its lines are numbered."""
    block = re.search(r"```hex\n(.*?)```", FORMAT, re.DOTALL)
    assert block, "FORMAT.md has no hex example"
    data = bytearray()
    for line in block[1].splitlines():
        at, digits = line.split("|", 1)[0].split("  ", 1)
        assert int(at, 16) == len(data), f"line {at} of the hex example is out of place"
        data += bytes.fromhex(digits)
    return bytes(data)


def enums() -> dict[str, dict[str, int]]:
    found = re.findall(r"enum (\w+) : ubyte \{(.*?)\}", FBS, re.DOTALL)
    return {name: {key: int(code) for key, code in re.findall(r"(\w+) = (\d+)", body)} for name, body in found}


def structs() -> dict[str, list[Field]]:
    """Return the schema's structs, offsets worked out as FlatBuffers and C do."""
    out: dict[str, list[Field]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\}", FBS, re.DOTALL):
        fields: list[Field] = []
        end = 0
        for field, kind in re.findall(r"(\w+):(\w+);", body):
            kind = "u8" if kind in enums() else NAMES.get(kind, kind)
            at = -(-end // alignment_of(kind, out)) * alignment_of(kind, out)
            fields.append(Field(at, kind, field))
            end = at + size_of(kind, out)
        out[name] = fields
    return out


def size_of(kind: str, known: dict[str, list[Field]]) -> int:
    if kind in SIZES:
        return SIZES[kind]
    last = known[kind][-1]
    end, alignment = last.offset + size_of(last.type, known), alignment_of(kind, known)
    return -(-end // alignment) * alignment


def alignment_of(kind: str, known: dict[str, list[Field]]) -> int:
    return SIZES.get(kind) or max(alignment_of(f.type, known) for f in known[kind])


def vectors() -> list[Vector]:
    """Return the fields of the root table; the one that is no vector comes with its enum's name."""
    body = re.search(r"table Record \{(.*?)\}", FBS, re.DOTALL)
    assert body
    found = re.findall(r"(\w+):\[?(\w+)\]?[^;]*\(id: (\d+)\)", body[1])
    return [Vector(int(number), name, NAMES.get(kind, kind)) for name, kind, number in found]
