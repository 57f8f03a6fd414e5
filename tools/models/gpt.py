"""Stream a GPT-shaped ONNX model of any size up to protobuf's 2 GiB, in bounded memory, to a file or a pipe.

    python -m tools.models.gpt --mib 512 gpt.onnx
    python -m tools.models.gpt --mib 512 - | onnx2zc - gpt.zcr

The same size gives the same bytes on every platform: the weights come from the raw words of a bit generator, whose
stream numpy keeps stable, and not from a distribution, whose stream it does not. No two tensors hold equal bytes, so
nothing that shares equal payloads gains by it. Weights are scaled by their fan-in, so outputs stay finite at any depth.

The protobuf wire format is written here and not by `onnx.helper`, which would need the whole model in memory twice.
Only the nodes and the graph's inputs and outputs, a few KB, are built with it.

Source: field numbers from onnx.proto (ModelProto 1, 2, 7, 8; GraphProto 1, 2, 5, 11, 12, 13; TensorProto 1, 2, 8, 9).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

__all__ = ["MAX_MIB", "GptShape", "plan", "write_gpt"]

MAX_MIB = 1900  # leaves protobuf's limit of 2 GiB for one message well clear
HEAD_SIZE = 64
CONTEXT = 256
BLOCK_SHARE = 0.62  # of all weights that lie in the blocks; the rest is embedding and output matrix, as in GPT-2
CHUNK_ITEMS = 1 << 20  # 4 MiB of float32: all the memory the weights ever take
SEED = 2026
OPSET = 17
IR_VERSION = 8
FLOAT, INT64 = 1, 7  # onnx.TensorProto.DataType
VARINT, LENGTH = 0, 2  # protobuf's wire types


@dataclass(frozen=True, slots=True)
class GptShape:
    """The sizes that define one model: width (a multiple of the head size), blocks, vocabulary."""

    width: int
    blocks: int
    vocabulary: int

    @property
    def heads(self) -> int:
        """Attention heads per block."""
        return self.width // HEAD_SIZE


@dataclass(frozen=True, slots=True)
class Weight:
    """One float32 initializer to be: values lie in [center - spread, center + spread)."""

    name: str
    shape: tuple[int, ...]
    spread: float
    center: float = 0.0

    @property
    def items(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


def plan(mib: int) -> GptShape:
    """Return the shape whose weights come to `mib` MiB, less at most one vocabulary entry.

    As many blocks as heads, which is GPT-2 small's shape (12 and 12 at 768) and near its larger siblings'.

    Raises:
        ValueError: `mib` is not from 1 to 1900.
    """
    if not 1 <= mib <= MAX_MIB:
        raise ValueError(f"size {mib} MiB is not from 1 to {MAX_MIB}: protobuf ends a model at 2 GiB")
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
        yield from _layer_norm(prefix + "ln_1", d)
        yield from _linear(prefix + "attn.c_attn", d, 3 * d)
        yield from _linear(prefix + "attn.c_proj", d, d)
        yield from _layer_norm(prefix + "ln_2", d)
        yield from _linear(prefix + "mlp.c_fc", d, 4 * d)
        yield from _linear(prefix + "mlp.c_proj", 4 * d, d)
    yield from _layer_norm("transformer.ln_f", d)
    yield Weight("lm_head.weight", (d, shape.vocabulary), math.sqrt(3 / d))


def _layer_norm(name: str, width: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (width,), 0.1, center=1.0)
    yield Weight(f"{name}.bias", (width,), 0.1)


def _linear(name: str, fan_in: int, fan_out: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (fan_in, fan_out), math.sqrt(3 / fan_in))
    yield Weight(f"{name}.bias", (fan_out,), 0.02)


def write_gpt(sink: IO[bytes], mib: int) -> GptShape:
    """Write the model of `mib` MiB to `sink`, which need not seek, and return its shape.

    Holds one chunk of 4 MiB besides the nodes.

    Raises:
        ValueError: `mib` is not from 1 to 1900.
    """
    shape = plan(mib)
    head, tail = _graph_parts(shape)
    tensors = [(w, _tensor_head(w)) for w in weights(shape)]
    records = [len(record) + w.items * 4 for w, record in tensors]
    graph_nbytes = len(head) + sum(len(_prefix(5, n)) + n for n in records) + len(tail)
    opset = _varint_field(2, OPSET)
    sink.write(_varint_field(1, IR_VERSION) + _bytes_field(2, b"zcrecord tools/models/gpt.py"))
    sink.write(_prefix(7, graph_nbytes) + head)
    chunk = np.empty(CHUNK_ITEMS, "<f4")
    for position, ((weight, record), nbytes) in enumerate(zip(tensors, records, strict=True)):
        sink.write(_prefix(5, nbytes) + record)
        _write_values(sink, weight, position, chunk)
    sink.write(tail + _bytes_field(8, opset))
    return shape


def _write_values(sink: IO[bytes], weight: Weight, position: int, chunk: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Write the weight's values, uniform from a stream of its own, by way of `chunk`."""
    generator = np.random.SFC64(np.random.SeedSequence([SEED, position]))
    bits = chunk.view("<u4")
    for start in range(0, weight.items, CHUNK_ITEMS):
        n = min(CHUNK_ITEMS, weight.items - start)
        words = generator.random_raw((n + 1) // 2).astype("<u8", copy=False)
        # The top 23 bits of each half become a mantissa: a float in [1, 2), far cheaper than a distribution.
        np.right_shift(words.view("<u4")[:n], 9, out=bits[:n])
        bits[:n] |= 0x3F800000
        values = chunk[:n]
        values -= np.float32(1.5)
        values *= np.float32(2 * weight.spread)
        values += np.float32(weight.center)
        sink.write(values.data)


# -- protobuf --------------------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | VARINT) + _varint(value)


def _prefix(number: int, nbytes: int) -> bytes:
    """Return what precedes a length-delimited field of `nbytes` bytes."""
    return _varint(number << 3 | LENGTH) + _varint(nbytes)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _prefix(number, len(value)) + value


def _tensor_head(weight: Weight) -> bytes:
    """Return a TensorProto up to and including the length of its raw_data, in the order in which exporters write."""
    dims = b"".join(_varint_field(1, n) for n in weight.shape)
    return dims + _varint_field(2, FLOAT) + _bytes_field(8, weight.name.encode()) + _prefix(9, weight.items * 4)


# -- the graph -------------------------------------------------------------------------------------------------------


class _Nodes:
    """Collects nodes and their small constants; each call returns the name of the value it makes."""

    def __init__(self) -> None:
        from onnx import helper

        self._helper = helper
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, name: str, values: list[int] | list[float], dtype: int) -> str:
        dims = [len(values)] if dtype == INT64 else []
        self.constants.append(self._helper.make_tensor(name, dtype, dims, values))
        return name

    def op(self, kind: str, *inputs: str, out: str, **attributes: Any) -> str:
        self.ops(kind, *inputs, outs=[out], **attributes)
        return out

    def ops(self, kind: str, *inputs: str, outs: list[str], **attributes: Any) -> list[str]:
        self.nodes.append(self._helper.make_node(kind, inputs, outs, name=f"/{outs[0]}", **attributes))
        return outs

    def linear(self, x: str, name: str) -> str:
        y = self.op("MatMul", x, f"{name}.weight", out=f"{name}/matmul")
        return self.op("Add", y, f"{name}.bias", out=f"{name}/out")

    def layer_norm(self, x: str, name: str) -> str:
        scale, bias = f"{name}.weight", f"{name}.bias"
        return self.op("LayerNormalization", x, scale, bias, out=f"{name}/out", axis=-1, epsilon=1e-5)


