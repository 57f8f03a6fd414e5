"""vLLM on this machine's CPU: models served from archives answer as from safetensors, and errors say what is wrong.

`./tools/vllm` runs it, in an environment that has vLLM. One process serves the models, one after the other.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zcrecord
from tools.models.causal_lms import LENGTH, MODELS, change_config, copy_with_archive
from tools.range_server import serving
from tools.worker import Worker, WorkerError, call_alone
from zcrecord.errors import RecordError

# Engines run in the process that asks for them; a small cache; no telemetry, no hub.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each rank takes a NUMA node of its own
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # ranks that share a core wait for each other's threads
OURS, THEIRS = "zcrecord", "safetensors"
PROMPTS = [[2, 5, 9, 33], list(range(40, 60)), [7]]
NEW_TOKENS = 16


Answers = list[list[float]]  # of each prompt: the tokens, and the sum of the logarithms of their probabilities


class CheckError(Exception):
    """vLLM did something else with an archive than with safetensors."""


# In the process that has vLLM.


def engine(folder: str, load_format: str, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return vLLM's engine for a model's folder, in float32: its bfloat16 kernels need what few processors have."""
    from vllm import LLM

    options = {"enforce_eager": True, "max_model_len": LENGTH, "dtype": "float32", "use_tqdm_on_load": False} | options
    return LLM(
        folder, load_format=load_format, model_loader_extra_config=extra or {}, skip_tokenizer_init=True, **options
    )


def tokens(folder: str, load_format: str, extra: dict[str, Any] | None = None, **options: Any) -> Answers:
    """Return the most probable tokens that vLLM generates for each prompt, and the logarithm of their probability."""
    from vllm import SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    try:
        answers = engine(folder, load_format, extra, **options).generate(prompts, sampling, use_tqdm=False)
        best = [answer.outputs[0] for answer in answers]
        return [[*one.token_ids, one.cumulative_logprob] for one in best]
    finally:
        cleanup_dist_env_and_memory()  # the next engine of this process starts anew


def modules_after_plugins() -> list[str]:
    """Return the load format if vLLM knows it, and the modules of zcrecord that its loading of plugins imports."""
    import vllm.model_executor.model_loader as loaders
    from vllm.plugins import load_general_plugins

    before = set(sys.modules)
    load_general_plugins()
    known = [OURS] if OURS in loaders._LOAD_FORMAT_TO_MODEL_LOADER else []
    return known + sorted(name for name in set(sys.modules) - before if name.startswith("zcrecord"))


# The checks: each yields a line for each thing that holds, or raises.


def check_registration(_: Path) -> Iterator[str]:
    """Check that vLLM finds the load format by the entry point, which imports two small modules."""
    found = call_alone("tools.vllm:modules_after_plugins")
    _expect(found == [OURS, "zcrecord.vllm", "zcrecord.vllm.loader"], f"vLLM's plugins brought {found}")
    yield "vLLM knows the load format; nothing else of zcrecord is imported"


def check_tokens(folder: Path) -> Iterator[str]:
    """Check each model from a path, and some from a server."""
    for title in MODELS:
        source = folder / _name(title)
        expected = _expected(source)
        _expect(len({token for answer in expected for token in answer[:-1]}) > 8, f"{title}: all tokens are alike")
        archive = folder / f"{source.name}-zcr"
        yield _same(expected, _tokens(archive), f"{title}: from a path")
        if title in ("Llama", "GPT-2, tied"):
            yield _same(expected, _tokens_by_http(archive), f"{title}: from an HTTP server")


def check_quantized(folder: Path) -> Iterator[str]:
    """Check a quantised model, whose configuration vLLM reads from config.json."""
    source = folder / "Llama-int8"
    _worker().call("tools.models.causal_lms:write_int8", source=str(folder / "Llama"), folder=str(source))
    expected = _expected(source)
    _expect(expected != _expected(folder / "Llama"), "quantised weights answer as the others")
    yield _same(expected, _tokens(copy_with_archive(source, folder / "Llama-int8-zcr")), "Llama, int8: from a path")


