"""Checkpoints of torch.distributed.checkpoint, beside its FileSystemWriter and HuggingFaceStorageWriter.

Ranks are processes on this machine that meet by gloo; the state is that of a Llama sharded by FSDP2, with AdamW's. The
seconds of a save or load are those of the slowest rank. HuggingFaceStorageWriter saves tensors alone, so its state has
no settings of the optimizer. Memory is the peak of a rank above what it has before, its tensors among that.
"""

from __future__ import annotations

import pickle
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness import OURS, Promise, Row, Settings, collect, require_disk
from tools.measure import MIB, begin_peak, peak_rss
from tools.ranks import FILES, HUGGING_FACE, Ranks
from tools.worker import call_alone
from zcrecord import dtypes
from zcrecord.codec.index import PAYLOAD
from zcrecord.codec.layout import ALIGNMENT, front_header
from zcrecord.distributed.folder import CheckpointFolder
from zcrecord.distributed.join import joined
from zcrecord.distributed.rank_archive import RankReport, WholeTensor
from zcrecord.writing.catalogue import WrittenShard

AREA = "distributed"
TENSORS = "the tensors"  # a copy of them has to be held
WAYS = (OURS, FILES, HUGGING_FACE)
MODEL = {"layers": 32, "width": 384, "vocabulary": 32000}
SMALL = {"layers": 2, "width": 64, "vocabulary": 500}
CHUNKS = (2000, 500)  # tensors, and ranks that have a chunk of each
_CHUNK = (16, 4096)
_SIZE = 2 * 16 * 4096  # bytes


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of saves, loads and views of one model, then those of a million chunks' metadata."""
    require_disk(settings.folder, settings.pick(5000, 100) * MIB)
    others = settings.pick(4, 1)
    with Ranks() as ranks:
        ranks.join(2)
        nbytes = _build(ranks, settings, "rows", filled=True)
        expected = ranks.call("checksum")[0]
        work = f"torch.distributed.checkpoint, {nbytes / 1e9:.1f} GB, 2 ranks"
        yield from _saves(settings, ranks, work, nbytes)
        yield from _loads(settings, ranks, f"{work}: load, same layout", expected)
        for sharded, count, layout in (("columns", 2, "rows as columns"), ("rows", others, f"by {others} ranks")):
            if count != 2:
                ranks.join(count)
            _build(ranks, settings, sharded, filled=False)
            yield from _loads(settings, ranks, f"{work}: load, {layout}", expected)
        ranks.join(2)
        yield from _views(settings, ranks)
    yield from _metadata(settings)


def _build(ranks: Ranks, settings: Settings, sharded: str, *, filled: bool) -> int:
    size = SMALL if settings.quick else MODEL
    nbytes: int = ranks.call("build", sharded=sharded, filled=filled, **size)[0]
    return nbytes


def _folder(settings: Settings, way: str) -> str:
    return str(settings.folder / f"by {way}")


def _slowest(ranks: Ranks, function: str, told: list[dict[str, float]], **arguments: Any) -> float:
    """Call a function in all ranks; return the slowest one's seconds, and keep the largest of each figure in `told`."""
    found = ranks.call(function, **arguments)
    told.append({figure: max(one[figure] for one in found) for figure in found[0]})
    return told[-1]["seconds"]


def _interleaved(
    settings: Settings, ranks: Ranks, function: str, repeats: int, **arguments: Any
) -> dict[str, dict[str, float]]:
    """Return for each way the median of each figure, after one call that is not counted; quick runs leave it out."""
    told: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    ways: dict[str, Callable[[], float]] = {
        way: partial(_slowest, ranks, function, told[way], way=way, folder=_folder(settings, way), **arguments)
        for way in WAYS
    }
    uncounted = settings.pick(1, 0)
    collect(uncounted + repeats, ways)
    return {
        way: {figure: statistics.median(one[figure] for one in each[uncounted:]) for figure in each[0]}
        for way, each in told.items()
    }


def _only(figure: str, told: dict[str, dict[str, float]], *peers: str) -> dict[str, float]:
    return {way: told[way][figure] for way in (OURS, *peers)}


