"""Write small ONNX models of well-known architectures as torch's two exporters make them.

Weights are random, from a fixed seed; nothing is downloaded. The bytes depend on the versions of torch, transformers
and onnxscript. Inputs are named `tokens`, `mask`, `pixels` and `values`; the sizes `batch` and `sequence` are
free. Needs torch and transformers, and onnxscript for the exporter "dynamo".
"""

from __future__ import annotations

import functools
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

EXPORTERS = ("dynamo", "torchscript")
SEED = 7
OPSET = 18
BLOCK = 32  # elements of a 4-bit matrix that share a scale
BATCH, SEQUENCE = 2, 16  # of the inputs that a model is traced with
Traced = tuple[Any, dict[str, Any]]  # a module, and its inputs by name


def write_architecture(name: str, exporter: str, path: str | os.PathLike[str]) -> None:
    """Export one of ARCHITECTURES by one of EXPORTERS to a self-contained `.onnx` file."""
    import torch

    with torch.random.fork_rng(), torch.no_grad(), quiet():
        torch.manual_seed(SEED)
        module, inputs = ARCHITECTURES[name]()
        stir(module)
        free = {n: {0: "batch", 1: "sequence"} if n in ("tokens", "mask", "values") else {0: "batch"} for n in inputs}
        options: dict[str, Any] = {"dynamo": False, "dynamic_axes": free}
        if exporter == "dynamo":
            options = {"dynamo": True, "dynamic_shapes": tuple(free.values()), "verbose": False, "external_data": False}
        torch.onnx.export(
            module.eval(), tuple(inputs.values()), os.fspath(path), opset_version=OPSET, input_names=list(inputs),
            output_names=["answer"], **options,
        )  # fmt: skip
        if name == "llama-4bit":
            _quantize(Path(path))


def stir(module: Any) -> None:
    """Give normalisations and biases, which start as ones and zeros, values of their own."""
    import torch

    for value in module.state_dict().values():
        if value.dim() == 1 and value.is_floating_point():
            value.add_(torch.rand_like(value) * 0.1)


def _quantize(path: Path) -> None:
    """Replace each product with a constant matrix by one with 4-bit blocks.

    Not by ONNX Runtime's own tool, which changed its name after 1.21, and sets up logging for the whole process.
    """
    import onnx

    model = onnx.load(path)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        weight = weights.get(node.input[1]) if node.op_type == "MatMul" else None
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
        model.graph.initializer.remove(weights.pop(weight.name))
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


def _pixels() -> dict[str, Any]:
    import torch

    return {"pixels": torch.randn(BATCH, 3, 64, 64)}


def _tokens() -> dict[str, Any]:
    """Return token numbers, all of them small, and a mask that hides none."""
    import torch

    return {
        "tokens": torch.randint(0, 100, (BATCH, SEQUENCE)), "mask": torch.ones(BATCH, SEQUENCE, dtype=torch.int64),
    }  # fmt: skip


def _resnet() -> Traced:
    """Convolutions with batch normalisation."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 64, 96], depths=[1, 1, 1, 1], num_labels=40)
    return _wrapped(ResNetForImageClassification(config), "logits", "pixel_values"), _pixels()


def _vit() -> Traced:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=1,
                       intermediate_size=256, num_labels=40)  # fmt: skip
    return _wrapped(ViTForImageClassification(config), "logits", "pixel_values"), _pixels()


def _bert() -> Traced:
    """BERT with its masked language head, whose matrix is the embedding."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=256, max_position_embeddings=64)  # fmt: skip
    return _wrapped(BertForMaskedLM(config), "logits", "input_ids", "attention_mask"), _tokens()


def _llama(*, half: bool = False) -> Traced:
    """Llama, whose embedding is its output matrix, too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
                         max_position_embeddings=256)  # fmt: skip
    inner = LlamaForCausalLM(config)
    return _wrapped(inner.half() if half else inner, "logits", "input_ids", "attention_mask"), _tokens()


def _gru() -> Traced:
    """Two layers of GRU in both directions, and a classifier of each step."""
    import torch

    class Gru(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gru = torch.nn.GRU(32, 32, 2, batch_first=True, bidirectional=True)
            self.out = torch.nn.Linear(64, 32)

        def forward(self, values: Any) -> Any:
            return self.out(self.gru(values)[0])

    return Gru(), {"values": torch.randn(BATCH, SEQUENCE, 32)}


ARCHITECTURES: dict[str, Callable[[], Traced]] = {
    "resnet": _resnet, "vit": _vit, "bert": _bert,
    "llama-f16": functools.partial(_llama, half=True), "gru": _gru, "llama-4bit": _llama,
}  # fmt: skip
