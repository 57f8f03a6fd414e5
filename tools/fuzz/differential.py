"""The readers in Python, C and Rust asked the same of many inputs; each has to accept and read what the others do.

Look-ups by name at level `touch` are compared with a plain reading of FORMAT.md, too (tests/support/plain_touch.py).
"""

from __future__ import annotations

import random
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

import c_programs
import numpy as np
import rust_programs
from forge import Forge
from malformed import rich, saved
from plain_touch import Plain
from readers import Answer, Level, Mode, Question, ask, ours

from . import ROOT, archives
from .corpus import inputs

BATCH = 2000
NAMES = 16  # looked up in an archive, of each kind
MODES: tuple[Mode, ...] = ("w", "w", "w", "w", "w", "w", "p", "s")
LEVELS: tuple[Level, ...] = ("o", "i", "i", "f", "f", "f", "f", "f")


class Compared(NamedTuple):
    """How many questions were asked, how many archives all accepted, and where they differed, with the input."""

    questions: int
    accepted: int
    different: list[tuple[Question, str]]


def checkers(folder: Path) -> dict[str, Path]:
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
        different += _differences(questions, mine, language, ask([program], questions))
    different += _differences(questions, mine, "FORMAT.md", list(map(_plainly, questions, mine)))
    return Compared(len(questions), sum(answer.accepted for answer in mine), different)


def _differences(
    questions: Sequence[Question], mine: Sequence[Answer], whose: str, answers: Sequence[Answer]
) -> list[tuple[Question, str]]:
    asked = zip(questions, mine, answers, strict=True)
    return [
        (question, f"Python {own}, {whose} {theirs}")
        for question, own, theirs in asked
        if own.accepted != theirs.accepted or (own.accepted and own.text != theirs.text)
    ]


def _plainly(question: Question, own: Answer) -> Answer:
    """Answer look-ups in an archive that opens by a plain reading of FORMAT.md; anything else as Python does."""
    if question.level != "t" or not own.accepted:
        return own
    archive = Plain(question.data)
    text = "".join(archive.look_up(name) + "\n" for name in question.names)
    return Answer(True, f"{zlib.crc32(text.encode()):08x}")


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


def _touched() -> list[bytes]:
    """Return archives to look names up in: the golden ones that stand alone, and some with more names."""
    names = [f"{'abc'[i % 3]}.{i:02}{'x' * (i % 40)}" for i in range(60)]
    many = {name: np.full(1 + i % 7, i % 5, np.uint8) for i, name in enumerate(names)}
    made = [rich().seal(), saved(many), Forge(saved(many, alignment=16), front=False).seal()]
    golden = [path.read_bytes() for path in sorted((ROOT / "tests" / "conformance" / "valid").glob("*.zcr"))]
    return made + [data for data in golden if ours(Question(data, level="o")).accepted]


def _sample(names: Sequence[bytes], rng: random.Random) -> list[bytes]:
    return list(names) if len(names) <= NAMES else rng.sample(names, NAMES)


def look_ups(seed: int) -> Iterator[Question]:
    """Yield changed archives without end, each with names to look up: those it had, those it has, and absent ones."""
    starts = [(data, Plain(data).names()) for data in _touched()]
    rng = random.Random(seed)
    raw = _raw(rng)
    while True:
        start, names = rng.choice(starts)
        data = start
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = archives.mutated(data, rng, raw)
        asked = _sample(names, rng)
        asked += [name + rng.choice((b"x", b".", b"\xc3\xa9")) for name in asked[:2]] + [b"w"]
        with suppress(LookupError, ValueError, OverflowError):  # an index that cannot be read is refused at open
            asked += _sample(Plain(data).names(), rng)
        yield Question(data, "w", "t", tuple(asked))


def run(runs: int, seed: int, told: Callable[[str], None], *, touch: bool = False) -> Compared:
    """Compare the readers on so many changed archives; `told` hears of every 50 batches.

    `touch`: by single look-ups at that level.
    """
    starts = [data for data in inputs("archive") if 0 < len(data) < 6000]
    stream = look_ups(seed) if touch else mutations(starts, seed)
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
