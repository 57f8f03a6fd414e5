"""The guide's example of checkpoints, saved meanwhile and loaded, does on several ranks what it does on one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ranks

SCRIPT = Path(__file__).with_name("ranks_guide.py")


@pytest.mark.skipif(sys.platform != "linux", reason="platform: forks")
@pytest.mark.exhaustive(keep=0)  # on one rank the guide runs in any case
@pytest.mark.parametrize("world", [2, 4])
def test_the_guides_example_runs_on_ranks_with_a_group_of_its_own_for_saves(world: int, tmp_path: Path) -> None:
    found = ranks.run_ranks(SCRIPT, world, tmp_path)
    assert found == {"the_guides_example": [{"own groups": [True], "steps": 2}] * world}
