"""Malformed safetensors files: each fault is one typed error, here and, but for its gaps, with safetensors itself.

No file costs more memory than a small constant times its length, and none leaves an archive behind.
"""

from __future__ import annotations

import io
import json
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exchange import MIB, MOST, cost, entry, file_of, peer, peer_told, read, refused, tensor, told
from exhaustive import rounds, some
from hypothesis import given, settings
from hypothesis import strategies as st

import zcrecord
from zcrecord.errors import FormatError, LimitError, RecordError, SourceError, UnsupportedError, VersionError
from zcrecord.foreign import safetensors_header as header
from zcrecord.foreign.safetensors_header import MAX_HEADER
from zcrecord.formats import convert

HUGE = 10**30
HEADERS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "0 bytes are too few"),
    "shorter than its first number": (b"\0" * 7, "7 bytes are too few"),
    "header too large": (file_of("{}", length=MAX_HEADER + 1), f"its header would have {MAX_HEADER + 1} bytes"),
    "header past the end": (file_of("{}", length=3), r"its header of 3 bytes ends past the end of the file \(10\)"),
    "header of 2^64 - 1 bytes": (b"\xff" * 8 + b"{}", f"would have {2**64 - 1} bytes"),
    "no header": (file_of(""), "byte 0x8: a header starts with '{'"),
    "space before the header": (file_of(" {}"), "byte 0x8: a header starts with '{'"),
    "header not UTF-8": (file_of(b'{"\xff":1}'), "byte 0xa: the header is not UTF-8"),
    "header cut": (file_of('{"w":'), "byte 0xd: ends where '{' is due"),
    "header an array": (file_of("[]"), "a header starts with '{'"),
    "name without quotes": (file_of("{w:1}"), "byte 0x9: expected '\"', got 'w'"),
    "name that does not end": (file_of('{"w'), "byte 0xa: no string of JSON"),
    "name with a raw newline": (file_of('{"a\nb":1}'), "no string of JSON"),
    "name with a lone surrogate": (file_of(r'{"\ud800":1}'), "lone surrogates"),
    "no colon": (file_of('{"w" 1}'), "expected ':', got '1'"),
    "no comma": (file_of('{"w":' + json.dumps(tensor(0, 1)) + '"v":1}', b"\0"), "expected ',', got '\"'"),
    "comma at the end": (file_of('{"w":' + json.dumps(tensor(0, 1)) + ",}", b"\0"), "expected '\"', got '}'"),
    "something behind the header": (file_of("{}x"), "byte 0xa: something behind the header's object"),
    "NUL behind the header": (file_of("{}\0\0"), "something behind the header's object"),
    "empty name": (file_of({"": tensor(0, 1)}, b"\0"), "a name that is empty or has NUL"),
    "name with NUL": (file_of({"a\0b": tensor(0, 1)}, b"\0"), "a name that is empty or has NUL"),
    "name twice": (file_of('{"w":' + json.dumps(tensor(0, 1)) + ', "w" :' + json.dumps(tensor(0, 1)) + "}", b"\0"),
                   "tensor 'w': byte 0x44: this name is there twice"),
    "name twice, once escaped": (
        file_of('{"w":' + json.dumps(tensor(0, 1)) + r',"\u0077":' + json.dumps(tensor(0, 1)) + "}", b"\0"),
        "tensor 'w': .* this name is there twice",
    ),
    "entry that is no object": (entry("[]"), "tensor 'w': byte 0xd: expected '{', got '\\['"),
    "entry empty": (entry("{}"), "one of dtype, shape and data_offsets is missing"),
    "depth bomb": (entry("[" * 50_000), "expected '{', got '\\['"),
    "depth bomb of objects": (entry('{"dtype":' * 50_000), "expected '\"', got '{'"),
    "depth bomb in a shape": (entry('{"shape":' + "[" * 50_000), r"expected a whole number from 0 on, got '\['"),
    "dtype missing": (entry('{"shape":[2],"data_offsets":[0,2]}'), "one of dtype, shape and data_offsets is missing"),
    "shape missing": (entry('{"dtype":"U8","data_offsets":[0,2]}'), "one of dtype, shape and data_offsets is missing"),
    "offsets missing": (entry('{"dtype":"U8","shape":[2]}'), "one of dtype, shape and data_offsets is missing"),
    "unknown field": (entry('{"dtype":"U8","shape":[2],"data_offsets":[0,2],"strides":[1]}'),
                      "field 'strides' is unknown, or there twice"),
    "field twice": (entry('{"dtype":"U8","dtype":"I8"}'), "field 'dtype' is unknown, or there twice"),
    "unknown dtype": (entry(json.dumps(tensor(0, 2, "Q4"))), "dtype 'Q4' is not known; it knows BOOL, U8"),
    "dtype a number": (entry('{"dtype":8}'), "expected '\"', got '8'"),
    "shape a number": (entry('{"dtype":"U8","shape":2}'), "expected '\\[', got '2'"),
    "negative dimension": (entry(json.dumps(tensor(0, 2, shape=[-2]))), "from 0 on, got '-2'"),
    "fractional dimension": (entry(json.dumps(tensor(0, 2, shape=[2.0]))), "from 0 on, got '2.0'"),
    "exponent": (entry('{"shape":[2e0]}'), "from 0 on, got '2e0'"),
    "leading zero": (entry('{"shape":[02]}'), "from 0 on, got '02'"),
    "dimension in other digits": (entry('{"shape":[\u0662]}'), "from 0 on, got '\u0662'"),
    "huge number": (entry(json.dumps(tensor(0, 2, shape=[HUGE]))), "a number of 31 digits"),
    "number of a million digits": (entry('{"shape":[' + "9" * 1_000_000 + "]}"), "a number of 1000000 digits"),
    "rank 65": (entry(json.dumps(tensor(0, 1, shape=[1] * 65)), b"\0"), "more than 64 dimensions"),
    "product beside a zero": (entry(json.dumps(tensor(0, 0, shape=[0, 2**60, 2**60])), b""),
                              "tensor 'w': its shape .* claims more than 2\\^56 bytes"),
    "one offset": (entry('{"dtype":"U8","shape":[2],"data_offsets":[2]}'), "data_offsets are not two numbers"),
    "three offsets": (entry('{"data_offsets":[0,2,3]}'), "more than 2 data_offsets"),
    "offsets inverted": (entry(json.dumps(tensor(2, 0, shape=[2]))), r"data_offsets \[2, 0\] are the wrong way round"),
    "negative offset": (entry('{"data_offsets":[-1,2]}'), "from 0 on, got '-1'"),
    "offset of 2^64": (entry(json.dumps(tensor(0, 2**64, shape=[2]))), f"data_offsets .0, {2**64}. end past the last"),
    "size below shape": (entry(json.dumps(tensor(0, 2, shape=[3]))), r"shape \(3,\) of uint8 takes 3 bytes, .* say 2"),
    "size above shape": (entry(json.dumps(tensor(0, 2, shape=[1]))), r"shape \(1,\) of uint8 takes 1 bytes, .* say 2"),
    "size of no dimensions": (entry(json.dumps(tensor(0, 2, shape=[]))), r"shape \(\) of uint8 takes 1 bytes"),
    "partial bytes": (entry(json.dumps(tensor(0, 2, "F4", [3]))),
                      "3 elements of float4_e2m1fn do not fill whole bytes"),
    "bytes before the first": (entry(json.dumps(tensor(1, 2))), "0 is where it has to start: it leaves a hole"),
    "hole": (file_of({"a": tensor(0, 1), "b": tensor(2, 3)}, b"\0" * 3),
             "tensor 'b': .* 1 is where it has to start: it leaves a hole before it"),
    "overlap": (file_of({"a": tensor(0, 2), "b": tensor(1, 3)}, b"\0" * 3),
                "tensor 'b': .* 2 is where it has to start: it overlaps the tensor before it"),
    "empty tensor in a hole": (file_of({"a": tensor(0, 2), "b": tensor(3, 3)}, b"\0" * 2),
                               "tensor 'b': data_offsets .3, 3. end past the last of 2 bytes"),
    "empty tensor inside another": (file_of({"a": tensor(0, 2), "b": tensor(1, 1)}, b"\0" * 2),
                                    "tensor 'b': .* it overlaps the tensor before it"),
    "bytes missing": (file_of({"w": tensor(0, 3)}, b"\0" * 2), "end past the last of 2 bytes; is it truncated?"),
    "bytes behind": (file_of({"w": tensor(0, 2)}, b"\0" * 3), "1 bytes behind the last tensor belong to none"),
    "bytes of no tensor": (file_of("{}", b"\0"), "1 bytes behind the last tensor belong to none"),
    "metadata twice": (file_of('{"__metadata__":{},"__metadata__":{}}'),
                       "tensor '__metadata__': byte 0x1b: this name is there twice"),
    "metadata that is a tensor": (file_of({"__metadata__": tensor(0, 0)}), "metadata 'shape' is no string"),
    "metadata null": (file_of({"__metadata__": None}), "expected '{', got 'n'"),
    "metadata a number": (file_of({"__metadata__": {"a": 1}}), "metadata 'a' is no string"),
    "metadata with a name twice": (file_of('{"__metadata__":{"a":"","a":""}}'), "metadata 'a' is there twice"),
    "metadata with an empty name": (file_of({"__metadata__": {"": "x"}}), "a name in the metadata that is empty"),
    "metadata with NUL in a name": (file_of({"__metadata__": {"a\0": "x"}}), "a name in the metadata that is empty"),
    "metadata with a lone surrogate": (file_of(r'{"__metadata__":{"a":"\udc00"}}'), "lone surrogates"),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer, not a safetensors file"),
    "GGUF": (b"GGUF" + bytes(60), "this is a GGUF file"),
}  # fmt: skip


