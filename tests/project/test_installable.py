"""Packages of every language, as a release builds them, install into empty environments and work there.

Nothing is fetched: an environment of Python links what the wheel requires from the one that the tests run in.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterable
from pathlib import Path

import guides
import numpy as np
import pytest
from packaging.requirements import Requirement
from rich.console import Console

import zcrecord
from tools import quickstart, release
from tools.generate import manifests

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "conformance" / "valid" / "nested.zcr"  # has the names of the pages' examples
VERSION = manifests.semantic(zcrecord.__version__)
NUMBERS = VERSION.partition("-")[0]  # a version as CMake knows it


def built(package: str, folder: Path) -> list[Path]:
    """Build one package by the command of a release; return its files."""
    done = run([sys.executable, "-m", "tools.release", package, "--dest", folder], ROOT)
    files = sorted((folder / package).iterdir())
    assert all(file.name in done for file in files)
    return files


def run(command: list[str | Path], folder: Path, **variables: str) -> str:
    """Run a command without the repository on Python's path; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def unpacked(package: Path, folder: Path) -> Path:
    """Unpack a package; return the one folder in it."""
    with tarfile.open(package) as archive:
        if hasattr(tarfile, "data_filter"):  # from 3.11.4 on
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    (inside,) = folder.iterdir()
    return inside


