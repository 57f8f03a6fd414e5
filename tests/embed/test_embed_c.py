"""Tensors as typed symbols of C, C++ and assembler programs: the right bytes, in memory that is only ever read.

Everything is compiled under all warnings as errors, by several compilers, for 64 and 32 bits and for a Cortex-M3.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import embedded as e
import numpy as np
import pytest

import zcrecord
from zcrecord import embed
from zcrecord.embed import asm, c
from zcrecord.embed.plan import Plan, plan
from zcrecord.embed.write_files import write

pytestmark = pytest.mark.needs("gcc", "gcc -m32", "g++", "clang-19", "clang++-19", "readelf", "nm")


class Generated:
    """Sources of every archive, with all names prefixed (`gen`) or none (`bare`, hostile names alone)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.gen = folder, folder / "gen"
        paths = e.archives(folder)
        self.plans = [plan(path) for path in paths]
        self.bare = plan(folder / "hostile.zcr", prefix="")
        for each, out in (*((each, self.gen) for each in self.plans), (self.bare, folder / "bare")):
            write(c.files(each, str(out)), out)
            write(c.files(each, str(out), language="cpp"), out)
        self.own = [e.own_bytes(path) for path in paths]

    def program(self, name: str, plans: list[Plan], suffix: str) -> Path:
        """Return the source of a program that shows every constant."""
        paths: dict[tuple[int, int], str] = {}
        for p, each in enumerate(plans):
            for n, k in enumerate(each.constants):
                if k.nbytes:
                    paths[p, n] = f"{each.stem}::{k.local}" if suffix == "hpp" else k.identifier
        text = e.uses(plans, [f"{p.stem}.{suffix}" for p in plans], paths)
        return e.put(self.folder / f"{name}.{'cpp' if suffix == 'hpp' else 'c'}", text)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    return Generated(tmp_path_factory.mktemp("symbols"))


def check_shown(program: Path, plans: list[Plan], own: list[dict[str, bytes]]) -> None:
    """Check that a program has every constant's bytes, aligned as promised, ties and views at one address."""
    shown = e.shown(program)
    for p, each in enumerate(plans):
        at = {k.identifier: shown[p, n].address for n, k in enumerate(each.constants) if k.nbytes}
        for n, k in enumerate(each.constants):
            assert ((p, n) in shown) == (k.nbytes > 0)
            if k.nbytes:
                assert shown[p, n].data == own[p][k.name], k
                assert at[k.identifier] % k.alignment == 0, k
            if k.base is not None:
                assert at[k.identifier] == at[k.base] + k.base_offset, k


@pytest.mark.parametrize("compiler", e.COMPILERS)
def test_program_has_every_tensor_s_bytes_and_hostile_names_need_no_prefix(generated: Generated, compiler: str) -> None:
    g = generated
    suffix = "hpp" if "++" in compiler else "h"
    for name, plans, own in (("gen", g.plans, g.own), ("bare", [g.bare], g.own[-1:])):
        sources = [g.program(f"{name}_{suffix}", plans, suffix), *sorted((g.folder / name).glob("*.S"))]
        out = e.compiled(e.COMPILERS[compiler], g.folder / f"{name}_{compiler}", sources, f"-I{g.folder / name}")
        check_shown(out, plans, own)


def test_c_header_is_cpp_too_and_both_go_together(generated: Generated) -> None:
    g = generated
    lines = [f'#include "{p.stem}.{suffix}"\n' for p in g.plans for suffix in ("h", "hpp", "h")]
    main = "int main() { return views::views_is_current() && ::views_is_current() ? 0 : 1; }\n"
    sources = [e.put(g.folder / "both.cpp", "".join(lines) + main), g.gen / "views.S"]
    for compiler in ("g++", "clang++"):
        e.quiet(e.compiled(e.COMPILERS[compiler], g.folder / "both", sources, f"-I{g.gen}", "-std=c++17"))


BARE = ["-nostdlib", "-nostartfiles", "-fno-stack-protector"]
TINY = """
#include "every_thing.h"
volatile int sink;
void _start(void);
void _start(void)
{{
{reads}
    for (;;) {{
    }}
}}
"""


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_nothing_is_left_for_the_loader_to_do(generated: Generated, compiler: str) -> None:
    g = generated
    (each,) = (p for p in g.plans if p.stem == "every_thing")
    constants = [k for k in each.constants if k.nbytes]
    reads = "".join(f"    sink = *(const volatile unsigned char *)&{k.identifier};\n" for k in constants)
    sources = [e.put(g.folder / "loaded.c", TINY.format(reads=reads)), g.gen / "every_thing.S"]
    flags = [*BARE, "-fPIE", "-pie", f"-I{g.gen}"]
    out = e.compiled(e.COMPILERS[compiler], g.folder / f"loaded_{compiler}", sources, *flags)
    assert "There are no relocations in this file." in e.quiet("readelf", "-rW", out)
    found, sections = e.symbols(out), e.section_flags(out)
    assert {sections[found[k.identifier].section][:2] for k in constants} == {(".rodata", "A")}
    assert not {name for name, _, _ in sections.values()} & {".data", ".data.rel.ro", ".init_array"}
    writable = {name for name, flags, _ in sections.values() if "W" in flags}
    assert writable == {".dynamic", ".bss"}, "the volatile alone is in .bss"
    assert "RWE" not in e.quiet("readelf", "-lW", out), "an executable stack"


