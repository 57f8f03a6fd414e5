"""zcrecord.rs is without unsafe code and without a way to panic, by every compiler, and where addresses have 32 bits.

That it agrees with the package on what is an archive, and on what it holds, test_readers says.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import rust_programs
from costly_archives import ARCHIVES, strings
from other_processors import X86_64
from reader_archives import bools, golden, mixed, wide
from readers import Level, Mode, Question, agreed, ask
from rust_programs import CHECKED, READER, SOURCES, build, compilers, editions

import zcrecord

pytestmark = pytest.mark.needs("rustc", "cc")

LEVELS = get_args(Level)
BARE = ("--crate-type", "staticlib", "-C", "panic=abort", "-C", "lto=fat", "-C", "codegen-units=1")
GOLDEN = sorted(path.stem for path in (Path(__file__).parents[1] / "conformance" / "valid").glob("*.zcr"))


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rust_programs.checker(tmp_path_factory.mktemp("checker"))


def everything_golden() -> list[Question]:
    return [Question(golden(name)[0], mode, level) for name in GOLDEN for mode in get_args(Mode) for level in LEVELS]


def test_every_other_compiler_s_checker_gives_the_same_answers(checker: Path, tmp_path: Path) -> None:
    questions = [*everything_golden(), *mixed(7, 500)]
    expected = ask([checker], questions)
    for rustc in compilers()[1:]:
        assert ask([build(rustc, SOURCES / "checker.rs", tmp_path / "checker", *CHECKED)], questions) == expected


@pytest.mark.needs("/usr/bin/rustc", "node", "wasm-ld-14")
def test_agrees_where_addresses_have_32_bits(checker: Path, tmp_path: Path) -> None:
    flags = ("--target", "wasm32-wasi", *CHECKED)
    program = build("/usr/bin/rustc", SOURCES / "checker.rs", tmp_path / "checker.wasm", *flags)
    questions = [*everything_golden(), *mixed(8, 1500), *(Question(data) for data in wide())]
    agreed([[checker], ["node", "--no-warnings", SOURCES / "run_wasi.mjs", program]], questions)


def test_agrees_on_archives_made_to_cost_much(checker: Path) -> None:
    """Were one of their passes quadratic, they would take hours."""
    questions = [Question(build().seal()) for build, _, _ in ARCHIVES.values()]
    assert agreed([[checker]], questions) == [kind for _, kind, _ in ARCHIVES.values()].count("")
    answers = ask([checker, "--terse"], [Question(forged.seal(), "w", "f") for forged in (strings(), bools())])
    assert [answer.accepted for answer in answers] == [True, True]


@pytest.mark.parametrize(("rustc", "edition"), [(one, edition) for one in compilers() for edition in editions(one)])
def test_compiles_as_a_crate_and_as_a_module(rustc: str, edition: str, tmp_path: Path) -> None:
    """The line is the guide's, and the file's own."""
    guide = (READER.parent / "README.md").read_text(encoding="utf-8")
    (line,) = {line for line in guide.splitlines() if line.startswith("impl ") and "error::Error" in line}
    assert f"//! {line}" in READER.read_text(encoding="utf-8")
    build(rustc, READER, tmp_path / "lib.rlib", "--crate-type", "rlib", "-W", "missing-docs", edition=edition)
    host = tmp_path / "host.rs"
    host.write_text(
        f"""#[path = "{READER}"]
mod zcrecord;
{line}
fn opened() -> Result<u32, Box<dyn std::error::Error + Send + Sync>> {{
    Ok(zcrecord::Archive::open(&[])?.tensor_count())
}}
fn main() {{
    println!("{{}}", opened().unwrap_err());
}}
""",
        encoding="utf-8",
    )
    program = build(rustc, host, tmp_path / "host", edition=edition)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout == "R1: too few bytes for an archive; the source is truncated\n"


def test_prints_what_it_found_in_a_line(tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.ones((2, 3), np.int8), "steps": 5, "words": ["up", "a"]}, tmp_path / "m.zcr")
    main = f"""#[path = "{READER}"]
mod zcrecord;
fn main() {{
    let archive = zcrecord::Archive::open(include_bytes!("m.zcr")).unwrap();
    let root = archive.module(0).unwrap();
    println!("{{:?}}", archive);
    for child in archive.children(&root, &mut [0; 9]).unwrap() {{
        println!("{{:?}}", child.unwrap());
    }}
}}
"""
    source = tmp_path / "main.rs"
    source.write_text(main, encoding="utf-8")
    lines = subprocess.run([build("rustc", source, tmp_path / "main")], capture_output=True, text=True).stdout
    archive, w, steps, words = lines.splitlines()
    assert archive == f"Archive({(tmp_path / 'm.zcr').stat().st_size} bytes, 1 tensors)"
    assert w == 'Tensor(Tensor("w", int8, [2, 3]))' and "value: Int(5)" in steps
    assert 'value: List([Ok(Text("up")), Ok(Text("a"))])' in words


def test_has_no_unsafe_code_and_lets_none_in() -> None:
    text = READER.read_text(encoding="utf-8")
    assert text.startswith("// SPDX-License-Identifier: 0BSD\n")
    assert "#![forbid(unsafe_code)]" in text
    code = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("//"))
    assert "unsafe {" not in code and "std::" not in code and len(code) > len(text) // 2


def link_bare(rustc: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Link the reader and a program without C library, std or panics; all that is not reached is dropped."""
    library = build(rustc, SOURCES / "bare.rs", folder / "libbare.a", *BARE, *flags)
    data = golden("nested")[0]
    (folder / "model.inc").write_text(",".join(map(str, data)), encoding="utf-8")
    command = ["gcc", "-O2", "-static", "-nostdlib", "-nostartfiles", "-Wl,--gc-sections", f"-I{folder}"]
    command += [str(SOURCES / "bare.c"), str(library), "-o", str(folder / "bare")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("rustc", compilers())
@X86_64
@pytest.mark.needs("gcc")
@pytest.mark.parametrize("level", ["2", "s"])
def test_links_into_a_program_that_has_nothing_and_no_way_to_panic(rustc: str, level: str, tmp_path: Path) -> None:
    done = link_bare(rustc, tmp_path, "-C", f"opt-level={level}")
    assert done.returncode == 0, done.stderr
    assert subprocess.run([tmp_path / "bare"]).returncode == 0


@X86_64
@pytest.mark.needs("gcc")
def test_a_way_to_panic_would_not_link(tmp_path: Path) -> None:
    done = link_bare(compilers()[0], tmp_path, "-C", "opt-level=2", "--cfg", "can_panic")
    assert done.returncode != 0 and "undefined reference to `zcrecord_panicked'" in done.stderr
