"""Headers that are read all at once say what they say character by character, and no other is read so."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from exchange import tensor

from zcrecord.errors import FormatError
from zcrecord.foreign import safetensors_header as header

peer: Any = safetensors.numpy


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
    compact({"w": tensor(0, 12, "F64", [])}),
]


@pytest.mark.parametrize("base", BASES[:3])
def test_headers_as_writers_write_them_are_read_all_at_once(base: str) -> None:
    assert check(base, None)
    assert check(base, 13 if "a.b" in base else 12)
    assert not check(base, 11)


def test_files_of_safetensors_and_ours_are_read_all_at_once() -> None:
    tensors = {f"layers.{i}.w": np.zeros((i % 3, 4), np.float16 if i % 2 else np.float32) for i in range(100)}
    data = peer.save(tensors, metadata={"format": "pt"})
    length = int.from_bytes(data[:8], "little")
    found = usual(data[8 : 8 + length], len(data) - 8 - length)
    assert sorted(found.names) == sorted(tensors)
    assert found.metadata == {"format": "pt"}
    again = header.encode_header(found.entries(), found.metadata)
    assert usual(again[8:], len(data) - 8 - length) == found


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
    "space": BASES[0].replace('"shape":[3]', '"shape": [3]'),
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
