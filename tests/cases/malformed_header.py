"""Archives whose header or trailer breaks one rule of FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from forge import END, Forge
from malformed import Case

from zcrecord import IntegrityError, LimitError, VersionError

Change = Callable[[Forge], Any]


def both(**fields: Any) -> Change:
    return lambda f: f.ends.update(fields)


def header(**fields: Any) -> Change:
    return lambda f: f.header.update(fields)


def trailer(**fields: Any) -> Change:
    return lambda f: f.trailer.update(fields)


def unsealed_trailer(f: Forge) -> None:
    """Make the trailer what an unsealed header is."""
    kept = {"magic", "version", "alignment_log2", "crc"}
    f.trailer.update({str(name): 0 for name in END.names or () if name not in kept})


def widened(f: Forge) -> None:
    """Put 64 zeros too many between a front index and the payloads."""
    f.widen = 64


def shorter(f: Forge) -> None:
    f.ends["archive_size"] = len(f.seal()) - 8


def longer(f: Forge) -> None:
    """Claim 64 bytes more than there are, all of them the index's."""
    end = np.frombuffer(f.seal()[-64:], END)[0]
    f.trailer.update(archive_size=int(end["archive_size"]) + 64, index_size=int(end["index_size"]) + 64)


# fmt: off
FRONT = [
    Case("R1", "magic of the trailer", trailer(magic=b"\x89ZCR\r\n\x1a\r"), "^trailer: its magic is missing; the"),
    Case("R2", "next version", both(version=2), "format version 2, this reader knows 1; upgrade", VersionError),
    Case("R2", "version of the trailer", trailer(version=255), "^trailer: format version 255", VersionError),
    Case("R3", "CRC of the header", header(crc=1), "^header: its CRC does not match; .*copy it again", IntegrityError),
    Case("R3", "CRC of the trailer", trailer(crc=1), "^trailer: its CRC does not match", IntegrityError),
    Case("R4", "alignment of 8", both(alignment_log2=3), r"^header: alignment 2\^3 is outside 2\^4 to 2\^16"),
    Case("R4", "alignment of 2^17", both(alignment_log2=17), r"^header: alignment 2\^17 is outside"),
    Case("R4", "alignment of 2^255", both(alignment_log2=255), r"^header: alignment 2\^255 is outside"),
    Case("R4", "alignment of the trailer", trailer(alignment_log2=0), r"^trailer: alignment 2\^0 is outside"),
    Case("R5", "base below alignment", both(base_alignment_log2=5), r"^header: base alignment 2\^5 is outside 2\^6 to"),
    Case("R5", "base of 2^17", both(base_alignment_log2=17), r"^header: base alignment 2\^17 is outside"),
    Case("R5", "base of the trailer", trailer(base_alignment_log2=0), r"^trailer: base alignment 2\^0 is outside"),
    Case("R6", "byte 11", both(zero8=1), "^header: reserved bytes 11 to 15 are not zero"),
    Case("R6", "byte 15", both(zero32=1 << 24), "^header: reserved bytes 11 to 15 are not zero"),
    Case("R7", "feature 0", both(required_features=1), r"needs features \(bits \[0\]\) .*upgrade", VersionError),
    Case("R7", "two features", both(required_features=1 << 63 | 2), r"features \(bits \[1, 63\]\)", VersionError),
    Case("R8", "header differs", header(index_crc=5), "^header and trailer differ; the file is damaged"),
    Case("R8", "trailer differs", trailer(base_alignment_log2=7), "^header and trailer differ; the file is damaged"),
    Case("R8", "trailer not sealed", unsealed_trailer, "^trailer: not sealed"),
    Case("R9", "archive_size over 2^56", both(archive_size=2**56 + 64), r"^header: archive_size \d+ is", LimitError),
    Case("R9", "archive_size of 2^64-1", both(archive_size=2**64 - 1), r"^header: archive_size \d+ is", LimitError),
    Case("R9", "archive_size 2^56", both(archive_size=2**56), "^the archive has 72057594037927936 bytes, the source"),
    Case("R10", "index_size 0", both(index_size=0), r"^header: index_size 0 is not a multiple of 8 from 8 to 2\^31"),
    Case("R10", "index_size no multiple of 8", both(index_size=100), "^header: index_size 100 is not"),
    Case("R10", "index_size 2^31", both(index_size=2**31), "^header: index_size 2147483648 is not"),
    Case("R10", "index_size 2^64-8", both(index_size=2**64 - 8), "^header: index_size 18446744073709551608 is not"),
    Case("R11", "payload_offset unaligned", both(payload_offset=4104), "^header: payload_offset 4104 is unaligned or"),
    Case("R11", "payload_offset past the end", both(payload_offset=2**40), "^header: payload_offset 1099511627776 is"),
    Case("R11", "archive_size of one end", both(archive_size=64), "^header: payload_offset [0-9]+ is unaligned or"),
    Case("R12", "wide gap behind the index", widened, "^header: [0-9]+ bytes between index and payloads, at most 63"),
    Case("R12", "payloads inside the index", both(payload_offset=128), "^header: payload_offset 128 fits neither"),
    Case("R12", "index_offset 0", both(index_offset=0), "^header: payload_offset [0-9]+ fits neither index order"),
    Case("R13", "payloads end early", lambda f: f.payload.extend(bytes(64)), "^payloads end at 0x.* not within its"),
    Case("R13", "payloads without a payload", lambda f: f.drop("payloads"), "^payloads end at 0x0 of a region of 0x"),
    Case("R14", "archive_size too large", both(archive_size=2**20), "has 1048576 bytes, the source [0-9]+; it is"),
    Case("R14", "archive_size too small", shorter, "has [0-9]+ bytes, the source [0-9]+; it is followed by other"),
]
BACK = [
    Case("R12", "payload_offset of none", both(payload_offset=128), "^header: payload_offset 128 fits neither index"),
    Case("R12", "index before the payloads", both(index_offset=0), "^header: index_offset 0 is unaligned or before"),
    Case("R12", "index unaligned", both(index_offset=72), "^header: index_offset 72 is unaligned or before the"),
    Case("R12", "index ends early", both(index_size=8), "^header: the index ends at 0x[0-9a-f]+, the trailer starts"),
    Case("R12", "index ends beyond 2^64", both(index_offset=2**64 - 64), "^header: the index ends at 0x1[0-9a-f]{16},"),
    Case("R13", "payloads end early", lambda f: f.payload.extend(bytes(64)), "^payloads end at 0x.* not within its"),
]
UNSEALED = [
    Case("R1", "magic of the trailer", trailer(magic=b"1" * 8), "^trailer: its magic is missing; the file is"),
    Case("R3", "CRC of the header", header(crc=1), "^header: its CRC does not match", IntegrityError),
    Case("R4", "alignment of the header", header(alignment_log2=3), r"^header: alignment 2\^3 is outside"),
    Case("R8", "alignments differ", header(alignment_log2=5), "^header and trailer differ in their alignment; the"),
    Case("R8", "a byte that unsealed headers keep zero", header(index_crc=1), r"^header: base alignment 2\^0 is"),
    Case("R8", "trailer not sealed either", unsealed_trailer, "^trailer: not sealed"),
    Case("R14", "archive_size too large", longer, "^trailer: the archive has [0-9]+ bytes, the source [0-9]+; copy"),
    Case("R12", "index ends early", trailer(index_size=8), "^trailer: the index ends at 0x[0-9a-f]+, the trailer"),
]
