"""Readers in other languages beside ours: what each says of the same bytes, in one text that all of them write.

A checker is a program that answers a stream of questions on standard input, each

    mode   1 byte: w the whole (R14), p a prefix (R15), s a suffix (R16)
    level  1 byte: o only what opening checks, i every rule of the index, f of the payloads too; t names are looked up
    names  u16, little-endian: the number of names, which is 0 but at level t
    size   u32; that many bytes follow, the archive; then the names, each a u32 and so many bytes

with one line: `refused WHY`, or `accepted CRC`, the CRC-32 (8 hexadecimal digits) of what `dump` returns, of nothing at
level o. At level t each name is looked up in an archive that was opened for it alone, at level `touch`, and the CRC is
that of one line for each: the tensor's, as `dump` has it, `-` for none, `refused` for an error. Called with --dump it
writes that text after each `accepted`, and an empty line.
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zcrecord.archive import digest
from zcrecord.archive.archive import Archive, open_archive
from zcrecord.codec.entries import ValueForm, ValueType
from zcrecord.codec.layout import NONE
from zcrecord.errors import RecordError, TensorNotFoundError
from zcrecord.record.record import Record
from zcrecord.storage.memory import Memory, buffer_of

Checker = Sequence[str | Path]  # a command
JAVASCRIPT: Checker = ["node", Path(__file__).parents[1] / "programs" / "js" / "web" / "checker.mjs"]
Mode = Literal["w", "p", "s"]
Level = Literal["o", "i", "f"]
EMBEDDED = {"w": None, "p": "prefix", "s": "suffix"}
VERIFY = {"o": "touch", "i": "index", "f": "full"}


class Question(NamedTuple):
    """Bytes, how they are to be opened and checked, and at level t the names to look up."""

    data: bytes
    mode: Mode = "w"
    level: Level | Literal["t"] = "i"
    names: tuple[bytes, ...] = ()


class Answer(NamedTuple):
    """Answer of a reader: the CRC-32 of an archive's contents, or the reason why it is none."""

    accepted: bool
    text: str


def _hex(data: bytes) -> str:
    return data.hex() or "-"


def _numbers(values: Iterable[int]) -> str:
    return ",".join(map(str, values)) or "-"


def dump(archive: Archive) -> str:
    """Return everything the index says, one entry a line; names and texts in hexadecimal, `-` for what is empty.

    archive  alignment, base alignment, archive_size, numbers of tensors, modules, attributes, metadata
    tensor   in saved order: name, dtype, bits, dims, strides (`c`: none are stored), where element [0, ...] lies in the
             archive (`-`: no bytes), the payload's bytes and their CRC-32, parent, place, key_size
    module   name, kind, type name, parent (`-`: none), end, place, key_size
    attribute, metadata
             parent (`-`: none), place, name, type, form, words: a text's bytes, a payload's nbytes (0: none), a number
    """
    ix, header = archive.index, archive.header

    def span(row: Any, field: str) -> str:
        start, size = int(row[field]), int(row[f"{field}_size"])
        return _hex(bytes(ix.text[start : start + size]))

    counts = [len(rows) for rows in (ix.tensors, ix.modules, ix.attributes, ix.metadata)]
    lines = [f"archive {header.alignment} {header.base_alignment} {header.archive_size} {' '.join(map(str, counts))}"]
    lines += [_tensor(archive, i) for i in range(len(ix.tensors))]
    for row in ix.modules:
        parent = "-" if int(row["parent"]) == NONE else row["parent"]
        what = f"{span(row, 'name')} {row['kind']} {span(row, 'type_name')} {parent} {row['end']}"
        lines.append(f"module {what} {row['place']} {row['key_size']}")
    for kind, rows in (("attribute", ix.attributes), ("metadata", ix.metadata)):
        for row in rows:
            parent = "-" if int(row["parent"]) == NONE else row["parent"]
            words = [int(row["value"])]
            if row["form"] != ValueForm.SCALAR:
                start, count = words[0] & NONE, words[0] >> 32
                words = ix.words[start : start + count].tolist()
            shown = ",".join(_word(archive, int(row["type"]), word) for word in words) or "-"
            lines.append(f"{kind} {parent} {row['place']} {span(row, 'name')} {row['type']} {row['form']} {shown}")
    return "".join(line + "\n" for line in lines)


