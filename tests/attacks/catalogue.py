"""Attacks, the answers they must get, and the answers they got.

A module of attacks has `ATTACKS`, a tuple of `Attack`; `DOORS`, the ways through which each is tried, by name;
`HARMLESS`, which makes a file that every door accepts; and, where a trick can be played on others, `PEERS`: for each of
them its doors. How an attack is run and measured is left to `attacks.running`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exhaustive import ALL

import zcrecord
from tools.measure import MIB
from zcrecord import FormatError, RecordError

MOST_BYTES = 64 * MIB  # that Python and numpy allocate, counted
# Measured, and judged under --all alone: several times what the slowest and largest take, on machines of any kind.
MOST_SECONDS, MOST_RESIDENT = 10.0, 256 * MIB

# What is done with an attack's file: what the call is given is made ready first, and only what it returns is measured.
Door = Callable[[Path], Callable[[], object]]
Doors = frozenset[str] | None
Maker = Callable[[Path], Path]
Outcome = Literal["refused", "either", "accepted"]


class Refused(Exception):  # not an error of this program's: the answer of another
    """A door that is no function of ours refused: a command with exit status 1 and one line, a peer with its error.

    The message is that line or error; doors raise it so that the answer's kind is "Refused" everywhere.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One trick.

    Attributes:
        name: a few words, unique in its module.
        rules: the rules it breaks or leans on: "R30", "O7", "X2".
        make: writes the file into an empty folder, and returns its path.
        error: exactly the error's type; None where the trick is legal and has to be harmless.
        message: a regular expression that the error's message has to contain a match of.
        doors: names of those that have to refuse it; every other may, in words of its own. None: all of them.
        peer: for each peer that the same trick can be played on, the function that makes its file.
    """

    name: str
    rules: tuple[str, ...]
    make: Maker
    error: type[RecordError] | None
    message: str = ""
    doors: Doors = None
    peer: Mapping[str, Maker] | None = None

    def outcome(self, door: str) -> Outcome:
        """Return the answer that is right at a door."""
        if self.error is None:
            return "accepted"
        return "refused" if self.doors is None or door in self.doors else "either"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to one attack at one door.

    Attributes:
        kind: the error's type, "Refused", "" if it was accepted; "hung" or "killed by SIG..." if the process was lost.
        message: the error's.
        nbytes: the most that Python and numpy had allocated for it, if that was counted.
        seconds: of the processor, all threads.
        resident: by how much the peak of resident memory exceeded what was resident before and the file.
    """

    attack: str
    door: str
    kind: str
    message: str
    nbytes: int = 0
    seconds: float = 0.0
    resident: int = 0


def file(data: Callable[[], bytes], name: str = "m.zcr") -> Maker:
    """Return a function that writes these bytes into a folder."""

    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data())
        return path

    return make


def attack(
    name: str, rules: str, make: Maker, error: type[RecordError] | None = FormatError, message: str = "",
    doors: Doors = None, peers: Iterable[str] = (),
) -> Attack:  # fmt: skip
    """Return an attack, on peers by the same file; `rules` with spaces between."""
    broken, peer = tuple(rules.split()), dict.fromkeys(peers, make)
    return Attack(name=name, rules=broken, make=make, error=error, message=message, doors=doors, peer=peer)


def wrong(attack: Attack, answer: Answer) -> str:
    """Return the fault of an answer, as a sentence; empty if it is as it has to be."""
    where = f"{attack.name}, at {answer.door}: "
    if answer.nbytes > MOST_BYTES:
        return f"{where}allocated {answer.nbytes / MIB:.0f} MiB, at most {MOST_BYTES // MIB}"
    if ALL and not answer.nbytes and answer.seconds > MOST_SECONDS:  # counting takes longer
        return f"{where}took {answer.seconds:.2f} s of the processor, at most {MOST_SECONDS:g}"
    if ALL and answer.resident > MOST_RESIDENT:
        return f"{where}took {answer.resident / MIB:.0f} MiB, at most {MOST_RESIDENT // MIB}"
    outcome = attack.outcome(answer.door)
    if not answer.kind:
        return f"{where}accepted" if outcome == "refused" else ""
    if outcome == "accepted" or attack.error is None:
        return f"{where}{answer.kind}: {answer.message}; it is legal"
    if outcome == "either" and issubclass(getattr(zcrecord, answer.kind, object), RecordError):
        return ""
    if answer.kind not in (attack.error.__name__, "Refused"):
        return f"{where}{answer.kind} in place of {attack.error.__name__}: {answer.message}"
    if not re.search(attack.message, answer.message):
        return f"{where}says '{answer.message}', which does not match '{attack.message}'"
    return ""


def rules_on_the_page(letter: str) -> list[str]:
    """Return the numbered rules of a table of SECURITY.md, which has to count them from 1."""
    page = (Path(__file__).parents[2] / "schema" / "SECURITY.md").read_text(encoding="utf-8")
    rules = re.findall(rf"^\| ({letter}\d+) \|", page, re.MULTILINE)
    assert rules == [f"{letter}{i}" for i in range(1, len(rules) + 1)]
    return rules
