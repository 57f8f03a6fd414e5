"""Stream an ONNX model of one tensor whose values lie in a typed field, as `onnx.helper.make_tensor` lays them there.

float_data holds 4 bytes for each element; int64_data varints of values of every size and both signs: one to nine bytes,
and ten for what is negative. A block of them is repeated, so any size takes little time and memory.
"""

from __future__ import annotations

from typing import IO, Any, Literal

import numpy as np

from zcrecord.onnx.protobuf.reader import encode_field, encode_varint

BLOCK = 1 << 18  # elements
SEED = 2026
_NUMBERS = {"float_data": (4, 1), "int64_data": (7, 7)}  # of the field in TensorProto, of the type


def write_typed(sink: IO[bytes], field: Literal["float_data", "int64_data"], nbytes: int) -> int:
    """Write a model whose tensor `values` has at least `nbytes` of values on the wire; return how many elements."""
    number, data_type = _NUMBERS[field]
    rng = np.random.default_rng(SEED)
    block = rng.random(BLOCK, np.float32).astype("<f4").tobytes() if field == "float_data" else _varints(rng)
    count = -(-nbytes // len(block))
    size = count * len(block)
    head = b"\x08" + encode_varint(count * BLOCK) + b"\x10" + encode_varint(data_type)
    head += encode_varint(number << 3 | 2) + encode_varint(size)
    tail = encode_field(8, b"values")
    tensor = encode_field(2, b"typed") + b"\x2a" + encode_varint(len(head) + size + len(tail)) + head
    sink.write(b"\x08\x08\x3a" + encode_varint(len(tensor) + size + len(tail)) + tensor)
    for _ in range(count):
        sink.write(block)
    sink.write(tail + encode_field(8, b"\x10\x11"))
    return count * BLOCK


def _varints(rng: Any) -> bytes:
    sizes = rng.integers(0, 63, BLOCK)  # in bits
    values = rng.integers(0, 1 << 62, BLOCK) >> (62 - sizes)
    values *= rng.choice([-1, 1], BLOCK)
    return b"".join(encode_varint(v & 0xFFFFFFFFFFFFFFFF) for v in values.tolist())
