"""The table of targets in the guide: what it says was run is run here, and what it says was built is built.

WebAssembly in Node, AVR in simavr, Windows under wine; other machines and object formats as far as an object file.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import embedded as e
import numpy as np
import pytest

import zcrecord
from zcrecord.embed import asm, blob, c
from zcrecord.embed.plan import Plan, plan
from zcrecord.embed.write_files import write

TARGETS = {  # of clang, and whether names have an underscore before them
    "x86_64-linux-gnu": False, "aarch64-linux-gnu": False, "powerpc64le-linux-gnu": False, "mipsel-linux-gnu": False,
    "riscv32-unknown-elf": False, "riscv64-unknown-elf": False, "armv7m-none-eabi": False, "i686-linux-gnu": False,
    "arm64-apple-macos": True, "x86_64-apple-macos": True,
    "x86_64-pc-windows-gnu": False, "i686-pc-windows-gnu": True,
    "x86_64-pc-windows-msvc": False, "aarch64-pc-windows-msvc": False,
    "wasm32-unknown-unknown": False, "wasm64-unknown-unknown": False,
}  # fmt: skip
ELF = [target for target in TARGETS if "linux" in target or "elf" in target or "eabi" in target]
OTHERS = ["arm-none-eabi-gcc", "avr-gcc -mmcu=atmega1284p", "x86_64-w64-mingw32-gcc", "xtensa-lx106-elf-gcc"]
FREESTANDING = """
#include "model.h"
volatile int sink;
void start(void);
void start(void)
{{
{reads}
}}
"""


def clang(target: str) -> list[str]:
    return ["clang-19", f"--target={target}"]


COMPILERS = [
    *(pytest.param(clang(target), id=target, marks=pytest.mark.needs("clang-19")) for target in TARGETS),
    *(pytest.param(name.split(), id=name, marks=pytest.mark.needs(name.split()[0])) for name in OTHERS),
]


@pytest.fixture(scope="module")
def each(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """An archive with everything, and its sources beside it in a folder that is not the compiler's."""
    folder = tmp_path_factory.mktemp("targets")
    zcrecord.save_record(e.everything(), folder / "model.zcr")
    made = plan(folder / "model.zcr")
    write(c.files(made, str(folder)), folder)
    return made


