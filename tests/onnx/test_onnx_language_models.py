"""onnxruntime-genai and transformers.js run a Llama from an archive as from its .onnx, by the guide's lines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import command_line as c
import onnx_runtimes
import onnxruntime as ort
import pytest
from optimum_folders import copy_folder

PAGE = (c.ROOT / "zcrecord" / "onnx" / "README.md").read_text(encoding="utf-8")
OLD = tuple(map(int, ort.__version__.split(".")[:2])) < (1, 31)
MAPPED = "\n".join(["", "with open('/proc/self/maps') as maps:", "    print('model.zcr' in maps.read())"])
MAPPED_JS = 'console.log((await import("node:fs")).readFileSync("/proc/self/maps", "utf8").includes("model.zcr"));'

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="platform: /proc as Linux has it")


def lines(language: str, number: int = 0) -> str:
    """The guide's lines in a language."""
    (section,) = re.findall(r"^## Language models.*?\n(.*?)^## ", PAGE, re.M | re.S)
    return str(re.findall(rf"^```{language}\n(.*?)^```$", section, re.M | re.S)[number])


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as Optimum exports it, with what onnxruntime-genai wants besides, in the one to work in."""
    monkeypatch.chdir(tmp_path)
    folder = copy_folder("text-generation", tmp_path / "llama")
    (folder / "genai_config.json").write_text(json.dumps(genai_config(folder)), encoding="utf-8")
    return folder


def genai_config(folder: Path) -> dict[str, Any]:
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inputs = {name: name for name in ("input_ids", "attention_mask", "position_ids")}
    inputs |= {f"past_{what}_names": f"past_key_values.%d.{what}" for what in ("key", "value")}
    outputs = {"logits": "logits", **{f"present_{what}_names": f"present.%d.{what}" for what in ("key", "value")}}
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    decoder = {"filename": "model.onnx", "head_size": told["head_dim"], "inputs": inputs, "outputs": outputs}
    decoder |= {name: told[name] for name in names}
    model = {name: told[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")}
    model |= {"type": "llama", "context_length": told["max_position_embeddings"], "decoder": decoder}
    return {"model": model, "search": {"past_present_share_buffer": False}}


def printed(*command: str | Path, **environment: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="platform: onnxruntime-genai wants a later onnxruntime")
def test_onnxruntime_genai_chooses_the_same_tokens_from_an_archive(llama: Path) -> None:
    assert c.run_console(lines("console")) == 2
    found = []
    for folder in ("llama", "served"):
        program = lines("python").replace('"served"', repr(folder)) + MAPPED
        found.append(printed(sys.executable, "-c", program, PYTHONPATH=str(onnx_runtimes.genai())))
    (tokens, before), (again, mapped) = found
    assert tokens == again and len(tokens.split()) == 16 and tokens.startswith("30 41 52 ")
    assert (before, mapped) == ("False", "True")


@pytest.mark.needs("node", "npm")
def test_transformers_js_writes_the_same_text_from_an_archive(llama: Path) -> None:
    assert c.run_console(lines("console", 1)) == 3
    shutil.copytree("hub", "plain", ignore=shutil.ignore_patterns("model.*"))
    for name in ("model.onnx", "model.onnx_data"):
        shutil.copy(llama / name, f"plain/onnx/{name}")
    Path("node_modules").symlink_to(onnx_runtimes.transformers_js() / "node_modules")
    program = lines("js")
    plain = program.replace('"hub"', '"plain"').replace('"fp32" }', '"fp32", use_external_data_format: true }')
    found = []
    for text in (plain, program):
        Path("program.mjs").write_text(text + MAPPED_JS, encoding="utf-8")
        found.append(printed("node", "program.mjs"))
    (told, before), (again, mapped) = found
    assert told == again and len(told.split()) == 11 and told.startswith("w30 w41 w52 ")
    assert (before, mapped) == ("false", "true")