def example(page: Path, kind: str) -> str:
    """Return the one block of a page in a language."""
    (block,) = re.findall(rf"^```{kind}\b[^\n]*\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return str(block)


# -- Python ----------------------------------------------------------------------------------------------------------


def required(names: Iterable[str]) -> set[str]:
    """Return distributions of this environment with all that they require, extras left out."""
    found: set[str] = set()
    left = list(names)
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            requirements = map(Requirement, importlib.metadata.requires(name) or ())
            left += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def environment(folder: Path, *more: str) -> Path:
    """Make a virtual environment with what zcrecord requires, and `more`; return its Python."""
    venv.create(folder, symlinks=os.name != "nt")
    (site,) = [*folder.glob("lib/python*/site-packages"), *folder.glob("Lib/site-packages")]
    declared = map(Requirement, manifests.project()["dependencies"])
    for name in required([*(r.name for r in declared), *more]):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(python: Path, package: Path, *options: str) -> None:
    """Install a built package; pip fails if the environment lacks what it requires."""
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-index", *options, package], package.parent)


@pytest.fixture(scope="module")
def python_packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return built("python", tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(python_packages: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the built wheel, and with ONNX Runtime for README's example."""
    (wheel,) = (file for file in python_packages if file.suffix == ".whl")
    python = environment(tmp_path_factory.mktemp("wheel") / "venv", "onnx", "onnxruntime")
    install(python, wheel)
    return python


@pytest.mark.slow
def test_installed_wheel_runs_the_example_of_readme(installed: Path, tmp_path: Path) -> None:
    quickstart.act_one(Console(file=io.StringIO()), tmp_path)
    where = "\nimport importlib.util as u\nprint(zcrecord.__file__, u.find_spec('tests'), u.find_spec('tools'))"
    (tmp_path / "example.py").write_text(example(guides.README, "python") + where, encoding="utf-8")
    file, *absent = run([installed, "example.py"], tmp_path).split()
    assert installed.parents[1] in Path(file).parents and absent == ["None", "None"]
    assert (tmp_path / "own.zcr").exists() and Path(file).with_name("py.typed").exists()


@pytest.mark.exhaustive(keep=0)  # the test before runs without it
def test_source_distribution_installs_without_extras_and_has_commands_that_convert_a_model_and_show_it(
    python_packages: list[Path], tmp_path: Path
) -> None:
    (source,) = (file for file in python_packages if file.suffix == ".gz")
    python = environment(tmp_path / "venv", "hatchling")
    install(python, source, "--no-build-isolation")
    zcr, onnx2zc = (python.with_name(name + python.suffix) for name in ("zcrecord", "onnx2zc"))
    assert set(manifests.project()["scripts"]) == {"zcrecord", "onnx2zc"}
    assert run([zcr, "--version"], tmp_path).startswith(f"zcrecord {zcrecord.__version__}, archive format ")
    assert "usage: onnx2zc " in run([onnx2zc, "--help"], tmp_path)
    shutil.copy(ROOT / "tests" / "data" / "digits.onnx", tmp_path / "model.onnx")
    run([onnx2zc, "model.onnx"], tmp_path)
    listed = run([zcr, "ls", "model.zcr"], tmp_path)
    assert all(name in listed for name in zcrecord.load_record(tmp_path / "model.zcr").names)
    assert run([python, "-m", "zcrecord", "ls", "model.zcr"], tmp_path) == listed


# -- npm -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def npm_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of ECMAScript modules into which npm installed the built package."""
    folder = tmp_path_factory.mktemp("npm")
    (package,) = built("npm", folder / "dist")
    (folder / "package.json").write_text('{"type": "module", "private": true}', encoding="utf-8")
    run(["npm", "install", "--offline", "--ignore-scripts", "--no-audit", "--no-fund", package], folder)
    return folder


@pytest.mark.needs("npm", "node")
def test_npm_package_reads_an_archive_as_its_page_shows(npm_project: Path) -> None:
    shutil.copy(MODEL, npm_project / "model.zcr")
    (npm_project / "page.js").write_text(example(ROOT / manifests.NPM.parent / "README.md", "js"), encoding="utf-8")
    *infos, last = run(["node", "page.js"], npm_project).splitlines()
    record = zcrecord.load_record(MODEL)
    assert [line.split()[:2] for line in infos] == [[name, record.info(name).dtype.name] for name in record.names]
    weight = record["encoder.weight"]
    assert last == f"Float32Array {weight.size} {weight.flat[0]:g}"


@pytest.mark.needs("npm", "node")
def test_npm_package_holds_the_module_and_nothing_else(npm_project: Path) -> None:
    folder = npm_project / "node_modules" / "zcrecord"
    reader = ROOT / manifests.NPM.parent
    assert {path.name for path in folder.iterdir()} == {path.name for path in reader.iterdir()}
    manifest = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    assert manifest["version"] == VERSION
    assert not {"dependencies", "devDependencies", "scripts", "private"} & set(manifest)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 200_000
    closed = 'import("zcrecord/format.js").catch((error) => console.log(error.code))'
    assert run(["node", "-e", closed], npm_project) == "ERR_PACKAGE_PATH_NOT_EXPORTED\n"


# -- Rust ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built crate, unpacked as cargo would."""
    folder = tmp_path_factory.mktemp("rust")
    (package,) = built("rust", folder)
    return unpacked(package, folder / "unpacked")


def cargo_project(crate: Path, folder: Path, program: str, features: str = "") -> None:
    """Make a project that depends on the crate."""
    (folder / "src").mkdir()
    (folder / "src" / "main.rs").write_text(program, encoding="utf-8")
    dependency = f'zcrecord = {{ path = "{crate}"{features} }}'
    package = '[package]\nname = "program"\nversion = "0.1.0"\nedition = "2021"\n'
    (folder / "Cargo.toml").write_text(f"{package}\n[dependencies]\n{dependency}\n", encoding="utf-8")


@pytest.mark.needs("cargo", "rustc", "cc")
def test_crate_reads_an_archive_as_its_page_shows(crate: Path, tmp_path: Path) -> None:
    cargo_project(crate, tmp_path, example(crate / "README.rust.md", "rust"))
    shutil.copy(MODEL, tmp_path / "model.zcr")
    *infos, last = run(["cargo", "run", "--offline", "--quiet"], tmp_path, RUSTFLAGS="-D warnings").splitlines()
    record = zcrecord.load_record(MODEL)
    assert [line.split()[:2] for line in infos] == [[name, record.info(name).dtype.name] for name in record.names]
    assert last == f"sum {record['encoder.weight'].sum():g}"
    zcrecord.save_record({"other": np.ones(2, np.float32)}, tmp_path / "model.zcr")
    done = subprocess.run(["target/debug/program"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == 'Error: "encoder.weight: there is none of that name or number"\n'


@pytest.mark.needs("cargo", "rustc")
@pytest.mark.exhaustive(keep=0)
def test_crate_without_its_feature_std_needs_core_alone(crate: Path, tmp_path: Path) -> None:
    """A program with a panic handler of its own has two as soon as anything brings std."""
    handler = "#[panic_handler]\nfn panic(_: &core::panic::PanicInfo) -> ! {\n    loop {}\n}\n"
    count = (
        "pub fn count(bytes: &[u8]) -> u32 {\n    zcrecord::Archive::open(bytes).map_or(0, |a| a.tensor_count())\n}\n"
    )
    cargo_project(crate, tmp_path, f"#![no_std]\n{handler}{count}", ", default-features = false")
    (tmp_path / "src" / "main.rs").rename(tmp_path / "src" / "lib.rs")
    run(["cargo", "check", "--offline", "--quiet"], tmp_path)
    manifest = tmp_path / "Cargo.toml"
    manifest.write_text(
        manifest.read_text(encoding="utf-8").replace(", default-features = false", ""), encoding="utf-8"
    )
    done = subprocess.run(["cargo", "check", "--offline", "--quiet"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "duplicate lang item `panic_impl`" in done.stderr, done.stderr


@pytest.mark.needs("cargo", "rustc")
def test_crate_holds_the_reader_and_depends_on_nothing(crate: Path) -> None:
    ours = {"lib.rs", "zcrecord.rs", "README.rust.md", "LICENSE", "Cargo.toml"}
    made = {"Cargo.toml.orig", "Cargo.lock", "target"}  # by cargo
    assert {path.name for path in crate.iterdir()} - made == ours
    assert (crate / "zcrecord.rs").read_bytes() == (ROOT / manifests.CARGO.parent / "zcrecord.rs").read_bytes()
    (found,) = json.loads(run(["cargo", "metadata", "--offline", "--format-version=1"], crate))["packages"]
    assert (found["version"], found["license"], found["dependencies"]) == (VERSION, "0BSD", [])


# -- C ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `cmake --install` installed the built package of the header into."""
    folder = tmp_path_factory.mktemp("c")
    (package,) = built("c", folder)
    source = unpacked(package, folder / "unpacked")
    run(["cmake", "-S", source, "-B", folder / "build", "-G", "Ninja"], folder)
    run(["cmake", "--install", folder / "build", "--prefix", folder / "prefix"], folder)
    return folder / "prefix"


def cmake_project(folder: Path, version: str) -> list[str | Path]:
    """Make a project of the page's program in C and in C++; return the command that configures it."""
    program = example(ROOT / "zcrecord" / "embed" / "README.c.md", "c")
    for name in ("program.c", "program.cc"):
        (folder / name).write_text(program, encoding="utf-8")
    find, link = example(ROOT / "zcrecord" / "embed" / "README.c.md", "cmake").splitlines()
    text = f"""
        cmake_minimum_required(VERSION 3.20)
        project(program C CXX)
        add_compile_options(-Wall -Wextra -Wpedantic -Werror)
        {re.sub(r"(?<=zcrecord )[0-9.]+", version, find)}
        add_executable(program program.c)
        add_executable(program_in_cc program.cc)
        {link}
        {link.replace("program", "program_in_cc")}
    """
    (folder / "CMakeLists.txt").write_text(text, encoding="utf-8")
    compilers = ["-DCMAKE_C_COMPILER=gcc", "-DCMAKE_CXX_COMPILER=g++"]
    return ["cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", *compilers]


@pytest.mark.needs("cmake", "ninja", "gcc", "g++")
def test_installed_header_is_found_by_cmake_and_reads_an_archive_in_c_and_cpp(prefix: Path, tmp_path: Path) -> None:
    run([*cmake_project(tmp_path, NUMBERS.rpartition(".")[0]), f"-DCMAKE_PREFIX_PATH={prefix}"], tmp_path)
    run(["cmake", "--build", "build"], tmp_path)
    record = zcrecord.load_record(MODEL)
    told = [f"{info.name}: {len(info.shape)} axes, {info.nbytes} bytes" for info in record.infos()]
    zcrecord.save_record({"w": np.zeros(3_000_000, np.uint8)}, large := tmp_path / "large.zcr")
    for program in ("program", "program_in_cc"):
        assert run([tmp_path / "build" / program, MODEL], tmp_path).splitlines() == told
        assert run([tmp_path / "build" / program, large], tmp_path) == "w: 1 axes, 3000000 bytes\n"
        done = subprocess.run([tmp_path / "build" / program, "none.zcr"], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.endswith(": the file cannot be read\n")
    assert (prefix / "share" / "licenses" / "zcrecord" / "LICENSE").exists()


# -- the versions and the command ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("python", "semantic"),
    [("1.0.0", "1.0.0"), ("1.0.0rc1", "1.0.0-rc.1"), ("1.2.3a10", "1.2.3-alpha.10"), ("0.1.0b2", "0.1.0-beta.2")],
)
def test_versions_of_npm_and_cargo_are_those_of_python(python: str, semantic: str) -> None:
    made = {path.name: text for path, text in manifests.files(python).items()}
    npm = json.loads(made["package.json"])
    assert npm["version"] == semantic
    assert npm.get("publishConfig") == (None if semantic == python else {"tag": "next"})
    assert f'\nversion = "{semantic}"\n' in made["Cargo.toml"]
    assert f"\nproject(zcrecord VERSION {python[:5]} LANGUAGES" in made["CMakeLists.txt"]


@pytest.mark.parametrize("python", ["1.0", "1.0.0.post1", "1.0.0rc1.dev2", "1.0.0+local", "v1.0.0"])
def test_version_that_npm_and_cargo_cannot_have_is_refused(python: str) -> None:
    with pytest.raises(ValueError, match=rf"version '{re.escape(python)}': npm and cargo know 1\.0\.0, .*; choose one"):
        manifests.semantic(python)


def test_release_refuses_the_tag_of_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["c", "--dest", str(tmp_path), "--tag", "v0.0.9"]) == 1
    due = f"tag v0.0.9: __version__ in zcrecord/__init__.py has v{zcrecord.__version__}; change it, or tag that\n"
    assert capsys.readouterr().err == f"tools.release: {due}"
    assert not list(tmp_path.iterdir())
    assert release.main(["c", "--dest", str(tmp_path), "--tag", f"v{zcrecord.__version__}"]) == 0
    assert f"zcrecord-c-{VERSION}.tar.gz: " in capsys.readouterr().out


def test_release_refuses_a_stale_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(manifests, "version", lambda: "7.0.0")
    assert release.main(["c", "--dest", str(tmp_path), "--tag", "v7.0.0"]) == 1
    assert f"{manifests.NPM} is stale: run python -m tools.generate, and commit" in capsys.readouterr().err
