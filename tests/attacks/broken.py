"""Archives in which one numbered rule of FORMAT.md is broken and nothing else: those of the tests, and what they lack.

The cases are those of `tests/cases/malformed_*.py`, which the tests of `codec` show at every question; here
they go through every door, their cost is measured, and each rule that readers check needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import malformed_attributes as attributes
import malformed_contents as contents
import malformed_header as header
import malformed_index as index
import malformed_modules as modules
import malformed_names as names
import malformed_payloads as payloads
import malformed_tensors as tensors
import numpy as np
from forge import Forge
from malformed import Case, plain, rich, saved, sequence

from attacks.catalogue import Attack, Doors, attack, file
from attacks.doors import ARCHIVE_DOORS, FULL_DOORS
from zcrecord import IntegrityError, LimitError

# What goes wrong with one rule does so on opening, whatever is asked then: not all commands need to be tried. The
# path is opened at the level "index".
LEFT_OUT = {"load_record index", "zcrecord info", "zcrecord tree"}
DOORS = {name: door for name, door in ARCHIVE_DOORS.items() if name not in LEFT_OUT}


HARMLESS = file(lambda: rich().seal())


def sealed(start: Callable[[], Forge], change: Callable[[Forge], Any]) -> Callable[[], bytes]:
    """Return a function that makes an archive, takes it apart, changes it and seals it."""

    def made() -> bytes:
        archive = start()
        change(archive)
        return archive.seal()

    return made


def attacks(start: Callable[[], Forge], found: Iterable[Case], of: str, doors: Doors = None) -> Iterator[Attack]:
    for case in found:
        make = file(sealed(start, case.change))
        yield attack(f"{case.rule} {of}: {case.what}", case.rule, make, case.error, case.message, doors)


def nested() -> Forge:
    return Forge(saved({"w": np.ones(1), "m": {"x": np.ones(1)}}))


def spans() -> Iterator[Case]:
    """Yield every kind of text with every fault that a span can have."""

    def put(target: names.Target, span: Callable[[Forge], tuple[int, int]]) -> Callable[[Forge], Any]:
        return lambda f: target.put(f, *span(f))

    faults: list[tuple[str, str, Callable[[Forge], tuple[int, int]], str]] = [
        ("R27", "past the pool", lambda f: (len(f.columns["text"]), 1), ""),
        ("R27", "end wraps around", lambda f: (2**32 - 2, 3), ""),
        ("R27", "not followed by NUL", lambda f: (f.text(b"longer")[0], 3), ""),
        ("R28", "inside a character", lambda f: (f.text("é".encode())[0] + 1, 1), ""),
        ("R28", "ends inside a character", lambda f: (f.text(b"\xc3\0x")[0], 1), "UTF-8"),
        ("R29", "NUL inside", lambda f: f.text(b"a\0b"), ""),
        ("R29", "empty", lambda f: f.text(b""), ""),
    ]
    for rule, what, span, why in faults:
        for target in names.TARGETS:
            if (what == "NUL inside" and target.may_hold_nul) or (what == "empty" and target.may_be_empty):
                continue
            yield Case(rule, f"{target.what}: {what}", put(target, span), why or target.message)


def twins(f: Forge) -> None:
    f.set("payloads", 3, offset=f.get("payloads", 2, "offset"), digest=1)
    del f.payload[-64:]


def names_descend(f: Forge) -> None:
    f.columns["by_name"][:] = f.columns["by_name"][::-1].copy()


def same_name(f: Forge) -> None:
    f.columns["by_name"][:] = f.columns["by_name"][0]


def deep(f: Forge) -> None:
    level: dict[str, Any] = {}
    for _ in range(99):
        level = {"m": level}
    f.columns, f.payload = Forge(saved(level)).columns, bytearray()
    rows = f.columns["modules"]
    f.add("modules", rows[-1:])
    rows = f.columns["modules"]
    rows["end"] = len(rows)
    rows["parent"][-1], rows["place"][-1] = len(rows) - 2, 0
    name = f.name(rows[-2]).encode() + b".m"
    f.rename("modules", len(rows) - 1, name)


ASCEND = r"by_name\[\d\]: names are not strictly ascending"
MORE = [
    Case("R17", "CRC of the index", lambda f: f.ends.update(index_crc=1), "^index: its CRC does not", IntegrityError),
    Case("R32", "names descend", names_descend, ASCEND),
    Case("R32", "one tensor again and again", same_name, ASCEND),
    Case("R60", "twins of two digests", twins, "digest"),
    Case("R60", "digests of no kind", lambda f: setattr(f, "digest_kind", 0), "digest"),
    Case("R61", "payload that nothing uses", lambda f: f.set("tensors", "t002", payload=1),
         r"^payloads\[2\]: no tensor and no attribute uses it$"),
]  # fmt: skip
GAPS = [Case("R74", "byte in a gap", lambda f: f.payload.__setitem__(20, 1), "not zero")]


class Group(NamedTuple):
    """Cases that start from one archive: its maker, a word for it, and the doors that have to refuse them."""

    start: Callable[[], Forge]
    cases: Iterable[Case]
    of: str
    doors: Doors = None


GROUPS = (
    Group(plain, header.FRONT, "front"),
    Group(lambda: plain(front=False), header.BACK, "back"),
    Group(lambda: plain(front=False, sealed=False), header.UNSEALED, "unsealed"),
    Group(rich, [*index.OPEN, *index.INDEX], "index"),
    Group(rich, tensors.CASES, "tensor"),
    Group(lambda: sequence(4), payloads.CASES, "payload"),
    Group(rich, modules.CASES, "module"),
    Group(lambda: sequence(4), modules.FLAT, "flat"),
    Group(nested, modules.NESTED, "nested"),
    Group(rich, attributes.CASES, "attribute"),
    Group(rich, names.FULL_NAMES, "names"),
    Group(rich, contents.CASES, "contents", FULL_DOORS),
    Group(lambda: sequence(4), MORE, "more"),
    Group(lambda: sequence(4), GAPS, "gaps", FULL_DOORS),
    Group(lambda: sequence(1), [Case("R40", "101 deep", deep, "nested more than 100 deep", LimitError)], "deep"),
    Group(rich, list(spans()), "span"),
)
ATTACKS: tuple[Attack, ...] = tuple(attack for group in GROUPS for attack in attacks(*group))
