"""Generated Rust modules: they compile without a word, and hold what the archive does, where the program's code is.

All archives are in one program, once for each form and compiler. Alignment, addresses, names and shapes are checked by
what the program prints of its own statics.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from embedded import archives, own_bytes, put
from rust_programs import READER, SOURCES, build, compile_rust, compilers, editions

import zcrecord
from zcrecord import UnsupportedError
from zcrecord.embed import rust
from zcrecord.embed.plan import Plan, plan
from zcrecord.embed.write_files import write

pytestmark = pytest.mark.needs("rustc", "cc")

ROOT = Path(__file__).resolve().parents[2]
FORMS = list(product((False, True), compilers()))
FORM = pytest.mark.parametrize("assembly", [False, True], ids=["included", "assembly"])

LIBRARY = "#![no_std]\npub mod model;\n"


class Static(NamedTuple):
    """A program's output for one constant."""

    address: int
    align: int
    name: str
    dtype: str
    bits: int
    shape: tuple[int, ...]
    data: bytes


class Host(NamedTuple):
    """A program with every archive in it, and what it printed."""

    plans: list[Plan]
    statics: dict[tuple[int, int], Static]


def generate(source: Any, folder: Path, *, assembly: bool = False, section: str | None = None) -> Plan:
    """Write the module of an archive, or of a plan."""
    made = source if isinstance(source, Plan) else plan(source)
    write(rust.files(made, str(folder), assembly=assembly, section=section), folder)
    return made


def saved(folder: Path, record: Any, **options: Any) -> Path:
    zcrecord.save_record(record, folder / "model.zcr", **options)
    return folder / "model.zcr"


def printed(folder: Path, main: str) -> str:
    """Build main.rs, by the first compiler; return what the program prints."""
    program = build(compilers()[0], put(folder / "main.rs", main), folder / "main")
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def host(plans: Sequence[Plan]) -> str:
    """Return a program that shows every constant of every module."""
    modules = "".join(f"mod {made.stem};\n" for made in plans)
    shows = []
    for p, made in enumerate(plans):
        for n, c in enumerate(made.constants):
            path = f"{made.stem}::{c.local.upper()}"
            value = f"Some({path})" if c.nbytes else "None::<&u8>"
            shape = f"&{path}_SHAPE.iter().map(|&d| d as u64).collect::<Vec<_>>()"
            about = f"({path}_NAME, {path}_DTYPE, {path}_BITS)"
            shows.append(f"    shows::show(({p}, {n}), {value}, {about}, {shape});\n")
    return f"""#[path = "{SOURCES / "shows.rs"}"]
mod shows;
{modules}
fn main() {{
{"".join(shows)}}}
"""


@pytest.fixture(scope="module", params=FORMS, ids=[f"{'assembly' if a else 'included'}{of}" for a, of in FORMS])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Host:
    assembly, rustc = request.param
    folder = tmp_path_factory.mktemp("host")
    plans = [generate(path, folder, assembly=assembly) for path in archives(folder)]
    program = build(rustc, put(folder / "main.rs", host(plans)), folder / "main")
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    statics = {}
    for line in lines:
        p, n, address, align, name, *dtype, bits, shape, data = line.split(" ")
        dims = tuple(map(int, filter(None, shape[1:].split(","))))
        text = bytes.fromhex(name[1:]).decode()
        known = Static(int(address), int(align), text, " ".join(dtype), int(bits), dims, bytes.fromhex(data[1:]))
        statics[int(p), int(n)] = known
    return Host(plans, statics)


def test_constants_hold_what_the_archive_does(ran: Host) -> None:
    for p, made in enumerate(ran.plans):
        expected = own_bytes(Path(made.archive))
        for n, c in enumerate(made.constants):
            found = ran.statics[p, n]
            assert (found.name, found.dtype, found.bits, found.shape) == (c.name, c.dtype.name, c.bits, c.shape)
            assert found.data == expected[c.name], (made.archive, c.name)
    assert len(ran.statics) > 150


def test_constants_are_aligned_and_shared_as_planned(ran: Host) -> None:
    for p, made in enumerate(ran.plans):
        address = {c.identifier: ran.statics[p, n].address for n, c in enumerate(made.constants)}
        for n, c in enumerate(made.constants):
            if c.nbytes:
                assert address[c.identifier] % max(c.alignment, ran.statics[p, n].align) == 0, c
            if c.base is not None:
                assert address[c.identifier] == address[c.base] + c.base_offset


