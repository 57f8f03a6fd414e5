"""zcrecord.js answers as the package does: errors, digests, elements, attacks; test_readers asks it about archives.

The checker uses all that the module offers on every small archive that it accepts, and fails if any of it does.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import records as r
import xxhash
from attacks import broken, placed, tricks
from costly_archives import ARCHIVES, ONES, alike, strings, tensors
from digest_trees import LISTS, long_name, swapped
from malformed import plain
from reader_archives import bools, catalogue
from readers import JAVASCRIPT, Answer, Mode, Question, ask, ours
from strided_views import ROOM, Strided, archive_of, elements_of, random_views

import zcrecord
from zcrecord.codec.layout import MAGIC

pytestmark = pytest.mark.needs("node")


def kind(answer: Answer) -> str:
    """Return the error's name."""
    return "" if answer.accepted else answer.text.partition(":")[0]


def test_says_of_a_first_number_in_by_module_that_no_tensor_has_what_is_wrong() -> None:
    forged = plain()
    forged.add("by_module", [99, *range(1, len(forged.columns["tensors"]))])
    (answer,) = ask(JAVASCRIPT, [Question(forged.seal())])
    assert not answer.accepted and "it is no tensor, or not ascending" in answer.text


def test_gives_errors_of_the_same_kind() -> None:
    """If several rules are broken, another may come first; mostly it does not."""
    questions = [Question(data) for data in catalogue()]
    pairs = [(ours(q), theirs) for q, theirs in zip(questions, ask(JAVASCRIPT, questions), strict=True)]
    different = [(mine.text, theirs.text) for mine, theirs in pairs if kind(mine) != kind(theirs)]
    assert len(different) < 0.01 * len(pairs), different[:8]


def test_agrees_on_archives_made_to_cost_much() -> None:
    """Were one of their passes quadratic, they would take hours."""
    questions = [Question(build().seal()) for build, _, _ in ARCHIVES.values()]
    answers = ask([*JAVASCRIPT, "--terse"], questions)
    wanted = [kind == "" for _, kind, _ in ARCHIVES.values()]
    assert [answer.accepted for answer in answers] == wanted
    forged = [strings(), alike(strings()), alike(bools())]
    full = ask([*JAVASCRIPT, "--terse"], [Question(f.seal(), "w", "f") for f in forged])
    assert [answer.accepted for answer in full] == [True] * 3


def test_digests_of_every_size_are_xxh3() -> None:
    data = os.urandom(40_000)
    sizes = [*range(600), *range(1020, 1100), *range(2040, 2120), 3071, 3072, 3073, *range(16380, 16460), 40_000]
    asked = b"".join(size.to_bytes(4, "little") + data[:size] for size in sizes)
    done = subprocess.run([*JAVASCRIPT, "--xxh3"], input=asked, capture_output=True, check=True)
    assert done.stdout.decode().split() == [xxhash.xxh3_64_hexdigest(data[:size]) for size in sizes]


def test_content_digests_are_the_package_s() -> None:
    archives = [data for data in catalogue() if ours(Question(data, "w", "f")).accepted][::2]
    assert len(archives) > 5
    archives += in_another_order()
    answers = ask([*JAVASCRIPT, "--content"], [Question(data) for data in archives])
    assert [answer.text for answer in answers] == [zcrecord.load_record(data).content_digest() for data in archives]


def test_strided_tensors_take_no_step_for_each_axis_of_one_item() -> None:
    """R76: 16 MiB of views would take some minutes."""
    f, size = tensors(4, *ONES, strided=True).cut("tensors", 64).cut("by_name", 64), 1 << 18
    f.columns["tensors"]["byte_offset"] = np.arange(64)
    f.columns["dims"][-64], f.columns["strides"][1:] = size - 64, 2**56 - 1
    f.payload = bytearray(os.urandom(size))
    f.columns["payloads"]["nbytes"] = size
    data = f.digest().seal()
    (answer,) = ask([*JAVASCRIPT, "--content"], [Question(data)])
    assert answer.text == zcrecord.load_record(data).content_digest()


