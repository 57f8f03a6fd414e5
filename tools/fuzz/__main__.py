"""`python -m tools.fuzz WHAT [--runs N]`: what was executed, reached and found; exit status 1 if anything was.

archive       load_record and everything a record can be asked for, by atheris
model         the ONNX scanner and conversion, by atheris
c             zcrecord.h by libFuzzer, under AddressSanitizer and UBSan
rust          zcrecord.rs by libFuzzer, compared with zcrecord.h on every input
differential  the readers in Python, C and Rust compared on changed archives
look-ups      the same by single names at level `touch`, and compared with a plain reading of FORMAT.md
coverage      branches of the verifier that the kept inputs reach
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import CORPUS, ROOT

FOUND = Path(tempfile.gettempdir()) / "zcrecord-found"
MOST = {"archive": 4096, "model": 1500}  # bytes of an input


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser("python -m tools.fuzz", description=__doc__.partition(":")[2], allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = ("archive", "model", "c", "rust", "differential", "look-ups", "coverage")
    parser.add_argument("what", choices=what)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for new inputs")
    parser.add_argument("--found", type=Path, default=FOUND, help="folder for inputs that show a fault")
    given = parser.parse_args()
    if given.what == "coverage":
        return _coverage()
    return _differential(given) if given.what in ("differential", "look-ups") else _fuzz(given)


def guided(what: str, runs: int, *, seed: int, found: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run atheris from the kept corpus on; new inputs go to `folder`, those that show a fault to `found`."""
    from .native import options

    command = [sys.executable, "-m", "tools.fuzz.guided", what, str(folder), str(CORPUS / what)]
    return subprocess.run(
        [*command, f"-max_len={MOST[what]}", *options(runs, seed, found)], capture_output=True, text=True,
        errors="replace", cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "0"},
    )  # fmt: skip


def _fuzz(given: argparse.Namespace) -> int:
    from . import native

    found = given.found.absolute()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "new" if given.out is None else given.out.absolute()
        folder.mkdir(parents=True, exist_ok=True)  # without one of their own they would write into the kept corpus
        if given.what in MOST:
            done = native.outcome(guided(given.what, given.runs, seed=given.seed, found=found, folder=folder))
        else:
            program = native.build(given.what, Path(scratch))
            done = native.fuzz(program, given.runs, seed=given.seed, found=found, folder=folder)
    print(f"{given.what}: {done.executions} executions, {done.edges} edges, {done.features} features", end=", ")
    print("no finding" if done.clean else f"a finding, see {found}:\n{done.tail}")
    return not done.clean


def _differential(given: argparse.Namespace) -> int:
    from . import differential

    touch = given.what == "look-ups"
    done = differential.run(given.runs, given.seed, lambda line: print(line, flush=True), touch=touch)
    print(f"{given.what}: {done.questions} inputs, {done.accepted} accepted, {len(done.different)} differences")
    given.found.mkdir(parents=True, exist_ok=True)
    for number, (question, what) in enumerate(done.different):
        (given.found / f"different-{number}").write_bytes(question.data)
        print(f"{number} ({question.mode}{question.level}): {what}")
    return bool(done.different)


def _coverage() -> int:
    from . import branches, corpus

    found = branches.reached(corpus.everything)
    for line in found.missing:
        print(line)
    missed = sum("->" in line for line in found.missing)
    share = 100 * (1 - missed / found.branches)
    print(f"verifier: {found.branches - missed} of {found.branches} branches ({share:.1f} %)")
    return bool(found.missing)


if __name__ == "__main__":
    sys.exit(main())
