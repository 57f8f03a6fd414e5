"""zcrecord.h and the package agree: on what is an archive, and on what it holds.

Archives are whole, cut off, changed byte by byte, forged rule by rule, and mixed up at random. The checkers run under
AddressSanitizer and UBSan, each archive in memory of exactly its size; none may say a word but its answers.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import windows
from c_programs import COMPILERS, agree, checkers
from forge import VECTORS, Forge
from malformed import Case, compact, plain, rich, saved
from readers import Level, Mode, Question, ask, dump
from records import edited_with_a_longer_index, repetitive
from strided_views import questions, told
from test_malformed_fuzz import regions, resealed, variants, with_crc
from test_malformed_index import at_the_budget

import zcrecord

pytestmark = pytest.mark.needs(*COMPILERS)

GOLDEN = Path(__file__).parents[1] / "conformance" / "valid"
LEVELS: tuple[Level, ...] = get_args(Level)
MOSTLY: list[Level] = ["i", "i", "f"]
EACH: tuple[Mode, ...] = get_args(Mode)
MODES: dict[str | None, Mode] = {None: "w", "prefix": "p", "suffix": "s"}
# Small ones with something of each kind; `nested` has all kinds of modules and values, and is the largest.
SMALL = ["tiny", "views", "strings", "deduplicated", "back_unsealed", "unknown_vector", "prefix", "suffix"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return checkers(tmp_path_factory.mktemp("checkers"))


def golden(name: str) -> tuple[bytes, Mode]:
    """Return a golden archive, and how it is to be opened."""
    embedded = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["embedded"]
    return (GOLDEN / f"{name}.zcr").read_bytes(), MODES[embedded]


def test_elements_of_strided_tensors_are_found_whatever_the_strides(built: list[Path]) -> None:
    """R52 to R55."""
    asked = questions(1, 300)
    for checker in built:
        answers = ask([checker, "--elements"], [question for question, _ in asked])
        assert [answer.text for answer in answers] == [told(elements) for _, elements in asked]


def test_reads_every_golden_archive_as_the_package_does(built: list[Path]) -> None:
    names = sorted(path.stem for path in GOLDEN.glob("*.zcr"))
    questions = [Question(*golden(name), level) for name in names for level in LEVELS]
    assert agree(built, questions) == len(questions) >= 54


def test_agrees_on_records_that_repeat_themselves_up_to_the_budget(built: list[Path]) -> None:
    """R30, R31."""
    questions = [Question(saved(record, metadata=metadata), "w", "f") for record, metadata in repetitive(500)]
    questions += [Question(data) for data in at_the_budget(0)]
    assert agree(built, questions) == len(questions)
    assert not agree(built, [Question(data) for data in at_the_budget(1)])


def test_refuses_a_draft_and_says_how_to_convert_it(built: list[Path]) -> None:
    """R2."""
    draft = Path(__file__).parents[1] / "data" / "draft" / "nested.zcr"
    for checker, level in itertools.product(built, LEVELS):
        (answer,) = ask([checker], [Question(draft.read_bytes(), "w", level)])
        assert not answer.accepted and "R2: " in answer.text and "`zcrecord convert` makes version 1" in answer.text


def test_agrees_on_an_archive_whose_index_an_edit_made_longer(built: list[Path], tmp_path: Path) -> None:
    data = edited_with_a_longer_index(tmp_path / "m.zcr")
    assert agree(built, [Question(data, "w", level) for level in LEVELS]) == len(LEVELS)


def test_dump_is_the_package_s_word_for_word(built: list[Path]) -> None:
    data, _ = golden("nested")
    question = b"wi\0\0" + len(data).to_bytes(4, "little") + data
    done = subprocess.run([built[0], "--dump"], input=question, capture_output=True, check=True)
    _, text = done.stdout.decode().split("\n", 1)
    assert text == dump(zcrecord.load_record(data)._archive) + "\n"


@pytest.mark.parametrize("name", [*SMALL, "nested"])
def test_agrees_on_every_truncation(built: list[Path], name: str) -> None:
    data, mode = golden(name)
    step = 1 if len(data) < 1500 else 7
    cuts = [data[:size] for size in range(0, len(data), step)]
    cuts += [data[size:] for size in range(1, len(data), step)] if mode == "s" else []
    assert agree(built, (Question(cut, mode, "f") for cut in cuts)) < len(cuts)


def test_agrees_on_archives_in_the_middle_of_other_bytes(built: list[Path]) -> None:
    data, _ = golden("tiny")
    around = [bytes(n) for n in (0, 1, 7, 8, 63, 64, 1000)]
    questions = [Question(before + data + after, mode) for before in around for after in around for mode in EACH]
    assert agree(built, questions) == 1 + 2 * len(around)


def test_agrees_on_archives_of_signed_programs(built: list[Path]) -> None:
    questions = windows.questions()
    assert 20 < agree(built, questions) < len(questions) // 10


@pytest.mark.parametrize("level", LEVELS)
def test_agrees_on_every_changed_byte_of_a_tiny_archive(built: list[Path], level: Level) -> None:
    data, mode = golden("tiny")
    changed = variants(data, range(len(data)), "^1 ^80 =0 =ff +1")
    accepted = agree(built, (Question(one, mode, level) for one in changed))
    assert accepted == 0 if level == "f" else accepted > 0  # the payload's bytes are looked at by `full` alone


@pytest.mark.parametrize("name", SMALL)
def test_agrees_on_every_changed_byte(built: list[Path], name: str) -> None:
    data, mode = golden(name)
    changed = variants(data, range(len(data)), "^80 +1")
    agree(built, (Question(one, mode, "f") for one in changed))


def test_agrees_on_every_changed_byte_of_header_and_trailer_whose_crcs_are_right(built: list[Path]) -> None:
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
    assert 0 < agree(built, questions) < len(questions) // 10


@pytest.mark.parametrize("level", LEVELS)
def test_agrees_on_every_changed_byte_of_an_index_whose_crcs_are_right(built: list[Path], level: Level) -> None:
    values = "^1 ^80 =0 =ff +1" if level == "i" else "^80 =ff +1"
    for data in (compact().seal(), golden("tiny")[0]):
        questions = [Question(resealed(one), "w", level) for one in variants(data, regions(data)[1], values)]
        assert 0 < agree(built, questions) < len(questions)


def key_that_wraps(vector: str, parent_size: int) -> bytes:
    """R34: name a child shorter than its module, its key_size what is left of it, below 0, after module and dot.

    Its name ends the pool, and the index the archive: as many bytes as the module's name has are not behind it.
    """
    forged = Forge(saved({"m": {"t": np.ones(1)}} if vector == "tensors" else {"m": {"t": {"n": 1}}}), front=False)
    forged.rename("modules", "m", b"m" * parent_size).set("modules", 1, key_size=parent_size)
    row = 0 if vector == "tensors" else 2
    return forged.rename(vector, row, b"x").set(vector, row, key_size=(1 - 1 - parent_size) % 2**32).seal()


def shared_payload(data: bytes, *views: dict[str, int]) -> bytes:
    """Let tensors of several types, each a `dim` and perhaps strides, be made of the same bytes."""
    tied = np.frombuffer(data, np.uint8)
    forged = Forge(saved({f"t{i}": tied for i in range(len(views))}))
    for row, view in enumerate(views):
        fields = dict(view)
        forged.set("tensors", row, dims=forged.add("dims", [fields.pop("dim")]), **fields)
        if "strides" in fields:
            forged.set("tensors", row, strides=forged.add("strides", [view["strides"]]))
    return forged.seal()


def shared_by_strings_and_bools() -> Iterator[bytes]:
    """Yield payloads that are one, the other, both or none, used by both, either first (R71, R72)."""
    for ends in ((0, 2), (1, 0), (0, 1), (2, 1)):
        text = (b"ab" if 2 in ends else b"\1").ljust(8, b"\0")
        data = text + b"".join(end.to_bytes(8, "little") for end in ends)
        strings, bools = {"dtype": 64, "bits": 0, "dim": 1}, {"dtype": 1, "bits": 8, "dim": len(data)}
        yield from (shared_payload(data, *views) for views in ((strings, bools), (bools, strings), (bools, bools)))
    data = bytes([1, 0, 1, 0, 2])
    few, all_but_one, every = ({"dtype": 1, "bits": 8, "strides": 1, "dim": dim} for dim in (2, 4, 5))
    yield from (shared_payload(data, *views) for views in ((few, all_but_one), (few, every), (every, few)))


def sizes_below_two_ends() -> Iterator[bytes]:
    """Yield archives whose header, trailer or both are sealed and say that they are of fewer than 128 bytes."""
    for front in (True, False):
        for size in (0, 1, 64, 127):
            for end in ("ends", "header", "trailer"):
                forged = plain(front=front)
                getattr(forged, end)["archive_size"] = size
                yield forged.seal()
        forged = plain(front=front)
        forged.header = {"archive_size": 0, "index_size": 8, "payload_offset": 80, "index_crc": 0xDEADBEEF}
        yield forged.seal()  # were it unsealed, no more than ten bytes of it would be compared with the trailer


def corners() -> Iterator[bytes]:
    """Yield archives that readers with fixed widths and flags once took for something else."""
    yield from (key_that_wraps(vector, size) for vector in ("modules", "tensors") for size in (2, 70, 5000))
    yield from shared_by_strings_and_bools()
    yield from sizes_below_two_ends()


def catalogue() -> Iterator[bytes]:
    """Yield every archive that the tests of malformed archives forge, and corner cases."""
    yield from corners()
    starts = [plain(front=front, sealed=sealed) for front in (True, False) for sealed in (True, False)]
    starts += [rich(), compact()]
    ends = [start.seal() for start in starts]
    names = ("attributes", "contents", "header", "index", "modules", "names", "payloads", "tensors")
    for module in [importlib.import_module(f"test_malformed_{name}") for name in names]:
        lists = [value for value in vars(module).values() if isinstance(value, list)]
        for case in [item for found in lists for item in found if isinstance(item, Case)]:
            for data in ends:
                forged = Forge(data)
                try:
                    case.change(forged)
                    yield forged.seal()
                except (LookupError, StopIteration, ValueError):
                    continue  # it changes what this archive does not have


def test_agrees_on_every_rule_that_the_catalogue_of_malformed_archives_breaks(built: list[Path]) -> None:
    forged = list(catalogue())
    assert len(forged) > 1000
    opened, verified, full = (agree(built, (Question(data, "w", level) for data in forged)) for level in LEVELS)
    assert full < verified < opened < len(forged), (full, verified, opened)
    assert full < len(forged) // 20  # a case may be none on an archive that it was not made for


def test_agrees_on_keys_sizes_and_shared_payloads_that_wrap_or_contradict(built: list[Path]) -> None:
    whole = list(corners())
    assert agree(built, (Question(data, "w", "f") for data in whole)) == 4
    assert not agree(built, (Question(data, "w", level) for data in sizes_below_two_ends() for level in LEVELS))
    trailers = [data for data in sizes_below_two_ends() if data[-16:-8] == data[48:56]]
    assert not agree(built, (Question(data, mode, "o") for data in trailers for mode in EACH))


def test_tells_that_an_unsealed_header_does_not_say_the_size(built: list[Path]) -> None:
    (answer,) = ask([built[0]], [Question(golden("back_unsealed")[0], "p")])
    assert not answer.accepted
    assert answer.text.startswith("R15: the archive's header does not say its size") and "open the whole" in answer.text


def test_names_the_rule_that_a_forged_archive_breaks(built: list[Path]) -> None:
    """Among rules that cannot be broken alone another may be named; most are."""
    module = importlib.import_module("test_malformed_tensors")
    cases = [case for case in module.CASES if isinstance(case, Case)]
    questions = []
    for case in cases:
        forged = rich()
        case.change(forged)
        questions.append(Question(forged.seal()))
    answers = ask([built[0]], questions)
    named = [answer.text.startswith(f"{case.rule}:") for case, answer in zip(cases, answers, strict=True)]
    assert not any(answer.accepted for answer in answers)
    assert sum(named) > 0.8 * len(named), [(c.rule, c.what, a.text) for c, a in zip(cases, answers, strict=True)]


def test_agrees_on_every_element_type_and_width(built: list[Path]) -> None:
    """R46, on a tensor without elements: there is nothing else to be wrong."""
    forged = Forge(saved({"w": np.zeros((0, 2), np.float32)}))
    row = forged.columns["tensors"][0]
    questions = []
    for dtype in range(256):
        known = (
            range(256) if dtype in (0, 1, 18, 48, 52, 54, 64, 65) else (0, 1, 2, 4, 6, 7, 8, 16, 32, 64, 128, 129, 255)
        )
        for row["dtype"], row["bits"] in ((dtype, bits) for bits in known):
            questions.append(Question(forged.seal()))
    assert 128 + 8 * 200 < agree(built, questions) < len(questions)


def test_digests_of_payloads_of_every_length_are_xxhash_s(built: list[Path]) -> None:
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
    assert agree(built, [Question(data, "w", "f"), *(Question(one, "w", "f") for one in damaged)]) == 1


def mixed(seed: int, count: int) -> Iterator[Question]:
    """Yield archives with a few numbers of their index changed, or a few of their bytes; their CRCs are right."""
    rng = random.Random(seed)
    starts = [rich(), compact(), plain(front=False)]
    whole = [start.seal() for start in starts] + [golden(name)[0] for name in ("views", "nested", "dtypes", "onnx")]
    for _ in range(count):
        level = rng.choice(MOSTLY)
        if rng.random() < 0.5:
            data = rng.choice(whole)
            places = regions(data)[1]
            changed = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 3))):
                at = rng.randrange(places.start, places.stop)
                changed[at] = rng.choice((0, 1, 2, 255, changed[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
            yield Question(resealed(bytes(changed)), "w", level)
            continue
        forged = Forge(rng.choice(whole[:3]))
        for _ in range(rng.choice((1, 1, 2, 3))):
            change_number(rng, forged)
        yield Question(forged.seal(), "w", level)


def change_number(rng: random.Random, forged: Forge) -> None:
    """Write one number into one column: a small one, one of another row, or one around its limits."""
    vector = rng.choice([name for name, column in forged.columns.items() if len(column)])
    column: Any = forged.columns[vector]
    dtype = VECTORS[vector][1]
    if dtype.names:
        field = rng.choice(dtype.names)
        column, dtype = column[field], dtype[field]
    bits = dtype.itemsize * 8
    top = 1 << bits if dtype.kind == "u" else 1 << (bits - 1)
    least = 0 if dtype.kind == "u" else -top
    wild = (top - 1, least, top // 2, min(top - 1, 1 << 56), rng.randrange(least, top))
    near = int(column[rng.randrange(len(column))])
    choices = (rng.randrange(8), near, min(near + 1, top - 1), max(near - 1, least), rng.choice(wild))
    column[rng.randrange(len(column))] = rng.choice(choices)


@pytest.mark.parametrize("seed", range(3))
def test_agrees_on_archives_mixed_up_at_random(built: list[Path], seed: int) -> None:
    questions = list(mixed(seed, 4000))
    assert 100 < agree(built, questions) < len(questions) // 2