def _graph_parts(shape: GptShape) -> tuple[bytes, bytes]:
    """Return the GraphProto's bytes before the weights (nodes, name, constants) and after them (inputs to shapes)."""
    from onnx import helper

    g = _Nodes()
    g.constant("constants.heads", [0, 0, shape.heads, HEAD_SIZE], INT64)
    g.constant("constants.width", [0, 0, shape.width], INT64)
    g.constant("constants.attention_scale", [HEAD_SIZE**-0.5], FLOAT)
    g.constant("constants.sqrt_half", [0.5**0.5], FLOAT)
    g.constant("constants.one", [1.0], FLOAT)
    g.constant("constants.half", [0.5], FLOAT)
    x, mask = _embed(g)
    for block in range(shape.blocks):
        x = _block(g, x, mask, f"transformer.h.{block}")
    x = g.layer_norm(x, "transformer.ln_f")
    g.op("MatMul", x, "lm_head.weight", out="logits")

    tokens = helper.make_tensor_value_info("input_ids", INT64, ["batch", "sequence"])
    logits = helper.make_tensor_value_info("logits", FLOAT, ["batch", "sequence", shape.vocabulary])
    head = b"".join(_bytes_field(1, n.SerializeToString(deterministic=True)) for n in g.nodes)
    head += _bytes_field(2, b"gpt")
    head += b"".join(_bytes_field(5, c.SerializeToString(deterministic=True)) for c in g.constants)
    # Shape inference cannot see that positions and mask are as long as the sequence. Told so, it knows every shape;
    # else each block has unknown ones of its own, and ONNX Runtime's memory planner compares all of them with each
    # other, 0.1 s for each session from either form.
    known = [
        helper.make_tensor_value_info("positions", INT64, ["sequence"]),
        helper.make_tensor_value_info(mask, FLOAT, ["sequence", "sequence"]),
    ]
    tail = _bytes_field(11, tokens.SerializeToString(deterministic=True))
    tail += _bytes_field(12, logits.SerializeToString(deterministic=True))
    return head, tail + b"".join(_bytes_field(13, v.SerializeToString(deterministic=True)) for v in known)