def _saves(settings: Settings, ranks: Ranks, work: str, nbytes: int) -> Iterator[Row]:
    repeats = settings.pick(7, 1)
    limits = ((FILES, 0.6), (HUGGING_FACE, 0.5))
    for durable in (True, False):
        told = _interleaved(settings, ranks, "save", repeats, durable=durable)
        what = f"{work}: save, {'fsync' if durable else 'no fsync'}"
        for peer, limit in limits:
            yield Row(AREA, what, "s", _only("seconds", told, peer), Promise("within", limit, peer), samples=repeats)
    peaks = _only("peak", told, FILES, HUGGING_FACE)
    what = f"{work}: peak memory of a rank while it saves {nbytes / 2 / MIB:,.0f} MiB"
    yield Row(AREA, what, "B", peaks, Promise("under", 16 * MIB), samples=repeats)
    repeats = settings.pick(5, 1)
    told = _interleaved(settings, ranks, "save_in_background", repeats)
    what = f"{work}: async_save"
    for figure, when in (("returned", "until it returns"), ("seconds", "until it is done")):
        yield Row(AREA, f"{what}, {when}", "s", _only(figure, told, FILES, HUGGING_FACE), samples=repeats)
    peaks = {**_only("peak", told, FILES, HUGGING_FACE), TENSORS: told[OURS]["nbytes"]}
    promise = Promise("within", 1.05, TENSORS)
    yield Row(AREA, f"{what}, peak memory of a rank", "B", peaks, promise, samples=repeats)


def _loads(settings: Settings, ranks: Ranks, work: str, expected: float) -> Iterator[Row]:
    """Yield the rows of a load, once each way has brought what was saved."""
    for way in WAYS:
        ranks.call("load", way=way, folder=_folder(settings, way))
        found = ranks.call("checksum")[0]
        assert abs(found - expected) <= 1e-9 * abs(expected), f"{way} loaded something else: {found}, not {expected}"
    repeats = settings.pick(9, 1)
    told = _interleaved(settings, ranks, "load", repeats)
    for peer, limit in ((HUGGING_FACE, 1.1), (FILES, 0.45)):
        seconds = _only("seconds", told, peer)
        yield Row(AREA, work, "s", seconds, Promise("within", limit, peer), samples=repeats)


def _views(settings: Settings, ranks: Ranks) -> Iterator[Row]:
    """Yield the rows of a model's weights, without an optimizer, as views."""
    for way in WAYS:
        shutil.rmtree(_folder(settings, way))
    size = SMALL if settings.quick else {**MODEL, "width": 768}
    nbytes = ranks.call("build", sharded="rows", filled=True, trained=False, **size)[0]
    ranks.call("save", way=OURS, folder=_folder(settings, OURS), durable=False)
    told: list[dict[str, float]] = []
    repeats = settings.pick(15, 1)
    for _ in range(1 + repeats):
        _slowest(ranks, "load_views", told, folder=_folder(settings, OURS))
    medians = {figure: statistics.median(one[figure] for one in told[1:]) for figure in told[0]}
    gigabytes, count = nbytes / 1e9, ranks.call("count")[0]
    what = f"torch.distributed.checkpoint, {gigabytes:.1f} GB of {count} weights, 2 ranks: load_views"
    promise = Promise("under", 0.01 * max(gigabytes, 1))
    yield Row(AREA, what, "s", {OURS: medians["seconds"]}, promise, samples=repeats)
    private = {OURS: medians["private"]}
    yield Row(AREA, f"{what}, private memory", "B", private, Promise("under", MIB), samples=repeats)


# -- a million chunks ------------------------------------------------------------------------------------------------


