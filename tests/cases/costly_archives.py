"""Archives that cost a reader much if it is careless: many or large tensors, names and lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from forge import NONE, Forge
from malformed import saved

N = 100_000
LONG = 1 << 20
BIG = 1 << 26


def write_twins(path: Path, count: int, nbytes: int, filler: int = 0) -> None:
    """Write an archive of payloads w0, w1, ... that are one range; and of the tensor `last`, if it has any bytes."""
    record = {f"w{i}": np.full(1, i % 256, np.uint8) for i in range(count)}
    forged = Forge(saved(record | ({"last": np.zeros(1, np.uint8)} if filler else {})))
    payloads, tensors = forged.columns["payloads"], forged.columns["tensors"]
    payloads["offset"], payloads["nbytes"], payloads["digest"], forged.digest_kind = 0, nbytes, 0, 0
    tensors["dims"], tensors["payload"] = forged.add("dims", [nbytes]), np.arange(len(tensors))
    if filler:
        payloads["offset"][-1], payloads["nbytes"][-1] = nbytes, filler
        tensors["dims"][-1] = forged.add("dims", [filler])
    forged.payload = bytearray(nbytes + filler)
    path.write_bytes(forged.seal())


def start() -> Forge:
    return Forge(saved({"a": np.ones(4, np.uint8), "m": {"n": 1}}, metadata={"k": "v"}))


def repeated(f: Forge, vector: str, count: int = N) -> Any:
    """Repeat the last row of a vector; returns the vector."""
    column = f.columns[vector]
    f.columns[vector] = column = np.concatenate((column[:-1], np.repeat(column[-1:], count)))
    if "place" in (column.dtype.names or ()) and vector != "metadata":
        column["place"][-count:] = np.arange(count)
    return column


def long_names(vector: str, field: str = "name") -> Forge:
    """Let all entries share one span of a MB."""
    f = start()
    begin, size = f.text(b"x" * LONG)
    column = repeated(f, vector)
    column[field][1:], column[f"{field}_size"][1:] = begin, size
    if vector == "tensors":
        column["key_size"][1:] = size
        f.columns["by_name"] = np.arange(len(column), dtype="<u4")
    if vector == "modules":
        column["end"] = np.arange(len(column)) + 1
        column["end"][0] = len(column)
    return f


def chain() -> Forge:
    f = start()
    column = repeated(f, "modules")
    column["end"], column["parent"] = len(column), np.arange(len(column), dtype="<i8") - 1 & NONE
    return f


def long_values(form: int, size: int, *, text: bool) -> Forge:
    """Let all attributes share one text, one list of integers, or one list of texts."""
    f = start()
    column = repeated(f, "attributes")
    word = 0
    if text:
        begin, bytes_ = f.text(b"x" * (40 if form else LONG))
        word = begin | bytes_ << 32
    if form:
        word = f.add("words", np.full(LONG // 8, word, "<u8")) | size << 32
    column["type"], column["form"], column["value"] = 5 if text else 2, form, word
    return f


def tensors(*dims: int, strided: bool = False, count: int = N, **fields: int) -> Forge:
    """Return a valid archive of many tensors that share one payload, dims and strides."""
    f = Forge(saved({"a": np.ones(4, np.uint8)}))
    begin = f.add("text", np.frombuffer(b"".join(b"%06d\0" % i for i in range(count)), np.uint8))
    column = repeated(f, "tensors", count)
    column["name"], column["name_size"], column["key_size"] = begin + np.arange(count) * 7, 6, 6
    column["name"][-1], column["name_size"][-1], column["key_size"][-1] = *f.text(b"a"), 1
    column["dims"], column["rank"] = f.add("dims", dims), len(dims)
    for field, value in fields.items():
        column[field] = value
    if strided:
        column["strides"] = f.add("strides", [1] * len(dims))
    f.columns["by_name"] = np.arange(count, dtype="<u4")
    return f


def nuls() -> Forge:
    f = start()
    f.text(bytes(8 << 20))
    return f


ONES = [1] * 63
TAKES = "^index: its names, texts and lists take "
ALIKE, HUGE = "two of its children have the key 'n'", r"its shape claims more than 2\^56 bytes"
ARCHIVES: dict[str, tuple[Callable[[], Forge], str, str]] = {
    "names of tensors": (lambda: long_names("tensors"), "LimitError", TAKES),
    "names of modules": (lambda: long_names("modules"), "LimitError", TAKES),
    "type names": (lambda: long_names("modules", "type_name"), "LimitError", TAKES),
    "names of attributes": (lambda: long_names("attributes"), "LimitError", TAKES),
    "names of metadata": (lambda: long_names("metadata"), "LimitError", TAKES),
    "texts": (lambda: long_values(0, 0, text=True), "LimitError", TAKES),
    "lists": (lambda: long_values(1, LONG // 8, text=False), "LimitError", TAKES),
    "lists of texts": (lambda: long_values(1, LONG // 8, text=True), "LimitError", TAKES),
    "short lists": (lambda: long_values(1, 31, text=False), "FormatError", ALIKE),
    "short lists of texts": (lambda: long_values(1, 10, text=True), "FormatError", ALIKE),
    "chain of modules": (chain, "LimitError", "^modules: nested more than 100 deep"),
    "pool of NULs": (nuls, "", ""),
    "tensors": (lambda: tensors(4), "", ""),
    "tensors of rank 64": (lambda: tensors(*ONES, 4), "", ""),
    "strided tensors of rank 64": (lambda: tensors(*ONES, 4, strided=True), "", ""),
    "tensors of 2^60 bytes": (lambda: tensors(2**60), "LimitError", f"'000000': {HUGE}"),
    "tensors of 2^(64*63) bytes": (lambda: tensors(*[2**63] * 64), "LimitError", HUGE),
    "tensors of no payload": (lambda: tensors(4, payload=NONE - 1), "FormatError", "payload 4294967294 is not in the"),
}


def strings(count: int = N) -> Forge:
    return large(tensors(BIG // 8 - 1, count=count, dtype=64, bits=0))


def large(f: Forge) -> Forge:
    """Make the one payload 64 MB of zeros: bools, or strings that are all empty."""
    f.payload = bytearray(BIG)
    f.columns["payloads"]["nbytes"] = BIG
    return f.digest()


def alike(f: Forge) -> Forge:
    """Give each tensor a payload of its own, all of the very same range."""
    rows = f.columns["tensors"]
    f.columns["payloads"] = np.repeat(f.columns["payloads"][:1], len(rows))
    rows["payload"] = np.arange(len(rows))
    return f
