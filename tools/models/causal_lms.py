"""Small causal language models with random weights, as transformers saves them, and the same weights as archives.

Their sizes are those that vLLM's CPU kernels take: heads of 64 elements.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

VOCABULARY, LENGTH = 512, 256
_SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_SMALL |= {"intermediate_size": 512, "max_position_embeddings": LENGTH}
_GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LENGTH}

# By title: class of transformers' configuration, and its arguments.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {**_SMALL, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    "Llama, tied": ("LlamaConfig", {**_SMALL, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "Qwen2": ("Qwen2Config", {**_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    "Qwen2, tied": ("Qwen2Config", {**_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "GPT-2, tied": ("GPT2Config", {**_GPT2, "tie_word_embeddings": True}),
}


def write_model(folder: str, title: str) -> None:
    """Write a model's folder: config.json, and model.safetensors, which leaves out a tied output layer."""
    import torch
    import transformers

    kind, arguments = MODELS[title]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**arguments, bos_token_id=0, eos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # so that layers count for more than the last token
            small = name.endswith("bias") or any(part in name for part in ("embed", "wte", "wpe"))
            parameter.normal_(0, 0.05 if small else 1 if parameter.dim() == 1 else 0.3)
    model.save_pretrained(folder)


def save_again(source: str, folder: str) -> None:
    """Load a model from safetensors, and save it by `zcrecord.transformers`: with all names of tied weights."""
    import transformers

    from zcrecord.transformers import save_pretrained

    save_pretrained(transformers.AutoModelForCausalLM.from_pretrained(source), folder, durable=False)


def write_int8(source: str, folder: str) -> None:
    """Write a Llama with int8 linear layers, a scale to a row, as compressed-tensors has them."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for name, weight in load_file(f"{source}/model.safetensors").items():
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}
        else:
            tensors[name] = weight
    shutil.copytree(source, folder)
    save_file(tensors, f"{folder}/model.safetensors")
    form = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**form, "strategy": "channel"}}
    group["input_activations"] = {**form, "strategy": "token", "dynamic": True}
    how = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    change_config(Path(folder), quantization_config={**how, "config_groups": {"group_0": group}})


def write_large_llama(folder: str, layers: int, hidden: int) -> None:
    """Write a Llama whose size is that of its linear layers: 1.1 GB of float32 with one layer of 4096."""
    import torch
    import transformers

    heads = {"num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128}
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 43 // 16, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(
        **heads, **sizes, vocab_size=8192, max_position_embeddings=LENGTH, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="100GB")


def copy_with_archive(source: Path, folder: Path) -> Path:
    """Copy a model's folder with its weights as model.zcr instead; returns the copy."""
    from zcrecord import formats

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    formats.convert(source / "model.safetensors", folder / "model.zcr", durable=False)
    return folder


def change_config(folder: Path, **values: Any) -> None:
    """Set values of a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")
