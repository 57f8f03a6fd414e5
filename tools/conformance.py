"""Tries a reader of any language on every archive of tests/conformance, and says what is wrong with it.

    python -m tools.conformance --reader "node my_reader.mjs"

tests/conformance/README.md has the protocol. Needs Python 3.11 and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import queue
import re
import shlex
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "tests" / "conformance"
LEVELS = ("touch", "index", "full")
ABSENT = "no such tensor"  # asked of every valid archive
NOT_TOUCHED = {"module", "tied"}  # fields of a tensor that take more than its own entry
KNOWN_KINDS = 6  # from here on kinds of modules are unknown, and read as mappings

# The rules to read where an answer to a valid archive is wrong in a field.
RULES = {
    "names": (32,), "module": (34, 45), "dtype": (46, 77), "bits": (46,), "shape": (48,), "strides": (52,),
    "offset": (13, 51, 53), "nbytes": (51, 71), "tied": (63,), "elements": (51, 53, 70, 71), "kind": (41,),
    "type_name": (29,), "children": (44,), "type": (66,), "form": (66,), "values": (67, 68), "modules": (39,),
    "attributes": (64,), "metadata": (65,), "content_digest": (76,),
}  # fmt: skip


class Question(NamedTuple):
    """One line for the reader, and the answer that is right.

    `expected` is a rule, such as "R46"; or "accepted"; or what the archive holds, by field; or, at level `touch`, for
    each name one of the three, or None where there is no such tensor.
    """

    path: Path
    level: str
    embedded: str
    expected: Any
    about: str

    def line(self) -> bytes:
        names = self.expected if self.level == "touch" and isinstance(self.expected, dict) else ()
        return ("\t".join([self.level, self.embedded, str(self.path), *names]) + "\n").encode()


class Fault(NamedTuple):
    """One thing that is wrong: where, what, and the rules to read."""

    where: str
    what: str
    rules: tuple[int, ...]


class Result(NamedTuple):
    """The answer to a question and its faults; `answer` is None where there is none to judge."""

    question: Question
    answer: dict[str, Any] | None
    faults: list[Fault]


def questions(only: str = "*", kit: Path = KIT) -> Iterator[Question]:
    """Yield every question of the kit about files whose names match a pattern."""
    for path in sorted(kit.glob("*/*.json")):
        if fnmatch.fnmatch(path.stem, only):
            yield from about_valid(path.with_suffix(".zcr"), json.loads(path.read_text(encoding="utf-8")))
    refused = json.loads((kit / "invalid.json").read_text(encoding="utf-8"))
    for name, answers in refused.items():
        if fnmatch.fnmatch(name, only):
            path = kit / "invalid" / f"{name}.zcr"
            for level in filter(answers.__contains__, LEVELS):
                yield Question(path, level, answers.get("embedded", "whole"), answers[level], name)


def about_valid(path: Path, content: dict[str, Any]) -> Iterator[Question]:
    found: dict[str, Any] = {ABSENT: None}
    for tensor in content["tensors"]:
        if not re.search(r"[\t\n]", tensor["name"]):
            found[tensor["name"]] = {field: value for field, value in tensor.items() if field not in NOT_TOUCHED}
    for level, expected in (("touch", found), ("index", content), ("full", content)):
        yield Question(path, level, content["embedded"] or "whole", expected, content["about"])


class Reader:
    """The program under test: started when it is asked first, and again after it crashed or hung."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self.command, self.seconds = command, seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.lines: queue.Queue[bytes] = queue.Queue()

    def ask(self, line: bytes) -> dict[str, Any] | str:
        """Return the answer to a line, or the reason why there is none; a program that ended is asked once more."""
        again = self.process is not None
        try:
            reply = self.reply(line)
            if not reply and again:
                self.stop()
                reply = self.reply(line)
        except queue.Empty:
            self.stop()
            return f"no answer within {self.seconds:g} s (does it flush each line?)"
        if not reply:
            assert self.process is not None
            status = self.process.wait()
            self.stop()
            return f"it ended with exit status {status}"
        try:
            answer = json.loads(reply)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            return answer
        return f"no JSON object: {reply[:60].decode(errors='replace').strip()!r}"

    def reply(self, line: bytes) -> bytes:
        """Write a line and return the one that answers it, empty if the program has ended."""
        process = self.process or self.start()
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        return self.lines.get(timeout=self.seconds)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the program, and a thread that takes its lines; the last of them is empty."""
        process = self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        lines = self.lines = queue.Queue()

        def take() -> None:
            for line in process.stdout or ():
                lines.put(line)
            lines.put(b"")

        threading.Thread(target=take, daemon=True).start()
        return process

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in filter(None, (self.process.stdin, self.process.stdout)):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.process = None


def examine(command: Sequence[str], asked: Iterable[Question], *, seconds: float = 10) -> list[Result]:
    """Ask a reader every question, and judge its answers; fields that it offers only sometimes are faults, too."""
    reader = Reader(command, seconds)
    results = []
    try:
        for question in asked:
            answer = reader.ask(question.line())
            if isinstance(answer, str):
                results.append(Result(question, None, [Fault("", answer, ())]))
            else:
                results.append(Result(question, answer, list(judge(question, answer))))
    finally:
        reader.stop()
    return results + list(left_out_sometimes(results))


def judge(question: Question, answer: dict[str, Any]) -> Iterator[Fault]:
    """Yield the faults of an answer; `{}` says that the reader does not offer the level or the way of opening."""
    if not answer:
        return
    accepted = answer.get("accepted")
    if not isinstance(accepted, bool):
        yield Fault("", 'the answer has no "accepted" that is true or false', ())
    elif isinstance(question.expected, str):
        yield from judge_refusal("", question.expected, accepted, answer)
    elif not accepted:
        yield Fault("", f"a valid archive ({question.about}) is refused{reason(answer)}", named(answer))
    elif question.level == "touch":
        found = answer.get("tensors")
        if not isinstance(found, list) or len(found) != len(question.expected):
            yield Fault("", f'"tensors" has no item for each of the {len(question.expected)} names asked', (32,))
            return
        for (name, expected), one in zip(question.expected.items(), found, strict=True):
            yield from judge_name(name, expected, one)
    else:
        yield from judge_contents(question.expected, answer)


def judge_refusal(where: str, expected: str, accepted: bool, answer: dict[str, Any]) -> Iterator[Fault]:
    """Yield a fault if an answer is not "accepted", or not a refusal where a rule is due."""
    if expected == "accepted" and not accepted:
        yield Fault(where, f"is refused{reason(answer)}; it is to be accepted at this level", named(answer))
    elif expected != "accepted" and accepted:
        yield Fault(where, f"is accepted; it breaks {expected}", (int(expected[1:]),))


def judge_name(name: str, expected: Any, answer: Any) -> Iterator[Fault]:
    """Yield the faults of the answer to one name at level touch."""
    where = f"name {name!r}"
    refused = isinstance(answer, dict) and answer.get("accepted") is False
    if answer is not None and not isinstance(answer, dict):
        yield Fault(where, f"the answer is {answer!r}; it is to be an object or null", ())
    elif isinstance(expected, str) and (expected != "accepted" or refused):
        # A search may miss a name whose tensor is refused: both keep anybody from using it.
        yield from judge_refusal(where, expected, answer is not None and not refused, answer or {})
    elif refused:
        due = "there is no such tensor" if expected is None else "it is a tensor of a valid archive"
        yield Fault(where, f"is refused{reason(answer or {})}; {due}", named(answer or {}))
    elif (answer is None) != (expected is None):
        yield Fault(where, "is not found" if answer is None else "is found, and there is no such tensor", (32,))
    elif isinstance(expected, dict) and answer is not None:
        yield from judge_fields(f"tensor {name!r}", expected, answer)


def judge_contents(expected: dict[str, Any], answer: dict[str, Any]) -> Iterator[Fault]:
    yield from judge_rows("tensors", ("name",), "tensor", expected, answer)
    yield from judge_rows("modules", ("name",), "module", expected, answer)
    yield from judge_rows("attributes", ("module", "key"), "attribute", expected, answer)
    yield from judge_rows("metadata", ("key",), "metadata", expected, answer)
    if "content_digest" in answer:
        yield from judge_fields("", {"content_digest": expected["content_digest"]}, answer)


def judge_rows(
    vector: str, key: tuple[str, ...], what: str, expected: dict[str, Any], answer: dict[str, Any]
) -> Iterator[Fault]:
    """Yield the faults of a list of objects; attributes may be in any order, the others are not."""
    if vector not in answer:
        return
    rule = RULES["names" if vector == "tensors" else vector]
    rows = answer[vector]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        yield Fault("", f'"{vector}" is no list of objects', ())
        return
    due = {tuple(row[k] for k in key): row for row in expected[vector]}
    got = {tuple(str(row.get(k)) for k in key): row for row in rows}
    if sorted(due) != sorted(got) or len(got) != len(rows):
        missing, extra = sorted(due.keys() - got.keys()), sorted(got.keys() - due.keys())
        yield Fault("", f"{vector}: missing {shown(missing)}, too many {shown(extra)}", rule)
    elif list(due) != list(got) and vector != "attributes":
        yield Fault("", f"{vector} are in another order: expected {shown(list(due))}, got {shown(list(got))}", rule)
    for row in due.keys() & got.keys():
        yield from judge_fields(f"{what} {'.'.join(filter(None, row))!r}", due[row], got[row])


def judge_fields(where: str, expected: dict[str, Any], answer: dict[str, Any]) -> Iterator[Fault]:
    """Yield the fields of an object that are not as expected; those left out are not asked."""
    for field, due in expected.items():
        if field not in answer:
            continue
        try:
            same = alike(field, due, answer[field])
        except (TypeError, ValueError):
            same = False
        if not same:
            what = f"{field}: expected {cut(json.dumps(due))}, got {cut(json.dumps(answer[field]))}"
            yield Fault(where, what, RULES.get(field, ()))


def alike(field: str, expected: Any, got: Any) -> bool:
    """Compare two values of a field; integers may come as text, since JSON's numbers lose some."""
    if isinstance(expected, list) and field != "children":
        same_size = isinstance(got, list) and len(got) == len(expected)
        return same_size and all(alike(field, *pair) for pair in zip(expected, got, strict=True))
    if isinstance(expected, int) and not isinstance(expected, bool):
        number = int(got) if isinstance(got, str) else got
        unknown_kind = field == "kind" and expected >= KNOWN_KINDS and number == 1
        return type(number) is int and (number == expected or unknown_kind)
    if field in ("elements", "values") and isinstance(expected, str) and isinstance(got, str):
        return expected == got or (field == "elements" and expected == got.lower())
    return type(expected) is type(got) and bool(expected == got)


