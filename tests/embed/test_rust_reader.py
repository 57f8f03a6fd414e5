"""zcrecord.rs and the package agree: on what is an archive, and on what it holds; and it panics at nothing.

The checkers are built with overflow checks and debug assertions, and use all that the reader offers on every archive
that opens. One of them is WebAssembly, whose addresses have 32 bits.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
import windows
import xxhash
from changed_bytes import regions, resealed, variants, with_crc
from costly_archives import ARCHIVES, strings
from malformed import Case, compact, plain, rich, saved
from malformed_index import at_the_budget
from other_processors import X86_64
from reader_archives import SMALL, bools, catalogue, golden, mixed, repeating, uneven, wide
from readers import Level, Mode, Question, ask, disagreements, dump
from records import edited_with_a_longer_index, repetitive
from rust_programs import READER, SOURCES, build, compilers, editions
from strided_views import questions, told

import zcrecord

pytestmark = pytest.mark.needs("rustc", "cc")

LEVELS = get_args(Level)
CHECKED = ("-C", "opt-level=1", "-C", "debug-assertions=on", "-C", "overflow-checks=on")
BARE = ("--crate-type", "staticlib", "-C", "panic=abort", "-C", "lto=fat", "-C", "codegen-units=1")
GOLDEN = sorted(path.stem for path in (Path(__file__).parents[1] / "conformance" / "valid").glob("*.zcr"))
COMPILER = pytest.mark.parametrize("rustc", compilers(), ids=lambda path: path.replace("/", "_"))


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(compilers()[0], SOURCES / "checker.rs", tmp_path_factory.mktemp("checker") / "checker", *CHECKED)


def accepted(checker: Path, questions: Sequence[Question]) -> int:
    """Check that the checker answers as the package does; returns how many archives both take."""
    assert not (found := disagreements([checker], questions)), found[:5]
    return sum(answer.accepted for answer in ask([checker], questions))


def everything_golden() -> list[Question]:
    return [Question(golden(name)[0], mode, level) for name in GOLDEN for mode in get_args(Mode) for level in LEVELS]


def test_elements_of_strided_tensors_are_found_whatever_the_strides(checker: Path) -> None:
    """R52 to R55."""
    asked = questions(1, 300)
    answers = ask([checker, "--elements"], [question for question, _ in asked])
    assert [answer.text for answer in answers] == [told(elements) for _, elements in asked]


def test_reads_every_golden_archive_as_the_package_does(checker: Path) -> None:
    questions = [Question(*golden(name), level) for name in GOLDEN for level in LEVELS]
    assert accepted(checker, questions) == len(questions) >= 54
    assert len(questions) < accepted(checker, everything_golden())


def test_agrees_on_records_that_repeat_themselves_up_to_the_budget(checker: Path) -> None:
    """R30, R31."""
    questions = [Question(saved(record, metadata=metadata), "w", "f") for record, metadata in repetitive(500)]
    questions += [Question(data) for data in at_the_budget(0)]
    assert accepted(checker, questions) == len(questions)
    assert not accepted(checker, [Question(data) for data in at_the_budget(1)])


def test_refuses_a_draft_and_says_how_to_convert_it(checker: Path) -> None:
    """R2."""
    draft = Path(__file__).parents[1] / "data" / "draft" / "nested.zcr"
    for level in LEVELS:
        (answer,) = ask([checker], [Question(draft.read_bytes(), "w", level)])
        assert not answer.accepted and "R2: " in answer.text and "`zcrecord convert` makes version 1" in answer.text


def test_agrees_on_an_archive_whose_index_an_edit_made_longer(checker: Path, tmp_path: Path) -> None:
    data = edited_with_a_longer_index(tmp_path / "m.zcr")
    assert accepted(checker, [Question(data, "w", level) for level in LEVELS]) == len(LEVELS)


def test_every_other_compiler_s_checker_gives_the_same_answers(checker: Path, tmp_path: Path) -> None:
    questions = [*everything_golden(), *mixed(7, 500)]
    expected = ask([checker], questions)
    for rustc in compilers()[1:]:
        assert ask([build(rustc, SOURCES / "checker.rs", tmp_path / "checker", *CHECKED)], questions) == expected


def test_agrees_on_archives_of_signed_programs(checker: Path) -> None:
    questions = windows.questions()
    assert 20 < accepted(checker, questions) < len(questions) // 10


@pytest.mark.needs("/usr/bin/rustc", "node", "wasm-ld-14")
def test_agrees_where_addresses_have_32_bits(checker: Path, tmp_path: Path) -> None:
    program = build(
        "/usr/bin/rustc", SOURCES / "checker.rs", tmp_path / "checker.wasm", "--target", "wasm32-wasi", *CHECKED
    )
    command: list[str | Path] = ["node", "--no-warnings", SOURCES / "run_wasi.mjs", program]
    questions = [*everything_golden(), *mixed(8, 1500), *(Question(data) for data in wide())]
    same = [(a.accepted, a.accepted and a.text) for a in ask([checker], questions)]
    assert same == [(a.accepted, a.accepted and a.text) for a in ask(command, questions)]


def test_agrees_on_what_may_be_repeated_and_how_often(checker: Path) -> None:
    """Of four pairs the second repeats little."""
    questions = [Question(data) for data in repeating()]
    assert accepted(checker, questions) == 4


def test_agrees_where_one_rule_alone_is_broken(checker: Path) -> None:
    questions = [Question(data) for data in uneven()]
    assert accepted(checker, questions) == 0


def test_agrees_on_sizes_past_32_bits(checker: Path) -> None:
    questions = [Question(data, "w", level) for data in wide() for level in LEVELS]
    assert accepted(checker, questions) < len(questions)


def test_dump_is_the_package_s_word_for_word(checker: Path) -> None:
    data, _ = golden("nested")
    question = b"wi\0\0" + len(data).to_bytes(4, "little") + data
    done = subprocess.run([checker, "--dump"], input=question, capture_output=True, check=True)
    _, text = done.stdout.decode().split("\n", 1)
    assert text == dump(zcrecord.load_record(data)._archive) + "\n"


@pytest.mark.parametrize("name", [*SMALL, "nested"])
def test_agrees_on_every_truncation(checker: Path, name: str) -> None:
    data, mode = golden(name)
    step = 1 if len(data) < 1500 else 7
    cuts = [data[:size] for size in range(0, len(data), step)]
    cuts += [data[size:] for size in range(1, len(data), step)] if mode == "s" else []
    assert accepted(checker, [Question(cut, mode, "f") for cut in cuts]) < len(cuts)


@pytest.mark.parametrize("name", SMALL)
def test_agrees_on_every_changed_byte(checker: Path, name: str) -> None:
    data, mode = golden(name)
    changed = list(variants(data, range(len(data)), "^80 +1"))
    accepted(checker, [Question(one, mode, "f") for one in changed])


def test_agrees_on_every_changed_byte_of_header_and_trailer_whose_crcs_are_right(checker: Path) -> None:
    questions = []
    for front, sealed in ((True, True), (True, False), (False, True), (False, False)):
        data = plain(front=front, sealed=sealed).seal()
        for changed in variants(data, range(60), "^1 ^80 =0 =ff +1"):
            start = with_crc(changed[:60])
            end = start if sealed else data[-64:]
            questions += [Question(start + data[64:-64] + end), Question(start + data[64:], "p")]
        for changed in variants(data, range(len(data) - 64, len(data) - 4), "^1 ^80 =0 =ff +1"):
            end = with_crc(changed[-64:-4])
            questions += [Question(data[:-64] + end), Question(data[:-64] + end, "s")]
    assert 0 < accepted(checker, questions) < len(questions) // 10


@pytest.mark.parametrize("level", LEVELS)
def test_agrees_on_every_changed_byte_of_an_index_whose_crcs_are_right(checker: Path, level: Level) -> None:
    for data in (compact().seal(), golden("tiny")[0]):
        changed = variants(data, regions(data)[1], "^1 ^80 =0 =ff +1" if level == "i" else "^80 =ff +1")
        questions = [Question(resealed(one), "w", level) for one in changed]
        assert 0 < accepted(checker, questions) < len(questions)


def test_agrees_on_every_rule_that_the_catalogue_of_malformed_archives_breaks(checker: Path) -> None:
    forged = list(catalogue())
    assert len(forged) > 1000
    opened, verified, full = (accepted(checker, [Question(data, "w", level) for data in forged]) for level in LEVELS)
    assert full < verified < opened < len(forged), (full, verified, opened)


def test_names_the_rule_that_a_forged_archive_breaks(checker: Path) -> None:
    """Among rules that cannot be broken alone another may be named; most are."""
    cases = [case for case in importlib.import_module("test_malformed_tensors").CASES if isinstance(case, Case)]
    questions = []
    for case in cases:
        forged = rich()
        case.change(forged)
        questions.append(Question(forged.seal()))
    answers = ask([checker], questions)
    named = [answer.text.startswith(f"{case.rule}:") for case, answer in zip(cases, answers, strict=True)]
    assert not any(answer.accepted for answer in answers)
    assert sum(named) > 0.8 * len(named), [(c.rule, c.what, a.text) for c, a in zip(cases, answers, strict=True)]


@pytest.mark.parametrize("seed", range(10, 13))
def test_agrees_on_archives_mixed_up_at_random(checker: Path, seed: int) -> None:
    questions = list(mixed(seed, 4000))
    assert 100 < accepted(checker, questions) < len(questions) // 2


def test_agrees_on_archives_made_to_cost_much(checker: Path) -> None:
    """Were one of their passes quadratic, they would take hours."""
    questions = [Question(build().seal()) for build, _, _ in ARCHIVES.values()]
    assert accepted(checker, questions) == [kind for _, kind, _ in ARCHIVES.values()].count("")
    answers = ask([checker, "--terse"], [Question(forged.seal(), "w", "f") for forged in (strings(), bools())])
    assert [answer.accepted for answer in answers] == [True, True]


def test_digests_of_every_size_are_xxh3(checker: Path) -> None:
    data = os.urandom(5000)
    sizes = [*range(600), *range(1020, 1100), *range(2040, 2120), 3071, 3072, 3073, 4999]
    asked = b"".join(size.to_bytes(4, "little") + data[:size] for size in sizes)
    done = subprocess.run([checker, "--xxh3"], input=asked, capture_output=True, check=True)
    assert done.stdout.decode().split() == [xxhash.xxh3_64_hexdigest(data[:size]) for size in sizes]


@pytest.mark.parametrize(
    ("rustc", "edition"), [(rustc, edition) for rustc in compilers() for edition in editions(rustc)]
)
def test_compiles_without_a_warning_as_a_crate_and_as_a_private_module(
    rustc: str, edition: str, tmp_path: Path
) -> None:
    host = tmp_path / "host.rs"
    host.write_text(
        f'#[path = "{READER}"]\nmod zcrecord;\nfn main() {{\n    zcrecord::Archive::open(&[]).err();\n}}\n',
        encoding="utf-8",
    )
    build(rustc, READER, tmp_path / "lib.rlib", "--crate-type", "rlib", "-W", "missing-docs", edition=edition)
    build(rustc, host, tmp_path / "host", edition=edition)


@pytest.mark.parametrize("rustc", compilers())
def test_one_line_makes_its_error_one_of_std(rustc: str, tmp_path: Path) -> None:
    """The line is the guide's, and the file's own."""
    guide = (READER.parent / "README.md").read_text(encoding="utf-8")
    (line,) = {line for line in guide.splitlines() if line.startswith("impl ") and "error::Error" in line}
    assert f"//! {line}" in READER.read_text(encoding="utf-8")
    host = tmp_path / "host.rs"
    host.write_text(
        f"""#[path = "{READER}"]
