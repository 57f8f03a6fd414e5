"""A generated Python module holds the archive as a constant: views lie in it, and loading copies no payload."""

from __future__ import annotations

import ast
import importlib.util
from collections import deque
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from tools.measure import most_allocated
from zcrecord import LimitError
from zcrecord.embed import python
from zcrecord.embed.plan import plan

MIB = 1 << 20
TREE: dict[str, Any] = {
    **{d.name: r.filled(d, (3, 5)) for d in r.NUMERIC},
    "every byte": np.arange(256, dtype=np.uint8).repeat(256) ^ np.tile(np.arange(256, dtype=np.uint8), 256),
    "f_order": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "rank0": np.array(1.5),
    "strings": np.array(["a", "bc"]),
    "nothing": np.zeros((0, 3)),
    "blob": b"attribute",
    "m": {"blobs": [b"x", b"yz"], "rate": 0.5},
}


def written(source: Any, folder: Path, **options: Any) -> Path:
    """Write the module of an archive; return where it is."""
    planned = plan(source, **options)
    folder.mkdir(exist_ok=True)
    for name, pieces in python.files(planned).items():
        (folder / name).write_bytes(b"".join(pieces))
    return folder / f"{planned.stem}.py"


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def saved(tree: Any, path: Path, **options: Any) -> Path:
    zcrecord.save_record(tree, path, durable=False, **options)
    return path


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(TREE, tmp_path_factory.mktemp("embed") / "model.zcr", metadata={"by": "us"})


@pytest.fixture(scope="module")
def module(archive: Path) -> ModuleType:
    return imported(written(archive, archive.parent / "out"))


def test_module_loads_what_was_saved_and_its_constant_is_the_archive(archive: Path, module: ModuleType) -> None:
    assert type(module.ARCHIVE) is bytes and archive.read_bytes() == module.ARCHIVE
    record = module.load(verify="full")
    r.assert_same(record.tree(), TREE)
    assert record.metadata == {"by": "us"}
    assert list(module.load(names="m.*")) == [] and module.load(names="rank0")["rank0"] == 1.5
    assert {name: (record.info(name).dtype.name, record.info(name).shape) for name in record} == module.TENSORS
    assert list(module.TENSORS) == list(record)


def test_every_view_lies_in_the_constant_and_is_read_only(module: ModuleType) -> None:
    start = r.address(np.frombuffer(module.ARCHIVE, np.uint8))
    record = module.load()
    for name, value in record.items():
        info = record.info(name)
        if isinstance(value, np.ndarray) and info.nbytes:
            assert r.address(value) == start + info.offset, name
            assert value.flags.aligned and not value.flags.writeable, name


def test_stub_offers_what_the_module_does(archive: Path, module: ModuleType) -> None:
    stub = ast.parse((archive.parent / "out" / "model.pyi").read_text(encoding="utf-8"))
    names = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")}
    assert names | {node.name for node in stub.body if isinstance(node, ast.FunctionDef)} == set(module.__all__)


def test_names_of_strangers_break_nothing(tmp_path: Path) -> None:
    names = ('"""', "'", "\\", "{x}", "%s", "a\nb", "\x1b[31m", "é", "\u202e", "\\N{DEL}")
    tree = {name: np.arange(3) for name in names}
    path = written(saved(tree, tmp_path / "7 odd'\"names.zcr"), tmp_path / "out")
    module = imported(path)
    assert path.read_text(encoding="utf-8").isascii() and path.stem.isidentifier()
    assert list(module.TENSORS) == list(tree)
    r.assert_same(module.load().tree(), tree)


def test_what_is_left_out_is_not_in_the_constant(tmp_path: Path) -> None:
    shared = np.arange(1000.0)
    tree = {"encoder": {"w": shared, "again": shared}, "decoder": {"w": np.random.default_rng(0).random(MIB)}}
    archive = saved(tree, tmp_path / "m.zcr")
    module = imported(written(archive, tmp_path / "out", select="encoder.*"))
    assert len(module.ARCHIVE) < 32768
    assert list(module.TENSORS) == ["encoder.w", "encoder.again"]
    record = module.load()
    r.assert_same(record.tree(), {"encoder": tree["encoder"]})
    assert r.address(record["encoder.w"]) == r.address(record["encoder.again"])


def test_the_same_archive_gives_the_same_module_wherever_it_lies(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "model.zcr").write_bytes(archive.read_bytes())
    again = written(tmp_path / "model.zcr", tmp_path / "out")
    assert again.read_bytes() == (archive.parent / "out" / "model.py").read_bytes()


def test_what_no_compiler_would_take_is_refused_with_the_other_way(archive: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(python, "MAX_CONSTANT", archive.stat().st_size - 1)
    with pytest.raises(LimitError, match=r"model\.zcr: \d+ bytes are too many .* a package resource"):
        python.files(plan(archive))
    python.files(plan(archive, select="rank0"))


@pytest.mark.slow
def test_module_is_made_in_little_memory_and_its_constant_is_loaded_in_less_than_64_kib(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tree = {f"layer{i}": {"w": rng.random((MIB,), np.float32) - 0.5} for i in range(4)}
    planned = plan(saved(tree, tmp_path / "large.zcr"))

    def pieces(keep: int) -> object:
        return deque(islice(python.files(planned)["large.py"], keep or None), keep)

    assert most_allocated(lambda: pieces(8)) > 16 * MIB, "8 pieces would not be noticed"
    assert most_allocated(lambda: pieces(0)) < 16 * MIB
    module = imported(written(tmp_path / "large.zcr", tmp_path / "out"))
    list(module.load(names="layer0").values())  # imports what is imported on the way
    assert most_allocated(lambda: zcrecord.load_record(bytearray(module.ARCHIVE))) > 16 * MIB, "nor would a copy"
    assert most_allocated(lambda: list(module.load().values())) < 64 << 10