def check_catalogues(folder: Path) -> Iterator[str]:
    """Check weights in shards that a catalogue names."""
    for name in ("Llama", "GPT-2-tied"):
        source, catalogue = folder / f"{name}-zcr", folder / f"{name}-catalogue"
        shutil.copytree(source, catalogue, ignore=shutil.ignore_patterns("*.zcr"))
        record = zcrecord.load_record(source / "model.zcr")
        zcrecord.save_record(record, catalogue / "model.zcr", max_shard_size=1 << 20)
        _expect(len(list(catalogue.glob("*.zcr"))) > 2, "the catalogue has one shard")
        expected = _expected(folder / name)
        yield _same(expected, _tokens(catalogue), f"{name}: from a catalogue")
        yield _same(expected, _tokens_by_http(catalogue), f"{name}: from a catalogue on an HTTP server")


def check_heads(folder: Path) -> Iterator[str]:
    """Check output layers that config.json says are tied: stored as a tie, as equal numbers, and as others."""
    source, untied = folder / "Llama-tied", folder / "Llama"
    expected = _expected(source)
    tensors = dict(zcrecord.load_record(folder / "Llama-tied-zcr" / "model.zcr"))
    saved = folder / "head-tied"
    _worker().call("tools.models.causal_lms:save_again", source=str(source), folder=str(saved))
    _expect(len(zcrecord.load_record(saved / "model.zcr")) == len(tensors) + 1, "lm_head was left out")
    yield _same(expected, _tokens(saved), "tie_word_embeddings, and lm_head tied, as zcrecord.transformers saves it")
    head = tensors["model.embed_tokens.weight"].copy()
    equal = _folder(source, folder / "head-equal", {**tensors, "lm_head.weight": head})
    yield _same(expected, _tokens(equal), "tie_word_embeddings, and lm_head equal, not tied")
    theirs = folder / "head-of-its-own"
    shutil.copytree(untied, theirs)
    change_config(theirs, tie_word_embeddings=True)
    expected = _expected(theirs)
    _same(_expected(untied), expected, "such a head in a .safetensors")
    ours = copy_with_archive(theirs, folder / "head-of-its-own-zcr")
    yield _same(expected, _tokens(ours), "tie_word_embeddings, and lm_head with other numbers")


def check_ranks(folder: Path) -> Iterator[str]:
    """Check that two tensor-parallel ranks answer as one does."""
    expected = _expected(folder / "Llama", 2)
    yield _same(expected, _tokens(folder / "Llama-zcr", tensor_parallel_size=2), "two tensor-parallel ranks")


def check_hub(folder: Path) -> Iterator[str]:
    """Check a model of a hub, as the hub's cache has it; nothing is fetched."""
    cache = folder / "hub"
    snapshot = cache / "models--somebody--llama" / "snapshots" / ("0" * 40)
    shutil.copytree(folder / "Llama-zcr", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    with _environment(HF_HUB_CACHE=str(cache)):  # in a process that starts with that cache
        answers = call_alone("tools.vllm:tokens", folder="somebody/llama", load_format=OURS)
    yield _same(_expected(folder / "Llama"), answers, "a model in the cache of a hub")


def check_serve(folder: Path) -> Iterator[str]:
    """Check `vllm serve FOLDER --load-format zcrecord`."""
    expected = _expected(folder / "Llama")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(folder / "Llama-zcr"), "--load-format", OURS]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--max-model-len", str(LENGTH), "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    log = folder / "serve.log"
    with (
        log.open("w", encoding="utf-8") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as server,
    ):
        try:
            answers = [_completion(f"http://127.0.0.1:{port}", prompt, server) for prompt in PROMPTS]
        except CheckError as error:
            raise CheckError(f"{error}\n{log.read_text(encoding='utf-8')[-4000:]}") from None
        finally:
            server.terminate()
            server.wait(60)
    yield _same([answer[:-1] for answer in expected], answers, "vllm serve FOLDER --load-format zcrecord")


CHECKS = {
    "registration": check_registration,
    "tokens": check_tokens,
    "quantized": check_quantized,
    "catalogues": check_catalogues,
    "heads": check_heads,
    "ranks": check_ranks,
    "hub": check_hub,
    "serve": check_serve,
}


# Helpers.


