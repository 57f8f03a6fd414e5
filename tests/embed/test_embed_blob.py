"""A whole archive as one constant, in three ways: byte for byte the archive, its tensors typed where they lie."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, get_args

import embedded as e
import numpy as np
import pytest

import zcrecord
from zcrecord.embed import blob
from zcrecord.embed.plan import Plan, plan
from zcrecord.embed.write_files import write

pytestmark = pytest.mark.needs("gcc", "gcc -m32", "g++", "clang-19", "clang++-19", "readelf", "nm")

FORMS: tuple[blob.Form, ...] = get_args(blob.Form)
READER = Path(zcrecord.__file__).parent / "embed"

# `#embed` is clang's from 19 on and gcc's from 15 on; every compiler has the other two.
BUILDS = [
    *((form, name) for form in ("incbin", "string") for name in e.COMPILERS),
    *(("embed", name) for name in e.COMPILERS if "clang" in name),
]


class Generated:
    """Blobs of every archive in every form, in a folder for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = e.archives(folder)
        rng = np.random.default_rng(0)
        pieces = {
            "full": np.full(200_001, 255, np.uint8),
            "zeros": np.zeros(200_001, np.uint8),
            "noise": rng.integers(0, 256, 200_001, np.uint8),
            "digits": np.frombuffer(b"\0001\377" + b"07\0" * 70_000, np.uint8),
            "tri": np.frombuffer(b'??/??=\\"\n\r\t%' * 10_000, np.uint8),
        }
        zcrecord.save_record(pieces, folder / "pieces.zcr")
        zcrecord.save_record({"noise": pieces["noise"]}, folder / "noise.zcr")
        self.paths += [folder / "pieces.zcr", folder / "noise.zcr"]
        self.plans = [plan(path) for path in self.paths]
        for form in FORMS:
            for each in self.plans:
                write(blob.files(each, str(folder / form), form=form), folder / form)

    def sources(self, form: str) -> list[Path]:
        return sorted(p for p in (self.folder / form).iterdir() if p.suffix in (".S", ".c"))


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    return Generated(tmp_path_factory.mktemp("blobs"))


def member(each: Plan, name: str) -> str:
    return f"{each.stem}_blob.at.{name}"


@pytest.mark.parametrize("form, compiler", BUILDS)
def test_constant_is_the_archive_and_its_tensors_lie_where_they_should(
    generated: Generated, form: str, compiler: str
) -> None:
    g = generated
    plus = "++" in compiler
    paths: dict[tuple[int, int], str] = {}
    for p, each in enumerate(g.plans):
        paths[p, -1] = f"{each.stem}_blob.bytes"
        named = enumerate(zip(each.constants, each.local, strict=True))
        paths |= {(p, n): member(each, name) for n, (k, name) in named if k.place == "archive"}
    source = g.folder / f"{form}{'.cpp' if plus else '.c'}"
    source.write_text(e.uses(g.plans, [f"{each.stem}_blob.h" for each in g.plans], paths), encoding="utf-8")
    out = g.folder / f"{form} {compiler}"
    e.compiled(e.COMPILERS[compiler], out, [source, *g.sources(form)], f"-I{g.folder / form}")
    shown = e.shown(out)
    for p, (each, path) in enumerate(zip(g.plans, g.paths, strict=True)):
        whole = shown.pop((p, -1))
        assert whole.data == path.read_bytes()
        assert whole.address % each.base_alignment == 0
        for n, k in enumerate(each.constants):
            if k.place == "archive":
                found = shown.pop((p, n))
                assert found.address - whole.address == k.offset
                assert found.data == whole.data[k.offset :][: k.nbytes]
                assert found.address % k.alignment == 0
    assert not shown


