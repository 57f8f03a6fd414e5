"""Archives among other bytes, opened at a known place: from flash by the header, at a file's end by the trailer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import windows
from malformed import plain, saved

import zcrecord
from attacks.broken import HARMLESS as HARMLESS
from attacks.broken import file
from attacks.catalogue import Attack, Door
from attacks.doors import every_question
from zcrecord import FormatError, IntegrityError, RecordError
from zcrecord.archive.archive import Embedded


def opened(embedded: Embedded) -> Door:
    """Load from bytes at their start or end, and ask everything."""

    def door(path: Path) -> Callable[[], object]:
        data = path.read_bytes()
        return lambda: every_question(zcrecord.load_record(data, embedded=embedded))

    return door


DOORS: dict[str, Door] = {"prefix": opened("prefix"), "suffix": opened("suffix")}
PREFIX, SUFFIX = frozenset({"prefix"}), frozenset({"suffix"})


def whole() -> bytes:
    return plain().seal()


def unsealed() -> bytes:
    return plain(front=False, sealed=False).seal()


def claiming(size: int) -> bytes:
    """Return an archive whose ends claim another size."""
    f = plain()
    f.ends["archive_size"] = size
    return f.seal()


def inner() -> bytes:
    return saved({"w": np.frombuffer(whole(), np.uint8)})


def attack(
    name: str, rule: str, make: Callable[[], bytes], message: str, doors: frozenset[str],
    error: type[RecordError] = FormatError,
) -> Attack:  # fmt: skip
    return Attack(name=name, rules=(rule,), make=file(make), error=error, message=message, doors=doors)


NONE_ENDS = "^trailer: no archive of a size up to"
ATTACKS: tuple[Attack, ...] = (
    attack("unsealed header", "R15", lambda: unsealed() + bytes(9), "not sealed|magic", PREFIX),
    attack("cut off by a byte", "R15", lambda: whole()[:-1], "only [0-9]+ are there|magic", PREFIX | SUFFIX),
    attack("header that claims 2^56 bytes", "R15", lambda: claiming(2**56), "are there|no archive of a size",
           PREFIX | SUFFIX),
    attack("header that claims 127 bytes", "R15", lambda: claiming(127), "", PREFIX | SUFFIX),
    attack("header that claims 128 bytes", "R15", lambda: claiming(128), "", PREFIX | SUFFIX),
    attack("trailer of more than there is", "R16", lambda: whole()[64:], NONE_ENDS + "|magic", PREFIX | SUFFIX),
    attack("bytes behind the trailer", "R16", lambda: whole() + b"x", "^trailer: its magic is missing", SUFFIX),
    attack("trailer inside a payload", "R16", lambda: inner()[: inner().rindex(whole()) + len(whole()) - 8],
           "^trailer: its magic is missing|are there", PREFIX | SUFFIX),
    attack("header of one, trailer of another, bytes between", "R8", lambda: whole()[:64] + bytes(99) + whole()[-64:],
           "", PREFIX | SUFFIX),
    attack("index of another", "R17", lambda: bytes(3) + crossed(), "its CRC|not a zcrecord|magic", SUFFIX,
           IntegrityError),
    *(attack(f"signed program: {name}", "R16", partial(bytes, data), "magic|^trailer: no archive of a size", SUFFIX)
      for name, data in windows.refused()),
)  # fmt: skip


def crossed() -> bytes:
    """Return an archive whose index is another's."""
    f = plain()
    f.ends["index_crc"] = 1
    return f.seal()
