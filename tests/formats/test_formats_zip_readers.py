"""A zip file that two readers would read in two ways is refused: a checkpoint, and an .npz."""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exhaustive import rounds, some
from zip_tricks import TRICKS, directory, two_directories

import zcrecord
from tools.measure import MIB
from zcrecord import FormatError, RecordError
from zcrecord.foreign.readers import MemoryReader
from zcrecord.foreign.torch import stored_members
from zcrecord.formats import convert
from zcrecord.storage.memory import Memory

GIB = 1 << 30


def checkpoint() -> bytes:
    out = io.BytesIO()
    torch.save({"w": torch.arange(3), "n": 4}, out)
    return out.getvalue()


def repacked() -> bytes:
    """A checkpoint as a zip tool packs it again: without ZIP64."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(checkpoint())) as found, zipfile.ZipFile(out, "w") as packed:
        for name in found.namelist():
            packed.writestr(name, found.read(name))
    return out.getvalue()


def arrays(save: Any = np.savez) -> bytes:
    out = io.BytesIO()
    save(out, w=np.arange(3), v=np.ones((2, 2)))
    return out.getvalue()


SOUND = {
    "torch.save": (checkpoint, "m.pt"),
    "torch.save, packed again": (repacked, "m.pt"),
    "np.savez": (arrays, "m.npz"),
    "np.savez_compressed": (lambda: arrays(np.savez_compressed), "m.npz"),
}


def read(data: bytes, name: str, folder: Path) -> zcrecord.Record:
    (folder / name).write_bytes(data)
    convert(folder / name, folder / "out.zcr", force=True, durable=False)
    return zcrecord.load_record((folder / "out.zcr").read_bytes(), verify="full")


@pytest.mark.parametrize("kind", SOUND)
def test_what_torch_numpy_and_zip_tools_write_is_read(kind: str, tmp_path: Path) -> None:
    make, name = SOUND[kind]
    assert read(make(), name, tmp_path)["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", SOUND)
@pytest.mark.parametrize("trick", TRICKS)
def test_a_file_that_can_be_read_in_two_ways_is_refused(trick: str, kind: str, tmp_path: Path) -> None:
    make, name = SOUND[kind]
    spoil, said = TRICKS[trick]
    (tmp_path / name).write_bytes(spoil(make()))
    with pytest.raises(FormatError, match=said):
        convert(tmp_path / name, tmp_path / "out.zcr", source_format=name.partition(".")[2].replace("pt", "torch"))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_trick_of_two_directories_works_on_torch_and_zipfile(tmp_path: Path) -> None:
    """Else the test above would show nothing: zipfile sees stored members, torch inflates."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("m/data.pkl", bytes(MIB))
        packed.writestr("m/version", b"3\n")
    (tmp_path / "m.pt").write_bytes(two_directories(out.getvalue()))
    with zipfile.ZipFile(tmp_path / "m.pt") as opened:
        assert {info.compress_type for info in opened.infolist()} == {zipfile.ZIP_STORED}
    assert torch._C.PyTorchFileReader(os.fspath(tmp_path / "m.pt")).get_record("data.pkl") == bytes(MIB)


def members_of_ours(path: Path) -> dict[str, tuple[int, bytes]] | None:
    """Return each member's offset and bytes, of a file that the reader of checkpoints takes; None for others."""
    data = path.read_bytes()
    try:
        members, _ = stored_members(MemoryReader(Memory(memoryview(data))))
    except RecordError:
        return None
    return {
        name.decode(errors="replace").partition("/")[2]: (m.start, data[m.start : m.start + m.nbytes])
        for name, m in members.items()
    }


def members_of_torch(path: Path) -> dict[str, tuple[int, bytes]] | None:
    try:
        reader = torch._C.PyTorchFileReader(os.fspath(path))
        return {name: (reader.get_record_offset(name), reader.get_record(name)) for name in reader.get_all_records()}
    except RuntimeError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("kind, changes", [("torch.save", [0xFF]), ("torch.save, packed again", [0xFF, 0x01, 0x08])])
