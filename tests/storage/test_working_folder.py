"""A record keeps working when the process changes its folder, and never takes another file of that name for its own."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
import zcrecord.embed
import zcrecord.formats
import zcrecord.onnx
from zcrecord import Record, load_record
from zcrecord.distributed.folder import CheckpointFolder
from zcrecord.errors import SourceError
from zcrecord.hollow import hollow_of
from zcrecord.loaders import load_into
from zcrecord.loaders.torch import TorchLoader
from zcrecord.transport import pack

MIB = 1 << 20
TREE: dict[str, Any] = {
    "a": np.arange(8.0),
    "n": {"w": np.arange(6.0), "v": np.arange(4)},
    "big": np.ones(MIB, np.uint8),
    "twin": np.ones(MIB, np.uint8),
}


def filled(hollow: Any) -> Any:
    """Return the content of a hollow record after a loader has read its file."""
    hollow.fill_by("read")
    return hollow.seal()["a"]


LATE: dict[str, Callable[[Record], Any]] = {
    "torch": lambda rec: rec.torch()["a"].numpy(),
    "read": lambda rec: rec.load_into("read")["a"],
    "torch's loader": lambda rec: load_into(rec, TorchLoader("cpu"))["a"].numpy(),
    "pickle": lambda rec: pickle.loads(pickle.dumps(rec))["a"],
    "pickle of a part": lambda rec: pickle.loads(pickle.dumps(rec.select("a")))["a"],
    "hollow": lambda rec: filled(rec.hollow()),
    "hollow, pickled": lambda rec: filled(pickle.loads(pickle.dumps(rec.hollow()))),
    "private": lambda rec: Record(rec.archive.private())["a"],
    "path": lambda rec: load_record(rec.path)["a"],
}


# Called with the path of another folder, which has an archive and a model.
IN_NO_FOLDER: dict[str, Callable[[Path], Any]] = {
    "save": lambda _: zcrecord.save_record(TREE, "m.zcr"),
    "load": lambda _: load_record("m.zcr"),
    "edit": lambda _: zcrecord.edit("m.zcr").__enter__(),
    "convert": lambda there: zcrecord.formats.convert(there / "m.zcr", "m.safetensors"),
    "convert of a model": lambda there: zcrecord.onnx.convert(there / "model" / "model.onnx", "m.zcr"),
    "embed in a new folder": lambda there: zcrecord.embed.generate(there / "m.zcr", "new", lang="rust"),
    "checkpoint": lambda _: CheckpointFolder("new", durable=True).make(),
}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Go to a folder that has an archive; returns what goes to another, that has another archive of that name."""
    for name, tree in (("here", TREE), ("there", {**TREE, "a": np.zeros(8)})):
        (tmp_path / name).mkdir()
        zcrecord.save_record(tree, tmp_path / name / "m.zcr", durable=False)
        pack(tmp_path / name / "m.zcr", tmp_path / name / "m.zcr.zst")
    monkeypatch.chdir(tmp_path / "here")
    return lambda: monkeypatch.chdir(tmp_path / "there")


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("case", LATE)
def test_what_opens_a_file_again_opens_the_same(case: str, mmap: bool, elsewhere: Callable[[], None]) -> None:
    rec = load_record("m.zcr", mmap=mmap)
    elsewhere()
    assert LATE[case](rec).tolist() == TREE["a"].tolist()
    r.assert_same(rec.tree(), TREE)


def test_a_hollow_record_of_a_path_is_filled_from_it(elsewhere: Callable[[], None]) -> None:
    hollow = hollow_of("m.zcr")
    elsewhere()
    assert filled(hollow).tolist() == TREE["a"].tolist()


def test_the_path_is_absolute_and_errors_name_it_as_it_was_given(elsewhere: Callable[[], None]) -> None:
    here = os.getcwd()
    rec = load_record("m.zcr")
    elsewhere()
    assert rec.path == rec.select("a").path == os.path.join(here, "m.zcr")
    assert repr(rec) == "<Record m.zcr: 5 tensors>"
    with pytest.raises(zcrecord.TensorNotFoundError, match=r"^m\.zcr: tensor 'x'"):
        rec["x"]


@pytest.mark.skipif(os.name != "posix", reason="platform: no links everywhere")
def test_two_dots_after_a_link_lead_where_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[], None]
) -> None:
    (tmp_path / "there" / "deep").mkdir()
    Path("link").symlink_to(tmp_path / "there" / "deep")
    rec = load_record("link/../m.zcr")  # there/m.zcr, not here/m.zcr
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(rec)).torch()["a"].tolist() == filled(rec.hollow()).tolist() == [0] * 8


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder and remove it; returns that above, which has an archive and a model."""
    zcrecord.save_record(TREE, tmp_path / "m.zcr", durable=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.onnx").write_bytes((r.ROOT / "tests" / "data" / "digits.onnx").read_bytes())
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="platform: a folder in use can be removed on Linux")
def test_a_folder_that_was_removed_does_not_keep_from_loading(gone: Path) -> None:
    assert load_record("../m.zcr")["a"].tolist() == load_record(gone / "m.zcr")["a"].tolist()


@pytest.mark.skipif(sys.platform != "linux", reason="platform: a folder in use can be removed on Linux")
@pytest.mark.parametrize("name", IN_NO_FOLDER)
def test_a_relative_path_in_a_folder_that_was_removed_is_one_typed_error(name: str, gone: Path) -> None:
    with pytest.raises(SourceError, match=r"removed; go to another one|[Nn]o such file"):
        IN_NO_FOLDER[name](gone)
    assert sorted(path.name for path in gone.iterdir()) == ["m.zcr", "model"]
