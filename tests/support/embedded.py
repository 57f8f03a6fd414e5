"""Shared by tests of generated sources: archives with everything in them, compilers, facts of an ELF file."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from processes import quiet as quiet

import zcrecord
from zcrecord.embed.plan import Plan

GOLDEN = Path(__file__).parents[1] / "conformance" / "valid"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Wundef", "-Werror", "-O2"]
COMPILERS: dict[str, list[str]] = {
    "gcc": ["gcc", "-std=c99"],
    "gcc, 32 bits": ["gcc", "-std=c11", "-m32"],
    "clang": ["clang-19", "-std=c99"],
    "clang, 32 bits": ["clang-19", "-std=c17", "-m32"],
    "g++": ["g++", "-std=c++11"],
    "clang++": ["clang++-19", "-std=c++20"],
}

HOSTILE = [
    "a*/int x;/*", "b??/", "c\\", "d\\\nint y;", 'e"', "f\r\n#error", "g\u202e\u2066", "h\x1b[2J", "重み", "café",
    "class", "Class", "CLASS", "w", "w.shape", "w.rank", "w.dim0", "w_shape", "int", "register", "linux", "gamma", "r0",
    "eax", "sin", "main", "blob", "check", "zcr", "zcr.check", "at", "bytes", "is_current", "a b", "a-b", "a.b", "a_b",
    "x" * 3000, "%s%n", "$(ls)", "`ls`", "name, skip", "\\name", "@", ";", "#", "'", "//", "/*", "__LINE__", "defined",
    "NULL", "true", "std", "namespace", "uint8_t", "size_t", "offsetof", "0", "",
]  # fmt: skip


def everything() -> dict[str, Any]:
    """Return a record with every element type, rank 0, empty, strided, tied, equal and view tensors."""
    big = np.arange(24, dtype=np.float32).reshape(6, 4) - 7.5
    out: dict[str, Any] = {
        "f32": big, "f64": np.linspace(-1, 1, 7), "i8": np.arange(-6, 6, dtype=np.int8).reshape(3, 4),
        "u64": np.array([0, 2**64 - 1], np.uint64), "i16": np.array(-3, np.int16), "yes": np.array([True, False, True]),
        "half": np.array([1, 2.5], np.float16),
        "c64": np.array([[1 + 2j], [3 - 4j]], np.complex64), "c0": np.array(5 + 6j),
        "none": np.zeros((3, 0), np.float32), "t": big.T, "tied": big, "rows": big[2:4], "one": big[5, 3:].reshape(()),
        "text": zcrecord.StringTensor.from_strings(["a", "bc", ""]),
        "int4": zcrecord.PackedTensor.pack(np.array([[1, -2, 3], [4, 5, -6]]).astype("int4")),
        "large": np.arange(1 << 18, dtype=np.float32), "same": big.copy(), "bits": big.view(np.uint32).copy(),
    }  # fmt: skip
    for name in ("bfloat16", "float8_e4m3fn", "int2", "float6_e2m3fn"):
        out[name] = np.arange(-1, 2).astype(name)
    return {"layer": out}


def archives(folder: Path) -> list[Path]:
    """Write archives with everything, and with hostile names; return them beside the golden ones."""
    zcrecord.save_record(everything(), folder / "every thing.zcr")
    hostile = {name: np.full(3 + i, i, np.float32) for i, name in enumerate(HOSTILE) if name}
    zcrecord.save_record(hostile, folder / "hostile.zcr")
    return [*sorted(p for p in GOLDEN.glob("*.zcr") if p.stem not in ("prefix", "suffix")), folder / "every thing.zcr",
            folder / "hostile.zcr"]  # fmt: skip


def own_bytes(path: Path) -> dict[str, bytes]:
    record = zcrecord.load_record(path)
    out = {}
    for name in record:
        info = record.info(name)
        plain = info.strides is None or not info.nbytes
        out[name] = bytes(record.raw(name)) if plain else np.ascontiguousarray(record.array(name)).tobytes()
    return out


def put(path: Path, text: str) -> Path:
    """Write a source; return its path."""
    path.write_text(text, encoding="utf-8")
    return path


def small(folder: Path, value: float = 1, **options: Any) -> Path:
    """Write an archive m.zcr of one tensor, `a`."""
    zcrecord.save_record({"a": np.full(3, float(value))}, folder / "m.zcr", **options)
    return folder / "m.zcr"


@functools.cache
def wine_environment() -> dict[str, str]:
    """Return the environment of programs of Windows: one wine prefix, made to its end before a program runs in it."""
    prefix = tempfile.mkdtemp(prefix="zcrecord-wine-")
    atexit.register(shutil.rmtree, prefix, ignore_errors=True)
    environment = {**os.environ, "WINEDEBUG": "-all", "WINEPREFIX": prefix}
    for command in (["wineboot", "--init"], ["wineserver", "--wait"]):
        subprocess.run(command, env=environment, capture_output=True, check=False)
    return environment


def refused(*command: str | Path, **options: Any) -> str:
    """Run a command that has to fail; return what it complains of."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode, done.stdout
    return str(done.stderr)