TYPES = """mod model;
static M: &[[f32; 3]; 2] = &[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]];
const SHAPE: [usize; 2] = model::M_SHAPE;
fn main() {
    let (c, s, b): (&[[f32; 2]; 1], &i64, &[u8; 1]) = (model::C, model::S, model::YES);
    assert_eq!((model::M, c[0], *s, b[0], SHAPE), (M, [1.0, 2.0], 7, 1, [2, 3]));
}
"""
READS = """#![deny(unsafe_code)]
mod model;
mod zcrecord;
fn main() {
    let archive = zcrecord::Archive::open(model::MODEL_ARCHIVE).expect("an archive");
    let m = archive.get("m").expect("a tensor");
    assert!(m.values::<f32>().expect("f32").eq(model::M.iter().flatten().copied()));
    assert_eq!(m.bytes().expect("C order").as_ptr(), model::M.as_ptr() as *const u8);
}
"""


def test_types_are_arrays_of_the_archive_s_shape_and_the_whole_archive_is_there_for_the_reader(tmp_path: Path) -> None:
    record = {"m": np.arange(6, dtype=np.float32).reshape(2, 3), "c": np.array([1 + 2j], np.complex64)}
    generate(saved(tmp_path, record | {"s": np.array(7), "yes": np.array([True])}), tmp_path)
    shutil.copy(READER, tmp_path)
    for main in (TYPES, READS):
        printed(tmp_path, main)


@FORM
@pytest.mark.parametrize("section", [None, ".weights."])
def test_goes_into_a_crate_without_std_of_any_edition(tmp_path: Path, assembly: bool, section: str | None) -> None:
    turned = np.arange(4, dtype=np.float32).reshape(2, 2).T
    archive = saved(tmp_path, {"w": np.arange(4, dtype=np.float32), "t": turned})
    generate(archive, tmp_path, assembly=assembly, section=section)
    tried = [(rustc, edition) for rustc in compilers() for edition in editions(rustc)]
    assert {edition for _, edition in tried} >= {"2018", "2021"}
    source = put(tmp_path / "lib.rs", LIBRARY)
    for rustc, edition in tried:
        build(rustc, source, tmp_path / "lib.rlib", "--crate-type", "rlib", edition=edition)
    if section is not None:
        flags = ("--crate-type", "lib", "--emit", "obj")
        data = build(compilers()[0], source, tmp_path / "lib.o", *flags).read_bytes()
        assert (b".weights.model_w\0" if assembly else b".weights.model\0") in data


@pytest.mark.needs("/usr/bin/rustc", "wasm-ld-14")
def test_assembly_is_refused_for_webassembly_with_what_works(tmp_path: Path) -> None:
    archive = saved(tmp_path, {"w": np.arange(4, dtype=np.float32)})
    source = put(tmp_path / "lib.rs", LIBRARY)
    flags = ("--crate-type", "rlib", "--target", "wasm32-wasi")
    for assembly in (True, False):
        generate(archive, tmp_path, assembly=assembly, section=".weights")
        done = compile_rust("/usr/bin/rustc", source, tmp_path / "lib.rlib", *flags)
        assert (done.returncode != 0) == assembly
        assert ("generate this module again, without --assembly" in done.stderr) == assembly


@FORM
def test_a_stale_module_does_not_compile(tmp_path: Path, assembly: bool) -> None:
    source = put(tmp_path / "main.rs", 'mod model;\nfn main() {\n    println!("{:?}", model::W);\n}\n')
    generate(saved(tmp_path, {"w": np.zeros(4, np.float32)}), tmp_path, assembly=assembly)
    for rustc in compilers():
        saved(tmp_path, {"w": np.zeros(4, np.float32)})
        build(rustc, source, tmp_path / "main")
        saved(tmp_path, {"w": np.ones(4, np.float32)})
        done = compile_rust(rustc, source, tmp_path / "main")
        assert done.returncode and "the archive is not the one that this file was generated from" in done.stderr


