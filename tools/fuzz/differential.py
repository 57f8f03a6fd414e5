"""The readers in Python, C and Rust asked the same of many inputs; each has to accept and read what the others do."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

import c_programs
import rust_programs
from readers import Level, Mode, Question, ask, ours

from . import archives
from .corpus import inputs

__all__ = ["Compared", "asked_every_way", "checkers", "compare", "mutations"]

BATCH = 2000
MODES: tuple[Mode, ...] = ("w", "w", "w", "w", "w", "w", "p", "s")
LEVELS: tuple[Level, ...] = ("o", "i", "i", "f", "f", "f", "f", "f")


class Compared(NamedTuple):
    """How many questions were asked, how many archives all accepted, and where they differed, with the input."""

    questions: int
    accepted: int
    different: list[tuple[Question, str]]


def checkers(folder: Path) -> dict[str, Path]:
    """Build the checkers of tests/support/readers.py, one for each language."""
    return {
        "C": c_programs.build("gcc", c_programs.SOURCES / "checker.c", folder / "checker_c", "-std=c99", "-O2"),
        "Rust": rust_programs.build(
            rust_programs.compilers()[0], rust_programs.SOURCES / "checker.rs", folder / "checker_rust",
            "-C", "opt-level=2", "-C", "debug-assertions=on", "-C", "overflow-checks=on",
        ),
    }  # fmt: skip


def compare(programs: dict[str, Path], questions: Sequence[Question]) -> Compared:
    """Ask all of them; why one refuses may differ, but not whether, nor what an accepted archive holds."""
    mine = [ours(question) for question in questions]
    different = []
    for language, program in programs.items():
        for question, own, theirs in zip(questions, mine, ask([program], questions), strict=True):
            if own.accepted != theirs.accepted or (own.accepted and own.text != theirs.text):
                different.append((question, f"Python {own}, {language} {theirs}"))
    return Compared(len(questions), sum(answer.accepted for answer in mine), different)


def asked_every_way(kept: Sequence[bytes]) -> list[Question]:
    """Return the questions of each input at every level, alone and among other bytes."""
    return [Question(data, mode, level) for data in kept for mode in get_args(Mode) for level in get_args(Level)]


def _raw(rng: random.Random) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(out) + 1)
            out[at : at + rng.randrange(2)] = rng.randbytes(rng.randrange(2) + (rng.randrange(32) == 0))
        return bytes(out)

    return change


def mutations(starts: Sequence[bytes], seed: int) -> Iterator[Question]:
    """Yield changed archives without end, each of them asked about in one way."""
    rng = random.Random(seed)
    raw = _raw(rng)
    while True:
        data = rng.choice(starts)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = archives.mutated(data, rng, raw)
        yield Question(data, rng.choice(MODES), rng.choice(LEVELS))


def run(runs: int, seed: int, told: Callable[[str], None]) -> Compared:
    """Compare the readers on so many changed archives; `told` hears of every 50 batches."""
    starts = [data for data in inputs("archive") if 0 < len(data) < 6000]
    stream = mutations(starts, seed)
    questions = accepted = 0
    different: list[tuple[Question, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        programs = checkers(Path(folder))
        while questions < runs:
            done = compare(programs, list(islice(stream, min(BATCH, runs - questions))))
            questions, accepted = questions + done.questions, accepted + done.accepted
            different += done.different
            if questions // BATCH % 50 == 0:
                told(f"{questions} inputs, {accepted} accepted, {len(different)} differences")
    return Compared(questions, accepted, different)
