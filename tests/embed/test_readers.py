"""zcrecord.h, zcrecord.rs, zcrecord.js and the package agree: on what is an archive, and on what it holds.

Archives are whole, cut off, changed byte by byte, forged rule by rule, and mixed up at random. The checkers in C run
under AddressSanitizer and UBSan, each archive in memory of exactly its size; none may say a word but its answers. That
in Rust has overflow checks and debug assertions. Each uses all that its reader offers on an archive that opens.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import c_programs
import numpy as np
import pytest
import rust_programs
import windows
from changed_bytes import regions, resealed, variants, with_crc
from forge import Forge
from malformed import compact, plain, rich, saved
from malformed_index import at_the_budget
from malformed_tensors import CASES
from reader_archives import (
    GOLDEN,
    SMALL,
    catalogue,
    corners,
    golden,
    mixed,
    repeating,
    sizes_below_two_ends,
    wide,
)  # fmt: skip
from readers import JAVASCRIPT, Checker, Level, Mode, Question, agreed, ask, dump
from records import edited_with_a_longer_index, repetitive
from strided_views import questions, told

import zcrecord

LEVELS: tuple[Level, ...] = get_args(Level)
MODES: tuple[Mode, ...] = get_args(Mode)
TOOLS = {"c": c_programs.COMPILERS, "rust": ("rustc", "cc"), "javascript": ("node",)}


class Reader(NamedTuple):
    """The checkers of a language, and the levels that they know."""

    checkers: list[Checker]
    levels: tuple[Level, ...] = LEVELS

    def agrees(self, questions: Iterable[Question]) -> int:
        """Check that all answer as the package does; returns how many archives were accepted."""
        return agreed(self.checkers, [question for question in questions if question.level in self.levels])

    def agrees_at_each_level(self, archives: Iterable[bytes]) -> list[int]:
        whole = list(archives)
        return [self.agrees(Question(data, "w", level) for data in whole) for level in self.levels]


def languages(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.needs(*TOOLS[name])) for name in names]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reader]:
    """The reader of a language, built once."""

    @cache
    def reader(language: str) -> Reader:
        if language == "javascript":
            return Reader([JAVASCRIPT], ("i", "f"))
        folder = tmp_path_factory.mktemp("checkers")
        return Reader([[rust_programs.checker(folder)]] if language == "rust" else c_programs.checkers(folder))

    return reader


@pytest.fixture(scope="module", params=languages("c", "rust", "javascript"))
def reader(request: pytest.FixtureRequest, built: Callable[[str], Reader]) -> Reader:
    return built(request.param)


@pytest.fixture(scope="module", params=languages("c", "rust"))
def compiled(request: pytest.FixtureRequest, built: Callable[[str], Reader]) -> Reader:
    """A reader whose errors name the rule; tests/web asks JavaScript's in its own terms."""
    return built(request.param)


def test_elements_of_strided_tensors_are_found_whatever_the_strides(compiled: Reader) -> None:
    """R52 to R55."""
    asked = questions(1, 300)
    for checker in compiled.checkers:
        answers = ask([*checker, "--elements"], [question for question, _ in asked])
        assert [answer.text for answer in answers] == [told(elements) for _, elements in asked]


def test_reads_every_golden_archive_as_the_package_does(reader: Reader) -> None:
    names = sorted(path.stem for path in GOLDEN.glob("*.zcr"))
    questions = [Question(*golden(name), level) for name in names for level in reader.levels]
    assert reader.agrees(questions) == len(questions) >= 36
    every = [Question(golden(name)[0], mode, "f") for name in names for mode in MODES]
    assert len(names) < reader.agrees(every) < len(every)


def test_agrees_on_records_that_repeat_themselves_up_to_the_budget(reader: Reader) -> None:
    """R30, R31."""
    questions = [Question(saved(record, metadata=metadata), "w", "f") for record, metadata in repetitive(500)]
    questions += [Question(data) for data in at_the_budget(0)]
    assert reader.agrees(questions) == len(questions)
    assert not reader.agrees(Question(data) for data in at_the_budget(1))