def compiled(compiler: Sequence[str], out: Path, sources: Sequence[Path], *flags: str) -> Path:
    words: list[str | Path] = [s for s in sources if s.suffix != ".c"]
    in_c = [s for s in sources if s.suffix == ".c"]
    if in_c:
        words += ["-x", "c++" if "++" in compiler[0] else "c", *in_c]
    quiet(*compiler, *WARNINGS, *flags, *words, "-o", out)
    return out


_SHOW = """
#include <stdio.h>
#include <stdint.h>

/* No name here is one that a tensor may have: those are lower-case. */
void Show(int Plan, int Number, const void *At, size_t Nbytes);

void Show(int Plan, int Number, const void *At, size_t Nbytes)
{
    const unsigned char *Bytes = (const unsigned char *)At;
    size_t I;
    printf("%d %d %llx ", Plan, Number, (unsigned long long)(uintptr_t)At);
    for (I = 0; I < Nbytes; I++) {
        printf("%02x", Bytes[I]);
    }
    printf("\\n");
}
"""


def uses(plans: Sequence[Plan], headers: Sequence[str], paths: Mapping[tuple[int, int], str]) -> str:
    """Return a program that shows each constant: `paths` has the expression for each plan's and constant's number."""
    includes = "".join(f'#include "{header}"\n' for header in headers)
    calls = "".join(f"    Show({p}, {n}, &{path}, sizeof {path});\n" for (p, n), path in paths.items())
    scopes = zip(plans, _scopes(plans, headers), strict=True)
    current = " && ".join(f"{scope}{p.stem}_is_current()" for p, scope in scopes if p.has_digests) or "1"
    return f"{includes}{_SHOW}\nint main(void)\n{{\n{calls}    return !({current});\n}}\n"


def _scopes(plans: Sequence[Plan], headers: Sequence[str]) -> list[str]:
    return [f"{p.stem}::" if h.endswith(".hpp") else "" for p, h in zip(plans, headers, strict=True)]


class Shown(NamedTuple):
    address: int
    data: bytes


def shown(program: Path) -> dict[tuple[int, int], Shown]:
    """Run a program of `uses`; return what it shows by the numbers of plan and constant."""
    out = {}
    for line in quiet(program).splitlines():
        p, n, address, data = [*line.split(" "), ""][:4]
        out[int(p), int(n)] = Shown(int(address, 16), bytes.fromhex(data))
    return out


class Symbol(NamedTuple):
    """A symbol of an ELF file: its place, size and type, and the number of its section."""

    value: int
    size: int
    type: str
    section: str


def symbols(path: Path) -> dict[str, Symbol]:
    out = {}
    for line in quiet("readelf", "-sW", path).splitlines():
        words = line.split()
        if len(words) == 8 and words[4] == "GLOBAL":
            out[words[7]] = Symbol(int(words[1], 16), int(words[2], 0), words[3], words[6])
    return out


def section_flags(path: Path) -> dict[str, tuple[str, str, int]]:
    """Return the name, flags and alignment of an ELF file's sections by their numbers."""
    out = {}
    row = re.compile(
        r"\s*\[\s*(\d+)\] (\S+)\s+\S+\s+[0-9a-f]+ [0-9a-f]+ [0-9a-f]+ [0-9a-f]+ +([A-Z]*) +\d+ +\d+ +(\d+)"
    )
    for line in quiet("readelf", "-SW", path).splitlines():
        if match := row.match(line):
            out[match[1]] = (match[2], match[3], int(match[4]))
    return out