def test_what_is_taken_torchs_own_reader_reads_the_same(kind: str, changes: list[int], tmp_path: Path) -> None:
    """Each byte of headers, directory and end records is changed; names may then differ, bytes may not."""
    path, whole = tmp_path / "m.pt", SOUND[kind][0]()
    path.write_bytes(whole)
    sound = members_of_ours(path)
    assert sound is not None
    assert sound == members_of_torch(path)
    inside = {i for start, data in sound.values() for i in range(start, start + len(data))}
    taken = 0
    for at in some(sorted(set(range(len(whole))) - inside), 400):
        for change in changes:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
            ours = members_of_ours(path)
            if ours is None or (theirs := members_of_torch(path)) is None:
                continue
            taken += 1
            assert sorted(ours.values()) == sorted(theirs.values()), f"byte {at}, changed by {change:#x}"
    assert taken > rounds(100)


def test_checkpoint_of_more_than_4_gib_comes_over_without_its_holes_being_read(tmp_path: Path) -> None:
    """Its last members lie behind 5 GiB of nothing, so that sizes and offsets need ZIP64."""
    path = tmp_path / "m.pt"
    hole: Any = zipfile.ZipInfo("archive/data/hole")
    hole.file_size, hole.compress_size, hole.CRC, hole.header_offset = 5 * GIB, 5 * GIB, 0, 0
    with (
        zipfile.ZipFile(io.BytesIO(checkpoint())) as found,
        path.open("wb") as file,
        zipfile.ZipFile(file, "w") as packed,
    ):
        file.write(hole.FileHeader(zip64=True))
        file.seek(5 * GIB, os.SEEK_CUR)
        packed.filelist.append(hole)
        packed.start_dir = file.tell()
        for name in found.namelist():
            packed.writestr(name, found.read(name))
    assert path.stat().st_size > 5 * GIB
    convert(path, tmp_path / "out.zcr", durable=False)
    assert zcrecord.load_record(tmp_path / "out.zcr", verify="full")["w"].tolist() == [0, 1, 2]


def test_no_array_at_all_is_an_empty_archive(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz")
    assert directory((tmp_path / "m.npz").read_bytes()) == (0, 0, 0)
    convert(tmp_path / "m.npz", tmp_path / "out.zcr")
    convert(tmp_path / "out.zcr", tmp_path / "own.npz")
    assert [len(zcrecord.load_record(tmp_path / name)) for name in ("m.npz", "out.zcr", "own.npz")] == [0, 0, 0]


def test_every_rule_of_zip_files_that_is_written_down_has_its_error() -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "schema" / "SECURITY.md").read_text(encoding="utf-8")
    code = (root / "zcrecord" / "foreign" / "zip_files.py").read_text(encoding="utf-8")
    rules = re.findall(r"^\| (Z\d+) \|.*\| (.*) \|$", page, re.MULTILINE)
    assert [rule for rule, _ in rules] == [f"Z{i}" for i in range(1, len(rules) + 1)]
    assert len(rules) == 8
    for rule, errors in rules:
        for error in re.findall("`(.*?)`", errors):
            assert error in code, f"{rule}: no error says '{error}'"


@pytest.mark.parametrize("member", ["archive/data/0", "archive/DATA/0"])
def test_a_checkpoint_has_no_member_twice_in_any_case(member: str, tmp_path: Path) -> None:
    data = io.BytesIO(repacked())
    with zipfile.ZipFile(data, "a") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file.writestr(member, b"\xff" * 24)
    assert zipfile.ZipFile(data).read(member) == b"\xff" * 24
    for use in (zcrecord.load_record, lambda path: convert(path, tmp_path / "out.zcr")):
        (tmp_path / "m.pt").write_bytes(data.getvalue())
        with pytest.raises(FormatError, match="have one name, or differ by case alone"):
            use(tmp_path / "m.pt")


@pytest.mark.parametrize("nbytes", [8, 32])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_storage_ends_where_its_member_does(nbytes: int, mmap: bool, tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(checkpoint())) as found, zipfile.ZipFile(out, "w") as packed:
        for name in found.namelist():
            data = found.read(name)
            packed.writestr(name, bytes(nbytes) if name.endswith("data/0") else data)
    (tmp_path / "m.pt").write_bytes(out.getvalue())
    with pytest.raises(RuntimeError, match="does not match expected size"):
        torch.load(tmp_path / "m.pt")
    with pytest.raises(FormatError, match=f"its storage '0' has {nbytes} bytes, not those of its tensors"):
        zcrecord.load_record(tmp_path / "m.pt", mmap=mmap)
    with pytest.raises(FormatError, match=f"its storage '0' has {nbytes} bytes"):
        convert(tmp_path / "m.pt", tmp_path / "out.zcr")
