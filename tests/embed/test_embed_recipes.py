"""The build recipes of tools/recipes: a changed archive is in the program after the next build, and only then.

Each builds a program that prints what it has of the archive's tensor.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import command_line as c
import numpy as np
import pytest
from embedded import put

import zcrecord

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "tools" / "recipes"

MAIN = """\
#include <stdio.h>
#include "model.h"

int main(void)
{
    int i;
    for (i = 0; i < MODEL_W_DIM0; i++) {
        printf("%g ", (double)model_w[i]);
    }
    printf("%d\\n", model_is_current());
    return 0;
}
"""


class Project:
    """A folder with a recipe, a program and an archive."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder = folder
        shutil.copytree(RECIPES / recipe, folder, dirs_exist_ok=True)
        put(folder / "main.c", MAIN)
        self.save(1.0, 2.0)

    def save(self, *values: float) -> None:
        """Write the archive, later than all that was built before, whatever the file system's clock is like."""
        zcrecord.save_record({"w": np.array(values, np.float32)}, self.folder / "model.zcr")
        for path in [*self.folder.rglob("*")]:  # existing files are made an hour older
            if path.is_file() and path.name != "model.zcr":
                status = path.stat()
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 3600 * 10**9))

    def run(self, *command: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "ZCRECORD": f"{sys.executable} -m zcrecord"}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def cmake(self) -> None:
        self.run("cmake", "-S", ".", "-B", "build", "-G", "Ninja", f"-DZCRECORD_COMMAND={sys.executable};-m;zcrecord")
        self.run("cmake", "--build", "build")

    def times(self) -> dict[str, int]:
        """Return when each file was written, but for build systems' own records."""
        suffixes = {".o", ".S", ".h", ".d", ""}
        files = [
            p for p in self.folder.rglob("*") if p.suffix in suffixes and "CMakeFiles" not in p.parts and p.is_file()
        ]
        return {str(p): p.stat().st_mtime_ns for p in files if not p.name.startswith((".ninja", "Makefile"))}


def check(project: Project, build: list[str], program: str) -> None:
    """Check that a build has the archive's values, that another does nothing, and that a changed archive is built."""
    assert project.run(program).split() == ["1", "2", "1"]
    before = project.times()
    project.run(*build)
    assert project.times() == before
    for values in ((3.0, 4.0), (5.0, 6.0, 7.0)):  # of the same shape, and of another
        project.save(*values)
        project.run(*build)
        assert project.run(program).split() == [*(f"{v:g}" for v in values), "1"]


@pytest.mark.needs("make", "cc")
def test_makefile_builds_what_the_archive_holds(tmp_path: Path) -> None:
    project = Project(tmp_path, "make")
    project.run("make")
    check(project, ["make"], "./program")
    project.run("make", "--question")


@pytest.mark.needs("cmake", "ninja", "cc")
def test_cmake_builds_what_the_archive_holds(tmp_path: Path) -> None:
    project = Project(tmp_path, "cmake")
    project.cmake()
    check(project, ["cmake", "--build", "build"], "build/program")


@pytest.mark.needs("cmake", "ninja", "cc")
def test_cmake_takes_an_archive_of_any_name(tmp_path: Path) -> None:
    project = Project(tmp_path, "cmake")
    (tmp_path / "model.zcr").rename(tmp_path / "Mobile Net-v2.zcr")
    changes = ("CMakeLists.txt", "model.zcr", '"Mobile Net-v2.zcr"'), ("main.c", "model", "mobile_net_v2")
    for name, old, new in changes:
        text = (tmp_path / name).read_text(encoding="utf-8").replace(old, new)
        put(tmp_path / name, text.replace("MODEL", "MOBILE_NET_V2"))
    project.cmake()
    assert project.run("build/program").split() == ["1", "2", "1"]


# Programs of the page.


PAGE = (c.ROOT / "zcrecord" / "embed" / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

shell = pytest.mark.skipif(os.name != "posix", reason="platform: the page's commands are those of a POSIX shell")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the page works in: the model, the page's files, and the commands of the package on PATH."""
    shutil.copy(c.DIGITS, tmp_path / "digits.onnx")
    scripts = tmp_path / "bin"
    scripts.mkdir()
    for name, function in (("zcrecord", "main"), ("onnx2zc", "onnx2zc_main")):
        code = f"import sys; from zcrecord.cli.dispatch import {function}; sys.exit({function}())"
        (scripts / name).write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n", encoding="utf-8")
        (scripts / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(scripts), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(c.ROOT), prepend=os.pathsep)
    for _, name, text in BLOCK.findall(PAGE):
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(script: str, folder: Path) -> str:
    """Run commands of the page, which have to succeed and to complain of nothing; return what they print."""
    done = subprocess.run(["sh", "-e"], input=script, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, script + done.stdout + done.stderr
    assert not done.stderr, f"{script}: {done.stderr}"
    return done.stdout


@shell
@pytest.mark.needs("gcc", "rustc", "cc")
def test_programs_of_the_page_build_and_run_as_it_shows_them(folder: Path) -> None:
    told = [run(text, folder) for language, name, text in BLOCK.findall(PAGE) if language == "sh" and not name]
    runs = [text for text in told if "10 x 32" in text or "[10, 32]" in text]
    assert len(runs) == 5, told
    assert runs[4] == "10 x 32 of its own\n"
    assert "classifier.weight float32" in runs[2]


@shell
@pytest.mark.needs("avr-gcc", "simavr")
def test_avr_program_reads_its_own_flash_and_has_no_weight_in_its_ram(folder: Path) -> None:
    run("onnx2zc digits.onnx digits.zcr --quiet", folder)
    done = subprocess.run(["sh", "-e", "avr.sh"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    bias = zcrecord.load_record(folder / "digits.zcr")["classifier.bias"]
    assert f"{bias.sum():.4f}, current" in done.stdout + done.stderr
    sizes = run("avr-size avr.elf", folder).splitlines()[1].split()
    assert int(sizes[1]) + int(sizes[2]) < 64  # .data and .bss; the tensor has 40 bytes, the strings are the program's
