"""A Llama's tokens by onnxruntime-genai, Optimum and transformers.js: from its own folder, and from a tuned archive.

    python -m tools.bench.generation

Prints the table of zcrecord/onnx/README.generation.md. The weights are random, in int4 with one matrix for embedding
and head, and in float32. The packages are those that tests/onnx/test_onnx_languages.py fetches into .cache; run that
first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tools.bench.sharing import total_pss
from tools.bench.table import quantity
from tools.models.optimum import write_tokenizer
from tools.worker import ROOT

PROCESSES, REPEATS, TOKENS, WORDS = 4, 2, 64, 32000
PRECISIONS = {"int4, tied": "int4", "float32": "fp32"}
PACKAGES = {"onnxruntime-genai": "onnxruntime-genai-*", "Optimum": "optimum-*", "transformers.js": "transformers-js-*"}
PYTHON = """
import json, sys, time
IMPORTS
count = int(sys.argv[2])
start = time.perf_counter()
MODEL
answer(1)
ready = time.perf_counter() - start
start = time.perf_counter()
tokens = list(map(int, answer(count)))
print(json.dumps([ready, count / (time.perf_counter() - start), tokens]), flush=True)
sys.stdin.read()
"""
GENAI = """
model = og.Model(sys.argv[1])
def answer(count):
    options = og.GeneratorParams(model)
    options.set_search_options(max_length=3 + count, min_length=3 + count, do_sample=False)
    generator = og.Generator(model, options)
    generator.append_tokens([30, 41, 52])
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(0)
"""
OPTIMUM = """
model = ORTModelForCausalLM.from_pretrained(sys.argv[1])
def answer(count):
    asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    return model.generate(torch.tensor([[30, 41, 52]]), **asked)[0]
"""
JAVASCRIPT = """
import { env, AutoModelForCausalLM, Tensor } from "@huggingface/transformers";
env.allowRemoteModels = false;
const [parent, name, external, count] = process.argv.slice(1);
env.localModelPath = parent;
let start = performance.now();
const options = { dtype: "fp32", use_external_data_format: external === "true" };
const model = await AutoModelForCausalLM.from_pretrained(name, options);
const row = (...numbers) => new Tensor("int64", BigInt64Array.from(numbers), [1, numbers.length]);
const answer = async (count) => {
  const asked = { max_new_tokens: count, min_new_tokens: count, do_sample: false };
  return (await model.generate({ inputs: row(30n, 41n, 52n), attention_mask: row(1n, 1n, 1n), ...asked })).tolist()[0];
};
await answer(1);
const ready = performance.now() - start;
start = performance.now();
const tokens = await answer(Number(count));
console.log(JSON.stringify([ready / 1e3, (1e3 * count) / (performance.now() - start), tokens.map(Number)]));
process.stdin.resume();
"""


def main() -> None:
    print("| runtime | weights | ready | tokens per second | memory of four processes |\n|---|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory(prefix="zcrecord-generation-", dir=os.environ.get("TMPDIR")) as scratch:
        for weights, precision in PRECISIONS.items():
            folders = _write_folders(Path(scratch, precision), precision)
            for runtime in PACKAGES:
                ways = list(folders)
                alone = [[_measure(runtime, folders[way], 1) for way in ways] for _ in range(REPEATS)]
                together = [_measure(runtime, folders[way], PROCESSES) for way in ways]
                tokens = [run[2] for runs in (*alone, together) for run in runs]
                assert all(some == tokens[0] and len(some) == 3 + TOKENS for some in tokens), "other tokens"
                ready, rate = ([[run[at] for run in runs] for runs in zip(*alone, strict=True)] for at in (0, 1))
                cells = [
                    "{:.3g} s ({:.3g} s)".format(*map(min, ready)),
                    "{:.3g} ({:.3g})".format(*map(max, rate)),
                    "{} ({})".format(*(quantity(run[3], "B") for run in together)),
                ]
                print("|", " | ".join([runtime, weights, *cells]), "|", flush=True)


def _write_folders(folder: Path, precision: str) -> dict[bool, Path]:
    """Write a Llama as all three runtimes take it; return its folder, and that of its archive under True."""
    import onnx
    import torch
    import transformers

    from zcrecord.onnx import convert, to_onnx, tune

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for value in model.parameters():
        value.data.normal_(0, 0.1) if value.dim() > 1 else value.data.normal_(1, 0.1)
    model.save_pretrained(folder / "torch")
    write_tokenizer(folder / "torch", WORDS)
    plain, served = folder / "plain", folder / "served"
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder / "torch"), "-o", str(plain)]
    builder += ["-p", precision, "-e", "cpu", "-c", str(folder / "cache")]
    builder += ["--extra_options", "shared_embeddings=true"]
    subprocess.run(builder, env=_environment("onnxruntime-genai"), check=True, capture_output=True)
    made = onnx.load(plain / "model.onnx")
    for value in (*made.graph.input, *made.graph.output):  # transformers.js wants the size of a head
        if len(dims := value.type.tensor_type.shape.dim) == 4:
            dims[3].dim_value = config.hidden_size // config.num_attention_heads
    (plain / "model.onnx.data").unlink()
    onnx.save(made, plain / "model.onnx", save_as_external_data=True, location="model.onnx_data")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(folder / "torch" / name, plain)
    convert(plain, served)
    tune(served)
    to_onnx(served, served / "model.onnx", external=True)
    for found in (plain, served):  # transformers.js looks below onnx
        (found / "onnx").mkdir()
        for path in found.glob("model.*"):
            os.link(path, found / "onnx" / path.name)
    return {True: served, False: plain}


def _measure(runtime: str, folder: Path, processes: int) -> tuple[float, float, list[int], float]:
    """Return the seconds of a process until the first token, its tokens, and the memory of so many processes."""
    with ExitStack() as stack:
        started = [stack.enter_context(_started(runtime, folder)) for _ in range(processes)]
        answers = [json.loads(process.stdout.readline()) for process in started]
        return (*answers[0], float(total_pss(process.pid for process in started)))


@contextmanager
def _started(runtime: str, folder: Path) -> Iterator[Any]:
    if runtime == "transformers.js":
        plain = str((folder / "onnx" / "model.onnx_data").exists()).lower()
        command = ["node", "--input-type=module", "-e", JAVASCRIPT, str(folder.parent), folder.name, plain]
        command.append(str(TOKENS))
    else:
        imports = "import onnxruntime_genai as og"
        if runtime == "Optimum":
            imports = "import torch\nfrom optimum.onnxruntime import ORTModelForCausalLM"
        model = GENAI if runtime == "onnxruntime-genai" else OPTIMUM
        program = PYTHON.replace("IMPORTS", imports).replace("MODEL", model)
        command = [sys.executable, "-c", program, str(folder), str(TOKENS)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=_packages(runtime), env=_environment(runtime), text=True, **pipes) as process:
        yield process
        process.kill()


def _environment(runtime: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_packages(runtime)), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}


def _packages(runtime: str) -> Path:
    """Return the folder of a runtime's packages."""
    (folder,) = (ROOT / ".cache").glob(PACKAGES[runtime])
    return folder


if __name__ == "__main__":
    main()
