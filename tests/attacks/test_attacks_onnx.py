"""Every rule of ONNX models and of external data has its attack; each attack is answered as it has to be.

So are those by way of other formats.
"""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcrecord
from attacks import external, foreign, onnx_files
from attacks.catalogue import rules_on_the_page
from attacks.external import SECRET, at, folder_with
from attacks.running import faults
from zcrecord.codec.entries import TensorLayout
from zcrecord.errors import ExternalDataError, IntegrityError, LimitError, SourceError
from zcrecord.onnx import archive_link, convert, to_onnx, verify_external
from zcrecord.onnx import external_data as rules
from zcrecord.storage.memory import read_some
from zcrecord.writing.module_tree import ModuleTreeBuilder

ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="platform: needs fork and /proc")
MODULES = {"O": onnx_files, "X": external}
ALL = [*MODULES.values(), foreign]


@LINUX
@pytest.mark.exhaustive(keep=("external",))
@pytest.mark.parametrize("module", ALL, ids=lambda module: module.__name__)
def test_every_attack_is_answered_by_its_error_in_little_memory(module: Any, tmp_path: Path) -> None:
    assert not faults(module, tmp_path, 12)


# What takes more than a file.


def outside(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model whose data lie in a folder of its own, and another such folder outside, with other bytes."""
    path = folder_with(tmp_path, at("sub/w.bin"))
    (path.parent / "sub").mkdir()
    (path.parent / "w.bin").rename(path.parent / "sub" / "w.bin")
    (tmp_path / "other").mkdir()
    (tmp_path / "secret.bin").rename(tmp_path / "other" / "w.bin")
    return path, path.parent / "sub", tmp_path / "other"


def read(path: Path) -> bytes:
    """Convert a model and return the bytes of its one tensor."""
    out = io.BytesIO()
    convert(path, out)
    return np.asarray(zcrecord.load_record(out.getvalue())["w"]).tobytes()


def test_a_folder_swapped_for_a_link_and_back_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X18. Each check by itself sees the right folder; the link is there only while the file is opened."""
    path, sub, other = outside(tmp_path)
    resolve = os.path.realpath
    state = {"linked": False}

    def realpath(name: str) -> str:
        if not str(name).endswith("w.bin"):
            return resolve(name)
        if state["linked"]:
            sub.unlink()
            sub.with_name("aside").rename(sub)
        found = resolve(name)
        if not state["linked"]:
            sub.rename(sub.with_name("aside"))
            sub.symlink_to(other)
        state["linked"] = not state["linked"]
        return found

    monkeypatch.setattr("zcrecord.onnx.external_data.os.path.realpath", realpath)
    with monkeypatch.context() as patch:
        patch.setattr(rules, "_WALKS", False)
        assert read(path) == SECRET, "the trick itself does not work: nothing would be noticed"
    with pytest.raises(ExternalDataError, match=r"external data 'sub/w\.bin': cannot be opened: (Not a dir|Too many)"):
        read(path)


def checked_archive(tmp_path: Path) -> tuple[Path, Path]:
    """A small model whose archive was replaced by another, and the right one outside, where no model may refer to."""
    inside = tmp_path / "m"
    inside.mkdir()
    convert(ROOT / "tests" / "data" / "digits.onnx", inside / "model.zcr")
    to_onnx(inside / "model.zcr", inside / "small.onnx", external=True)
    (inside / "model.zcr").rename(tmp_path / "right.zcr")
    zcrecord.save_record({"w": np.zeros(9)}, inside / "model.zcr")
    return inside / "small.onnx", tmp_path / "right.zcr"


def test_the_verified_archive_is_the_file_that_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X15 and X18. A link to the right archive comes once the wrong one was found to be a plain file."""
    model, right = checked_archive(tmp_path)
    opened = rules.ModelFolder.open

    def late(folder: rules.ModelFolder, location: str) -> int:
        fd = opened(folder, location)
        model.with_name(location).unlink()
        model.with_name(location).symlink_to(right)
        return fd

    monkeypatch.setattr(rules.ModelFolder, "open", late)
    with pytest.raises(IntegrityError, match=r"model\.zcr: payload offset \d+ was expected by '.*small\.onnx', it has"):
        verify_external(model)
    monkeypatch.undo()
    with pytest.raises(
        ExternalDataError, match=r"external data 'model\.zcr': a symbolic link leads out of the model's"
    ):
        verify_external(model)


def test_what_a_model_tells_is_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = checked_archive(tmp_path)
    right.rename(model.with_name("model.zcr"))
    told = archive_link._link_properties

    def late(*given: Any) -> Any:
        found = told(*given)
        model.unlink()
        model.write_bytes(at("w.bin"))
        return found

    monkeypatch.setattr(archive_link, "_link_properties", late)
    assert verify_external(model).tensors == 5


def test_a_file_that_ends_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X19."""
    path = folder_with(tmp_path, at("w.bin"))

    def late(fd: int, buffer: memoryview, offset: int) -> int:
        os.truncate(path.parent / "w.bin", 10)
        return read_some(fd, buffer, offset)

    monkeypatch.setattr(rules, "read_some", late)
    with pytest.raises(SourceError, match=r"w\.bin: tensor 'w': became shorter than the \d+ bytes it had"):
        read(path)


def test_a_stream_has_no_folder_to_point_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X22."""
    path = folder_with(tmp_path, at("w.bin"))
    shutil.copy(path.parent / "w.bin", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExternalDataError, match=r"'w\.bin' lies beside the model, and a stream has no folder"):
        convert(io.BytesIO(path.read_bytes()), io.BytesIO())


def test_modules_nested_32_deep_always_have_room_for_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcrecord.writing.module_tree._BASE_BUDGET", 0)
    form = TensorLayout(18, 32, (1,))
    for i in range(100):
        outline = ModuleTreeBuilder()
        for path in ([f"{i}"] * 32, [f"{i}x"] * 32):
            outline.tensor(path, form, 0)
        with pytest.raises(
            LimitError, match="names of modules would take more than 0 MiB and 16 times those of tensors"
        ):
            outline.check_name([f"{i}y"] * 99)


ACTED = {
    "X18": test_a_folder_swapped_for_a_link_and_back_is_noticed,
    "X19": test_a_file_that_ends_while_it_is_read_is_an_error,
    "X22": test_a_stream_has_no_folder_to_point_into,
}


@pytest.mark.parametrize("letter", MODULES)
def test_every_rule_that_is_written_down_has_an_attack(letter: str) -> None:
    written = rules_on_the_page(letter)
    assert len(written) > 20
    tried = {rule for module in MODULES.values() for attack in module.ATTACKS for rule in attack.rules} | ACTED.keys()
    assert {rule for rule in tried if rule[0] == letter} == set(written)
