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
from typing import NamedTuple

import numpy as np
import pytest
from embedded import archives, own_bytes
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
    """A program with every archive in it, what it printed, and the mappings it had."""

    plans: list[Plan]
    statics: dict[tuple[int, int], Static]
    rest: list[str]


def generate(made: Plan, folder: Path, *, assembly: bool = False, section: str | None = None) -> Path:
    """Write a module; returns its path."""
    write(rust.files(made, str(folder), assembly=assembly, section=section), folder)
    return folder / f"{made.stem}.rs"


def local(made: Plan, folder: Path) -> list[str]:
    """Return the constants' names in the module, in saved order."""
    lines = (folder / f"{made.stem}.rs").read_text(encoding="utf-8").splitlines()
    return [line.split()[2].rstrip(":").removesuffix("_NAME") for line in lines if "_NAME: &str" in line]


def host(plans: Sequence[Plan], folder: Path) -> str:
    """Return a program that shows every constant of every module, and then what it allocated in using some."""
    modules = "".join(f"mod {made.stem};\n" for made in plans)
    shows = []
    for p, made in enumerate(plans):
        for n, (c, name) in enumerate(zip(made.constants, local(made, folder), strict=True)):
            path = f"{made.stem}::{name}"
            value = f"Some({path})" if c.nbytes else "None::<&u8>"
            shape = f"&{path}_SHAPE.iter().map(|&d| d as u64).collect::<Vec<_>>()"
            about = f"({path}_NAME, {path}_DTYPE, {path}_BITS)"
            shows.append(f"    shows::show(({p}, {n}), {value}, {about}, {shape});\n")
    return f"""#[path = "{SOURCES / "shows.rs"}"]
mod shows;
{modules}
fn main() {{
    let before = shows::allocations();
    let mut sum = 0.0;
    for row in every_thing::LAYER_F32 {{
        sum += row.iter().sum::<f32>();
    }}
    let used = shows::allocations() - before;
    let boxed = Box::new(sum);
    let noticed = shows::allocations() - before - used;
{"".join(shows)}    println!("sum {{}} {{}} {{}}", boxed, used, noticed);
    print!("{{}}", std::fs::read_to_string("/proc/self/maps").expect("/proc"));
}}
"""


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: f"{'assembly' if form[0] else 'included'}{form[1]}")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Host:
    assembly, rustc = request.param
    folder = tmp_path_factory.mktemp("host")
    plans = [plan(path) for path in archives(folder)]
    for made in plans:
        generate(made, folder, assembly=assembly)
    (folder / "main.rs").write_text(host(plans, folder), encoding="utf-8")
    program = build(rustc, folder / "main.rs", folder / "main")
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    statics = {}
    for line in lines[: sum(len(made.constants) for made in plans)]:
        p, n, address, align, name, *dtype, bits, shape, data = line.split(" ")
        dims = tuple(map(int, filter(None, shape[1:].split(","))))
        text = bytes.fromhex(name[1:]).decode()
        known = Static(int(address), int(align), text, " ".join(dtype), int(bits), dims, bytes.fromhex(data[1:]))
        statics[int(p), int(n)] = known
    return Host(plans, statics, lines[len(statics) :])


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


def test_constants_lie_in_the_read_only_segment_of_the_program(ran: Host) -> None:
    maps = [line.split() for line in ran.rest if "/main" in line]
    ranges = [(tuple(int(x, 16) for x in line[0].split("-")), line[1]) for line in maps]
    for found in ran.statics.values():
        if found.data:
            assert [mode for (lo, hi), mode in ranges if lo <= found.address < hi] == ["r--p"], found.name


def test_using_constants_allocates_nothing(ran: Host) -> None:
    [line] = [line for line in ran.rest if line.startswith("sum ")]
    _, value, used, noticed = line.split()
    f32 = zcrecord.load_record(ran.plans[-2].archive)["layer.f32"]
    assert (float(value), used, noticed) == (float(np.sum(f32)), "0", "1")