def test_refuses_a_draft_and_says_how_to_convert_it(compiled: Reader) -> None:
    """R2."""
    draft = Path(__file__).parents[1] / "data" / "draft" / "nested.zcr"
    for checker in compiled.checkers:
        for answer in ask(checker, [Question(draft.read_bytes(), "w", level) for level in LEVELS]):
            assert not answer.accepted and "R2: " in answer.text and "`zcrecord convert` makes version 1" in answer.text


def test_agrees_on_an_archive_whose_index_an_edit_made_longer(reader: Reader, tmp_path: Path) -> None:
    data = edited_with_a_longer_index(tmp_path / "m.zcr")
    assert reader.agrees_at_each_level([data]) == [1] * len(reader.levels)


def test_dump_is_the_package_s_word_for_word(reader: Reader) -> None:
    data, _ = golden("nested")
    question = b"wi\0\0" + len(data).to_bytes(4, "little") + data
    done = subprocess.run([*reader.checkers[0], "--dump"], input=question, capture_output=True, check=True)
    _, text = done.stdout.decode().split("\n", 1)
    assert text == dump(zcrecord.load_record(data)._archive) + "\n"


@pytest.mark.parametrize("name", [*SMALL, "nested"])
def test_agrees_on_every_truncation(reader: Reader, name: str) -> None:
    data, mode = golden(name)
    step = 1 if len(data) < 1500 else 7
    cuts = [data[:size] for size in range(0, len(data), step)]
    cuts += [data[size:] for size in range(1, len(data), step)] if mode == "s" else []
    assert reader.agrees(Question(cut, mode, "f") for cut in cuts) < len(cuts)


def test_agrees_on_archives_in_the_middle_of_other_bytes(reader: Reader) -> None:
    data, _ = golden("tiny")
    around = [bytes(n) for n in (0, 1, 7, 8, 63, 64, 1000)]
    questions = [Question(before + data + after, mode) for before in around for after in around for mode in MODES]
    assert reader.agrees(questions) == 1 + 2 * len(around)


def test_agrees_on_archives_of_signed_programs(reader: Reader) -> None:
    questions = windows.questions()
    assert 20 < reader.agrees(questions) < len(questions) // 10


@pytest.mark.parametrize("name", SMALL)
def test_agrees_on_every_changed_byte(reader: Reader, name: str) -> None:
    data, mode = golden(name)
    levels: tuple[Level, ...] = LEVELS if name == "tiny" else ("f",)
    for level in levels:
        changed = variants(data, range(len(data)), "^1 ^80 =0 =ff +1" if name == "tiny" else "^80 +1")
        accepted = reader.agrees(Question(one, mode, level) for one in changed)
        if name == "tiny" and level in reader.levels:  # only `full` reads the bytes of the payload
            assert (accepted == 0) == (level == "f")


def test_agrees_on_every_changed_byte_of_header_and_trailer_whose_crcs_are_right(reader: Reader) -> None:
    questions = []
    for front, sealed in ((True, True), (True, False), (False, True), (False, False)):
        data = plain(front=front, sealed=sealed).seal()
        for changed in variants(data, range(60), "^1 ^80 =0 =ff +1"):
            start = with_crc(changed[:60])
            end = with_crc(changed[:60]) if sealed else data[-64:]
            questions += [Question(start + data[64:-64] + end), Question(start + data[64:], "p")]
        for changed in variants(data, range(len(data) - 64, len(data) - 4), "^1 ^80 =0 =ff +1"):
            end = with_crc(changed[-64:-4])
            questions += [Question(data[:-64] + end), Question(data[:-64] + end, "s")]
    assert 0 < reader.agrees(questions) < len(questions) // 10


@pytest.mark.parametrize("level", LEVELS)
def test_agrees_on_every_changed_byte_of_an_index_whose_crcs_are_right(reader: Reader, level: Level) -> None:
    values = "^1 ^80 =0 =ff +1" if level == "i" else "^80 =ff +1"
    for data in (compact().seal(), golden("tiny")[0]):
        questions = [Question(resealed(one), "w", level) for one in variants(data, regions(data)[1], values)]
        assert 0 < reader.agrees(questions) < len(questions) or level not in reader.levels


