"""The main job, from a model to an answer, on this machine: what `tools/quickstart` runs.

Act one converts a small classifier of handwritten digits, opens it, lists it and runs it from both files. Both stay in
`.quickstart`, as model.onnx and model.zcr: the examples of README and of the guides run there. Act two, left out with
--small, streams a large GPT-shaped model to disk, converts it beside what `onnx.load` takes for it, tunes the archive
for this machine, and has four processes serve it from each file. What it writes is in one temporary folder, removed at
the end and on Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import zcrecord
import zcrecord.onnx
from tools.measure import MIB, free_bytes, memory
from tools.models.gpt import write_gpt
from tools.models.wire import MAX_MIB
from tools.serving import make_session
from tools.worker import Worker, WorkerError, call_alone, call_at_once

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
LEFT = ROOT / ".quickstart"  # the small model and its archive, for examples
PROCESSES = 4
LATENCY_ROUNDS, LATENCY_REPEATS = 4, 5  # in turns, so that a slow second hits all files alike
LARGE_BATCH = 16
FILES = 6  # times a model's size on disk: the .onnx, the archive, the tuned one, and what tuning writes meanwhile
LEAST_MIB = 16  # of a model that is made smaller
SPARE_MIB = 256  # of disk and memory, left for everybody else


class QuickstartError(Exception):
    """Something about this machine, or a result that should not be; one line for the user."""


@dataclass(frozen=True, slots=True)
class Served:
    """Cost of serving one file: seconds are medians over the processes, bytes are summed over them; None off Linux."""

    label: str
    ready: float
    first_answer: float
    resident: int | None
    private: int | None
    answer: list[float]


def act_one(console: Console, folder: Path) -> None:
    """Convert, open, list and run the digits classifier; both files must classify alike."""
    folder.mkdir(exist_ok=True)
    source, archive = folder / "model.onnx", folder / "model.zcr"
    shutil.copyfile(DATA / "digits.onnx", source)
    console.rule("[bold]Act one[/]: a classifier of handwritten digits", align="left")
    start = time.perf_counter()
    zcrecord.onnx.convert(source, archive, force=True)
    converted = time.perf_counter()
    record = zcrecord.load_record(archive)
    opened = time.perf_counter()
    console.print(
        f"onnx2zc model.onnx model.zcr      {_seconds(converted - start)}, {source.stat().st_size:,} bytes in"
    )
    console.print(f'load_record("model.zcr")          {_seconds(opened - converted)}, nothing copied:')
    table = _table(["tensor", "dtype", "shape"], ["bytes", "at offset"])
    for info in record.infos():
        shape = " x ".join(map(str, info.shape)) or "scalar"
        table.add_row(info.name, info.dtype.name, shape, f"{info.nbytes:,}", f"{info.offset:,}")
    console.print(table)
    _compare_digits(console, source, archive)


def _table(texts: list[str], figures: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in texts:
        table.add_column(heading)
    for heading in figures:
        table.add_column(heading, justify="right")
    return table


def _compare_digits(console: Console, source: Path, archive: Path) -> None:
    with np.load(DATA / "digits_heldout.npz") as held_out:
        images, labels = held_out["images"], held_out["labels"]
    pixels = images.reshape(len(images), -1).astype(np.float32)
    both = [make_session(str(path)).run(None, {"pixels": pixels})[0] for path in (source, archive)]
    accuracies = [float((logits.argmax(axis=1) == labels).mean()) for logits in both]
    for path, accuracy in zip((source, archive), accuracies, strict=True):
        console.print(f"ONNX Runtime from {path.name:<12}    {accuracy:.1%} of {len(labels)} held-out images right")
    stock, ours = both
    if np.array_equal(stock, ours):
        console.print("All logits are equal, bit for bit.")
    elif accuracies[0] == accuracies[1] and np.allclose(stock, ours, atol=1e-4):
        console.print(f"The logits differ by at most {np.abs(stock - ours).max():.1e}.")
    else:
        raise QuickstartError("the two files do not give the same answers; this is a fault, please report it")


def act_two(console: Console, folder: Path, mib: int) -> None:
    """Stream, convert and serve a GPT-shaped model of `mib` MiB."""
    console.print()
    console.rule(f"[bold]Act two[/]: a GPT-shaped model of {mib:,} MiB", align="left")
    mib = _that_fits(console, folder, mib)
    source, archive, tuned = (folder / name for name in ("gpt.onnx", "gpt.zcr", "tuned.zcr"))
    with _step(console, "streaming the model to disk"), source.open("wb") as sink:
        shape = write_gpt(sink, mib)
    console.print(
        f"gpt.onnx: {shape.blocks} blocks, width {shape.width}, vocabulary {shape.vocabulary:,}; made just now"
    )
    with _step(console, "onnx.load, in a process of its own"):
        loaded = call_alone("tools.serving:onnx_load", source=str(source))
    with _step(console, "onnx2zc, in a process of its own"):
        converted = call_alone("tools.serving:convert", source=str(source), dest=str(archive))
    with _step(console, "zcrecord tune, in a process of its own"):
        packed = call_alone("tools.serving:tune", source=str(archive), dest=str(tuned))
    table = _table(["preparing it"], ["time", "peak memory", "file"])
    for what, cost, path in (
        ("onnx2zc", converted, archive),
        ("zcrecord tune (once for a kind of machine)", packed, tuned),
        ("onnx.load (parses it, writes nothing)", loaded, None),
    ):
        size = "" if path is None else _mib(path.stat().st_size)
        table.add_row(what, _seconds(cost["seconds"]), _mib(cost["peak_rss"]), size)
    console.print(table)

    files = {"gpt.onnx": source, "gpt.zcr, tuned": tuned, "gpt.zcr": archive}
    served = [_serve(console, path, label) for label, path in files.items()]
    _check_answers(console, *served)
    latencies = _latencies(console, list(files.values()))
    table = _table([f"{PROCESSES} processes serve it"], [s.label for s in served])
    table.add_row("session ready", *(_seconds(s.ready) for s in served))
    table.add_row("first answer", *(_seconds(s.first_answer) for s in served))
    for batch, of_each in latencies.items():
        table.add_row(f"steady latency, batch {batch}", *map(_seconds, of_each))
    table.add_row("memory of all, shared pages once", *(_mib(s.resident) for s in served))
    table.add_row("  of which copies", *(_mib(s.private) for s in served))
    console.print(table)
    _summary(console, served, latencies, (loaded["peak_rss"], converted["peak_rss"]), [source, tuned])


def _that_fits(console: Console, folder: Path, mib: int) -> int:
    """Return `mib`, or a smaller size if memory has no room for four copies of the model, or the disk for its files.

    Raises:
        QuickstartError: the disk has no room for the smallest either.
    """
    available, free = _available_memory(), free_bytes(folder)
    least = min(mib, LEAST_MIB)
    on_disk = (free // MIB - SPARE_MIB) // FILES
    if on_disk < least:
        raise QuickstartError(
            f"{folder.parent} has {_mib(free)} free, act two needs {_mib((FILES * least + SPARE_MIB) * MIB)}; "
            "set TMPDIR to a roomier folder, or run with --small"
        )
    # Each process that creates a session from .onnx holds the parsed model and its own copy of it for a moment.
    in_memory = mib if available is None else max(least, (available // MIB - SPARE_MIB) // (2 * PROCESSES + 1))
    fitting = min(mib, on_disk, in_memory)
    if fitting < mib:
        what = f"{PROCESSES} processes with the .onnx would not fit into memory here"
        if on_disk < in_memory:
            what = f"{FILES} files of that size would not fit into {folder.parent}; TMPDIR may name a roomier folder"
        console.print(f"{what}; taking {fitting} MiB instead")
    return fitting


def _available_memory() -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _threads() -> int:
    """Return the threads of each process: all of them together take all cores."""
    return max(1, (os.cpu_count() or 1) // PROCESSES)


def _serve(console: Console, path: Path, label: str) -> Served:
    """Have four processes serve `path` at once; memory is taken when all four have answered and none has ended."""
    with _step(console, f"{PROCESSES} processes serve {label}"), contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(PROCESSES)]
        call_at_once(workers, "tools.serving:prepare")
        ready = call_at_once(workers, "tools.serving:open_session", path=str(path), threads=_threads())
        answers = call_at_once(workers, "tools.serving:first_answer")
        resident = private = None
        with contextlib.suppress(OSError):  # other systems than Linux do not tell
            memories = [memory(worker.pid) for worker in workers]
            resident, private = sum(m.pss for m in memories), sum(m.private for m in memories)
    first = statistics.median(r + a[0] for r, a in zip(ready, answers, strict=True))
    return Served(label, statistics.median(ready), first, resident, private, answers[0][1])


def _latencies(console: Console, paths: list[Path]) -> dict[int, list[float]]:
    """Return by batch size the median seconds of an answer from each file.

    One process answers at a time: several at once would measure how they fight over the cores.
    """
    with _step(console, "steady latency of each file, in turns"), contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in paths]
        for worker, path in zip(workers, paths, strict=True):
            worker.call("tools.serving:open_session", path=str(path), threads=_threads())
        latencies = {}
        for batch in (1, LARGE_BATCH):
            asked = {"batch": batch, "repeats": LATENCY_REPEATS}
            rounds = [[w.call("tools.serving:latency", **asked) for w in workers] for _ in range(LATENCY_ROUNDS)]
            latencies[batch] = [statistics.median(seconds) for seconds in zip(*rounds, strict=True)]
    return latencies


def _check_answers(console: Console, stock: Served, *others: Served) -> None:
    for other in others:
        if not np.allclose(stock.answer, other.answer, atol=1e-3):
            raise QuickstartError(f"{other.label} answers otherwise than gpt.onnx; this is a fault, please report it")
    if alike := [other.label for other in others if other.answer == stock.answer]:
        console.print(f"Answers equal to those from {stock.label}, bit for bit: {'; '.join(alike)}.")


def _summary(
    console: Console,
    served: list[Served],
    latencies: dict[int, list[float]],
    peaks: tuple[int, int],
    files: list[Path],
) -> None:
    """Print what the tuned archive gains beside the .onnx, and what it costs."""
    stock, ours, untuned = served
    console.print("[bold]What it saved[/]")
    console.print(f"  converting  {_mib(peaks[1])} at the peak instead of {_mib(peaks[0])}")
    first, stock_first = _seconds(ours.first_answer), _seconds(stock.first_answer)
    console.print(f"  starting    {first} to the first answer instead of {stock_first}")
    if stock.resident:
        instead = f"{_mib(ours.resident)} for {PROCESSES} processes instead of {_mib(stock.resident)}"
        console.print(f"  serving     {instead}")
    behind = [(batch, theirs, mine) for batch, (theirs, mine, _) in latencies.items() if mine > 1.05 * theirs]
    console.print("  ONNX Runtime packs the weights of an .onnx for its kernels, in each process anew.")
    console.print(f"  Tuning stores them packed: all processes map one copy{'' if behind else ', and answer as fast'}.")
    console.print("[bold]Where the .onnx wins[/]")
    for batch, theirs, mine in behind:
        console.print(f"  batch of {batch:<3}{_seconds(theirs)} instead of {_seconds(mine)}")
    smaller, larger = (_mib(path.stat().st_size) for path in files)
    console.print(f"  disk        {smaller} instead of {larger}: the weights as they were, and packed")
    slower = _seconds(latencies[LARGE_BATCH][-1])
    console.print(f"  The archive before tuning is smaller and ready in {_seconds(untuned.ready)}; it answers")
    console.print(f"  a batch of {LARGE_BATCH} in {slower}.")


def _next_steps(console: Console, small: bool, left: Path) -> None:
    bin_folder = Path(sys.executable).parent
    shown = bin_folder.relative_to(ROOT) if bin_folder.is_relative_to(ROOT) else bin_folder
    model = left.relative_to(ROOT) if left.is_relative_to(ROOT) else left
    console.print("\n[bold]What to try next[/]")
    steps = [
        (f"{shown}/onnx2zc your-model.onnx", "convert a model of your own"),
        (f"{shown}/zcrecord tree {model}/model.zcr", "look into what act one left, for the examples in README.md"),
        ("./tools/test", "run the tests"),
    ]
    if small:
        steps.insert(0, ("./tools/quickstart", "the same with a large model and four processes"))
    width = max(len(command) for command, _ in steps)
    for command, purpose in steps:
        console.print(f"  {command:<{width}}  {purpose}", soft_wrap=True)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms"


def _mib(nbytes: int | None) -> str:
    return "not told by this system" if nbytes is None else f"{nbytes / MIB:,.0f} MiB"


def _import_onnx() -> None:
    """Import what writes models while a signal still just ends the program: there is nothing to remove yet.

    An exception in the middle of it would crash the interpreter (onnx 1.23.2).
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    import onnx  # noqa: F401

    signal.signal(signal.SIGINT, handler)


