"""Attacks carried out, each at each door in a process of its own: `python -m attacks.running MODULE FOLDER WHAT HOW`.

The process imports what doors need and forks for every attack: a crash, a hang or a leak ends with the child, and the
memory is the attack's alone. What Python and numpy allocate is counted, the same on every machine; resident memory and
time are measured besides. It needs fork and Linux's /proc. What an answer has to be is left to `attacks.catalogue`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NoReturn

from exhaustive import some, spread

from attacks.catalogue import Answer, Door, Maker, wrong
from tools.measure import begin_peak, peak_rss

What = Literal["ours", "peers"]
How = Literal["counted", "timed"]
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".", "tests", "tests/support", "tests/cases")  # of attacks, their helpers and their cases
LONGEST = 60.0  # seconds by the clock; what takes longer is called hung, unless the module says otherwise
ROOM = 6 << 30  # bytes of address space: a fault ends the child, not the machine
SHORT = 500  # characters of a message


def answers(
    module: str, folder: Path, what: What = "ours", names: Iterable[str] = (), how: How = "counted"
) -> list[Answer]:
    """Return the answers to a module's attacks (those named, or all), from a process that does nothing else.

    `what` is "ours" for the module's DOORS, "peers" for its PEERS. Counting takes time and memory; "timed" is without.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in FOLDERS)}
    command = [sys.executable, "-m", "attacks.running", module, str(folder), what, how, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Answer(**json.loads(line)) for line in done.stdout.splitlines()]


def faults(module: Any, folder: Path, few: int) -> list[str]:
    """Return the faults of the answers to a module's attacks, missing answers included.

    Of so many attacks memory is counted, which takes five times as long. The others are carried out if tests leave
    nothing out: of these resident memory and time are held against a limit.
    """
    known = {attack.name: attack for attack in module.ATTACKS}
    assert len(known) == len(module.ATTACKS), "two attacks have one name"
    counted = spread([*known], few)
    told = answers(module.__name__, folder, names=counted)
    names = [name for name in some([*known], few) if name not in counted]
    if names:
        told += answers(module.__name__, folder, names=names, how="timed")
    due = [(name, door) for name in (*counted, *names) for door in module.DOORS]
    missing = {*due} - {(answer.attack, answer.door) for answer in told}
    assert len(told) == len(due) and not missing, f"no answer: {missing}"
    return [fault for answer in told if (fault := wrong(known[answer.attack], answer))]


def run(module: str, folder: Path, what: What, how: How, names: Iterable[str]) -> Iterator[Answer]:
    """Carry a module's attacks out in children of this process."""
    found = importlib.import_module(module)
    chosen = set(names)
    if what == "ours" and hasattr(found, "HARMLESS"):
        warm_up(found, folder)
    gc.freeze()  # what is here by now needs no looking through in every child
    for attack in found.ATTACKS:
        if chosen and attack.name not in chosen:
            continue
        if what == "ours":
            longest = getattr(found, "LONGEST", LONGEST)
            yield from at_doors(attack.name, attack.make, folder, found.DOORS, how, longest)
        else:
            for peer, make in (attack.peer or {}).items():
                yield from at_doors(attack.name, make, folder, found.PEERS[peer], how)


def warm_up(found: Any, folder: Path) -> None:
    """Take every door once with a harmless file, in this process: what is imported on the way is not an attack's."""
    (folder / "harmless").mkdir()
    path = found.HARMLESS(folder / "harmless")
    for name, door in found.DOORS.items():
        if (answer := measured(door, path, "timed"))["kind"]:
            raise RuntimeError(f"{name} refuses what is harmless: {answer['message']}")
    shutil.rmtree(folder / "harmless")


def at_doors(
    attack: str, make: Maker, folder: Path, doors: Mapping[str, Door], how: How, longest: float = LONGEST
) -> Iterator[Answer]:
    """Make an attack's file, and yield what each door answers; where one ends the child, another tries the rest."""
    place = folder / "attack"
    place.mkdir()
    try:
        [path] = in_child(lambda tell: tell(os.fspath(make(place))))[0] or [""]
        if not path:
            raise RuntimeError(f"{attack}: its file could not be made")
        left = list(doors)
        while left:
            told, end = in_child(lambda tell: [tell(measured(doors[name], Path(path), how, longest)) for name in left])
            for one in told:
                yield Answer(attack=attack, door=left.pop(0), **one)
            if left:
                yield Answer(attack=attack, door=left.pop(0), kind=end, message="")
    finally:
        shutil.rmtree(place)


def in_child(work: Callable[[Callable[[Any], object]], object]) -> tuple[list[Any], str]:
    """Return the report of `work` in a child of this process, and the child's end ("" as it should be)."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        as_child(work, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as lines:
        told = [json.loads(line) for line in lines]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return told, "hung"
    return told, f"killed by {signal.Signals(-status).name}" if status < 0 else "ended" if status else ""


def as_child(work: Callable[[Callable[[Any], object]], object], writing: int) -> NoReturn:
    """Do the work and end, whatever comes of it."""
    import resource  # here, since Windows, which runs none of these, has none

    status = 1
    try:
        os.dup2(2, 1)  # standard output is the parent's answers
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        def tell(value: Any) -> None:
            os.write(writing, (json.dumps(value) + "\n").encode())

        work(tell)
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def measured(door: Door, path: Path, how: How, longest: float = LONGEST) -> dict[str, Any]:
    """Return a door's answer, and its cost.

    Resident pages of the file itself, which a mapping shows and the system takes back as it likes, are not told from
    others; so as many bytes as the file has do not count.
    """
    act = door(path)
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)  # what is taken from free heap later would not count
    if how == "counted":
        tracemalloc.start()
    before, start = begin_peak(), time.process_time()
    signal.setitimer(signal.ITIMER_REAL, longest)
    kind = message = ""
    try:
        act()
    except BaseException as error:
        kind, message = type(error).__name__, str(error)[:SHORT]
    signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.process_time() - start
    resident = max(0, (peak_rss() or 0) - before - path.stat().st_size)
    nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"kind": kind, "message": message, "seconds": seconds, "nbytes": nbytes, "resident": resident}


def main(module: str, folder: str, what: What, how: How, *names: str) -> None:
    """Print an answer a line, as JSON."""
    for answer in run(module, Path(folder), what, how, names):
        print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
