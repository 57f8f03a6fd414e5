"""State the figures: `python -m tools.faults [--times 1000] [--calls] [--ranks]`.

Needs Linux; gcc too for `--calls`, which interrupts every save at every system call, and torch for `--ranks`, which
kills ranks that save checkpoints. Both take minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.ranks import FILES, HUGGING_FACE, OURS

from .checkpoints import kill_ranks
from .interrupting import build, run_in
from .kills import kill_saves
from .replacing import replace_under_readers


def main(arguments: list[str] | None = None) -> int:
    """Print the figures; the exit status is 0 if all are as they have to be."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=summary)
    parser.add_argument("--times", type=int, default=1000, help="of kills, and of replacements")
    parser.add_argument("--folder", type=Path, help="where to, for another file system than that of temporary files")
    parser.add_argument("--calls", action="store_true", help="also interrupt every save at every system call")
    parser.add_argument("--ranks", action="store_true", help="instead, kill ranks that save checkpoints; torch's, too")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        if given.ranks:
            return 0 if _ranks_killed(folder, given.times) else 1
        works = [
            *(_killed(folder, given.times, size) for size in (None, 300_000)),
            *(_replaced(folder, given.times, durable) for durable in (False, True)),
        ]
        if given.calls:
            works.append(_calls(folder))
    return 0 if all(works) else 1


def _say(what: str, started: float, good: bool, results: Any) -> bool:
    print(f"{what}: {'ok' if good else 'FAILED'}, {time.perf_counter() - started:.0f} s\n  {results}", flush=True)
    return good


def _killed(folder: Path, times: int, max_shard_size: int | None) -> bool:
    started = time.perf_counter()
    where = folder / ("killed" if max_shard_size is None else "killed shards")
    where.mkdir()
    results = kill_saves(where / "m.zcr", times, max_shard_size=max_shard_size)
    kind = "archive" if max_shard_size is None else "catalogue"
    what = f"{results.whole} of {times} killed saves left a whole {kind}"
    return _say(what, started, results.whole == times and not results.left, dataclasses.asdict(results))


def _ranks_killed(folder: Path, times: int) -> bool:
    """Kill ranks that save by zcrecord, and a tenth as often some that save by torch; theirs need not be whole."""
    good = True
    for way, count in ((OURS, times), (FILES, times // 10), (HUGGING_FACE, times // 10)):
        started = time.perf_counter()
        results = kill_ranks(folder / way, count, way=way)
        whole = way != OURS or (results.whole == count and not (results.left or results.mixed or results.crashed))
        what = f"{way}: {results.whole} of {count} killed saves of two ranks left a whole checkpoint"
        good &= _say(what, started, whole, dataclasses.asdict(results))
    return good


def _replaced(folder: Path, times: int, durable: bool) -> bool:
    started = time.perf_counter()
    results = replace_under_readers(folder / "replaced.zcr", times, processes=8, threads=8, durable=durable)
    errors = results.pop("errors")
    what = f"{times} replacements (durable={durable}) under {results['readers']} readers, {len(errors)} errors"
    return _say(what, started, not errors, {**results, "errors": errors[:5]})


def _calls(folder: Path) -> bool:
    started = time.perf_counter()
    (folder / "calls").mkdir()
    results = run_in(build(folder), folder / "calls")
    wrong = [problem for found in results.values() for problem in found.pop("wrong")]
    sums = {what: sum(found[what] for found in results.values()) for what in ("failed", "survived", "killed")}
    what = f"{len(results)} kinds of save, interrupted {sum(sums.values())} times"
    return _say(what, started, not wrong, {**sums, "wrong": wrong})


if __name__ == "__main__":
    sys.exit(main())
