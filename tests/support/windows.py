"""Windows programs made by hand: headers that say where the certificate table is, and archives before and inside it.

Nothing here runs, and no signature is one: readers look at numbers alone. Programs that do are test_attach_programs's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from malformed import plain, saved
from readers import Question

ARCHIVE = plain().seal()
UNSEALED = plain(front=False, sealed=False).seal()
OTHER = saved({"other": 1})
TOP = 2**32 - 1


def program(
    *,
    wide: bool = True,
    table: tuple[int, int] = (0, 0),
    pe: int = 128,
    magic: bytes = b"PE\0\0",
    kind: int | None = None,
    directories: int = 16,
    size: int = 512,
) -> bytes:
    """Return the headers of a program of 64 or 32 bits, `pe` where they start, whose certificate `table` lies there."""
    kind = (0x20B if wide else 0x10B) if kind is None else kind
    optional = struct.pack("<H", kind) + bytes(106 if wide else 90) + struct.pack("<I", directories)
    headers = magic + bytes(20) + optional + bytes(32) + struct.pack("<II", *table) + bytes(88)
    start = (b"MZ" + bytes(58) + struct.pack("<I", pe)).ljust(pe, b"\0")
    return (start + headers).ljust(size, b"\0")


def signed(
    archive: bytes = ARCHIVE,
    signature: bytes = b"\1" * 24,
    *,
    padding: bytes = b"",
    moved: tuple[int, int] = (0, 0),
    behind: bytes = b"",
    **headers: int | bool | bytes,
) -> bytes:
    """Return a program with an archive, signed after: padding, and a table, whose numbers are wrong by `moved`."""
    start = program(**headers)  # type: ignore[arg-type]
    end = len(start) + len(archive) + len(padding)
    table = ((end + moved[0]) & TOP, (len(signature) + moved[1]) & TOP)
    return program(table=table, **headers) + archive + padding + signature + behind  # type: ignore[arg-type]


def found() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield programs that are opened as a suffix: a name, the program, and its archive."""
    yield "64 bits", signed(), ARCHIVE
    yield "32 bits", signed(wide=False), ARCHIVE
    yield "headers at an odd place", signed(pe=131), ARCHIVE
    yield "headers up to the archive", signed(size=0), ARCHIVE
    yield "no more than five directories", signed(directories=5), ARCHIVE
    yield "an archive whose header is not sealed", signed(UNSEALED), UNSEALED
    for n in range(1, 8):
        yield f"{n} zeros of padding", signed(padding=bytes(n)), ARCHIVE
    yield "padding before 32 bits", signed(padding=bytes(4), wide=False), ARCHIVE
    yield "an archive in the table", signed(signature=bytes(8) + OTHER), ARCHIVE
    yield "an archive as the table", signed(signature=OTHER), ARCHIVE
    # What is no signature at the end is none to step over.
    yield "an archive behind the table", signed(behind=OTHER), OTHER
    yield "no table", program() + ARCHIVE, ARCHIVE
    yield "a table of nothing at the end", signed(signature=b""), ARCHIVE
    yield "four directories, an archive in the table", signed(signature=OTHER, directories=4), OTHER
    yield "other magic, an archive in the table", signed(signature=OTHER, magic=b"PE\0\1"), OTHER
    yield "a kind that is not known, an archive in the table", signed(signature=OTHER, kind=0x107), OTHER
    for name, moved in (("past the end", (0, 8)), ("before the end", (0, -8)), ("at the end", (len(OTHER), 0))):
        yield f"a table that ends {name}", signed(signature=OTHER, moved=moved), OTHER
    whole = program(table=(TOP - 255, len(program()) + len(OTHER) + 256)) + OTHER
    yield "a table whose end wraps to the file's", whole, OTHER
    for pe in (len(whole) - 1, len(whole), TOP, 2**31):
        yield f"headers at {pe:#x}", b"MZ" + bytes(58) + struct.pack("<I", pe) + bytes(448) + OTHER, OTHER


def refused() -> Iterator[tuple[str, bytes]]:
    """Yield programs that no reader opens as a suffix."""
    yield "no archive before the signature", program(table=(512, 24)) + b"\1" * 24
    yield "an archive in the table alone", program(table=(512, len(OTHER))) + OTHER
    yield "eight zeros of padding", signed(padding=bytes(8))
    yield "padding that is not zero", signed(padding=b"\0\1\0")
    yield "an archive whose start is gone", signed(ARCHIVE[64:])
    yield "an archive whose trailer is cut", signed(ARCHIVE[:-8])
    for at in (0, 1, 63, 64, 127, 128, 511):
        size = len(program()) + len(ARCHIVE)
        yield f"a table from byte {at} on", program(table=(at, size - at)) + ARCHIVE
    whole = signed()
    for size in (128 + 159, 128 + 175, 128 + 176):
        yield f"headers cut off after {size} bytes", whole[:size]


def questions() -> list[Question]:
    """Return inputs on which all readers have to agree: the programs above, cut off, and with other numbers."""
    programs = [*(data for _, data, _ in found()), *(data for _, data in refused())]
    for whole in (signed(), signed(wide=False, padding=bytes(3))):
        programs += [whole[:size] for size in range(0, len(whole), 3)]
        directories = 128 + (136 if whole[128 + 25] == 2 else 120)
        for at in (60, 128, 128 + 24, directories - 4, directories + 32, directories + 36):
            old = struct.unpack_from("<I", whole, at)[0]
            values = {old ^ 1 << bit for bit in range(32)} | {old - 8, old + 8, 0, 1, TOP, len(whole), len(whole) - 1}
            programs += [whole[:at] + struct.pack("<I", value & TOP) + whole[at + 4 :] for value in sorted(values)]
    return [Question(data, "s", "f") for data in programs]