def _metadata(settings: Settings) -> Iterator[Row]:
    """Yield the rows of opening a checkpoint's catalogue, and DCP's own metadata, of as many chunks."""
    tensors, each = (20, 10) if settings.quick else CHUNKS
    folder, small = settings.folder / "metadata", settings.folder / "little metadata"
    for where, size in ((folder, (tensors, each)), (small, (5, 2))):
        where.mkdir()
        call_alone("tools.bench.distributed:write_metadata", folder=str(where), tensors=size[0], ranks=size[1])
    work = f"metadata of {tensors * each:,} chunks of {tensors:,} tensors"
    repeats = settings.pick(3, 1)
    told: dict[str, list[dict[str, float]]] = {OURS: [], FILES: []}

    def seconds(way: str) -> float:
        given = {"way": way, "folder": str(folder), "small": str(small)}
        told[way].append(call_alone("tools.bench.distributed:open_metadata", **given))
        return told[way][-1]["seconds"]

    collect(repeats, {way: partial(seconds, way) for way in told})
    found = {
        figure: {way: statistics.median(one[figure] for one in each) for way, each in told.items()}
        for figure in ("seconds", "peak")
    }
    yield Row(AREA, f"{work}: open", "s", found["seconds"], Promise("under", 0.01), samples=repeats)
    yield Row(AREA, f"{work}: open, peak memory", "B", found["peak"], samples=repeats)


def write_metadata(folder: str, tensors: int, ranks: int) -> None:
    """Write a catalogue, and DCP's metadata, of tensors by rows of as many ranks; no rank's archive is there."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    names = [f"model.layers.{i // 8}.part{i % 8}.weight" for i in range(tensors)]
    paths = {name: tuple(name.split(".")) for name in names}
    _write_catalogue(Path(folder), paths, ranks)
    state = {name: _rows_of(ranks) for name in names}
    places = {
        MetadataIndex(name, chunk.offsets, rank): _StorageInfo(f"__{rank}_0.distcp", i * _SIZE, _SIZE)
        for i, (name, told) in enumerate(state.items())
        for rank, chunk in enumerate(told.chunks)
    }
    with open(Path(folder, ".metadata"), "wb") as file:
        pickle.dump(Metadata(state, planner_data=paths, storage_data=places), file)


def _rows_of(ranks: int) -> Any:
    """Return DCP's metadata of one tensor."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    sizes = torch.Size(_CHUNK)
    chunks = [ChunkStorageMetadata(torch.Size((_CHUNK[0] * rank, 0)), sizes) for rank in range(ranks)]
    whole = torch.Size((_CHUNK[0] * ranks, _CHUNK[1]))
    return TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), whole, chunks)


def _write_catalogue(folder: Path, paths: dict[str, tuple[str, ...]], ranks: int) -> None:
    """Write the catalogue that joins the reports of all ranks."""
    kind, count = dtypes.by_name["bfloat16"], len(paths)
    whole = WholeTensor(kind.code, kind.bits, (_CHUNK[0] * ranks, _CHUNK[1]))
    rows = np.zeros(count, PAYLOAD)
    rows["nbytes"], rows["offset"] = _SIZE, np.arange(count) * _SIZE
    trailer = front_header(b"", ALIGNMENT, ALIGNMENT, count * _SIZE).encode()
    numbers, extent = np.arange(count), np.tile(np.array(_CHUNK, np.int64), (count, 1))
    reports = [
        RankReport(
            WrittenShard(f"checkpoint~{0:016x}-{rank + 1:05}-of-{ranks:05}.zcr", 0, trailer, bytes(32), rows),
            list(paths), numbers, numbers + rank * count, np.tile([rank * _CHUNK[0], 0], (count, 1)), extent,
            dict.fromkeys(paths, whole), {},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    tree = joined(reports, paths, None, alignment=ALIGNMENT, digest="xxh3")
    CheckpointFolder(folder, durable=False).commit(tree, 1, {})


def open_metadata(way: str, folder: str, small: str) -> dict[str, float]:
    """Open a checkpoint's metadata as a load does, once a small one's, and find one tensor; tell seconds and memory."""
    from torch.distributed.checkpoint import FileSystemReader

    from zcrecord.distributed import ZcrStorageReader

    make = {OURS: ZcrStorageReader, FILES: FileSystemReader}[way]
    for where in (small, folder):
        before, start = begin_peak(), time.perf_counter()
        told = make(where).read_metadata()
        chunks = len(next(iter(told.state_dict_metadata.values())).chunks)
        seconds = time.perf_counter() - start
        assert chunks > 1, "a tensor has a chunk of each rank"
    return {"seconds": seconds, "peak": float((peak_rss() or 0) - before)}
