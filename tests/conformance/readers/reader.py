"""Reader of tests/conformance in Python, by the package's API; README.md beside has the protocol."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import zcrecord
from zcrecord.archive.unflatten import attribute_entries
from zcrecord.codec.layout import NONE
from zcrecord.dtypes import by_code

KINDS = {"mapping": 1, "list": 2, "tuple": 3, "object": 4, "numbered": 5}
FLOAT, PAYLOAD = 4, 6


def tensor(record: zcrecord.Record, name: str) -> dict[str, Any]:
    """Everything that a tensor's own entry tells: `Record.info` asks for its ties, too, which touch does not."""
    archive = record.archive
    row = archive.row(archive.find(name))
    at, elements, strides = None, b"", archive.strides(row)
    if row.payload != NONE:
        at = archive.header.payload_offset + int(archive.index.payloads["offset"][row.payload]) + row.byte_offset
        known = strides is not None and row.dtype in by_code
        elements = record[name].tobytes() if known else bytes(record.raw(name))
    return {"name": name, "dtype": row.dtype, "bits": row.bits, "shape": archive.shape(row), "strides": strides,
            "offset": at, "nbytes": len(elements), "elements": elements.hex()}  # fmt: skip


def values(value: Any, kind: int, form: int) -> dict[str, Any]:
    """A value as it is told; the type of an integer or of an empty list stands in its entry alone."""
    items = list(value) if form else [value]
    if kind == FLOAT:
        items = [struct.pack(">d", item).hex() for item in items]
    return {"type": kind, "form": form, "values": [bytes(v).hex() if kind == PAYLOAD else v for v in items]}


def types(record: zcrecord.Record, rows: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Type and form of each attribute or item of metadata, by the name of its module and its key."""
    ix = record.archive.index
    modules = {i: ix.text_of(row) for i, row in enumerate(ix.modules)} | {NONE: ""}
    return {(modules[int(row["parent"])], ix.text_of(row)): (int(row["type"]), int(row["form"])) for row in rows}


def digest(record: zcrecord.Record) -> str | None:
    try:
        return record.content_digest()
    except zcrecord.LimitError:
        return None  # R76


def contents(record: zcrecord.Record) -> dict[str, Any]:
    ix = record.archive.index
    modules: list[dict[str, Any]] = []
    attributes: list[dict[str, Any]] = []
    of_attribute, of_metadata = (types(record, rows) for rows in (ix.attributes, ix.metadata))
    path: list[dict[str, Any]] = []  # from the record itself to the module whose children come
    for depth, key, child in record.walk():
        if depth:
            path[depth - 1]["children"].append(str(key))
        if isinstance(child, zcrecord.ModuleInfo):
            told = {"name": child.name, "kind": KINDS[child.kind], "type_name": child.type_name, "children": []}
            modules.append(told)
            path[depth:] = [told]
            for key, value in child.attributes.items():
                attributes.append({"module": child.name, "key": key, **values(value, *of_attribute[child.name, key])})
    own = attribute_entries(ix, ix.metadata, record.archive.payload)  # with the checksums of blocks
    metadata = [{"key": a.key, **values(a.value, *of_metadata["", a.key])} for a in own]
    order = {name: number for number, name in enumerate(record.modules)}
    modules.sort(key=lambda told: order[told["name"]])
    tensors = [{**tensor(record, i.name), "module": i.module, "tied": i.tied} for i in record.infos()]
    return {"tensors": tensors, "modules": modules, "attributes": attributes, "metadata": metadata,
            "content_digest": digest(record)}  # fmt: skip


def found(record: zcrecord.Record, name: str) -> dict[str, Any] | None:
    try:
        return tensor(record, name) if name in record else None
    except zcrecord.RecordError as error:
        return {"accepted": False, "message": str(error)}


def answer(level: Any, embedded: Any, path: str, *names: str) -> dict[str, Any]:
    try:
        data = Path(path).read_bytes()
        record = zcrecord.load_record(data, verify=level, embedded=None if embedded == "whole" else embedded)
        told = {"tensors": [found(record, name) for name in names]} if level == "touch" else contents(record)
        return {"accepted": True, **told}
    except zcrecord.RecordError as error:
        return {"accepted": False, "message": str(error)}


if __name__ == "__main__":
    for line in sys.stdin.buffer:
        print(json.dumps(answer(*line.decode().rstrip("\n").split("\t"))), flush=True)
