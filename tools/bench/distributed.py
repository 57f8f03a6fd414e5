"""Checkpoints of torch.distributed.checkpoint, beside its FileSystemWriter and HuggingFaceStorageWriter.

Ranks are processes on this machine that meet by gloo; the state is that of a Llama sharded by FSDP2, with AdamW's. The
seconds of a save or load are those of the slowest rank. HuggingFaceStorageWriter saves tensors alone, so its state has
no settings of the optimizer. Memory is the peak of a rank above what it has before, its tensors among that.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness import OURS, Promise, Row, Settings, collect, figures_of, medians, require_disk, seconds_of
from tools.measure import MIB
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
CHUNKS = (2000, 500)  # tensors, and ranks that have a chunk of each
_CHUNK = (16, 4096)
_SIZE = 2 * 16 * 4096  # bytes
Figures = dict[str, float]


def model_size(settings: Settings) -> dict[str, int]:
    full, quick = (32, 384, 32000), (2, 64, 500)
    return dict(zip(("layers", "width", "vocabulary"), quick if settings.quick else full, strict=True))


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of saves, loads and views of one model, then those of a million chunks' metadata."""
    require_disk(settings.folder, settings.pick(5000, 100) * MIB)
    others = settings.pick(4, 1)
    with Ranks() as ranks:
        ranks.join(2)
        (nbytes, *_) = ranks.call("build", sharded="rows", filled=True, **model_size(settings))
        expected = ranks.call("checksum")[0]
        work = f"torch.distributed.checkpoint, {nbytes / 1e9:.1f} GB, 2 ranks"
        yield from _saves(settings, ranks, work, nbytes)
        yield from _loads(settings, ranks, f"{work}: load, same layout", expected)
        for sharded, count, layout in (("columns", 2, "rows as columns"), ("rows", others, f"by {others} ranks")):
            if count != 2:
                ranks.join(count)
            ranks.call("build", sharded=sharded, filled=False, **model_size(settings))
            yield from _loads(settings, ranks, f"{work}: load, {layout}", expected)
        ranks.join(2)
        yield from _views(settings, ranks)
    yield _metadata(settings)


def _folder(settings: Settings, way: str) -> str:
    return str(settings.folder / f"by {way}")


def _slowest(ranks: Ranks, function: str, **arguments: Any) -> Figures:
    """Call a function in all ranks; return the largest of each figure."""
    found = ranks.call(function, **arguments)
    return {figure: max(one[figure] for one in found) for figure in found[0]}


def _interleaved(
    settings: Settings, ranks: Ranks, function: str, repeats: int, **arguments: Any
) -> dict[str, list[Figures]]:
    """Return the figures of each way and repetition, after one call that is not counted; quick runs leave it out."""
    ways = {
        way: partial(_slowest, ranks, function, way=way, folder=_folder(settings, way), **arguments) for way in WAYS
    }
    collect(settings.pick(1, 0), ways)
    return collect(repeats, ways)


def _only(figure: str, samples: dict[str, list[Figures]], *peers: str) -> Figures:
    return {way: figures_of(samples[way], figure) for way in (OURS, *peers)}


def _saves(settings: Settings, ranks: Ranks, work: str, nbytes: int) -> Iterator[Row]:
    repeats = settings.pick(7, 1)
    for durable in (True, False):
        samples = _interleaved(settings, ranks, "save", repeats, durable=durable)
        what = f"{work}: save, {'fsync' if durable else 'no fsync'}"
        for peer, limit in ((FILES, 0.6), (HUGGING_FACE, 0.5)):
            seconds = _only("seconds", samples, peer)
            yield Row(AREA, what, "s", seconds, Promise("within", limit, peer), samples=repeats)
    peaks = _only("peak", samples, FILES, HUGGING_FACE)
    what = f"{work}: peak memory of a rank while it saves {nbytes / 2 / MIB:,.0f} MiB"
    yield Row(AREA, what, "B", peaks, Promise("under", 16 * MIB), samples=repeats)
    repeats = settings.pick(5, 1)
    samples = _interleaved(settings, ranks, "save_in_background", repeats)
    what = f"{work}: async_save"
    for figure, when in (("returned", "until it returns"), ("seconds", "until it is done")):
        yield Row(AREA, f"{what}, {when}", "s", _only(figure, samples, FILES, HUGGING_FACE), samples=repeats)
    peaks = {**_only("peak", samples, FILES, HUGGING_FACE), TENSORS: samples[OURS][0]["nbytes"]}
    promise = Promise("within", 1.05, TENSORS)
    yield Row(AREA, f"{what}, peak memory of a rank", "B", peaks, promise, samples=repeats)


