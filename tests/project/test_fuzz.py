"""A short run of every fuzzer from the kept corpus on, always the same; and what the corpus itself shows.

`python -m tools.fuzz` does longer ones. An input that once showed a fault lies in tests/data/corpus/found.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from exhaustive import rounds

from tools.fuzz import ROOT, archives, models, native, targets
from tools.fuzz.__main__ import guided
from tools.fuzz.corpus import inputs

SMALL = 300 << 10


def folders(tmp_path: Path) -> Path:
    """Make the folder for new inputs; without one they would go to the kept ones."""
    (tmp_path / "new").mkdir()
    return tmp_path / "new"


def test_corpus_is_small_and_without_repetition() -> None:
    kept = [*inputs("archive"), *inputs("model")]
    assert len(inputs("archive")) > 100 and len(inputs("model")) > 30
    assert len(set(kept)) == len(kept)
    assert sum(map(len, kept)) < SMALL


@pytest.mark.slow
@pytest.mark.parametrize("what", ["archive", "model"])
def test_changes_are_the_same_for_the_same_seed_and_get_past_the_checksums(what: str) -> None:
    mutated = {"archive": archives.mutated, "model": models.mutated}[what]

    def changed() -> list[bytes]:
        rng = random.Random(4)
        kept = [data for data in inputs(what) if len(data) < 4000]
        return [mutated(rng.choice(kept), rng, lambda data: data[: rng.randrange(len(data) + 1)]) for _ in range(600)]

    first = changed()
    assert first == changed()
    assert len(set(first)) > 400
    accepted = sum(map(getattr(targets, what), first))
    assert 30 < accepted < 580


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("what", ["archive", "model"])
def test_atheris_finds_nothing_in_a_short_run(tmp_path: Path, what: str) -> None:
    done = native.outcome(guided(what, RUNS[what], seed=1, found=tmp_path / "found", folder=folders(tmp_path)))
    assert done.clean, done.tail
    assert done.executions >= RUNS[what]
    assert done.features > 1000
    assert not list((tmp_path / "found").iterdir())


RUNS = {"archive": rounds(2000), "model": rounds(1500)}


@pytest.fixture(scope="module", params=["c", "rust"])
def fuzzer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native.build(request.param, tmp_path_factory.mktemp("fuzzer"))


@pytest.mark.needs("clang-19", "rustc", "cc")
def test_libfuzzer_finds_nothing_in_the_readers_in_c_and_rust(fuzzer: Path, tmp_path: Path) -> None:
    done = native.fuzz(fuzzer, 40_000, seed=1, found=tmp_path / "found", folder=folders(tmp_path))
    assert done.clean, done.tail
    assert done.executions >= 40_000
    assert done.edges > 500
    assert not list((tmp_path / "found").iterdir())


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tools.fuzz.differential import checkers

    return checkers(tmp_path_factory.mktemp("checkers"))


@pytest.mark.needs("gcc", "gcc -m32", "clang-19", "rustc", "cc")
def test_readers_in_python_c_and_rust_agree_on_the_corpus_and_on_changes_of_it(programs: dict[str, Path]) -> None:
    from tools.fuzz.differential import asked_every_way, compare, mutations

    kept = inputs("archive")
    questions = asked_every_way(kept) + list(islice(mutations([d for d in kept if len(d) < 6000], 1), 1500))
    done = compare(programs, questions)
    assert not done.different, done.different[:3]
    assert 100 < done.accepted < len(questions)


@pytest.mark.needs("gcc", "rustc", "cc")
def test_readers_agree_on_single_look_ups_at_touch_and_do_what_the_specification_says(
    programs: dict[str, Path],
) -> None:
    from tools.fuzz.differential import compare, look_ups

    questions = list(islice(look_ups(1), rounds(1500)))
    done = compare(programs, questions)
    assert not done.different, done.different[:3]
    assert len(questions) // 2 < done.accepted < len(questions)


@pytest.mark.parametrize(
    ("rule", "careless"), [("search", lambda *_: None), ("payload", lambda self, k: self.row("payloads", k)["nbytes"])]
)
def test_comparison_of_look_ups_notices_a_reader_that_leaves_a_rule_out(
    monkeypatch: pytest.MonkeyPatch, rule: str, careless: Callable[..., object]
) -> None:
    import plain_touch

    from tools.fuzz.differential import compare, look_ups

    questions = list(islice(look_ups(2), 60))
    assert not compare({}, questions).different
    monkeypatch.setattr(plain_touch.Plain, rule, careless)
    assert compare({}, questions).different


@pytest.mark.exhaustive(keep=0)
def test_corpus_reaches_every_branch_of_the_verifier() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.fuzz", "coverage"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(100.0 %)" in done.stdout
