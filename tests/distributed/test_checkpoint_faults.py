"""A checkpoint that is not there, not whole, or replaced while it is loaded; and saves that fail or were killed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import records as r
import torch
import torch.distributed.checkpoint as dcp
from forked import run_torch
from rank_checkpoints import load, refused, report, save, shards_in, written

import zcrecord
from zcrecord.distributed import ZcrStorageReader, load_views
from zcrecord.distributed.join import join_reports
from zcrecord.distributed.rank_archive import Chunk
from zcrecord.errors import (
    DestinationExistsError,
    FormatError,
    IntegrityError,
    MismatchError,
    RecordError,
    SourceError,
    SourceNotFoundError,
    TensorNotFoundError,
    UnsupportedError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
VALUES = torch.arange(12.0).reshape(3, 4)
KINDS = (torch.float32, torch.int32)


def wanted(*names: str) -> dict[str, Any]:
    return {name: torch.zeros(3, 4) for name in names or ("w",)}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Folders without a checkpoint.


@pytest.mark.parametrize("left, message", [
    ("", "no such folder; name the one that the checkpoint was saved to"),
    ("checkpoint~0123456789abcdef-00001-of-00002.zcr", "it has no checkpoint.zcr, .*; a save was begun.* here, load"),
    ("notes.txt", "is no checkpoint: it has no checkpoint.zcr, .*; no checkpoint was saved here, load an earlier one"),
])  # fmt: skip
def test_a_folder_without_a_finished_save_is_refused(tmp_path: Path, left: str, message: str) -> None:
    if left:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / left).write_bytes(b"")
    with pytest.raises(SourceNotFoundError, match=f"a: .*{message}"):
        load_views(tmp_path / "a", wanted())
    with pytest.raises(dcp.api.CheckpointException, match=f"metadata read failed: .*{message}"):
        load(wanted(), tmp_path / "a")


# Files that are damaged, missing, or others.


def another(path: Path) -> None:
    other = path.with_name("other")
    save({"w": VALUES + 1}, other)
    shutil.copy(other / shards_in(other)[0], path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "harm, kind, what",
    [
        (Path.unlink, SourceNotFoundError, "no such file; it is shard 1 of 1 of"),
        (another, IntegrityError, "is another archive than the one that the catalogue names"),
        (cut, FormatError, "is truncated"),
    ],
)
def test_an_archive_of_a_rank_that_is_wrong_is_named(
    tmp_path: Path, harm: Callable[[Path], None], kind: type[RecordError], what: str
) -> None:
    save({"w": VALUES}, tmp_path)
    harm(tmp_path / shards_in(tmp_path)[0])
    refused(kind, rf"checkpoint~[0-9a-f]+-00001-of-00001\.zcr: .*{what}", lambda: load(wanted(), tmp_path))
    with pytest.raises(kind, match=what):
        load_views(tmp_path, wanted())


def test_full_verification_alone_finds_a_damaged_chunk(tmp_path: Path) -> None:
    save({"w": VALUES, "v": VALUES + 1}, tmp_path)
    shard = tmp_path / shards_in(tmp_path)[0]
    r.damage(shard, "w")
    assert not torch.equal(load(wanted(), tmp_path)["w"], VALUES)
    message = r"checkpoint~.*: tensor 'w': its payload's digest does not match"
    refused(IntegrityError, message, lambda: load(wanted(), tmp_path, verify="full"))
    assert torch.equal(load(wanted("v"), tmp_path, verify="full")["v"], VALUES + 1)


def test_views_of_another_type_or_shape_and_a_missing_name_are_refused(tmp_path: Path) -> None:
    save({"w": VALUES, "n": 1}, tmp_path)
    for like in (torch.zeros(3, 4, dtype=torch.float16), torch.zeros(4, 3)):
        message = rf"'w': is torch\.float32 of shape \(3, 4\) in .*, and {like.dtype} of shape .* in `like`"
        with pytest.raises(MismatchError, match=message):
            load_views(tmp_path, {"w": like})
    for missing in (torch.zeros(4, 3), 5):
        with pytest.raises(TensorNotFoundError, match="'m': not in this record"):
            load_views(tmp_path, {"m": missing})


# A checkpoint that is replaced while it is loaded.


class Replacing(dcp.DefaultLoadPlanner):  # type: ignore[misc]  # mypy takes torch for Any
    """Acts after the metadata were read, or with `late` before each tensor is copied."""

    def __init__(self, act: Callable[[], None], *, late: bool = False) -> None:
        super().__init__()
        self._act, self._late = act, late

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        if not self._late:
            self._act()
        return plan

    def resolve_tensor(self, read_item: Any) -> Any:
        if self._late:
            self._act()
        return super().resolve_tensor(read_item)


def load_replaced(state: dict[str, Any], folder: Path, by: dict[str, Any], *, late: bool = False) -> dict[str, Any]:
    """Load a state while a save replaces the checkpoint."""
    planner = Replacing(lambda: save(by, folder), late=late)
    dcp.load(state, storage_reader=ZcrStorageReader(folder), planner=planner, no_dist=True)
    return state


@pytest.mark.parametrize("late", [False, True])
def test_a_load_gets_the_new_checkpoint_whole_or_the_old_one_once_its_files_are_open(
    late: bool, tmp_path: Path
) -> None:
    save({"w": VALUES, "v": VALUES}, tmp_path)
    state = load_replaced(wanted("w", "v"), tmp_path, {"v": VALUES + 1, "w": VALUES + 1}, late=late)
    want = VALUES if late else VALUES + 1
    assert torch.equal(state["w"], want) and torch.equal(state["v"], want)


@pytest.mark.parametrize("name, shape", [("v", (3, 4)), ("w", (2, 4))])
def test_a_load_that_lost_its_files_to_another_model_is_refused(tmp_path: Path, name: str, shape: Any) -> None:
    save({"w": VALUES}, tmp_path)
    message = "tensor 'w': the checkpoint was replaced by one of other chunks while it was being loaded; load it again"
    refused(SourceError, message, lambda: load_replaced(wanted(), tmp_path, {name: torch.ones(shape)}))


# Saves that fail, or were killed.


class Acting(dcp.DefaultSavePlanner):  # type: ignore[misc]  # mypy takes torch for Any
    """Acts before a tensor is written, the first by default."""

    def __init__(self, act: Callable[[], None], at: int = 0) -> None:
        super().__init__()
        self._act, self._left = act, at

    def resolve_data(self, write_item: Any) -> Any:
        self._left -= 1
        if self._left == -1:
            self._act()
        return super().resolve_data(write_item)


def full(*_: Any, **__: Any) -> None:
    raise SourceError("cannot write: No space left on device", errno=28)


def test_a_save_that_fails_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"a": VALUES, "b": VALUES}, tmp_path)
    before = contents(tmp_path)
    refused(SourceError, "No space", lambda: save({"a": VALUES + 1, "b": VALUES}, tmp_path, planner=Acting(full, 1)))
    assert contents(tmp_path) == before
    message = "tensor 'm.q': a tensor of layout torch.sparse_coo"
    refused(UnsupportedError, message, lambda: save({"m": {"q": torch.eye(3).to_sparse()}}, tmp_path))
    assert contents(tmp_path) == before
    monkeypatch.setattr("zcrecord.distributed.folder.write_catalogue", full)
    refused(SourceError, f"{tmp_path}: cannot write: No space", lambda: save({"a": VALUES + 1}, tmp_path))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("begun", [0, 1], ids=["the first checkpoint", "the next one"])
def test_of_two_saves_at_a_time_the_one_that_ends_last_is_refused(begun: int, tmp_path: Path) -> None:
    for value in range(begun):
        save({"w": VALUES + value}, tmp_path)
    kind, message = (SourceError, "was replaced") if begun else (DestinationExistsError, "was made by another saver")
    planner = Acting(lambda: save({"w": VALUES + 8}, tmp_path))
    refused(kind, rf"checkpoint\.zcr: {message} meanwhile", lambda: save({"w": VALUES}, tmp_path, planner=planner))
    assert torch.equal(load(wanted(), tmp_path, verify="full")["w"], VALUES + 8)
    assert len(os.listdir(tmp_path)) == 2


def test_archives_that_another_catalogue_there_names_stay(tmp_path: Path) -> None:
    save({"w": VALUES}, tmp_path)
    shutil.copy(tmp_path / "checkpoint.zcr", tmp_path / "best.zcr")
    save({"w": VALUES + 1}, tmp_path)
    assert zcrecord.load_record(tmp_path / "best.zcr", verify="full")["w"].sum() == VALUES.sum()
    save({"w": VALUES + 2}, tmp_path)
    assert len(os.listdir(tmp_path)) == 4


def test_files_that_a_strangers_catalogue_names_and_that_are_not_its_archives_stay(tmp_path: Path) -> None:
    save({"w": VALUES}, tmp_path)
    mine = tmp_path / shards_in(tmp_path)[0]
    mine.write_bytes(b"mine")
    save({"w": VALUES + 1}, tmp_path)
    assert mine.read_bytes() == b"mine"
    assert torch.equal(load(wanted(), tmp_path)["w"], VALUES + 1)


KILLED = """
import os, signal, sys
import torch, torch.distributed.checkpoint as dcp
from zcrecord.distributed import ZcrStorageWriter

