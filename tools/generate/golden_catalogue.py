"""The golden checkpoint: a catalogue whose tensors are split over two shards, and beside it what it must load as.

The JSON comes from the values that went in, as that of the other golden archives does.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from zcrecord import dtypes
from zcrecord.codec.conventions import CATALOGUE_TYPE
from zcrecord.codec.entries import AttributeEntry, ModuleKind, TensorLayout
from zcrecord.codec.layout import ALIGNMENT, NONE
from zcrecord.storage.files import open_sink
from zcrecord.writing.catalogue import PieceColumns, WholeRecord, WrittenShard, catalogue_tree
from zcrecord.writing.flatten import flatten
from zcrecord.writing.module_tree import ModuleTreeBuilder
from zcrecord.writing.sharing import plan_sharing
from zcrecord.writing.writers import write_plan

from .golden import f32, saved, text_of
from .golden_contents import Content, describe

FOLDER = Path("tests/data/catalogue")
FOLDERS: tuple[Path, ...] = (FOLDER,)

SQUARE, CUBE, BIAS = f32(6, 4), np.arange(12, dtype=np.int16).reshape(2, 3, 2), f32(4)
CONTENT = Content(
    {
        "layers": [{"w": SQUARE, "b": BIAS}, {"w": SQUARE}],
        "cube": CUBE,
        "empty": np.zeros((0, 3), np.int8),
        "step": 500,
        "blob": b"bytes in the catalogue",
        "betas": (0.5, 0.75),
    },
    ties=[["layers.0.w", "layers.1.w"]],
    metadata={"zcrecord.checkpoint": 1},
)
# By payload its boxes, each with the shard that it lies in: columns, unequal quarters, a whole.
BOXES: list[tuple[str, Any, list[tuple[int, Any]]]] = [
    ("b", BIAS, [(1, np.s_[:])]),
    ("w", SQUARE, [(0, np.s_[:4, :1]), (1, np.s_[:4, 1:]), (0, np.s_[4:, :2]), (1, np.s_[4:, 2:])]),
    ("cube", CUBE, [(1, np.s_[:, :1, :]), (0, np.s_[:, 1:, :])]),
]


def shard_name(number: int) -> str:
    return f"checkpoint~0123456789abcdef-{number + 1:05}-of-00002.zcr"


def shards() -> list[bytes]:
    """Return the archives that the pieces lie in, each piece a tensor of its own."""
    trees: list[dict[str, Any]] = [{}, {}]
    for name, values, boxes in BOXES:
        for number, (shard, box) in enumerate(boxes):
            trees[shard][f"{name}~{number}"] = np.ascontiguousarray(values[box])
    return [saved(tree) for tree in trees]


def pieces(found: list[bytes]) -> PieceColumns:
    """Return the places of all pieces, boxes of three axes."""
    records = [zcrecord.load_record(data) for data in found]
    file, payload, first = [], [], [0]
    origin, extent = [], []
    for name, values, boxes in BOXES:
        for number, (shard, box) in enumerate(boxes):
            file.append(shard)
            payload.append(records[shard].info(f"{name}~{number}").payload)
            slices = box if isinstance(box, tuple) else (box,)
            spans = [s.indices(n) for s, n in zip(slices, values.shape, strict=True)]
            whole = len(boxes) == 1
            origin.append([0 if whole else span[0] for span in spans] + [0] * (3 - len(spans)))
            extent.append([0 if whole else span[1] - span[0] for span in spans] + [0] * (3 - len(spans)))
        first.append(len(file))
    columns = (np.array(column, np.uint64) for column in (file, payload, first, origin, extent))
    return PieceColumns(*columns)


def catalogue(found: list[bytes]) -> bytes:
    """Return the catalogue of these shards."""
    written = []
    for number, data in enumerate(found):
        archive = zcrecord.load_record(data).archive
        index = archive.buffer[archive.header.index_offset :][: archive.header.index_size]
        sha256 = hashlib.sha256(index).digest()
        written.append(WrittenShard(shard_name(number), len(data), data[-64:], sha256, archive.index.payloads))
    tree = ModuleTreeBuilder()

    def tensor(path: tuple[str, ...], values: Any, payload: int) -> None:
        kind = dtypes.from_numpy(values.dtype)
        tree.tensor(path, TensorLayout(kind.code, kind.bits, values.shape), payload)

    tensor(("layers", "0", "w"), SQUARE, 1)
    tensor(("layers", "0", "b"), BIAS, 0)
    tensor(("layers", "1", "w"), SQUARE, 1)
    tensor(("cube",), CUBE, 2)
    tensor(("empty",), np.zeros((0, 3), np.int8), NONE)
    for key in ("step", "blob", "betas"):
        tree.attribute((key,), CONTENT.record[key])
    tree.module(("layers",), ModuleKind.LIST)
    entries = tree.entries()
    entries.metadata = [AttributeEntry(key, NONE, 0, value) for key, value in CONTENT.metadata.items()]
    whole = WholeRecord(entries, written, alignment=ALIGNMENT, kind=1, pieces=pieces(found))
    flat = flatten(catalogue_tree(whole, written))
    flat.modules[0] = flat.modules[0]._replace(type_name=CATALOGUE_TYPE)
    out = io.BytesIO()
    with open_sink(out) as sink:
        write_plan(sink, flat, plan_sharing(flat.values), alignment=ALIGNMENT, kind=1)
    return out.getvalue()


def files() -> dict[Path, str | bytes]:
    """Return the catalogue, its shards, and what it must load as."""
    found = shards()
    out: dict[Path, str | bytes] = {FOLDER / shard_name(number): data for number, data in enumerate(found)}
    about = {"about": "tensors split over shards in columns and in unequal quarters, a tie, bytes in the catalogue"}
    told = text_of(about | describe(CONTENT))
    return out | {FOLDER / "checkpoint.zcr": catalogue(found), FOLDER / "checkpoint.json": told}
