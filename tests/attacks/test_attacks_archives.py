"""Every attack of the catalogue on archives gets the right answer at every door, in little memory.

The processes in which that happens are forked by `attacks.running`; here their answers are judged, all of a module's at
once, and the catalogue is held to FORMAT.md: a rule that readers check has an attack.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import safetensors.numpy
import specification
from exhaustive import ALL
from forge import Forge
from malformed import saved

import zcrecord
from attacks import attached, broken, packed, peers, placed, probes, tricks
from attacks.catalogue import MOST_BYTES, Answer, Attack, wrong
from attacks.running import answers, faults
from tools.attacks import worst
from tools.measure import most_allocated
from zcrecord import FormatError, LimitError, integrity
from zcrecord.codec import conventions

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="platform: needs fork and /proc")
MODULES = (broken, tricks, placed, packed, peers, attached)

# Rules that no reader can break an archive by, and what holds them instead.
ELSEWHERE = {
    77: "unknown dtypes are offered raw: test_malformed_tensors",
    78: "unknown vectors are ignored: test_malformed_index",
}


@pytest.mark.exhaustive(keep=("broken",))
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_attack_is_answered_as_it_must_be(module: Any, tmp_path: Path) -> None:
    assert not faults(module, tmp_path, 12)
    assert not os.listdir(tmp_path)  # what was made for attacks is gone


@pytest.mark.parametrize("listed", [False, True], ids=["attributes", "a list"])
@pytest.mark.parametrize(
    "act",
    [
        lambda record: record.into(dict[str, Any]),
        lambda record: record.hollow(),
        lambda record: zcrecord.save_record(record, io.BytesIO()),
    ],
    ids=["into", "hollow", "save"],
)
def test_bytes_that_many_values_share_are_not_copied_for_each(act: Callable[[Any], Any], listed: bool) -> None:
    record = zcrecord.load_record(tricks.named_bytes(2000, 1 << 20, listed=listed).seal())
    with pytest.raises(LimitError, match=r"tensors that share their bytes would take 2\.1e\+09 bytes"):
        act(record)


def test_every_rule_that_readers_check_has_an_attack() -> None:
    attacked = {int(rule[1:]) for module in MODULES for attack in module.ATTACKS for rule in attack.rules}
    checked = {number for number, (level, _) in specification.rules().items() if level != "writers"}
    assert sorted(checked - attacked - set(ELSEWHERE)) == []
    assert not attacked - set(specification.rules())
    for rule, where in ELSEWHERE.items():
        for name in where.partition(": ")[2].split(", "):
            assert f"R{rule}" in (Path(__file__).parents[1] / "codec" / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_becomes_of_a_process_is_noticed(tmp_path: Path) -> None:
    told = {answer.door: answer for answer in answers("attacks.probes", tmp_path)}
    assert {name: answer.kind for name, answer in told.items()} == {
        "killed": "killed by SIGKILL", "ends": "ended", "80 MiB": "", "8 GiB": "MemoryError", "refuses": "FormatError",
        "sleeps": "hung", "accepts": "",
    }  # fmt: skip
    assert 80 << 20 <= told["80 MiB"].nbytes <= 81 << 20
    assert told["accepts"].nbytes < 1 << 16
    assert list(probes.DOORS) == list(told)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"kind": ""}, "accepted"),
        ({"kind": "LimitError"}, "LimitError in place of FormatError"),
        ({"message": "else"}, "which does not match 'what it is'"),
        ({"nbytes": MOST_BYTES + 1}, "allocated 64 MiB, at most 64"),
        ({"seconds": 11, "nbytes": 0, "resident": 0}, "took 11.00 s of the processor, at most 10" if ALL else ""),
        ({"seconds": 11}, ""),
        ({"resident": 1 << 30}, "took 1024 MiB, at most 256" if ALL else ""),
        ({"kind": "hung"}, "hung in place of FormatError"),
        ({"door": "other", "kind": ""}, ""),
        ({"door": "other", "kind": "LimitError"}, ""),
        ({"door": "other", "kind": "TypeError"}, "TypeError in place of"),
    ],
)
def test_a_wrong_answer_is_called_wrong(change: dict[str, Any], fault: str) -> None:
    attack = Attack(name="a", rules=("R1",), make=Path, error=FormatError, message="what it is", doors=frozenset({"d"}))
    answer = Answer(
        **{"attack": "a", "door": "d", "kind": "FormatError", "message": "what it is", "nbytes": 1, **change}
    )
    assert fault in wrong(attack, answer) and bool(fault) == bool(wrong(attack, answer))


def test_a_legal_attack_may_not_be_refused() -> None:
    attack = Attack(name="a", rules=("R1",), make=Path, error=None)
    answer = Answer(attack="a", door="d", kind="FormatError", message="no")
    assert wrong(attack, answer) == "a, at d: FormatError: no; it is legal"


def test_report_shows_the_answer_that_accepts() -> None:
    one = Answer(attack="a", door="load", kind="ValueError", message="", seconds=0.5, resident=20 << 20)
    other = Answer(attack="a", door="safe_open", kind="", message="", seconds=0.25, resident=1 << 19)
    assert worst([one, other]) == "accepted, 250 ms"
    assert worst([one]) == "ValueError, 500 ms, 20 MiB"
    assert worst([]) == "-"


def test_catalogue_makes_the_same_files_every_time(tmp_path: Path) -> None:
    """An answer of today is to the same file tomorrow."""
    for attack in (*placed.ATTACKS, *broken.ATTACKS[:40]):
        digests = {hashlib.sha256(attack.make(tmp_path).read_bytes()).digest() for _ in range(2)}
        assert len(digests) == 1, attack.name


# What the catalogue found, each shown by itself.


def test_files_with_archives_in_them_are_models_to_other_readers() -> None:
    for data in (attached.safetensors(), attached.safetensors(0x5A4D), attached.safetensors(0x5A4D, b" ")):
        assert list(safetensors.numpy.load(data)) == ["w"]
    for before in (b"", b"MZ\x90\0\3", b"\xca\xfe\xba\xbe\0\0"):
        for turned in (False, True):
            model = onnx.load_from_string(attached.onnx(before, turned=turned))
            assert [tensor.name for tensor in model.graph.initializer] == ["w", "v"]
    assert np.load(io.BytesIO(attached.npz()))["w"].sum() == 3
    record = zcrecord.load_record(attached.safetensors(), embedded="suffix")
    assert integrity.check_signature(record, attached.KEY.public_key())


def test_full_names_of_attributes_are_bounded_by_the_index() -> None:
    record = zcrecord.load_record(tricks.below_a_long_name(100_000, 100))
    with pytest.raises(LimitError, match=r"^full names of attributes add up to 10000000 bytes, more than 64 times "):
        _ = record.attributes
    assert len(record.modules["x" * 100_000].attributes) == 100
    assert len(zcrecord.load_record(tricks.below_a_long_name(100_000, 40)).attributes) == 40


def test_infos_of_tied_tensors_share_their_names() -> None:
    record = zcrecord.load_record(tricks.tensors(300).seal())
    assert len({id(record.info(name).tied) for name in record}) == 1
    assert record.info("000007").tied == tuple(record)
    one, two = np.ones(3), np.zeros(4)
    record = zcrecord.load_record(saved({"a": one, "b": two, "c": one, "d": two, "e": np.ones(2)}))
    assert [record.info(name).tied for name in "abcde"] == [("a", "c"), ("b", "d")] * 2 + [()], "told by payload"


def test_texts_that_words_share_are_made_once() -> None:
    record = zcrecord.load_record(tricks.lists_of_texts())
    assert len({id(text) for texts in record.attributes.values() for text in texts}) == 1


@pytest.mark.parametrize(("step", "message"), [(0, ""), (2, "texts of paths overlap; the archive is malicious")])
def test_paths_that_share_a_long_text_are_made_once_or_refused(step: int, message: str) -> None:
    f = Forge(saved({"p": [Path("a")] * 100}))
    start, size = f.text(b"a/" * 50_000 + b"b")
    at = step * np.arange(100, dtype="<u8")
    f.columns["attributes"]["value"] = start + at | (size - at) << np.uint64(32)
    f.text(b"x" * (100 - f.budget_left() // 16))
    record = zcrecord.load_record(f.seal())
    if message:
        with pytest.raises(LimitError, match=message):
            record.tree()
    else:
        assert most_allocated(record.tree) < 4 << 20


def test_sets_in_sets_are_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    value: frozenset[Any] = frozenset(range(1000))
    for _ in range(25):
        value = frozenset([(value, 1)])
    record = zcrecord.load_record(saved({"s": value}))
    order = Mock(wraps=conventions._sort_key)
    monkeypatch.setattr(conventions, "_sort_key", order)
    assert record.tree()["s"] == value
    assert order.call_count < 1200