def test_types_are_arrays_of_the_archive_s_shape(tmp_path: Path) -> None:
    record = {
        "m": np.arange(6, dtype=np.float32).reshape(2, 3),
        "c": np.array([1 + 2j], np.complex64),
        "s": np.array(7),
    }
    zcrecord.save_record({**record, "yes": np.array([True])}, tmp_path / "model.zcr")
    generate(plan(tmp_path / "model.zcr"), tmp_path)
    (tmp_path / "main.rs").write_text(
        """mod model;
static M: &[[f32; 3]; 2] = &[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]];
const SHAPE: [usize; 2] = model::M_SHAPE;
fn main() {
    let (c, s, b): (&[[f32; 2]; 1], &i64, &[u8; 1]) = (model::C, model::S, model::YES);
    assert_eq!((model::M, c[0], *s, b[0], SHAPE), (M, [1.0, 2.0], 7, 1, [2, 3]));
}
""",
        encoding="utf-8",
    )
    subprocess.run([build(compilers()[0], tmp_path / "main.rs", tmp_path / "main")], check=True)


def test_the_whole_archive_is_there_for_the_reader(tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.arange(4, dtype=np.int16)}, tmp_path / "model.zcr")
    generate(plan(tmp_path / "model.zcr"), tmp_path)
    shutil.copy(READER, tmp_path)
    (tmp_path / "main.rs").write_text(
        """#![deny(unsafe_code)]
mod model;
mod zcrecord;
fn main() {
    let archive = zcrecord::Archive::open(model::MODEL_ARCHIVE).expect("an archive");
    let w = archive.get("w").expect("a tensor");
    assert!(w.values::<i16>().expect("i16").eq(model::W.iter().copied()));
    assert_eq!(w.bytes().expect("C order").as_ptr(), model::W.as_ptr() as *const u8);
}
""",
        encoding="utf-8",
    )
    subprocess.run([build(compilers()[0], tmp_path / "main.rs", tmp_path / "main")], check=True)


@FORM
@pytest.mark.parametrize("section", [None, ".weights."])
def test_goes_into_a_crate_without_std_of_any_edition(tmp_path: Path, assembly: bool, section: str | None) -> None:
    turned = np.arange(4, dtype=np.float32).reshape(2, 2).T
    zcrecord.save_record({"w": np.arange(4, dtype=np.float32), "t": turned}, tmp_path / "model.zcr")
    generate(plan(tmp_path / "model.zcr"), tmp_path, assembly=assembly, section=section)
    (tmp_path / "lib.rs").write_text("#![no_std]\npub mod model;\n", encoding="utf-8")
    tried = [(rustc, edition) for rustc in compilers() for edition in editions(rustc)]
    assert {edition for _, edition in tried} >= {"2018", "2021"}
    for rustc, edition in tried:
        build(rustc, tmp_path / "lib.rs", tmp_path / "lib.rlib", "--crate-type", "rlib", edition=edition)


@pytest.mark.needs("/usr/bin/rustc", "wasm-ld-14")
def test_assembly_is_refused_for_webassembly_with_what_works(tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.arange(4, dtype=np.float32)}, tmp_path / "model.zcr")
    (tmp_path / "lib.rs").write_text("#![no_std]\npub mod model;\n", encoding="utf-8")
    flags = ("--crate-type", "rlib", "--target", "wasm32-wasi")
    for assembly in (True, False):
        generate(plan(tmp_path / "model.zcr"), tmp_path, assembly=assembly, section=".weights")
        done = compile_rust("/usr/bin/rustc", tmp_path / "lib.rs", tmp_path / "lib.rlib", *flags)
        assert (done.returncode != 0) == assembly
        assert ("generate this module again, without --assembly" in done.stderr) == assembly