def _name(title: str) -> str:
    return title.replace(", ", "-")


def _tokens(folder: Path, extra: dict[str, Any] | None = None, **options: Any) -> Answers:
    """Return vLLM's answers from an archive."""
    asked = {"folder": str(folder), "load_format": OURS, "extra": extra, **options}
    answers: Answers = _worker().call("tools.vllm:tokens", **asked)
    return answers


@functools.cache
def _expected(folder: Path, ranks: int = 1) -> Answers:
    """Return vLLM's answers from safetensors."""
    options: dict[str, Any] = {} if ranks == 1 else {"tensor_parallel_size": ranks}
    answers: Answers = _worker().call("tools.vllm:tokens", folder=str(folder), load_format=THEIRS, **options)
    return answers


@functools.cache
def _worker() -> Worker:
    """Return the process that has vLLM: importing it takes as long as serving a small model."""
    return Worker()


def _tokens_by_http(folder: Path) -> Answers:
    bare = folder.with_name(f"{folder.name}-bare")
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.zcr"))
    with serving(folder) as server:
        answers = _tokens(bare, {"url": f"{server.url}/model.zcr", "storage_options": {}, "cache": False})
        size = sum(path.stat().st_size for path in folder.glob("*.zcr"))
        _expect(0 < server.sent < 1.1 * size, f"{server.sent} bytes were sent of an archive of {size}")
    return answers


def _folder(like: Path, to: Path, tensors: dict[str, Any] | None) -> Path:
    """Return a new folder with the configuration of a model, and an archive of these tensors."""
    shutil.copytree(like, to, ignore=shutil.ignore_patterns("*.safetensors"))
    if tensors is not None:
        zcrecord.save_record(tensors, to / "model.zcr", durable=False)
    return to


def _completion(url: str, prompt: list[int], server: subprocess.Popen[bytes]) -> list[float]:
    asked = {"model": "m", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    asked |= {"detokenize": False, "return_token_ids": True}
    request = urllib.request.Request(  # of this machine
        f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 180
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found: list[float] = json.load(answer)["choices"][0]["token_ids"]
                return found
        except urllib.error.HTTPError as error:
            raise CheckError(f"vllm serve answers {error.code}: {error.read()[:400]!r}") from None
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise CheckError(f"vllm serve does not answer (status {server.poll()})") from None
            time.sleep(0.5)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckError(otherwise)


def _same(expected: Answers, found: Answers, line: str) -> str:
    """Return the line if the answers are the same."""
    _expect(expected == found, f"{line}: other tokens than from safetensors\n  {expected}\n  {found}")
    return line


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables for processes that are started in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, or the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="tools/vllm", description="vLLM over archives, on this machine.")
    parser.add_argument("--bench", action="store_true", help="load times, and bytes read by a tensor-parallel rank")
    parser.add_argument("--only", nargs="+", metavar="CHECK", choices=CHECKS, help=f"some of {', '.join(CHECKS)}")
    args, rest = parser.parse_known_args(arguments)
    if args.bench:
        from tools.bench.vllm import main as measure

        with _environment(**ENVIRONMENT):
            return measure(rest)
    if rest:
        parser.error(f"not known: {' '.join(rest)}")
    with (
        tempfile.TemporaryDirectory(prefix="zcrecord-vllm-") as folder,
        _environment(**ENVIRONMENT | ONE_THREAD),
        _worker(),
    ):
        return _run_checks(Path(folder), args.only or list(CHECKS))


def _run_checks(folder: Path, names: list[str]) -> int:
    """Write each model's folder, NAME with safetensors and NAME-zcr with an archive; run checks, return the status."""
    for title in MODELS:
        source = folder / _name(title)
        _worker().call("tools.models.causal_lms:write_model", folder=str(source), title=title)
        copy_with_archive(source, folder / f"{source.name}-zcr")
    for name, check in CHECKS.items():
        begun = time.monotonic()
        try:
            for line in check(folder) if name in names else ():
                print(f"ok  {line}  ({time.monotonic() - begun:.0f} s)", flush=True)
                begun = time.monotonic()
        except (CheckError, WorkerError, RecordError) as error:
            print(f"tools/vllm: {name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
