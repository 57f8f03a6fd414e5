"""Folders of torch.distributed.checkpoint: converted and opened as what they hold, and nothing runs that is in them."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import zcrecord
from zcrecord.archive import private_copy
from zcrecord.errors import FormatError, LimitError, RecordError, SourceNotFoundError, UnsupportedError
from zcrecord.formats import convert

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
WHOLE = torch.arange(60.0).reshape(10, 6)
ROWS = [((0, 0), (7, 6)), ((7, 0), (3, 6))]
COLUMNS = [((0, 4), (10, 2)), ((0, 0), (10, 4))]
GRID = [((0, 0), (4, 3)), ((0, 3), (4, 3)), ((4, 0), (6, 5)), ((4, 5), (6, 1))]


class Folder:
    """A folder with tensors in chunks, each chunk in a file of its own; its metadata may be changed before `save`."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self.metadata = Metadata({}, planner_data={}, storage_data={})

    def add(self, name: str, value: Any, boxes: list[Any] | None = None) -> None:
        if isinstance(value, torch.Tensor):
            boxes = [((0,) * value.dim(), tuple(value.shape))] if boxes is None else boxes
            chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in boxes]
            described = TensorStorageMetadata(TensorProperties(value.dtype), value.size(), chunks)
            self.metadata.state_dict_metadata[name] = described
            for start, size in boxes:
                box = value[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
                self._store(MetadataIndex(name, start), box.clone())
        else:
            self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
            self._store(MetadataIndex(name), value)
        self.metadata.planner_data[name] = tuple(int(key) if key.isdigit() else key for key in name.split("."))

    def _store(self, index: MetadataIndex, value: Any) -> None:
        file, number = io.BytesIO(), len(self.metadata.storage_data)
        torch.save(value, file)
        name = f"__{number % 3}_{number // 3}.distcp"
        (self.path / name).write_bytes(b"before" + file.getvalue() + b"behind")
        self.metadata.storage_data[index] = _StorageInfo(name, 6, len(file.getvalue()))

    def save(self, protocol: int = pickle.DEFAULT_PROTOCOL) -> Path:
        (self.path / ".metadata").write_bytes(pickle.dumps(self.metadata, protocol))
        return self.path


def chunked(path: Path) -> Folder:
    """Return a folder that is not saved yet, with everything that a checkpoint of many ranks has."""
    folder = Folder(path)
    for name, boxes in {"m.rows": ROWS, "m.columns": COLUMNS, "m.grid": GRID, "m.whole": None}.items():
        folder.add(name, WHOLE, boxes)
    folder.add("m.bf", WHOLE[:, 0].bfloat16(), [((0,), (6,)), ((6,), (4,))])
    folder.add("m.flag", WHOLE[:, 0] > 3, [((0,), (5,)), ((5,), (5,))])
    folder.add("m.scalar", torch.tensor(7))
    folder.add("m.empty", torch.zeros(0, 3), [])
    folder.add("optim.groups.0.lr", 0.5)
    folder.add("optim.groups.1.lr", 0.25)
    folder.add("step", 7)
    folder.add("sizes", torch.Size([2, 3]))
    folder.add("pair", (WHOLE[0], WHOLE))  # a value with tensors, in a file of its own
    return folder


EXPECTED = {
    "m": {
        **dict.fromkeys(("rows", "columns", "grid", "whole"), WHOLE), "bf": WHOLE[:, 0].bfloat16(),
        "flag": WHOLE[:, 0] > 3, "scalar": torch.tensor(7), "empty": torch.zeros(0, 3),
    },
    "optim": {"groups": [{"lr": 0.5}, {"lr": 0.25}]}, "step": 7, "sizes": (2, 3), "pair": (WHOLE[0], WHOLE),
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_chunks_are_put_together_as_save_record_would_save_the_whole(tmp_path: Path, protocol: int) -> None:
    folder = chunked(tmp_path / "run").save(protocol)
    zcrecord.save_record(EXPECTED, tmp_path / "expected.zcr")
    report = convert(folder, tmp_path / "m.zcr")
    assert report.input_bytes == sum(os.path.getsize(folder / name) for name in os.listdir(folder))
    expected = zcrecord.load_record(tmp_path / "expected.zcr")
    for found in (zcrecord.load_record(tmp_path / "m.zcr", verify="full"), zcrecord.load_record(folder)):
        assert found.names == expected.names and found.attributes == expected.attributes
        assert found.content_digest() == expected.content_digest()
    assert zcrecord.load_record(folder)["m.rows"].tolist() == WHOLE.tolist()


def test_values_that_are_tensors_are_read_from_their_own_files(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.add("w", WHOLE)
    folder.metadata.state_dict_metadata["w"] = BytesStorageMetadata()
    [(_, place)] = folder.metadata.storage_data.items()
    folder.metadata.storage_data = {MetadataIndex("w"): place}
    assert zcrecord.load_record(folder.save())["w"].tolist() == WHOLE.tolist()


def test_what_dcp_saves_is_converted_as_torchs_own_conversion_of_it(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "betas": (0.5, None), "name": "run"}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "run", thread_count=2), no_dist=True)
    dcp_to_torch_save(tmp_path / "run", tmp_path / "one.pt")
    for source in ("run", "one.pt"):
        convert(tmp_path / source, tmp_path / f"{source}.zcr")
    found, expected = (zcrecord.load_record(tmp_path / f"{name}.zcr") for name in ("run", "one.pt"))
    assert found.attributes == expected.attributes and found.content_digest() == expected.content_digest()


def test_nothing_runs_that_the_metadata_name(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = chunked(tmp_path / "run")
    folder.metadata.planner_data["step"] = Evil()
    with pytest.raises(
        FormatError, match=r"\.metadata: holds an object of posix\.mkdir, and loading that may run code"
    ):
        convert(folder.save(), tmp_path / "m.zcr")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "m.zcr").exists()


def places(folder: Folder, name: str, **fields: Any) -> None:
    for index, place in folder.metadata.storage_data.items():
        if index.fqn == name:
            for field, value in fields.items():
                setattr(place, field, value)


def drop_a_chunk(folder: Folder) -> None:
    folder.metadata.state_dict_metadata["m.rows"].chunks.pop()


def another_shape(folder: Folder) -> None:
    folder.metadata.state_dict_metadata["m.whole"].size = torch.Size([1 << 40, 6])
    folder.metadata.state_dict_metadata["m.whole"].chunks[0].sizes = torch.Size([1 << 40, 6])


def one_path(folder: Folder) -> None:
    folder.metadata.planner_data["m.rows"] = ("m", "whole")


def one_chunk_for_all(folder: Folder) -> None:
    folder.add("big", torch.zeros(1 << 18))
    index, described = MetadataIndex("big", (0,)), folder.metadata.state_dict_metadata["big"]
    for i in range(80):
        folder.metadata.state_dict_metadata[f"w{i}"] = described
        folder.metadata.storage_data[MetadataIndex(f"w{i}", (0,))] = folder.metadata.storage_data[index]


DAMAGED = r"\.metadata: no torch checkpoint, or a damaged one"
HALF = torch.complex32


def one_value_for_all(f: Folder) -> None:
    f.add("n0", list(range(100)))
    f.metadata.state_dict_metadata = {f"n{i}": BytesStorageMetadata() for i in range(9)}
    info = f.metadata.storage_data[MetadataIndex("n0")]
    info.offset, info.length = 0, (f.path / info.relative_path).stat().st_size
    (f.path / info.relative_path).write_bytes((f.path / info.relative_path).read_bytes()[6:-6])
    info.length -= 12
    f.metadata.storage_data = {MetadataIndex(name): info for name in f.metadata.state_dict_metadata}


def sized(f: Folder, size: Any, boxes: int = 0, names: int = 1) -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))] * boxes
    described = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
    f.metadata.state_dict_metadata = {f"t{i}": described for i in range(names)}


