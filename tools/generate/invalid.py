"""The invalid archives of tests/conformance: each breaks the rule of schema/FORMAT.md that its name begins with.

They are the cases of the tests of malformed archives, each with the answer that is due at each level: `accepted`, or
the rule that refuses it; at `touch` where single tensors are refused, that for each of a few names. Cases of more than
6,000 bytes are left out. An archive that is committed stays as it is, whatever becomes of its case.
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
from attacks import broken
from forge import Forge
from malformed import Case, plain, rich
from plain_touch import Plain

from zcrecord.codec import layout

from . import ROOT, committed

FOLDER = Path("tests/conformance/invalid")
ANSWERS = FOLDER.with_suffix(".json")
FOLDERS: tuple[Path, ...] = (FOLDER,)
MOST = 6000  # bytes of an archive of the kit
OPEN = {"front", "back", "unsealed", "later"}

OTHERS = [Case("R2", f"version {n}", header.both(version=n), "") for n in (0, 2) if n != layout.VERSION]
LATER = broken.Group(plain, OTHERS, "later")
Answer = dict[str, Any]


def answer(case: Case, of: str, data: bytes) -> Answer:
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


def name_of(rule: str, of: str, what: str) -> str:
    """Return the name of an archive; names sort by their rules."""
    text = what.lower().replace("-1", " less 1").replace("+1", " more 1")
    return f"R{int(rule[1:]):02}-{of}-{re.sub(r'[^a-z0-9]+', '_', text).strip('_')}"


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


def forged() -> Iterator[tuple[str, Answer, bytes]]:
    """Yield name, answers and bytes of the cases of the tests."""
    for group in (*broken.GROUPS, LATER):
        for case in group.cases:
            archive = group.start()
            if group.start is rich:
                pack(archive)
            case.change(archive)
            data = archive.seal()
            if len(data) <= MOST:
                yield name_of(case.rule, group.of, case.what), answer(case, group.of, data), data


@cache
def made() -> dict[str, tuple[Answer, bytes]]:
    """Return answers and bytes of every archive that has a case, by its name."""
    out: dict[str, tuple[Answer, bytes]] = {}
    for name, due, data in forged():
        if name in out and out[name][1] != data:
            raise AssertionError(f"{name}: two archives have this name")
        out[name] = due, data
    return out


def files() -> dict[Path, str | bytes]:
    """Return every archive, and the answers; those that are committed as they are."""
    answers = json.loads((ROOT / ANSWERS).read_text(encoding="utf-8")) | {
        name: due for name, (due, _) in made().items()
    }
    archives: dict[Path, str | bytes] = {FOLDER / f"{name}.zcr": data for name, (_, data) in made().items()}
    lines = [f" {json.dumps(name)}: {json.dumps(answers[name])}" for name in sorted(answers)]
    return archives | committed(FOLDER) | {ANSWERS: "{\n" + ",\n".join(lines) + "\n}\n"}
