"""Stream an ONNX model of int8 matrices in QDQ form, of any size, in bounded memory.

Blocks of two layers around a residual, as the MLPs of a transformer are: every MatMul takes activations that were
quantized to uint8, and int8 weights, each through a DequantizeLinear, as ONNX Runtime's own static quantization writes
a model. ONNX Runtime computes in integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from tools.models.wire import FLOAT, INT8, UINT8, Nodes, Weight, check_size, norm_weights, write_model

BLOCKS = 12
MULTIPLE = 64  # of the width
LEAST_CLASSES = 16
ACTIVATION_SCALE = 8 / 255  # what is quantized has a deviation of about 1
WEIGHT_DEVIATION = 256 / math.sqrt(12)  # of an int8 that may have any value


@dataclass(frozen=True, slots=True)
class QuantizedShape:
    """Width of the residual, a quarter of the hidden one, and classes."""

    width: int
    classes: int

    def __str__(self) -> str:
        return f"width {self.width}, {BLOCKS} blocks, {self.classes} classes"


def plan(mib: int) -> QuantizedShape:
    """Return the shape whose weights come to `mib` MiB, less at most one class."""
    check_size(mib)
    width = MULTIPLE
    while _nbytes(width + MULTIPLE) <= mib << 20:
        width += MULTIPLE
    return QuantizedShape(width, classes=LEAST_CLASSES + ((mib << 20) - _nbytes(width)) // width)


def write_quantized(sink: IO[bytes], mib: int) -> QuantizedShape:
    """Write the model of `mib` MiB, 1 to 1900, to `sink`, which need not seek; holds one chunk of 4 MiB."""
    shape = plan(mib)
    g = Nodes()
    g.constant("constants.activation_scale", [ACTIVATION_SCALE], FLOAT)
    g.constant("constants.activation_zero", [128], UINT8)
    g.constant("constants.weight_zero", [0], INT8)
    x = "x"
    for block in range(BLOCKS):
        x = _block(g, x, shape.width, f"blocks.{block}")
    _matmul(g, _quantize(g, _norm(g, x, "norm"), "head"), shape.width, "head", out="y")
    value = g.helper.make_tensor_value_info
    sized = ["batch", "sequence"]
    inputs, outputs = [value("x", FLOAT, [*sized, shape.width])], [value("y", FLOAT, [*sized, shape.classes])]
    write_model(sink, "quantized", g, _weights(shape), inputs=inputs, outputs=outputs)
    return shape


def _block(g: Nodes, x: str, width: int, name: str) -> str:
    hidden = _linear(g, _norm(g, x, f"{name}.norm"), width, f"{name}.fc1")
    hidden = g.op("Relu", hidden, out=f"{name}/relu")
    return g.op("Add", x, _linear(g, hidden, 4 * width, f"{name}.fc2"), out=f"{name}/out")


def _linear(g: Nodes, x: str, fan_in: int, name: str) -> str:
    product = _matmul(g, _quantize(g, x, f"{name}/in"), fan_in, name, out=f"{name}/matmul")
    return g.op("Add", _quantize(g, product, f"{name}/product"), f"{name}.bias", out=f"{name}/out")


def _matmul(g: Nodes, x: str, fan_in: int, name: str, *, out: str) -> str:
    """Add a product that keeps the deviation of its input."""
    scale = g.constant(f"{name}.weight_scale", [1 / (WEIGHT_DEVIATION * math.sqrt(fan_in))], FLOAT)
    weight = g.op("DequantizeLinear", f"{name}.weight", scale, "constants.weight_zero", out=f"{name}/weight")
    return g.op("MatMul", x, weight, out=out)


def _quantize(g: Nodes, x: str, name: str) -> str:
    by = "constants.activation_scale", "constants.activation_zero"
    return g.op("DequantizeLinear", g.op("QuantizeLinear", x, *by, out=f"{name}/q"), *by, out=f"{name}/dq")


def _norm(g: Nodes, x: str, name: str) -> str:
    return g.op("LayerNormalization", x, f"{name}.weight", f"{name}.bias", out=f"{name}/out", axis=-1)


def _weights(shape: QuantizedShape) -> Iterator[Weight]:
    width = shape.width
    for block in range(BLOCKS):
        yield from norm_weights(f"blocks.{block}.norm", width)
        for name, sizes in (("fc1", (width, 4 * width)), ("fc2", (4 * width, width))):
            yield Weight(f"blocks.{block}.{name}.weight", sizes, dtype=INT8)
            yield Weight(f"blocks.{block}.{name}.bias", sizes[1:], 0.1)
    yield from norm_weights("norm", width)
    yield Weight("head.weight", (width, shape.classes), dtype=INT8)


def _nbytes(width: int) -> int:
    return sum(w.nbytes for w in _weights(QuantizedShape(width, LEAST_CLASSES)))
