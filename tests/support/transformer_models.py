"""Small models of transformers with random weights, no two tensors alike; and what two models have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 100
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2() -> Any:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def bert() -> Any:
    return BertForMaskedLM(BertConfig(**SMALL, intermediate_size=64))


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64)).to(torch.bfloat16)


def t5() -> Any:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, num_layers=2, decoder_start_token_id=0))


def mixtral() -> Any:
    """A mixture of experts, which transformers has in one tensor and checkpoints have each by itself."""
    return MixtralForCausalLM(
        MixtralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    )


MAKERS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "bert": bert, "llama": llama, "t5": t5}


def made(make: Callable[[], Any]) -> Any:
    """Return a model with random weights, biases and norms included; the same at each call."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        model = make().eval()
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def requests(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.arange(24).reshape(2, 12) % VOCABULARY
    more = {"decoder_input_ids": tokens[:, :5] + 1} if model.config.is_encoder_decoder else {}
    return {"input_ids": tokens, **more}


def same_tensors(model: Any, other: Any) -> bool:
    """Return True if two models have the same tensors bit for bit, and the same ties."""
    ours, theirs = model.state_dict(), other.state_dict()
    parameters = [[name for name, _ in each.named_parameters()] for each in (model, other)]  # a tied one once
    equal = (ours[n].dtype == t.dtype and torch.equal(ours[n], t) for n, t in theirs.items() if n in ours)
    return ours.keys() == theirs.keys() and all(equal) and parameters[0] == parameters[1]


def off_the_mapping(model: Any, archive: Path) -> list[str]:
    """Return the names of a model's parameters that do not lie on mappings of an archive; on Linux alone."""
    assert sys.platform == "linux"
    lines = [
        line.split()
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if line.endswith(str(archive))
    ]
    ends = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    return [n for n, p in model.named_parameters() if not any(a <= p.data_ptr() < b for a, b in ends)]
