"""Models of transformers from archives, and from safetensors by transformers itself: time, private memory, saves.

GPT-2 has its embedding tied, and its weights in float32; the Llama is in bfloat16. Memory is measured in a process of
its own, where a small model was loaded before. The model on the meta device, which has no weights, is what both ways
make first.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.cold import drop_cached
from tools.bench.harness import OURS, Promise, Row, Settings, collect, require_disk
from tools.measure import MIB, memory
from tools.worker import Worker, call_alone

__all__ = ["answer_seconds", "load_growth", "load_seconds", "save_seconds", "write_models"]

AREA = "transformers"
THEIRS, META = "transformers, safetensors", "the model on the meta device"
MODELS = {"gpt2": "GPT-2", "llama": "Llama, bfloat16"}
BESIDE = 8 * MIB  # of private memory, beside transformers' own


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of both models, loaded warm and cold, in one file and in shards, and saved."""
    require_disk(settings.folder, settings.pick(5000, 100) * MIB)
    names = list(MODELS)[-settings.pick(2, 1) :]
    with Worker() as worker:
        given: dict[str, Any] = {"folder": str(settings.folder), "names": names, "quick": settings.quick}
        medians = partial(_medians, worker, settings.pick(1, 0))
        sizes = worker.call("tools.bench.transformers:write_models", **given)
        os.sync()
        for name in names:
            yield from _loads(settings, medians, name, sizes[name])
        given = {"folder": _folder(settings, "llama"), "model": "llama", "out": str(settings.folder / "saved")}
        repeats = settings.pick(5, 1)
        seconds = medians("save_seconds", repeats, (OURS, THEIRS), **given)
        work = _work("llama", sizes["llama"])
        yield Row(AREA, f"{work}: save, no fsync", "s", seconds, samples=repeats)


def _loads(settings: Settings, medians: Callable[..., dict[str, float]], name: str, nbytes: int) -> Iterator[Row]:
    work, within = _work(name, nbytes), Promise("within", 1.1, THEIRS)
    for shards in (False, True):
        given = {"folder": _folder(settings, name, shards=shards), "model": name}
        told = f"{work}, in shards of 64 MB" if shards else work
        repeats = settings.pick(15, 1)
        seconds = medians("load_seconds", repeats, (OURS, THEIRS, META), **given)
        yield Row(AREA, f"{told}: load", "s", seconds, within, samples=repeats)
    given = {"folder": _folder(settings, name), "model": name}
    yield _private(work, {**given, "small": _folder(settings, f"small-{name}")})
    repeats = settings.pick(5, 1)
    seconds = medians("answer_seconds", repeats, (OURS, THEIRS), **given)
    yield Row(AREA, f"{work}, not in the page cache: load and answer 16 tokens", "s", seconds, within, samples=repeats)


def _work(name: str, nbytes: int) -> str:
    return f"transformers, {MODELS[name]}, {nbytes / MIB:,.0f} MiB"


def _folder(settings: Settings, name: str, *, shards: bool = False) -> str:
    return str(settings.folder / (f"{name}-shards" if shards else name))


def _medians(
    worker: Worker, uncounted: int, target: str, repeats: int, ways: tuple[str, ...], **given: Any
) -> dict[str, float]:
    """Return the median seconds of each way, after so many calls each that are not counted."""

    def seconds(way: str) -> float:
        return float(worker.call(f"tools.bench.transformers:{target}", way=way, **given))

    calls = {way: partial(seconds, way) for way in ways}
    collect(uncounted, calls)
    return {way: statistics.median(found) for way, found in collect(repeats, calls).items()}


def _private(work: str, given: dict[str, str]) -> Row:
    target = "tools.bench.transformers:load_growth"
    values = {way: float(call_alone(target, way=way, **given)) for way in (OURS, THEIRS, META)}
    promise = Promise("under", values[THEIRS] + BESIDE)
    return Row(AREA, f"{work}: private memory before the first write", "B", values, promise)


# -- in the worker ---------------------------------------------------------------------------------------------------


def write_models(folder: str, names: list[str], quick: bool) -> dict[str, int]:
    """Write each model as both ways save it, whole and in shards, and small ones; return the bytes of the weights."""
    import torch
    import transformers as hf

    from zcrecord.transformers import save_pretrained

    def made(name: str, small: bool) -> Any:
        if name == "gpt2":
            return hf.GPT2LMHeadModel(hf.GPT2Config(**({"n_embd": 48, "n_layer": 2} if small else {})))
        wide = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 500}
        large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "vocab_size": 32000}
        config = hf.LlamaConfig(**(wide if small else large), num_attention_heads=8, head_dim=64)
        return hf.LlamaForCausalLM(config).to(torch.bfloat16)

    _quiet()
    sizes = {}
    for small in (True, False):
        for name in names:
            torch.manual_seed(3)
            model = made(name, small or quick)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.02)
            sizes[name] = sum(p.nbytes for p in model.parameters())
            where = Path(folder, f"small-{name}" if small else name)
            for at, size in ((where, None), (Path(f"{where}-shards"), "64KB" if quick else "64MB")):
                save_pretrained(model, at, max_shard_size=size)
                model.save_pretrained(at, max_shard_size=size or "50GB")
    return sizes


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _load(way: str, model: str, folder: str) -> Any:
    import torch
    import transformers as hf

    from zcrecord.transformers import from_pretrained

    kind = {"gpt2": hf.GPT2LMHeadModel, "llama": hf.LlamaForCausalLM}[model]
    if way == OURS:
        return from_pretrained(folder, kind)
    if way == THEIRS:
        return kind.from_pretrained(folder)
    with torch.device("meta"):
        return kind(hf.AutoConfig.from_pretrained(folder))


def load_seconds(way: str, model: str, folder: str) -> float:
    """Load a model one way; return the seconds."""
    _quiet()
    _load(way, model, folder)  # so that nobody finds the processor's caches full of what was another's
    gc.collect()
    start = time.perf_counter()
    kept = _load(way, model, folder)  # freed after the clock is read
    seconds = time.perf_counter() - start
    del kept
    return seconds


def load_growth(way: str, model: str, folder: str, small: str) -> int:
    """Return by how much private memory grows by loading a model one way, once a small one was loaded so."""
    _quiet()
    _load(way, model, small)
    gc.collect()
    before = memory()
    kept = _load(way, model, folder)
    after = memory()
    del kept
    assert before is not None and after is not None and before.private is not None and after.private is not None
    return after.private - before.private


def answer_seconds(way: str, model: str, folder: str) -> float:
    """Drop a model's files from the page cache, load it and have it answer; return the seconds."""
    import torch

    _quiet()
    for path in Path(folder).iterdir():
        drop_cached(str(path))
    gc.collect()
    start = time.perf_counter()
    kept = _load(way, model, folder)
    with torch.no_grad():
        kept(torch.arange(16)[None])
    seconds = time.perf_counter() - start
    del kept
    return seconds


def save_seconds(way: str, model: str, folder: str, out: str) -> float:
    """Load a model one way and save it so, over the last that was saved; return the seconds of the save."""
    from zcrecord.transformers import save_pretrained

    _quiet()
    kept = _load(way, model, folder)
    for parameter in kept.parameters():
        parameter.data = parameter.data.clone()  # as after training: in memory
    where = Path(out, "ours" if way == OURS else "theirs")
    start = time.perf_counter()
    if way == OURS:
        save_pretrained(kept, where, durable=False)
    else:
        kept.save_pretrained(where)
    return time.perf_counter() - start
