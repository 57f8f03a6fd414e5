"""The golden archives: small ones of every kind, and beside each what it must load as, in JSON.

The JSON comes from the values that went in, by code of its own (names, bytes, content digest), never from reading the
archive. Of the archive itself only the header's fields and the places of tensors are copied, by the byte tables of
schema/FORMAT.md; at each place the bytes that went in have to lie.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import io
import json
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from forge import NONE, read_index

import zcrecord
from zcrecord import dtypes, onnx
from zcrecord.codec import entries, layout
from zcrecord.codec.digests import digest_of
from zcrecord.onnx.protobuf.reader import encode_field
from zcrecord.storage.files import open_sink
from zcrecord.tensors.packed import PackedTensor, pack_bits
from zcrecord.writing import module_tree, writers

from . import committed
from .golden_contents import Content, describe

FOLDER = Path("tests/conformance/valid")
FOLDERS: tuple[Path, ...] = (FOLDER,)
# The element types of the archive `dtypes`, which never changes; each later one has archives of its own.
FIRST = {*range(1, 10), *range(16, 22), *range(32, 37), *range(48, 55), 64}
LATER = [kind for kind in dtypes.DTYPES if kind.code not in FIRST]
Bytes = Callable[[], bytes]


class Case(NamedTuple):
    """One archive: how it is made, what it must hold, and how it is opened."""

    about: str
    build: Bytes
    content: Content
    embedded: str | None = None


class Point(NamedTuple):
    """A named tuple of a tensor and a value."""

    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    """A class of which only name and fields are stored."""

    rate: float
    scale: Any


def saved(record: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    zcrecord.save_record(record, file, **options)
    return file.getvalue()


def f32(*shape: int) -> Any:
    """Return 0, 0.5, 1, ... in some shape."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 2


def nested_record() -> dict[str, Any]:
    """Return modules of every kind, values of every type, and one tensor twice."""
    shared = f32(2, 3)
    values = {
        "nil": None, "no": False, "yes": True, "least": -(2**63), "most": 2**64 - 1, "pi": 3.25, "inf": float("inf"),
        "minus_zero": -0.0, "text": "na\u00efve\0text", "no_text": "", "blob": b"\x00\x01\xff", "no_blob": b"",
        "ints": [1, 2, -3], "uints": [0, 2**63], "floats": (0.5, -0.5), "texts": ["a", "", "\u00e9"],
        "flags": [True, False], "nils": [None, None], "blobs": [b"xyz", b"", b"xyz"], "nothing": [], "no_items": (),
    }  # fmt: skip
    layer = np.array([-1, 1], np.int8)
    return {
        "encoder": {"weight": shared, "name": "first", "bias": np.ones(3), "layers": [{"w": layer}, {"drop": 0.5}]},
        "head": shared,
        "values": values,
        "mixed": [1, "two", np.array(3.0), [4, 5], None, {"deep": {"er": np.array(7, np.uint16)}}],
        "point": Point(f32(2), 2),
        "config": Config(0.25, f32(1)),
        "pair": (f32(4), {}),
        "last": 7,
    }


def numbered_record() -> dict[Any, Any]:
    """Return mappings with integers as keys, in an optimizer's state and elsewhere, and values without a type."""
    moments = [{"step": np.float32(4 + i).reshape(()), "exp_avg": f32(3 + i)} for i in range(2)]
    return {
        "state": dict(enumerate(moments)),
        "milestones": {2: 1, 4: 2},
        "keys": {-1: "least", 0: None, "01": "text", "-0": "text", "name": {10: f32(1)}, 2**64 - 1: 1.5, -(2**63): []},
        "rng": {"state": 2**100 + 1, "inc": -(2**64), "list": [2**64, 5]},
        "phase": 0.5 - 2j,
        7: {"7": f32(2)},
    }


def python_values() -> dict[str, Any]:
    """Return values of Python that conventions make modules of."""
    return {
        "queue": collections.deque([f32(2), {"w": f32(1)}], 5),
        "seen": {"b", "a"},
        "by_pair": {(0, "w"): f32(2), True: 1.5, None: []},
        "run": SimpleNamespace(lr=0.5, out=PurePosixPath("runs/7")),
        "started": datetime.datetime(2026, 11, 26, 22, 15, 0, 7, datetime.UTC),
        "took": datetime.timedelta(1, 2, 3),
        "ordered": collections.OrderedDict(b=1, a=2),
        "history": collections.defaultdict(list, loss=[0.5, 0.25]),
    }


