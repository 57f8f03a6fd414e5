"""A whole archive as one constant, in three ways: byte for byte the archive, its tensors typed where they lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import embedded as e
import numpy as np
import pytest

import zcrecord
from zcrecord.embed import blob, generate
from zcrecord.embed.plan import plan
from zcrecord.embed.write_files import write

pytestmark = pytest.mark.needs("gcc", "gcc -m32", "g++", "clang-19", "clang++-19", "readelf", "nm")

FORMS: tuple[blob.Form, ...] = get_args(blob.Form)

# `#embed` is clang's from 19 on and gcc's from 15 on; every compiler has the other two.
BUILDS = [
    *((form, name) for form in ("incbin", "string") for name in e.COMPILERS),
    *(("embed", name) for name in e.COMPILERS if "clang" in name),
]


class Generated:
    """Blobs of every archive in every form, in a folder for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        self.plans = [plan(path) for path in (*e.archives(folder), folder / "pieces.zcr", folder / "noise.zcr")]
        for form in FORMS:
            for each in self.plans:
                write(blob.files(each, str(folder / form), form=form), folder / form)

    def sources(self, form: str, stem: str = "*") -> list[Path]:
        return sorted(p for p in (self.folder / form).glob(f"{stem}_blob.*") if p.suffix in (".S", ".c"))


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    return Generated(tmp_path_factory.mktemp("blobs"))


@pytest.mark.parametrize("form, compiler", BUILDS)
def test_constant_is_the_archive_with_its_tensors(generated: Generated, form: str, compiler: str) -> None:
    g = generated
    paths: dict[tuple[int, int], str] = {}
    for p, each in enumerate(g.plans):
        paths[p, -1] = f"{each.stem}_blob.bytes"
        tensors = ((n, k) for n, k in enumerate(each.constants) if k.place == "archive")
        paths |= {(p, n): f"{each.stem}_blob.at.{k.local}" for n, k in tensors}
    text = e.uses(g.plans, [f"{each.stem}_blob.h" for each in g.plans], paths)
    source = e.put(g.folder / f"{form}{'.cpp' if '++' in compiler else '.c'}", text)
    out = g.folder / f"{form} {compiler}"
    e.compiled(e.COMPILERS[compiler], out, [source, *g.sources(form)], f"-I{g.folder / form}")
    shown = e.shown(out)
    assert shown.keys() == paths.keys()
    for p, each in enumerate(g.plans):
        whole = shown[p, -1]
        assert whole.data == Path(each.archive).read_bytes()
        assert whole.address % each.base_alignment == 0
        for n, k in enumerate(each.constants):
            if k.place == "archive":
                assert shown[p, n].address - whole.address == k.offset
                assert shown[p, n].data == whole.data[k.offset :][: k.nbytes]
                assert shown[p, n].address % k.alignment == 0


@pytest.mark.parametrize("form", FORMS)
def test_it_is_read_only_and_needs_no_relocation(generated: Generated, form: str) -> None:
    g, name = generated, "every_thing_blob"
    main = f"float _start(void);\nfloat _start(void) {{ return {name}.at.layer_f32[1][2]; }}\n"
    sources = [e.put(g.folder / "tiny.c", f'#include "{name}.h"\n{main}'), *g.sources(form, "every_thing")]
    flags = ["-nostdlib", "-nostartfiles", "-fPIE", "-pie", "-fno-stack-protector", f"-I{g.folder / form}"]
    out = e.compiled(e.COMPILERS["clang"], g.folder / f"tiny_{form}", sources, *flags)
    assert "There are no relocations in this file." in e.quiet("readelf", "-rW", out)
    symbol, sections = e.symbols(out)[name], e.section_flags(out)
    assert sections[symbol.section][:2] == (".rodata", "A")
    assert symbol.size == next(p for p in g.plans if p.stem == "every_thing").archive_size
    assert {n for n, flags, _ in sections.values() if "W" in flags} == {".dynamic"}


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


@pytest.mark.parametrize("form", ["embed", "string"])
def test_assembler_has_incbin_alone(tmp_path: Path, form: Any) -> None:
    each = plan(e.small(tmp_path))
    with pytest.raises(zcrecord.UnsupportedError, match=f"a blob by '{form}' is C; for an assembler there is 'incbin'"):
        blob.files(each, str(tmp_path), form=form, language="asm")
    write(blob.files(each, str(tmp_path), form="incbin", language="asm"), tmp_path)
    source = e.put(tmp_path / "p.S", '.include "m_blob.inc"\n.long M_A_OFFSET\n')
    e.quiet("gcc", f"-I{tmp_path}", "-c", source, "-o", tmp_path / "p.o")
    assert each.constants[0].offset.to_bytes(4, "little") in (tmp_path / "p.o").read_bytes()


def test_form_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zcrecord.UnsupportedError, match="blob 'literals' is not known; incbin, embed, string"):
        generate(e.small(tmp_path), tmp_path / "out", lang="c", blob="literals")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_path_that_embed_cannot_name_is_refused(tmp_path: Path) -> None:
    path = e.small(tmp_path).rename(tmp_path / 'm".zcr')
    with pytest.raises(zcrecord.UnsupportedError, match="#embed cannot name"):
        write(blob.files(plan(path), str(tmp_path), form="embed"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ['m".zcr']


def test_archive_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    each = plan(e.small(tmp_path))
    e.small(tmp_path, 2)
    with pytest.raises(zcrecord.IntegrityError, match="was changed while constants were made of it"):
        write(blob.files(each, str(tmp_path), form="string"), tmp_path)
    zcrecord.save_record({"a": np.zeros(300)}, tmp_path / "m.zcr")
    with pytest.raises(zcrecord.RecordError):
        write(blob.files(each, str(tmp_path), form="string"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["m.zcr"]
