"""Write folders of ONNX models as Hugging Face's Optimum exports them, from random transformers models.

`seq2seq` is T5: `encoder_model.onnx`, `decoder_model.onnx` for the first token and `decoder_with_past_model.onnx` for
all others, which has most weights of the former once more. `text-generation` is Llama: `model.onnx`, with and without a
past. File names, inputs and outputs are those of Optimum; each model's weights lie in its `.onnx_data`; beside them are
`config.json`, `generation_config.json` and tokenizer files. Nothing is downloaded. Needs torch and transformers.

Source: optimum-onnx 0.1, `exporters/onnx/model_configs.py` and `constants.py` for names.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.models.architectures import OPSET, SEED, quiet, stir

SEQ2SEQ = ("encoder_model", "decoder_model", "decoder_with_past_model")
DATA = ".onnx_data"  # suffix of the file of a model's weights
START, END = 0, 1  # tokens, the former for padding, too
_BATCH, _TOKENS, _PAST = 2, 5, 3  # of the inputs that a model is traced with


def make_model(task: str) -> Any:
    """Return the transformers model of a task, with random weights from a fixed seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    with torch.random.fork_rng(), quiet():
        torch.manual_seed(SEED)
        if task == "seq2seq":
            sizes = {"vocab_size": 200, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2}
            config = T5Config(**sizes, decoder_start_token_id=START, pad_token_id=START, eos_token_id=END)
            model = T5ForConditionalGeneration(config)
            model.shared.weight.data.mul_(0.02)  # or, being the output matrix, too, it would repeat the last token
        else:
            sizes = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                     "num_attention_heads": 2}  # fmt: skip
            config = LlamaConfig(**sizes, bos_token_id=START, eos_token_id=END, pad_token_id=START,
                                 max_position_embeddings=128, attn_implementation="eager")  # fmt: skip
            model = LlamaForCausalLM(config)
        stir(model)
    return model.eval()


def write_folder(task: str, folder: str | os.PathLike[str]) -> None:
    """Write the folder of a task's model, which must not exist."""
    model, path = make_model(task), Path(folder)
    path.mkdir(parents=True)
    for name, (module, inputs, outputs) in _parts(model, task).items():
        _export(module, inputs, outputs, path / f"{name}.onnx")
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    write_tokenizer(path, model.config.vocab_size)


def generate(make: Callable[[str], Any], question: list[int], steps: int) -> tuple[list[int], list[Any]]:
    """Return the tokens that the models of a seq2seq folder choose greedily, and their logits.

    `make` returns the session of a model by its name; `question` are tokens for the encoder.
    """
    import numpy as np

    encoder, first, later = map(make, SEQ2SEQ)
    mask = np.ones((1, len(question)), np.int64)
    states = encoder.run(None, {"input_ids": np.array([question]), "attention_mask": mask})[0]
    given = {"encoder_attention_mask": mask, "encoder_hidden_states": states}
    tokens, logits, decoder = [START], [], first
    for _ in range(steps):
        given["input_ids"] = np.array([tokens[-1:]])
        taken = {value.name: given[value.name] for value in decoder.get_inputs()}
        names = [value.name.replace("present", "past_key_values") for value in decoder.get_outputs()]
        given |= dict(zip(names, decoder.run(None, taken), strict=True))
        logits.append(given.pop("logits"))
        tokens.append(int(logits[-1][0, -1].argmax()))
        decoder = later
    return tokens[1:], logits


