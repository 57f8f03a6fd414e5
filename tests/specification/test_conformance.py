"""Four readers answer rightly to every archive of tests/conformance, and a reader with a fault is told its rule."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import c_programs
import pytest
import rust_programs
import specification

from tools import conformance
from tools.conformance import KIT, LEVELS, Question, examine, questions, report, rule_text
from tools.generate import __main__ as generate
from tools.generate import checksums, invalid

READERS = KIT / "readers"
PYTHON = [sys.executable, str(READERS / "reader.py")]
ROOT = KIT.parents[1]


def in_c(folder: Path) -> list[str]:
    return [str(c_programs.build("gcc", READERS / "reader.c", folder / "reader", "-std=c99", "-O1"))]


def in_rust(folder: Path) -> list[str]:
    return [str(rust_programs.build("rustc", READERS / "reader.rs", folder / "reader"))]


def in_javascript(_: Path) -> list[str]:
    return ["node", str(READERS / "reader.mjs")]


@pytest.mark.exhaustive(keep=("Python", "C99"))
@pytest.mark.parametrize(
    ("reader", "lacks"),
    [
        pytest.param(lambda _: PYTHON, [], id="Python"),
        pytest.param(in_c, ["content_digest"], id="C99", marks=pytest.mark.needs("gcc")),
        pytest.param(in_rust, ["content_digest, tensors.tied"], id="Rust", marks=pytest.mark.needs("rustc", "cc")),
        pytest.param(in_javascript, ["level touch"], id="JavaScript", marks=pytest.mark.needs("node")),
    ],
)
def test_reader_gives_every_right_answer(reader: Callable[[Path], list[str]], lacks: list[str], tmp_path: Path) -> None:
    lines, right = report(examine(reader(tmp_path), questions()), 20)
    assert right, "\n".join(lines)
    assert [re.sub(r", \d+ questions$", "", line.removeprefix("not offered: ")) for line in lines[1:]] == lacks


def test_every_rule_that_readers_check_has_an_invalid_archive_at_its_level() -> None:
    """R76 and R83 to R85 are about digests and the packed form; R23, R77 and R78 say what is accepted."""
    told = json.loads((KIT / "invalid.json").read_text(encoding="utf-8"))
    due = {n for n, (level, _) in specification.rules().items() if level != "writers"} - {23, 76, 77, 78, 83, 84, 85}
    broken: dict[int, set[str]] = {}
    for answers in told.values():
        for level in LEVELS:
            for answer in answers[level].values() if isinstance(answers.get(level), dict) else [answers.get(level)]:
                if answer and answer != "accepted":
                    broken.setdefault(int(answer[1:]), set()).add(level)
    assert sorted(due - broken.keys()) == []
    assert not {n for n in due if "full" not in broken[n]}
    opened = {n for n, (level, _) in specification.rules().items() if level == "open"} & due
    assert not {n for n in opened if broken[n] != set(LEVELS)}


def test_no_archive_of_the_kit_ever_changes() -> None:
    found = {path.relative_to(ROOT): path.read_bytes() for path in KIT.glob("*/*.zcr")}
    listed = checksums.listed()
    changed = [path for path, data in found.items() if listed.get(path, "") != hashlib.sha256(data).hexdigest()]
    assert not changed, (
        "archives of version 1 never change, whatever happens to the code: implementers hold their readers against "
        f"them. Take these back, and give new ones another name (python -m tools.generate): {changed}"
    )
    assert found.keys() == listed.keys()
    assert sum(path.stat().st_size for path in KIT.rglob("*") if path.is_file()) < 1_650_000


def test_generator_refuses_to_change_an_archive_of_version_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = Path("tests/conformance/valid")
    old, new = (tmp_path / kit / f"{name}.zcr" for name in ("old", "new"))
    old.parent.mkdir(parents=True)
    old.write_bytes(b"as it was")
    old.with_suffix(".json").write_bytes(b"what it was")
    sums = f"{hashlib.sha256(b'as it was').hexdigest()}  valid/old.zcr\n"
    (old.parents[1] / "SHA256SUMS").write_text(sums, encoding="utf-8")
    made = {"old.zcr": b"as it is", "old.json": b"what it is", "new.zcr": b"added"}
    generator = SimpleNamespace(FOLDERS=(), files=lambda: {kit / name: data for name, data in made.items()})
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "GENERATORS", (generator,))
    assert generate.main([]) == 1
    assert "valid/old.zcr is of version 1 and never changes: " in capsys.readouterr().out
    assert (old.read_bytes(), new.read_bytes()) == (b"as it was", b"added")
    assert old.with_suffix(".json").read_bytes() == b"what it was", "it is about the archive that stays"


def test_names_of_invalid_archives_say_the_rule_that_refuses_them() -> None:
    for name, (answers, _) in invalid.made().items():
        assert f"R{int(name[1:3])}" == answers["full"], name


# A reader that knows all right answers, which it takes from the kit, but for one fault.
FAULTY = """
import json, os, sys, time
for line in sys.stdin:
    level, embedded, path, *names = line.rstrip("\\n").split("\\t")
    if "invalid" in path:
        told = dict(accepted=False)
    else:
        told = dict(json.load(open(path[:-3] + "json")), accepted=True)
        if level == "touch":
            by_name = {{tensor["name"]: tensor for tensor in told["tensors"]}}
            told = dict(accepted=True, tensors=[by_name.get(name) for name in names])
    {fault}
    print(json.dumps(told), flush=True)