@FORM
def test_a_stale_module_does_not_compile(tmp_path: Path, assembly: bool) -> None:
    zcrecord.save_record({"w": np.zeros(4, np.float32)}, tmp_path / "model.zcr")
    generate(plan(tmp_path / "model.zcr"), tmp_path, assembly=assembly)
    (tmp_path / "main.rs").write_text('mod model;\nfn main() {\n    println!("{:?}", model::W);\n}\n', encoding="utf-8")
    for rustc in compilers():
        zcrecord.save_record({"w": np.zeros(4, np.float32)}, tmp_path / "model.zcr")
        build(rustc, tmp_path / "main.rs", tmp_path / "main")
        zcrecord.save_record({"w": np.ones(4, np.float32)}, tmp_path / "model.zcr")
        done = compile_rust(rustc, tmp_path / "main.rs", tmp_path / "main")
        assert done.returncode and "the archive is not the one that this file was generated from" in done.stderr


def test_the_linker_drops_symbols_that_nothing_uses(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    record = {"used": rng.bytes(64), "unused": rng.bytes(64)}
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in record.items()}
    zcrecord.save_record(arrays, tmp_path / "model.zcr")
    main = 'mod model;\nfn main() {\n    println!("{}", model::USED[std::env::args().count()]);\n}\n'
    held = {}
    for assembly in (False, True):
        generate(plan(tmp_path / "model.zcr"), tmp_path, assembly=assembly)
        (tmp_path / "main.rs").write_text(main, encoding="utf-8")
        program = build(compilers()[0], tmp_path / "main.rs", tmp_path / "main").read_bytes()
        held[assembly] = [data in program for data in record.values()]
    assert held == {False: [True, True], True: [True, False]}


@FORM
def test_bytes_go_into_the_section_that_is_asked_for(tmp_path: Path, assembly: bool) -> None:
    zcrecord.save_record({"w": np.full(4, 7, np.float32)}, tmp_path / "model.zcr")
    generate(plan(tmp_path / "model.zcr"), tmp_path, assembly=assembly, section=".weights.")
    (tmp_path / "lib.rs").write_text("#![no_std]\npub mod model;\n", encoding="utf-8")
    flags = ("--crate-type", "lib", "--emit", "obj")
    compiled = build(compilers()[0], tmp_path / "lib.rs", tmp_path / "lib.o", *flags)
    data = compiled.read_bytes()
    assert (b".weights.model_w\0" if assembly else b".weights.model\0") in data


TARGETS = {
    "x86_64-linux-gnu": 0, "thumbv7m-none-eabi": 0, "aarch64-linux-gnu": 0, "riscv64-linux-gnu": 0,
    "x86_64-apple-darwin": 1, "arm64-apple-darwin": 1, "i686-pc-windows-msvc": 2, "x86_64-pc-windows-msvc": 3,
}  # fmt: skip


@pytest.mark.needs("clang-19")
@pytest.mark.parametrize(("target", "number"), TARGETS.items())
@pytest.mark.parametrize("section", [None, ".weights", ".weights."])
def test_assembles_for_machines_and_systems_other_than_this(
    tmp_path: Path, target: str, number: int, section: str | None
) -> None:
    """LLVM's assembler is rustc's; it is handed what each of the module's cfgs would."""
    golden = ROOT / "tests" / "conformance" / "valid" / "views.zcr"
    module = generate(plan(golden), tmp_path, assembly=True, section=section).read_text(encoding="utf-8")
    macros, uses = module.split("symbols! {\n")
    blocks, symbols = macros.split("global_asm!(")[1:], re.findall(r'    r##"(.*)"##', uses)
    lines = re.findall(r'    r##"(.*)"##', blocks[number]) + symbols + [".purgem zcr_at", ".purgem zcr_set"]
    command = ["clang-19", f"--target={target}", "-x", "assembler", "-c", "-", "-o", str(tmp_path / "out.o")]
    again = [*lines, lines[0], ".endm", ""]  # as another module of the same crate does
    done = subprocess.run(command, input="\n".join(again), capture_output=True, text=True)
    assert len(blocks) == 4 and len(symbols) > 10
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_refuses_alignment_that_places_in_the_archive_do_not_have(tmp_path: Path) -> None:
    zcrecord.save_record({"a": np.ones(4), "w": np.ones(4)}, tmp_path / "model.zcr")
    made = plan(tmp_path / "model.zcr", alignment=4096)
    with pytest.raises(UnsupportedError, match=r"tensor 'a': its offset is not a multiple of 4096"):
        rust.files(made, str(tmp_path))
    generate(made, tmp_path, assembly=True)
    address = "model::W.as_ptr() as usize, model::A.as_ptr() as usize"
    (tmp_path / "main.rs").write_text(
        f'mod model;\nfn main() {{\n    println!("{{}} {{}}", {address});\n}}\n', encoding="utf-8"
    )
    program = build(compilers()[0], tmp_path / "main.rs", tmp_path / "main")
    found = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert [int(at) % 4096 for at in found] == [0, 0]


