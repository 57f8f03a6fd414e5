"""Processes of one job of torch.distributed: gloo, on the CPU; all are forks of one, so that torch starts once."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked

Scenario = Callable[["Rank"], Any]
_RUN = """
import os, runpy, sys
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
runpy.run_path(sys.argv[1], run_name="__main__")
"""
_MOST_SECONDS = 240  # of a rank that waits for another


class Rank:
    """One process of a job.

    Attributes:
        number, world: its rank, and the number of all.
        folder: one for all ranks and scenarios; `scenario` of it is for one.
    """

    def __init__(self, number: int, world: int, folder: Path) -> None:
        self.number, self.world, self.folder = number, world, folder
        self.scenario = folder


def run_ranks(script: Path, world: int, folder: Path, *names: str) -> dict[str, list[Any]]:
    """Run scenarios (all by default) of a script that calls `serve`; return for each what each rank returned."""
    forked.run_torch(_RUN, script, world, folder, *names)
    found = [json.loads((folder / f"rank-{number}.json").read_text(encoding="utf-8")) for number in range(world)]
    return {name: [of_rank[name] for of_rank in found] for name in found[0]}


def serve(scenarios: list[Scenario], by_name: list[Scenario]) -> None:
    """Fork a process for each rank, which runs all scenarios, or those that are named.

    The script that `run_ranks` runs calls it.
    """
    world, folder, names = int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    scenarios = [scenario for scenario in scenarios + by_name if scenario.__name__ in names] if names else scenarios
    children = {_forked(Rank(number, world, folder), scenarios) for number in range(world)}
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:  # the others would wait for it
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def _forked(rank: Rank, scenarios: list[Scenario]) -> int:
    child = os.fork()
    if child:
        return child
    signal.alarm(_MOST_SECONDS)
    status = 1
    try:
        _run(rank, scenarios)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run(rank: Rank, scenarios: list[Scenario]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    where = f"file://{rank.folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank.number, world_size=rank.world)
    found = {}
    for scenario in scenarios:
        rank.scenario = rank.folder / scenario.__name__
        dist.barrier()
        found[scenario.__name__] = scenario(rank)
    (rank.folder / f"rank-{rank.number}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