def _parts(model: Any, task: str) -> dict[str, tuple[Any, dict[str, Any], list[str]]]:
    """Return the module, the inputs and the names of the outputs of each .onnx."""
    import torch

    config = model.config
    tokens = torch.randint(2, config.vocab_size, (_BATCH, _TOKENS))
    mask = torch.ones_like(tokens)
    if task == "text-generation":
        heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        past = {
            f"past_key_values.{i}.{kind}": torch.randn(_BATCH, heads, _PAST, width)
            for i in range(config.num_hidden_layers) for kind in ("key", "value")
        }  # fmt: skip
        longer = torch.ones(_BATCH, _PAST + _TOKENS, dtype=torch.int64)
        places = torch.arange(_PAST, _PAST + _TOKENS).repeat(_BATCH, 1)
        inputs = {"input_ids": tokens, "attention_mask": longer, "position_ids": places, **past}
        return {"model": (_causal(model), inputs, ["logits", *_present(past)])}
    states = torch.randn(_BATCH, _TOKENS, config.d_model)
    past = {
        f"past_key_values.{i}.{side}.{kind}": torch.randn(_BATCH, config.num_heads, length, config.d_kv)
        for i in range(config.num_layers)
        for side, length in (("decoder", _PAST), ("encoder", _TOKENS))
        for kind in ("key", "value")
    }
    one = tokens[:, :1]
    first = {"encoder_attention_mask": mask, "input_ids": one, "encoder_hidden_states": states}
    later = {"encoder_attention_mask": mask, "input_ids": one, **past}
    new = [name for name in _present(past) if ".decoder." in name]
    parts = (
        (_encoder(model), {"input_ids": tokens, "attention_mask": mask}, ["last_hidden_state"]),
        (_decoder(model), first, ["logits", *_present(past)]),
        (_decoder(model, with_past=True), later, ["logits", *new]),
    )
    return dict(zip(SEQ2SEQ, parts, strict=True))


def _present(past: dict[str, Any]) -> list[str]:
    return [name.replace("past_key_values", "present") for name in past]


def _encoder(model: Any) -> Any:
    import torch

    class Encoder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model.encoder

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    return Encoder()


def _decoder(model: Any, *, with_past: bool = False) -> Any:
    """Return a module of T5's decoder; with a past, its cross attention takes the keys and values of that."""
    import torch
    from transformers import DynamicCache, EncoderDecoderCache

    class Decoder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, mask: Any, input_ids: Any, *rest: Any) -> Any:
            if with_past:
                fours = [rest[i : i + 4] for i in range(0, len(rest), 4)]
                cache = EncoderDecoderCache(DynamicCache([f[:2] for f in fours]), DynamicCache([f[2:] for f in fours]))
                cache.is_updated = dict.fromkeys(range(len(fours)), True)
                states = torch.zeros(input_ids.shape[0], mask.shape[1], model.config.d_model)  # of no effect
            else:
                cache, states = EncoderDecoderCache(DynamicCache(), DynamicCache()), rest[0]
            answer = self.inner(
                decoder_input_ids=input_ids, encoder_outputs=(states,), attention_mask=mask, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            out = [answer.logits]
            for own, cross in zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True):
                out += [own.keys, own.values]
                out += [] if with_past else [cross.keys, cross.values]
            return tuple(out)

    return Decoder()


def _causal(model: Any) -> Any:
    import torch
    from transformers import DynamicCache

    class Causal(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> Any:
            cache = DynamicCache([past[i : i + 2] for i in range(0, len(past), 2)])
            answer = self.inner(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            return (answer.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values)))

    return Causal()


def _export(module: Any, inputs: dict[str, Any], outputs: Sequence[str], path: Path) -> None:
    """Export a module by torchscript, as Optimum does, its weights to one file beside the model."""
    import onnx
    import torch

    free = {name: {0: "batch_size", **_free(name)} for name in (*inputs, *outputs)}
    with quiet(), torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
        whole = os.path.join(scratch, "model.onnx")
        torch.onnx.export(
            module.eval(), tuple(inputs.values()), whole, dynamo=False, opset_version=OPSET, input_names=list(inputs),
            output_names=list(outputs), dynamic_axes=free,
        )  # fmt: skip
        model = onnx.load(whole)
    onnx.save(model, path, save_as_external_data=True, location=path.name + "_data", size_threshold=1024)


def _free(name: str) -> dict[int, str]:
    """Return the free sizes of an input or an output, but for the batch."""
    if name.startswith(("past_key_values", "present")):
        return {2: "encoder_sequence_length" if ".encoder." in name else "past_sequence_length"}
    return {1: "encoder_sequence_length" if name.startswith("encoder_") else "sequence_length"}


def write_tokenizer(folder: Path, words: int) -> None:
    """Write the files of a tokenizer that has a word for each token, `w2` for 2 and so on."""
    vocabulary = {f"w{i}": i for i in range(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w2"}
    none = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    parts = {"added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    tokenizer: dict[str, Any] = {"version": "1.0", **none, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
