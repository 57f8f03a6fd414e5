"""TINY files become archives and come back; each fault is one typed error, by every way in."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from exchange import MIB

import zcrecord
from tools.measure import most_allocated
from zcrecord.cli.dispatch import main
from zcrecord.errors import FormatError
from zcrecord.foreign.tiny import MAGIC
from zcrecord.formats import convert


def entry(name: bytes = b"w", kind: bytes = b"uint8", shape: tuple[int, ...] = (2,), offset: int = 64) -> bytes:
    form = struct.pack(f"<B{len(shape)}QQ", len(shape), *shape, offset)
    return struct.pack("<H", len(name)) + name + struct.pack("<B", len(kind)) + kind + form


def tiny(*entries: bytes, data: bytes = b"ab", count: int | None = None) -> bytes:
    head = MAGIC + struct.pack("<I", len(entries) if count is None else count) + b"".join(entries)
    return head + bytes(-len(head) % 32) + data


OK = tiny(entry())
BAD = {
    "cut": (OK[:-1], "tensor 'w': its bytes .* end past the end of the file .*; the file is truncated"),
    "cut in the header": (OK[:20], "ends inside"),
    "count": (tiny(count=1 << 30), "1073741824 tensors are claimed"),
    "twice": (tiny(entry(), entry()), "tensor 'w': this name is there twice"),
    "dtype": (tiny(entry(kind=b"Q9")), "tensor 'w': its dtype 'Q9' is not known"),
    "not aligned": (tiny(entry(offset=65)), "tensor 'w': its offset is 0x41, 0x40 is due"),
    "huge": (tiny(entry(shape=(0, 2**60, 2**60))), "claims more than 2\\^56 bytes"),
    "behind": (OK + b"x", "bytes behind the last tensor belong to none"),
    "no name": (tiny(entry(b"")), "a name is empty"),
}


@pytest.mark.parametrize("kind", BAD)
def test_each_fault_is_one_typed_error_by_every_way_in(kind: str, tmp_path: Path) -> None:
    data, message = BAD[kind]
    (tmp_path / "m.weights.bin").write_bytes(data)
    for act in (
        lambda: zcrecord.load_record(tmp_path / "m.weights.bin"),
        lambda: convert(tmp_path / "m.weights.bin", tmp_path / "m.zcr"),
        lambda: zcrecord.index(tmp_path / "m.weights.bin", tmp_path / "m.zcr"),
    ):
        with pytest.raises(FormatError, match=f"m.weights.bin: .*{message}"):
            act()
    with pytest.raises(FormatError):
        convert(io.BytesIO(data), tmp_path / "m.zcr")
    assert not (tmp_path / "m.zcr").exists()


def test_a_large_file_is_mapped_and_an_index_of_it_is_small(tmp_path: Path) -> None:
    path = tmp_path / "m.weights.bin"
    path.write_bytes(OK.replace(entry(), entry(shape=(64 * MIB,)))[:64])
    with path.open("r+b") as file:
        file.truncate(64 + 64 * MIB)
    assert most_allocated(lambda: zcrecord.load_record(path)["w"]) < MIB
    zcrecord.index(path, tmp_path / "i.zcr")
    assert (tmp_path / "i.zcr").stat().st_size < 4096
    assert zcrecord.load_record(tmp_path / "i.zcr")["w"].shape == (64 * MIB,)


@pytest.mark.parametrize("command", ["info", "ls", "tree", "verify"])
def test_commands_show_it(command: str, tmp_path: Path) -> None:
    (tmp_path / "m.weights.bin").write_bytes(OK)
    assert main([command, str(tmp_path / "m.weights.bin")]) == 0


def test_it_comes_back(tmp_path: Path) -> None:
    zcrecord.save_record({"a": {"w": np.ones((3, 5)).T, "z": np.float32(1)}}, tmp_path / "a.zcr")
    convert(tmp_path / "a.zcr", tmp_path / "m.weights.bin")
    convert(tmp_path / "m.weights.bin", tmp_path / "b.zcr")
    a, b = (zcrecord.load_record(tmp_path / f"{name}.zcr") for name in "ab")
    assert a.names == b.names and all(np.array_equal(a[name], b[name]) for name in a.names)
