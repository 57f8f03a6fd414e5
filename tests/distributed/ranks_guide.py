"""The guide's example, run by several ranks; `test_guide_of_ranks.py` starts it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from guides import ROOT
from ranks import Rank, serve

import zcrecord

GUIDE = ROOT / "zcrecord" / "distributed" / "README.md"
ALONE = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)\n'


def the_guides_example(rank: Rank) -> Any:
    """Run all blocks up to the one that looks into the checkpoint, in ranks whose process group is there."""
    text, _, _ = GUIDE.read_text(encoding="utf-8").partition("## Look into a checkpoint")
    blocks = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    code = "\n".join(blocks)
    assert code.count(ALONE) == 1 and len(blocks) == 4
    rank.scenario.mkdir(exist_ok=True)
    os.chdir(rank.scenario)
    torch.manual_seed(0)  # all ranks begin with one model, as under torchrun with a seed
    groups, real = [], dcp.async_save

    def noting(*args: Any, process_group: Any = None, **options: Any) -> Any:
        groups.append(process_group)
        return real(*args, process_group=process_group, **options)

    dcp.async_save, names = noting, dict[str, Any]()
    exec(compile(code.replace(ALONE, ""), str(GUIDE), "exec", dont_inherit=True), names)
    dist.barrier()
    own = [group not in (None, dist.group.WORLD) for group in groups]
    return {"own groups": own, "steps": zcrecord.load_record("run/checkpoint.zcr").attributes["step"]}


if __name__ == "__main__":
    serve([the_guides_example])
