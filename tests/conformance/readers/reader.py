"""Reader of tests/conformance in Python, by the package's API; README.md beside has the protocol."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import zcrecord
from zcrecord.codec.layout import NONE
from zcrecord.dtypes import by_code

KINDS = {"mapping": 1, "list": 2, "tuple": 3, "object": 4, "numbered": 5}
TYPES = {type(None): 0, bool: 1, int: 2, float: 4, str: 5, memoryview: 6}


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


def values(value: Any) -> dict[str, Any]:
    form = 1 if isinstance(value, list) else 2 if isinstance(value, tuple) else 0
    items = list(value) if form else [value]
    kind = TYPES[type(items[0])] if items else 0
    if kind == 2 and max(items) >= 2**63:
        kind = 3  # UINT
    if kind == 4:
        items = [struct.pack(">d", item).hex() for item in items]
    return {"type": kind, "form": form, "values": [bytes(v).hex() if kind == 6 else v for v in items]}


def contents(record: zcrecord.Record) -> dict[str, Any]:
    modules: list[dict[str, Any]] = []
    attributes: list[dict[str, Any]] = []
    path: list[dict[str, Any]] = []  # from the record itself to the module whose children come
    for depth, key, child in record.walk():
        if depth:
            path[depth - 1]["children"].append(str(key))
        if isinstance(child, zcrecord.ModuleInfo):
            told = {"name": child.name, "kind": KINDS[child.kind], "type_name": child.type_name, "children": []}
            modules.append(told)
            path[depth:] = [told]
            attributes += [{"module": child.name, "key": k, **values(v)} for k, v in child.attributes.items()]
    metadata = [{"key": key, **values(value)} for key, value in record.metadata.items()]
    order = {name: number for number, name in enumerate(record.modules)}
    modules.sort(key=lambda told: order[told["name"]])
    tensors = [{**tensor(record, i.name), "module": i.module, "tied": i.tied} for i in record.infos()]
    return {"tensors": tensors, "modules": modules, "attributes": attributes, "metadata": metadata,
            "content_digest": record.content_digest()}  # fmt: skip


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
