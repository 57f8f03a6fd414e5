"""Shared by tests of other formats: small files forged byte by byte, reading them, and the cost."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import records as r
import safetensors

import zcrecord
from zcrecord.errors import FormatError, RecordError
from zcrecord.formats import convert

peer: Any = safetensors  # its own reader; some of it has no types
Told = dict[str, tuple[Any, ...]]
MIB = 1 << 20
MOST = 64  # times its length that a file may cost: a name of a few bytes is an object of a few hundred


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with this header: text, bytes, or what JSON makes of anything else."""
    if not isinstance(header, str | bytes):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor(start: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def entry(text: str, data: bytes = b"\0\0") -> bytes:
    """Return a file of one tensor "w" whose entry is this text."""
    return file_of('{"w":' + text + "}", data)


def read(data: bytes, tmp_path: Path, suffix: str = ".safetensors") -> zcrecord.Record:
    source = tmp_path / f"in{suffix}"
    source.write_bytes(data)
    convert(source, tmp_path / "out.zcr", force=True, durable=False, source_format=suffix[1:])
    return zcrecord.load_record((tmp_path / "out.zcr").read_bytes(), verify="full")


def refused(data: bytes, tmp_path: Path, pattern: str, suffix: str = ".safetensors", kind: Any = FormatError) -> None:
    """Fail unless a file is refused with this message, from a path and, where it can be, a stream; nothing is left."""
    with pytest.raises(kind, match=pattern) as caught:
        read(data, tmp_path, suffix)
    assert str(caught.value).startswith(str(tmp_path)), "it does not say which file"
    assert [p.name for p in tmp_path.iterdir()] == [f"in{suffix}"]
    if suffix == ".safetensors":
        with pytest.raises(RecordError):
            convert(io.BytesIO(data), tmp_path / "out.zcr", source_format="safetensors")


COST = """
import resource, sys, tracemalloc, io
import zcrecord.formats, zcrecord.formats.safetensors, zcrecord.formats.npz
from zcrecord.errors import RecordError
source, suffix = sys.argv[1:3]
class Nowhere:
    def write(self, data):
        return len(data)
tracemalloc.start()
try:
    zcrecord.formats.convert(source, Nowhere(), source_format=suffix)
    print('read')
except RecordError as error:
    print(str(error)[:2000].replace('\\n', ' '))
print(tracemalloc.get_traced_memory()[1])
"""


def cost(data: bytes, tmp_path: Path, suffix: str = "safetensors") -> tuple[str, int]:
    """Return the answer to a file, and the most memory that Python and numpy took for it."""
    source = tmp_path / f"in.{suffix}"
    source.write_bytes(data)
    said, peak = r.run_python(COST, source, suffix).stdout.splitlines()
    return said, int(peak)


def npy(header: str | bytes, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    raw = header.encode("utf-8" if version[0] == 3 else "latin-1") if isinstance(header, str) else header
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version[0] == 1 else "<I", len(raw)) + raw + data


def npz(*members: tuple[str, bytes], deflate: bool = False) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED) as opened:
        for name, data in members:
            opened.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED if deflate else None)
    return file.getvalue()


def described(descr: str = "'|u1'", shape: str = "(2,)", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


def array(*arguments: str, data: bytes = b"ab") -> bytes:
    return npz(("w.npy", npy(described(*arguments), data)))


def told(record: zcrecord.Record) -> Told:
    """Return dtype, shape and bytes of every tensor, as safetensors names them."""
    infos = record.infos()
    return {i.name: (i.dtype.safetensors, list(i.shape), bytes(record.raw(i.name)) if i.nbytes else b"") for i in infos}


def peer_told(data: bytes) -> Told:
    """Return the same of a safetensors file, as its own reader has it."""
    found = peer.deserialize(data)
    return {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in found}