def boxes_for_all(f: Folder) -> None:
    sized(f, torch.Size([0]), 10_000, 1000)


def paths_of_one_key(f: Folder) -> None:
    sized(f, torch.Size([0]), names=2000)
    f.metadata.planner_data = {f"t{i}": (f"t{i}", *["k"] * 98) for i in range(2000)}


def zeros_in_each(f: Folder) -> None:
    f.metadata.state_dict_metadata = {}
    for i in range(2):
        f.add(f"z{i}", {"n": b"here"})
        info = f.metadata.storage_data[MetadataIndex(f"z{i}")]
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as members:
            members.writestr("a/data.pkl", b"\x80\2c__builtin__\nbytes\nJ\0\0\0\3\x85R.")  # 48 MiB
            members.writestr("a/version", b"3\n")
        (f.path / info.relative_path).write_bytes(bytes(6) + file.getvalue())
        info.length = len(file.getvalue())


def chunks_alike(f: Folder) -> None:
    info = f.metadata.storage_data[MetadataIndex("step")]
    f.metadata.storage_data |= {MetadataIndex("a", (i * sys.hash_info.modulus,)): info for i in range(200)}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "harm, kind, message",
    [
        (lambda f: os.unlink(f.path / "__0_0.distcp"), SourceNotFoundError, r"__0_0\.distcp: .*no such file"),
        (
            lambda f: os.truncate(f.path / "__0_0.distcp", 99),
            FormatError,
            r"__0_0\.distcp: tensor 'm\.rows': ends past",
        ),
        (drop_a_chunk, FormatError, r"tensor 'm\.rows': its chunks do not make it up; save it again"),
        (another_shape, FormatError, r"tensor 'm\.whole': a chunk of it is another one than \.metadata says"),
        (one_path, FormatError, "two of its values have one path"),
        (one_chunk_for_all, LimitError, r"tensor 'w0': parts of its file overlap"),
        (one_value_for_all, LimitError, r"tensor 'n1': parts of its file overlap"),
        (boxes_for_all, LimitError, r"'t\d+': its chunks are there millions of times"),
        (paths_of_one_key, LimitError, "its paths make far more modules than it has tensors"),
        (zeros_in_each, LimitError, r"tensor 'z1': its pickle asks for \d+ bytes"),
        (chunks_alike, LimitError, "a hundred chunks have the same hash"),
        (lambda f: sized(f, (2**2000,) * 30_000), FormatError, "sizes of a tensor that are no numbers, or too many"),
        (lambda f: sized(f, (2**40, "a")), FormatError, "sizes of a tensor that are no numbers, or too many"),
        (lambda f: places(f, "step", relative_path="../__0_0.distcp"), FormatError, r"'step': its file '\.\./__0_0"),
        (lambda f: places(f, "step", relative_path="/etc/passwd"), FormatError, r"'step': its file '/etc/passwd' is"),
        (lambda f: places(f, "step", offset=-9), FormatError, r"'step': ends past the end of its file"),
        (lambda f: places(f, "step", length=1.5), FormatError, DAMAGED),
        (lambda f: f.add("odd", torch.zeros(2, dtype=HALF)), UnsupportedError, r"'odd': dtype torch\.complex32"),
        (lambda f: f.add("odd", torch.ones(2).to_sparse(), []), FormatError, r"'odd': its chunks do not make it up"),
        (lambda f: setattr(f, "metadata", {"a": 1}), FormatError, DAMAGED),
    ],
)
def test_a_bad_folder_is_one_typed_error(
    tmp_path: Path, harm: Callable[[Folder], None], kind: type[RecordError], message: str
) -> None:
    folder = chunked(tmp_path / "run")
    harm(folder)
    folder.save()
    for act in (lambda: convert(tmp_path / "run", tmp_path / "m.zcr"), lambda: zcrecord.load_record(tmp_path / "run")):
        with pytest.raises(kind, match=message):
            act()
    assert not (tmp_path / "m.zcr").exists()


