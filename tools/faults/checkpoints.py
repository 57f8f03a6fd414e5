"""Ranks killed while they save over the last checkpoint with torch.distributed.checkpoint, and loads at the same time.

Two ranks save a whole checkpoint, and then the next one over it, during which one of them or both are killed. The
folder has to contain one of the two, whole; the next save has to remove the remains of the killed one. Writers and
readers of torch itself can be tried the same way. Ranks are forked from a process that has imported torch.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tools.ranks import HUGGING_FACE, OURS, reader, writer
from tools.worker import call_alone
from zcrecord import load_record

_TENSORS, _ROWS, _COLUMNS = 8, 256, 1024  # of a rank: 8 MiB
_APART = 2 * _TENSORS  # values of a generation
_PATIENCE = 120.0  # seconds for a save that nothing disturbs
_CALLS = (38, 10)  # on files, of the first rank and of the second one in a save, and a little more


@dataclass(slots=True)
class RankKills:
    """Counts of killed saves of checkpoints.

    Attributes:
        whole: checkpoints that were whole afterwards: the one before, or the `new` one.
        others: folders in which the killed save had left other files beside the checkpoint; `left`, those in which
            they were still there after the next save.
        loads: by a reader, at the same time; `refused`, those that ended in an error; `mixed`, of several saves.
        crashed: readers that a signal killed.
    """

    times: int = 0
    whole: int = 0
    new: int = 0
    others: int = 0
    left: int = 0
    loads: int = 0
    refused: int = 0
    mixed: int = 0
    crashed: int = 0


def kill_ranks(folder: Path, times: int, *, way: str = OURS, durable: bool = False, seed: int = 0) -> RankKills:
    """Kill so many saves of checkpoints to `folder`, which is to be new; Linux only."""
    options: dict[str, Any] = {"way": way, "durable": durable, "seed": seed}
    return RankKills(**call_alone("tools.faults.checkpoints:run", folder=str(folder), times=times, **options))


# -- in a process of its own, of which the ranks are forked ----------------------------------------------------------


class Checkpoint(NamedTuple):
    """A folder for checkpoints, and the way they are saved and loaded."""

    way: str
    folder: str
    durable: bool

    def save(self, generation: int, mesh: Any = None) -> None:
        """Save a generation; of a mesh's rank its part."""
        import torch.distributed.checkpoint as dcp

        storage = writer(self.way, self.folder, durable=self.durable)
        dcp.save(state_of(self.way, generation, mesh), storage_writer=storage, no_dist=mesh is None)

    def generations(self) -> set[float] | None:
        """Return all generations that the values are of; None if nothing can be loaded."""
        import torch.distributed.checkpoint as dcp

        state = state_of(self.way, 0)
        for layer in state["model"]["layers"].values():
            layer["weight"].fill_(-1)
        try:
            dcp.load(state, storage_reader=reader(self.way, self.folder), no_dist=True)
        except BaseException:  # DCP's own is no Exception
            return None
        generations = {float(state["model"]["steps"]), float(state.get("epoch", state["model"]["steps"]))}
        for i, layer in enumerate(state["model"]["layers"].values()):
            for half, part in enumerate(layer["weight"].chunk(2)):
                generations |= {(float(value) - 2 * i - half) / _APART for value in part.aminmax()}
        return generations

    def others(self) -> set[str]:
        """Return the files in the folder that are no part of its checkpoint, which is zcrecord's."""
        if self.way != OURS:
            return set()
        path = Path(self.folder, "checkpoint.zcr")
        with load_record(path) as record:
            return {*os.listdir(self.folder)} - {path.name, *record.archive.source.file_names}


def run(folder: str, times: int, way: str, durable: bool, seed: int) -> dict[str, int]:
    """Do what `kill_ranks` says."""
    import torch
    import torch._dynamo  # each rank would need seconds for it
    import torch._inductor.test_operators

    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)  # of ranks that find another gone
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    checkpoint = Checkpoint(way, folder, durable)
    checkpoint.save(0)
    chance, kills, within = random.Random(seed), RankKills(), 0.05
    for number in range(1, 2 * times, 2):
        fatal = [chance.randrange(most) for most in _CALLS] if number % 4 == 1 else []  # every other one by its calls
        with _Reader(checkpoint) as seen, _Ranks(checkpoint, number, fatal) as ranks:
            kills.left += number > 1 and bool(checkpoint.others())
            ranks.save_and_kill(chance, within, by_calls=bool(fatal))
        for what, count in seen.counts.items():
            setattr(kills, what, getattr(kills, what) + count)
        generations = checkpoint.generations()
        if not fatal:
            within *= 0.9 if generations == {number + 1} else 1.1  # so that half of them are fast enough
        kills.times += 1
        kills.whole += generations in ({number}, {number + 1})
        kills.new += generations == {number + 1}
        kills.others += bool(checkpoint.others())
    with _Ranks(checkpoint, 2 * times + 1):
        kills.left += bool(checkpoint.others())
    return asdict(kills)


