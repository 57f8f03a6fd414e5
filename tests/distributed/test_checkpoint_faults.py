"""A checkpoint that is not there, not whole, or replaced while it is loaded; and saves that fail or were killed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_checkpoints import load, refused, save, shards_in

import zcrecord
from zcrecord.codec.index import PAYLOAD
from zcrecord.distributed import ZcrStorageReader, ZcrStorageWriter, load_views
from zcrecord.distributed.join import joined
from zcrecord.distributed.rank_archive import RankReport, WholeTensor
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
from zcrecord.writing.catalogue import WrittenShard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
VALUES = torch.arange(12.0).reshape(3, 4)


def wanted() -> dict[str, Any]:
    return {"w": torch.zeros(3, 4)}


# Folders without a checkpoint.


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SourceNotFoundError, match="none: no such folder; name the one that the checkpoint was saved to"
    ):
        load_views(tmp_path / "none", wanted())


@pytest.mark.parametrize("left, begun", [("checkpoint~0123456789abcdef-00001-of-00002.zcr", "a save was begun"),
                                         ("notes.txt", "no checkpoint was saved")])  # fmt: skip
def test_a_folder_in_which_no_save_was_finished_is_none(tmp_path: Path, left: str, begun: str) -> None:
    (tmp_path / left).write_bytes(b"")
    with pytest.raises(
        SourceNotFoundError, match=f"is no checkpoint: it has no checkpoint.zcr, .*; {begun}.* here, load"
    ):
        load_views(tmp_path, wanted())


def test_the_error_of_a_load_says_why_there_is_no_metadata(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=r"metadata read failed: .*is no checkpoint: it has no check"):
        load(wanted(), tmp_path)
    assert "Falling back" in caplog.text, "DCP logs what it does"


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


def test_full_verification_finds_a_damaged_chunk_and_no_other_level_looks(tmp_path: Path) -> None:
    save({"w": VALUES, "v": VALUES + 1}, tmp_path)
    shard = tmp_path / shards_in(tmp_path)[0]
    octets = bytearray(shard.read_bytes())
    octets[zcrecord.load_record(shard).info("w").offset or 0] ^= 1
    shard.write_bytes(octets)
    assert not torch.equal(load(wanted(), tmp_path)["w"], VALUES)
    what = r"checkpoint~.*: tensor 'w': its payload's digest does not match"
    refused(IntegrityError, what, lambda: load(wanted(), tmp_path, verify="full"))
    assert torch.equal(load({"v": torch.zeros(3, 4)}, tmp_path, verify="full")["v"], VALUES + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32])
def test_a_tensor_of_another_type_is_refused_not_converted(tmp_path: Path, dtype: Any) -> None:
    save({"w": VALUES}, tmp_path)
    what = rf"tensor 'w': is torch\.float32 in the checkpoint, and {dtype} in the state dict; load it as it is"
    refused(MismatchError, what, lambda: load({"w": torch.zeros(3, 4, dtype=dtype)}, tmp_path))
    with pytest.raises(MismatchError, match=rf"tensor 'w': is torch\.float32 of shape \(3, 4\) in .*and {dtype}"):
        load_views(tmp_path, {"w": torch.zeros(3, 4, dtype=dtype)})


def test_a_tensor_of_another_shape_and_a_missing_name_are_refused(tmp_path: Path) -> None:
    save({"w": VALUES, "n": 1}, tmp_path)
    with pytest.raises(
        MismatchError, match=r"\(3, 4\) in the checkpoint, and torch\.float32 of shape \(4, 3\) in `like`"
    ):
        load_views(tmp_path, {"w": torch.zeros(4, 3)})
    with pytest.raises(TensorNotFoundError, match="'v': not in this record"):
        load_views(tmp_path, {"v": torch.zeros(4, 3)})
    with pytest.raises(TensorNotFoundError, match="'m': not in this record"):
        load_views(tmp_path, {"m": 5})


# A checkpoint that is replaced while it is loaded.


class Replacing(dcp.DefaultLoadPlanner):  # type: ignore[misc]  # mypy takes torch for Any
    """Saves another checkpoint over the one that is being loaded, once its metadata were read."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self._act()
        return plan


def test_a_load_that_lost_its_files_takes_the_new_checkpoint_whole(tmp_path: Path) -> None:
    save({"w": VALUES, "v": VALUES}, tmp_path)
    state = {"w": torch.zeros(3, 4), "v": torch.zeros(3, 4)}
    planner = Replacing(lambda: save({"v": VALUES + 1, "w": VALUES + 1}, tmp_path))
    dcp.load(state, storage_reader=ZcrStorageReader(tmp_path), planner=planner, no_dist=True)
    assert torch.equal(state["w"], VALUES + 1) and torch.equal(state["v"], VALUES + 1)


@pytest.mark.parametrize("name, shape", [("v", (3, 4)), ("w", (2, 4))])
def test_a_load_that_lost_its_files_to_another_model_is_refused(tmp_path: Path, name: str, shape: Any) -> None:
    save({"w": VALUES}, tmp_path)
    planner = Replacing(lambda: save({name: torch.ones(shape)}, tmp_path))
    reader = ZcrStorageReader(tmp_path)
    what = r"tensor 'w': the checkpoint was replaced by one of other chunks while it was being loaded; load it again"
    refused(SourceError, what, lambda: dcp.load(wanted(), storage_reader=reader, planner=planner, no_dist=True))