def _tensor(archive: Archive, i: int) -> str:
    row, header = archive.row(i), archive.header
    shape, strides = archive.shape(row), archive.strides(row)
    at, nbytes, crc = "-", 0, 0
    if row.payload != NONE:
        payload = archive.payload(row.payload)
        start = header.payload_offset + int(archive.index.payloads[row.payload]["offset"])
        at, nbytes, crc = str(start + row.byte_offset), len(payload), zlib.crc32(payload)
    assert prod(shape) or at == "-"
    kept = "c" if strides is None else _numbers(strides)
    name = _hex(bytes(archive.index.text[row.name : row.name + row.name_size]))
    what = f"{name} {row.dtype} {row.bits} {_numbers(shape)} {kept} {at} {nbytes} {crc:08x}"
    return f"tensor {what} {row.parent} {row.place} {row.key_size}"


def looked_up(question: Question) -> list[str] | None:
    """Return the package's line for each name of a question at level t; None if the archive does not open."""

    def opened() -> Record:
        embedded: Any = EMBEDDED[question.mode]
        return Record(open_archive(Memory(buffer_of(question.data)), verify="touch", embedded=embedded))

    def line(name: str) -> str:
        record = opened()
        try:
            record.raw(name)
        except TensorNotFoundError:
            return "-"
        except RecordError:
            return "refused"
        return _tensor(record.archive, record.archive.find(name))

    try:
        opened()
    except RecordError:
        return None
    return [line(name.decode()) for name in question.names]


def _word(archive: Archive, kind: int, word: int) -> str:
    if kind == ValueType.TEXT:
        start, size = word & NONE, word >> 32
        return _hex(bytes(archive.index.text[start : start + size]))
    if kind == ValueType.PAYLOAD:
        return "0" if word == NONE else str(len(archive.payload(word)))
    return str(word)


def ours(question: Question) -> Answer:
    if question.level == "t":
        lines = looked_up(question)
        text = "".join(line + "\n" for line in lines or ())
        return Answer(False, "at open") if lines is None else Answer(True, f"{zlib.crc32(text.encode()):08x}")
    verify: Any = VERIFY[question.level]
    embedded: Any = EMBEDDED[question.mode]
    try:
        # not `load_record`, which also finds what is attached to a program, and unpacks
        archive = open_archive(Memory(buffer_of(question.data)), verify=verify, embedded=embedded)
        if verify == "full":
            digest.check(archive)
    except RecordError as error:
        return Answer(False, f"{type(error).__name__}: {error}")
    text = "" if question.level == "o" else dump(archive)
    return Answer(True, f"{zlib.crc32(text.encode()):08x}")


def _asked(question: Question) -> bytes:
    head = (question.mode + question.level).encode() + len(question.names).to_bytes(2, "little")
    return head + b"".join(len(part).to_bytes(4, "little") + part for part in (question.data, *question.names))


def ask(checker: Checker, questions: Sequence[Question]) -> list[Answer]:
    """Return a checker's answers; anything but an answer to each question fails."""
    done = subprocess.run([*map(str, checker)], input=b"".join(map(_asked, questions)), capture_output=True)
    lines = done.stdout.decode().splitlines()
    last = lines[-1] if lines else "nothing"
    told = f"{checker}: exit {done.returncode} after {len(lines)} of {len(questions)} answers, {last}; "
    assert done.returncode == 0 and len(lines) == len(questions), told + done.stderr.decode(errors="replace")[-4000:]
    assert all(line.startswith(("accepted ", "refused ")) for line in lines), lines[:5]
    return [Answer(line.startswith("accepted "), line.partition(" ")[2]) for line in lines]


def disagreements(checker: Checker, questions: Sequence[Question]) -> list[str]:
    """Return the differences of a checker and the package: in acceptance, or in the contents they read."""
    out = []
    for number, (question, theirs) in enumerate(zip(questions, ask(checker, questions), strict=True)):
        mine = ours(question)
        if mine.accepted != theirs.accepted or (mine.accepted and mine.text != theirs.text):
            out.append(f"question {number} ({question.mode}{question.level}): ours {mine}, theirs {theirs}")
    return out


def agreed(checkers: Sequence[Checker], questions: Sequence[Question]) -> int:
    """Check that all answer as the package does; returns how many archives were accepted.

    Why one is refused may differ: where a size does not fit 32 bits, another rule is broken first.
    """
    assert not (different := disagreements(checkers[0], questions)), different[:5]
    answers = ask(checkers[0], questions)
    for checker in checkers[1:]:
        pairs = zip(answers, ask(checker, questions), strict=True)
        unequal = [(x, y) for x, y in pairs if x != y and (x.accepted or y.accepted)]
        assert not unequal, (checker, unequal[:5])
    return sum(answer.accepted for answer in answers)