@pytest.mark.parametrize("fault", HEADERS)
def test_refuses_safetensors_with(fault: str, tmp_path: Path) -> None:
    data, pattern = HEADERS[fault]
    refused(data, tmp_path, pattern)


PEERLESS = {  # what safetensors 0.8 lets through
    "name twice", "name twice, once escaped", "empty name", "name with NUL", "unknown field", "metadata null",
    "metadata with a name twice", "metadata with an empty name", "metadata with NUL in a name", "rank 65",
    "product beside a zero", "space before the header",
}  # fmt: skip


@pytest.mark.parametrize("fault", HEADERS)
def test_safetensors_itself_refuses_the_same_but_for_its_gaps(fault: str) -> None:
    data, _ = HEADERS[fault]
    try:
        peer.deserialize(data)
    except Exception:
        assert fault not in PEERLESS
    else:
        assert fault in PEERLESS


ODD: dict[str, bytes] = {
    "spaces everywhere": file_of(
        '{ \n"w" :\t{ "shape" : [ 2 , 1 ] , "data_offsets":[ 0,\r2 ] , "dtype" : "U8" } } \t\n ', b"ab"
    ),
    "escapes": file_of(r'{"\u0077":{"d\u0074ype":"\u00558","shape":[2,1],"data_offsets":[0,2]}}', b"ab"),
    "padded": file_of('{"w":' + json.dumps(tensor(0, 2, shape=[2, 1])) + "}" + " " * 100, b"ab"),
    "empty tensors around": file_of(
        {"z": tensor(2, 2), "w": tensor(0, 2, shape=[2, 1]), "y": tensor(0, 0, "F32", [3, 0])}, b"ab"
    ),
    "64 dimensions": file_of({"w": tensor(0, 2, shape=[2, 1]), "r": tensor(2, 3, shape=[1] * 64)}, b"abc"),
}