def test_linker_drops_what_nothing_uses(generated: Generated) -> None:
    g = generated
    source = e.put(g.folder / "one.c", TINY.format(reads="    sink = every_thing_layer_i8[0][0];"))
    sizes = {}
    for option in ("--no-gc-sections", "--gc-sections"):
        sources = [source, g.gen / "every_thing.S"]
        out = e.compiled(["gcc"], g.folder / "one", sources, *BARE, f"-I{g.gen}", f"-Wl,{option}")
        sizes[option] = out.stat().st_size
        left = {name for name in e.symbols(out) if name.startswith("every_thing")}
        assert (left == {"every_thing_layer_i8"}) == (option == "--gc-sections")
    assert sizes["--no-gc-sections"] - sizes["--gc-sections"] > 1 << 20


BTI = ["-target", "aarch64-linux-gnu", "-mbranch-protection=standard"]


@pytest.mark.parametrize(
    "compiler, feature", [(["gcc", "-fcf-protection=full"], "IBT, SHSTK"), (["clang-19", *BTI], "BTI, PAC")]
)
def test_branch_protection_of_a_program_is_kept(generated: Generated, compiler: list[str], feature: str) -> None:
    g = generated
    out = g.folder / "protected.o"
    e.quiet(*compiler, f"-I{g.folder}/gen", "-c", g.folder / "gen/views.S", "-o", out)
    assert feature in e.quiet("readelf", "-nW", out)


@pytest.mark.parametrize("section, names", [
    (None, {".rodata.m_a", ".rodata.m_b"}), (".flash", {".flash"}), (".ext.", {".ext.m_a", ".ext.m_b"}),
])  # fmt: skip
def test_section_is_the_one_that_is_asked_for(tmp_path: Path, section: str | None, names: set[str]) -> None:
    zcrecord.save_record({"a": np.ones(3), "b": np.zeros(4)}, tmp_path / "m.zcr")
    write(c.files(plan(tmp_path / "m.zcr"), str(tmp_path), section=section), tmp_path)
    out = tmp_path / "m.o"
    e.quiet("gcc", f"-I{tmp_path}", "-c", tmp_path / "m.S", "-o", out)
    found, sections = e.symbols(out), e.section_flags(out)
    numbers = [found[name].section for name in ("m_a", "m_b")]
    assert {sections[number][0] for number in numbers} == names
    assert len(set(numbers)) == 2, "one section for both: no linker could drop one alone"
    assert {sections[number][1].removesuffix("G") for number in numbers} == {"A"}  # each in a group, or by its name


