"""The invalid archives of tests/conformance: each breaks the rule of schema/FORMAT.md that its name begins with.

They are the cases of the tests of malformed archives, each with the answer that is due at each level: `accepted`, or
the rule that refuses it; at `touch` where single tensors are refused, that for each of a few names. Cases of more than
6,000 bytes are left out. From version 1 on an archive that is there stays as it is, whatever becomes of its case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import malformed_header as header
import malformed_index as index
import numpy as np
import windows
from attacks import broken, tricks
from forge import Forge
from malformed import Case, plain, rich, saved
from plain_touch import Plain

from zcrecord.codec import layout

from . import ROOT, invalid_alone
from .golden import FOLDER as VALID

FOLDER = Path("tests/conformance/invalid")
ANSWERS = FOLDER.with_suffix(".json")
FOLDERS: tuple[Path, ...] = (FOLDER,)
MOST = 6000  # bytes of an archive of the kit
OPEN = {"front", "back", "unsealed", "later", "alone"}

OTHERS = [Case("R2", f"version {n}", header.both(version=n), "") for n in (0, 2) if n != layout.VERSION]
LATER = broken.Group(plain, OTHERS, "later")
Answer = dict[str, Any]


def version_of(root: Path) -> int:
    """Return the version of the archives that are committed; 0 if there are none."""
    tiny = root / VALID / "tiny.zcr"
    return tiny.read_bytes()[8] if tiny.exists() else 0


COMMITTED = version_of(ROOT)  # before anything is written


def answer(case: Case, of: str, data: bytes) -> Answer:
    """Return the right answer at each level."""
    if of in OPEN or case in index.OPEN:
        return {"touch": case.rule, "index": case.rule, "full": case.rule}
    touch = looked_up(case.tensor, data)
    if of in ("contents", "gaps"):
        # A reader that gives strings has to look at their ends before (R71), one that gives bytes need not.
        return {"touch": touch, **({} if case.rule == "R71" else {"index": "accepted"}), "full": case.rule}
    return {"touch": touch, "index": case.rule, "full": case.rule}


def looked_up(suspect: str, data: bytes) -> Any:
    """Return the answers to the look-up of a few names, by the plainest reading of the section "Level `touch`".

    They are the tensor that a case is about, the first and the last of all names, and the one in their middle.
    """
    archive = Plain(data)
    names = sorted({name.decode() for name in archive.names()})
    chosen = dict.fromkeys((suspect, names[0], names[len(names) // 2], names[-1]) if names else (suspect,))
    return {name: archive.answer(name.encode()) for name in chosen if name in names} or "accepted"


def slug(text: str) -> str:
    """Return a text as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower().replace("-1", " less 1").replace("+1", " more 1")).strip("_")


def name_of(rule: str, of: str, what: str) -> str:
    """Return the name of an archive; names sort by their rules."""
    return f"R{int(rule[1:]):02}-{of}-{slug(what)}"


def forged() -> Iterator[tuple[str, Answer, bytes]]:
    """Yield name, answers and bytes of the cases of the tests."""
    for group in (*broken.GROUPS, LATER, *invalid_alone.GROUPS):
        for case in group.cases:
            archive = group.start()
            if group.start is rich:
                pack(archive)
            case.change(archive)
            data = archive.seal()
            if len(data) <= MOST:
                yield name_of(case.rule, group.of, case.what), answer(case, group.of, data), data


def pack(archive: Forge) -> None:
    """Move payloads together, to multiples of 16: the kit has some 270 archives that start from this one."""
    rows, payload = archive.columns["payloads"], bytearray()
    for row in rows:
        old = int(row["offset"])
        row["offset"] = len(payload)
        payload += archive.payload[old : old + int(row["nbytes"])]
        payload += bytes(-len(payload) % 16)
    archive.alignment_log2 = archive.base_log2 = 4
    archive.payload = payload


def refused(rule: str, embedded: str = "whole") -> Answer:
    """Return the answers where an archive is refused on opening."""
    opened = {} if embedded == "whole" else {"embedded": embedded}
    return {**opened, "touch": rule, "index": rule, "full": rule}


