"""Archives that each reader is tried on, and what is asked of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import malformed_attributes
import malformed_contents
import malformed_header
import malformed_index
import malformed_modules
import malformed_names
import malformed_payloads
import malformed_tensors
import numpy as np
from changed_bytes import regions, resealed, with_crc
from costly_archives import BIG, large, tensors
from forge import VECTORS, Forge, build_index
from malformed import Case, compact, plain, rich, saved
from readers import Level, Mode, Question

MALFORMED = (
    malformed_attributes, malformed_contents, malformed_header, malformed_index, malformed_modules, malformed_names,
    malformed_payloads, malformed_tensors,
)  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "conformance" / "valid"
MOSTLY: list[Level] = ["i", "i", "f"]
MODES: dict[str | None, Mode] = {None: "w", "prefix": "p", "suffix": "s"}
# Small ones with something of each kind; `nested` has all kinds of modules and values, and is the largest.
SMALL = ["tiny", "views", "strings", "deduplicated", "back_unsealed", "unknown_vector", "prefix", "suffix"]


def golden(name: str) -> tuple[bytes, Mode]:
    """Return a golden archive, and how it is to be opened."""
    embedded = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["embedded"]
    return (GOLDEN / f"{name}.zcr").read_bytes(), MODES[embedded]


def key_that_wraps(vector: str, parent_size: int) -> bytes:
    """R34: name a child shorter than its module, its key_size what is left of it, below 0, after module and dot.

    Its name ends the pool, and the index the archive: as many bytes as the module's name has are not behind it.
    """
    forged = Forge(saved({"m": {"t": np.ones(1)}} if vector == "tensors" else {"m": {"t": {"n": 1}}}), front=False)
    forged.rename("modules", "m", b"m" * parent_size).set("modules", 1, key_size=parent_size)
    row = 0 if vector == "tensors" else 2
    return forged.rename(vector, row, b"x").set(vector, row, key_size=(1 - 1 - parent_size) % 2**32).seal()


def shared_payload(data: bytes, *views: dict[str, int]) -> bytes:
    """Let tensors of several types, each a `dim` and perhaps strides, be made of the same bytes."""
    tied = np.frombuffer(data, np.uint8)
    forged = Forge(saved({f"t{i}": tied for i in range(len(views))}))
    for row, view in enumerate(views):
        fields = dict(view)
        forged.set("tensors", row, dims=forged.add("dims", [fields.pop("dim")]), **fields)
        if "strides" in fields:
            forged.set("tensors", row, strides=forged.add("strides", [view["strides"]]))
    return forged.seal()


def shared_by_strings_and_bools() -> Iterator[bytes]:
    """Yield payloads that are one, the other, both or none, used by both, either first (R71, R72)."""
    for ends in ((0, 2), (1, 0), (0, 1), (2, 1)):
        text = (b"ab" if 2 in ends else b"\1").ljust(8, b"\0")
        data = text + b"".join(end.to_bytes(8, "little") for end in ends)
        strings, bools = {"dtype": 64, "bits": 0, "dim": 1}, {"dtype": 1, "bits": 8, "dim": len(data)}
        yield from (shared_payload(data, *views) for views in ((strings, bools), (bools, strings), (bools, bools)))
    data = bytes([1, 0, 1, 0, 2])
    few, all_but_one, every = ({"dtype": 1, "bits": 8, "strides": 1, "dim": dim} for dim in (2, 4, 5))
    yield from (shared_payload(data, *views) for views in ((few, all_but_one), (few, every), (every, few)))


def sizes_below_two_ends() -> Iterator[bytes]:
    """Yield archives whose header, trailer or both are sealed and say that they are of fewer than 128 bytes."""
    for front in (True, False):
        for size in (0, 1, 64, 127):
            for end in ("ends", "header", "trailer"):
                forged = plain(front=front)
                getattr(forged, end)["archive_size"] = size
                yield forged.seal()
        forged = plain(front=front)
        forged.header = {"archive_size": 0, "index_size": 8, "payload_offset": 80, "index_crc": 0xDEADBEEF}
        yield forged.seal()  # were it unsealed, no more than ten bytes of it would be compared with the trailer


def corners() -> Iterator[bytes]:
    """Yield archives that readers with fixed widths and flags once took for something else."""
    yield from (key_that_wraps(vector, size) for vector in ("modules", "tensors") for size in (2, 70, 5000))
    yield from shared_by_strings_and_bools()
    yield from sizes_below_two_ends()


def catalogue() -> Iterator[bytes]:
    """Yield every archive that the tests of malformed archives forge, and corner cases."""
    yield from corners()
    starts = [plain(front=front, sealed=sealed) for front in (True, False) for sealed in (True, False)]
    starts += [rich(), compact()]
    ends = [start.seal() for start in starts]
    for module in MALFORMED:
        lists = [value for value in vars(module).values() if isinstance(value, list)]
        for case in [item for found in lists for item in found if isinstance(item, Case)]:
            for data in ends:
                forged = Forge(data)
                try:
                    case.change(forged)
                    yield forged.seal()
                except (LookupError, StopIteration, ValueError):
                    continue  # it changes what this archive does not have


def mixed(seed: int, count: int) -> Iterator[Question]:
    """Yield archives with a few numbers of their index changed, or a few of their bytes; their CRCs are right."""
    rng = random.Random(seed)
    starts = [rich(), compact(), plain(front=False)]
    whole = [start.seal() for start in starts] + [golden(name)[0] for name in ("views", "nested", "dtypes", "onnx")]
    for _ in range(count):
        level = rng.choice(MOSTLY)
        if rng.random() < 0.5:
            data = rng.choice(whole)
            places = regions(data)[1]
            changed = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 3))):
                at = rng.randrange(places.start, places.stop)
                changed[at] = rng.choice((0, 1, 2, 255, changed[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
            yield Question(resealed(bytes(changed)), "w", level)
            continue
        forged = Forge(rng.choice(whole[:3]))
        for _ in range(rng.choice((1, 1, 2, 3))):
            change_number(rng, forged)
        yield Question(forged.seal(), "w", level)


def change_number(rng: random.Random, forged: Forge) -> None:
    """Write one number into one column: a small one, one of another row, or one around its limits."""
    vector = rng.choice([name for name, column in forged.columns.items() if len(column)])
    column: Any = forged.columns[vector]
    dtype = VECTORS[vector][1]
    if dtype.names:
        field = rng.choice(dtype.names)
        column, dtype = column[field], dtype[field]
    bits = dtype.itemsize * 8
    top = 1 << bits if dtype.kind == "u" else 1 << (bits - 1)
    least = 0 if dtype.kind == "u" else -top
    wild = (top - 1, least, top // 2, min(top - 1, 1 << 56), rng.randrange(least, top))
    near = int(column[rng.randrange(len(column))])
    choices = (rng.randrange(8), near, min(near + 1, top - 1), max(near - 1, least), rng.choice(wild))
    column[rng.randrange(len(column))] = rng.choice(choices)


def wide() -> Iterator[bytes]:
    """Yield archives that speak of sizes past 2^32: the same in 32 bits as what is there, or nearly."""
    data = plain().seal()
    for field in (24, 32, 40, 48):
        for more in (1 << 32, 1 << 33, 1 << 63):
            number = int.from_bytes(data[field : field + 8], "little") + more
            end = with_crc(data[:field] + number.to_bytes(8, "little") + data[field + 8 : 60])
            yield end + data[64:-64] + end
    for vector, column in (("payloads", "offset"), ("payloads", "nbytes"), ("tensors", "byte_offset")):
        for row in range(2):
            forged = rich()
            forged.columns[vector][column][row] += np.uint64(1 << 32)
            yield forged.seal()
    for nbytes in (0, (1 << 64) - 64, (1 << 56) + 1):
        forged = rich()
        forged.set("payloads", forged.get("attributes", "blob", "value"), nbytes=nbytes)
        yield forged.seal()
    for name in ("dims", "strides", "words"):
        for row in range(2):
            forged = rich()
            forged.columns[name][row] += forged.columns[name].dtype.type(1 << 32)
            yield forged.seal()


def uneven() -> Iterator[bytes]:
    """Yield archives that break a rule which others mostly stand before."""
    forged = Forge(saved({}))
    forged.widen = 8
    yield forged.seal()  # R11: nothing but payload_offset is unaligned
    forged = rich()
    dims = [2, 3, *[1] * 63]
    yield forged.set("tensors", "w", rank=65, dims=forged.add("dims", dims)).seal()  # R47
    wide = Forge(saved({"w": np.zeros(1 << 16, np.complex128)}))
    pools = {"dims": wide.add("dims", [2] * 16), "strides": wide.add("strides", [1 << 56] * 16)}
    yield wide.set("tensors", "w", rank=16, **pools).seal()  # R53: the highest byte is past 2^64, at 0
    forged = plain()
    index = build_index(forged.columns, forged.digest_kind)
    table = int.from_bytes(index[:4], "little")
    index[:4] = (table + 2).to_bytes(4, "little")
    forged.index = index
    yield forged.seal()  # R19
    forged = plain()
    index = build_index(forged.columns, forged.digest_kind) + bytes(64)
    field = table + 8  # of the text, whose items may lie anywhere; the count may not
    at, size = len(index) - 63, len(forged.columns["text"])
    text = forged.columns["text"].tobytes()
    index += bytes(size + 8 - (len(index) + size) % 8)
    index[at : at + 4 + size] = size.to_bytes(4, "little") + text
    index[field : field + 4] = (at - field).to_bytes(4, "little")
    forged.index = index
    yield forged.seal()  # R22
    index = build_index(plain().columns, 1)
    index[10:12] = (8).to_bytes(2, "little")
    forged.index = index
    yield forged.seal()  # R21: the table ends before its fields
    forged.index = build_index(plain().columns, 1) + bytes(4)
    yield forged.seal()  # R10
    for log2 in (3, 17):
        forged = Forge(saved({}))
        forged.alignment_log2, forged.base_log2 = log2, max(log2, 6)
        yield forged.seal()  # R4
    for vector, name in (("attributes", "note"), ("metadata", "by")):
        yield rich().rename(vector, name, b"").seal()  # R29
    forged = Forge(saved({"w": np.ones(3), "blob": b"bytes"}))
    row = forged.get("attributes", "blob", "value")
    forged.payload = forged.payload[: forged.get("payloads", row, "offset")]
    yield forged.set("payloads", row, nbytes=0).seal()  # R56
    yield deep().seal()  # R40


def deep() -> Forge:
    """Nest 100 modules as an archive may, and one more in the innermost."""
    record: dict[str, Any] = {"n": 1}
    for _ in range(99):
        record = {"a": record}
    forged = Forge(saved(record))
    modules = forged.columns["modules"]
    assert len(modules) == 100
    modules["end"] += 1
    forged.columns["modules"] = np.concatenate((modules, modules[-1:]))
    forged.rename("modules", 100, b".".join([b"a"] * 100))
    return forged.set("modules", 100, parent=99, place=1, end=101, first_attribute=1)


def repeating() -> Iterator[bytes]:
    """Yield archives whose only fault is how often they repeat their pools (R30, R31); names differ in length."""
    long = 20_000
    for vector, record in (
        ("tensors", {f"k{i:02}": np.full(1, i, np.uint8) for i in range(20)}),
        ("attributes", {f"k{i:02}": i for i in range(20)}),
        ("modules", {f"k{i:02}": {"n": i} for i in range(20)}),
        ("metadata", {}),
    ):
        for short in (False, True):
            forged = Forge(saved(record, metadata={f"k{i:02}": i for i in range(20)}))
            start, _ = forged.text(b"x" * long)
            column = forged.columns[vector][-20:]
            sizes = np.arange(20) + (1 if short else long - 20)
            column["name"], column["name_size"] = start + long - sizes, sizes
            if "key_size" in (column.dtype.names or ()):
                column["key_size"] = sizes
            yield forged.seal()
    forged = Forge(saved({f"k{i:02}": {"n": i} for i in range(20)}))
    start, size = forged.text(b"x" * long)
    forged.columns["modules"]["type_name"], forged.columns["modules"]["type_name_size"] = start, size
    yield forged.seal()
    forged = Forge(saved({f"k{i:02}": "text" for i in range(20)}))
    start, size = forged.text(b"x" * long)
    forged.columns["attributes"]["value"] = start | size << 32
    yield forged.seal()
    forged = Forge(saved({f"k{i:02}": [1, 2] for i in range(20)}))
    forged.columns["attributes"]["value"] = forged.add("words", [7] * long) | long << 32
    yield forged.seal()


def bools() -> Forge:
    """Let as many tensors as `strings` share one payload of bools."""
    return large(tensors(BIG, dtype=1, bits=8))