@pytest.mark.parametrize("form", FORMS)
def test_it_is_read_only_and_needs_no_relocation(generated: Generated, form: str) -> None:
    g = generated
    name = "every_thing_blob"
    source = g.folder / "tiny.c"
    source.write_text(
        f'#include "{name}.h"\nfloat _start(void);\nfloat _start(void) {{ return {name}.at.layer_f32[1][2]; }}\n',
        encoding="utf-8",
    )
    flags = ["-nostdlib", "-nostartfiles", "-fPIE", "-pie", "-fno-stack-protector", f"-I{g.folder / form}"]
    (made,) = (p for p in g.sources(form) if p.stem == name)
    out = e.compiled(e.COMPILERS["clang"], g.folder / f"tiny_{form}", [source, made], *flags)
    assert "There are no relocations in this file." in e.quiet("readelf", "-rW", out)
    symbol, sections = e.symbols(out)[name], e.section_flags(out)
    assert sections[symbol.section][:2] == (".rodata", "A")
    assert symbol.size == next(p for p in g.plans if p.stem == "every_thing").archive_size
    assert {n for n, flags, _ in sections.values() if "W" in flags} == {".dynamic"}


@pytest.mark.needs("arm-none-eabi-gcc")
@pytest.mark.parametrize("form", ["incbin", "string"])
def test_cortex_m3_has_it_in_flash(generated: Generated, form: str) -> None:
    g = generated
    for source in g.sources(form):
        e.quiet(*e.ARM, *e.WARNINGS, f"-I{g.folder / form}", "-c", source, "-o", g.folder / "arm.o")
        symbol, sections = e.symbols(g.folder / "arm.o")[source.stem], e.section_flags(g.folder / "arm.o")
        name, flags, alignment = sections[symbol.section]
        assert name.startswith(".rodata") and flags == "A"
        assert alignment >= 16


@pytest.mark.parametrize("form", FORMS)
def test_reader_opens_it(generated: Generated, form: str) -> None:
    g = generated
    source = g.folder / "opens.c"
    source.write_text(
        """
#include "zcrecord.h"
#include "every_thing_blob.h"
int main(void)
{
    zcr_archive archive;
    zcr_tensor tensor;
    if (zcr_open(&archive, every_thing_blob.bytes, sizeof every_thing_blob.bytes)) {
        return 1;
    }
    if (zcr_get(&archive, "layer.f32", &tensor)) {
        return 2;
    }
    return zcr_f32(&tensor) == &every_thing_blob.at.layer_f32[0][0] && every_thing_is_current() ? 0 : 3;
}
""",
        encoding="utf-8",
    )
    (made,) = (p for p in g.sources(form) if p.stem == "every_thing_blob")
    flags = (f"-I{g.folder / form}", f"-I{READER}")
    e.quiet(e.compiled(e.COMPILERS["clang"], g.folder / f"opens_{form}", [source, made], *flags))


LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


def test_literals_are_ones_that_every_compiler_takes(generated: Generated) -> None:
    text = (generated.folder / "string" / "pieces_blob.c").read_text("ascii")
    body = text[text.index("= {{") :]
    literals = [match[1] for match in LITERAL.finditer(body)]
    assert len(literals) > 100
    assert all(len(literal) <= 2048 for literal in literals), "MSVC's longest, before they are joined"
    joined = re.findall(r'(?:^".*"\n)+', body, re.MULTILINE)
    lengths = [sum(len(re.sub(r"\\[0-7]{3}", "x", m[1])) for m in LITERAL.finditer(part)) for part in joined]
    assert 3000 < max(lengths) <= 4095, "the longest that C99 promises to take"
    assert "??" not in body
    assert not re.search(r"\\(?![0-7]{3})", body), "an escape that is not three octal digits"
    assert max(map(len, body.splitlines())) < 1100


@pytest.mark.parametrize("form", FORMS)
def test_section_is_the_one_that_is_asked_for(tmp_path: Path, form: blob.Form) -> None:
    zcrecord.save_record({"a": np.ones(3)}, tmp_path / "m.zcr")
    write(blob.files(plan(tmp_path / "m.zcr"), str(tmp_path), form=form, section=".weights"), tmp_path)
    source = tmp_path / ("m_blob.S" if form == "incbin" else "m_blob.c")
    e.quiet("clang-19", *e.WARNINGS, f"-I{tmp_path}", "-c", source, "-o", tmp_path / "m.o")
    symbol = e.symbols(tmp_path / "m.o")["m_blob"]
    name, flags, _ = e.section_flags(tmp_path / "m.o")[symbol.section]
    assert (name, flags.removesuffix("G")) == (".weights", "A")
    with pytest.raises(zcrecord.UnsupportedError, match="a section's name is letters"):
        write(blob.files(plan(tmp_path / "m.zcr"), str(tmp_path), form=form, section='"x'), tmp_path)


