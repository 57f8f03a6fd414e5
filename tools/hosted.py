"""Programs of this machine with weights in them, built and run: what they allocate, of what pages their weights are.

Knows the programs host_*.c and host_*.rs of tests/programs. Each prints a line of JSON, with at least `address` and
`nbytes` of its weights, and then waits for the end of its standard input. Tests and benchmarks say what they show.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import zcrecord
from tools.worker import ROOT
from zcrecord.embed import generate

PROGRAMS = ROOT / "tests" / "programs"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")
BIASES = (1, -2, 3, -4)


@dataclass(frozen=True, slots=True)
class Pages:
    """The mappings that hold a range of a process's memory, in the words of /proc/PID/smaps; sizes in bytes.

    Attributes:
        permissions: of every mapping that holds a byte of the range, such as {"r--p"}.
        files: what is mapped there; "" is memory of the process's own.
        shared: resident pages that another process has mapped, too.
        private_dirty: pages that were written to, and are this process's alone.
    """

    permissions: frozenset[str]
    files: frozenset[str]
    rss: int
    pss: int
    shared: int
    private_dirty: int


@dataclass(frozen=True, slots=True)
class Hosted:
    """Report of one process, and the kernel's count of the pages of its weights while it ran."""

    told: dict[str, Any]
    pages: Pages


def write_model(folder: Path, rows: int, columns: int) -> Path:
    """Write `model.zcr` with `encoder.weight`, float32 of that shape, all 0.5, and `encoder.bias`, four int16."""
    weight = np.full((rows, columns), 0.5, np.float32)
    archive = folder / "model.zcr"
    zcrecord.save_record({"encoder": {"weight": weight, "bias": np.array(BIASES, np.int16)}}, archive, durable=False)
    return archive


def build_c(
    folder: Path, archive: Path, program: str, compiler: Sequence[str] = ("gcc",), *, copied: bool = False
) -> Path:
    """Return a program of tests/programs/c with the weights of `write_model`'s archive, made by a C or C++ compiler.

    They are symbols or, for `host_archive`, a blob. `copied`: the program first copies its weights, which a measurement
    has to notice. Under -fsanitize it does not count allocations: the sanitizer has an allocator of its own.
    """
    made = folder / "_".join([program, *compiler, *(["copied"] * copied)]).replace("/", "")
    cpp = "++" in compiler[0]
    whole = program == "host_archive"
    lang: Literal["c", "cpp"] = "cpp" if cpp else "c"
    report = generate(archive, made, lang=lang, blob="incbin" if whole else None, reader=whole)
    sources = [Path(file) for file in report.files if file.endswith((".S", ".c"))]
    sanitized = any(option.startswith("-fsanitize") for option in compiler)
    counting = PROGRAMS / "c" / ("host_uncounted.c" if sanitized else "host_counting.c")
    flags = ["-O2", "-g", *WARNINGS, *["-DHOST_COPY"] * copied, f"-I{made}", f"-I{PROGRAMS / 'c'}"]
    # The program itself is C++ as well; the rest stays what it is.
    standards = {program: ["-x", "c++", "-std=c++11"], counting.stem: ["-x", "c"]} if cpp else {}
    objects = []
    for source in (PROGRAMS / "c" / f"{program}.c", counting, *sources):
        out = made / f"{source.stem}_{source.suffix[1:]}.o"
        _run([*compiler, *flags, *standards.get(source.stem, []), "-c", source, "-o", out], made)
        objects.append(out)
    _run([*compiler, *objects, "-o", made / program], made)
    return _written_back(made / program)


def build_rust(folder: Path, archive: Path, program: str, *, assembly: bool = False, copied: bool = False) -> Path:
    """Return a program of tests/programs/rust, likewise; `assembly` has each tensor placed by `global_asm!`."""
    made = folder / "_".join([program, "rust", *(["assembly"] * assembly), *(["copied"] * copied)])
    generate(archive, made, lang="rust", assembly=assembly, reader=program == "host_archive")
    for name in (program, "host_counting"):
        shutil.copy(PROGRAMS / "rust" / f"{name}.rs", made)
    environment = {**os.environ, "HOST_COPY": "1"} if copied else None
    command = ["rustc", "--edition", "2021", "-O", "-D", "warnings", f"{program}.rs", "-o", program]
    _run(command, made, environment)
    return _written_back(made / program)


def _run(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")


def _written_back(program: Path) -> Path:
    """Return a program whose pages are clean: those of a new file are dirty until they are on the disk."""
    with program.open("rb") as file:
        os.fsync(file.fileno())
    return program


def run_together(program: Path, count: int = 1) -> list[Hosted]:
    """Run a program in so many processes at once, and look at all of them when each has used its weights."""
    processes = [subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        lines = [process.stdout.readline() for process in processes if process.stdout is not None]
        if not all(lines):
            status = processes[lines.index(b"")].wait()
            raise RuntimeError(f"{program}: exit {status}, and it said nothing")
        told = [json.loads(line) for line in lines]
        return [
            Hosted(words, _pages(process.pid, words["address"], words["address"] + words["nbytes"]))
            for process, words in zip(processes, told, strict=True)
        ]
    finally:
        for process in processes:
            process.communicate()


def _pages(pid: int, start: int, end: int) -> Pages:
    permissions, files = set(), set()
    sums = dict.fromkeys(("Rss", "Pss", "Shared_Clean", "Shared_Dirty", "Private_Dirty"), 0)
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            low, high = (int(word, 16) for word in words[0].split("-"))
            inside = low < end and start < high
            if inside:
                permissions.add(words[1])
                files.add(words[5] if len(words) == 6 else "")
        elif inside and words[0][:-1] in sums:
            sums[words[0][:-1]] += int(words[1]) * 1024
    shared = sums["Shared_Clean"] + sums["Shared_Dirty"]
    return Pages(frozenset(permissions), frozenset(files), sums["Rss"], sums["Pss"], shared, sums["Private_Dirty"])