mod zcrecord;
{line}
fn opened() -> Result<u32, Box<dyn std::error::Error + Send + Sync>> {{
    Ok(zcrecord::Archive::open(&[])?.tensor_count())
}}
fn main() {{
    println!("{{}}", opened().unwrap_err());
}}
""",
        encoding="utf-8",
    )
    done = subprocess.run([build(rustc, host, tmp_path / "host")], capture_output=True, text=True, check=True)
    assert done.stdout == "R1: too few bytes for an archive; the source is truncated\n"


def test_has_no_unsafe_code_and_lets_none_in() -> None:
    text = READER.read_text(encoding="utf-8")
    assert text.startswith("// SPDX-License-Identifier: 0BSD\n")
    assert "#![forbid(unsafe_code)]" in text
    code = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("//"))
    assert "unsafe {" not in code and "std::" not in code and len(code) > len(text) // 2


def link_bare(rustc: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Link the reader and a program without C library, std or panics; all that is not reached is dropped."""
    library = build(rustc, SOURCES / "bare.rs", folder / "libbare.a", *BARE, *flags)
    data = golden("nested")[0]
    (folder / "model.inc").write_text(",".join(map(str, data)), encoding="utf-8")
    command = ["gcc", "-O2", "-static", "-nostdlib", "-nostartfiles", "-Wl,--gc-sections", f"-I{folder}"]
    command += [str(SOURCES / "bare.c"), str(library), "-o", str(folder / "bare")]
    return subprocess.run(command, capture_output=True, text=True)


@COMPILER
@X86_64
@pytest.mark.needs("gcc")
@pytest.mark.parametrize("level", ["2", "s"])
def test_links_into_a_program_that_has_nothing_and_no_way_to_panic(rustc: str, level: str, tmp_path: Path) -> None:
    done = link_bare(rustc, tmp_path, "-C", f"opt-level={level}")
    assert done.returncode == 0, done.stderr
    assert subprocess.run([tmp_path / "bare"]).returncode == 0


@X86_64
@pytest.mark.needs("gcc")
def test_a_way_to_panic_would_not_link(tmp_path: Path) -> None:
    done = link_bare(compilers()[0], tmp_path, "-C", "opt-level=2", "--cfg", "can_panic")
    assert done.returncode != 0 and "undefined reference to `zcrecord_panicked'" in done.stderr
