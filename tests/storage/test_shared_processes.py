"""Four processes over one archive hold its weights once: ONNX Runtime sessions, and torch workers however started.

Proportional set sizes are summed: each page counts as one part in as many as there are processes that have it. The same
processes, in the same run, are also measured with a copy of their own each, which is what the sum has to notice.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tools.bench.sharing import BARE, OWN, SHARED, serve, torch_workers, total_pss, write_archive, write_models
from tools.measure import MIB
from tools.worker import call_alone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="platform: /proc/PID/smaps_rollup is Linux's")

WEIGHTS = 128  # MiB: enough that copies are not lost among what four processes take anyway
PROMISED = 1.15


def assert_one_copy(sums: dict[str, int], nbytes: int) -> None:
    most = PROMISED * (nbytes + sums[BARE])
    assert sums[OWN] > most + nbytes, "private copies are to be noticed, and were not"
    assert sums[SHARED] < most
    assert sums[SHARED] - sums[BARE] < PROMISED * nbytes, "hidden by what the processes take without weights"


@pytest.mark.exhaustive(keep=0)
def test_four_sessions_that_use_one_matrix_in_two_branches_hold_it_once(tmp_path: Path) -> None:
    paths = write_models(tmp_path, WEIGHTS)
    assert_one_copy(serve(paths), Path(paths[SHARED]).stat().st_size)


@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("start", ["fork", "spawn", "DataLoader, fork"])
def test_four_torch_workers_over_one_archive_hold_its_weights_once(start: str, tmp_path: Path) -> None:
    path = write_archive(tmp_path, WEIGHTS)
    sums = call_alone(f"{torch_workers.__module__}:{torch_workers.__name__}", path=str(path), start=start)
    assert_one_copy(sums, path.stat().st_size)


def test_memory_of_a_process_that_is_gone_is_an_error_and_not_nothing() -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        total_pss([1 << 22])
    assert total_pss([os.getpid()]) > MIB