def of_bytes(code: int, bits: int, shape: Sequence[int], strides: Sequence[int], start: bytes) -> Strided:
    """Return a tensor of the first bytes of a payload."""
    return Strided(code, bits, tuple(shape), tuple(strides), 0, start.ljust(ROOM, b"\0"))


STRIDED = {
    "an axis of one item whose stride no number is": of_bytes(2, 8, [3, 1, 3], [3, 2**56, 1], bytes(range(9))),
    "one past what a number can be": of_bytes(2, 8, [5, 1, 5], [5, 2**53 + 1, 1], bytes(range(25))),
    "one backwards": of_bytes(2, 8, [1, 2, 1], [-(2**56), 1, 1 - 2**53], b"\1\2"),
    "a float32 that signals": of_bytes(18, 32, [1, 2], [2**53, 0], bytes.fromhex("e573a87f")),
    "a complex64 that signals": of_bytes(20, 64, [2], [0], bytes.fromhex("e573a87f0100a0ff")),
}


def elements_told(views: Sequence[Strided]) -> tuple[Question, str]:
    """Return an archive of strided tensors, and its content digest and the CRC of its elements."""
    data = archive_of(views)
    record = zcrecord.load_record(data, verify="full")
    elements = [elements_of(view) for view in views]
    assert [record.archive.elements(i).tobytes() for i in range(len(views))] == elements
    return Question(data), f"{record.content_digest()} {zlib.crc32(b''.join(elements)):08x}"


def test_elements_of_strided_tensors_are_copied_bit_by_bit_whatever_the_strides(seed: int = 0) -> None:
    """R52 to R55, R76; what numbers would change is among them: NaNs that signal, and strides past 2^53."""
    views = [*STRIDED.values(), *random_views(seed, 300)]
    told = [elements_told(views[at : at + 30]) for at in range(0, len(views), 30)]
    answers = ask([*JAVASCRIPT, "--elements"], [question for question, _ in told])
    assert [answer.text for answer in answers] == [text for _, text in told]


def in_another_order() -> Iterator[bytes]:
    """Yield archives whose names and keys do not tell the tree, some that are close to that, and a long name."""
    yield from (swapped(r.saved({"m": items}), vector, *names) for items, vector, names in LISTS.values())
    x = np.zeros(2)
    yield r.saved(
        {"a": {}, "a.b": x, "a.c": {}, "a-b": {"c": x}, "ä.b": {"ÿ": x}, "ä": {"\U0001f600": {}, "\uff5e": {}}}
    )
    yield r.saved({"a": {"b": {"c": x}}, "a.b.d": x, "a.bc": x, "n": [1, 2, {"k": (x, {})}]})
    yield r.saved([x, {"w": x}, 3])
    yield long_name()


def attacks(folder: Path) -> Iterator[tuple[str, Question, str]]:
    """Yield the catalogue's attacks on archives: a name, the question, and the error it must be answered with.

    Those on packed archives are left out: the module does not read them.
    """
    doors: dict[str, Mode] = {"load_record full": "w", "prefix": "p", "suffix": "s"}
    for module in (broken, tricks, placed):
        for attack in module.ATTACKS:
            data = attack.make(folder).read_bytes()
            for door, mode in doors.items():
                if door in module.DOORS and attack.outcome(door) != "either":
                    error = "" if attack.error is None else attack.error.__name__
                    # load_record looks at the end of other files by itself; `open` does when it is told to
                    after = attack.error is None and not data.startswith(MAGIC)
                    yield f"{attack.name}, at {door}", Question(data, "s" if after else mode, "f"), error


def test_answers_every_attack_as_the_catalogue_demands(tmp_path: Path) -> None:
    """All there is to ask is asked, as at the catalogue's own doors."""
    cases = list(attacks(tmp_path))
    answers = ask([*JAVASCRIPT, "--everything"], [question for _, question, _ in cases])
    different = [
        f"{name}: {answer.text} in place of {error or 'nothing'}"
        for (name, _, error), answer in zip(cases, answers, strict=True)
        if kind(answer) != error
    ]
    assert not different, "\n".join(different)
    assert len(cases) > 420 and 10 < sum(answer.accepted for answer in answers) < len(answers) - 380
