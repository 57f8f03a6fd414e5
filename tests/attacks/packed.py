"""Packed archives (`.zcr.zst`) that expand without end, or whose seek table lies; and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import packed_archives
import zstandard
from malformed import plain
from packed_faults import WAYS, WRONG, forged

import zcrecord
from attacks.broken import file
from attacks.catalogue import Attack, Door
from attacks.doors import command, every_question, mapped
from zcrecord import FormatError, LimitError, RecordError
from zcrecord.cli.dispatch import main

NAME = "m.zcr.zst"
GIB = 1 << 30


def from_bytes(path: Path) -> Callable[[], object]:
    """Load from bytes, and ask everything."""
    data = path.read_bytes()
    return lambda: every_question(zcrecord.load_record(data))


def one_tensor(path: Path) -> Callable[[], object]:
    """Load one tensor, which needs some frames alone."""
    data = path.read_bytes()
    return lambda: every_question(zcrecord.load_record(data, names="w"))


DOORS: dict[str, Door] = {
    "load_record": from_bytes,
    "load_record names": one_tensor,
    "load_record path": mapped,
    "zcrecord verify": command(main, "verify"),
    "zcrecord unpack": command(main, "unpack", after=lambda path: [str(path.parent / "out.zcr")]),
}
WHOLE = frozenset(DOORS) - {"load_record names"}
HARMLESS = file(lambda: packed_archives.tabled([plain().seal()]), NAME)


def zeros(nbytes: int, *, sized: bool = True) -> bytes:
    """Return a frame that expands to zeros."""
    piece = bytes(1 << 20)
    made = zstandard.ZstdCompressor(level=1, write_checksum=False).compressobj(size=nbytes if sized else -1)
    return b"".join([*(made.compress(piece) for _ in range(nbytes >> 20)), made.flush()])


def bomb(*, sized: bool) -> bytes:
    """Return the ends of an archive around 4 GiB of zeros, as frames without a table."""
    data = plain().seal()
    ends = [zstandard.ZstdCompressor().compress(part) for part in (data[:64], data[-64:])]
    return ends[0] + zeros(GIB // 4, sized=sized) * 16 + ends[1]


def tabled_bomb() -> bytes:
    """Return the same with a table that tells the truth."""
    data = plain().seal()
    rows, frames = [], []
    middle = zeros(GIB // 4)
    for frame, size in [
        (zstandard.ZstdCompressor().compress(data[:64]), 64), *[(middle, GIB // 4)] * 16,
        (zstandard.ZstdCompressor().compress(data[-64:]), 64),
    ]:  # fmt: skip
        frames.append(frame)
        rows.append((len(frame), size))
    body = b"".join(a.to_bytes(4, "little") + b.to_bytes(4, "little") for a, b in rows)
    body += len(rows).to_bytes(4, "little") + b"\0" + (0x8F92EAB1).to_bytes(4, "little")
    head = (0x184D2A5E).to_bytes(4, "little") + len(body).to_bytes(4, "little")
    return b"".join(frames) + head + body


def index_of_zeros() -> bytes:
    """Return a header that claims an index of 1.5 GiB, and frames of zeros for it."""
    f = plain()
    size = 6 * (GIB // 4)
    f.ends.update(index_size=size, payload_offset=64 + size, archive_size=size + 192)
    ends = f.seal()
    parts = [zstandard.ZstdCompressor().compress(part) for part in (ends[:64], bytes(64) + ends[-64:])]
    return parts[0] + zeros(GIB // 4) * 6 + parts[1]


def skippable() -> bytes:
    """Return 100,000 empty skippable frames, then an archive."""
    return b"\x50\x2a\x4d\x18\0\0\0\0" * 100_000 + zstandard.ZstdCompressor().compress(plain().seal())


def attack(
    name: str, rules: str, make: Callable[[], bytes], error: type[RecordError] | None = None, message: str = "",
    doors: frozenset[str] | None = WHOLE,
) -> Attack:  # fmt: skip
    return Attack(name=name, rules=tuple(rules.split()), make=file(make, NAME), error=error, message=message,
                  doors=doors)  # fmt: skip


LOADING = frozenset({"load_record", "load_record path", "zcrecord verify"})
MORE = "holds more than the archive's 960 bytes"
CLAIM = "packed bytes would take [0-9]+ bytes of memory|no room in memory|trailer: it is not that|" + MORE
ATTACKS: tuple[Attack, ...] = (
    *(
        attack(f"table: {what}", "R83 R84", partial(bytes, data), error, message)
        for what, (data, error, message) in WRONG.items()
        if what != "terabytes"
    ),
    *(
        attack(f"two archives: {way.__name__.replace('_', ' ')}", "R84", partial(forged, way), FormatError,
               r"frame \[.*(is not one zstd frame|holds)")
        for way in WAYS
    ),
    attack("table of terabytes", "R83", lambda: WRONG["terabytes"][0], LimitError, CLAIM, LOADING),
    attack("frames of 4 GiB without a table", "R85", lambda: bomb(sized=True), FormatError, MORE),
    attack("frames of 4 GiB that do not say so", "R85", lambda: bomb(sized=False), FormatError, MORE),
    attack("frames of 4 GiB and a table that tells the truth", "R83 R84", tabled_bomb, LimitError, CLAIM, LOADING),
    attack("index of 1.5 GiB of zeros", "R17 R85", index_of_zeros, LimitError,
           "its index takes more than 64 times|bytes of memory"),
    attack("100,000 skippable frames", "R85", skippable),
    attack("packed again and again", "R81", lambda: packed_archives.tabled([packed_archives.tabled([plain().seal()])]),
           FormatError, "this is a zstd stream|magic is missing|not a"),
)  # fmt: skip
