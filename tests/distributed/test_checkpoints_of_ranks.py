"""Checkpoints that several ranks saved and loaded: one run of `ranks_scenarios`, and a test for each fact of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks

import zcrecord
from zcrecord.distributed import consolidate
from zcrecord.integrity import compare

SCENARIOS = Path(__file__).with_name("ranks_scenarios.py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="platform: forks, and Linux tells what is mapped")
exhaustive = pytest.mark.exhaustive(keep=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[Any]]:
    return ranks.run_ranks(SCENARIOS, 4, folder)


@pytest.fixture
def model(found: dict[str, list[Any]]) -> dict[str, Any]:
    facts: dict[str, Any] = found["model_in_two_dimensions"][0]
    return facts


@exhaustive
def test_a_checkpoint_is_a_catalogue_and_one_archive_a_rank(model: dict[str, Any]) -> None:
    assert "_StridedShard" in model["placements"]
    names = [re.sub("~[0-9a-f]{16}", "~", name) for name in model["files"]]
    assert sorted(names) == ["checkpoint.zcr", *(f"checkpoint~-0000{i}-of-00004.zcr" for i in range(1, 5))]


@exhaustive
@pytest.mark.parametrize("way", ["same", "one", "half", "views"])
def test_a_model_and_its_optimizer_come_back_in_every_layout(
    way: str, model: dict[str, Any], found: dict[str, list[Any]]
) -> None:
    assert model[way] == model["saved"]
    assert model.get(f"before {way}") != model["saved"]
    assert way != "views" or all(rank["mapped"] for rank in found["model_in_two_dimensions"])


@exhaustive
def test_one_process_reads_it_as_one_record(folder: Path, found: dict[str, list[Any]]) -> None:
    assert found
    record = zcrecord.load_record(folder / "model_in_two_dimensions" / "checkpoint.zcr", verify="full")
    assert record["model.1.weight"].shape == (42, 16)
    assert record.attributes["optim.param_groups.0.betas"] == (0.8, 0.9)
    assert record.attributes["epoch"] == 3 and record["model.table"].tolist() == list(range(10))
    state = record.tree()["optim"]["state"]["0.weight"]
    assert state["step"] == 1 and state["exp_avg"].shape == (16,)


@exhaustive
def test_one_archive_is_made_of_it(folder: Path, found: dict[str, list[Any]], tmp_path: Path) -> None:
    assert found
    checkpoint = folder / "model_in_two_dimensions"
    consolidate(checkpoint, tmp_path / "one.zcr")
    one, split = (zcrecord.load_record(path) for path in (tmp_path / "one.zcr", checkpoint / "checkpoint.zcr"))
    assert not list(compare(one, split)) and one.attributes == split.attributes
    assert any(not np.array_equal(one[name], np.zeros_like(one[name])) for name in one if "exp_avg" in name)
    one.verify()


@exhaustive
def test_every_layout_is_loaded_into_every_other(found: dict[str, list[Any]]) -> None:
    assert [rank["wrong"] for rank in found["resharding"]] == [[], [], [], []]
    assert found["resharding"][0]["count"] == 6 * 6 * 4


@exhaustive
def test_tied_tensors_stay_tied_if_all_their_chunks_are(found: dict[str, list[Any]]) -> None:
    tied = found["ties"][0]["tied"]
    assert tied["embed.weight"] == tied["head.weight"] == ["embed.weight", "head.weight"]
    assert tied["local"] == tied["moments.0"] == tied["moments.1"] == []
    assert found["ties"][0]["head"] == np.arange(40.0).reshape(8, 5).tolist()
    assert [rank["stepped"] for rank in found["ties"]] == [1, 1, 1, 1], "a step of one is a step of the other"


@exhaustive
def test_a_rank_that_fails_leaves_the_old_checkpoint_and_the_next_save_removes_its_files(
    found: dict[str, list[Any]],
) -> None:
    for facts in found["a_rank_that_fails"]:
        before, failed, after = (set(facts[name]) for name in ("before", "failed", "after"))
        assert re.search(r"RANK 2(?s:.*)No space left on device", facts["told"])
        left = failed - before
        assert len(left) <= 3 and not [name for name in left if "00003-of" in name or "scratch" not in name]
        assert before < failed and facts["kept"] == 1
        assert len(after) == 5 and facts["now"] == 3
        assert not after & (before | failed) - {"checkpoint.zcr"}


def test_two_ranks_save_over_their_checkpoint_with_cached_plans_and_without_collectives(tmp_path: Path) -> None:
    found = ranks.run_ranks(SCENARIOS, 2, tmp_path, "plans_that_are_cached", "saved_without_collectives")
    assert found["plans_that_are_cached"] == [[[0, 0, 3], [1, 1, 3], [2, 2, 3]]] * 2
    for facts in found["saved_without_collectives"]:
        assert facts["equal"] and facts["files"] == 3, "the second save has removed the first one's archives"
        assert facts["values"] == ["n", "of 0", "of 1"], "each rank's own values are there"
        assert re.search(r"'odd': rank 1 has it as float32 of shape \(1,\), a rank before as", facts["told"])


@exhaustive
def test_an_asynchronous_save_has_the_values_of_its_start(found: dict[str, list[Any]]) -> None:
    assert found["asynchronous_saves"] == [[[[1], 5, ["w", "tied"]]] * 3] * 4


@exhaustive
def test_a_save_to_folders_that_ranks_have_to_themselves_is_refused(found: dict[str, list[Any]]) -> None:
    archive = r"checkpoint~\w{16}-0000[34]-of-00004\.zcr, which a rank has written, is not in this folder .*share"
    for told, left in found["folders_that_are_not_shared"]:
        assert re.search(f"SourceNotFoundError: .*node-0: {archive}", told) and left == []


@exhaustive
def test_some_of_the_ranks_save_alone(found: dict[str, list[Any]]) -> None:
    facts = found["a_part_of_the_ranks"][0]
    assert len(facts["files"]) == 3 and facts["w"] == [[0, 1], [2, 3], [4, 5]]


@exhaustive
def test_ranks_that_opened_different_checkpoints_refuse(found: dict[str, list[Any]]) -> None:
    for told in found["ranks_that_opened_different_checkpoints"]:
        assert re.search(r"SourceError: .*: was replaced while ranks were opening it, .*; load it again", told)


@exhaustive
@pytest.mark.parametrize("world", [2, 4])  # on one rank the guide runs in any case
def test_the_guides_example_runs_on_ranks_with_a_group_of_its_own_for_saves(world: int, tmp_path: Path) -> None:
    found = ranks.run_ranks(SCENARIOS, world, tmp_path, "the_guides_example")
    assert found == {"the_guides_example": [{"own groups": [True], "steps": 2}] * world}