@pytest.mark.needs("cargo")
@pytest.mark.parametrize(("assembly", "digest"), [(False, "xxh3"), (True, "xxh3"), (True, None)])
@pytest.mark.parametrize("edition", editions("rustc"))
def test_cargo_builds_what_the_archive_holds(tmp_path: Path, edition: str, assembly: bool, digest: str | None) -> None:
    """The recipe: build.rs makes the module again whenever the archive changes, and only then.

    A build of cargo's dev profile is incremental, and does not see what an assembler reads.
    """
    shutil.copytree(ROOT / "tools" / "recipes" / "cargo", tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / "Cargo.toml"
    manifest.write_text(
        manifest.read_text(encoding="utf-8").replace('edition = "2021"', f'edition = "{edition}"'), encoding="utf-8"
    )
    if assembly:
        script = tmp_path / "build.rs"
        script.write_text(
            script.read_text(encoding="utf-8").replace('"--quiet"', '"--quiet", "--assembly"'), encoding="utf-8"
        )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ZCRECORD": f"{sys.executable} -m zcrecord"}

    def run(values: list[float]) -> tuple[str, list[str]]:
        command = ["cargo", "run", "--offline"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[: len(values)] == [f"{value:g}" for value in values]
        return done.stdout, [line for line in done.stderr.splitlines() if "Compiling" in line]

    for number, values in enumerate(([1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 7.0])):
        zcrecord.save_record({"w": np.array(values, np.float32)}, tmp_path / "model.zcr", digest=digest)
        later = tmp_path.stat().st_mtime_ns + (number + 1) * 10**10  # whatever the file system's clock is like
        os.utime(tmp_path / "model.zcr", ns=(later, later))
        text, compiled = run(values)
        assert text.endswith(f"[{len(values)}]\n") and len(compiled) == 1


@pytest.mark.parametrize("assembly", [False, True])
def test_names_keep_a_prefix_that_was_asked_for_and_none_is_taken(tmp_path: Path, assembly: bool) -> None:
    names = ["check", "file", "blob", "packed", "at_file"]
    record = {name: np.full(2, i, np.float32) for i, name in enumerate(names)}
    zcrecord.save_record({**record, "turned": np.asfortranarray(np.eye(2))}, tmp_path / "model.zcr")
    for prefix, start in (("", ""), ("p_", "P_")):
        generate(plan(tmp_path / "model.zcr", prefix=prefix), tmp_path, assembly=assembly)
        values = ", ".join(f"model::{start}{name.upper()}[0]" for name in names)
        shown = 'println!("{:?}", [' + values + "]);"
        (tmp_path / "main.rs").write_text(f"mod model;\nfn main() {{\n    {shown}\n}}\n", encoding="utf-8")
        program = build(compilers()[0], tmp_path / "main.rs", tmp_path / "main")
        found = subprocess.run([program], capture_output=True, text=True, check=True).stdout
        assert found == "[0.0, 1.0, 2.0, 3.0, 4.0]\n"