def test_the_linker_drops_symbols_that_nothing_uses(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    record = {"used": rng.bytes(64), "unused": rng.bytes(64)}
    archive = saved(tmp_path, {name: np.frombuffer(data, np.uint8) for name, data in record.items()})
    for assembly, linked in ((False, [True, True]), (True, [True, False])):
        generate(archive, tmp_path, assembly=assembly)
        printed(tmp_path, 'mod model;\nfn main() {\n    println!("{}", model::USED[std::env::args().count()]);\n}\n')
        assert [data in (tmp_path / "main").read_bytes() for data in record.values()] == linked


TARGETS = {
    "x86_64-linux-gnu": 0, "thumbv7m-none-eabi": 0, "aarch64-linux-gnu": 0, "riscv64-linux-gnu": 0,
    "x86_64-apple-darwin": 1, "arm64-apple-darwin": 1, "i686-pc-windows-msvc": 2, "x86_64-pc-windows-msvc": 3,
}  # fmt: skip


@pytest.mark.needs("clang-19")
@pytest.mark.parametrize(("target", "number"), TARGETS.items())
@pytest.mark.parametrize("section", [None, ".weights."])
def test_assembles_for_other_machines(tmp_path: Path, target: str, number: int, section: str | None) -> None:
    """LLVM's assembler is rustc's; it is handed what each of the module's cfgs would."""
    golden = ROOT / "tests" / "conformance" / "valid" / "views.zcr"
    generate(golden, tmp_path, assembly=True, section=section)
    module = (tmp_path / "views.rs").read_text(encoding="utf-8")
    macros, uses = module.split("symbols! {\n")
    blocks, symbols = macros.split("global_asm!(")[1:], re.findall(r'    r##"(.*)"##', uses)
    lines = re.findall(r'    r##"(.*)"##', blocks[number]) + symbols + [".purgem zcr_at", ".purgem zcr_set"]
    command = ["clang-19", f"--target={target}", "-x", "assembler", "-c", "-", "-o", str(tmp_path / "out.o")]
    again = [*lines, lines[0], ".endm", ""]  # as another module of the same crate does
    done = subprocess.run(command, input="\n".join(again), capture_output=True, text=True)
    assert len(blocks) == 4 and len(symbols) > 10
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_refuses_alignment_that_places_in_the_archive_do_not_have(tmp_path: Path) -> None:
    made = plan(saved(tmp_path, {"a": np.ones(4), "w": np.ones(4)}), alignment=4096)
    with pytest.raises(UnsupportedError, match=r"tensor 'a': its offset is not a multiple of 4096"):
        rust.files(made, str(tmp_path))
    generate(made, tmp_path, assembly=True)
    addresses = "model::W.as_ptr() as usize, model::A.as_ptr() as usize"
    found = printed(tmp_path, f'mod model;\nfn main() {{\n    println!("{{}} {{}}", {addresses});\n}}\n').split()
    assert [int(address) % 4096 for address in found] == [0, 0]


@pytest.mark.needs("cargo")
@pytest.mark.parametrize(("assembly", "digest"), [(False, "xxh3"), (True, "xxh3"), (True, None)])
@pytest.mark.parametrize("edition", editions("rustc"))
def test_cargo_builds_what_the_archive_holds(tmp_path: Path, edition: str, assembly: bool, digest: str | None) -> None:
    """The recipe: build.rs makes the module again whenever the archive changes, and only then.

    A build of cargo's dev profile is incremental, and does not see what an assembler reads.
    """
    shutil.copytree(ROOT / "tools" / "recipes" / "cargo", tmp_path, dirs_exist_ok=True)
    changes = [("Cargo.toml", 'edition = "2021"', f'edition = "{edition}"')]
    changes += [("build.rs", '"--quiet"', '"--quiet", "--assembly"')] if assembly else []
    for name, old, new in changes:
        put(tmp_path / name, (tmp_path / name).read_text(encoding="utf-8").replace(old, new))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ZCRECORD": f"{sys.executable} -m zcrecord"}

    def run(values: list[float]) -> tuple[str, list[str]]:
        command = ["cargo", "run", "--offline"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[: len(values)] == [f"{value:g}" for value in values]
        return done.stdout, [line for line in done.stderr.splitlines() if "Compiling" in line]

    for number, values in enumerate(([1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 7.0])):
        saved(tmp_path, {"w": np.array(values, np.float32)}, digest=digest)
        later = tmp_path.stat().st_mtime_ns + (number + 1) * 10**10  # whatever the file system's clock is like
        os.utime(tmp_path / "model.zcr", ns=(later, later))
        text, compiled = run(values)
        assert text.endswith(f"[{len(values)}]\n") and len(compiled) == 1


@FORM
def test_names_keep_a_prefix_that_was_asked_for_and_none_is_taken(tmp_path: Path, assembly: bool) -> None:
    names = ["check", "file", "blob", "packed", "at_file"]
    record = {name: np.full(2, i, np.float32) for i, name in enumerate(names)}
    archive = saved(tmp_path, {**record, "turned": np.asfortranarray(np.eye(2))})
    for prefix in ("", "p_"):
        generate(plan(archive, prefix=prefix), tmp_path, assembly=assembly)
        values = ", ".join(f"model::{(prefix + name).upper()}[0]" for name in names)
        main = 'println!("{:?}", [' + values + "]);"
        assert printed(tmp_path, f"mod model;\nfn main() {{\n    {main}\n}}\n") == "[0.0, 1.0, 2.0, 3.0, 4.0]\n"
