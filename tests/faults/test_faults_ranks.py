"""Ranks that are killed while they save over a checkpoint leave the last one or the new one, whole.

The figures of SECURITY.md are those of `python -m tools.faults --ranks`, which does the same 1,000 times.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.faults.checkpoints import Checkpoint, kill_ranks, state_of
from tools.ranks import OURS, writer

pytest.importorskip("torch")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: ranks end with their parent by prctl")


@LINUX
@pytest.mark.exhaustive(keep=0)
def test_checkpoint_is_whole_after_ranks_were_killed_and_the_next_save_removes_what_they_left(tmp_path: Path) -> None:
    kills = kill_ranks(tmp_path / "run", 5, seed=4)
    assert (kills.times, kills.whole) == (5, 5)
    assert kills.others, "no save was killed in the middle, so nothing was tried"
    assert (kills.left, kills.mixed, kills.crashed) == (0, 0, 0)
    assert kills.loads > kills.refused


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_of_two_generations_is_noticed(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = state_of(OURS, 3)
    state["model"]["layers"]["5"]["weight"][300] = state_of(OURS, 4)["model"]["layers"]["5"]["weight"][300]
    dcp.save(state, storage_writer=writer(OURS, str(tmp_path / "run"), durable=False), no_dist=True)
    assert Checkpoint(OURS, str(tmp_path / "run"), False).generations() == {3.0, 4.0}
    assert Checkpoint(OURS, str(tmp_path / "missing"), False).generations() is None
