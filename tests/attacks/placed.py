"""Archives among other bytes, opened at a known place: from flash by the header, at a file's end by the trailer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import windows
from malformed import plain
from malformed_header import both

from attacks import catalogue
from attacks.broken import HARMLESS as HARMLESS
from attacks.broken import sealed
from attacks.catalogue import Attack, Door, file
from attacks.doors import loaded
from attacks.tricks import inner_at_the_end, whole
from zcrecord import FormatError, IntegrityError, RecordError

DOORS: dict[str, Door] = {"prefix": loaded(embedded="prefix"), "suffix": loaded(embedded="suffix")}
PREFIX, SUFFIX = frozenset({"prefix"}), frozenset({"suffix"})


def claiming(size: int) -> Callable[[], bytes]:
    return sealed(plain, both(archive_size=size))


def attack(
    name: str, rule: str, make: Callable[[], bytes], message: str, doors: frozenset[str],
    error: type[RecordError] = FormatError,
) -> Attack:  # fmt: skip
    return catalogue.attack(name, rule, file(make), error, message, doors)


NONE_ENDS = "^trailer: no archive of a size up to"
ATTACKS: tuple[Attack, ...] = (
    attack("unsealed header", "R15", lambda: plain(front=False, sealed=False).seal() + bytes(9),
           "not sealed|magic", PREFIX),
    attack("cut off by a byte", "R15", lambda: whole()[:-1], "only [0-9]+ are there|magic", PREFIX | SUFFIX),
    attack("header that claims 2^56 bytes", "R15", claiming(2**56), "are there|no archive of a size",
           PREFIX | SUFFIX),
    attack("header that claims 127 bytes", "R15", claiming(127), "", PREFIX | SUFFIX),
    attack("header that claims 128 bytes", "R15", claiming(128), "", PREFIX | SUFFIX),
    attack("trailer of more than there is", "R16", lambda: whole()[64:], NONE_ENDS + "|magic", PREFIX | SUFFIX),
    attack("bytes behind the trailer", "R16", lambda: whole() + b"x", "^trailer: its magic is missing", SUFFIX),
    attack("trailer inside a payload", "R16", lambda: inner_at_the_end()[:-8],
           "^trailer: its magic is missing|are there|not sealed", PREFIX | SUFFIX),
    attack("header of one, trailer of another, bytes between", "R8", lambda: whole()[:64] + bytes(99) + whole()[-64:],
           "", PREFIX | SUFFIX),
    attack("index of another", "R17", lambda: bytes(3) + sealed(plain, both(index_crc=1))(),
           "its CRC|not a zcrecord|magic", SUFFIX, IntegrityError),
    *(attack(f"signed program: {name}", "R16", partial(bytes, data), "magic|^trailer: no archive of a size", SUFFIX)
      for name, data in windows.refused()),
)  # fmt: skip