@pytest.mark.parametrize("kind", ODD)
def test_reads_safetensors_with(kind: str, tmp_path: Path) -> None:
    record = read(ODD[kind], tmp_path)
    assert record["w"].tolist() == [[97], [98]]
    assert set(record) == {name for name, _ in peer.deserialize(ODD[kind])}


# Every cut, every flip.

SMALL = file_of(
    {
        "__metadata__": {"format": "pt", "é": "\u2028"},
        "a.b": tensor(0, 8, "F32", [2, 1]),
        "c": tensor(8, 11, "U8", [3]),
        "d": tensor(11, 11, "BF16", [0, 5]),
        "e": tensor(11, 13, "F4", [4]),
    },
    bytes(range(13)),
)


@pytest.mark.slow
def test_safetensors_cut_anywhere_is_refused(tmp_path: Path) -> None:
    assert told(read(SMALL, tmp_path)) == peer_told(SMALL)
    for end in some(range(len(SMALL)), 100):
        for source in (SMALL[:end], SMALL[: end - 1] + SMALL[end:]):
            with pytest.raises(RecordError):
                read(source, tmp_path)
            with pytest.raises(RecordError):
                convert(io.BytesIO(source), io.BytesIO(), source_format="safetensors")


@given(st.data())
@settings(max_examples=rounds(200), deadline=None)
def test_safetensors_mutated_is_refused_or_read_as_its_own_reader_reads_it(data: st.DataObject) -> None:
    raw = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["set", "insert", "delete", "repeat"]))
        if how == "set":
            raw[at] = data.draw(st.sampled_from(b'0129{}[]",: \\eE+-.\xff\0'))
        elif how == "insert":
            raw.insert(at, data.draw(st.sampled_from(b'0129{}[]",: \\')))
        elif how == "delete":
            del raw[at]
        else:
            raw[at:at] = raw[at : at + data.draw(st.integers(1, 30))]
    if data.draw(st.booleans()):  # a length that fits what is there now
        end = bytes(raw).rfind(b"}") + 1
        raw[:8] = struct.pack("<Q", max(end - 8, 0))
    out = io.BytesIO()
    try:
        convert(io.BytesIO(bytes(raw)), out, source_format="safetensors")
    except RecordError:
        return
    assert told(zcrecord.load_record(out.getvalue(), verify="full")) == peer_told(bytes(raw))


