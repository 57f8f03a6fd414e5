"""Checkpoints of torch.distributed.checkpoint, beside its FileSystemWriter and HuggingFaceStorageWriter.

Ranks are processes on this machine that meet by gloo; the state is that of a Llama sharded by FSDP2, with AdamW's. The
seconds of a save or load are those of the slowest rank. HuggingFaceStorageWriter saves tensors alone, so its state has
no settings of the optimizer. Memory is the peak of a rank above what it has before, its tensors among that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

from tools.bench.harness import OURS, Promise, Row, Settings, collect, figures_of, require_disk
from tools.measure import MIB
from tools.ranks import FILES, HUGGING_FACE, Ranks

AREA = "distributed"
TENSORS = "the tensors"  # a copy of them has to be held
WAYS = (OURS, FILES, HUGGING_FACE)
Figures = dict[str, float]


def model_size(settings: Settings) -> dict[str, int]:
    full, quick = (32, 384, 32000), (2, 64, 500)
    return dict(zip(("layers", "width", "vocabulary"), quick if settings.quick else full, strict=True))


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of saves, loads and views of one model; a quick run does without other numbers of ranks."""
    require_disk(settings.folder, settings.pick(5000, 100) * MIB)
    with Ranks() as ranks:
        ranks.join(2)
        (nbytes, *_) = ranks.call("build", sharded="rows", filled=True, **model_size(settings))
        expected = ranks.call("checksum")[0]
        work = f"torch.distributed.checkpoint, {nbytes / 1e9:.1f} GB, 2 ranks"
        yield from _saves(settings, ranks, work, nbytes)
        yield from _loads(settings, ranks, f"{work}: load, same layout", expected)
        ranks.call("build", sharded="columns", filled=False, **model_size(settings))
        yield from _loads(settings, ranks, f"{work}: load, rows as columns", expected)
        if not settings.quick:
            ranks.join(4)
            ranks.call("build", sharded="rows", filled=False, **model_size(settings))
            yield from _loads(settings, ranks, f"{work}: load, by 4 ranks", expected)
            ranks.join(2)
        yield from _views(settings, ranks)


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
    for peer, limit in ((HUGGING_FACE, 1.0), (FILES, 0.45)):
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