"""


def faulty(folder: Path, fault: str) -> list[str]:
    program = folder / "faulty.py"
    program.write_text(FAULTY.format(fault=fault), encoding="utf-8")
    return [sys.executable, "-IS", str(program)]


def told_of(folder: Path, fault: str, only: str, seconds: float = 10) -> list[str]:
    """Return the report on a reader with this fault, asked about some archives."""
    lines, right = report(examine(faulty(folder, fault), questions(only), seconds=seconds), 20)
    assert not right
    return lines


# fmt: off
FAULTS = [
    ('if "R46" in path: told = {"accepted": True, "tensors": [None] * len(names)}', "R46-tensor-dtype_0",
     "invalid/R46-tensor-dtype_0.zcr at level index: is accepted; it breaks R46"),
    ('if level != "touch": told["tensors"][0]["offset"] += 64', "tiny",
     "valid/tiny.zcr at level index: tensor 'w': offset: expected 304, got 368"),
    ('told = {"accepted": False, "rule": "R1", "message": "no"}', "tiny",
     "valid/tiny.zcr at level touch: a valid archive (the example of FORMAT.md) is refused (R1: no)"),
    ('told["tensors"] = [None for _ in told["tensors"]]', "tiny", "valid/tiny.zcr at level touch: name 'w': is not fo"),
    ('told["tensors"] = []', "tiny",
     'valid/tiny.zcr at level touch: "tensors" has no item for each of the 2 names asked'),
    ('if level == "full": told["modules"][0]["children"].reverse()', "nested",
     "valid/nested.zcr at level full: module '': children: expected "),
    ('if level == "full": del told["metadata"]', "tiny", 'valid/tiny.zcr at level full: no "metadata", which is '),
    ('if level == "full": os._exit(3)', "tiny", "valid/tiny.zcr at level full: it ended with exit status 3"),
    ('if level == "full": time.sleep(9)', "tiny", "valid/tiny.zcr at level full: no answer within 0.5 s"),
    ('if level == "full": told = [1]', "tiny", "valid/tiny.zcr at level full: no JSON object: '[1]'"),
    ('if level == "full": told = {"ok": 1}', "tiny", 'valid/tiny.zcr at level full: the answer has no "accepted"'),
    ("told = {}", "tiny", "1 archives, 3 questions: 0 answers right, 0 wrong"),
]
# fmt: on


@pytest.mark.parametrize(("fault", "only", "message"), FAULTS)
def test_fault_of_a_reader_is_told(fault: str, only: str, message: str, tmp_path: Path) -> None:
    lines = told_of(tmp_path, fault, only, 0.5 if "sleep" in fault else 10)
    assert any(line.startswith(message) for line in lines), "\n".join(lines)


def test_program_that_ends_after_each_answer_is_started_again(tmp_path: Path) -> None:
    command = faulty(tmp_path, "print(json.dumps(told), flush=True); break")
    lines, right = report(examine(command, questions("tiny")), 20)
    assert right, lines


def test_rule_to_read_follows_the_fault(tmp_path: Path) -> None:
    lines = told_of(tmp_path, "told = dict(accepted=True, tensors=[{} for _ in names])", "R47-tensor-rank_65")
    assert lines[1] == "    R47. [entry] `rank` is at most 64."
    assert rule_text(7).startswith("R7. [open] `required_features` has no bit")


def test_integers_may_come_as_text_and_an_unknown_kind_as_a_mapping() -> None:
    alike = [("shape", [2**60, 3], [str(2**60), 3]), ("kind", 77, 1)]
    others = [("shape", [1], [True]), ("shape", [1], [1.0]), ("kind", 3, 1), ("values", [1], [True])]
    assert all(conformance.alike(*values) for values in alike)
    assert not any(conformance.alike(*values) for values in others)


def test_command_needs_no_package_and_says_what_it_finds(tmp_path: Path) -> None:
    command = shlex.join(faulty(tmp_path, "pass"))
    tool = [sys.executable, "-S", "-m", "tools.conformance", "--reader", command]
    done = subprocess.run([*tool, "--only", "tiny"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 archives, 3 questions: 3 answers right, 0 wrong\n")


def test_command_names_an_option_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"/no/such/program": "[Errno 2]", "my 'reader": "No closing quotation", "": "name a program"}
    options = [(["--reader", command], f"--reader: {message}") for command, message in wrong.items()]
    options.append((["--reader", "reader", "--only", "none_such"], "--only none_such: no archive of that name"))
    for arguments, message in options:
        with pytest.raises(SystemExit):
            conformance.main(arguments)
        assert message in capsys.readouterr().err


VECTORS = ("tensors", "modules", "attributes", "metadata")


def test_page_describes_every_field_of_the_answers() -> None:
    page = (KIT / "README.md").read_text(encoding="utf-8")
    told = json.loads((KIT / "valid" / "nested.json").read_text(encoding="utf-8"))
    fields = {*told, *(field for vector in VECTORS for field in told[vector][0])}
    header = {"version", "alignment", "base_alignment"} | {
        row["field"].strip("`") for row in specification.table("Header and")
    }
    missing = {field for field in fields - header if f"`{field}`" not in page and f'"{field}"' not in page}
    assert not missing


def test_names_asked_hold_what_a_line_can() -> None:
    asked: set[bytes] = set()
    for question in questions():
        assert isinstance(question, Question) and question.line().count(b"\n") == 1
        asked.update(question.line()[:-1].split(b"\t")[3:])
    assert b"" not in asked and not any(b"\0" in name for name in asked)
    assert b"a\r" in asked, "a carriage return is a part of a name"