def state_of(way: str, generation: int, mesh: Any = None) -> dict[str, Any]:
    """Return the state of a generation, by which each element is known; that of a mesh's rank, or the whole."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    layers: dict[str, Any] = {}
    for i in range(_TENSORS):
        halves = [torch.full((_ROWS, _COLUMNS), float(generation * _APART + 2 * i + half)) for half in range(2)]
        if mesh is None:
            layers[str(i)] = {"weight": torch.cat(halves)}
        else:
            local = halves[mesh.get_local_rank()]
            layers[str(i)] = {"weight": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    state = {"model": {"layers": layers, "steps": torch.full((1,), float(generation))}}
    return state if way == HUGGING_FACE else {**state, "epoch": generation}


class _Ranks:
    """Two forked ranks that have saved one checkpoint, whole, and wait; leaving the context ends them."""

    def __init__(self, checkpoint: Checkpoint, number: int, fatal: list[int] | None = None) -> None:
        """`fatal` has for each rank the call on the folder, by number, before which a signal can kill it."""
        self._folder = checkpoint.folder
        self._pids: list[int] = []
        self._answers: list[int] = []  # a pipe's end of each rank, which writes when it has saved
        self._go: list[int] = []
        with tempfile.TemporaryDirectory() as meeting:
            for rank in range(2):
                at = fatal[rank] if fatal else None
                self._fork(partial(_be_rank, checkpoint, number, rank, meeting, at))
            for end in self._answers:
                if _read(end, _PATIENCE) != b"s":
                    self.__exit__()
                    raise RuntimeError("a rank could not save a checkpoint that nothing disturbed")

    def _fork(self, act: Callable[[int, int], None]) -> None:
        (answers, answer), (wait, go) = os.pipe(), os.pipe()
        pid = os.fork()
        if not pid:
            with suppress(BaseException):
                act(answer, wait)
            os._exit(1)
        for end in (answer, wait):
            os.close(end)
        self._pids.append(pid)
        self._answers.append(answers)
        self._go.append(go)

    def save_and_kill(self, chance: random.Random, within: float, *, by_calls: bool = False) -> None:
        """Have the ranks save over the checkpoint, kill one or both, and wait until the other has noticed.

        They kill themselves before their fatal call, or are killed soon after the save has made its first file, or at
        its end if it makes none.
        """
        victims = chance.choice([[0], [1], [0, 1]])
        before = set(os.listdir(self._folder))
        for rank, go in enumerate(self._go):
            os.write(go, b"k" if by_calls and rank in victims else b"g")
        while (
            not by_calls
            and set(os.listdir(self._folder)) <= before
            and not select.select(self._answers, [], [], 0.0005)[0]
        ):
            pass
        time.sleep(0 if by_calls else chance.uniform(0, within))
        for rank in victims:
            if by_calls:
                _read(self._answers[rank])  # the end of it, or that it has made fewer calls
            os.kill(self._pids[rank], signal.SIGKILL)
        for rank in {0, 1}.difference(victims):
            _read(self._answers[rank])  # that it is done, or its end; gloo may not notice for long

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for end in (*self._answers, *self._go):
            os.close(end)


def _read(end: int, patience: float = 5) -> bytes:
    """Return the next byte that a rank sends; nothing if it ends, or sends none for so many seconds."""
    return os.read(end, 1) if select.select([end], [], [], patience)[0] else b""


def _be_rank(
    checkpoint: Checkpoint, number: int, rank: int, meeting: str, fatal: int | None, answer: int, go: int
) -> None:
    """Save one checkpoint, and on a byte from `go` the next one over it; on a `k` up to the fatal call."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    _end_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo reports that the other rank is gone
    dist.init_process_group("gloo", init_method=f"file://{meeting}/m", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for generation in (number, number + 1):
        checkpoint.save(generation, mesh)
        dist.barrier()
        os.write(answer, b"s")
        if os.read(go, 1) == b"k" and fatal is not None:
            sys.addaudithook(partial(_die, checkpoint.folder, iter(range(fatal))))
    signal.pause()


def _die(folder: str, left: Iterator[int], event: str, arguments: tuple[Any, ...]) -> None:
    """End this process by a signal before its next call on a folder or a lock, if no call is left."""
    named = event == "open" or event.startswith("os.")
    if (event == "fcntl.flock" or (named and folder in str(arguments))) and next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class _Reader:
    """A forked process that loads all the time; leaving the context ends it.

    Attributes:
        counts: of its loads, as `RankKills` has them.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.counts = {"crashed": 1}  # unless it answers
        self._answers, answer = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            with suppress(BaseException):
                _be_reader(checkpoint, answer)
            os._exit(1)
        os.close(answer)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGTERM)
        if answer := os.read(self._answers, 1000):
            self.counts = json.loads(answer)
        os.waitpid(self._pid, 0)
        os.close(self._answers)


def _be_reader(checkpoint: Checkpoint, answer: int) -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    _end_with_parent()
    counts = dict.fromkeys(("loads", "refused", "mixed"), 0)
    while not stopped:
        generations = checkpoint.generations()
        counts["loads"] += 1
        counts["refused"] += generations is None
        counts["mixed"] += generations is not None and len(generations) > 1
    os.write(answer, json.dumps(counts).encode())
