"""A file that zcrecord takes, the format's own package takes, too, with the same content; zcrecord may be stricter.

Each odd file is given to both. `STRICTER` names, for each format, those that only the package takes: what that would
read might be what nobody meant. Zip files are held by `test_formats_zip_readers.py`, faults of safetensors and bytes
flipped and mutated by `test_formats_malformed.py`, forms of ONNX's values by `test_onnx_wire.py`.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import zstandard
from exchange import file_of, peer_told, read, told
from onnx import numpy_helper
from onnx_models import varint

import zcrecord
from zcrecord import RecordError
from zcrecord.onnx import convert
from zcrecord.storage.compressed import PeekableStream, decompressed

# Safetensors.

OK = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
HEADERS: dict[str, str | bytes] = {
    "byte order mark": b'\xef\xbb\xbf{"w":' + OK.encode() + b"}",
    "metadata twice, once escaped": f'{{"__metadata__":{{"a":"1"}},"\\u005f_metadata__":{{"b":"2"}},"w":{OK}}}',
    "metadata escaped": f'{{"\\u005f_metadata__":{{"a":"1"}},"w":{OK}}}',
    "dimension +2": f'{{"w":{OK}}}'.replace("[2]", "[+2]"),
    "dimension of 2^64 + 2": f'{{"w":{OK}}}'.replace("[2]", f"[{2**64 + 2}]"),
    "offset -0": f'{{"w":{OK}}}'.replace("[0,", "[-0,"),
    "spaces behind": f'{{"w":{OK}}} \n\t\r ',
    "no-break space behind": f'{{"w":{OK}}}\xa0',
    "form feed inside": f'{{"w":\x0c{OK}}}',
    "line separator inside": f'{{"w":\u2028{OK}}}',
    "comment": f'{{/**/"w":{OK}}}',
    "entry that is a list": '{"w":["U8",[2],[0,2]]}',
    "surrogate as UTF-8": b'{"\xed\xa0\x80":' + OK.encode() + b"}",
    "NUL as two bytes": b'{"a\xc0\x80":' + OK.encode() + b"}",
    "two surrogates": f'{{"\\ud83d\\ude00":{OK}}}',
    "control character": f'{{"a\x01":{OK}}}',
    "delete": f'{{"a\x7f":{OK}}}',
    "escape \\x": f'{{"a\\x41":{OK}}}',
    "escape with a sign": f'{{"a\\u+041":{OK}}}',
    "dtype escaped": f'{{"w":{OK}}}'.replace("U8", "\\u00558"),
    "empty tensor between elements": f'{{"e":{{"dtype":"U16","shape":[0],"data_offsets":[1,1]}},"w":{OK}}}',
    "scalar": '{"w":{"dtype":"U16","shape":[],"data_offsets":[0,2]}}',
}
STRICTER_HEADERS = {"entry that is a list"}


def check(ours: Callable[[], Any], theirs: Callable[[], Any], *, stricter: bool) -> None:
    """Fail unless both readers refuse something or find the same; a stricter one refuses it alone."""
    found: Any = None
    with contextlib.suppress(RecordError):
        found = ours()
    expected: Any = None
    with contextlib.suppress(Exception):
        expected = theirs()
    if stricter:
        assert (found is None, expected is None) == (True, False)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", HEADERS)
def test_header_of_safetensors_is_refused_or_read_as_its_own_package_reads_it(kind: str, tmp_path: Path) -> None:
    data = file_of(HEADERS[kind], b"ab")
    check(lambda: told(read(data, tmp_path)), lambda: peer_told(data), stricter=kind in STRICTER_HEADERS)


# ONNX.


def field(number: int, data: bytes, tag: int = 0, length: int = 0) -> bytes:
    """A field of bytes, its tag and its length of at least so many bytes."""
    return varint(number << 3 | 2, tag) + varint(len(data), length) + data


def number(at: int, value: int) -> bytes:
    return varint(at << 3) + varint(value)


RAW = field(9, b"\1\0\0\0\2\0\0\0")
NAMED = number(1, 2) + number(2, 6) + field(8, b"w")  # two int32
SOUND = NAMED + RAW
GROUP = [varint(100 << 3 | kind) for kind in (3, 4)]


def model(tensor: bytes, behind: bytes = b"") -> bytes:
    return number(1, 9) + field(7, field(5, tensor)) + behind


MODELS: dict[str, bytes] = {
    "as it should be": model(SOUND),
    "name twice": model(SOUND + field(8, b"x")),
    "data_type twice before values": model(number(1, 2) + number(2, 1) + number(2, 6) + field(8, b"w") + RAW),
    "data_type twice, after values": model(SOUND + number(2, 1)),
    "data_type 2^32 + 6": model(number(1, 2) + number(2, (1 << 32) + 6) + field(8, b"w") + RAW),
    "dims around values": model(number(1, 1) + number(2, 6) + field(8, b"w") + RAW + number(1, 2)),
    "dims packed and not": model(field(1, b"\1\1") + SOUND),
    "dim of 2^64 + 2": model(number(2, 6) + field(8, b"w") + b"\x08\x82" + b"\x80" * 8 + b"\x02" + RAW),
    "dims of 8 bytes": model(SOUND + varint(1 << 3 | 1) + bytes(8)),
    "graph twice": model(SOUND, field(7, field(5, number(1, 2) + number(2, 6) + field(8, b"x") + RAW))),
    "tag of 5 bytes": number(1, 9) + field(7, field(5, SOUND), tag=5),
    "tag of 6 bytes": number(1, 9) + field(7, field(5, SOUND), tag=6),
    "length of 5 bytes": number(1, 9) + field(7, field(5, SOUND), length=5),
    "length of 6 bytes": number(1, 9) + field(7, field(5, SOUND), length=6),
    "length of values of 6 bytes": model(NAMED + field(9, RAW[2:], length=6)),
    "field 2^29 - 1": model(SOUND + varint((1 << 29) - 1 << 3) + b"\0"),
    "field 2^29": model(SOUND + varint(1 << 32) + b"\0"),
    "unknown group": model(SOUND + GROUP[0] + number(1, 1) + GROUP[1]),
    "group that is a name's number": model(SOUND + varint(8 << 3 | 3) + number(1, 1) + varint(8 << 3 | 4)),
    "name that is a number": model(SOUND + number(8, 7)),
    "values that are a number": model(SOUND + number(9, 7)),
    "no values in another field": model(SOUND + field(4, b"")),
    "raw_data twice, first empty": model(NAMED + field(9, b"") + RAW),
    "external, then not": model(SOUND + number(14, 1) + number(14, 0)),
    "data_location 2^32": model(SOUND + number(14, 1 << 32)),
    "external_data that is not meant": model(SOUND + field(13, field(1, b"location") + field(2, b"x"))),
    "int32 of 10 bytes": model(NAMED + field(5, varint(1, 10) + b"\2")),
    "name that is not UTF-8": model(number(1, 2) + number(2, 6) + field(8, b"\xff") + RAW),
    "text that is not UTF-8": model(SOUND, field(6, b"\xff")),
    "zero behind": model(SOUND, b"\0"),
    "end of no group": model(SOUND, varint(7 << 3 | 4)),
    "two of one name": number(1, 9) + field(7, field(5, SOUND) * 2),
}
STRICTER_MODELS = {
    "data_type twice, after values", "raw_data twice, first empty", "data_location 2^32", "name that is not UTF-8",
    "two of one name",
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_model_is_refused_or_read_as_protobuf_and_onnx_read_it(kind: str) -> None:
    def ours() -> Any:
        out = io.BytesIO()
        convert(io.BytesIO(MODELS[kind]), out)
        return {name: np.asarray(value).tolist() for name, value in zcrecord.load_record(out.getvalue()).items()}

    def theirs() -> Any:
        initializers = onnx.ModelProto.FromString(MODELS[kind]).graph.initializer
        return {t.name: numpy_helper.to_array(t).tolist() for t in initializers}

    check(ours, theirs, stricter=kind in STRICTER_MODELS)


# GGUF.


@pytest.mark.slow
def test_gguf_with_a_byte_flipped_is_refused_or_read_as_its_own_package_reads_it(tmp_path: Path) -> None:
    """But text that is not UTF-8, which that package cannot read: it comes as bytes."""
    path = tmp_path / "m.gguf"
    made: Any = gguf.GGUFWriter(path, "llama")
    made.add_string("a.b", "x")
    made.add_array("l", [1, 2, 3])
    made.add_bool("t", True)
    made.add_tensor("w", np.arange(4, dtype=np.float32).reshape(2, 2))
    made.add_tensor("v", np.arange(3, dtype=np.int8))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    whole, taken = path.read_bytes(), 0
    for at in range(len(whole)):
        for change in (0xFF, 1 << at % 8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
            try:
                record = read(path.read_bytes(), tmp_path, ".gguf")
            except RecordError:
                continue  # the package may then take all memory there is
            if any(isinstance(value, bytes | memoryview) for value in record.metadata.values()):
                continue
            found: Any = gguf.GGUFReader(path)
            fields = {key: value.contents() for key, value in found.fields.items() if not key.startswith("GGUF.")}
            assert fields == dict(record.metadata), f"byte {at}"
            tensors = {t.name: (t.data.shape, t.data.tobytes()) for t in found.tensors}
            assert tensors == {name: (record[name].shape, record[name].tobytes()) for name in record}, f"byte {at}"
            taken += 1
    assert taken > 100


# Compressed streams.

A, B = b"hello" * 10, b"world" * 10
SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
Packer = Callable[[bytes], bytes]


def gz(data: bytes) -> bytes:
    """A gzip member, the same at any time."""
    import gzip

    return gzip.compress(data, mtime=0)


ZS: Packer = zstandard.ZstdCompressor(write_checksum=True).compress
STREAMS: dict[str, bytes] = {
    "gzip: zeros behind": gz(A) + bytes(10),
    "gzip: zeros between members": gz(A) + bytes(8) + gz(B),
    "gzip: garbage behind": gz(A) + b"garbage",
    "gzip: a byte of a member behind": gz(A) + b"\x1f",
    "gzip: another's checksum": gz(A)[:-8] + gz(B)[-8:],
    "gzip: another size": gz(A)[:-4] + b"\1\0\0\0",
    "gzip: cut": gz(A)[:-1],
    "zstd: frames to be skipped": SKIPPED + ZS(A) + SKIPPED + ZS(B) + SKIPPED,
    "zstd: garbage behind": ZS(A) + b"garbage",
    "zstd: zeros behind": ZS(A) + bytes(8),
    "zstd: a byte of a frame behind": ZS(A) + b"\x28",
    "zstd: gzip behind": ZS(A) + gz(B),
    "zstd: cut": ZS(A)[:-1],
    "zstd: cut in a frame to be skipped": ZS(A) + SKIPPED[:-1],
    "zstd: another checksum": ZS(A)[:-4] + ZS(B)[-4:],
    "zstd: an empty frame": ZS(b"") + ZS(A),
}
# `zstd` expands gzip, too; gzip takes what lies behind zeros for garbage, and tells so by its exit status.
OTHERWISE = {"zstd: gzip behind", "gzip: zeros between members"}


@pytest.mark.needs("zstd", "gzip")
@pytest.mark.parametrize("kind", STREAMS)
def test_compressed_stream_is_refused_or_read_as_the_tools_read_it(kind: str) -> None:
    data = STREAMS[kind]
    done = subprocess.run([kind.partition(":")[0], "-dc"], input=data, capture_output=True, check=False)
    try:
        ours = decompressed(PeekableStream(io.BytesIO(data))).read()
    except RecordError:
        ours = None
    theirs = None if done.returncode else done.stdout
    assert (ours == theirs) is (kind not in OTHERWISE)