def left_out_sometimes(results: Iterable[Result]) -> Iterator[Result]:
    """Yield a fault for each field that some answers have and others lack."""
    there: dict[str, Result] = {}
    lacking: dict[str, Result] = {}
    for result in results:
        if not isinstance(result.question.expected, dict) or not (result.answer or {}).get("accepted"):
            continue
        for field, offered in fields_of(result.question, result.answer or {}):
            (there if offered else lacking).setdefault(field, result)
    for field in there.keys() & lacking.keys():
        question = lacking[field].question
        elsewhere = there[field].question.path.name
        yield Result(question, None, [Fault("", f'no "{field}", which is in the answer to {elsewhere}', ())])


def fields_of(question: Question, answer: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield every field that an answer can have by its path, and whether it is there."""
    if question.level == "touch":
        found = answer.get("tensors")
        for expected, one in zip(question.expected.values(), found if isinstance(found, list) else [], strict=False):
            if isinstance(expected, dict) and isinstance(one, dict):
                yield from ((f"{field} at level touch", field in one) for field in expected if field != "name")
        return
    yield "content_digest", "content_digest" in answer
    for vector in ("tensors", "modules", "attributes", "metadata"):
        yield vector, vector in answer
        rows = answer.get(vector)
        objects = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        for expected in question.expected[vector][:1] if objects else ():
            yield from ((f"{vector}.{field}", all(field in row for row in objects)) for field in expected)


def reason(answer: dict[str, Any]) -> str:
    """Return the rule and the message that a reader gives for its refusal, in brackets."""
    told = [str(answer[key]) for key in ("rule", "message") if key in answer]
    return f" ({': '.join(told)})" if told else ""


def named(answer: dict[str, Any]) -> tuple[int, ...]:
    """Return the rule that a reader gives for its refusal."""
    found = re.fullmatch(r"R?(\d{1,2})", str(answer.get("rule", "")))
    return (int(found[1]),) if found else ()


def shown(keys: Sequence[tuple[str, ...]]) -> str:
    """Return the first few keys of rows as text."""
    few = ", ".join(repr(".".join(filter(None, key))) for key in keys[:3])
    return f"{few}{', ...' if len(keys) > 3 else ''}" or "none"


def cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def rule_text(number: int) -> str:
    """Return a rule of schema/FORMAT.md or CONVENTIONS.md in one line, its level in brackets."""
    pages = ("FORMAT.md", "CONVENTIONS.md")
    text = "\n".join((ROOT / "schema" / page).read_text(encoding="utf-8") for page in pages)
    found = re.search(rf"^\*\*R{number}\.\*\* (.*?)(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return f"R{number}. {' '.join(found[1].split())}" if found else f"R{number}"


def report(results: Sequence[Result], most: int) -> tuple[list[str], bool]:
    """Return the lines that tell what is wrong, a summary last, and whether all that was answered is right."""
    lines: list[str] = []
    told: set[int] = set()
    wrong = [result for result in results if result.faults]
    for question, _, faults in wrong[:most]:
        fault = faults[0]
        opened = "" if question.embedded == "whole" else f", opened as {question.embedded}"
        place = f"{question.path.parent.name}/{question.path.name} at level {question.level}{opened}"
        lines.append(": ".join(filter(None, (place, fault.where, fault.what))))
        lines += [f"    and {len(faults) - 1} more of this answer"] if faults[1:] else []
        lines += [f"    {rule_text(number)}" for number in fault.rules if number not in told]
        told.update(fault.rules)
    if len(wrong) > most:
        lines.append(f"... and {len(wrong) - most} more wrong answers; --most 0 shows all")
    given = [result for result in results if result.answer]
    missing = Counter(result.question.level for result in results if result.answer == {})
    files = len({result.question.path for result in results})
    right = sum(not result.faults for result in given)
    lines.append(f"{files} archives, {len(results)} questions: {right} answers right, {len(wrong)} wrong")
    lines += [f"not offered: level {level}, {count} questions" for level, count in missing.items()]
    offered: dict[str, bool] = {}
    for result in given:
        if result.answer and result.answer.get("accepted") and isinstance(result.question.expected, dict):
            for field, there in fields_of(result.question, result.answer):
                offered[field] = offered.get(field, False) or there
    if fields := [field for field, there in offered.items() if not there]:
        lines.append(f"not offered: {', '.join(fields)}")
    return lines, not wrong and right > 0


def main(arguments: list[str] | None = None) -> int:
    """Ask a reader everything, and print what is wrong with its answers."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=str(__doc__).splitlines()[0])
    parser.add_argument("--reader", required=True, metavar="COMMAND", help="the program, with its arguments")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="archives whose names match, such as 'R46-*'")
    parser.add_argument("--timeout", default=10.0, type=float, metavar="SECONDS", help="for each answer (default: 10)")
    parser.add_argument("--most", default=20, type=int, metavar="N", help="wrong answers to show (default: 20; 0: all)")
    options = parser.parse_args(arguments)
    asked = list(questions(options.only))
    if not asked:
        parser.error(f"--only {options.only}: no archive of that name in {KIT}")
    try:
        command = shlex.split(options.reader)
    except ValueError as error:  # a quotation that does not end
        parser.error(f"--reader: {error}")
    if not command:
        parser.error("--reader: name a program")
    try:
        results = examine(command, asked, seconds=options.timeout)
    except OSError as error:
        parser.error(f"--reader: {error}")
    lines, right = report(results, options.most or len(asked))
    print("\n".join(lines))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
