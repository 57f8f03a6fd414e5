"""Stream a GPT-shaped ONNX model of any size up to protobuf's 2 GiB, in bounded memory.

The same size gives the same bytes on every platform. Weights are scaled by their fan-in, so outputs stay finite at any
depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from tools.models.wire import FLOAT, INT64, Nodes, Weight, check_size, norm_weights, write_model

HEAD_SIZE = 64
CONTEXT = 256
BLOCK_SHARE = 0.62  # of all weights that lie in the blocks; the rest is embedding and output matrix, as in GPT-2


@dataclass(frozen=True, slots=True)
class GptShape:
    """Width (a multiple of the head size), blocks, vocabulary."""

    width: int
    blocks: int
    vocabulary: int

    @property
    def heads(self) -> int:
        return self.width // HEAD_SIZE

    def __str__(self) -> str:
        return f"width {self.width}, {self.blocks} blocks, vocabulary {self.vocabulary}"


def plan(mib: int) -> GptShape:
    """Return the shape whose weights come to `mib` MiB, less at most one vocabulary entry; as many blocks as heads."""
    check_size(mib)
    items = mib << 18
    heads = max(1, round((BLOCK_SHARE * items / 12) ** (1 / 3) / HEAD_SIZE ** (2 / 3)))
    shape = GptShape(width=heads * HEAD_SIZE, blocks=heads, vocabulary=0)
    rest = items - sum(w.items for w in weights(shape))
    return GptShape(shape.width, shape.blocks, vocabulary=max(16, rest // (2 * shape.width)))


def weights(shape: GptShape) -> Iterator[Weight]:
    """Yield every weight in the order in which it is written, named as a PyTorch export would name it."""
    d = shape.width
    yield Weight("transformer.wte.weight", (shape.vocabulary, d), 1.0)
    yield Weight("transformer.wpe.weight", (CONTEXT, d), 0.1)
    for block in range(shape.blocks):
        prefix = f"transformer.h.{block}."
        yield from norm_weights(prefix + "ln_1", d)
        yield from _linear(prefix + "attn.c_attn", d, 3 * d)
        yield from _linear(prefix + "attn.c_proj", d, d)
        yield from norm_weights(prefix + "ln_2", d)
        yield from _linear(prefix + "mlp.c_fc", d, 4 * d)
        yield from _linear(prefix + "mlp.c_proj", 4 * d, d)
    yield from norm_weights("transformer.ln_f", d)
    yield Weight("lm_head.weight", (d, shape.vocabulary), math.sqrt(3 / d))


def _linear(name: str, fan_in: int, fan_out: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (fan_in, fan_out), math.sqrt(3 / fan_in))
    yield Weight(f"{name}.bias", (fan_out,), 0.02)


def write_gpt(sink: IO[bytes], mib: int) -> GptShape:
    """Write the model of `mib` MiB, 1 to 1900, to `sink`, which need not seek; holds one chunk of 4 MiB."""
    shape = plan(mib)
    g = Nodes()
    g.constant("constants.heads", [0, 0, shape.heads, HEAD_SIZE], INT64)
    g.constant("constants.width", [0, 0, shape.width], INT64)
    g.constant("constants.attention_scale", [HEAD_SIZE**-0.5], FLOAT)
    g.constant("constants.sqrt_half", [0.5**0.5], FLOAT)
    g.constant("constants.one", [1.0], FLOAT)
    g.constant("constants.half", [0.5], FLOAT)
    x, mask = _embed(g)
    for block in range(shape.blocks):
        x = _block(g, x, mask, f"transformer.h.{block}")
    x = _add_layer_norm(g, x, "transformer.ln_f")
    g.op("MatMul", x, "lm_head.weight", out="logits")
    value = g.helper.make_tensor_value_info
    # Shape inference cannot see that positions and mask are as long as the sequence. Told so, it knows every shape;
    # else each block has unknown ones of its own, and ONNX Runtime's memory planner compares all of them with each
    # other, 0.1 s for each session from either form.
    known = [value("positions", INT64, ["sequence"]), value(mask, FLOAT, ["sequence", "sequence"])]
    inputs = [value("input_ids", INT64, ["batch", "sequence"])]
    outputs = [value("logits", FLOAT, ["batch", "sequence", shape.vocabulary])]
    write_model(sink, "gpt", g, weights(shape), inputs=inputs, outputs=outputs, known=known)
    return shape


# -- the graph -------------------------------------------------------------------------------------------------------


def _add_linear(g: Nodes, x: str, name: str) -> str:
    y = g.op("MatMul", x, f"{name}.weight", out=f"{name}/matmul")
    return g.op("Add", y, f"{name}.bias", out=f"{name}/out")


def _add_layer_norm(g: Nodes, x: str, name: str) -> str:
    scale, bias = f"{name}.weight", f"{name}.bias"
    return g.op("LayerNormalization", x, scale, bias, out=f"{name}/out", axis=-1, epsilon=1e-5)


def _embed(g: Nodes) -> tuple[str, str]:
    """Add token and position embedding and the causal mask; return the names of both results."""
    g.constant("constants.axis0", [0], INT64)
    g.constant("constants.axis1", [1], INT64)
    sizes = g.op("Shape", "input_ids", out="sizes")
    length = g.op("Slice", sizes, "constants.axis1", g.constant("constants.two", [2], INT64), out="length")
    scalar = g.op("Squeeze", length, "constants.axis0", out="length_scalar")
    zero = g.op("Squeeze", "constants.axis0", "constants.axis0", out="zero_scalar")
    step = g.op("Squeeze", "constants.axis1", "constants.axis0", out="one_scalar")
    positions = g.op("Range", zero, scalar, step, out="positions")
    tokens = g.op("Gather", "transformer.wte.weight", "input_ids", out="transformer.wte/out", axis=0)
    places = g.op("Gather", "transformer.wpe.weight", positions, out="transformer.wpe/out", axis=0)
    square = g.op("Concat", length, length, out="mask_sizes", axis=0)
    value = g.helper.make_tensor("value", FLOAT, [1], [-1e9])
    filled = g.op("ConstantOfShape", square, out="mask_filled", value=value)
    mask = g.op("Trilu", filled, "one_scalar", out="mask", upper=1)
    return g.op("Add", tokens, places, out="transformer.embedding/out"), mask


def _block(g: Nodes, x: str, mask: str, name: str) -> str:
    """Add one transformer block: attention and MLP, each after a LayerNormalization and around a residual."""
    attended = _attention(g, _add_layer_norm(g, x, f"{name}.ln_1"), mask, f"{name}.attn")
    x = g.op("Add", x, attended, out=f"{name}.residual_1")
    hidden = _add_linear(g, _add_layer_norm(g, x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
    scaled = g.op("Mul", hidden, "constants.sqrt_half", out=f"{name}.mlp/scaled")
    erf = g.op("Erf", scaled, out=f"{name}.mlp/erf")
    shifted = g.op("Add", erf, "constants.one", out=f"{name}.mlp/shifted")
    gated = g.op("Mul", hidden, shifted, out=f"{name}.mlp/gated")
    gelu = g.op("Mul", gated, "constants.half", out=f"{name}.mlp/gelu")
    return g.op("Add", x, _add_linear(g, gelu, f"{name}.mlp.c_proj"), out=f"{name}/out")


def _attention(g: Nodes, x: str, mask: str, name: str) -> str:
    parts = g.ops("Split", _add_linear(g, x, f"{name}.c_attn"), outs=[f"{name}/{p}" for p in "qkv"], axis=-1)
    heads = [g.op("Reshape", p, "constants.heads", out=f"{p}_heads") for p in parts]
    orders = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])  # k comes out transposed, ready for q @ k
    q, k, v = (g.op("Transpose", h, out=f"{h}_t", perm=order) for h, order in zip(heads, orders, strict=True))
    scores = g.op("Mul", g.op("MatMul", q, k, out=f"{name}/qk"), "constants.attention_scale", out=f"{name}/scores")
    masked = g.op("Add", scores, mask, out=f"{name}/masked")
    weighted = g.op("MatMul", g.op("Softmax", masked, out=f"{name}/softmax", axis=-1), v, out=f"{name}/weighted")
    joined = g.op("Transpose", weighted, out=f"{name}/joined", perm=[0, 2, 1, 3])
    return _add_linear(g, g.op("Reshape", joined, "constants.width", out=f"{name}/flat"), f"{name}.c_proj")
