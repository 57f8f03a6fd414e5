"""Malformed safetensors files: each fault is one typed error, here and, but for its gaps, with safetensors itself.

No file costs more memory than a small constant times its length, and none leaves an archive behind.
"""

from __future__ import annotations

import io
import json
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
from zcrecord.errors import FormatError, RecordError
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