def assembled(compiler: list[str], source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    folders = [f"-I{source.parent}", *([f"-Wa,-I{source.parent}"] if "avr" in compiler[0] else [])]
    command = [*compiler, *folders, "-c", str(source), "-o", str(out)]
    return subprocess.run(command, capture_output=True, text=True, cwd=out.parent)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("section", [None, ".weights."])
def test_every_object_format_has_the_bytes(
    each: Plan, compiler: list[str], section: str | None, tmp_path: Path
) -> None:
    archive = Path(each.archive)
    folder = archive.parent / (section or "default")
    write(c.files(each, str(folder), section=section), folder)
    done = assembled(compiler, folder / "model.S", tmp_path / "model.o")
    assert done.returncode == 0 and not done.stderr, done.stderr
    data = (tmp_path / "model.o").read_bytes()
    for part in e.own_bytes(archive).values():
        assert part in data
    underscore = TARGETS.get(compiler[-1].removeprefix("--target="), False)
    for name in (b"model_layer_f64", b"model_layer_tied", b"model_check"):
        assert name in data
        assert (b"_" + name in data) == underscore


@pytest.mark.parametrize("compiler", COMPILERS)
def test_archive_of_another_size_is_refused_while_it_is_assembled(compiler: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "sizes"
    folder.mkdir()
    zcrecord.save_record({"a": np.ones(3), "t": np.ones((3, 4)).T}, folder / "m.zcr")
    made = plan(folder / "m.zcr")
    write({**c.files(made, str(folder)), **blob.files(made, str(folder), form="incbin")}, folder)
    for source, name, macro in (
        ("m.S", "m.zcr", "M_ZCR"), ("m.S", "m_packed.bin", "M_PACKED"), ("m_blob.S", "m.zcr", "M_ZCR")
    ):  # fmt: skip
        data = (folder / name).read_bytes()
        for size in (len(data) + 1, 5, len(data)):
            (folder / name).write_bytes(data.ljust(size, b"\0")[:size])
            done = assembled(compiler, folder / source, tmp_path / "m.o")
            noticed = f"{macro} is not the file that this one was generated from: generate it again" in done.stderr
            assert (done.returncode != 0) == noticed == (size != len(data)), (source, name, size, done.stderr)


@pytest.mark.needs("clang-19", "readelf")
@pytest.mark.parametrize("target", ELF)
def test_other_machines_symbols_lie_where_they_should(each: Plan, target: str, tmp_path: Path) -> None:
    folder, out = Path(each.archive).parent, tmp_path / "model.o"
    e.quiet(*clang(target), f"-I{folder}", "-c", "-o", out, folder / "model.S")
    found, sections = e.symbols(out), e.section_flags(out)
    for k in each.constants:
        if k.nbytes:
            assert (found[k.identifier].size, found[k.identifier].value) == (k.nbytes, k.base_offset)
            name, flags, alignment = sections[found[k.identifier].section]
            assert (name, flags) == (f".rodata.{k.base or k.identifier}", "A")
            assert alignment >= k.alignment


@pytest.mark.needs("clang-19")
@pytest.mark.parametrize("target", TARGETS)
def test_header_and_blob_without_an_assembler_go_with_every_machine(each: Plan, target: str, tmp_path: Path) -> None:
    folder, out = Path(each.archive).parent, tmp_path / "main.o"
    names = [k.identifier for k in each.constants if k.nbytes]
    reads = "".join(f"    sink = *(const volatile unsigned char *)&{name};\n" for name in names)
    source = e.put(tmp_path / "main.c", FREESTANDING.format(reads=reads))
    command: list[str | Path] = [*clang(target), "-ffreestanding", *e.WARNINGS, f"-I{folder}", "-c", "-o", out]
    e.quiet(*command, source)
    for form, standard in (("embed", "-std=c23"), ("string", "-std=c99")):
        write(blob.files(each, str(tmp_path), form=form), tmp_path)  # type: ignore[arg-type]
        e.quiet(*command, standard, tmp_path / "model_blob.c")
        assert Path(each.archive).read_bytes() in out.read_bytes()


@pytest.mark.needs("clang-19")
@pytest.mark.parametrize("flags, told", [
    (["--target=s390x-linux-gnu"], "the archive is little-endian and used as it lies"),
    (["--target=x86_64-linux-gnu", "-U__ELF__"], "what any C compiler takes is: zcrecord embed --lang c --blob string"),
])  # fmt: skip
def test_other_targets_are_told_what_works(each: Plan, flags: list[str], told: str, tmp_path: Path) -> None:
    write(asm.files(each, str(tmp_path)), tmp_path)
    done = assembled(["clang-19", *flags], tmp_path / "model.S", tmp_path / "model.o")
    assert done.returncode != 0
    assert re.findall("error: (.*)", done.stderr)[0] == f'"{told}"' or told in done.stderr.splitlines()[0]


WASM = """
#include "model.h"
#define EXPORT(name) __attribute__((export_name(name)))
EXPORT("is_current") int is_current(void) { return model_is_current(); }
EXPORT("sum") double sum(void)
{
    double total = 0;
    for (int i = 0; i < MODEL_LAYER_F64_COUNT; i++)
        total += model_layer_f64[i] * (i + 1);
    return total;
}
EXPORT("base") const void *base(void) { return model_layer_f32; }
EXPORT("tied") const void *tied(void) { return model_layer_tied; }
EXPORT("row") const void *row(void) { return model_layer_rows; } /* from the third on */
"""
IN_NODE = """
const bytes = require("fs").readFileSync(process.argv[1]);
const { is_current, sum, base, tied, row } = new WebAssembly.Instance(new WebAssembly.Module(bytes)).exports;
console.log(is_current(), sum().toFixed(6), tied() - base(), row() - base(), base() % 64, bytes.length < 4000);
"""


@pytest.mark.needs("clang-19", "wasm-ld-19", "node")
def test_webassembly_has_typed_symbols_and_drops_those_that_nothing_uses(each: Plan, tmp_path: Path) -> None:
    folder = Path(each.archive).parent
    for source in (e.put(tmp_path / "main.c", WASM), folder / "model.S"):
        out = tmp_path / f"{source.stem}.o"
        e.quiet(*clang("wasm32"), "-O2", f"-I{folder}", "-c", source, "-o", out)
    linked = tmp_path / "program.wasm"
    e.quiet("wasm-ld-19", "--no-entry", tmp_path / "main.o", tmp_path / "model.o", "-o", linked)
    total = sum(value * (i + 1) for i, value in enumerate(np.linspace(-1, 1, 7)))
    assert e.quiet("node", "-e", IN_NODE, linked).split() == ["1", f"{total:.6f}", "0", "32", "0", "true"]


WINDOWS = """
#include <stdio.h>
#include "{header}"
int main(void)
{{
    printf("%d %g %d\\n", model_is_current(), {values}[6], (int)((size_t){values} % {alignment}));
    return 0;
}}
"""


@pytest.mark.needs("x86_64-w64-mingw32-gcc", "wine")
@pytest.mark.parametrize("form", ["symbols", "incbin", "string"])
def test_windows_program_has_its_weights(each: Plan, form: str, tmp_path: Path) -> None:
    if form == "symbols":
        write(c.files(each, str(tmp_path)), tmp_path)
        header, values, source = "model.h", "model_layer_f64", "model.S"
    else:
        write(blob.files(each, str(tmp_path), form=form), tmp_path)  # type: ignore[arg-type]
        header, values = "model_blob.h", "model_blob.at.layer_f64"
        source = "model_blob.S" if form == "incbin" else "model_blob.c"
    alignment = next(k.alignment for k in each.constants if k.name == "layer.f64")
    e.put(tmp_path / "main.c", WINDOWS.format(header=header, values=values, alignment=alignment))
    command = ["x86_64-w64-mingw32-gcc", *e.WARNINGS, "-I.", "main.c", source, "-o", "app.exe"]
    e.quiet(*command, cwd=tmp_path)
    done = subprocess.run(["wine", "app.exe"], cwd=tmp_path, env=e.wine_environment(), capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1", "0"], done.stderr