@pytest.mark.parametrize("asked, found", [(None, 256), (64, 256), (512, 512)])
@pytest.mark.parametrize("form", FORMS)
def test_alignment_is_that_of_the_archive_or_more(
    tmp_path: Path, form: blob.Form, asked: int | None, found: int
) -> None:
    zcrecord.save_record({"a": np.ones(3)}, tmp_path / "m.zcr", alignment=256)
    assert zcrecord.load_record(tmp_path / "m.zcr").info("a").offset == 512
    write(blob.files(plan(tmp_path / "m.zcr", alignment=asked), str(tmp_path), form=form), tmp_path)
    source = tmp_path / ("m_blob.S" if form == "incbin" else "m_blob.c")
    e.quiet("clang-19", *e.WARNINGS, f"-I{tmp_path}", "-c", source, "-o", tmp_path / "m.o")
    symbol = e.symbols(tmp_path / "m.o")["m_blob"]
    assert e.section_flags(tmp_path / "m.o")[symbol.section][2] == found


@pytest.mark.parametrize("form", FORMS)
def test_archive_without_digests_is_not_said_to_be_current(tmp_path: Path, form: blob.Form) -> None:
    zcrecord.save_record({"a": np.ones(3)}, tmp_path / "m.zcr", digest=None)
    header = b"".join(blob.files(plan(tmp_path / "m.zcr"), str(tmp_path), form=form)["m_blob.h"])
    assert b"is_current" not in header
    assert b"saved without digests" in header


@pytest.mark.parametrize("form", ["embed", "string"])
def test_assembler_has_incbin_alone(tmp_path: Path, form: Any) -> None:
    zcrecord.save_record({"a": np.ones(3)}, tmp_path / "m.zcr")
    each = plan(tmp_path / "m.zcr")
    with pytest.raises(zcrecord.UnsupportedError, match=f"a blob by '{form}' is C; for an assembler there is 'incbin'"):
        blob.files(each, str(tmp_path), form=form, language="asm")
    write(blob.files(each, str(tmp_path), form="incbin", language="asm"), tmp_path)
    program = '.include "m_blob.inc"\n.long M_A_OFFSET\n'
    (tmp_path / "p.S").write_text(program, encoding="utf-8")
    e.quiet("gcc", f"-I{tmp_path}", "-c", tmp_path / "p.S", "-o", tmp_path / "p.o")
    assert each.constants[0].offset.to_bytes(4, "little") in (tmp_path / "p.o").read_bytes()


def test_path_that_embed_cannot_name_is_refused(tmp_path: Path) -> None:
    zcrecord.save_record({"a": np.ones(3)}, tmp_path / 'm".zcr')
    with pytest.raises(zcrecord.UnsupportedError, match="#embed cannot name"):
        write(blob.files(plan(tmp_path / 'm".zcr'), str(tmp_path), form="embed"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ['m".zcr']


def test_archive_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"a": np.ones(3)}, path)
    each = plan(path)
    zcrecord.save_record({"a": np.zeros(3)}, path)
    with pytest.raises(zcrecord.IntegrityError, match="was changed while constants were made of it"):
        write(blob.files(each, str(tmp_path), form="string"), tmp_path)
    zcrecord.save_record({"a": np.zeros(300)}, path)
    with pytest.raises(zcrecord.RecordError):
        write(blob.files(each, str(tmp_path), form="string"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["m.zcr"]


@pytest.mark.parametrize("form", ["incbin", "embed"])
def test_header_of_another_archive_is_noticed(tmp_path: Path, form: blob.Form) -> None:
    (tmp_path / "main.c").write_text(
        '#include "m_blob.h"\nint main(void) { return m_is_current(); }\n', encoding="utf-8"
    )
    for value, current in ((1.0, 1), (2.0, 0)):
        zcrecord.save_record({"a": np.full(3, value)}, tmp_path / "m.zcr")
        if current:
            write(blob.files(plan(tmp_path / "m.zcr"), str(tmp_path), form=form), tmp_path)
        sources = [tmp_path / "main.c", tmp_path / ("m_blob.S" if form == "incbin" else "m_blob.c")]
        out = e.compiled(e.COMPILERS["clang"], tmp_path / "main", sources, f"-I{tmp_path}")
        assert subprocess.run([out]).returncode == current