def elements_of(kinds: Iterable[dtypes.DType]) -> dict[str, Any]:
    """Return seven elements of each type, their bits 0, 1, 2, ... byte by byte."""
    out: dict[str, Any] = {}
    for kind in kinds:
        if kind is dtypes.STRING:
            out[kind.name] = np.array(["", "one", "tw\u00f6"])
            continue
        most = 1 if kind.name == "bool" else (1 << kind.bits) - 1 if kind.packed else 255
        raw = np.arange(7 * -(-kind.bits // 8), dtype=np.uint8) & np.uint8(most)
        known = kind.numpy is not None
        out[kind.name] = raw.view(kind.numpy) if known else PackedTensor(pack_bits(raw, kind.bits), kind, raw.shape)
    return out


def views() -> Content:
    """Return views of one base, a transpose, a broadcast, gaps, rank 0, no elements, the other byte order."""
    base = f32(6, 4)
    record = {
        "base": base, "rows": base[2:4], "column": base[:, 1], "corner": base[5, 3, ...], "backwards": base[::-1],
        "transposed": np.asfortranarray(f32(3, 2)), "gaps": f32(8)[::2], "repeated": np.broadcast_to(f32(1), (2, 3)),
        "scalar": np.array(2.5), "empty": np.zeros((0, 5), np.int16), "swapped": np.arange(3, dtype=">f4"),
        "high": np.arange(8, dtype=np.uint8).reshape((1, 2) * 3),
    }  # fmt: skip
    strides = {"rows": (4, 1), "column": (4,), "corner": (), "backwards": (-4, 1), "transposed": (1, 3)}
    ties = [["base", "rows", "column", "corner", "backwards"]]
    return Content(record, ties=ties, strides=strides)


def deduplicated() -> Content:
    """Return equal bytes that are not tied, of one type and of two."""
    record = {"a": f32(4), "b": f32(4), "c": f32(4).view(np.uint8), "tied": None, "other": f32(3)}
    record["tied"] = record["a"]
    return Content(record, ties=[["a", "tied"]], stored_once=[["a", "b", "c"]])


def streamed(file: Any, metadata: dict[str, Any]) -> None:
    """Write a back-indexed archive, tensors of two modules in turn."""
    out = writers.StreamWriter(file, alignment=64)
    tree = module_tree.ModuleTreeBuilder()
    for path, array in (("b", "w"), f32(5)), (("a", "w"), f32(2, 2)), (("b", "v"), f32(5)), (("top",), f32(0)):
        out.begin(array.nbytes)
        out.write(array.tobytes())
        tree.tensor(path, entries.TensorLayout(dtypes.by_name["float32"].code, 32, array.shape), out.end())
    tree.attribute(("note",), b"streamed")
    found = tree.entries()
    found.metadata = [entries.AttributeEntry(key, layout.NONE, 0, value) for key, value in metadata.items()]
    out.finish(found)


BLOCKED = {"large": (np.arange(4100) * 7 % 251).astype(np.uint8), "small": f32(3)}


def checksums() -> list[int]:
    """Return the words of `zcrecord.blocks` for a payload of 4100 bytes, in blocks of 4096."""
    octets = BLOCKED["large"].tobytes()
    blocks = [octets[start : start + 4096] for start in range(0, len(octets), 4096)]
    return [4096, 1, digest_of(octets), len(octets), *map(digest_of, blocks)]


def blocked() -> bytes:
    """Return an archive with checksums of blocks, which no writer of ours makes for so small a payload."""
    file, tree = io.BytesIO(), module_tree.ModuleTreeBuilder()
    with open_sink(file) as opened:
        out = writers.StreamWriter(opened, alignment=64)
        for name, array in BLOCKED.items():
            kind = dtypes.from_numpy(array.dtype)
            tree.tensor((name,), entries.TensorLayout(kind.code, kind.bits, array.shape), out.store(array))
        found = tree.entries()
        found.metadata = [entries.AttributeEntry("zcrecord.blocks", layout.NONE, 0, checksums())]
        out.finish(found)
    return file.getvalue()


def back(sealed: bool) -> bytes:
    """Return the same archive with its header sealed, or as it comes out of a pipe, which only writes."""
    file = io.BytesIO()
    with open_sink(file if sealed else SimpleNamespace(write=file.write)) as opened:
        streamed(opened, {"kind": "stream"})
    return file.getvalue()


STREAMED = {"b": {"w": f32(5), "v": f32(5)}, "a": {"w": f32(2, 2)}, "top": f32(0), "note": b"streamed"}
STREAM_ORDER = ["b.w", "a.w", "b.v", "top"]


def onnx_model(value: bytes) -> bytes:
    """Return a ModelProto of one initializer, `fc.weight`; `value` is the field with its values."""
    tensor = b"\x08\x02\x10\x01" + encode_field(8, b"fc.weight") + value
    graph = encode_field(2, b"g") + encode_field(5, tensor)
    return b"\x08\x08" + encode_field(7, graph) + encode_field(8, b"\x10\x0d")


def converted() -> bytes:
    file = io.BytesIO()
    onnx.convert(io.BytesIO(onnx_model(encode_field(9, f32(2).tobytes()))), file)
    return file.getvalue()


STUB = b"\x70\x01" + encode_field(13, encode_field(1, b"zcrecord") + encode_field(2, b"0"))


def kinds_record() -> dict[str, Any]:
    """Return the same children in modules of every kind and of two type names, and an empty module."""
    x = [f32(1) + i for i in range(7)]
    return {
        "mapping": {"0": x[0], "1": {}}, "numbered": {0: x[1], 1: {}}, "list": [x[2], {}], "tuple": (x[3], {}),
        "named": Point(x[4], {}), "object": Config(0.5, x[5]), "fields": {"x": x[6], "y": {}}, "empty": {},
    }  # fmt: skip


def cases() -> dict[str, Case]:
    """Return every case by the name of its files."""
    nested, numbers = nested_record(), numbered_record()
    every = elements_of(kind for kind in dtypes.DTYPES if kind not in LATER)
    later = {kind.name: elements_of([kind]) for kind in LATER}
    seen, equal = views(), deduplicated()
    strings = {"words": np.array([["a", "bc"], ["", "d\u00e9"]]), "none": np.array([], dtype=str), "one": np.array("x")}
    plain = {"w": f32(2, 3), "inner": {"b": np.ones(2, np.int64)}}
    small = {"w": np.array([1, 2, 3], np.uint8)}
    metadata = {"format": "pt", "blob": b"\1\2", "tags": ["x", "y"], "steps": 12, "none": None}
    whole = Content(plain)
    dots = {"a": {}, "a.b": f32(2), "c": {}, "c.d": {}, "e": {"f": {}}, "e.f.g": 1}
    lists = {"mixed": [f32(2), {"w": f32(3)}, 3], "point": Point(f32(1), 2), "inner": [[f32(4), "x"], [[1, 2], f32(5)]],
             "ways": ({"w": f32(6)}, {"w": f32(7)})}  # fmt: skip
    apart = {"a": {"b": f32(2)}, "c": {"d": {}}, "e": {"f": {"g": 1}}}
    return {
        "tiny": Case("the example of FORMAT.md", lambda: saved(small, alignment=16), Content(small)),
        "empty": Case("no tensors at all", lambda: saved({}), Content({})),
        "nested": Case(
            "every kind of module and type of value, children mixed, a tie",
            lambda: saved(nested, metadata=metadata),
            Content(nested, ties=[["encoder.weight", "head"]], metadata=metadata),
        ),
        "numbered": Case(
            "keys that are integers, wide integers, a complex number", lambda: saved(numbers), Content(numbers)
        ),
        "python_values": Case(str(python_values.__doc__), lambda: saved(python_values()), Content(python_values())),
        "kinds": Case(str(kinds_record.__doc__), lambda: saved(kinds_record()), Content(kinds_record())),
        "lists": Case("lists and tuples, some in others", lambda: saved(lists), Content(lists)),
        "dots": Case("dots in keys", lambda: saved(dots), Content(dots)),
        "dots_nested": Case("the full names of `dots`, in other modules", lambda: saved(apart), Content(apart)),
        "dtypes": Case("every element type", lambda: saved(every), Content(every)),
        **{
            f"dtype_{name}": Case(f"the element type {name}", partial(saved, record), Content(record))
            for name, record in later.items()
        },
        "views": Case(str(views.__doc__), lambda: saved(seen.record), seen),
        "deduplicated": Case("equal bytes stored once", lambda: saved(equal.record), equal),
        "strings": Case("string tensors", lambda: saved(strings), Content(strings)),
        "back_sealed": Case(
            "index at the back, seekable sink", lambda: back(True),
            Content(STREAMED, order=STREAM_ORDER, metadata={"kind": "stream"}, stored_once=[["b.w", "b.v"]]),
        ),
        "back_unsealed": Case(
            "index at the back, a pipe", lambda: back(False),
            Content(STREAMED, order=STREAM_ORDER, metadata={"kind": "stream"}),
        ),
        "blocks": Case(
            "checksums of the blocks of a payload", blocked,
            Content(BLOCKED, metadata={"zcrecord.blocks": checksums()}),
        ),
        "onnx": Case(
            "an ONNX model", converted,
            Content({"fc": {"weight": f32(2)}, "onnx.graph": onnx_model(STUB)}),
        ),
        "alignment_16": Case(
            "weakest alignment, no digests", lambda: saved(plain, alignment=16, digest="none"), whole
        ),
        "alignment_4096": Case("payloads on pages", lambda: saved(plain, alignment=4096), whole),
        "prefix": Case("followed by other bytes", lambda: saved(plain) + b"\xaa" * 100, whole, "prefix"),
        "suffix": Case("appended to other bytes", lambda: b"\xbb" * 128 + saved(plain), whole, "suffix"),
    }  # fmt: skip


def expected(case: Case, data: bytes) -> dict[str, Any]:
    """Return the JSON beside an archive."""
    archive = data if case.embedded != "prefix" else data[: int.from_bytes(data[48:56], "little")]
    archive = archive[len(archive) - int.from_bytes(archive[-16:-8], "little") :]
    trailer = archive[-64:]
    fields: dict[str, Any] = {"version": trailer[8], "alignment": 1 << trailer[9], "base_alignment": 1 << trailer[10]}
    for at, field in enumerate(("required_features", "index_offset", "index_size", "payload_offset", "archive_size")):
        fields[field] = int.from_bytes(trailer[16 + 8 * at : 24 + 8 * at], "little")
    fields["index_crc"] = int.from_bytes(trailer[56:60], "little")
    told = describe(case.content)
    put_places(told["tensors"], archive, fields)
    about = {"about": case.about, "embedded": case.embedded, "sealed": archive[:64] == trailer, **fields}
    return about | told


def put_places(tensors: list[dict[str, Any]], archive: bytes, header: dict[str, Any]) -> None:
    """Add to each tensor where its element [0, ..., 0] lies in the archive, after a look at what lies there."""
    start = header["index_offset"]
    _, columns = read_index(archive[start : start + header["index_size"]])
    for tensor, row in zip(tensors, columns.get("tensors", ()), strict=True):
        tensor["offset"] = None
        if int(row["payload"]) != NONE:
            place = header["payload_offset"] + int(columns["payloads"]["offset"][row["payload"]])
            tensor["offset"] = place + int(row["byte_offset"])
        if stored(tensor, archive) != tensor["elements"]:
            raise AssertionError(f"tensor {tensor['name']!r}: other bytes lie at its place")


def stored(tensor: dict[str, Any], archive: bytes) -> str:
    """Return the elements at a tensor's place, in hexadecimal."""
    if tensor["strides"] is None or not tensor["nbytes"]:
        start = tensor["offset"] or 0
        return archive[start : start + tensor["nbytes"]].hex()
    item = tensor["bits"] // 8
    steps = (
        sum(at * stride for at, stride in zip(index, tensor["strides"], strict=True))
        for index in np.ndindex(*tensor["shape"])
    )
    places = (tensor["offset"] + step * item for step in steps)
    return b"".join(archive[place : place + item] for place in places).hex()


def text_of(told: dict[str, Any]) -> str:
    """Return JSON with one line for each tensor, module and value: short, and to be compared by people."""
    lines = []
    for key, value in told.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n".join(f"  {json.dumps(item)}" for item in value)
            lines.append(f' "{key}": [\n{items}\n ]')
        else:
            lines.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


@cache
def files() -> dict[Path, str | bytes]:
    """Return every archive, and what it must load as."""
    out = committed(FOLDER)
    for name, case in cases().items():
        data = case.build()
        out[FOLDER / f"{name}.zcr"] = data
        out[FOLDER / f"{name}.json"] = text_of(expected(case, data))
    return out