def test_a_name_of_a_million_tuples_is_an_error(tmp_path: Path) -> None:
    """Its hash would be worked out by recursion in C."""
    folder = chunked(tmp_path / "run")
    folder.metadata.storage_data = {MetadataIndex("here"): _StorageInfo("a.distcp", 0, 1)}
    data = pickle.dumps(folder.metadata, 2).replace(b"X\4\0\0\0here", b")" + b"\x85" * 1_000_000)
    (tmp_path / "run" / ".metadata").write_bytes(data)
    with pytest.raises(FormatError, match="a tuple where a str is due"):
        zcrecord.load_record(tmp_path / "run")


def test_paths_too_deep_or_with_odd_places_are_not_followed(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    for name, path in {"a": (7,) * 100_000, "b": (2**61, "b"), "c": (-1, "c"), "d": ("m", "d")}.items():
        folder.add(name, 5)
        folder.metadata.planner_data[name] = path
    assert zcrecord.load_record(folder.save()).tree() == {"a": 5, "b": 5, "c": 5, "m": {"d": 5}}


def test_chunks_of_any_size_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their limit is 1 GiB and 64 times the size of all files, not that of `.metadata` alone."""
    folder, value = Folder(tmp_path / "run"), torch.arange(1 << 18).reshape(512, 512)
    folder.add("w", value, [((0, 0), (256, 512)), ((256, 0), (256, 512))])
    record, whole = zcrecord.load_record(folder.save()), tmp_path / "whole.zcr"
    zcrecord.save_record({"w": value}, whole)
    monkeypatch.setattr(private_copy, "_APART_FREE", 0)
    assert torch.equal(record.torch()["w"], value)
    assert record.content_digest() == zcrecord.load_record(whole).content_digest()


def test_chunks_that_repeat_an_element_are_put_together(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.add("w", torch.ones(4, 1).expand(4, 50), [((0, 0), (2, 50)), ((2, 0), (2, 50))])
    for info in folder.metadata.storage_data.values():
        file = io.BytesIO()
        torch.save(torch.ones(1).expand(2, 50), file)
        (folder.path / info.relative_path).write_bytes(bytes(6) + file.getvalue())
        info.length = len(file.getvalue())
    assert (zcrecord.load_record(folder.save())["w"] == 1).all()


def test_metadata_cut_or_changed_anywhere_are_typed_errors_or_other_values(tmp_path: Path) -> None:
    folder = chunked(tmp_path / "run").save()
    octets, chance = (folder / ".metadata").read_bytes(), np.random.default_rng(5)
    changed = [octets[: int(at)] for at in chance.integers(0, len(octets), 60)]
    for at, value in zip(chance.integers(0, len(octets), 240), chance.integers(0, 256, 240), strict=True):
        changed.append(octets[: int(at)] + bytes([int(value)]) + octets[int(at) + 1 :])
    refused = 0
    for data in changed:
        (folder / ".metadata").write_bytes(data)
        try:
            dict(zcrecord.load_record(folder))
        except RecordError:
            refused += 1
    assert 150 < refused < len(changed)