def placed() -> Iterator[tuple[str, Answer, bytes]]:
    """Yield archives that are cut off or lie among other bytes."""
    whole = plain().seal()
    for size in (0, 1, 8, 63, 64, 127):
        yield name_of("R1", "cut", f"{size} bytes"), refused("R1"), whole[:size]
    yield name_of("R14", "cut", "by a byte"), refused("R14"), whole[:-1]
    yield name_of("R14", "placed", "twice"), refused("R14"), whole * 2
    unsealed = plain(front=False, sealed=False).seal()
    yield name_of("R15", "placed", "unsealed"), refused("R15", "prefix"), unsealed + bytes(9)
    yield name_of("R15", "cut", "by a byte"), refused("R15", "prefix"), whole[:-1]
    cut = {"start gone": whole[64:], "first byte gone": whole[1:], "empty": b""}
    for what, data in {"bytes behind it": whole + b"x", **cut}.items():
        yield name_of("R16", "placed", what), refused("R16", "suffix"), data
    for what, data in list(windows.refused())[:6]:
        yield name_of("R16", "signed", what), refused("R16", "suffix"), data


def gaps() -> Iterator[tuple[str, Answer, bytes]]:
    """Yield archives whose gaps are not zeros."""
    for what, data in invalid_alone.changed_bytes():
        due = {"touch": looked_up("w", data), "index": "accepted", "full": "R74"}
        yield name_of("R74", "gap", what), due, data


def deep() -> tuple[str, Answer, bytes]:
    """Return modules nested 101 deep, all names the ends of one text."""
    return name_of("R40", "module", "101 deep"), {"touch": "accepted", "index": "R40", "full": "R40"}, chain(101)


def chain(depth: int) -> bytes:
    """Return modules nested so deep, the record itself included, whose names a, a.a, ... are the ends of one text."""
    archive = Forge(saved({}))
    rows = archive.columns["modules"] = np.repeat(archive.columns["modules"], depth)
    start, size = archive.text(b".".join([b"a"] * (depth - 1)))
    sizes = 2 * np.arange(1, depth) - 1
    rows["name"][1:], rows["name_size"][1:], rows["key_size"][1:] = start + size - sizes, sizes, 1
    rows["parent"][1:], rows["end"] = np.arange(depth - 1), depth
    return archive.seal()


def lists_used_up(over: int = 0) -> Forge:
    """Return an archive of 40 lists of zeros that have as many items as R30 allows, and `over` more."""
    f = tricks.attributes(40, {"n": [0, 0]})
    rows, start = f.columns["attributes"], f.add("words", np.zeros(100, "<u8"))
    rows["value"] = start
    items, rest = divmod(f.budget_left(), 16)
    each, more = divmod(items + over, len(rows))
    rows["value"] = start | (each + (np.arange(len(rows))[::-1] < more)).astype("<u8") << np.uint64(32)
    assert rest == 0 and each < 100 and f.budget_left() == -16 * over
    return f


def repeated() -> Iterator[tuple[str, Answer, bytes]]:
    """Yield indexes that repeat a byte too many of a text, and too many items of a list."""
    f = tricks.attributes(40, {"n": "a"}).use_up("attributes", "value", 1)
    yield name_of("R30", "budget", "a byte too many"), refused("R30") | {"touch": "accepted"}, f.seal()
    yield name_of("R31", "budget", "an item too many"), refused("R31") | {"touch": "accepted"}, lists_used_up(1).seal()
    f = tricks.attributes(60, {"n": [1, 2]})
    f.columns["attributes"]["value"] = f.add("words", np.zeros(200, "<u8")) | 200 << 32
    yield name_of("R31", "budget", "lists"), refused("R31") | {"touch": "accepted"}, f.seal()


@cache
def made() -> dict[str, tuple[Answer, bytes]]:
    """Return answers and bytes of every archive by its name."""
    out: dict[str, tuple[Answer, bytes]] = {}
    for name, due, data in (*forged(), *placed(), *repeated(), *gaps(), deep()):
        if name in out and out[name][1] != data:
            raise AssertionError(f"{name}: two archives have this name")
        out[name] = due, data
    return out


def files() -> dict[Path, str | bytes]:
    """Return every archive, and the answers; from version 1 on those that are there as they are."""
    answers = {name: due for name, (due, _) in made().items()}
    out: dict[Path, str | bytes] = {FOLDER / f"{name}.zcr": data for name, (_, data) in made().items()}
    if COMMITTED:
        answers = json.loads((ROOT / ANSWERS).read_text(encoding="utf-8")) | answers
        out |= {FOLDER / path.name: path.read_bytes() for path in sorted((ROOT / FOLDER).glob("*.zcr"))}
    lines = [f" {json.dumps(name)}: {json.dumps(answers[name])}" for name in sorted(answers)]
    return {**out, ANSWERS: "{\n" + ",\n".join(lines) + "\n}\n"}
