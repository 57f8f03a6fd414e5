"""GGUF files become archives: values and metadata equal, blocks as they are, and nothing is believed that is not there.

Files are made by `gguf` itself; the damaged ones by hand, field by field.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import records as r
from processes import growth

import zcrecord
from tools.measure import most_allocated
from zcrecord import RecordWriter
from zcrecord.foreign import gguf as reading
from zcrecord.formats.copying import copy_file

TYPES = gguf.GGMLQuantizationType
MIB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")


def written(path: Path, tensors: Any = (), fields: Callable[[Any], None] | None = None) -> Path:
    """Write a GGUF file of (name, array) or (name, bytes of blocks, their type)."""
    made = gguf.GGUFWriter(path, "llama")
    if fields is not None:
        fields(made)
    for name, array, *kind in tensors:
        made.add_tensor(name, array, raw_dtype=kind[0] if kind else None)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return path


def nothing(done: int, total: int | None) -> None:
    """Progress that nobody looks at."""


def converted(path: Path, progress: Any = nothing) -> zcrecord.Record:
    """Return the archive of a GGUF file, every digest checked."""
    with RecordWriter(path.with_suffix(".zcr")) as out:
        assert copy_file("gguf", str(path), out, progress) == path.stat().st_size
    return zcrecord.load_record(path.with_suffix(".zcr"), verify="full")


def weights(rows: int, columns: int) -> Any:
    return np.random.default_rng(rows * columns).standard_normal((rows, columns)).astype(np.float32)


# What comes over.


def test_no_other_tensor_has_the_name_of_a_quantised_ones_blocks(tmp_path: Path) -> None:
    blocks = np.zeros((2, 34), np.uint8), gguf.GGMLQuantizationType.Q8_0
    path = written(tmp_path / "m.gguf", [("a", *blocks), ("a.data", weights(1, 3))])
    with pytest.raises(zcrecord.NameCollisionError, match=r"tensor 'a\.data': two tensors would have this name"):
        zcrecord.load_record(path)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int16", "int32", "int64"])
def test_plain_tensor_comes_in_numpys_order_of_dimensions(dtype: str, tmp_path: Path) -> None:
    array = (weights(6, 4) * 50).astype(dtype).reshape(2, 3, 4)
    record = converted(written(tmp_path / "m.gguf", [("blk.0.w", array)]))
    r.assert_same(record["blk.0.w"], array)
    assert record.tree()["blk"]["0"]["w"].shape == (2, 3, 4)


def test_every_type_of_blocks_that_gguf_knows_comes_over_block_by_block(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = {kind: size for kind, size in gguf.GGML_QUANT_SIZES.items() if size[0] > 1}
    raws = {kind: rng.integers(0, 256, (2, 3, 2 * nbytes), np.uint8) for kind, (_, nbytes) in sizes.items()}
    record = converted(written(tmp_path / "m.gguf", [(f"blk.{kind.name}", raw, kind) for kind, raw in raws.items()]))
    assert len(sizes) > 20
    for kind, (block, nbytes) in sizes.items():
        module, data = record.modules[f"blk.{kind.name}"], record[f"blk.{kind.name}.data"]
        assert module.type_name == "zcr:quantized"
        told = {"ggml_type": kind.name, "shape": [2, 3, 2 * block], "block": block, "block_nbytes": nbytes}
        assert module.attributes == told
        assert data.dtype == np.uint8 and np.array_equal(data, raws[kind])


def test_content_is_what_ggufs_own_reader_finds(tmp_path: Path) -> None:
    raw = gguf.quants.quantize(weights(3, 64), TYPES.Q8_0)
    path = written(
        tmp_path / "m.gguf", [("a.w", weights(5, 3)), ("a.q", raw, TYPES.Q8_0), ("s", np.full(1, 7, np.float32))]
    )
    record = converted(path)
    theirs = gguf.GGUFReader(path)
    assert [t.name for t in theirs.tensors] == [name.removesuffix(".data") for name in record]
    for tensor, value in zip(theirs.tensors, record.values(), strict=True):
        assert np.array_equal(tensor.data, value)
    assert [key for key in theirs.fields if not key.startswith("GGUF.")] == list(record.metadata)


def test_metadata_comes_with_its_types(tmp_path: Path) -> None:
    def fields(made: Any) -> None:
        for kind, value in {"uint8": 255, "int8": -128, "uint16": 65535, "int16": -1, "uint32": 1 << 31,
                            "int32": -5, "uint64": (1 << 64) - 1, "int64": -(1 << 63)}.items():  # fmt: skip
            getattr(made, f"add_{kind}")(kind, value)
        made.add_float32("float32", 0.1)
        made.add_float64("float64", 0.1)
        made.add_bool("yes", True)
        made.add_bool("no", False)
        made.add_string("text", "grüße\n")
        made.add_array("ints", [3, 1, 2])
        made.add_array("floats", [0.5, 1.5])
        made.add_array("bools", [True, False])
        made.add_token_list(["<s>", "Ġa", "日"])

    found = converted(written(tmp_path / "m.gguf", fields=fields)).metadata
    want = {
        "general.architecture": "llama", "uint8": 255, "int8": -128, "uint16": 65535, "int16": -1, "uint32": 1 << 31,
        "int32": -5, "uint64": (1 << 64) - 1, "int64": -(1 << 63), "float32": float(np.float32(0.1)), "float64": 0.1,
        "yes": True, "no": False, "text": "grüße\n", "ints": [3, 1, 2], "floats": [0.5, 1.5], "bools": [True, False],
        "tokenizer.ggml.tokens": ["<s>", "Ġa", "日"],
    }  # fmt: skip
    assert found == want
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in want.items()}


def test_name_that_continues_a_tensors_name_stays_whole(tmp_path: Path) -> None:
    one = np.ones(1, np.float32)
    record = converted(written(tmp_path / "m.gguf", [("out", one), ("out.bias", 2 * one), ("in.w", 3 * one)]))
    assert list(record) == ["out", "out.bias", "in.w"]
    assert list(record.modules) == ["", "in"]


# Files made by hand.


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def head(tensors: int, fields: int, version: int = 3) -> bytes:
    return b"GGUF" + u32(version) + u64(tensors) + u64(fields)


def described(name: str | bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def padded(start: bytes, data: bytes = b"", alignment: int = 32) -> bytes:
    return start + bytes(-len(start) % alignment) + data


FLOATS = np.arange(8, dtype=np.float32).tobytes()
ALIGN = text("general.alignment") + u32(4)
KEY = text("k")
STRING, ARRAY = u32(8), u32(9)
HOSTILE = {
    "empty": (b"", "the file is empty"),
    "another magic": (b"GGML" + bytes(40), "does not start with 'GGUF'"),
    "version 1": (head(0, 0, 1), "GGUF version 1; versions 2 and 3"),
    "version 4": (head(0, 0, 4), "GGUF version 4"),
    "tensors without end": (head(1 << 63, 0), "9223372036854775808 tensors are claimed, 8 bytes are left"),
    "entries without end": (head(0, 1 << 60) + bytes(64), "metadata entries are claimed, 64 bytes are left"),
    "key past the end": (head(0, 1) + u64(40) + bytes(20), "a metadata key takes 40 bytes, 20 are left"),
    "key of no bytes": (head(0, 1) + text("") + u32(0) + bytes(20), "a metadata key has 0 bytes"),
    "long key": (head(0, 1) + text("k" * 70000) + u32(0) + b"1", "70000 bytes; 1 to 65535 are legal"),
    "key not UTF-8": (head(0, 1) + text(b"\xff") + u32(0) + bytes(8), "a metadata key is not UTF-8"),
    "key with NUL": (head(0, 1) + text(b"a\0") + u32(0) + bytes(8), "a metadata key is not UTF-8 without NUL"),
    "key twice": (head(0, 2) + 2 * (KEY + u32(0) + b"1"), "'k' is there twice"),
    "type of no value": (head(0, 1) + KEY + u32(13) + bytes(8), "of the unknown type 13"),
    "bool of 2": (head(0, 1) + KEY + u32(7) + b"\2", "neither 0 nor 1"),
    "bools of 2": (head(0, 1) + KEY + ARRAY + u32(7) + u64(2) + b"\1\2", "neither 0 nor 1"),
    "text past the end": (head(0, 1) + KEY + STRING + u64(1 << 62) + b"x", "takes 4611686018427387904 bytes"),
    "list past the end": (head(0, 1) + KEY + ARRAY + u32(0) + u64(1 << 62), "4611686018427387904 items"),
    "list of texts past the end": (head(0, 1) + KEY + ARRAY + STRING + u64(3) + bytes(16), "3 items of metadata"),
    "list of no type": (head(0, 1) + KEY + ARRAY + u32(77) + u64(1) + bytes(16), "of the unknown type 77"),
    "long list of no type": (head(0, 1) + KEY + ARRAY + u32(77) + u64(99) + bytes(16), "of the unknown type 77"),
    "lists within lists": (head(0, 1) + KEY + ARRAY + (ARRAY + u64(1)) * 9, "lists within a list"),
    "alignment 0": (head(0, 1) + ALIGN + u32(0), "general.alignment is 0"),
    "alignment 48": (head(0, 1) + ALIGN + u32(48), "general.alignment is 48; a power of two"),
    "alignment as text": (head(0, 1) + text("general.alignment") + STRING + text("32"), "general.alignment is '32'"),
    "tensor without name": (padded(head(1, 0) + described("", [8]), FLOATS), "a tensor's name has 0 bytes"),
    "name not UTF-8": (padded(head(1, 0) + described(b"\xc3(", [8]), FLOATS), "a tensor's name is not UTF-8"),
    "name twice": (padded(head(2, 0) + 2 * described("w", [8]), FLOATS), "tensor 'w': .*there twice"),
    "rank without end": (head(1, 0) + text("w") + u32(1 << 31) + bytes(99), "tensor 'w': .*rank 2147483648"),
    "type of no tensor": (padded(head(1, 0) + described("w", [8], 4), FLOATS), "ggml type 4 is not known"),
    "more than all": (padded(head(1, 0) + described("w", [1 << 40, 1 << 40]), FLOATS), "more than 2\\^56 bytes"),
    "nothing of much": (padded(head(1, 0) + described("w", [0, 1 << 60]), FLOATS), "more than 2\\^56 bytes"),
    "past the end": (padded(head(1, 0) + described("w", [9]), FLOATS), "tensor 'w': .*end past the end of the file"),
    "far past the end": (padded(head(1, 0) + described("w", [8], 0, 1 << 63), FLOATS), "end past the end of the file"),
    "offset between": (padded(head(1, 0) + described("w", [4], 0, 4), FLOATS), "no multiple of general.alignment"),
    "part of a block": (padded(head(1, 0) + described("w", [33], 8), bytes(99)), "not whole blocks of 32 \\(Q8_0"),
    "block of rank 0": (padded(head(1, 0) + described("w", [], 8), bytes(99)), "not whole blocks"),
    "overlap": (padded(head(2, 0) + described("a", [8]) + described("b", [4], 0, 0), FLOATS),
                "tensor '[ab]': its bytes overlap those of tensor '[ab]'"),
}  # fmt: skip


def read_bytes(data: bytes, folder: Path) -> zcrecord.Record:
    path = folder / "m.gguf"
    path.write_bytes(data)
    return converted(path)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_one_typed_error_and_leaves_no_archive(name: str, tmp_path: Path) -> None:
    data, message = HOSTILE[name]
    kind = zcrecord.UnsupportedError if name == "lists within lists" else zcrecord.FormatError
    with pytest.raises(kind, match=message) as caught:
        read_bytes(data, tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "m.gguf"))
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_hostile_files_are_one_field_away_from_good_ones(tmp_path: Path) -> None:
    fields = KEY + u32(7) + b"\1" + text("l") + ARRAY + u32(8) + u64(2) + text("a") + text("") + ALIGN + u32(64)
    tensors = described("w", [4, 2]) + described("b", [32], 8, 64) + described("e", [0, 1 << 40], 0, 128)
    start = head(4, 3, 2) + fields + tensors + described("s", [], 0, 128)
    record = read_bytes(padded(start, padded(padded(FLOATS, bytes(range(34)), 64), FLOATS[4:8], 64), 64), tmp_path)
    assert record.metadata == {"k": True, "l": ["a", ""], "general.alignment": 64}
    assert record["w"].tolist() == np.arange(8).reshape(2, 4).tolist()
    assert record["b.data"].tolist() == list(range(34))
    assert record["e"].shape == (1 << 40, 0)
    assert record["s"].shape == () and record["s"] == 1


def test_text_that_is_not_utf8_comes_as_bytes(tmp_path: Path) -> None:
    fields = KEY + STRING + text(b"\xff\xfe") + text("l") + ARRAY + STRING + u64(2) + text("a") + text(b"\xe4")
    found = read_bytes(head(0, 2) + fields, tmp_path).metadata
    assert bytes(found["k"]) == b"\xff\xfe"
    assert [bytes(item) for item in found["l"]] == [b"a", b"\xe4"]


def test_big_endian_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(zcrecord.UnsupportedError, match=r"big-endian.*gguf_convert_endian"):
        read_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16), tmp_path)


@pytest.mark.slow
def test_truncated_anywhere_it_is_an_error(tmp_path: Path) -> None:
    fields = KEY + ARRAY + u32(8) + u64(2) + text("ab") + text("c") + text("n") + u32(10) + u64(5)
    whole = padded(head(2, 2) + fields + described("w", [8]) + described("q", [32], 8, 32), FLOATS + bytes(34))
    assert list(read_bytes(whole, tmp_path)) == ["w", "q.data"]
    for size in range(len(whole)):
        with pytest.raises(zcrecord.FormatError, match=r"truncated|bytes are left|the file became shorter"):
            read_bytes(whole[:size], tmp_path)


def test_claims_cost_no_memory(tmp_path: Path) -> None:
    claims = [HOSTILE[name][0] for name in HOSTILE if "without end" in name or "past the end" in name]
    copy_file("gguf", str(written(tmp_path / "m.gguf")), RecordWriter(os.devnull).__enter__(), nothing)

    def refuse_all() -> None:
        for data in claims:
            with pytest.raises(zcrecord.FormatError):
                read_bytes(data, tmp_path)

    assert most_allocated(refuse_all) < 4 * MIB


def test_metadata_without_end_is_refused_at_the_documented_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MAX_HEADER", 1 << 20)
    with pytest.raises(zcrecord.LimitError, match="more than 1 MiB of metadata"):
        read_bytes(head(0, 1) + KEY + STRING + text(bytes(1 << 20)), tmp_path)


def listed(key: str, kind: int, count: int, items: bytes) -> bytes:
    return text(key) + ARRAY + u32(kind) + u64(count) + items


LENGTH = 3000
DENSE = {  # much in few bytes
    "texts": head(0, 1) + listed("k", 8, LENGTH, b"".join(text(f"{i:03x}") for i in range(LENGTH))),
    "texts that are not UTF-8": head(0, 1) + listed("k", 8, LENGTH, text(b"\xff") * LENGTH),
    "empty texts": head(0, 1) + listed("k", 8, LENGTH, bytes(8 * LENGTH)),
    "bytes": head(0, 1) + listed("k", 0, 5 * LENGTH, bytes(5 * LENGTH)),
    "floats": head(0, 1) + listed("k", 6, 5 * LENGTH, np.arange(5 * LENGTH, dtype="<f4").tobytes()),
    "bools": head(0, 1) + listed("k", 7, 5 * LENGTH, bytes(5 * LENGTH)),
    "entries": head(0, LENGTH) + b"".join(text(f"{i:x}") + u32(0) + b"1" for i in range(LENGTH)),
    "short lists": head(0, LENGTH) + b"".join(listed(f"{i:x}", 0, 3, b"123") for i in range(LENGTH)),
    "lists of one text": head(0, LENGTH) + b"".join(listed(f"{i:x}", 8, 1, text(b"\xff")) for i in range(LENGTH)),
    "tensors of no bytes": padded(head(LENGTH, 0) + b"".join(described(f"{i:x}", [0]) for i in range(LENGTH))),
    "no blocks": padded(head(LENGTH // 9, 0) + b"".join(described(f"{i:x}", [0], 8) for i in range(LENGTH // 9))),
    "dots": padded(head(99, 0) + b"".join(described(f"{i:x}{'.a' * 40}", [0]) for i in range(99))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_entries_cost_at_most_the_memory_that_is_counted_for_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DENSE[name]
    read_bytes(padded(head(1, 0) + described("w", [8]), FLOATS), tmp_path)
    counted, start = [], reading._GgufHeader.__init__

    def header(self: Any, file: Any, size: int, types: Any) -> None:
        start(self, file, size, types)
        counted.append((64 << 20) + 16 * size - self._memory_left)

    monkeypatch.setattr(reading._GgufHeader, "__init__", header)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)

    def read() -> None:
        counted.clear()
        with RecordWriter(os.devnull) as out:
            copy_file("gguf", str(path), out, nothing)

    peak = most_allocated(read)
    assert peak < 2 * MIB + sum(counted) + 8 * len(data)


@pytest.mark.parametrize("name", DENSE)
def test_what_takes_far_more_memory_than_the_file_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MEMORY", 1 << 10)
    with pytest.raises(zcrecord.LimitError, match=r"m\.gguf: .*more than 0 MiB and 16 times the file in memory"):
        read_bytes(DENSE[name], tmp_path)


def test_vocabulary_alone_in_a_file_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the proportions of the largest vocabularies there are, 262,144 tokens and 514,906 merges, one in 128 of it."""
    monkeypatch.setattr(reading, "_MEMORY", reading._MEMORY >> 7)
    tokens = [f"token{i:03}"[-7:] for i in range(1 << 11)]

    def fields(made: Any) -> None:
        made.add_token_list(tokens)
        made.add_token_scores([-float(i) for i in range(len(tokens))])
        made.add_token_types([1] * len(tokens))
        made.add_token_merges([f"{i:04} {i:05}" for i in range(4022)])

    path = written(tmp_path / "m.gguf", fields=fields)
    assert converted(path).metadata["tokenizer.ggml.tokens"] == tokens


# Around it.


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@LINUX
def test_conversion_holds_one_window_of_payload_and_the_measurement_would_notice(tmp_path: Path) -> None:
    raw = np.zeros((4096, 34 * 512), np.uint8)
    raw[:, 0] = np.arange(4096) % 256
    large = written(tmp_path / "large.gguf", [("w", raw, TYPES.Q8_0), ("b", raw[1:], TYPES.Q8_0)])
    small = written(tmp_path / "small.gguf", [("w", raw[:1], TYPES.Q8_0)])
    setup = "from zcrecord.formats import convert\nconvert(sys.argv[2], sys.argv[2] + '.zcr', force=True)"
    work = "convert(sys.argv[1], sys.argv[1] + '.zcr', durable=False)"
    assert growth(setup, work, large, small)[1] < 16 * MIB
    assert growth(setup, "kept = open(sys.argv[1], 'rb').read()", large, small)[1] > 100 * MIB
