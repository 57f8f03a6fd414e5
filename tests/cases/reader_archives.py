"""Archives that each reader is tried on, and what is asked of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import malformed_attributes
import malformed_contents
import malformed_header
import malformed_index
import malformed_modules
import malformed_names
import malformed_payloads
import malformed_tensors
import numpy as np
from changed_bytes import with_crc
from costly_archives import BIG, large, tensors
from forge import Forge
from malformed import Case, compact, plain, rich, saved
from readers import Mode, Question

MALFORMED = (
    malformed_attributes, malformed_contents, malformed_header, malformed_index, malformed_modules, malformed_names,
    malformed_payloads, malformed_tensors,
)  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "conformance" / "valid"
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
    """Yield archives that a fuzzer changed, whose CRCs are right, each asked about in one way."""
    from tools.fuzz.differential import mutations  # here, since the fuzzers take these archives, too

    starts = [rich().seal(), compact().seal(), plain(front=False).seal()]
    starts += [golden(name)[0] for name in ("views", "nested", "dtypes", "onnx")]
    yield from islice(mutations(starts, seed), count)


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
    forged = Forge(saved({"w": np.zeros(1 << 16, np.complex128)}))
    pools = {"dims": forged.add("dims", [2] * 16), "strides": forged.add("strides", [1 << 56] * 16)}
    yield forged.set("tensors", "w", rank=16, **pools).seal()  # R53: the highest byte is past 2^64, at 0


def repeating() -> Iterator[bytes]:
    """Yield archives whose only fault is how often they repeat their pools (R30, R31); names differ in length."""
    long, keys = 20_000, [f"k{i:02}" for i in range(20)]
    for vector, record in (
        ("tensors", {key: np.full(1, i, np.uint8) for i, key in enumerate(keys)}),
        ("attributes", dict.fromkeys(keys, 1)),
        ("modules", {key: {"n": 1} for key in keys}),
        ("metadata", {}),
    ):
        for short in (False, True):
            forged = Forge(saved(record, metadata=dict.fromkeys(keys, 1)))
            start, _ = forged.text(b"x" * long)
            column = forged.columns[vector][-20:]
            sizes = np.arange(20) + (1 if short else long - 20)
            column["name"], column["name_size"] = start + long - sizes, sizes
            if "key_size" in (column.dtype.names or ()):
                column["key_size"] = sizes
            yield forged.seal()
    forged = Forge(saved({key: {"n": 1} for key in keys}))
    start, size = forged.text(b"x" * long)
    forged.columns["modules"]["type_name"], forged.columns["modules"]["type_name_size"] = start, size
    yield forged.seal()
    forged = Forge(saved(dict.fromkeys(keys, "text")))
    start, size = forged.text(b"x" * long)
    forged.columns["attributes"]["value"] = start | size << 32
    yield forged.seal()
    forged = Forge(saved({key: [1, 2] for key in keys}))
    forged.columns["attributes"]["value"] = forged.add("words", [7] * long) | long << 32
    yield forged.seal()


def bools() -> Forge:
    """Let as many tensors as `strings` share one payload of bools."""
    return large(tensors(BIG, dtype=1, bits=8))
