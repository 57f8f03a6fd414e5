"""Packed archives (`.zcr.zst`) that expand without end, or whose seek table lies; and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import packed_archives
import zstandard
from malformed import plain
from packed_faults import WAYS, WRONG, forged

from attacks import catalogue
from attacks.catalogue import Attack, Door, Doors, file
from attacks.doors import command, loaded, mapped
from zcrecord import FormatError, LimitError, RecordError
from zcrecord.cli.dispatch import main

NAME = "m.zcr.zst"
GIB = 1 << 30


DOORS: dict[str, Door] = {
    "load_record": loaded(),
    "load_record names": loaded(names="w"),  # some frames alone are needed
    "load_record path": mapped,
    "zcrecord verify": command(main, "verify"),
    "zcrecord unpack": command(main, "unpack", after=lambda path: [str(path.parent / "out.zcr")]),
}
WHOLE = frozenset(DOORS) - {"load_record names"}
HARMLESS = file(lambda: packed_archives.tabled([plain().seal()]), NAME)


def zeros(nbytes: int, *, sized: bool = True) -> bytes:
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
    data, middle = plain().seal(), zeros(GIB // 4)
    ends = [(zstandard.ZstdCompressor().compress(part), 64) for part in (data[:64], data[-64:])]
    frames = [ends[0], *[(middle, GIB // 4)] * 16, ends[1]]
    body = b"".join(len(frame).to_bytes(4, "little") + size.to_bytes(4, "little") for frame, size in frames)
    body += len(frames).to_bytes(4, "little") + b"\0" + (0x8F92EAB1).to_bytes(4, "little")
    head = (0x184D2A5E).to_bytes(4, "little") + len(body).to_bytes(4, "little")
    return b"".join(frame for frame, _ in frames) + head + body


def index_of_zeros() -> bytes:
    """Return a header that claims an index of 1.5 GiB, and frames of zeros for it."""
    f = plain()
    size = 6 * (GIB // 4)
    f.ends.update(index_size=size, payload_offset=64 + size, archive_size=size + 192)
    ends = f.seal()
    parts = [zstandard.ZstdCompressor().compress(part) for part in (ends[:64], bytes(64) + ends[-64:])]
    return parts[0] + zeros(GIB // 4) * 6 + parts[1]


def attack(
    name: str, rules: str, make: Callable[[], bytes], error: type[RecordError] | None = None, message: str = "",
    doors: Doors = WHOLE,
) -> Attack:  # fmt: skip
    return catalogue.attack(name, rules, file(make, NAME), error, message, doors)


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
    attack("100,000 skippable frames", "R85",
           lambda: b"\x50\x2a\x4d\x18\0\0\0\0" * 100_000 + zstandard.ZstdCompressor().compress(plain().seal())),
    attack("packed again and again", "R81", lambda: packed_archives.tabled([packed_archives.tabled([plain().seal()])]),
           FormatError, "this is a zstd stream|magic is missing|not a"),
)  # fmt: skip
