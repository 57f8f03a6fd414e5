"""Weights as constants of programs: what loading allocates, what compiling takes, and what a Cortex-M3 does with them.

Compilers and QEMU are wanted; a quick run leaves out the rows of those that are missing. Hex arrays, as `xxd -i` writes
them, are compiled at two sizes that a compiler survives, and the line through both is taken at the size asked about.
"""

from __future__ import annotations

import gc
import importlib
import io
import pickle
import shutil
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, Settings, collect, on_path
from tools.bench.peers import NPZ, SAFETENSORS
from tools.firmware.figures import measure
from tools.hosted import build_c, build_rust, run_together, write_model
from tools.measure import MIB, memory
from tools.worker import ROOT, call_alone
from zcrecord.embed import generate

AREA = "embedding"
NONE_AT_ALL = Promise("under", 1)
KIB = 1024
RUST, READER = "zcrecord, Rust", "zcrecord.h"
HEX_ARRAY = "hex array"
PICKLE = "pickle.loads"


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of weights that are part of a program; a quick run leaves out what lacks a tool."""
    if on_path("gcc", "rustc"):
        yield from _at_load(settings)
    yield from _compiled(settings)
    yield _constant(settings)
    if on_path("make", "arm-none-eabi-gcc", "qemu-system-arm"):
        yield from _on_a_microcontroller(settings)


# -- at load ---------------------------------------------------------------------------------------------------------


def _at_load(settings: Settings) -> Iterator[Row]:
    """Measure the heap that programs with 256 KB of weights ask for until they have used all of them."""
    folder = settings.folder / "host"
    folder.mkdir()
    archive = write_model(folder, rows=128, columns=512)
    programs = {
        OURS: build_c(folder, archive, "host_symbols"),
        READER: build_c(folder, archive, "host_archive"),
        RUST: build_rust(folder, archive, "host_symbols"),
    }
    told = {name: run_together(program)[0].told for name, program in programs.items()}
    shutil.rmtree(folder)
    for key, what, unit in (("allocations", "allocations", ""), ("bytes", "bytes allocated", "B")):
        values = {name: float(words[key]) for name, words in told.items()}
        work = f"load 256 KB of weights that are part of a program: {what}"
        yield Row(AREA, work, unit, values, NONE_AT_ALL)


# -- compiling -------------------------------------------------------------------------------------------------------


def _compiled(settings: Settings) -> Iterator[Row]:
    """Yield how long compilers take to make an object file of an archive."""
    mib = settings.pick(64, 1)
    folder = settings.folder / "compile"
    folder.mkdir()
    archive = folder / "model.zcr"
    zcrecord.save_record({"w": _noise(mib * MIB).view(np.float32)}, archive, durable=False)
    for compiler in [name for name in ("gcc", "clang-19") if on_path(name)]:
        ways = {OURS: _compile(compiler, folder, archive, "c")}
        ways["zcrecord, string literal"] = _compile(compiler, folder, archive, "c", blob="string")
        if compiler == "clang-19":  # gcc has #embed from version 15 on
            ways["zcrecord, #embed"] = _compile(compiler, folder, archive, "c", blob="embed")
        promise = Promise("faster", 50, HEX_ARRAY)
        yield _compile_row(settings, f"{compiler}, {mib} MiB of weights to an object file", ways, promise, mib)
    if on_path("rustc"):
        ways = {OURS: _compile("rustc", folder, archive, "rust")}
        ways["zcrecord, global_asm!"] = _compile("rustc", folder, archive, "rust", assembly=True)
        yield _compile_row(settings, f"rustc, {mib} MiB of weights to a library", ways, None, mib)
    shutil.rmtree(folder)


def _noise(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def _compile(compiler: str, folder: Path, archive: Path, language: Any, **options: Any) -> Callable[[], float]:
    """Return a function that times the compiler on the files that embed the archive."""
    made = folder / "_".join([compiler, *options])
    report = generate(archive, made, lang=language, **options)
    (source,) = (Path(file) for file in report.files if file.endswith((".S", ".c", ".rs")))
    return lambda: _seconds(compiler, source)


def _seconds(compiler: str, source: Path) -> float:
    library = ["--edition", "2021", "--crate-type", "lib", "-O"] if compiler == "rustc" else ["-c"]
    out = source.with_suffix(".o")
    start = time.perf_counter()
    subprocess.run([compiler, *library, source.name, "-o", out], cwd=source.parent, check=True)
    seconds = time.perf_counter() - start
    out.unlink()
    return seconds


def _compile_row(
    settings: Settings, work: str, ways: dict[str, Callable[[], float]], promise: Promise | None, mib: int
) -> Row:
    repeats = settings.pick(3, 1)
    sizes = [settings.pick(1024, 8) * KIB, settings.pick(4096, 32) * KIB]
    suffix, compiler = ("rs" if work.startswith("rustc") else "c"), work.partition(",")[0]
    arrays = {str(nbytes): _array(settings.folder / f"{nbytes}.{suffix}", compiler, nbytes) for nbytes in sizes}
    for way in ways.values():
        way()
    samples = collect(repeats, ways) | collect(settings.pick(3, 1), arrays)
    seconds = {name: statistics.median(some) for name, some in samples.items()}
    short, long = (seconds.pop(str(nbytes)) for nbytes in sizes)
    seconds[HEX_ARRAY] = long + (long - short) * (mib * MIB - sizes[1]) / (sizes[1] - sizes[0])
    measured = " and ".join(f"{s:.2f} s for {n // KIB:,} KiB" for s, n in zip((short, long), sizes, strict=True))
    return Row(AREA, work, "s", seconds, promise, f"the array extrapolated from {measured}", repeats)


def _array(source: Path, compiler: str, nbytes: int) -> Callable[[], float]:
    """Return a function that times the compiler on a hex array."""
    data = _noise(nbytes).tobytes()
    rows = "".join(f"  {', '.join(f'0x{b:02x}' for b in data[at : at + 12])},\n" for at in range(0, nbytes, 12))
    rust = source.suffix == ".rs"
    head, tail = (f"pub static MODEL: [u8; {nbytes}] = [", "]") if rust else ("const unsigned char model[] = {", "}")
    source.write_text(f"{head}\n{rows}{tail};\n", encoding="utf-8")
    return lambda: _seconds(compiler, source)


# -- in Python -------------------------------------------------------------------------------------------------------


def _constant(settings: Settings) -> Row:
    """Return the bytes that Python allocates to get arrays out of a constant, an existing bytes object."""
    mib = settings.pick(64, 1)
    folder = settings.folder / "constant"
    folder.mkdir()
    call_alone("tools.bench.embedding:write_constants", folder=str(folder), mib=mib)
    told = {way: call_alone("tools.bench.embedding:load_constant", way=way, folder=str(folder)) for way in LOADERS}
    shutil.rmtree(folder)
    allocated = {way: float(words["allocated"]) for way, words in told.items()}
    work = f"arrays out of a Python constant of {mib} MiB: allocated"
    extra = {"private": {way: words["private"] for way, words in told.items()}}
    return Row(AREA, work, "B", allocated, Promise("under", 64 * KIB), extra=extra)


def write_constants(folder: str, mib: int) -> None:
    """Write the same tensors as a generated module and as a peer each has them."""
    from safetensors.numpy import save

    values = np.random.default_rng(0)
    tensors = {f"layers.{i}.weight": values.random((mib, MIB // 64), np.float32) for i in range(16)}
    archive = Path(folder, "weights.zcr")
    zcrecord.save_record(tensors, archive, durable=False)
    generate(archive, folder, lang="python")
    arrays: dict[str, Any] = tensors
    with Path(folder, NPZ).open("wb") as file:
        np.savez(file, **arrays)
    Path(folder, SAFETENSORS).write_bytes(save(tensors))
    Path(folder, PICKLE).write_bytes(pickle.dumps(tensors, protocol=5))


def _module(folder: Path) -> Callable[[], Any]:
    sys.path.insert(0, str(folder))
    load: Callable[[], Any] = importlib.import_module("weights").load
    return lambda: dict(load())


def _bytes_of(name: str, load: Callable[[bytes], Any]) -> Callable[[Path], Callable[[], Any]]:
    def prepare(folder: Path) -> Callable[[], Any]:
        constant = Path(folder, name).read_bytes()
        return lambda: load(constant)

    return prepare


def _safetensors(constant: bytes) -> Any:
    from safetensors.numpy import load

    return load(constant)


# Each takes the folder and returns what loads the constant, which is in memory by then.
LOADERS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    OURS: _module,
    PICKLE: _bytes_of(PICKLE, pickle.loads),
    NPZ: _bytes_of(NPZ, lambda constant: dict(np.load(io.BytesIO(constant)))),
    SAFETENSORS: _bytes_of(SAFETENSORS, _safetensors),
}


def load_constant(way: str, folder: str) -> dict[str, int]:
    """Load a constant one way; return the most that Python had allocated for it, and the growth of private memory."""
    load = LOADERS[way](Path(folder))
    load()  # what is imported and kept at the first call is no part of it
    before = memory()
    kept = load()
    after = memory()
    assert len(kept) == 16
    del kept
    gc.collect()
    tracemalloc.start()
    load()  # what is allocated on the way counts as well: the peak is asked for
    allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    growth = 0 if before is None or after is None else (after.private or 0) - (before.private or 0)
    return {"allocated": allocated, "private": growth}


# -- on a Cortex-M3 --------------------------------------------------------------------------------------------------


def _on_a_microcontroller(settings: Settings) -> Iterator[Row]:
    """Yield the figures of `python -m tools.firmware`: a classifier of digits as firmware, and reading at run time."""
    for level, what, most in ((1, "open and find", 2 * KIB), (2, "open, find and verify", 4 * KIB)):
        nbytes = {OURS: float(reader_code_size(settings.folder, level))}
        yield Row(AREA, f"Cortex-M3, zcrecord.h: code to {what}", "B", nbytes, Promise("under", most + 1))
    figures = measure(settings.folder / "firmware")
    shutil.rmtree(settings.folder / "firmware")
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
    told = subprocess.run(["arm-none-eabi-size", made], check=True, capture_output=True, text=True).stdout
    made.unlink()
    return int(told.splitlines()[1].split()[0])