def _embed(g: _Nodes) -> tuple[str, str]:
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
    value = g._helper.make_tensor("value", FLOAT, [1], [-1e9])
    filled = g.op("ConstantOfShape", square, out="mask_filled", value=value)
    mask = g.op("Trilu", filled, "one_scalar", out="mask", upper=1)
    return g.op("Add", tokens, places, out="transformer.embedding/out"), mask


def _block(g: _Nodes, x: str, mask: str, name: str) -> str:
    """Add one transformer block: attention and MLP, each after a LayerNormalization and around a residual."""
    attended = _attention(g, g.layer_norm(x, f"{name}.ln_1"), mask, f"{name}.attn")
    x = g.op("Add", x, attended, out=f"{name}.residual_1")
    hidden = g.linear(g.layer_norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
    scaled = g.op("Mul", hidden, "constants.sqrt_half", out=f"{name}.mlp/scaled")
    erf = g.op("Erf", scaled, out=f"{name}.mlp/erf")
    shifted = g.op("Add", erf, "constants.one", out=f"{name}.mlp/shifted")
    gated = g.op("Mul", hidden, shifted, out=f"{name}.mlp/gated")
    gelu = g.op("Mul", gated, "constants.half", out=f"{name}.mlp/gelu")
    return g.op("Add", x, g.linear(gelu, f"{name}.mlp.c_proj"), out=f"{name}/out")


def _attention(g: _Nodes, x: str, mask: str, name: str) -> str:
    parts = g.ops("Split", g.linear(x, f"{name}.c_attn"), outs=[f"{name}/{p}" for p in "qkv"], axis=-1)
    heads = [g.op("Reshape", p, "constants.heads", out=f"{p}_heads") for p in parts]
    orders = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])  # k comes out transposed, ready for q @ k
    q, k, v = (g.op("Transpose", h, out=f"{h}_t", perm=order) for h, order in zip(heads, orders, strict=True))
    scores = g.op("Mul", g.op("MatMul", q, k, out=f"{name}/qk"), "constants.attention_scale", out=f"{name}/scores")
    masked = g.op("Add", scores, mask, out=f"{name}/masked")
    weighted = g.op("MatMul", g.op("Softmax", masked, out=f"{name}/softmax", axis=-1), v, out=f"{name}/weighted")
    joined = g.op("Transpose", weighted, out=f"{name}/joined", perm=[0, 2, 1, 3])
    return g.linear(g.op("Reshape", joined, "constants.width", out=f"{name}/flat"), f"{name}.c_proj")


def main(arguments: list[str] | None = None) -> int:
    """Write a model as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.models.gpt", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", help="path of the .onnx file, or - for standard output")
    parser.add_argument("--mib", type=int, default=512, help=f"size of the weights, 1 to {MAX_MIB} (default 512)")
    args = parser.parse_args(arguments)
    try:
        plan(args.mib)  # before the output is touched
    except ValueError as error:
        parser.error(str(error))
    if args.out == "-":
        shape = write_gpt(sys.stdout.buffer, args.mib)
        sys.stdout.buffer.flush()
    else:
        with Path(args.out).open("wb") as sink:
            shape = write_gpt(sink, args.mib)
    print(f"{args.out}: width {shape.width}, {shape.blocks} blocks, vocabulary {shape.vocabulary}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
