"""Weights as constants of programs: what compiling takes, and what a Cortex-M3 does with them.

Compilers and QEMU are wanted; a quick run leaves out the rows of those that are missing. Hex arrays, as `xxd -i` writes
them, are compiled at two sizes that a compiler survives, and the line through both is taken at the size asked about.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, Settings, medians, on_path, seconds_of
from tools.firmware.figures import measure
from tools.measure import MIB
from tools.worker import ROOT
from zcrecord.embed import generate

AREA = "embedding"
KIB = 1024
HEX_ARRAY = "hex array"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of weights that are part of a program; a quick run leaves out what lacks a tool."""
    yield from _compiled(settings)
    if on_path("make", "arm-none-eabi-gcc", "qemu-system-arm"):
        yield from _on_a_microcontroller(settings)


# -- compiling -------------------------------------------------------------------------------------------------------


def _compiled(settings: Settings) -> Iterator[Row]:
    """Yield how long compilers take to make an object file of an archive."""
    mib = settings.pick(64, 1)
    folder = settings.folder / "compile"
    folder.mkdir()
    archive = folder / "model.zcr"
    zcrecord.save_record({"w": _noise(mib * MIB).view(np.float32)}, archive, durable=False)
    for compiler in [name for name in ("gcc", "clang-19") if on_path(name)]:
        options: dict[str, dict[str, str]] = {OURS: {}, "zcrecord, string literal": {"blob": "string"}}
        if compiler == "clang-19":  # gcc has #embed from version 15 on
            options["zcrecord, #embed"] = {"blob": "embed"}
        ways = {name: _compile(compiler, archive, folder, **chosen) for name, chosen in options.items()}
        work = f"{compiler}, {mib} MiB of weights to an object file"
        yield _compile_row(settings, compiler, work, ways, mib)


def _noise(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def _compile(compiler: str, archive: Path, folder: Path, **options: Any) -> Callable[[], float]:
    """Return a function that times the compiler on the files that embed the archive."""
    report = generate(archive, folder / "_".join([compiler, *options.values()]), lang="c", **options)
    (source,) = (Path(file) for file in report.files if file.endswith((".S", ".c")))
    return partial(_seconds, compiler, source)


def _seconds(compiler: str, source: Path) -> float:
    command = [compiler, "-c", source.name, "-o", "made.o"]
    return seconds_of(lambda: subprocess.run(command, cwd=source.parent, check=True))


def _compile_row(settings: Settings, compiler: str, work: str, ways: dict[str, Callable[[], float]], mib: int) -> Row:
    repeats = settings.pick(3, 1)
    sizes = [settings.pick(1024, 8) * KIB, settings.pick(4096, 32) * KIB]
    arrays = {str(nbytes): _array(settings.folder / f"{nbytes}.c", compiler, nbytes) for nbytes in sizes}
    seconds = medians(repeats, ways, uncounted=1) | medians(repeats, arrays)
    short, long = (seconds.pop(str(nbytes)) for nbytes in sizes)
    seconds[HEX_ARRAY] = long + (long - short) * (mib * MIB - sizes[1]) / (sizes[1] - sizes[0])
    measured = " and ".join(f"{s:.2f} s for {n // KIB:,} KiB" for s, n in zip((short, long), sizes, strict=True))
    note = f"the array extrapolated from {measured}"
    return Row(AREA, work, "s", seconds, Promise("faster", 50, HEX_ARRAY), note, repeats)


def _array(source: Path, compiler: str, nbytes: int) -> Callable[[], float]:
    """Return a function that times the compiler on a hex array."""
    data = _noise(nbytes).tobytes()
    rows = "".join(f"  {', '.join(f'0x{b:02x}' for b in data[at : at + 12])},\n" for at in range(0, nbytes, 12))
    source.write_text(f"const unsigned char model[] = {{\n{rows}}};\n", encoding="utf-8")
    return partial(_seconds, compiler, source)


# -- on a Cortex-M3 --------------------------------------------------------------------------------------------------


def _on_a_microcontroller(settings: Settings) -> Iterator[Row]:
    """Yield the figures of `python -m tools.firmware`: a classifier of digits as firmware, and reading at run time."""
    for level, what, most in ((1, "open and find", 2 * KIB), (2, "open, find and verify", 4 * KIB)):
        nbytes = {OURS: float(reader_code_size(settings.folder, level))}
        yield Row(AREA, f"Cortex-M3, zcrecord.h: code to {what}", "B", nbytes, Promise("under", most + 1))
    figures = measure(settings.folder / "firmware")
    reader = figures["runtime"]
    for what, key, promise in (
        ("find one of 1,000 tensors", "find_1000", Promise("under", 5000)),
        ("find the slowest of 1,000 tensors", "find_1000_slowest", None),
        ("open an archive", "open", None),
        ("verify the index of 1,000 tensors", "verify_1000", None),
    ):
        yield Row(AREA, f"Cortex-M3, zcrecord.h: instructions to {what}", "", {OURS: float(reader[key])}, promise)
    names = {OURS: "float", "zcrecord, int8": "int8", "zcrecord, float, by zcrecord.h": "runtime"}
    for what, key, unit, promise in (
        ("flash", "flash", "B", None),
        ("RAM", "ram", "B", Promise("under", 8 * KIB)),
        ("instructions for one image", "instructions_per_inference", "", None),
    ):
        values = {name: float(figures[image][key]) for name, image in names.items()}
        yield Row(AREA, f"Cortex-M3, classifier of digits, float32: {what}", unit, values, promise)


def reader_code_size(folder: Path, level: int) -> int:
    """Return the bytes of Thumb-2 code and constants that zcrecord.h takes to find (1), and to verify, too (2)."""
    with_reader, without = (_code_size(folder, n) for n in (level, 0))
    return with_reader - without


def _code_size(folder: Path, level: int) -> int:
    made = folder / "reader_size.o"
    target = ["-mcpu=cortex-m3", "-mthumb", "-Os", "-std=c99", "-ffreestanding", f"-I{ROOT / 'zcrecord' / 'embed'}"]
    source = Path(__file__).with_name("reader_size.c")
    subprocess.run(["arm-none-eabi-gcc", *target, f"-DLEVEL={level}", "-c", source, "-o", made], check=True)
    sizes = subprocess.run(["arm-none-eabi-size", made], check=True, capture_output=True, text=True).stdout
    return int(sizes.splitlines()[1].split()[0])