def test_a_load_whose_files_are_open_gets_the_old_checkpoint_whole(tmp_path: Path) -> None:
    class Late(dcp.DefaultLoadPlanner):  # type: ignore[misc]  # mypy takes torch for Any
        def resolve_tensor(self, read_item: Any) -> Any:
            save({"w": VALUES + 1, "v": VALUES + 1}, tmp_path)
            return super().resolve_tensor(read_item)

    save({"w": VALUES, "v": VALUES}, tmp_path)
    state = {"w": torch.zeros(3, 4), "v": torch.zeros(3, 4)}
    dcp.load(state, storage_reader=ZcrStorageReader(tmp_path), planner=Late(), no_dist=True)
    assert torch.equal(state["w"], VALUES) and torch.equal(state["v"], VALUES)


def test_a_record_that_lost_its_files_says_so(tmp_path: Path) -> None:
    save({"w": VALUES}, tmp_path)
    record = zcrecord.load_record(tmp_path / "checkpoint.zcr")
    save({"w": VALUES + 1}, tmp_path)
    with pytest.raises(
        SourceNotFoundError, match=r"no such file; .*checkpoint\.zcr.* was replaced since .*load it again"
    ):
        record["w"]


# Saves that fail, or were killed.


class Breaking(dcp.DefaultSavePlanner):  # type: ignore[misc]  # mypy takes torch for Any
    """Fails at its second tensor."""

    calls = 0

    def resolve_data(self, write_item: Any) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise OSError(28, "No space left on device")
        return super().resolve_data(write_item)


def test_a_save_that_fails_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    save({"a": VALUES, "b": VALUES}, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    with pytest.raises(dcp.api.CheckpointException, match="No space left"):
        save({"a": VALUES + 1, "b": VALUES}, tmp_path, planner=Breaking())
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_a_tensor_that_no_archive_holds_is_named_by_the_save(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    refused(
        UnsupportedError,
        "tensor 'm.q': a tensor of layout torch.sparse_coo",
        lambda: save({"m": {"q": sparse}}, tmp_path),
    )
    assert os.listdir(tmp_path) == []


def test_a_commit_that_fails_removes_what_the_ranks_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": VALUES}, tmp_path)
    before = sorted(os.listdir(tmp_path))

    def full(*_: Any, **__: Any) -> None:
        raise SourceError("cannot write: No space left on device", errno=28)

    with monkeypatch.context() as patched:
        patched.setattr("zcrecord.distributed.folder.write_catalogue", full)
        refused(SourceError, f"{tmp_path}: cannot write: No space", lambda: save({"w": VALUES + 1}, tmp_path))
    assert sorted(os.listdir(tmp_path)) == before
    assert torch.equal(load(wanted(), tmp_path)["w"], VALUES)


class Meanwhile(dcp.DefaultSavePlanner):  # type: ignore[misc]  # mypy takes torch for Any
    """Saves another checkpoint to the folder before the first tensor is written."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._acts = [act]

    def resolve_data(self, write_item: Any) -> Any:
        while self._acts:
            self._acts.pop()()
        return super().resolve_data(write_item)


@pytest.mark.parametrize("begun", [0, 1], ids=["the first checkpoint", "the next one"])
def test_of_two_saves_at_a_time_the_one_that_ends_last_is_refused(begun: int, tmp_path: Path) -> None:
    for value in range(begun):
        save({"w": VALUES + value}, tmp_path)
    kind, what = (SourceError, "was replaced") if begun else (DestinationExistsError, "was made by another saver")
    planner = Meanwhile(lambda: save({"w": VALUES + 8}, tmp_path))
    refused(kind, rf"checkpoint\.zcr: {what} meanwhile", lambda: save({"w": VALUES}, tmp_path, planner=planner))
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
    writer.joined = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
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
    command = [sys.executable, "-c", KILLED, str(tmp_path), when]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode == -9
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


def report(names: list[str], boxes: list[tuple[Any, Any]], whole: dict[str, Any], file: str = "a") -> RankReport:
    rows = np.zeros(len(names), PAYLOAD)
    rows["nbytes"] = [4 * int(np.prod(extent)) for _, extent in boxes]
    rows["offset"] = np.cumsum([0, *rows["nbytes"]])[:-1]
    shard = WrittenShard(f"{file}.zcr", 0, bytes(64), bytes(32), rows)
    number = np.arange(len(names))
    origin, extent = (np.array([box[k] for box in boxes], np.int64) for k in (0, 1))
    tensors = {name: WholeTensor(18, 32, shape) for name, shape in whole.items()}
    return RankReport(shard, names, number, number, origin, extent, tensors, {})


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
        joined([given], None, None, alignment=64, digest=None)


def test_ranks_that_do_not_agree_on_a_tensor_are_refused() -> None:
    one = report(["w"], [((0, 0), (3, 4))], {"w": (3, 4)})
    other = report(["w"], [((0, 0), (3, 5))], {"w": (3, 5)}, "b")
    what = r"tensor 'w': rank 1 has it as float32 of shape \(3, 5\), a rank before as float32 of shape \(3, 4\)"
    with pytest.raises(MismatchError, match=what):
        joined([one, other], None, None, alignment=64, digest=None)


def test_chunks_of_one_tensor_with_other_types_are_refused(tmp_path: Path) -> None:
    class Mixing(dcp.DefaultSavePlanner):  # type: ignore[misc]  # mypy takes torch for Any
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item)[:2]

    what = r"tensor 'w': has the shape \(2, 4\), and was planned with \(3, 4\)"
    refused(MismatchError, what, lambda: save({"w": VALUES}, tmp_path, planner=Mixing()))
    assert ZcrStorageWriter.validate_checkpoint_id(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="platform: modes of POSIX")
def test_archives_of_ranks_have_the_mode_of_the_catalogue_that_they_are_saved_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start: they are never open to more people."""
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
