"""zcrecord.h builds quietly wherever it should, needs nothing, stays small, and is refused where it cannot work.

Every compiler, language level, optimisation and word size in turn; what an object leaves undefined; code size on a
Cortex-M3; and archives on a machine whose size_t has 16 bits, under simulation.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from c_programs import HEADER, SOURCES, WARNINGS, build
from changed_bytes import regions, resealed, with_crc
from embedded import put, quiet, refused

from tools.bench.embedding import reader_code_size

GOLDEN = Path(__file__).parents[1] / "conformance" / "valid"
EVERYTHING = SOURCES / "everything.c"
MISSING = {"_GLOBAL_OFFSET_TABLE_"}  # where code is made position-independent
M3 = ["-mcpu=cortex-m3", "-mthumb", "-ffreestanding"]
BUILDS = [
    *((compiler, "c", std) for compiler in ("gcc", "clang-19") for std in ("c99", "c11", "c2x")),
    *((compiler, "c++", std) for compiler in ("g++", "clang++-19") for std in ("c++11", "c++17", "c++20")),
]


def undefined(nm: str, program: Path) -> set[str]:
    """Return the names of symbols that an object needs from elsewhere."""
    return {line.split()[-1] for line in quiet(nm, "-u", program).splitlines()} - MISSING


@pytest.mark.needs("gcc", "gcc -m32", "g++", "g++ -m32", "clang-19", "clang++-19", "nm")
@pytest.mark.parametrize(("compiler", "language", "std"), BUILDS)
def test_builds_without_a_warning_and_needs_nothing(compiler: str, language: str, std: str, tmp_path: Path) -> None:
    others = [("-O0", "-m64"), ("-O3", "-m32")] if std in ("c99", "c++11") else []
    for optimise, machine in [("-O2", "-m64"), ("-Os", "-m32"), *others]:
        flags = ["-x", language, f"-std={std}", optimise, machine, "-ffreestanding", "-fno-pic", "-fno-exceptions"]
        program = build(compiler, EVERYTHING, tmp_path / "everything.o", "-c", *flags)
        assert undefined("nm", program) == set(), (optimise, machine)


@pytest.mark.needs("gcc", "clang-19", "nm")
@pytest.mark.parametrize("compiler", ["gcc", "clang-19"])
def test_a_file_that_calls_nothing_has_nothing_and_no_warning(compiler: str, tmp_path: Path) -> None:
    source = put(tmp_path / "nothing.c", '#include "zcrecord.h"\n' * 2 + "extern int one;\nint one = 1;\n")
    for optimise in ("-O1", "-O2", "-Os"):
        program = build(compiler, source, tmp_path / "nothing.o", "-c", "-std=c99", optimise)
        assert not [line for line in quiet("nm", program).splitlines() if " t " in line.lower()]
    source = put(tmp_path / "needs.c", "extern int f(void);\nextern int g(void);\nint f(void) { return g(); }\n")
    assert undefined("nm", build(compiler, source, tmp_path / "needs.o", "-c")) == {"g"}, "other tests would see it"


@pytest.mark.needs("arm-none-eabi-gcc", "arm-none-eabi-nm", "clang-19")
@pytest.mark.parametrize("optimise", ["-O0", "-O1", "-O2", "-O3", "-Os"])
def test_needs_nothing_on_a_microcontroller(optimise: str, tmp_path: Path) -> None:
    for compiler, target in (("arm-none-eabi-gcc", M3), ("clang-19", ["--target=thumbv7m-none-eabi", *M3[2:]])):
        out = tmp_path / "everything.o"
        program = build(compiler, EVERYTHING, out, "-c", *target, "-std=c99", optimise)
        assert undefined("arm-none-eabi-nm", program) == set(), compiler


@pytest.mark.needs("clang-19")
@pytest.mark.parametrize("target", ["powerpc-unknown-none", "armeb-none-eabi", "s390x-unknown-linux-gnu"])
def test_is_refused_on_a_big_endian_machine(target: str) -> None:
    told = refused(*syntax_of(target))
    assert "zcrecord archives are little-endian and used in place; this machine is not" in told


@pytest.mark.needs("clang-19")
@pytest.mark.parametrize("target", ["msp430", "riscv32", "riscv64", "aarch64", "wasm32", "thumbv6m-none-eabi"])
def test_is_accepted_on_little_endian_machines_of_16_to_64_bits(target: str) -> None:
    quiet(*syntax_of(target), *WARNINGS)


def syntax_of(target: str) -> list[str | Path]:
    """Return the command that checks a program for a target."""
    return ["clang-19", f"--target={target}", "-ffreestanding", "-fsyntax-only", f"-I{HEADER.parent}", EVERYTHING]


@pytest.mark.needs("arm-none-eabi-gcc", "arm-none-eabi-size")
def test_takes_at_most_2_kib_to_open_and_find_and_4_with_verifying(tmp_path: Path) -> None:
    find, verify = (reader_code_size(tmp_path, level) for level in (1, 2))
    assert 1024 < find <= 2048  # the reader is in it
    assert find < verify <= 4096


def beyond_16_bits(data: bytes) -> list[bytes]:
    """Return the archive with 2^16, 2^32 or 2^48 added to each size in its ends, and 2^16 to each word of its index."""
    out = []
    for at in (24, 32, 40, 48):
        for more in (1 << 16, 1 << 32, 1 << 48):
            end = bytearray(data[:60])
            end[at : at + 8] = (int.from_bytes(end[at : at + 8], "little") + more).to_bytes(8, "little")
            sealed = with_crc(bytes(end))
            out.append(sealed + data[64:-64] + sealed)
    for at in range(regions(data)[1].start, regions(data)[1].stop, 4):
        changed = bytearray(data)
        changed[at + 2] ^= 1
        out.append(resealed(bytes(changed)))
    return out


@pytest.mark.needs("gcc", "avr-gcc", "simavr")
@pytest.mark.parametrize("what", ["whole", "beyond"])
def test_reads_and_refuses_with_a_size_t_of_16_bits_what_it_does_with_64(what: str, tmp_path: Path) -> None:
    whole = [(GOLDEN / f"{name}.zcr").read_bytes() for name in ("tiny", "views", "nested", "dtypes", "strings", "onnx")]
    archives = whole if what == "whole" else beyond_16_bits(whole[0])
    data = b"".join(len(archive).to_bytes(2, "little") + archive for archive in archives) + bytes(2)
    text = f"static const uint8_t questions[] PROGMEM = {{{','.join(map(str, data))}}};\n"
    put(tmp_path / "questions.h", text)  # small.c includes it
    sources: list[str | Path] = [f"-I{HEADER.parent}", f"-I{tmp_path}", SOURCES / "small.c", EVERYTHING]
    answers = []
    for compiler, flags in (("gcc", ["-O2"]), ("avr-gcc", ["-mmcu=atmega1284p", "-Os", "-Werror", "-Wall", "-Wextra"])):
        program = tmp_path / compiler
        quiet(compiler, "-std=c99", *flags, *sources, "-o", program)
        simulate = ["simavr", "-m", "atmega1284p", "-f", "16000000"] if compiler == "avr-gcc" else []
        command: list[str | Path] = [*simulate, program]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
        answers.append(re.findall(r"\b[0-9a-f]{8}\b", re.sub(r"\x1b\[\d*m", " ", done.stdout + done.stderr)))
    here, small = ([int(answer, 16) for answer in found] for found in answers)
    assert len(here) == len(archives) == len(small)
    refused = [answer >> 31 for answer in here]
    assert refused == [answer >> 31 for answer in small]  # why may differ: what does not fit 16 bits fails earlier
    assert [x for x, no in zip(here, refused, strict=True) if not no] == [y for y in small if not y >> 31]
    assert not any(refused) and len(set(here)) == len(archives) if what == "whole" else sum(refused) > 40
