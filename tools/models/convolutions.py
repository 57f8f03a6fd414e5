"""Stream an ONNX model of convolutions in the shape of ResNet-18, of any size, in bounded memory.

Batch normalisation is folded into the convolutions' weights and biases, as exporters for inference leave it. Weights
are scaled by their fan-in, so outputs stay finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from tools.models.wire import FLOAT, Nodes, Weight, check_size, write_model

IMAGE = 112  # pixels to a side
STAGES = 4
BLOCKS = 2  # to a stage; each stage halves the image's sides and doubles the channels
MULTIPLE = 8  # of the channels
LEAST_CLASSES = 1000  # as ImageNet has


@dataclass(frozen=True, slots=True)
class ConvolutionsShape:
    """Channels of the first stage, and classes."""

    channels: int
    classes: int

    def __str__(self) -> str:
        return f"{self.channels} to {self.channels << STAGES - 1} channels, {self.classes} classes"


@dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution with a bias."""

    name: str
    channels_in: int
    channels_out: int
    kernel: int
    stride: int = 1

    def weights(self) -> Iterator[Weight]:
        """Yield its weight, which keeps the variance behind a Relu, and its bias."""
        shape = (self.channels_out, self.channels_in, self.kernel, self.kernel)
        yield Weight(f"{self.name}.weight", shape, math.sqrt(6 / math.prod(shape[1:])))
        yield Weight(f"{self.name}.bias", (self.channels_out,), 0.1)

    def add(self, g: Nodes, x: str) -> str:
        sizes = {"kernel_shape": [self.kernel] * 2, "strides": [self.stride] * 2, "pads": [self.kernel // 2] * 4}
        return g.op("Conv", x, f"{self.name}.weight", f"{self.name}.bias", out=f"{self.name}/out", **sizes)


@dataclass(frozen=True, slots=True)
class Block:
    """Two convolutions in a residual, with a third beside them where the sizes differ."""

    first: Convolution
    second: Convolution
    down: Convolution | None

    @property
    def convolutions(self) -> list[Convolution]:
        return [self.first, self.second, *([] if self.down is None else [self.down])]

    def add(self, g: Nodes, x: str) -> str:
        y = self.second.add(g, g.op("Relu", self.first.add(g, x), out=f"{self.first.name}/relu"))
        beside = x if self.down is None else self.down.add(g, x)
        return g.op("Relu", g.op("Add", y, beside, out=f"{self.second.name}/sum"), out=f"{self.second.name}/relu")


def plan(mib: int) -> ConvolutionsShape:
    """Return the shape whose weights come to `mib` MiB, less at most one class."""
    check_size(mib)
    channels = MULTIPLE
    while _items(channels + MULTIPLE) <= mib << 18:
        channels += MULTIPLE
    rest = (mib << 18) - _items(channels)
    return ConvolutionsShape(channels, classes=LEAST_CLASSES + rest // ((channels << STAGES - 1) + 1))


def write_convolutions(sink: IO[bytes], mib: int) -> ConvolutionsShape:
    """Write the model of `mib` MiB, 1 to 1900, to `sink`, which need not seek; holds one chunk of 4 MiB."""
    shape = plan(mib)
    g = Nodes()
    stem, blocks = _layers(shape.channels)
    x = g.op("Relu", stem.add(g, "image"), out="stem/relu")
    for block in blocks:
        x = block.add(g, x)
    x = g.op("Flatten", g.op("GlobalAveragePool", x, out="pooled"), out="features", axis=1)
    g.op("Gemm", x, "classifier.weight", "classifier.bias", out="logits", transB=1)
    value = g.helper.make_tensor_value_info
    inputs = [value("image", FLOAT, ["batch", 3, IMAGE, IMAGE])]
    outputs = [value("logits", FLOAT, ["batch", shape.classes])]
    write_model(sink, "convolutions", g, _weights(shape), inputs=inputs, outputs=outputs)
    return shape


def _layers(channels: int) -> tuple[Convolution, list[Block]]:
    blocks = []
    before = channels
    for stage in range(STAGES):
        width = channels << stage
        for number in range(BLOCKS):
            name, stride = f"layer{stage + 1}.{number}", 2 if number == 0 and stage else 1
            down = Convolution(f"{name}.downsample", before, width, 1, stride) if before != width else None
            first = Convolution(f"{name}.conv1", before, width, 3, stride)
            blocks.append(Block(first, Convolution(f"{name}.conv2", width, width, 3), down))
            before = width
    return Convolution("stem", 3, channels, 7, 4), blocks


def _weights(shape: ConvolutionsShape) -> Iterator[Weight]:
    stem, blocks = _layers(shape.channels)
    for convolution in (stem, *(c for block in blocks for c in block.convolutions)):
        yield from convolution.weights()
    features = shape.channels << STAGES - 1
    yield Weight("classifier.weight", (shape.classes, features), math.sqrt(3 / features))
    yield Weight("classifier.bias", (shape.classes,), 0.1)


def _items(channels: int) -> int:
    return sum(w.items for w in _weights(ConvolutionsShape(channels, LEAST_CLASSES)))
