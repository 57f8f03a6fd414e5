"""Shared by tests of packed archives: archives with payloads of every size, and their seek tables, read anew."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

import zcrecord
from zcrecord.transport import pack

MIB = 1 << 20
FOLDER = Path(__file__).parents[1] / "conformance" / "valid"
GOLDEN = {p.stem: p.read_bytes() for p in sorted(FOLDER.glob("*.zcr")) if p.stem not in ("prefix", "suffix")}


class OneWay(io.RawIOBase):
    """A pipe of either end: bytes are read or written once, forward, a few at a time."""

    def __init__(self, data: bytes = b"") -> None:
        self._source = io.BytesIO(data)
        self.written = bytearray()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._source.readinto(memoryview(buffer)[:70_000])

    def write(self, data: Any) -> int:
        self.written += memoryview(data)[:70_000]
        return min(len(memoryview(data)), 70_000)


class Frame(NamedTuple):
    """One line of a seek table, and where the frame and what it holds begin."""

    offset: int
    nbytes: int
    start: int
    size: int
    checksum: int


def weights(nbytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return bytes that zstd can make a little smaller."""
    return np.random.default_rng(seed).standard_normal(nbytes // 4, np.float32)


def mixed() -> dict[str, Any]:
    """Return a record with payloads of 100 bytes to 11 MiB, ties, twins, packed, strided and string tensors."""
    tied = weights(300_000, 1)
    return {
        "small": {f"w{i}": weights(4 * (25 + 900 * i), i) for i in range(60)},
        "large": weights(11 * MIB, 2),
        "page": weights(4 * MIB, 3),
        "tied": {"a": tied, "b": tied, "twin": tied.copy()},
        "q": zcrecord.PackedTensor(np.arange(5000, dtype=np.uint8), "int4", (10_000,)),
        "s": zcrecord.StringTensor.from_strings(["one", "two", "three"]),
        "t": weights(40_000, 4).reshape(100, 100).T,
        "empty": np.zeros((0, 3)),
        "deep": [{"w": weights(400, 5), "note": "text", "blob": weights(2 * MIB, 6).tobytes()}, {"w": np.arange(3)}],
    }


@cache
def encoded(how: str = "front") -> bytes:
    """Return the archive of that record: index first, or last with the header sealed or not."""
    metadata = {"by": "test", "raw": bytes(range(200)) * 100}
    file = io.BytesIO()
    if how == "front":
        zcrecord.save_record(mixed(), file, metadata=metadata)
        return file.getvalue()
    sink = OneWay() if how == "unsealed" else file
    with zcrecord.RecordWriter(sink, metadata=metadata) as out:
        for name, value in zcrecord.load_record(encoded()).items():
            out.add(name, value)
        out.attribute("deep.0.blob", weights(2 * MIB, 6).tobytes())
    return bytes(sink.written) if isinstance(sink, OneWay) else file.getvalue()


@cache
def packed(how: str = "front", level: int = 1) -> bytes:
    """Return that archive's packed form, as it comes of a file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.zcr")
        path.write_bytes(encoded(how))
        pack(path, Path(folder, "m.zcr.zst"), level=level, durable=False)
        return Path(folder, "m.zcr.zst").read_bytes()


def streamed(data: bytes, **options: Any) -> bytes:
    """Return the packed form of an archive that came through a pipe."""
    out = io.BytesIO()
    pack(OneWay(data), out, **options)
    return out.getvalue()


def tabled(parts: list[bytes], *, checksums: bool = True, **options: Any) -> bytes:
    """Return these parts as frames with a seek table, without the help of the package."""
    made = [zstandard.ZstdCompressor(**options).compress(part) for part in parts]
    rows = b""
    for part, frame in zip(parts, made, strict=True):
        rows += struct.pack("<II", len(frame), len(part))
        if checksums:
            rows += struct.pack("<I", xxh64(part))
    body = rows + struct.pack("<IBI", len(parts), 0x80 if checksums else 0, 0x8F92EAB1)
    return b"".join(made) + struct.pack("<II", 0x184D2A5E, len(body)) + body


def parts(data: bytes) -> list[bytes]:
    step = max(333, len(data) // 80)
    return [data[i : i + step] for i in range(0, len(data), step)]


def of_a_stream(data: bytes) -> bytes:
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


WIDE = zstandard.ZstdCompressionParameters(window_log=25, write_content_size=0)
FORMS: dict[str, Callable[[bytes], bytes]] = {  # the archive as other programs pack it
    "one frame": zstandard.ZstdCompressor().compress,
    "of a stream": of_a_stream,
    "many frames": lambda data: b"".join(map(zstandard.ZstdCompressor(write_checksum=True).compress, parts(data))),
    "skippable frame first": lambda data: b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + of_a_stream(data),
    "table without checksums": lambda data: tabled(parts(data), checksums=False),
    "table with checksums": lambda data: tabled(parts(data), write_checksum=True),
    "frames of unknown size": lambda data: tabled(parts(data), write_content_size=False),
    "wide windows": lambda data: tabled(parts(data), compression_params=WIDE),
    "one frame, with a table": lambda data: tabled([data]),
    "empty frames": lambda data: tabled([b"", data[:70], b"", b"", data[70:], b""]),
}


def xxh64(data: bytes) -> int:
    """Return the low half of the XXH64, as zstd itself computes it: the end of a frame that has a checksum."""
    return int.from_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(data)[-4:], "little")


def frames_of(data: bytes) -> list[Frame]:
    """Return the seek table of a packed archive, taken apart by CONVENTIONS.md alone."""
    count, descriptor, magic = struct.unpack("<IBI", data[-9:])
    assert (descriptor, magic) == (0x80, 0x8F92EAB1)
    table = data[-(12 * count + 17) :]
    assert struct.unpack("<II", table[:8]) == (0x184D2A5E, 12 * count + 9)
    out: list[Frame] = []
    offset = start = 0
    for i in range(count):
        nbytes, size, checksum = struct.unpack_from("<III", table, 8 + 12 * i)
        out.append(Frame(offset, nbytes, start, size, checksum))
        offset, start = offset + nbytes, start + size
    assert offset == len(data) - len(table)
    return out
