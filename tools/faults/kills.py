"""Saves that are killed at any moment: afterwards the file is one generation, whole.

A catalogue and all shards that it names are of one generation, too.
"""

from __future__ import annotations

import os
import random
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord

_WORDS = 60_000  # of one tensor; a save takes several writes


@dataclass(slots=True)
class Kills:
    """Result of killed saves: how many files were whole after it, were new, or had a scratch file beside."""

    times: int = 0
    whole: int = 0
    new: int = 0
    scratches: int = 0
    left: int = 0


def written(number: int) -> dict[str, np.ndarray]:
    """Return the record of one generation, whose number is in every word."""
    return {"first": np.full(_WORDS, number, np.int32), "last": np.full(_WORDS // 2, -number, np.int64)}


def generation(record: zcrecord.Record) -> int:
    """Return the generation of a record; a ValueError if there are several."""
    first, last = record["first"], record["last"]
    number = int(first[0])
    if not ((first == number).all() and (last == -number).all() and len(last) == _WORDS // 2):
        raise ValueError(f"a file of several generations, {number} among them")
    return number


def kill_saves(
    path: Path,
    times: int,
    *,
    durable: bool = False,
    seed: int = 0,
    max_shard_size: int | None = None,
    save: Callable[..., object] = zcrecord.save_record,
) -> Kills:
    """Save generation after generation, each save killed at a moment of its own; POSIX only."""
    chance = random.Random(seed)
    options: dict[str, Any] = {"durable": durable, "max_shard_size": max_shard_size}
    options = options if save is zcrecord.save_record else {}
    save(written(0), path, **options)
    kills = Kills()
    last, within = 0, 0.01
    for number in range(1, times + 1):
        kill_one(partial(save, written(number), path, **options), chance.uniform(0, within))
        whole = _whole(path)
        within *= 0.9 if whole == number else 1.1  # so that half of them are fast enough
        kills.times += 1
        kills.whole += whole in (last, number)
        kills.new += whole == number
        kills.scratches += bool(_others(path))
        last = last if whole is None else whole
    save(written(times + 1), path, **options)  # and not 0, whose two tensors have the same bytes
    kills.left = len(_others(path))
    return kills


def _others(path: Path) -> set[str]:
    """Return the files beside a record that are no part of it."""
    with zcrecord.load_record(path) as record:
        return {*os.listdir(path.parent)} - {path.name, *record.archive.source.file_names}


def kill_one(save: Callable[[], object], after: float) -> None:
    """Kill a process some time after it began to save; one that was faster waits for it."""
    begun, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(tell, b".")
            save()
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.read(begun, 1)
        select.select([], [], [], after)
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(begun)
        os.close(tell)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise RuntimeError("a save ended by itself, with an error")


def _whole(path: Path) -> int | None:
    try:
        with zcrecord.load_record(path, verify="full") as record:
            return generation(record)
    except (zcrecord.RecordError, ValueError):
        return None