class Dying(dcp.DefaultSavePlanner):
    def resolve_data(self, item):
        if item.index.fqn == "z":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(item)

if sys.argv[2] == "after":  # its archive is whole, and has no name yet
    from zcrecord.distributed import writer
    writer.join_reports = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    Dying = dcp.DefaultSavePlanner
import warnings; warnings.simplefilter("ignore")
state = {"w": torch.zeros(1 << 20), "z": torch.ones(3)}
dcp.save(state, storage_writer=ZcrStorageWriter(sys.argv[1]), planner=Dying(), no_dist=True)
"""


@pytest.mark.exhaustive(keep=0)
@pytest.mark.skipif(os.name != "posix", reason="platform: SIGKILL, and locks that tell the dead from the living")
@pytest.mark.parametrize("when", ["meanwhile", "after"])
def test_files_of_killed_saves_are_gone_after_the_next_and_no_others(when: str, tmp_path: Path) -> None:
    save({"w": VALUES}, tmp_path)
    assert run_torch(KILLED, tmp_path, when, ok=False).returncode == -9
    left = [name for name in os.listdir(tmp_path) if name.endswith(".zcr-scratch")]
    assert len(left) == 1 and left[0].startswith(".checkpoint.zcr.") and len(os.listdir(tmp_path)) == 3
    others = {f"{stem}-00002-of-00002.zcr" for stem in ("checkpoint~00112233445566aa", "checkpoint~2", "other")}
    for name in others:
        (tmp_path / name).write_bytes(b"nobody knows whose")
    assert torch.equal(load(wanted(), tmp_path)["w"], VALUES)
    save({"w": VALUES + 1}, tmp_path)
    kept = sorted(re.sub("~[0-9a-f]{16}-00001-", "~-00001-", name) for name in {*os.listdir(tmp_path)} - others)
    assert kept == ["checkpoint.zcr", "checkpoint~-00001-of-00001.zcr"]
    assert others < {*os.listdir(tmp_path)}


# Reports that do not fit together.


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (2, 4))],
        [((0, 0), (2, 4)), ((1, 0), (2, 4))],
        [((0, 0), (2, 4)), ((2, 0), (2, 4))],
        [((0, 0), (3, 2)), ((0, 2), (2, 2)), ((0, 2), (1, 2))],
    ],
)
def test_chunks_that_do_not_cover_a_tensor_once_are_refused(boxes: Any) -> None:
    given = report(["w"] * len(boxes), boxes, {"w": (3, 4)})
    with pytest.raises(MismatchError, match=r"tensor 'w': the \d chunks .* do not cover its shape \(3, 4\) once"):
        join_reports([given], None, None, alignment=64, digest=None)


def test_ranks_that_do_not_agree_on_a_tensor_are_refused() -> None:
    reports = [report(["w"], [((0, 0), shape)], {"w": shape}) for shape in ((3, 4), (3, 5))]
    message = r"tensor 'w': rank 1 has it as float32 of shape \(3, 5\), a rank before as float32 of shape \(3, 4\)"
    with pytest.raises(MismatchError, match=message):
        join_reports(reports, None, None, alignment=64, digest=None)


def test_chunks_of_one_tensor_with_other_shapes_or_types_are_refused(tmp_path: Path) -> None:
    class Cutting(dcp.DefaultSavePlanner):  # type: ignore[misc]  # mypy takes torch for Any
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item)[:2]

    message = r"tensor 'w': has the shape \(2, 4\), and was planned with \(3, 4\)"
    refused(MismatchError, message, lambda: save({"w": VALUES}, tmp_path, planner=Cutting()))
    halves = [(Chunk("w", (2, 4), (i, 0), (1, 4)), torch.ones(1, 4, dtype=kind)) for i, kind in enumerate(KINDS)]
    with pytest.raises(MismatchError, match=r"tensor 'w': one chunk of it is int32 of shape .*, another float32"):
        written(tmp_path, halves)


@pytest.mark.skipif(os.name != "posix", reason="platform: modes of POSIX")
def test_archives_of_ranks_have_the_mode_of_the_catalogue_that_they_are_saved_over_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": VALUES}, tmp_path)
    for name in os.listdir(tmp_path):
        (tmp_path / name).chmod(0o600)
    opened, made = os.open, []

    def noted(name: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_CREAT and "checkpoint" in str(name):
            made.append(mode)
        return opened(name, flags, mode, **more)

    monkeypatch.setattr(os, "open", noted)
    save({"w": VALUES + 1}, tmp_path)
    assert 0o600 in made
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in os.listdir(tmp_path)} == {0o600}
