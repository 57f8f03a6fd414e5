"""Writers of the models here: weights from a fixed stream, nodes, and protobuf in bounded memory.

The same size gives the same bytes on every platform: the weights come from the raw words of a bit generator, whose
stream numpy keeps stable, and not from a distribution, whose stream it does not. No two tensors of a model hold equal
bytes, so nothing that shares equal payloads gains by it.

The protobuf wire format is written here and not by `onnx.helper`, which would need the whole model in memory twice.
Only the nodes and the graph's inputs and outputs, a few KB, are built with it.

Source: field numbers from onnx.proto (ModelProto 1, 2, 7, 8; GraphProto 1, 2, 5, 11, 12, 13; TensorProto 1, 2, 8, 9).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from zcrecord.onnx.protobuf.reader import encode_field, encode_varint

MAX_MIB = 1900  # leaves protobuf's limit of 2 GiB for one message well clear
CHUNK_NBYTES = 4 << 20  # all the memory the weights ever take
SEED = 2026
OPSET = 17
IR_VERSION = 8
FLOAT, UINT8, INT8, INT64, BOOL = 1, 2, 3, 7, 9  # onnx.TensorProto.DataType
VARINT, LENGTH = 0, 2  # protobuf's wire types


@dataclass(frozen=True, slots=True)
class Weight:
    """One initializer to be: float32 with values in [center - spread, center + spread), or bytes with any."""

    name: str
    shape: tuple[int, ...]
    spread: float = 0.0
    center: float = 0.0
    dtype: int = FLOAT

    @property
    def items(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.items * (4 if self.dtype == FLOAT else 1)


def norm_weights(name: str, width: int) -> Iterator[Weight]:
    """Yield the weights of a layer normalisation."""
    yield Weight(f"{name}.weight", (width,), 0.1, center=1.0)
    yield Weight(f"{name}.bias", (width,), 0.1)


class Nodes:
    """Collects nodes and their small constants; each call returns the name of the value it makes."""

    def __init__(self) -> None:
        from onnx import helper

        self.helper = helper
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, name: str, values: list[int] | list[float], dtype: int) -> str:
        """Add an initializer of few values, a scalar unless it is of INT64."""
        dims = [len(values)] if dtype == INT64 else []
        self.constants.append(self.helper.make_tensor(name, dtype, dims, values))
        return name

    def op(self, kind: str, *inputs: str, out: str, **attributes: Any) -> str:
        """Add a node with one output."""
        self.ops(kind, *inputs, outs=[out], **attributes)
        return out

    def ops(self, kind: str, *inputs: str, outs: list[str], **attributes: Any) -> list[str]:
        """Add a node with several outputs."""
        self.nodes.append(self.helper.make_node(kind, inputs, outs, name=f"/{outs[0]}", **attributes))
        return outs


def check_size(mib: int) -> None:
    """Raise ValueError unless a model of `mib` MiB fits into one protobuf message."""
    if not 1 <= mib <= MAX_MIB:
        raise ValueError(f"size {mib} MiB is not from 1 to {MAX_MIB}: protobuf ends a model at 2 GiB")


def write_model(
    sink: IO[bytes],
    name: str,
    graph: Nodes,
    weights: Iterable[Weight],
    *,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    known: Sequence[Any] = (),
    opsets: Mapping[str, int] = {"": OPSET},
) -> None:
    """Write a model to `sink`, which need not seek; `inputs`, `outputs` and `known` shapes are ValueInfoProtos."""
    head = b"".join(_message(1, n) for n in graph.nodes) + encode_field(2, name.encode())
    head += b"".join(_message(5, c) for c in graph.constants)
    tail = b"".join(_message(number, v) for number, vs in ((11, inputs), (12, outputs), (13, known)) for v in vs)
    tensors = [(w, _tensor_head(w)) for w in weights]
    records = [len(record) + w.nbytes for w, record in tensors]
    graph_nbytes = len(head) + sum(len(_prefix(5, n)) + n for n in records) + len(tail)
    sink.write(_varint_field(1, IR_VERSION) + encode_field(2, f"zcrecord tools/models/{name}.py".encode()))
    sink.write(_prefix(7, graph_nbytes) + head)
    chunk = np.empty(CHUNK_NBYTES // 4, "<f4")
    for position, ((weight, record), nbytes) in enumerate(zip(tensors, records, strict=True)):
        sink.write(_prefix(5, nbytes) + record)
        generator = np.random.SFC64(np.random.SeedSequence([SEED, position]))  # a stream of its own for each
        if weight.dtype == FLOAT:
            _write_floats(sink, weight, generator, chunk)
            continue
        for start in range(0, weight.items, CHUNK_NBYTES):
            n = min(CHUNK_NBYTES, weight.items - start)
            words = generator.random_raw((n + 7) // 8).astype("<u8", copy=False)
            sink.write(words.view("u1")[:n].data)
    imports = (encode_field(1, domain.encode()) * bool(domain) + _varint_field(2, n) for domain, n in opsets.items())
    sink.write(tail + b"".join(encode_field(8, each) for each in imports))


def _write_floats(sink: IO[bytes], weight: Weight, generator: Any, chunk: np.ndarray[Any, Any]) -> None:
    """Write uniform values by way of `chunk`."""
    bits = chunk.view("<u4")
    for start in range(0, weight.items, len(chunk)):
        n = min(len(chunk), weight.items - start)
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


def _varint_field(number: int, value: int) -> bytes:
    return encode_varint(number << 3 | VARINT) + encode_varint(value)


def _prefix(number: int, nbytes: int) -> bytes:
    return encode_varint(number << 3 | LENGTH) + encode_varint(nbytes)


def _message(number: int, message: Any) -> bytes:
    return encode_field(number, message.SerializeToString(deterministic=True))


def _tensor_head(weight: Weight) -> bytes:
    """Return a TensorProto up to and including the length of its raw_data, in the order in which exporters write."""
    dims = b"".join(_varint_field(1, n) for n in weight.shape)
    return dims + _varint_field(2, weight.dtype) + encode_field(8, weight.name.encode()) + _prefix(9, weight.nbytes)
