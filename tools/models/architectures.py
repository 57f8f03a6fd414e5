"""Write ONNX models of well-known architectures as torch's two exporters make them.

    python -m tools.models.architectures --model bert --exporter dynamo --size real bert.onnx

Weights are random, from a fixed seed; nothing is downloaded. The bytes depend on the versions of torch, transformers
and onnxscript. Inputs are named `tokens`, `mask`, `pixels`, `mel` and `values`; the sizes `batch` and `sequence` are
free. Needs torch and transformers, and onnxscript for the exporter "dynamo".
"""

from __future__ import annotations

import argparse
import functools
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

EXPORTERS = ("dynamo", "torchscript")
SEED = 7
OPSET = 18
BLOCK = 32  # elements of a 4-bit matrix that share a scale
IMAGE = 112  # pixels to a side, at the real size
BATCH, SEQUENCE = 2, 16  # of the inputs that a model is traced with
Size = Literal["small", "real"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: its module at both sizes, and inputs to trace it with.

    Attributes:
        title: its name in tables, at the size "real".
        build: returns the module of a size, and its inputs by name.
        quantized: True if the matrices of the exported model become 4-bit MatMulNBits.
    """

    title: str
    build: Callable[[Size], tuple[Any, dict[str, Any]]]
    quantized: bool = False


def write_architecture(name: str, exporter: str, size: Size, path: str | os.PathLike[str]) -> None:
    """Export one of ARCHITECTURES by one of EXPORTERS to a self-contained `.onnx` file.

    Raises:
        KeyError: there is no such architecture. Errors of torch's exporters pass unchanged.
    """
    import torch

    how = ARCHITECTURES[name]
    with torch.random.fork_rng(), torch.no_grad(), quiet():
        torch.manual_seed(SEED)
        module, inputs = how.build(size)
        stir(module)
        export = _dynamo if exporter == "dynamo" else _torchscript
        export(module.eval(), inputs, os.fspath(path))
        if how.quantized:
            _quantize(Path(path))


def _dynamo(module: Any, inputs: dict[str, Any], path: str) -> None:
    import torch

    torch.onnx.export(
        module, tuple(inputs.values()), path, dynamo=True, verbose=False, external_data=False, opset_version=OPSET,
        input_names=list(inputs), output_names=["answer"], dynamic_shapes=tuple(_free(inputs).values()),
    )  # fmt: skip


def _torchscript(module: Any, inputs: dict[str, Any], path: str) -> None:
    import torch

    torch.onnx.export(
        module, tuple(inputs.values()), path, dynamo=False, opset_version=OPSET,
        input_names=list(inputs), output_names=["answer"], dynamic_axes=_free(inputs),
    )  # fmt: skip


def _free(inputs: dict[str, Any]) -> dict[str, dict[int, str]]:
    """Return the names of the free sizes of each input: its batch, and the sequence of those that have one."""
    with_sequence = {"tokens", "mask", "values"}
    return {name: {0: "batch", 1: "sequence"} if name in with_sequence else {0: "batch"} for name in inputs}


def stir(module: Any) -> None:
    """Give normalisations and biases, which start as ones and zeros, values of their own."""
    import torch

    for value in module.state_dict().values():
        if value.dim() == 1 and value.is_floating_point():
            value.add_(torch.rand_like(value) * 0.1)


def _quantize(path: Path) -> None:
    """Replace each product with a constant matrix by one with 4-bit blocks, as ONNX Runtime's own tool does.

    Written here, since that tool changed its name after 1.21, and its import sets up logging for the whole process.
    """
    import onnx

    model = onnx.load(path)
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        weight = held.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None or len(weight.dims) != 2 or weight.dims[0] % BLOCK:
            continue
        blocks, scales = _four_bits(onnx.numpy_helper.to_array(weight))
        names = [f"{weight.name}_Q4", f"{weight.name}_scales"]
        parts = [onnx.numpy_helper.from_array(a, n) for a, n in zip((blocks, scales), names, strict=True)]
        options = {"bits": 4, "block_size": BLOCK, "accuracy_level": 4}
        node.CopyFrom(onnx.helper.make_node(
            "MatMulNBits", [node.input[0], *names], list(node.output), node.name, domain="com.microsoft",
            K=weight.dims[0], N=weight.dims[1], **options,
        ))  # fmt: skip
        model.graph.initializer.remove(held.pop(weight.name))
        model.graph.initializer.extend(parts)
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, path)


def _four_bits(weight: Any) -> tuple[Any, Any]:
    """Return a matrix's columns in blocks of 4-bit integers around 8, two to a byte, and the blocks' scales."""
    import numpy as np

    blocks = weight.T.reshape(weight.shape[1], -1, BLOCK)
    scales = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(7)
    whole = (np.rint(blocks / scales) + 8).astype(np.uint8)
    return whole[:, :, ::2] | whole[:, :, 1::2] << 4, scales.reshape(-1)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' progress and advice to themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# -- modules ---------------------------------------------------------------------------------------------------------


@functools.cache
def _wrapper() -> Any:
    """Return a class of modules that call another and give one tensor of its answer."""
    import torch

    class Wrapped(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, inner: Any, answer: str, arguments: tuple[str, ...]) -> None:
            super().__init__()
            self.inner = inner
            self.answer = answer
            self.arguments = arguments

        def forward(self, first: Any, second: Any = None) -> Any:
            # No *arguments: torch.export would want the free sizes in a tuple of their own.
            given = (first,) if second is None else (first, second)
            return getattr(self.inner(**dict(zip(self.arguments, given, strict=True))), self.answer)

    return Wrapped


def _wrapped(inner: Any, answer: str, *arguments: str) -> Any:
    inner.config.return_dict = True
    return _wrapper()(inner, answer, arguments)


def _pixels(side: int) -> dict[str, Any]:
    import torch

    return {"pixels": torch.randn(BATCH, 3, side, side)}


def _tokens(*, mask: bool = True) -> dict[str, Any]:
    """Return token numbers, all of them small, and a mask that hides none."""
    import torch

    tokens = {"tokens": torch.randint(0, 100, (BATCH, SEQUENCE))}
    return tokens | ({"mask": torch.ones(BATCH, SEQUENCE, dtype=torch.int64)} if mask else {})


def _resnet(size: Size) -> tuple[Any, dict[str, Any]]:
    """ResNet-50: convolutions with batch normalisation."""
    from transformers import ResNetConfig, ResNetForImageClassification

    small: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [32, 64, 64, 96], "depths": [1, 1, 1, 1]}
    config = ResNetConfig(**(small if size == "small" else {}), num_labels=1000 if size == "real" else 40)
    inner = ResNetForImageClassification(config)
    return _wrapped(inner, "logits", "pixel_values"), _pixels(64 if size == "small" else IMAGE)


def _vit(size: Size) -> tuple[Any, dict[str, Any]]:
    """ViT-S/16."""
    from transformers import ViTConfig, ViTForImageClassification

    side, width, layers = (64, 64, 2) if size == "small" else (IMAGE, 384, 12)
    config = ViTConfig(
        image_size=side, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32 // 2,
        intermediate_size=4 * width, num_labels=40 if size == "small" else 1000,
    )  # fmt: skip
    return _wrapped(ViTForImageClassification(config), "logits", "pixel_values"), _pixels(side)


def _bert(size: Size) -> tuple[Any, dict[str, Any]]:
    """BERT of four layers with its masked language head, whose matrix is the embedding."""
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"num_hidden_layers": 4}
    if size == "small":
        sizes = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                 "intermediate_size": 256, "max_position_embeddings": 64}  # fmt: skip
    return _wrapped(BertForMaskedLM(BertConfig(**sizes)), "logits", "input_ids", "attention_mask"), _tokens()


def _t5(size: Size) -> tuple[Any, dict[str, Any]]:
    """The encoder of T5-small."""
    from transformers import T5Config, T5EncoderModel

    sizes: dict[str, Any] = {}
    if size == "small":
        sizes = {"vocab_size": 500, "d_model": 64, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 2}
    inner = T5EncoderModel(T5Config(**sizes))
    return _wrapped(inner, "last_hidden_state", "input_ids", "attention_mask"), _tokens()


def _whisper(size: Size) -> tuple[Any, dict[str, Any]]:
    """The encoder of Whisper base, for one second of sound."""
    import torch
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    width, layers, heads, positions = (64, 2, 2, 20) if size == "small" else (512, 6, 8, 50)
    config = WhisperConfig(
        d_model=width, encoder_layers=layers, encoder_attention_heads=heads, encoder_ffn_dim=4 * width,
        max_source_positions=positions,
    )  # fmt: skip
    mel = torch.randn(BATCH, config.num_mel_bins, 2 * positions)
    return _wrapped(WhisperEncoder(config), "last_hidden_state", "input_features"), {"mel": mel}


def _llama_module(size: Size) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816,
                             "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4}  # fmt: skip
    if size == "small":
        sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    config = LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False, max_position_embeddings=256)
    return LlamaForCausalLM(config)


def _llama(size: Size) -> tuple[Any, dict[str, Any]]:
    """Llama in half precision, whose embedding is its output matrix, too."""
    return _wrapped(_llama_module(size).half(), "logits", "input_ids", "attention_mask"), _tokens()


def _llama_4_bits(size: Size) -> tuple[Any, dict[str, Any]]:
    """The same Llama in single precision; its matrices become 4-bit afterwards."""
    return _wrapped(_llama_module(size), "logits", "input_ids", "attention_mask"), _tokens()


def _gru(size: Size) -> tuple[Any, dict[str, Any]]:
    """Two layers of GRU in both directions, and a classifier of each step."""
    import torch

    width = 32 if size == "small" else 768

    class Gru(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gru = torch.nn.GRU(width, width, 2, batch_first=True, bidirectional=True)
            self.out = torch.nn.Linear(2 * width, width)

        def forward(self, values: Any) -> Any:
            return self.out(self.gru(values)[0])

    return Gru(), {"values": torch.randn(BATCH, SEQUENCE, width)}


ARCHITECTURES = {
    "resnet": Architecture("ResNet-50", _resnet),
    "vit": Architecture("ViT-S/16", _vit),
    "bert": Architecture("BERT of 4 layers", _bert),
    "t5": Architecture("T5 small's encoder", _t5),
    "whisper": Architecture("Whisper base's encoder", _whisper),
    "llama-f16": Architecture("Llama of 4 layers in f16", _llama),
    "gru": Architecture("GRU", _gru),
    "llama-4bit": Architecture("Llama of 4 layers in 4 bits", _llama_4_bits, quantized=True),
}


def main(arguments: list[str] | None = None) -> int:
    """Write a model as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the file to write")
    parser.add_argument("--model", choices=ARCHITECTURES, required=True)
    parser.add_argument("--exporter", choices=EXPORTERS, default=EXPORTERS[0])
    parser.add_argument("--size", choices=("small", "real"), default="small")
    args = parser.parse_args(arguments)
    write_architecture(args.model, args.exporter, args.size, args.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