@pytest.mark.parametrize("section", ["", "a b", '.x,"aw"', "1", ".x\n.data", "é", "x" * 200])
def test_section_that_is_no_name_is_refused(tmp_path: Path, section: str) -> None:
    with pytest.raises(zcrecord.UnsupportedError, match="a section's name is letters, digits"):
        write(c.files(plan(e.small(tmp_path)), str(tmp_path), section=section), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["m.zcr"]


def test_archive_is_found_from_any_folder_and_may_be_named(tmp_path: Path) -> None:
    home, gen, elsewhere = (tmp_path / name for name in ('it\'s a "folder" é', "gen", "else where"))
    for folder in (home, gen, elsewhere):
        folder.mkdir()
    archive, out = e.small(home), tmp_path / "m.o"
    write(c.files(plan(archive), str(gen)), gen)
    for compiler in ("gcc", "clang-19"):
        e.quiet(compiler, f"-I{gen}", "-c", gen / "m.S", "-o", out, cwd=elsewhere)
        assert np.ones(3).tobytes() in out.read_bytes()
        archive.rename(tmp_path / "moved.zcr")
        e.refused(compiler, f"-I{gen}", "-c", gen / "m.S", "-o", out)
        e.quiet(compiler, '-DM_ZCR="moved.zcr"', "-c", gen / "m.S", "-o", out, cwd=tmp_path)
        assert np.ones(3).tobytes() in out.read_bytes()
        (tmp_path / "moved.zcr").rename(archive)


@pytest.mark.parametrize("value, declared", [
    (np.zeros((2, 3), np.float32), "float m_a[2][3];"), (np.zeros(2), "double m_a[2];"), (np.float32(1), "float m_a;"),
    (np.zeros(2, bool), "uint8_t m_a[2];"), (np.zeros(2, np.int8), "int8_t m_a[2];"),
    (np.zeros(2, np.float16), "uint16_t m_a[2];"), (np.zeros((2, 1), np.complex64), "float m_a[2][1][2];"),
    (np.array(1j), "double m_a[2];"), (zcrecord.StringTensor.from_strings(["a"]), "uint8_t m_a[24];"),
    (zcrecord.PackedTensor(np.zeros(5, np.uint8), "int4", (3, 3)), "uint8_t m_a[5];"), (np.zeros((3, 0)), None),
])  # fmt: skip
def test_declaration_of(tmp_path: Path, value: Any, declared: str | None) -> None:
    zcrecord.save_record({"a": value}, tmp_path / "m.zcr")
    header = b"".join(c.files(plan(tmp_path / "m.zcr"), ".")["m.h"]).decode()
    found = re.findall(r"extern M_ALIGNED\(\d+\) const (\w+ m_a.*;)", header)
    assert found == ([declared] if declared else [])
    shape = ", ".join(map(str, np.shape(value) or getattr(value, "shape", ())))
    assert (f"#define M_A_SHAPE {{{shape}}}\n" in header) == bool(shape)
    assert f"/* a: {zcrecord.load_record(tmp_path / 'm.zcr').info('a').dtype.name} [{shape}]" in header


VALUES = """
#include <stdio.h>
#include "every_thing.h"
static const int shape[] = EVERY_THING_LAYER_I8_SHAPE;
int main(void)
{
    printf("%g %g %d %d %d %d ", (double)every_thing_layer_f32[1][2], every_thing_layer_f64[6],
        every_thing_layer_i8[0][1], every_thing_layer_i16, every_thing_layer_yes[1], every_thing_layer_half[1]);
    printf("%g %g %g %g ", (double)every_thing_layer_c64[1][0][1], every_thing_layer_c0[0],
        (double)every_thing_layer_t[3][1], (double)every_thing_layer_one);
    printf("%d %d %d %d %d %d %d\\n", shape[1], EVERY_THING_LAYER_I8_RANK, EVERY_THING_LAYER_I8_DIM0,
        EVERY_THING_LAYER_I8_COUNT, EVERY_THING_LAYER_F32_NBYTES, EVERY_THING_LAYER_F32_DTYPE,
        EVERY_THING_LAYER_INT4_BITS);
    return 0;
}
"""


def test_numbers_and_values_are_what_numpy_has(generated: Generated) -> None:
    g = generated
    sources = [e.put(g.folder / "values.c", VALUES), g.gen / "every_thing.S"]
    out = e.compiled(["gcc", "-std=c99"], g.folder / "values", sources, f"-I{g.gen}")
    assert e.quiet(out) == "-1.5 1 -5 -3 0 16640 -4 5 -0.5 15.5 4 2 3 12 96 18 4\n"


def test_header_of_another_archive_is_noticed(tmp_path: Path) -> None:
    main = e.put(tmp_path / "main.c", '#include "m.h"\nint main(void) { return m_is_current(); }\n')
    headers = {}
    for value in (1, 2):  # of one size, so that the assembler has nothing to say
        write(c.files(plan(e.small(tmp_path, value)), str(tmp_path)), tmp_path)
        headers[value] = (tmp_path / "m.h").read_bytes()
    for value, current in ((1, 0), (2, 1)):
        (tmp_path / "m.h").write_bytes(headers[value])
        out = e.compiled(["gcc"], tmp_path / "main", [main, tmp_path / "m.S"], f"-I{tmp_path}")
        assert subprocess.run([out]).returncode == current


def test_assembler_programs_have_equates(generated: Generated) -> None:
    g = generated
    each = next(p for p in g.plans if p.stem == "every_thing")
    write(asm.files(each, str(g.folder / "asm")), g.folder / "asm")
    uses = ".long EVERY_THING_LAYER_I8_DIM1, EVERY_THING_LAYER_F32_NBYTES\n"
    source = e.put(g.folder / "program.S", f'.include "every_thing.inc"\n{uses}')
    for compiler in ("gcc", "clang-19"):
        e.quiet(compiler, f"-I{g.folder}/asm", "-c", source, "-o", g.folder / "program.o")
        assert np.array([4, 96], np.int32).tobytes() in (g.folder / "program.o").read_bytes()


@pytest.mark.parametrize("options", [
    {"lang": "c"}, {"lang": "cpp"}, *({"lang": "c", "blob": form} for form in ("incbin", "embed", "string")),
])  # fmt: skip
def test_archive_without_digests_is_not_said_to_be_current(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its last bytes would be the same with other weights."""
    report = embed.generate(e.small(tmp_path, digest=None), tmp_path, **options)
    (header,) = (Path(path).read_bytes() for path in report.files if path.endswith((".h", ".hpp")))
    assert b"is_current" not in header and b"saved without digests" in header
