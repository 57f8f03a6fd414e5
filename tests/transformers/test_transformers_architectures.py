"""Architectures of many kinds load from archives as from safetensors: composed, tied, of experts, with buffers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_models as models
import transformers as hf

from zcrecord.transformers import from_pretrained, save_pretrained

SMALL: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
VISION = {key: value for key, value in SMALL.items() if key != "vocab_size"} | {"image_size": 16, "patch_size": 8}
STACK = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}
TWO_STACKS = {f"{half}_{key}": size for half in ("encoder", "decoder") for key, size in STACK.items()}
TWO_STACKS |= {"vocab_size": 100, "d_model": 32}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
AUDIO = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WAVES = {"conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2}
POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gemma3, text and images": lambda: hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(text_config={**GROUPED, "head_dim": 16}, vision_config=VISION, mm_tokens_per_image=4)
    ),
    "qwen2, experts": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**GROUPED, **EXPERTS, shared_expert_intermediate_size=16, num_experts=4)
    ),
    "deepseek, experts": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **GROUPED, **EXPERTS, **LATENT, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1
        )
    ),
    "gpt-oss, experts": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    ),
    "whisper": lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**TWO_STACKS, **AUDIO, **TOKENS)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**TWO_STACKS)),
    "bert, twice": lambda: hf.EncoderDecoderModel(
        hf.EncoderDecoderConfig.from_encoder_decoder_configs(hf.BertConfig(**SMALL), hf.BertConfig(**SMALL))
    ),
    "albert": lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**SMALL, embedding_size=16)),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION)),
    "clip": lambda: hf.CLIPModel(
        hf.CLIPConfig(text_config={**SMALL, "max_position_embeddings": 16}, vision_config=VISION, projection_dim=8)
    ),
    "wav2vec2": lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SMALL, **WAVES, **POSITIONS)),
}
COPIED = re.compile(r".*\.experts\..*|(.*\.)?predictions\.bias|lm_head\.bias")  # joined, or padded, by transformers


@pytest.mark.slow
@pytest.mark.exhaustive(keep=("gemma3", "whisper"))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_loads_as_from_safetensors(name: str, tmp_path: Path) -> None:
    model = models.made(ARCHITECTURES[name])
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_pretrained(model, ours, durable=False)
    model.save_pretrained(theirs)
    torch.manual_seed(1)
    loaded, told = from_pretrained(ours, type(model), output_loading_info=True)
    torch.manual_seed(1)
    expected, as_told = type(model).from_pretrained(theirs, output_loading_info=True)
    assert models.same_tensors(loaded, expected) and models.same_tensors(loaded, model)
    assert told == as_told
    if sys.platform == "linux":
        off = models.off_the_mapping(loaded, ours / "model.zcr")
        assert all(map(COPIED.fullmatch, off)) and len(off) < 5