# What a hostile file costs.

BOMBS: dict[str, Callable[[], bytes]] = {
    "many dimensions": lambda: entry('{"shape":[' + "0," * (MIB // 2)),
    "a long name with dots": lambda: file_of({"n." * (MIB // 2): tensor(0, 1)}, b"\0"),
    "a long name with escapes": lambda: file_of(
        '{"' + r"\n" * (MIB // 2) + '":' + json.dumps(tensor(0, 1)) + "}", b"\0"
    ),
    "a long number": lambda: entry('{"shape":[' + "1" * MIB),
    "much metadata": lambda: file_of({"__metadata__": {f"{i:x}": "" for i in range(MIB // 12)}}),
    "many empty tensors": lambda: file_of({f"{i:x}": tensor(0, 0) for i in range(20_000)}),
    "a deep entry": lambda: file_of({"__metadata__": {"zcrecord": "[" * MIB}}),
    "a wide entry": lambda: file_of({"__metadata__": {"zcrecord": "[" + "[]," * (MIB // 3) + "[]]"}}),
}


@pytest.mark.slow
@pytest.mark.exhaustive(keep=("a long name with escapes", "a wide entry"))
@pytest.mark.parametrize("kind", BOMBS)
def test_safetensors_header_costs_no_more_than_a_small_constant_times_its_length(kind: str, tmp_path: Path) -> None:
    data = BOMBS[kind]()
    said, peak = cost(data, tmp_path)
    assert peak < MOST * len(data) + 4 * MIB, said


@pytest.mark.slow
def test_a_stream_that_claims_much_costs_what_it_has(tmp_path: Path) -> None:
    for data in (file_of("{", length=MAX_HEADER), file_of({"w": tensor(0, 2**50)}, b"ab")):
        said, peak = cost(data, tmp_path)
        assert peak < 4 * MIB
        assert "past the" in said
        with pytest.raises(FormatError, match="truncated"):
            convert(io.BytesIO(data), io.BytesIO(), source_format="safetensors")


# Headers that are read all at once say what they say character by character, and no other is read so.


def usual(text: str | bytes, data_nbytes: int | None = None) -> Any:
    """Return a header that is read all at once, None if it is not."""
    raw = text.encode() if isinstance(text, str) else text
    return header._decode_usual(raw.decode(), data_nbytes) if min(raw, default=0) >= 0x20 else None


def outcome(read: Any) -> Any:
    try:
        return read()
    except FormatError as error:
        return type(error), str(error), error.offset, error.tensor


def check(text: str, data_nbytes: int | None) -> bool:
    """Fail unless a header is read, or refused, as it is character by character; returns whether it was all at once."""
    raw = text.encode()
    carefully = outcome(lambda: header._decode_any(text, len(raw), data_nbytes))
    assert outcome(lambda: header.decode_header(raw, data_nbytes)) == carefully
    found = outcome(lambda: usual(raw, data_nbytes))
    assert found is None or found == carefully
    return isinstance(found, header.SafetensorsHeader)


def compact(said: Any) -> str:
    return json.dumps(said, separators=(",", ":"), ensure_ascii=False)


PLAIN = {
    "a.b": tensor(0, 8, "F32", [2, 1]),
    "é\u2028": tensor(8, 11, "U8", [3]),
    "d": tensor(11, 11, "BF16", [0, 5]),
    "e": tensor(11, 13, "F4", [4]),
    "s": tensor(13, 13, "F32", [0]),
}
BASES = [
    compact(PLAIN),
    compact({"__metadata__": {"format": "pt", 'q"\\': "\u2028}"}, **PLAIN}) + "   ",
    compact({"__metadata__": {}, "w": tensor(0, 12, "U8", [3, 4])}),
    json.dumps(PLAIN, ensure_ascii=False),
    json.dumps({"__metadata__": {"format": "pt"}, "w": tensor(0, 12, "U8", [3, 4])}) + " ",
    compact({"w": tensor(0, 12, "F64", [])}),
]


@pytest.mark.parametrize("base", BASES[:5])
def test_headers_as_writers_write_them_are_read_all_at_once(base: str) -> None:
    assert check(base, None)
    assert check(base, 13 if "a.b" in base else 12)
    assert not check(base, 11)


def one_for_another(one: str, other: str) -> str:
    """Return a header in which something that all entries have is in the place of something else, once."""
    return BASES[0].replace(one, other, 1)


NEAR = {
    "another first character": "," + BASES[0][1:],
    "something before metadata": '{"x":1,' + BASES[1][1:],
    "metadata that does not end": '{"__metadata__":{}',
    "metadata last": BASES[0][:-1] + ',"__metadata__":{}}',
    "metadata as a tensor": BASES[0].replace('"d"', '"__metadata__"'),
    "no end": BASES[0][:-1],
    "other brackets at the end": BASES[0][:-3] + "}}}",
    "the last entry without its end": BASES[0][:-2] + "]}",
    "a name at the end": BASES[0][:-1] + ',"s]}}',
    "a name's end behind a shape": one_for_another('],"data_offsets":[', '":{"dtype":"'),
    "an entry's end behind a shape": one_for_another('],"data_offsets":[', ']},"'),
    "an entry's end behind a name": one_for_another('":{"dtype":"', ']},"'),
    "a shape's end behind an entry": one_for_another(']},"', '],"data_offsets":['),
    "a name's end behind an entry": one_for_another(']},"', '":{"dtype":"'),
    "something behind": BASES[0] + " x",
    "a newline behind": BASES[0] + "\n",
    "a name twice": BASES[0].replace('"d"', '"e"'),
    "a name that is empty": BASES[0].replace('"d"', '""'),
    "a name with a quote": BASES[0].replace('"d"', '"d"d"'),
    "a name that is an escaped other": BASES[0].replace('"d"', '"\\u0065"'),
    "a name with a newline": BASES[0].replace('"d"', '"d\n"'),
    "a name like a half": BASES[0].replace('"d"', '"d\\":{\\"dtype"'),
    "a field twice": BASES[0].replace('"shape":[3]', '"shape":[3],"shape":[3]'),
    "two spaces": BASES[0].replace('"shape":[3]', '"shape":  [3]'),
    "a space in some places": BASES[0].replace('},"', '}, "', 1),
    "offsets without the spaces of others": BASES[3].replace("[8, 11]", "[8,11]"),
    "an unknown type": BASES[0].replace('"U8"', '"U9"'),
    "an underscore": BASES[0].replace("[2,1]", "[2,1_0]"),
    "a comma too many": BASES[0].replace("[3]", "[3,]"),
    "half a byte": BASES[0].replace("[4]", "[3]"),
    "65 dimensions": BASES[0].replace("[3]", f"[3{',1' * 64}]"),
    "2^56 bytes": BASES[0].replace("[0,5]", f"[0,{1 << 56}]"),
    "a number of 21 digits": BASES[0].replace("[0,5]", f"[0,{10**20}]"),
    "a hole": BASES[0].replace("[11,13]", "[12,14]"),
    "an overlap": BASES[0].replace("[11,13]", "[10,12]"),
    "offsets of another size": BASES[0].replace("[11,13]", "[11,14]"),
    "offsets in another order": BASES[0].replace("[11,13]", "[13,11]"),
    "offsets with a leading zero": BASES[0].replace("[0,8]", "[00,8]"),
    "three offsets": BASES[0].replace("[0,8]", "[0,8,8]"),
    "tensors in another order": compact(dict(reversed(PLAIN.items()))),
    "nothing": "{}",
    "no text": "",
}


@pytest.mark.parametrize("kind", NEAR)
def test_headers_that_are_nearly_so_are_read_with_care(kind: str) -> None:
    for data_nbytes in (None, 13, 14):
        assert not check(NEAR[kind], data_nbytes)


def test_shapes_that_come_to_more_than_any_file_are_read_with_care() -> None:
    each = 1 << 55
    many = {f"{i}": tensor(i * each, (i + 1) * each, "U8", [each]) for i in range(4)}
    assert not check(compact(many), None)
    assert not check(compact(many), 1 << 56)
    assert check(compact({"0": many["0"]}), None)


# Indexes of shards, and the entry of our own.


# Shards.


def shards_of(tmp_path: Path, weight_map: Any, **more: Any) -> Path:
    """Write an index beside two shards, of tensors a and b, and of tensor c."""
    (tmp_path / "m-1.safetensors").write_bytes(file_of({"a": tensor(0, 1), "b": tensor(1, 2)}, b"ab"))
    (tmp_path / "m-2.safetensors").write_bytes(file_of({"c": tensor(0, 1)}, b"c"))
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map, **more}), encoding="utf-8")
    return index


RIGHT = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
INDEXES: dict[str, tuple[Any, str]] = {
    "tensor missing from its shard": (RIGHT | {"d": "m-2.safetensors"},
        "m-2.safetensors: tensor 'd': the index has it in this file, which does not hold it"),
    "tensor not in the index": ({"a": "m-1.safetensors", "c": "m-2.safetensors"},
                                "m-1.safetensors: tensor 'b': the index does not have it in this file, which holds it"),
    "no shard": (RIGHT | {"d": "m-3.safetensors"}, "m-3.safetensors: cannot read: No such file"),
    "shard above": (RIGHT | {"c": "../m-2.safetensors"}, "is not the plain name of a .safetensors file"),
    "absolute shard": (RIGHT | {"c": "/etc/passwd"}, "'/etc/passwd' is not the plain name of a .safetensors file"),
    "shard behind a backslash": (RIGHT | {"c": "..\\m.safetensors"}, "is not the plain name"),
    "shard without a name": (RIGHT | {"c": ""}, "shard '' is not the plain name"),
    "shard that is another file": (RIGHT | {"c": "m.zcr"}, "'m.zcr' is not the plain name of a .safetensors file"),
    "shard that is no text": (RIGHT | {"c": 3}, "tensor 'c': its shard 3 is not the plain name"),
    "map that is a list": (["a"], "not an index of safetensors shards: it has no 'weight_map'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", INDEXES)
def test_refuses_index_of_shards_with(fault: str, tmp_path: Path) -> None:
    weight_map, pattern = INDEXES[fault]
    index = shards_of(tmp_path, weight_map)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RecordError, match=pattern):
        convert(index, tmp_path / "out.zcr")
    assert sorted(tmp_path.iterdir()) == before


INDEX_TEXTS: dict[str, tuple[str, str]] = {
    "that is no JSON": ("{", "no JSON that can be read"),
    "that is an array": ('{"weight_map":[]}', "it has no 'weight_map'"),
    "of another kind": ('{"a":1}', "not an index of safetensors shards"),
    "with a name twice": ('{"weight_map":{"a":"m-1.safetensors","a":"m-2.safetensors"}}', "has 'a' twice"),
    "with odd metadata": ('{"weight_map":{},"metadata":3}', "metadata is not an object"),
    "with metadata without a name": ('{"weight_map":{},"metadata":{"":3}}', "metadata has the name ''"),
    "with a lone surrogate": ('{"weight_map":{"\\ud800":3}}', "its shard 3"),
    "that nests too deep": ('{"a":' * 100_000, "no JSON that can be read"),
    "with a number too long": ('{"weight_map":{},"metadata":{"a":' + "9" * 10_000 + "}}", "no JSON that can be read"),
    "that is not UTF-8": ('{"\udcff":1}', "no JSON that can be read"),
    "with an entry that is no text": ('{"weight_map":{},"metadata":{"zcrecord":1}}', "'zcrecord' entry is no text"),
}


@pytest.mark.parametrize("fault", INDEX_TEXTS)
def test_refuses_index(fault: str, tmp_path: Path) -> None:
    text, pattern = INDEX_TEXTS[fault]
    index = tmp_path / "m.safetensors.index.json"
    index.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(FormatError, match=pattern):
        convert(index, tmp_path / "out.zcr")


def test_error_in_a_shard_names_the_shard(tmp_path: Path) -> None:
    index = shards_of(tmp_path, RIGHT)
    (tmp_path / "m-2.safetensors").write_bytes(file_of({"c": tensor(0, 2)}, b"c"))
    with pytest.raises(FormatError, match=r"m-2\.safetensors: tensor 'c': data_offsets"):
        convert(index, tmp_path / "out.zcr")


@pytest.mark.skipif(os.name != "posix", reason="platform: named pipes")
def test_shard_that_is_a_pipe_is_refused_without_waiting_for_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = shards_of(tmp_path, RIGHT)
    (tmp_path / "m-2.safetensors").unlink()
    os.mkfifo(tmp_path / "m-2.safetensors")
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waits for the pipe's writer"))
    signal.alarm(60)
    try:
        with pytest.raises(
            SourceError, match=r"m-2\.safetensors: not a regular file; put a copy of the file in its pl"
        ):
            convert(index, tmp_path / "out.zcr")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# What an archive says besides its tensors.

ENTRIES: dict[str, tuple[Any, str]] = {
    "empty": ("", "is no JSON that can be read"),
    "a list": ([], "is no JSON object with a version"),
    "no version": ({}, "is no JSON object with a version"),
    "version true": ({"version": True}, "is no JSON object with a version"),
    "a key twice": ('{"version":1,"version":1}', "has a key twice in one object"),
    "unknown part": ({"version": 1, "x": 1}, "has an unknown part 'x'"),
    "depth": ("[" * 100_000, "is no JSON that can be read"),
    "long number": ('{"version":1,"metadata":{"a":' + "9" * 10_000 + "}}", "is no JSON that can be read"),
    "items an object": ({"version": 1, "items": {}}, "something other than a list"),
    "item without a place": ({"version": 1, "items": [[None, ["a"], 1]]}, "neither a module nor an attribute"),
    "items out of order": ({"version": 1, "items": [[1, ["a"], 1], [0, ["b"], 1]]}, "items out of order"),
    "path that is text": ({"version": 1, "items": [[0, "a", 1]]}, "something other than a list"),
    "path of numbers": ({"version": 1, "items": [[0, [1], 1]]}, "something other than text"),
    "path with a surrogate": ('{"version":1,"items":[[0,["\\ud800"],1]]}', "lone surrogates"),
    "unknown kind": ({"version": 1, "items": [[0, ["a"], "set", ""]]}, "a module of unknown kind"),
    "kind a list": ({"version": 1, "items": [[0, ["a"], [], ""]]}, "a module of unknown kind"),
    "paths a list": ({"version": 1, "paths": []}, "something other than an object"),
    "paths to another name": ({"version": 1, "paths": {"w": ["v"]}}, "splits 'w' into other keys"),
    "ties of numbers": ({"version": 1, "ties": [[1]]}, "something other than text"),
    "order a number": ({"version": 1, "order": 1}, "something other than a list"),
    "marked with a number": ({"version": 1, "marked": 1}, "marks with something other than true"),
    "bytes that are none": ({"version": 1, "metadata": {"a": {"bytes": "?"}}}, "has a malformed value of type bytes"),
    "bytes a list": ({"version": 1, "metadata": {"a": {"bytes": []}}}, "something other than text"),
    "float that is none": ({"version": 1, "metadata": {"a": {"float": "x" * 16}}},
                           "has a malformed value of type float"),
    "float too short": ({"version": 1, "metadata": {"a": {"float": "7f"}}}, "an object of an unknown type"),
    "unknown type": ({"version": 1, "metadata": {"a": {"set": []}}}, "an object of an unknown type"),
    "empty type": ({"version": 1, "metadata": {"a": {}}}, "an object of an unknown type"),
    "mixed list": ({"version": 1, "metadata": {"a": [1, "x"]}}, "a value for 'a' that no attribute has"),
    "nested list": ({"version": 1, "metadata": {"a": [[1]]}}, "a value for 'a' that no attribute has"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ENTRIES)
def test_refuses_entry_of_its_own_with(fault: str, tmp_path: Path) -> None:
    what, pattern = ENTRIES[fault]
    text = what if isinstance(what, str) else json.dumps(what)
    refused(file_of({"__metadata__": {"zcrecord": text}, "w": tensor(0, 2)}, b"ab"), tmp_path, pattern)


TYPED = {
    "later version": ({"version": 2}, VersionError, "has version 2, this is 1; upgrade zcrecord"),
    "integer of 70 bits": ({"version": 1, "metadata": {"a": 1 << 70}},
                           RecordError, "a value for 'a' that no attribute has"),
    "name of a tensor": ({"version": 1, "items": [[0, ["w"], 1]]},
                         RecordError, "tensor 'w': an attribute has this name"),
    "module under a tensor": ({"version": 1, "items": [[1, ["w", "x"], 1]]},
                              RecordError, "a tensor or an attribute has the name of this module"),
    "attribute twice": ({"version": 1, "items": [[0, ["a"], 1], [0, ["a"], 1]]},
                        RecordError, "two attributes would have this name"),
    "empty key": ({"version": 1, "items": [[0, [""], 1]]}, UnsupportedError, "keys are non-empty strings"),
    "no path": ({"version": 1, "items": [[0, [], 1]]}, UnsupportedError, "keys are non-empty strings"),
    "too deep": ({"version": 1, "items": [[0, ["a"] * 101, 1]]}, LimitError, "nested more than 100 deep"),
    "nameless metadata": ({"version": 1, "metadata": {"": 1}}, UnsupportedError, "names are non-empty strings"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TYPED)
def test_entry_that_no_archive_can_hold_is_a_typed_error(fault: str, tmp_path: Path) -> None:
    what, kind, pattern = TYPED[fault]
    data = file_of({"__metadata__": {"zcrecord": json.dumps(what)}, "w": tensor(0, 2)}, b"ab")
    with pytest.raises(kind, match=pattern):
        read(data, tmp_path)


def test_entry_about_tensors_that_are_no_longer_there_is_no_fault(tmp_path: Path) -> None:
    about = {"version": 1, "paths": {"x.y": ["x.y"]}, "ties": [["x", "w", "y"]], "order": ["x", "w"]}
    about["items"] = [[7, ["late"], 1]]
    record = read(file_of({"__metadata__": {"zcrecord": json.dumps(about)}, "w": tensor(0, 2)}, b"ab"), tmp_path)
    assert (record.names, record.attributes) == (("w",), {"late": 1})