def _loads(settings: Settings, ranks: Ranks, work: str, expected: float) -> Iterator[Row]:
    """Yield the rows of a load, once each way has brought what was saved."""
    for way in WAYS:
        ranks.call("load", way=way, folder=_folder(settings, way))
        found = ranks.call("checksum")[0]
        assert abs(found - expected) <= 1e-9 * abs(expected), f"{way} loaded something else: {found}, not {expected}"
    repeats = settings.pick(9, 1)
    samples = _interleaved(settings, ranks, "load", repeats)
    for peer, limit in ((HUGGING_FACE, 1.1), (FILES, 0.45)):
        seconds = _only("seconds", samples, peer)
        yield Row(AREA, work, "s", seconds, Promise("within", limit, peer), samples=repeats)


def _views(settings: Settings, ranks: Ranks) -> Iterator[Row]:
    """Yield the rows of a model's weights, without an optimizer, as views."""
    for way in WAYS:
        shutil.rmtree(_folder(settings, way))
    size = model_size(settings) | ({} if settings.quick else {"width": 768})
    nbytes = ranks.call("build", sharded="rows", filled=True, trained=False, **size)[0]
    ranks.call("save", way=OURS, folder=_folder(settings, OURS), durable=False)
    repeats = settings.pick(15, 1)
    samples = [_slowest(ranks, "load_views", folder=_folder(settings, OURS)) for _ in range(1 + repeats)][1:]
    gigabytes, count = nbytes / 1e9, ranks.call("count")[0]
    what = f"torch.distributed.checkpoint, {gigabytes:.1f} GB of {count} weights, 2 ranks: load_views"
    promise = Promise("under", 0.01 * max(gigabytes, 1))
    yield Row(AREA, what, "s", {OURS: figures_of(samples, "seconds")}, promise, samples=repeats)
    private = {OURS: figures_of(samples, "private")}
    yield Row(AREA, f"{what}, private memory", "B", private, Promise("under", MIB), samples=repeats)


# -- a million chunks ------------------------------------------------------------------------------------------------


def _metadata(settings: Settings) -> Row:
    """Return the row of opening a checkpoint's catalogue, and DCP's own metadata, of as many chunks."""
    tensors, each = (20, 10) if settings.quick else CHUNKS
    folder, small = settings.folder / "metadata", settings.folder / "little metadata"
    for where, size in ((folder, (tensors, each)), (small, (5, 2))):
        where.mkdir()
        call_alone("tools.bench.distributed:write_metadata", folder=str(where), tensors=size[0], ranks=size[1])
    opened = partial(call_alone, "tools.bench.distributed:open_metadata", folder=str(folder), small=str(small))
    repeats = settings.pick(3, 1)
    seconds = medians(repeats, {way: partial(opened, way=way) for way in (OURS, FILES)})
    work = f"metadata of {tensors * each:,} chunks of {tensors:,} tensors: open"
    return Row(AREA, work, "s", seconds, Promise("under", 0.01), samples=repeats)


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
        for i, (name, tensor) in enumerate(state.items())
        for rank, chunk in enumerate(tensor.chunks)
    }
    with open(Path(folder, ".metadata"), "wb") as file:
        pickle.dump(Metadata(state, planner_data=paths, storage_data=places), file)


def _rows_of(ranks: int) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    sizes = torch.Size(_CHUNK)
    chunks = [ChunkStorageMetadata(torch.Size((_CHUNK[0] * rank, 0)), sizes) for rank in range(ranks)]
    whole = torch.Size((_CHUNK[0] * ranks, _CHUNK[1]))
    return TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), whole, chunks)


def _write_catalogue(folder: Path, paths: dict[str, tuple[str, ...]], ranks: int) -> None:
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


def open_metadata(way: str, folder: str, small: str) -> float:
    """Open a checkpoint's metadata as a load does, once a small one's, and find one tensor; return the seconds."""
    from torch.distributed.checkpoint import FileSystemReader

    from zcrecord.distributed import ZcrStorageReader

    make = {OURS: ZcrStorageReader, FILES: FileSystemReader}[way]

    def find(where: str) -> None:
        chunks = next(iter(make(where).read_metadata().state_dict_metadata.values())).chunks
        assert len(chunks) > 1, "a tensor has a chunk of each rank"

    find(small)
    return seconds_of(partial(find, folder))
