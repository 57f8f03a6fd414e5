"""Hostile ONNX models: one for each rule that `convert` demands of their bytes, and tricks that lean on several.

Each is tried by path, as a stream, by a scan, and as a command. onnx itself is given the same files. Numbers of rules
are those of schema/SECURITY.md.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import zstandard
from onnx import TensorProto as T
from onnx_models import field, varint, wire_model

import zcrecord
from attacks import catalogue
from attacks.catalogue import Attack, Door, Doors, Refused, file
from attacks.doors import command
from zcrecord import LimitError, RecordError
from zcrecord.cli.dispatch import onnx2zc_main
from zcrecord.errors import FormatError, OnnxError
from zcrecord.onnx import convert, scan

MIB = 1 << 20
OLD = "old.zcr"

# What every door but the streams' replaces, or must not.


def old_archive(path: Path) -> Path:
    dest = path.with_name(OLD)
    zcrecord.save_record({"old": np.arange(3)}, dest, durable=False)
    return dest


def converting(path: Path, convert: Callable[..., object], **options: Any) -> Callable[[], object]:
    """Convert over an old archive, which must stay where the file is refused, with nothing left beside it."""
    dest = old_archive(path)
    before = {*os.listdir(path.parent)}

    def act() -> None:
        try:
            convert(path, dest, force=True, durable=False, **options)
        except RecordError:
            assert list(zcrecord.load_record(dest)) == ["old"], "the old archive was replaced"
            assert {*os.listdir(path.parent)} == before, "something was left behind"
            raise

    return act


def converted(path: Path, **options: Any) -> Callable[[], object]:
    return converting(path, convert, **options)


class Into(io.RawIOBase):
    """A stream that cannot be read back, which is what a pipe is."""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return memoryview(data).nbytes  # type: ignore[arg-type]


def streamed(path: Path) -> Callable[[], object]:
    def act() -> None:
        with path.open("rb", buffering=0) as source:
            convert(source, Into())

    return act


def scanned(path: Path) -> Callable[[], object]:
    """Scan without mapping, and read every tensor; nothing compressed, which a scan does not take."""
    with path.open("rb") as file:
        packed = file.read(4).startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd"))

    def act() -> None:
        if packed:
            return
        with scan(path, mmap=False) as found:
            for name in found:
                found[name]

    return act


DOORS: dict[str, Door] = {
    "convert": converted,
    "convert a stream": streamed,
    "scan": scanned,
    "onnx2zc": command(onnx2zc_main, "--force", after=lambda path: [os.fspath(path.with_name("out.zcr"))]),
}
ALL_BUT_SCAN = frozenset(DOORS) - {"scan"}


def peer(read: Callable[[Path], object]) -> Door:
    """Return the door of another library, each of whose errors is a refusal."""

    def act(path: Path) -> None:
        try:
            read(path)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None

    return lambda path: partial(act, path)


CHECKER = peer(lambda path: onnx.checker.check_model(os.fspath(path)))
PEERS: dict[str, dict[str, Door]] = {"onnx": {"onnx.load": peer(onnx.load), "onnx.checker": CHECKER}}

# The parts of a tensor.
FLOATS = np.arange(1, 7, dtype="<f4")
DIMS = field(1, 2) + field(1, 3)
FLOAT = field(2, T.FLOAT)
INT64 = field(2, T.INT64)
NAME = field(8, b"w")
RAW = field(9, FLOATS.tobytes())
WHOLE = DIMS + FLOAT + NAME + RAW
DOC = field(12, b"")  # two bytes that mean nothing


def model(*initializers: bytes) -> bytes:
    """A model whose graph has a name, without which the checker of onnx looks at nothing else."""
    return wire_model(*initializers, graph=field(2, b"g"))


def one(code: int) -> bytes:
    return field(1, 1) + field(2, code) + NAME


def in_attribute(*fields: bytes) -> bytes:
    return field(7, field(1, [field(3, b"n"), field(5, [field(1, b"a"), *fields])]))


def nested(depth: int) -> bytes:
    inner = field(5, one(T.FLOAT) + field(9, bytes(4)))
    for _ in range(depth):
        inner = field(1, field(3, b"n") + field(5, field(1, b"a") + field(6, inner)))
    return field(7, inner)


def typed(count: int, body: bytes, code: int = T.INT64) -> bytes:
    return model(field(1, count) + field(2, code) + NAME + body)


HARMLESS = file(lambda: model(WHOLE), "m.onnx")


def attack(
    rules: str, name: str, make: Callable[[], bytes], message: str, error: type[RecordError] | None = OnnxError,
    doors: Doors = None,
) -> Attack:  # fmt: skip
    return catalogue.attack(name, rules, file(make, "m.onnx"), error, message, doors, PEERS)


def squeezed(*parts: tuple[bytes, int]) -> bytes:
    """A gzip stream of bytes, each so many times, made without holding them."""
    squeezer = zlib.compressobj(9, wbits=31)
    return b"".join([squeezer.compress(part) for part, times in parts for _ in range(times)]) + squeezer.flush()


def graph_bomb() -> bytes:
    """A graph of 400 MiB in 400 KB: texts that no conversion needs and every skeleton keeps."""
    text = field(6, b" " * MIB)
    return squeezed((text, 400), (model(WHOLE), 1))


def greedy_frame() -> bytes:
    """A zstd frame that asks for a window of 3.75 GiB."""
    frame = bytearray(zstandard.ZstdCompressor().compress(model(WHOLE)))
    return bytes(frame[:4]) + bytes([0, 0xAF]) + bytes(10)


BROKEN = [
    attack("O1", "nothing", lambda: b"", "empty, not an ONNX model"),
    attack("O1", "a zip file", lambda: b"PK\x03\x04" + bytes(60), "this is a zip file"),
    attack("O1", "a web page", lambda: b"<!DOCTYPE html>" + bytes(60), "this is a web page"),
    attack("O1", "an archive already", lambda: b"\x89ZCR\r\n\x1a\n" + bytes(60), "zcrecord archive, not an ONNX"),
    attack("O2", "no graph", lambda: b"\x08\x09", "no graph"),
    attack("O3", "a varint of 11 bytes", lambda: field(7, b"\x08" + b"\x80" * 10 + b"\x01"), "varint of more than 10"),
    attack("O3", "a packed varint of 12 bytes", lambda: typed(1, field(7, b"\x80" * 11 + b"\x01")),
           "varint of more than 10 bytes"),
    attack("O3", "a varint without an end", lambda: field(7, b"\x08" + b"\x80" * MIB), "varint of more than 10"),
    attack("O4", "a tag of 35 bits", lambda: field(7, b"\xff\xff\xff\xff\x7f\x00"), "a tag of more than 32 bits"),
    attack("O5", "field 0", lambda: field(7, b"\x00\x00"), "a field with number 0"),
    attack("O6", "wire type 6", lambda: field(7, b"\x2e\x00"), "wire type 6, which does not exist"),
    attack("O6", "wire type 7", lambda: field(7, b"\x2f\x00"), "wire type 7, which does not exist"),
    attack("O7", "a length past the end of its message", lambda: field(7, b"\x2a\x7fxx"), "reaches past the end"),
    attack("O4", "a length of 2^63", lambda: field(7, b"\x2a" + varint(2**63)), "a length of more than 5 bytes"),
    attack("O4", "a length of 2^64 - 1", lambda: field(7, b"\x2a" + varint(2**64 - 1)), "a length of more than 5"),
    attack("O4", "a tag of 6 bytes", lambda: b"\xba\x80\x80\x80\x80\0\0", "a tag of more than 32 bits, or 5 bytes"),
    attack("O7", "values of 2^31 - 1 bytes in a short model",
           lambda: field(7, b"\x2a\x7f" + DIMS + FLOAT + NAME + b"\x4a" + varint(2**31 - 1)), "reaches past the end"),
    attack("O8", "a graph of 2 GiB", lambda: b"\x3a" + varint(2**31), "more than protobuf's 2 GiB"),
    attack("O8", "a text of 2^35 - 1 bytes", lambda: b"\x32" + varint(2**35 - 1), "more than protobuf's 2 GiB"),
    attack("O9", "a group that never ends", lambda: field(7, b"\x2b\x08\x01"), "group 5 never ends"),
    attack("O9", "a group that ends as another", lambda: field(7, b"\x2b\x34"), "group 5 ends as group 6"),
    attack("O9", "the end of a group that was not started", lambda: field(7, b"\x2c"), "which was never started"),
    attack("O10", "graphs 34 deep", lambda: nested(34), "nested more than 100 deep"),
    attack("O10", "graphs 5,000 deep", lambda: nested(5000), "nested more than 100 deep"),
    attack("O10", "groups 100,000 deep", lambda: model() + varint(100 << 3 | 3) * 100_000, "nested more than 100"),
    attack("O11", "a model cut in its values", lambda: model(WHOLE)[:-9], "stream ends|file ends|ends inside"),
    attack("O11", "a graph cut after its length", lambda: b"\x3a\x64", "ends|no graph"),
    attack("O12", "a node that ends inside a field", lambda: field(7, field(1, b"\x0a\x05")), "node ends|reaches"),
    attack("O12", "an attribute past its node", lambda: field(7, field(1, b"\x2a\x05\x0a")), "message it is in"),
    attack("O12", "an attribute that ends inside a field", lambda: field(7, field(1, field(5, b"\x0a\x05"))),
           "attribute ends inside a field|reaches past"),
    attack("O13", "a name of 64 KiB and 1", lambda: model(DIMS + FLOAT + field(8, b"n" * 65537) + RAW),
           "a name of 65537 bytes"),
    attack("O14", "no data_type", lambda: model(DIMS + NAME + RAW), "no data_type"),
    attack("O14", "data_type 99", lambda: model(DIMS + field(2, 99) + NAME + RAW), "99 is not known here"),
    attack("O14", "data_type -1", lambda: model(DIMS + field(2, -1) + NAME + RAW), "is not known here"),
    attack("O14", "half a million empty tensors", lambda: model(*[b""] * (1 << 19)), "no data_type"),
    attack("O15", "65 dims", lambda: model(field(1, 1) * 65 + FLOAT + NAME + RAW), "64 dimensions"),
    attack("O15", "a million packed dims", lambda: model(field(1, b"\1" * MIB) + FLOAT + NAME + RAW), "64 dimensions"),
    attack("O16", "a negative dim", lambda: model(field(1, -2) + FLOAT + NAME + RAW), "a negative dimension"),
    attack("O16", "two negative dims, 6 together", lambda: model(field(1, -2) + field(1, -3) + FLOAT + NAME + RAW),
           "a negative dimension"),
    attack("O16", "a negative dim beside a zero", lambda: model(field(1, 0) + field(1, -2) + FLOAT + NAME),
           "a negative dimension"),
    attack("O17", "dims of 2^64 elements and more", lambda: model(field(1, 2**40) * 3 + FLOAT + NAME + RAW),
           r"more than 2\^56 bytes", LimitError),
    attack("O17", "dims that come to 6 modulo 2^64",
           lambda: model(field(1, 2**62 + 3) + field(1, 2) + FLOAT + NAME + RAW), r"more than 2\^56", LimitError),
    attack("O17", "a huge dim beside a zero", lambda: model(field(1, 0) + field(1, 2**60) + FLOAT + NAME),
           r"more than 2\^56", LimitError),
    attack("O18", "packed dims cut", lambda: model(field(1, b"\x80") + FLOAT + NAME + RAW), "dims end inside"),
    attack("O19", "raw_data twice", lambda: model(WHOLE + RAW), "raw_data twice"),
    attack("O19", "raw_data and float_data", lambda: model(WHOLE + field(4, FLOATS.tobytes())), "besides raw"),
    attack("O19", "string_data and raw_data",
           lambda: model(one(T.STRING) + field(6, b"x") + field(9, b"x")), "besides string_data"),
    attack("O20", "floats in int64_data", lambda: typed(6, field(7, b"\1" * 6), T.FLOAT), "keeps its values"),
    attack("O20", "strings in raw_data", lambda: typed(1, field(9, b"x"), T.STRING), "keeps its values"),
    attack("O20", "a type after values it does not allow", lambda: model(field(7, b"\1" * 6) + DIMS + FLOAT),
           "keeps its values"),
    attack("O21", "raw_data too short", lambda: model(DIMS + FLOAT + NAME + field(9, bytes(20))), "got 20 in raw"),
    attack("O21", "raw_data too long", lambda: model(DIMS + FLOAT + NAME + field(9, bytes(25))), "got 25 in raw"),
    attack("O21", "4 PiB in no field", lambda: model(field(1, 2**50) + FLOAT + NAME), "got 0 in no value field"),
    attack("O21", "4 PiB in one byte", lambda: typed(2**50, field(7, b"\1")), "takes .* got"),
    attack("O21", "3 elements of 4 bits in one byte", lambda: typed(3, field(9, b"\x21"), T.UINT4),
           "takes 2 bytes, got 1"),
    attack("O21", "5 elements of 2 bits in one byte", lambda: typed(5, field(9, b"\x21"), T.UINT2),
           "takes 2 bytes, got 1"),
    attack("O21", "an empty tensor with values", lambda: typed(0, field(9, bytes(8))), "takes 0 bytes, got 8"),
    attack("O21", "too few strings", lambda: typed(2, field(6, b"x"), T.STRING), "takes .* got"),
    attack("O22", "float_data of 23 bytes", lambda: typed(6, field(4, bytes(23)), T.FLOAT), "a multiple of 4"),
    attack("O23", "int8 of 128", lambda: typed(1, field(5, varint(128)), T.INT8), "out of range for int8"),
    attack("O23", "uint8 of -1", lambda: typed(1, field(5, varint(-1)), T.UINT8), "out of range for uint8"),
    attack("O23", "uint32 of 2^32", lambda: typed(1, field(11, varint(2**32)), T.UINT32), "out of range for"),
    attack("O24", "int64_data cut", lambda: typed(1, field(7, b"\x80")), "ends inside a varint"),
    attack("O24", "int32_data cut before its data_type, then more of it",
           lambda: model(field(5, b"\x81") + field(5, 1) + field(1, 1) + field(2, T.INT32) + NAME),
           "ends inside a varint"),
    attack("O25", "values before their type", lambda: model(field(5, bytes(MIB + 1)) + field(1, 1) + INT64 + NAME),
           "before the data_type that explains them"),
    attack("O26", "bools of 2 before their type", lambda: model(field(9, b"\2") + one(T.BOOL)),
           "bools other than 0 and 1"),
    attack("O27", "values around those of another",
           lambda: in_attribute(field(5, DIMS + FLOAT + field(4, FLOATS[:2].tobytes())), field(10, DIMS + FLOAT + RAW),
                                field(5, field(4, FLOATS[2:].tobytes()))), "values in two places"),
    attack("O28", "a type that changes after values",
           lambda: in_attribute(field(5, field(2, T.INT4) + field(9, b"\x21")), field(10, DIMS + FLOAT + RAW),
                                field(5, field(1, 2))), "change after the values"),
    attack("O28", "two types", lambda: in_attribute(field(5, DIMS + field(2, T.STRING)), field(5, FLOAT)),
           "data_type 8 in one part, and 1 in another"),
    attack("O29", "a segment", lambda: model(WHOLE + field(3, field(1, 0))), "it is one segment"),
    attack("O30", "data_location 2", lambda: model(WHOLE + field(14, 2)), "neither DEFAULT nor EXTERNAL"),
    attack("O31", "an initializer without a name", lambda: model(DIMS + FLOAT + RAW), "no name"),
    attack("O31", "a name that is not UTF-8", lambda: model(DIMS + FLOAT + RAW + field(8, b"\xff\xfe")), "UTF-8"),
    attack("O31", "a name with NUL", lambda: model(DIMS + FLOAT + RAW + field(8, b"a\0b")), "with NUL in it"),
    attack("O32", "two initializers of one name", lambda: model(WHOLE, WHOLE), "two initializers of one graph"),
    attack("O32", "two of one hostile name", lambda: model(*[DIMS + FLOAT + RAW + field(8, b"\x1b]0;w\7\n")] * 2),
           r"called '\\x1b\]0;w\\x07\\n'"),
    attack("O32", "20,000 initializers without a name", lambda: model(*[field(1, 0) + FLOAT] * 20_000),
           "two initializers of one graph|no name"),
    attack("O33", "names of nested parts",
           lambda: field(7, field(1, field(3, b"n" * 60_000) + field(5, field(10, one(T.INT8) + field(9, b"1")) * 60))),
           "flatten the model", LimitError),
    attack("O34", "gzip cut", lambda: gzip.compress(model(WHOLE))[:-9], "ends|truncated|damaged", FormatError,
           ALL_BUT_SCAN),
    attack("O34", "gzip changed", lambda: gzip.compress(model(WHOLE))[:-8] + bytes(8), "damaged", FormatError,
           ALL_BUT_SCAN),
    attack("O34", "zstd that wants 3.75 GiB", greedy_frame, "memory|window|damaged", FormatError, ALL_BUT_SCAN),
    attack("O34", "a graph of 400 MiB in 400 KB", graph_bomb, "expand to a graph of more", LimitError, ALL_BUT_SCAN),
]  # fmt: skip

# Legal, and no dearer than what they are: each took many times as long, or as much memory, as it should at some time.
COSTLY = [
    attack("O21", "50,000 single values, each behind another field",
           lambda: typed(50_000, (field(7, 1) + DOC) * 50_000), "", None),
    attack("O21", "20,000 single floats, each behind another field",
           lambda: typed(20_000, (varint(4 << 3 | 5) + bytes(4) + DOC) * 20_000, T.FLOAT), "", None),
    attack("O21", "20,000 runs of one value, packed and single by turns",
           lambda: typed(20_000, (field(7, b"\1") + field(7, 1)) * 10_000), "", None),
    attack("O25", "80,000 runs before their type",
           lambda: model(field(5, b"\1") * 80_000 + field(1, 80_000) + field(2, T.INT8) + NAME), "", None),
    attack("O25", "50,000 single values before their type",
           lambda: model((field(5, 1) + DOC) * 50_000 + one(T.INT8)[2:] + field(1, 50_000)), "", None),
    attack("O33", "names of 99 parts, 64 KiB each",
           lambda: model(*[field(1, 1) + FLOAT + field(9, bytes(4)) + field(8, (b"%04d" % i + b"a" * 640 + b".")
                                * 99 + b"a") for i in range(32)]), "", None),
    attack("O9", "100,000 empty groups", lambda: model() + (b"\xa3\x06\xa4\x06") * 100_000, "", None),
    attack("O10", "groups 99 deep, a thousand times",
           lambda: model() + (b"\xa3\x06" * 99 + b"\xa4\x06" * 99) * 1000, "", None),
    attack("O12", "100,000 empty attributes", lambda: field(7, field(1, field(5, b"") * 100_000)), "", None),
    attack("O31", "30,000 tensors of one element",
           lambda: model(*[field(1, 1) + FLOAT + field(8, b"%x" % i) + field(9, bytes(4)) for i in range(30_000)]),
           "", None),
]  # fmt: skip

ATTACKS = tuple(BROKEN + COSTLY)
