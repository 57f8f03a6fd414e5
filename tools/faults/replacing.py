"""Reading a file that is replaced all the time: processes and threads load it in every way, and check every byte.

`python -m tools.faults.replacing PATH THREADS` is one of the readers: it prints that it is ready, reads until its
standard input ends, and prints its results as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zcrecord
from zcrecord import RecordError, load_record

from .kills import generation, written

_CHANGED = ("was replaced or changed since it was opened", "is not the archive that the hollow record is of")


def _generation(path: str, **options: Any) -> int:
    with load_record(path, **options) as record:
        return generation(record)


def _loaded(path: str) -> int:
    loaded: Any = load_record(path).load_into("read")
    return generation(loaded)


def _filled(path: str) -> int:
    hollow = load_record(path).hollow()
    hollow.fill_by("read")
    return generation(hollow.seal())


# Ways to read; those that open the file a second time may report that it was replaced.
WAYS: dict[str, tuple[Callable[[str], int], bool]] = {
    "mapped": (partial(_generation, verify="full"), False),
    "read": (partial(_generation, verify="full", mmap=False), False),
    "touched": (partial(_generation, verify="touch"), False),
    "load_into": (_loaded, True),
    "fill_by": (_filled, True),
}


class _Reader(threading.Thread):
    """Reads in every way, one after the other, until `stop` is set."""

    def __init__(self, path: str, stop: threading.Event) -> None:
        super().__init__()
        self._path, self._stop_reading = path, stop
        self.reads = dict.fromkeys(WAYS, 0)
        self.refused = 0
        self.generations: set[int] = set()
        self.errors: list[str] = []

    def run(self) -> None:
        last = False
        while not last:
            last = self._stop_reading.is_set()  # then each way reads once more, while nothing is replaced
            for name, (read, may_refuse) in WAYS.items():
                try:
                    self.generations.add(read(self._path))
                    self.reads[name] += 1
                except Exception as error:
                    if may_refuse and isinstance(error, RecordError) and any(what in str(error) for what in _CHANGED):
                        self.refused += 1
                    else:
                        self.errors.append(f"{name}: {type(error).__name__}: {error}")


def replace_under_readers(path: Path, times: int, *, processes: int, threads: int, durable: bool) -> dict[str, Any]:
    """Replace a file so many times while others read it; returns their results, together.

    `reads` by way, `refused` because the file was another one when it was opened again, `generations` that were seen,
    and `errors`, which must be empty.
    """
    zcrecord.save_record(written(0), path, durable=durable)
    command = [sys.executable, "-m", __name__, str(path)]
    root = Path(__file__).resolve().parents[2]
    readers = [
        subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, text=True)
        for n in [*[1] * processes, threads]
    ]
    for reader in readers:
        assert reader.stdout is not None
        if reader.stdout.readline() != "ready\n":
            raise RuntimeError("a reader did not begin")
    for number in range(1, times + 1):
        zcrecord.save_record(written(number), path, durable=durable)
    results = []
    for reader in readers:
        answer, _ = reader.communicate("", timeout=300)
        if reader.returncode:
            raise RuntimeError(f"a reader ended by itself: {reader.returncode}")
        results.append(json.loads(answer))
    return {
        "replacements": times,
        "readers": processes + threads,
        "reads": {name: sum(r["reads"][name] for r in results) for name in WAYS},
        "refused": sum(r["refused"] for r in results),
        "generations": len({g for r in results for g in r["generations"]}),
        "errors": [error for r in results for error in r["errors"]],
    }


def main(arguments: list[str]) -> int:
    """Read until standard input ends."""
    stop = threading.Event()
    readers = [_Reader(arguments[0], stop) for _ in range(int(arguments[1]))]
    for reader in readers:
        reader.start()
    print("ready", flush=True)
    sys.stdin.read()
    stop.set()
    for reader in readers:
        reader.join()
    results = {
        "reads": {name: sum(r.reads[name] for r in readers) for name in WAYS},
        "refused": sum(r.refused for r in readers),
        "generations": sorted({g for r in readers for g in r.generations}),
        "errors": [error for r in readers for error in r.errors],
    }
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