def test_agrees_on_every_rule_that_the_catalogue_of_malformed_archives_breaks(reader: Reader) -> None:
    forged = list(catalogue())
    accepted = [len(forged), *reader.agrees_at_each_level(forged)]
    assert len(forged) > 1000 and accepted == sorted(set(accepted), reverse=True)
    assert accepted[-1] < len(forged) // 20  # a case may be none on an archive that it was not made for


def test_agrees_on_keys_sizes_and_shared_payloads_that_wrap_or_contradict(reader: Reader) -> None:
    assert reader.agrees(Question(data, "w", "f") for data in corners()) == 4
    assert not any(reader.agrees_at_each_level(sizes_below_two_ends()))
    trailers = [data for data in sizes_below_two_ends() if data[-16:-8] == data[48:56]]
    assert not reader.agrees(Question(data, mode, "o") for data in trailers for mode in MODES)


def test_tells_that_an_unsealed_header_does_not_say_the_size(compiled: Reader) -> None:
    (answer,) = ask(compiled.checkers[0], [Question(golden("back_unsealed")[0], "p")])
    assert not answer.accepted and answer.text.startswith("R15: ")


def test_names_the_rule_that_a_forged_archive_breaks(compiled: Reader) -> None:
    """Among rules that cannot be broken alone another may be named; most are."""
    questions = []
    for case in CASES:
        forged = rich()
        case.change(forged)
        questions.append(Question(forged.seal()))
    answers = ask(compiled.checkers[0], questions)
    named = [answer.text.startswith(f"{case.rule}:") for case, answer in zip(CASES, answers, strict=True)]
    assert not any(answer.accepted for answer in answers)
    assert sum(named) > 0.8 * len(named), [(c.rule, c.what, a.text) for c, a in zip(CASES, answers, strict=True)]


def test_agrees_on_every_element_type_and_width(reader: Reader) -> None:
    """R46, on a tensor without elements: there is nothing else to be wrong."""
    forged = Forge(saved({"w": np.zeros((0, 2), np.float32)}))
    row = forged.columns["tensors"][0]
    some = (0, 1, 2, 4, 6, 7, 8, 16, 32, 64, 128, 129, 255)
    questions = []
    for dtype in range(256):
        widths = range(256) if dtype in (0, 1, 18, 48, 52, 54, 64, 65) else some
        for row["dtype"], row["bits"] in ((dtype, bits) for bits in widths):
            questions.append(Question(forged.seal()))
    assert 128 + 8 * 200 < reader.agrees(questions) < len(questions)


def test_digests_of_payloads_of_every_length_are_xxhash_s(reader: Reader) -> None:
    """R73: each of XXH3's ways to treat short and long input."""
    sizes = [*range(1, 600), *range(1000, 1100), 2047, 2048, 2049, 5000, 65536, 100_001]
    rng = np.random.default_rng(1)
    data = saved({f"t{size}": rng.integers(0, 256, size, np.uint8) for size in sizes})
    payloads = Forge(data).columns["payloads"]
    assert set(payloads["nbytes"].tolist()) == set(sizes)
    start = int.from_bytes(data[40:48], "little")
    damaged = []
    for offset, nbytes, _ in payloads[::40].tolist():
        at = start + offset + nbytes - 1
        damaged.append(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert reader.agrees([Question(data, "w", "f"), *(Question(one, "w", "f") for one in damaged)]) == 1


@pytest.mark.parametrize("seed", range(3))
def test_agrees_on_archives_mixed_up_at_random(reader: Reader, seed: int) -> None:
    questions = list(mixed(seed, 4000))
    assert 100 < reader.agrees(questions) < len(questions) // 2


def test_agrees_on_what_may_be_repeated_and_on_sizes_past_32_bits(reader: Reader) -> None:
    """Of four pairs the second repeats little."""
    assert reader.agrees(Question(data) for data in repeating()) == 4
    archives = list(wide())
    assert max(reader.agrees_at_each_level(archives)) < len(archives)