_signals: list[int] = []  # those that came


def _end_on_signals() -> None:
    """Have signals end the program by an exception, so that the folder is removed."""

    def end(number: int, _frame: object) -> None:
        _signals.append(number)
        sys.exit(128 + number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)


@contextlib.contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    """Say what goes on; end after it if a signal came in a callback of protobuf's, which drops exceptions."""
    with console.status(what):
        yield
    if _signals:
        sys.exit(128 + _signals[0])


def main(arguments: list[str] | None = None) -> int:
    """Run both acts; return the exit status."""
    parser = argparse.ArgumentParser(prog="tools/quickstart", description="zcrecord's main job, on this machine.")
    parser.add_argument("--small", action="store_true", help="leave out act two, the large model")
    parser.add_argument("--left", type=Path, default=LEFT, metavar="FOLDER", help="for act one's files (.quickstart)")
    parser.add_argument("--mib", type=int, default=512, help="size of the large model (default 512)")
    args = parser.parse_args(arguments)
    if not 1 <= args.mib <= MAX_MIB:
        parser.error(f"--mib {args.mib} is not from 1 to {MAX_MIB}")
    if not args.small:
        _import_onnx()
    _end_on_signals()
    console = Console(highlight=False)  # coloured digits distract from the two columns that matter
    try:
        with tempfile.TemporaryDirectory(prefix="zcrecord-quickstart-") as folder:
            act_one(console, args.left)
            if not args.small:
                act_two(console, Path(folder), args.mib)
        _next_steps(console, args.small, args.left.resolve())
    except SystemExit:
        if _signals == [signal.SIGINT]:
            console.print("\ninterrupted; the large model is removed")
        raise
    except (QuickstartError, WorkerError, zcrecord.RecordError) as error:
        print(f"tools/quickstart: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
